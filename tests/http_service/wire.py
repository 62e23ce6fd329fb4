"""One connection to a server, spoken by hand: for what a client library does not send, or hides."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import IO, Final, NamedTuple, Self
from urllib.parse import urlencode, urlsplit

# Far more than an answer needs; it bounds how long a broken server hangs a test.
PATIENCE: Final = 120.0


class Raw(NamedTuple):
    """An answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes


class Wire:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = socket.create_connection((parts.hostname, parts.port or 80), timeout=PATIENCE)
        self._file: IO[bytes] = self._connection.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._connection.close()

    def send(self, content: bytes) -> None:
        self._connection.sendall(content)

    def end(self) -> None:
        """Nothing more is sent; the answer can still be read."""
        self._connection.shutdown(socket.SHUT_WR)

    def answer(self) -> Raw:
        """The next answer, whole; an interim one (100) is an answer, too."""
        status = int(self._file.readline().split(b" ")[1])
        headers: dict[str, str] = {}
        while line := self._file.readline().strip():
            key, _, value = line.decode("latin-1").partition(":")
            headers[key.lower()] = value.strip()
        return Raw(status, headers, self._body(status, headers))

    def some(self) -> bytes:
        """Something of the answer's body."""
        while self._file.readline().strip():
            pass
        return self._file.read(1)

    def rest(self) -> bytes:
        """All that comes until the server closes."""
        return self._file.read()

    def _body(self, status: int, headers: dict[str, str]) -> bytes:
        if status in (100, 204):
            return b""
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self._file.readline(), 16):
                body += self._file.read(size)
                self._file.readline()
            self._file.readline()
            return body
        if "content-length" in headers:
            return self._file.read(int(headers["content-length"]))
        return self.rest()


def post_of(
    path: str,
    body: bytes = b"{}",
    *,
    headers: Sequence[tuple[str, bytes | str]] = (),
    version: str = "1.1",
    **wish: str,
) -> bytes:
    """A POST as bytes, with an API key and its length."""
    lines: list[tuple[str, bytes | str]] = [
        ("Host", "127.0.0.1"),
        ("X-Api-Key", "asha"),
        ("Content-Length", str(len(body))),
        *headers,
    ]
    shown = b"".join(
        name.encode() + b": " + (value.encode() if isinstance(value, str) else value) + b"\r\n" for name, value in lines
    )
    return f"POST {path}?{urlencode(wish)} HTTP/{version}\r\n".encode() + shown + b"\r\n" + body
