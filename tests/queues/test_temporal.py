"""Temporal: each verdict, on a real server. Workers that die are in `test_temporal_crashes.py`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import wraps
from typing import Any

import pytest
from temporalio import activity
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetActivityRequest, ResetWorkflowExecutionRequest
from temporalio.common import RetryPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, CancelledError
from temporalio.testing import ActivityEnvironment

from onefold import AsyncGuard, Done, Event, Guard, UsageError, current, subscribe
from onefold.events import Kind
from onefold.queues._shared.jobs.handler import Ended, GuardedJob
from onefold.queues._shared.jobs.waits import HELD, again
from onefold.queues._shared.verdict import Later
from onefold.queues.temporal import activities, guarded, per_run, per_workflow
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.queues.temporal_tools import (
    Cancelling,
    Environment,
    Order,
    Twice,
    delay_of,
    type_of,
    until,
    working,
)
from tests.support import PATIENCE, AsyncProxyStore, ProxyStore, in_time


@dataclass
class Receipt:
    order: str
    cents: int


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


# Long enough for a busy machine: a heartbeat that is missing would be another attempt.
BEAT = 3.0

Story = Callable[[Environment], Coroutine[Any, Any, Any]]


@pytest.fixture
def play(temporal_address: str, temporal_name: str) -> Callable[..., Any]:
    """Play a story with a worker for these activities; return what it returns."""

    def played(story: Story, *activities: Any, **options: Any) -> Any:
        async def whole() -> Any:
            async with working(temporal_address, temporal_name, activities, **options) as environment:
                return await story(environment)

        return in_time(whole())

    return played


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "onefold.queues.temporal"]


async def try_now(environment: Environment, handle: Any, pending: Any) -> None:
    """Let the server try an activity again without the rest of its delay."""
    await environment.client.workflow_service.reset_activity(
        ResetActivityRequest(
            namespace="default",
            execution=WorkflowExecution(workflow_id=handle.id),
            identity="tests",
            id=pending.activity_id,
        )
    )


# Keys.


def test_an_activity_runs_once_and_returns_its_result(play: Callable[..., Any], guard: Guard) -> None:
    keys: list[str] = []

    @activity.defn
    @guarded(guard, "charge")
    def charge(receipt: Receipt) -> Receipt:
        keys.append(current().key)
        return Receipt(receipt.order, receipt.cents + 1)

    async def story(environment: Environment) -> Any:
        return await environment.run(charge, Receipt("o-1", 4200))

    assert play(story, charge) == {"order": "o-1", "cents": 4201}
    record = guard.read("charge", keys[0])
    assert record is not None
    assert record.state == "done"


def test_each_activity_of_a_workflow_has_a_key_of_its_own(play: Callable[..., Any], guard: Guard) -> None:
    keys: list[str] = []

    @activity.defn
    @guarded(guard, "charge")
    def charge(cents: int) -> int:
        keys.append(current().key)
        return len(keys)

    async def story(environment: Environment) -> Any:
        handle = await environment.start(Order("charge", [4200]), Twice)
        return await handle.result()

    assert play(story, charge) == [1, 2]
    assert len(set(keys)) == 2


def test_all_attempts_have_one_key_and_the_error_is_unmasked(
    play: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    seen: list[tuple[str, str]] = []
    guard = AsyncGuard("memory:")

    @activity.defn
    @guarded(guard, "charge")
    async def charge(cents: int) -> int:
        seen.append((current().key, current().key_for("card")))
        if len(seen) < 2:
            raise ValueError("not yet")
        return cents

    async def story(environment: Environment) -> Any:
        found = await environment.run(charge, 4200)
        await guard.aclose()
        return found

    assert play(story, charge) == 4200
    assert (len(seen), len(set(seen))) == (2, 1)
    assert [line.partition("]: ")[2].partition(" at ")[0] for line in told(caplog)] == ["attempt 1 failed: ValueError"]


def test_an_error_that_is_not_retried_keeps_its_type_and_text(play: Callable[..., Any], guard: Guard) -> None:
    @activity.defn
    @guarded(guard, "charge")
    def charge(cents: int) -> None:
        raise ApplicationError("declined", {"code": 51}, type="Declined", non_retryable=True)

    async def story(environment: Environment) -> ApplicationError:
        return await environment.fails(charge, 4200)

    error = play(story, charge)
    assert (error.type, error.message, error.details, error.non_retryable) == (
        "Declined",
        "declined",
        ({"code": 51},),
        True,
    )


def test_another_run_of_a_workflow_runs_again_and_per_workflow_does_not(play: Callable[..., Any], guard: Guard) -> None:
    ran: list[str] = []

    @activity.defn
    @guarded(guard, "by run")
    def by_run(name: str) -> int:
        ran.append(name)
        return len(ran)

    @activity.defn
    @guarded(guard, "by workflow", key=per_workflow())
    def by_workflow(name: str) -> int:
        ran.append(name)
        return len(ran)

    async def story(environment: Environment) -> Any:
        again = {"id_reuse_policy": WorkflowIDReusePolicy.ALLOW_DUPLICATE, "id": environment.queue}
        found = [await environment.run(by_run, "run", activity_id="charge", **again) for _ in range(2)]
        found.append(await environment.run(by_run, "run", continues=1))
        ran.append("-")
        found += [await environment.run(by_workflow, "workflow", activity_id="charge", **again) for _ in range(2)]
        return found

    # Continue-As-New numbers its activities anew: each run is another one.
    assert play(story, by_run, by_workflow) == [1, 2, 4, 6, 6]
    assert ran == ["run"] * 4 + ["-"] + ["workflow"]


@pytest.mark.more
def test_with_the_key_of_a_workflow_continue_as_new_gets_the_stored_result(
    play: Callable[..., Any], guard: Guard
) -> None:
    ran: list[str] = []

    @activity.defn
    @guarded(guard, "charge", key=per_workflow())
    def charge(name: str) -> int:
        ran.append(name)
        return len(ran)

    async def story(environment: Environment) -> Any:
        return await environment.run(charge, "a", activity_id="charge", continues=1)

    assert play(story, charge) == 1


@pytest.mark.parametrize("is_of_workflow", [False, True])
def test_after_a_reset_an_activity_runs_again_unless_its_key_is_that_of_the_workflow(
    play: Callable[..., Any], guard: Guard, is_of_workflow: bool
) -> None:
    ran: list[str] = []

    @activity.defn
    @guarded(guard, "charge", key=per_workflow() if is_of_workflow else per_run())
    def charge(name: str) -> int:
        ran.append(name)
        return len(ran)

    async def story(environment: Environment) -> Any:
        handle = await environment.start(Order("charge", ["a"], activity_id="charge"))
        await handle.result()
        await environment.client.workflow_service.reset_workflow_execution(
            ResetWorkflowExecutionRequest(
                namespace="default",
                workflow_execution=WorkflowExecution(workflow_id=handle.id, run_id=handle.result_run_id or ""),
                reason="tests",
                # After the first workflow task has begun.
                workflow_task_finish_event_id=3,
                request_id="reset",
            )
        )
        return await environment.client.get_workflow_handle(handle.id).result()

    assert play(story, charge) == (1 if is_of_workflow else 2)
    assert len(ran) == (1 if is_of_workflow else 2)


def test_a_number_of_temporals_is_no_key_of_a_workflow(play: Callable[..., Any], guard: Guard) -> None:
    @activity.defn
    @guarded(guard, "charge", key=per_workflow())
    def charge(name: str) -> None:
        raise AssertionError("it ran")

    async def story(environment: Environment) -> ApplicationError:
        return await environment.fails(charge, "a")

    error = play(story, charge)
    assert (error.type, error.non_retryable) == ("MissingKey", True)
    assert "activity_id='charge'" in error.message


def test_a_key_among_the_arguments_is_the_same_in_every_workflow(play: Callable[..., Any], guard: Guard) -> None:
    ran: list[str] = []

    @activity.defn
    @guarded(guard, "charge", key="order")
    def charge(order: str, cents: int) -> int:
        ran.append(order)
        return cents

    async def story(environment: Environment) -> Any:
        found = [await environment.run(charge, "o-1", 4200) for _ in range(2)]
        return found, await environment.fails(charge, "o-1", 1)

    found, error = play(story, charge)
    assert (found, ran) == ([4200, 4200], ["o-1"])
    assert (error.type, error.non_retryable, "o-1" in error.message) == ("KeyReused", True, False)


def test_a_workflow_id_of_any_length_makes_a_key(play: Callable[..., Any], guard: Guard) -> None:
    keys: list[str] = []

    @activity.defn
    @guarded(guard, "charge")
    def charge() -> None:
        keys.append(current().key)

    async def story(environment: Environment) -> None:
        for end in "ab":
            await environment.run(charge, id=f"{environment.queue}{'ä' * 400}{end}")

    play(story, charge)
    assert [key.partition(":")[0] for key in keys] == ["sha256"] * 2
    assert len(set(keys)) == 2


# Duplicates of what runs.


def test_an_activity_three_times_as_long_as_its_timeout_runs_once_and_its_late_end_is_the_result(
    play: Callable[..., Any], guard: Guard
) -> None:
    ran, leave = list[int](), threading.Event()

    @activity.defn
    @guarded(guard, "charge", wait=0)
    def charge(cents: int) -> str:
        ran.append(activity.info().attempt)
        assert leave.wait(PATIENCE)
        return f"charged by attempt {activity.info().attempt}"

    async def story(environment: Environment) -> Any:
        handle = await environment.start(Order("charge", [4200], seconds=0.5))

        async def third() -> bool:
            return bool((await environment.pending(handle)).attempt >= 3)

        await until(third, "two attempts have found it running")
        pending = await environment.pending(handle)
        leave.set()
        return type_of(pending), await handle.result()

    # The first attempt has timed out, and nobody listens to it; its result is in the record.
    assert play(story, charge) == ("InProgress", "charged by attempt 1")
    assert ran == [1]


@pytest.mark.more
def test_a_running_duplicate_is_tried_again_later(play: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onefold.queues.temporal")
    store, ran = AsyncProxyStore(), list[int]()
    guard = AsyncGuard(store)

    @activity.defn
    @guarded(guard, "charge", key="order", wait=0, lease="1h", fingerprint=None)
    async def charge(order: str) -> str:
        ran.append(1)
        return "charged"

    async def story(environment: Environment) -> Any:
        leave, begun = asyncio.Event(), asyncio.Event()

        async def run() -> str:
            begun.set()
            await leave.wait()
            return "by somebody else"

        other = asyncio.create_task(guard.run("charge", "o-1", run, lease="1h"))
        await begun.wait()
        handle = await environment.start(Order("charge", ["o-1"]))
        pending = await environment.pending(handle)
        leave.set()
        await other
        result = await handle.result()
        await guard.aclose()
        return type_of(pending), delay_of(pending), result

    assert play(story, charge) == ("InProgress", 1.0, "by somebody else")
    assert ran == []
    assert "again in" in told(caplog)[0]
    assert "o-1" not in caplog.text


def test_what_is_held_waits_for_a_person_and_not_for_another_run(play: Callable[..., Any]) -> None:
    store = MemoryStore()
    guard = Guard(store, after_crash="hold")
    ran: list[int] = []

    @activity.defn
    @guarded(guard, "charge", key="order", fingerprint=None, wait=0)
    def charge(order: str) -> str:
        ran.append(1)
        raise TimeoutError("nobody knows")

    async def story(environment: Environment) -> Any:
        handle = await environment.start(Order("charge", ["o-1"]))

        async def is_held() -> bool:
            return type_of(await environment.pending(handle)) == "Held"

        await until(is_held, "it is held")
        pending = await environment.pending(handle)
        guard.resolve("charge", "o-1", Done("charged by hand"), by="rahul", reason="looked it up")
        await try_now(environment, handle, pending)
        return delay_of(pending), await handle.result()

    with guard:
        assert play(story, charge) == (60.0, "charged by hand")
    assert ran == [1]


def test_a_workflow_that_wants_to_react_to_held_names_it_in_its_retry_policy(
    play: Callable[..., Any], temporal_name: str, guard: Guard
) -> None:
    @activity.defn
    @guarded(guard, "charge", key="order", fingerprint=None, after_crash="hold", wait=0)
    def charge(order: str) -> str:
        raise TimeoutError("nobody knows")

    async def story(environment: Environment) -> Any:
        await environment.fails(charge, "o-1", attempts=1)
        return await environment.fails(charge, "o-1", attempts=1)

    error = play(story, charge)
    assert (error.type, error.non_retryable) == ("Held", False)
    assert RetryPolicy(non_retryable_error_types=["Held"]).non_retryable_error_types == [error.type]


def test_each_attempt_that_has_to_wait_waits_longer() -> None:
    info = ActivityEnvironment.default_info()
    calls = [activities.call_of(replace(info, attempt=attempt), (), {}) for attempt in (1, 2, 3, 4, 20)]

    assert [again(Later(1.0, "it runs"), call.headers)[0] for call in calls] == [1.0, 1.0, 2.0, 4.0, 60.0]
    assert [call.headers[HELD] for call in calls] == [0, 1, 2, 3, 19]


# What never can run, and whose mistake it is.


class Declined(Exception):
    """A final answer of the card's bank."""


def test_a_remembered_failure_is_not_retried_and_keeps_its_type(play: Callable[..., Any], guard: Guard) -> None:
    ran: list[int] = []
    buried: list[str] = []

    @activity.defn
    @guarded(guard, "charge", key="order", final_errors=[Declined])
    def charge(order: str) -> None:
        ran.append(1)
        raise Declined("no money")

    async def story(environment: Environment) -> Any:
        return [await environment.fails(charge, "o-1") for _ in range(2)]

    def heard(event: Event) -> None:
        if event.kind is Kind.BURIED:
            buried.append(event.operation)

    unsubscribe = subscribe(heard)
    errors = play(story, charge)
    unsubscribe()
    assert [(one.type, one.message, one.non_retryable) for one in errors] == [("Declined", "no money", True)] * 2
    assert (ran, buried) == ([1], ["charge", "charge"])


def test_a_final_error_of_temporals_own_kind_keeps_its_details(play: Callable[..., Any], guard: Guard) -> None:
    @activity.defn
    @guarded(guard, "charge", key="order", final_errors=[ApplicationError])
    def charge(order: str) -> None:
        raise ApplicationError("declined", 51, type="Declined")

    async def story(environment: Environment) -> Any:
        return await environment.fails(charge, "o-1")

    error = play(story, charge)
    assert (error.type, error.message, error.details, error.non_retryable) == ("Declined", "declined", (51,), True)


def test_a_result_that_was_not_kept_is_told_to_the_workflow(play: Callable[..., Any], guard: Guard) -> None:
    @activity.defn
    @guarded(guard, "charge", key="order", keep_result=False)
    def charge(order: str) -> str:
        return "receipt"

    async def story(environment: Environment) -> Any:
        return await environment.run(charge, "o-1"), await environment.fails(charge, "o-1")

    first, error = play(story, charge)
    assert (first, error.type, error.non_retryable) == ("receipt", "ResultNotKept", True)


def test_a_store_that_is_down_buries_nothing(play: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    store, ran = ProxyStore(), list[int]()

    @activity.defn
    @guarded(Guard(store), "charge")
    def charge(cents: int) -> int:
        ran.append(cents)
        return cents

    async def story(environment: Environment) -> Any:
        store.down.add("claim")
        handle = await environment.start(Order("charge", [4200]))
        pending = await environment.pending(handle)
        store.down.clear()
        return type_of(pending), await handle.result()

    assert play(story, charge) == ("StoreUnavailable", 4200)
    assert ran == [4200]


def test_a_worker_with_a_closed_guard_buries_nothing(play: Callable[..., Any]) -> None:
    store, ran = MemoryStore(), list[int]()
    closed = Guard(store)
    closed.close()

    def made(guard: Guard) -> Any:
        @activity.defn
        @guarded(guard, "charge")
        def charge(cents: int) -> int:
            ran.append(cents)
            return cents

        return charge

    async def wrong(environment: Environment) -> Any:
        handle = await environment.start(Order("charge", [4200]), id=environment.queue)
        pending = await environment.pending(handle)
        return type_of(pending), delay_of(pending)

    async def right(environment: Environment) -> Any:
        handle = environment.client.get_workflow_handle(environment.queue)
        await try_now(environment, handle, await environment.pending(handle))
        return await handle.result()

    assert play(wrong, made(closed)) == ("UsageError", 60.0)
    assert ran == []
    # The same worker, repaired.
    with Guard(store) as guard:
        assert play(right, made(guard)) == 4200


# Decorators.


def test_the_guard_may_be_on_top(play: Callable[..., Any], guard: Guard) -> None:
    ran: list[int] = []

    @guarded(guard, "charge", key="cents")
    @activity.defn(name="charge-card")
    def charge(cents: int) -> int:
        ran.append(cents)
        return cents

    async def story(environment: Environment) -> Any:
        return [await environment.run("charge-card", 4200) for _ in range(2)]

    assert play(story, charge) == [4200, 4200]
    assert ran == [4200]


def test_a_decorator_in_between_that_hides_the_guard_is_told(play: Callable[..., Any], guard: Guard) -> None:
    ran: list[int] = []

    def timed(function: Any) -> Any:
        @wraps(function)
        def inner(*args: Any) -> Any:
            return function(*args)

        return inner

    @guarded(guard, "charge", key="cents")
    def charge(cents: int) -> int:
        ran.append(cents)
        return cents

    named = activity.defn(name="charge-card")(timed(charge))
    plain = activity.defn(timed(charge))

    async def story(environment: Environment) -> Any:
        found = [await environment.run("charge", 4200) for _ in range(2)]
        handle = await environment.start(Order("charge-card", [1]))
        pending = await environment.pending(handle)
        return found, type_of(pending), pending.last_failure.message

    found, kind, text = play(story, named, plain)
    assert (found, ran) == ([4200, 4200], [4200])
    assert kind == "UsageError"
    assert "directly below @activity.defn" in text


def test_a_plain_call_is_not_guarded_also_inside_another_activity(play: Callable[..., Any], guard: Guard) -> None:
    ran: list[int] = []

    @activity.defn
    @guarded(guard, "charge")
    def charge(cents: int) -> int:
        ran.append(cents)
        return cents if cents == 1 else charge(1)

    @activity.defn
    def both(cents: int) -> int:
        return charge(cents) + charge(cents)

    async def story(environment: Environment) -> Any:
        return await environment.run(both, 1), await environment.run(charge, 2)

    assert charge(1) == 1
    assert play(story, charge, both) == (2, 1)
    assert ran == [1, 1, 1, 2, 1]


def test_a_method_is_guarded(play: Callable[..., Any], guard: Guard) -> None:
    class Shop:
        def __init__(self) -> None:
            self.ran: list[int] = []

        @activity.defn
        @guarded(guard, "charge", key="cents")
        def charge(self, cents: int) -> int:
            self.ran.append(cents)
            return cents

    shop = Shop()

    async def story(environment: Environment) -> Any:
        return [await environment.run("charge", 4200) for _ in range(2)]

    assert play(story, shop.charge) == [4200, 4200]
    assert shop.ran == [4200]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": "ordre"}, "has no argument 'ordre'"),
        ({"heartbeat": "no"}, "heartbeat='no' is neither True nor False"),
        ({"kepe": "1h"}, "did you mean"),
        ({"missing_key": "maybe"}, "neither 'never' nor 'run'"),
    ],
)
def test_a_wrong_option_is_refused_when_decorating(guard: Guard, options: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        guarded(guard, "charge", **options)(lambda order: None)


def test_an_async_activity_needs_an_async_guard(guard: Guard) -> None:
    async def charge() -> None: ...

    with pytest.raises(UsageError, match="takes AsyncGuard"):
        guarded(guard, "charge")(charge)


# Cancellation and heartbeats.


@pytest.mark.more
def test_under_rerun_a_cancelled_sync_activity_is_released(play: Callable[..., Any], guard: Guard) -> None:
    entered, keys = threading.Event(), list[str]()

    @activity.defn
    @guarded(guard, "charge", heartbeat=True)
    def charge(cents: int) -> int:
        keys.append(current().key)
        entered.set()
        while True:
            # The exception comes between two of these.
            threading.Event().wait(0.01)

    async def story(environment: Environment) -> Any:
        handle = await environment.start(Order("charge", [4200], heartbeat=BEAT), Cancelling)
        await until(entered.is_set, "it runs")
        await handle.signal(Cancelling.cancel)
        return await handle.result()

    assert play(story, charge) == "CancelledError"
    record = guard.read("charge", keys[0])
    assert record is None or record.state == "open"


def test_under_hold_a_cancelled_sync_activity_is_held(play: Callable[..., Any], guard: Guard) -> None:
    entered = threading.Event()

    @activity.defn
    @guarded(guard, "charge", key="order", heartbeat=True, after_crash="hold")
    def charge(order: str) -> int:
        entered.set()
        while True:
            threading.Event().wait(0.01)

    async def story(environment: Environment) -> Any:
        handle = await environment.start(Order("charge", ["o-1"], heartbeat=BEAT), Cancelling)
        await until(entered.is_set, "it runs")
        await handle.signal(Cancelling.cancel)
        return await handle.result()

    assert play(story, charge) == "CancelledError"
    record = guard.read("charge", "o-1")
    assert record is not None
    assert record.state == "held"


@pytest.mark.parametrize(
    ("after_crash", "state"), [("rerun", None), pytest.param("hold", "running", marks=pytest.mark.more)]
)
def test_a_cancelled_async_activity_is_released_or_stays_claimed(
    play: Callable[..., Any], after_crash: Any, state: str | None
) -> None:
    guard = AsyncGuard("memory:", lease="1h")
    entered = threading.Event()

    @activity.defn
    @guarded(guard, "charge", key="order", heartbeat=True, after_crash=after_crash)
    async def charge(order: str) -> str:
        entered.set()
        await asyncio.Event().wait()
        return order

    async def story(environment: Environment) -> Any:
        handle = await environment.start(Order("charge", ["o-1"], heartbeat=BEAT), Cancelling)
        await until(entered.is_set, "it runs")
        await handle.signal(Cancelling.cancel)
        found = await handle.result()
        record = await guard.read("charge", "o-1")
        await guard.aclose()
        return found, None if record is None or record.state == "open" else record.state

    assert play(story, charge) == ("CancelledError", state)


def test_a_worker_that_shuts_down_releases_what_it_runs(play: Callable[..., Any]) -> None:
    store, keys = AsyncMemoryStore(), list[str]()

    def made(guard: AsyncGuard, *, is_over: bool) -> Any:
        @activity.defn
        @guarded(guard, "charge")
        async def charge(cents: int) -> int:
            keys.append(current().key)
            if not is_over:
                await asyncio.Event().wait()
            return cents

        return charge

    async def leaves(environment: Environment) -> None:
        await environment.start(Order("charge", [4200]), id=environment.queue)
        await until(lambda: keys, "it runs")

    async def comes(environment: Environment) -> Any:
        return await environment.client.get_workflow_handle(environment.queue).result()

    # Its lease would outlive the test.
    play(leaves, made(AsyncGuard(store, lease="1h"), is_over=False))
    assert play(comes, made(AsyncGuard(store, lease="1h"), is_over=True)) == 4200
    assert (len(keys), len(set(keys))) == (2, 1)


@pytest.mark.more
def test_an_activity_that_a_client_starts_has_a_key_of_its_own_run(play: Callable[..., Any], guard: Guard) -> None:
    keys: list[str] = []

    @activity.defn
    @guarded(guard, "charge")
    def charge(cents: int) -> int:
        keys.append(current().key)
        if len(keys) == 1:
            raise ValueError("not yet")
        return cents

    async def story(environment: Environment) -> Any:
        options: dict[str, Any] = {"task_queue": environment.queue, "id": environment.queue}
        limit = timedelta(seconds=PATIENCE)
        return [
            await environment.client.execute_activity(charge, 4200, start_to_close_timeout=limit, **options)
            for _ in range(2)
        ]

    assert play(story, charge) == [4200, 4200]
    # Two attempts of the first one, and the second one.
    assert (len(keys), keys[0] == keys[1], keys[1] == keys[2]) == (3, True, False)


@pytest.mark.more
@pytest.mark.parametrize("is_async", [False, True])
def test_an_activity_sends_heartbeats_for_as_long_as_it_takes(play: Callable[..., Any], is_async: bool) -> None:
    guard: Any = AsyncGuard("memory:") if is_async else Guard("memory:")
    attempts: list[int] = []
    begun = threading.Event()
    leave = threading.Event()

    async def waiting(cents: int) -> int:
        attempts.append(activity.info().attempt)
        begun.set()
        await until(leave.is_set, "it may end")
        return cents

    def blocking(cents: int) -> int:
        attempts.append(activity.info().attempt)
        begun.set()
        assert leave.wait(PATIENCE)
        return cents

    function: Any = waiting if is_async else blocking
    charge = activity.defn(name="charge")(guarded(guard, "charge", heartbeat=True)(function))

    async def story(environment: Environment) -> Any:
        handle = await environment.start(Order("charge", [4200], heartbeat=1.5))
        await until(begun.is_set, "it runs")
        first = await seen(handle)

        async def several() -> bool:
            return (await seen(handle)) > first + 1.6

        await until(several, "heartbeats over more than one time-out")
        # Another attempt would find it running, and return its result, too.
        attempt = (await pending(handle)).attempt
        leave.set()
        found = await handle.result()
        if is_async:
            await guard.aclose()
        return attempt, found

    async def pending(handle: Any) -> Any:
        return (await handle.describe()).raw_description.pending_activities[0]

    async def seen(handle: Any) -> float:
        found = (await pending(handle)).last_heartbeat_time
        return float(found.seconds + found.nanos / 1e9)

    assert play(story, charge) == (1, 4200)
    assert attempts == [1]


def test_temporals_own_cancellation_before_the_function_is_passed_on(guard: Guard) -> None:
    job = GuardedJob.__new__(GuardedJob)
    ended = Ended(Later(1.0, "it was cancelled before it was called"), error=CancelledError("now"))
    with pytest.raises(CancelledError):
        activities.settled(job, None, None, ended)  # type: ignore[arg-type]
