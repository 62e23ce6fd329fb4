"""Kafka, both clients, on a broker: what is read twice happens once, and no offset passes what is not finished."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import SerializingProducer

from onefold import AsyncGuard, Guard, UsageError
from onefold._delivery import claim as claim_flow
from onefold._delivery.waiting import patience
from onefold.queues._kafka import partitions as kafka_partitions
from onefold.queues.keys import field, header, position
from onefold.stores.base import Address
from tests.queues.kafka_tools import (
    QUIET,
    SHORT_SESSION_MS,
    WORKERS,
    committed,
    headers_of,
    letters_in,
    produce,
    value_of,
)
from tests.support import PATIENCE, Clock, Elsewhere, Heard


@pytest.fixture(params=sorted(WORKERS))
def worker(request: pytest.FixtureRequest) -> Any:
    return WORKERS[request.param]


class Effects:
    """A handler that remembers what it was called with, and raises what it is told to."""

    def __init__(self, *errors: BaseException) -> None:
        self.seen: list[bytes] = []
        self._errors = list(errors)

    def __call__(self, message: Any) -> None:
        self.seen.append(value_of(message))
        if self._errors:
            raise self._errors.pop(0)


def only(poison: bytes) -> tuple[list[bytes], Any]:
    """A handler that always fails on one message, and the list of those that it finished."""
    done: list[bytes] = []

    def handler(message: Any) -> None:
        if value_of(message) == poison:
            raise ValueError("cannot be done")
        done.append(value_of(message))

    return done, handler


def test_a_duplicate_of_a_finished_message_is_committed_and_not_run(
    worker: Any, kafka_url: str, kafka_topic: str
) -> None:
    produce(kafka_url, kafka_topic, ("a", b"1"), ("a", b"1"), ("b", b"2"))
    effects = Effects()

    with worker(kafka_url, kafka_topic, effects) as one:
        one.until(lambda: b"2" in effects.seen)

    assert effects.seen == [b"1", b"2"]
    assert committed(kafka_url, kafka_topic, kafka_topic) == 3


def test_a_group_that_reads_everything_again_runs_nothing(
    worker: Any, kafka_url: str, kafka_topic: str, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path / 'records.db'}"
    produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))
    effects = Effects()
    with worker(kafka_url, kafka_topic, effects, store=store) as first:
        first.until(lambda: len(effects.seen) == 2)

    with worker(kafka_url, kafka_topic, effects, store=store, group=f"{kafka_topic}.again") as second:
        second.until(lambda: committed(kafka_url, f"{kafka_topic}.again", kafka_topic) == 2)

    assert effects.seen == [b"1", b"2"]


def test_a_duplicate_of_a_running_message_waits_its_turn_and_is_replayed_in_the_end(
    worker: Any, kafka_url: str, kafka_topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = f"sqlite:///{tmp_path / 'records.db'}", Clock()
    started, end, effects, heard = threading.Event(), threading.Event(), Effects(), Heard()
    produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))
    produce(kafka_url, kafka_topic, ("c", b"elsewhere"), partition=1)

    def running() -> None:
        started.set()
        assert end.wait(PATIENCE)

    def deliver() -> None:
        with Guard(store) as other:
            other.run("credit", "a", running)

    owner = Elsewhere(deliver)
    assert started.wait(PATIENCE)
    with worker(kafka_url, kafka_topic, effects, store=store) as one:
        one.guard._tell.own = (heard,)
        one.handle._ledger._clock = clock
        # The other partition goes on, and the one that waits is neither committed nor read in a hot loop.
        one.until(lambda: b"elsewhere" in effects.seen and "refused" in heard.kinds)
        with monkeypatch.context() as patch:
            patch.setattr(one.handle._ledger, "admit", None)
            for _ in range(5):
                one.step()
        assert heard.kinds.count("refused") == 1
        assert committed(kafka_url, kafka_topic, kafka_topic) == 0
        end.set()
        owner.result()
        clock.advance(60)
        one.until(lambda: b"2" in effects.seen)

    assert effects.seen == [b"elsewhere", b"2"]
    assert committed(kafka_url, kafka_topic, kafka_topic) == 2


def test_a_running_duplicate_first_waits_in_place(
    worker: Any, kafka_url: str, kafka_topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"sqlite:///{tmp_path / 'records.db'}"
    started, found, effects, heard = threading.Event(), threading.Event(), Effects(), Heard()
    produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))
    waiting_for = patience.waiting_for

    def running() -> None:
        started.set()
        assert found.wait(PATIENCE)

    def waits(*given: Any) -> Any:
        """The duplicate has found the other one running."""
        found.set()
        return waiting_for(*given)

    def deliver() -> None:
        with Guard(store) as other:
            other.run("credit", "a", running)

    monkeypatch.setattr(claim_flow, "waiting_for", waits)
    owner = Elsewhere(deliver)
    assert started.wait(PATIENCE)
    with worker(kafka_url, kafka_topic, effects, store=store, wait=PATIENCE) as one:
        one.guard._tell.own = (heard,)
        one.until(lambda: b"2" in effects.seen)
    owner.result()

    assert effects.seen == [b"2"]
    assert "waited" in heard.kinds
    assert "refused" not in heard.kinds


def test_a_handler_that_raises_gets_its_message_again(worker: Any, kafka_url: str, kafka_topic: str) -> None:
    produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))
    effects = Effects(ValueError("not yet"))

    with worker(kafka_url, kafka_topic, effects) as one:
        one.until(lambda: effects.seen != [])
        assert committed(kafka_url, kafka_topic, kafka_topic) == 0
        one.until(lambda: b"2" in effects.seen)

    assert effects.seen == [b"1", b"1", b"2"]
    assert committed(kafka_url, kafka_topic, kafka_topic) == 2


def test_a_consumer_that_was_subscribed_elsewhere_works_too(worker: Any, kafka_url: str, kafka_topic: str) -> None:
    produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))
    effects = Effects(ValueError("not yet"))

    with worker(kafka_url, kafka_topic, effects, subscribe=False) as one:
        one.consumer.subscribe([kafka_topic])
        one.until(lambda: b"2" in effects.seen)

    assert effects.seen == [b"1", b"1", b"2"]
    assert committed(kafka_url, kafka_topic, kafka_topic) == 2


def test_an_interrupted_handler_gets_its_message_again(worker: Any, kafka_url: str, kafka_topic: str) -> None:
    produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))
    effects = Effects(SystemExit())

    with worker(kafka_url, kafka_topic, effects) as one:
        with pytest.raises(SystemExit):
            one.until(lambda: False)
        one.until(lambda: b"2" in effects.seen)

    assert effects.seen == [b"1", b"1", b"2"]


def test_a_poison_message_ends_in_the_dead_letters_and_its_partition_goes_on(
    worker: Any, kafka_url: str, kafka_topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    produce(kafka_url, kafka_topic, ("a", b"poison"), ("b", b"2"))
    done, handler = only(b"poison")

    with worker(kafka_url, kafka_topic, handler, attempts=3) as one:
        one.until(lambda: done == [b"2"])

    (letter,) = letters_in(kafka_url, f"{kafka_topic}.dead", 1)
    assert letter.value() == b"poison"
    reason = headers_of(letter)["x-onefold-reason"]
    assert headers_of(letter) == {
        "idempotency-key": b"a",
        "x-onefold-topic": kafka_topic.encode(),
        "x-onefold-partition": b"0",
        "x-onefold-offset": b"0",
        "x-onefold-operation": b"credit",
        "x-onefold-reason": reason,
        "x-onefold-digest": Address("", "credit", "a").digest.encode(),
    }
    # What a handler's error says may hold a payload.
    assert re.fullmatch(rb"it failed 3 times, the last time with ValueError at \w+\.py:\d+ in \w+", reason)
    assert "cannot be done" not in caplog.text
    assert committed(kafka_url, kafka_topic, kafka_topic) == 2


def test_a_dead_letter_is_confirmed_before_its_offset_is_committed(
    worker: Any, kafka_url: str, kafka_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(kafka_url, kafka_topic, (None, b"keyless"), ("b", b"2"))
    monkeypatch.setattr(kafka_partitions, "BURY_AGAIN", 0.05)
    effects = Effects()
    with worker(kafka_url, kafka_topic, effects) as one:
        letters, found = one.handle._dead_letter, []
        bury = letters.bury

        def look(confirmed: bool) -> bool:
            found.append((confirmed, committed(kafka_url, kafka_topic, kafka_topic), list(effects.seen)))
            return confirmed

        def unconfirmed_at_first(*letter: Any) -> bool:
            return look(bury(*letter)) if found else look(confirmed=False)

        async def unconfirmed_at_first_async(*letter: Any) -> bool:
            return look(await bury(*letter)) if found else look(confirmed=False)

        letters.bury = unconfirmed_at_first_async if worker.is_async else unconfirmed_at_first
        one.until(lambda: effects.seen == [b"2"])

    # Unconfirmed, it comes again; nothing above it has run by then, and nothing was committed.
    assert found == [(False, 0, []), (True, 0, [])]
    letters_in(kafka_url, f"{kafka_topic}.dead", 1)
    assert committed(kafka_url, kafka_topic, kafka_topic) == 2


def test_dead_letters_that_cannot_be_produced_lose_nothing(
    worker: Any, kafka_url: str, kafka_topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    produce(kafka_url, kafka_topic, (None, b"too large for the other producer" * 100), ("b", b"2"))
    effects, small = Effects(), {"max_request_size": 1000} if worker.is_async else {"message.max.bytes": 1000}

    with worker(kafka_url, kafka_topic, effects, producer_config=small) as one:
        one.until(lambda: "no dead letter" in caplog.text)
        for _ in range(3):
            one.step()

    assert effects.seen == []
    assert committed(kafka_url, kafka_topic, kafka_topic) == 0


def test_a_serializing_producer_does_not_mistake_a_key_for_a_value(kafka_url: str, kafka_topic: str) -> None:
    """Its arguments are in another order than those of a plain one."""
    producer = SerializingProducer({"bootstrap.servers": kafka_url, **QUIET})
    adapter = WORKERS["confluent"].adapter
    letters = adapter.DeadLetters(producer, f"{kafka_topic}.dead")
    adapter.send(producer, kafka_topic, b"value", partition_by=b"account")
    (sent,) = letters_in(kafka_url, kafka_topic, 1)

    with WORKERS["confluent"](kafka_url, kafka_topic, Effects(*[ValueError()] * 9), letters=letters, attempts=1) as one:
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 1)

    (letter,) = letters_in(kafka_url, f"{kafka_topic}.dead", 1)
    assert [(one.key(), one.value()) for one in (sent, letter)] == [(b"account", b"value")] * 2


def test_without_dead_letters_the_consumer_stops_rather_than_lose(
    worker: Any, kafka_url: str, kafka_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(kafka_url, kafka_topic, ("a", b"1"), (None, b"keyless"), ("b", b"2"))
    monkeypatch.setattr(kafka_partitions, "BURY_AGAIN", PATIENCE)
    effects = Effects()

    with worker(kafka_url, kafka_topic, effects, dead_letter="stop") as one:
        with pytest.raises(one.adapter.Undeliverable, match=f"{kafka_topic}/0 offset 1: credit: it has no key"):
            one.until(lambda: False)
        for _ in range(3):
            one.step()

    assert effects.seen == [b"1"]
    assert committed(kafka_url, kafka_topic, kafka_topic) == 1


@pytest.mark.parametrize("poll", [0, 10])
def test_a_message_without_a_key_runs_unguarded_if_that_is_the_policy(
    worker: Any, kafka_url: str, kafka_topic: str, poll: int
) -> None:
    produce(kafka_url, kafka_topic, (None, b"1"), (None, b"1"), ("b", b"2"))
    effects = Effects()

    with worker(kafka_url, kafka_topic, effects, missing_key="run", poll=poll) as one:
        one.until(lambda: b"2" in effects.seen)

    assert sorted(effects.seen) == [b"1", b"1", b"2"]
    assert committed(kafka_url, kafka_topic, kafka_topic) == 3


BAD_KEYS = {
    "it has no key": None,
    "the header idempotency-key is not text": b"\xff\xfe",
    "the key is empty": b"  ",
    "the key has 1048576 characters, and the limit is 255": b"k" * (1 << 20),
}
BAD_BODIES = {
    b'{"id": true}': "a key is text, a whole number or a UUID, not bool",
    b'{"id": 1.5}': "a key is text, a whole number or a UUID, not float",
    b'{"id": ["a"]}': "a key is text, a whole number or a UUID, not list",
    b'{"id": null}': "it has no key",
    b"[]": "it has no key",
    b"": "the body is not JSON, and the key is its field id",
    b"\xff": "the body is not JSON, and the key is its field id",
    b"{oh": "the body is not JSON, and the key is its field id",
}


@pytest.mark.parametrize("poll", [0, 10])
def test_a_bad_key_is_buried_with_the_reason_and_the_consumer_lives_on(
    worker: Any, kafka_url: str, kafka_topic: str, poll: int
) -> None:
    limit, effects = 3 << 20, Effects()
    messages = [*((key, reason.encode()) for reason, key in BAD_KEYS.items()), ("b", b"good")]
    produce(kafka_url, kafka_topic, *messages, **{"message.max.bytes": limit})
    config = {"max_request_size": limit} if worker.is_async else {"message.max.bytes": limit}

    with worker(kafka_url, kafka_topic, effects, poll=poll, producer_config=config) as one:
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == len(messages))

    letters = letters_in(kafka_url, f"{kafka_topic}.dead", len(BAD_KEYS))
    assert {letter.value(): headers_of(letter)["x-onefold-reason"] for letter in letters} == {
        reason.encode(): reason.encode() for reason in BAD_KEYS
    }
    assert {headers_of(letter).get("idempotency-key") for letter in letters} == set(BAD_KEYS.values())
    assert effects.seen == [b"good"]


@pytest.mark.parametrize("poll", [0, 10])
def test_a_body_without_its_key_is_buried_with_the_reason(
    worker: Any, kafka_url: str, kafka_topic: str, poll: int
) -> None:
    effects = Effects()
    produce(kafka_url, kafka_topic, *((None, body) for body in BAD_BODIES), (None, b'{"id": 7}'))

    with worker(kafka_url, kafka_topic, effects, poll=poll, key=field("id")) as one:
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == len(BAD_BODIES) + 1)

    letters = letters_in(kafka_url, f"{kafka_topic}.dead", len(BAD_BODIES))
    reasons = {letter.value() or b"": headers_of(letter)["x-onefold-reason"].decode() for letter in letters}
    assert reasons == BAD_BODIES
    assert effects.seen == [b'{"id": 7}']


def test_a_dead_letter_sent_again_runs_once(worker: Any, kafka_url: str, kafka_topic: str) -> None:
    produce(kafka_url, kafka_topic, ("a", b"1"))
    effects = Effects(ValueError("mended later"))

    with worker(kafka_url, kafka_topic, effects, attempts=1) as one:
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 1)
        produce(kafka_url, kafka_topic, ("a", b"1"), ("a", b"1"))
        one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 3)

    assert effects.seen == [b"1", b"1"]


def test_a_position_as_the_key_finds_redeliveries_only_and_warns(worker: Any, kafka_url: str, kafka_topic: str) -> None:
    produce(kafka_url, kafka_topic, (None, b"1"), (None, b"1"))
    effects = Effects()
    with pytest.warns(UserWarning, match="does not detect duplicates"):
        key = position(changes_when_a_producer_retries=True)

    with worker(kafka_url, kafka_topic, effects, key=key) as one:
        one.until(lambda: len(effects.seen) == 2)

    assert committed(kafka_url, kafka_topic, kafka_topic) == 2


def test_messages_in_hand_do_not_pass_an_unfinished_one(kafka_url: str, kafka_topic: str) -> None:
    produce(kafka_url, kafka_topic, *((f"k{number}", b"%d" % number) for number in range(5)))
    effects = Effects(ValueError("not yet"))

    with WORKERS["confluent"](kafka_url, kafka_topic, effects, backoff=0) as one:
        messages: list[Any] = []
        while len(messages) < 5:
            messages += one.consumer.consume(5, 0.1)
        for message in messages:
            one.handle(message)
        assert (effects.seen, committed(kafka_url, kafka_topic, kafka_topic)) == ([b"0"], 0)
        one.until(lambda: b"4" in effects.seen)

    assert effects.seen == [b"0", b"0", b"1", b"2", b"3", b"4"]
    assert committed(kafka_url, kafka_topic, kafka_topic) == 5


def test_a_result_for_a_partition_that_has_gone_commits_nothing(worker: Any, kafka_url: str, kafka_topic: str) -> None:
    produce(kafka_url, kafka_topic, ("a", b"1"))
    effects = Effects()

    def handler(message: Any) -> None:
        one.handle._ledger.forget([(kafka_topic, 0)])
        effects(message)

    with worker(kafka_url, kafka_topic, handler) as one:
        one.until(lambda: effects.seen != [])

    assert committed(kafka_url, kafka_topic, kafka_topic) == 0


def test_consumers_come_and_go_and_each_message_happens_once(
    worker: Any, kafka_url: str, kafka_topic: str, tmp_path: Path
) -> None:
    store, effects = f"sqlite:///{tmp_path / 'records.db'}", Effects()
    for number in range(40):
        produce(kafka_url, kafka_topic, (f"k{number}", b"%d" % number), partition=number % 4)
    config = {"session_timeout_ms" if worker.is_async else "session.timeout.ms": SHORT_SESSION_MS}
    first = worker(kafka_url, kafka_topic, effects, store=store, consumer_config=config)
    first.until(lambda: len(effects.seen) >= 5)
    if worker.is_async:
        # On the mock an aiokafka consumer that joins others gets an error instead of its partitions.
        first.close()
    second = worker(kafka_url, kafka_topic, effects, store=store, consumer_config=config)

    def both() -> bool:
        second.step()
        return len(effects.seen) >= 40 and bool(second.partitions())

    if not worker.is_async:
        first.until(both)
        # The first one leaves, and what it had comes to the second.
        first.close()
    for number in range(4):
        produce(kafka_url, kafka_topic, (f"later{number}", b"later%d" % number), partition=number)
    # A commit in the middle of a rebalance is refused; the message is read again, found done, and committed.
    second.until(lambda: [committed(kafka_url, kafka_topic, kafka_topic, one) for one in range(4)] == [11] * 4)
    second.close()

    assert len(effects.seen) == len(set(effects.seen)) == 44


@pytest.mark.more
def test_a_handler_that_outlasts_the_poll_interval_happens_once(
    kafka_url: str, kafka_topic: str, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path / 'records.db'}"
    config = {"max.poll.interval.ms": 1000, "session.timeout.ms": 1000}
    patient = {"session.timeout.ms": SHORT_SESSION_MS}
    produce(kafka_url, kafka_topic, ("a", b"1"))
    starts, heard, started, refused = Effects(), Heard(), threading.Event(), threading.Event()

    def slow(message: Any) -> None:
        starts(message)
        started.set()
        assert refused.wait(PATIENCE)

    def first() -> None:
        with WORKERS["confluent"](kafka_url, kafka_topic, slow, store=store, consumer_config=config) as one:
            # Until it knows that it has lost the partition: librdkafka can hang in a `close` that has to tell it so.
            one.until(lambda: starts.seen != [] and not one.partitions())

    owner = Elsewhere(first)
    assert started.wait(PATIENCE)
    with WORKERS["confluent"](kafka_url, kafka_topic, starts, store=store, consumer_config=patient) as second:
        second.guard._tell.own = (heard,)
        # It gets the partition while the handler runs, and finds it running.
        second.until(lambda: "refused" in heard.kinds)
        refused.set()
        owner.result(PATIENCE)
        second.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 1)

    assert starts.seen == [b"1"]


class TestRefused:
    """What would lose messages is refused before the first one."""

    def test_a_consumer_that_stores_or_commits_offsets_by_itself(
        self, worker: Any, kafka_url: str, kafka_topic: str
    ) -> None:
        config: dict[str, Any] = {"enable_auto_commit": True} if worker.is_async else {"enable.auto.offset.store": True}

        with pytest.raises(UsageError, match="a crash loses messages"):
            worker(kafka_url, kafka_topic, Effects(), consumer_config=config)

    def test_no_word_about_dead_letters(self, worker: Any, kafka_url: str, kafka_topic: str) -> None:
        with pytest.raises(UsageError, match="pass DeadLetters"):
            worker(kafka_url, kafka_topic, Effects(), dead_letter=None)

    def test_an_async_handler_of_a_sync_guard_and_the_reverse(self, worker: Any) -> None:
        async def awaits(message: Any) -> None: ...
        def blocks(message: Any) -> None: ...

        guard: Any = AsyncGuard("memory:") if worker.is_async else Guard("memory:")
        wrong = blocks if worker.is_async else awaits
        options: Any = {"consumer": object(), "key": header(), "dead_letter": "stop"}

        with pytest.raises(UsageError, match="its work would be lost"):
            worker.adapter.guarded(guard, "credit", wrong, **options)
        with pytest.raises(UsageError, match="its work would be lost"):
            worker.adapter.guarded_batches(guard, "credit", wrong, transaction=print, **options)

    def test_a_consumer_that_decodes_by_itself(self, kafka_url: str, kafka_topic: str) -> None:
        with pytest.raises(UsageError, match="Decode messages in the handler"):
            WORKERS["aiokafka"](kafka_url, kafka_topic, Effects(), consumer_config={"value_deserializer": bytes.decode})

    def test_what_is_no_consumer(self, worker: Any) -> None:
        guard: Any = AsyncGuard("memory:") if worker.is_async else Guard("memory:")

        async def awaits(message: Any) -> None: ...
        def blocks(message: Any) -> None: ...

        with pytest.raises(UsageError, match="consumer= is NoneType, but this client takes"):
            worker.adapter.guarded(
                guard,
                "credit",
                awaits if worker.is_async else blocks,
                consumer=None,
                key=header(),
                dead_letter="stop",
            )

    @pytest.mark.parametrize("wrong", ["no producer", "no topic", "one that encodes"])
    def test_dead_letters_that_could_not_be_sent_as_they_were(
        self, worker: Any, kafka_url: str, kafka_topic: str, wrong: str
    ) -> None:
        class Encodes:
            _value_serializer = staticmethod(str.encode)
            produce = send_and_wait = None

        with worker(kafka_url, kafka_topic, Effects(), subscribe=False) as one:
            arguments = {
                "no producer": ("dead", one.producer),
                "no topic": (one.producer, ""),
                "one that encodes": (Encodes(), "dead"),
            }
            with pytest.raises(UsageError, match=r"DeadLetters|serializer"):
                worker.adapter.DeadLetters(*arguments[wrong])

    def test_an_unknown_option(self, worker: Any, kafka_url: str, kafka_topic: str) -> None:
        with pytest.raises(UsageError, match="unknown argument 'attempt': did you mean 'attempts'"):
            worker(kafka_url, kafka_topic, Effects(), attempt=3)

    @pytest.mark.parametrize("attempts", [0, True, "3", 1.5])
    def test_attempts_that_are_no_number(self, worker: Any, kafka_url: str, kafka_topic: str, attempts: Any) -> None:
        with pytest.raises(UsageError, match="attempts="):
            worker(kafka_url, kafka_topic, Effects(), attempts=attempts)

    def test_whole_batches_of_a_handler_with_a_transaction(
        self, worker: Any, kafka_url: str, kafka_topic: str, tmp_path: Path
    ) -> None:
        def handler(message: Any, *, tx: Any) -> None: ...

        with (
            worker(kafka_url, kafka_topic, handler, store=f"sqlite:///{tmp_path / 'r.db'}", poll=10) as one,
            pytest.raises(UsageError, match="guarded_batches"),
        ):
            one.step()
