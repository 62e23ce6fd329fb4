"""NATS: workers that are killed, connections that are lost, a server that goes and comes back; and sending."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from onefold import Guard, MissingKey, Policy, UsageError, current
from onefold.events import Sent, subscribe_to_sends
from onefold.queues import nats as onefold_nats
from onefold.queues._nats import messages as nats_messages
from onefold.queues._nats.consumer import MSG_ID, Delivery
from onefold.queues.nats import send
from services.proxy import Proxy
from services.servers import Server
from tests.processes import Stage, child
from tests.queues.nats_tools import MODES, Environment, Handled, Mode, connected, until, worker
from tests.support import PATIENCE, in_time
from tests.wallet import add, balance

# Long enough for a heartbeat of a busy machine, short enough to wait for.
LEASE = 1.0

STEPS = ("after the effect", "before the ack")


class Credit:
    """A handler whose effect commits with its record."""

    def __init__(self, stage: Stage | None = None) -> None:
        self._stage = stage

    async def __call__(self, delivery: Delivery, *, tx: Any) -> None:
        add(tx, int(delivery.body))
        if self._stage is not None:
            self._stage.at("after the effect")


class Charge:
    """A handler whose effect is elsewhere: one line with the key that the other side is given."""

    def __init__(self, effects: Path, stage: Stage | None = None) -> None:
        self._effects = effects
        self._stage = stage

    async def __call__(self, delivery: Delivery) -> None:
        with self._effects.open("a") as effects:
            effects.write(f"{current().key_for('gateway')}\n")
        if self._stage is not None:
            self._stage.at("after the effect")


def work(stage: Stage, environment: Environment, store: str, effects: Path | None, policy: Policy | None) -> None:
    """The part of a worker that is killed on the stage."""
    ack = Msg.ack

    async def stopping(message: Msg) -> None:
        stage.at("before the ack")
        await ack(message)

    Msg.ack = stopping  # type: ignore[assignment, method-assign]
    handler: Callable[..., Any] = Credit(stage) if effects is None else Charge(effects, stage)

    async def story() -> None:
        async with worker(environment, store, handler, policy=policy):
            await asyncio.Event().wait()

    asyncio.run(story())


class TestKilledWorkers:
    @pytest.mark.parametrize("step", STEPS)
    def test_in_a_transaction_the_effect_happens_exactly_once(
        self, nats_url: str, nats_name: str, path: Path, step: str
    ) -> None:
        store, environment = f"sqlite:///{path}", Environment(nats_url, nats_name, ack_wait=0.5)

        async def story() -> None:
            async with Environment(nats_url, nats_name, ack_wait=0.5) as here:
                await here.send_keyed("pay-1", b"10")
                with child(work, environment, store, None, None, stops=(step,)) as killed:
                    await asyncio.to_thread(killed.reaches, step)
                    killed.kill()
                assert balance(path) == (0 if step == "after the effect" else 10)
                async with worker(here, store, Credit()):
                    await here.settled(1)
                assert await here.letters() == []

        in_time(story())

        assert balance(path) == 10

    @pytest.mark.parametrize("step", STEPS)
    def test_a_claim_is_run_again_with_the_same_key_for_the_other_side(
        self, nats_url: str, nats_name: str, tmp_path: Path, step: str
    ) -> None:
        store, effects, policy = f"sqlite:///{tmp_path}/records.db", tmp_path / "effects", Policy(lease=LEASE)
        environment = Environment(nats_url, nats_name, ack_wait=0.5)

        async def story() -> None:
            async with Environment(nats_url, nats_name, ack_wait=0.5) as here:
                await here.send_keyed("pay-1")
                with child(work, environment, store, effects, policy, stops=(step,)) as killed:
                    await asyncio.to_thread(killed.reaches, step)
                    killed.kill()
                async with worker(here, store, Charge(effects), policy=policy):
                    await here.settled(1)
                assert await here.letters() == []

        in_time(story())

        keys = effects.read_text().split()
        assert len(keys) == (2 if step == "after the effect" else 1)
        assert len(set(keys)) == 1
        with Guard(store) as guard:
            record = guard.read("charge", "pay-1")
            assert record is not None
            assert record.state == "done"


class TestLostConnections:
    def test_a_connection_that_is_cut_at_each_message_loses_and_doubles_nothing(
        self, nats_url: str, nats_name: str, path: Path
    ) -> None:
        """Cut before each acknowledgement reaches the server, in turn: it is sent again, or the message comes again."""

        async def story() -> None:
            async with Environment(nats_url, nats_name, ack_wait=0.5) as environment:
                with Proxy(nats_url) as proxy:
                    async with worker(environment, f"sqlite:///{path}", Credit(), url=proxy.url()) as one:
                        for number in range(5):
                            fault = proxy.cut_before(f"$JS.ACK.{nats_name}.".encode())
                            await environment.send_keyed(f"pay-{number}", b"10")
                            await until(fault.reached.is_set, "the connection is cut")
                        await environment.settled(5)
                        assert one.client.stats["reconnects"] >= 5
                assert await environment.letters() == []

        in_time(story())

        assert balance(path) == 50

    @pytest.mark.parametrize("mode", MODES)
    def test_a_handler_outlives_its_server_and_the_message_that_comes_again_finds_it_done(
        self, mode: Mode, own_nats: Server, path: Path
    ) -> None:
        handled = Handled()

        async def credit(delivery: Delivery, *, tx: Any) -> None:
            await handled(delivery)
            add(tx, int(delivery.body))

        async def story() -> None:
            handled.gate = asyncio.Event()
            async with Environment(own_nats.url, "charges", ack_wait=0.5) as environment:
                await environment.send_keyed("pay-1", b"10")
                async with worker(environment, f"sqlite:///{path}", credit, mode=mode) as one:
                    await until(lambda: handled.calls, "it runs")
                    own_nats.kill()
                    await until(lambda: not one.client.is_connected, "the connection is lost")
                    handled.gate.set()
                    await until(lambda: balance(path), "it has run to its end")
                    own_nats.restart()
                    await until(lambda: one.client.is_connected and environment.client.is_connected, "it is back")
                    await environment.settled(1)
                    await environment.send_keyed("pay-1", b"10")
                    await environment.send_keyed("pay-2", b"5")
                    await environment.settled(3)
                assert await environment.letters() == []

        in_time(story())

        assert balance(path) == 15
        assert len(handled.calls) == 2

    def test_nothing_is_asked_for_while_the_connection_is_lost(
        self, own_nats: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """nats-py keeps what is published meanwhile, and sends all of it later: each would fetch a batch."""
        publish, asked, handle = Client.publish, list[bool](), Handled()

        async def counted(client: Client, subject: str, *arguments: Any, **options: Any) -> None:
            if subject.startswith("$JS.API.CONSUMER.MSG.NEXT"):
                asked.append(client.is_connected)
            await publish(client, subject, *arguments, **options)

        monkeypatch.setattr(Client, "publish", counted)
        monkeypatch.setattr(onefold_nats, "RECONNECT_SECONDS", 0.001)

        async def story() -> None:
            looks = 0
            async with (
                Environment(own_nats.url, "charges") as environment,
                worker(environment, "memory:", handle) as one,
            ):
                fetched = one.callback._fetched

                async def looked(*arguments: Any, **options: Any) -> Any:
                    nonlocal looks
                    looks += not one.client.is_connected
                    return await fetched(*arguments, **options)

                monkeypatch.setattr(one.callback, "_fetched", looked)
                own_nats.kill()
                await until(lambda: looks >= 10, "it looks again and again")
                own_nats.restart()
                await until(lambda: environment.client.is_connected, "it is back")
                await environment.send_keyed("pay-1")
                await environment.settled(1)

        in_time(story())

        assert len(handle.calls) == 1
        assert asked.count(False) == 0

    def test_a_connection_that_is_closed_is_told_and_the_server_delivers_again(
        self, nats_url: str, nats_name: str, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        handled = Handled()

        async def credit(delivery: Delivery, *, tx: Any) -> None:
            await handled(delivery)
            add(tx, int(delivery.body))

        async def story() -> None:
            handled.gate = asyncio.Event()
            async with Environment(nats_url, nats_name, ack_wait=0.5) as environment:
                await environment.send_keyed("pay-1", b"10")
                async with worker(environment, f"sqlite:///{path}", credit, drains=False) as one:
                    await until(lambda: handled.calls, "it runs")
                    await one.client.close()
                    handled.gate.set()
                    assert await one.callback.drain(within=PATIENCE)
                async with worker(environment, f"sqlite:///{path}", credit):
                    await environment.settled(1)

        with caplog.at_level("INFO", "onefold.queues.nats"):
            in_time(story())

        assert balance(path) == 10
        assert len(handled.calls) == 1
        assert any("ConnectionClosedError, the server delivers it again" in line for line in caplog.messages)


class TestSend:
    def test_a_key_is_minted_once_and_the_stream_drops_what_is_sent_again_within_its_window(
        self, nats_url: str, nats_name: str
    ) -> None:
        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                key = await send(environment.js, environment.subject, b"1")
                assert await send(environment.js, environment.subject, b"1", key=key) == key
                assert str(uuid.UUID(key)) == key
                state = (await environment.js.stream_info(nats_name)).state
                assert state.messages == 1
                raw = await environment.js.get_msg(nats_name, 1)
                assert raw.headers == {"idempotency-key": key, MSG_ID: f"{key}@{environment.subject}"}

        in_time(story())

    def test_one_key_on_two_subjects_of_a_stream_is_two_messages(self, nats_url: str, nats_name: str) -> None:
        """A stream drops what has the id of another of its messages, on whichever subject."""

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                await send(environment.js, environment.subject, b"1", key="order-1")
                await send(environment.js, f"{environment.subject}.ship", b"1", key="order-1")
                assert (await environment.js.stream_info(nats_name)).state.messages == 2

        in_time(story())

    def test_the_senders_own_headers_are_kept_and_its_id_is_its_key(self, nats_url: str, nats_name: str) -> None:
        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                given = {"Nats-Msg-Id": "mine", "x-trace": "t"}
                assert await send(environment.js, environment.subject, b"1", headers=given) == "mine"
                given = {"Idempotency-Key": "other", "Nats-Msg-Id": "mine-2"}
                assert await send(environment.js, environment.subject, b"1", headers=given) == "other"
                found = [(await environment.js.get_msg(nats_name, number)).headers for number in (1, 2)]
                assert found == [
                    {"Nats-Msg-Id": "mine", "x-trace": "t", "idempotency-key": "mine"},
                    {"Nats-Msg-Id": "mine-2", "idempotency-key": "other"},
                ]

        in_time(story())

    @pytest.mark.parametrize("key", [" pay-1", "pay-1 ", "pay\n1", "pay\r1", "pay-1\x85"])
    def test_a_key_that_a_header_would_change_is_refused(self, key: str) -> None:
        with pytest.raises(MissingKey, match="nothing was sent"):
            in_time(send(NOTHING, "charges", b"", key=key))

    @pytest.mark.parametrize("headers", [{"x": "a\nb"}, {"x": 7}, {"ü": "a"}, {"a b": "c"}])
    def test_a_header_that_cannot_be_sent_is_refused(self, headers: Any) -> None:
        with pytest.raises(UsageError, match="one line of text"):
            in_time(send(NOTHING, "charges", b"", key="pay-1", headers=headers))

    def test_a_key_in_any_language_arrives_as_it_was_sent(self, nats_url: str, nats_name: str) -> None:
        handle = Handled()

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                for key in ("ключ 1", "鍵", "a: b", "=?utf-8?q?a?="):
                    await send(environment.js, environment.subject, b"1", key=key)
                async with worker(environment, "memory:", handle) as one:
                    await environment.settled(4)
                    for key in ("ключ 1", "鍵", "a: b", "=?utf-8?q?a?="):
                        record = await one.guard.read("charge", key)
                        assert record is not None

        in_time(story())

        assert len(handle.calls) == 4

    def test_what_the_server_does_not_confirm_is_sent_again_with_its_key(
        self, nats_url: str, nats_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publish, told = JetStreamContext.publish, list[Sent]()
        end = subscribe_to_sends(told.append)

        async def lost(js: Any, *arguments: Any, **options: Any) -> Any:
            answer = await publish(js, *arguments, **options)
            if len(told) < 3:
                raise nats.errors.TimeoutError
            return answer

        async def story() -> None:
            async with Environment(nats_url, nats_name) as environment:
                monkeypatch.setattr(JetStreamContext, "publish", lost)
                key = await send(environment.js, environment.subject, b"1")
                assert told == [Sent(environment.subject, key)] * 3
                assert (await environment.js.stream_info(nats_name)).state.messages == 1

        in_time(story())
        end()

    def test_it_survives_a_restart_of_the_server(self, own_nats: Server) -> None:
        async def story() -> None:
            async with Environment(own_nats.url, "charges") as environment:
                own_nats.kill()
                await until(lambda: not environment.client.is_connected, "the connection is lost")
                sending = asyncio.create_task(send(environment.js, environment.subject, b"1"))
                own_nats.restart()
                await sending
                assert (await environment.js.stream_info("charges")).state.messages == 1

        in_time(story())

    def test_it_raises_if_no_stream_takes_it(self, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nats_messages, "NOBODY_TRIES", 2)
        told = list[Sent]()
        end = subscribe_to_sends(told.append)

        async def story() -> None:
            client = await connected(nats_url)
            with pytest.raises(nats.js.errors.NoStreamResponseError):
                await send(client.jetstream(), "nobody.takes.this", b"1")
            await client.close()
            with pytest.raises(nats.errors.ConnectionClosedError):
                await send(client.jetstream(), "charges", b"1")

        in_time(story())
        end()

        assert len(told) == 3


NOTHING: Any = object()
