"""Queues on a real RabbitMQ, and sync and async consumers on them, each in a thread with a connection of its own."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, Self

import aio_pika
import pika

from onefold import AsyncGuard, Guard, Policy
from onefold.queues import aio_pika as onefold_aio_pika
from onefold.queues import pika as onefold_pika
from onefold.queues._rabbitmq.consumer import Delivery
from onefold.queues.keys import header
from tests.support import PATIENCE

Library = Literal["pika", "aio-pika"]
LIBRARIES: Final = ("pika", "aio-pika")

# A queue that nobody uses any more goes by itself: AMQP has no word for emptying a broker.
EXPIRES: Final = {"x-expires": 600_000}


def until(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


class Environment:
    """A queue, its dead letters, and a connection to look at both."""

    def __init__(self, url: str, name: str, **arguments: Any) -> None:
        self.url = url
        self.queue = name
        self.dead = f"{name}.dead"
        self._arguments = EXPIRES | arguments
        self.declare()

    def declare(self) -> None:
        with self.channel() as channel:
            channel.queue_declare(self.queue, durable=True, arguments=self._arguments)
            channel.queue_declare(self.dead, durable=True, arguments=EXPIRES)

    @contextmanager
    def channel(self) -> Iterator[Any]:
        with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            yield channel

    def send(self, body: bytes = b"{}", *, times: int = 1, **properties: Any) -> None:
        """As somebody else's client would."""
        with self.channel() as channel:
            for _ in range(times):
                made = pika.BasicProperties(delivery_mode=2, **properties)
                channel.basic_publish("", self.queue, body, made, mandatory=True)

    def send_keyed(self, key: str, body: bytes = b"{}", *, times: int = 1) -> None:
        self.send(body, times=times, headers={"idempotency-key": key})

    def count(self, queue: str | None = None) -> int:
        with self.channel() as channel:
            return int(channel.queue_declare(queue or self.queue, passive=True).method.message_count)

    def letter(self) -> tuple[Any, bytes]:
        """The next dead letter: its properties, and its body."""
        with self.channel() as channel:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                method, properties, body = channel.basic_get(self.dead, auto_ack=True)
                if method is not None:
                    return properties, body
                time.sleep(0.01)
        raise AssertionError("no dead letter came")


class Consumer:
    """One that consumes in a thread until it is told to stop; it settles what it has begun before it goes.

    A queue that looks empty may have given its messages to a consumer that has not begun them, or to one that is dead:
    wait for `acks`. Once a consumer has gone, what it did not acknowledge is in the queue again.
    """

    def __init__(
        self,
        library: Library,
        environment: Environment,
        store: Any,
        handler: Callable[..., Any],
        *,
        policy: Policy | None = None,
        prefetch: int = 10,
        heartbeat: int | None = None,
        loses_its_broker: bool = False,
        **options: Any,
    ) -> None:
        self.environment = environment
        self.prefetch = prefetch
        self.heartbeat = heartbeat
        self.errors: list[BaseException] = []
        # How many messages it has acknowledged.
        self.acks = 0
        self._callback: onefold_pika.GuardedCallback | onefold_aio_pika.GuardedCallback | None = None
        self._loses_its_broker = loses_its_broker
        self._options: dict[str, Any] = {"key": header(), "dead_letter": environment.dead, "policy": policy} | options
        self._stop = threading.Event()
        self._ready = threading.Event()
        run = self._pika if library == "pika" else self._aio_pika
        self._thread = threading.Thread(target=self._caught, args=(run, store, handler))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        self._thread.join(2 * PATIENCE)
        assert not self._thread.is_alive()
        if kind is None and self.errors and not self._loses_its_broker:
            raise self.errors[0]

    @property
    def is_leaving(self) -> bool:
        """It takes no more messages, and waits for those that it has begun."""
        return self._callback is not None and bool(self._callback._leaving)

    def has_all_of(self, prefetch: int) -> bool:
        """Whether every message that the broker may give it has arrived. aio-pika keeps no list of them."""
        callback = self._callback
        return not isinstance(callback, onefold_pika.GuardedCallback) or len(callback._at_work) == prefetch

    def _caught(self, run: Callable[..., None], *arguments: Any) -> None:
        try:
            run(*arguments)
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._ready.set()

    def _pika(self, store: Any, handler: Callable[..., Any]) -> None:
        with Guard(store) as guard:
            try:
                self._consume(onefold_pika.guarded(guard, "charge", handler, **self._options))
            finally:
                # As in a service, the guard outlives a connection.
                self._stop.wait()

    def _consume(self, callback: onefold_pika.GuardedCallback) -> None:
        self._callback = callback
        parameters = pika.URLParameters(self.environment.url)
        parameters.heartbeat = self.heartbeat
        with pika.BlockingConnection(parameters) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=self.prefetch)
            ack = channel.basic_ack

            def counted(*arguments: Any, **options: Any) -> None:
                ack(*arguments, **options)
                self.acks += 1

            channel.basic_ack = counted  # type: ignore[method-assign]
            channel.basic_consume(self.environment.queue, callback)
            self._ready.set()
            while not self._stop.is_set():
                connection.process_data_events(0.02)
            channel.stop_consuming()
            assert callback.drain(connection, within=PATIENCE)

    def _aio_pika(self, store: Any, handler: Callable[..., Any]) -> None:
        asyncio.run(self._consume_async(store, as_async(handler)))

    async def _consume_async(self, store: Any, handler: Callable[..., Any]) -> None:
        connection = await aio_pika.connect(self.environment.url, heartbeat=self.heartbeat)
        async with AsyncGuard(store) as guard, connection:
            callback = self._callback = onefold_aio_pika.guarded(guard, "charge", handler, **self._options)
            channel = await connection.channel()
            await channel.set_qos(self.prefetch)
            below: Any = await channel.get_underlay_channel()
            ack = below.basic_ack

            async def counted(*arguments: Any, **options: Any) -> None:
                await ack(*arguments, **options)
                self.acks += 1

            below.basic_ack = counted
            queue = await channel.get_queue(self.environment.queue)
            tag = await queue.consume(callback)
            self._ready.set()
            await asyncio.to_thread(self._stop.wait)
            await queue.cancel(tag)
            assert await callback.drain(within=PATIENCE)


def as_async(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler as aio-pika wants it; what blocks is in a thread, what has a transaction stays with it."""

    async def simple(delivery: Delivery) -> None:
        await asyncio.to_thread(handler, delivery)

    async def transactional(delivery: Delivery, *, tx: Any) -> None:
        handler(delivery, tx=tx)

    return transactional if "tx" in inspect.signature(handler).parameters else simple
