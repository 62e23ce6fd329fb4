"""A server that answers as its script says, and keeps what it was sent: for tests of clients."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

# Far more than a client needs; it bounds how long a broken one hangs.
PATIENCE = 120.0


class Got(NamedTuple):
    """One request, as it came."""

    method: str
    path: str
    key: str | None
    body: bytes
    headers: dict[str, str]


class Say(NamedTuple):
    """One answer. `cut`: the connection is reset before it, or ("body") in the middle of its body."""

    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    body: bytes = b"{}"
    cut: str = ""
    chunked: bool = False


CUT = Say(cut="before")


class Scripted:
    """Answers in turn; the last answer is given again and again."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.script: list[Say] = [Say()]
        self.got: list[Got] = []
        # Set: answers come. Until then requests are held.
        self.flows = threading.Event()
        self.flows.set()
        self.arrived = threading.Semaphore(0)

    @property
    def keys(self) -> list[str | None]:
        return [one.key for one in self.got]

    def next(self) -> Say:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


class Handler(BaseHTTPRequestHandler):
    script: Scripted
    protocol_version = "HTTP/1.1"
    # Headers and body are written apart: with Nagle's algorithm each answer would wait for the client's delayed ACK.
    disable_nagle_algorithm = True

    def answer(self) -> None:
        body = self._body()
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.script.got.append(Got(self.command, self.path, self.headers.get("Idempotency-Key"), body, headers))
        say = self.script.next()
        self.script.arrived.release()
        self.script.flows.wait(PATIENCE)
        if say.cut == "before":
            self._reset()
            return
        self.send_response(say.status)
        for name, value in say.headers:
            self.send_header(name, value)
        if say.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif say.status != 204:
            self.send_header("Content-Length", str(len(say.body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self._send(say)

    do_POST = do_PATCH = do_GET = do_PUT = answer  # noqa: N815 - their names are http.server's

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, say: Say) -> None:
        if say.cut == "body":
            self.wfile.write(say.body[: len(say.body) // 2])
            self.wfile.flush()
            self._reset()
        elif say.chunked:
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(say.body), say.body))
        elif say.status != 204:
            self.wfile.write(say.body)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, *_: Any) -> None:
        """Nothing: a test shows what it needs."""


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A connection that was reset here is no error."""


@contextlib.contextmanager
def scripted() -> Iterator[Scripted]:
    class Own(Handler):
        """With a script of its own."""

    with Quiet(("127.0.0.1", 0), Own) as listener:
        server = Own.script = Scripted(f"http://127.0.0.1:{listener.server_address[1]}")
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.flows.set()
            listener.shutdown()
            thread.join(PATIENCE)
