"""Redis Streams: what becomes of an entry, sync and async, on a real Valkey and a real Redis."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, OutcomeUnknown, StoreUnavailable, UsageError
from onefold.events import Event, subscribe
from onefold.events import Kind as EventKind
from onefold.queues._redis_streams import consumer as stream_rules
from onefold.queues._redis_streams import jobs as stream_jobs
from onefold.queues._redis_streams import loop as stream_loop
from onefold.queues._redis_streams.consumer import Delivery
from onefold.queues._redis_streams.jobs import Job, Jobs
from onefold.queues._shared import verdict as shared_verdict
from onefold.queues._shared.verdict import Later
from onefold.queues.keys import body, field, header
from onefold.queues.redis_streams import guarded
from tests.queues.redis_streams_tools import (
    FEW_SIDES,
    GROUP,
    Environment,
    Handled,
    Kind,
    Worker,
    client_of,
    on_both,
    until,
)
from tests.support import PATIENCE, Died, ProxyStore
from tests.wallet import add, balance


@pytest.fixture(params=FEW_SIDES, ids="-".join)
def side(request: pytest.FixtureRequest) -> tuple[Kind, str]:
    chosen: tuple[Kind, str] = request.param
    return chosen


@pytest.fixture
def kind(side: tuple[Kind, str]) -> Kind:
    return side[0]


@pytest.fixture
def environment(side: tuple[Kind, str], request: pytest.FixtureRequest) -> Environment:
    return Environment(request.getfixturevalue(side[1]))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that is under way is waited for by a stop."""
    monkeypatch.setattr(stream_loop, "FETCH_SECONDS", 0.05)
    monkeypatch.setattr("onefold.queues.redis_streams.FETCH_SECONDS", 0.05)


@pytest.fixture
def shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed, has to wait, or was refused as a dead letter, comes again in no time."""
    monkeypatch.setattr(stream_rules, "FAILED_DELAY", 0.01)
    monkeypatch.setattr(stream_rules, "DEAD_LETTER_DELAY", 0.05)
    monkeypatch.setattr(shared_verdict, "SOON", 0.05)
    monkeypatch.setattr(stream_loop, "SOON", 0.05)
    monkeypatch.setattr("onefold.queues.redis_streams.SOON", 0.05)


class TestVerdicts:
    @on_both
    def test_a_duplicate_of_a_finished_message_is_acknowledged_and_not_run(
        self, kind: Kind, environment: Environment
    ) -> None:
        handle = Handled()
        environment.send_keyed("pay-1", times=3)

        with Worker(kind, environment, "memory:", handle):
            environment.settled()
            environment.send_keyed("pay-1")
            environment.send_keyed("pay-2")
            environment.settled()

        assert len(handle.calls) == 2
        assert environment.letters() == []

    @on_both
    def test_a_handler_sees_the_entry_whatever_the_client_decodes(self, kind: Kind, environment: Environment) -> None:
        handle = Handled()
        (entry_id,) = environment.send(b"\xff\x00", Idempotency_Key="ключ", amount=4200)

        with Worker(kind, environment, "memory:", handle, client={"decode_responses": True, "protocol": 3}) as worker:
            environment.settled()
            assert worker.errors == []

        (seen,) = handle.calls
        assert seen.body == b"\xff\x00"
        assert seen.headers == {"Idempotency-Key": "ключ".encode(), "amount": b"4200"}
        assert (seen.stream, seen.entry_id, seen.times_delivered) == ("charges", entry_id.decode(), 1)
        assert seen.native[b"amount"] == b"4200"

    @pytest.mark.parametrize(
        ("key", "options", "fields"),
        [
            (field("id"), {}, {"body": b'{"id": "a"}'}),
            (field("id"), {"body_field": "json"}, {"json": b'{"id": "a"}'}),
            (header("order_id"), {}, {"order_id": "7", "amount": "4200"}),
        ],
    )
    def test_the_key_may_be_any_field_or_one_of_the_body(
        self, key: Any, options: dict[str, Any], fields: dict[str, Any], valkey_url: str
    ) -> None:
        handle, environment = Handled(), Environment(valkey_url)
        with environment.server as server:
            for _ in range(2):
                server.xadd("charges", fields)

        with Worker("sync", environment, "memory:", handle, key=key, **options):
            environment.settled()

        assert len(handle.calls) == 1

    @on_both
    def test_a_duplicate_of_a_running_message_waits_in_hand_and_is_never_acknowledged(
        self, kind: Kind, shortly: None, environment: Environment
    ) -> None:
        handle = Handled()
        handle.gate = threading.Event()

        with Worker(kind, environment, "memory:", handle, concurrency=2, wait=0, lease=1) as worker:
            environment.send_keyed("pay-1")
            until(lambda: handle.calls, "it runs")
            environment.send_keyed("pay-1")
            until(lambda: worker.jobs.waiting, "the other one waits")
            assert [one["times_delivered"] for one in environment.pending()] == [1, 1]
            handle.gate.set()
            environment.settled()

        assert len(handle.calls) == 1
        assert environment.letters() == []

    @on_both
    def test_a_handler_that_fails_is_run_again_until_it_succeeds(
        self, kind: Kind, shortly: None, environment: Environment, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled(failures=2)
        environment.send_keyed("pay-1")

        with Worker(kind, environment, "memory:", handle):
            environment.settled()

        assert [one.times_delivered for one in handle.calls] == [1, 2, 3]
        assert environment.letters() == []
        told = [line for line in caplog.messages if "failed" in line]
        assert [line.partition(" failed: ")[0][-9:] for line in told] == ["attempt 1", "attempt 2"]
        assert all("ValueError at redis_streams_tools.py" in line and "4200" not in line for line in told)

    @on_both
    def test_a_handler_that_always_fails_sends_its_entry_to_the_dead_letters(
        self, kind: Kind, shortly: None, environment: Environment
    ) -> None:
        handle, heard = Handled(failures=99), list[Event]()
        end = subscribe(heard.append)
        (entry_id,) = environment.send(b"\xff4200", idempotency_key="pay-1", x_trace="t")

        with Worker(kind, environment, "memory:", handle, attempts=3) as worker:
            letter = environment.letter()
            environment.settled()
            digest = worker.guard.address("charge", "pay-1").digest
        end()

        assert len(handle.calls) == 3
        assert letter.pop(b"x-onefold-reason").startswith(b"it failed 3 times, the last time with ValueError at redis_")
        assert letter == {
            b"body": b"\xff4200",
            b"idempotency-key": b"pay-1",
            b"x-trace": b"t",
            b"x-onefold-digest": digest.encode(),
            b"x-onefold-operation": b"charge",
            b"x-onefold-stream": b"charges",
            b"x-onefold-group": GROUP.encode(),
            b"x-onefold-entry-id": entry_id,
        }
        assert [one.kind for one in heard if one.kind == EventKind.BURIED] == [EventKind.BURIED]

    @pytest.mark.parametrize(
        ("headers", "sent", "options", "reason"),
        [
            ({}, b"{}", {}, b"it has no key"),
            ({"idempotency_key": b"\xff"}, b"{}", {}, b"the header idempotency-key is not text"),
            ({"idempotency_key": "k" * 5000}, b"{}", {}, b"the key has 5000 characters, and the limit is"),
            ({}, b"no JSON", {"key": field("id")}, b"the body is not JSON, and the key is its field id"),
            ({"idempotency_key": "a", "Idempotency_Key": "b"}, b"{}", {}, b"comes in several spellings with different"),
        ],
    )
    def test_an_entry_without_a_usable_key_is_a_dead_letter(
        self, headers: Any, sent: bytes, options: Any, reason: bytes, valkey_url: str
    ) -> None:
        handle, environment = Handled(), Environment(valkey_url)
        environment.send(sent, **headers)

        with Worker("sync", environment, "memory:", handle, **options):
            letter = environment.letter()
            environment.settled()

        assert reason in letter[b"x-onefold-reason"]
        assert b"x-onefold-digest" not in letter
        assert handle.calls == []

    @on_both
    def test_missing_key_run_runs_it_unguarded_and_acknowledges_it_at_once(
        self, kind: Kind, environment: Environment
    ) -> None:
        handle, pending = Handled(), list[int]()
        environment.send(times=2)
        environment.send_keyed("pay-1", times=2)

        def looking(delivery: Delivery) -> None:
            pending.append(len(environment.pending()))
            handle(delivery)

        with Worker(kind, environment, "memory:", looking, missing_key="run"):
            environment.settled()

        assert len(handle.calls) == 3
        assert pending == [4, 3, 2]

    def test_a_used_key_with_another_body_is_a_dead_letter(self, kind: Kind, environment: Environment) -> None:
        handle = Handled()
        for sent in (b"1", b"1", b"2"):
            environment.send_keyed("pay-1", sent)

        with Worker(kind, environment, "memory:", handle, payload=body()):
            letter = environment.letter()
            environment.settled()

        assert letter[b"body"] == b"2"
        assert letter[b"x-onefold-reason"].startswith(b"KeyReused: ")
        assert handle.bodies == [b"1"]

    def test_a_worker_that_cannot_work_buries_nothing(
        self, environment: Environment, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled()

        with Worker("sync", environment, "memory:", handle) as worker:
            until(lambda: worker.has_begun, "it consumes")
            worker.guard.close()
            environment.send_keyed("pay-1")
            until(lambda: worker.jobs.waiting, "it waits")
            (pending,) = environment.pending()

        assert pending["times_delivered"] == 1
        assert environment.letters() == []
        assert handle.calls == []
        (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "again in 60 s: " in told.getMessage()

    def test_what_waits_for_the_store_is_not_counted(self, shortly: None, environment: Environment) -> None:
        handle, store = Handled(failures=1), ProxyStore()
        store.down = {"claim"}
        environment.send_keyed("pay-1")

        with Worker("sync", environment, store, handle, attempts=2):
            until(lambda: store.calls["claim"] >= 3, "the store is asked again and again")
            store.down = set()
            environment.settled()

        assert [one.times_delivered for one in handle.calls] == [1, 2]
        assert environment.letters() == []

    @on_both
    def test_a_handler_with_tx_commits_with_its_record(self, kind: Kind, environment: Environment, path: Path) -> None:
        def credit(delivery: Delivery, *, tx: Any) -> None:
            add(tx, int(delivery.body))

        environment.send_keyed("pay-1", b"10", times=3)
        environment.send_keyed("pay-2", b"5", times=2)

        with Worker(kind, environment, f"sqlite:///{path}", credit, concurrency=3):
            environment.settled()

        assert balance(path) == 15

    def test_a_handler_that_raises_what_is_no_exception_does_not_end_the_worker(
        self, kind: Kind, shortly: None, environment: Environment
    ) -> None:
        ran: list[bytes] = []

        def handle(delivery: Delivery) -> None:
            ran.append(delivery.body)
            if delivery.body == b"1":
                raise Died

        environment.send_keyed("pay-1", b"1")
        environment.send_keyed("pay-2", b"2")

        with Worker(kind, environment, "memory:", handle) as worker:
            until(lambda: b"2" in ran and worker.jobs.waiting, "the other one runs")

        assert environment.letters() == []
        assert len(environment.pending()) == 1

    def test_a_sync_handler_in_which_something_was_cancelled_does_not_end_the_worker(
        self, shortly: None, valkey_url: str
    ) -> None:
        """As `asyncio.run` in a handler raises it: nobody has cancelled this worker."""
        environment, handle = Environment(valkey_url), Handled(failures=1, error=asyncio.CancelledError)
        environment.send_keyed("pay-1")
        environment.send_keyed("pay-2")

        with Worker("sync", environment, "memory:", handle):
            environment.settled()

        assert len(handle.calls) == 3

    def test_an_async_handler_that_cancels_its_own_task_does_not_end_the_worker(
        self, shortly: None, valkey_url: str
    ) -> None:
        environment, ran = Environment(valkey_url), list[bytes]()
        environment.send_keyed("pay-1", b"1")
        environment.send_keyed("pay-2", b"2")

        async def cancels(delivery: Delivery) -> None:
            ran.append(delivery.body)
            if len(ran) == 1:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)

        with Worker("async", environment, "memory:", cancels):
            environment.settled()

        assert sorted(ran) == [b"1", b"1", b"2"]

    def test_an_unknown_outcome_is_held_and_comes_again(
        self, kind: Kind, shortly: None, environment: Environment
    ) -> None:
        handle = Handled(failures=1, error=OutcomeUnknown)
        environment.send_keyed("pay-1", times=2)

        with Worker(kind, environment, "memory:", handle, after_crash="hold") as worker:
            until(lambda: [job.times_held for job in worker.jobs.waiting] == [1, 1], "both are held")

        assert len(handle.calls) == 1
        assert environment.letters() == []

    @on_both
    def test_one_at_a_time_they_run_in_the_streams_order_and_otherwise_at_once(
        self, kind: Kind, environment: Environment
    ) -> None:
        together = threading.Barrier(4, timeout=PATIENCE)
        first, second = Handled(), list[bytes]()

        def meet(delivery: Delivery) -> None:
            together.wait()
            second.append(delivery.body)

        with Worker(kind, environment, "memory:", first):
            for number in range(20):
                environment.send_keyed(f"pay-{number}", b"%d" % number)
            environment.settled()
        with Worker(kind, environment, "memory:", meet, concurrency=4):
            for number in range(20, 40):
                environment.send_keyed(f"pay-{number}", b"%d" % number)
            environment.settled()

        assert first.bodies == [b"%d" % number for number in range(20)]
        assert sorted(second) == [b"%d" % number for number in range(20, 40)]

    def test_a_worker_takes_no_more_than_its_batch(
        self, kind: Kind, environment: Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handle, rooms, room = Handled(), list[int](), Jobs.room
        handle.gate = threading.Event()
        for number in range(10):
            environment.send_keyed(f"pay-{number}")

        def counted(jobs: Jobs, batch: int) -> int:
            rooms.append(room(jobs, batch))
            return rooms[-1]

        monkeypatch.setattr(Jobs, "room", counted)

        with Worker(kind, environment, "memory:", handle, batch=2, concurrency=3):
            until(lambda: len(handle.calls) == 2, "they run")
            # A third could run.
            until(lambda: rooms[-3:] == [0, 0, 0], "the worker has looked for room again and again")
            assert len(environment.pending()) == len(handle.calls) == 2
            handle.gate.set()
            environment.settled()

        assert len(handle.calls) == 10


class TestRules:
    def after(self, verdict: Any, times_delivered: int = 1, age: float = 0.0) -> Any:
        rules = stream_rules.Rules("charge", "charges", "workers", "dead")
        return rules.after(verdict, rules.delivery(b"1-0", {}, times_delivered), age)

    @pytest.mark.parametrize(("age", "delay"), [(0.0, 1), (3.0, 3), (30.0, 30), (600.0, 60)])
    def test_a_store_that_is_down_is_asked_less_and_less_often(self, age: float, delay: float) -> None:
        assert self.after(Later(1.0, "down", error=StoreUnavailable("down")), age=age)[:2] == ("again", delay)

    @pytest.mark.parametrize(("attempt", "delay"), [(1, 1), (2, 2), (4, 8)])
    def test_a_failed_attempt_is_counted_and_waits_twice_as_long_each_time(self, attempt: int, delay: float) -> None:
        step = self.after(shared_verdict.HandlerRaised(ValueError()), attempt)

        assert (step.action, step.delay, step.is_counted) == ("again", delay, True)
        assert self.after(shared_verdict.HandlerRaised(ValueError()), 5).action == "bury"

    def test_a_dead_letter_of_an_entry_with_too_many_fields_names_those_that_it_lost(self) -> None:
        rules = stream_rules.Rules("charge", "charges", "workers", "dead")
        fields = {b"%d" % number: b"" for number in range(stream_rules.FIELDS_MAX + 2)}

        dead = rules.dead(rules.delivery(b"1-0", fields), "because")

        assert dead[dead.index(b"x-onefold-dropped-headers") + 1] == "3000, 3001"
        assert len(dead) < 7_000

    def test_an_entry_that_says_that_it_is_a_dead_letter_does_not_say_so_twice(self) -> None:
        rules = stream_rules.Rules("charge", "charges", "workers", "dead")

        dead = rules.dead(rules.delivery(b"1-0", {b"x-onefold-reason": b"before", b"a": b"b"}), "because")

        assert dead.count(b"x-onefold-reason") == 1
        assert dead[:4] == [b"a", b"b", b"x-onefold-reason", "because"]


class TestJobs:
    def job(self, number: int) -> Job:
        rules = stream_rules.Rules("charge", "charges", "workers", "dead")
        entry_id = b"%d-0" % number
        return Job(entry_id, rules.delivery(entry_id, {}), now=0.0)

    def test_what_waits_leaves_room_for_others_but_not_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stream_jobs, "WAITING_MAX", 3)
        jobs, rooms = Jobs(), list[int]()

        for number in range(3):
            jobs.add(self.job(number))
            job = jobs.next(0.0)
            assert job is not None
            rooms.append(jobs.room(10))
            jobs.wait(job, stream_rules.Step("again", 60.0), 0.0)
            rooms.append(jobs.room(10))

        assert rooms == [9, 10, 9, 10, 9, 0]
        assert jobs.due_in(50.0) == 10.0
        assert jobs.next(59.0) is None
        first = jobs.next(60.0)
        assert first is not None
        assert (first.id, jobs.room(10)) == (b"0-0", 9)

    def test_an_entry_that_comes_again_is_taken_only_if_its_claim_is_lost(self) -> None:
        jobs, first, again = Jobs(), self.job(1), self.job(1)
        jobs.add(first)
        assert jobs.next(0.0) is first

        jobs.add(again)
        assert jobs.next(0.0) is None
        first.claim = SimpleNamespace(lost=True)  # type: ignore[assignment]
        jobs.add(again)
        assert jobs.next(0.0) is again
        # What the first one ends in is not lost, if it is done.
        assert not jobs.is_ours(first)
        assert (jobs.done(first), jobs.unacknowledged) == (1, [b"1-0"])
        assert jobs.is_ours(again)

    def test_an_entry_that_is_done_does_not_come_again_before_it_is_acknowledged(self) -> None:
        jobs, job = Jobs(), self.job(1)
        jobs.add(job)
        jobs.done(job)

        jobs.add(self.job(1))
        assert len(jobs) == 0
        jobs.acknowledged([job.id])
        jobs.add(self.job(1))
        assert len(jobs) == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"dead_letter": ""}, "the key of a stream for dead letters"),
        ({"dead_letter": "charges"}, "is the stream itself"),
        ({"stream": None}, "the key of a stream"),
        ({"group": b"g"}, "the name of a consumer group"),
        ({"start": 0}, "the id of an entry"),
        ({"body_field": ""}, "the name of a field"),
        ({"attempts": 0}, "attempts"),
        ({"concurrency": 0}, "concurrency"),
        ({"min_idle": "soon"}, "min_idle"),
        ({"min_idle": 0.01}, "0.1 s or more"),
        ({"min_idle": "forever"}, "to have an end"),
        ({"key": header}, r"write key=header\("),
    ],
)
def test_wrong_options_are_refused_before_the_first_entry(wrong: dict[str, Any], says: str) -> None:
    right: dict[str, Any] = {"key": header(), "stream": "charges", "group": "g", "dead_letter": "dead"}

    with pytest.raises(UsageError, match=says):
        guarded(Guard("memory:"), "charge", Handled(), **right | wrong)


def test_a_client_of_the_wrong_kind_is_refused(valkey_url: str) -> None:
    right: dict[str, Any] = {"key": header(), "stream": "charges", "group": "g", "dead_letter": "dead"}
    worker = guarded(Guard("memory:"), "charge", Handled(), **right)

    with client_of(valkey_url) as client:
        with pytest.raises(UsageError, match=r"takes a client of redis-py, redis.Redis or redis.RedisCluster"):
            worker.consume(client.pipeline())
        with pytest.raises(UsageError, match="not NoneType"):
            worker.consume(None)
        with pytest.raises(UsageError, match="consumer=''"):
            worker.consume(client, consumer="")
        with pytest.raises(UsageError, match="batch"):
            worker.consume(client, batch=0)
    with pytest.raises(UsageError, match="its work would be lost"):
        guarded(AsyncGuard("memory:"), "charge", Handled(), **right)
