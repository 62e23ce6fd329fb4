"""Fields of a policy are keywords of every queue adapter: they change the guard's policy, and leave the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from celery import Celery

from onefold import AsyncGuard, Guard, Policy, UsageError
from onefold.queues import aio_pika, babelqueue, pika
from onefold.queues._kafka.partitions import Options, asked_of
from onefold.queues._shared.options import WAIT
from onefold.queues.celery import OnefoldTask
from onefold.queues.celery import guarded as celery_guarded
from onefold.queues.celery.options import policy_for
from onefold.queues.keys import header

# The guard's: a field that is changed below, and one that is left.
GUARDS = Policy(keep="1d", lease="45s")


def handle(message: object) -> None: ...


async def handle_async(message: object) -> None: ...


def of_pika(**fields: Any) -> Policy:
    guard = Guard("memory:", policy=GUARDS)
    return pika.guarded(guard, "charge", handle, key=header(), dead_letter="dead", **fields)._consuming._policy


def of_aio_pika(**fields: Any) -> Policy:
    guard = AsyncGuard("memory:", policy=GUARDS)
    return aio_pika.guarded(guard, "charge", handle_async, key=header(), dead_letter="d", **fields)._consuming._policy


def of_kafka(**fields: Any) -> Policy:
    policy = fields.pop("policy", None)
    chosen: Policy = asked_of(Guard("memory:", policy=GUARDS), Guard, header(), cast("Options", fields), policy)[
        "policy"
    ]
    return chosen


def of_celery(**fields: Any) -> Policy:
    """As a task has it whose base class and whose decorator name one field each."""
    guard, policy = Guard("memory:", policy=GUARDS), fields.pop("policy", None)
    of_base = dict(list(fields.items())[:1])
    base = type("Base", (OnefoldTask,), of_base)
    return policy_for(guard, policy, base, dict(list(fields.items())[1:]))


ADAPTERS: dict[str, Callable[..., Policy]] = {
    "pika": of_pika,
    "aio_pika": of_aio_pika,
    "Kafka": of_kafka,
    "Celery": of_celery,
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_fields_change_the_guards_policy(adapter: str) -> None:
    assert ADAPTERS[adapter]() == GUARDS.replace(wait=WAIT)
    assert ADAPTERS[adapter](keep="7d", after_crash="hold") == GUARDS.replace(wait=WAIT, keep="7d", after_crash="hold")
    assert ADAPTERS[adapter](wait=0) == GUARDS.replace(wait=0)
    assert ADAPTERS[adapter](policy=Policy(), keep="7d") == Policy(wait=WAIT, keep="7d")


@pytest.mark.parametrize("adapter", ["pika", "aio_pika", "Kafka"])
def test_a_wrong_keyword_is_refused_by_its_name(adapter: str) -> None:
    with pytest.raises(UsageError, match=r"kep.*did you mean 'keep'"):
        ADAPTERS[adapter](kep="7d")
    with pytest.raises(UsageError, match="keep='soon'"):
        ADAPTERS[adapter](keep="soon")


def test_a_celery_base_class_with_a_wrong_field_is_refused_when_it_is_defined() -> None:
    with pytest.raises(UsageError, match="Base: keep='soon'"):
        type("Base", (OnefoldTask,), {"keep": "soon"})


def test_a_celery_task_runs_under_its_fields() -> None:
    guard, app = Guard("memory:", policy=GUARDS), Celery("shop", set_as_current=False)

    @celery_guarded(app, guard, "charge", name="charge", shared=False, key="payment_id", keep="7d")
    def charge(payment_id: str) -> None: ...

    charge.apply(("pay_1",)).get()

    found = guard.read("charge", "pay_1")
    assert found is not None
    assert found.ttl_left == pytest.approx(7 * 86_400, abs=60)


def test_babelqueue_takes_fields_and_waits_longer() -> None:
    guard = Guard("memory:", policy=GUARDS)

    babelqueue.wrap(guard, lambda data, meta: None, keep="7d")({}, {"id": "m_1"})

    found = guard.read("babelqueue", "m_1")
    assert found is not None
    assert found.ttl_left == pytest.approx(7 * 86_400, abs=60)
    with pytest.raises(UsageError, match=r"kep= is neither an argument of wrap\(\).*'keep'"):
        babelqueue.wrap(guard, lambda data, meta: None, kep="7d")  # type: ignore[call-arg]
