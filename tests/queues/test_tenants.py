"""A guard with a scope of its own, below queues: no adapter has another one, and two tenants share no message."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from celery import Celery

from onefold import Guard, UsageError, current
from onefold.queues import dramatiq, keys
from onefold.queues._shared.consumer import Consuming
from onefold.queues._shared.jobs.handler import DEFAULT_KEY, GuardedJob, JobCall
from onefold.queues.babelqueue import IdempotencyStore, wrap
from onefold.queues.celery import guarded
from onefold.queues.keys import Message
from onefold.queues.rq.jobs import FRAMEWORK as RQ
from onefold.stores.memory import MemoryStore
from tests.queues.dramatiq_tools import Hand

GIVEN = {
    "key": DEFAULT_KEY,
    "missing_key": "never",
    "scope": None,
    "fingerprint": "*",
    "record": None,
    "policy": None,
}

# Delivers one message to the consumer of this guard, which calls back.
Deliver = Callable[[Guard, Callable[[], None]], object]


def by_a_broker(guard: Guard, ran: Callable[[], None]) -> None:
    consuming = Consuming(guard, "mail", lambda _message: ran(), key=keys.header())
    message = Message(b"{}", {"idempotency-key": "k"})
    consuming.deliver(message, message)


def by_babelqueue(guard: Guard, ran: Callable[[], None]) -> None:
    wrap(guard, lambda _data, _meta: ran())({}, {"id": "k"})


def by_its_own_store(guard: Guard, ran: Callable[[], None]) -> None:
    records = IdempotencyStore(guard)
    if not records.seen("k"):
        guard.run("handler", "k", ran)
        records.remember("k")


def by_celery(guard: Guard, ran: Callable[[], None]) -> None:
    with closing(Celery("shop", broker="memory://", set_as_current=False)) as app:
        app.conf.update(task_always_eager=True, task_eager_propagates=True)
        task: Any = guarded(app, guard, "mail", name="mail", shared=False)(ran)
        task.apply_async(headers={"idempotency-key": "k"})


def by_dramatiq(guard: Guard, ran: Callable[[], None]) -> None:
    hand = Hand()
    actor = dramatiq.guarded(guard, "mail", broker=hand.broker)(ran)
    hand.process(actor.message_with_options(idempotency_key="k"))


def by_rq(guard: Guard, ran: Callable[[], None]) -> None:
    job = GuardedJob(RQ, "mail", guard, "mail", ran, GIVEN)
    assert job.deliver(JobCall("mails", "id", {"idempotency-key": "k"}, (), {})).error is None


@pytest.mark.parametrize("deliver", [by_a_broker, by_babelqueue, by_its_own_store, by_celery, by_dramatiq, by_rq])
def test_each_tenant_runs_a_message_once(deliver: Deliver) -> None:
    store = MemoryStore()
    ran: list[str] = []

    def handle() -> None:
        ran.append(current().scope)

    for tenant in ("tenant-a", "tenant-b") * 2:
        for scope in (tenant, lambda whose=f"{tenant}-found": whose):
            deliver(Guard(store, scope=scope), handle)

    assert ran == ["tenant-a", "tenant-a-found", "tenant-b", "tenant-b-found"]


def paying(guard: Guard, ran: list[str], **options: Any) -> Any:
    app = Celery("shop", set_as_current=False)

    @guarded(app, guard, "pay", name="pay", shared=False, fingerprint=("amount",), **{"key": "payment_id", **options})
    def pay(tenant: Any, payment_id: str, amount: int, region: str = "eu") -> str:
        ran.append(f"{tenant} {region}")
        return f"{tenant} paid {amount}"

    return pay


@pytest.mark.parametrize(
    "scope", ["tenant", ("tenant", "region"), lambda tenant, payment_id, amount, region="eu": tenant]
)
def test_a_celery_task_keeps_tenants_apart_by_an_argument(scope: Any) -> None:
    guard, ran = Guard("memory:"), list[str]()
    pay = paying(guard, ran, scope=scope)

    answers = [pay.apply((tenant, "1", 5)).get() for tenant in ("acme", "bakery", "acme")]

    assert answers == ["acme paid 5", "bakery paid 5", "acme paid 5"]
    assert ran == ["acme eu", "bakery eu"]


@pytest.mark.parametrize("tenant", [None, ""])
def test_a_celery_message_without_its_tenant_is_rejected(tenant: Any, caplog: pytest.LogCaptureFixture) -> None:
    ran = list[str]()

    ended = paying(Guard("memory:"), ran, scope="tenant").apply((tenant, "1", 5))

    assert (ended.state, ran) == ("FAILURE", [])
    assert "scope= has to name a tenant or caller" in str(ended.result)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scope": "tenat"}, "scope='tenat': the task has no argument 'tenat': did you mean 'tenant'"),
        ({"scope": 7}, "scope=7 has to name arguments"),
        ({"key": lambda tenant, payment_id: payment_id}, "key= is called with one argument, the message"),
    ],
)
def test_a_celery_task_with_a_wrong_scope_or_key_is_refused_when_decorating(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        paying(Guard("memory:"), [], **options)


def test_a_celery_task_whose_argument_has_no_key_names_it() -> None:
    ended = paying(Guard("memory:"), []).apply(("acme", None, 5))

    assert "pay: the message has no key in its argument 'payment_id'" in str(ended.result)
