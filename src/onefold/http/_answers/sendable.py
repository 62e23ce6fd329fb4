"""Check that HTTP (RFC 9110) can express a response. A server refuses any other, or sends a part of it. Pure.

Such a response is never final: the server would fail at every replay, and its client would never learn the outcome of
the request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from onefold.http._shared.messages import Answer

# An interim response (1xx) is not an answer, and HTTP has no status beyond.
STATUS: Final = range(200, 600)
STATUS_LINE: Final = re.compile(r"([0-9]{3})(?: [\t\x20-\x7e\x80-\xff]*)?")

# A value contains no control characters except the tab.
NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
BLANKS: Final = b" \t"

# A number of bytes, up to 2**64: servers refuse more digits.
LENGTH: Final = re.compile(rb"[0-9]{1,20}")

# Responses without a body, whatever was passed with them; and without a length.
BODILESS: Final = frozenset({204, 304})

Headers = list[tuple[bytes, bytes]]


class UnsendableAnswer(RuntimeError):
    """The application produced a response that HTTP cannot carry. It has run, and its outcome is unknown."""


def status_of(given: Any) -> int:
    """Return the status, of a number or of WSGI's line. Raises `UnsendableAnswer`."""
    if isinstance(given, str):
        line = STATUS_LINE.fullmatch(given)
        if line is None:
            raise UnsendableAnswer(f"{given!r:.60} is not a status line such as '200 OK'")
        given = int(line[1])
    if not isinstance(given, int) or given not in STATUS:
        raise UnsendableAnswer(f"{given!r:.60} is not a valid status: it has to be from 200 to 599")
    return int(given)


def headers_of(given: Iterable[Any]) -> Headers:
    """Return names and values, without the meaningless blanks around a value. Raises `UnsendableAnswer`."""
    try:
        pairs = [(_as_bytes(name), _as_bytes(value)) for name, value in given]
    except (TypeError, ValueError) as error:
        raise UnsendableAnswer(f"the headers of the answer cannot be sent: {error}") from error
    for name, value in pairs:
        if not NAME.fullmatch(name):
            raise UnsendableAnswer(f"{name!r:.60} is not a header name")
        if not VALUE.fullmatch(value):
            # Only the name: the value may be a secret.
            raise UnsendableAnswer(f"the header {name!r:.60} has a control character, such as the end of a line")
    return [(name, value.strip(BLANKS)) for name, value in pairs]


def check_length(status: int, headers: Headers, size: int, *, is_head: bool) -> None:
    """Refuse a body whose length is not the declared one. A response without a body may declare any length."""
    declared = {value for name, value in headers if name.lower() == b"content-length"}
    is_chunked = any(name.lower() == b"transfer-encoding" for name, _value in headers)
    if not declared or is_chunked or is_head or status in BODILESS:
        return
    if len(declared) > 1 or not LENGTH.fullmatch(next(iter(declared))):
        raise UnsendableAnswer("Content-Length is not a number of bytes, or has two values")
    if int(next(iter(declared))) != size:
        raise UnsendableAnswer(f"the answer has {size} bytes, but its Content-Length is {int(declared.pop())}")


def is_sendable(answer: Answer) -> bool:
    """Check that a remembered response can be sent: a probe, a person, or an earlier release may have written it."""
    try:
        status_of(answer.status)
        headers_of(answer.headers)
    except UnsendableAnswer:
        return False
    return True


def _as_bytes(text: Any) -> bytes:
    """Return a header's name or value as bytes. Servers accept text, too, if it is Latin-1."""
    if type(text) is bytes:
        return text
    if isinstance(text, str):
        return text.encode("latin-1")
    if isinstance(text, (bytes, bytearray, memoryview)):
        return bytes(text)
    raise TypeError(f"one has {type(text).__name__} instead of text or bytes")
