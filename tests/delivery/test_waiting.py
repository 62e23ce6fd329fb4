"""Duplicates that wait are woken by the owner, and one look serves all who wait in its process."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Held, InProgress
from onefold._concurrency import waiters
from onefold._concurrency.waiters import ROOMS, AwaitingWaiter, BlockingWaiter, Waiter
from onefold._delivery.waiting.patience import waiting_for
from onefold._model import Claim, Ending, Entry, Record, State
from onefold.keys import address
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.delivery.waiting_tools import CHARGE, LONG, NEVER, until, waiting, without_polls  # noqa: F401 - a fixture
from tests.processes import exit_code
from tests.support import PATIENCE, AsyncProxyStore, Elsewhere, Handler, ProxyStore, eventually, in_time

CROWD = 16


class Gate:
    """A handler that has started, and goes on when it may."""

    def __init__(self, value: Any = "charged", error: Exception | None = None) -> None:
        self.started, self.may_end = threading.Event(), threading.Event()
        self.starts = 0
        self._value, self._error = value, error

    def __call__(self) -> Any:
        self.starts += 1
        self.started.set()
        assert self.may_end.wait(PATIENCE)
        if self._error is not None and self.starts == 1:
            raise self._error
        return self._value


def run(guard: Guard, call: Callable[[], Any], **options: Any) -> Any:
    return guard.run("charge", "pay_1", call, wait=LONG, **options)


@pytest.mark.usefixtures("without_polls")
def test_who_waits_in_the_same_process_is_woken_by_the_owner_and_one_look_serves_all() -> None:
    store, gate, duplicate = ProxyStore(), Gate(), Handler()
    with Guard(store) as guard:
        owner = Elsewhere(lambda: run(guard, gate))
        assert gate.started.wait(PATIENCE)
        crowd = [Elsewhere(lambda: run(guard, duplicate)) for _ in range(CROWD)]
        assert eventually(lambda: waiting() == CROWD)
        gate.may_end.set()

        assert [one.result().value for one in (owner, *crowd)] == ["charged"] * (CROWD + 1)

    assert duplicate.starts == 0
    assert store.count("claim") == 1 + CROWD + 1
    assert not ROOMS


@pytest.mark.usefixtures("without_polls")
def test_tasks_that_wait_are_woken_by_the_owner_and_one_look_serves_all() -> None:
    store = AsyncProxyStore()

    async def story() -> list[Any]:
        may_end = asyncio.Event()

        async def handler() -> str:
            await may_end.wait()
            return "charged"

        async with AsyncGuard(store) as guard:
            tasks = [asyncio.create_task(guard.run("charge", "pay_1", handler, wait=LONG)) for _ in range(CROWD + 1)]
            await until(lambda: waiting() == CROWD)
            may_end.set()
            return await asyncio.gather(*tasks)

    outcomes = in_time(story())

    assert [outcome.value for outcome in outcomes] == ["charged"] * (CROWD + 1)
    assert store.count("claim") == 1 + CROWD + 1
    assert not ROOMS


@pytest.mark.usefixtures("without_polls")
def test_of_those_who_are_woken_by_a_release_one_runs_and_the_others_wait_on() -> None:
    store, inside, again = ProxyStore(), Gate(error=ValueError("declined")), Gate()
    with Guard(store) as guard:
        owner = Elsewhere(lambda: run(guard, inside))
        assert inside.started.wait(PATIENCE)
        crowd = [Elsewhere(lambda: run(guard, again)) for _ in range(CROWD)]
        assert eventually(lambda: waiting() == CROWD)
        inside.may_end.set()
        with pytest.raises(ValueError, match="declined"):
            owner.result()
        assert again.started.wait(PATIENCE)
        assert eventually(lambda: waiting() == CROWD - 1)
        # The owner, everybody once, and the one that was woken: nobody else has looked.
        assert store.count("claim") == 1 + CROWD + 1
        again.may_end.set()

        assert [one.result().value for one in crowd] == ["charged"] * CROWD

    assert again.starts == 1
    assert not ROOMS


@pytest.mark.usefixtures("without_polls")
def test_who_waits_for_a_new_run_is_not_handed_the_answer_of_a_forgotten_one() -> None:
    store, first, second = ProxyStore(), Gate("first"), Gate("second")
    asked, may_know = threading.Event(), threading.Event()

    def hold_the_answer() -> None:
        asked.set()
        assert may_know.wait(PATIENCE)

    with Guard(store) as guard:
        owner = Elsewhere(lambda: run(guard, first))
        assert first.started.wait(PATIENCE)
        early = Elsewhere(lambda: run(guard, Handler()))
        assert eventually(lambda: waiting() == 1)
        store.after["claim"] = hold_the_answer
        first.may_end.set()
        assert owner.result().value == "first"
        assert asked.wait(PATIENCE)

        # It has ended, and the one who has looked does not know it yet.
        guard.forget("charge", "pay_1")
        new_owner = Elsewhere(lambda: run(guard, second))
        assert second.started.wait(PATIENCE)
        late = Elsewhere(lambda: run(guard, Handler()))
        assert eventually(lambda: waiting() == 2)
        may_know.set()
        assert early.result().value == "first"
        assert eventually(lambda: waiting() == 1)
        second.may_end.set()

        assert (new_owner.result().value, late.result().value) == ("second", "second")
    assert not ROOMS


def found_done(token: bytes) -> Record:
    store = MemoryStore()
    store.claim(Entry(address=CHARGE, token=token, lease=30))
    store.finish(Claim(CHARGE, token), Ending(state=State.DONE, ttl=60))
    found = store.read(CHARGE)
    assert found is not None
    return found


def test_what_was_handed_before_a_look_of_ones_own_found_another_owner_is_dropped() -> None:
    store, ends = object(), time.monotonic() + PATIENCE
    looking, other = BlockingWaiter(CHARGE, store), BlockingWaiter(CHARGE, store)
    for one in (looking, other):
        one.waits_for(b"1" * 16)
        one.has_looked(time.monotonic())

    looking.share(found_done(b"1" * 16), ended=True)
    other.waits_for(b"2" * 16)

    assert other.handed() is None
    looking.share(found_done(b"3" * 16), ended=True)
    assert other.pause_left(NEVER, ends) == 0
    assert other.handed() is None
    looking.share(found_done(b"2" * 16), ended=True)
    assert other.handed().token == b"2" * 16
    for one in (looking, other):
        one.leave()


@pytest.mark.usefixtures("without_polls")
def test_an_ending_that_is_held_wakes_too() -> None:
    with Guard(MemoryStore()) as guard:
        gate = Gate(error=TimeoutError("no answer"))
        owner = Elsewhere(lambda: run(guard, gate, after_crash="hold"))
        assert gate.started.wait(PATIENCE)
        other = Elsewhere(lambda: run(guard, Handler(), after_crash="hold"))
        assert eventually(lambda: waiting() == 1)
        gate.may_end.set()

        for one in (owner, other):
            with pytest.raises((TimeoutError, Held)):
                one.result()

    assert not ROOMS


@pytest.mark.usefixtures("without_polls")
def test_a_thread_is_woken_by_a_task_and_a_task_by_a_thread(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    gate, may_end = Gate("by a thread"), threading.Event()

    async def tasks() -> Any:
        async with AsyncGuard(url) as there:
            by_thread = await there.run("charge", "pay_1", Handler(), wait=LONG)

            async def handler() -> str:
                await until(may_end.is_set)
                return "by a task"

            return by_thread, await there.run("charge", "pay_2", handler)

    with Guard(url) as here:
        owner = Elsewhere(lambda: run(here, gate))
        assert gate.started.wait(PATIENCE)
        loop = Elsewhere(lambda: in_time(tasks()))
        assert eventually(lambda: waiting() == 1)
        gate.may_end.set()
        owner.result()
        assert eventually(lambda: here.store.read(address("charge", "pay_2")) is not None)
        waits = Elsewhere(lambda: here.run("charge", "pay_2", Handler(), wait=LONG))
        assert eventually(lambda: waiting(address("charge", "pay_2")) == 1)
        may_end.set()
        by_task = waits.result()
        by_thread, ran = loop.result()

    assert (by_thread.value, by_thread.replayed) == ("by a thread", True)
    assert (by_task.value, by_task.replayed, ran.replayed) == ("by a task", True, False)


def test_without_a_waiter_the_end_of_a_delivery_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiters, "wake", pytest.fail)

    with Guard("memory:") as guard:
        assert run(guard, Handler("charged")).value == "charged"


def test_one_who_looks_and_is_interrupted_leaves_the_look_to_the_next() -> None:
    store = object()
    first, second = BlockingWaiter(CHARGE, store), BlockingWaiter(CHARGE, store)
    for one in (first, second):
        one.has_looked(time.monotonic())
    waiters.wake(CHARGE)
    ends = time.monotonic() + PATIENCE

    assert first.pause_left(NEVER, ends) == 0
    assert second.pause_left(NEVER, ends) > 0
    first.leave()

    assert second.pause_left(NEVER, ends) == 0
    second.leave(runs=True)
    assert not ROOMS


def test_a_waiter_that_an_interrupt_kept_from_leaving_is_forgotten() -> None:
    waiter: Waiter | None = BlockingWaiter(CHARGE, object())
    assert waiting() == 1

    del waiter
    gc.collect()
    waiters.wake(CHARGE)

    assert not ROOMS


def test_a_task_whose_loop_is_closed_is_woken_in_vain() -> None:
    loop = asyncio.new_event_loop()

    async def enter() -> AwaitingWaiter:
        return AwaitingWaiter(CHARGE, "a store")

    waiter = loop.run_until_complete(enter())
    loop.close()
    other = BlockingWaiter(CHARGE, "a store")
    waiters.wake(CHARGE)

    assert other.pause_left(NEVER, time.monotonic() + PATIENCE) == 0
    waiter.leave()
    other.leave()
    assert not ROOMS


def test_a_cancelled_task_leaves_and_touches_nothing() -> None:
    store = AsyncMemoryStore()

    async def story() -> None:
        async with AsyncGuard(store) as guard:
            await store.claim(Entry(address=CHARGE, token=b"o" * 16, lease=30))
            before = await store.read(CHARGE)
            task = asyncio.create_task(guard.run("charge", "pay_1", Handler(), wait=LONG))
            await until(lambda: waiting() == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            after = await store.read(CHARGE)
            assert before is not None
            assert after is not None
            assert (after.token, after.revision) == (before.token, before.revision)

    in_time(story())

    assert not ROOMS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_forgets_the_parents_waiters() -> None:
    waiter = BlockingWaiter(CHARGE, object())
    child = os.fork()
    if child == 0:
        os._exit(3 if ROOMS else 0)

    assert exit_code(child) == 0
    assert waiting() == 1
    waiter.leave()


def test_one_who_waits_for_an_owner_that_is_killed_takes_over_when_the_lease_ends() -> None:
    store = MemoryStore()
    store.claim(Entry(address=CHARGE, token=b"o" * 16, lease=0.05))
    handler = Handler("again")

    with Guard(store) as guard:
        outcome = run(guard, handler)

    assert (outcome.value, handler.starts) == ("again", 1)


def test_one_who_is_not_woken_looks_by_itself() -> None:
    """A lost wake-up costs time, and nothing else: the owner is not in this process, and tells nobody."""
    store = MemoryStore()
    claim = Claim(CHARGE, b"o" * 16)
    store.claim(Entry(address=CHARGE, token=claim.token, lease=30))
    with Guard(store) as guard:
        one = Elsewhere(lambda: run(guard, Handler()))
        assert eventually(lambda: waiting() == 1)
        store.finish(claim, Ending(state=State.DONE, ttl=60, omitted=True))

        assert one.result().replayed


def test_a_waiter_that_gives_up_is_refused_after_a_last_look() -> None:
    store = ProxyStore()
    store.claim(Entry(address=CHARGE, token=b"o" * 16, lease=30))

    with Guard(store) as guard, pytest.raises(InProgress):
        guard.run("charge", "pay_1", Handler(), wait=0.001)

    assert store.count("claim") == 1 + 2
    assert not ROOMS


def polls_of_one(seconds: float) -> int:
    """How often each one looked when nobody was woken: after 5 ms, then a quarter of its wait, at most 250 ms."""
    looks, waited = 1, 0.0
    while waited < seconds:
        waited += min(max(0.005, waited / 4), 0.25)
        looks += 1
    return looks


class Idle(Waiter):
    """A waiter in a simulated time."""

    def notify(self) -> None:
        """It is asked at every step of the clock."""


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("seconds", [1.0, 5.0, 20.0])
def test_sixty_four_waiters_cost_the_store_a_tenth_of_the_looks(
    seconds: float, *, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the same time of the handler, whether the end is told of or not."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store, number = object(), 64
    found = Record(CHARGE, b"o" * 16, 1, State.RUNNING, 1, lease_left=30.0, ttl_left=60.0, age=0.0)
    crowd = [Idle(CHARGE, store) for _ in range(number)]
    looks = number
    while now[0] < seconds:
        now[0] += 0.005
        for one in crowd:
            step = waiting_for(found, now[0], 60.0, 30.0)
            if one.pause_left(step.seconds_told if told else step.seconds, 60.0) == 0:
                looks += 1
                one.has_looked(now[0])
    looks += 1
    for one in crowd:
        one.leave()

    assert looks * 10 <= polls_of_one(seconds) * number


def test_a_store_that_falls_silent_while_it_is_asked_is_asked_again() -> None:
    """Its answer may come after the loss of the connection that gave it."""
    waiter = BlockingWaiter(CHARGE, MemoryStore())
    assert waiter.asks_the_store()

    waiters.nobody_tells(CHARGE)
    waiter.is_told(told=True)

    assert waiter.asks_the_store()
    waiter.leave()


class Telling(MemoryStore):
    """A store that tells of endings, and notes which."""

    def __init__(self) -> None:
        super().__init__()
        self.listened: list[Any] = []

    def unlisten(self, address: Any) -> None:
        self.listened.remove(address)


@pytest.mark.parametrize("answer", ["yes", "no", "interrupted", "lost"])
def test_a_store_that_was_asked_to_tell_is_told_when_nobody_waits_any_more(answer: str) -> None:
    """Whatever it has answered: it may have subscribed all the same, and would stay subscribed without an end."""
    store, other = Telling(), BlockingWaiter(CHARGE, Telling())
    waiter = BlockingWaiter(CHARGE, store)
    assert waiter.asks_the_store()
    store.listened.append(CHARGE)
    if answer in ("yes", "no"):
        waiter.is_told(answer == "yes")
    elif answer == "lost":
        waiters.nobody_tells(CHARGE)

    waiter.leave()

    assert store.listened == []
    other.leave()
    assert not ROOMS


def test_who_enters_as_the_last_one_leaves_asks_the_store_again() -> None:
    entered: list[Waiter] = []

    class Late(Telling):
        def unlisten(self, address: Any) -> None:
            entered.append(BlockingWaiter(CHARGE, self))
            assert entered[0].asks_the_store()
            entered[0].is_told(told=True)
            super().unlisten(address)

    store = Late()
    waiter = BlockingWaiter(CHARGE, store)
    assert waiter.asks_the_store()
    store.listened.append(CHARGE)
    waiter.leave()

    assert entered[0].asks_the_store()
    store.unlisten = lambda address: None  # type: ignore[method-assign]
    entered[0].leave()
