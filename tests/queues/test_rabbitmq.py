"""RabbitMQ, with pika and with aio-pika, on a real broker: what each verdict does to a message."""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from onefold import AsyncGuard, Done, Event, Guard, Policy, UsageError, subscribe
from onefold.events import Kind
from onefold.queues import aio_pika as onefold_aio_pika
from onefold.queues import pika as onefold_pika
from onefold.queues._rabbitmq import consumer as rabbitmq_consumer
from onefold.queues._rabbitmq.consumer import OWN_EXCHANGE, Delivery, Rules
from onefold.queues._shared.verdict import HandlerRaised
from onefold.queues.keys import body, field, first_of, header, message_id
from onefold.stores.base import Address
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.queues import rabbitmq_tools
from tests.queues.rabbitmq_tools import LIBRARIES, Consumer, Environment, Library, as_async, until
from tests.support import PATIENCE
from tests.wallet import add, balance


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    chosen: Library = request.param
    return chosen


@pytest.fixture
def environment(rabbitmq_url: str, rabbitmq_name: str) -> Environment:
    return Environment(rabbitmq_url, rabbitmq_name)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/records.db"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed attempts come again at once, or nearly."""
    monkeypatch.setattr(rabbitmq_consumer, "FAILED_DELAY", 0.01)
    monkeypatch.setattr(rabbitmq_consumer, "DEAD_LETTER_DELAY", 0.05)


class Handled:
    """A handler that keeps what it was called with, and fails the first few times."""

    def __init__(self, failures: int = 0) -> None:
        self.calls: list[Delivery] = []
        self._failures = failures

    def __call__(self, delivery: Delivery) -> None:
        self.calls.append(delivery)
        if len(self.calls) <= self._failures:
            raise ValueError("card 4111 1111 1111 1111 was refused")


class TestVerdicts:
    def test_a_duplicate_of_a_finished_message_is_acknowledged_and_not_run(
        self, library: Library, environment: Environment, store: str
    ) -> None:
        handle = Handled()
        environment.send_keyed("pay-1", times=3)
        environment.send_keyed("pay-2")

        with Consumer(library, environment, store, handle) as consumer:
            until(lambda: consumer.acks == 4, "all are acknowledged")

        assert len(handle.calls) == 2
        assert (environment.count(), environment.count(environment.dead)) == (0, 0)

    def test_a_duplicate_of_a_running_message_is_acknowledged_in_the_end(
        self, library: Library, environment: Environment, store: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        runs, gate, handle = [], threading.Event(), Handled()

        def slow(delivery: Delivery) -> None:
            runs.append(delivery)
            assert gate.wait(2 * PATIENCE)

        with Consumer(library, environment, store, slow, prefetch=1) as first:
            environment.send_keyed("pay-1")
            until(lambda: runs, "the first runs")
            # Its wait is over at once: it has to be kept, and delivered again in place.
            with Consumer(library, environment, store, handle, wait=0) as second:
                environment.send_keyed("pay-1")
                until(lambda: caplog.text.count("]: again in") >= 2, "the duplicate is delivered, and again")
                assert (first.acks, second.acks) == (0, 0)
                gate.set()
                until(lambda: (first.acks, second.acks) == (1, 1), "both are acknowledged")

        assert (len(runs), handle.calls) == (1, [])
        assert (environment.count(), environment.count(environment.dead)) == (0, 0)

    def test_a_handler_that_raises_gets_the_message_again_and_then_succeeds(
        self, library: Library, environment: Environment, store: str
    ) -> None:
        handle = Handled(failures=2)
        environment.send_keyed("pay-1")

        with Consumer(library, environment, store, handle):
            until(lambda: len(handle.calls) == 3, "it ran three times")

        assert [call.redelivered for call in handle.calls] == [False, True, True]
        assert (environment.count(), environment.count(environment.dead)) == (0, 0)

    def test_a_probe_that_fails_is_no_failure_of_the_handler_and_is_asked_again(
        self, library: Library, environment: Environment, store: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled()
        asked: list[None] = []

        def times_out(delivery: Delivery) -> None:
            handle(delivery)
            raise TimeoutError

        def probe(_running: Any) -> Any:
            asked.append(None)
            if len(asked) < 3:
                raise ConnectionError("the gateway is down")
            return Done()

        environment.send_keyed("pay-1")
        policy = Policy(after_crash=probe)
        with Consumer(library, environment, store, times_out, attempts=2, policy=policy) as consumer:
            until(lambda: consumer.acks == 1, "it is acknowledged, as the probe says")

        assert (len(handle.calls), len(asked)) == (1, 3)
        assert (environment.count(), environment.count(environment.dead)) == (0, 0)
        assert "again in 1 s: ProbeFailed: charge [key" in caplog.text
        assert "the probe failed with ConnectionError" in caplog.text

    def test_a_handler_that_always_raises_sends_its_message_to_the_dead_letters(
        self, library: Library, environment: Environment, store: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled(failures=99)
        environment.send(
            b"poison", headers={"idempotency-key": "pay-1", "CC": ["elsewhere"]}, expiration="3600000", app_id="x"
        )

        with Consumer(library, environment, store, handle, attempts=3):
            properties, body = environment.letter()

        assert len(handle.calls) == 3
        assert body == b"poison"
        reason = properties.headers.pop("x-onefold-reason")
        assert reason.startswith("it failed 3 times, the last time with ValueError at test_rabbitmq.py:")
        assert reason.endswith(" in __call__")
        assert abs(properties.headers.pop("x-onefold-time") - time.time()) < 2 * PATIENCE
        assert properties.headers == {
            "idempotency-key": "pay-1",
            "x-onefold-operation": "charge",
            "x-onefold-exchange": "",
            "x-onefold-routing-key": environment.queue,
            "x-onefold-digest": Address("", "charge", "pay-1").digest,
        }
        assert (properties.delivery_mode, properties.expiration, properties.app_id) == (2, None, "x")
        assert environment.count() == 0
        assert "4111" not in "".join(record.getMessage() for record in caplog.records if record.levelname != "DEBUG")

    def test_after_a_poison_message_the_consumer_lives_on(
        self, library: Library, environment: Environment, store: str
    ) -> None:
        handle = Handled()
        environment.send(b"no key")
        environment.send_keyed("pay-1")

        with Consumer(library, environment, store, handle):
            until(lambda: handle.calls, "the good one ran")

        assert environment.letter()[0].headers["x-onefold-reason"] == "it has no key"
        assert environment.count() == 0

    def test_a_used_key_with_another_body_is_buried_where_bodies_are_compared(
        self, library: Library, environment: Environment, store: str
    ) -> None:
        handle = Handled()
        for amount in (b"10 EUR", b"10 EUR", b"99 EUR"):
            environment.send(amount, headers={"idempotency-key": "pay-1"})

        # One after the other: the first of them is the one that the others are compared with.
        with Consumer(library, environment, store, handle, payload=body(), prefetch=1):
            properties, buried = environment.letter()

        assert buried == b"99 EUR"
        assert "another payload" in properties.headers["x-onefold-reason"]
        assert len(handle.calls) == 1
        assert environment.count() == 0

    def test_a_quorum_queue_counts_failed_attempts_and_its_own_limit_holds(
        self, library: Library, rabbitmq_url: str, rabbitmq_name: str, store: str
    ) -> None:
        environment = quorum(rabbitmq_url, rabbitmq_name, limit=1)
        handle = Handled(failures=99)
        environment.send_keyed("pay-1")

        with Consumer(library, environment, store, handle):
            properties, _ = environment.letter()

        assert len(handle.calls) == 2
        assert properties.headers["x-first-death-reason"] == "delivery_limit"
        assert "x-onefold-reason" not in properties.headers

    def test_on_a_quorum_queue_a_restarted_consumer_knows_how_often_a_message_failed(
        self,
        library: Library,
        rabbitmq_url: str,
        rabbitmq_name: str,
        store: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        environment = quorum(rabbitmq_url, rabbitmq_name, limit=20)
        handle, shortly = Handled(failures=99), rabbitmq_consumer.FAILED_DELAY
        environment.send_keyed("pay-1")

        def fails_twice(delivery: Delivery) -> None:
            # After the second time it is kept until its consumer goes, and the broker counts that as well.
            monkeypatch.setattr(rabbitmq_consumer, "FAILED_DELAY", PATIENCE if handle.calls else shortly)
            handle(delivery)

        with Consumer(library, environment, store, fails_twice, attempts=4):
            until(lambda: len(handle.calls) == 2, "it failed twice")
        monkeypatch.setattr(rabbitmq_consumer, "FAILED_DELAY", shortly)
        with Consumer(library, environment, store, handle, attempts=4):
            properties, _ = environment.letter()

        assert len(handle.calls) == 4
        assert properties.headers["x-onefold-reason"].startswith("it failed 4 times")

    def test_on_a_quorum_queue_a_running_duplicate_is_not_counted(
        self, library: Library, rabbitmq_url: str, rabbitmq_name: str, store: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        environment = quorum(rabbitmq_url, rabbitmq_name, limit=1)
        runs, gate = [], threading.Event()

        def slow(delivery: Delivery) -> None:
            runs.append(delivery)
            assert gate.wait(2 * PATIENCE)

        environment.send_keyed("pay-1", times=2)
        two = [Consumer(library, environment, store, slow, prefetch=1, wait=0) for _ in range(2)]
        with two[0], two[1]:
            until(lambda: caplog.text.count("]: again in") >= 3, "it came three times; the limit is one")
            assert environment.count(environment.dead) == 0
            gate.set()
            until(lambda: [one.acks for one in two] == [1, 1], "both are acknowledged")

        assert len(runs) == 1
        assert (environment.count(), environment.count(environment.dead)) == (0, 0)

    def test_what_is_held_comes_again_for_a_while_and_then_goes_to_the_dead_letters(
        self, library: Library, environment: Environment, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("onefold.queues._shared.verdict.HELD_DELAY", 0.2)
        handle = Handled()
        held(store, "pay-1")
        environment.send_keyed("pay-1")

        begun = time.monotonic()
        with Consumer(library, environment, store, handle, policy=HOLD, unacked_max=1):
            properties, _ = environment.letter()

        assert time.monotonic() - begun >= 0.8
        assert handle.calls == []
        assert properties.headers["x-onefold-reason"].startswith("Held: charge [key ")
        assert "pay-1" not in properties.headers["x-onefold-reason"]

    def test_what_has_waited_too_long_is_given_back(
        self, library: Library, environment: Environment, store: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        gate, runs, begun = threading.Event(), [], time.monotonic()

        def slow(delivery: Delivery) -> None:
            runs.append(delivery)
            assert gate.wait(2 * PATIENCE)

        environment.send_keyed("pay-1", times=2)
        two = [Consumer(library, environment, store, slow, prefetch=1, wait=0, unacked_max=0.5) for _ in range(2)]
        with two[0], two[1]:
            until(lambda: caplog.text.count("given back after") >= 2, "it is given back, and again")
            gate.set()
            until(lambda: environment.count() == 0, "all are delivered")

        assert len(runs) == 1
        assert time.monotonic() - begun >= 1, "it went round in circles"

    def test_a_dead_letter_that_no_queue_takes_is_not_lost(
        self, library: Library, environment: Environment, store: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled()
        with environment.channel() as channel:
            channel.queue_delete(environment.dead)
        environment.send(b"no key")
        environment.send_keyed("pay-1")

        with Consumer(library, environment, store, handle):
            until(lambda: "did not accept a dead letter" in caplog.text, "it was tried")
            until(lambda: handle.calls, "its neighbour ran")
            with environment.channel() as channel:
                channel.queue_declare(environment.dead, durable=True)
            assert environment.letter()[1] == b"no key"

        assert environment.count() == 0

    def test_a_dead_letter_that_the_client_cannot_write_does_not_end_the_consumer(
        self, library: Library, environment: Environment, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handle, module = Handled(), onefold_pika if library == "pika" else onefold_aio_pika
        tries: list[object] = []
        bury = module.bury

        def unwritable_at_first(*letter: Any) -> Any:
            tries.append(letter)
            if len(tries) == 1:
                raise struct.error("a header of a type that this client does not know")
            return bury(*letter)

        monkeypatch.setattr(module, "bury", unwritable_at_first)
        environment.send(b"no key")
        environment.send_keyed("pay-1")

        with Consumer(library, environment, store, handle):
            until(lambda: handle.calls, "its neighbour ran")
            assert environment.letter()[1] == b"no key"

        assert environment.count() == 0

    def test_the_queues_own_exchange_can_take_the_dead_letters(
        self, library: Library, rabbitmq_url: str, rabbitmq_name: str, store: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        own = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{rabbitmq_name}.dead"}
        environment = Environment(rabbitmq_url, rabbitmq_name, **own)
        environment.send(b"no key")

        with Consumer(library, environment, store, Handled(), dead_letter=OWN_EXCHANGE):
            properties, body = environment.letter()

        assert body == b"no key"
        assert properties.headers["x-first-death-reason"] == "rejected"
        assert "charge: to the dead letters: it has no key" in caplog.text


class TestLogs:
    """Dead letters as events, and lines that lead to a record."""

    @pytest.fixture(autouse=True)
    def buried(self) -> Iterator[list[Event]]:
        heard: list[Event] = []
        stop = subscribe(lambda event: heard.append(event) if event.kind == Kind.BURIED else None)
        yield heard
        stop()

    def test_every_dead_letter_is_an_event_without_a_payload(
        self, library: Library, environment: Environment, store: str, buried: list[Event]
    ) -> None:
        environment.send_keyed("pay-1")
        with Consumer(library, environment, store, Handled(failures=99), attempts=1):
            environment.letter()
            environment.send(b"no key")
            environment.letter()
            until(lambda: len(buried) == 2, "both are told")

        assert [event.address for event in buried] == [Address("", "charge", "pay-1"), Address("", "charge", "")]
        assert buried[0].detail.startswith("it failed once, with ValueError")
        assert buried[1].detail == "it has no key"
        assert "4111" not in buried[0].detail

    def test_a_dead_letter_is_told_once_it_is_one(
        self,
        library: Library,
        environment: Environment,
        store: str,
        buried: list[Event],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with environment.channel() as channel:
            channel.queue_delete(environment.dead)
        environment.send(b"no key")

        with Consumer(library, environment, store, Handled()):
            until(lambda: caplog.text.count("did not accept a dead letter") > 1, "it was tried, and again")
            assert buried == []
            with environment.channel() as channel:
                channel.queue_declare(environment.dead, durable=True)
            until(lambda: buried, "it is told")

        assert len(buried) == 1

    def test_what_is_rejected_is_told_as_well(
        self, library: Library, environment: Environment, store: str, buried: list[Event]
    ) -> None:
        environment.send(b"no key")

        with Consumer(library, environment, store, Handled(), dead_letter=OWN_EXCHANGE):
            until(lambda: buried, "it is told")

        assert buried[0].detail == "it has no key"

    def test_lines_have_the_queue_the_operation_and_the_digest_and_never_a_key(
        self, library: Library, environment: Environment, store: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        environment.send(headers={"idempotency-key": "secret-key"}, message_id="secret-key")

        with Consumer(library, environment, store, Handled(failures=99), attempts=2):
            environment.letter()

        lines = [record.getMessage() for record in caplog.records if record.name == "onefold.queues.rabbitmq"]
        where = f"{environment.queue}: charge [key {Address('', 'charge', 'secret-key').digest}]: "
        assert lines[0].startswith(f"{where}attempt 1 failed: ValueError")
        assert lines[1].startswith(f"{where}to the dead letters: it failed 2 times")
        assert "secret-key" not in "".join(lines)

    def test_a_worker_that_cannot_work_buries_nothing_and_says_why(
        self, library: Library, environment: Environment, buried: list[Event], caplog: pytest.LogCaptureFixture
    ) -> None:
        def credit(delivery: Delivery, *, tx: Any) -> None: ...

        environment.send_keyed("pay-1", times=2)
        with Consumer(library, environment, MemoryStore if library == "pika" else AsyncMemoryStore, credit) as consumer:
            until(lambda: "again in 60 s: UsageError: " in caplog.text, "it is told")

        assert "MemoryStore has no transactions" in caplog.text
        assert [record.levelname for record in caplog.records if "UsageError" in record.getMessage()] == ["ERROR"]
        assert (consumer.acks, buried) == (0, [])
        assert (environment.count(), environment.count(environment.dead)) == (2, 0)

    def test_a_store_that_is_away_is_told_with_its_cause(
        self, library: Library, environment: Environment, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        environment.send_keyed("pay-1", times=3)

        with Consumer(library, environment, f"sqlite:///{tmp_path}/nowhere/records.db", Handled()):
            until(lambda: "StoreUnavailable: " in caplog.text, "it is told")

        assert "the file cannot be opened" in caplog.text
        assert [record.levelname for record in caplog.records if record.name == "onefold.queues.rabbitmq"] == [
            "WARNING"
        ]

    def test_a_handler_with_tx_on_a_store_without_transactions_is_refused_at_once(self) -> None:
        def credit(delivery: Delivery, *, tx: Any) -> None: ...

        async def credit_async(delivery: Delivery, *, tx: Any) -> None: ...

        with pytest.raises(UsageError, match="memory has no transactions"):
            onefold_pika.guarded(Guard("memory:"), "charge", credit, key=header(), dead_letter="dead")
        with pytest.raises(UsageError, match="redis has no transactions"):
            onefold_aio_pika.guarded(
                AsyncGuard("redis://localhost"), "charge", credit_async, key=header(), dead_letter="dead"
            )


HOLD = Policy(after_crash="hold", ambiguous_errors=(TimeoutError,))


def held(store: str, key: str) -> None:
    def unknown() -> None:
        raise TimeoutError

    with Guard(store, policy=HOLD) as guard, pytest.raises(TimeoutError):
        guard.run("charge", key, unknown)


def quorum(url: str, name: str, limit: int) -> Environment:
    return Environment(
        url,
        name,
        **{
            "x-queue-type": "quorum",
            "x-delivery-limit": limit,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": f"{name}.dead",
        },
    )


class TestKeys:
    def test_a_message_without_a_key_runs_unguarded_if_that_is_the_policy(
        self, library: Library, environment: Environment, store: str
    ) -> None:
        handle = Handled()
        environment.send(b"no key", times=2)

        with Consumer(library, environment, store, handle, missing_key="run"):
            until(lambda: len(handle.calls) == 2, "both ran")

        assert (environment.count(), environment.count(environment.dead)) == (0, 0)

    @pytest.mark.parametrize(
        ("sent", "reason"),
        [
            ({"headers": {"idempotency-key": [1, 2]}}, "a key is text, a whole number or a UUID, not list"),
            ({"headers": {"idempotency-key": True}}, "a key is text, a whole number or a UUID, not bool"),
            ({"headers": {"idempotency-key": b"\xff\xfe"}}, "the header idempotency-key is not text"),
            ({"headers": {"idempotency-key": "  "}}, "the key is empty"),
            ({"headers": {"idempotency-key": "k" * 100_000}}, "the key has 100000 characters, and the limit is 255"),
            ({"headers": {}}, "it has no key"),
            ({}, "it has no key"),
        ],
    )
    def test_a_header_that_is_no_key_ends_in_the_dead_letters_with_the_reason(
        self, library: Library, environment: Environment, store: str, sent: dict[str, Any], reason: str
    ) -> None:
        environment.send(b"bad", **sent)

        with Consumer(library, environment, store, Handled()):
            properties, body = environment.letter()

        assert (properties.headers["x-onefold-reason"], body) == (reason, b"bad")

    def test_headers_that_leave_no_room_for_the_reason_do_not_end_the_consumer(
        self, library: Library, environment: Environment, store: str
    ) -> None:
        handle = Handled()
        environment.send(b"bad", headers={"idempotency-key": "k" * 130_900, "kept": "yes"})
        environment.send_keyed("pay-1")

        with Consumer(library, environment, store, handle):
            properties, _ = environment.letter()
            until(lambda: handle.calls, "the good one ran")

        assert properties.headers["x-onefold-reason"] == "the key has 130900 characters, and the limit is 255"
        assert properties.headers["x-onefold-dropped-headers"] == "idempotency-key"
        assert properties.headers["kept"] == "yes"

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"not JSON", "the body is not JSON, and the key is its field event.id"),
            (b"\xff\xfe", "the body is not JSON, and the key is its field event.id"),
            (b"[]", "it has no key"),
            (b"", "the body is not JSON, and the key is its field event.id"),
            (json.dumps({"event": {"id": 1.5}}).encode(), "a key is text, a whole number or a UUID, not float"),
            (
                json.dumps({"event": {"id": "k" * (1 << 20)}}).encode(),
                "the key has 1048576 characters, and the limit is 255",
            ),
        ],
        ids=["not JSON", "not UTF-8", "a list", "empty", "a float", "1 MiB"],
    )
    def test_a_body_without_a_usable_key_ends_in_the_dead_letters_with_the_reason(
        self, library: Library, environment: Environment, store: str, body: bytes, reason: str
    ) -> None:
        environment.send(body)

        with Consumer(library, environment, store, Handled(), key=field("event.id")):
            properties, found = environment.letter()

        assert (properties.headers["x-onefold-reason"], found) == (reason, body)

    def test_the_message_id_is_the_key_where_there_is_no_header(
        self, library: Library, environment: Environment, store: str
    ) -> None:
        handle = Handled()
        environment.send(message_id="pay-1", times=2)
        environment.send(message_id="pay-1", headers={"idempotency-key": "pay-2"})

        with Consumer(library, environment, store, handle, key=first_of(header(), message_id())) as consumer:
            until(lambda: consumer.acks == 3, "all are acknowledged")

        assert [call.message_id for call in handle.calls] == ["pay-1", "pay-1"]

    def test_what_comes_back_from_the_dead_letters_by_mistake_is_absorbed_and_by_intent_runs(
        self, library: Library, environment: Environment, store: str
    ) -> None:
        handle = Handled()
        environment.send_keyed("pay-1")
        with Consumer(library, environment, store, handle):
            until(lambda: handle.calls, "it ran")

        environment.send_keyed("pay-1")
        with Consumer(library, environment, store, handle) as consumer:
            until(lambda: consumer.acks == 1, "it came again")
        assert len(handle.calls) == 1

        with Guard(store) as guard:
            assert guard.forget("charge", "pay-1")
        environment.send_keyed("pay-1")
        with Consumer(library, environment, store, handle):
            until(lambda: len(handle.calls) == 2, "it ran again")


class TestTransactions:
    def test_a_handler_with_tx_commits_with_its_record(
        self, library: Library, environment: Environment, path: Path
    ) -> None:
        def credit(delivery: Delivery, *, tx: Any) -> None:
            add(tx, int(delivery.body))

        for number in range(5):
            environment.send_keyed(f"pay-{number}", b"10", times=2)
        with Consumer(library, environment, f"sqlite:///{path}", credit) as consumer:
            until(lambda: consumer.acks == 10, "all are acknowledged")

        assert balance(path) == 50
        assert (environment.count(), environment.count(environment.dead)) == (0, 0)


# In seconds: long enough for a thread of a busy machine to have its turn.
HEARTBEAT = 2


class TestConnections:
    @pytest.mark.more
    def test_a_handler_may_take_longer_than_the_heartbeat(
        self, rabbitmq_url: str, rabbitmq_name: str, tmp_path: Path
    ) -> None:
        runs: list[Delivery] = []

        def long(delivery: Delivery) -> None:
            runs.append(delivery)
            # A broker hangs up after two to three heartbeats without a word.
            time.sleep(4.5 * HEARTBEAT)

        # Both at once: each takes long.
        environments = [Environment(rabbitmq_url, f"{rabbitmq_name}-{library}") for library in LIBRARIES]
        consumers = [
            Consumer(library, environment, f"sqlite:///{tmp_path}/{library}.db", long, heartbeat=HEARTBEAT)
            for library, environment in zip(get_args(Library), environments, strict=True)
        ]
        for environment in environments:
            environment.send_keyed("pay-1")
        with consumers[0], consumers[1]:
            until(lambda: [one.acks or len(one.errors) for one in consumers] == [1, 1], "both have ended")

        assert [one.errors for one in consumers] == [[], []]
        assert len(runs) == 2
        assert [(environment.count(), environment.count(environment.dead)) for environment in environments] == [
            (0, 0),
            (0, 0),
        ]

    def test_with_prefetch_and_one_thread_messages_are_handled_in_order(
        self, environment: Environment, store: str
    ) -> None:
        handle = Handled()
        for number in range(20):
            environment.send_keyed(f"pay-{number}", str(number).encode())

        with Consumer("pika", environment, store, handle):
            until(lambda: len(handle.calls) == 20, "all ran")

        assert [int(call.body) for call in handle.calls] == list(range(20))

    def test_several_threads_handle_several_messages_at_once(self, environment: Environment, store: str) -> None:
        together = threading.Barrier(3, timeout=PATIENCE)
        for number in range(3):
            environment.send_keyed(f"pay-{number}")

        with Consumer("pika", environment, store, lambda delivery: together.wait(), threads=3) as consumer:
            until(lambda: consumer.acks == 3, "all are acknowledged")

        assert environment.count() == 0

    def test_a_consumer_that_goes_settles_what_runs_and_leaves_the_rest_to_the_queue(
        self, library: Library, environment: Environment, store: str
    ) -> None:
        runs: list[Delivery] = []

        def slow(delivery: Delivery) -> None:
            runs.append(delivery)
            until(lambda: consumer.is_leaving, "its consumer goes")

        prefetch = 5 if library == "pika" else 1
        for number in range(5):
            environment.send_keyed(f"pay-{number}")
        with Consumer(library, environment, store, slow, prefetch=prefetch) as consumer:
            until(lambda: runs and consumer.has_all_of(prefetch), "the first runs, and the rest is with the consumer")

        assert len(runs) == 1
        assert environment.count() == 4


class TestPikasOwnWays:
    """What pika can do besides a callback, and what a thread must not swallow."""

    def test_its_generator_can_feed_the_callback(self, environment: Environment, store: str) -> None:
        handle = Handled()
        environment.send_keyed("pay-1", times=2)
        environment.send_keyed("pay-2")

        with Guard(store) as guard, environment.channel() as channel:
            consumer = onefold_pika.guarded(guard, "charge", handle, key=header(), dead_letter=environment.dead)
            for method, properties, body in channel.consume(environment.queue, inactivity_timeout=0.05):
                if method is not None:
                    consumer(channel, method, properties, body)
                elif len(handle.calls) == 2:
                    break
            assert consumer.drain(channel.connection)
            channel.cancel()

        assert len(handle.calls) == 2
        assert (environment.count(), environment.count(environment.dead)) == (0, 0)

    def test_a_handler_that_ends_its_thread_does_not_lose_its_message(
        self, environment: Environment, store: str
    ) -> None:
        runs: list[Delivery] = []

        def leaves(delivery: Delivery) -> None:
            runs.append(delivery)
            if len(runs) == 1:
                raise SystemExit("I am off")

        environment.send_keyed("pay-1")
        with Consumer("pika", environment, store, leaves, policy=Policy(lease=0.5), wait=0):
            until(lambda: len(runs) == 2, "it ran again")

        assert (environment.count(), environment.count(environment.dead)) == (0, 0)

    def test_an_async_handler_that_was_cancelled_inside_does_not_keep_its_message_for_ever(
        self, environment: Environment, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs: list[Delivery] = []

        async def waits_for_a_cancelled_task(delivery: Delivery) -> None:
            runs.append(delivery)
            if len(runs) == 1:
                raise asyncio.CancelledError

        monkeypatch.setattr(rabbitmq_tools, "as_async", lambda handler: handler)
        environment.send_keyed("pay-1")
        with Consumer("aio-pika", environment, store, waits_for_a_cancelled_task, policy=Policy(lease=0.5), wait=0):
            until(lambda: len(runs) == 2, "it ran again")

        assert (environment.count(), environment.count(environment.dead)) == (0, 0)

    @pytest.mark.parametrize("how", ["cancels its task", "raises no Exception"])
    def test_an_async_handler_that_ends_its_task_does_not_keep_its_message_for_ever(
        self, how: str, environment: Environment, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs: list[bytes] = []

        class NoException(BaseException):
            pass

        async def ends_its_task(delivery: Delivery) -> None:
            runs.append(delivery.body)
            if len(runs) > 1:
                return
            if how == "raises no Exception":
                raise NoException
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

        monkeypatch.setattr(rabbitmq_tools, "as_async", lambda handler: handler)
        monkeypatch.setattr(onefold_aio_pika, "SOON", 0.05)
        environment.send_keyed("pay-1", b"1")
        environment.send_keyed("pay-2", b"2")
        policy = Policy(lease=0.5)
        # The only message that the broker gives it.
        with Consumer("aio-pika", environment, store, ends_its_task, policy=policy, wait=0, prefetch=1):
            until(lambda: len(runs) == 3, "both ran")

        assert sorted(runs) == [b"1", b"1", b"2"]
        assert (environment.count(), environment.count(environment.dead)) == (0, 0)

    def test_a_moved_back_dead_letter_has_all_its_attempts_again(self, environment: Environment, path: Path) -> None:
        calls: list[Delivery] = []

        def refuses(delivery: Delivery, *, tx: Any) -> None:
            calls.append(delivery)
            raise ValueError

        environment.send_keyed("pay-1")
        with Consumer("pika", environment, f"sqlite:///{path}", refuses, attempts=2):
            environment.letter()
            environment.send_keyed("pay-1")
            environment.letter()

        assert len(calls) == 4


class TestCounting:
    """How often a message has failed, where the broker does not say, or says something else."""

    def failures(self, rules: Rules, **parts: Any) -> int:
        """How often it fails before it is dead."""
        delivery = Delivery(b"4200", {}, None, None, "", "", True, "1", None)._replace(**parts)
        steps = (rules.after(HandlerRaised(ValueError()), delivery, 0.0) for _ in range(100))
        return 1 + sum(1 for _ in takewhile(lambda step: step.action == "give back", steps))

    def test_a_count_that_a_message_has_brought_along_does_not_keep_it_alive(self) -> None:
        rules = Rules("charge", "dead", attempts=5)

        assert self.failures(rules, headers={"x-delivery-count": 1}) == 4

    def test_equal_orders_under_two_keys_are_counted_apart(self) -> None:
        rules = Rules("charge", "dead", attempts=5)
        first = Delivery(b"4200", {"idempotency-key": "a"}, None, None, "", "", True, "1", None)
        for _ in range(4):
            assert rules.after(HandlerRaised(ValueError()), first, 0.0).action == "give back"

        assert self.failures(rules, headers={"idempotency-key": "b"}) == 5
        assert rules.after(HandlerRaised(ValueError()), first, 0.0).action == "bury"


class TestRefusals:
    @pytest.mark.parametrize("name", ["pika", "aio_pika"])
    def test_a_missing_client_is_told_with_the_way_to_get_it(self, name: str) -> None:
        code = f"import sys; sys.modules[{name!r}] = None\nimport onefold.queues.{name}"

        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

        assert "UsageError: onefold.queues." in done.stderr
        assert "pip install 'onefold[rabbitmq]'" in done.stderr

    def test_a_handler_of_sync_for_async_is_refused_at_once(self) -> None:
        async def on_loop(delivery: Delivery) -> None: ...

        def blocking(delivery: Delivery) -> None: ...

        with Guard("memory:") as guard, pytest.raises(UsageError, match="its work would be lost"):
            onefold_pika.guarded(guard, "charge", on_loop, key=header(), dead_letter="dead")
        with pytest.raises(UsageError, match="its work would be lost"):
            onefold_aio_pika.guarded(AsyncGuard("memory:"), "charge", blocking, key=header(), dead_letter="dead")
        with pytest.raises(UsageError, match="it takes Guard"):
            onefold_pika.guarded(AsyncGuard("memory:"), "charge", blocking, key=header(), dead_letter="dead")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"dead_letter": ""},
            {"dead_letter": None},
            {"dead_letter": object()},
            {"attempts": 0},
            {"attempts": "3"},
            {"threads": 0},
            {"threads": 1.5},
            {"missing_key": "skip"},
            {"unacked_max": -1},
            {"unacked_max": "30m"},
            {"unacked_max": "2h"},
        ],
    )
    def test_wrong_options_are_refused_at_once(self, wrong: dict[str, Any]) -> None:
        options: dict[str, Any] = {"key": header(), "dead_letter": "dead"} | wrong

        with Guard("memory:") as guard, pytest.raises(UsageError):
            onefold_pika.guarded(guard, "charge", Handled(), **options)

    def test_another_client_of_pika_is_refused(self) -> None:
        with Guard("memory:") as guard:
            callback = onefold_pika.guarded(guard, "charge", Handled(), key=header(), dead_letter="dead")

            with pytest.raises(UsageError, match="BlockingConnection"):
                callback(object(), None, None, b"")  # type: ignore[arg-type]

    def test_a_consumer_without_acknowledgements_is_refused(self) -> None:
        guard = AsyncGuard("memory:")
        callback = onefold_aio_pika.guarded(guard, "charge", as_async(Handled()), key=header(), dead_letter="dead")

        with pytest.raises(UsageError, match="no_ack=True"):
            asyncio.run(callback(SimpleNamespace(processed=True)))  # type: ignore[arg-type]
