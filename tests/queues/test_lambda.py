"""AWS Lambda: batches of SQS with partial answers, direct invocations, and the time of a function."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from onefold import (
    Guard,
    Held,
    InProgress,
    KeyReused,
    MissingKey,
    OutcomeUnknown,
    StoreUnavailable,
    UsageError,
    current,
)
from onefold.queues._sqs import time_limits
from onefold.queues.aws_lambda import BatchFailed, client_context, guarded_invocation, guarded_messages
from onefold.queues.keys import field, header
from tests.processes import Stage, child
from tests.queues.sqs_tools import Environment, said
from tests.support import PATIENCE, Elsewhere, Handler, ProxyStore, elsewhere, eventually
from tests.wallet import add, balance

# Seconds that a function has: long enough for its handler to begin on a busy machine.
SHORTLY = 3.0

ARN = "arn:aws:sqs:eu-central-1:123456789012:charges"


def record(at: int, key: str | None = None, body: str = "{}", group: str | None = None, **more: Any) -> dict[str, Any]:
    """A message, as Lambda passes it on."""
    system = {"ApproximateReceiveCount": "1", "SentTimestamp": "1795012795440"}
    attributes = {} if key is None else {"idempotency-key": {"stringValue": key, "dataType": "String"}}
    return {
        "messageId": f"m-{at}",
        "receiptHandle": f"r-{at}",
        "body": body,
        "attributes": system | ({"MessageGroupId": group, "MessageDeduplicationId": f"d-{at}"} if group else {}),
        "messageAttributes": attributes | more,
        "eventSource": "aws:sqs",
        "eventSourceARN": f"{ARN}.fifo" if group else ARN,
    }


class Died(BaseException):
    """What is no error of a handler's."""


class Context:
    """What Lambda passes beside an event, as far as it is read."""

    def __init__(self, seconds: float = 300.0, **custom: str) -> None:
        self._ends_at = time.monotonic() + seconds
        self.client_context = type("ClientContext", (), {"custom": custom}) if custom else None

    def get_remaining_time_in_millis(self) -> int:
        return round((self._ends_at - time.monotonic()) * 1000)


def undone(answer: dict[str, Any]) -> list[str]:
    assert set(answer) == {"batchItemFailures"}
    return [one["itemIdentifier"] for one in answer["batchItemFailures"]]


class TestMessages:
    def test_duplicates_are_done_and_only_what_is_not_done_comes_again(self) -> None:
        ran: list[str] = []

        def charge(delivery: Any) -> None:
            ran.append(delivery.headers["idempotency-key"])
            if ran.count("bad") and ran[-1] == "bad":
                raise ValueError

        with Guard("memory:") as guard:
            handle = guarded_messages(guard, "charge", charge, key=header())
            batch = [record(1, "a"), record(2, "bad"), record(3, "a"), record(4), record(5, "b")]
            first = handle({"Records": batch}, Context())
            again = handle({"Records": [record(6, "a"), record(7, "b")]}, Context())

        # A failed message and one without a key do not fail their neighbours.
        assert (undone(first), undone(again)) == (["m-2", "m-4"], [])
        assert ran == ["a", "bad", "b"]

    def test_a_handler_sees_the_message(self) -> None:
        seen = Handler()
        number = {"stringValue": "17", "dataType": "Number"}
        some = {"binaryValue": base64.b64encode(b"\x00\x01").decode(), "dataType": "Binary"}
        with Guard("memory:") as guard:
            handle = guarded_messages(guard, "charge", lambda delivery: seen(delivery) and None, key=header())
            handle({"Records": [record(1, "a", "4200", "asha", number=number, bytes=some)]})

        ((delivery,),) = seen._started
        assert (delivery.body, delivery.queue, delivery.group) == (b"4200", "charges.fifo", "asha")
        assert delivery.headers == {"idempotency-key": "a", "number": "17", "bytes": b"\x00\x01"}
        assert (delivery.deduplication_id, delivery.receive_count, delivery.position) == ("d-1", 1, "m-1")

    def test_on_a_fifo_queue_a_group_stops_at_its_first_failure_and_the_others_go_on(self) -> None:
        ran: list[str] = []

        def charge(delivery: Any) -> None:
            ran.append(delivery.body.decode())
            if delivery.body == b"a2":
                raise ValueError

        with Guard("memory:") as guard:
            handle = guarded_messages(guard, "charge", charge, key=header())
            bodies = ["a1", "b1", "a2", "a3", "b2", "a4"]
            batch = [record(number, body, body, body[0]) for number, body in enumerate(bodies)]
            answer = handle({"Records": batch}, Context())

        assert ran == ["a1", "b1", "a2", "b2"]
        assert undone(answer) == ["m-2", "m-3", "m-5"]

    def test_on_a_standard_queue_groups_are_for_fairness_and_stop_nothing(self) -> None:
        ran: list[str] = []

        def charge(delivery: Any) -> None:
            ran.append(delivery.body.decode())
            if delivery.body == b"1":
                raise ValueError

        batch = [record(number, str(number), str(number), "a") | {"eventSourceARN": ARN} for number in (1, 2)]
        with Guard("memory:") as guard:
            answer = guarded_messages(guard, "charge", charge, key=header())({"Records": batch})

        assert (ran, undone(answer)) == (["1", "2"], ["m-1"])

    def test_without_partial_answers_the_batch_is_raised_and_what_is_done_is_found_done(self) -> None:
        ran: list[str] = []

        def charge(delivery: Any) -> None:
            ran.append(delivery.body.decode())
            if ran == ["1", "2"]:
                raise ValueError

        with Guard("memory:") as guard:
            handle = guarded_messages(guard, "charge", charge, key=header(), report="raise")
            event = {"Records": [record(number, str(number), str(number)) for number in (1, 2)]}
            with pytest.raises(BatchFailed, match="1 of 2 messages are not done"):
                handle(event, Context())
            assert undone(handle(event, Context())) == []

        assert ran == ["1", "2", "2"]

    def test_a_worker_that_cannot_work_and_a_store_that_is_down_lose_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        store, charge = ProxyStore(), Handler(None)
        store.down = {"claim"}
        guard = Guard(store)
        handle = guarded_messages(guard, "charge", charge, key=header())

        assert undone(handle({"Records": [record(1, "a")]})) == ["m-1"]
        guard.close()
        assert undone(handle({"Records": [record(1, "a")]})) == ["m-1"]

        assert charge.starts == 0
        assert [one.levelno for one in caplog.records] == [logging.WARNING, logging.ERROR]

    def test_what_never_can_run_is_a_dead_letter_if_a_queue_is_named(
        self, sqs_url: str, sqs_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Environment(sqs_url, sqs_name) as environment, Guard("memory:") as guard:
            options: Any = {"key": field("id"), "dead_letter": environment.dead, "client": environment.client}
            handle = guarded_messages(guard, "charge", lambda delivery: None, **options)

            assert undone(handle({"Records": [record(1, body="no JSON", trace={"stringValue": "t"})]})) == []
            letter = environment.letter()
            environment.client.delete_queue(QueueUrl=environment.dead)
            assert undone(handle({"Records": [record(2, body="no JSON")]})) == ["m-2"]
            environment.dead = environment._create(environment.dead_name, {})

        assert (letter["Body"], said(letter, "trace")) == ("no JSON", "t")
        assert said(letter, "x-onefold-reason") == "the body is not JSON, and the key is its field id"
        assert said(letter, "x-onefold-queue") == "charges"
        assert re.search(r"did not accept a dead letter: \S*NonExistentQueue", caplog.text)

    @pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit, Died])
    def test_a_handler_that_raises_what_is_no_exception_does_not_fail_its_neighbours(
        self, error: type[BaseException]
    ) -> None:
        """As `asyncio.run` in a handler raises it."""
        ran: list[str] = []

        def charge(delivery: Any) -> None:
            ran.append(delivery.body.decode())
            if delivery.body == b"1":
                raise error

        with Guard("memory:") as guard:
            handle = guarded_messages(guard, "charge", charge, key=header())
            answer = handle({"Records": [record(0, "a", "0"), record(1, "b", "1"), record(2, "c", "2")]}, Context())

        assert (ran, undone(answer)) == (["0", "1", "2"], ["m-1"])

    def test_a_handler_with_tx_commits_with_its_record(self, path: Path) -> None:
        def credit(delivery: Any, *, tx: Any) -> None:
            add(tx, int(delivery.body))

        with Guard(f"sqlite:///{path}") as guard:
            handle = guarded_messages(guard, "charge", credit, key=header())
            for _ in range(2):
                assert undone(handle({"Records": [record(1, "a", "10"), record(2, "a", "10")]}, Context())) == []

        assert balance(path) == 10

    @pytest.mark.parametrize("event", [{}, {"Records": [{"eventSource": "aws:kinesis"}]}, [], "text"])
    def test_an_event_of_something_else_is_refused(self, event: Any) -> None:
        with Guard("memory:") as guard, pytest.raises(UsageError, match="not one of SQS"):
            guarded_messages(guard, "charge", lambda delivery: None, key=header())(event, None)

    def test_options_are_checked_before_the_first_message(self) -> None:
        async def awaited(delivery: Any) -> None: ...

        with Guard("memory:") as guard:
            for handler, options, says in [
                (awaited, {}, "the handler is `async def`"),
                (lambda: None, {}, "the handler is called with only the message"),
                (lambda delivery: None, {"dead_letter": "dead"}, "dead_letter='dead' is the URL of a queue"),
                (lambda delivery: None, {"dead_letter": "https://dead"}, "client= is a client made with client"),
                (lambda delivery: None, {"report": "all"}, "report='all' is not one of"),
                (lambda delivery: None, {"kep": "7d"}, "kep= is neither an argument of guarded_messages"),
            ]:
                with pytest.raises(UsageError, match=says):
                    guarded_messages(guard, "charge", handler, key=header(), **options)  # type: ignore[arg-type]


class TestTime:
    """A run that would exceed the time of its function ends before it, and nobody knows its outcome."""

    @pytest.mark.parametrize(
        ("after_crash", "state"),
        [
            ("hold", "held"),
            pytest.param("rerun", None, marks=pytest.mark.more),
            pytest.param("skip", "done", marks=pytest.mark.more),
        ],
    )
    def test_a_handler_that_is_too_slow_is_interrupted_and_its_outcome_is_unknown(
        self, after_crash: Any, state: str | None
    ) -> None:
        ran: list[str] = []

        def charge(delivery: Any) -> None:
            ran.append(delivery.body.decode())
            try:
                threading.Event().wait(PATIENCE)
            except Exception:
                ran.append("caught")

        with Guard("memory:") as guard:
            handle = guarded_messages(guard, "charge", charge, key=header(), after_crash=after_crash, margin=0.5)
            began = time.monotonic()
            answer = handle({"Records": [record(1, "a", "1"), record(2, "b", "2")]}, Context(SHORTLY))
            taken = time.monotonic() - began
            found = guard.read("charge", "a")

        # The second was not started: its time was up.
        assert (ran, undone(answer)) == (["1"], ["m-1", "m-2"])
        assert taken < PATIENCE / 2
        if state is None:
            assert found is None or found.state == "open"
        else:
            assert found is not None
            assert found.state == state
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

    @pytest.mark.more
    def test_a_policy_that_names_other_errors_takes_it_for_unknown_all_the_same(self) -> None:
        with Guard("memory:", policy=None) as guard:
            options: Any = {"after_crash": "hold", "ambiguous_errors": (ConnectionError,), "margin": 0.5}
            handle = guarded_messages(
                guard, "charge", lambda delivery: threading.Event().wait(PATIENCE) and None, key=header(), **options
            )
            handle({"Records": [record(1, "a")]}, Context(SHORTLY))
            found = guard.read("charge", "a")

        assert found is not None
        assert found.state == "held"

    @pytest.mark.more
    def test_in_a_transaction_nothing_happened(self, path: Path) -> None:
        def credit(delivery: Any, *, tx: Any) -> None:
            add(tx, int(delivery.body))
            if delivery.receive_count == 1:
                threading.Event().wait(PATIENCE)

        with Guard(f"sqlite:///{path}") as guard:
            handle = guarded_messages(guard, "charge", credit, key=header(), margin=0.5)
            assert undone(handle({"Records": [record(1, "a", "10")]}, Context(SHORTLY))) == ["m-1"]
            assert balance(path) == 0
            again = record(1, "a", "10")
            again["attributes"]["ApproximateReceiveCount"] = "2"
            assert undone(handle({"Records": [again]}, Context())) == []

        assert balance(path) == 10

    @pytest.mark.parametrize("how", ["messages", "invocation"])
    def test_what_a_slow_store_has_left_no_time_for_has_not_run_and_is_not_held(
        self, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The time is up after the claim, and before the handler is called."""
        ran, store = list[str](), ProxyStore()
        options: Any = {"after_crash": "hold"}
        store.after["claim"] = lambda: monkeypatch.setattr(time_limits, "clock", lambda: time.monotonic() + 3600)

        with Guard(store) as guard:
            if how == "messages":
                batch = {"Records": [record(1, "a")]}
                handle = guarded_messages(guard, "charge", lambda _: ran.append("ran"), key=header(), **options)
                assert undone(handle(batch, Context())) == ["m-1"]
                found = guard.read("charge", "a")
                monkeypatch.undo()
                assert undone(handle(batch, Context())) == []
            else:
                invoked = guarded_invocation(guard, "charge", lambda *_: ran.append("ran"), key="id", **options)
                with pytest.raises(time_limits.NotStarted, match="nothing ran"):
                    invoked({"id": "a"}, Context())
                found = guard.read("charge", "a")
                monkeypatch.undo()
                invoked({"id": "a"}, Context())

        assert found is None or found.state == "open"
        assert ran == ["ran"]

    def test_a_signal_that_did_not_wake_the_handler_comes_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The system may give it to another thread, which has nothing to do with the handler."""
        real, limit, handler = signal.setitimer, time_limits.TimeLimit(0.0), threading.get_ident()

        def once_it_waits() -> None:
            assert eventually(lambda: sys._current_frames()[handler].f_code is threading.Condition.wait.__code__)
            signal.raise_signal(signal.SIGALRM)

        def given_to_another_thread(which: int, seconds: float, again: float = 0.0) -> None:
            if seconds:
                Elsewhere(once_it_waits)
            real(which, again, again)

        def handle() -> None:
            threading.Event().wait(PATIENCE)

        monkeypatch.setattr(signal, "setitimer", given_to_another_thread)
        limit.begin(Context(PATIENCE))
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            limit.limited(handle)()

        assert time.monotonic() - began < PATIENCE / 2

    def test_a_handler_may_tidy_up_once_it_is_interrupted(self) -> None:
        limit, left = time_limits.TimeLimit(0.0), list[tuple[float, float]]()

        def handle() -> None:
            try:
                threading.Event().wait(PATIENCE)
            finally:
                threading.Event().wait(4 * time_limits.AGAIN_SECONDS)
                left.append(signal.getitimer(signal.ITIMER_REAL))

        limit.begin(Context(0.1))
        with pytest.raises(OutcomeUnknown):
            limit.limited(handle)()

        # It came to its end, and no other signal interrupts its system calls.
        assert left == [(0.0, 0.0)]

    def test_what_has_returned_is_done_even_if_the_timer_was_faster(self) -> None:
        limit = time_limits.TimeLimit(0.0)
        limit.begin(Context(PATIENCE))

        assert limit.limited(lambda: "done")() == "done"
        assert limit.left > 0

    def test_outside_the_main_thread_nothing_is_interrupted_and_that_is_told(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        ran = Handler(None)
        with Guard("memory:") as guard:
            handle = guarded_messages(guard, "charge", ran, key=header(), lease=1)
            answer = elsewhere(lambda: handle({"Records": [record(1, "a")]}, Context()))

        assert (undone(answer), ran.starts) == ([], 1)
        assert "cannot be interrupted" in caplog.text

    @pytest.mark.parametrize(
        ("seconds", "options", "told"),
        [
            (3.0, {}, "the lease of 30 s is longer than five times the 3 s of this function"),
            (3.0, {"lease": 3}, ""),
            (10.0, {}, ""),
            (3.0, {"lease": 3, "wait": 5}, "wait=5 is longer than the 3 s of this function: nothing is started"),
        ],
    )
    def test_a_lease_and_a_wait_that_do_not_fit_the_time_are_told_once(
        self, seconds: float, options: Any, told: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Guard("memory:") as guard:
            handle = guarded_messages(guard, "charge", lambda delivery: None, key=header(), **options)
            for _ in range(2):
                handle({"Records": []}, Context(seconds))

        assert [told in line for line in caplog.messages] == ([True] if told else [])


class TestInvocations:
    def test_a_duplicate_gets_the_stored_result(self) -> None:
        ran: list[Any] = []

        def charge(event: Any, _context: Any) -> dict[str, Any]:
            ran.append(event)
            return {"charged": event["amount"], "key": current().key_for("gateway")}

        with Guard("memory:") as guard:
            handle = guarded_invocation(guard, "charge", charge, key="detail.id")
            event = {"detail": {"id": "pay-1"}, "amount": 4200}
            first, second = handle(event, Context()), handle(event, Context())

        assert first == second
        assert first["charged"] == 4200
        assert len(ran) == 1

    def test_the_key_may_be_in_the_client_context_or_what_a_function_says(self) -> None:
        ran = Handler("ok")
        with Guard("memory:") as guard:
            named = guarded_invocation(guard, "a", lambda event, context: ran(event), key=client_context("id"))
            asked = guarded_invocation(guard, "b", lambda event, context: ran(event), key=lambda event, _: event[0])
            for _ in range(2):
                assert named({}, Context(id="pay-1")) == "ok"
                assert asked(["pay-1"], Context()) == "ok"
            with pytest.raises(MissingKey, match="the event has no key"):
                named({}, Context())

        assert ran.starts == 2

    @pytest.mark.parametrize("event", [{}, {"id": None}, {"id": {}}, [], "text", {"id": ""}, {"id": True}])
    def test_an_event_without_a_usable_key_runs_nothing(self, event: Any) -> None:
        ran = Handler("ok")
        with Guard("memory:") as guard:
            handle = guarded_invocation(guard, "charge", lambda event, context: ran(event), key="id")
            with pytest.raises(MissingKey):
                handle(event, Context())
            unguarded = guarded_invocation(guard, "c", lambda event, _: ran(event), key="id", missing_key="run")
            if not event or event == "text":
                assert unguarded(event, Context()) == "ok"

        assert ran.starts == (1 if not event or event == "text" else 0)

    def test_another_payload_under_the_key_is_refused_if_it_is_compared(self) -> None:
        with Guard("memory:") as guard:
            options: Any = {"key": "id", "payload": lambda event: event["amount"]}
            handle = guarded_invocation(guard, "charge", lambda event, context: event["amount"], **options)
            assert handle({"id": "pay-1", "amount": 1}, Context()) == 1
            assert handle({"id": "pay-1", "amount": 1, "trace": "t"}, Context()) == 1
            with pytest.raises(KeyReused):
                handle({"id": "pay-1", "amount": 2}, Context())

    def test_errors_are_raised_as_they_are(self) -> None:
        store = ProxyStore()
        with Guard(store) as guard:
            handle = guarded_invocation(guard, "charge", lambda event, context: 1 // event["by"], key="id")
            with pytest.raises(ZeroDivisionError):
                handle({"id": "pay-1", "by": 0}, Context())
            assert handle({"id": "pay-1", "by": 1}, Context()) == 1
            store.down = {"claim"}
            with pytest.raises(StoreUnavailable):
                handle({"id": "pay-2", "by": 1}, Context())

    def test_a_running_one_is_told_at_once(self) -> None:
        entered, go_on = threading.Event(), threading.Event()

        def charge(event: Any, _context: Any) -> str:
            entered.set()
            assert go_on.wait(PATIENCE)
            return "ok"

        with Guard("memory:") as guard:
            handle = guarded_invocation(guard, "charge", charge, key="id")
            running = threading.Thread(target=handle, args=({"id": "a"}, None))
            running.start()
            assert entered.wait(PATIENCE)
            with pytest.raises(InProgress):
                handle({"id": "a"}, Context())
            go_on.set()
            running.join()
            assert handle({"id": "a"}, Context()) == "ok"

    @pytest.mark.more
    def test_a_handler_that_is_too_slow_is_held(self) -> None:
        with Guard("memory:") as guard:
            options: Any = {"key": "id", "after_crash": "hold", "margin": 0.5}
            handle = guarded_invocation(guard, "charge", lambda e, c: threading.Event().wait(PATIENCE), **options)
            with pytest.raises((OutcomeUnknown, Held)):
                handle({"id": "pay-1"}, Context(SHORTLY))
            with pytest.raises(Held):
                handle({"id": "pay-1"}, Context())

    def test_a_handler_with_tx_commits_with_its_record(self, path: Path) -> None:
        def credit(event: Any, _context: Any, *, tx: Any) -> str:
            add(tx, event["amount"])
            return "credited"

        with Guard(f"sqlite:///{path}") as guard:
            handle = guarded_invocation(guard, "charge", credit, key="id")
            answers = [handle({"id": "pay-1", "amount": 10}, Context()) for _ in range(2)]

        assert (answers, balance(path)) == (["credited"] * 2, 10)


def invoke(stage: Stage, store: str, effects: Path, lease: float) -> None:
    """A function that is killed at its time limit, or frozen between two invocations."""

    def charge(delivery: Any) -> None:
        with effects.open("a") as file:
            file.write(f"{delivery.headers['idempotency-key']} {current().key_for('gateway')}\n")
        stage.at("after the effect")

    with Guard(store) as guard:
        handle = guarded_messages(guard, "charge", charge, key=header(), lease=lease)
        stage.tell(handle({"Records": [record(1, "a")]}, Context()))
        stage.at("between two")
        stage.tell(handle({"Records": [record(1, "a"), record(2, "b")]}, Context()))


class TestLostFunctions:
    def test_a_function_that_is_killed_at_its_limit_is_run_again_with_the_same_key(self, tmp_path: Path) -> None:
        """After its lease: the claim of a killed one is nobody's before."""
        store, effects = f"sqlite:///{tmp_path}/records.db", tmp_path / "effects"
        ran: list[str] = []

        def charge(delivery: Any) -> None:
            ran.append(current().key_for("gateway"))

        with child(invoke, store, effects, 1.0, stops=("after the effect",)) as killed:
            killed.reaches("after the effect")
            killed.kill()
        with Guard(store) as guard:
            handle = guarded_messages(guard, "charge", charge, key=header(), lease=1.0)
            assert eventually(lambda: undone(handle({"Records": [record(1, "a")]}, Context())) == [])

        assert effects.read_text().split() == ["a", *ran]

    @pytest.mark.more
    def test_a_function_that_is_frozen_between_two_invocations_loses_and_doubles_nothing(self, tmp_path: Path) -> None:
        """For longer than its lease, heartbeat and all."""
        store, effects = f"sqlite:///{tmp_path}/records.db", tmp_path / "effects"

        with child(invoke, store, effects, 0.5, stops=("between two",)) as frozen:
            assert undone(frozen.hear()) == []
            frozen.reaches("between two")
            frozen.signal(signal.SIGSTOP)
            time.sleep(1.5)
            frozen.signal(signal.SIGCONT)
            frozen.go_on()
            assert undone(frozen.hear()) == []

        assert [line.split()[0] for line in effects.read_text().splitlines()] == ["a", "b"]
