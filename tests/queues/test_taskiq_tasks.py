"""taskiq without a server: what is refused when decorating, what is sent, and each verdict, step by step."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import pytest
from taskiq import (
    Context,
    InMemoryBroker,
    ScheduledTask,
    ScheduleSource,
    SimpleRetryMiddleware,
    SmartRetryMiddleware,
    TaskiqDepends,
    TaskiqMessage,
    TaskiqMiddleware,
)
from taskiq.acks import AcknowledgeType
from taskiq.exceptions import NoResultError
from taskiq.receiver import Receiver

from onefold import AsyncGuard, Event, Guard, MissingKey, Policy, UsageError, subscribe
from onefold.events import Kind
from onefold.queues._shared.jobs.waits import HELD, TIMES
from onefold.queues._shared.verdict import HELD_MAX
from onefold.queues.keys import field, position
from onefold.queues.taskiq import OnefoldMiddleware, Rejected, guarded, send
from onefold.queues.taskiq import messages as taskiq_messages
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.queues.taskiq_tools import Hand
from tests.support import AsyncProxyStore, Clock, die_running, in_own_context, in_time

Story = Callable[..., Coroutine[Any, Any, None]]


def story(test: Story) -> Callable[..., None]:
    """A test that is played in an event loop of its own."""

    @functools.wraps(test)
    def played(**fixtures: Any) -> None:
        in_time(test(**fixtures))

    return played


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the worker has waited: nobody has to, here."""
    told: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        told.append(seconds)
        await real(0)

    monkeypatch.setattr("onefold.queues.taskiq.messages.asyncio.sleep", sleep)
    return told


@pytest.fixture
def hand() -> Hand:
    hand = Hand()
    hand.broker.add_middlewares(SimpleRetryMiddleware())
    return hand


@pytest.fixture
def guard() -> AsyncGuard:
    return AsyncGuard("memory:")


@pytest.fixture
def guard_sync() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


def paying(hand: Hand, guard: AsyncGuard, ran: list[Any], **options: Any) -> Any:
    """A task that pays."""

    @guarded(guard, "pay", broker=hand.broker, **{"task_name": "pay", "retry_on_error": True, **options})
    async def pay(amount: int) -> str:
        ran.append(amount)
        return f"paid {amount}"

    return pay


# Duplicates.


@story
async def test_a_duplicate_gets_the_stored_result_whichever_message_it_is(hand: Hand, guard: AsyncGuard) -> None:
    ran: list[int] = []
    pay = paying(hand, guard, ran)
    first, second = await hand.message(pay, 5), await hand.message(pay, 5, key=None, **{"Idempotency-Key": "pay-1"})

    ids = [await hand.process(message) for message in (first, first, second)]

    assert ran == [5]
    assert [await hand.result(one) for one in ids] == ["paid 5"] * 3
    assert hand.acknowledged == ids


@story
async def test_a_sync_task_gets_the_same_from_a_thread(hand: Hand, guard_sync: Guard) -> None:
    ran: list[Any] = []

    @guarded(guard_sync, "pay", broker=hand.broker)
    def pay(amount: int) -> str:
        ran.append((amount, threading.current_thread() is threading.main_thread()))
        return f"paid {amount}"

    ids = [await hand.process(await hand.message(pay, 5)) for _ in range(2)]

    assert ran == [(5, False)]
    assert [await hand.result(one) for one in ids] == ["paid 5"] * 2


@story
async def test_a_running_duplicate_comes_later_with_its_id_and_its_retries_and_is_not_done(
    hand: Hand, guard: AsyncGuard, pauses: list[float]
) -> None:
    entered, leave, ran = asyncio.Event(), asyncio.Event(), list[int]()

    @guarded(guard, "pay", broker=hand.broker, wait=0)
    async def pay(amount: int) -> str:
        ran.append(amount)
        entered.set()
        await leave.wait()
        return "paid"

    message = await hand.message(pay, 5, _retries=2)
    running = in_own_context(hand.process(message))
    await entered.wait()

    await hand.process(message)
    (again,) = hand.broker.sent
    hand.broker.sent.clear()
    await hand.process(again)
    (third,) = hand.broker.sent

    assert (again.task_id, hand.labels(again)["idempotency_key"]) == (message.task_id, "pay-1")
    assert [hand.labels(one)["_retries"] for one in (again, third)] == [2, 2]
    assert [hand.labels(one)[TIMES] for one in (again, third)] == [1, 2]
    assert "retry_on_error" not in hand.labels(third)
    assert pauses == [1.0, 2.0]
    assert not await hand.has_result(message.task_id)
    leave.set()
    await running
    await hand.process(third)
    assert (ran, await hand.result(message.task_id)) == ([5], "paid")


@story
async def test_a_store_that_is_down_uses_up_no_retry_and_nobody_counts_it(hand: Hand, pauses: list[float]) -> None:
    store, ran = AsyncProxyStore(), list[int]()
    store.down.add("claim")
    async with AsyncGuard(store) as guard:
        pay = paying(hand, guard, ran, max_retries=1)
        message = await hand.message(pay, 5)
        for _ in range(3):
            await hand.process(message)
            (message,) = hand.broker.sent
            hand.broker.sent.clear()
        assert not await hand.has_result(message.task_id)
        store.down.clear()
        await hand.process(message)

    assert (ran, len(hand.acknowledged), hand.broker.sent) == ([5], 4, [])
    assert pauses == [1.0, 2.0, 4.0]
    assert "_retries" not in hand.labels(message)


@story
async def test_a_message_waits_in_its_worker_no_longer_than_a_bound_and_the_log_says_how_long(
    hand: Hand, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    guard = AsyncGuard("memory:")
    pay = paying(hand, guard, [])
    await guard.aclose()
    await hand.process(await hand.message(pay, 5))

    assert pauses == [taskiq_messages.PAUSE_MAX]
    (line,) = [one.getMessage() for one in caplog.records if one.name == "onefold.queues.taskiq"]
    assert ": again in 5 s: " in line


class Schedule(ScheduleSource):
    """Remembers what is to be sent, and when."""

    def __init__(self) -> None:
        self.added: list[ScheduledTask] = []

    async def get_schedules(self) -> list[ScheduledTask]:
        return self.added

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        self.added.append(schedule)


@story
async def test_with_a_schedule_source_it_waits_there(guard: AsyncGuard, pauses: list[float]) -> None:
    hand, source = Hand(), Schedule()
    hand.broker.add_middlewares(OnefoldMiddleware(schedule_source=source))
    pay = paying(hand, guard, [])
    await guard.aclose()
    message = await hand.message(pay, 5)
    await hand.process(message)

    (task,) = source.added
    assert (task.task_id, task.task_name, task.args) == (message.task_id, "pay", [5])
    assert (task.labels["idempotency_key"], task.labels[TIMES]) == ("pay-1", 1)
    assert task.time is not None
    assert (pauses, hand.broker.sent, hand.acknowledged) == ([], [], [message.task_id])
    assert sum(isinstance(one, OnefoldMiddleware) for one in hand.broker.middlewares) == 1


@story
async def test_a_middleware_that_was_added_a_second_time_sends_nothing_a_second_time(guard: AsyncGuard) -> None:
    hand, source = Hand(), Schedule()
    pay = paying(hand, guard, [])
    hand.broker.add_middlewares(OnefoldMiddleware(schedule_source=source))
    await guard.aclose()
    await hand.process(await hand.message(pay, 5))

    assert (len(source.added), len(hand.broker.sent)) == (1, 0)


class Sealing(TaskiqMiddleware):
    """Turns the argument of a message around on the wire."""

    def pre_send(self, message: TaskiqMessage) -> TaskiqMessage:
        return message.model_copy(update={"args": [message.args[0][::-1]]})

    def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        return message.model_copy(update={"args": [message.args[0][::-1]]})


@pytest.mark.parametrize("order", ["ours first", "ours last"])
@story
async def test_a_message_that_comes_later_is_on_the_wire_as_before(order: str) -> None:
    hand, ran, store = Hand(), list[str](), AsyncMemoryStore()
    both = [OnefoldMiddleware(), Sealing()]
    hand.broker.add_middlewares(*(both if order == "ours first" else reversed(both)))
    guard = AsyncGuard(store, lease="1h")
    entered, leave = asyncio.Event(), asyncio.Event()

    @guarded(guard, "pay", broker=hand.broker, wait=0)
    async def pay(name: str) -> None:
        ran.append(name)
        entered.set()
        await leave.wait()
        raise ValueError("not yet")

    first, second = [await hand.message(pay, "rahul") for _ in range(2)]
    running = in_own_context(hand.process(first))
    await entered.wait()
    await hand.process(second)
    leave.set()
    await running
    await hand.take()

    assert ran == ["rahul", "rahul"]
    await guard.aclose()


@story
async def test_a_scheduler_sends_what_comes_later_also_if_it_has_no_key(hand: Hand, guard: AsyncGuard) -> None:
    pay = paying(hand, guard, [], missing_key="run")

    await pay.kicker().with_labels(**{TIMES: 1}).kiq(5)

    assert len(hand.broker.sent) == 1


@story
async def test_what_is_held_comes_a_bounded_number_of_times(hand: Hand) -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    policy = Policy(lease=1, after_crash="hold")
    die_running(store, "pay", "pay-1", policy)
    clock.advance(2)
    guard, ran = Guard(store, policy=policy), list[int]()

    @guarded(guard, "pay", broker=hand.broker, fingerprint=None)
    def pay(amount: int) -> None:
        ran.append(amount)

    await hand.process(await hand.message(pay, 5))
    (again,) = hand.broker.sent
    hand.broker.sent.clear()
    last = await hand.process(await hand.message(pay, 5, key="pay-1", **{HELD: HELD_MAX}))
    guard.close()

    assert hand.labels(again)[HELD] == 1
    assert isinstance(await hand.error(last), Rejected)
    assert (ran, hand.broker.sent) == ([], [])


@story
async def test_a_broker_that_refuses_the_copy_is_asked_again(
    hand: Hand, guard: AsyncGuard, pauses: list[float]
) -> None:
    pay = paying(hand, guard, [])
    await guard.aclose()
    message = await hand.message(pay, 5)
    hand.broker.refuses = 2
    await hand.process(message)

    assert (len(hand.broker.sent), len(hand.acknowledged)) == (1, 1)
    assert pauses[1:] == [taskiq_messages.REFUSED_SECONDS] * 2


@story
async def test_a_message_that_cannot_be_sent_again_is_not_acknowledged(hand: Hand, guard: AsyncGuard) -> None:
    pay = paying(hand, guard, [])
    await guard.aclose()
    message = await hand.message(pay, 5)
    hand.broker.refuses = taskiq_messages.SEND_TRIES
    with pytest.raises(ConnectionError):
        await hand.process(message)

    assert (hand.acknowledged, await hand.has_result(message.task_id)) == ([], False)


# Errors.


@pytest.mark.parametrize("retry", [SimpleRetryMiddleware, SmartRetryMiddleware])
@story
async def test_an_error_of_the_task_is_left_to_taskiqs_retries(
    retry: Any, guard: AsyncGuard, caplog: pytest.LogCaptureFixture
) -> None:
    hand, attempts = Hand(), list[int]()
    hand.broker.add_middlewares(retry())

    @guarded(guard, "pay", broker=hand.broker, retry_on_error=True, max_retries=2)
    async def pay(amount: int) -> None:
        attempts.append(amount)
        raise ValueError("secret 4711")

    await hand.process(await hand.message(pay, 5))
    last = await hand.take()

    assert (attempts, hand.broker.sent, len(hand.acknowledged)) == ([5, 5], [], 2)
    assert isinstance(await hand.error(last), ValueError)
    lines = [record.getMessage() for record in caplog.records if record.name == "onefold.queues.taskiq"]
    assert [line.rpartition("]: ")[2].split(" at ")[0] for line in lines] == [
        "attempt 1 failed: ValueError",
        "attempt 2 failed: ValueError",
    ]
    assert "4711" not in "".join(lines)


@story
async def test_a_final_error_is_not_retried_and_is_what_a_duplicate_gets(hand: Hand, guard: AsyncGuard) -> None:
    ran: list[int] = []

    @guarded(guard, "pay", broker=hand.broker, retry_on_error=True, final_errors=(LookupError,))
    async def pay() -> None:
        ran.append(1)
        raise LookupError("no such account")

    ids = [await hand.process(await hand.message(pay)) for _ in range(2)]

    assert (ran, hand.broker.sent) == ([1], [])
    assert [type(await hand.error(one)) for one in ids] == [LookupError, LookupError]


@pytest.mark.parametrize("last", [False, True])
@story
async def test_what_never_can_run_is_rejected_once_and_told(
    last: bool, guard: AsyncGuard, caplog: pytest.LogCaptureFixture
) -> None:
    hand, heard, ran = Hand(), list[Event](), list[int]()
    retries = SimpleRetryMiddleware(default_retry_label=True)
    hand.broker.add_middlewares(*([OnefoldMiddleware(), retries] if last else [retries]))
    pay = paying(hand, guard, ran)
    await hand.process(await hand.message(pay, 5))
    end = subscribe(heard.append)
    other = await hand.process(await hand.message(pay, 6))
    end()

    assert (ran, hand.broker.sent, len(hand.acknowledged)) == ([5], [], 2)
    assert [event.operation for event in heard if event.kind is Kind.BURIED] == ["pay"]
    error = await hand.error(other)
    assert isinstance(error, Rejected)
    assert "KeyReused" in str(error)
    (line,) = [
        one.getMessage() for one in caplog.records if one.levelno == logging.ERROR and one.name.startswith("onefold")
    ]
    assert line.startswith("pay [key ")
    assert "pay-1" not in line


@pytest.mark.parametrize(("missing_key", "ran"), [("never", []), ("run", [5, 5])])
@story
async def test_a_message_without_a_key_follows_the_policy(
    hand: Hand, guard: AsyncGuard, missing_key: str, ran: list[int]
) -> None:
    seen: list[int] = []
    paying(hand, guard, seen, missing_key=missing_key)
    ids = [await hand.process(hand.raw("pay", 5)) for _ in range(2)]

    assert (seen, hand.acknowledged, hand.broker.sent) == (ran, ids, [])
    assert isinstance(await hand.error(ids[0]), Rejected) == (missing_key == "never")


@pytest.mark.parametrize("key", [" ", True, 1.5, ["a"], "x" * 5_000])
@story
async def test_a_bad_key_is_rejected_and_the_worker_lives_on(hand: Hand, guard: AsyncGuard, key: Any) -> None:
    ran: list[int] = []
    paying(hand, guard, ran)
    bad = await hand.process(hand.raw("pay", 5, **{"idempotency-key": key}))
    await hand.process(hand.raw("pay", 5, **{"idempotency-key": "pay-1"}))

    assert ran == [5]
    assert isinstance(await hand.error(bad), Rejected)


@story
async def test_arguments_that_do_not_fit_are_left_to_retries(hand: Hand, guard: AsyncGuard) -> None:
    paying(hand, guard, [])
    await hand.process(hand.raw("pay", 5, 6, 7, idempotency_key="pay-1", retry_on_error=True))

    assert hand.labels(hand.broker.sent[0])["_retries"] == 1


@story
async def test_a_workers_own_mistake_buries_nothing(hand: Hand, guard: AsyncGuard) -> None:
    ran: list[int] = []
    pay = paying(hand, guard, ran)
    await guard.aclose()
    message = await hand.message(pay, 5)
    await hand.process(message)

    (again,) = hand.broker.sent
    assert (ran, hand.labels(again)["idempotency_key"]) == ([], "pay-1")
    assert not await hand.has_result(message.task_id)


@story
async def test_a_scope_function_that_names_nobody_buries_nothing(hand: Hand, guard: AsyncGuard) -> None:
    pay = paying(hand, guard, [], scope=lambda amount: object())
    await hand.process(await hand.message(pay, 5))

    assert len(hand.broker.sent) == 1


@story
async def test_two_tenants_may_send_the_same_key(hand: Hand, guard: AsyncGuard) -> None:
    ran: list[Any] = []

    @guarded(guard, "pay", broker=hand.broker, scope="tenant")
    async def pay(tenant: str) -> None:
        ran.append(tenant)

    for tenant in ("ann", "bob", "ann"):
        await hand.process(await hand.message(pay, tenant))

    assert ran == ["ann", "bob"]


@pytest.mark.parametrize("has_earlier", [True, False])
@story
async def test_a_result_that_was_not_kept_is_an_error_only_if_nobody_has_it(
    hand: Hand, guard: AsyncGuard, has_earlier: bool
) -> None:
    ran: list[int] = []
    pay = paying(hand, guard, ran, keep_result=False)
    first = await hand.message(pay, 5)
    await hand.process(first)
    duplicate = await hand.process(first if has_earlier else await hand.message(pay, 5))

    assert (ran, hand.broker.sent) == ([5], [])
    if has_earlier:
        assert await hand.result(duplicate) == "paid 5"
    else:
        assert "ResultNotKept" in str(await hand.error(duplicate))


# What taskiq passes, and what a function asks it for.


@story
async def test_what_taskiq_resolves_is_passed_and_not_compared(hand: Hand, guard: AsyncGuard) -> None:
    ran: list[Any] = []

    def fresh() -> object:
        return object()

    @guarded(guard, "pay", broker=hand.broker)
    async def pay(
        amount: int,
        context: Annotated[Context, TaskiqDepends()],
        thing: object = TaskiqDepends(fresh),
        note: str = "none",
    ) -> str:
        ran.append((amount, context.message.task_id, type(thing), note))
        return "paid"

    first = await hand.message(pay, 5)
    ids = [await hand.process(one) for one in (first, await hand.message(pay, 5))]

    assert ran == [(5, first.task_id, object, "none")]
    assert [await hand.result(one) for one in ids] == ["paid", "paid"]


@story
async def test_a_message_that_comes_later_has_its_arguments_as_they_came(hand: Hand) -> None:
    """taskiq converts those of its own object by their annotations."""
    store, ran = AsyncProxyStore(), list[Any]()
    store.down.add("claim")
    async with AsyncGuard(store) as guard:
        pay = paying(hand, guard, ran)
        await hand.process(await hand.message(pay, "5"))
        store.down.clear()
        (again,) = hand.broker.sent
        assert hand.broker.formatter.loads(again.message).args == ["5"]
        await hand.take()

    assert ran == [5]


@pytest.mark.parametrize("kind", ["async", "sync"])
@story
async def test_a_function_that_wants_no_result_is_done(
    hand: Hand, guard: AsyncGuard, guard_sync: Guard, kind: str
) -> None:
    ran: list[int] = []

    async def awaited() -> str:
        ran.append(1)
        raise NoResultError

    def called() -> str:
        ran.append(1)
        raise NoResultError

    chosen, function = (guard, awaited) if kind == "async" else (guard_sync, called)
    task: Any = guarded(chosen, "pay", broker=hand.broker)(function)
    ids = [await hand.process(await hand.message(task)) for _ in range(2)]

    assert (ran, hand.acknowledged) == ([1], ids)
    assert not await hand.has_result(ids[0])


@story
async def test_a_function_that_puts_itself_back_is_not_done(hand: Hand, guard: AsyncGuard) -> None:
    ran: list[int] = []

    @guarded(guard, "pay", broker=hand.broker)
    async def pay(context: Annotated[Context, TaskiqDepends()]) -> str:
        ran.append(1)
        if len(ran) == 1:
            await context.requeue()
        return "paid"

    await hand.process(await hand.message(pay))
    last = await hand.take()

    assert (len(ran), await hand.result(last)) == (2, "paid")


@story
async def test_a_time_limit_that_ends_the_wait_for_another_worker_uses_up_no_retry(hand: Hand) -> None:
    store = AsyncMemoryStore()
    guard, other = AsyncGuard(store), AsyncGuard(store)
    entered, leave, ran = asyncio.Event(), asyncio.Event(), list[int]()

    async def hold() -> None:
        entered.set()
        await leave.wait()

    running = in_own_context(other.run("pay", "pay-1", hold))
    await entered.wait()
    pay = paying(hand, guard, ran, wait="1h", timeout=0.05, fingerprint=None, max_retries=3)
    message = await hand.message(pay, 5)
    await hand.process(message)
    leave.set()
    await running

    (again,) = hand.broker.sent
    assert "_retries" not in hand.labels(again)
    assert (hand.labels(again)["retry_on_error"], hand.labels(again)["timeout"]) == (True, 0.05)
    assert (ran, await hand.has_result(message.task_id)) == ([], False)
    await guard.aclose()
    await other.aclose()


@pytest.mark.parametrize(("after_crash", "state"), [("rerun", "open"), ("hold", "running")])
@story
async def test_a_time_limit_inside_the_function_is_left_to_after_crash_and_to_retries(
    hand: Hand, guard: AsyncGuard, after_crash: Any, state: str
) -> None:
    @guarded(guard, "pay", broker=hand.broker, timeout=0.05, retry_on_error=True, after_crash=after_crash)
    async def pay() -> None:
        await asyncio.Event().wait()

    await hand.process(await hand.message(pay))
    record = await guard.read("pay", "pay-1")

    assert hand.labels(hand.broker.sent[0])["_retries"] == 1
    assert record is not None
    assert record.state.value == state


@pytest.mark.parametrize("order", ["the retries first", "the retries last"])
@story
async def test_a_time_limit_of_a_thread_that_waits_for_another_worker_uses_up_no_retry(order: str) -> None:
    hand, ran, store = Hand(), list[int](), MemoryStore()
    die_running(store, "pay", "pay-1", Policy(lease="1h"))
    both = [OnefoldMiddleware(), SimpleRetryMiddleware()]
    hand.broker.add_middlewares(*(both if order == "the retries first" else reversed(both)))
    with Guard(store) as guard:

        @guarded(guard, "pay", broker=hand.broker, wait=0.5, timeout=0.05, retry_on_error=True, max_retries=1)
        def pay() -> None:
            ran.append(1)

        message = await hand.message(pay)
        await hand.process(message)
        await asyncio.get_running_loop().shutdown_default_executor()

    (again,) = hand.broker.sent
    assert "_retries" not in hand.labels(again)
    assert (hand.labels(again)["retry_on_error"], hand.labels(again)["timeout"]) == (True, 0.05)
    assert (ran, await hand.has_result(message.task_id)) == ([], False)


@story
async def test_a_time_limit_of_a_function_in_a_thread_is_left_to_retries(hand: Hand, guard_sync: Guard) -> None:
    leave = threading.Event()

    @guarded(guard_sync, "pay", broker=hand.broker, timeout=0.2, retry_on_error=True)
    def pay() -> None:
        assert leave.wait(60)

    await hand.process(await hand.message(pay))
    leave.set()
    await asyncio.get_running_loop().shutdown_default_executor()

    assert [hand.labels(one)["_retries"] for one in hand.broker.sent] == [1]


@pytest.mark.parametrize("is_begun", [True, False])
@story
async def test_what_a_worker_cancels_because_it_stops_is_not_acknowledged(
    hand: Hand, guard: AsyncGuard, is_begun: bool
) -> None:
    entered, stays = asyncio.Event(), asyncio.Event()

    @guarded(guard, "pay", broker=hand.broker, wait="1h", fingerprint=None)
    async def pay() -> None:
        entered.set()
        await stays.wait()

    async def elsewhere() -> None:
        entered.set()
        await stays.wait()

    running = [] if is_begun else [in_own_context(guard.run("pay", "pay-1", elsewhere))]
    message = await hand.message(pay)
    working = asyncio.ensure_future(hand.process(message))
    await entered.wait()
    # In a moment it waits, or has begun.
    await asyncio.wait([working], timeout=0.2)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    stays.set()
    await asyncio.gather(*running)

    assert (hand.acknowledged, hand.broker.sent, await hand.has_result(message.task_id)) == ([], [], False)


# Keys, and what is refused.


@story
async def test_a_message_without_a_key_is_not_sent(hand: Hand, guard: AsyncGuard) -> None:
    pay = paying(hand, guard, [])

    with pytest.raises(MissingKey, match="pay: this message has no key, and nothing was sent"):
        await pay.kiq(5)
    assert hand.broker.sent == []


@story
async def test_the_id_is_a_key_only_by_wish_and_with_a_warning(hand: Hand, guard: AsyncGuard) -> None:
    ran: list[int] = []
    pay = paying(hand, guard, ran, require_key=False)
    with pytest.warns(UserWarning, match="under the id of its message"):
        await pay.kiq(5)
    await pay.kiq(5)
    first, second = hand.broker.sent
    for message in (first, first, second):
        await hand.process(message)

    assert ran == [5, 5]
    assert hand.labels(first)["idempotency-key"] == first.task_id


@story
async def test_a_position_is_a_key_only_by_name(hand: Hand, guard: AsyncGuard) -> None:
    with pytest.raises(UsageError, match="is not the sender's key"):
        position()
    with pytest.warns(UserWarning, match="does not detect duplicates"):
        key = position(changes_when_a_producer_retries=True)
    ran: list[int] = []
    pay = paying(hand, guard, ran, key=key)
    message = await hand.message(pay, 5, key=None)
    for one in (message, message, await hand.message(pay, 5, key=None)):
        await hand.process(one)

    assert ran == [5, 5]


@story
async def test_a_key_in_an_argument_is_found(hand: Hand, guard: AsyncGuard) -> None:
    ran: list[Any] = []

    @guarded(guard, "pay", broker=hand.broker, key=field("order.id"))
    async def pay(order: dict[str, Any]) -> None:
        ran.append(order["id"])

    for number in (1, 1, 2):
        await pay.kiq({"id": number})
        await hand.take()

    assert ran == [1, 2]


@story
async def test_send_returns_the_key_and_a_new_one_if_there_is_none(hand: Hand, guard: AsyncGuard) -> None:
    pay = paying(hand, guard, [])

    assert await send(pay, (5,), key="pay-1") == "pay-1"
    made = await send(pay, kwargs={"amount": 5}, queue_name="slow")
    assert await send(pay, (5,), idempotency_key="pay-2") == "pay-2"
    with pytest.raises(MissingKey):
        await send(pay, (5,), key=None)  # type: ignore[arg-type]

    labels = [hand.labels(one) for one in hand.broker.sent]
    assert [one["idempotency-key"] for one in labels] == ["pay-1", made, "pay-2"]
    assert labels[1]["queue_name"] == "slow"


@story
async def test_a_plain_call_is_plain(hand: Hand, guard: AsyncGuard, guard_sync: Guard) -> None:
    ran: list[int] = []
    pay = paying(hand, guard, ran)

    @guarded(guard_sync, "charge", broker=hand.broker)
    def charge(amount: int) -> int:
        return amount

    assert [await pay(5), await pay(5), charge(1), charge(1)] == ["paid 5", "paid 5", 1, 1]
    assert ran == [5, 5]


def refused_options() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("unknown option 'fingerprnt'", {"fingerprnt": None}),
        ("missing_key='maybe'", {"missing_key": "maybe"}),
        ("require_key=1", {"require_key": 1}),
        ("has no argument 'amont': did you mean 'amount'", {"key": "amont"}),
        ("every Exception as final", {"final_errors": (Exception,)}),
        ("a crash loses it", {"ack_type": "when_received"}),
        ("a crash loses it", {"ack_type": AcknowledgeType.WHEN_RECEIVED}),
        ("a duplicate gets the stored result", {"ack_type": "manual"}),
    ]


@pytest.mark.parametrize(("told", "options"), refused_options())
def test_wrong_options_are_refused_when_decorating(
    hand: Hand, guard: AsyncGuard, told: str, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=f"the task pay.*{told}"):
        paying(hand, guard, [], **options)


@story
async def test_a_task_of_taskiqs_own_is_refused_above_it_and_guarded_below_it(
    hand: Hand, guard: AsyncGuard, guard_sync: Guard
) -> None:
    ran: list[int] = []
    with pytest.raises(UsageError, match=r"leave @broker\.task out"):
        guarded(guard_sync, "pay", broker=hand.broker)(hand.broker.task(lambda: None))

    pay = hand.broker.task(paying(hand, guard, ran))
    for _ in range(2):
        await hand.process(await hand.message(pay, 5))

    assert ran == [5]


def test_what_cannot_be_guarded_is_refused_when_decorating(hand: Hand, guard: AsyncGuard, guard_sync: Guard) -> None:
    async def awaited() -> None: ...
    def called() -> None: ...
    def yields() -> Iterator[int]:
        yield 1

    for chosen, function, told in (
        (guard, called, "takes Guard"),
        (guard_sync, awaited, "takes AsyncGuard"),
        (guard_sync, yields, "has a `yield`"),
    ):
        with pytest.raises(UsageError, match=told):
            guarded(chosen, "pay", broker=hand.broker)(function)
    with pytest.raises(UsageError, match="broker= is str"):
        guarded(guard, "pay", broker="redis://")(awaited)  # type: ignore[arg-type]


# The worker.


@pytest.mark.parametrize("ack_type", [AcknowledgeType.WHEN_RECEIVED, AcknowledgeType.MANUAL])
@story
async def test_a_worker_that_acknowledges_too_early_runs_nothing_and_loses_nothing(
    guard: AsyncGuard, ack_type: AcknowledgeType
) -> None:
    hand, ran = Hand(ack_type=ack_type), list[int]()
    pay = paying(hand, guard, ran)
    for _ in range(2):
        with pytest.raises(UsageError, match="this worker has --ack-type"):
            await hand.process(await hand.message(pay, 5))

    assert (ran, hand.acknowledged) == ([], [])


@story
async def test_a_worker_that_acknowledges_too_early_does_not_start(hand: Hand, guard: AsyncGuard) -> None:
    paying(hand, guard, [])
    hand.broker.is_worker_process = True
    receiver = Receiver(hand.broker, max_async_tasks=1, ack_type=AcknowledgeType.WHEN_RECEIVED)

    with pytest.raises(SystemExit, match="onefold: this worker has --ack-type='when_received'"):
        await receiver.listen(asyncio.Event())


@story
async def test_a_process_pool_is_refused_for_functions_that_would_run_there(hand: Hand, guard_sync: Guard) -> None:
    @guarded(guard_sync, "pay", broker=hand.broker)
    def pay() -> None: ...

    with ProcessPoolExecutor(1) as pool:
        theirs = Hand(executor=pool)
        theirs.broker = hand.broker
        with pytest.raises(UsageError, match="--use-process-pool"):
            await theirs.process(await hand.message(pay))
    with ThreadPoolExecutor(1) as threads:
        fine = Hand(executor=threads)
        fine.broker = hand.broker
        await fine.process(await hand.message(pay))


@story
async def test_a_broker_without_acknowledgements_is_told_once(
    hand: Hand, guard: AsyncGuard, caplog: pytest.LogCaptureFixture
) -> None:
    pay = paying(hand, guard, [])
    receiver = Receiver(hand.broker, max_async_tasks=1)
    for _ in range(2):
        await receiver.callback((await hand.message(pay, 5)).message)

    (line,) = [one.getMessage() for one in caplog.records if one.name == "onefold.queues.taskiq"]
    assert "Recording has no acknowledgements" in line


@pytest.mark.parametrize("kind", ["async", "sync"])
@story
async def test_a_task_that_runs_under_another_broker_is_guarded_from_its_first_message(
    guard: AsyncGuard, guard_sync: Guard, kind: str
) -> None:
    ran: list[int] = []

    async def awaited(amount: int) -> str:
        ran.append(amount)
        return "paid"

    def called(amount: int) -> str:
        ran.append(amount)
        return "paid"

    hand, chosen = Hand(), guard if kind == "async" else guard_sync
    pay: Any = guarded(chosen, "pay", broker=hand.broker)(awaited if kind == "async" else called)
    message = await hand.message(pay, 5)
    hand.broker.middlewares.clear()
    ids = [await hand.process(message), await hand.process(message)]

    assert (ran, [await hand.result(one) for one in ids]) == ([5], ["paid"] * 2)
    hand.broker.middlewares.clear()
    await guard.aclose()
    guard_sync.close()
    await hand.process(message)
    # Its worker's mistake, and nothing is lost.
    assert len(hand.broker.sent) == 1


@story
async def test_tx_is_the_guards_and_not_the_senders(hand: Hand, tmp_path: Path) -> None:
    with Guard(f"sqlite:///{tmp_path}/wallet.db") as guard:

        @guarded(guard, "credit", broker=hand.broker, key="name")
        def credit(name: str, *, tx: sqlite3.Connection) -> int:
            tx.execute("CREATE TABLE IF NOT EXISTS wallet (name TEXT)")
            return tx.execute("INSERT INTO wallet VALUES (?)", (name,)).rowcount

        handler: Any = credit
        assert [*inspect.signature(handler.original_func).parameters] == ["name", "onefold_context"]
        for _ in range(2):
            await handler.kiq("ann")
            assert await hand.result(await hand.take()) == 1

    with closing(sqlite3.connect(tmp_path / "wallet.db")) as connection:
        assert connection.execute("SELECT name FROM wallet").fetchall() == [("ann",)]


@story
async def test_a_worker_whose_store_cannot_be_used_does_not_start(hand: Hand, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "records.db")) as other:
        other.execute("CREATE TABLE onefold_records (something TEXT)")
    with Guard(f"sqlite:///{tmp_path}/records.db") as guard:
        guarded(guard, "pay", broker=hand.broker)(lambda: None)
        await hand.broker.startup()
        hand.broker.is_worker_process = True
        with pytest.raises(SystemExit, match="onefold: "):
            await hand.broker.startup()


@story
async def test_the_broker_for_tests_works_as_a_worker_does(guard: AsyncGuard, caplog: pytest.LogCaptureFixture) -> None:
    broker, ran = InMemoryBroker(await_inplace=True), list[int]()

    @guarded(guard, "inner", broker=broker)
    async def inner(amount: int) -> int:
        ran.append(amount)
        return amount + 1

    @guarded(guard, "outer", broker=broker)
    async def outer(amount: int) -> int:
        await send(inner, (amount,), key="in-1")
        return await inner(amount)

    for _ in range(2):
        sent = await outer.kicker().with_labels(idempotency_key="out-1").kiq(5)
        assert (await sent.get_result()).return_value == 6
    await broker.shutdown()

    # Once by its message, and once by a plain call.
    assert ran == [5, 5]
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
