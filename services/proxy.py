"""A TCP proxy before a server, for faults at an exact message and for counting round trips.

    with Proxy(server.url) as proxy:
        store = open_store(proxy.url())
        fault = proxy.cut_after(b"COMMIT")     # the server has executed it, the client never hears of it
        ...
        assert fault.reached.is_set()

    with proxy.counting() as count:            # on connections that are open already
        store.claim(claim)
    assert count.trips == 1

It knows no protocol. A *message* is what a client sends between two replies; a *round trip* is a message that got one.
A fault strikes once. A cluster's client learns the nodes' own addresses and so goes around it.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qsl, urlsplit

from services.processes import HOST

# One message of a test fits, so that it is seen whole.
READ_BYTES = 1 << 20

# A client that sends a batch piece by piece may get its first reply before its last piece is out. While trips are
# counted, a reply waits until the client has been silent for this long, far longer than it takes to go on sending.
QUIET_SECONDS = 0.1
# So often it is looked at meanwhile: a machine that stands still for a second is not a client that is silent.
QUIET_LOOKS = 20

WAIT_SECONDS_MAX = 120.0
# How often who waits looks whether its connection is to end.
LOOK_SECONDS = 0.05

Matches = bytes | Callable[[bytes], bool]


@dataclass
class Fault:
    """What happens to the first message that matches."""

    # Asked with the bytes of a message, and with its number among all messages of the proxy.
    matches: Callable[[bytes, int], bool]
    # Before the server sees the message, or once the server has answered it.
    before: bool
    # Reset the connection, or hold what there is until `released` is set.
    cut: bool
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@dataclass
class Count:
    """The round trips of a block, each with what the client sent."""

    messages: list[bytes] = field(default_factory=list)

    @property
    def trips(self) -> int:
        return len(self.messages)


class Proxy:
    def __init__(self, url: str) -> None:
        """The server of this URL; of a DynamoDB store, the server of its `endpoint_url`."""
        self._url = url
        parts = urlsplit(dict(parse_qsl(urlsplit(url).query)).get("endpoint_url", url))
        assert parts.hostname is not None
        assert parts.port is not None
        self._behind = (parts.hostname, parts.port)
        self._faults: list[Fault] = []
        self._counts: list[Count] = []
        self._messages = 0
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._connections: list[_Connection] = []
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._acceptor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url(self, url: str | None = None) -> str:
        """The same URL, through this proxy."""
        host, port = self._behind
        return (url or self._url).replace(f"{host}:{port}", f"{HOST}:{self.port}")

    def cut_before(self, matches: Matches) -> Fault:
        """Reset the connection when the client sends it; the server never sees it."""
        return self._arm(_holding(matches), before=True, cut=True)

    def cut_after(self, matches: Matches) -> Fault:
        """Pass it on, and reset the connection in place of the reply: the server has executed it."""
        return self._arm(_holding(matches), before=False, cut=True)

    def lose_reply(self, number: int = 1) -> Fault:
        """As `cut_after`, for the n-th message from now, whatever it holds."""
        with self._lock:
            wanted = self._messages + number
        return self._arm(lambda _, number: number == wanted, before=False, cut=True)

    def hold_request(self, matches: Matches) -> Fault:
        """Keep it from the server until `released` is set."""
        return self._arm(_holding(matches), before=True, cut=False)

    def hold_reply(self, matches: Matches) -> Fault:
        """Pass it on, and keep the reply from the client until `released` is set."""
        return self._arm(_holding(matches), before=False, cut=False)

    def stall(self) -> None:
        """From now on nothing passes, in either direction, until `resume`."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut_all(self) -> None:
        """Reset every connection that is open now."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.end()
        for connection in connections:
            connection.thread.join(WAIT_SECONDS_MAX)

    @contextmanager
    def counting(self) -> Iterator[Count]:
        """Count the round trips of the block, on all connections together."""
        count = Count()
        with self._lock:
            self._counts.append(count)
        try:
            yield count
        finally:
            with self._lock:
                self._counts.remove(count)

    def close(self) -> None:
        # On Linux only a shutdown wakes who waits in accept, on macOS only the close does.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(WAIT_SECONDS_MAX)
        self.cut_all()

    def _arm(self, matches: Callable[[bytes, int], bool], *, before: bool, cut: bool) -> Fault:
        fault = Fault(matches, before, cut)
        with self._lock:
            self._faults.append(fault)
        return fault

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            connection = _Connection(self, client, self._behind)
            with self._lock:
                self._connections.append(connection)
                # Inside the lock: whoever cuts all connections waits for their threads.
                connection.thread.start()

    # What the connections ask for.

    @property
    def counted(self) -> bool:
        return bool(self._counts)

    @property
    def flowing(self) -> threading.Event:
        return self._flowing

    def message_begins(self) -> int:
        with self._lock:
            self._messages += 1
            return self._messages

    def struck(self, message: bytes, number: int) -> Fault | None:
        """The fault that waited for this message; it waits for no other."""
        with self._lock:
            for fault in self._faults:
                if fault.matches(message, number):
                    self._faults.remove(fault)
                    return fault
        return None

    def answered(self, message: bytes) -> None:
        with self._lock:
            for count in self._counts:
                count.messages.append(message)

    def gone(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.remove(connection)


def _holding(matches: Matches) -> Callable[[bytes, int], bool]:
    if isinstance(matches, bytes):
        return lambda message, _: matches in message
    return lambda message, _: matches(message)


class _Connection:
    """One client with its connection to the server. Only its own thread reads, writes and closes."""

    def __init__(self, proxy: Proxy, client: socket.socket, behind: tuple[str, int]) -> None:
        self._proxy, self._client, self._behind = proxy, client, behind
        self._server: socket.socket | None = None
        self._message, self._number = b"", 0
        # Whether the client has sent something that the server has not answered.
        self._asked = False
        self._fault: Fault | None = None
        self._ending = threading.Event()
        self._woken, self._waker = socket.socketpair()
        self.thread = threading.Thread(target=self._run, name="proxied", daemon=True)

    def end(self) -> None:
        self._ending.set()
        with suppress(OSError):
            self._waker.send(b"!")

    def _run(self) -> None:
        try:
            self._server = socket.create_connection(self._behind, WAIT_SECONDS_MAX)
            self._server.settimeout(None)
            for end in (self._client, self._server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while self._pass_on(self._server):
                pass
        except OSError:
            pass
        finally:
            self._proxy.gone(self)
            _reset(self._client)
            for end in (self._server or self._client, self._woken, self._waker):
                end.close()

    def _pass_on(self, server: socket.socket) -> bool:
        """Bytes of one direction, the client's first; False when the connection is over."""
        readable, _, _ = select.select([self._client, server, self._woken], [], [])
        self._wait(self._proxy.flowing)
        if self._ending.is_set():
            return False
        if self._client in readable:
            return self._from_client(server)
        return self._from_server(server)

    def _from_client(self, server: socket.socket) -> bool:
        sent = self._client.recv(READ_BYTES)
        if not sent:
            return False
        if not self._asked:
            self._message, self._number, self._asked = b"", self._proxy.message_begins(), True
        self._message += sent
        self._fault = self._fault or self._proxy.struck(self._message, self._number)
        if self._fault and self._fault.before and not self._suffer():
            return False
        server.sendall(sent)
        return True

    def _from_server(self, server: socket.socket) -> bool:
        if self._asked and self._proxy.counted and not _silent(self._client):
            return True
        reply = server.recv(READ_BYTES)
        if not reply:
            return False
        if self._asked:
            self._proxy.answered(self._message)
            self._asked = False
            if self._fault:
                # The first bytes may answer only the first part of what was asked.
                reply += _rest(server)
                if not self._suffer():
                    return False
        self._client.sendall(reply)
        return True

    def _suffer(self) -> bool:
        """False if the connection does not live through it."""
        fault, self._fault = self._fault, None
        assert fault is not None
        fault.reached.set()
        if fault.cut:
            return False
        self._wait(fault.released)
        return not self._ending.is_set()

    def _wait(self, event: threading.Event) -> None:
        """For the event, or for the end of this connection; a test that forgets both goes on after the bound."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not event.wait(LOOK_SECONDS) and not self._ending.is_set() and time.monotonic() < deadline:
            pass


def _rest(server: socket.socket) -> bytes:
    """What else it has to say, until it is silent."""
    said = b""
    while not _silent(server):
        more = server.recv(READ_BYTES)
        if not more:
            break
        said += more
    return said


def _silent(end: socket.socket) -> bool:
    """Whether nothing comes from there for a while."""
    return not any(select.select([end], [], [], QUIET_SECONDS / QUIET_LOOKS)[0] for _ in range(QUIET_LOOKS))


def _reset(end: socket.socket) -> None:
    """Close it the hard way: the other side gets an error instead of an end of file."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
