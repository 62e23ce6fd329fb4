"""The line of a status, for servers that want its words too."""

from __future__ import annotations

from http import HTTPStatus


def line_of(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        # A status of somebody's own needs words as well; no client reads them.
        return f"{status} Status"
