"""Connections kept for the next operation: few, bounded, and never shared across a fork or between event loops.

A dead connection is detected by using it: then all idle ones are dropped with it, because a server that restarts ends
them all. Connections that nobody closes are closed with the pool, the process or the event loop.

A pool of our own, because no other serves all drivers: PyMySQL has none. psycopg_pool connects in threads of its own,
which a forked child does not have; its async pool, asyncpg's and asyncmy's belong to one event loop. SQLAlchemy's would
be one more package. And an interrupt must not break the lock of a pool (`slots`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from onefold._concurrency.generators import Flow, run, run_async
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

# On Python 3.11 accessing an enum's members is slow.
IDLE: Final = TransactionStatus.IDLE

# The maximum of concurrent transactions; a server has room for some hundred connections in all.
SIZE: Final = 10

# How long an operation waits for a connection: as long as a lease, because a longer wait would lose the claim.
PATIENCE: Final = 30.0


class Pool:
    """A pool of connections for threads."""

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

    def acquire(self) -> AbstractContextManager[Connection]:
        """Lend a connection outside any transaction. Keep it afterwards only if it is again outside one."""
        return Loan(self)

    def of_this_process(self) -> Slots:
        """Return the slots. A child must neither use nor close its parent's connections: it leaves them alone."""
        if self._pid != os.getpid():
            inherited.append(self._at_end.detach())
            self._reset()
        return self._slots

    def drop_idle(self) -> None:
        """Close the idle connections."""
        _close_all(self._idle, self._pid)

    def reserve(self) -> Reserve:
        """Return a pool of one extra connection, opened like these, that is lent to nobody else."""
        return Reserve(self._connect)

    def take(self, slots: Slots, waiter: Waiter) -> Connection:
        """Return a connection, once there is a slot for it."""
        if not slots.enter(waiter, self._patience):
            raise StoreUnavailable.unreached(all_in_use(self._size, self._patience))
        try:
            return self._idle.pop()
        except IndexError:
            with connecting():
                return self._connect()


class Loan:
    """A connection of a pool for as long as a `with` block lasts; every operation of a store takes one."""

    __slots__ = ("_conn", "_pid", "_pool", "_slots", "_waiter")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __enter__(self) -> Connection:
        pool, pid = self._pool, os.getpid()
        slots = pool._slots if pool._pid == pid else pool.of_this_process()
        waiter = Waiter()
        self._slots, self._waiter, self._pid = slots, waiter, pid
        try:
            self._conn = pool.take(slots, waiter)
        except BaseException:
            slots.leave(waiter)
            raise
        return self._conn

    def __exit__(self, *_: object) -> None:
        try:
            conn = self._conn
            if self._pid != os.getpid():
                # In a child that was forked meanwhile.
                inherited.append(conn)
            elif conn.transaction_status() is IDLE:
                self._pool._idle.append(conn)
            else:
                quietly(conn.close)
        finally:
            self._slots.leave(self._waiter)


class Reserve(Pool):
    """The one connection on which a store renews its claims. It is never lent to a handler."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        super().__init__(connect, size=1)
        self._opened_in = 0

    @property
    def is_held(self) -> bool:
        """Return whether it was opened in this process. If it was lost since, the next renewal opens another."""
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
    """The part of an `AsyncPool` that belongs to one event loop of one process."""

    def __init__(self, size: int) -> None:
        import asyncio

        self.pid = os.getpid()
        self.idle: list[AsyncConnection] = []
        self.free = asyncio.Semaphore(size)
        self.finalizer = _keep(self.idle)
        # For a reserve: whether its connection was opened.
        self.opened = False


class AsyncPool:
    """A pool of connections for tasks. Each event loop has its own; several may use one pool, even concurrently."""

    def __init__(
        self, connect: Callable[[], Awaitable[AsyncConnection]], *, size: int = SIZE, patience: float = PATIENCE
    ) -> None:
        self._connect = connect
        self._size = size
        self._patience = patience
        self._shares: dict[asyncio.AbstractEventLoop, Share] = {}

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[AsyncConnection]:
        """Lend a connection outside any transaction. Keep it afterwards only if it is again outside one."""
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
                if share.pid != os.getpid():
                    # In a child that was forked meanwhile.
                    inherited.append(conn)
                elif conn.transaction_status() is IDLE:
                    idle.append(conn)
                else:
                    await closed_for_sure(conn.close, conn.abandon)
        finally:
            free.release()

    async def _connected(self) -> AsyncConnection:
        with connecting():
            return await self._connect()

    def _known_share(self) -> Share | None:
        """Return this pool's share in the running event loop, if it was used there before."""
        import asyncio

        found = self._shares.get(asyncio.get_running_loop())
        return found if found is not None and found.pid == os.getpid() else None

    async def _new_share(self) -> Share:
        import asyncio

        # Connections of another process, or of a loop that was closed abruptly, cannot be closed here.
        for loop, share in list(self._shares.items()):
            if share.pid != os.getpid() or loop.is_closed():
                self._shares.pop(loop, None)
                if share.pid != os.getpid() or share.idle:
                    inherited.append(share)
        share = self._shares[asyncio.get_running_loop()] = Share(self._size)
        await anext(share.finalizer)
        return share

    def reserve(self) -> AsyncReserve:
        """Return a pool of one extra connection, opened like these, that is lent to nobody else."""
        return AsyncReserve(self._connect)

    async def drop_idle(self) -> None:
        """Close the idle connections of this event loop."""
        share = self._known_share()
        while share is not None and share.idle:
            await quietly_async(share.idle.pop().close)


class AsyncReserve(AsyncPool):
    """The async counterpart of `Reserve`: one connection for each event loop."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncConnection]]) -> None:
        super().__init__(connect, size=1)

    @property
    def is_held(self) -> bool:
        """Return whether it was opened in this event loop. If it was lost since, the next renewal opens another."""
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
    """Close the idle connections when asyncio shuts down async generators, just before it closes the event loop."""
    try:
        yield
    finally:
        while idle:
            await quietly_async(idle.pop().close)


def _close_all(idle: list[Connection], pid: int) -> None:
    # A forked child leaves its parent's connections alone; and other threads pop from the list concurrently.
    with suppress(IndexError):
        while pid == os.getpid():
            quietly(idle.pop().close)


# Kept from the garbage collector, which would close what belongs to another process or loop.
inherited: list[Any] = []


def all_in_use(size: int, patience: float) -> str:
    return (
        f"all {size} connections to the database have been in use for {as_text(patience)}. Nothing ran. Keep "
        "transactions short, or raise pool_size"
    )


def quietly(close: Callable[[], None]) -> None:
    """Close something that may be broken, ignoring errors: they would help nobody."""
    with suppress(Exception):
        close()


async def quietly_async(close: Callable[[], Awaitable[None]]) -> None:
    with suppress(Exception):
        await close()


class OneOff:
    """Lends a connection that is opened on demand and closed afterwards."""

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
        """Do nothing: no connection is kept."""


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
        """Do nothing: no connection is kept."""


def run_on(pool: ConnectionSource, work: Callable[[Connection], Flow[T]]) -> T:
    """Run work on a connection borrowed from the pool."""
    with pool.acquire() as conn:
        return run(work(conn), conn)


async def run_on_async(pool: AsyncConnectionSource, work: Callable[[AsyncConnection], Flow[T]]) -> T:
    async with pool.acquire() as conn:
        return await run_async(work(conn), conn)
