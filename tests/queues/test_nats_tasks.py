"""NATS JetStream: a worker whose task is cancelled or whose question is lost, that two loops share, or odd senders."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig

from onefold import AsyncGuard, OutcomeUnknown
from onefold.queues._nats import consumer as nats_consumer
from onefold.queues._nats import jobs as nats_jobs
from onefold.queues._nats import messages as nats_messages
from onefold.queues._nats.consumer import Delivery
from onefold.queues.keys import header
from onefold.queues.nats import guarded
from tests.queues.nats_tools import DURABLE, Environment, Handled, connected, until, worker
from tests.support import PATIENCE, in_time


@pytest.fixture(autouse=True)
def shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was cancelled, or failed, comes again in no time."""
    monkeypatch.setattr(nats_consumer, "FAILED_DELAY", 0.01)
    monkeypatch.setattr(nats_jobs, "SOON", 0.05)


def test_messages_behind_a_handler_that_cancels_its_task_do_not_wait_for_ever(nats_url: str, nats_name: str) -> None:
    sent, ran = 12, list[bytes]()

    async def handle(delivery: Delivery) -> None:
        ran.append(delivery.body)
        if delivery.body == b"0" and ran.count(b"0") == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    async def story() -> None:
        # Nothing is delivered again within the test, and the worker has too many messages to fetch another.
        async with Environment(nats_url, nats_name, ack_wait=3_600) as environment:
            for number in range(sent):
                await environment.send_keyed(f"pay-{number}", str(number).encode())
            async with worker(environment, "memory:", handle, lease=0.5, wait=0):
                await environment.settled(sent)

    in_time(story())

    # The one that was cancelled runs again once its claim is over, and in the same delivery.
    assert sorted(ran) == sorted([b"0", *(str(number).encode() for number in range(sent))])


def test_a_place_that_is_cancelled_between_two_messages_is_filled_again(
    nats_url: str, nats_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It gives way after each message, and is struck there.
    monkeypatch.setattr(nats_jobs, "YIELD_SECONDS", 0.0)
    handle, sent = Handled(), 10

    async def story() -> None:
        async with Environment(nats_url, nats_name, ack_wait=3_600) as environment:
            for number in range(sent):
                await environment.send_keyed(f"pay-{number}")

            async def cancelling(delivery: Delivery) -> None:
                await handle(delivery)
                task = asyncio.current_task()
                if len(handle.calls) == 1 and task is not None:
                    asyncio.get_running_loop().call_soon(task.cancel)

            async with worker(environment, "memory:", cancelling, lease=0.5, wait=0):
                await environment.settled(sent)

    in_time(story())

    assert len({one.sequence for one in handle.calls}) == sent


@pytest.mark.parametrize("waits_for", ["a person", "a dead-letter stream"])
def test_messages_that_wait_in_place_leave_room_for_others(waits_for: str, nats_url: str, nats_name: str) -> None:
    # More than a batch.
    waiting, ran = 12, list[bytes]()

    async def handle(delivery: Delivery) -> None:
        ran.append(delivery.body)
        if delivery.body == b"held":
            raise OutcomeUnknown("nobody knows")

    async def story() -> None:
        is_held = waits_for == "a person"
        async with (
            Environment(nats_url, nats_name, dead=is_held, max_deliver=5) as environment,
            worker(environment, "memory:", handle, after_crash="hold") as one,
        ):
            for number in range(waiting):
                await (environment.send_keyed(f"held-{number}", b"held") if is_held else environment.send())
            jobs = one.callback._jobs
            await until(lambda: jobs._aside == waiting, "all of them wait")
            await environment.send_keyed("pay-1", b"4200")
            await until(lambda: b"4200" in ran, "it runs past them")
            # They are with this worker, and in progress.
            assert len(jobs) >= waiting

    in_time(story())


def test_a_handler_that_cancels_its_task_while_its_worker_leaves_does_not_start_again(
    nats_url: str, nats_name: str
) -> None:
    ran, gate = list[Delivery](), asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        ran.append(delivery)
        await gate.wait()
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def story() -> None:
        async with Environment(nats_url, nats_name, ack_wait=3_600) as environment:
            await environment.send_keyed("pay-1")
            async with worker(environment, "memory:", handle, wait=0) as one:
                await until(lambda: ran, "it runs")
                leaving = asyncio.create_task(one.stop())
                await until(lambda: one.callback._jobs.is_leaving, "the worker leaves")
                gate.set()
                assert await leaving
                # It is given back, and nothing is left that would start.
                assert not len(one.callback._jobs)
            (again,) = await (await environment.js.pull_subscribe(environment.subject, DURABLE)).fetch(1, PATIENCE)
            assert again.metadata.num_delivered > 1

    in_time(story())

    assert len(ran) == 1


def test_the_last_delivery_of_a_message_behind_a_cancelled_one_runs_before_its_worker_has_left(
    nats_url: str, nats_name: str
) -> None:
    ran, gate = list[bytes](), asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        ran.append(delivery.body)
        await gate.wait()
        if delivery.body == b"0":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    async def story() -> None:
        async with Environment(nats_url, nats_name, ack_wait=3_600, max_deliver=1) as environment:
            for number in range(3):
                await environment.send_keyed(f"pay-{number}", str(number).encode())
            async with worker(environment, "memory:", handle, wait=0) as one:
                await until(lambda: len(one.callback._jobs) == 3, "it has all of them")
                leaving = asyncio.create_task(one.stop())
                await until(lambda: one.callback._jobs.is_leaving, "the worker leaves")
                gate.set()
                assert await leaving
                assert ran == [b"0", b"1", b"2"]
            letter = await environment.letter()
            assert letter.headers is not None
            assert "it was the last of 1 deliveries" in letter.headers["x-onefold-reason"]

    in_time(story())


def test_two_subscriptions_of_one_callback_each_have_their_own_batch(nats_url: str, nats_name: str) -> None:
    sent = 60
    ran: list[int] = []

    async def handle(delivery: Delivery) -> None:
        await asyncio.sleep(0.005)
        ran.append(delivery.sequence)

    async def story() -> None:
        async with Environment(nats_url, nats_name) as environment:
            client = await connected(nats_url)
            js = client.jetstream()
            async with AsyncGuard("memory:") as guard:
                callback = guarded(guard, "charge", handle, key=header(), dead_letter=environment.dead)
                few = await js.pull_subscribe(f"{environment.subject}.few", "few", config=ConsumerConfig())
                many = await js.pull_subscribe(f"{environment.subject}.many", "many", config=ConsumerConfig())
                for number in range(sent):
                    name = ("few", "many")[number % 2]
                    await js.publish(f"{environment.subject}.{name}", b"", headers={"idempotency-key": f"pay-{number}"})
                loops = [
                    asyncio.create_task(callback.consume(few, batch=2)),
                    asyncio.create_task(callback.consume(many, batch=40)),
                ]
                await until(lambda: len(ran) == sent or any(one.done() for one in loops), "all have run")
                assert await callback.drain()
                await asyncio.gather(*loops)
            await client.close()

    in_time(story())

    assert len(ran) == sent


def test_a_consumer_that_was_deleted_is_named_in_the_log(
    nats_url: str, nats_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    handle = Handled()

    async def story() -> None:
        async with Environment(nats_url, nats_name) as environment, worker(environment, "memory:", handle):
            await environment.send_keyed("pay-1")
            await environment.settled(1)
            await environment.js.delete_consumer(environment.stream, DURABLE)
            says = f"the consumer {DURABLE} of the stream {nats_name} does not answer: it was deleted"
            await until(lambda: says in caplog.text, "it is told")
            # Whoever creates it again need not start the worker again.
            await environment.js.pull_subscribe(environment.subject, DURABLE)
            await environment.send_keyed("pay-2")
            await until(lambda: len(handle.calls) == 2, "it goes on")

    in_time(story())


def test_a_last_delivery_that_no_stream_takes_before_its_worker_leaves_is_told(
    nats_url: str, nats_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with Environment(nats_url, nats_name, dead=False, max_deliver=1) as environment:
            await environment.send()
            async with worker(environment, "memory:", Handled()):
                await until(lambda: "did not accept a dead letter" in caplog.text, "it is refused")

    in_time(story())

    assert f"it stays in the stream {nats_name} at sequence 1, and comes to nobody" in caplog.text


def _are(calls: list[Delivery], number: int) -> bool:
    return len(calls) == number


def test_a_second_consumer_with_a_shorter_ack_wait_is_told_of_progress_in_its_own_time(
    nats_url: str, nats_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, told, in_progress = Handled(), list[str](), Msg.in_progress

    async def counted(message: Msg) -> None:
        await in_progress(message)
        told.append(nats_messages.origin_of(message.reply)[1])

    monkeypatch.setattr(Msg, "in_progress", counted)

    async def story() -> None:
        handle.gate = asyncio.Event()
        async with Environment(nats_url, nats_name) as environment:
            client = await connected(nats_url)
            js = client.jetstream()
            async with AsyncGuard("memory:") as guard:
                callback = guarded(guard, "charge", handle, key=header(), dead_letter=environment.dead, concurrency=2)
                for number, (name, ack_wait) in enumerate({"slow": 3_600, "quick": 3}.items(), 1):
                    subject, config = f"{environment.subject}.{name}", ConsumerConfig(ack_wait=ack_wait)
                    await js.subscribe(subject, durable=name, cb=callback, manual_ack=True, config=config)
                    await js.publish(subject, b"", headers={"idempotency-key": name})
                    await until(partial(_are, handle.calls, number), "it runs")
                await until(lambda: "quick" in told, "the server hears of it")
                assert (await js.consumer_info(environment.stream, "quick")).num_redelivered == 0
                handle.gate.set()
                assert await callback.drain()
            await client.close()

    in_time(story())


def test_a_worker_that_leaves_asks_for_nothing_more(
    nats_url: str, nats_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, fetch = list[int](), JetStreamContext.PullSubscription.fetch

    async def in_vain(subscription: JetStreamContext.PullSubscription, *arguments: Any, **options: Any) -> list[Msg]:
        asked.append(1)
        with suppress(TimeoutError):
            return await fetch(subscription, *arguments, **options)
        # The server says that a request has timed out, when nobody waits for that any more.
        inbox = subscription._sub
        await inbox._pending_queue.put(Msg(inbox._conn, inbox.subject, headers={"Status": "408"}))
        raise TimeoutError

    monkeypatch.setattr(JetStreamContext.PullSubscription, "fetch", in_vain)
    handle = Handled()

    async def story() -> None:
        async with Environment(nats_url, nats_name) as environment, worker(environment, "memory:", handle) as one:
            await until(lambda: asked, "it waits for messages")
            leaving = asyncio.create_task(one.stop())
            await until(lambda: one.callback._jobs.is_leaving, "it leaves")
            before = len(asked)
            assert await asyncio.wait_for(leaving, PATIENCE / 2)
            assert len(asked) == before

    in_time(story())


def test_a_lost_question_about_max_deliver_is_asked_again_before_it_matters(
    nats_url: str, nats_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, settings_of = list[str](), nats_messages.settings_of

    async def lost_once(message: Msg) -> Any:
        asked.append(message.reply)
        if len(asked) == 1:
            raise nats.errors.TimeoutError
        return await settings_of(message)

    monkeypatch.setattr(nats_messages, "settings_of", lost_once)
    handle = Handled(failures=100)

    async def story() -> None:
        # Each message fails in its only delivery: given back, it would stay in its stream, and nobody would know.
        async with Environment(nats_url, nats_name, max_deliver=1) as environment:
            await environment.send_keyed("pay-1")
            await environment.send_keyed("pay-2")
            async with worker(environment, "memory:", handle, concurrency=2):
                await until(lambda: _are_dead(environment, 2), "both are dead letters")
            assert await environment.count("MAX_DELIVERIES") == 0

    async def _are_dead(environment: Environment, count: int) -> bool:
        return len(await environment.letters()) == count

    in_time(story())

    assert len(asked) == 2


def test_a_lost_question_about_ack_wait_is_asked_again_though_nothing_fails(
    nats_url: str, nats_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, settings_of, gate = list[str](), nats_messages.settings_of, asyncio.Event()

    async def lost_once(message: Msg) -> Any:
        asked.append(message.reply)
        if len(asked) == 1:
            raise nats.errors.TimeoutError
        return await settings_of(message)

    monkeypatch.setattr(nats_messages, "settings_of", lost_once)
    monkeypatch.setattr(nats_jobs, "Settings", lambda: nats_consumer.Settings(ack_wait=0.3))
    handle = Handled()

    async def story() -> None:
        handle.gate = gate
        async with Environment(nats_url, nats_name, ack_wait=3_600) as environment:
            await environment.send_keyed("pay-1")
            async with worker(environment, "memory:", handle) as one:
                await until(lambda: len(asked) == 2, "it is asked again")
                (known,) = one.callback._jobs._known.values()
                await until(lambda: known.settings.ack_wait == 3_600, "the answer counts")
                gate.set()
                await environment.settled(1)

    in_time(story())

    assert len(handle.calls) == 1


def test_two_keys_that_are_not_text_are_not_one(nats_url: str, nats_name: str) -> None:
    handle = Handled()

    async def story() -> None:
        async with Environment(nats_url, nats_name) as environment:
            # "größe" and "gräße" from a sender that writes Latin-1: nats-py reads the same of both.
            await _published(environment, ["gr\xf6\xdfe".encode("latin-1"), "gr\xe4\xdfe".encode("latin-1")])
            async with worker(environment, "memory:", handle):
                await environment.settled(2)
            reasons = [(letter.headers or {})["x-onefold-reason"] for letter in await environment.letters()]
            assert [one.partition(":")[0] for one in reasons] == ["the key is not text"] * 2

    in_time(story())

    assert handle.calls == []


async def _published(environment: Environment, keys: list[bytes]) -> None:
    """Publish by hand: nats-py writes nothing but UTF-8."""
    parts = urlsplit(environment.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    await reader.readline()
    writer.write(b'CONNECT {"headers": true, "verbose": false}\r\n')
    for key in keys:
        block = b"NATS/1.0\r\nidempotency-key: " + key + b"\r\n\r\n"
        writer.write(b"HPUB %s %d %d\r\n%s{}\r\n" % (environment.subject.encode(), len(block), len(block) + 2, block))
    writer.write(b"PING\r\n")
    while (await reader.readline()).strip() != b"PONG":
        pass
    writer.close()
    await writer.wait_closed()
