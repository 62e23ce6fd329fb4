"""Dramatiq without a server: what is refused when decorating, what is sent, and each verdict, step by step."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any

import dramatiq
import pytest
from dramatiq.asyncio import EventLoopThread, get_event_loop_thread, set_event_loop_thread
from dramatiq.middleware import (
    AgeLimit,
    Callbacks,
    Middleware,
    Pipelines,
    Retries,
    Shutdown,
    ShutdownNotifications,
    SkipMessage,
    TimeLimit,
    TimeLimitExceeded,
)
from dramatiq.results import ResultFailure, ResultMissing
from dramatiq.worker import WorkerThread

from onefold import (
    AsyncGuard,
    Event,
    Guard,
    MissingKey,
    Policy,
    ResultNotKept,
    StoreUnavailable,
    UsageError,
    current,
    subscribe,
)
from onefold.events import Kind
from onefold.queues._shared.jobs.waits import HELD, TIMES
from onefold.queues._shared.verdict import HELD_DELAY, HELD_MAX
from onefold.queues.dramatiq import OnefoldMiddleware, guarded, send
from onefold.queues.dramatiq import messages as dramatiq_messages
from onefold.queues.keys import field, position
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.queues.dramatiq_tools import Hand
from tests.support import Clock, Elsewhere, ProxyStore, die_running, eventually

KEY = "idempotency-key"


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


def paying(hand: Hand, guard: Guard, ran: list[Any], **options: Any) -> Any:
    """An actor that pays, and whose result is stored."""

    @guarded(guard, "pay", broker=hand.broker, **{"store_results": True, **options})
    def pay(amount: int) -> str:
        ran.append(amount)
        return f"paid {amount}"

    return pay


def result_of(hand: Hand, message: Any) -> Any:
    return message.get_result(backend=hand.results)


# Duplicates.


def test_a_duplicate_gets_the_stored_result_whichever_message_it_is(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []
    pay = paying(hand, guard, ran)
    first = pay.send_with_options(args=(5,), idempotency_key="pay-1")
    second = pay.send_with_options(args=(5,), **{"Idempotency-Key": "pay-1"})

    for message in (first, first, second):
        hand.process(message)

    assert ran == [5]
    assert result_of(hand, first) == result_of(hand, second) == "paid 5"
    assert hand.ended == ["acknowledged"] * 3


def test_a_running_duplicate_comes_later_with_its_id_and_its_retries_and_is_not_done(hand: Hand, guard: Guard) -> None:
    entered, leave, ran = threading.Event(), threading.Event(), list[int]()

    @guarded(guard, "pay", broker=hand.broker, store_results=True, wait=0)
    def pay(amount: int) -> str:
        ran.append(amount)
        entered.set()
        assert leave.wait(30)
        return "paid"

    message = pay.message_with_options(args=(5,), idempotency_key="pay-1", retries=2)
    running = Elsewhere(lambda: hand.process(message))
    assert entered.wait(30)

    hand.process(message)
    again = hand.delayed()
    hand.process(again)
    third = hand.delayed()
    leave.set()
    running.result()

    assert (again.message_id, again.options["idempotency_key"], again.options["retries"]) == (
        message.message_id,
        "pay-1",
        2,
    )
    assert [one.options[TIMES] for one in (again, third)] == [1, 2]
    assert hand.broker.delays == [1_000, 2_000]
    assert hand.ended == ["acknowledged"] * 3
    hand.process(third)
    assert (ran, result_of(hand, message)) == ([5], "paid")


def test_a_message_that_comes_later_has_no_result_meanwhile(hand: Hand) -> None:
    store = ProxyStore()
    store.down.add("claim")
    with Guard(store) as guard:
        pay = paying(hand, guard, [])
        message = pay.message_with_options(args=(5,), idempotency_key="pay-1")
        hand.process(message)

    with pytest.raises(ResultMissing):
        result_of(hand, message)
    assert hand.delayed().options.get("store_results") is None


def test_a_store_that_is_down_uses_up_no_retry(hand: Hand) -> None:
    store, ran = ProxyStore(), list[int]()
    store.down.add("claim")
    with Guard(store) as guard:
        pay = paying(hand, guard, ran, max_retries=0)
        message = pay.message_with_options(args=(5,), idempotency_key="pay-1")
        for _ in range(3):
            hand.process(message)
            message = hand.delayed()
        store.down.clear()
        hand.process(message)

    assert (ran, hand.ended) == ([5], ["acknowledged"] * 4)
    assert hand.broker.delays == [1_000, 2_000, 4_000]


def test_what_is_held_comes_a_bounded_number_of_times(hand: Hand) -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    policy = Policy(lease=1, after_crash="hold")
    die_running(store, "pay", "pay-1", policy)
    clock.advance(2)
    with Guard(store, policy=policy) as guard:
        pay = paying(hand, guard, [], fingerprint=None)
        hand.process(pay.message_with_options(args=(5,), idempotency_key="pay-1"))
        again = hand.delayed()
        hand.process(again.copy(options={HELD: HELD_MAX}))

    assert hand.broker.delays == [HELD_DELAY * 1000]
    assert again.options[HELD] == 1
    assert hand.ended == ["acknowledged", "dead"]


# Errors.


def test_an_error_of_the_actor_is_left_to_retries(hand: Hand, guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[int] = []

    @guarded(guard, "pay", broker=hand.broker, max_retries=1, min_backoff=10)
    def pay(amount: int) -> None:
        attempts.append(amount)
        raise ValueError("secret 4711")

    message = pay.message_with_options(args=(5,), idempotency_key="pay-1")
    hand.process(message)
    hand.process(hand.delayed())

    assert (attempts, hand.ended) == ([5, 5], ["acknowledged", "dead"])
    lines = [record.getMessage() for record in caplog.records if record.name == "onefold.queues.dramatiq"]
    assert [line.rpartition("]: ")[2].split(" at ")[0] for line in lines] == [
        "attempt 1 failed: ValueError",
        "attempt 2 failed: ValueError",
    ]
    assert "4711" not in "".join(lines)


def test_an_actor_that_asks_for_a_retry_has_not_failed_and_runs_again(
    hand: Hand, guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    @guarded(guard, "pay", broker=hand.broker)
    def pay() -> None:
        ran.append(1)
        if len(ran) == 1:
            raise dramatiq.errors.Retry("later", delay=10)

    hand.process(pay.message_with_options(idempotency_key="pay-1"))
    hand.process(hand.delayed())

    assert len(ran) == 2
    assert not [record for record in caplog.records if record.name == "onefold.queues.dramatiq"]


def test_a_final_error_is_not_retried_and_is_what_a_duplicate_gets(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []

    @guarded(guard, "pay", broker=hand.broker, store_results=True, final_errors=(LookupError,))
    def pay() -> None:
        ran.append(1)
        raise LookupError("no such account")

    messages = [pay.message_with_options(idempotency_key="pay-1") for _ in range(2)]
    for message in messages:
        hand.process(message)

    assert (ran, hand.ended, hand.size("default.DQ")) == ([1], ["dead"] * 2, 0)
    for message in messages:
        with pytest.raises(ResultFailure, match="actor raised LookupError"):
            result_of(hand, message)


def test_what_never_can_run_is_dead_at_once_and_told(
    hand: Hand, guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []
    told: list[Any] = []

    @dramatiq.actor(broker=hand.broker)
    def complain(message: dict[str, Any], error: dict[str, str]) -> None:
        told.append((message["message_id"], error["type"]))

    pay = paying(hand, guard, [], on_failure="complain")
    hand.process(pay.message_with_options(args=(5,), idempotency_key="pay-1"))
    other = pay.message_with_options(args=(6,), idempotency_key="pay-1")
    end = subscribe(heard.append)
    hand.process(other)
    end()
    hand.take()

    assert hand.ended[:2] == ["acknowledged", "dead"]
    assert hand.size("default.DQ") == 0
    assert [event.operation for event in heard if event.kind is Kind.BURIED] == ["pay"]
    with pytest.raises(ResultFailure, match="KeyReused"):
        result_of(hand, other)
    assert told == [(other.message_id, "Rejected")]
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR and "rejected" in one.message]
    assert line.startswith("default: pay [key ")
    assert "pay-1" not in line


@pytest.mark.parametrize(("missing_key", "ran"), [("never", []), ("run", [5, 5])])
def test_a_message_without_a_key_follows_the_policy(hand: Hand, guard: Guard, missing_key: str, ran: list[int]) -> None:
    seen: list[int] = []
    pay = paying(hand, guard, seen, missing_key=missing_key)
    message: Any = dramatiq.Message("default", "pay", (5,), {}, {})
    for _ in range(2):
        hand.process(message)

    assert seen == ran
    assert hand.ended == (["acknowledged"] * 2 if ran else ["dead"] * 2)
    assert pay.actor_name == "pay"


@pytest.mark.parametrize("key", [" ", True, 1.5, ["a"], "x" * 5_000])
def test_a_bad_key_is_dead_and_the_worker_lives_on(hand: Hand, guard: Guard, key: Any) -> None:
    ran: list[int] = []
    paying(hand, guard, ran)
    hand.process(dramatiq.Message("default", "pay", (5,), {}, {KEY: key}))
    hand.process(dramatiq.Message("default", "pay", (5,), {}, {KEY: "pay-1"}))

    assert (ran, hand.ended) == ([5], ["dead", "acknowledged"])


def test_arguments_that_do_not_fit_are_left_to_retries(hand: Hand, guard: Guard) -> None:
    paying(hand, guard, [], max_retries=0)
    hand.process(dramatiq.Message("default", "pay", (5, 6, 7), {}, {KEY: "pay-1"}))

    assert hand.ended == ["dead"]


def test_a_workers_own_mistake_buries_nothing(hand: Hand) -> None:
    guard, ran = Guard("memory:"), list[int]()
    pay = paying(hand, guard, ran, max_retries=0)
    guard.close()
    hand.process(pay.message_with_options(args=(5,), idempotency_key="pay-1"))

    assert (ran, hand.ended) == ([], ["acknowledged"])
    assert hand.delayed().options["idempotency_key"] == "pay-1"
    assert hand.broker.delays == [HELD_DELAY * 1000]


def test_a_scope_function_that_names_nobody_buries_nothing(hand: Hand, guard: Guard) -> None:
    pay = paying(hand, guard, [], scope=lambda amount: object())
    hand.process(pay.message_with_options(args=(5,), idempotency_key="pay-1"))

    assert (hand.ended, hand.size("default.DQ")) == (["acknowledged"], 1)


@pytest.mark.parametrize("error", [ResultNotKept("of an inner charge"), MissingKey("of what it sends")])
def test_what_another_guard_says_inside_an_actor_is_its_own_error(hand: Hand, guard: Guard, error: Exception) -> None:
    @guarded(guard, "outer", broker=hand.broker, max_retries=1, min_backoff=1)
    def outer() -> None:
        raise error

    hand.process(outer.message_with_options(idempotency_key="a"))

    assert (hand.ended, hand.size("default.DQ")) == (["acknowledged"], 1)
    assert guard.read("outer", "a") is None


# Interrupts: Dramatiq raises them into the thread, at any line.


@pytest.mark.parametrize("interrupt", [TimeLimitExceeded, Shutdown])
@pytest.mark.parametrize(("after_crash", "state", "starts"), [("rerun", "", 2), ("hold", "held", 1)])
def test_an_interrupt_leaves_the_outcome_to_after_crash(
    hand: Hand, guard: Guard, interrupt: type[BaseException], after_crash: Any, state: str, starts: int
) -> None:
    ran: list[int] = []

    @guarded(guard, "pay", broker=hand.broker, after_crash=after_crash, ambiguous_errors=(OSError,), min_backoff=1)
    def pay() -> None:
        ran.append(1)
        if len(ran) == 1:
            raise interrupt

    hand.process(pay.message_with_options(idempotency_key="pay-1"))
    record = guard.read("pay", "pay-1")
    retried = hand.delayed()
    hand.process(retried)

    assert ("" if record is None else record.state.value) == state
    assert retried.options["retries"] == 1
    assert len(ran) == starts


def test_an_interrupt_that_comes_while_a_duplicate_waits_uses_up_no_retry(hand: Hand) -> None:
    store = ProxyStore()

    def struck() -> None:
        raise TimeLimitExceeded

    store.before["claim"] = struck
    ran: list[int] = []
    with Guard(store) as guard:
        # A message that has used up its retries would be dead.
        pay = paying(hand, guard, ran, max_retries=0)
        hand.process(pay.message_with_options(args=(5,), idempotency_key="pay-1"))
        again = hand.delayed()
        hand.process(again)

    assert (ran, hand.ended) == ([5], ["acknowledged"] * 2)
    assert "retries" not in again.options


# Middleware.


class Skipping(Middleware):
    """Skips whatever it is told to."""

    def before_process_message(self, broker: Any, message: Any) -> None:
        if message.options.get("skip"):
            raise SkipMessage("not today")


def middleware() -> list[Middleware]:
    return [AgeLimit(), TimeLimit(), ShutdownNotifications(), Callbacks(), Pipelines(), Retries(min_backoff=1)]


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("order", [1, -1])
def test_the_order_of_middleware_makes_no_difference(guard: Guard, place: int, order: int) -> None:
    others = [*middleware(), Skipping()][::order]
    hand = Hand([*others[:place], OnefoldMiddleware(), *others[place:]])
    ran: list[int] = []

    @guarded(guard, "pay", broker=hand.broker, store_results=True)
    def pay(amount: int) -> str:
        ran.append(amount)
        if len(ran) == 1:
            raise ValueError
        return "paid"

    message = pay.message_with_options(args=(5,), idempotency_key="pay-1")
    hand.process(message.copy(options={"skip": True}))
    assert dramatiq_messages.RECEIVED.get() is None
    hand.process(message)
    assert dramatiq_messages.RECEIVED.get() is None
    hand.process(hand.delayed())
    hand.process(message)
    hand.process(message.copy(args=(6,)))

    assert ran == [5, 5]
    assert hand.ended == [*["acknowledged"] * 4, "dead"]
    assert sum(isinstance(one, OnefoldMiddleware) for one in hand.broker.middleware) == 1


class Own(Middleware):
    """Somebody's own rule for errors, in the place of Retries: whatever fails is done."""

    @property
    def actor_options(self) -> set[str]:
        return {"throws"}


def test_what_never_can_run_is_dead_whoever_handles_errors(guard: Guard) -> None:
    hand = Hand([Own()])
    pay = paying(hand, guard, [])
    for amount in (5, 6):
        hand.process(pay.message_with_options(args=(amount,), idempotency_key="pay-1"))

    assert hand.ended == ["acknowledged", "dead"]


def test_a_broker_without_retries_is_refused(guard: Guard) -> None:
    hand = Hand([])

    with pytest.raises(UsageError, match="the actor pay: its broker has no Retries middleware"):
        paying(hand, guard, [])


def test_a_worker_whose_broker_shows_no_messages_runs_nothing_unguarded(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []
    pay = paying(hand, guard, ran)
    worker = WorkerThread(broker=hand.broker, consumers={}, work_queue=None, worker_timeout=1)  # type: ignore[arg-type]
    said: list[str] = []

    def called() -> None:
        try:
            pay(5)
        except UsageError as error:
            said.append(str(error))

    worker.run = called  # type: ignore[method-assign]
    worker.start()
    worker.join(30)

    assert ran == []
    assert "has no OnefoldMiddleware" in said[0]


def test_a_worker_lets_rabbitmq_confirm_what_it_enqueues(hand: Hand, guard: Guard) -> None:
    paying(hand, guard, [])
    hand.broker.confirm_delivery = False  # type: ignore[attr-defined]

    hand.broker.emit_before("worker_boot", None)

    assert hand.broker.confirm_delivery is True  # type: ignore[attr-defined]


def test_a_worker_does_not_start_on_a_store_that_cannot_be_used(hand: Hand, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "records.db")) as connection:
        connection.execute("CREATE TABLE onefold_records (x INTEGER)")
    with Guard(f"sqlite:///{tmp_path}/records.db") as guard:
        paying(hand, guard, [])

        with pytest.raises(SystemExit, match="onefold: "):
            hand.broker.emit_before("worker_boot", None)


# What cannot be sent again.


def test_a_message_is_acknowledged_only_when_its_copy_is_enqueued(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    store, pauses = ProxyStore(), list[float]()
    store.down.add("claim")
    enqueue, failing = hand.broker.enqueue, [True, True]

    def refused(message: Any, *, delay: int | None = None) -> Any:
        if failing and failing.pop():
            assert hand.ended == []
            raise dramatiq.errors.ConnectionClosed("gone")
        return enqueue(message, delay=delay)

    monkeypatch.setattr(hand.broker, "enqueue", refused)
    monkeypatch.setattr(dramatiq_messages, "time", SimpleNamespace(sleep=pauses.append))
    with Guard(store) as guard:
        pay = paying(hand, guard, [])
        hand.process(pay.message_with_options(args=(5,), idempotency_key="pay-1"))

    assert (pauses, hand.ended, hand.size("default.DQ")) == ([1.0, 1.0], ["acknowledged"], 1)


def test_a_worker_that_ends_leaves_what_it_cannot_enqueue_to_the_dead_letters(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ProxyStore()
    store.down.add("claim")

    def refused(message: Any, *, delay: int | None = None) -> Any:
        raise dramatiq.errors.ConnectionClosed("gone")

    monkeypatch.setattr(hand.broker, "enqueue", refused)
    monkeypatch.setattr(threading.current_thread(), "running", False, raising=False)
    with Guard(store) as guard:
        pay = paying(hand, guard, [])
        hand.process(pay.message_with_options(args=(5,), idempotency_key="pay-1"))

    assert hand.ended == ["dead"]


@pytest.mark.parametrize("place", ["enqueueing", "waiting"])
def test_a_time_limit_does_not_bury_what_cannot_be_enqueued_yet(
    place: str, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ProxyStore()
    store.down.add("claim")
    enqueue, failing = hand.broker.enqueue, [True]

    def refused(message: Any, *, delay: int | None = None) -> Any:
        if not failing:
            return enqueue(message, delay=delay)
        failing.pop()
        raise TimeLimitExceeded if place == "enqueueing" else dramatiq.errors.ConnectionClosed("gone")

    def struck(_seconds: float) -> None:
        raise TimeLimitExceeded

    monkeypatch.setattr(hand.broker, "enqueue", refused)
    monkeypatch.setattr(dramatiq_messages, "time", SimpleNamespace(sleep=struck))
    with Guard(store) as guard:
        pay = paying(hand, guard, [], max_retries=0)
        hand.process(pay.message_with_options(args=(5,), idempotency_key="pay-1"))

    assert (hand.ended, hand.size("default.DQ")) == (["acknowledged"], 1)


@pytest.mark.parametrize("ends", [False, True])
def test_a_retry_that_the_broker_did_not_take_is_not_lost(
    ends: bool, hand: Hand, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue, refusals = hand.broker.enqueue, list[str]()

    def refused(message: Any, *, delay: int | None = None) -> Any:
        if len(refusals) < 2 or ends:
            refusals.append(message.message_id)
            raise dramatiq.errors.ConnectionClosed("gone")
        return enqueue(message, delay=delay)

    monkeypatch.setattr(dramatiq_messages, "time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(hand.broker, "enqueue", refused)
    monkeypatch.setattr(threading.current_thread(), "running", not ends, raising=False)

    @guarded(guard, "pay", broker=hand.broker, min_backoff=1)
    def pay() -> None:
        raise ValueError

    hand.process(pay.message_with_options(idempotency_key="pay-1"))

    if ends:
        # Its broker delivers it again, as for a worker that is killed.
        assert (hand.ended, hand.size("default.DQ")) == (["kept"], 0)
    else:
        assert (hand.ended, hand.delayed().options["retries"]) == (["acknowledged"], 1)


def test_what_no_broker_can_take_is_not_tried_for_ever(hand: Hand, guard: Guard) -> None:
    @guarded(guard, "pay", broker=hand.broker, min_backoff=1)
    def pay() -> None:
        received = dramatiq_messages.RECEIVED.get()
        assert received is not None
        received.message.options["mine"] = object()
        raise ValueError

    hand.process(pay.message_with_options(idempotency_key="pay-1"))

    assert hand.ended == ["kept"]


def test_a_retry_that_the_broker_took_is_enqueued_once(hand: Hand, guard: Guard) -> None:
    @guarded(guard, "pay", broker=hand.broker, min_backoff=1, max_retries=1)
    def pay() -> None:
        raise ValueError

    hand.process(pay.message_with_options(idempotency_key="pay-1"))
    retried = hand.delayed()
    assert hand.size("default.DQ") == 0
    hand.process(retried)

    assert (hand.ended, hand.size("default.DQ")) == (["acknowledged", "dead"], 0)


# Pipelines and results.


def test_a_pipeline_goes_on_with_the_stored_result(hand: Hand, guard: Guard) -> None:
    ran: list[str] = []

    @guarded(guard, "double", broker=hand.broker)
    def double(n: int) -> int:
        ran.append(f"double {n}")
        return 2 * n

    steps = dramatiq.pipeline(
        [double.message_with_options(args=(n,), idempotency_key=key) for n, key in [(3, "a")]]
        + [double.message_with_options(idempotency_key="b")],
        broker=hand.broker,
    )
    steps.run()
    first = hand.next_of()
    for _ in range(2):
        hand.process(first)
    for _ in range(2):
        hand.take()

    assert ran == ["double 3", "double 6"]
    assert hand.ended == ["acknowledged"] * 4


def test_a_result_that_was_not_kept_is_not_made_up(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []
    pay = paying(hand, guard, ran, keep_result=False)
    first, second = (pay.message_with_options(args=(5,), idempotency_key="pay-1") for _ in range(2))
    for message in (first, first, second):
        hand.process(message)
    quiet = second.copy(options={"store_results": False})
    hand.process(quiet)

    assert ran == [5]
    assert result_of(hand, first) == "paid 5"
    assert hand.ended == ["acknowledged", "acknowledged", "dead", "acknowledged"]


def test_after_a_lost_claim_a_result_that_was_not_kept_is_not_made_up(hand: Hand) -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    policy = Policy(lease=1, keep_result=False)
    with Guard(store, policy=policy) as guard, Guard(store, policy=policy) as other:

        @guarded(guard, "pay", broker=hand.broker, fingerprint=None)
        def pay() -> str:
            clock.advance(5)
            Elsewhere(lambda: other.run("pay", "pay-1", lambda: "of the other")).result()
            return "too late"

        hand.process(pay.message_with_options(idempotency_key="pay-1"))

    assert (hand.ended, hand.size("default.DQ")) == (["acknowledged"], 0)


def test_after_a_lost_claim_the_result_of_the_new_owner_counts(hand: Hand) -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    ran: list[str] = []
    with Guard(store, policy=Policy(lease=1)) as guard, Guard(store, policy=Policy(lease=1)) as other:

        @guarded(guard, "pay", broker=hand.broker, store_results=True, fingerprint=None)
        def pay() -> str:
            ran.append("slow")
            clock.advance(5)
            Elsewhere(lambda: other.run("pay", "pay-1", lambda: "of the other")).result()
            return "too late"

        message = pay.message_with_options(idempotency_key="pay-1")
        hand.process(message)

    assert (result_of(hand, message), hand.ended) == ("of the other", ["acknowledged"])


# Sending.


def test_a_message_without_a_key_is_refused_and_nothing_is_sent(hand: Hand, guard: Guard) -> None:
    pay = paying(hand, guard, [])

    for build in (pay.send, pay.message, lambda amount: pay.send_with_options(args=(amount,), delay=10)):
        with pytest.raises(MissingKey, match="pay: this message has no key, and nothing was sent"):
            build(5)
    with pytest.raises(MissingKey, match="several spellings"):
        pay.send_with_options(args=(5,), idempotency_key="a", **{KEY: "b"})

    assert hand.broker.delays == []


def test_whatever_has_a_key_is_sent(hand: Hand, guard: Guard) -> None:
    @guarded(guard, "ship", broker=hand.broker, key="order.id")
    def ship(order: dict[str, Any]) -> None: ...

    @guarded(guard, "tell", broker=hand.broker, key=field("word"))
    def tell(word: str) -> None: ...

    ship.send({"id": 7})
    tell.send("hello")
    with pytest.raises(MissingKey, match=r"in its argument 'order\.id'"):
        ship.send({})

    assert len(hand.broker.delays) == 2


def test_where_no_key_is_required_one_warning_says_that_the_id_is_none(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []
    pay = paying(hand, guard, ran, require_key=False)

    with pytest.warns(UserWarning, match="pay: sent without a key, under the id of its message") as told:
        messages = [pay.send(5), pay.send(5)]
    for message in (messages[0], messages[0], messages[1]):
        hand.process(message)

    assert len(told) == 1
    assert [message.options[KEY] for message in messages] == [message.message_id for message in messages]
    assert ran == [5, 5]


def test_a_position_is_a_key_only_by_name(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []
    with pytest.raises(UsageError, match="not the sender's key"):
        position()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pay = paying(hand, guard, ran, key=position(changes_when_a_producer_retries=True))

    message = pay.send(5)
    for _ in range(2):
        hand.process(message)

    assert ran == [5]


def test_send_returns_the_key_and_passes_options_on(hand: Hand, guard: Guard) -> None:
    pay = paying(hand, guard, [])

    assert send(pay, (5,), key="pay-1", delay=100) == "pay-1"
    assert send(pay, (5,), idempotency_key="pay-2") == "pay-2"
    minted = send(pay, kwargs={"amount": 5})

    assert hand.broker.delays == [100, None, None]
    assert hand.delayed().options[KEY] == "pay-1"
    assert [hand.next_of().options[KEY] for _ in range(2)] == ["pay-2", minted]


# Calls, transactions and scopes.


def test_called_as_a_function_it_is_one(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []

    @guarded(guard, "count", broker=hand.broker, store_results=True)
    def count(n: int) -> int:
        ran.append(n)
        return n + (count(n - 1) if n else 0)

    assert [count(1), count(1)] == [1, 1]
    message = count.message_with_options(args=(2,), idempotency_key="a")
    for _ in range(2):
        hand.process(message)

    assert result_of(hand, message) == 3
    assert ran == [1, 0, 1, 0, 2, 1, 0]


def test_a_key_in_the_arguments_and_a_scope_keep_tenants_apart(hand: Hand, guard: Guard) -> None:
    ran: list[str] = []

    @guarded(guard, "pay", broker=hand.broker, key="payment_id", scope="tenant")
    def pay(tenant: str, payment_id: str) -> None:
        ran.append(f"{tenant} {current().scope}")

    for tenant in ("acme", "bakery", "acme"):
        pay.send(tenant, "1")
        hand.take()

    assert ran == ["acme acme", "bakery bakery"]


def test_a_parameter_tx_makes_it_transactional(hand: Hand, tmp_path: Path) -> None:
    path = tmp_path / "wallet.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE wallet (amount INTEGER)")
        connection.commit()
    fail = [True]
    with Guard(f"sqlite:///{path}") as guard:

        @guarded(guard, "credit", broker=hand.broker, min_backoff=1, missing_key="run")
        def credit(amount: int, *, tx: sqlite3.Connection) -> None:
            tx.execute("INSERT INTO wallet VALUES (?)", (amount,))
            if fail and fail.pop():
                raise ValueError

        message = credit.message_with_options(args=(5,), idempotency_key="pay-1")
        keyless: Any = dramatiq.Message("default", "credit", (1,), {}, {})
        for one in (message, message, message, keyless):
            hand.process(one)

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT amount FROM wallet").fetchall() == [(5,), (1,)]


# Async actors.


@pytest.fixture
def loop() -> Iterator[None]:
    """What Dramatiq's AsyncIO middleware starts in a worker."""
    thread = EventLoopThread(logging.getLogger(__name__))
    thread.start(timeout=30)
    set_event_loop_thread(thread)
    yield
    thread.stop()
    thread.join()
    set_event_loop_thread(None)


def _waits_for_the_loop(thread: int | None) -> bool:
    """Whether a worker waits for the event loop: struck before that, Dramatiq would cancel nothing."""
    frame = sys._current_frames()[thread or 0]
    return any(one.f_code.co_name == "result" for one, _ in walk_stack(frame))


@pytest.mark.usefixtures("loop")
def test_an_async_actor_runs_once_under_an_async_guard(hand: Hand) -> None:
    guard, ran = AsyncGuard("memory:"), list[int]()

    @guarded(guard, "pay", broker=hand.broker, store_results=True, min_backoff=1)
    async def pay(amount: int) -> str:
        await asyncio.sleep(0)
        ran.append(amount)
        if len(ran) == 1:
            raise ValueError
        return current().key_for("bank")

    message = pay.message_with_options(args=(5,), idempotency_key="pay-1")
    for _ in range(3):
        hand.process(message)
    hand.process(pay.message_with_options(args=(6,), idempotency_key="pay-1"))

    assert ran == [5, 5]
    assert result_of(hand, message)
    assert hand.ended == [*["acknowledged"] * 3, "dead"]


@pytest.mark.usefixtures("loop")
def test_a_cancelled_async_actor_keeps_its_claim_until_the_lease_ends(hand: Hand) -> None:
    guard = AsyncGuard("memory:", policy=Policy(after_crash="hold"))
    entered, thread = threading.Event(), threading.main_thread().ident

    @guarded(guard, "pay", broker=hand.broker, min_backoff=1)
    async def pay() -> None:
        entered.set()
        await asyncio.sleep(30)

    def strike() -> None:
        assert entered.wait(30)
        assert eventually(lambda: _waits_for_the_loop(thread))
        dramatiq.middleware.raise_thread_exception(thread, TimeLimitExceeded)

    striking = Elsewhere(strike)
    hand.process(pay.message_with_options(idempotency_key="pay-1"))
    striking.result()

    record = asyncio.run(guard.read("pay", "pay-1"))
    assert record is not None
    assert record.state.value in ("running", "held")
    assert hand.delayed().options["retries"] == 1


@pytest.mark.usefixtures("loop")
def test_an_interrupt_that_comes_while_an_async_duplicate_waits_uses_up_no_retry(hand: Hand) -> None:
    guard = AsyncGuard("memory:", policy=Policy(lease="1h"))
    thread, ran = threading.main_thread().ident, list[int]()

    @guarded(guard, "pay", broker=hand.broker, max_retries=0, wait=30)
    async def pay() -> None:
        ran.append(1)

    def strike() -> None:
        assert eventually(lambda: _waits_for_the_loop(thread))
        dramatiq.middleware.raise_thread_exception(thread, TimeLimitExceeded)

    async def elsewhere() -> None:
        """Another worker runs it, and this one waits for that."""
        await guard.run("pay", "pay-1", taking)

    async def taking() -> None:
        taken.set()
        await asyncio.to_thread(done.wait, 30)

    taken, done = threading.Event(), threading.Event()
    loop_thread = get_event_loop_thread()
    assert loop_thread is not None
    running = asyncio.run_coroutine_threadsafe(elsewhere(), loop_thread.loop)
    assert taken.wait(30)
    striking = Elsewhere(strike)
    hand.process(pay.message_with_options(idempotency_key="pay-1"))
    striking.result()
    done.set()
    running.result(30)

    assert (ran, hand.ended) == ([], ["acknowledged"])
    assert "retries" not in hand.delayed().options


@pytest.mark.usefixtures("loop")
def test_a_time_limit_does_not_bury_an_async_message_whose_store_does_not_answer(hand: Hand) -> None:
    asked, answers, thread, ran = threading.Event(), threading.Event(), threading.main_thread().ident, list[int]()

    class Hangs(AsyncMemoryStore):
        async def claim(self, *args: Any, **kwargs: Any) -> Any:
            asked.set()
            await asyncio.to_thread(answers.wait, 30)
            return await super().claim(*args, **kwargs)

    @guarded(AsyncGuard(Hangs()), "pay", broker=hand.broker, max_retries=0)
    async def pay() -> None:
        ran.append(1)

    def strike() -> None:
        assert asked.wait(30)
        assert eventually(lambda: _waits_for_the_loop(thread))
        dramatiq.middleware.raise_thread_exception(thread, TimeLimitExceeded)

    striking = Elsewhere(strike)
    hand.process(pay.message_with_options(idempotency_key="pay-1"))
    answers.set()
    striking.result()

    assert (ran, hand.ended) == ([], ["acknowledged"])
    assert "retries" not in hand.delayed().options


# What is refused when decorating.


async def nothing_async() -> None: ...


def nothing() -> None: ...


def with_tx(*, tx: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "options", "says"),
    [
        (nothing_async, {}, "the actor nothing_async: it is `async def`, and takes AsyncGuard, but this is Guard"),
        (nothing, {"guard": AsyncGuard("memory:")}, "it is `def`, and takes Guard, but this is AsyncGuard"),
        (nothing, {"guard": "memory:"}, "it takes Guard, but this is str"),
        (nothing, {"operation": ""}, "operation"),
        (nothing, {"key": "order"}, "key='order': the actor has no argument 'order'"),
        (nothing, {"scope": "tenant"}, "scope='tenant': the actor has no argument"),
        (nothing, {"scope": 7}, "scope=7 has to name arguments"),
        (nothing, {"missing_key": "skip"}, "missing_key='skip' is neither"),
        (nothing, {"require_key": "no"}, "require_key='no' has to be True or False"),
        (nothing, {"keep": "soon"}, "keep='soon'"),
        (nothing, {"kep": "7d"}, "unknown option 'kep': did you mean 'keep'"),
        (nothing, {"max_retry": 3}, "unknown option 'max_retry': did you mean 'max_retries'"),
        (nothing, {"colour": 3}, "unknown option 'colour'. Is its middleware added"),
        (nothing, {"final_errors": (Exception,)}, "treats every Exception as final, and with it Dramatiq's Retry"),
        (with_tx, {}, "the handler takes tx, and memory has no transactions"),
    ],
)
def test_what_cannot_work_is_refused(
    hand: Hand, handler: Callable[..., Any], options: dict[str, Any], says: str
) -> None:
    given = {"guard": Guard("memory:"), "operation": "pay", **options}

    with pytest.raises(UsageError) as refused:
        guarded(**given, broker=hand.broker)(handler)

    assert says in str(refused.value)
    assert handler.__name__ not in hand.broker.actors


def test_without_dramatiq_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['dramatiq'] = None; import onefold.queues.dramatiq"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "UsageError: Dramatiq is not installed: `pip install 'onefold[dramatiq]'`" in ended.stderr


def test_store_errors_are_told_by_their_cause_and_by_no_key(hand: Hand, caplog: pytest.LogCaptureFixture) -> None:
    class Down(ProxyStore):
        def claim(self, *_: Any, **__: Any) -> Any:
            raise StoreUnavailable("not now")

    caplog.set_level(logging.INFO)
    with Guard(Down()) as guard:
        pay = paying(hand, guard, [])
        for number in range(3):
            hand.process(pay.message_with_options(args=(5,), idempotency_key=f"secret-{number}"))

    lines = [one for one in caplog.records if one.name == "onefold.queues.dramatiq"]
    assert [one.levelname for one in lines] == ["WARNING"]
    assert "again in 1 s: StoreUnavailable: not now" in lines[0].getMessage()
    assert "secret" not in "".join(map(str, itertools.chain(one.getMessage() for one in lines)))
