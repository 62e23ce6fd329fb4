"""Fields of a policy are keywords of every queue adapter: they change the guard's policy, and leave the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import boto3
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from taskiq import InMemoryBroker

from onefold import AsyncGuard, Guard, Policy, UsageError
from onefold.queues import (
    aio_pika,
    aws_lambda,
    babelqueue,
    dramatiq,
    faststream,
    nats,
    pika,
    redis_streams,
    rq,
    sqs,
    taskiq,
)
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


def of_nats(**fields: Any) -> Policy:
    guard = AsyncGuard("memory:", policy=GUARDS)
    return nats.guarded(guard, "charge", handle_async, key=header(), dead_letter="d", **fields)._consuming._policy


def of_redis_streams(**fields: Any) -> Policy:
    names: Any = {"key": header(), "stream": "charges", "group": "g", "dead_letter": "d"}
    made = redis_streams.guarded(AsyncGuard("memory:", policy=GUARDS), "charge", handle_async, **names, **fields)
    chosen: Policy = made._consuming._policy
    return chosen


SQS: dict[str, Any] = {"queue": "https://sqs/1/charges", "dead_letter": "https://sqs/1/dead", "key": header()}


def of_sqs(**fields: Any) -> Policy:
    client: Any = boto3.client("sqs", region_name="eu-central-1")
    found = sqs.guarded(Guard("memory:", policy=GUARDS), "charge", handle, client=client, **SQS, **fields)
    client.close()
    return found._consuming._policy


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


def of_dramatiq(**fields: Any) -> Policy:
    guard = Guard("memory:", policy=GUARDS)
    return dramatiq.guarded(guard, "charge", broker=StubBroker(), key="message", **fields)(handle).job.policy


def of_rq(**fields: Any) -> Policy:
    guard = Guard("memory:", policy=GUARDS)
    made: Any = rq.guarded(guard, "charge", key="message", **fields)(handle)
    return made.__onefold_job__.policy  # type: ignore[no-any-return]


def of_taskiq(**fields: Any) -> Policy:
    guard = Guard("memory:", policy=GUARDS)
    made: Any = taskiq.guarded(guard, "charge", broker=InMemoryBroker(), key="message", **fields)(handle)
    return made.__onefold_job__.policy  # type: ignore[no-any-return]


def of_faststream(**fields: Any) -> Policy:
    guard = Guard("memory:", policy=GUARDS)
    made: Any = faststream.guarded(guard, "charge", key=header(), **fields)(handle)
    return made.__onefold_job__.policy  # type: ignore[no-any-return]


ADAPTERS: dict[str, Callable[..., Policy]] = {
    "pika": of_pika,
    "aio_pika": of_aio_pika,
    "nats": of_nats,
    "Redis Streams": of_redis_streams,
    "SQS": of_sqs,
    "Kafka": of_kafka,
    "Celery": of_celery,
    "Dramatiq": of_dramatiq,
    "RQ": of_rq,
    "taskiq": of_taskiq,
    "FastStream": of_faststream,
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_fields_change_the_guards_policy(adapter: str) -> None:
    assert ADAPTERS[adapter]() == GUARDS.replace(wait=WAIT)
    assert ADAPTERS[adapter](keep="7d", after_crash="hold") == GUARDS.replace(wait=WAIT, keep="7d", after_crash="hold")
    assert ADAPTERS[adapter](wait=0) == GUARDS.replace(wait=0)
    assert ADAPTERS[adapter](policy=Policy(), keep="7d") == Policy(wait=WAIT, keep="7d")


@pytest.mark.parametrize(
    "adapter", ["pika", "aio_pika", "nats", "SQS", "Redis Streams", "Kafka", "Dramatiq", "RQ", "taskiq", "FastStream"]
)
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


def test_lambda_takes_fields_and_does_not_wait() -> None:
    guard = Guard("memory:", policy=GUARDS)

    chosen = aws_lambda.guarded_messages(guard, "charge", handle, key=header(), keep="7d")._policy

    assert chosen == GUARDS.replace(wait=0, keep="7d")
