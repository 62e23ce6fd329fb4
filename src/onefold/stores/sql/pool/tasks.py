"""The pool for tasks, with a part for each event loop, and what it lends."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from onefold._concurrency.interrupts import closed_for_sure
from onefold.errors import StoreUnavailable
from onefold.stores.reserved import connecting
from onefold.stores.sql.connection import AsyncConnection
from onefold.stores.sql.pool.common import IDLE, PATIENCE, SIZE, all_in_use, inherited
from onefold.stores.sql.pool.reserve import gave_none

if TYPE_CHECKING:
    import asyncio


class AsyncPool:
    """A pool of connections for tasks. Each event loop has its own; several may use one pool, even concurrently."""

    def __init__(
        self, connect: Callable[[], Awaitable[AsyncConnection]], *, size: int = SIZE, patience: float = PATIENCE
    ) -> None:
        self._connect = connect
        self._size = size
        self._patience = patience
        self._shares: dict[asyncio.AbstractEventLoop, Share] = {}

    def acquire(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Lend a connection outside any transaction. Keep it afterwards only if it is again outside one."""
        return AsyncLoan(self)

    def soon(self, seconds: float) -> AbstractAsyncContextManager[AsyncConnection]:
        """Lend one within so many seconds, if need be opened within them."""
        return AsyncLoan(self, seconds)

    async def take(self, share: Share, soon: float | None) -> AsyncConnection:
        """Return a connection, once there is a slot for it."""
        slots, began = share.slots, time.monotonic()
        if not slots.take():
            at_most = self._patience if soon is None else min(soon, self._patience)
            if not await slots.wait(at_most):
                told = all_in_use(self._size, self._patience) if at_most != soon else gave_none(at_most)
                raise StoreUnavailable.unreached(told)
        try:
            if share.idle:
                return share.idle.pop()
            if soon is None:
                return await self._connected()
            return await self._connected_soon(soon, began)
        except BaseException:
            slots.leave()
            raise

    async def _connected_soon(self, seconds: float, began: float) -> AsyncConnection:
        import asyncio

        try:
            async with asyncio.timeout(began + seconds - time.monotonic()) as bound:
                return await self._connected()
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise StoreUnavailable.unreached(gave_none(seconds)) from error

    async def _connected(self) -> AsyncConnection:
        with connecting():
            return await self._connect()

    def known_share(self) -> Share | None:
        """Return this pool's share in the running event loop, if it was used there before."""
        import asyncio

        found = self._shares.get(asyncio.get_running_loop())
        return found if found is not None and found.pid == os.getpid() else None

    async def new_share(self) -> Share:
        import asyncio

        for loop, share in list(self._shares.items()):
            if share.pid != os.getpid():
                # Its connections are another process's, which still uses them.
                self._shares.pop(loop, None)
                inherited.append(share)
            elif loop.is_closed():
                self._shares.pop(loop, None)
                share.abandon()
        share = self._shares[asyncio.get_running_loop()] = Share(self._size)
        await anext(share.finalizer)
        return share

    def reserve(self) -> AsyncReserve:
        """Return a pool of one extra connection, opened like these, that is lent to nobody else."""
        return AsyncReserve(self._connect)

    async def drop_idle(self) -> None:
        """Close the idle connections of this event loop."""
        share = self.known_share()
        while share is not None and share.idle:
            await quietly_async(share.idle.pop().close)


class AsyncLoan:
    """The async counterpart of `Loan`."""

    __slots__ = ("_conn", "_pool", "_share", "_soon")

    def __init__(self, pool: AsyncPool, soon: float | None = None) -> None:
        self._pool = pool
        # In how many seconds at most; None: as long as the pool waits.
        self._soon = soon

    async def __aenter__(self) -> AsyncConnection:
        pool = self._pool
        share = self._share = pool.known_share() or await pool.new_share()
        # `AsyncPool.take`, without calling it where nothing is waited for.
        if share.idle and share.slots.take():
            self._conn = share.idle.pop()
        else:
            self._conn = await pool.take(share, self._soon)
        return self._conn

    async def __aexit__(self, *_: object) -> None:
        conn, share = self._conn, self._share
        try:
            if share.pid != os.getpid():
                # In a child that was forked meanwhile.
                inherited.append(conn)
            elif conn.transaction_status() is IDLE:
                share.idle.append(conn)
            else:
                await closed_for_sure(conn.close, conn.abandon)
        finally:
            share.slots.leave()


class Share:
    """The part of an `AsyncPool` that belongs to one event loop of one process."""

    def __init__(self, size: int) -> None:
        # Imported on use: blocking programs need no asyncio.
        from onefold.stores.sql.pool.async_slots import AsyncSlots

        self.pid = os.getpid()
        self.idle: list[AsyncConnection] = []
        self.slots = AsyncSlots(size)
        self.finalizer = _keep(self.idle)
        # For a reserve: whether its connection was opened.
        self.opened = False

    def abandon(self) -> None:
        """Let go of the connections of a loop that was closed abruptly: none of them can be closed gracefully any more.

        A driver that needs its loop even for this leaves the socket to the garbage collector.
        """
        while self.idle:
            with suppress(Exception):
                self.idle.pop().abandon()


class AsyncReserve(AsyncPool):
    """The async counterpart of `Reserve`: one connection for each event loop."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncConnection]]) -> None:
        super().__init__(connect, size=1)

    @property
    def is_held(self) -> bool:
        """Return whether it was opened in this event loop. If it was lost since, the next renewal opens another."""
        share = self.known_share()
        return share is not None and share.opened

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[AsyncConnection]:
        async with super().acquire() as conn:
            share = self.known_share()
            if share is not None:
                share.opened = True
            yield conn

    async def let_go(self) -> None:
        """Close it. The next claim opens another."""
        share = self.known_share()
        if share is not None:
            share.opened = False
        await self.drop_idle()


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


async def _keep(idle: list[AsyncConnection]) -> AsyncGenerator[None, None]:
    """Close the idle connections when asyncio shuts down async generators, just before it closes the event loop."""
    try:
        yield
    finally:
        while idle:
            await quietly_async(idle.pop().close)


async def quietly_async(close: Callable[[], Awaitable[None]]) -> None:
    with suppress(Exception):
        await close()
