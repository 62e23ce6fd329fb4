"""Rows 55, 57 and 58 of the edge cases, and what else a batch promises: sync and async, on stores of both kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from onefold import (
    AsyncGuard,
    Done,
    Guard,
    Held,
    InProgress,
    KeyReused,
    MissingKey,
    NotDone,
    Outcome,
    Policy,
    State,
    Unknown,
    current,
)
from onefold.stores.base import Query
from onefold.stores.memory import AsyncMemoryStore
from tests.support import (
    EVERYTHING,
    AsyncBatchingProxyStore,
    AsyncProxyStore,
    BatchingProxyStore,
    Clock,
    Died,
    Handler,
    Heard,
    ProxyStore,
    die_running,
    elsewhere,
)

HOLD = Policy(after_crash="hold")


class Consumer:
    """One sync or async guard, on a store that can or cannot batch; called in one way."""

    def __init__(self, *, is_async: bool, batching: bool) -> None:
        self.clock, self.heard, self.is_async = Clock(), Heard(), is_async
        inner = AsyncMemoryStore(clock=self.clock)
        self.memory = inner.sync
        self.proxy: Any
        if is_async:
            self.proxy = AsyncBatchingProxyStore(inner) if batching else AsyncProxyStore(inner)
        else:
            self.proxy = BatchingProxyStore(inner.sync) if batching else ProxyStore(inner.sync)
        self.batching = batching
        # What interrupts a worker of this kind.
        self.interrupt: type[BaseException] = asyncio.CancelledError if is_async else KeyboardInterrupt

    def poll(
        self, messages: Sequence[Any], handler: Callable[[Any], Any], policy: Policy | None = None, **options: Any
    ) -> list[Any]:
        options = {"key": str} | options

        async def handler_async(message: Any) -> Any:
            return handler(message)

        if self.is_async:
            guard = AsyncGuard(self.proxy, policy=policy, on_event=self.heard)
            return asyncio.run(guard.run_batch("charge", messages, handler=handler_async, **options))
        return Guard(self.proxy, policy=policy, on_event=self.heard).run_batch(
            "charge", messages, handler=handler, **options
        )

    def states(self, *keys: str) -> list[State | None]:
        found = [Guard(self.memory).read("charge", key) for key in keys]
        return [None if record is None else record.state for record in found]


@pytest.fixture(params=["blocking", "blocking, one by one", "async", "async, one by one"])
def consumer(request: pytest.FixtureRequest) -> Consumer:
    return Consumer(is_async="async" in request.param, batching="one by one" not in request.param)


def shown(results: Sequence[Any]) -> list[Any]:
    """Each outcome as its value, each error as its class."""
    return [result.value_or(None) if isinstance(result, Outcome) else type(result) for result in results]


# Row 55.


def test_of_equal_keys_in_one_batch_one_runs_and_the_others_share_its_outcome(consumer: Consumer) -> None:
    handler = Handler("once")

    results = consumer.poll(["a", "b", "a", "a"], handler)

    assert handler.starts == 2
    assert shown(results) == ["once"] * 4
    assert [result.replayed for result in results] == [False, False, True, True]


def test_equal_keys_share_an_error_too_and_another_payload_is_refused(consumer: Consumer) -> None:
    def handler(message: tuple[str, int]) -> int:
        if message[0] == "poison":
            raise ValueError("poison")
        return message[1]

    messages = [("a", 1), ("a", 2), ("a", 1), ("poison", 1), ("poison", 1)]
    results = consumer.poll(messages, handler, key=lambda message: message[0], payload=lambda message: message[1])

    assert shown(results) == [1, KeyReused, 1, ValueError, ValueError]
    assert consumer.states("a", "poison") == [State.DONE, None]


# Row 57.


def test_one_poison_message_never_fails_its_neighbours(consumer: Consumer) -> None:
    def handler(message: Any) -> Any:
        if message == "poison":
            raise ValueError(message)
        return message

    results = consumer.poll(["a", "poison", None, "b"], handler, key=lambda message: message)

    assert shown(results) == ["a", ValueError, MissingKey, "b"]
    assert consumer.states("a", "poison", "b") == [State.DONE, None, State.DONE]
    assert shown(consumer.poll(["b", "poison", "a"], str.upper)) == ["b", "POISON", "a"]


def test_a_key_that_cannot_be_read_is_the_error_of_its_own_message(consumer: Consumer) -> None:
    results = consumer.poll([{"id": "a"}, {}, {"id": "b"}], len, key=lambda message: message["id"])

    assert shown(results) == [1, KeyError, 1]


# Row 58.


def test_where_best_effort_is_enough_an_abandoned_message_counts_as_done(consumer: Consumer) -> None:
    skip = Policy(after_crash="skip")
    die_running(consumer.memory, "charge", "a", skip)
    consumer.clock.advance(31)

    first, second = consumer.poll(["a", "b"], lambda message: message, skip)

    assert (first.value_or(None), first.replayed, first.omitted, first.attempt) == (None, True, True, 1)
    assert (second.value, second.replayed) == ("b", False)
    assert consumer.states("a", "b") == [State.DONE, State.DONE]
    assert "skipped" in consumer.heard.kinds


# Mixed batches.


def test_a_mixed_batch_gives_each_message_its_own_answer_in_order(consumer: Consumer) -> None:
    guard = Guard(consumer.memory, policy=HOLD.replace(keep="1h"))
    guard.run("charge", "expired", lambda: "old")
    consumer.clock.advance(3_601)
    guard.run("charge", "done", lambda: "before")
    with pytest.raises(TimeoutError):
        guard.run("charge", "held", raising(TimeoutError()))
    die_running(consumer.memory, "charge", "abandoned", HOLD)
    consumer.clock.advance(31)
    die_running(consumer.memory, "charge", "running", HOLD)

    messages = ["new", "done", "running", "held", "expired", "new", "abandoned", "newer"]
    results = consumer.poll(messages, str.upper, HOLD)

    assert shown(results) == ["NEW", "before", InProgress, Held, "EXPIRED", "NEW", Held, "NEWER"]
    replayed = [result.replayed for result in results if isinstance(result, Outcome)]
    assert replayed == [False, True, False, True, False]


def raising(error: BaseException) -> Callable[[], Any]:
    def handler() -> Any:
        raise error

    return handler


def test_an_empty_batch_asks_nothing(consumer: Consumer) -> None:
    assert consumer.poll([], pytest.fail) == []
    assert not consumer.proxy.calls


def test_scopes_and_current_belong_to_each_message(consumer: Consumer) -> None:
    def handler(message: str) -> tuple[str, str]:
        return current().scope, current().key

    results = consumer.poll(["a1", "b1"], handler, key=lambda m: m[1:], scope=lambda m: m[0], returns=tuple[str, str])

    assert shown(results) == [("a", "1"), ("b", "1")]


# Round trips.


def test_one_round_trip_claims_a_batch_and_one_ends_it(consumer: Consumer) -> None:
    def handler(message: int) -> int:
        if message == 7:
            raise ValueError(message)
        return message

    consumer.poll(range(50), handler)
    first = dict(consumer.proxy.calls)
    consumer.proxy.calls.clear()
    consumer.poll(range(8, 20), handler)

    if consumer.batching:
        assert first == {"claim_all": 1, "close_all": 1}
        assert consumer.proxy.calls == {"claim_all": 1}
    else:
        assert first == {"claim": 50, "finish": 49, "release": 1}
        assert consumer.proxy.calls == {"claim": 12}


def test_a_batch_above_the_bound_is_taken_in_parts_that_share_nothing_but_the_store(consumer: Consumer) -> None:
    ran: list[int] = []

    results = consumer.poll([*range(1_000), 0, 1_000], ran.append)

    assert ran == [*range(1_001)]
    assert [result.replayed for result in results[-2:]] == [True, False]
    assert not consumer.batching or consumer.proxy.calls == {"claim_all": 2, "close_all": 2}


def test_a_store_that_fails_at_the_end_of_a_batch_loses_no_value(stall: Callable[[float], None]) -> None:
    consumer = Consumer(is_async=False, batching=True)

    def handler(message: str) -> str:
        if message == "b":
            consumer.proxy.die()
            # Finishing is tried again as long as the lease lasts.
            consumer.proxy.before["finish"] = lambda: stall(31)
        return message

    results = consumer.poll(["a", "b"], handler)

    assert [(result.value, result.recorded) for result in results] == [("a", False), ("b", False)]


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_a_batch_end_that_fails_is_made_up_for_message_by_message(is_async: bool) -> None:
    consumer = Consumer(is_async=is_async, batching=True)
    consumer.proxy.down = {"close_all"}

    results = consumer.poll(["a", "b"], str.upper)

    assert [(result.value, result.recorded) for result in results] == [("A", True), ("B", True)]
    assert consumer.states("a", "b") == [State.DONE, State.DONE]


# Crashes.


@pytest.mark.parametrize("way", ["hold", "skip", lambda _current: Unknown()], ids=["hold", "skip", "probe"])
def test_a_message_not_started_when_the_process_died_is_not_unknown(consumer: Consumer, way: Any) -> None:
    policy = Policy(after_crash=way)

    def handler(message: str) -> None:
        consumer.proxy.die()
        raise Died

    with pytest.raises(Died):
        consumer.poll(["a", "b", "c"], handler, policy)
    consumer.proxy.down.clear()
    consumer.clock.advance(31)
    results = consumer.poll(["a", "b", "c"], str.upper, policy)

    assert shown(results) == [None if way == "skip" else Held, "B", "C"]
    assert [result.attempt for result in results[1:]] == [1, 1]


def test_a_message_that_kills_its_worker_does_not_take_its_neighbours_along(
    consumer: Consumer, stall: Callable[[float], None]
) -> None:
    polled = ["before", "kills", "after"]
    ran: list[str] = []

    def handler(message: str) -> str:
        ran.append(message)
        if message == "kills":
            consumer.proxy.die()
            stall(31)
            raise Died
        return message

    for _ in range(Policy().max_attempts):
        with pytest.raises(Died):
            consumer.poll(polled, handler)
        consumer.proxy.down.clear()
        consumer.clock.advance(31)
    results = consumer.poll(polled, handler)

    assert shown(results) == ["before", Held, "after"]
    # Once when it was not recorded, because the worker died before the end of the batch, and once more.
    assert (ran.count("before"), ran.count("kills"), ran.count("after")) == (
        2 if consumer.batching else 1,
        Policy().max_attempts,
        1,
    )


def test_a_start_inside_a_batch_is_counted_as_an_attempt(consumer: Consumer) -> None:
    policy = Policy(after_crash=lambda _current: NotDone())

    def handler(message: str) -> int:
        if message == "dies":
            consumer.proxy.die()
            raise Died
        return current().attempt

    finished = consumer.poll(["ends"], handler, policy)
    with pytest.raises(Died):
        consumer.poll(["dies"], handler, policy)
    consumer.proxy.down.clear()
    consumer.clock.advance(31)
    again = consumer.poll(["dies"], lambda _message: current().attempt, policy)

    record = Guard(consumer.memory).read("charge", "ends")
    assert record is not None
    assert (shown(finished), record.attempt) == ([1], 1)
    assert shown(again) == [2]


def test_an_abandoned_message_under_a_probe_is_asked_for_and_its_neighbours_run(consumer: Consumer) -> None:
    probe = Policy(after_crash=lambda inside: Done(f"found {inside.key}"))
    die_running(consumer.memory, "charge", "a", probe)
    consumer.clock.advance(31)

    results = consumer.poll(["a", "b"], str.upper, probe)

    assert shown(results) == ["found a", "B"]
    assert [result.replayed for result in results] == [True, False]


def test_the_heartbeat_keeps_the_whole_batch_while_its_first_handler_runs(long_lease: float) -> None:
    consumer = Consumer(is_async=False, batching=True)

    def handler(message: str) -> str:
        for _ in range(2 if message == "a" else 0):
            consumer.clock.advance(long_lease * 0.9)
            consumer.proxy.wait_for("extend_all", consumer.proxy.count("extend_all") + 2)
        left = [record.lease_left for record in consumer.memory.browse(Query(state=State.RUNNING), 9)]
        assert min(left) > 0
        return message

    results = consumer.poll(["a", "b", "c"], handler, Policy(lease=long_lease))

    assert shown(results) == ["a", "b", "c"]


def test_a_handler_whose_claim_ended_while_it_waited_for_its_turn_does_not_start(
    stall: Callable[[float], None],
) -> None:
    consumer = Consumer(is_async=False, batching=True)
    consumer.proxy.down = {*EVERYTHING} - {"claim_all", "close_all", "finish"}
    started: list[str] = []

    def handler(message: str) -> str:
        started.append(message)
        stall(31)
        assert current().lost
        consumer.clock.advance(31)
        elsewhere(lambda: Guard(consumer.memory).run("charge", "b", lambda: "theirs"))
        return message

    results = consumer.poll(["a", "b"], handler)

    assert started == ["a"]
    assert shown(results) in (["a", InProgress], ["a", "theirs"])


# Interrupts.


@pytest.mark.parametrize("policy", [Policy(), HOLD], ids=["rerun", "hold"])
def test_an_interrupt_finishes_what_has_ended_and_gives_back_what_has_not_started(
    consumer: Consumer, policy: Policy
) -> None:
    started: list[str] = []

    def handler(message: str) -> str:
        started.append(message)
        if message == "b":
            raise consumer.interrupt
        return message

    with pytest.raises(consumer.interrupt):
        consumer.poll(["a", "b", "c", "d"], handler, policy)

    assert started == ["a", "b"]
    interrupted = State.OPEN if policy.after_crash == "rerun" else State.RUNNING
    assert consumer.states("a", "b", "c", "d") == [State.DONE, interrupted, None, None]


def test_an_interrupt_inside_a_round_trip_finishes_or_gives_back_all_the_same(consumer: Consumer) -> None:
    def interrupt() -> None:
        raise consumer.interrupt

    first, last = ("claim_all", "close_all") if consumer.batching else ("claim", "finish")
    consumer.proxy.after[first] = interrupt
    with pytest.raises(consumer.interrupt):
        consumer.poll(["a", "b"], pytest.fail)
    unstarted = consumer.states("a", "b")
    consumer.proxy.after[last] = interrupt
    with pytest.raises(consumer.interrupt):
        consumer.poll(["a", "b"], str.upper)

    assert unstarted == [None, None]
    assert consumer.states("a")[0] is State.DONE


INTERRUPTED: dict[str, Policy] = {
    "seen mode": Policy(mode="seen"),
    "a store that is down": Policy(store_down="run"),
    "a probe": Policy(after_crash=lambda inside: interrupt_probe()),
}


@pytest.mark.parametrize("where", INTERRUPTED)
@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_an_interrupt_is_never_taken_for_one_messages_error(where: str, is_async: bool) -> None:
    consumer = Consumer(is_async=is_async, batching=True)
    started: list[str] = []

    def handler(message: str) -> str:
        started.append(message)
        raise TimeoutError if where == "a probe" else consumer.interrupt

    if where == "a store that is down":
        consumer.proxy.die()

    with pytest.raises((consumer.interrupt, KeyboardInterrupt)):
        consumer.poll(["a", "b"], handler, INTERRUPTED[where])
    assert started == ["a"]


def interrupt_probe() -> Any:
    raise KeyboardInterrupt
