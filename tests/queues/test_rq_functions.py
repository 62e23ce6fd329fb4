"""RQ without a forking worker: what is refused when decorating, what is sent, and each verdict, on a real server."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rq import Queue, Retry
from rq.exceptions import ShutDownImminentException
from rq.scheduler import RQScheduler
from rq.timeouts import JobTimeoutException

from onefold import AsyncGuard, Event, Guard, Policy, ResultNotKept, UsageError, current, subscribe
from onefold.events import Kind
from onefold.queues._shared.jobs.waits import HELD, TIMES
from onefold.queues._shared.verdict import HELD_MAX
from onefold.queues.keys import position
from onefold.queues.rq import guarded, send
from onefold.queues.rq import jobs as rq_jobs
from onefold.queues.rq import loops as rq_loops
from onefold.stores.memory import MemoryStore
from tests.queues.rq_tools import Hand, published
from tests.support import Clock, ProxyStore, die_running

KEY = "idempotency-key"


@pytest.fixture
def hand(valkey_url: str) -> Iterator[Hand]:
    with closing(Hand(valkey_url, f"onefold-{secrets.token_hex(6)}")) as hand:
        yield hand


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of a job that waits in its worker; none is made."""
    found: list[float] = []
    monkeypatch.setattr(rq_jobs, "time", SimpleNamespace(sleep=found.append))
    return found


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """RQ opens an event loop for each job, and closes none."""
    made, new = list[asyncio.AbstractEventLoop](), asyncio.new_event_loop

    def opened() -> asyncio.AbstractEventLoop:
        made.append(new())
        return made[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", opened)
    yield
    for loop in made:
        loop.close()


def paying(guard: Guard, ran: list[Any], **options: Any) -> Any:
    @guarded(guard, "pay", **options)
    def pay(amount: int) -> str:
        ran.append(amount)
        return f"paid {amount}"

    return pay


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "onefold.queues.rq"]


# Duplicates.


def test_a_duplicate_gets_the_stored_result_whichever_job_it_is(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []
    pay = paying(guard, ran)
    jobs = [hand.enqueue(pay, 5, key="pay-1") for _ in range(2)]
    jobs.append(hand.queue.enqueue_call(pay, args=(5,), meta={"idempotency_key": "pay-1"}))
    hand.work(3)
    hand.queue.enqueue_job(jobs[0])
    hand.work()

    assert ran == [5]
    assert [job.return_value(refresh=True) for job in jobs] == ["paid 5"] * 3


def test_a_running_duplicate_comes_later_with_its_retries_and_is_not_done(
    hand: Hand, guard: Guard, pauses: list[float]
) -> None:
    entered, leave, ran = threading.Event(), threading.Event(), list[int]()

    def handle(amount: int) -> str:
        ran.append(amount)
        entered.set()
        assert leave.wait(30)
        return "paid"

    pay = guarded(guard, "pay", wait=0, fingerprint=None)(handle)
    running = threading.Thread(target=guard.run, args=("pay", "pay-1", lambda: handle(5)))
    running.start()
    assert entered.wait(30)

    job = hand.enqueue(pay, 5, key="pay-1", retry=Retry(max=3))
    hand.work(2)
    job.refresh()
    counted = (job.meta[TIMES], job.retries_left, job.number_of_retries, hand.state(job))
    leave.set()
    running.join(30)
    hand.work()

    assert counted == (2, 3, 0, "queued")
    assert pauses == [1.0, 2.0]
    assert (ran, job.return_value(refresh=True)) == ([5], "paid")


def test_with_a_scheduler_a_job_that_comes_later_waits_there(hand: Hand, pauses: list[float]) -> None:
    store = ProxyStore()
    store.down.add("claim")
    hand.connection.set(RQScheduler.get_locking_key(hand.queue.name), "1")
    with Guard(store) as guard:
        job = hand.enqueue(paying(guard, []), 5, key="pay-1")
        hand.work()

    assert (hand.state(job), pauses) == ("scheduled", [])
    assert job.id in hand.queue.scheduled_job_registry


def test_a_store_that_is_down_uses_up_no_retry(hand: Hand, pauses: list[float]) -> None:
    store, ran = ProxyStore(), list[int]()
    store.down.add("claim")
    with Guard(store) as guard:
        job = hand.enqueue(paying(guard, ran), 5, key="pay-1", timeout=9)
        hand.work(4)
        store.down.clear()
        hand.work()

    assert (ran, hand.state(job)) == ([5], "finished")
    # Not longer than a third of what the job may take.
    assert pauses == [1.0, 2.0, 3.0, 3.0]


def test_what_is_held_comes_a_bounded_number_of_times(hand: Hand, pauses: list[float]) -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    policy = Policy(lease=1, after_crash="hold")
    die_running(store, "pay", "pay-1", policy)
    clock.advance(2)
    with Guard(store, policy=policy) as guard:
        job = hand.enqueue(paying(guard, [], fingerprint=None), 5, key="pay-1")
        hand.work()
        job.refresh()
        held = job.meta[HELD]
        job.meta = {**job.meta, HELD: HELD_MAX}
        job.save_meta()
        hand.work()

    assert (held, hand.state(job)) == (1, "failed")
    assert pauses == [rq_jobs.PAUSE_MAX]


# Errors.


def test_an_error_of_the_function_is_left_to_rqs_retry(
    hand: Hand, guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    @guarded(guard, "pay")
    def pay() -> None:
        ran.append(1)
        raise ValueError("secret 4711")

    job = hand.enqueue(pay, key="pay-1", retry=Retry(max=1))
    hand.work(2)

    assert (len(ran), hand.state(job)) == (2, "failed")
    assert [line.rpartition("]: ")[2].split(" at ")[0] for line in told(caplog)] == ["failed: ValueError"] * 2
    assert "4711" not in "".join(told(caplog))


def test_a_function_that_returns_a_retry_is_not_done(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []

    @guarded(guard, "pay")
    def pay() -> Any:
        ran.append(1)
        return Retry(max=2) if len(ran) < 2 else "paid"

    job = hand.enqueue(pay, key="pay-1")
    hand.work(2)

    job.refresh()
    assert (len(ran), job.return_value(), job.number_of_retries) == (2, "paid", 1)


def test_what_never_can_run_fails_at_once_and_is_told(
    hand: Hand, guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []
    pay = paying(guard, [])
    hand.enqueue(pay, 5, key="pay-1")
    other = hand.enqueue(pay, 6, key="pay-1", retry=Retry(max=3))
    end = subscribe(heard.append)
    hand.work(2)
    end()

    assert hand.state(other) == "failed"
    assert other.id in hand.queue.failed_job_registry
    assert [event.operation for event in heard if event.kind is Kind.BURIED] == ["pay"]
    found = other.latest_result()
    assert found is not None
    assert "KeyReused" in str(found.exc_string)
    (line,) = told(caplog)
    assert "rejected, never again: KeyReused" in line
    assert "pay-1" not in line


def test_a_final_error_is_not_retried_and_is_what_a_duplicate_gets(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []

    @guarded(guard, "pay", final_errors=(LookupError,))
    def pay() -> None:
        ran.append(1)
        raise LookupError("no such account")

    jobs = [hand.enqueue(pay, key="pay-1", retry=Retry(max=3)) for _ in range(2)]
    hand.work(5)

    assert len(ran) == 1
    assert [hand.state(job) for job in jobs] == ["failed"] * 2
    assert all("LookupError" in str(job.latest_result().exc_string) for job in jobs)  # type: ignore[union-attr]


@pytest.mark.parametrize(("missing_key", "times", "state"), [("never", 0, "failed"), ("run", 1, "finished")])
def test_a_job_without_a_key_follows_the_policy(
    hand: Hand, guard: Guard, missing_key: Any, times: int, state: str
) -> None:
    ran: list[int] = []
    job = hand.enqueue(paying(guard, ran, missing_key=missing_key), 5)
    hand.work()

    assert (len(ran), hand.state(job)) == (times, state)


def test_a_job_without_a_key_says_who_gives_it_one(hand: Hand, guard: Guard) -> None:
    job = hand.enqueue(paying(guard, []), 5)
    hand.work()

    assert "has no key, and nothing ran. Its sender gives it one with send(" in str(job.latest_result().exc_string)  # type: ignore[union-attr]


def test_a_workers_own_mistake_buries_nothing(hand: Hand, pauses: list[float]) -> None:
    guard, ran = Guard("memory:"), list[int]()
    pay = paying(guard, ran)
    guard.close()
    job = hand.enqueue(pay, 5, key="pay-1")
    hand.work()

    assert (ran, hand.state(job), pauses) == ([], "queued", [rq_jobs.PAUSE_MAX])


# Interrupts.


def late(signum: int | None) -> BaseException:
    return JobTimeoutException("too long") if signum is None else ShutDownImminentException("now", {})


@pytest.mark.parametrize("by", [None, 15])
@pytest.mark.parametrize(("after_crash", "state"), [("rerun", ""), ("hold", "held")])
def test_an_interrupt_leaves_the_outcome_to_after_crash(
    hand: Hand, guard: Guard, by: int | None, after_crash: Any, state: str
) -> None:
    @guarded(guard, "pay", after_crash=after_crash, ambiguous_errors=(OSError,))
    def pay() -> None:
        raise late(by)

    job = hand.enqueue(pay, key="pay-1")
    hand.work()

    record = guard.read("pay", "pay-1")
    assert ("" if record is None else record.state.value) == state
    assert type(late(by)).__name__ in str(job.latest_result().exc_string)  # type: ignore[union-attr]


def test_an_interrupt_that_the_policy_calls_final_is_final(hand: Hand, guard: Guard) -> None:
    @guarded(guard, "pay", final_errors=(JobTimeoutException,))
    def pay() -> None:
        raise late(None)

    hand.enqueue(pay, key="pay-1", retry=Retry(max=3))
    hand.work(4)

    record = guard.read("pay", "pay-1")
    assert record is not None
    assert record.state.value == "failed"


@pytest.mark.usefixtures("loops")
def test_an_interrupt_in_an_async_function_leaves_the_outcome_to_after_crash(hand: Hand) -> None:
    guard = AsyncGuard("memory:")

    @guarded(guard, "pay", after_crash="hold", ambiguous_errors=(OSError,))
    async def pay() -> None:
        raise late(None)

    hand.enqueue(pay, key="pay-1")
    hand.work()

    record = asyncio.run(guard.read("pay", "pay-1"))
    assert record is not None
    assert record.state.value == "held"


def test_a_real_time_limit_is_ambiguous(hand: Hand, guard: Guard) -> None:
    @guarded(guard, "pay", after_crash="hold")
    def pay() -> None:
        time.sleep(30)

    job = hand.enqueue(pay, key="pay-1", timeout=1)
    hand.work()

    record = guard.read("pay", "pay-1")
    assert record is not None
    assert (record.state.value, hand.state(job)) == ("held", "failed")


def test_a_time_limit_that_ends_the_wait_for_another_worker_ends_no_job(
    hand: Hand, guard: Guard, pauses: list[float]
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def handle() -> None:
        entered.set()
        assert leave.wait(30)

    running = threading.Thread(target=guard.run, args=("pay", "pay-1", handle))
    running.start()
    assert entered.wait(30)
    job = hand.enqueue(paying(guard, [], fingerprint=None, wait=30), 5, key="pay-1", timeout=1)
    hand.work()
    state = hand.state(job)
    leave.set()
    running.join(30)

    assert state == "queued"
    assert len(pauses) == 1


@pytest.mark.usefixtures("loops")
def test_a_real_time_limit_of_an_async_function_is_ambiguous(hand: Hand) -> None:
    guard = AsyncGuard("memory:")

    # The signal comes while the event loop waits: no coroutine sees it.
    @guarded(guard, "pay", after_crash="hold")
    async def pay() -> None:
        await asyncio.sleep(30)

    job = hand.enqueue(pay, key="pay-1", timeout=1)
    hand.work()

    record = asyncio.run(guard.read("pay", "pay-1"))
    assert record is not None
    assert (record.state.value, hand.state(job)) == ("held", "failed")
    assert "JobTimeoutException" in str(job.latest_result().exc_string)  # type: ignore[union-attr]


@pytest.mark.usefixtures("loops")
def test_an_async_function_that_cannot_be_cancelled_fails_at_its_time_limit(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, other = AsyncGuard("memory:"), list[int]()
    monkeypatch.setattr(rq_loops, "CANCEL_SECONDS_MAX", 0.05)

    @guarded(guard, "pay")
    async def pay() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(30)

    @guarded(guard, "other")
    async def others() -> None:
        other.append(1)

    job = hand.enqueue(pay, key="pay-1", timeout=1)
    hand.enqueue(others, key="pay-1")
    hand.work(2)

    assert (hand.state(job), other) == ("failed", [1])


@pytest.mark.usefixtures("loops")
def test_a_time_limit_that_ends_the_wait_of_an_async_function_ends_no_job(hand: Hand, pauses: list[float]) -> None:
    guard, ran = AsyncGuard("memory:"), list[int]()
    entered, leave = threading.Event(), threading.Event()

    async def handle() -> None:
        entered.set()
        assert await asyncio.to_thread(leave.wait, 30)

    running = threading.Thread(target=lambda: asyncio.run(guard.run("pay", "pay-1", handle)))
    running.start()
    assert entered.wait(30)

    @guarded(guard, "pay", fingerprint=None, wait=30)
    async def pay() -> None:
        ran.append(1)

    job = hand.enqueue(pay, key="pay-1", timeout=1)
    hand.work()
    state = hand.state(job)
    leave.set()
    running.join(30)

    assert (state, ran, len(pauses)) == ("queued", [], 1)


@pytest.mark.parametrize("by", [None, 15])
def test_an_interrupt_that_ends_the_pause_ends_no_job(
    hand: Hand, by: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def struck(_seconds: float) -> None:
        raise late(by)

    monkeypatch.setattr(rq_jobs, "time", SimpleNamespace(sleep=struck))
    store = ProxyStore()
    store.down.add("claim")
    with Guard(store) as guard:
        job = hand.enqueue(paying(guard, []), 5, key="pay-1")
        hand.work()

    assert hand.state(job) == "queued"


def test_a_shutdown_that_ends_the_wait_for_another_worker_ends_no_job(hand: Hand, pauses: list[float]) -> None:
    store = ProxyStore()

    def struck() -> None:
        raise late(15)

    store.before["claim"] = struck
    with Guard(store) as guard:
        job = hand.enqueue(paying(guard, []), 5, key="pay-1")
        hand.work()

    assert (hand.state(job), len(pauses)) == ("queued", 1)


# Calls.


def test_called_as_a_function_it_is_one(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []

    @published
    @guarded(guard, "count")
    def count(n: int) -> int:
        ran.append(n)
        return n + (count(n - 1) if n else 0)

    assert [count(1), count(1)] == [1, 1]
    job = hand.enqueue(count, 2, key="a")
    hand.work()

    assert job.return_value(refresh=True) == 3
    assert ran == [1, 0, 1, 0, 2, 1, 0]


def test_an_unguarded_job_may_call_a_guarded_function(hand: Hand, guard: Guard) -> None:
    pay = paying(guard, [])

    @published
    def outer() -> str:
        return str(pay(5))

    job = hand.enqueue(outer)
    hand.work()

    assert job.return_value(refresh=True) == "paid 5"


def test_a_decorator_around_it_leaves_it_guarded(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []
    inner = paying(guard, ran)

    @wraps(inner)
    def outer(amount: int) -> str:
        return f"outer {inner(amount)}"

    jobs = [hand.enqueue(outer, 5, key="pay-1") for _ in range(2)]
    hand.work(2)

    assert ran == [5]
    assert [job.return_value(refresh=True) for job in jobs] == ["outer paid 5"] * 2


def test_a_queue_that_performs_its_jobs_in_the_caller_is_guarded_and_raises(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []
    pay = published(paying(guard, ran, wait=0))
    queue = Queue(hand.queue.name, connection=hand.connection, is_async=False)

    jobs = [queue.enqueue_call(pay, args=(amount,), meta={KEY: "pay-1"}) for amount in (5, 5, 6)]
    guard.close()
    jobs.append(queue.enqueue_call(pay, args=(5,), meta={KEY: "pay-2"}))

    assert ran == [5]
    assert [hand.state(job) for job in jobs] == ["finished", "finished", "failed", "failed"]


@pytest.mark.usefixtures("loops")
def test_async_jobs_of_a_worker_share_an_event_loop_and_so_their_connections(hand: Hand) -> None:
    guard, seen = AsyncGuard("memory:"), list[asyncio.AbstractEventLoop]()

    @guarded(guard, "pay")
    async def pay(_number: int) -> None:
        seen.append(asyncio.get_running_loop())

    for number in range(3):
        hand.enqueue(pay, number, key=f"pay-{number}")
    hand.work(3)

    assert (len(seen), len(set(seen))) == (3, 1)


@pytest.mark.usefixtures("loops")
def test_an_async_function_runs_once_under_an_async_guard(hand: Hand) -> None:
    guard, ran = AsyncGuard("memory:"), list[int]()

    @guarded(guard, "pay")
    async def pay(amount: int) -> str:
        await asyncio.sleep(0)
        ran.append(amount)
        return current().key_for("bank")

    jobs = [hand.enqueue(pay, 5, key="pay-1") for _ in range(2)]
    hand.work(2)

    assert ran == [5]
    assert len({job.return_value(refresh=True) for job in jobs}) == 1


def test_a_key_in_the_arguments_and_a_scope_keep_tenants_apart(hand: Hand, guard: Guard) -> None:
    ran: list[str] = []

    @guarded(guard, "pay", key="payment_id", scope="tenant")
    def pay(tenant: str, payment_id: str) -> None:
        ran.append(f"{tenant} {current().scope}")

    for tenant in ("acme", "bakery", "acme"):
        hand.enqueue(pay, tenant, "1")
    hand.work(3)

    assert ran == ["acme acme", "bakery bakery"]


def test_a_parameter_tx_makes_it_transactional(hand: Hand, tmp_path: Path) -> None:
    path = tmp_path / "wallet.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE wallet (amount INTEGER)")
        connection.commit()
    fail = [True]
    with Guard(f"sqlite:///{path}") as guard:

        @guarded(guard, "credit", missing_key="run")
        def credit(amount: int, *, tx: sqlite3.Connection) -> None:
            tx.execute("INSERT INTO wallet VALUES (?)", (amount,))
            if fail and fail.pop():
                raise ValueError

        hand.enqueue(credit, 5, key="pay-1", retry=Retry(max=1))
        hand.enqueue(credit, 1)
        hand.enqueue(credit, 5, key="pay-1")
        hand.work(4)

    with closing(sqlite3.connect(path)) as connection:
        assert sorted(connection.execute("SELECT amount FROM wallet").fetchall()) == [(1,), (5,)]


def test_a_result_that_was_not_kept_is_not_made_up(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []
    pay = paying(guard, ran, keep_result=False)
    first, second = (hand.enqueue(pay, 5, key="pay-1") for _ in range(2))
    unread = hand.enqueue(pay, 5, key="pay-1", result_ttl=0)
    hand.work(3)
    hand.queue.enqueue_job(first)
    hand.work()

    assert ran == [5]
    assert first.return_value(refresh=True) == "paid 5"
    assert hand.state(second) == "failed"
    assert ResultNotKept.__name__ in str(second.latest_result().exc_string)  # type: ignore[union-attr]
    assert unread.id not in hand.queue.failed_job_registry


def test_a_position_is_a_key_only_by_name(hand: Hand, guard: Guard) -> None:
    ran: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pay = paying(guard, ran, key=position(changes_when_a_producer_retries=True))
    job = hand.enqueue(pay, 5)
    hand.work()
    hand.queue.enqueue_job(job)
    hand.work()

    assert ran == [5]


def test_send_returns_the_key_and_passes_options_on(hand: Hand, guard: Guard) -> None:
    pay = published(paying(guard, []))

    keys = [
        send(hand.queue, pay, (5,), key="pay-1", retry=Retry(max=2), meta={"of": "ann"}),
        send(hand.queue, "tests_queues_rq_space.pay", kwargs={"amount": 5}, meta={"idempotency_key": "pay-2"}),
        send(hand.queue, pay, (5,)),
    ]

    jobs = hand.queue.jobs
    assert [job.meta[KEY] for job in jobs] == keys
    assert keys[:2] == ["pay-1", "pay-2"]
    assert (jobs[0].meta["of"], jobs[0].retries_left) == ("ann", 2)


# What is refused when decorating.


async def nothing_async() -> None: ...


def nothing() -> None: ...


def with_tx(*, tx: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "options", "says"),
    [
        (nothing_async, {}, "the job nothing_async: it is `async def`, and takes AsyncGuard, but this is Guard"),
        (nothing, {"guard": AsyncGuard("memory:")}, "it is `def`, and takes Guard, but this is AsyncGuard"),
        (nothing, {"guard": "memory:"}, "it takes Guard, but this is str"),
        (nothing, {"key": "order"}, "key='order': the job has no argument 'order'"),
        (nothing, {"scope": "tenant"}, "scope='tenant': the job has no argument"),
        (nothing, {"missing_key": "skip"}, "missing_key='skip' is neither"),
        (nothing, {"keep": "soon"}, "keep='soon'"),
        (nothing, {"kep": "7d"}, "did you mean 'keep'"),
        (nothing, {"final_errors": (Exception,)}, "treats every Exception as final, and with it RQ's Retry"),
        (with_tx, {}, "the handler takes tx, and memory has no transactions"),
    ],
)
def test_what_cannot_work_is_refused(handler: Callable[..., Any], options: dict[str, Any], says: str) -> None:
    given = {"guard": Guard("memory:"), "operation": "pay", **options}

    with pytest.raises(UsageError) as refused:
        guarded(**given)(handler)

    assert says in str(refused.value)


def test_without_rq_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['rq'] = None; import onefold.queues.rq"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "UsageError: RQ is not installed: `pip install 'onefold[rq]'`" in ended.stderr
