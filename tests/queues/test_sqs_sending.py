"""SQS: sending with a key, dead letters and their attributes, and workers that are killed."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiobotocore.session import AioSession
from botocore.exceptions import ClientError, ConnectionClosedError, EndpointConnectionError

from onefold import AsyncGuard, Guard, MissingKey, Policy, UsageError, current
from onefold.events import Sent, subscribe_to_sends
from onefold.queues._shared import sends
from onefold.queues._sqs import requests as sqs_requests
from onefold.queues._sqs import sending as sqs_sending
from onefold.queues._sqs.consumer import OWN_REDRIVE, Delivery
from onefold.queues._sqs.dead_letters import ATTRIBUTES_MAX, OURS, dead_attributes, text
from onefold.queues.keys import header
from onefold.queues.sqs import AsyncWorker, guarded, guarded_async, restored, send, send_async
from services.proxy import Proxy
from tests.processes import Stage, child
from tests.queues.sqs_tools import (
    Environment,
    Handled,
    Mode,
    client_of,
    each_mode,
    mode,
    options,
    said,
    shortly,
    worker,
)
from tests.support import PATIENCE, Elsewhere, eventually, in_time
from tests.wallet import add, balance

__all__ = ["each_mode", "mode", "shortly"]

# Long enough for a heartbeat of a busy machine, short enough to wait for.
LEASE = 1.0


def received(environment: Environment) -> list[dict[str, Any]]:
    found = environment.client.receive_message(
        QueueUrl=environment.queue,
        MaxNumberOfMessages=10,
        AttributeNames=["All"],
        MessageAttributeNames=["All"],
    )
    return list(found.get("Messages", []))


async def sent_async(url: str, queue: str, body: str, **asked: Any) -> str:
    async with AioSession().create_client("sqs", **options(url)) as client:
        return await send_async(client, queue, body, **asked)


class TestSending:
    def test_it_makes_a_key_or_keeps_the_senders(self, sqs_url: str, sqs_name: str) -> None:
        told: list[Sent] = []
        end = subscribe_to_sends(told.append)

        with Environment(sqs_url, sqs_name) as environment:
            keys = [
                send(environment.client, environment.queue, b"1"),
                send(environment.client, environment.queue, "2", key="pay-2", headers={"n": 7, "b": b"\x00"}),
                send(environment.client, environment.queue, "3", headers={"Idempotency-Key": "pay-3"}),
                in_time(sent_async(sqs_url, environment.queue, "4", key=uuid.UUID(int=4))),
            ]
            found = {one["Body"]: one for one in received(environment)}
        end()

        assert str(uuid.UUID(keys[0])) == keys[0]
        assert keys[1:] == ["pay-2", "pay-3", str(uuid.UUID(int=4))]
        assert [said(found[str(at)], "idempotency-key") for at in (1, 2, 3, 4)] == keys
        assert found["2"]["MessageAttributes"]["n"] == {"DataType": "Number", "StringValue": "7"}
        assert found["2"]["MessageAttributes"]["b"] == {"DataType": "Binary", "BinaryValue": b"\x00"}
        assert told == [Sent(sqs_name, key) for key in keys]

    def test_a_fifo_queue_gets_the_key_as_the_deduplication_id(self, sqs_url: str, sqs_name: str) -> None:
        with Environment(sqs_url, sqs_name, fifo=True) as environment:
            for key in ("pay-1", "pay-1", "ключ", "ключ"):
                send(environment.client, environment.queue, "1", key=key, group="asha")
            assert send(environment.client, environment.queue, "2", group="asha", deduplication_id="own") == "own"
            ids = [one["Attributes"]["MessageDeduplicationId"] for one in received(environment)]

        assert ids == ["pay-1", sqs_sending.id_of("ключ"), "own"]
        assert len(ids[1]) == 64

    @pytest.mark.parametrize("is_async", [False, True], ids=["boto3", "aiobotocore"])
    def test_a_lost_answer_is_sent_again_with_the_same_key_and_id(
        self, is_async: bool, sqs_url: str, sqs_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sends, "SEND_DELAY", 0.01)
        tries: list[Sent] = []
        end = subscribe_to_sends(tries.append)

        with (
            Environment(sqs_url, sqs_name) as environment,
            Environment(sqs_url, f"{sqs_name}-f", fifo=True) as fifo,
            Proxy(sqs_url) as proxy,
        ):
            choices: list[tuple[Environment, dict[str, Any]]] = [(environment, {}), (fifo, {"group": "a"})]
            for one, more in choices:
                fault = proxy.cut_after(b"SendMessage")
                if is_async:
                    key = in_time(sent_async(proxy.url(), one.queue, "1", **more))
                else:
                    client = client_of(proxy.url())
                    key = send(client, one.queue, "1", **more)
                    client.close()
                assert fault.reached.is_set()
            twice, once = received(environment), received(fifo)
        end()

        # A client may try it again by itself.
        assert {said(one, "idempotency-key") for one in twice} == {tries[0].key}
        assert [said(one, "idempotency-key") for one in once] == [key]
        if not is_async:
            assert (len(twice), len(tries)) == (2, 4)

    def test_a_queue_that_does_not_exist_is_told_at_once(self, sqs_url: str, sqs_name: str) -> None:
        tries: list[Sent] = []
        end = subscribe_to_sends(tries.append)
        client = client_of(sqs_url)

        with pytest.raises(ClientError):
            send(client, f"{sqs_url}/000000000000/{sqs_name}", "1")
        client.close()
        end()

        assert len(tries) == 1

    @pytest.mark.parametrize(
        ("given", "error", "says"),
        [
            ({"key": None}, MissingKey, "key=None: nothing was sent"),
            ({"key": "a\x07b"}, MissingKey, "nothing was sent|control"),
            ({"body": b"\xff"}, UsageError, "Write bytes as base64"),
            ({"body": ""}, UsageError, "not empty"),
            ({"body": "\x07"}, UsageError, "without control characters"),
            ({"headers": {"a": ""}}, UsageError, "not empty"),
            ({"headers": {"a": object()}}, UsageError, "headers={'a': …}"),
            ({"headers": {"AWS.x": "1"}}, UsageError, "does not begin with AWS"),
            ({"headers": {"ключ": "1"}}, UsageError, "letters, digits"),
            ({"headers": {f"h{at}": "1" for at in range(10)}}, UsageError, "11 entries with the key, and SQS takes 10"),
            ({"queue": "charges"}, UsageError, "queue='charges' is the URL of a queue"),
            ({"deduplication_id": "x"}, UsageError, "is for a FIFO queue"),
            ({"queue": "https://x/1/c.fifo"}, UsageError, "a message needs group="),
        ],
    )
    def test_what_sqs_would_refuse_is_refused_before(self, given: Any, error: Any, says: str) -> None:
        asked: Any = {"queue": "https://x/1/charges", "body": "1"} | given

        with pytest.raises(error, match=says):
            send(object(), **asked)

    def test_a_client_of_the_other_kind_or_of_something_else_is_refused(self, sqs_url: str) -> None:
        asked: Any = {"queue": "https://x/1/charges", "key": header(), "dead_letter": OWN_REDRIVE}
        client = client_of(sqs_url)

        async def story() -> None:
            async with AioSession().create_client("sqs", **options(sqs_url)) as other:
                with pytest.raises(UsageError, match="client= is async, but this needs one of boto3"):
                    guarded(Guard("memory:"), "charge", Handled(), client=other, **asked)
                with pytest.raises(UsageError, match="client= is async, but this needs one of boto3"):
                    send(other, "https://x/1/charges", "1")
            with pytest.raises(UsageError, match="client= is sync, but this needs one of aiobotocore"):
                guarded_async(AsyncGuard("memory:"), "charge", Handled().in_task, client=client, **asked)
            with pytest.raises(UsageError, match="client= is sync, but this needs one of aiobotocore"):
                await send_async(client, "https://x/1/charges", "1")

        in_time(story())
        client.close()
        with pytest.raises(UsageError, match=r"client= is a client made with client\('sqs'\), not builtins.object"):
            guarded(Guard("memory:"), "charge", Handled(), client=object(), **asked)

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"dead_letter": "dead"}, "dead_letter='dead' is the URL of a queue"),
            ({"dead_letter": "https://x/1/charges"}, "is the queue itself"),
            ({"unacked_max": "13h"}, "less than 12 hours"),
            ({"threads": 0}, "threads=0"),
            ({"batch": 0}, "batch=0"),
            ({"visibility": 0}, "visibility=0"),
            ({"attempts": 0}, "attempts=0"),
            ({"key": "id"}, "key='id' is only a name"),
            ({"kep": "7d"}, "did you mean 'keep'"),
        ],
    )
    def test_options_are_checked_before_the_first_message(self, given: Any, says: str, sqs_url: str) -> None:
        client = client_of(sqs_url)
        asked: Any = {"queue": "https://x/1/charges", "key": header(), "dead_letter": OWN_REDRIVE} | given

        with pytest.raises(UsageError, match=says):
            guarded(Guard("memory:"), "charge", Handled(), client=client, **asked)
        client.close()


class TestDeadLetters:
    def test_one_that_its_queue_does_not_take_is_kept_and_tried_again(
        self, mode: Mode, shortly: None, sqs_url: str, sqs_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Environment(sqs_url, sqs_name) as environment:
            environment.client.delete_queue(QueueUrl=environment.dead)
            environment.send("poison")
            with worker(environment, "memory:", Handled(), mode=mode):
                # Not only that it is a ClientError.
                assert eventually(
                    lambda: bool(re.search(r"did not accept a dead letter: \S*NonExistentQueue", caplog.text))
                )
                assert environment.counts() == (0, 1)
                environment.dead = environment._create(environment.dead_name, {})
                assert environment.letter()["Body"] == "poison"
                environment.settled()

    def test_all_ten_attributes_of_a_message_come_back_from_the_dead_letters(self, sqs_url: str, sqs_name: str) -> None:
        theirs: dict[str, Any] = {f"a{at}": text(str(at) * 50) for at in range(7)}
        theirs |= {
            "idempotency-key": text("k" * 5000),
            "number": {"DataType": "Number", "StringValue": "17"},
            "bytes": {"DataType": "Binary.png", "BinaryValue": bytes(range(256))},
        }
        with Environment(sqs_url, sqs_name, fifo=True) as environment:
            ids = {"MessageGroupId": "a", "MessageDeduplicationId": "d-1"}
            environment.client.send_message(
                QueueUrl=environment.queue, MessageBody="1", MessageAttributes=theirs, **ids
            )
            with worker(environment, "memory:", Handled()):
                letter = environment.letter()

        found = letter["MessageAttributes"]
        assert len(found) <= ATTRIBUTES_MAX
        # The key stays where people look for it.
        assert found["idempotency-key"]["StringValue"] == "k" * 5000
        assert (said(letter, "x-onefold-reason") or "").startswith("the key has 5000 characters")
        assert restored(found) == theirs

    @pytest.mark.parametrize(
        ("room", "kept"), [(1_000_000, {"large", "small"}), (61_000, {"small"}), (10, set()), (-5, set())]
    )
    def test_a_dead_letter_is_never_too_large(self, room: int, kept: set[str]) -> None:
        theirs = {"large": text("x" * 60_000), "small": text("y")}
        ours = {"x-onefold-reason": "r" * 1000, "x-onefold-operation": "charge"}

        found = dead_attributes(theirs, ours, room)

        assert {*found} & {*theirs} == kept
        assert sum(len(name) + len(one["StringValue"]) + 6 for name, one in found.items()) <= max(room, 0)
        assert ("x-onefold-dropped-headers" in found) == (kept == {"small"})

    def test_one_that_was_a_dead_letter_before_has_the_last_reason_only(self) -> None:
        first = dead_attributes({"a": text("1")}, {"x-onefold-reason": "first", "x-onefold-digest": "d"}, 10_000)
        second = dead_attributes(first, {"x-onefold-reason": "second"}, 10_000)

        assert second == {"a": text("1"), "x-onefold-reason": text("second")}
        assert {*first} - OURS == {"a"}
        # What was packed, and came back so, is not lost.
        theirs = {f"a{at}": text(str(at)) for at in range(10)}
        packed = dead_attributes(theirs, {"x-onefold-reason": "first"}, 10_000)
        assert restored(dead_attributes(packed, {"x-onefold-reason": "second"}, 10_000)) == theirs

    def test_attributes_that_somebody_else_has_packed_are_told(self) -> None:
        with pytest.raises(UsageError, match="x-onefold-attributes"):
            restored({"x-onefold-attributes": text("not JSON")})

    def test_what_comes_back_from_the_dead_letters_runs_if_it_has_not_run(
        self, shortly: None, sqs_url: str, sqs_name: str
    ) -> None:
        handle = Handled(failures=1)

        with Environment(sqs_url, sqs_name) as environment:
            environment.send_keyed("pay-1")
            with worker(environment, "memory:", handle, attempts=1):
                letter = environment.letter()
                for _ in range(2):
                    environment.client.send_message(
                        QueueUrl=environment.queue,
                        MessageBody=letter["Body"],
                        MessageAttributes=restored(letter["MessageAttributes"]),
                    )
                environment.settled()

        assert len(handle.calls) == 2


class TestDeletions:
    def test_one_that_cannot_be_deleted_does_not_keep_the_others_from_it(
        self, mode: Mode, sqs_url: str, sqs_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "onefold.queues.sqs")

        with Environment(sqs_url, sqs_name) as environment:

            def handle(delivery: Delivery) -> None:
                if delivery.body == b"2":
                    receipt = delivery.native["ReceiptHandle"]
                    environment.client.delete_message(QueueUrl=environment.queue, ReceiptHandle=receipt)

            for at in range(4):
                environment.send_keyed(f"pay-{at}", str(at))
            with worker(environment, "memory:", handle, mode=mode):
                environment.settled()

        assert [line for line in caplog.messages if "ReceiptHandleIsInvalid" in line]

    def test_messages_are_deleted_while_a_receive_waits_for_more(
        self, mode: Mode, sqs_url: str, sqs_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handle, gate = Handled(), threading.Event()

        def waiting(client: Any, *asked: Any) -> Any:
            received = yield from receive(client, *asked)
            while handle.calls and not gate.is_set():
                yield lambda: (time.sleep if mode == "threads" else asyncio.sleep)(0.01)
            return received

        # Far too long for an extension to bring the deletion about.
        with (
            Environment(sqs_url, sqs_name, visibility=3600) as environment,
            worker(environment, "memory:", handle, mode=mode),
        ):
            receive = sqs_requests.receive
            monkeypatch.setattr(sqs_requests, "receive", waiting)
            environment.send_keyed("pay-1")
            environment.settled()
            gate.set()

        assert len(handle.calls) == 1

    def test_a_deletion_whose_connection_is_lost_is_sent_again(
        self, mode: Mode, sqs_url: str, sqs_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handle, lost, delete = Handled(), list[int](), sqs_requests.delete

        def flaky(client: Any, queue: str, jobs: Any) -> Any:
            if len(lost) < 2:
                lost.append(len(jobs))
                raise EndpointConnectionError(endpoint_url="")
            return (yield from delete(client, queue, jobs))

        monkeypatch.setattr(sqs_requests, "delete", flaky)
        monkeypatch.setattr("onefold.queues._sqs.jobs.RETRY_SECONDS", 0.05)
        with Environment(sqs_url, sqs_name) as environment:
            environment.send_keyed("pay-1")
            with worker(environment, "memory:", handle, mode=mode):
                environment.settled()

        assert (len(handle.calls), len(lost)) == (1, 2)

    def test_a_receive_that_fails_is_tried_again_and_a_queue_that_is_gone_ends_the_worker(
        self, mode: Mode, shortly: None, sqs_url: str, sqs_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handle = Handled()
        failed: list[int] = []

        def flaky(*asked: Any) -> Any:
            if not failed:
                failed.append(1)
                raise ConnectionClosedError(endpoint_url="")
            return (yield from receive(*asked))

        def story(environment: Environment) -> None:
            with worker(environment, "memory:", handle, mode=mode) as one:
                monkeypatch.setattr(sqs_requests, "receive", flaky)
                assert eventually(lambda: bool(failed))
                environment.send_keyed("pay-1")
                environment.settled()
                environment.client.delete_queue(QueueUrl=environment.queue)
                assert eventually(lambda: one.worker._work.is_leaving)

        receive = sqs_requests.receive
        with Environment(sqs_url, sqs_name) as environment:
            with pytest.raises(ClientError):
                story(environment)
            environment.queue = environment._create(environment.name, {})

        assert len(handle.calls) == 1

    def test_a_worker_that_begins_while_its_connection_is_lost_waits_for_it(
        self, each_mode: Mode, sqs_url: str, sqs_name: str
    ) -> None:
        handle = Handled()

        with Environment(sqs_url, sqs_name) as environment, Proxy(sqs_url) as proxy:
            environment.send_keyed("pay-1")
            fault = proxy.cut_before(b"GetQueueAttributes")
            with worker(environment, "memory:", handle, mode=each_mode, url=proxy.url()):
                environment.settled()
            assert fault.reached.is_set()

        assert len(handle.calls) == 1

    def test_a_receive_that_is_refused_lets_handlers_end_and_be_settled(
        self, each_mode: Mode, sqs_url: str, sqs_name: str
    ) -> None:
        handle, gate = Handled(), threading.Event()
        handle.gate = gate

        def forbidden(*_: Any) -> Any:
            raise ClientError({"Error": {"Code": "AccessDenied"}}, "ReceiveMessage")
            yield

        def story(environment: Environment) -> None:
            with worker(environment, "memory:", handle, mode=each_mode) as one:
                assert eventually(lambda: bool(handle.calls))
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(sqs_requests, "receive", forbidden)
                    assert eventually(lambda: one.worker._work.is_leaving)
                gate.set()

        with Environment(sqs_url, sqs_name) as environment:
            environment.send_keyed("pay-1")
            with pytest.raises(ClientError, match="AccessDenied"):
                story(environment)
            assert environment.counts() == (0, 0)


class TestDrainAtTheBeginning:
    """A worker that still asks how its queue delivers consumes already: its client must not be closed yet."""

    def test_in_threads(self, sqs_url: str, sqs_name: str) -> None:
        with Environment(sqs_url, sqs_name) as environment, Proxy(sqs_url) as proxy, Guard("memory:") as guard:
            client, held = client_of(proxy.url()), proxy.hold_reply(b"GetQueueAttributes")
            asked: Any = {"client": client, "queue": environment.queue, "dead_letter": environment.dead}
            one = guarded(guard, "charge", Handled(), key=header(), **asked)
            consuming = Elsewhere(one.consume)
            assert held.reached.wait(PATIENCE)

            assert not one.drain(0)
            held.released.set()
            assert one.drain(PATIENCE)
            consuming.result()
            client.close()

    def test_in_tasks(self, sqs_url: str, sqs_name: str) -> None:
        async def story() -> None:
            async with (
                AioSession().create_client("sqs", **options(proxy.url())) as client,
                AsyncGuard("memory:") as guard,
            ):
                asked: Any = {"client": client, "queue": environment.queue, "dead_letter": environment.dead}
                one = guarded_async(guard, "charge", Handled().in_task, key=header(), **asked)
                consuming = asyncio.create_task(one.consume())
                assert await asyncio.to_thread(held.reached.wait, PATIENCE)

                assert not await one.drain(0)
                held.released.set()
                assert await one.drain(PATIENCE)
                await consuming

        with Environment(sqs_url, sqs_name) as environment, Proxy(sqs_url) as proxy:
            held = proxy.hold_reply(b"GetQueueAttributes")
            in_time(story())


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
    stage: Stage, url: str, queue: str, dead: str, store: str, effects: Path | None, policy: Policy | None
) -> None:
    """The part of a worker that is killed on the stage."""
    delete = sqs_requests.delete

    def stopping(*asked: Any) -> Any:
        stage.at("before the delete")
        return (yield from delete(*asked))

    sqs_requests.delete = stopping  # type: ignore[assignment]
    handler: Callable[..., Any] = Credit(stage) if effects is None else Charge(effects, stage)
    with Guard(store) as guard:
        asked: Any = {"client": client_of(url), "queue": queue, "key": header(), "dead_letter": dead}
        guarded(guard, "charge", handler, policy=policy, **asked).consume()


class TestKilledWorkers:
    @pytest.mark.parametrize("step", ["after the effect", pytest.param("before the delete", marks=pytest.mark.more)])
    def test_in_a_transaction_the_effect_happens_exactly_once(
        self, sqs_url: str, sqs_name: str, path: Path, step: str
    ) -> None:
        store = f"sqlite:///{path}"

        with Environment(sqs_url, sqs_name, visibility=1) as environment:
            environment.send_keyed("pay-1", "10")
            part = (sqs_url, environment.queue, environment.dead, store, None, None)
            with child(work, *part, stops=(step,)) as killed:
                killed.reaches(step)
                killed.kill()
            assert balance(path) == (0 if step == "after the effect" else 10)
            with worker(environment, store, Credit()):
                environment.settled()
            assert environment.no_letters()

        assert balance(path) == 10

    @pytest.mark.parametrize("step", ["before the delete", "after the effect"])
    @pytest.mark.more
    def test_a_claim_is_run_again_with_the_same_key_for_the_other_side(
        self, sqs_url: str, sqs_name: str, tmp_path: Path, step: str
    ) -> None:
        store, effects, policy = f"sqlite:///{tmp_path}/records.db", tmp_path / "effects", Policy(lease=LEASE)

        with Environment(sqs_url, sqs_name, visibility=1) as environment:
            environment.send_keyed("pay-1")
            part = (sqs_url, environment.queue, environment.dead, store, effects, policy)
            with child(work, *part, stops=(step,)) as killed:
                killed.reaches(step)
                killed.kill()
            with worker(environment, store, Charge(effects), policy=policy):
                environment.settled()
            assert environment.no_letters()

        keys = effects.read_text().split()
        assert len(keys) == (2 if step == "after the effect" else 1)
        assert len(set(keys)) == 1


def test_a_cancelled_consume_cancels_its_handlers_and_their_messages_come_again(sqs_url: str, sqs_name: str) -> None:
    ran, began = list[str](), asyncio.Event()

    async def slow(delivery: Delivery) -> None:
        ran.append("began")
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ran.append("ended")

    async def story(environment: Environment) -> None:
        async with (
            AioSession().create_client("sqs", **options(sqs_url)) as client,
            AsyncGuard("memory:") as guard,
        ):
            asked: Any = {"queue": environment.queue, "key": header(), "dead_letter": environment.dead}
            consuming = asyncio.create_task(guarded_async(guard, "charge", slow, client=client, **asked).consume())
            await began.wait()
            consuming.cancel()
            ended, _ = await asyncio.wait({consuming}, timeout=PATIENCE / 2)
            assert ended == {consuming}
            assert consuming.cancelled()

    with Environment(sqs_url, sqs_name) as environment:
        environment.send_keyed("pay-1")
        in_time(story(environment))
        assert environment.counts() == (0, 1)

    assert ran == ["began", "ended"]


def test_a_consume_that_is_cancelled_twice_has_ended(sqs_url: str, sqs_name: str) -> None:
    began, cleaning = asyncio.Event(), asyncio.Event()

    async def slow(_delivery: Delivery) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await asyncio.Event().wait()

    async def story(environment: Environment) -> None:
        async with (
            AioSession().create_client("sqs", **options(sqs_url)) as client,
            AsyncGuard("memory:") as guard,
        ):
            asked: Any = {"queue": environment.queue, "key": header(), "dead_letter": environment.dead}
            one = guarded_async(guard, "charge", slow, client=client, **asked)
            others = asyncio.all_tasks()
            consuming = asyncio.create_task(one.consume())
            await began.wait()
            consuming.cancel()
            await cleaning.wait()
            consuming.cancel()
            await asyncio.wait({consuming}, timeout=PATIENCE / 2)
            assert consuming.cancelled()
            assert asyncio.all_tasks() - others == set()
            assert await one.drain(0)

    with Environment(sqs_url, sqs_name) as environment:
        environment.send_keyed("pay-1")
        in_time(story(environment))


def test_a_handler_that_cancels_its_own_task_does_not_keep_its_message_for_ever(
    shortly: None, sqs_url: str, sqs_name: str
) -> None:
    class Cancels:
        def __init__(self) -> None:
            self.calls: list[Delivery] = []

        async def in_task(self, delivery: Delivery) -> None:
            self.calls.append(delivery)
            if len(self.calls) == 1:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)

    handle = Cancels()
    with Environment(sqs_url, sqs_name) as environment:
        environment.send_keyed("pay-1")
        environment.send_keyed("pay-2")
        with worker(environment, "memory:", handle, mode="tasks", wait=0):
            environment.settled()

    assert len(handle.calls) == 3


def test_a_worker_that_is_stopped_before_it_begins_takes_nothing_and_none_consumes_twice(
    mode: Mode, sqs_url: str, sqs_name: str
) -> None:
    handle = Handled()

    with Environment(sqs_url, sqs_name) as environment:
        environment.send_keyed("pay-1")
        with worker(environment, "memory:", handle, mode=mode, stopped=True) as one:
            assert one.worker._work.is_leaving
        with pytest.raises(UsageError, match="create another one"):
            _consume(one.worker)
        assert environment.counts() == (1, 0)

    assert handle.calls == []


def _consume(one: Any) -> None:
    if isinstance(one, AsyncWorker):
        asyncio.run(one.consume())
    else:
        one.consume()
