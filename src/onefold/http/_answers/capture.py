"""Copy an application's response while it is produced. Pure.

The copy is made at once: a layer that forwards it (compression, CORS, request ids) may change its objects. A response
that is invalid, or cannot be sent, is no reason to forget that the application has run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onefold.http._answers.rules import EVENT_STREAM, failed_with
from onefold.http._answers.sendable import BODILESS, UnsendableAnswer, check_length, headers_of, status_of
from onefold.http._shared.messages import Answer


class Capture:
    """The response received so far, with at most `limit` bytes of its body."""

    def __init__(self, limit: int, method: str) -> None:
        """Capture the response to a request with this method: a response to HEAD has a length, and no body."""
        self._limit = limit
        self._is_head = method == "HEAD"
        self._status: int | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        # The number of bytes received. None: not counted.
        self._size: int | None = 0
        self._cut = False
        # The reason why it is not a valid response.
        self.malformed: Exception | None = None

    def begin(self, status: Any, headers: Iterable[Any]) -> None:
        """Take a status (a number, or WSGI's line) and headers. Never raises: the application has already run."""
        try:
            self._status = status_of(status)
            self._headers = headers_of(headers)
        except UnsendableAnswer as error:
            self.malformed = error
        else:
            self.malformed = None

    def add(self, part: bytes) -> None:
        """Take the next part of the body. Raises `TypeError`, as a server does, for anything but bytes."""
        if not isinstance(part, (bytes, bytearray, memoryview)):
            raise TypeError(f"a part of the body has to be bytes, not {type(part).__name__}")
        if self._size is not None:
            self._size += len(part)
        if len(self._body) + len(part) > self._limit:
            self._cut = True
            self._body.clear()
        if not self._cut:
            self._body += part

    def add_whole(self, body: bytes | None) -> None:
        """Take all of the body at once. None: it is longer than the limit."""
        if body is None:
            self._cut, self._size = True, None
        else:
            self.add(body)

    def header(self, name: bytes) -> bytes:
        """Return the first value of this header, whose name is in lower case."""
        return next((value for key, value in self._headers if key.lower() == name), b"")

    @property
    def is_event_stream(self) -> bool:
        return self.header(b"content-type").partition(b";")[0].strip().lower() == EVENT_STREAM

    def answer(self) -> Answer:
        """Return the response. Raises `ServerFailed` if it is not a valid one."""
        try:
            self._check()
        except UnsendableAnswer as error:
            self.malformed = error
        if self.malformed is not None:
            raise failed_with(self.malformed) from self.malformed
        assert self._status is not None
        if self._status in BODILESS:
            # Such a response has no body; one would break the connection of every replay.
            return Answer(self._status, self._headers)
        return Answer(self._status, self._headers, b"" if self._cut else bytes(self._body), self._cut)

    def _check(self) -> None:
        if self.malformed is not None:
            return
        if self._status is None:
            raise UnsendableAnswer("the application has sent a body but no status")
        if self._size is not None:
            check_length(self._status, self._headers, self._size, is_head=self._is_head)
