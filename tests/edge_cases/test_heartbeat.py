"""Rows 2, 5 and 11 of the edge cases: what the heartbeat keeps alive, and how a handler learns that it did not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from onefold import AsyncGuard, ClaimLost, Guard, InProgress, Outcome, Policy, current
from onefold._model import Record
from onefold.keys import address
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import (
    PATIENCE,
    AsyncProxyStore,
    Clock,
    Heard,
    ProxyStore,
    die_running,
    elsewhere,
    eventually,
    in_time,
)

Stall = Callable[[float], None]

CHARGE = address("charge", "pay_1")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


def charge(guard: Guard, call: Callable[[], Any] = lambda: "ok") -> Outcome[Any]:
    return guard.run("charge", "pay_1", call)


def record(store: MemoryStore) -> Record:
    found = store.read(CHARGE)
    assert found is not None
    return found


def test_the_heartbeat_keeps_the_claim_of_a_handler_that_outlives_its_lease(
    clock: Clock, store: MemoryStore, long_lease: float
) -> None:
    proxy = ProxyStore(store)
    guard = Guard(proxy, policy=Policy(lease=long_lease))
    refusals = []

    def handler() -> str:
        for _ in range(2):
            clock.advance(long_lease * 0.9)
            # The second answer from here on is that of a beat sent after the clock had moved.
            proxy.wait_for("extend", proxy.count("extend") + 2)
        with pytest.raises(InProgress) as refusal:
            elsewhere(lambda: charge(Guard(store)))
        refusals.append(refusal.value)
        return "slow"

    outcome = charge(guard, handler)

    assert len(refusals) == 1
    assert (outcome.value, outcome.recorded, outcome.attempt) == ("slow", True, 1)


def test_a_zombies_heartbeat_is_refused_and_the_handler_can_see_it(
    clock: Clock, store: MemoryStore, long_lease: float
) -> None:
    proxy = ProxyStore(store)
    guard = Guard(proxy, policy=Policy(lease=long_lease))
    seen: list[Any] = []

    def zombie() -> None:
        clock.advance(long_lease + 1)
        die_running(store, "charge", "pay_1")
        seen.append(record(store))
        # By the worker's own clock the lease is far from over: only the answer to a beat can tell it.
        seen.append(eventually(lambda: current().lost))

    with pytest.raises(ClaimLost):
        charge(guard, zombie)

    owned, lost = seen
    assert lost
    assert ("extend", False) in proxy.answers
    assert (record(store).token, record(store).lease_left) == (owned.token, owned.lease_left)


def test_a_blocked_event_loop_makes_the_lost_claim_visible(clock: Clock, stall: Stall) -> None:
    guard = AsyncGuard(AsyncMemoryStore(clock=clock))

    async def handler() -> tuple[bool, bool]:
        before = current().lost
        stall(31)
        return before, current().lost

    outcome = asyncio.run(guard.run("charge", "pay_1", handler))

    assert outcome.value == (False, True)


def test_by_policy_an_async_handler_is_cancelled_when_its_claim_is_lost(
    clock: Clock, long_lease: float, stall: Stall
) -> None:
    store = AsyncMemoryStore(clock=clock)
    heard = Heard()
    guard = AsyncGuard(store, policy=Policy(lease=long_lease, cancel_when_lost=True), on_event=heard)

    async def zombie() -> None:
        stall(long_lease + 1)
        assert current().lost
        clock.advance(long_lease + 1)
        elsewhere(lambda: charge(Guard(store.sync), lambda: "theirs"))
        await asyncio.wait_for(asyncio.Event().wait(), PATIENCE)

    async def story() -> int:
        with pytest.raises(ClaimLost):
            await guard.run("charge", "pay_1", zombie)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert in_time(story()) == 0
    assert heard.kinds == ["started", "left"]
    assert charge(Guard(store.sync)).value == "theirs"


def test_a_claim_that_ends_while_it_is_being_finished_does_not_cancel_the_finished(
    clock: Clock, long_lease: float
) -> None:
    store = AsyncProxyStore(AsyncMemoryStore(clock=clock))
    guard = AsyncGuard(store, policy=Policy(lease=long_lease, cancel_when_lost=True))

    refused = asyncio.Event()

    async def until_the_beat_is_refused() -> None:
        # A beat that crosses the finish on its way finds the record done: refused, but nothing is lost.
        store.after["extend"] = refused.set
        await refused.wait()
        for _ in range(10):
            await asyncio.sleep(0)

    store.after["finish"] = until_the_beat_is_refused

    async def handler() -> str:
        return "ok"

    outcome = in_time(guard.run("charge", "pay_1", handler))

    assert (outcome.value, outcome.recorded) == ("ok", True)
