"""Compute the parts of a request that a retry has to repeat: its content, and the host name. Pure.

A body is never read into memory as a whole: its digest is computed chunk by chunk.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final

from onefold.http._shared.messages import Body, Request

# Returns what has to be equal in all requests with one key, besides host, method and path.
RequestFingerprint = Callable[[Request, Body], Any]

# The parameters of a media type.
Parameters = tuple[tuple[str, str], ...]

# Media types and host names up to this length are remembered with what they mean.
USUAL_MAX: Final = 255

# RFC 2046. A boundary of another form is not used: its body is compared byte by byte, including its boundary.
BOUNDARY: Final = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")

# A parameter of a media type, in quotes or bare.
PARAMETER: Final = re.compile(r';\s*([^=;\s"]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;"]*)')

# The end of a delimiter's line: with or without a following part. The last one may be the end of the body.
LINE_ENDS: Final = (b"\r\n", b"--\r\n")
LAST: Final = b"--"
LOOK_AHEAD: Final = 4

# Separates digests of parts from every other use of the same digest.
LABEL: Final = b"onefold multipart 1"

PORT: Final = re.compile(r":[0-9]*$")


def whole_content(request: Request, body: Body) -> tuple[bytes, str, bytes]:
    """Return all that a retry has to repeat besides host, method and path: the query, the media type and the body."""
    return request.query, *content_of(request, body)


def content_of(request: Request, body: Body) -> tuple[str, bytes]:
    """Return the media type of a body, with its encoding, and its digest.

    The boundary of a multipart body is a random word that a client creates for each attempt. It is not part of the
    request: such a body is compared by the content between its delimiters.
    """
    kind, parameters = _media_type(request)
    boundary = _boundary_of(kind, parameters)
    if (encoding := (request.header("Content-Encoding") or "").lower()) not in ("", "identity"):
        kind = f"{kind}|{encoding}"
    if boundary is None:
        return _written(kind, parameters), body.digest
    others = [one for one in parameters if one[0] != "boundary"]
    digest = body.parts() if isinstance(body, _MultipartBody) else _digest_of_parts(body, boundary)
    return _written(kind, others), digest


def body_for(request: Request) -> Body:
    """Return a spool for the body of this request that digests it as it comes, without blocking an event loop."""
    boundary = boundary_of(request)
    return Body() if boundary is None else _MultipartBody(boundary)


def boundary_of(request: Request) -> bytes | None:
    """Return the boundary between the parts of this request's body.

    None if it is not multipart, or has no valid boundary.
    """
    return _boundary_of(*_media_type(request))


def parameters_of(value: str) -> list[tuple[str, str]]:
    """Return the parameters of a header such as `form-data; name="id"`."""
    _, semicolon, rest = value.partition(";")
    return [(name.lower(), _bare(found)) for name, found in PARAMETER.findall(semicolon + rest)]


def _boundary_of(kind: str, parameters: Parameters) -> bytes | None:
    if not parameters:
        return None
    found = [value for name, value in parameters if name == "boundary"]
    if not kind.startswith("multipart/") or len(found) != 1 or not BOUNDARY.fullmatch(found[0]):
        return None
    return found[0].encode("ascii")


def _media_type(request: Request) -> tuple[str, Parameters]:
    value = request.header("Content-Type") or ""
    return _usual_type(value) if len(value) <= USUAL_MAX else _parsed_type(value)


def _parsed_type(value: str) -> tuple[str, Parameters]:
    return value.partition(";")[0].strip().lower(), tuple(parameters_of(value))


# An API has a few media types, and all its clients send them.
_usual_type = lru_cache(maxsize=64)(_parsed_type)


def _bare(value: str) -> str:
    if value.startswith('"'):
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value.strip()


def _written(kind: str, parameters: Iterable[tuple[str, str]]) -> str:
    """Write a media type in one form. The name of a character set is case-insensitive."""
    if not parameters:
        return kind
    small = [(name, value.lower() if name == "charset" else value) for name, value in parameters]
    return "".join([kind, *(f";{name}={len(value)}:{value}" for name, value in sorted(small))])


def _digest_of_parts(body: Body, boundary: bytes) -> bytes:
    parts = _Parts(boundary)
    for chunk in body.chunks():
        parts.add(chunk)
    return parts.digest()


class _Parts:
    """The pieces between the delimiters of a multipart body, each digested separately.

    Only a whole line is a delimiter: `--boundary`, or `--boundary--`. Every other byte is compared as it is, so that
    two bodies with one digest are the same to any reader, except for the word that separates their parts.
    """

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._all = hashlib.sha256(LABEL)
        self._piece = hashlib.sha256()
        # A delimiter begins with the end of a line; before the first line there is none.
        self._rest = b"\r\n"

    def add(self, chunk: bytes) -> None:
        self._take(self._rest + chunk, is_last=False)

    def digest(self) -> bytes:
        """Return the digest of all pieces: the body ends here."""
        self._take(self._rest, is_last=True)
        self._all.update(self._piece.digest())
        return self._all.digest()

    def _take(self, data: bytes, *, is_last: bool) -> None:
        """Digest as much as is certain, and keep the possible start of a delimiter's line."""
        length = len(self._delimiter)
        certain = len(data) if is_last else len(data) - length - LOOK_AHEAD
        done, found = 0, data.find(self._delimiter)
        while 0 <= found < certain:
            if _ends_the_line(data, found + length):
                self._piece.update(data[done:found])
                self._all.update(self._piece.digest())
                self._piece = hashlib.sha256()
                done = found + length
            found = data.find(self._delimiter, found + 1)
        end = max(certain, done)
        self._piece.update(data[done:end])
        self._rest = data[end:]


class _MultipartBody(Body):
    """A multipart body, whose parts are digested as they come."""

    def __init__(self, boundary: bytes) -> None:
        super().__init__()
        self._parts = _Parts(boundary)
        self._found: bytes | None = None

    def add(self, chunk: bytes) -> None:
        super().add(chunk)
        self._parts.add(chunk)

    def parts(self) -> bytes:
        """Return the digest of the parts. The body must be complete."""
        self._found = self._parts.digest() if self._found is None else self._found
        return self._found


def _ends_the_line(data: bytes, at: int) -> bool:
    return data.startswith(LINE_ENDS, at) or data[at:] == LAST


def host_of(request: Request) -> str:
    """Return the name, or the address, of the host that a request was sent to, without its port."""
    host = PORT.sub("", request.host.strip().lower())
    return host.rstrip(".")


def is_address(host: str) -> bool:
    """Return whether this is the address of a machine, rather than the name of a service."""
    return _is_usual_address(host) if len(host) <= USUAL_MAX else _is_address(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


_is_usual_address = lru_cache(maxsize=256)(_is_address)
