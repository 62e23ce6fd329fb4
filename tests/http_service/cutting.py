"""A server that cuts the first answer to each path after some bytes, and gives the whole one then: for clients.

The path says how: `/chunked/17/reset/anything`. It counts the keys that it saw by path.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

PAID = b"paid!"

ANSWERS = {
    "length": b"HTTP/1.1 201 Made\r\nX-A: b\r\nContent-Length: 5\r\n\r\n" + PAID,
    "chunked": b"HTTP/1.1 201 Made\r\nTransfer-Encoding: chunked\r\n\r\n2\r\npa\r\n3\r\nid!\r\n0\r\n\r\n",
    "empty": b"HTTP/1.1 204 Done\r\nX-A: b\r\n\r\n",
    # Its body ends with the connection: nobody can tell whether that was cut. Its headers can be.
    "closing": b"HTTP/1.1 201 Made\r\nConnection: close\r\n\r\n" + PAID,
}

PATIENCE = 120.0


def landmarks(kind: str) -> list[int]:
    """Some of these: inside of the status line, after it, inside of a header, before the empty line, in the body."""
    whole = ANSWERS[kind]
    line, head = whole.index(b"\r\n") + 2, whole.index(b"\r\n\r\n") + 2
    return sorted({12, line, line + 3, head, (head + 2 + len(whole)) // 2} & {*cuts(kind)})


def cuts(kind: str) -> range:
    """After how many bytes an answer of this kind is visibly cut."""
    whole = ANSWERS[kind]
    # With the size of the last chunk, which is 0, the body is whole: urllib3 looks no further.
    seen = {"closing": whole.index(b"\r\n\r\n") + 4, "chunked": len(whole) - len(b"\r\n\r\n")}
    return range(seen.get(kind, len(whole)))


class Cutting:
    """The keys by path."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys: dict[str, list[str]] = defaultdict(list)

    def answer(self, path: str, key: str) -> tuple[bytes, str]:
        """Return what to send, and how it ends: "", "closed" or "reset"."""
        _, kind, cut, how, *_ = path.split("/")
        self.keys[path].append(key)
        if len(self.keys[path]) == 1:
            return ANSWERS[kind][: int(cut)], how
        return ANSWERS[kind], "closed" if kind == "closing" else ""


class Handler(socketserver.StreamRequestHandler):
    script: Cutting
    timeout = PATIENCE

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while self._answer():
                """Until the connection is closed by either side."""

    def _answer(self) -> bool:
        path = self.rfile.readline().decode().split(" ")[1:2]
        if not path:
            return False
        headers: dict[str, str] = {}
        while line := self.rfile.readline().decode().strip():
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        self.rfile.read(int(headers.get("content-length", "0")))
        sent, how = self.script.answer(path[0], headers["idempotency-key"])
        self.wfile.write(sent)
        if how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return not how


class Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def shutdown_request(self, request: Any) -> None:
        # No FIN before a reset.
        self.close_request(request)


@contextlib.contextmanager
def cutting() -> Iterator[Cutting]:
    class Own(Handler):
        """With keys of its own."""

    with Listener(("127.0.0.1", 0), Own) as listener:
        server = Own.script = Cutting(f"http://127.0.0.1:{listener.server_address[1]}")
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join(PATIENCE)
