"""Deliveries inside the transaction of another one, in tasks of its handler's own: none of them outlives it.

Each async driver; what others see is read by another connection.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest

from onefold import Guard, UsageError
from onefold._concurrency import interrupts as _interrupts
from tests.faults.cancel_tools import DRIVERS, Environment, prepare
from tests.support import PATIENCE, in_time

# How a nested delivery is made inside of a handler that has this transaction.
Nested = Callable[[Any, str, Callable[[], Awaitable[None]]], Coroutine[Any, Any, Any]]

# A delivery around others: its message, and what its handler does once it has its own effect.
Around = Callable[[str, Callable[[Any], Awaitable[None]]], Coroutine[Any, Any, Any]]


class Nest:
    """Deliveries inside of a delivery, on one driver: by `transactional`, or by `within` on a caller's connection."""

    def __init__(self, environment: Environment, mode: str) -> None:
        self._environment = environment
        self.around: Around = self._within if mode == "within" else self._transactional
        self.nested: Nested = self._nested_within if mode == "within" else self._nested_transactional
        self._calls: dict[str, Callable[[], Awaitable[None]]] = {}

        @environment.guard.transactional("inner", key="message")
        async def inner(message: str, *, tx: Any) -> None:
            await self._calls[message]()
            await environment.credit(tx, message)

        @environment.guard.transactional("outer", key="message", fingerprint=None)
        async def outer(message: str, then: Any, *, tx: Any) -> None:
            await environment.credit(tx, message)
            await then(tx)

        self._inner: Any = inner
        self._outer: Any = outer

    async def redelivered(self, message: str) -> None:
        await self._nested_transactional(None, message, nothing)

    async def _transactional(self, message: str, then: Callable[[Any], Awaitable[None]]) -> Any:
        return await self._outer(message, then)

    async def _nested_transactional(self, tx: Any, message: str, call: Callable[[], Awaitable[None]]) -> Any:
        self._calls[message] = call
        return await self._inner(message)

    async def _within(self, message: str, then: Callable[[Any], Awaitable[None]]) -> Any:
        async with self._environment.begun() as connection:

            async def handler() -> None:
                await self._environment.credit(connection, message)
                await then(connection)

            await self._environment.guard.within(connection).run("outer", message, handler)

    async def _nested_within(self, tx: Any, message: str, call: Callable[[], Awaitable[None]]) -> Any:
        async def handler() -> None:
            await call()
            await self._environment.credit(tx, message)

        return await self._environment.guard.within(tx).run("inner", message, handler)


async def nothing() -> None:
    await asyncio.sleep(0)


class Gate:
    """A nested handler waits inside of it, until somebody lets it go on."""

    def __init__(self) -> None:
        self.inside = asyncio.Event()
        self.may_go = asyncio.Event()

    async def __call__(self) -> None:
        self.inside.set()
        await self.may_go.wait()

    def open_soon(self) -> None:
        """After the handler around it has ended, unless that waits for it."""
        asyncio.get_running_loop().call_later(0.05, self.may_go.set)


async def gathered(nest: Nest, tx: Any, message: str, gate: Gate) -> None:
    """One fails, and `gather` leaves the other one running."""

    async def failing() -> None:
        await gate.inside.wait()
        gate.open_soon()
        raise ValueError("no")

    task = asyncio.create_task(nest.nested(tx, message, gate))
    _tasks.add(task)
    await asyncio.gather(task, failing())


async def left(nest: Nest, tx: Any, message: str, gate: Gate) -> None:
    """A task that its handler does not wait for."""
    task = asyncio.create_task(nest.nested(tx, message, gate))
    _tasks.add(task)
    await gate.inside.wait()
    gate.open_soon()


async def left_failing(nest: Nest, tx: Any, message: str, gate: Gate) -> None:
    """The same, and it raises after it has written, and after the handler around it has ended."""

    async def inner() -> None:
        await gate()
        await nest._environment.credit(tx, message)
        raise ValueError("late")

    task = asyncio.create_task(nest.nested(tx, message, inner))
    _tasks.add(task)
    await gate.inside.wait()
    gate.open_soon()


_tasks: set[asyncio.Task[Any]] = set()


@pytest.fixture(autouse=True)
def _no_tasks() -> None:
    _tasks.clear()


async def tasks_ended() -> None:
    if _tasks:
        await asyncio.wait(_tasks)
        await asyncio.gather(*_tasks, return_exceptions=True)


@pytest.fixture
def address(driver: str, request: pytest.FixtureRequest, tmp_path: Any) -> str:
    database = DRIVERS[driver].database
    found = str(tmp_path / "wallet.db") if database == "path" else str(request.getfixturevalue(database))
    prepare(database, found)
    return found


# What becomes of the delivery, and how many records and effects there are then of it and of the nested one.
STORIES: dict[str, tuple[Any, type[Exception] | None, int]] = {
    "gathered": (gathered, ValueError, 0),
    "left": (left, None, 1),
    "left failing": (left_failing, ValueError, 0),
}

EVERYDAY = {
    *product(["psycopg", "asyncmy", "sqlite"], ["transactional"], STORIES),
    ("asyncpg", "transactional", "gathered"),
    ("sqlalchemy, sessions on asyncpg", "transactional", "left failing"),
    ("psycopg", "within", "left failing"),
    ("sqlite", "within", "gathered"),
}
ALL = [
    pytest.param(*one, id="-".join(one), marks=() if one in EVERYDAY else pytest.mark.more)
    for one in product(DRIVERS, ["transactional", "within"], STORIES)
]


@pytest.mark.parametrize(("driver", "mode", "story"), ALL)
def test_a_nested_delivery_in_a_task_commits_with_the_one_around_it_or_neither_does(
    driver: str, mode: str, story: str, address: str
) -> None:
    then, raised, committed = STORIES[story]
    seen = DRIVERS[driver].seen

    async def played() -> None:
        async with DRIVERS[driver].opened(address) as environment:
            nest, gate = Nest(environment, mode), Gate()
            await nest.redelivered("first")
            with pytest.raises(raised) if raised else nullcontext():
                await nest.around("o1", lambda tx: then(nest, tx, "i1", gate))
            # At once, and when nothing runs any more.
            assert seen(address, "o1") == seen(address, "i1") == (committed, committed)
            await tasks_ended()
            assert seen(address, "o1") == seen(address, "i1") == (committed, committed)

            # What comes again finds connections that work, and happens once.
            await nest.redelivered("i1")
            assert seen(address, "i1") == (1, 1)

    in_time(played())


DAILY = {"psycopg", "asyncmy", "sqlite", "sqlalchemy, psycopg", "sqlalchemy, aiosqlite"}


@pytest.mark.parametrize(
    "driver", [pytest.param(one, marks=() if one in DAILY else pytest.mark.more) for one in DRIVERS]
)
def test_a_nested_delivery_that_does_not_end_takes_both_down_and_the_caller_is_told(
    driver: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_interrupts, "CLEAN_UP_SECONDS", 0.05)
    seen = DRIVERS[driver].seen

    async def played(mode: str, outer: str, inner: str) -> None:
        async with DRIVERS[driver].opened(address) as environment:
            nest, gate = Nest(environment, mode), Gate()
            await nest.redelivered(f"first of {mode}")

            async def ends_late() -> None:
                await gate()
                # A session that is closed takes another connection by itself, which nobody would give back.
                assert "session" not in driver

            async def leave_it(tx: Any) -> None:
                _tasks.add(asyncio.create_task(nest.nested(tx, inner, ends_late)))
                await gate.inside.wait()

            with pytest.raises(Exception) as told:  # noqa: PT011 - a caller's own block finds its connection closed
                await nest.around(outer, leave_it)
            assert any("still running" in str(error) for error in causes_of(told.value))
            assert mode == "within" or isinstance(told.value, UsageError)
            gate.may_go.set()
            (late,) = await asyncio.gather(*_tasks, return_exceptions=True)

            assert isinstance(late, Exception), "it has worked on a connection that is not its own any more"
            assert seen(address, outer) == seen(address, inner) == (0, 0)
            await nest.redelivered(inner)
            assert seen(address, inner) == (1, 1)
            _tasks.clear()

    in_time(played("transactional", "o1", "i1"))
    in_time(played("within", "o2", "i2"))


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__


@pytest.mark.parametrize("driver", ["psycopg", "asyncmy", "sqlite"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_delivery_waits_for_its_nested_ones_and_nothing_is_committed(
    driver: str, times: int, address: str
) -> None:
    seen = DRIVERS[driver].seen

    async def played() -> None:
        async with DRIVERS[driver].opened(address) as environment:
            nest, gate = Nest(environment, "transactional"), Gate()
            await nest.redelivered("first")

            async def leave_it(tx: Any) -> None:
                _tasks.add(asyncio.create_task(nest.nested(tx, "i1", gate)))
                await asyncio.Event().wait()

            around = asyncio.create_task(nest.around("o1", leave_it))
            await gate.inside.wait()
            gate.open_soon()
            for _ in range(times):
                around.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await around

            assert all(task.done() for task in _tasks)
            assert seen(address, "o1") == seen(address, "i1") == (0, 0)
            await nest.around("o1", lambda tx: nest.nested(tx, "i1", nothing))
            assert seen(address, "o1") == seen(address, "i1") == (1, 1)

    in_time(played())


@pytest.mark.parametrize("driver", ["sqlite"])
def test_a_delivery_that_is_cancelled_while_it_waits_for_its_nested_ones_is_rolled_back(
    driver: str, address: str
) -> None:
    seen = DRIVERS[driver].seen

    async def played() -> None:
        async with DRIVERS[driver].opened(address) as environment:
            nest, gate = Nest(environment, "transactional"), Gate()

            async def leave_it(tx: Any) -> None:
                _tasks.add(asyncio.create_task(nest.nested(tx, "i1", gate)))
                await gate.inside.wait()
                asyncio.get_running_loop().call_soon(around.cancel)

            around = asyncio.create_task(nest.around("o1", leave_it))
            await gate.inside.wait()
            gate.open_soon()
            with pytest.raises(asyncio.CancelledError):
                await around

            assert seen(address, "o1") == seen(address, "i1") == (0, 0)

    in_time(played())


@pytest.mark.parametrize("driver", ["psycopg", "sqlite", pytest.param("asyncpg", marks=pytest.mark.more)])
@pytest.mark.parametrize("mode", ["transactional", "within"])
def test_nested_deliveries_run_one_after_the_other_and_their_own_nested_ones_do_not_wait_for_them(
    driver: str, mode: str, address: str
) -> None:
    seen, running, together = DRIVERS[driver].seen, 0, 0

    async def counted() -> None:
        nonlocal running, together
        running += 1
        together = max(together, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1

    async def played() -> None:
        async with DRIVERS[driver].opened(address) as environment:
            nest = Nest(environment, mode)
            await nest.redelivered("first")

            async def two_levels(tx: Any) -> None:
                async def deeper(message: str) -> None:
                    await counted()
                    await nest.nested(tx, f"{message} inside", nothing)

                await asyncio.gather(
                    *(nest.nested(tx, message, partial(deeper, message)) for message in ("a", "b", "a"))
                )

            await nest.around("o1", two_levels)

    in_time(played())

    assert together == 1
    for message in ("o1", "a", "b", "a inside", "b inside"):
        assert seen(address, message) == (1, 1)


@pytest.mark.parametrize("driver", ["sqlite"])
def test_what_waits_for_its_turn_when_the_handler_fails_does_not_run(driver: str, address: str) -> None:
    ran: list[str] = []

    async def played() -> None:
        async with DRIVERS[driver].opened(address) as environment:
            nest, gate = Nest(environment, "transactional"), Gate()

            async def waiting() -> None:
                ran.append("waiting")

            async def fail(tx: Any) -> None:
                _tasks.add(asyncio.create_task(nest.nested(tx, "i1", gate)))
                await gate.inside.wait()
                second = asyncio.create_task(nest.nested(tx, "i2", waiting))
                _tasks.add(second)
                await asyncio.sleep(0)
                gate.open_soon()
                raise ValueError("no")

            with pytest.raises(ValueError, match="no"):
                await nest.around("o1", fail)
            (refused,) = [error for error in await asyncio.gather(*_tasks, return_exceptions=True) if error]
            assert isinstance(refused, UsageError)
            assert "Await everything that a handler starts" in str(refused)

    in_time(played())
    assert ran == []


@pytest.mark.parametrize("driver", ["sqlite"])
def test_a_task_that_begins_its_delivery_after_the_handler_has_ended_has_a_transaction_of_its_own(
    driver: str, address: str
) -> None:
    async def played() -> None:
        async with DRIVERS[driver].opened(address) as environment:
            nest, over = Nest(environment, "transactional"), asyncio.Event()

            async def later(tx: Any) -> None:
                await over.wait()
                await nest.nested(tx, "i1", nothing)

            async def fail(tx: Any) -> None:
                _tasks.add(asyncio.create_task(later(tx)))
                raise ValueError("no")

            with pytest.raises(ValueError, match="no"):
                await nest.around("o1", fail)
            over.set()
            await asyncio.gather(*_tasks)

    in_time(played())
    assert DRIVERS[driver].seen(address, "o1") == (0, 0)
    assert DRIVERS[driver].seen(address, "i1") == (1, 1)


@pytest.mark.parametrize("mode", ["transactional", "within", "fresh"])
def test_a_delivery_in_another_thread_than_the_handler_around_it_is_refused(mode: str, tmp_path: Any) -> None:
    path = str(tmp_path / "wallet.db")
    prepare("path", path)
    ran: list[str] = []
    with Guard(f"sqlite:///{path}") as guard, ThreadPoolExecutor(1) as threads:

        @guard.transactional("inner", key="message")
        def inner(message: str, *, tx: Any) -> None:
            ran.append(message)

        def nested(tx: Any) -> Any:
            if mode == "transactional":
                return inner("i1")  # type: ignore[call-arg]
            within = guard.within(tx)
            return within.fresh("inner", ["i1"], key=str) if mode == "fresh" else within.run("inner", "i1", list)

        @guard.transactional("outer", key="message")
        def outer(message: str, *, tx: Any) -> None:
            tx.execute("INSERT INTO effects VALUES (?)", (message,))
            threads.submit(contextvars.copy_context().run, nested, tx).result(PATIENCE)

        with pytest.raises(UsageError, match="in a different thread"):
            outer("o1")  # type: ignore[call-arg]
        # The same thread, and a context of its own in another one, are right.
        threads.submit(contextvars.Context().run, inner, "i1").result(PATIENCE)  # type: ignore[arg-type]

    assert ran == ["i1"]
    assert DRIVERS["sqlite"].seen(path, "o1") == (0, 0)
