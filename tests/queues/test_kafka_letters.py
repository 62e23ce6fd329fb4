"""Kafka's dead letters: what a client can read and not write ends no consumer, and is not lost."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.producer import message_accumulator
from aiokafka.producer import producer as aiokafka_producer
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from confluent_kafka import Producer

from onefold.queues._kafka import partitions as kafka_partitions
from onefold.queues._kafka.messages import CHANGED_HEADER, letter_headers
from onefold.queues._kafka.partitions import Ledger
from onefold.queues.keys import field
from tests.queues.kafka_tools import QUIET, WORKERS, committed, headers_of, letters_in, produce, value_of
from tests.support import PATIENCE


@pytest.fixture(params=sorted(WORKERS))
def worker(request: pytest.FixtureRequest) -> Any:
    return WORKERS[request.param]


class Refusing:
    """A producer of either client that refuses to write what it is given first, so many times."""

    def __init__(self, producer: Any, error: Exception, times: int) -> None:
        self.poll = getattr(producer, "poll", None)
        self.asked = 0
        self._producer, self._error, self._times = producer, error, times

    def _refuse(self) -> None:
        self.asked += 1
        if self.asked <= self._times:
            raise self._error

    def produce(self, *given: Any, **named: Any) -> None:
        self._refuse()
        self._producer.produce(*given, **named)

    async def send_and_wait(self, *given: Any, **named: Any) -> Any:
        self._refuse()
        return await self._producer.send_and_wait(*given, **named)


@pytest.mark.parametrize("poll", [0, 10])
def test_a_message_of_nothing_but_nulls_is_buried_and_what_is_behind_it_runs(
    worker: Any, kafka_url: str, kafka_topic: str, poll: int
) -> None:
    producer = Producer({"bootstrap.servers": kafka_url, **QUIET})
    producer.produce(kafka_topic, partition=0)
    producer.produce(kafka_topic, partition=0, headers=[("trace", b"t"), ("empty", None), ("", b"nameless")])
    assert producer.flush(PATIENCE) == 0
    produce(kafka_url, kafka_topic, ("b", b"behind"))
    seen: list[bytes] = []

    with worker(kafka_url, kafka_topic, lambda message: seen.append(value_of(message)), poll=poll) as one:
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 3)

    assert seen == [b"behind"]
    letters = [headers_of(letter) for letter in letters_in(kafka_url, f"{kafka_topic}.dead", 2)]
    (second,) = [headers for headers in letters if headers["x-onefold-offset"] == b"1"]
    assert {headers["x-onefold-reason"] for headers in letters} == {b"it has no key"}
    assert (second["trace"], second["empty"] or b"", second[""]) == (b"t", b"", b"nameless")
    # Only what this client cannot write is changed, and says so.
    assert [CHANGED_HEADER in headers for headers in letters] == [worker.is_async] * 2


ERRORS = (AssertionError("Need"), TypeError(), ValueError(), struct.error(), LookupError())


@pytest.mark.parametrize(("error", "refused"), [*((error, 1) for error in ERRORS), (TypeError(), 2)])
def test_a_letter_that_its_producer_refuses_to_write_is_written_in_another_form(
    worker: Any, kafka_url: str, kafka_topic: str, error: Exception, refused: int
) -> None:
    produce(kafka_url, kafka_topic, (b" ", b"keyless"), ("b", b"behind"))
    seen: list[bytes] = []

    with worker(kafka_url, kafka_topic, lambda message: seen.append(value_of(message))) as one:
        one.handle._dead_letter._producer = Refusing(one.producer, error, refused)
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 2)

    assert seen == [b"behind"]
    (letter,) = letters_in(kafka_url, f"{kafka_topic}.dead", 1)
    headers = headers_of(letter)
    assert (letter.value(), headers["x-onefold-reason"]) == (b"keyless", b"the key is empty")
    assert CHANGED_HEADER in headers
    # Its own headers are left out last.
    assert ("idempotency-key" in headers) == (refused == 1)


def test_a_letter_that_cannot_be_written_at_all_is_kept_and_its_consumer_lives_on(
    worker: Any, kafka_url: str, kafka_topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kafka_partitions, "BURY_AGAIN", 0.05)
    produce(kafka_url, kafka_topic, (None, b"keyless"), ("b", b"behind"))
    produce(kafka_url, kafka_topic, ("c", b"elsewhere"), partition=1)
    seen: list[bytes] = []

    with worker(kafka_url, kafka_topic, lambda message: seen.append(value_of(message))) as one:
        one.handle._dead_letter._producer = refusing = Refusing(one.producer, ValueError("keyless is secret"), 6)
        one.until(lambda: b"elsewhere" in seen and refusing.asked >= 3)
        assert committed(kafka_url, kafka_topic, kafka_topic) == 0
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 2)

    assert sorted(seen) == [b"behind", b"elsewhere"]
    letters_in(kafka_url, f"{kafka_topic}.dead", 1)
    assert "no dead letter" in caplog.text
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


class NoText(str):
    """The name of a header that other clients send, and that is no UTF-8."""

    __slots__ = ()

    def encode(self, *_: Any) -> bytes:
        return b"\xff\xfe"


def send_unreadable(url: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (message_accumulator, aiokafka_producer):
        monkeypatch.setattr(module, "DefaultRecordBatchBuilder", _DefaultRecordBatchBuilderPy)

    async def story() -> None:
        async with AIOKafkaProducer(bootstrap_servers=url) as producer:
            headers = [(NoText("name"), b"1"), ("idempotency-key", b"a")]
            await producer.send_and_wait(topic, b'{"id": 1}', headers=headers, partition=0)

    asyncio.run(story())


@pytest.mark.parametrize("poll", [0, 10])
def test_headers_that_cannot_be_read_end_no_consumer(
    kafka_url: str, kafka_topic: str, monkeypatch: pytest.MonkeyPatch, poll: int
) -> None:
    """aiokafka raises in `getone`, where nobody can bury the message."""
    send_unreadable(kafka_url, kafka_topic, monkeypatch)
    produce(kafka_url, kafka_topic, ("b", b"behind"))
    seen: list[bytes] = []

    def handler(message: Any) -> None:
        seen.append(value_of(message))

    with WORKERS["confluent"](kafka_url, kafka_topic, handler, poll=poll) as one:
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 2)

    assert seen == [b"behind"]
    (letter,) = letters_in(kafka_url, f"{kafka_topic}.dead", 1)
    reason = b"the name of one of its headers is not UTF-8, so they cannot be read"
    assert (letter.value(), headers_of(letter)["x-onefold-reason"]) == (b'{"id": 1}', reason)
    assert CHANGED_HEADER in headers_of(letter)


def test_headers_that_cannot_be_read_keep_no_key_in_the_body_from_being_found(
    kafka_url: str, kafka_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_unreadable(kafka_url, kafka_topic, monkeypatch)
    seen: list[Any] = []

    def handler(message: Any) -> None:
        seen.append((message.headers() or [], value_of(message)))

    with WORKERS["confluent"](kafka_url, kafka_topic, handler, key=field("id")) as one:
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 1)

    assert seen == [([], b'{"id": 1}')]


def test_a_letter_replaces_our_own_headers_and_none_of_the_senders() -> None:
    spot = Ledger({}, stops=False).spot("payments", 0, 7)
    theirs = [("x-onefold-tenant", b"a"), ("x-onefold-", b"b"), ("X-Onefold-Reason", b"c"), ("trace", None)]

    headers = letter_headers([*theirs, ("x-onefold-reason", b"old"), (CHANGED_HEADER, b"old")], spot, "credit", "new")

    assert headers[: len(theirs)] == theirs
    assert dict(headers)["x-onefold-reason"] == b"new"
    assert b"old" not in [value for _, value in headers]
