"""The header of the key, however its name is spelled: HTTP's people write Idempotency-Key, and mean the same one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from celery import Celery
from confluent_kafka import Producer
from msgspec import UNSET

from onefold import Guard, MissingKey, UsageError
from onefold.queues import aio_pika as onefold_aio_pika
from onefold.queues import aiokafka as onefold_aiokafka
from onefold.queues import confluent_kafka as onefold_confluent_kafka
from onefold.queues import dramatiq as onefold_dramatiq
from onefold.queues import faststream as onefold_faststream
from onefold.queues import nats as onefold_nats
from onefold.queues import pika as onefold_pika
from onefold.queues import redis_streams
from onefold.queues import rq as onefold_rq
from onefold.queues import sqs as onefold_sqs
from onefold.queues import taskiq as onefold_taskiq
from onefold.queues.celery import guarded
from onefold.queues.celery import send as send_task
from onefold.queues.keys import Message, first_of, header, message_id, with_key
from tests.queues.dramatiq_tools import Hand
from tests.queues.kafka_tools import QUIET, WORKERS, committed, headers_of, letters_in, value_of
from tests.queues.nats_tools import Environment as NatsEnvironment
from tests.queues.nats_tools import Handled, worker
from tests.queues.rabbitmq_tools import LIBRARIES, Consumer, Environment, Library, until
from tests.queues.redis_streams_tools import Environment as StreamEnvironment
from tests.queues.redis_streams_tools import Handled as StreamHandled
from tests.queues.redis_streams_tools import Worker as StreamWorker
from tests.support import PATIENCE, in_time

SPELLINGS = ("idempotency-key", "Idempotency-Key", "IDEMPOTENCY-KEY", "idempotency-KEY")
# The second is a duplicate of the first, and nobody knows of what the third is one.
THREE = ({"Idempotency-Key": "a"}, {"idempotency-key": "a"}, {"Idempotency-Key": "a", "idempotency-key": "b"})
TWO = "the header idempotency-key comes in several spellings with different values: none is the key"


def message(headers: dict[Any, Any]) -> Message:
    return Message(b"", headers, message_id="id")


@pytest.mark.parametrize("written", SPELLINGS)
@pytest.mark.parametrize("value", ["pay-1", b"pay-1", bytearray(b"pay-1")])
@pytest.mark.parametrize("asked", [*SPELLINGS[:2], ""])
def test_the_name_of_a_header_has_no_case(written: str, value: Any, asked: str) -> None:
    key = header(asked) if asked else header()

    assert key(message({"other": "x", written: value, 7: "no name"})) == "pay-1"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Idempotency-Key": "a", "idempotency-key": b"a"}, "a"),
        ({"Idempotency-Key": 7, "idempotency-key": "7"}, 7),
        ({"Idempotency-Key": None, "idempotency-key": "a"}, "a"),
        ({"Idempotency-Key": None}, None),
        ({"Idempotency_Key": "a", "idempotency-key-2": "b"}, None),
    ],
)
def test_two_spellings_of_one_value_are_one_key(headers: dict[str, Any], expected: object) -> None:
    assert header()(message(headers)) == expected


@pytest.mark.parametrize("order", [1, -1])
def test_two_spellings_with_different_values_are_no_key(order: int) -> None:
    headers = dict([("Idempotency-Key", "a"), ("idempotency-key", b"b")][::order])

    for key in (header(), first_of(header(), message_id())):
        with pytest.raises(MissingKey, match=TWO):
            key(message(headers))


@pytest.mark.parametrize("name", ["", None, b"idempotency-key", 7])
def test_a_header_has_to_be_named(name: Any) -> None:
    with pytest.raises(UsageError, match="has to name a header"):
        header(name)


def test_a_key_that_the_sender_has_put_among_the_headers_is_the_key() -> None:
    assert with_key({"Idempotency-Key": "a", "x": 1}, UNSET) == ("a", {"x": 1, "idempotency-key": "a"})
    # The one that is named wins, and no other spelling is left beside it.
    assert with_key({"Idempotency-Key": "a", "idempotency-key": "a"}, "b") == ("b", {"idempotency-key": "b"})
    assert with_key({"X-EVENT": b"a"}, UNSET, "x-event") == ("a", {"x-event": "a"})
    minted, headers = with_key(None, UNSET)
    assert headers == {"idempotency-key": minted}
    with pytest.raises(MissingKey, match=TWO):
        with_key({"Idempotency-Key": "a", "idempotency-key": "b"}, UNSET)
    with pytest.raises(MissingKey, match="empty"):
        with_key({"Idempotency-Key": " "}, UNSET)


@pytest.mark.parametrize("client", sorted(WORKERS))
def test_on_kafka_a_key_in_capitals_runs_once(client: str, kafka_url: str, kafka_topic: str) -> None:
    producer = Producer({"bootstrap.servers": kafka_url, **QUIET})
    for headers in THREE:
        producer.produce(kafka_topic, b"1", headers=list(headers.items()), partition=0)
    assert producer.flush(PATIENCE) == 0
    seen: list[bytes] = []

    with WORKERS[client](kafka_url, kafka_topic, lambda message: seen.append(value_of(message))) as one:
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 3)
        assert one.send(f"{kafka_topic}.sent", b"2", headers={"Idempotency-Key": "c"}) == "c"

    assert seen == [b"1"]
    (letter,) = letters_in(kafka_url, f"{kafka_topic}.dead", 1)
    assert headers_of(letter)["x-onefold-reason"] == TWO.encode()
    (sent,) = letters_in(kafka_url, f"{kafka_topic}.sent", 1)
    assert headers_of(sent) == {"idempotency-key": b"c"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_on_rabbitmq_a_key_in_capitals_runs_once(
    library: Library, rabbitmq_url: str, rabbitmq_name: str, tmp_path: Path
) -> None:
    environment = Environment(rabbitmq_url, rabbitmq_name)
    for headers in THREE:
        environment.send(headers=headers)
    seen: list[bytes] = []

    def handle(delivery: Any) -> None:
        seen.append(delivery.body)

    with Consumer(library, environment, f"sqlite:///{tmp_path}/records.db", handle) as consumer:
        until(lambda: consumer.acks == 3, "all are acknowledged")

    assert len(seen) == 1
    assert environment.letter()[0].headers["x-onefold-reason"] == TWO


def test_on_rabbitmq_a_key_among_the_headers_is_the_key(rabbitmq_url: str, rabbitmq_name: str) -> None:
    environment, given = Environment(rabbitmq_url, rabbitmq_name), {"Idempotency-Key": "pay-1"}

    async def in_loop() -> str:
        async with await aio_pika.connect(environment.url) as connection:
            return await onefold_aio_pika.send(await connection.channel(), environment.queue, b"{}", headers=given)

    with environment.channel() as channel:
        keys = [onefold_pika.send(channel, environment.queue, b"{}", headers=given), asyncio.run(in_loop())]
        found = [channel.basic_get(environment.queue, auto_ack=True)[1] for _ in keys]

    assert keys == ["pay-1"] * 2
    assert [(one.message_id, one.headers) for one in found] == [("pay-1", {"idempotency-key": "pay-1"})] * 2


def test_on_redis_streams_a_key_in_capitals_runs_once(valkey_url: str) -> None:
    handle, environment = StreamHandled(), StreamEnvironment(valkey_url)
    with environment.server as server:
        for headers in THREE:
            server.xadd("charges", headers)

    with StreamWorker("sync", environment, "memory:", handle):
        letter = environment.letter()
        environment.settled()

    assert letter[b"x-onefold-reason"].decode() == TWO
    assert len(handle.calls) == 1


def test_on_nats_a_key_in_capitals_runs_once(nats_url: str, nats_name: str) -> None:
    handle = Handled()

    async def story() -> str:
        async with NatsEnvironment(nats_url, nats_name) as environment:
            for headers in THREE:
                await environment.js.publish(environment.subject, b"{}", headers=headers)
            async with worker(environment, "memory:", handle):
                letter = await environment.letter()
                await environment.settled(3)
            given = {"Idempotency-Key": "pay-1"}
            assert await onefold_nats.send(environment.js, environment.subject, b"{}", headers=given) == "pay-1"
            return str((letter.headers or {})["x-onefold-reason"])

    assert in_time(story()) == TWO
    assert len(handle.calls) == 1


@pytest.fixture
def eager() -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    yield app
    app.close()


def test_on_celery_a_key_in_capitals_runs_once(eager: Celery) -> None:
    ran: list[int] = []
    with Guard("memory:") as guard:

        @guarded(eager, guard, "pay", name="pay", shared=False)
        def pay(amount: int) -> int:
            ran.append(amount)
            return len(ran)

        for written in SPELLINGS:
            pay.apply_async((1,), headers={written: "pay-1"})
            pay.s(1).set(headers={written: "pay-1"}).apply_async()
            pay.apply((1,), headers={written: "pay-1"})
            assert send_task(pay, (1,), headers={written: "pay-1"}) == "pay-1"
            assert send_task(pay, (1,), headers={written: "other"}, key="pay-1") == "pay-1"
        with pytest.raises(MissingKey, match=TWO):
            pay.apply_async((1,), headers={"Idempotency-Key": "a", "idempotency-key": "b"})

    assert ran == [1]


def test_on_dramatiq_a_key_in_capitals_runs_once() -> None:
    ran, hand = list[int](), Hand()

    def handle(amount: int) -> None:
        ran.append(amount)

    with Guard("memory:") as guard:
        pay: Any = onefold_dramatiq.guarded(guard, "pay", broker=hand.broker)(handle)
        for written in (*SPELLINGS, "idempotency_key"):
            pay.send_with_options(args=(1,), **{written: "pay-1"})
            assert onefold_dramatiq.send(pay, (1,), **{written: "pay-1"}) == "pay-1"
            assert onefold_dramatiq.send(pay, (1,), **{written: "other"}, key="pay-1") == "pay-1"
        for _ in range(3 * len((*SPELLINGS, "idempotency_key"))):
            hand.take()
        with pytest.raises(MissingKey, match=TWO):
            pay.send_with_options(args=(1,), **{"Idempotency-Key": "a", "idempotency_key": "b"})

    assert (ran, hand.size()) == ([1], 0)


@pytest.mark.parametrize("key", ["order_id", "order.id", "options.order_id"])
def test_a_celery_key_is_found_among_the_keywords_that_the_task_catches(eager: Celery, key: str) -> None:
    ran: list[Any] = []
    with Guard("memory:") as guard:

        @guarded(eager, guard, "pay", name="pay", shared=False, key=key)
        def pay(a: int = 0, /, **options: Any) -> None:
            ran.append(options)

        for _ in range(2):
            pay.delay(order_id="o_1", order={"id": "o_1"})
        pay.delay(order_id="o_2", order={"id": "o_2"})
        with pytest.raises(MissingKey):
            pay.delay(other=1)

    assert [one["order_id"] for one in ran] == ["o_1", "o_2"]


def test_a_celery_key_is_what_the_sender_has_named_so(eager: Celery) -> None:
    ran: list[Any] = []
    with Guard("memory:") as guard:

        @guarded(eager, guard, "pay", name="pay", shared=False, key="options", fingerprint=None)
        def pay(**options: Any) -> None:
            ran.append(options)

        for amount in (1, 2):
            pay.delay(options="o_1", amount=amount)

    assert ran == [{"options": "o_1", "amount": 1}]


SENDERS: dict[str, Callable[..., Any]] = {
    "pika": lambda **key: onefold_pika.send(NOTHING, "charges", b"4200", **key),
    "aio_pika": lambda **key: asyncio.run(onefold_aio_pika.send(NOTHING, "charges", b"4200", **key)),
    "confluent_kafka": lambda **key: onefold_confluent_kafka.send(NOTHING, "charges", b"4200", **key),
    "aiokafka": lambda **key: asyncio.run(onefold_aiokafka.send(NOTHING, "charges", b"4200", **key)),
    "nats": lambda **key: asyncio.run(onefold_nats.send(NOTHING, "charges", b"4200", **key)),
    "redis_streams": lambda **key: redis_streams.send(NOTHING, "charges", b"4200", **key),
    "redis_streams, async": lambda **key: asyncio.run(redis_streams.send_async(NOTHING, "charges", b"4200", **key)),
    "sqs": lambda **key: onefold_sqs.send(NOTHING, "https://sqs/1/charges", b"4200", **key),
    "aio sqs": lambda **key: asyncio.run(onefold_sqs.send_async(NOTHING, "https://sqs/1/charges", b"4200", **key)),
    "celery": lambda **key: send_task(NOTHING, **key),
    "dramatiq": lambda **key: onefold_dramatiq.send(NOTHING, **key),
    "rq": lambda **key: onefold_rq.send(NOTHING, "shop.pay", **key),
    "taskiq": lambda **key: asyncio.run(onefold_taskiq.send(NOTHING, **key)),
    "faststream": lambda **key: asyncio.run(onefold_faststream.send(NOTHING, b"4200", "charges", **key)),
}
NOTHING: Any = object()


@pytest.mark.parametrize("client", SENDERS)
def test_a_sender_that_passes_no_key_by_mistake_is_told_instead_of_getting_a_new_one(client: str) -> None:
    with pytest.raises(MissingKey, match="key=None: nothing was sent"):
        SENDERS[client](key=None)
