"""The main promises, from the front door: one run, one answer, whoever asks, from wherever."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass

import pytest

from onefold import (
    AsyncGuard,
    ClaimLost,
    Guard,
    InProgress,
    Outcome,
    Policy,
    State,
    StoreUnavailable,
    UsageError,
    current,
)
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import (
    PATIENCE,
    AsyncProxyStore,
    BatchingProxyStore,
    Clock,
    Elsewhere,
    Handler,
    Heard,
    ProxyStore,
    elsewhere,
    in_own_context,
    in_time,
)


@dataclass
class Receipt:
    number: int


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


# Whoever asks.


def test_a_duplicate_replays_and_nothing_runs_twice(store: MemoryStore) -> None:
    guard, handler = Guard(store), Handler({"paid": True})

    first, again = (guard.run("charge", "pay_1", handler) for _ in range(2))

    assert (first.value, first.replayed, first.attempt) == ({"paid": True}, False, 1)
    assert (again.value, again.replayed, again.attempt) == ({"paid": True}, True, 1)
    assert handler.starts == 1


def test_after_keep_a_delivery_runs_again(clock: Clock, store: MemoryStore) -> None:
    guard, handler = Guard(store, policy=Policy(keep="1h")), Handler()
    guard.run("charge", "pay_1", handler)

    clock.advance(3_599)
    kept = guard.run("charge", "pay_1", handler)
    clock.advance(2)
    forgotten = guard.run("charge", "pay_1", handler)

    assert (kept.replayed, forgotten.replayed, handler.starts) == (True, False, 2)


def test_two_functions_on_one_store_in_sixteen_threads_run_each_key_exactly_once(store: MemoryStore) -> None:
    guard, threads, keys = Guard(store, policy=Policy(wait=PATIENCE)), 16, 40
    ran: Counter[tuple[str, int]] = Counter()
    counting, all_here = threading.Lock(), threading.Barrier(threads)

    @guard.idempotent("charge", key="number")
    def charge(number: int, amount: int) -> Receipt:
        with counting:
            ran["charge", number] += 1
        return Receipt(number * amount)

    @guard.idempotent("mail", key="number")
    def mail(number: int) -> None:
        with counting:
            ran["mail", number] += 1

    def work() -> list[Receipt]:
        all_here.wait(PATIENCE)
        receipts = []
        for number in range(keys):
            receipts.append(charge(number, amount=3))
            mail(number)
        return receipts

    workers = [Elsewhere(work) for _ in range(threads)]
    results = [worker.result() for worker in workers]

    assert ran == {(name, number): 1 for name in ("charge", "mail") for number in range(keys)}
    assert results == [[Receipt(number * 3) for number in range(keys)]] * threads
    assert len(store) == 2 * keys


at_module_level = AsyncGuard("memory:")


def test_an_async_guard_at_module_level_serves_one_event_loop_after_the_other(long_lease: float) -> None:
    lasting = Policy(lease=long_lease)

    async def story(key: str) -> tuple[Outcome[bool], Outcome[bool]]:
        async def until_a_beat() -> bool:
            first = await at_module_level.read("charge", key)
            assert first is not None
            while (await revision(key)) < first.revision + 2:  # noqa: ASYNC110 - only the heartbeat moves it
                await asyncio.sleep(0.005)
            return current().lost

        own = await at_module_level.run("charge", key, until_a_beat, policy=lasting)
        return own, await at_module_level.run("charge", "first", until_a_beat, policy=lasting)

    first, second = in_time(story("first")), in_time(story("second"))

    assert [outcome.replayed for outcome in (*first, *second)] == [False, True, False, True]
    assert [outcome.value for outcome in (*first, *second)] == [False] * 4


async def revision(key: str) -> int:
    found = await at_module_level.read("charge", key)
    assert found is not None
    return found.revision


# Waiting.


def test_a_duplicate_that_waits_gets_the_answer_of_the_one_that_runs(store: MemoryStore) -> None:
    proxy, heard = ProxyStore(store), Heard()
    inside, may_end = threading.Event(), threading.Event()
    patient = Guard(proxy, policy=Policy(wait=PATIENCE), on_event=heard)

    def slow() -> str:
        inside.set()
        assert may_end.wait(PATIENCE)
        return "first"

    running = Elsewhere(lambda: Guard(store).run("charge", "pay_1", slow))
    assert inside.wait(PATIENCE)
    waiting = Elsewhere(lambda: patient.run("charge", "pay_1", Handler("second")))
    proxy.wait_for("claim", 3)
    may_end.set()

    assert running.result().value == "first"
    outcome = waiting.result()
    assert (outcome.value, outcome.replayed) == ("first", True)
    assert heard.kinds == ["waited", "replayed"]


def test_a_waiting_duplicate_runs_itself_where_the_running_one_fails() -> None:
    store = AsyncProxyStore()
    guard = AsyncGuard(store, policy=Policy(wait=PATIENCE))

    async def story() -> Outcome[str]:
        inside, looked = asyncio.Event(), asyncio.Event()

        async def fails() -> str:
            inside.set()
            await looked.wait()
            raise ValueError("no such card")

        async def works() -> str:
            return "second"

        running = in_own_context(guard.run("charge", "pay_1", fails))
        await inside.wait()
        store.after["claim"] = looked.set
        waiting = in_own_context(guard.run("charge", "pay_1", works))
        with pytest.raises(ValueError, match="no such card"):
            await running
        return await waiting

    outcome = in_time(story())

    assert (outcome.value, outcome.replayed, outcome.attempt) == ("second", False, 1)


def test_without_a_wait_a_duplicate_is_told_to_come_back_soon_whatever_the_lease(store: MemoryStore) -> None:
    guard = Guard(store, policy=Policy(lease="10m"))

    def handler() -> float:
        with pytest.raises(InProgress) as refusal:
            elsewhere(lambda: guard.run("charge", "pay_1", pytest.fail))
        return refusal.value.retry_after

    assert 0 < guard.run("charge", "pay_1", handler).value <= 2


# Steps.


def test_finished_steps_are_not_repeated_by_the_next_attempt(store: MemoryStore) -> None:
    guard, reserve, pay = Guard(store), Handler(7), Handler(error=ValueError("no such card"))

    def handler() -> Receipt:
        reserved = current().step("reserve", reserve)
        paid: Receipt = current().step("pay", pay, returns=Receipt)
        return Receipt(reserved + paid.number)

    with pytest.raises(ValueError, match="no such card"):
        guard.run("charge", "pay_1", handler)
    pay.error, pay.value = None, Receipt(1)
    outcome = guard.run("charge", "pay_1", handler)

    assert (outcome.value, outcome.attempt) == (Receipt(8), 2)
    assert (reserve.starts, pay.starts) == (1, 2)


def test_finished_steps_survive_the_death_of_the_process(clock: Clock, store: MemoryStore) -> None:
    proxy, reserve = ProxyStore(store), Handler([1])

    def handler() -> list[int]:
        reserved: list[int] = current().step("reserve", reserve)
        if current().attempt == 1:
            proxy.die()
            raise KeyboardInterrupt
        return reserved

    with pytest.raises(KeyboardInterrupt):
        Guard(proxy).run("charge", "pay_1", handler)
    clock.advance(31)
    outcome = Guard(store).run("charge", "pay_1", handler)

    assert (outcome.value, outcome.attempt, reserve.starts) == ([1], 2, 1)


def test_async_steps_are_not_repeated_by_the_next_attempt() -> None:
    guard, ran = AsyncGuard("memory:"), Counter[str]()

    async def reserve() -> int:
        ran["reserve"] += 1
        return 7

    async def handler() -> int:
        ran["handler"] += 1
        reserved = await current().step("reserve", reserve)
        if ran["handler"] == 1:
            raise ValueError("no such card")
        return reserved

    async def story() -> Outcome[int]:
        with pytest.raises(ValueError, match="no such card"):
            await guard.run("charge", "pay_1", handler)
        return await guard.run("charge", "pay_1", handler)

    assert in_time(story()).value == 7
    assert ran == {"reserve": 1, "handler": 2}


def test_a_step_of_a_zombie_is_told_that_its_claim_is_lost(clock: Clock, store: MemoryStore) -> None:
    guard = Guard(store)

    def zombie() -> None:
        clock.advance(31)
        elsewhere(lambda: guard.run("charge", "pay_1", lambda: "theirs"))
        current().step("pay", lambda: "mine")

    with pytest.raises(ClaimLost) as lost:
        guard.run("charge", "pay_1", zombie)

    assert lost.value.value == "mine"
    assert guard.run("charge", "pay_1", pytest.fail).value == "theirs"


def test_a_step_whose_result_could_not_be_kept_or_read_says_so_and_does_not_run_again(store: MemoryStore) -> None:
    opaque = Handler(object())
    errors = []

    def handler() -> None:
        current().step("number", lambda: 7, returns=Receipt if current().attempt == 3 else int)
        current().step("opaque", opaque)
        raise ValueError

    for _ in range(3):
        with pytest.raises(Exception) as raised:  # noqa: PT011 - which one is what it is about
            Guard(store).run("charge", "pay_1", handler)
        errors.append(raised.type)

    assert errors == [ValueError, UsageError, UsageError]
    assert opaque.starts == 1


@pytest.mark.parametrize("policy", [Policy(mode="seen"), Policy(store_down="run")], ids=["seen", "store down"])
def test_without_a_claim_a_step_simply_runs(store: MemoryStore, policy: Policy) -> None:
    proxy = ProxyStore(store)
    proxy.down = {"claim"} if policy.store_down == "run" else set()

    assert Guard(proxy, policy=policy).run("charge", "pay_1", lambda: current().step("a", Handler(7))).value == 7


def test_outside_of_a_handler_there_is_nothing_current() -> None:
    with pytest.raises(UsageError, match="inside a guarded handler"):
        current()


# What a handler may know.


def test_a_handler_knows_its_delivery(store: MemoryStore) -> None:
    guard = Guard(store, scope="acme")

    def handler() -> None:
        mine = current()
        found = guard.read("charge", "pay_1")
        assert found is not None
        assert (mine.operation, mine.key, mine.scope, mine.attempt) == ("charge", "pay_1", "acme", 1)
        assert (mine.token, mine.lost, found.state) == (found.token.hex(), False, State.RUNNING)

    assert guard.run("charge", "pay_1", handler).attempt == 1


def test_blocking_and_async_guards_share_their_records() -> None:
    store = AsyncMemoryStore()

    async def handler() -> str:
        return "async"

    asyncio.run(AsyncGuard(store).run("charge", "pay_1", handler))

    assert Guard(store.sync).run("charge", "pay_1", pytest.fail).value == "async"


def test_a_batch_on_a_store_that_is_down_asks_twice_and_not_once_for_each_message() -> None:
    store = BatchingProxyStore()
    store.die()

    outcomes = Guard(store).run_batch("credit", range(1, 101), key=lambda number: number, handler=Handler())

    assert {type(outcome) for outcome in outcomes} == {StoreUnavailable}
    assert store.calls == {"claim_all": 1, "close_all": 1}
