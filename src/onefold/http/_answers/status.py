"""The status line, for servers that need its reason phrase too."""

from __future__ import annotations

from http import HTTPStatus


def line_of(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        # A custom status needs a phrase as well; no client reads it.
        return f"{status} Status"
