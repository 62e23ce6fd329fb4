"""Celery on RabbitMQ: a message that comes again is there before the one that it replaces is acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import SoftTimeLimitExceeded
from kombu import Queue

from onefold import Guard, StoreUnavailable
from onefold.queues._shared.jobs.waits import TIMES
from onefold.queues.celery import guarded
from onefold.queues.celery import task as celery_task
from onefold.queues.celery.task import REFUSED_SECONDS_MAX
from onefold.stores.memory import MemoryStore
from services.proxy import Proxy
from tests.queues.rabbitmq_tools import EXPIRES, Environment
from tests.support import ProxyStore


class Down(ProxyStore):
    """A store that nobody reaches: what needs it comes later."""

    def claim(self, *_: Any, **__: Any) -> Any:
        raise StoreUnavailable("not now")


@pytest.fixture
def proxy(rabbitmq_url: str) -> Iterator[Proxy]:
    with Proxy(rabbitmq_url) as proxy:
        yield proxy


@pytest.fixture
def app(proxy: Proxy, rabbitmq_name: str) -> Iterator[Celery]:
    app = Celery("shop", broker=proxy.url(), set_as_current=False)
    app.conf.update(task_default_queue=rabbitmq_name, task_queues=[Queue(rabbitmq_name, queue_arguments=EXPIRES)])
    yield app
    app.close()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; nobody waits for them."""
    found: list[float] = []
    monkeypatch.setattr(celery_task, "time", SimpleNamespace(sleep=found.append))
    return found


def made(app: Celery, guard: Guard) -> Any:
    @guarded(app, guard, "pay", name="pay", shared=False)
    def pay() -> None:
        raise AssertionError("it cannot run")

    return pay


def worked(pay: Any) -> Any:
    """What a worker makes of a message whose store is away."""
    queue = pay.app.conf.task_default_queue
    request = {"id": "id-1", "delivery_info": {"exchange": "", "routing_key": queue}, "idempotency-key": "k"}
    return build_tracer("pay", pay, app=pay.app)("id-1", [], {}, request).info


@pytest.mark.parametrize("fault", ["", "cut", "silent"])
def test_what_the_broker_has_not_confirmed_is_not_acknowledged(
    app: Celery,
    proxy: Proxy,
    rabbitmq_url: str,
    rabbitmq_name: str,
    fault: str,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = Environment(rabbitmq_url, rabbitmq_name)
    if fault == "cut":
        proxy.cut_before(TIMES.encode())
    if fault == "silent":
        proxy.hold_request(TIMES.encode())
        monkeypatch.setattr(celery_task, "CONFIRM_SECONDS_MAX", 0.2)

    with Guard(Down(MemoryStore())) as guard:
        ended = worked(made(app, guard))

    if fault:
        assert (ended.state, ended.retval.requeue, environment.count()) == ("REJECTED", True, 0)
    else:
        assert (ended.state, environment.count()) == ("IGNORED", 1)
    assert pauses == ([REFUSED_SECONDS_MAX] if fault else [])


def test_a_queue_that_is_full_gets_its_message_back_after_a_pause(
    app: Celery, rabbitmq_name: str, pauses: list[float]
) -> None:
    full = {**EXPIRES, "x-max-length": 1, "x-overflow": "reject-publish"}
    app.conf.task_queues = [Queue(rabbitmq_name, queue_arguments=full)]

    with Guard(Down(MemoryStore())) as guard:
        pay = made(app, guard)
        first, second = worked(pay), worked(pay)

    assert (first.state, pauses) == ("IGNORED", [REFUSED_SECONDS_MAX])
    assert (second.state, second.retval.requeue) == ("REJECTED", True)


def test_a_time_limit_that_ends_the_pause_does_not_end_the_message(
    app: Celery, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(_: float) -> None:
        raise SoftTimeLimitExceeded

    proxy.cut_before(TIMES.encode())
    monkeypatch.setattr(celery_task, "time", SimpleNamespace(sleep=limited))

    with Guard(Down(MemoryStore())) as guard:
        ended = worked(made(app, guard))

    assert (ended.state, ended.retval.requeue) == ("REJECTED", True)


def test_a_channel_that_confirms_is_not_left_to_others(app: Celery, rabbitmq_url: str, rabbitmq_name: str) -> None:
    with Guard(Down(MemoryStore())) as guard:
        pay = made(app, guard)
        for _ in range(3):
            assert worked(pay).state == "IGNORED"

    with app.producer_or_acquire() as producer:
        assert not producer.channel._confirm_selected
    assert Environment(rabbitmq_url, rabbitmq_name).count() == 3
