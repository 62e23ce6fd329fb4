"""Run a connection inside an async engine, which has a sync engine inside, so that nothing is written twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy.util import greenlet_spawn

from onefold._concurrency.interrupts import brought_to_its_end, replied
from onefold.stores.sql.connection import TransactionStatus
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sqlalchemy.connection import HeldConnection
from onefold.stores.sqlalchemy.engine_connection import StoresConnection

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class AsyncConnectionShell:
    """Make a connection async: SQLAlchemy lets the sync code inside an async engine wait for the event loop."""

    spoils_gently = False

    def __init__(self, sync: HeldConnection | StoresConnection) -> None:
        self.sync = sync
        self.connection: Any = sync.connection

    async def send(self, request: SqlRequest) -> Reply:
        if isinstance(self.sync, StoresConnection) and self.sync.is_closed:
            await self._in_one_piece(self.sync.open_alone)
        return await self._sent(self.sync.send, request)

    async def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        if isinstance(self.sync, StoresConnection) and not self.sync.in_transaction:
            await self._in_one_piece(self.sync.open_many)
        return await self._sent(self.sync.send_all, requests)

    async def _sent(self, send: Callable[..., T], requests: Any) -> T:
        if isinstance(self.sync, StoresConnection) and not self.sync.in_transaction:
            # Some drivers can only close a connection whose reply is outstanding, and the server would execute the
            # statement all the same.
            return await replied(_in_greenlet(send, requests), self.abandon)
        return await _in_greenlet(send, requests)

    async def begin(self) -> None:
        assert isinstance(self.sync, StoresConnection), "a caller begins their own transactions"
        await self._in_one_piece(self.sync.open_transaction)
        await _in_greenlet(self.sync.enter)
        self.connection = self.sync.connection

    async def _in_one_piece(self, opens: Callable[[], object]) -> None:
        """Take a connection: SQLAlchemy leaves one to the garbage collector whose `connect` is cancelled."""
        await brought_to_its_end(greenlet_spawn(opens), self.abandon)

    async def take(self, *, many: bool) -> None:
        """Take the connection for the first statement, or for many, now; a cancellation is heard at once.

        What the engine gives after that goes back to it.
        """
        import asyncio

        assert isinstance(self.sync, StoresConnection), "a caller has their own connection"
        task = asyncio.ensure_future(greenlet_spawn(self.sync.open_many if many else self.sync.open_alone))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            give_back(task, self.close)
            raise

    async def run(self, statement: str) -> None:
        await _in_greenlet(self.sync.run, statement)

    async def flush(self) -> None:
        assert isinstance(self.sync, StoresConnection), "a caller's connection flushes its session itself"
        await _in_greenlet(self.sync.flush)

    async def commit(self) -> None:
        await _in_greenlet(self.sync.commit)

    async def rollback(self) -> None:
        await _in_greenlet(self.sync.rollback)

    def transaction_status(self) -> TransactionStatus:
        return self.sync.transaction_status()

    async def close(self) -> None:
        # A cancelled task, too, has to give its connection back.
        await brought_to_its_end(_in_greenlet(self.sync.close), self.abandon)

    async def spoil(self) -> None:
        await _in_greenlet(self.sync.spoil)

    def abandon(self) -> None:
        self.sync.abandon()


def give_back(task: asyncio.Task[Any], close: Callable[[], Awaitable[None]]) -> None:
    """Close what a task opens after nobody waits for it any more."""

    async def closing() -> None:
        with suppress(Exception):
            await task
            await close()

    late = task.get_loop().create_task(closing())
    _late.add(late)
    late.add_done_callback(_late.discard)


# Kept from the garbage collector until they have ended: the event loop does not do it.
_late: Final[set[Any]] = set()


async def _in_greenlet(work: Callable[..., T], *values: Any) -> T:
    try:
        return await greenlet_spawn(work, *values)
    except Exception:
        raise
    except BaseException as interrupt:
        # A cursor in one of these frames would keep SQLite's lock, although its connection is closed, until the
        # garbage collector comes by.
        clear_frames(interrupt.__traceback__)
        raise
