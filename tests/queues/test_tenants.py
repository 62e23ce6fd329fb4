"""A guard with a scope of its own, below queues: no adapter has another one, and two tenants share no message."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from celery import Celery

from onefold import Guard, current
from onefold.queues import keys
from onefold.queues._shared.consumer import Consuming
from onefold.queues.babelqueue import IdempotencyStore, wrap
from onefold.queues.celery import guarded
from onefold.queues.keys import Message
from onefold.stores.memory import MemoryStore

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


@pytest.mark.parametrize("deliver", [by_a_broker, by_babelqueue, by_its_own_store, by_celery])
def test_each_tenant_runs_a_message_once(deliver: Deliver) -> None:
    store = MemoryStore()
    ran: list[str] = []

    def handle() -> None:
        ran.append(current().scope)

    for tenant in ("tenant-a", "tenant-b") * 2:
        for scope in (tenant, lambda whose=f"{tenant}-found": whose):
            deliver(Guard(store, scope=scope), handle)

    assert ran == ["tenant-a", "tenant-a-found", "tenant-b", "tenant-b-found"]
