"""Send the calls of many tasks on one connection to each server: written together, and answered in order.

A connection is opened by the client library, with its login, TLS and Sentinel; then its transport is used directly,
because asyncio's streams and a pool cost more than the server's reply. Only single calls are sent here. A call that
blocks the server's answers (WAIT) or is large would delay all others.

Whatever goes wrong, nobody gets another's reply: a connection on which that could happen is aborted, and the calls on
it fail as lost. They may have been executed, so whoever sends them again relies on their tokens.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from types import ModuleType
from typing import Any, Final

from onefold.stores.redis.sender import new_connection, node_name
from onefold.stores.reserved import connecting

# Larger calls take a connection of the pool: they would delay the others.
CALL_MAX: Final = 64 * 1024

# Replies are read into this much room. A larger one gets more for as long as it takes.
ROOM: Final = 64 * 1024

# How long a closing connection is waited for: TLS says good-bye.
CLOSE_SECONDS: Final = 1.0

CLOSED: Final = "Connection closed by server."

# The kinds of replies that our scripts have.
INTEGER, BULK, ERROR = b":$-"


class MultiplexedConnection(asyncio.BufferedProtocol):
    """One connection, whose replies are assigned to its calls in order."""

    def __init__(self, connection: Any, errors: ModuleType) -> None:
        self._loop = asyncio.get_running_loop()
        self._errors = errors
        self._error_of: Callable[[str], Exception] = connection._parser.parse_error
        self._where: str = connection._host_error()
        self._patience: float | None = connection.socket_timeout
        self._idle_max: float = connection.health_check_interval or math.inf
        # Kept, because the garbage collector would close it; and hidden from the client library, which would, too.
        self._writer, connection._reader, connection._writer = connection._writer, None, None
        self._transport: asyncio.Transport = self._writer.transport
        # The calls without a reply, and the last of them, which are not written yet.
        self._pending: deque[asyncio.Future[Any]] = deque()
        self._unsent: list[bytes] = []
        # Whether several calls were answered together.
        self._is_crowded = False
        # What is read and not assigned yet is at the beginning of the buffer.
        self._buffer = bytearray(ROOM)
        self._filled, self._is_reading = 0, False
        # Since when the server has been silent, while there are calls; and the timer that looks at it.
        self._since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        # Whether it takes calls, and whether replies can still be expected.
        self._is_open, self._is_lost = True, False
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._transport.set_protocol(self)

    @property
    def is_usable(self) -> bool:
        """Return whether it takes calls. After `health_check_interval` without any, it may be dead without a sign."""
        return self._is_open and (bool(self._pending) or self._loop.time() - self._since <= self._idle_max)

    def call(self, packed: bytes) -> asyncio.Future[Any]:
        """Send one command; return the future of its reply, which its caller may cancel."""
        if not self._is_open:
            raise self._errors.ConnectionError(CLOSED)
        reply = self._loop.create_future()
        try:
            self._pending.append(reply)
            if self._is_crowded or len(self._pending) > 1:
                # Others call at the same time: what is sent in one turn of the event loop goes in one write.
                self._unsent.append(packed)
                if len(self._unsent) == 1:
                    self._loop.call_soon(self._flush)
            else:
                self._since = self._loop.time()
                self._transport.write(packed)
            if self._timer is None and self._patience is not None:
                self._timer = self._loop.call_later(self._patience, self._check, context=contextvars.Context())
        except BaseException:
            # An interrupt: calls and replies may no longer correspond.
            self._abort()
            raise
        return reply

    def retire(self) -> None:
        """Take no more calls, and close once all are answered."""
        self._is_open = False
        if not self._pending:
            self._transport.close()

    async def close(self) -> None:
        """Close now. Calls in progress fail as lost."""
        self._is_open = False
        self._transport.close()
        await asyncio.wait({self._closed}, timeout=CLOSE_SECONDS)
        self._transport.abort()

    def _flush(self) -> None:
        try:
            if self._is_lost:
                return
            if len(self._pending) == len(self._unsent):
                self._since = self._loop.time()
            unsent, self._unsent = self._unsent, []
            self._transport.write(b"".join(unsent))
        except BaseException:
            self._abort()
            raise

    def _check(self) -> None:
        """Give up a server that has been silent for too long. One timer serves many calls."""
        self._timer = None
        if not self._pending or self._patience is None:
            return
        left = self._since + self._patience - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check, context=contextvars.Context())
        else:
            self._abort()
            self._fail(lambda: self._errors.TimeoutError(f"Timeout reading from {self._where}"))

    def _abort(self) -> None:
        """Close at once: what is unsent stays so, and calls in progress fail as lost."""
        self._is_open, self._is_lost = False, True
        self._transport.abort()

    def _fail(self, error: Callable[[], Exception]) -> None:
        """Fail all calls, each with an error of its own, because each adds its traceback."""
        while self._pending:
            reply = self._pending.popleft()
            if not reply.done():
                reply.set_exception(error())

    # What the event loop calls.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - there is always room
        if self._is_reading and self._buffer[self._filled]:
            # An interrupt has kept from us what was read: another's reply would be taken for the one that is missing.
            self._abort()
        self._is_reading, self._buffer[self._filled] = True, 0
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._is_reading = False
            if self._is_lost:
                return
            self._filled += nbytes
            self._since = self._loop.time()
            self._assign()
            if not self._is_open and not self._pending:
                self._transport.close()
        except BaseException:
            self._abort()
            raise

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_open, self._is_lost = False, True
        if self._timer is not None:
            self._timer.cancel()
        said = CLOSED if exc is None else f"Error while reading from {self._where} : {exc.args}"
        self._fail(lambda: self._errors.ConnectionError(said))
        self._closed.set_result(None)

    def _assign(self) -> None:
        """Assign all complete replies; keep the rest."""
        buffer, filled, at, answered, room = self._buffer, self._filled, 0, 0, ROOM
        while at < filled:
            line = buffer.find(b"\r\n", at, filled)
            if line < 0:
                break
            value: Any = None
            kind, after = buffer[at], line + 2
            if kind == INTEGER:
                value = int(buffer[at + 1 : line])
            elif kind == BULK:
                size = int(buffer[at + 1 : line])
                if size >= 0:
                    after += size + 2
                    if after > filled:
                        room = max(after - at + 1, ROOM)
                        break
                    value = bytes(buffer[line + 2 : after - 2])
            elif kind == ERROR:
                value = self._error_of(buffer[at + 1 : line].decode("utf-8", "replace"))
            else:
                raise self._errors.InvalidResponse(f"Protocol Error: {bytes(buffer[at:line])!r:.60}")
            # An interrupt here costs a caller its reply, and nobody gets another's.
            reply = self._pending[0]
            if reply.done():
                # Its caller was cancelled.
                pass
            elif kind == ERROR:
                reply.set_exception(value)
            else:
                reply.set_result(value)
            _ = self._pending.popleft()
            answered, at = answered + 1, after
        # Those who were answered together will send their next calls together.
        self._is_crowded = answered > 1
        self._filled = filled - at
        if len(buffer) != room:
            self._buffer = bytearray(room)
        if self._filled and (at or self._buffer is not buffer):
            self._buffer[: self._filled] = buffer[at:filled]


class Multiplexer:
    """The connections of one event loop: one to each server, opened when it is first called."""

    def __init__(self, errors: ModuleType) -> None:
        self._errors = errors
        self._connections: dict[object, MultiplexedConnection] = {}
        self._opening: dict[object, asyncio.Task[MultiplexedConnection]] = {}

    def open_to(self, node: Any) -> MultiplexedConnection | None:
        """Return the connection to this node, if it is open."""
        connection = self._connections.get(node_name(node))
        return connection if connection is not None and connection.is_usable else None

    async def opened_to(self, node: Any) -> MultiplexedConnection:
        """Open the connection to this node. All who need it wait for one attempt, which no cancellation interrupts."""
        name = node_name(node)
        task = self._opening.get(name)
        if task is None:
            self.retire(node)
            task = asyncio.get_running_loop().create_task(self._open(name, node), context=contextvars.Context())
            self._opening[name] = task
            task.add_done_callback(partial(self._opened, name))
        await asyncio.wait({task})
        if task.cancelled():
            # The store was closed meanwhile, not whoever waits.
            raise self._errors.ConnectionError(CLOSED)
        error = task.exception()
        if isinstance(error, Exception):
            # Each who waits raises its own.
            raise copy(error)
        return task.result()

    def _opened(self, name: object, task: asyncio.Task[MultiplexedConnection]) -> None:
        self._opening.pop(name, None)
        if not task.cancelled():
            # All who have waited for it may be cancelled: asyncio would report an error that nobody has seen.
            task.exception()

    async def _open(self, name: object, node: Any) -> MultiplexedConnection:
        with connecting():
            connection = new_connection(node)
            await connection.connect()
        found = self._connections[name] = MultiplexedConnection(connection, self._errors)
        return found

    def retire(self, node: Any) -> None:
        """Open another connection to this node for the next call."""
        connection = self._connections.pop(node_name(node), None)
        if connection is not None:
            connection.retire()

    def retire_all(self) -> None:
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.retire()

    async def close(self) -> None:
        for task in list(self._opening.values()):
            task.cancel()
            await asyncio.wait({task})
        while self._connections:
            _, connection = self._connections.popitem()
            await connection.close()
