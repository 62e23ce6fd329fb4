"""NATS JetStream: what becomes of a message, push and pull, on a real server."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from onefold import AsyncGuard, InProgress, OutcomeUnknown, StoreUnavailable, UsageError, current
from onefold.events import Event, Kind, subscribe
from onefold.queues._nats import consumer as nats_consumer
from onefold.queues._nats import jobs as nats_jobs
from onefold.queues._nats import messages as nats_messages
from onefold.queues._nats.consumer import Delivery
from onefold.queues._shared import verdict as shared_verdict
from onefold.queues._shared.verdict import SOON, Later
from onefold.queues.keys import body, field, first_of, header, message_id
from onefold.queues.nats import guarded
from tests.queues.nats_tools import (
    DURABLE,
    MODES,
    Environment,
    Handled,
    Mode,
    connected,
    lasting_longer,
    until,
    worker,
)
from tests.support import PATIENCE, AsyncProxyStore, Died, in_time
from tests.wallet import add, balance

# Short enough to wait for three times, and long enough for the signs of a busy machine.
ACK_WAIT = 1.0

# Longer than any test: what waits for its end comes too late.
LONG_ACK_WAIT = 3_600.0


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest.fixture
def shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed, or was refused as a dead letter, comes again in no time."""
    monkeypatch.setattr(nats_consumer, "FAILED_DELAY", 0.01)
    monkeypatch.setattr(nats_consumer, "DEAD_LETTER_DELAY", 0.05)
    monkeypatch.setattr(shared_verdict, "SOON", 0.05)
    monkeypatch.setattr(nats_jobs, "SOON", 0.05)


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The signs of progress that were sent."""
    sent: list[str] = []
    in_progress = Msg.in_progress

    async def counted(message: Msg) -> None:
        await in_progress(message)
        sent.append(message.reply)

    monkeypatch.setattr(Msg, "in_progress", counted)
    return sent


class TestVerdicts:
    def test_a_duplicate_of_a_finished_message_is_acknowledged_and_not_run(
        self, mode: Mode, nats_url: str, nats_name: str
    ) -> None:
        handle = Handled()

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await environment.send_keyed("pay-1", times=3)
                async with worker(environment, "memory:", handle, mode=mode):
                    await environment.settled(3)
                    await environment.send_keyed("pay-1")
                    await environment.send_keyed("pay-2")
                    await environment.settled(5)
                assert (await environment.info()).num_redelivered == 0

        in_time(story())

        assert len(handle.calls) == 2

    def test_a_handler_sees_the_message(self, nats_url: str, nats_name: str) -> None:
        handle = Handled()

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await environment.js.publish(
                    environment.subject, b"4200", headers={"Idempotency-Key": "ключ", "Nats-Msg-Id": "id-1"}
                )
                async with worker(environment, "memory:", handle):
                    await environment.settled(1)

        in_time(story())

        (seen,) = handle.calls
        assert seen.body == b"4200"
        assert (seen.headers["Idempotency-Key"], seen.message_id) == ("ключ", "id-1")
        assert (seen.subject, seen.stream, seen.sequence) == (f"{nats_name}.charges", nats_name, 1)
        assert seen.num_delivered == 1
        metadata = seen.native.metadata
        assert (metadata.stream, metadata.consumer, metadata.sequence.stream) == (nats_name, DURABLE, 1)

    @pytest.mark.parametrize("key", [message_id(), field("id"), first_of(header(), message_id())])
    def test_the_key_may_be_the_senders_message_id_or_a_field(self, key: Any, nats_url: str, nats_name: str) -> None:
        handle = Handled()

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                # The window of the stream drops what has the same id: such duplicates come from another stream.
                await environment.js.update_stream(name=nats_name, subjects=[environment.subject], duplicate_window=0.1)
                await environment.send(b'{"id": "a"}', Nats_Msg_Id="a")
                async with worker(environment, "memory:", handle, key=key):
                    await environment.settled(1)
                    await until(lambda: _is_new(environment), "the window is over")
                    found = await environment.js.stream_info(nats_name)
                    await environment.settled(found.state.last_seq)

        async def _is_new(environment: Environment) -> bool:
            ack = await environment.js.publish(environment.subject, b'{"id": "a"}', headers={"Nats-Msg-Id": "a"})
            return not ack.duplicate

        in_time(story())

        assert len(handle.calls) == 1

    def test_a_duplicate_of_a_running_message_is_given_back_and_never_acknowledged(
        self, mode: Mode, nats_url: str, nats_name: str
    ) -> None:
        handle = Handled()

        async def story() -> None:
            handle.gate = asyncio.Event()
            async with (
                Environment(nats_url, nats_name) as environment,
                worker(environment, "memory:", handle, mode=mode, concurrency=2, wait=0, lease=1),
            ):
                await environment.send_keyed("pay-1")
                await until(lambda: handle.calls, "it runs")
                await environment.send_keyed("pay-1")
                await until(lambda: environment.heard("MSG_NAKED"), "it is given back")
                info = await environment.info()
                assert (info.num_ack_pending, info.ack_floor.stream_seq) == (2, 0)
                handle.gate.set()
                await environment.settled(2)

        in_time(story())

        assert len(handle.calls) == 1

    def test_a_handler_that_fails_is_run_again_until_it_succeeds(
        self, mode: Mode, shortly: None, nats_url: str, nats_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled(failures=2)

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await environment.send_keyed("pay-1")
                async with worker(environment, "memory:", handle, mode=mode):
                    await environment.settled(1)
                assert await environment.letters() == []
                assert await environment.count("MSG_NAKED") == 2

        in_time(story())

        assert [one.num_delivered for one in handle.calls] == [1, 2, 3]
        told = [line for line in caplog.messages if "failed" in line]
        assert [line.partition(" failed: ")[0][-9:] for line in told] == ["attempt 1", "attempt 2"]
        assert all("ValueError at nats_tools.py" in line and "4200" not in line for line in told)

    def test_a_handler_that_always_fails_sends_its_message_to_the_dead_letters(
        self, mode: Mode, shortly: None, nats_url: str, nats_name: str
    ) -> None:
        handle, heard = Handled(failures=99), list[Event]()
        end = subscribe(heard.append)

        async def story() -> Msg:
            async with Environment(nats_url, nats_name) as environment:
                await environment.js.publish(
                    environment.subject,
                    b"4200",
                    headers={"idempotency-key": "pay-1", "x-trace": "t", "Nats-Msg-Id": "id-1"},
                )
                async with worker(environment, "memory:", handle, mode=mode, attempts=3) as one:
                    letter = await environment.letter()
                    await environment.settled(1)
                    assert letter.headers is not None
                    assert letter.headers["x-onefold-digest"] == one.guard.address("charge", "pay-1").digest
                await until(lambda: environment.heard("MSG_TERMINATED"), "the server tells it")
                (told,) = environment.heard("MSG_TERMINATED")
                assert told["reason"] == letter.headers["x-onefold-reason"]
                return letter

        letter = in_time(story())
        end()

        assert len(handle.calls) == 3
        assert letter.data == b"4200"
        headers = dict(letter.headers or {})
        assert headers.pop("x-onefold-reason").startswith("it failed 3 times, the last time with ValueError at nats_to")
        headers.pop("x-onefold-digest")
        headers.pop("Nats-Msg-Id")
        assert headers == {
            "idempotency-key": "pay-1",
            "x-trace": "t",
            "x-onefold-operation": "charge",
            "x-onefold-subject": f"{nats_name}.charges",
            "x-onefold-stream": nats_name,
            "x-onefold-sequence": "1",
            "x-onefold-message-id": "id-1",
        }
        assert [one.kind for one in heard if one.kind == Kind.BURIED] == [Kind.BURIED]

    @pytest.mark.parametrize(
        ("headers", "sent", "options", "reason"),
        [
            ({}, b"{}", {}, "it has no key"),
            ({"idempotency-key": "k" * 5000}, b"{}", {}, "the key has 5000 characters, and the limit is"),
            ({}, b"no JSON", {"key": field("id")}, "the body is not JSON, and the key is its field id"),
            ({"idempotency-key": "a", "Idempotency-Key": "b"}, b"{}", {}, "comes in several spellings with different"),
        ],
    )
    def test_a_message_without_a_usable_key_is_a_dead_letter(
        self, headers: Any, sent: bytes, options: Any, reason: str, nats_url: str, nats_name: str
    ) -> None:
        handle = Handled()

        async def story() -> str:
            async with Environment(nats_url, nats_name) as environment:
                await environment.js.publish(environment.subject, sent, headers=headers)
                async with worker(environment, "memory:", handle, **options):
                    letter = await environment.letter()
                    await environment.settled(1)
                    return str((letter.headers or {})["x-onefold-reason"])

        assert reason in in_time(story())
        assert handle.calls == []

    def test_missing_key_run_runs_it_unguarded_and_waits_for_the_servers_word(
        self, nats_url: str, nats_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handle, surely = Handled(), list[str]()
        ack_sync = Msg.ack_sync

        async def counted(message: Msg, **options: float) -> Msg:
            surely.append(message.reply)
            return await ack_sync(message, **options)

        monkeypatch.setattr(Msg, "ack_sync", counted)

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await environment.send(times=2)
                await environment.send_keyed("pay-1", times=2)
                async with worker(environment, "memory:", handle, missing_key="run"):
                    await environment.settled(4)

        in_time(story())

        assert len(handle.calls) == 3
        assert len(surely) == 2

    def test_a_used_key_with_another_body_is_a_dead_letter(self, nats_url: str, nats_name: str) -> None:
        handle = Handled()

        async def story() -> str:
            async with Environment(nats_url, nats_name) as environment:
                for sent in (b"1", b"1", b"2"):
                    await environment.send_keyed("pay-1", sent)
                async with worker(environment, "memory:", handle, payload=body()):
                    letter = await environment.letter()
                    await environment.settled(3)
                    assert letter.data == b"2"
                    return str((letter.headers or {})["x-onefold-reason"])

        assert in_time(story()).startswith("KeyReused: ")
        assert handle.bodies == [b"1"]

    def test_a_worker_that_cannot_work_buries_nothing(
        self, nats_url: str, nats_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled()

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                async with worker(environment, "memory:", handle) as one:
                    await one.guard.aclose()
                    await environment.send_keyed("pay-1")
                    await until(lambda: environment.heard("MSG_NAKED"), "it is given back")
                info = await environment.info()
                assert (info.num_ack_pending, info.delivered.consumer_seq) == (1, 1)
                assert await environment.letters() == []

        in_time(story())

        assert handle.calls == []
        (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "again in 60 s: " in told.getMessage()

    def test_a_handler_with_tx_commits_with_its_record(self, nats_url: str, nats_name: str, path: Path) -> None:
        async def credit(delivery: Delivery, *, tx: Any) -> None:
            add(tx, int(delivery.body))

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await environment.send_keyed("pay-1", b"10", times=3)
                await environment.send_keyed("pay-2", b"5", times=2)
                async with worker(environment, f"sqlite:///{path}", credit, concurrency=3):
                    await environment.settled(5)

        in_time(story())

        assert balance(path) == 15

    def test_a_handler_that_raises_what_is_no_exception_does_not_end_the_worker(
        self, shortly: None, nats_url: str, nats_name: str
    ) -> None:
        ran: list[bytes] = []

        async def handle(delivery: Delivery) -> None:
            ran.append(delivery.body)
            if delivery.body == b"1":
                raise Died

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await environment.send_keyed("pay-1", b"1")
                await environment.send_keyed("pay-2", b"2")
                async with worker(environment, "memory:", handle):
                    await until(lambda: environment.heard("MSG_NAKED"), "it is given back")
                    await until(lambda: b"2" in ran, "the other one runs")
                assert await environment.letters() == []

        in_time(story())

    def test_an_unknown_outcome_is_held_and_comes_again(self, nats_url: str, nats_name: str) -> None:
        handle = Handled(failures=1, error=OutcomeUnknown)

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await environment.send_keyed("pay-1", times=2)
                async with worker(environment, "memory:", handle, after_crash="hold") as one:
                    await until(lambda: len(environment.heard("MSG_NAKED")) == 2, "both are given back")
                    record = await one.guard.read("charge", "pay-1")
                    assert record is not None
                    assert record.state == "held"

        in_time(story())

        assert len(handle.calls) == 1


class TestProgress:
    """A message that this worker has is not delivered to another one."""

    def test_a_handler_that_takes_three_times_the_ack_wait_is_not_delivered_again(
        self, mode: Mode, signs: list[str], nats_url: str, nats_name: str
    ) -> None:
        handle = Handled()

        async def story() -> None:
            handle.gate = asyncio.Event()
            async with Environment(nats_url, nats_name, ack_wait=ACK_WAIT) as environment:
                async with worker(environment, "memory:", handle, mode=mode):
                    await environment.send_keyed("pay-1")
                    await environment.send_keyed("pay-2")
                    # Of both: the second waits for its turn meanwhile.
                    await until(lambda: len(signs) >= 2 * 3 * nats_consumer.BEATS, "they are in progress")
                    assert len(set(signs)) == 2
                    assert len(handle.calls) == 1
                    handle.gate.set()
                    await environment.settled(2)
                info = await environment.info()
                assert (info.num_redelivered, info.delivered.consumer_seq) == (0, 2)

        in_time(story())

        assert [one.num_delivered for one in handle.calls] == [1, 1]

    def test_a_handler_that_blocks_its_loop_is_not_run_a_second_time_and_its_late_end_counts(
        self, nats_url: str, nats_name: str, tmp_path: Path
    ) -> None:
        store, again = f"sqlite:///{tmp_path}/records.db", threading.Event()
        ran: list[int] = []

        async def blocks(delivery: Delivery) -> None:
            ran.append(delivery.num_delivered)
            # Not one sign of progress can be sent until another worker has got the message.
            assert again.wait(PATIENCE)

        async def runs(delivery: Delivery) -> None:
            ran.append(delivery.num_delivered)

        async def slow(begun: threading.Event) -> None:
            async with worker(environment, store, blocks):
                begun.set()
                await until(again.is_set, "it goes on")

        async def story() -> None:
            async with environment:
                await environment.send_keyed("pay-1")
                begun = threading.Event()
                blocked = asyncio.create_task(asyncio.to_thread(asyncio.run, slow(begun)))
                await until(lambda: ran, "it runs")
                async with worker(environment, store, runs, wait=0):
                    await until(lambda: environment.heard("MSG_NAKED"), "the other worker gives it back")
                    again.set()
                    await blocked
                    await environment.settled(1)
                assert await environment.letters() == []

        environment = Environment(nats_url, nats_name, ack_wait=0.3)
        in_time(story())

        assert ran == [1]

    def test_a_message_whose_claim_is_lost_is_not_kept_from_others(self, nats_url: str, nats_name: str) -> None:
        ran: list[int] = []

        async def story() -> None:
            second = asyncio.Event()

            async def handle(delivery: Delivery) -> None:
                ran.append(delivery.num_delivered)
                if len(ran) > 1:
                    store.down = set()
                    second.set()
                    return
                store.down = {"extend"}
                await until(lambda: current().lost, "the claim is lost")
                await second.wait()

            async with Environment(nats_url, nats_name, ack_wait=ACK_WAIT) as environment:
                async with worker(environment, store, handle, concurrency=2, lease=0.5):
                    await environment.send_keyed("pay-1")
                    await environment.settled(1)
                assert await environment.letters() == []

        store = AsyncProxyStore()
        in_time(story())

        assert ran == [1, 2]

    def test_the_shortest_back_off_counts(self) -> None:
        settings = nats_messages.checked(
            ConsumerConfig(ack_wait=30, backoff=[2, 9], max_deliver=5, ack_policy=EXPLICIT)
        )

        assert settings == nats_consumer.Settings(2, 5)

    def test_handlers_that_never_wait_let_others_have_their_turn(
        self, nats_url: str, nats_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Signs of progress and heartbeats among them: the loop goes on between two messages."""
        monkeypatch.setattr(nats_jobs, "YIELD_SECONDS", 0.0)
        turns: list[str] = []

        async def handle(delivery: Delivery) -> None:
            turns.append("message")

        async def others() -> None:
            while turns.count("message") < 5:
                turns.append("other")
                await asyncio.sleep(0)

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment, AsyncGuard("memory:") as guard:
                for number in range(5):
                    await environment.send_keyed(f"pay-{number}")
                subscription = await environment.js.pull_subscribe(environment.subject, DURABLE)
                fetched = await subscription.fetch(5)
                callback = guarded(guard, "charge", handle, key=header(), dead_letter=environment.dead)
                await asyncio.gather(callback.batch(fetched), others())

        in_time(story())

        first, last = turns.index("message"), len(turns) - turns[::-1].index("message")
        assert turns[first:last].count("other") >= 4

    def test_a_reply_subject_may_name_a_domain(self) -> None:
        short = "$JS.ACK.CHARGES.pay.3.17.9.1795000997576981322.4"
        long = "$JS.ACK.hub.acchash.CHARGES.pay.3.17.9.1795000997576981322.4"
        expected = ("CHARGES", "pay", "3", "17", "1795000997576981322")

        assert [nats_messages.origin_of(one) for one in (short, long, f"{long}.random")] == [expected] * 3

    def test_settings_that_cannot_be_read_are_assumed_and_told(
        self, nats_url: str, nats_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled()

        async def forbidden(_message: Msg) -> Any:
            raise nats.errors.TimeoutError

        monkeypatch.setattr(nats_messages, "settings_of", forbidden)

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await environment.send_keyed("pay-1")
                await environment.send_keyed("pay-2")
                async with worker(environment, "memory:", handle):
                    await environment.settled(2)

        in_time(story())

        assert len(handle.calls) == 2
        (told,) = [line for line in caplog.messages if "cannot be read" in line]
        assert "ack_wait=30 s and no max_deliver are assumed" in told


EXPLICIT = AckPolicy.EXPLICIT


class TestRules:
    """What is waited for is asked less and less often, and what is given back is never given back at once."""

    def after(self, later: Later, delivered: int, settings: nats_consumer.Settings, age: float = 0.0) -> Any:
        delivery = Delivery(b"", {}, None, "charges", "CHARGES", 1, delivered, "CHARGES.c.1.1", None)
        return nats_consumer.Rules("charge", "dead", unacked_max=900.0).after(later, delivery, settings, age)

    @pytest.mark.parametrize(("delivered", "delay"), [(1, 1), (2, 2), (4, 8), (7, 60), (999, 60)])
    def test_a_store_that_is_down_is_asked_less_and_less_often(self, delivered: int, delay: float) -> None:
        down = Later(1.0, "the store is down", error=StoreUnavailable("down"))

        assert self.after(down, delivered, nats_consumer.Settings())[:2] == ("give back", delay)

    @pytest.mark.parametrize(("age", "delay"), [(0.0, 1), (3.0, 3), (30.0, 30), (600.0, 60)])
    def test_and_so_it_is_in_place(self, age: float, delay: float) -> None:
        down = Later(1.0, "the store is down", error=StoreUnavailable("down"))

        assert self.after(down, 1, nats_consumer.Settings(max_deliver=2), age)[:2] == ("again", delay)

    def test_a_running_duplicate_comes_when_the_lease_of_the_other_is_over(self) -> None:
        running = Later(17.0, "another worker runs it", error=InProgress("running"))

        assert self.after(running, 9, nats_consumer.Settings())[:2] == ("give back", 17.0)

    def test_what_has_waited_long_in_place_is_given_back_but_on_its_last_delivery(self) -> None:
        running = Later(17.0, "another worker runs it")

        assert self.after(running, 1, nats_consumer.Settings(max_deliver=2), 890.0)[:2] == ("give back", SOON)
        assert self.after(running, 2, nats_consumer.Settings(max_deliver=2), 890.0)[:2] == ("again", 17.0)
        held = Later(60.0, "held", limited=True)
        assert self.after(held, 1, nats_consumer.Settings(max_deliver=2), 890.0)[:3] == ("bury", 0.0, "held")


class TestMaxDeliver:
    """The server never delivers a message again that has used up its deliveries: it has to be settled before."""

    def test_the_last_delivery_that_fails_is_a_dead_letter(self, shortly: None, nats_url: str, nats_name: str) -> None:
        handle = Handled(failures=99)

        async def story() -> str:
            async with Environment(nats_url, nats_name, max_deliver=2) as environment:
                await environment.send_keyed("pay-1")
                async with worker(environment, "memory:", handle):
                    letter = await environment.letter()
                    await environment.settled(1)
                assert await environment.count("MAX_DELIVERIES") == 0
                return str((letter.headers or {})["x-onefold-reason"])

        assert in_time(story()).startswith("its delivery 2 of 2 and last failed with ValueError")
        assert len(handle.calls) == 2

    def test_what_waits_for_the_store_uses_up_no_delivery(
        self, mode: Mode, shortly: None, nats_url: str, nats_name: str
    ) -> None:
        handle, store = Handled(), AsyncProxyStore()
        store.down = {"claim"}

        async def story() -> None:
            async with Environment(nats_url, nats_name, max_deliver=1) as environment:
                await environment.send_keyed("pay-1")
                async with worker(environment, store, handle, mode=mode):
                    await until(lambda: store.calls["claim"] >= 3, "the store is asked again and again")
                    store.down = set()
                    await environment.settled(1)
                assert await environment.letters() == []
                assert await environment.count("MSG_NAKED") == 0

        in_time(story())

        assert [one.num_delivered for one in handle.calls] == [1]

    def test_a_worker_that_leaves_buries_what_nobody_would_deliver_again(
        self, shortly: None, nats_url: str, nats_name: str
    ) -> None:
        handle, store = Handled(), AsyncProxyStore()
        store.down = {"claim"}

        async def story() -> str:
            async with Environment(nats_url, nats_name, max_deliver=1) as environment:
                await environment.send_keyed("pay-1")
                async with worker(environment, store, handle):
                    await until(lambda: store.calls["claim"], "the store is asked")
                letter = await environment.letter()
                await environment.settled(1)
                return str((letter.headers or {})["x-onefold-reason"])

        assert in_time(story()).startswith("it was the last of 1 deliveries, and waited: StoreUnavailable")
        assert handle.calls == []

    def test_a_worker_that_leaves_runs_what_nobody_would_deliver_again(self, nats_url: str, nats_name: str) -> None:
        handle = Handled()

        async def story() -> None:
            handle.gate = asyncio.Event()
            async with Environment(nats_url, nats_name, max_deliver=1) as environment:
                for number in range(3):
                    await environment.send_keyed(f"pay-{number}")
                async with worker(environment, "memory:", handle, mode="push") as one:
                    await until(lambda: len(one.callback._jobs) == 3, "it has all of them")
                    stopping = asyncio.create_task(one.stop())
                    await until(lambda: one.callback._jobs.is_leaving, "it leaves")
                    handle.gate.set()
                    assert await stopping
                await environment.settled(3)

        in_time(story())

        assert len(handle.calls) == 3

    def test_a_limit_that_was_set_later_is_seen(
        self, shortly: None, nats_url: str, nats_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nats_jobs, "SETTINGS_SECONDS", 0.0)

        async def story() -> str:
            async with Environment(nats_url, nats_name) as environment:

                async def handle(_delivery: Delivery) -> None:
                    config = (await environment.info()).config
                    await environment.js.add_consumer(nats_name, config.evolve(max_deliver=2))
                    raise ValueError

                await environment.send_keyed("pay-1")
                async with worker(environment, "memory:", handle):
                    letter = await environment.letter()
                    return str((letter.headers or {})["x-onefold-reason"])

        assert in_time(story()).startswith("its delivery 2 of 2 and last failed")


class TestDeadLetters:
    def test_a_dead_letter_that_no_stream_takes_is_kept_and_tried_again(
        self, shortly: None, nats_url: str, nats_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def story() -> None:
            async with Environment(nats_url, nats_name, dead=False) as environment:
                await environment.send()
                async with worker(environment, "memory:", Handled()):
                    await until(told, "it is refused")
                    assert (await environment.info()).num_ack_pending == 1
                    await environment.add_dead_letters()
                    await environment.letter()
                    await environment.settled(1)

        def told() -> list[str]:
            return [line for line in caplog.messages if "did not accept a dead letter: NoStreamResponseError" in line]

        in_time(story())

        assert told()

    def test_a_consumer_that_reads_its_own_dead_letters_is_told_and_does_not_go_round(
        self, nats_url: str, nats_name: str
    ) -> None:
        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment, AsyncGuard("memory:") as guard:
                await environment.send()
                dead = f"{environment.subject}.dead"
                callback = guarded(guard, "charge", Handled(), key=header(), dead_letter=dead)
                subscription = await environment.js.pull_subscribe(f"{nats_name}.>", DURABLE)
                with pytest.raises(UsageError, match="a subject that this consumer reads"):
                    await callback.consume(subscription)
                assert (await environment.js.stream_info(nats_name)).state.messages == 2

        in_time(story())

    def test_one_message_that_is_buried_twice_is_one_dead_letter(self, nats_url: str, nats_name: str) -> None:
        async def story() -> None:
            async with Environment(nats_url, nats_name, ack_wait=0.3) as environment:
                await environment.send()
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(nats_messages, "terminate", lost)
                    async with worker(environment, "memory:", Handled()):
                        await until(lambda: len(ended) >= 2, "it is buried twice")
                assert len(await environment.letters()) == 1

        ended: list[str] = []

        async def lost(_message: Msg, reason: str) -> None:
            ended.append(reason)
            raise nats.errors.TimeoutError

        in_time(story())

    def test_the_servers_own_headers_do_not_go_along(self, nats_url: str, nats_name: str) -> None:
        """A rollup would empty the dead letters, and an expected sequence have them refused."""

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await environment.js.update_stream(
                    name=nats_name, subjects=[environment.subject], allow_rollup_hdrs=True
                )
                await environment.send(b"1")
                async with worker(environment, "memory:", Handled()):
                    await until(environment.letters, "the first is there")
                    rollup = {"Nats-Rollup": "all", "Nats-Expected-Last-Sequence": "1", "x-mine": "kept"}
                    await environment.js.publish(environment.subject, b"2", headers=rollup)
                    await until(lambda: two(environment), "both are there")
                first, second = await environment.letters()
                assert (first.data, second.data) == (b"1", b"2")
                assert (second.headers or {})["x-mine"] == "kept"
                assert not any(name.startswith("Nats-Exp") or name == "Nats-Rollup" for name in second.headers or ())

        async def two(environment: Environment) -> bool:
            return len(await environment.letters()) == 2

        in_time(story())

    @pytest.mark.parametrize(
        ("size", "headers", "kept"),
        [
            (0, {"large": "x" * 60_000, "small": "y"}, {"large", "small"}),
            (0, {"large": "x" * 65_400, "small": "y"}, {"small"}),
            (1_048_576 - 60_200, {"large": "x" * 60_000, "small": "y"}, {"small"}),
            (1_048_576, {}, set()),
        ],
    )
    def test_a_dead_letter_is_never_too_large_and_keeps_its_body(
        self, size: int, headers: dict[str, str], kept: set[str], nats_url: str, nats_name: str
    ) -> None:
        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await environment.js.publish(environment.subject, b"b" * size, headers=headers or None)
                async with worker(environment, "memory:", Handled()) as one:
                    letter = await environment.letter()
                    await environment.settled(1)
                    assert one.client.stats["reconnects"] == 0
                assert len(letter.data) == size
                found = letter.headers or {}
                assert {*headers} & {*found} == kept
                if size < 1_000_000:
                    assert found["x-onefold-reason"] == "it has no key"
                    assert found.get("x-onefold-dropped-headers") == (None if len(kept) == len(headers) else "large")

        in_time(story())

    def test_what_comes_back_from_the_dead_letters_runs_if_it_has_not_run(
        self, shortly: None, nats_url: str, nats_name: str
    ) -> None:
        handle = Handled(failures=1)

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await environment.send_keyed("pay-1")
                async with worker(environment, "memory:", handle, attempts=1):
                    letter = await environment.letter()
                    for _ in range(2):
                        await environment.js.publish(environment.subject, letter.data, headers=letter.headers)
                    await environment.settled(2)

        in_time(story())

        assert len(handle.calls) == 2

    @pytest.mark.parametrize("since", [(2, 11), (99, 0)])
    def test_a_stream_that_is_a_work_queue_keeps_nothing_that_is_settled(
        self, since: tuple[int, int], nats_url: str, nats_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither what is done, nor what is a dead letter; nor on a server that takes no reason for it."""
        monkeypatch.setattr(nats_messages, "REASONS_SINCE", since)

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await environment.js.delete_stream(nats_name)
                await environment.js.add_stream(name=nats_name, subjects=[environment.subject], retention="workqueue")
                async with worker(environment, "memory:", Handled()):
                    await environment.send_keyed("pay-1")
                    await environment.send()
                    await environment.letter()
                    await environment.settled(2)
                assert (await environment.js.stream_info(nats_name)).state.messages == 0
                await until(lambda: environment.heard("MSG_TERMINATED"), "the server tells it")
                assert ("reason" in environment.heard("MSG_TERMINATED")[0]) == (since < (99, 0))

        in_time(story())


class TestSubscriptions:
    def test_a_subscription_that_would_acknowledge_by_itself_does_not(
        self, shortly: None, nats_url: str, nats_name: str
    ) -> None:
        handle = Handled(failures=1)

        async def story() -> None:
            handle.gate = asyncio.Event()
            async with Environment(nats_url, nats_name) as environment:
                await environment.send_keyed("pay-1")
                async with worker(environment, "memory:", handle, mode="push", manual_ack=False):
                    await until(lambda: len(handle.calls) == 2, "it is run again")
                    assert (await environment.info()).num_ack_pending == 1
                    handle.gate.set()
                    await environment.settled(1)

        in_time(story())

        assert [one.num_delivered for one in handle.calls] == [1, 2]

    @pytest.mark.parametrize(
        ("policy", "why"), [(AckPolicy.NONE, "before it is handled"), (AckPolicy.ALL, "for messages before it")]
    )
    def test_a_consumer_that_is_not_acknowledged_message_by_message_is_refused(
        self, policy: AckPolicy, why: str, nats_url: str, nats_name: str
    ) -> None:
        handle = Handled()

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment, AsyncGuard("memory:") as guard:
                await environment.send_keyed("pay-1")
                callback = guarded(guard, "charge", handle, key=header(), dead_letter=environment.dead)
                config = ConsumerConfig(ack_policy=policy)
                subscription = await environment.js.subscribe(environment.subject, config=config)
                with pytest.raises(UsageError, match=why):
                    await callback(await subscription.next_msg(PATIENCE))

        in_time(story())

        assert handle.calls == []

    @pytest.mark.parametrize("reply", ["inbox.of.somebody", "one.that.has.as.many.parts.as.an.acknowledgement"])
    def test_a_message_that_is_not_of_jetstream_is_refused(self, reply: str, nats_url: str, nats_name: str) -> None:
        async def story() -> None:
            async with AsyncGuard("memory:") as guard:
                client = await connected(nats_url)
                callback = guarded(guard, "charge", Handled(), key=header(), dead_letter="dead")
                subscription = await client.subscribe(nats_name)
                await client.publish(nats_name, b"{}", reply=reply)
                with pytest.raises(UsageError, match="no message of JetStream"):
                    await callback(await subscription.next_msg(PATIENCE))
                await client.close()

        in_time(story())

    def test_batch_handles_what_was_fetched_and_returns_when_each_had_its_turn(
        self, nats_url: str, nats_name: str
    ) -> None:
        handle = Handled(failures=1)

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment, AsyncGuard("memory:") as guard:
                for number in range(5):
                    await environment.send_keyed(f"pay-{number}")
                callback = guarded(guard, "charge", handle, key=header(), dead_letter=environment.dead, concurrency=2)
                subscription = await environment.js.pull_subscribe(environment.subject, DURABLE)
                await callback.batch(await subscription.fetch(5))
                assert len(handle.calls) == 5
                assert await callback.drain()
                info = await environment.info()
                # The first has failed, and comes again later.
                assert info.num_ack_pending == 1
                with pytest.raises(UsageError, match="takes the list that fetch"):
                    await callback.batch(handle.calls[0].native)

        in_time(story())

    def test_one_at_a_time_they_run_in_the_streams_order_and_otherwise_at_once(
        self, mode: Mode, nats_url: str, nats_name: str
    ) -> None:
        async def run(concurrency: int, first: int) -> tuple[list[bytes], int]:
            seen: list[bytes] = []
            running = most = 0
            gate = asyncio.Event()

            async def handle(delivery: Delivery) -> None:
                nonlocal running, most
                running += 1
                most = max(most, running)
                if most == concurrency:
                    gate.set()
                await gate.wait()
                for _ in range(10):
                    # Whoever may run besides this one begins.
                    await asyncio.sleep(0)
                seen.append(delivery.body)
                running -= 1

            async with worker(environment, "memory:", handle, mode=mode, concurrency=concurrency):
                for number in range(first, first + 20):
                    await environment.send_keyed(f"pay-{number}", b"%d" % number)
                await environment.settled(first + 20)
            return seen, most

        async def story() -> None:
            async with environment:
                assert await run(1, 0) == ([b"%d" % number for number in range(20)], 1)
                seen, most = await run(4, 20)
                assert (len(set(seen)), most) == (20, 4)

        environment = Environment(nats_url, nats_name)
        in_time(story())

    def test_consume_takes_no_more_than_it_is_told(self, nats_url: str, nats_name: str) -> None:
        ran: list[Delivery] = []

        async def story() -> None:
            gate = asyncio.Semaphore(0)

            async def handle(delivery: Delivery) -> None:
                await gate.acquire()
                ran.append(delivery)

            async with Environment(nats_url, nats_name) as environment, AsyncGuard("memory:") as guard:
                for number in range(10):
                    await environment.send_keyed(f"pay-{number}")
                callback = guarded(guard, "charge", handle, key=header(), dead_letter=environment.dead)
                subscription = await environment.js.pull_subscribe(environment.subject, DURABLE)
                consuming = asyncio.create_task(callback.consume(subscription, batch=4))
                await until(lambda: len(callback._jobs) == 4, "it has as many")
                assert (await environment.info()).num_pending == 6
                for _ in range(2):
                    gate.release()
                await until(lambda: fetched_more(environment), "it fetches more")
                assert (await environment.info()).num_pending == 4
                for _ in range(8):
                    gate.release()
                await environment.settled(10)
                assert await callback.drain(within=PATIENCE)
                await consuming
                with pytest.raises(UsageError, match="for a pull subscription"):
                    await callback.consume(await environment.js.subscribe(environment.subject))  # type: ignore[arg-type]

        async def fetched_more(environment: Environment) -> bool:
            return bool((await environment.info()).num_pending < 6)

        in_time(story())

        assert len(ran) == 10


class TestDrain:
    def test_what_runs_is_settled_and_what_was_not_started_goes_to_others_at_once(
        self, mode: Mode, nats_url: str, nats_name: str
    ) -> None:
        handle, other = Handled(), Handled()

        async def story() -> None:
            handle.gate = asyncio.Event()
            async with AsyncExitStack() as stack:
                environment = await stack.enter_async_context(Environment(nats_url, nats_name, ack_wait=LONG_ACK_WAIT))
                for number in range(3):
                    await environment.send_keyed(f"pay-{number}")
                one = await stack.enter_async_context(worker(environment, "memory:", handle, mode=mode))
                await until(lambda: len(one.callback._jobs) == 3, "it has all of them")
                stopping = asyncio.create_task(one.stop())
                await until(lambda: len(environment.heard("MSG_NAKED")) == 2, "the others are given back")
                assert not stopping.done()
                handle.gate.set()
                assert await stopping
                assert (await environment.info()).num_ack_pending == 2
                await stack.enter_async_context(worker(environment, "memory:", other, mode=mode))
                await environment.settled(3)

        in_time(story())

        assert (len(handle.calls), len(other.calls)) == (1, 2)
        # The server also counts what it could not deliver, because nobody was there any more.
        assert all(one.num_delivered >= 2 for one in other.calls)

    @pytest.mark.parametrize("sent_before", [0, 3], ids=["new ones", "those given back"])
    @pytest.mark.parametrize("cancelled", [False, True], ids=["drained", "cancelled, then drained"])
    def test_a_request_that_outlives_its_fetch_keeps_no_message_from_others(
        self, nats_url: str, nats_name: str, sent_before: int, cancelled: bool
    ) -> None:
        """As one that reached the server late, or was cancelled: what it gets waits for the end of `ack_wait`."""
        handle, other = Handled(), Handled()

        async def story() -> None:
            handle.gate = asyncio.Event()
            async with AsyncExitStack() as stack:
                environment = await stack.enter_async_context(Environment(nats_url, nats_name, ack_wait=LONG_ACK_WAIT))
                for number in range(sent_before):
                    await environment.send_keyed(f"pay-{number}")
                one = await stack.enter_async_context(worker(environment, "memory:", handle))
                requests = lasting_longer(one.client, PATIENCE)
                await until(lambda: len(one.callback._jobs) == sent_before, "it has all of them")
                await until(lambda: requests, "it asks for more")
                if cancelled and one.consuming is not None:
                    one.consuming.cancel()
                    await asyncio.wait([one.consuming])
                stopping = asyncio.create_task(one.stop())
                if sent_before:
                    await until(lambda: len(environment.heard("MSG_NAKED")) == 2, "the others are given back")
                    handle.gate.set()
                assert await stopping
                for number in range(sent_before, 3):
                    await environment.send_keyed(f"pay-{number}")
                await stack.enter_async_context(worker(environment, "memory:", other))
                await environment.settled(3)

        in_time(story())

        assert (len(handle.calls), len(other.calls)) == ((1, 2) if sent_before else (0, 3))

    def test_a_handler_that_still_runs_is_told(self, nats_url: str, nats_name: str) -> None:
        handle = Handled()

        async def story() -> None:
            handle.gate = asyncio.Event()
            async with Environment(nats_url, nats_name) as environment:
                await environment.send_keyed("pay-1")
                async with worker(environment, "memory:", handle, mode="push") as one:
                    await until(lambda: handle.calls, "it runs")
                    assert not await one.callback.drain(within=0.01)
                    handle.gate.set()
                    assert await one.callback.drain(within=PATIENCE)
                await environment.settled(1)

        in_time(story())

    def test_a_message_that_comes_after_drain_is_given_back_and_told(
        self, nats_url: str, nats_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled()

        async def story() -> None:
            async with (
                Environment(nats_url, nats_name) as environment,
                worker(environment, "memory:", handle, mode="push") as one,
            ):
                assert await one.callback.drain()
                await environment.send_keyed("pay-1")
                await until(lambda: environment.heard("MSG_NAKED"), "it is given back")

        in_time(story())

        assert handle.calls == []
        assert any("it came after drain() and was not started" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"dead_letter": ""}, "the subject of a stream for dead letters"),
        ({"dead_letter": "dead.>"}, "without wildcards"),
        ({"dead_letter": None}, "the subject of a stream for dead letters"),
        ({"attempts": 0}, "attempts"),
        ({"concurrency": 0}, "concurrency"),
        ({"unacked_max": "soon"}, "unacked_max"),
        ({"key": header}, r"write key=header\("),
    ],
)
def test_wrong_options_are_refused_before_the_first_message(wrong: dict[str, Any], says: str) -> None:
    right: dict[str, Any] = {"key": header(), "dead_letter": "dead"}

    with pytest.raises(UsageError, match=says):
        guarded(AsyncGuard("memory:"), "charge", Handled(), **right | wrong)
