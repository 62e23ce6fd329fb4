"""A delivery in a transaction, as a task that can be cancelled at every point: once, twice, or at every turn.

All of it is production code (the flow, the async driver, the transaction, the pool) except the connection, which asks
the world. A task cannot be copied, but it can be replayed: each `TaskNode` is one list of replies, as in `_worker`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from onefold._delivery.drive import drive_async
from onefold._delivery.steps import Beginning, Claiming, Committing, Finishing, Releasing, RollingBack, StoreStep
from onefold._guard.context import DeliveryContext
from onefold._model import Claim, Commit, Ending, Entry, Record, Released
from onefold.stores.sql.connection import Database, ErrorClass, ErrorInfo, TransactionStatus
from onefold.stores.sql.pool import AsyncPool
from onefold.stores.sql.store import AsyncSqlStore
from onefold.testing.simulate._worker import Choose, Effect, End, Fails, Moment, Node, Plan, Raised, Start, refusal
from onefold.testing.simulate._worker import ending as ended_in

# The number of turns of the event loop after which everything has come to rest; a delivery that has not hangs.
TURNS_MAX: Final = 200

# The turns that a cancellation takes to reach the innermost awaitable of a task.
TURNS_TO_ARRIVE: Final = 10

# The longest pause between two transactions takes some turns, and the bound of a clean-up many more.
TURN_SECONDS: Final = 0.05

UNDO: Final = Exception("rolled back")


class Cancelled(msgspec.Struct, frozen=True):
    """A reply of the world: the task is cancelled in this many turns; 0 means in each until it has ended.

    It does not reach a clean-up, which is answered by `reply` instead.
    """

    turns: int
    reply: Any = None


class Lost(Exception):
    """A simulated connection was lost."""


class Conflict(Exception):
    """A simulated serialization failure."""


class Spoken:
    """The dialect of a database that understands the steps of a flow directly.

    No handler ends the transaction by itself here, so that nothing has to be marked.
    """

    def mark(self, claim: Claim) -> Generator[Any, Any, None]:
        del claim
        yield from ()

    def unmark(self, claim: Claim) -> Generator[Any, Any, bool]:
        del claim
        yield from ()
        return True

    still_there = unmark

    def claim_joined(self, entry: Entry, replacing: Record | None) -> Generator[Any, Any, Any]:
        return (yield Claiming(entry, replacing))

    def finish_joined(self, claim: Claim, ending: Ending) -> Generator[Any, Any, Any]:
        return (yield Finishing(claim, ending))

    def release(self, claim: Claim, released: Released | None) -> Generator[Any, Any, Any]:
        return (yield Releasing(claim, released))


def _classify(error: BaseException) -> ErrorInfo | None:
    if isinstance(error, Lost):
        return ErrorInfo(ErrorClass.LOST, "the connection was lost")
    return ErrorInfo(ErrorClass.CONFLICT, "a conflict") if isinstance(error, Conflict) else None


DATABASE: Final = Database(Spoken(), "the simulated database", _classify, purges=False)  # type: ignore[arg-type]


class SimulatedConnection:
    """A connection whose every message is a moment. The outcome of an interrupted one is unknown, as in reality."""

    spoils_gently = False

    def __init__(self, stage: Stage) -> None:
        self.connection = None
        self._stage = stage
        self._transaction_status = TransactionStatus.IDLE

    async def send(self, request: Any) -> Any:
        with self._marked():
            reply = await self._stage.moment(request)
        if isinstance(reply, Fails):
            self._transaction_status = TransactionStatus.ABORTED
            raise Conflict
        return reply

    async def send_all(self, requests: list[Any]) -> list[Any]:
        return [await self.send(request) for request in requests]

    async def begin(self) -> None:
        with self._marked():
            await self._stage.moment(Beginning())
        self._transaction_status = TransactionStatus.OPEN

    async def run(self, statement: str) -> None:
        raise AssertionError(f"no savepoint is simulated: {statement}")

    async def commit(self) -> None:
        with self._marked():
            reply = await self._stage.moment(Committing())
        self._transaction_status = TransactionStatus.BROKEN if reply is Commit.UNKNOWN else TransactionStatus.IDLE
        if reply is not Commit.DONE:
            raise Lost if reply is Commit.UNKNOWN else Conflict

    async def rollback(self) -> None:
        with self._marked():
            await self._stage.moment(RollingBack(UNDO))
        self._transaction_status = TransactionStatus.IDLE

    def transaction_status(self) -> TransactionStatus:
        return self._transaction_status

    async def close(self) -> None:
        self.abandon()

    async def spoil(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._transaction_status = TransactionStatus.BROKEN
        self._stage.closed += 1

    @contextmanager
    def _marked(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._transaction_status = TransactionStatus.BROKEN
            raise


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock is moved by its turns: a pause takes no time."""

    now = 0.0

    def time(self) -> float:
        return self.now

    async def turn(self) -> None:
        """Run everything that is ready by then."""
        self.now += TURN_SECONDS
        await asyncio.sleep(0)


class Stage:
    """One delivery as a task, and the world's answers to it."""

    def __init__(self, plan: Plan, loop: Loop) -> None:
        self._plan = plan
        self._loop = loop
        self._waiting: tuple[Moment, asyncio.Future[Any]] | None = None
        self._relentless = False
        self.over = False
        # How many connections were closed without telling the server.
        self.closed = 0
        self._task = asyncio.create_task(self._delivery())

    async def moment(self, what: Any) -> Any:
        if self.over:
            raise Lost
        future = asyncio.get_running_loop().create_future()
        self._waiting = what, future
        return await future

    async def _delivery(self) -> Any:
        store = AsyncSqlStore(DATABASE, AsyncPool(self._connected))
        store._looked = True
        async with store.transaction() as transaction:
            delivery = replace(self._plan.delivery(), call=self._handle)
            context = DeliveryContext(
                transaction, delivery.codec, delivery.tell, drive_async, awaits=True, transaction=transaction
            )
            return await drive_async(self._plan.flow(delivery), context)

    async def _connected(self) -> SimulatedConnection:
        return SimulatedConnection(self)

    async def _handle(self) -> str:
        await self.moment(Start(1))
        await self.moment(Effect("effect"))
        way = await self.moment(Choose("the handler", ("returns", "raises")))
        if way == "raises":
            raise Raised
        return f"{self._plan.name}'s result"

    async def settle(self) -> Moment:
        """Return the next moment at which the world decides, or how the delivery has ended."""
        for _ in range(TURNS_MAX):
            if self._task.done():
                return self._end()
            if self._waiting is not None and not self._waiting[1].done():
                return self._waiting[0]
            if self._relentless:
                self._task.cancel()
            await self._loop.turn()
        return End("a hang")

    async def answer(self, reply: Any) -> None:
        assert self._waiting is not None
        future = self._waiting[1]
        if isinstance(reply, Cancelled):
            self._relentless = reply.turns == 0
            await self._cancel(future, reply.turns)
            reply = reply.reply
        if not future.done():
            future.set_result(reply)

    async def _cancel(self, future: asyncio.Future[Any], turns: int) -> None:
        for turn in range(TURNS_TO_ARRIVE):
            if turn < turns or turns == 0:
                self._task.cancel()
            await self._loop.turn()
            if future.done() and turn >= turns:
                return

    async def end(self) -> None:
        """End any remaining clean-up at once: its result no longer matters."""
        self.over = True
        while not self._task.done():
            if self._waiting is not None:
                self._waiting[1].cancel()
            self._task.cancel()
            await self._loop.turn()

    def _end(self) -> End:
        if self._task.cancelled():
            return End("CancelledError")
        error = self._task.exception()
        if error is None:
            return ended_in(self._task.result())
        return refusal(error) if isinstance(error, Exception) else End(type(error).__name__)


@cache
def _runner() -> asyncio.Runner:
    """Return one event loop for all: creating one takes longer than playing a delivery."""
    return asyncio.Runner(loop_factory=Loop)


class TaskNode(Node):
    """A delivery after a list of replies, and how many connections it has closed until then."""

    __slots__ = ("closed",)

    def _replay(self) -> Moment:
        return _runner().run(self._played())

    async def _played(self) -> Moment:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        stage = Stage(self._plan, loop)
        at = await stage.settle()
        for reply in self._replies:
            await stage.answer(reply)
            at = await stage.settle()
        self.closed = stage.closed
        await stage.end()
        return at


def can_be_cancelled(moment: Moment) -> bool:
    return isinstance(moment, (StoreStep, Start, Effect, Choose))
