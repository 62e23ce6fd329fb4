"""Workers of both Kafka clients with one face, so that each promise is written once; and a look at what they left.

An async worker runs in an event loop of its own, one step at a time; its handlers are written blocking.
"""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import confluent_kafka
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from onefold import AsyncGuard, Guard, Policy
from onefold.queues import aiokafka as of_aiokafka
from onefold.queues import confluent_kafka as of_confluent
from onefold.queues.keys import header
from tests.support import PATIENCE

POLL = 0.05
# How long a consumer is waited for that is to be closed before it has partitions.
FIRST_ASSIGNMENT = 1.0

# A broker that does not hear of a consumer for so long gives its partitions away, and the consumer counts its attempts
# anew: not in a test that is about something else. An aiokafka consumer is silent between two steps.
SESSION_MS = 45_000
# Where a test waits for that, or for a rebalance: the mock gives the others nearly as long to join again.
SHORT_SESSION_MS = 3_000

# A client that outlives its server by a moment has nothing to say.
QUIET = {"log_level": 2}

CONFIG = {
    **QUIET,
    "auto.offset.reset": "earliest",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "session.timeout.ms": SESSION_MS,
    "heartbeat.interval.ms": 100,
    # A partition that goes back is read again when the broker has answered the last question.
    "fetch.wait.max.ms": 20,
}
ASYNC_CONFIG: dict[str, Any] = {
    "auto_offset_reset": "earliest",
    "enable_auto_commit": False,
    "session_timeout_ms": SESSION_MS,
    "heartbeat_interval_ms": 100,
    "fetch_max_wait_ms": 20,
}


class Worker:
    """A confluent-kafka consumer, its loop and its guard."""

    is_async = False
    adapter: Any = of_confluent

    def __init__(
        self,
        url: str,
        topic: str,
        handler: Callable[..., Any],
        *,
        group: str | None = None,
        store: Any = "memory:",
        policy: Policy | None = None,
        poll: int = 0,
        transaction: Callable[[], Any] | None = None,
        subscribe: bool = True,
        consumer_kind: type[Consumer] = Consumer,
        consumer_config: dict[str, Any] | None = None,
        producer_config: dict[str, Any] | None = None,
        letters: Any = None,
        **options: Any,
    ) -> None:
        self._poll = poll
        self._subscribes = subscribe
        self.guard = Guard(store, policy=policy)
        config = {**CONFIG, "bootstrap.servers": url, "group.id": group or topic, **(consumer_config or {})}
        self.consumer = consumer_kind(config)
        self.producer = Producer({"bootstrap.servers": url, **QUIET, **(producer_config or {})})
        # The mock creates a topic when it is asked about; a producer that has to wait for that loses a second.
        self.producer.list_topics(f"{topic}.dead", timeout=PATIENCE)
        options = {"key": header(), "backoff": 0.05, **options}
        letters = letters or self.adapter.DeadLetters(self.producer, f"{topic}.dead", within=PATIENCE)
        options.setdefault("dead_letter", letters)
        make = self.adapter.guarded
        if transaction is not None:
            make, options["transaction"] = self.adapter.guarded_batches, transaction
        else:
            options.setdefault("wait", 0)
        self.handle = make(self.guard, "credit", handler, consumer=self.consumer, **options)
        if subscribe:
            self.handle.subscribe([topic])

    def step(self) -> None:
        """One turn of the loop."""
        if self._poll:
            self.handle.batch(self.consumer.consume(self._poll, POLL))
        else:
            self.handle(self.consumer.poll(POLL))

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, "it does not come to hold"
            self.step()

    def partitions(self) -> set[int]:
        return {one.partition for one in self.consumer.assignment()}

    def send(self, topic: str, value: bytes, **options: Any) -> Any:
        return self.adapter.send(self.producer, topic, value, **options)

    def close_guard(self) -> None:
        self.guard.close()

    def close(self) -> None:
        self._wait_for_assignment()
        self.consumer.close()
        self.guard.close()

    def _wait_for_assignment(self) -> None:
        """Have the first assignment before closing: in its very moment, librdkafka may hang (its issue 4041)."""
        deadline = time.monotonic() + FIRST_ASSIGNMENT
        with suppress(KafkaException, RuntimeError):
            while self._subscribes and not self.consumer.assignment() and time.monotonic() < deadline:
                self.consumer.poll(POLL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncWorker:
    """The same with aiokafka."""

    is_async = True
    adapter: Any = of_aiokafka

    def __init__(
        self,
        url: str,
        topic: str,
        handler: Callable[..., Any],
        *,
        group: str | None = None,
        store: Any = "memory:",
        policy: Policy | None = None,
        poll: int = 0,
        transaction: Callable[[], Any] | None = None,
        subscribe: bool = True,
        consumer_kind: type[Any] = AIOKafkaConsumer,
        consumer_config: dict[str, Any] | None = None,
        producer_config: dict[str, Any] | None = None,
        letters: Any = None,
        **options: Any,
    ) -> None:
        self._poll = poll
        self.guard = AsyncGuard(store, policy=policy)
        self._runner = asyncio.Runner()
        self._runner.__enter__()
        self._reading: asyncio.Task[Any] | None = None
        config = {**ASYNC_CONFIG, "bootstrap_servers": url, "group_id": group or topic, **(consumer_config or {})}

        async def begin() -> None:
            self.consumer = consumer_kind(**config)
            self.producer = AIOKafkaProducer(bootstrap_servers=url, **(producer_config or {}))
            made = {"key": header(), "backoff": 0.05, **options}
            made.setdefault(
                "dead_letter", letters or self.adapter.DeadLetters(self.producer, f"{topic}.dead", within=PATIENCE)
            )
            make = self.adapter.guarded
            if transaction is not None:
                make, made["transaction"] = self.adapter.guarded_batches, awaited_transaction(transaction)
            else:
                made.setdefault("wait", 0)
            self.handle = make(self.guard, "credit", as_async(handler), consumer=self.consumer, **made)
            await self.producer.start()
            await self.producer.partitions_for(f"{topic}.dead")
            await self.consumer.start()
            if subscribe:
                self.handle.subscribe([topic])

        try:
            self._runner.run(begin())
        except BaseException:
            self.close()
            raise

    def step(self) -> None:
        self._runner.run(self._step())

    async def _step(self) -> None:
        if self._poll:
            await self.handle.batch(await self.consumer.getmany(timeout_ms=int(POLL * 1000), max_records=self._poll))
            return
        # A message that is late must not be lost with its reader.
        self._reading = self._reading or asyncio.ensure_future(self.consumer.getone())
        done, _ = await asyncio.wait([self._reading], timeout=POLL)
        if done:
            reading, self._reading = self._reading, None
            await self.handle(reading.result())

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, "it does not come to hold"
            self.step()

    def partitions(self) -> set[int]:
        return {one.partition for one in self.consumer.assignment()}

    def send(self, topic: str, value: bytes, **options: Any) -> Any:
        return self._runner.run(self.adapter.send(self.producer, topic, value, **options))

    def close_guard(self) -> None:
        self._runner.run(self.guard.aclose())

    def close(self) -> None:
        async def end() -> None:
            if self._reading is not None:
                self._reading.cancel()
                await asyncio.wait([self._reading])
            await self.consumer.stop()
            await self.producer.stop()
            await self.guard.aclose()

        self._runner.run(end())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


WORKERS: dict[str, Any] = {"confluent": Worker, "aiokafka": AsyncWorker}


class Wallet:
    """A table of credits in a file, whose transactions can be made to fail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.poison = b"poison"
        self.calls: list[int] = []
        self.down = False
        with self.begin() as tx:
            tx.execute("CREATE TABLE credits (body TEXT)")
        # The records' own table.
        with Guard(f"sqlite:///{path}") as guard:
            guard.run("other", "k", lambda: None)

    @contextmanager
    def begin(self) -> Iterator[sqlite3.Connection]:
        if self.down:
            raise ConnectionError("the database is away")
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=PATIENCE)
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        finally:
            connection.close()

    def credit_all(self, messages: list[Any], *, tx: sqlite3.Connection) -> None:
        self.calls.append(len(messages))
        for message in messages:
            self.credit(message, tx=tx)

    def credit(self, message: Any, *, tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO credits VALUES (?)", (value_of(message).decode(),))
        if value_of(message) == self.poison:
            raise ValueError("cannot be done")

    @property
    def credits(self) -> list[str]:
        with self.begin() as tx:
            return [row[0] for row in tx.execute("SELECT body FROM credits ORDER BY rowid")]

    def next_offsets(self) -> list[tuple[Any, ...]]:
        with self.begin() as tx:
            return tx.execute("SELECT topic, partition_number, next_offset FROM onefold_offsets ORDER BY 2").fetchall()


def as_async(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler as an `async def`, with a `tx` if it has one; what it returns is awaited if it can be."""
    if "tx" in inspect.signature(handler).parameters:

        async def with_tx(message: Any, *, tx: Any) -> None:
            found = handler(message, tx=tx)
            if inspect.isawaitable(found):
                await found

        return with_tx

    async def plain(message: Any) -> None:
        handler(message)

    return plain


def awaited_transaction(transaction: Callable[[], Any]) -> Callable[[], Any]:
    @asynccontextmanager
    async def opened() -> Any:
        with transaction() as tx:
            yield tx

    return opened


def value_of(message: Any) -> bytes:
    value = message.value() if isinstance(message, Message) else message.value
    return value or b""


def produce(url: str, topic: str, *messages: tuple[Any, bytes], partition: int = 0, **config: Any) -> None:
    """Each message as its key, or None, and its value; they are there when this returns, and are read in one poll."""
    # One batch, which `flush` sends: the mock answers a fetch with one, and a poll does not wait for the next.
    producer = Producer({"bootstrap.servers": url, "linger.ms": int(1000 * PATIENCE), **QUIET, **config})
    reports: list[Any] = []
    for key, value in messages:
        headers = [] if key is None else [("idempotency-key", key)]
        producer.produce(
            topic, value, partition=partition, headers=headers, on_delivery=lambda error, _: reports.append(error)
        )
    assert producer.flush(PATIENCE) == 0
    assert reports == [None] * len(messages)


def committed(url: str, group: str, topic: str, partition: int = 0) -> int:
    """The next offset of the group; 0 where it has none."""
    with reader(url, group) as consumer:
        (found,) = consumer.committed([TopicPartition(topic, partition)], timeout=PATIENCE)
    assert found.error is None
    return max(found.offset, 0)


def letters_in(url: str, topic: str, count: int) -> list[Message]:
    """So many messages of a topic, from the beginning, and proof that there are no more."""
    with reader(url, "letters") as consumer:
        partitions = consumer.list_topics(topic, timeout=PATIENCE).topics[topic].partitions
        deadline = time.monotonic() + PATIENCE
        while (held := _held(consumer, topic, partitions)) < count:
            assert time.monotonic() < deadline, f"{held} messages, and there should be {count}"
            time.sleep(POLL)
        assert held == count
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        found: list[Message] = []
        while len(found) < count:
            assert time.monotonic() < deadline
            found += [message for message in consumer.consume(count, POLL) if message.error() is None]
    return found


def _held(consumer: Consumer, topic: str, partitions: Iterable[int]) -> int:
    """How many messages the broker has."""
    wanted = [TopicPartition(topic, number) for number in partitions]
    return sum(consumer.get_watermark_offsets(one, PATIENCE)[1] for one in wanted)


def headers_of(message: Message) -> dict[str, Any]:
    return dict(message.headers() or [])


@contextmanager
def reader(url: str, group: str) -> Iterator[confluent_kafka.Consumer]:
    consumer = Consumer({**CONFIG, "bootstrap.servers": url, "group.id": group})
    try:
        yield consumer
    finally:
        consumer.close()
