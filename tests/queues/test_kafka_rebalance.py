"""Kafka, both clients: partitions that wait while consumers come and go are read on, whoever has them then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiokafka
import pytest
from confluent_kafka import TopicPartition

from onefold import Event, UsageError, subscribe
from onefold.queues._kafka import partitions as kafka_partitions
from onefold.queues._kafka import unread as kafka_unread
from onefold.queues._kafka.offsets import Partition
from onefold.queues._kafka.unread import LOOK_EVERY, UNREAD_AFTER, Ends, Readings
from tests.queues.kafka_tools import SHORT_SESSION_MS, WORKERS, committed, produce, value_of
from tests.support import Clock

P0, P1 = Partition("payments", 0), Partition("payments", 1)


# On the mock an aiokafka consumer that comes back waits until its old self is thought dead.
@pytest.fixture(params=["confluent", pytest.param("aiokafka", marks=pytest.mark.more)])
def worker(request: pytest.FixtureRequest) -> Any:
    return WORKERS[request.param]


def short_session(worker: Any) -> dict[str, Any]:
    return {"session_timeout_ms" if worker.is_async else "session.timeout.ms": SHORT_SESSION_MS}


class Failing:
    """Fails on what it was told to, until it is mended."""

    def __init__(self) -> None:
        self.starts: list[bytes] = []
        self.effects: list[bytes] = []
        self.is_mended = False

    def __call__(self, message: Any) -> None:
        value = value_of(message)
        self.starts.append(value)
        if value.startswith(b"fails") and not self.is_mended:
            raise ValueError("not yet")
        self.effects.append(value)


# Longer than the test: a partition that goes on does so because of the rebalance.
LONG = 3_600.0


@pytest.fixture(autouse=True)
def _long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_partitions, "BACKOFF_MAX", LONG)


def done(one: Any, call: Callable[[], object]) -> None:
    """Call it where the consumer's loop is, if it has one."""

    async def in_the_loop() -> None:
        call()

    if one.is_async:
        one._runner.run(in_the_loop())
    else:
        call()


def subscribe_again(one: Any, topic: str) -> None:
    """All partitions go, and come back to the same consumer."""
    done(one, one.consumer.unsubscribe)
    done(one, lambda: one.handle.subscribe([topic]))


@pytest.mark.parametrize(
    "poll", [pytest.param(0, id="one by one"), pytest.param(10, id="in batches", marks=pytest.mark.more)]
)
def test_a_partition_that_waits_is_read_after_it_went_and_came_back(
    worker: Any, kafka_url: str, kafka_topic: str, poll: int
) -> None:
    handler = Failing()
    produce(kafka_url, kafka_topic, ("a", b"fails"), ("b", b"after it"))

    with worker(kafka_url, kafka_topic, handler, backoff=LONG, poll=poll, consumer_config=short_session(worker)) as one:
        one.until(lambda: b"fails" in handler.starts)
        handler.is_mended = True
        subscribe_again(one, kafka_topic)
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 2)

    assert sorted(set(handler.effects)) == [b"after it", b"fails"]


def test_a_partition_that_waits_is_read_after_a_rebalance_of_which_nobody_was_told(
    worker: Any, kafka_url: str, kafka_topic: str
) -> None:
    handler = Failing()
    produce(kafka_url, kafka_topic, ("a", b"fails"))

    def subscribe() -> None:
        one.consumer.subscribe([kafka_topic])

    config = short_session(worker)
    with worker(kafka_url, kafka_topic, handler, backoff=0.2, subscribe=False, consumer_config=config) as one:
        done(one, subscribe)
        one.until(lambda: handler.starts != [])
        done(one, one.consumer.unsubscribe)
        handler.is_mended = True
        # The time of the message comes while its partition is nobody's.
        steps = iter(range(10))
        one.until(lambda: next(steps, None) is None)
        done(one, subscribe)
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 1)

    assert handler.effects == [b"fails"]


def test_a_pause_of_aiokafka_ends_with_the_assignment(kafka_url: str, kafka_topic: str) -> None:
    handler = Failing()
    produce(kafka_url, kafka_topic, ("a", b"fails"))
    partition = aiokafka.TopicPartition(kafka_topic, 0)

    with WORKERS["aiokafka"](kafka_url, kafka_topic, handler, backoff=0.2, subscribe=False) as one:
        done(one, lambda: one.consumer.assign([partition]))
        one.until(lambda: handler.starts != [])
        assert one.consumer.paused() == {partition}
        handler.is_mended = True
        done(one, one.consumer.unsubscribe)
        done(one, lambda: one.consumer.assign([partition]))
        assert one.consumer.paused() == set()
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 1)

    assert handler.effects == [b"fails"]


def test_what_the_user_has_paused_stays_paused(kafka_url: str, kafka_topic: str) -> None:
    handler = Failing()
    for number in range(4):
        produce(kafka_url, kafka_topic, (f"k{number}", b"fails" if number == 0 else b"%d" % number), partition=number)

    with WORKERS["confluent"](
        kafka_url, kafka_topic, handler, backoff=LONG, consumer_config=short_session(WORKERS["confluent"])
    ) as one:
        one.until(lambda: len(handler.starts) == 4)
        one.consumer.pause([TopicPartition(kafka_topic, 3)])
        handler.is_mended = True
        subscribe_again(one, kafka_topic)
        for number in range(4):
            produce(kafka_url, kafka_topic, (f"later{number}", b"later %d" % number), partition=number)
        one.until(lambda: {b"later %d" % number for number in range(3)} <= set(handler.effects))

    assert b"later 3" not in handler.effects


def pause(one: Any, topic: str) -> None:
    """Pause the first partition, as a user does it."""
    if one.is_async:
        one.consumer.pause(aiokafka.TopicPartition(topic, 0))
    else:
        one.handle.pause([TopicPartition(topic, 0)])


def resume(one: Any, topic: str) -> None:
    if one.is_async:
        one.consumer.resume(aiokafka.TopicPartition(topic, 0))
    else:
        one.handle.resume([TopicPartition(topic, 0)])


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize("when", ["while it waits", "in the handler"])
def test_a_pause_of_the_user_s_own_outlasts_the_wait_for_a_message(
    kafka_url: str, kafka_topic: str, kind: str, when: str
) -> None:
    failing, clock = Failing(), Clock()

    def handler(message: Any) -> None:
        if when == "in the handler" and failing.starts == []:
            pause(one, kafka_topic)
        failing(message)

    produce(kafka_url, kafka_topic, ("a", b"fails"))
    with WORKERS[kind](kafka_url, kafka_topic, handler, backoff=LONG, poll=10) as one:
        one.handle._ledger._clock = clock
        one.until(lambda: failing.starts == [b"fails"])
        if when == "while it waits":
            done(one, lambda: pause(one, kafka_topic))
        failing.is_mended = True
        clock.advance(2 * LONG)
        # Of another partition: meanwhile the first one would have been read too.
        for value in (b"first", b"second", b"third"):
            produce(kafka_url, kafka_topic, (value.decode(), value), partition=1)
            one.until(lambda value=value: value in failing.effects)
        assert failing.starts.count(b"fails") == 1
        assert not one.is_async or one.consumer.paused() == {aiokafka.TopicPartition(kafka_topic, 0)}

        done(one, lambda: resume(one, kafka_topic))
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 1)

    assert failing.effects == [b"first", b"second", b"third", b"fails"]


def test_only_partitions_of_the_consumer_s_can_be_paused(kafka_url: str, kafka_topic: str) -> None:
    with WORKERS["confluent"](kafka_url, kafka_topic, Failing()) as one, pytest.raises(UsageError) as refused:
        one.handle.pause([TopicPartition("elsewhere", 0)])

    assert str(refused.value) == "elsewhere/0 is not assigned to this consumer, so it cannot be paused"


@pytest.mark.more
def test_consumers_join_and_leave_while_partitions_wait(kafka_url: str, kafka_topic: str, tmp_path: Path) -> None:
    """A deploy in the middle of an outage: each message fails, waits, moves to another consumer, and happens once."""
    handler, store = Failing(), f"sqlite:///{tmp_path / 'records.db'}"
    for number in range(4):
        produce(kafka_url, kafka_topic, (f"k{number}", b"fails %d" % number), partition=number)
    config = {"session.timeout.ms": SHORT_SESSION_MS}

    def started() -> Any:
        return WORKERS["confluent"](
            kafka_url, kafka_topic, handler, store=store, backoff=LONG, attempts=1_000, consumer_config=config
        )

    def stepping(*others: Any, until: Callable[[], bool]) -> Callable[[], bool]:
        def holds() -> bool:
            for other in others:
                other.step()
            return until()

        return holds

    first = started()
    first.until(lambda: len(set(handler.starts)) == 4)
    second = started()
    first.until(stepping(second, until=lambda: bool(first.partitions()) and bool(second.partitions())))
    before = len(handler.starts)
    # The second one has failed on what is its now, and leaves; the third comes.
    second.until(stepping(first, until=lambda: len(handler.starts) > before))
    second.close()
    third = started()
    first.until(stepping(third, until=lambda: bool(first.partitions()) and bool(third.partitions())))
    handler.is_mended = True
    third.close()
    first.until(lambda: [committed(kafka_url, kafka_topic, kafka_topic, one) for one in range(4)] == [1] * 4)
    first.close()

    assert sorted(handler.effects) == [b"fails %d" % number for number in range(4)]


# What is ours, has messages, and is not read.


@pytest.mark.parametrize("client", sorted(WORKERS))
def test_a_partition_that_is_paused_and_forgotten_is_told(
    client: str, kafka_url: str, kafka_topic: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_unread, "UNREAD_AFTER", 0.0)
    monkeypatch.setattr(kafka_unread, "LOOK_EVERY", 0.0)
    handler, heard = Failing(), list[Event]()
    produce(kafka_url, kafka_topic, ("a", b"1"))
    ends = subscribe(lambda event: heard.append(event) if event.kind == "unread" else None)

    with WORKERS[client](kafka_url, kafka_topic, handler, poll=10) as one:
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 1)
        partition = next(one_partition for one_partition in one.consumer.assignment() if one_partition.partition == 0)
        done(one, lambda: one.consumer.pause(partition if one.is_async else [partition]))
        produce(kafka_url, kafka_topic, ("b", b"2"), ("c", b"3"))
        one.until(lambda: any("has 2 messages" in line.message for line in caplog.records))
    ends()

    line = next(line for line in caplog.records if "has 2 messages" in line.message)
    assert line.levelname == "WARNING"
    assert f"{kafka_topic}/0 is assigned to this consumer" in line.message
    assert (heard[-1].operation, heard[-1].address.key) == ("credit", "")
    assert heard[-1].detail == f"{kafka_topic}/0: 2 messages"


class TestReadings:
    """The rule, with a moved clock."""

    def test_only_what_was_silent_for_long_is_looked_at_and_each_in_its_turn(self) -> None:
        clock = Clock()
        readings = Readings(clock)
        assert not readings.is_due
        clock.advance(LOOK_EVERY)
        assert readings.is_due
        assert readings.silent({P0, P1}) is None
        clock.advance(UNREAD_AFTER - 1)
        readings.note(P1)
        assert readings.silent({P0, P1}) is None
        clock.advance(1)
        assert readings.silent({P0, P1}) == P0
        # It was looked at, and is left alone for as long again.
        assert readings.silent({P0, P1}) is None
        clock.advance(UNREAD_AFTER)
        assert {readings.silent({P0, P1}), readings.silent({P0, P1})} == {P0, P1}

    def test_what_came_back_has_its_time(self) -> None:
        clock = Clock()
        readings = Readings(clock)
        readings.silent({P0})
        readings.silent(set())
        clock.advance(UNREAD_AFTER)
        assert readings.silent({P0}) is None

    def test_what_is_not_known_is_not_counted(self) -> None:
        readings = Readings(Clock())

        assert readings.unread(P0, Ends(None, None)) == 0
        assert readings.unread(P0, Ends(3, None)) == 0
        assert readings.unread(P0, Ends(3, 5)) == 2
        assert readings.unread(P0, Ends(5, 5)) == 0
        # Nobody knows where it begins: only what comes from now on counts.
        assert [readings.unread(P1, Ends(None, end)) for end in (7, 7, 9)] == [0, 0, 2]
