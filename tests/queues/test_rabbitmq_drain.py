"""A consumer that leaves starts nothing more: neither while it drains, nor after that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from onefold import AsyncGuard, Guard
from onefold.queues import aio_pika as onefold_aio_pika
from onefold.queues import pika as onefold_pika
from onefold.queues._rabbitmq.consumer import Delivery
from onefold.queues.keys import header
from tests.queues.rabbitmq_tools import Environment, until
from tests.support import PATIENCE


@pytest.fixture
def environment(rabbitmq_url: str, rabbitmq_name: str) -> Environment:
    return Environment(rabbitmq_url, rabbitmq_name)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/records.db"


class PikaConsumer:
    """A consumer on pika whose arrivals are counted, and that nobody has told its broker about leaving."""

    def __init__(self, environment: Environment, guard: Guard, handler: Callable[[Delivery], None]) -> None:
        self.environment = environment
        self.arrived = 0
        self.callback = onefold_pika.guarded(guard, "charge", handler, key=header(), dead_letter=environment.dead)

    def consume(self, channel: Any) -> None:
        def arrives(*message: Any) -> None:
            self.callback(*message)
            self.arrived += 1

        channel.basic_consume(self.environment.queue, arrives)

    def receive(self, connection: Any, count: int) -> None:
        while self.arrived < count:
            connection.process_data_events(PATIENCE)

    def let_its_threads_end(self) -> None:
        """Whatever was started has run after that."""
        self.callback._threads.shutdown(wait=True)


def test_a_message_that_comes_after_the_drain_is_not_started(
    environment: Environment, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[bytes] = []
    with Guard(store) as guard, environment.channel() as channel:
        consumer = PikaConsumer(environment, guard, lambda delivery: runs.append(delivery.body))
        consumer.consume(channel)
        environment.send_keyed("pay-1", b"1")
        consumer.receive(channel.connection, 1)
        until(lambda: runs, "the first has run")
        assert consumer.callback.drain(channel.connection)

        environment.send_keyed("pay-2", b"2")
        consumer.receive(channel.connection, 2)
        consumer.let_its_threads_end()

    assert runs == [b"1"]
    assert environment.count() == 1
    assert "charge: it came after drain() and was not started" in caplog.text


def test_a_message_that_comes_during_the_drain_is_not_started(environment: Environment, store: str) -> None:
    runs: list[bytes] = []

    def charge(delivery: Delivery) -> None:
        runs.append(delivery.body)
        until(lambda: consumer.callback._leaving, "its consumer leaves")
        environment.send_keyed("pay-2", b"2")
        until(lambda: consumer.arrived == 2, "the other has come")

    with Guard(store) as guard, environment.channel() as channel:
        consumer = PikaConsumer(environment, guard, charge)
        consumer.consume(channel)
        environment.send_keyed("pay-1", b"1")
        consumer.receive(channel.connection, 1)
        assert consumer.callback.drain(channel.connection, within=2 * PATIENCE)
        consumer.let_its_threads_end()

    assert runs == [b"1"]
    assert environment.count() == 1


def test_what_waits_for_a_handler_is_not_started_once_the_drain_has_given_up(
    environment: Environment, store: str
) -> None:
    runs: list[bytes] = []
    go_on = threading.Event()

    def charge(delivery: Delivery) -> None:
        runs.append(delivery.body)
        assert go_on.wait(PATIENCE)

    with Guard(store) as guard, environment.channel() as channel:
        consumer = PikaConsumer(environment, guard, charge)
        consumer.consume(channel)
        environment.send_keyed("pay-1", b"1")
        environment.send_keyed("pay-2", b"2")
        consumer.receive(channel.connection, 2)
        assert not consumer.callback.drain(channel.connection, within=0)
        go_on.set()
        consumer.let_its_threads_end()

    assert runs == [b"1"]


def test_after_a_drain_another_channel_can_be_consumed_from(environment: Environment, store: str) -> None:
    runs: list[bytes] = []
    with Guard(store) as guard, environment.channel() as channel:
        consumer = PikaConsumer(environment, guard, lambda delivery: runs.append(delivery.body))
        consumer.consume(channel)
        environment.send_keyed("pay-1", b"1")
        consumer.receive(channel.connection, 1)
        until(lambda: runs, "the first has run")
        channel.stop_consuming()
        assert consumer.callback.drain(channel.connection)

        consumer.consume(channel.connection.channel())
        environment.send_keyed("pay-2", b"2")
        consumer.receive(channel.connection, 2)
        until(lambda: len(runs) == 2, "the second has run")
        assert consumer.callback.drain(channel.connection)

    assert environment.count() == 0


class AioPikaConsumer:
    """The same on aio-pika."""

    def __init__(self, environment: Environment, guard: AsyncGuard, handler: Callable[..., Any]) -> None:
        self.environment = environment
        self.arrived: asyncio.Queue[None] = asyncio.Queue()
        self.callback = onefold_aio_pika.guarded(guard, "charge", handler, key=header(), dead_letter=environment.dead)

    async def consume(self, channel: Any) -> None:
        async def arrives(message: Any) -> None:
            self.arrived.put_nowait(None)
            await self.callback(message)

        await (await channel.get_queue(self.environment.queue)).consume(arrives)

    async def receive(self) -> None:
        await asyncio.wait_for(self.arrived.get(), PATIENCE)

    async def settle(self) -> None:
        """Whatever was started has run after that."""
        await asyncio.gather(*self.callback._unsettled)


def test_a_message_that_comes_after_the_drain_is_not_started_on_aio_pika(environment: Environment, store: str) -> None:
    runs: list[bytes] = []

    async def charge(delivery: Delivery) -> None:
        runs.append(delivery.body)

    async def leave() -> None:
        async with AsyncGuard(store) as guard, await aio_pika.connect(environment.url) as connection:
            consumer = AioPikaConsumer(environment, guard, charge)
            await consumer.consume(await connection.channel())
            await asyncio.to_thread(environment.send_keyed, "pay-1", b"1")
            await consumer.receive()
            await consumer.settle()
            assert await consumer.callback.drain()

            await asyncio.to_thread(environment.send_keyed, "pay-2", b"2")
            await consumer.receive()
            await consumer.settle()

    asyncio.run(leave())

    assert runs == [b"1"]
    assert environment.count() == 1


def test_a_message_that_comes_during_the_drain_is_not_started_on_aio_pika(environment: Environment, store: str) -> None:
    runs: list[bytes] = []

    async def leave() -> None:
        begun, left = asyncio.Event(), asyncio.Event()

        async def charge(delivery: Delivery) -> None:
            runs.append(delivery.body)
            begun.set()
            await left.wait()

        async with AsyncGuard(store) as guard, await aio_pika.connect(environment.url) as connection:
            consumer = AioPikaConsumer(environment, guard, charge)
            await consumer.consume(await connection.channel())
            await asyncio.to_thread(environment.send_keyed, "pay-1", b"1")
            await consumer.receive()
            await begun.wait()
            drained = asyncio.ensure_future(consumer.callback.drain())
            await asyncio.to_thread(environment.send_keyed, "pay-2", b"2")
            await consumer.receive()
            left.set()
            assert await drained
            await consumer.settle()

    asyncio.run(leave())

    assert runs == [b"1"]
    assert environment.count() == 1


def test_after_a_drain_another_channel_of_aio_pika_can_be_consumed_from(environment: Environment, store: str) -> None:
    runs: list[bytes] = []

    async def come_back() -> None:
        ended = asyncio.Event()

        async def charge(delivery: Delivery) -> None:
            runs.append(delivery.body)
            ended.set()

        async with AsyncGuard(store) as guard, await aio_pika.connect(environment.url) as connection:
            consumer = AioPikaConsumer(environment, guard, charge)
            for number in (b"1", b"2"):
                ended.clear()
                channel = await connection.channel()
                await consumer.consume(channel)
                await asyncio.to_thread(environment.send_keyed, f"pay-{number!r}", number)
                await asyncio.wait_for(ended.wait(), PATIENCE)
                assert await consumer.callback.drain()
                await channel.close()

    asyncio.run(come_back())

    assert runs == [b"1", b"2"]
    assert environment.count() == 0
