"""The pools of connections: whatever interrupts a thread, and from however many event loops they are used."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, TypeVar

import pytest

from onefold import Guard, StoreUnavailable
from onefold.stores.sql.connection import TransactionStatus
from onefold.stores.sql.pool import AsyncPool, AsyncReserve, Pool
from onefold.stores.sql.pool import slots as _slots
from onefold.stores.sql.pool import threads as _threads
from tests.support import PATIENCE, Elsewhere, eventually

# What `threading` has written in Python is interrupted, too.
OURS = {_slots.__file__, _threads.__file__, threading.__file__}

T = TypeVar("T")

# More than a pool has lines to go through: a bound for the loop over them.
LINES_MAX = 500


class FakeConnection:
    """A connection that is always idle."""

    connection: Any = None

    def __init__(self) -> None:
        self.closed = 0

    def transaction_status(self) -> TransactionStatus:
        return TransactionStatus.IDLE

    def close(self) -> None:
        self.closed += 1


class AsyncFakeConnection(FakeConnection):
    async def close(self) -> None:  # type: ignore[override]
        self.closed += 1

    def abandon(self) -> None:
        self.closed += 1


class Strike:
    """A KeyboardInterrupt at the n-th line of a pool."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.where = ""

    @contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._look if frame.f_code.co_filename in OURS else None

    def _look(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event in ("line", "return"):
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                self.where = f"{event} of {frame.f_code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._look


def pool_of(size: int, patience: float = PATIENCE) -> Pool:
    connect: Any = FakeConnection
    return Pool(connect, size=size, patience=patience)


def stands_in_line(pool: Pool, number: int) -> bool:
    return len(pool._slots._queue) == number


def use(pool: Pool) -> None:
    with pool.acquire():
        pass


# What strikes as a generator is closed that nobody goes through is heard by nobody.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wherever_an_interrupt_strikes_the_next_one_has_its_connection() -> None:
    for at in count(1):
        pool, strike = pool_of(1, patience=0), Strike(at)
        try:
            with strike.armed():
                use(pool)
        except KeyboardInterrupt:
            pass
        if not strike.where:
            break
        assert at < LINES_MAX, strike.where
        try:
            # In another thread, so that a place which is lost for ever fails, and does not hang.
            Elsewhere(partial(use, pool)).result()
        except (AssertionError, StoreUnavailable) as error:
            raise AssertionError(f"struck at {strike.where} ({at})") from error

    assert at > 20


def test_an_interrupt_that_keeps_an_operation_from_leaving_does_not_keep_its_slot(postgres_url: str) -> None:
    """Its traceback holds the waiter; the operation is sent again at once, and would wait for itself."""

    def strike(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code is _slots.Slots.leave.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    gc.disable()
    try:
        with Guard(f"{postgres_url}?pool_size=1") as guard:
            guard.run("charge", "before", lambda: None)
            sys.setprofile(strike)
            with pytest.raises(KeyboardInterrupt):
                guard.run("charge", "struck", lambda: None)
            assert guard.run("charge", "after", lambda: 1).value == 1
    finally:
        sys.setprofile(None)
        gc.enable()


def test_those_who_wait_for_a_connection_get_it_in_the_order_in_which_they_came() -> None:
    pool, came = pool_of(2), list[int]()

    def user(number: int) -> None:
        with pool.acquire():
            came.append(number)

    with pool.acquire(), pool.acquire():
        waiting = []
        for number in range(4):
            waiting.append(Elsewhere(partial(user, number)))
            assert eventually(partial(stands_in_line, pool, number + 3))
        assert came == []
    for one in waiting:
        one.result()

    assert sorted(came) == [0, 1, 2, 3]
    assert came[0] in (0, 1)
    assert not pool._slots._queue


def test_who_waits_in_vain_is_told_and_leaves_the_line() -> None:
    pool = pool_of(1, patience=0.01)
    with pool.acquire():
        with pytest.raises(StoreUnavailable, match="all 1 connections"):
            use(pool)
        assert len(pool._slots._queue) == 1
    use(pool)


class Loops:
    """Event loops that live at the same time, each in a thread of its own."""

    def __init__(self, number: int) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(number)]
        self.loops = [asyncio.new_event_loop() for _ in range(number)]

    def run(self, number: int, story: Coroutine[Any, Any, T]) -> T:
        return self._threads[number].submit(self.loops[number].run_until_complete, story).result(PATIENCE)

    def end(self, number: int) -> None:
        self.run(number, self.loops[number].shutdown_asyncgens())
        self.loops[number].close()

    def close(self) -> None:
        for number, loop in enumerate(self.loops):
            if not loop.is_closed():
                self.end(number)
            self._threads[number].shutdown()


@pytest.fixture
def loops() -> Iterator[Loops]:
    found = Loops(2)
    yield found
    found.close()


class Opened:
    """All connections that a pool has opened."""

    def __init__(self) -> None:
        self.connections: list[AsyncFakeConnection] = []

    async def __call__(self) -> Any:
        await asyncio.sleep(0)
        self.connections.append(AsyncFakeConnection())
        return self.connections[-1]


async def use_async(pool: AsyncPool) -> Any:
    async with pool.acquire() as conn:
        return conn


@pytest.mark.parametrize("kind", [AsyncPool, AsyncReserve])
def test_event_loops_that_use_one_pool_in_turn_have_a_connection_each(kind: type[AsyncPool], loops: Loops) -> None:
    opened = Opened()
    pool = kind(opened)

    lent = [loops.run(number % 2, use_async(pool)) for number in range(10)]

    assert lent == opened.connections * 5
    assert len(opened.connections) == 2
    loops.end(0)
    # A loop that ends closes its own, and no other.
    assert [conn.closed for conn in opened.connections] == [1, 0]
    assert loops.run(1, use_async(pool)) is opened.connections[1]


def test_a_reserve_is_let_go_in_one_event_loop_and_held_in_the_other(loops: Loops) -> None:
    reserve = AsyncReserve(Opened())

    async def is_held() -> bool:
        return reserve.is_held

    for number in range(2):
        assert not loops.run(number, is_held())
        loops.run(number, use_async(reserve))
    loops.run(0, reserve.let_go())

    assert [loops.run(number, is_held()) for number in range(2)] == [False, True]


def test_the_connections_of_a_loop_that_was_closed_abruptly_are_abandoned_by_the_next(loops: Loops) -> None:
    class NeedsItsLoop(AsyncFakeConnection):
        def abandon(self) -> None:
            super().abandon()
            raise RuntimeError("Event loop is closed")

    opened: list[AsyncFakeConnection] = []

    async def open_one() -> Any:
        opened.append(NeedsItsLoop())
        return opened[-1]

    async def use_two(pool: AsyncPool) -> None:
        async with pool.acquire(), pool.acquire():
            pass

    pool = AsyncPool(open_one)
    loops.run(0, use_two(pool))
    loops.loops[0].close()

    loops.run(1, use_async(pool))

    assert [conn.closed for conn in opened] == [1, 1, 0]
    assert list(pool._shares) == [loops.loops[1]]
    left = [weakref.ref(conn) for conn in opened[:2]]
    del opened[:2]
    gc.collect()
    # Nobody keeps them: the server would, too, until the process ends.
    assert [conn() for conn in left] == [None, None]


def test_another_process_leaves_all_of_them_alone(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened()
    pool = AsyncPool(opened)
    for number in range(2):
        loops.run(number, use_async(pool))
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)

    loops.run(0, use_async(pool))
    loops.run(0, pool.drop_idle())

    assert [conn.closed for conn in opened.connections] == [0, 0, 1]


async def hold(pool: AsyncPool, came: list[int], number: int) -> None:
    async with pool.acquire():
        came.append(number)
        await asyncio.sleep(0)


def test_tasks_that_wait_for_a_connection_get_it_in_the_order_in_which_they_came() -> None:
    pool, came = AsyncPool(Opened(), size=2), list[int]()

    async def story() -> None:
        async with pool.acquire(), pool.acquire():
            tasks = [asyncio.ensure_future(hold(pool, came, number)) for number in range(6)]
            await asyncio.sleep(0)
            assert came == []
        await asyncio.gather(*tasks)

    asyncio.run(story())

    assert came == [0, 1, 2, 3, 4, 5]


def test_a_task_that_waits_in_vain_is_told_and_costs_no_connection() -> None:
    pool = AsyncPool(Opened(), size=1, patience=0.01)

    async def story() -> None:
        async with pool.acquire():
            with pytest.raises(StoreUnavailable, match="all 1 connections"):
                await use_async(pool)
            with pytest.raises(StoreUnavailable, match=r"no connection within 0\.001s, an eighth"):
                async with pool.soon(0.001):
                    pass
        await use_async(pool)

    asyncio.run(story())


def test_a_connection_that_opens_too_slowly_for_an_ending_is_told_and_costs_no_place() -> None:
    opened, silent = Opened(), asyncio.Event()

    async def connect() -> Any:
        if not opened.connections:
            await silent.wait()
        return await opened()

    pool = AsyncPool(connect, size=1)

    async def story() -> None:
        with pytest.raises(StoreUnavailable, match=r"no connection within 0\.01s, an eighth"):
            async with pool.soon(0.01):
                pass
        silent.set()
        await use_async(pool)

    asyncio.run(story())


@pytest.mark.parametrize("moment", range(4))
@pytest.mark.parametrize("times", [1, 2])
def test_a_task_that_is_cancelled_as_it_waits_or_is_served_leaves_its_place_to_the_next(
    moment: int, times: int
) -> None:
    """The first moment is before it stands in line, the last one when it has its connection."""
    pool, came = AsyncPool(Opened(), size=1), list[int]()

    async def story() -> None:
        async with pool.acquire():
            first, second = (asyncio.ensure_future(hold(pool, came, number)) for number in range(2))
            if moment > 0:
                await asyncio.sleep(0)
            if moment == 1:
                first.cancel()
        # Its place was handed over here, and it does not know yet.
        if moment > 2:
            await asyncio.sleep(0)
        for _ in range(times):
            first.cancel()
        await asyncio.wait({first, second})
        assert first.cancelled()
        await use_async(pool)

    asyncio.run(asyncio.wait_for(story(), PATIENCE))

    assert came == ([0, 1] if moment == 3 else [1])
