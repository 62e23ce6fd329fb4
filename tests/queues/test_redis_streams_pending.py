"""Redis Streams: entries that a worker keeps, that others take over, and that it gives back; groups, and clusters."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import ResponseError

from onefold import AsyncGuard, Guard, current
from onefold.queues._redis_streams import consumer as stream_rules
from onefold.queues._redis_streams import loop as stream_loop
from onefold.queues._redis_streams.consumer import Delivery
from onefold.queues._redis_streams.requests import Requests
from onefold.queues._shared import verdict as shared_verdict
from onefold.queues.keys import header
from onefold.queues.redis_streams import guarded, send, send_async
from tests.queues.redis_streams_tools import (
    FEW_SIDES,
    GROUP,
    KINDS,
    Environment,
    Handled,
    Kind,
    Worker,
    as_redis,
    client_of,
    on_both,
    until,
)
from tests.support import PATIENCE, AsyncProxyStore, ProxyStore, in_time

# Short enough to wait for three times, and long enough for the signs of a busy machine.
MIN_IDLE = 1.0
# For entries that nobody keeps.
SHORT_IDLE = 0.1


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
    """A read that is under way is waited for by a stop; what waits comes again in no time."""
    monkeypatch.setattr(stream_loop, "FETCH_SECONDS", 0.05)
    monkeypatch.setattr("onefold.queues.redis_streams.FETCH_SECONDS", 0.05)
    monkeypatch.setattr(stream_rules, "FAILED_DELAY", 0.01)
    monkeypatch.setattr(stream_rules, "DEAD_LETTER_DELAY", 0.05)
    monkeypatch.setattr(shared_verdict, "SOON", 0.05)
    monkeypatch.setattr(stream_loop, "SOON", 0.05)


def read_by_another(environment: Environment, consumer: str = "dead", count: int = 10) -> list[bytes]:
    """Somebody has read so many entries, and does nothing with them."""
    with environment.server as server:
        with suppress(ResponseError):
            server.xgroup_create(environment.stream, GROUP, "0")
        found = server.xreadgroup(GROUP, consumer, {environment.stream: ">"}, count=count)
    entries = found[0][1] if isinstance(found, list) else found[environment.stream.encode()]
    return [entry_id for entry_id, _ in entries]


@pytest.fixture
def requests(environment: Environment) -> Iterator[Requests]:
    rules = stream_rules.Rules("charge", environment.stream, GROUP, environment.dead)
    with client_of(environment.url) as client:
        yield Requests(client, rules, "me")


@pytest.fixture
def beaten(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often the server has heard of an entry."""
    heard: Counter[bytes] = Counter()
    keep = Requests.keep

    def counted(requests: Requests, ids: Iterable[bytes], *, is_counted: bool = False) -> Any:
        known = [*ids]
        heard.update(known)
        return keep(requests, known, is_counted=is_counted)

    monkeypatch.setattr(Requests, "keep", counted)
    return heard


class TestServers:
    """What the scripts rely on, on both servers."""

    @on_both
    def test_keeping_resets_the_idle_time_and_counts_only_what_it_is_told_to(
        self, environment: Environment, requests: Requests
    ) -> None:
        environment.send(times=2)
        mine, other = read_by_another(environment, "me", 1) + read_by_another(environment, "other", 1)
        until(lambda: environment.pending()[0]["time_since_delivered"] >= 50, "it is idle")

        # What nobody has, and is not in the stream, may have been deleted in its hands: the answer may have been lost.
        assert requests.keep([mine, other, b"1-1"])() == [1, 0, -1]
        kept, untouched = environment.pending()
        assert (kept["time_since_delivered"] < untouched["time_since_delivered"], kept["times_delivered"]) == (True, 1)
        assert (untouched["consumer"], untouched["times_delivered"]) == (b"other", 1)

        assert requests.keep([mine], is_counted=True)() == [2]
        with environment.server as server:
            server.xdel(environment.stream, mine)
            server.xack(environment.stream, GROUP, other)
        assert requests.keep([mine, mine, other])() == [-1, -1, 0]

    @on_both
    def test_what_is_given_back_is_idle_and_not_counted(self, environment: Environment, requests: Requests) -> None:
        environment.send(times=3)
        first, second = read_by_another(environment, "me", 2)
        (other,) = read_by_another(environment, "other", 1)

        requests.give_back([(first, 30.0, 1), (second, 20.0, 0), (other, 30.0, 1)])()

        found = environment.pending()
        assert [one["times_delivered"] for one in found] == [0, 1, 1]
        assert [one["time_since_delivered"] // 10_000 for one in found] == [3, 2, 0]
        assert [one["consumer"] for one in found] == [b"me", b"me", b"other"]

    @on_both
    def test_a_dead_letter_is_written_once_however_often_it_is_asked_for(
        self, environment: Environment, requests: Requests
    ) -> None:
        environment.send(times=3)
        mine, deleted = read_by_another(environment, "me", 2)
        (other,) = read_by_another(environment, "other", 1)
        with environment.server as server:
            server.xdel(environment.stream, deleted)

        assert [requests.bury(one, [b"a", b"b"])() for one in (mine, mine, other)] == [1, 0, 0]
        assert len(environment.letters()) == 1
        # It is in no stream any more: this is all that is left of it.
        assert requests.bury(deleted, [b"a", b"b"])() == 1
        assert [one["consumer"] for one in environment.pending()] == [b"other"]

    def test_a_dead_letter_that_cannot_be_written_leaves_its_entry_as_it_was(
        self, environment: Environment, requests: Requests
    ) -> None:
        environment.send()
        (mine,) = read_by_another(environment, "me")
        with environment.server as server:
            server.set(environment.dead, "no stream")

        with pytest.raises(ResponseError, match="WRONGTYPE"):
            requests.bury(mine, [b"a", b"b"])()

        assert len(environment.pending()) == 1

    def test_a_consumer_that_has_something_is_not_deleted(self, environment: Environment, requests: Requests) -> None:
        environment.send()
        (mine,) = read_by_another(environment, "me")

        requests.leave()()
        assert environment.consumers() == [b"me"]

        requests.ack([mine])()
        requests.leave()()
        assert environment.consumers() == []


class TestKeeping:
    """An entry that this worker has is not delivered to another one."""

    def test_a_handler_that_takes_three_times_the_idle_time_is_not_run_twice(
        self, kind: Kind, beaten: Counter[bytes], environment: Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor are entries taken over that wait for their turn, or for their next attempt."""
        monkeypatch.setattr(stream_rules, "FAILED_DELAY", 600.0)
        handle, other = Handled(failures=1), Handled()
        handle.gate = threading.Event()
        ids = [environment.send_keyed(f"pay-{number}")[0] for number in range(3)]

        with Worker(kind, environment, "memory:", handle, min_idle=MIN_IDLE):
            until(lambda: len(handle.calls) == 2, "one has failed, one runs, and one waits for its turn")
            with Worker(kind, environment, "memory:", other, min_idle=MIN_IDLE) as another:
                until(lambda: all(beaten[one] >= 3 * stream_loop.BEATS for one in ids), "they are kept")
                assert another.errors == []
                assert [one["times_delivered"] for one in environment.pending()] == [1, 1, 1]
                assert other.calls == []
            handle.gate.set()
            until(lambda: len(environment.pending()) == 1, "the others are done")

        assert {one.times_delivered for one in handle.calls} == {1}
        assert len(handle.calls) == 3

    def test_a_worker_whose_entries_nobody_keeps_any_more_ends(
        self, kind: Kind, environment: Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A bug of ours, which others would not notice before their entries run twice."""

        def broken(_loop: stream_loop.Loop) -> Any:
            raise TypeError("a bug")

        monkeypatch.setattr(stream_loop.Loop, "_beat", broken)

        with Worker(kind, environment, "memory:", Handled(), min_idle=0.1, fails=True) as worker:
            worker.join()

        assert [str(error) for error in worker.errors] == ["a bug"]

    def test_an_entry_whose_claim_is_lost_is_not_kept_from_others(self, kind: Kind, environment: Environment) -> None:
        store: Any = ProxyStore() if kind == "sync" else AsyncProxyStore()
        ran, second = list[int](), threading.Event()

        def handle(delivery: Delivery) -> None:
            ran.append(delivery.times_delivered)
            if len(ran) > 1:
                store.down = set()
                second.set()
                return
            store.down = {"extend"}
            until(lambda: current().lost, "the claim is lost")
            assert second.wait(PATIENCE)

        environment.send_keyed("pay-1")

        with Worker(kind, environment, store, handle, concurrency=2, lease=0.5, min_idle=0.6):
            environment.settled()

        assert ran == [1, 2]
        assert environment.letters() == []


class TestTakingOver:
    @on_both
    def test_an_entry_of_a_dead_worker_is_claimed_and_counted(self, kind: Kind, environment: Environment) -> None:
        handle = Handled()
        environment.send_keyed("pay-1", times=2)
        environment.send_keyed("pay-2")
        read_by_another(environment)

        with Worker(kind, environment, "memory:", handle, min_idle=SHORT_IDLE):
            environment.settled()

        assert [one.times_delivered for one in handle.calls] == [2, 2]

    @on_both
    def test_own_entries_of_the_time_before_are_taken_at_once(self, kind: Kind, environment: Environment) -> None:
        """A worker that died, and is started again under its name, does not wait for the idle time."""
        handle = Handled()
        for number in range(25):
            environment.send_keyed(f"pay-{number}")
        read_by_another(environment, "worker-1", 25)

        with Worker(kind, environment, "memory:", handle, consumer="worker-1", min_idle="1h"):
            environment.settled()

        assert len(handle.calls) == 25
        assert {one.times_delivered for one in handle.calls} == {2}
        assert environment.consumers() == [b"worker-1"]

    def test_many_entries_are_found_among_those_that_others_keep(self, environment: Environment) -> None:
        """A scan looks at a part of the pending entries at a time."""
        handle = Handled()
        for number in range(60):
            environment.send_keyed(f"pay-{number}")
        ids = read_by_another(environment, "dead", 60)
        with environment.server as server:
            server.xclaim(environment.stream, GROUP, "other", 0, ids[:50], idle=0, justid=True)
            server.xclaim(environment.stream, GROUP, "dead", 0, ids[50:], idle=7_200_000, justid=True)

        with Worker("sync", environment, "memory:", handle, min_idle="1h", batch=2):
            until(lambda: len(handle.calls) == 10, "all are found")
            until(lambda: len(environment.pending()) == 50, "they are settled")

        assert {one["consumer"] for one in environment.pending()} == {b"other"}

    def test_a_scan_does_not_wait_for_new_entries_between_its_steps(
        self, environment: Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reads, before, read = list[float](), list[int](), Requests.read
        for number in range(101):
            environment.send_keyed(f"pay-{number}")
        ids = read_by_another(environment, "other", 101)
        with environment.server as server:
            server.xclaim(environment.stream, GROUP, "dead", 0, ids[100:], idle=7_200_000, justid=True)

        def counted(requests: Requests, count: int, block: float) -> Any:
            reads.append(block)
            return read(requests, count, block)

        monkeypatch.setattr(Requests, "read", counted)
        with Worker("sync", environment, "memory:", lambda _: before.append(len(reads)), min_idle="1h", batch=1):
            until(lambda: before, "it is found")

        assert before == [0]

    @on_both
    def test_entries_that_were_deleted_while_they_were_pending_are_told_and_settled(
        self, kind: Kind, environment: Environment, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled()
        for number in range(4):
            environment.send_keyed(f"pay-{number}")
        abandoned = read_by_another(environment, "dead", 2)
        own = read_by_another(environment, "worker-1", 2)
        with environment.server as server:
            server.xdel(environment.stream, abandoned[0], own[0])

        with Worker(kind, environment, "memory:", handle, consumer="worker-1", min_idle=SHORT_IDLE):
            until(lambda: environment.pending() == [], "everything is settled")

        assert sorted(one.entry_id for one in handle.calls) == sorted(one.decode() for one in (abandoned[1], own[1]))
        told = [line for line in caplog.messages if "trimmed or deleted before they were done" in line]
        assert [line.rpartition(" ")[2] for line in told] == [own[0].decode(), abandoned[0].decode()]

    def test_an_entry_that_is_deleted_in_a_workers_hands_is_handled_to_its_end(
        self, kind: Kind, environment: Environment
    ) -> None:
        handle = Handled(failures=99)

        def failing(delivery: Delivery) -> None:
            with environment.server as server:
                server.xtrim(environment.stream, maxlen=0)
            handle(delivery)

        environment.send_keyed("pay-1", b"4200")

        with Worker(kind, environment, "memory:", failing, attempts=3):
            letter = environment.letter()

        assert len(handle.calls) == 3
        assert letter[b"body"] == b"4200"

    @on_both
    def test_what_another_consumer_has_taken_is_left_to_it(self, kind: Kind, environment: Environment) -> None:
        """A worker that stood still finds that its entries are another's: it does not run, count or bury them."""
        handle = Handled(failures=99)
        environment.send_keyed("pay-1")
        environment.send_keyed("pay-2")

        def taken(delivery: Delivery) -> None:
            with environment.server as server:
                ids = [one["message_id"] for one in server.xpending_range(environment.stream, GROUP, "-", "+", 10)]
                server.xclaim(environment.stream, GROUP, "other", 0, ids, justid=True)
            handle(delivery)

        with Worker(kind, environment, "memory:", taken, attempts=1, min_idle=0.3) as worker:
            until(lambda: handle.calls, "it has failed for good")
            until(lambda: len(worker.jobs) == 0, "it has forgotten both")

        assert environment.letters() == []
        assert [(one["consumer"], one["times_delivered"]) for one in environment.pending()] == [(b"other", 1)] * 2

    def test_an_entry_that_another_has_settled_meanwhile_is_not_tried_again(
        self, kind: Kind, environment: Environment
    ) -> None:
        handle = Handled(failures=99)
        environment.send_keyed("pay-1")

        def settled(delivery: Delivery) -> None:
            with environment.server as server:
                server.xack(environment.stream, GROUP, delivery.entry_id)
            handle(delivery)

        with Worker(kind, environment, "memory:", settled) as worker:
            until(lambda: handle.calls and len(worker.jobs) == 0, "it is forgotten")

        assert len(handle.calls) == 1
        assert environment.letters() == []

    def test_a_handler_that_blocks_its_loop_is_not_run_a_second_time_and_its_late_end_counts(
        self, environment: Environment, tmp_path: Path
    ) -> None:
        """Not one sign of it reaches the server, and so another worker takes its entry over."""
        store, release, ran = f"sqlite:///{tmp_path}/records.db", threading.Event(), list[int]()
        environment.send_keyed("pay-1")

        async def blocks(delivery: Delivery) -> None:
            ran.append(delivery.times_delivered)
            assert release.wait(PATIENCE)

        def runs(delivery: Delivery) -> None:
            ran.append(delivery.times_delivered)

        with Worker("async", environment, store, blocks, min_idle=SHORT_IDLE):
            until(lambda: ran, "it runs")
            with Worker("sync", environment, store, runs, min_idle=SHORT_IDLE, wait=0) as other:
                until(lambda: other.jobs.waiting, "the other worker has it, and waits")
                release.set()
                environment.settled()

        assert ran == [1]
        assert environment.letters() == []

    def test_two_workers_of_one_name_run_each_key_once(
        self, kind: Kind, environment: Environment, tmp_path: Path
    ) -> None:
        """A mistake, because each takes the other's entries: the guard is what is left."""
        store, handle = f"sqlite:///{tmp_path}/records.db", Handled()
        for number in range(40):
            environment.send_keyed(f"pay-{number}")

        with (
            Worker(kind, environment, store, handle, consumer="same", min_idle=MIN_IDLE, wait=PATIENCE),
            Worker(kind, environment, store, handle, consumer="same", min_idle=MIN_IDLE, wait=PATIENCE),
        ):
            environment.settled()

        assert len(handle.calls) == 40


class TestGroups:
    @pytest.mark.parametrize(("start", "expected"), [("0", [b"1", b"2"]), ("$", [b"2"])])
    def test_a_new_group_starts_where_it_is_told_to(self, start: str, expected: list[bytes], valkey_url: str) -> None:
        environment, handle = Environment(valkey_url), Handled()
        environment.send_keyed("pay-1", b"1")

        with Worker("sync", environment, "memory:", handle, start=start):
            until(lambda: environment.server.xinfo_groups("charges"), "the group is there")
            environment.send_keyed("pay-2", b"2")
            environment.settled()

        assert handle.bodies == expected

    def test_a_stream_that_nobody_has_sent_to_is_waited_for(self, kind: Kind, environment: Environment) -> None:
        handle = Handled()

        with Worker(kind, environment, "memory:", handle):
            until(lambda: environment.server.exists("charges"), "the group is there, and its stream")
            environment.send_keyed("pay-1")
            environment.settled()

        assert len(handle.calls) == 1

    @on_both
    @pytest.mark.parametrize("how", ["the stream", "the group", "everything"])
    def test_a_group_that_is_deleted_under_a_worker_is_created_again_from_the_beginning(
        self, how: str, kind: Kind, environment: Environment, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled()
        environment.send_keyed("pay-1")

        with Worker(kind, environment, "memory:", handle, start="$"):
            until(lambda: environment.server.xinfo_groups("charges"), "the group is there")
            environment.send_keyed("pay-2")
            environment.settled()
            with environment.server as server:
                match how:
                    case "the stream":
                        server.delete("charges")
                    case "the group":
                        server.xgroup_destroy("charges", GROUP)
                    case "everything":
                        server.flushall()
                        server.script_flush()
            environment.send_keyed("pay-3")
            until(lambda: len(handle.calls) >= (3 if how == "the group" else 2), "the next one has run")
            environment.settled()

        assert any("the group workers is gone, and is created again" in line for line in caplog.messages)
        # Nobody had run the first: the group began after it.
        assert [one.headers["idempotency-key"] for one in handle.calls] == [
            *(b"pay-2", *([b"pay-1"] if how == "the group" else []), b"pay-3"),
        ]

    def test_a_stream_that_is_deleted_while_a_handler_runs_ends_nothing(
        self, kind: Kind, environment: Environment
    ) -> None:
        handle = Handled(failures=1)
        handle.gate = threading.Event()
        environment.send_keyed("pay-1")
        environment.send_keyed("pay-2")

        with Worker(kind, environment, "memory:", handle, min_idle=0.3, attempts=1) as worker:
            until(lambda: len(handle.calls) == 2, "one has failed, and one runs")
            environment.server.delete("charges")
            until(lambda: next(iter(worker.jobs._jobs.values())).is_taken, "the worker has noticed")
            handle.gate.set()
            environment.send_keyed("pay-3")
            until(lambda: len(handle.calls) == 3, "the next one has run")
            environment.settled()

        assert [one[b"idempotency-key"] for one in environment.letters()] == [b"pay-1"]

    def test_a_key_that_is_no_stream_ends_the_loop(self, kind: Kind, environment: Environment) -> None:
        environment.server.set("charges", "no stream")

        with Worker(kind, environment, "memory:", Handled(), fails=True) as worker:
            worker.join()

        (error,) = worker.errors
        assert "WRONGTYPE" in str(error)

    def test_two_groups_each_get_everything(self, environment: Environment) -> None:
        first, second = Handled(), Handled()
        environment.send_keyed("pay-1", times=2)

        # Two operations, and so two records: nothing is shared but the stream.
        with Guard("memory:") as guard, client_of(environment.url) as client:
            for operation, handle in (("charge", first), ("mail", second)):
                worker = guarded(
                    *(guard, operation, stopping(handle)),
                    key=header(),
                    stream="charges",
                    group=operation,
                    dead_letter="dead",
                )
                WORKERS.append(worker)
                worker.consume(client)

        assert (len(first.calls), len(second.calls)) == (1, 1)


WORKERS: list[Any] = []


def stopping(handle: Handled) -> Any:
    """The handler; its worker stops after one."""

    def handled(delivery: Delivery) -> None:
        handle(delivery)
        WORKERS.pop().stop()

    return handled


class TestDeadLetters:
    def test_a_dead_letter_that_is_refused_is_kept_and_tried_again(
        self, kind: Kind, environment: Environment, caplog: pytest.LogCaptureFixture
    ) -> None:
        def told() -> list[str]:
            return [line for line in caplog.messages if "did not accept a dead letter: ResponseError" in line]

        environment.send()
        environment.server.set(environment.dead, "no stream")

        with Worker(kind, environment, "memory:", Handled()):
            until(told, "it is refused")
            assert len(environment.pending()) == 1
            environment.server.delete(environment.dead)
            environment.letter()
            environment.settled()

    def test_an_entry_of_very_many_fields_is_buried(self, kind: Kind, environment: Environment) -> None:
        with environment.server as server:
            server.xadd("charges", {f"field-{number}": "x" for number in range(5_000)})

        with Worker(kind, environment, "memory:", Handled()):
            letter = environment.letter()
            environment.settled()

        assert letter[b"x-onefold-reason"] == b"it has no key"
        assert len([name for name in letter if name.startswith(b"field-")]) == stream_rules.FIELDS_MAX
        assert letter[b"x-onefold-dropped-headers"].startswith(b"field-3000, field-3001")

    def test_what_comes_back_from_the_dead_letters_runs_if_it_has_not_run(
        self, kind: Kind, environment: Environment
    ) -> None:
        handle = Handled(failures=1)
        environment.send_keyed("pay-1")

        with Worker(kind, environment, "memory:", handle, attempts=1):
            letter = environment.letter()
            with environment.server as server:
                for _ in range(2):
                    server.xadd("charges", letter)
            environment.settled()

        assert len(handle.calls) == 2


class TestStopping:
    @on_both
    def test_what_runs_is_settled_and_what_was_not_started_goes_to_others_uncounted(
        self, kind: Kind, environment: Environment
    ) -> None:
        handle, other = Handled(), Handled()
        handle.gate = threading.Event()
        for number in range(3):
            environment.send_keyed(f"pay-{number}")

        with Worker(kind, environment, "memory:", handle, min_idle="1h") as one:
            until(lambda: handle.calls and len(one.jobs) == 3, "it has all of them")
            one.stop()
            time.sleep(0.1)
            assert one.has_begun
            handle.gate.set()
            one.join()
        assert [each["times_delivered"] for each in environment.pending()] == [0, 0]
        with Worker(kind, environment, "memory:", other, min_idle="1h"):
            environment.settled()

        assert (len(handle.calls), len(other.calls)) == (1, 2)
        assert {each.times_delivered for each in other.calls} == {1}

    def test_what_waits_after_a_failure_goes_to_others_when_it_is_due(
        self, kind: Kind, environment: Environment
    ) -> None:
        handle = Handled(failures=1)
        environment.send_keyed("pay-1")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(stream_rules, "FAILED_DELAY", 60.0)
            with Worker(kind, environment, "memory:", handle, min_idle=600) as worker:
                until(lambda: worker.jobs.waiting, "it waits")

        (pending,) = environment.pending()
        assert pending["times_delivered"] == 1
        assert 530_000 < pending["time_since_delivered"] < 600_000

    @pytest.mark.parametrize("is_known", [True, False])
    @on_both
    def test_what_was_trimmed_in_its_hands_is_a_dead_letter_of_a_worker_that_stops(
        self, is_known: bool, kind: Kind, environment: Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has all that is left of such an entry, and cannot give it back."""
        handle = Handled(failures=99)
        for number in range(2):
            environment.send_keyed(f"pay-{number}", str(number).encode())

        def trimmed(delivery: Delivery) -> None:
            with environment.server as server:
                server.xtrim(environment.stream, maxlen=0)
            handle(delivery)

        monkeypatch.setattr(stream_rules, "FAILED_DELAY", 60.0)
        idle = SHORT_IDLE * 3 if is_known else 600
        with Worker(kind, environment, "memory:", trimmed, min_idle=idle) as worker:
            until(lambda: len(worker.jobs.waiting) == 2, "both have failed, and wait")
            if is_known:
                until(lambda: all(job.is_deleted for job in worker.jobs.waiting), "it knows that they are gone")

        assert sorted(letter[b"body"] for letter in environment.letters()) == [b"0", b"1"]
        assert {letter[b"x-onefold-reason"].decode() for letter in environment.letters()} == {stream_loop.LEFT_REASON}
        assert environment.pending() == []

    def test_what_was_trimmed_and_is_refused_as_a_dead_letter_is_told_and_the_others_go_on(
        self,
        kind: Kind,
        environment: Environment,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        # Each is given back by itself.
        monkeypatch.setattr(stream_loop, "KEPT_AT_ONCE", 1)
        monkeypatch.setattr(stream_rules, "FAILED_DELAY", 60.0)
        ids = [environment.send_keyed(f"pay-{number}")[0].decode() for number in range(3)]
        environment.server.set(environment.dead, "no stream")

        with Worker(kind, environment, "memory:", Handled(failures=99), min_idle=600) as worker:
            until(lambda: len(worker.jobs.waiting) == 3, "all have failed, and wait")
            environment.server.xdel(environment.stream, *ids[:2])

        lost = [line for line in caplog.messages if "are lost" in line]
        assert [one for one in ids if any(one in line for line in lost)] == ids[:2]
        (pending,) = environment.pending()
        assert (pending["message_id"].decode(), pending["time_since_delivered"] > 500_000) == (ids[2], True)

    def test_a_worker_leaves_no_consumer_behind(self, kind: Kind, environment: Environment) -> None:
        environment.send_keyed("pay-1")

        with Worker(kind, environment, "memory:", Handled()):
            environment.settled()
            (name,) = environment.consumers()
            assert name.startswith(b"onefold-")

        assert environment.consumers() == []

    @on_both
    def test_drain_says_whether_something_still_runs(self, kind: Kind, environment: Environment) -> None:
        handle = Handled()
        handle.gate = threading.Event()
        environment.send_keyed("pay-1")

        async def story() -> None:
            async with AsyncGuard("memory:") as guard, redis.asyncio.Redis.from_url(url) as client:

                async def handled(delivery: Delivery) -> None:
                    await asyncio.to_thread(handle, delivery)

                worker = guarded(guard, "charge", handled, **right)
                consuming = asyncio.create_task(worker.consume(client))
                await asyncio.to_thread(until, lambda: handle.calls, "it runs")
                assert not await worker.drain(within=0.01)
                gate.set()
                assert await worker.drain(within=PATIENCE)
                await consuming
                # It does not begin again.
                await worker.consume(client)

        url, gate = as_redis(environment.url), handle.gate
        right: Any = {"key": header(), "stream": "charges", "group": GROUP, "dead_letter": "charges.dead"}
        if kind == "async":
            in_time(story())
        else:
            with Worker(kind, environment, "memory:", handle) as one:
                until(lambda: handle.calls, "it runs")
                assert one.callback is not None
                assert not one.callback.drain(within=0.01)
                gate.set()
                assert one.callback.drain(within=PATIENCE)

        assert environment.is_settled()

    def test_a_consume_that_is_cancelled_cancels_its_handlers_and_leaves_their_entries_pending(
        self, valkey_url: str
    ) -> None:
        environment, ended = Environment(valkey_url), list[str]()
        environment.send_keyed("pay-1")

        async def story() -> None:
            begun = asyncio.Event()

            async def handle(_delivery: Delivery) -> None:
                begun.set()
                try:
                    await asyncio.sleep(PATIENCE)
                except asyncio.CancelledError:
                    ended.append("cancelled")
                    raise

            async with AsyncGuard("memory:") as guard, redis.asyncio.Redis.from_url(url) as client:
                worker = guarded(
                    guard, "charge", handle, key=header(), stream="charges", group=GROUP, dead_letter="dead"
                )
                consuming = asyncio.create_task(worker.consume(client))
                await begun.wait()
                consuming.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await consuming
                assert await worker.drain()

        url = valkey_url.replace("valkey:", "redis:")
        in_time(story())

        assert ended == ["cancelled"]
        assert len(environment.pending()) == 1

    def test_a_consume_that_is_cancelled_while_it_ends_leaves_nothing_behind(self, valkey_url: str) -> None:
        """It ends because its stream is none any more, and waits for a handler: then somebody loses patience."""
        environment, ended = Environment(valkey_url), list[str]()
        environment.send_keyed("pay-1")

        async def story() -> None:
            begun = asyncio.Event()

            async def handle(_delivery: Delivery) -> None:
                begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append("cancelled")

            async with AsyncGuard("memory:") as guard, redis.asyncio.Redis.from_url(as_redis(valkey_url)) as client:
                right: Any = {"key": header(), "stream": "charges", "group": GROUP, "dead_letter": "dead"}
                worker = guarded(guard, "charge", handle, concurrency=2, **right)
                others = asyncio.all_tasks()
                consuming = asyncio.create_task(worker.consume(client))
                await begun.wait()
                (loop,) = worker._loops
                await client.delete("charges")
                await client.set("charges", "no stream")
                await asyncio.to_thread(until, lambda: loop.is_leaving, "it ends")
                consuming.cancel()
                await asyncio.wait({consuming}, timeout=PATIENCE / 2)
                assert consuming.done()
                assert asyncio.all_tasks() - others == set()

        in_time(story())

        assert ended == ["cancelled"]


class TestClusters:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dead", ["{charges}.dead", "elsewhere"])
    def test_dead_letters_on_the_same_node_or_another(
        self, dead: str, kind: Kind, redis_cluster_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled(failures=1)
        port = int(redis_cluster_url.rpartition(":")[2].partition("/")[0])
        right: Any = {"key": header(), "stream": "{charges}", "group": GROUP, "dead_letter": dead, "attempts": 1}

        def is_settled(client: Any) -> bool:
            return bool(client.xlen(dead)) and not client.xpending("{charges}", GROUP)["pending"]

        def sync() -> None:
            with Guard("memory:") as guard, redis.RedisCluster(host="127.0.0.1", port=port) as client:
                worker = guarded(guard, "charge", handle, **right)
                for _ in range(3):
                    send(client, "{charges}", b"1", key="pay-1")
                with ConsumingThread(worker, client):
                    until(lambda: is_settled(client), "everything is settled")
                letters.extend(client.xrange(dead))

        async def story() -> None:
            async with AsyncGuard("memory:") as guard:
                client = redis.asyncio.RedisCluster(host="127.0.0.1", port=port)

                async def handled(delivery: Delivery) -> None:
                    handle(delivery)

                worker = guarded(guard, "charge", handled, **right)
                for _ in range(3):
                    await send_async(client, "{charges}", b"1", key="pay-1")
                consuming = asyncio.create_task(worker.consume(client))
                with redis.RedisCluster(host="127.0.0.1", port=port) as looking:
                    await asyncio.to_thread(until, lambda: is_settled(looking), "everything is settled")
                await worker.drain()
                await consuming
                letters.extend(await client.xrange(dead) or ())
                await client.aclose()

        letters: list[Any] = []
        if kind == "sync":
            sync()
        else:
            in_time(story())

        # The first of the three has failed, the second has run, and the last has found it done.
        assert [fields[b"x-onefold-stream"] for _, fields in letters] == [b"{charges}"]
        assert len(handle.calls) == 2
        assert any("on different nodes of the cluster" in line for line in caplog.messages) == (dead == "elsewhere")

    @pytest.mark.parametrize("attempts", [1, 2])
    def test_a_dead_letter_on_another_node_is_written_even_if_its_entry_was_trimmed(
        self, attempts: int, redis_cluster_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        port = int(redis_cluster_url.rpartition(":")[2].partition("/")[0])
        refused, add_dead = list[str](), Requests.add_dead

        def lost_once(requests: Requests, dead: Any) -> Any:
            def lost() -> Any:
                refused.append("lost")
                raise redis.ConnectionError

            return add_dead(requests, dead) if refused else lost

        monkeypatch.setattr(Requests, "add_dead", lost_once)
        with Guard("memory:") as guard, redis.RedisCluster(host="127.0.0.1", port=port) as client:

            def fails(_delivery: Delivery) -> None:
                client.xtrim("{charges}", maxlen=0)
                raise ValueError

            right: Any = {"key": header(), "stream": "{charges}", "group": GROUP, "dead_letter": "elsewhere"}
            worker = guarded(guard, "charge", fails, **right, attempts=attempts)
            send(client, "{charges}", b"4200")
            with ConsumingThread(worker, client):
                until(lambda: client.xlen("elsewhere"), "the dead letter is there")
            ((_, letter),) = client.xrange("elsewhere")

        assert letter[b"body"] == b"4200"
        assert refused == ["lost"]

    def test_what_another_consumer_has_is_not_buried_on_another_node(self, redis_cluster_url: str) -> None:
        port = int(redis_cluster_url.rpartition(":")[2].partition("/")[0])
        ran: list[Delivery] = []

        with Guard("memory:") as guard, redis.RedisCluster(host="127.0.0.1", port=port) as client:

            def taken(delivery: Delivery) -> None:
                ran.append(delivery)
                client.xclaim("{charges}", GROUP, "other", 0, [delivery.entry_id], justid=True)
                raise ValueError

            right: Any = {"key": header(), "stream": "{charges}", "group": GROUP, "dead_letter": "elsewhere"}
            worker = guarded(guard, "charge", taken, **right, attempts=1)
            send(client, "{charges}", b"1")
            with ConsumingThread(worker, client):
                until(lambda: ran and not any(len(loop.jobs) for loop in [*worker._loops]), "it is forgotten")
            (pending,) = client.xpending_range("{charges}", GROUP, "-", "+", 10)
            letters = client.xlen("elsewhere")

        assert (pending["consumer"], letters) == (b"other", 0)


class ConsumingThread:
    def __init__(self, worker: Any, client: Any) -> None:
        self._worker = worker
        self._thread = threading.Thread(target=worker.consume, args=(client,), daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        assert self._worker.drain(PATIENCE)
