"""Connections that are kept for the next operation: few, bounded, and never shared over a fork or between event loops.

A dead connection is found out by using it: then all that wait here are dropped with it, because a server that restarts
ends them all. What nobody closes is closed with the pool, the process or the event loop.

A pool of our own, because no other serves all drivers: PyMySQL has none. psycopg_pool connects in threads of its own,
which a forked child does not have; its async pool, asyncpg's and asyncmy's belong to one event loop. SQLAlchemy's would
be one more package. And an interrupt must not break the lock of a pool (`slots`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from onefold._concurrency.generators import Work, run, run_async
from onefold._concurrency.interrupts import closed_for_sure
from onefold.durations import as_text
from onefold.errors import StoreUnavailable
from onefold.stores.reserved import connecting
from onefold.stores.sql.connection import (
    AsyncConnection,
    AsyncConnectionSource,
    Connection,
    ConnectionSource,
    TransactionStatus,
)
from onefold.stores.sql.pool.slots import Slots, Waiter

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

# Transactions that are under way at the same time; a server has room for some hundred connections in all.
SIZE: Final = 10

# How long an operation waits for a connection: as long as a lease, because whoever waits longer has lost it.
PATIENCE: Final = 30.0


class Pool:
    """Connections for threads."""

    def __init__(self, connect: Callable[[], Connection], *, size: int = SIZE, patience: float = PATIENCE) -> None:
        self._connect = connect
        self._size = size
        self._patience = patience
        self._reset()

    def _reset(self) -> None:
        self._idle: list[Connection] = []
        self._slots = Slots(self._size)
        self._pid = os.getpid()
        self._at_end = weakref.finalize(self, _close_all, self._idle, self._pid)

    @contextmanager
    def acquire(self) -> Iterator[Connection]:
        """A connection outside any transaction. It is kept afterwards only if it is so again."""
        if self._pid != os.getpid():
            # A child must neither use nor close its parent's connections: it leaves them alone.
            _inherited.append(self._at_end.detach())
            self._reset()
        slots, waiter = self._slots, Waiter()
        try:
            if not slots.enter(waiter, self._patience):
                raise StoreUnavailable.unreached(all_in_use(self._size, self._patience))
            conn = self._taken()
            try:
                yield conn
            finally:
                self._give_back(conn)
        finally:
            slots.leave(waiter)

    def drop_idle(self) -> None:
        """Close what nobody uses."""
        _close_all(self._idle, self._pid)

    def reserve(self) -> Reserve:
        """Return a pool of one more connection, opened like these, which nobody else is lent."""
        return Reserve(self._connect)

    def _taken(self) -> Connection:
        try:
            return self._idle.pop()
        except IndexError:
            with connecting():
                return self._connect()

    def _give_back(self, conn: Connection) -> None:
        if conn.transaction_status() is TransactionStatus.IDLE and self._pid == os.getpid():
            self._idle.append(conn)
        else:
            quietly(conn.close)


class Reserve(Pool):
    """The one connection on which a store renews its claims. No handler is ever lent it."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        super().__init__(connect, size=1)
        self._opened_in = 0

    @property
    def is_held(self) -> bool:
        """Whether it was opened in this process. It may be lost by now: then whoever renews opens another."""
        return self._opened_in == os.getpid()

    @contextmanager
    def acquire(self) -> Iterator[Connection]:
        with super().acquire() as conn:
            self._opened_in = os.getpid()
            yield conn

    def let_go(self) -> None:
        """Close it. The next claim opens another."""
        self._opened_in = 0
        self.drop_idle()


class Share:
    """What an `AsyncPool` has in one event loop of one process."""

    def __init__(self, size: int) -> None:
        import asyncio

        self.pid = os.getpid()
        self.idle: list[AsyncConnection] = []
        self.free = asyncio.Semaphore(size)
        self.finalizer = _keep(self.idle)
        # Of a reserve: whether its connection was opened.
        self.opened = False


class AsyncPool:
    """Connections for tasks: each event loop has its own, as several may use one pool in turn, or at the same time."""

    def __init__(
        self, connect: Callable[[], Awaitable[AsyncConnection]], *, size: int = SIZE, patience: float = PATIENCE
    ) -> None:
        self._connect = connect
        self._size = size
        self._patience = patience
        self._shares: dict[asyncio.AbstractEventLoop, Share] = {}

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[AsyncConnection]:
        """A connection outside any transaction. It is kept afterwards only if it is so again."""
        import asyncio

        share = self._known_share() or await self._new_share()
        free, idle = share.free, share.idle
        try:
            async with asyncio.timeout(self._patience if free.locked() else None):
                await free.acquire()
        except TimeoutError:
            raise StoreUnavailable.unreached(all_in_use(self._size, self._patience)) from None
        try:
            conn = idle.pop() if idle else await self._connected()
            try:
                yield conn
            finally:
                if conn.transaction_status() is TransactionStatus.IDLE:
                    idle.append(conn)
                else:
                    await closed_for_sure(conn.close, conn.abandon)
        finally:
            free.release()

    async def _connected(self) -> AsyncConnection:
        with connecting():
            return await self._connect()

    def _known_share(self) -> Share | None:
        """What this pool has in the running event loop, if it was used there before."""
        import asyncio

        found = self._shares.get(asyncio.get_running_loop())
        return found if found is not None and found.pid == os.getpid() else None

    async def _new_share(self) -> Share:
        import asyncio

        # The connections of another process, or of a loop that was closed abruptly, cannot be closed by this one.
        for loop, share in list(self._shares.items()):
            if share.pid != os.getpid() or loop.is_closed():
                _inherited.append(self._shares.pop(loop, None))
        share = self._shares[asyncio.get_running_loop()] = Share(self._size)
        await anext(share.finalizer)
        return share

    def reserve(self) -> AsyncReserve:
        """Return a pool of one more connection, opened like these, which nobody else is lent."""
        return AsyncReserve(self._connect)

    async def drop_idle(self) -> None:
        """Close what nobody uses in this event loop."""
        share = self._known_share()
        while share is not None and share.idle:
            await quietly_async(share.idle.pop().close)


class AsyncReserve(AsyncPool):
    """The same as `Reserve`, async: one connection for each event loop."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncConnection]]) -> None:
        super().__init__(connect, size=1)

    @property
    def is_held(self) -> bool:
        """Whether it was opened in this event loop. It may be lost by now: then whoever renews opens another."""
        share = self._known_share()
        return share is not None and share.opened

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[AsyncConnection]:
        async with super().acquire() as conn:
            share = self._known_share()
            if share is not None:
                share.opened = True
            yield conn

    async def let_go(self) -> None:
        """Close it. The next claim opens another."""
        share = self._known_share()
        if share is not None:
            share.opened = False
        await self.drop_idle()


async def _keep(idle: list[AsyncConnection]) -> AsyncGenerator[None, None]:
    """Asyncio ends its asynchronous generators before it closes an event loop: then there is still time to close."""
    try:
        yield
    finally:
        while idle:
            await quietly_async(idle.pop().close)


def _close_all(idle: list[Connection], pid: int) -> None:
    # A child leaves alone what its parent has opened; and other threads take from the list meanwhile.
    with suppress(IndexError):
        while pid == os.getpid():
            quietly(idle.pop().close)


# Kept from the garbage collector, which would close what belongs to another process or loop.
_inherited: list[Any] = []


def all_in_use(size: int, patience: float) -> str:
    return (
        f"all {size} connections to the database have been in use for {as_text(patience)}. Nothing ran. Keep "
        "transactions short, or raise pool_size"
    )


def quietly(close: Callable[[], None]) -> None:
    """Closing what may be broken: there is nobody whom its error would help."""
    with suppress(Exception):
        close()


async def quietly_async(close: Callable[[], Awaitable[None]]) -> None:
    with suppress(Exception):
        await close()


class OneOff:
    """Lends a connection that is opened for it, and closed afterwards."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect

    @contextmanager
    def acquire(self) -> Iterator[Connection]:
        with connecting():
            conn = self._connect()
        try:
            yield conn
        finally:
            quietly(conn.close)

    def drop_idle(self) -> None:
        """Nothing: none is kept."""


class AsyncOneOff:
    """The async counterpart."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncConnection]]) -> None:
        self._connect = connect

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[AsyncConnection]:
        with connecting():
            conn = await self._connect()
        try:
            yield conn
        finally:
            await quietly_async(conn.close)

    async def drop_idle(self) -> None:
        """Nothing: none is kept."""


def run_on(pool: ConnectionSource, work: Callable[[Connection], Work[T]]) -> T:
    """Run work on a connection that the pool lends for it."""
    with pool.acquire() as conn:
        return run(work(conn), conn)


async def run_on_async(pool: AsyncConnectionSource, work: Callable[[AsyncConnection], Work[T]]) -> T:
    async with pool.acquire() as conn:
        return await run_async(work(conn), conn)
