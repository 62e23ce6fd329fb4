"""Many bounds of an event loop on one timer: each is called when its time comes, unless its wait has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from onefold._concurrency import deadlines as tested
from onefold._concurrency.deadlines import Deadlines, deadlines
from onefold._concurrency.interrupts import NotAnswered, _in_its_lease

T = TypeVar("T")

NAME: ContextVar[str] = ContextVar("NAME", default="nobody's")


class Clock:
    """A loop whose time is moved by hand, and which counts the timers that are set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.set = 100.0, list[tuple[float, Callable[[], None]]]()
        monkeypatch.setattr(tested, "asyncio", SimpleNamespace(get_running_loop=lambda: self))

    def time(self) -> float:
        return self.now

    def call_at(self, moment: float, call: Callable[[], None], **_: Any) -> Clock:
        self.set.append((moment, call))
        return self

    def cancel(self) -> None:
        self.set.clear()

    def move_to_the_timer(self) -> None:
        self.now, look = self.set.pop()
        look()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_many_bounds_set_one_timer(clock: Clock) -> None:
    bounds = Deadlines()
    timers = []
    for _ in range(1_000):
        bounds.remove(bounds.add(30.0, pytest.fail))
        clock.now += 0.01
        timers.append(len(clock.set))

    assert set(timers) == {1}
    clock.move_to_the_timer()
    assert clock.set == []


def test_each_is_called_in_its_time_and_once(clock: Clock) -> None:
    bounds, called = Deadlines(), list[tuple[str, float]]()
    for name, seconds in (("long", 30.0), ("short", 1.0), ("removed", 2.0), ("middle", 3.0)):
        bound = bounds.add(seconds, partial(lambda name: called.append((name, clock.now)), name))
        if name == "removed":
            bounds.remove(bound)
    while clock.set:
        clock.move_to_the_timer()

    assert called == [("short", 101.0), ("middle", 103.0), ("long", 130.0)]


def test_what_is_over_may_set_another_bound(clock: Clock) -> None:
    bounds, called = Deadlines(), list[float]()
    bounds.add(1.0, lambda: bounds.add(1.0, lambda: called.append(clock.now)))
    while clock.set:
        clock.move_to_the_timer()

    assert called == [102.0]


def test_a_loop_has_bounds_of_its_own_and_they_belong_to_no_delivery() -> None:
    async def story() -> Deadlines:
        heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        NAME.set("a delivery's")
        assert deadlines() is deadlines()
        deadlines().add(0.0, lambda: heard.set_result(NAME.get()))
        assert await heard == "nobody's"
        return deadlines()

    assert asyncio.run(story()) is not asyncio.run(story())


async def bounded(sent: Awaitable[T], left: float) -> T:
    task = asyncio.current_task()
    assert task is not None
    try:
        return await _in_its_lease(sent, left, task)
    finally:
        assert not deadlines()._due


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


def test_an_operation_is_given_up_when_its_lease_is_over() -> None:
    async def story() -> int:
        with pytest.raises(NotAnswered):
            await bounded(asyncio.Event().wait(), 0.001)
        return cancelling()

    assert asyncio.run(story()) == 0


def test_the_operations_own_timeout_is_not_the_end_of_a_lease() -> None:
    async def slow() -> None:
        async with asyncio.timeout(0.0):
            await asyncio.Event().wait()

    async def story() -> None:
        with pytest.raises(TimeoutError):
            await bounded(slow(), 60.0)

    asyncio.run(story())


def test_a_cancellation_of_the_task_is_not_the_end_of_a_lease() -> None:
    async def story() -> None:
        task = asyncio.ensure_future(bounded(asyncio.Event().wait(), 60.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(story())


@pytest.mark.parametrize("raises", [True, False])
def test_a_cancellation_at_the_end_of_a_lease_that_a_library_swallows_is_taken_back(raises: bool) -> None:
    async def swallowing() -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if raises:
            raise LookupError
        return "answered after all"

    async def story() -> int:
        if raises:
            with pytest.raises(LookupError):
                await bounded(swallowing(), 0.001)
        else:
            assert await bounded(swallowing(), 0.001) == "answered after all"
        return cancelling()

    assert asyncio.run(story()) == 0


def test_whoever_cancels_as_the_lease_ends_is_heard() -> None:
    async def story() -> None:
        async def twice() -> None:
            task = asyncio.current_task()
            assert task is not None
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                task.cancel()
                raise

        task = asyncio.ensure_future(bounded(twice(), 0.001))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())
