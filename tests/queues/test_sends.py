"""Every sender tells what it sends, each attempt, so that metrics can compare sends with keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aio_pika
import pytest
from celery import Celery
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import NackError

from onefold import Guard
from onefold.events import Sent, subscribe_to_sends
from onefold.queues import aio_pika as onefold_aio_pika
from onefold.queues import pika as onefold_pika
from onefold.queues.celery import guarded
from onefold.queues.celery import send as send_task
from tests.queues.kafka_tools import WORKERS
from tests.queues.rabbitmq_tools import Environment


@pytest.fixture
def told() -> Iterator[list[Sent]]:
    found: list[Sent] = []
    end = subscribe_to_sends(found.append)
    yield found
    end()


@pytest.fixture
def environment(rabbitmq_url: str, rabbitmq_name: str) -> Environment:
    return Environment(rabbitmq_url, rabbitmq_name)


def test_pika_and_aio_pika_name_the_queue(environment: Environment, told: list[Sent]) -> None:
    async def in_loop() -> str:
        async with await aio_pika.connect(environment.url) as connection:
            return await onefold_aio_pika.send(await connection.channel(), environment.queue, b"{}")

    with environment.channel() as channel:
        keys = [onefold_pika.send(channel, environment.queue, b"{}", key="pay-1"), asyncio.run(in_loop())]

    assert told == [Sent(environment.queue, key) for key in keys]


def test_an_exchange_is_named_instead_of_its_many_routing_keys(environment: Environment, told: list[Sent]) -> None:
    async def in_loop() -> None:
        async with await aio_pika.connect(environment.url) as connection:
            send = onefold_aio_pika.send
            await send(await connection.channel(), "order.2", b"{}", exchange=environment.queue, key="pay-2")

    with environment.channel() as channel:
        channel.exchange_declare(environment.queue, "fanout", auto_delete=True)
        channel.queue_bind(environment.queue, environment.queue)
        onefold_pika.send(channel, "order.1", b"{}", exchange=environment.queue, key="pay-1")
        asyncio.run(in_loop())
        channel.exchange_delete(environment.queue)

    assert told == [Sent(environment.queue, "pay-1"), Sent(environment.queue, "pay-2")]


def test_each_attempt_is_told_under_its_one_key(
    environment: Environment, told: list[Sent], monkeypatch: pytest.MonkeyPatch
) -> None:
    published, attempts = BlockingChannel.basic_publish, []

    def refused_once(channel: Any, *given: Any, **more: Any) -> None:
        attempts.append(given)
        published(channel, *given, **more)
        if len(attempts) == 1:
            raise NackError([])

    with environment.channel() as channel:
        monkeypatch.setattr(BlockingChannel, "basic_publish", refused_once)
        key = onefold_pika.send(channel, environment.queue, b"{}")

    assert told == [Sent(environment.queue, key)] * 2


@pytest.mark.parametrize("client", list(WORKERS))
def test_kafka_names_the_topic(client: str, kafka_url: str, kafka_topic: str, told: list[Sent]) -> None:
    with WORKERS[client](kafka_url, kafka_topic, print, subscribe=False) as worker:
        minted = worker.send(kafka_topic, b"1")
        worker.send(kafka_topic, b"1", key=minted)

    assert told == [Sent(kafka_topic, minted)] * 2


def test_celery_names_the_task(told: list[Sent]) -> None:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    with Guard("memory:") as guard:

        @guarded(app, guard, "pay", name="shop.pay", shared=False)
        def pay(amount: int) -> int:
            return amount

        send_task(pay, (1,), key="pay-1")
        send_task(pay.s(1), key="pay-2")
    app.close()

    assert told == [Sent("shop.pay", "pay-1"), Sent("shop.pay", "pay-2")]
