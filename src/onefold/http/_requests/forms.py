"""Read the fields of a form, for a key that may be one of them. Pure.

An application reads its form with its own parser. A form that two parsers might read differently is refused: if only
one of them found the key, the request would be unguarded, and each delivery of the form would have its effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import parse_qsl

from onefold.http._requests.fingerprints import boundary_of, parameters_of
from onefold.http._shared.messages import Request

URLENCODED: Final = "application/x-www-form-urlencoded"
MULTIPART: Final = "multipart/form-data"

# A header of a part. Some parsers accept a bare control character as the end of a line, or of all headers.
HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")

# The disposition of a part. Each parameter has its value in quotes, or one that needs none. Blanks are not backtracked.
PARAMETER: Final = rb';[ \t]*+([\w*-]+)=("(?:[^"\\]|\\.)*+"|[!#-:=?-\[\]-~]++)'
DISPOSITION: Final = re.compile(rb"[ \t]*+[\w-]++(?:[ \t]*+" + PARAMETER + rb")*+[ \t]*+;?[ \t]*+", re.ASCII)
PARAMETERS: Final = re.compile(PARAMETER, re.ASCII)

# A name that every parser reads in one way: in quotes and without escapes, or a plain word.
NAME: Final = re.compile(rb'"([^"\\]*)"|([\w.\[\]-]+)', re.ASCII)

# Encodings of a part that leave its bytes unchanged. Django decodes others, and most parsers do not.
PLAIN: Final = (b"", b"7bit", b"8bit", b"binary")

ASCII: Final = bytes(range(0x20, 0x7F))


class _Part(NamedTuple):
    """A part of a multipart form: its headers, and its content."""

    disposition: list[tuple[str, bytes]]
    encoding: bytes
    content: bytes


def values_of(request: Request, kind: str, body: bytes, field: str) -> list[str]:
    """Return every value of this field, except files. Raises `ValueError` for an invalid form."""
    _check_charset(request)
    pairs = _pairs(body) if kind == URLENCODED else _fields(_parts(request, body), field.encode())
    return [value.decode() for name, value in pairs if _is_named(name, field)]


def _check_charset(request: Request) -> None:
    """Raise `ValueError` if the name of the field would have other bytes than ours."""
    for name, charset in parameters_of(request.header("Content-Type") or ""):
        # A character set unknown to Python is unknown to a framework, too.
        with suppress(LookupError):
            if name == "charset" and ASCII.decode(charset, "replace") != ASCII.decode():
                raise ValueError("its character set is not supported")


def _is_named(name: bytes, field: str) -> bool:
    try:
        return name.decode() == field
    except UnicodeDecodeError:
        if field.isascii():
            return False
        # In another character set it may be the same.
        raise


def _pairs(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the fields of a form as bytes: those that are not wanted may be in any character set."""
    for name, value in parse_qsl(body.decode("latin-1"), keep_blank_values=True, encoding="latin-1"):
        yield name.encode("latin-1"), value.encode("latin-1")


def _fields(parts: Iterable[_Part], field: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the name and the content of each part that is not a file."""
    for part in parts:
        found = dict(part.disposition)
        if len(found) != len(part.disposition) or any(name.startswith("name*") for name in found):
            raise ValueError("a part has two names")
        if "name" not in found:
            continue
        name = _name(found["name"])
        if name == field:
            _check_wanted(found, part.encoding)
        if not found.keys() & {"filename", "filename*"}:
            yield name, part.content


def _name(written: bytes) -> bytes:
    found = NAME.fullmatch(written)
    name = b"" if found is None else found[1] or found[2] or b""
    # Django strips blanks.
    if found is None or (text := name.decode("utf-8", "replace")).strip() != text:
        raise ValueError("the name of a part is not written literally")
    return name


def _check_wanted(found: dict[str, bytes], encoding: bytes) -> None:
    """Raise `ValueError` for a part that is a file to some parsers, and a field to others; or has two contents."""
    is_file = found.get("filename", b"").strip(b'"') != b""
    if not is_file and found.keys() & {"filename", "filename*"}:
        raise ValueError("it may or may not be a file")
    if not is_file and encoding.strip().lower() not in PLAIN:
        raise ValueError("it is encoded")


def _parts(request: Request, body: bytes) -> Iterator[_Part]:
    """Yield the parts of a multipart form."""
    if not body:
        return
    boundary = boundary_of(request)
    if boundary is None:
        raise ValueError("its boundary cannot be read")
    # A delimiter begins with a line break; there is none before the first line.
    preamble, *pieces = body.split(b"--" + boundary)
    if preamble not in (b"", b"\r\n"):
        raise ValueError("there is something before its first delimiter")
    if not pieces or not pieces[-1].startswith(b"--") or pieces[-1][2:].strip():
        raise ValueError("its last delimiter is missing")
    for piece in pieces[:-1]:
        if not piece.endswith(b"\r\n"):
            raise ValueError("its boundary appears inside a part")
        yield _part(piece[:-2])


def _part(piece: bytes) -> _Part:
    padding, line_end, rest = piece.partition(b"\r\n")
    if padding.strip(b" \t") or not line_end:
        raise ValueError("a line begins with its boundary but is longer")
    head, blank, content = (b"\r\n" + rest).partition(b"\r\n\r\n")
    if not blank:
        raise ValueError("the headers of a part have no end")
    headers = [_header(line) for line in head.split(b"\r\n")[1:]]
    dispositions = [value for name, value in headers if name == b"content-disposition"]
    if len(dispositions) > 1 or not all(map(DISPOSITION.fullmatch, dispositions)):
        raise ValueError("the disposition of a part cannot be read")
    encodings = [value for name, value in headers if name == b"content-transfer-encoding"]
    return _Part(_parameters(b"".join(dispositions)), b"".join(encodings), content)


def _header(line: bytes) -> tuple[bytes, bytes]:
    """Return a header of a part. A folded one is refused: only some parsers know of that."""
    found = HEADER.fullmatch(line)
    if found is None:
        raise ValueError("a header of a part cannot be read")
    return found[1].lower(), found[2]


def _parameters(disposition: bytes) -> list[tuple[str, bytes]]:
    """Return the parameters as they are written, with their quotes."""
    return [(name.decode().lower(), value) for name, value in PARAMETERS.findall(disposition)]
