"""Read the fields of a form, for the key that may be one of them. Pure.

An application reads its form with a parser of its own. What two parsers might read in two ways is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from urllib.parse import parse_qsl

from onefold.http._fingerprints import boundary_of, parameters_of
from onefold.http._messages import Request

URLENCODED: Final = "application/x-www-form-urlencoded"
MULTIPART: Final = "multipart/form-data"


def values_of(request: Request, kind: str, body: bytes, field: str) -> list[str]:
    """Return every value of this field, files apart. Raises `ValueError` for what is no form."""
    if kind == URLENCODED:
        pairs: Iterator[tuple[str, str]] = iter(
            parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True) if body else []
        )
    else:
        pairs = _parts(request, body)
    return [value for name, value in pairs if name == field]


def _parts(request: Request, body: bytes) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each part of a multipart form."""
    if not body:
        return
    boundary = boundary_of(request)
    if boundary is None:
        raise ValueError("its boundary cannot be read")
    # A delimiter begins with the end of a line; before the first line there is none.
    _preamble, *pieces = (b"\r\n" + body).split(b"\r\n--" + boundary)
    for piece in pieces:
        if piece.startswith(b"--"):
            return
        line, _, rest = piece.partition(b"\r\n")
        if line.strip(b" \t"):
            raise ValueError("a line begins with its boundary, and is longer")
        head, blank, content = (b"\r\n" + rest).partition(b"\r\n\r\n")
        if not blank:
            raise ValueError("a part has no end of its headers")
        name = _field_of(head)
        if name is not None:
            yield name, content.decode()
    raise ValueError("its last delimiter is missing")


def _field_of(head: bytes) -> str | None:
    """Return the name of the field that a part is. None: it is a file, or has no name."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-disposition":
            found = dict(parameters_of(value.decode("utf-8", "replace")))
            return None if "filename" in found or "filename*" in found else found.get("name")
    return None
