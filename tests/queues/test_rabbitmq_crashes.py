"""RabbitMQ: workers that are killed, connections that are lost, and a broker that goes and comes back."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aio_pika
import aiormq
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError, NackError, UnroutableError

from onefold import Guard, MissingKey, Policy, UsageError, current
from onefold.queues import aio_pika as onefold_aio_pika
from onefold.queues import pika as onefold_pika
from onefold.queues._rabbitmq import consumer as rabbitmq_consumer
from onefold.queues._rabbitmq.consumer import Delivery
from services.fixtures import missing_told
from services.house import House
from services.rabbitmq import write_down
from services.servers import Server
from tests.processes import Stage, child, lapse
from tests.queues.rabbitmq_tools import LIBRARIES, Consumer, Environment, Library, until
from tests.support import PATIENCE
from tests.wallet import add, balance

# No pause of the machine outlasts it; after a kill its end is brought about.
LEASE = 3_600.0


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    chosen: Library = request.param
    return chosen


@pytest.fixture
def environment(rabbitmq_url: str, rabbitmq_name: str) -> Environment:
    return Environment(rabbitmq_url, rabbitmq_name)


class Credit:
    """A handler whose effect commits with its record."""

    def __init__(self, stage: Stage | None = None) -> None:
        self._stage = stage

    def __call__(self, delivery: Delivery, *, tx: Any) -> None:
        add(tx, int(delivery.body))
        if self._stage is not None:
            self._stage.at("after the effect")


class Charge:
    """A handler whose effect is elsewhere: one line with the key that the other side is given."""

    def __init__(self, effects: Path, stage: Stage | None = None) -> None:
        self._effects = effects
        self._stage = stage

    def __call__(self, delivery: Delivery) -> None:
        with self._effects.open("a") as effects:
            effects.write(f"{current().key_for('gateway')}\n")
        if self._stage is not None:
            self._stage.at("after the effect")


def work(
    stage: Stage, library: Library, environment: Environment, store: str, effects: Path | None, policy: Policy | None
) -> None:
    """The part of a worker that is killed on the stage."""
    stopping_before_the_ack(stage)
    handler: Callable[..., Any] = Credit(stage) if effects is None else Charge(effects, stage)
    with Consumer(library, environment, store, handler, policy=policy, prefetch=1):
        threading.Event().wait()


def stopping_before_the_ack(stage: Stage) -> None:
    blocking, async_handler = BlockingChannel.basic_ack, aiormq.channel.Channel.basic_ack

    def basic_ack(channel: Any, *args: Any, **kwargs: Any) -> None:
        stage.at("before the ack")
        blocking(channel, *args, **kwargs)

    async def async_ack(channel: Any, *args: Any, **kwargs: Any) -> None:
        stage.at("before the ack")
        await async_handler(channel, *args, **kwargs)

    BlockingChannel.basic_ack = basic_ack  # type: ignore[assignment, method-assign]
    aiormq.channel.Channel.basic_ack = async_ack  # type: ignore[assignment, method-assign]


STEPS = ("after the effect", "before the ack")


class TestKilledWorkers:
    @pytest.mark.parametrize("step", STEPS)
    def test_in_a_transaction_the_effect_happens_exactly_once(
        self, library: Library, environment: Environment, path: Path, step: str
    ) -> None:
        store = f"sqlite:///{path}"
        environment.send_keyed("pay-1", b"10")

        with child(work, library, environment, store, None, None, stops=(step,)) as worker:
            worker.reaches(step)
            worker.kill()
        assert balance(path) == (0 if step == "after the effect" else 10)
        with Consumer(library, environment, store, Credit()) as consumer:
            until(lambda: consumer.acks == 1, "it is acknowledged")

        assert balance(path) == 10
        assert (environment.count(), environment.count(environment.dead)) == (0, 0)

    @pytest.mark.parametrize("step", STEPS)
    def test_a_claim_is_run_again_with_the_same_key_for_the_other_side(
        self, library: Library, environment: Environment, tmp_path: Path, step: str
    ) -> None:
        store, effects, policy = f"sqlite:///{tmp_path}/records.db", tmp_path / "effects", Policy(lease=LEASE)
        environment.send_keyed("pay-1")

        with child(work, library, environment, store, effects, policy, stops=(step,)) as worker:
            worker.reaches(step)
            worker.kill()
        lapse(tmp_path / "records.db")
        with Consumer(library, environment, store, Charge(effects), policy=policy) as consumer:
            until(lambda: consumer.acks == 1, "it is acknowledged")

        assert done(store)
        keys = effects.read_text().split()
        assert len(keys) == (2 if step == "after the effect" else 1)
        assert len(set(keys)) == 1
        assert (environment.count(), environment.count(environment.dead)) == (0, 0)

    def test_under_hold_it_is_not_run_again_and_waits_for_a_person(
        self, library: Library, environment: Environment, tmp_path: Path
    ) -> None:
        store, effects = f"sqlite:///{tmp_path}/records.db", tmp_path / "effects"
        policy = Policy(lease=LEASE, after_crash="hold")
        environment.send_keyed("pay-1")

        with child(work, library, environment, store, effects, policy, stops=STEPS[:1]) as worker:
            worker.reaches("after the effect")
            worker.kill()
        lapse(tmp_path / "records.db")
        with Consumer(library, environment, store, Charge(effects), policy=policy, unacked_max=1):
            properties, _ = environment.letter()

        assert len(effects.read_text().split()) == 1
        assert properties.headers["x-onefold-reason"].startswith("Held: ")

    def test_under_skip_it_counts_as_done_and_nobody_has_to_look(
        self, library: Library, environment: Environment, tmp_path: Path
    ) -> None:
        store, effects = f"sqlite:///{tmp_path}/records.db", tmp_path / "effects"
        policy = Policy(lease=LEASE, after_crash="skip")
        environment.send_keyed("pay-1")

        with child(work, library, environment, store, effects, policy, stops=STEPS[:1]) as worker:
            worker.reaches("after the effect")
            worker.kill()
        lapse(tmp_path / "records.db")
        with Consumer(library, environment, store, Charge(effects), policy=policy) as consumer:
            until(lambda: consumer.acks == 1, "it is acknowledged")

        assert done(store)
        assert len(effects.read_text().split()) == 1
        assert (environment.count(), environment.count(environment.dead)) == (0, 0)


def done(store: str) -> bool:
    with Guard(store) as guard:
        record = guard.read("charge", "pay-1")
    return record is not None and record.state == "done"


@pytest.fixture(scope="module")
def mortal(request: pytest.FixtureRequest, house: House) -> Iterator[Server]:
    """A broker that these tests kill, one after the other: it takes long to start."""
    with missing_told(), house.own("rabbitmq") as server:
        yield server


class Scene:
    """A sync or async consumer whose handler waits while its broker goes."""

    def __init__(self, library: Library, server: Server, name: str, folder: Path, gate: threading.Event) -> None:
        self.library: Library = library
        self.environment = Environment(server.url, name)
        self.environment.send_keyed("pay-1")
        self.store = f"sqlite:///{folder}/{library}.db"
        self.runs: list[Delivery] = []
        self._gate = gate
        self.consumer = Consumer(library, self.environment, self.store, self._slow, loses_its_broker=True)

    def _slow(self, delivery: Delivery) -> None:
        self.runs.append(delivery)
        # A broker may take long to come back.
        assert self._gate.wait(6 * PATIENCE)


@pytest.mark.more
class TestBrokersThatGo:
    def test_a_handler_outlives_its_broker_and_the_message_that_comes_again_finds_it_done(
        self, mortal: Server, rabbitmq_name: str, tmp_path: Path
    ) -> None:
        gate = threading.Event()
        scenes = [Scene(library, mortal, f"{rabbitmq_name}-{library}", tmp_path, gate) for library in LIBRARIES]
        with ExitStack() as consumers:
            for scene in scenes:
                consumers.enter_context(scene.consumer)
                until(lambda scene=scene: scene.runs, "it runs")  # type: ignore[misc]
            write_down(mortal)
            mortal.kill()
            mortal.restart()
            gate.set()
            for scene in scenes:
                until(lambda scene=scene: done(scene.store), "it runs to its end, and is remembered")  # type: ignore[misc]

        for scene in scenes:
            again: list[Delivery] = []
            with Consumer(scene.library, scene.environment, scene.store, again.append) as consumer:
                until(lambda consumer=consumer: consumer.acks == 1, "it came again")  # type: ignore[misc]
            assert (len(scene.runs), again) == (1, [])
            assert (scene.environment.count(), scene.environment.count(scene.environment.dead)) == (0, 0)

    def test_a_sender_outlives_a_restart_of_the_broker(
        self, mortal: Server, rabbitmq_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A broker may take longer to come back than the half minute of a sender.
        monkeypatch.setattr(rabbitmq_consumer, "SEND_TRIES", 5 * rabbitmq_consumer.SEND_TRIES)
        environment = Environment(mortal.url, rabbitmq_name)
        channels: list[BlockingChannel] = []

        def channel() -> BlockingChannel:
            if not channels or not channels[-1].is_open:
                channels.append(pika.BlockingConnection(pika.URLParameters(environment.url)).channel())
            return channels[-1]

        async def sent() -> tuple[str, str]:
            async with await aio_pika.connect_robust(environment.url, reconnect_interval=0.2) as connection:
                robust = await connection.channel()
                await onefold_aio_pika.send(robust, environment.queue, b"before", key="pay-1")
                await asyncio.to_thread(onefold_pika.send, channel, environment.queue, b"before", key="pay-2")
                await asyncio.to_thread(write_down, mortal)
                await asyncio.to_thread(mortal.kill)
                back = asyncio.create_task(asyncio.to_thread(mortal.restart))
                keys = await asyncio.gather(
                    onefold_aio_pika.send(robust, environment.queue, b"after"),
                    asyncio.to_thread(onefold_pika.send, channel, environment.queue, b"after", key="pay-4"),
                )
                await back
                return keys

        minted, given = asyncio.run(sent())
        channel().connection.close()

        with environment.channel() as looking:
            found = []
            while (got := looking.basic_get(environment.queue, auto_ack=True))[0] is not None:
                found.append(got[1])
        assert {properties.message_id for properties in found} == {"pay-1", "pay-2", minted, "pay-4"}
        assert all(properties.headers["idempotency-key"] == properties.message_id for properties in found)
        assert given == "pay-4"
        assert len(channels) == 2


class TestSending:
    def test_a_key_is_minted_once_and_is_in_the_header_and_the_message_id(self, environment: Environment) -> None:
        async def async_handler() -> str:
            async with await aio_pika.connect(environment.url) as connection:
                channel = await connection.channel()
                return await onefold_aio_pika.send(
                    channel, environment.queue, b"{}", headers={"trace": "t"}, content_type="j"
                )

        with environment.channel() as channel:
            keys = [
                onefold_pika.send(channel, environment.queue, b"{}", headers={"trace": "t"}, content_type="j"),
                asyncio.run(async_handler()),
            ]
            found = [channel.basic_get(environment.queue, auto_ack=True)[1] for _ in keys]

        assert len({*keys}) == 2
        for key, properties in zip(keys, found, strict=True):
            assert (properties.message_id, properties.headers) == (key, {"trace": "t", "idempotency-key": key})
            assert (properties.delivery_mode, properties.content_type) == (2, "j")

    def test_what_no_queue_takes_is_an_error_at_once(
        self, environment: Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def async_handler() -> None:
            async with await aio_pika.connect(environment.url) as connection:
                await onefold_aio_pika.send(await connection.channel(), "nowhere", b"{}")

        # Whoever tries again cannot wait for this.
        monkeypatch.setattr(rabbitmq_consumer, "pauses", lambda: ["never"])
        with environment.channel() as channel, pytest.raises(UnroutableError):
            onefold_pika.send(channel, "nowhere", b"{}")
        with pytest.raises(aio_pika.exceptions.PublishError):
            asyncio.run(async_handler())

    def test_what_the_broker_does_not_confirm_is_sent_again_with_its_key(
        self, environment: Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        published, sent = BlockingChannel.basic_publish, []

        def refused_once(channel: Any, exchange: str, queue: str, body: bytes, properties: Any, **more: Any) -> None:
            sent.append(properties.message_id)
            published(channel, exchange, queue, body, properties, **more)
            if len(sent) == 1:
                raise NackError([])

        with environment.channel() as channel:
            monkeypatch.setattr(BlockingChannel, "basic_publish", refused_once)
            key = onefold_pika.send(channel, environment.queue, b"{}")

        assert sent == [key, key]

    def test_a_channel_that_is_closed_is_not_tried_again_and_again(
        self, environment: Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with environment.channel() as channel:
            pass

        monkeypatch.setattr(rabbitmq_consumer, "pauses", lambda: ["never"])
        with pytest.raises(AMQPError):
            onefold_pika.send(channel, environment.queue, b"{}")

    def test_a_channel_without_confirms_is_refused(self, environment: Environment) -> None:
        async def async_handler() -> None:
            async with await aio_pika.connect(environment.url) as connection:
                channel = await connection.channel(publisher_confirms=False)
                await onefold_aio_pika.send(channel, environment.queue, b"{}")

        with pytest.raises(UsageError, match="publisher_confirms"):
            asyncio.run(async_handler())

    @pytest.mark.parametrize("key", [42, uuid.UUID(int=42)])
    def test_a_number_or_a_uuid_is_sent_as_its_text(self, environment: Environment, key: Any) -> None:
        async def async_handler() -> str:
            async with await aio_pika.connect(environment.url) as connection:
                return await onefold_aio_pika.send(await connection.channel(), environment.queue, b"{}", key=key)

        with environment.channel() as channel:
            keys = [onefold_pika.send(channel, environment.queue, b"{}", key=key), asyncio.run(async_handler())]
            found = [channel.basic_get(environment.queue, auto_ack=True)[1] for _ in keys]

        assert keys == [str(key)] * 2
        assert [(one.headers["idempotency-key"], one.message_id) for one in found] == [(str(key), str(key))] * 2

    @pytest.mark.parametrize("key", ["", " ", "k" * 300, 1.5])
    def test_a_key_that_is_none_is_refused_before_anything_is_sent(self, environment: Environment, key: Any) -> None:
        with environment.channel() as channel, pytest.raises(MissingKey):
            onefold_pika.send(channel, environment.queue, b"{}", key=key)

        assert environment.count() == 0
