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

from onefold._generators import Work, run, run_async
from onefold._interrupts import closed_for_sure
from onefold.durations import in_words
from onefold.errors import StoreUnavailable
from onefold.stores.reserved import connecting
from onefold.stores.sql.connection import AsyncLink, Lends, LendsAwaited, Link, Standing
from onefold.stores.sql.pool.slots import Slots, Stay

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

# Transactions that are under way at the same time; a server has room for some hundred connections in all.
SIZE: Final = 10

# How long an operation waits for a connection: as long as a lease, because whoever waits longer has lost it.
PATIENCE: Final = 30.0


class Pool:
    """Connections for threads."""

    def __init__(self, connect: Callable[[], Link], *, size: int = SIZE, patience: float = PATIENCE) -> None:
        self._connect = connect
        self._size = size
        self._patience = patience
        self._reset()

    def _reset(self) -> None:
        self._idle: list[Link] = []
        self._slots = Slots(self._size)
        self._pid = os.getpid()
        self._at_end = weakref.finalize(self, _close_all, self._idle, self._pid)

    @contextmanager
    def lend(self) -> Iterator[Link]:
        """A connection outside any transaction. It is kept afterwards only if it is so again."""
        if self._pid != os.getpid():
            # A child must neither use nor close its parent's connections: it leaves them alone.
            _inherited.append(self._at_end.detach())
            self._reset()
        slots, stay = self._slots, Stay()
        try:
            if not slots.enter(stay, self._patience):
                raise StoreUnavailable.unreached(all_in_use(self._size, self._patience))
            link = self._taken()
            try:
                yield link
            finally:
                self._give_back(link)
        finally:
            slots.leave(stay)

    def drop_idle(self) -> None:
        """Close what nobody uses."""
        _close_all(self._idle, self._pid)

    def reserve(self) -> Reserve:
        """Return a pool of one more connection, opened like these, which nobody else is lent."""
        return Reserve(self._connect)

    def _taken(self) -> Link:
        try:
            return self._idle.pop()
        except IndexError:
            with connecting():
                return self._connect()

    def _give_back(self, link: Link) -> None:
        if link.standing() is Standing.IDLE and self._pid == os.getpid():
            self._idle.append(link)
        else:
            quietly(link.close)


class Reserve(Pool):
    """The one connection on which a store renews its claims. No handler is ever lent it."""

    def __init__(self, connect: Callable[[], Link]) -> None:
        super().__init__(connect, size=1)
        self._opened_in = 0

    @property
    def is_held(self) -> bool:
        """Whether it was opened in this process. It may be lost by now: then whoever renews opens another."""
        return self._opened_in == os.getpid()

    @contextmanager
    def lend(self) -> Iterator[Link]:
        with super().lend() as link:
            self._opened_in = os.getpid()
            yield link

    def let_go(self) -> None:
        """Close it. The next claim opens another."""
        self._opened_in = 0
        self.drop_idle()


class Share:
    """What an `AsyncPool` has in one event loop of one process."""

    def __init__(self, size: int) -> None:
        import asyncio

        self.pid = os.getpid()
        self.idle: list[AsyncLink] = []
        self.free = asyncio.Semaphore(size)
        self.keeper = _keep(self.idle)
        # Of a reserve: whether its connection was opened.
        self.opened = False


class AsyncPool:
    """Connections for tasks: each event loop has its own, as several may use one pool in turn, or at the same time."""

    def __init__(
        self, connect: Callable[[], Awaitable[AsyncLink]], *, size: int = SIZE, patience: float = PATIENCE
    ) -> None:
        self._connect = connect
        self._size = size
        self._patience = patience
        self._shares: dict[asyncio.AbstractEventLoop, Share] = {}

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[AsyncLink]:
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
            link = idle.pop() if idle else await self._connected()
            try:
                yield link
            finally:
                if link.standing() is Standing.IDLE:
                    idle.append(link)
                else:
                    await closed_for_sure(link.close, link.abandon)
        finally:
            free.release()

    async def _connected(self) -> AsyncLink:
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
        await anext(share.keeper)
        return share

    def reserve(self) -> AsyncReserve:
        """Return a pool of one more connection, opened like these, which nobody else is lent."""
        return AsyncReserve(self._connect)

    async def drop_idle(self) -> None:
        """Close what nobody uses in this event loop."""
        share = self._known_share()
        while share is not None and share.idle:
            await quietly_awaited(share.idle.pop().close)


class AsyncReserve(AsyncPool):
    """The same as `Reserve`, awaited: one connection for each event loop."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncLink]]) -> None:
        super().__init__(connect, size=1)

    @property
    def is_held(self) -> bool:
        """Whether it was opened in this event loop. It may be lost by now: then whoever renews opens another."""
        share = self._known_share()
        return share is not None and share.opened

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[AsyncLink]:
        async with super().lend() as link:
            share = self._known_share()
            if share is not None:
                share.opened = True
            yield link

    async def let_go(self) -> None:
        """Close it. The next claim opens another."""
        share = self._known_share()
        if share is not None:
            share.opened = False
        await self.drop_idle()


async def _keep(idle: list[AsyncLink]) -> AsyncGenerator[None, None]:
    """Asyncio ends its asynchronous generators before it closes an event loop: then there is still time to close."""
    try:
        yield
    finally:
        while idle:
            await quietly_awaited(idle.pop().close)


def _close_all(idle: list[Link], pid: int) -> None:
    # A child leaves alone what its parent has opened; and other threads take from the list meanwhile.
    with suppress(IndexError):
        while pid == os.getpid():
            quietly(idle.pop().close)


# Kept from the garbage collector, which would close what belongs to another process or loop.
_inherited: list[Any] = []


def all_in_use(size: int, patience: float) -> str:
    return (
        f"all {size} connections to the database have been in use for {in_words(patience)}. Nothing ran. Keep "
        "transactions short, or raise pool_size"
    )


def quietly(close: Callable[[], None]) -> None:
    """Closing what may be broken: there is nobody whom its error would help."""
    with suppress(Exception):
        close()


async def quietly_awaited(close: Callable[[], Awaitable[None]]) -> None:
    with suppress(Exception):
        await close()


class OneOff:
    """Lends a connection that is opened for it, and closed afterwards."""

    def __init__(self, connect: Callable[[], Link]) -> None:
        self._connect = connect

    @contextmanager
    def lend(self) -> Iterator[Link]:
        with connecting():
            link = self._connect()
        try:
            yield link
        finally:
            quietly(link.close)

    def drop_idle(self) -> None:
        """Nothing: none is kept."""


class AsyncOneOff:
    """The same, awaited."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncLink]]) -> None:
        self._connect = connect

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[AsyncLink]:
        with connecting():
            link = await self._connect()
        try:
            yield link
        finally:
            await quietly_awaited(link.close)

    async def drop_idle(self) -> None:
        """Nothing: none is kept."""


def run_on(pool: Lends, work: Callable[[Link], Work[T]]) -> T:
    """Run work on a connection that the pool lends for it."""
    with pool.lend() as link:
        return run(work(link), link)


async def run_on_async(pool: LendsAwaited, work: Callable[[AsyncLink], Work[T]]) -> T:
    async with pool.lend() as link:
        return await run_async(work(link), link)
