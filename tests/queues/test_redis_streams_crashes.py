"""Redis Streams: workers that are killed or stand still, connections that are lost, a server that goes; and sending."""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import ResponseError
from redis.retry import Retry

from onefold import Guard, MissingKey, Policy, UsageError, current
from onefold.events import Event, Sent, subscribe, subscribe_to_sends
from onefold.events import Kind as EventKind
from onefold.queues._redis_streams import loop as stream_loop
from onefold.queues._redis_streams import sending
from onefold.queues._redis_streams.consumer import Delivery
from onefold.queues._redis_streams.jobs import Job
from onefold.queues._redis_streams.requests import Requests
from onefold.queues.keys import header
from onefold.queues.redis_streams import guarded, send, send_async
from services.proxy import Proxy
from services.servers import Server
from tests.processes import Notes, Stage, child, lapse
from tests.queues.redis_streams_tools import (
    FEW_SIDES,
    GROUP,
    KINDS,
    Environment,
    Handled,
    Kind,
    Worker,
    async_client_of,
    client_of,
    on_both,
    until,
)
from tests.support import in_time
from tests.wallet import add, balance

# No pause of the machine outlasts it; after a kill its end is brought about.
LEASE = 3_600.0

# Of whoever takes over: nothing of a dead worker is waited for longer than that.
SHORT_IDLE = 0.2

STEPS = ("after the effect", "before the ack")


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
    monkeypatch.setattr(stream_loop, "FETCH_SECONDS", 0.05)
    monkeypatch.setattr("onefold.queues.redis_streams.FETCH_SECONDS", 0.05)
    monkeypatch.setattr(stream_loop, "SOON", 0.05)


class Credit:
    """A handler whose effect commits with its record."""

    def __init__(self, stage: Stage | None = None, at: bytes | None = None) -> None:
        self._stage = stage
        self._at = at

    def __call__(self, delivery: Delivery, *, tx: Any) -> None:
        add(tx, int(delivery.body))
        if self._stage is not None and self._at in (None, delivery.body):
            self._stage.at("after the effect")


class Charge:
    """A handler whose effect is elsewhere: one line with the key that the other side is given."""

    def __init__(self, effects: Path, stage: Stage | None = None, gate: threading.Event | None = None) -> None:
        self._effects = effects
        self._stage = stage
        self._gate = gate

    def __call__(self, _delivery: Delivery) -> None:
        Notes(self._effects).add(current().key_for("gateway"))
        if self._stage is not None:
            self._stage.at("after the effect")
        if self._gate is not None:
            assert self._gate.wait(60)


def consume(stage: Stage, environment: Environment, kind: Kind, store: str, handler: Any, **options: Any) -> None:
    """Be a worker, in a process of its own, until somebody ends it."""
    ack = Requests.ack

    def stopping(requests: Requests, ids: Any) -> Any:
        stage.at("before the ack")
        return ack(requests, ids)

    Requests.ack = stopping  # type: ignore[method-assign, assignment]
    with Worker(kind, environment, store, handler, **options) as worker:
        worker.join()


def credit(stage: Stage, environment: Environment, kind: Kind, store: str, at: bytes | None) -> None:
    consume(stage, environment, kind, store, Credit(stage, at))


def charge(stage: Stage, environment: Environment, kind: Kind, store: str, effects: Path, min_idle: float) -> None:
    taken = stream_loop.Loop._taken

    def told(loop: stream_loop.Loop, job: Job) -> None:
        taken(loop, job)
        stage.tell("taken")

    stream_loop.Loop._taken = told  # type: ignore[method-assign, assignment]
    policy = Policy(lease=LEASE, wait=0)
    consume(stage, environment, kind, store, Charge(effects, stage), policy=policy, min_idle=min_idle)


class TestKilledWorkers:
    @pytest.mark.parametrize("step", STEPS)
    def test_in_a_transaction_the_effect_happens_exactly_once(
        self, step: str, kind: Kind, environment: Environment, path: Path
    ) -> None:
        store = f"sqlite:///{path}"
        environment.send_keyed("pay-1", b"10")

        with child(credit, environment, kind, store, None, stops=(step,)) as killed:
            killed.reaches(step)
            killed.kill()
        assert balance(path) == (0 if step == "after the effect" else 10)
        with Worker(kind, environment, store, Credit(), min_idle=SHORT_IDLE):
            environment.settled()

        assert balance(path) == 10
        assert environment.letters() == []

    def test_a_worker_that_is_killed_amid_a_batch_loses_and_doubles_nothing(
        self, kind: Kind, environment: Environment, path: Path
    ) -> None:
        store = f"sqlite:///{path}"
        for number in range(1, 11):
            environment.send_keyed(f"pay-{number}", b"%d" % number)

        with child(credit, environment, kind, store, b"5", stops=("after the effect",)) as killed:
            killed.reaches("after the effect")
            assert len(environment.pending()) > 5
            killed.kill()
        assert balance(path) == 1 + 2 + 3 + 4
        with Worker(kind, environment, store, Credit(), min_idle=SHORT_IDLE):
            environment.settled()

        assert balance(path) == sum(range(1, 11))
        assert environment.letters() == []

    @pytest.mark.parametrize("step", STEPS)
    def test_a_claim_is_run_again_with_the_same_key_for_the_other_side(
        self, step: str, kind: Kind, environment: Environment, tmp_path: Path
    ) -> None:
        store, effects = f"sqlite:///{tmp_path}/records.db", tmp_path / "effects"
        environment.send_keyed("pay-1")

        with child(charge, environment, kind, store, effects, 30.0, stops=(step,)) as killed:
            killed.reaches(step)
            killed.kill()
        lapse(tmp_path / "records.db")
        with Worker(kind, environment, store, Charge(effects), min_idle=SHORT_IDLE):
            environment.settled()

        keys = Notes(effects).read()
        assert len(keys) == (2 if step == "after the effect" else 1)
        assert len(set(keys)) == 1
        with Guard(store) as guard:
            record = guard.read("charge", "pay-1")
            assert record is not None
            assert record.state == "done"

    def test_a_signal_stops_a_worker_which_settles_what_runs(self, environment: Environment, path: Path) -> None:
        environment.send_keyed("pay-1", b"10")

        with child(serve, environment, f"sqlite:///{path}", stops=("after the effect",)) as stopped:
            stopped.reaches("after the effect")
            stopped.signal(signal.SIGTERM)
            stopped.go_on()
            assert stopped.hear() == "stopped"

        assert balance(path) == 10
        assert environment.is_settled()
        assert environment.consumers() == []


def serve(stage: Stage, environment: Environment, store: str) -> str:
    """Be a service, as the page shows it."""
    with Guard(store) as guard, client_of(environment.url) as client:
        names: Any = {"stream": environment.stream, "group": GROUP, "dead_letter": environment.dead}
        worker = guarded(guard, "charge", Credit(stage), key=header(), **names)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
        worker.consume(client)
    return "stopped"


class TestFrozenWorkers:
    def test_a_worker_that_comes_back_leaves_the_entry_to_whoever_has_it_now(
        self, kind: Kind, environment: Environment, tmp_path: Path
    ) -> None:
        """Its claim is lost, and the other still runs: it neither acknowledges the entry nor takes it back."""
        store, effects, gate = f"sqlite:///{tmp_path}/records.db", tmp_path / "effects", threading.Event()
        environment.send_keyed("pay-1")

        with child(charge, environment, kind, store, effects, 30.0, stops=("after the effect",)) as frozen:
            frozen.reaches("after the effect")
            frozen.signal(signal.SIGSTOP)
            lapse(tmp_path / "records.db")
            policy = Policy(lease=LEASE)
            handler = Charge(effects, gate=gate)
            with Worker(kind, environment, store, handler, min_idle=SHORT_IDLE, policy=policy, consumer="second"):
                until(lambda: len(Notes(effects).read()) == 2, "the other runs it")
                frozen.signal(signal.SIGCONT)
                frozen.go_on(after=2 * LEASE)
                frozen.reaches("taken")
                (pending,) = environment.pending()
                assert (pending["consumer"], pending["times_delivered"]) == (b"second", 2)
                gate.set()
                environment.settled()

        assert len(set(Notes(effects).read())) == 1
        assert environment.letters() == []

    def test_a_worker_that_comes_back_acknowledges_only_what_is_done(
        self, kind: Kind, environment: Environment, tmp_path: Path
    ) -> None:
        """Its claim is lost, and the other has finished: its late acknowledgement changes nothing."""
        store, effects = f"sqlite:///{tmp_path}/records.db", tmp_path / "effects"
        environment.send_keyed("pay-1")

        with child(charge, environment, kind, store, effects, 30.0, stops=STEPS) as frozen:
            frozen.reaches("after the effect")
            frozen.signal(signal.SIGSTOP)
            lapse(tmp_path / "records.db")
            with Worker(kind, environment, store, Charge(effects), min_idle=SHORT_IDLE):
                environment.settled()
                frozen.signal(signal.SIGCONT)
                frozen.go_on(after=2 * LEASE)
                frozen.reaches("before the ack")
                environment.send_keyed("pay-2")
                frozen.go_on()
                environment.settled()

        assert len(set(Notes(effects).read())) == 2
        assert environment.letters() == []

    def test_a_worker_that_comes_back_does_not_start_what_others_have_taken(
        self, kind: Kind, environment: Environment, tmp_path: Path
    ) -> None:
        """Entries without keys: nothing but the server's word keeps them from running twice."""
        effects = tmp_path / "effects"
        for number in range(4):
            environment.send(b"%d" % number)

        with child(unguarded, environment, kind, effects, stops=("first",)) as frozen:
            frozen.reaches("first")
            frozen.signal(signal.SIGSTOP)
            with Worker(kind, environment, "memory:", Unguarded(effects), min_idle=SHORT_IDLE, missing_key="run"):
                environment.settled()
                frozen.signal(signal.SIGCONT)
                frozen.go_on()
                for _ in range(3):
                    frozen.reaches("taken")

        # It had begun the first, and so this one has run twice: that is what a key is for.
        assert sorted(Notes(effects).read()) == ["0", "0", "1", "2", "3"]


class Unguarded:
    def __init__(self, effects: Path, stage: Stage | None = None) -> None:
        self._effects = effects
        self._stage = stage

    def __call__(self, delivery: Delivery) -> None:
        Notes(self._effects).add(delivery.body.decode())
        if self._stage is not None and delivery.body == b"0":
            self._stage.at("first")


def unguarded(stage: Stage, environment: Environment, kind: Kind, effects: Path) -> None:
    taken = stream_loop.Loop._taken

    def no_beat(_loop: stream_loop.Loop) -> Iterator[Any]:
        """Which would tell it, too, perhaps in time."""
        return iter(())

    stream_loop.Loop._beat = no_beat  # type: ignore[method-assign, assignment]

    def told(loop: stream_loop.Loop, job: Job) -> None:
        taken(loop, job)
        if not job.has_begun:
            stage.tell("taken")

    stream_loop.Loop._taken = told  # type: ignore[method-assign, assignment]
    handler = Unguarded(effects, stage)
    consume(stage, environment, kind, "memory:", handler, min_idle=SHORT_IDLE, missing_key="run")


# redis-py sends some requests again by itself: here only the worker does.
ONCE: Any = {"retry": Retry(NoBackoff(), 0)}


class TestLostConnections:
    @on_both
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_connection_that_is_cut_at_an_acknowledgement_loses_and_doubles_nothing(
        self, when: str, kind: Kind, environment: Environment, path: Path
    ) -> None:
        heard: list[Event] = []
        end = subscribe(heard.append)

        with (
            Proxy(environment.url) as proxy,
            Worker(kind, environment, f"sqlite:///{path}", Credit(), url=proxy.url(), client=ONCE, min_idle=5),
        ):
            for number in range(3):
                cut = proxy.cut_before if when == "before" else proxy.cut_after
                fault = cut(b"XACK\r\n")
                environment.send_keyed(f"pay-{number}", b"10")
                until(fault.reached.is_set, "the connection is cut")
                environment.settled()
        end()

        assert balance(path) == 30
        assert environment.letters() == []
        # They are acknowledged again, and not handled again.
        assert EventKind.REPLAYED not in {one.kind for one in heard}

    @on_both
    def test_entries_whose_delivery_is_lost_on_its_way_are_found_without_waiting(
        self, kind: Kind, environment: Environment
    ) -> None:
        """The server has them for this worker, which has never seen them."""
        handle = Handled()
        environment.send_keyed("pay-1")

        with Proxy(environment.url) as proxy:
            fault = proxy.cut_after(b"XREADGROUP\r\n")
            with Worker(kind, environment, "memory:", handle, url=proxy.url(), client=ONCE, min_idle="1h"):
                environment.settled()

        assert fault.reached.is_set()
        assert [one.times_delivered for one in handle.calls] == [2]

    @on_both
    def test_a_dead_letter_whose_confirmation_is_lost_is_one_dead_letter(
        self, kind: Kind, environment: Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("onefold.queues._redis_streams.consumer.DEAD_LETTER_DELAY", 0.05)
        environment.send()

        with Proxy(environment.url) as proxy:
            fault = proxy.cut_after(b"it has no key")
            with Worker(kind, environment, "memory:", Handled(), url=proxy.url(), client=ONCE) as worker:
                until(fault.reached.is_set, "the connection is cut")
                environment.settled()
                until(lambda: len(worker.jobs) == 0, "the worker has asked again")

        assert len(environment.letters()) == 1

    def test_a_retry_is_not_lost_with_its_connection(
        self, kind: Kind, environment: Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("onefold.queues._redis_streams.consumer.FAILED_DELAY", 0.01)
        handle = Handled(failures=1)
        environment.send_keyed("pay-1")

        with Proxy(environment.url) as proxy:
            fault = proxy.cut_before(b"RETRYCOUNT")
            with Worker(kind, environment, "memory:", handle, url=proxy.url(), client=ONCE, min_idle="1h"):
                environment.settled()

        assert fault.reached.is_set()
        assert [one.times_delivered for one in handle.calls] == [1, 2]

    def test_an_entry_that_is_deleted_is_handled_to_its_end_although_the_answer_about_it_is_lost(
        self, kind: Kind, environment: Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The question itself settles what was deleted: whoever asks again finds it with nobody."""
        monkeypatch.setattr("onefold.queues._redis_streams.consumer.FAILED_DELAY", 0.01)
        handle = Handled(failures=99)

        def failing(delivery: Delivery) -> None:
            with environment.server as server:
                server.xtrim(environment.stream, maxlen=0)
            handle(delivery)

        environment.send_keyed("pay-1", b"4200")

        with Proxy(environment.url) as proxy:
            fault = proxy.cut_after(b"RETRYCOUNT")
            with Worker(kind, environment, "memory:", failing, url=proxy.url(), client=ONCE, attempts=2, min_idle="1h"):
                letter = environment.letter()

        assert fault.reached.is_set()
        assert len(handle.calls) == 2
        assert letter[b"body"] == b"4200"

    @on_both
    def test_a_handler_outlives_its_server_and_the_loop_goes_on(
        self, side: tuple[Kind, str], path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
    ) -> None:
        kind, name = side
        server: Server = request.getfixturevalue(f"own_{name.removesuffix('_url')}")
        environment, handled = Environment(server.url), Handled()
        handled.gate = threading.Event()

        def credit(delivery: Delivery, *, tx: Any) -> None:
            handled(delivery)
            add(tx, int(delivery.body))

        environment.send_keyed("pay-1", b"10")

        # What has a transaction blocks its event loop.
        with Worker(kind, environment, f"sqlite:///{path}", credit):
            until(lambda: handled.calls, "it runs")
            server.kill()
            handled.gate.set()
            until(lambda: balance(path), "it has run to its end")
            until(lambda: any("the server does not answer" in line for line in caplog.messages), "it is told")
            server.restart()
            environment.settled()
            environment.send_keyed("pay-1", b"10")
            environment.send_keyed("pay-2", b"5")
            environment.settled()

        assert balance(path) == 15
        assert len(handled.calls) == 2

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_worker_that_begins_before_its_server_waits_for_it(self, kind: Kind, own_valkey: Server) -> None:
        environment, handle = Environment(own_valkey.url), Handled()
        own_valkey.kill()

        with Worker(kind, environment, "memory:", handle, client=ONCE) as worker:
            until(lambda: worker.has_begun, "it consumes")
            own_valkey.restart()
            environment.send_keyed("pay-1")
            environment.settled()

        assert len(handle.calls) == 1

    def test_a_password_that_is_refused_ends_the_loop(self, kind: Kind, environment: Environment) -> None:
        with environment.server as server:
            server.acl_setuser("limited", enabled=True, passwords=["+right"], categories=["+@all"])
        wrong = {"username": "limited", "password": "wrong"}

        with Worker(kind, environment, "memory:", Handled(), client=wrong, fails=True) as worker:
            worker.join()
        with environment.server as server:
            server.acl_deluser("limited")

        assert type(worker.errors[0]).__name__ == "AuthenticationError"


class TestSend:
    @pytest.fixture
    def sent(self, kind: Kind, environment: Environment) -> Callable[..., str]:
        """Send with either client."""

        async def story(url: str, *arguments: Any, **options: Any) -> str:
            async with async_client_of(url, **ONCE) as client:
                return await send_async(client, *arguments, **options)

        def sync(*arguments: Any, url: str = environment.url, **options: Any) -> str:
            with client_of(url, **ONCE) as client:
                return send(client, *arguments, **options)

        def awaited(*arguments: Any, url: str = environment.url, **options: Any) -> str:
            return in_time(story(url, *arguments, **options))

        return sync if kind == "sync" else awaited

    @on_both
    def test_a_key_is_minted_once_and_kept(self, sent: Callable[..., str], environment: Environment) -> None:
        key = sent("charges", b"\xff")

        assert sent("charges", b"\xff", key=key) == key
        assert str(uuid.UUID(key)) == key
        with environment.server as server:
            found = [fields for _, fields in server.xrange("charges")]
        assert found == [{b"idempotency-key": key.encode(), b"body": b"\xff"}] * 2

    def test_the_senders_own_fields_are_kept(self, sent: Callable[..., str], environment: Environment) -> None:
        given = {"Idempotency-Key": "mine", "x-trace": b"\xfe", "amount": 4200}

        assert sent("charges", b"1", headers=given, body_field="json") == "mine"
        with environment.server as server:
            ((_, found),) = server.xrange("charges")
        assert found == {b"idempotency-key": b"mine", b"x-trace": b"\xfe", b"amount": b"4200", b"json": b"1"}

    @on_both
    def test_what_is_sent_again_after_a_lost_reply_is_two_entries_and_one_effect(
        self, sent: Callable[..., str], environment: Environment
    ) -> None:
        handle, told = Handled(), list[Sent]()
        end = subscribe_to_sends(told.append)

        with Proxy(environment.url) as proxy:
            fault = proxy.cut_after(b"XADD\r\n")
            key = sent("charges", b"1", url=proxy.url())
        end()
        assert fault.reached.is_set()
        with environment.server as server:
            assert server.xlen("charges") == 2
        with Worker("sync", environment, "memory:", handle):
            environment.settled()

        assert told == [Sent("charges", key)] * 2
        assert len(handle.calls) == 1

    def test_it_survives_a_restart_of_the_server(self, own_valkey: Server) -> None:
        own_valkey.kill()
        with client_of(own_valkey.url, **ONCE) as client:
            sending = threading.Thread(target=send, args=(client, "charges", b"1"))
            sending.start()
            own_valkey.restart()
            sending.join(60)
            assert client.xlen("charges") == 1

    def test_it_raises_at_once_what_does_not_go_away_and_in_the_end_what_might(
        self, sent: Callable[..., str], environment: Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = list[Sent]()
        end = subscribe_to_sends(told.append)
        environment.server.set("charges", "no stream")

        with pytest.raises(ResponseError, match="WRONGTYPE"):
            sent("charges", b"1")
        assert len(told) == 1
        monkeypatch.setattr(sending, "SEND_TRIES", 2)
        with pytest.raises(LostConnection):
            sent("charges", b"1", url="redis://127.0.0.1:1/0")
        end()

        assert len(told) == 3

    @pytest.mark.parametrize(
        ("options", "error", "says"),
        [
            ({"key": None}, MissingKey, "nothing was sent"),
            ({"key": ""}, MissingKey, "the key is empty"),
            ({"headers": {"body": "mine"}}, UsageError, "the field of the body"),
            ({"headers": {"x": 1.5}}, UsageError, "text, bytes or a whole number"),
            ({"headers": {"x": True}}, UsageError, "text, bytes or a whole number"),
        ],
    )
    def test_what_cannot_be_sent_is_refused(self, options: Any, error: type[Exception], says: str) -> None:
        with pytest.raises(error, match=says):
            send(NOTHING, "charges", b"1", **options)
        with pytest.raises(UsageError, match="the body has to be bytes, not str"):
            send(NOTHING, "charges", "text")  # type: ignore[arg-type]

    def test_a_client_of_the_other_kind_or_a_pipeline_is_refused(self, valkey_url: str) -> None:
        """It would return a key, and nothing would be sent."""

        async def story() -> None:
            async with async_client_of(valkey_url) as client:
                for wrong in (client, client.pipeline()):
                    with pytest.raises(UsageError, match="nothing was sent"):
                        send(wrong, "charges", b"1")
                with pytest.raises(UsageError, match="nothing was sent"):
                    await send_async(client.pipeline(), "charges", b"1")
            with client_of(valkey_url) as blocking:
                with pytest.raises(UsageError, match="nothing was sent"):
                    await send_async(blocking, "charges", b"1")
                with pytest.raises(UsageError, match="nothing was sent"):
                    send(blocking.pipeline(), "charges", b"1")
                assert blocking.xlen("charges") == 0

        in_time(story())

    def test_a_key_in_any_language_arrives_as_it_was_sent(
        self, sent: Callable[..., str], environment: Environment
    ) -> None:
        handle, keys = Handled(), ("ключ 1", "鍵", " a: b ", "line\nbreak")
        for key in keys:
            sent("charges", b"1", key=key)

        with Worker("sync", environment, "memory:", handle) as worker:
            environment.settled()
            assert all(worker.guard.read("charge", key) is not None for key in keys)

        assert len(handle.calls) == 4


NOTHING: Any = object()
