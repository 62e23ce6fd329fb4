"""SQS: what becomes of a message, in threads and in tasks, on a real server."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, OutcomeUnknown
from onefold.events import Event, Kind, subscribe
from onefold.queues._sqs.consumer import Delivery
from onefold.queues.keys import body, field, first_of, header, position
from onefold.queues.sqs import deduplication_id
from tests.queues.sqs_tools import Environment, Handled, Mode, each_mode, mode, said, shortly, worker
from tests.support import Died, eventually
from tests.wallet import add, balance

__all__ = ["each_mode", "mode", "shortly"]


class TestVerdicts:
    def test_a_duplicate_of_a_finished_message_is_deleted_and_not_run(
        self, each_mode: Mode, sqs_url: str, sqs_name: str
    ) -> None:
        handle = Handled()

        with Environment(sqs_url, sqs_name) as environment, worker(environment, "memory:", handle, mode=each_mode):
            environment.send_keyed("pay-1", times=3)
            environment.settled()
            environment.send_keyed("pay-1")
            environment.send_keyed("pay-2")
            environment.settled()
            assert environment.no_letters()

        assert len(handle.calls) == 2

    def test_a_handler_sees_the_message(self, sqs_url: str, sqs_name: str) -> None:
        handle = Handled()

        with Environment(sqs_url, sqs_name, fifo=True) as environment:
            environment.client.send_message(
                QueueUrl=environment.queue,
                MessageBody="4200",
                MessageGroupId="asha",
                MessageDeduplicationId="id-1",
                MessageAttributes={
                    "Idempotency-Key": {"DataType": "String", "StringValue": "ключ"},
                    "number": {"DataType": "Number", "StringValue": "17"},
                    "bytes": {"DataType": "Binary", "BinaryValue": b"\x00\x01"},
                },
            )
            with worker(environment, "memory:", handle):
                environment.settled()

        (seen,) = handle.calls
        assert (seen.body, seen.queue) == (b"4200", f"{sqs_name}.fifo")
        assert seen.headers == {"Idempotency-Key": "ключ", "number": "17", "bytes": b"\x00\x01"}
        assert (seen.deduplication_id, seen.group, seen.receive_count) == ("id-1", "asha", 1)
        assert seen.position == seen.native["MessageId"]

    @pytest.mark.parametrize("key", [deduplication_id(), field("id"), first_of(header(), deduplication_id())])
    def test_the_key_may_be_the_deduplication_id_or_a_field(self, key: Any, sqs_url: str, sqs_name: str) -> None:
        handle = Handled()

        with Environment(sqs_url, sqs_name, fifo=True) as environment:
            # Another group has a window of its own, if the queue is told so: as after five minutes.
            scope = {"DeduplicationScope": "messageGroup"}
            environment.client.set_queue_attributes(QueueUrl=environment.queue, Attributes=scope)
            for group in ("one", "two"):
                sent = {"MessageBody": '{"id": "a"}', "MessageGroupId": group, "MessageDeduplicationId": "a"}
                environment.client.send_message(QueueUrl=environment.queue, **sent)
            with worker(environment, "memory:", handle, key=key):
                environment.settled()
            assert environment.no_letters()

        assert len(handle.calls) == 1

    def test_the_id_of_sqs_is_a_key_only_on_request_and_does_not_find_what_a_producer_sends_again(
        self, sqs_url: str, sqs_name: str
    ) -> None:
        handle = Handled()
        with pytest.warns(UserWarning, match="does not detect duplicates made by the producer"):
            key = position(changes_when_a_producer_retries=True)

        with Environment(sqs_url, sqs_name) as environment:
            environment.send(times=2)
            with worker(environment, "memory:", handle, key=key):
                environment.settled()
            # On a standard queue there is no id of the sender's.
            environment.send()
            with worker(environment, "memory:", handle, key=deduplication_id()):
                assert said(environment.letter(), "x-onefold-reason") == "it has no key"

        assert len(handle.calls) == 2

    def test_a_duplicate_of_a_running_message_is_given_back_and_never_deleted(
        self, mode: Mode, sqs_url: str, sqs_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled()
        handle.gate = threading.Event()
        caplog.set_level("INFO", "onefold.queues.sqs")

        with (
            Environment(sqs_url, sqs_name) as environment,
            worker(environment, "memory:", handle, mode=mode, threads=2, wait=0, lease=1) as one,
        ):
            environment.send_keyed("pay-1")
            assert eventually(lambda: bool(handle.calls))
            environment.send_keyed("pay-1")
            assert eventually(lambda: "InProgress" in caplog.text)
            # It is not with this worker any more, and still there.
            assert eventually(lambda: environment.counts() == (0, 2) and len(one.worker._work) == 1)
            handle.gate.set()
            environment.settled()
            assert environment.no_letters()

        assert len(handle.calls) == 1

    def test_a_handler_that_fails_is_run_again_until_it_succeeds(
        self, mode: Mode, shortly: None, sqs_url: str, sqs_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled(failures=2)

        with Environment(sqs_url, sqs_name) as environment, worker(environment, "memory:", handle, mode=mode) as one:
            environment.send_keyed("pay-1")
            environment.settled()
            assert environment.no_letters()
            assert not one.worker._rules.remembers

        assert [one.receive_count for one in handle.calls] == [1, 2, 3]
        told = [line for line in caplog.messages if "failed" in line]
        assert [line.partition(" failed: ")[0][-9:] for line in told] == ["attempt 1", "attempt 2"]
        assert all("ValueError at sqs_tools.py" in line and "4200" not in line for line in told)

    def test_a_handler_that_always_fails_sends_its_message_to_the_dead_letters(
        self, each_mode: Mode, shortly: None, sqs_url: str, sqs_name: str
    ) -> None:
        handle, heard = Handled(failures=99), list[Event]()
        end = subscribe(heard.append)

        with Environment(sqs_url, sqs_name) as environment:
            environment.send("4200", idempotency_key="pay-1", x_trace="t")
            with worker(environment, "memory:", handle, mode=each_mode, attempts=3) as one:
                letter = environment.letter()
                environment.settled()
                digest = one.guard.address("charge", "pay-1").digest
        end()

        assert len(handle.calls) == 3
        assert letter["Body"] == "4200"
        assert (said(letter, "x-onefold-reason") or "").startswith("it failed 3 times, the last time with ValueError")
        assert {name: said(letter, name) for name in letter["MessageAttributes"] if name != "x-onefold-reason"} == {
            "idempotency-key": "pay-1",
            "x-trace": "t",
            "x-onefold-operation": "charge",
            "x-onefold-queue": sqs_name,
            "x-onefold-digest": digest,
        }
        assert [one.kind for one in heard if one.kind == Kind.BURIED] == [Kind.BURIED]

    @pytest.mark.parametrize(
        ("headers", "sent", "options", "reason"),
        [
            ({"idempotency_key": "k" * 5000}, "{}", {}, "the key has 5000 characters, and the limit is"),
            ({}, "no JSON", {"key": field("id")}, "the body is not JSON, and the key is its field id"),
            ({"idempotency_key": "a", "Idempotency_Key": "b"}, "{}", {}, "comes in several spellings with different"),
        ],
    )
    def test_a_message_without_a_usable_key_is_a_dead_letter(
        self, headers: Any, sent: str, options: Any, reason: str, sqs_url: str, sqs_name: str
    ) -> None:
        handle = Handled()

        with Environment(sqs_url, sqs_name) as environment:
            environment.send(sent, **headers)
            with worker(environment, "memory:", handle, **options):
                assert reason in (said(environment.letter(), "x-onefold-reason") or "")
                environment.settled()

        assert handle.calls == []

    def test_missing_key_run_runs_it_unguarded(self, sqs_url: str, sqs_name: str) -> None:
        handle = Handled()

        with Environment(sqs_url, sqs_name) as environment:
            environment.send(times=2)
            environment.send_keyed("pay-1", times=2)
            with worker(environment, "memory:", handle, missing_key="run"):
                environment.settled()

        assert len(handle.calls) == 3

    def test_a_used_key_with_another_body_is_a_dead_letter(self, mode: Mode, sqs_url: str, sqs_name: str) -> None:
        handle = Handled()

        with Environment(sqs_url, sqs_name) as environment:
            for sent in ("1", "1", "2"):
                environment.send_keyed("pay-1", sent)
            with worker(environment, "memory:", handle, mode=mode, payload=body()):
                letter = environment.letter()
                environment.settled()

        assert letter["Body"] == "2"
        assert (said(letter, "x-onefold-reason") or "").startswith("KeyReused: ")
        assert handle.bodies == ["1"]

    @pytest.mark.parametrize("max_receives", [0, 1])
    def test_a_worker_that_cannot_work_buries_nothing(
        self, mode: Mode, max_receives: int, sqs_url: str, sqs_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled()

        with (
            Environment(sqs_url, sqs_name, max_receives=max_receives) as environment,
            worker(environment, "memory:", handle, mode=mode) as one,
        ):
            _close(one.guard)
            environment.send_keyed("pay-1")
            assert eventually(lambda: any(record.levelno == logging.ERROR for record in caplog.records))
            # On its only receive it waits in place: given back, SQS would bury it.
            assert eventually(lambda: len(one.worker._work) == max_receives)
            assert environment.counts() == (0, 1)
            assert environment.no_letters()

        assert handle.calls == []
        assert "again in 60 s: " in next(one.getMessage() for one in caplog.records if one.levelno == logging.ERROR)

    def test_a_handler_with_tx_commits_with_its_record(self, sqs_url: str, sqs_name: str, path: Path) -> None:
        def credit(delivery: Delivery, *, tx: Any) -> None:
            add(tx, int(delivery.body))

        with Environment(sqs_url, sqs_name) as environment:
            environment.send_keyed("pay-1", "10", times=3)
            environment.send_keyed("pay-2", "5", times=2)
            with worker(environment, f"sqlite:///{path}", credit, threads=3):
                environment.settled()

        assert balance(path) == 15

    def test_two_equal_keys_and_a_poison_message_in_one_batch(self, mode: Mode, sqs_url: str, sqs_name: str) -> None:
        """The poison is a dead letter, its neighbours are done, and one of the equal ones has run."""
        handle = Handled()

        with Environment(sqs_url, sqs_name) as environment:
            environment.send_keyed("pay-1", "1")
            environment.send("poison")
            environment.send_keyed("pay-1", "1")
            environment.send_keyed("pay-2", "2")
            with worker(environment, "memory:", handle, mode=mode, threads=2):
                assert environment.letter()["Body"] == "poison"
                environment.settled()
            assert environment.no_letters() is False

        assert sorted(handle.bodies) == ["1", "2"]
        assert {one.receive_count for one in handle.calls} == {1}

    def test_a_handler_that_raises_what_is_no_exception_does_not_end_the_worker(
        self, mode: Mode, shortly: None, sqs_url: str, sqs_name: str
    ) -> None:
        ran: list[bytes] = []

        def handle(delivery: Delivery) -> None:
            ran.append(delivery.body)
            if delivery.body == b"1":
                raise Died

        with Environment(sqs_url, sqs_name) as environment:
            environment.send_keyed("pay-1", "1")
            environment.send_keyed("pay-2", "2")
            with worker(environment, "memory:", handle, mode=mode, wait=0):
                assert eventually(lambda: b"2" in ran and environment.counts() == (0, 1))
            assert environment.no_letters()

    def test_an_unknown_outcome_is_held_and_comes_again(
        self, mode: Mode, sqs_url: str, sqs_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled(failures=1, error=OutcomeUnknown)

        with Environment(sqs_url, sqs_name) as environment:
            environment.send_keyed("pay-1", times=2)
            with worker(environment, "memory:", handle, mode=mode, after_crash="hold") as one:
                assert eventually(lambda: "OutcomeUnknown" in caplog.text or "Held" in caplog.text)
                assert eventually(lambda: bool(handle.calls) and not len(one.worker._work))
                assert eventually(lambda: environment.counts() == (0, 2))
            assert environment.no_letters()

        assert len(handle.calls) == 1


def _close(guard: Guard | AsyncGuard) -> None:
    if isinstance(guard, AsyncGuard):
        asyncio.run(guard.aclose())
    else:
        guard.close()
