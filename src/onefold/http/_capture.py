"""Copy an application's answer while it is given. Pure.

It is copied at once: whoever passes it on (compression, CORS, request ids) may change what he was handed. An answer
that cannot be understood is no reason to forget that the application has run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from onefold.http._messages import Answer
from onefold.http._rules import EVENT_STREAM, failed_with

# An interim answer (1xx) is no answer.
STATUS_MIN: Final = 200
STATUS_MAX: Final = 999
STATUS_LINE: Final = re.compile(r"(\d{3})(?: .*)?", re.DOTALL | re.ASCII)


class Capture:
    """The answer as far as it has come, with at most `limit` bytes of its body."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._status: int | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        self._cut = False
        # Why it is no answer.
        self.malformed: Exception | None = None

    def begin(self, status: Any, headers: Iterable[Any]) -> None:
        """Take a status (a number, or WSGI's line) and headers. Never raises: the application has run already."""
        try:
            self._status = _status_of(status)
            self._headers = [(_as_bytes(name), _as_bytes(value)) for name, value in headers]
        except (TypeError, ValueError) as error:
            self.malformed = error
        else:
            self.malformed = None

    def add(self, part: bytes) -> None:
        if len(self._body) + len(part) > self._limit:
            self._cut = True
            self._body.clear()
        if not self._cut:
            self._body += part

    def add_whole(self, body: bytes | None) -> None:
        """Take all of the body at once. None: it is longer than the limit."""
        if body is None:
            self._cut = True
        else:
            self.add(body)

    def header(self, name: bytes) -> bytes:
        """The first value of this header, which is named in lower case."""
        return next((value for key, value in self._headers if key.lower() == name), b"")

    @property
    def is_event_stream(self) -> bool:
        return self.header(b"content-type").partition(b";")[0].strip().lower() == EVENT_STREAM

    def answer(self) -> Answer:
        """The answer. Raises `ServerFailed` where it is none."""
        if self._status is None and self.malformed is None:
            self.malformed = RuntimeError("the application has sent a body, and no status")
        if self.malformed is not None:
            raise failed_with(self.malformed) from self.malformed
        assert self._status is not None
        return Answer(self._status, self._headers, b"" if self._cut else bytes(self._body), self._cut)


def _status_of(given: Any) -> int:
    if isinstance(given, str):
        line = STATUS_LINE.fullmatch(given)
        if line is None:
            raise ValueError(f"{given!r:.60} is no status line: it has to be like '200 OK'")
        given = int(line[1])
    if not isinstance(given, int) or not STATUS_MIN <= given <= STATUS_MAX:
        raise ValueError(f"{given!r:.60} is no status of an answer")
    return int(given)


def _as_bytes(text: Any) -> bytes:
    """A name or a value of a header. Servers take text, too, if it is Latin-1."""
    if isinstance(text, str):
        return text.encode("latin-1")
    if isinstance(text, (bytes, bytearray, memoryview)):
        return bytes(text)
    raise TypeError(f"a header has {type(text).__name__}, and has to be text or bytes")
