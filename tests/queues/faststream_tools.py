"""FastStream's brokers on real servers: one way to subscribe, publish and look, whatever the broker is."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

import aio_pika
import nats
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from faststream import AckPolicy
from faststream.kafka import KafkaBroker
from faststream.nats import JStream, NatsBroker, PullSub
from faststream.rabbit import QueueType, RabbitBroker, RabbitQueue
from faststream.redis import RedisBroker, StreamSub
from faststream.redis.parser import BinaryMessageFormatV1
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig
from nats.js.errors import NotFoundError
from redis.asyncio import Redis

from services import kafka as kafka_server
from services.fixtures import found
from tests.support import PATIENCE

KINDS: Final = ("rabbitmq", "nats", "kafka", "redis")

# After how long a message of a dead worker is delivered again, in seconds.
SILENCE: Final = 1.0


class Place(NamedTuple):
    """A queue, a subject, a topic or a stream of its own on one server."""

    kind: str
    url: str
    name: str

    @property
    def dead(self) -> str:
        return f"{self.name}-dead"


SERVERS: Final = {"rabbitmq": "rabbitmq", "nats": "nats", "kafka": "kafka", "redis": "valkey"}


def new_place(request: pytest.FixtureRequest, kind: str) -> Place:
    server = found(request, SERVERS[kind])
    place = Place(kind, server.url.replace("valkey:", "redis:"), f"onefold-{secrets.token_hex(6)}")
    if kind != "kafka":
        return place
    for topic in (place.name, place.dead):
        kafka_server.create_topic(server, topic)
    return place._replace(url=kafka_server.bootstrap(server.url))


def broker_of(place: Place, **options: Any) -> Any:
    """Return a broker that acknowledges what its handlers have done, before it stops."""
    options = {"graceful_timeout": PATIENCE / 2, **options}
    match place.kind:
        case "rabbitmq":
            return RabbitBroker(place.url, logger=None, **options)
        case "nats":
            return NatsBroker(place.url, logger=None, **options)
        case "kafka":
            return KafkaBroker(place.url, logger=None, **options)
    quiet: Any = None
    return RedisBroker(place.url, logger=quiet, **options)


def subscriber(
    broker: Any, place: Place, policy: AckPolicy = AckPolicy.NACK_ON_ERROR, *, name: str | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator of a handler. Messages of a dead worker are delivered again soon."""
    decorator: Callable[[Callable[..., Any]], Callable[..., Any]] = _subscriber(
        broker, place, place.name if name is None else name, {"ack_policy": policy, **options}
    )
    return decorator


def _subscriber(broker: Any, place: Place, wanted: str, given: dict[str, Any]) -> Any:
    match place.kind:
        case "rabbitmq":
            queue = RabbitQueue(
                wanted,
                queue_type=QueueType.QUORUM,
                arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": place.dead},
            )
            return broker.subscriber(queue, **given)
        case "nats":
            config = ConsumerConfig(ack_wait=SILENCE)
            stream = JStream(wanted, subjects=[wanted, place.dead])
            pull = {"durable": "workers", "pull_sub": PullSub(timeout=0.2)}
            return broker.subscriber(wanted, stream=stream, config=config, **pull, **given)
        case "kafka":
            group = {"group_id": f"{wanted}-workers", "auto_offset_reset": "earliest"}
            alive = {"session_timeout_ms": int(SILENCE * 2_000), "heartbeat_interval_ms": int(SILENCE * 200)}
            return broker.subscriber(wanted, **group, **alive, **given)
    fresh = broker.subscriber(stream=_stream(wanted, last_id=">"), **given)
    claimed = broker.subscriber(stream=_stream(wanted, "claiming", min_idle_time=int(SILENCE * 1000)), **given)
    return lambda handler: fresh(claimed(handler))


def batches(broker: Any, place: Place) -> Any:
    """Return the decorator of a handler that takes several messages at once, on NATS or Redis."""
    policy = {"ack_policy": AckPolicy.NACK_ON_ERROR}
    if place.kind == "nats":
        pull = {"durable": "workers", "pull_sub": PullSub(2, timeout=0.2, batch=True)}
        return broker.subscriber(place.name, stream=JStream(place.name, subjects=[place.name]), **pull, **policy)
    return broker.subscriber(stream=_stream(place.name, last_id=">", batch=True), **policy)


def _stream(name: str, consumer: str = "reading", **options: Any) -> StreamSub[Any]:
    return StreamSub(name, group="workers", consumer=consumer, polling_interval=50, **options)


def publisher(broker: Any, place: Place, name: str) -> Any:
    match place.kind:
        case "nats":
            return broker.publisher(name, stream=place.name)
        case "redis":
            return broker.publisher(stream=name)
    return broker.publisher(name)


async def publish(broker: Any, place: Place, body: Any, *, key: str | None = None, **headers: str) -> None:
    given = {**headers, **({} if key is None else {"idempotency-key": key})}
    # One partition, so that messages come in their order.
    options: dict[str, Any] = {"partition": 0} if place.kind == "kafka" else {}
    if place.kind in ("nats", "redis"):
        options["stream"] = place.name
    where = () if place.kind == "redis" else (place.name,)
    await broker.publish(body, *where, headers=given, **options)


async def until(holds: Callable[[], Any], what: str = "it") -> None:
    end = asyncio.get_running_loop().time() + PATIENCE
    while not holds():
        assert asyncio.get_running_loop().time() < end, f"not in time: {what}"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def running(broker: Any, place: Place) -> AsyncIterator[None]:
    """A broker with its subscribers, started, and stopped at the end."""
    await broker.start()
    try:
        if place.kind == "rabbitmq":
            await broker.declare_queue(RabbitQueue(place.dead, durable=True))
        yield
    finally:
        await asyncio.wait_for(broker.stop(), PATIENCE)


async def letters(place: Place) -> list[dict[str, Any]]:
    """Return the headers of the dead letters."""
    match place.kind:
        case "rabbitmq":
            return await _letters_of_rabbitmq(place)
        case "nats":
            async with jetstream(place) as js:
                with suppress(NotFoundError):
                    return [dict((await js.get_last_msg(place.name, place.dead)).headers or {})]
                return []
        case "kafka":
            return await _letters_of_kafka(place)
    async with Redis.from_url(place.url) as redis:
        read: Any = await redis.xrange(place.dead)
        return [BinaryMessageFormatV1.parse(fields[b"__data__"])[1] for _, fields in read]


async def left(place: Place) -> int:
    """Return how many messages are not acknowledged, once no worker runs any more."""
    match place.kind:
        case "rabbitmq":
            async with await aio_pika.connect(place.url) as connection:
                queue = await (await connection.channel()).declare_queue(place.name, passive=True)
                return int(queue.declaration_result.message_count or 0)
        case "nats":
            async with jetstream(place) as js:
                known = await js.consumer_info(place.name, "workers")
                return int(known.num_ack_pending or 0) + int(known.num_pending or 0)
        case "kafka":
            return await _left_in_kafka(place)
    async with Redis.from_url(place.url) as redis:
        pending: Any = await redis.xpending(place.name, "workers")
        return int(pending["pending"])


@asynccontextmanager
async def jetstream(place: Place) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(place.url)
    try:
        yield client.jetstream()
    finally:
        await client.close()


async def _letters_of_rabbitmq(place: Place) -> list[dict[str, Any]]:
    async with await aio_pika.connect(place.url) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue(place.dead)
        read = []
        while (message := await queue.get(no_ack=True, fail=False)) is not None:
            read.append(dict(message.headers))
        return read


@asynccontextmanager
async def _reader(place: Place, topic: str, group: str | None = None) -> AsyncIterator[Any]:
    consumer = AIOKafkaConsumer(bootstrap_servers=place.url, group_id=group, enable_auto_commit=False)
    await consumer.start()
    try:
        parts = [TopicPartition(topic, number) for number in sorted(await _partitions(consumer, topic))]
        consumer.assign(parts)
        yield consumer
    finally:
        await consumer.stop()


async def _partitions(consumer: Any, topic: str) -> set[int]:
    await consumer._client.force_metadata_update()
    await consumer._client.add_topic(topic)
    return consumer.partitions_for_topic(topic) or set()


async def _letters_of_kafka(place: Place) -> list[dict[str, Any]]:
    async with _reader(place, place.dead) as consumer:
        await consumer.seek_to_beginning()
        wanted, read = sum((await consumer.end_offsets(consumer.assignment())).values()), list[Any]()
        end = asyncio.get_running_loop().time() + PATIENCE
        while len(read) < wanted:
            assert asyncio.get_running_loop().time() < end, "not all dead letters can be read"
            for several in (await consumer.getmany(timeout_ms=200)).values():
                read += several
        return [{name: value.decode() for name, value in one.headers} for one in read]


async def _left_in_kafka(place: Place) -> int:
    async with _reader(place, place.name, f"{place.name}-workers") as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        return sum([end - (await consumer.committed(part) or 0) for part, end in ends.items()])
