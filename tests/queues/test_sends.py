"""Every sender tells what it sends, each attempt, so that metrics can compare sends with keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aio_pika
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from faststream.rabbit import RabbitBroker, RabbitQueue, TestRabbitBroker
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import NackError
from redis import Redis
from rq import Queue
from taskiq import InMemoryBroker

from onefold import Guard
from onefold.events import Sent, subscribe_to_sends
from onefold.queues import aio_pika as onefold_aio_pika
from onefold.queues import dramatiq as onefold_dramatiq
from onefold.queues import faststream as onefold_faststream
from onefold.queues import pika as onefold_pika
from onefold.queues import redis_streams
from onefold.queues import rq as onefold_rq
from onefold.queues import taskiq as onefold_taskiq
from onefold.queues.celery import guarded
from onefold.queues.celery import send as send_task
from onefold.queues.nats import send as send_to_nats
from tests.queues.kafka_tools import WORKERS
from tests.queues.nats_tools import Environment as NatsEnvironment
from tests.queues.rabbitmq_tools import Environment
from tests.support import in_time


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


def test_nats_names_the_subject(nats_url: str, nats_name: str, told: list[Sent]) -> None:
    async def story() -> list[str]:
        async with NatsEnvironment(nats_url, nats_name) as environment:
            return [await send_to_nats(environment.js, environment.subject, b"1", key=key) for key in ("a", "b")]

    keys = in_time(story())

    assert told == [Sent(f"{nats_name}.charges", key) for key in keys]


def test_redis_streams_names_the_stream(told: list[Sent], valkey_url: str) -> None:
    with Redis.from_url(valkey_url.replace("valkey:", "redis:")) as client:
        keys = [redis_streams.send(client, "charges", b"1", key="pay-1"), redis_streams.send(client, "charges", b"1")]

    assert told == [Sent("charges", key) for key in keys]


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


def test_dramatiq_names_the_actor(told: list[Sent]) -> None:
    with Guard("memory:") as guard:

        @onefold_dramatiq.guarded(guard, "pay", broker=StubBroker(), actor_name="shop.pay")
        def pay(amount: int) -> int:
            return amount

        keys = [onefold_dramatiq.send(pay, (1,), key="pay-1"), onefold_dramatiq.send(pay, (1,))]

    assert told == [Sent("shop.pay", key) for key in keys]


def test_taskiq_names_the_task(told: list[Sent]) -> None:
    with Guard("memory:") as guard:
        broker = InMemoryBroker(await_inplace=True)

        @onefold_taskiq.guarded(guard, "pay", broker=broker, task_name="shop.pay")
        def pay(amount: int) -> int:
            return amount

        async def sent() -> list[str]:
            return [await onefold_taskiq.send(pay, (1,), key="pay-1"), await onefold_taskiq.send(pay, (1,))]

        keys = asyncio.run(sent())
        asyncio.run(broker.shutdown())

    assert told == [Sent("shop.pay", key) for key in keys]


def test_faststream_names_the_queue(told: list[Sent]) -> None:
    async def sent() -> list[str]:
        broker = RabbitBroker(logger=None)
        broker.subscriber("charges")(lambda message: None)
        async with TestRabbitBroker(broker):
            named = await onefold_faststream.send(broker, b"1", "charges", key="pay-1")
            return [named, await onefold_faststream.send(broker, b"1", queue=RabbitQueue("charges"))]

    assert [Sent("charges", key) for key in asyncio.run(sent())] == told


def test_rq_names_the_queue(told: list[Sent], valkey_url: str) -> None:
    with Redis.from_url(valkey_url.replace("valkey:", "redis:")) as connection:
        queue = Queue("mails", connection=connection)
        keys = [onefold_rq.send(queue, "shop.pay", (1,), key="pay-1"), onefold_rq.send(queue, "shop.pay", (1,))]

    assert told == [Sent("mails", key) for key in keys]
