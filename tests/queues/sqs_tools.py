"""Queues on an emulator of SQS, and guarded workers of them: in threads and in tasks, with clients of their own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import boto3
import pytest
from aiobotocore.session import AioSession
from botocore.config import Config

from onefold import AsyncGuard, Guard
from onefold._concurrency.generators import Flow
from onefold.queues._shared import verdict as shared_verdict
from onefold.queues._sqs import consumer as sqs_consumer
from onefold.queues._sqs import requests as sqs_requests
from onefold.queues._sqs import worker as sqs_worker
from onefold.queues._sqs.consumer import Delivery
from onefold.queues._sqs.worker import WorkerBase
from onefold.queues.keys import header
from onefold.queues.sqs import AsyncWorker, Worker, guarded, guarded_async
from services.dynamodb import CREDENTIALS, REGION
from tests.support import PATIENCE, AsyncProxyStore, Elsewhere, ProxyStore, eventually

Mode = Literal["threads", "tasks"]
MODES: Final = ("threads", "tasks")


def options(url: str) -> dict[str, Any]:
    """How a client finds the server; one that is gone is not waited for."""
    return {
        "endpoint_url": url,
        "region_name": REGION,
        "aws_access_key_id": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }


def client_of(url: str) -> Any:
    config = Config(retries={"total_max_attempts": 1}, max_pool_connections=50)
    return boto3.client("sqs", config=config, **options(url))


class Environment:
    """A queue, another one for its dead letters, and a client to look at both."""

    def __init__(
        self, url: str, name: str, *, fifo: bool = False, max_receives: int = 0, visibility: int = 30, **more: str
    ) -> None:
        self.url = url
        suffix = ".fifo" if fifo else ""
        self.name, self.dead_name = f"{name}{suffix}", f"{name}-dead{suffix}"
        self._fifo = {"FifoQueue": "true"} if fifo else {}
        self._attributes = {"VisibilityTimeout": str(visibility), **self._fifo, **more}
        self._max_receives = max_receives

    def __enter__(self) -> Self:
        self.client = client_of(self.url)
        self.dead = self._create(self.dead_name, self._fifo)
        told = self.client.get_queue_attributes(QueueUrl=self.dead, AttributeNames=["QueueArn"])
        redrive = {"deadLetterTargetArn": told["Attributes"]["QueueArn"], "maxReceiveCount": self._max_receives}
        limited = {"RedrivePolicy": json.dumps(redrive)} if self._max_receives else {}
        self.queue = self._create(self.name, self._attributes | limited)
        return self

    def __exit__(self, *_: object) -> None:
        for queue in (self.queue, self.dead):
            self.client.delete_queue(QueueUrl=queue)
        self.client.close()

    def _create(self, name: str, attributes: dict[str, str]) -> str:
        return str(self.client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"])

    def send(self, body: str = "{}", *, group: str | None = None, times: int = 1, **headers: str) -> None:
        """As somebody else's client would; `idempotency_key="pay-1"` is the attribute `idempotency-key`."""
        attributes = {
            name.replace("_", "-"): {"DataType": "String", "StringValue": value} for name, value in headers.items()
        }
        for _ in range(times):
            more = {"MessageGroupId": group, "MessageDeduplicationId": str(time.time_ns())} if group else {}
            self.client.send_message(QueueUrl=self.queue, MessageBody=body, MessageAttributes=attributes, **more)

    def send_keyed(self, key: str, body: str = "{}", *, times: int = 1, group: str | None = None) -> None:
        self.send(body, times=times, group=group, idempotency_key=key)

    def counts(self, queue: str | None = None) -> tuple[int, int]:
        """How many messages are visible, and how many are in flight."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        told = self.client.get_queue_attributes(QueueUrl=queue or self.queue, AttributeNames=names)["Attributes"]
        return int(told[names[0]]), int(told[names[1]])

    def settled(self) -> None:
        """Wait until the queue is empty."""
        assert eventually(lambda: self.counts() == (0, 0)), self.counts()

    def letters(self, number: int = 1) -> list[dict[str, Any]]:
        """Wait for that many dead letters, and take them."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + PATIENCE
        while len(found) < number:
            assert time.monotonic() < deadline, f"{len(found)} of {number} dead letters"
            found += self.client.receive_message(
                QueueUrl=self.dead,
                MaxNumberOfMessages=10,
                WaitTimeSeconds=1,
                AttributeNames=["All"],
                MessageAttributeNames=["All"],
            ).get("Messages", [])
        return found

    def letter(self) -> dict[str, Any]:
        (found,) = self.letters()
        return found

    def no_letters(self) -> bool:
        return self.counts(self.dead) == (0, 0)


def said(letter: dict[str, Any], name: str) -> str | None:
    """The text of an attribute."""
    found: str | None = letter.get("MessageAttributes", {}).get(name, {}).get("StringValue")
    return found


class Handled:
    """A handler that counts, fails as often as it is told to, and waits where it is told to; for threads and tasks."""

    def __init__(self, failures: int = 0, error: type[BaseException] = ValueError) -> None:
        self.calls: list[Delivery] = []
        self._failures = failures
        self._error = error
        self.gate: threading.Event | None = None

    def __call__(self, delivery: Delivery) -> None:
        self.calls.append(delivery)
        if len(self.calls) <= self._failures:
            raise self._error("not for the log: 4200")
        if self.gate is not None:
            assert self.gate.wait(PATIENCE)

    async def in_task(self, delivery: Delivery) -> None:
        self.calls.append(delivery)
        if len(self.calls) <= self._failures:
            raise self._error("not for the log: 4200")
        if self.gate is not None:
            assert await asyncio.to_thread(self.gate.wait, PATIENCE)

    @property
    def bodies(self) -> list[str]:
        return [one.body.decode() for one in self.calls]


def in_task(handler: Any) -> Any:
    """The handler for tasks; a plain function is called in its task."""
    if hasattr(handler, "in_task"):
        return handler.in_task

    async def handle(delivery: Delivery) -> None:
        handler(delivery)

    return handle


@dataclass
class Running:
    """A worker that consumes in another thread, and the guard that it has."""

    worker: WorkerBase
    guard: Any
    # Drains it, and does not wait for that.
    hint: Callable[[], object]
    stop: Callable[[], bool]


@contextmanager
def worker(
    environment: Environment, store: Any, handler: Any, *, mode: Mode = "threads", url: str = "", **options: Any
) -> Iterator[Running]:
    """Consume in another thread, until the end of the block."""
    patched = pytest.MonkeyPatch()
    # A receive that is under way is waited for by `drain`: here it asks, and waits for itself.
    patched.setattr(sqs_requests, "RECEIVE_SECONDS", 0)
    patched.setattr(sqs_requests, "receive", _receive)
    prepare, stopped = options.pop("prepare", None), options.pop("stopped", False)
    asked: dict[str, Any] = {"key": header(), "dead_letter": environment.dead, "queue": environment.queue} | options
    started: list[Running] = []
    begin = _in_threads if mode == "threads" else _in_tasks
    ways = (stopped, prepare)
    consuming = Elsewhere(lambda: begin(url or environment.url, store, handler, asked, started, ways))
    try:
        # It has read how the queue delivers, or was refused.
        assert eventually(lambda: (bool(started) and started[0].worker._jobs is not None) or consuming.has_ended)
        if consuming.has_ended or stopped:
            consuming.result()
        yield started[0]
        assert started[0].stop()
        consuming.result()
    finally:
        if started:
            started[0].worker._is_stopping = True
        patched.undo()


_receive_at_once: Final = sqs_requests.receive


def _receive(client: Any, *asked: Any) -> Flow[list[tuple[Delivery, str]]]:
    received = yield from _receive_at_once(client, *asked)
    if not received:
        sleep: Any = asyncio.sleep if "aiobotocore" in type(client).__mro__[1].__module__ else time.sleep
        yield lambda: sleep(0.02)
    return received


def _in_threads(url: str, store: Any, handler: Any, asked: dict[str, Any], started: list[Running], ways: Any) -> None:
    client = client_of(url)
    stopped, prepare = ways
    if prepare is not None:
        prepare(client)
    with Guard(store) as guard:
        one: Worker = guarded(guard, "charge", handler, client=client, **asked)
        started.append(Running(one, guard, lambda: one.drain(0), lambda: one.drain(PATIENCE)))
        if stopped:
            one.stop()
        one.consume()
    client.close()


def _in_tasks(url: str, store: Any, handler: Any, asked: dict[str, Any], started: list[Running], ways: Any) -> None:
    asked = {"concurrency" if name == "threads" else name: value for name, value in asked.items()}

    async def story() -> None:
        loop = asyncio.get_running_loop()
        config = Config(retries={"total_max_attempts": 1})
        async with (
            AioSession().create_client("sqs", config=config, **options(url)) as client,
            AsyncGuard(store) as guard,
        ):
            one: AsyncWorker = guarded_async(guard, "charge", in_task(handler), client=client, **asked)

            def stop(within: float = PATIENCE) -> bool:
                draining = one.drain(within)
                try:
                    return asyncio.run_coroutine_threadsafe(draining, loop).result(PATIENCE)
                except (RuntimeError, CancelledError):
                    # The loop has ended with `consume`, which says why.
                    draining.close()
                    return True

            if ways[0]:
                one.stop()
            consuming = asyncio.create_task(one.consume())
            started.append(Running(one, guard, lambda: stop(0), stop))
            await consuming

    asyncio.run(story())


@pytest.fixture(params=MODES)
def each_mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest.fixture(params=["threads", pytest.param("tasks", marks=pytest.mark.more)])
def mode(request: pytest.FixtureRequest) -> Mode:
    """The rules are the same for both."""
    chosen: Mode = request.param
    return chosen


@pytest.fixture
def shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed, or was refused as a dead letter, comes again in no time."""
    monkeypatch.setattr(sqs_consumer, "FAILED_DELAY", 0.0)
    monkeypatch.setattr(sqs_consumer, "DEAD_LETTER_DELAY", 0.05)
    monkeypatch.setattr(sqs_consumer, "SOON", 0.0)
    monkeypatch.setattr(shared_verdict, "SOON", 0.05)
    monkeypatch.setattr(sqs_worker, "SOON", 0.0)


def proxied(mode: Mode) -> Any:
    """A store that goes down on request."""
    return ProxyStore() if mode == "threads" else AsyncProxyStore()
