"""A queue on each broker, its dead letters, and a guarded consumer of it: with one face, on real servers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

import boto3
import pika
import redis
from confluent_kafka import Producer, TopicPartition
from typer.testing import CliRunner, Result

from onefold import Guard
from onefold.cli.app import app
from onefold.queues import redis_streams, sqs
from onefold.queues._kafka.messages import letter_headers
from onefold.queues._kafka.offsets import Partition, Spot
from onefold.queues.keys import header
from onefold.stores.base import Address
from services.dynamodb import REGION
from tests.queues import nats_tools
from tests.queues.kafka_tools import QUIET, Worker
from tests.queues.rabbitmq_tools import Consumer, until
from tests.queues.rabbitmq_tools import Environment as Queues
from tests.support import PATIENCE

REASON: Final = "it failed 5 times, the last time with ValueError at charge.py:7 in charge"

Handler = Callable[[bytes], None]


def letter_facts(key: str | None, reason: str, operation: str) -> dict[str, str]:
    """The headers of a dead letter on every broker."""
    facts = {"x-onefold-reason": reason, "x-onefold-operation": operation}
    if key is not None:
        facts |= {"x-onefold-digest": Address("", operation, key).digest, "idempotency-key": key}
    return facts


class Place(ABC):
    """A queue, and its dead letters."""

    # For `onefold redrive`.
    broker: str
    dead: str
    origin: str
    # Of its consumer.
    operation = "charge"
    drops_what_is_sent_twice = False

    @abstractmethod
    def send(self, key: str, body: bytes) -> None: ...

    @abstractmethod
    def bury(self, key: str | None, body: bytes, *, reason: str = REASON, origin: str | None = None) -> None:
        """Write a dead letter as the adapter does, whatever its record says."""

    @abstractmethod
    def deliver(self, store: str, handler: Handler, count: int) -> None:
        """Consume until so many messages are settled. What fails goes to the dead letters at once."""

    def redrive(self, *options: str) -> Result:
        return CliRunner().invoke(app, ["redrive", "--broker", self.broker, "--dead-letters", self.dead, *options])

    def json(self, *options: str) -> dict[str, Any]:
        said = self.redrive(*options, "--format", "json")
        found: dict[str, Any] = json.loads(said.stdout)
        return found

    def listed(self) -> int:
        return len(self.json()["messages"])

    def close(self) -> None:  # noqa: B027 - most leave nothing behind
        """Remove what would stay."""


class Rabbit(Place):
    def __init__(self, url: str, name: str) -> None:
        self.queues = Queues(url, name)
        self.broker, self.origin, self.dead = url, self.queues.queue, self.queues.dead

    def send(self, key: str, body: bytes) -> None:
        self.queues.send_keyed(key, body)

    def bury(self, key: str | None, body: bytes, *, reason: str = REASON, origin: str | None = None) -> None:
        origins = {"x-onefold-exchange": "", "x-onefold-routing-key": self.origin if origin is None else origin}
        headers = letter_facts(key, reason, self.operation) | origins | {"x-onefold-time": int(time.time()) - 60}
        with self.queues.channel() as channel:
            made = pika.BasicProperties(delivery_mode=2, headers=headers)
            channel.basic_publish("", self.dead, body, made, mandatory=True)

    def deliver(self, store: str, handler: Handler, count: int) -> None:
        def handle(delivery: Any) -> None:
            handler(delivery.body)

        with Consumer("pika", self.queues, store, handle, attempts=1) as consumer:
            until(lambda: consumer.acks == count, f"{count} messages are settled")


class Nats(Place):
    drops_what_is_sent_twice = True

    def __init__(self, url: str, name: str) -> None:
        self.streams = nats_tools.Environment(url, name)
        self.broker, self.origin, self.dead = url, self.streams.subject, self.streams.dead
        self._runner = asyncio.Runner()
        self._run(self.streams.__aenter__())
        self._settled = 0

    def _run(self, story: Any) -> Any:
        return self._runner.run(story)

    def send(self, key: str, body: bytes) -> None:
        # As `send` does: the id is made of the key.
        headers = {"idempotency-key": key, "Nats-Msg-Id": f"{key}@{self.origin}"}
        self._run(self.streams.js.publish(self.origin, body, headers=headers))

    def bury(self, key: str | None, body: bytes, *, reason: str = REASON, origin: str | None = None) -> None:
        headers = letter_facts(key, reason, self.operation) | {
            "x-onefold-stream": self.streams.stream,
            "x-onefold-sequence": "1",
        }
        if origin != "":
            headers["x-onefold-subject"] = origin or self.origin
        if key is not None:
            headers["x-onefold-message-id"] = f"{key}@{self.origin}"
        self._run(self.streams.js.publish(self.dead, body, headers=headers))

    def deliver(self, store: str, handler: Handler, count: int) -> None:
        async def handle(delivery: Any) -> None:
            handler(delivery.body)

        async def story() -> None:
            async with nats_tools.worker(self.streams, store, handle, attempts=1):
                await self.streams.settled(self._settled)

        self._settled += count
        self._run(story())

    def close(self) -> None:
        self._run(self.streams.__aexit__(None, None, None))
        self._runner.close()


class Kafka(Place):
    operation = "credit"

    def __init__(self, url: str, topic: str) -> None:
        self.url, self.origin, self.dead = url, topic, f"{topic}.dead"
        self.broker = f"kafka://{url}"
        self.producer = Producer({"bootstrap.servers": url, **QUIET})
        self.producer.list_topics(self.dead, timeout=PATIENCE)

    def send(self, key: str, body: bytes) -> None:
        self.producer.produce(self.origin, body, headers=[("idempotency-key", key.encode())], partition=0)
        self.producer.flush(PATIENCE)

    def bury(self, key: str | None, body: bytes, *, reason: str = REASON, origin: str | None = None) -> None:
        facts = letter_facts(key, reason, self.operation)
        own = [("idempotency-key", key.encode())] if key is not None else []
        spot = Spot(Partition(self.origin if origin is None else origin, 0), 0, 0)
        headers = letter_headers(own, spot, self.operation, reason, facts.get("x-onefold-digest", ""))
        self.producer.produce(self.dead, body, headers=headers, partition=0)
        self.producer.flush(PATIENCE)

    def deliver(self, store: str, handler: Handler, count: int) -> None:
        def handle(message: Any) -> None:
            handler(message.value())

        # Not as a member of its group: the mock would keep the next one waiting for half a minute.
        options: dict[str, Any] = {"attempts": 1, "group": self.origin, "subscribe": False}
        with Worker(self.url, self.origin, handle, store=store, **options) as one:
            parts = [TopicPartition(self.origin, number) for number in range(4)]
            one.consumer.assign(parts)

            def is_settled() -> bool:
                ends = [one.consumer.get_watermark_offsets(part, PATIENCE)[1] for part in parts]
                found = one.consumer.committed(parts, PATIENCE)
                return sum(max(part.offset, 0) for part in found) == sum(ends)

            one.until(is_settled)


class Streams(Place):
    def __init__(self, url: str, name: str) -> None:
        self.broker, self.origin, self.dead = url, name, f"{name}.dead"
        self.client: Any = redis.Redis.from_url(url)
        self._settled = 0
        self.client.xgroup_create(name, "workers", "0", mkstream=True)

    def send(self, key: str, body: bytes) -> None:
        self.client.xadd(self.origin, {"idempotency-key": key, "body": body})

    def bury(self, key: str | None, body: bytes, *, reason: str = REASON, origin: str | None = None) -> None:
        fields = letter_facts(key, reason, self.operation) | {"x-onefold-group": "workers", "x-onefold-entry-id": "1-1"}
        if origin != "":
            fields["x-onefold-stream"] = origin or self.origin
        self.client.xadd(self.dead, {**fields, "body": body})

    def deliver(self, store: str, handler: Handler, count: int) -> None:
        def handle(delivery: Any) -> None:
            handler(delivery.body)

        def is_settled() -> bool:
            (group,) = self.client.xinfo_groups(self.origin)
            return bool((group["entries-read"] or 0) == self._settled and not group["pending"])

        self._settled += count
        names: Any = {"stream": self.origin, "group": "workers", "dead_letter": self.dead}
        with Guard(store) as guard:
            worker = redis_streams.guarded(guard, self.operation, handle, key=header(), attempts=1, **names)
            consumed(lambda: worker.consume(self.client), worker.drain, is_settled)

    def close(self) -> None:
        self.client.delete(self.origin, self.dead)
        self.client.close()


class Sqs(Place):
    def __init__(self, url: str, name: str) -> None:
        self.broker = f"sqs://?region={REGION}&endpoint_url={url}"
        self.client: Any = boto3.client("sqs", endpoint_url=url, region_name=REGION)
        self.origin, self.dead = name, f"{name}-dead"
        self.urls = {one: self.client.create_queue(QueueName=one)["QueueUrl"] for one in (self.origin, self.dead)}

    def _send(self, queue: str, body: bytes, headers: Mapping[str, str]) -> None:
        attributes = {name: {"DataType": "String", "StringValue": value} for name, value in headers.items()}
        self.client.send_message(QueueUrl=self.urls[queue], MessageBody=body.decode(), MessageAttributes=attributes)

    def send(self, key: str, body: bytes) -> None:
        self._send(self.origin, body, {"idempotency-key": key})

    def bury(self, key: str | None, body: bytes, *, reason: str = REASON, origin: str | None = None) -> None:
        where = {} if origin == "" else {"x-onefold-queue": origin or self.origin}
        self._send(self.dead, body, letter_facts(key, reason, self.operation) | where)

    def deliver(self, store: str, handler: Handler, count: int) -> None:
        deleted: list[str] = []

        def handle(delivery: Any) -> None:
            handler(delivery.body)

        def counted(parsed: Any, **_: Any) -> None:
            deleted.extend(one["Id"] for one in parsed.get("Successful", []))

        self.client.meta.events.register("after-call.sqs.DeleteMessageBatch", counted)
        urls: Any = {"queue": self.urls[self.origin], "dead_letter": self.urls[self.dead]}
        with Guard(store) as guard:
            worker = sqs.guarded(guard, self.operation, handle, client=self.client, key=header(), attempts=1, **urls)
            consumed(worker.consume, worker.drain, lambda: len(deleted) >= count)
        self.client.meta.events.unregister("after-call.sqs.DeleteMessageBatch", counted)
        assert len(deleted) == count

    def close(self) -> None:
        for url in self.urls.values():
            self.client.delete_queue(QueueUrl=url)
        self.client.close()


def consumed(consume: Callable[[], None], drain: Callable[[], bool], is_settled: Callable[[], bool]) -> None:
    """Run a worker in a thread until everything is settled."""
    thread = threading.Thread(target=consume)
    thread.start()
    try:
        until(is_settled, "all messages are settled")
    finally:
        assert drain()
        thread.join(PATIENCE)
