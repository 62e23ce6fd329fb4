"""Celery without a worker: what is refused when decorating, what is sent, eager tasks, and verdicts step by step."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group, signals
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, SoftTimeLimitExceeded

from onefold import (
    AsyncGuard,
    Event,
    Guard,
    KeyReused,
    MissingKey,
    Policy,
    ResultNotKept,
    StoreUnavailable,
    UsageError,
    subscribe,
)
from onefold.events import Kind
from onefold.queues._shared.verdict import HELD_DELAY, HELD_MAX
from onefold.queues.celery import OnefoldTask, guarded, send
from onefold.queues.celery import task as celery_task
from onefold.queues.keys import header, position
from onefold.stores.base import Address
from onefold.stores.memory import MemoryStore
from tests.support import ProxyStore

KEY = "idempotency-key"


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def eager(app: Celery) -> Celery:
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    return app


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


@pytest.fixture
def sent() -> Iterator[list[dict[str, Any]]]:
    """The headers of every message that is published."""
    found: list[dict[str, Any]] = []

    def note(headers: dict[str, Any], **_: Any) -> None:
        found.append(dict(headers))

    signals.before_task_publish.connect(note, weak=False)
    yield found
    signals.before_task_publish.disconnect(note)


def task(app: Celery, guard: Guard, handler: Callable[..., Any], **options: Any) -> Any:
    name = options.pop("operation", handler.__name__)
    return guarded(app, guard, name, name=name, shared=False, **options)(handler)


def add(a: int, b: int) -> int:
    return a + b


def work(task: Any, *args: Any, **headers: Any) -> Any:
    """What a worker makes of one message: its state and what it says."""
    request = {"id": "id-1", "delivery_info": {"exchange": "", "routing_key": "celery"}, **headers}
    ended = build_tracer(task.name, task, app=task.app)("id-1", list(args), {}, request)
    return ("SUCCESS", ended.retval) if ended.info is None else (ended.info.state, ended.info.retval)


# When decorating.


def test_an_async_task_is_refused_at_once(app: Celery, guard: Guard) -> None:
    async def handler() -> None: ...

    with pytest.raises(UsageError, match="its work would be lost"):
        task(app, guard, handler)
    with pytest.raises(UsageError, match="its work would be lost"):
        app.task(base=OnefoldTask, guard=guard, operation="x", lazy=False, shared=False)(handler)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"operation": "add"}, "the task .*add: it has no guard"),
        ({"guard": AsyncGuard("memory:"), "operation": "add"}, "takes Guard|needs a Guard"),
        ({"guard": Guard("memory:")}, "the task .*add: it has no operation"),
        (
            {"guard": Guard("memory:"), "operation": "add", "fingerprint": 3},
            "the task .*add: fingerprint=3 has to name",
        ),
        ({"guard": Guard("memory:"), "operation": "add", "fingerprint": ["a", 3]}, "has to name arguments"),
        ({"guard": Guard("memory:"), "operation": "add", "fingerprint": "c"}, "the task has no argument 'c'"),
        ({"guard": Guard("memory:"), "operation": "add", "wait": "soon"}, "the task .*add: wait='soon'"),
        ({"guard": Guard("memory:"), "operation": "add", "missing_key": "maybe"}, "neither 'never' nor 'run'"),
        ({"guard": Guard("memory:"), "operation": "add", "require_key": "no"}, "require_key='no' has to be True or"),
        ({"guard": Guard("memory:"), "operation": "add", "key": "a..id"}, "has to name a field"),
        ({"guard": Guard("memory:"), "operation": "add", "key": "c"}, "the task has no argument 'c'"),
        ({"guard": Guard("memory:"), "operation": "add", "key": header}, "key=header is not called"),
        ({"guard": Guard("memory:"), "operation": "add", "policy": {"keep": 1}}, "has to be a Policy"),
    ],
)
def test_what_cannot_work_is_refused(app: Celery, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        app.task(base=OnefoldTask, lazy=False, shared=False, **options)(add)  # type: ignore[no-untyped-call]
    # The decorator says it at once, and not when the app is used for the first time.
    if {"guard", "operation"} <= set(options):
        with pytest.raises(UsageError, match=says):
            guarded(app, **options)(add)


def test_an_option_that_is_written_wrong_is_not_taken_for_celerys(app: Celery, guard: Guard) -> None:
    with pytest.raises(UsageError, match=r"unknown option 'missing_keys': did you mean 'missing_key'\?"):
        task(app, guard, add, missing_keys="run")
    task(app, guard, add, max_retries=3, my_own_attribute=1)


def test_what_another_guard_says_inside_a_task_is_the_tasks_own_error(app: Celery, guard: Guard) -> None:
    """The inner charge is done; the task is not, and must not be acknowledged as if it were."""

    def charges() -> None:
        raise ResultNotKept("of an inner charge")

    state, said = work(task(app, guard, charges), ignore_result=True, **{KEY: "k"})

    assert state == "FAILURE"
    assert isinstance(said, ResultNotKept)


@pytest.mark.parametrize(
    "policy",
    [Policy(final_errors=(Exception,)), Policy(after_crash="hold", ambiguous_errors=(Exception,))],
    ids=["final", "held"],
)
def test_a_policy_that_would_take_a_retry_for_an_end_is_refused(app: Celery, guard: Guard, policy: Policy) -> None:
    with pytest.raises(UsageError, match=r"the task add: .*Retry, Ignore and Reject"):
        task(app, guard, add, policy=policy)


def test_without_celery_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['celery'] = None; import onefold.queues.celery"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert "UsageError: Celery is not installed: `pip install 'onefold[celery]'`" in done.stderr.splitlines()[-1]


# What is sent.


def test_a_task_that_is_sent_without_a_key_is_refused_and_nothing_is_sent(
    app: Celery, guard: Guard, sent: list[dict[str, Any]]
) -> None:
    adding, by_argument = task(app, guard, add), task(app, guard, add, operation="of", key="a")
    refused: list[Callable[[], object]] = [
        lambda: adding.delay(1, 2),
        lambda: adding.apply_async((1, 2)),
        lambda: adding.apply_async((1, 2), headers={KEY: None, "x-trace": "t"}),
        lambda: adding.s(1, 2).delay(),
    ]

    for sending in refused:
        with pytest.raises(MissingKey, match=r"\w+: this message has no key, and nothing was sent.*require_key=False"):
            sending()
    with pytest.raises(MissingKey, match="of: this message has no key in its argument 'a', and nothing was sent"):
        by_argument.delay(None, 2)

    assert sent == []


def test_whatever_has_a_key_is_sent(app: Celery, guard: Guard, sent: list[dict[str, Any]]) -> None:
    adding, by_argument = task(app, guard, add), task(app, guard, add, operation="of", key="a")

    adding.apply_async((1, 2), headers={"Idempotency-Key": "mine"})
    adding.apply_async((1, 2), task_id="nightly-2026-11-17")
    by_argument.delay(1, 2)
    with pytest.raises(TypeError):
        by_argument.delay(2)

    assert [headers.get(KEY, "") for headers in sent[:2]] == ["", "nightly-2026-11-17"]
    assert len(sent) == 3


def test_where_no_key_is_required_one_warning_says_that_the_task_id_is_none(app: Celery, guard: Guard) -> None:
    class Lenient(OnefoldTask):
        require_key = False

    first, second = (task(app, guard, add, operation=name, base=Lenient) for name in ("first", "second"))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for adding in (first, first, second):
            adding.delay(1, 2)

    said = [str(one.message) for one in told]
    assert len(said) == 2
    assert "A redelivery and Celery's own retry() keep that id, but a sender that retries" in said[0]


def test_a_task_that_sends_another_without_a_key_fails_by_its_own_error_and_may_retry(
    app: Celery, guard: Guard, sent: list[dict[str, Any]]
) -> None:
    adding = task(app, guard, add)

    def pay() -> None:
        adding.delay(1, 2)

    state, said = work(task(app, guard, pay), **{KEY: "k"})

    assert (state, type(said)) == ("FAILURE", MissingKey)
    assert sent == []
    assert guard.read("pay", "k") is None, "a retry of it runs"


@pytest.mark.filterwarnings("ignore:add. sent without a key")
def test_the_key_is_the_tasks_id_unless_one_is_given(app: Celery, guard: Guard, sent: list[dict[str, Any]]) -> None:
    adding = task(app, guard, add, require_key=False)
    adding.delay(1, 2)
    adding.apply_async((1, 2), headers={KEY: "mine", "x-trace": "t"})
    minted = send(adding, (1, 2))
    adding.s(1, 2).set(countdown=5).delay()

    assert sent[0][KEY] == sent[0]["id"]
    assert (sent[1][KEY], sent[1]["x-trace"]) == ("mine", "t")
    assert sent[2][KEY] == minted != sent[2]["id"]
    assert sent[3][KEY] == sent[3]["id"]
    assert send(adding, (1, 2), key=17, headers={"x-trace": "t"}) == "17"
    with pytest.raises(MissingKey):
        send(adding, (1, 2), key="")


def test_every_task_of_a_canvas_has_a_key_of_its_own(app: Celery, guard: Guard, sent: list[dict[str, Any]]) -> None:
    adding = task(app, guard, add)
    group(adding.s(1, 1), chain(adding.s(1, 1), adding.s(2)), adding.s(1, 1)).apply_async()
    chord([adding.s(1, 1), adding.s(1, 2)], app=app)(adding.si(1, 2))

    keys = [headers[KEY] for headers in sent if headers["task"] == "add"]
    assert len(set(keys)) == len(keys) == 5


def test_the_callbacks_of_a_task_have_ids_that_follow_from_its_own(app: Celery, guard: Guard) -> None:
    adding = task(app, guard, add)
    callback = adding.s(1)
    bodies: list[Any] = []

    def note(body: Any, **_: Any) -> None:
        bodies.append([link["options"]["task_id"] for link in body[2]["callbacks"]])

    signals.before_task_publish.connect(note, weak=False)
    for task_id in ("one", "one", "two"):
        adding.apply_async((1, 2), task_id=task_id, link=[callback, callback])
    signals.before_task_publish.disconnect(note)

    assert bodies[0] == bodies[1] != bodies[2]
    assert len(set(bodies[0])) == 2
    assert "task_id" not in callback.options


def test_a_sender_needs_no_transaction(app: Celery, sent: list[dict[str, Any]]) -> None:
    def credit(account: str, *, tx: Any) -> None: ...

    crediting = task(app, Guard("sqlite:///never-opened.db"), credit)
    crediting.apply_async(("ada",), headers={KEY: "k"})

    assert len(sent) == 1
    with pytest.raises(TypeError):
        crediting.apply_async(headers={KEY: "k"})


# Eager, and called by hand.


def test_an_eager_task_runs_once_for_its_key(eager: Celery, guard: Guard) -> None:
    ran: list[int] = []

    def double(n: int) -> int:
        ran.append(n)
        return 2 * n

    doubling = task(eager, guard, double)
    results = [doubling.apply_async((4,), headers={KEY: "k"}).get() for _ in range(2)]
    other = doubling.apply((4,)).get()

    assert [*results, other] == [8, 8, 8]
    assert ran == [4, 4]


def test_an_eager_task_raises_what_a_worker_would_have_rejected(eager: Celery, guard: Guard) -> None:
    adding = task(eager, guard, add)
    adding.apply_async((1, 2), headers={KEY: "k"})

    with pytest.raises(KeyReused):
        adding.apply_async((3, 4), headers={KEY: "k"})


LEGAL: dict[str, Any] = {
    "wei": 2**64 + 1,
    "half a surrogate pair": "\ud83d",
    "keys that are numbers": {1: {2: "x"}},
    "both": {"wei": [10**30, {"note": "\udc00"}]},
}


@pytest.mark.parametrize("by", ["the header", "an argument"])
@pytest.mark.parametrize("what", LEGAL)
def test_whatever_can_be_sent_runs_once(eager: Celery, guard: Guard, what: str, by: str) -> None:
    runs: list[Any] = []
    options: dict[str, Any] = {} if by == "the header" else {"key": "order_id"}

    @eager.task(base=OnefoldTask, guard=guard, operation="pay", name="pay", shared=False, **options)
    def pay(order_id: str, amount: Any) -> int:
        runs.append(amount)
        return len(runs)

    for _ in range(2):
        pay.apply_async(("o_1", LEGAL[what]), headers={KEY: "pay_1"})
    with pytest.raises(KeyReused):
        pay.apply_async(("o_1", [LEGAL[what]]), headers={KEY: "pay_1"})

    assert len(runs) == 1


def test_an_eager_retry_runs_under_the_same_key(eager: Celery, guard: Guard) -> None:
    tries: list[int] = []

    def flaky(self: Any) -> int:
        tries.append(self.request.retries)
        if len(tries) < 3:
            raise self.retry(countdown=0)
        return len(tries)

    eager.conf.task_eager_propagates = False

    assert task(eager, guard, flaky, bind=True).apply_async(task_id="flaky").get() == 3
    assert tries == [0, 1, 2]


def test_called_as_a_function_it_is_one(app: Celery, guard: Guard) -> None:
    def down(self: Any, n: int) -> int:
        return n if n == 0 else self(n - 1)

    adding, counting = task(app, guard, add), task(app, guard, down, bind=True)

    assert adding(1, 2) == adding(1, 2) == 3
    assert guard.read("add", "id-1") is None
    # In a worker too: only the delivery is guarded, not what its handler calls.
    assert work(counting, 2, **{KEY: "k"})[0] == "SUCCESS"


# Verdicts, as a worker carries them out.


def test_a_position_is_a_key_only_by_name(app: Celery, guard: Guard) -> None:
    with pytest.warns(UserWarning, match="made by the producer"):
        adding = task(app, guard, add, key=position(changes_when_a_producer_retries=True))

    assert work(adding, 1, 2) == ("SUCCESS", 3)
    assert guard.read("add", "id-1") is not None


def test_arguments_that_do_not_fit_are_the_tasks_own_error(app: Celery, guard: Guard) -> None:
    for key in ({}, {"key": "a"}):
        state, error = work(task(app, guard, add, operation=f"add{len(key)}", **key), 1, 2, 3, **{KEY: "k"})
        assert (state, type(error)) == ("FAILURE", TypeError)


class Down(ProxyStore):
    """Does not answer."""

    def claim(self, *_: Any, **__: Any) -> Any:
        raise StoreUnavailable("not now")


@pytest.mark.parametrize(("times", "delay"), [(0, 1), (1, 2), (3, 8), (50, HELD_DELAY), ("junk", 1)])
def test_what_comes_later_comes_ever_later_with_its_retries_and_its_key(
    app: Celery, sent: list[dict[str, Any]], times: Any, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float] = []
    with Guard(Down()) as down:
        adding = task(app, down, add)
        resend = adding.signature_from_request

        def noted(*args: Any, countdown: float, **options: Any) -> Any:
            delays.append(countdown)
            return resend(*args, countdown=countdown, **options)

        monkeypatch.setattr(adding, "signature_from_request", noted)
        state, said = work(adding, 1, 2, retries=2, **{KEY: "k", "x-onefold-times": times, "x-death": [1]})

    assert (state, type(said)) == ("IGNORED", Ignore)
    assert delays == [delay]
    assert {name: sent[0][name] for name in ("id", "retries", KEY)} == {"id": "id-1", "retries": 2, KEY: "k"}
    assert "x-death" not in sent[0]


@pytest.mark.parametrize("begun", [False, True])
def test_a_time_limit_that_ends_the_wait_for_another_worker_ends_no_task(
    begun: bool, app: Celery, sent: list[dict[str, Any]]
) -> None:
    store = ProxyStore()

    def struck() -> None:
        raise SoftTimeLimitExceeded

    def pay() -> None:
        struck()

    if not begun:
        store.before["claim"] = struck
    with Guard(store) as guard:
        state, _ = work(task(app, guard, pay), **{KEY: "k"})

    assert (state, len(sent)) == (("FAILURE", 0) if begun else ("IGNORED", 1))


def test_a_broker_that_is_down_too_keeps_the_message(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(celery_task, "REFUSED_SECONDS_MAX", 0.0)
    with Guard(Down()) as down:
        adding = task(app, down, add)
        monkeypatch.setattr(app, "send_task", lambda *_, **__: (_ for _ in ()).throw(OSError("gone")))
        state, said = work(adding, 1, 2, **{KEY: "k"})

    assert state == "REJECTED"
    assert said.requeue


def test_what_is_held_comes_a_bounded_number_of_times(app: Celery, sent: list[dict[str, Any]]) -> None:
    with Guard("memory:", policy=Policy(after_crash="hold")) as guard:

        def unsure() -> None:
            raise TimeoutError

        asking = task(app, guard, unsure)
        first = work(asking, **{KEY: "k"})
        later = work(asking, **{KEY: "k", "x-onefold-held": 3})
        never = work(asking, **{KEY: "k", "x-onefold-held": HELD_MAX})

    assert [first[0], later[0], never[0]] == ["FAILURE", "IGNORED", "REJECTED"]
    assert [headers["x-onefold-held"] for headers in sent] == [4]
    assert never[1].requeue is False


async def found_later(*_: int) -> str:
    return "tenant-a"


@pytest.mark.parametrize("found", [found_later, lambda *_: object(), lambda *_: True, lambda *_: b"a", lambda *_: [1]])
def test_a_scope_function_that_names_nobody_runs_nothing_and_buries_nothing(
    app: Celery, guard: Guard, sent: list[dict[str, Any]], found: Any
) -> None:
    def note(left: int, right: int) -> None:
        pytest.fail(f"{left} {right}")

    assert work(task(app, guard, note, scope=found), 1, 2, **{KEY: "k"})[0] == "IGNORED"

    assert len(sent) == 1


@pytest.mark.parametrize("tenant", [None, "", "  ", True, ["a"], {"a": 1}, 1.5])
@pytest.mark.parametrize("scope", ["tenant", ("tenant", "region")])
def test_a_message_without_a_usable_tenant_is_rejected(app: Celery, guard: Guard, tenant: Any, scope: Any) -> None:
    def greet(tenant: Any, region: str) -> None:
        pytest.fail(f"{tenant} {region}")

    state, said = work(task(app, guard, greet, scope=scope), tenant, "eu", **{KEY: "k"})

    assert state == "REJECTED"
    assert "has to name a tenant or caller" in str(said.reason)


@pytest.mark.parametrize("scope", [None, "b"])
@pytest.mark.parametrize("done", [True, False])
def test_after_a_lost_claim_the_result_of_the_new_owner_counts(
    app: Celery, sent: list[dict[str, Any]], done: bool, scope: str | None
) -> None:
    class Lost(ProxyStore):
        def finish(self, claim: Any, ending: Any) -> bool:
            if done:
                super().finish(claim, ending)
            return False

    with Guard(Lost()) as guard:
        state, said = work(task(app, guard, add, scope=scope), 1, 2, **{KEY: "k"})

    assert (state, len(sent)) == (("SUCCESS", 0) if done else ("IGNORED", 1))
    assert said == 3 if done else isinstance(said, Ignore)


def test_after_a_retry_the_key_of_another_payload_is_still_refused(eager: Celery, guard: Guard) -> None:
    charged: list[int] = []

    def charge(self: Any, amount: int, tries: int = 0) -> int:
        charged.append(amount)
        if self.request.retries < tries:
            raise self.retry(countdown=0)
        return amount

    eager.conf.task_eager_propagates = False
    charging = task(eager, guard, charge, bind=True)

    assert [charging.apply_async((500, 2), headers={KEY: "k"}).get() for _ in range(2)] == [500, 500]
    with pytest.raises(KeyReused):
        charging.apply_async((900, 2), headers={KEY: "k"}).get()

    assert charged == [500, 500, 500]


def test_a_retry_may_change_its_arguments(app: Celery, guard: Guard) -> None:
    adding = task(app, guard, add)

    assert work(adding, 1, 2, **{KEY: "k"}) == ("SUCCESS", 3)
    assert work(adding, 8, 9, retries=1, **{KEY: "k"}) == ("SUCCESS", 3)
    assert work(adding, 8, 9, **{KEY: "k"})[0] == "REJECTED"


def test_a_missing_key_that_may_run_gets_a_transaction_all_the_same(app: Celery, tmp_path: Path) -> None:
    def credit(account: str, *, tx: Any) -> str:
        tx.execute("SELECT 1")
        return account

    with Guard(f"sqlite:///{tmp_path}/records.db") as guard:
        assert work(task(app, guard, credit, missing_key="run"), "ada") == ("SUCCESS", "ada")


# Whose mistake it is, and who is told.


def test_a_worker_whose_guard_is_closed_sends_its_messages_again_and_rejects_none(
    app: Celery, sent: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    guard = Guard("memory:")
    adding = task(app, guard, add)
    guard.close()

    state, _ = work(adding, 1, 2, **{KEY: "k"})

    assert (state, len(sent)) == ("IGNORED", 1)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "onefold.queues.celery"]
    assert line.startswith(f"celery: add [key {ADDED.digest}]: again in 60 s: UsageError: this guard is closed")


def test_a_store_without_transactions_rejects_no_message_of_a_task_with_tx(
    app: Celery, guard: Guard, sent: list[dict[str, Any]]
) -> None:
    def credit(account: str, *, tx: Any) -> None: ...

    with pytest.raises(UsageError, match="the task credit: the handler takes tx, and memory has no transactions"):
        task(app, guard, credit)
    with Guard(MemoryStore) as late:
        assert work(task(app, late, credit), "ada", **{KEY: "k"})[0] == "IGNORED"
    assert len(sent) == 1


def test_what_is_wrong_with_the_arguments_or_inside_the_task_is_rejected(app: Celery, guard: Guard) -> None:
    def wrong() -> None:
        raise UsageError("inside")

    for fingerprint in ("*", "a", ["a"], lambda a, b: a):
        adding = task(app, guard, add, fingerprint=fingerprint, operation=f"add {fingerprint}")
        assert work(adding, object(), 2, **{KEY: "k"})[0] == "REJECTED"
    assert work(task(app, guard, wrong), **{KEY: "k"})[0] == "REJECTED"


def test_a_rejected_message_is_told_by_its_digest_and_as_an_event(
    app: Celery, guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []
    adding = task(app, guard, add)
    stop = subscribe(heard.append)
    for args, headers in (((1, 2), {KEY: "secret"}), ((3, 4), {KEY: "secret"}), ((1, 2), {})):
        work(adding, *args, **headers)
    stop()

    buried = [event for event in heard if event.kind == Kind.BURIED]
    digest = Address("", "add", "secret").digest
    assert [event.address.key for event in buried] == ["secret", ""]
    assert "another payload" in buried[0].detail
    assert "has no key" in buried[1].detail
    lines = [record.getMessage() for record in caplog.records if record.name == "onefold.queues.celery"]
    assert lines[0].startswith(f"celery: add [key {digest}]: rejected, never again: KeyReused")
    assert lines[1].startswith("celery: add: rejected, never again: MissingKey")
    assert "secret" not in "".join(lines)


def test_a_store_that_is_away_is_told_by_its_cause_and_by_no_key(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "onefold.queues.celery")
    with Guard(Down()) as down:
        adding = task(app, down, add)
        for _ in range(2):
            work(adding, 1, 2, **{KEY: "k"})

    lines = [record for record in caplog.records if record.name == "onefold.queues.celery"]
    assert [(line.levelname, line.getMessage()) for line in lines] == [
        ("WARNING", f"celery: add [key {ADDED.digest}]: again in 1 s: StoreUnavailable: not now")
    ]


def test_that_another_worker_runs_it_is_no_warning(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "onefold.queues.celery")
    with Guard("memory:") as guard, ThreadPoolExecutor(1) as another:
        adding = task(app, guard, add, wait=0, fingerprint=None)

        def meanwhile() -> None:
            another.submit(work, adding, 1, 2, **{KEY: "k"}).result()

        guard.run("add", "k", meanwhile)

    (line,) = [record for record in caplog.records if record.name == "onefold.queues.celery"]
    assert line.levelname == "INFO"
    assert ": InProgress: " in line.getMessage()
    # Who reads a worker's log neither delivers nor acknowledges.
    assert line.getMessage().endswith("]: another delivery is running it")


ADDED = Address("", "add", "k")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"guard": "memory:"}, "the task .*Shop: guard= is str"),
        ({"fingerprint": 3}, "the task .*Shop: fingerprint=3 has to name"),
        ({"missing_key": "maybe"}, "the task .*Shop: missing_key='maybe'"),
        ({"wait": "soon"}, "the task .*Shop: wait='soon'"),
        ({"policy": {}}, "the task .*Shop: policy= has to be a Policy"),
        ({"key": header}, "the task .*Shop: key=header is not called"),
    ],
)
def test_a_base_class_that_cannot_work_is_refused_when_it_is_defined(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        type("Shop", (OnefoldTask,), options)


def test_a_guard_from_a_file_refuses_another_operation_when_decorating(app: Celery) -> None:
    class Declared(Guard):
        def idempotent(self, operation: str, **_: Any) -> Any:
            raise UsageError(f"not declared: {operation}")

    with pytest.raises(UsageError, match="the task add: not declared: add"):
        task(app, Declared("memory:"), add)


def test_a_result_is_found_by_the_key_where_the_task_is_named_by_it(eager: Celery, guard: Guard) -> None:
    eager.conf.task_store_eager_result = True
    adding = task(eager, guard, add)

    key = send(adding, (1, 2), key="order-17", task_id="order-17")

    assert (key, adding.AsyncResult(key).get(timeout=10)) == ("order-17", 3)
