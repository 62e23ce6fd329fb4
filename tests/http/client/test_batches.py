"""What a handler of a whole batch sends: it has no delivery of its own, and so no key can be derived for it."""

from __future__ import annotations

import asyncio
import contextvars
import sqlite3
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import requests

from onefold import AsyncGuard, Guard, UsageError, current
from onefold.current import in_batch
from onefold.http.client import Adapter, AsyncTransport, Transport, intent
from onefold.queues._shared.transactional_batches import TransactionalBatches
from onefold.queues._shared.verdict import ACK
from onefold.queues.keys import Message, header
from tests.http_service.scripted import Scripted, scripted

URL = "https://bank.example/charges"
KEYS = ["a", "b"]


class Sent(NamedTuple):
    """A message of a poll."""

    key: str

    @property
    def message(self) -> Message:
        return Message(headers={"idempotency-key": self.key}, body=b"{}")

    @property
    def native(self) -> str:
        return self.key


class Bank:
    """Keeps the keys of what it was sent."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        mock = httpx.MockTransport(self.answer)
        self.client = httpx.Client(transport=Transport(mock))
        self.async_client = httpx.AsyncClient(transport=AsyncTransport(mock))

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers["Idempotency-Key"])
        return httpx.Response(201)


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


class Batches:
    """Polls of two messages in a transaction. It fails at its end, and then each message gets one of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with Guard(f"sqlite:///{path}") as guard:
            guard.run("other", "k", lambda: None)

    @contextmanager
    def begin(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        finally:
            connection.close()

    def deliver(self, send: Any) -> list[Any]:
        def handle(keys: list[str], *, tx: sqlite3.Connection) -> None:
            for key in keys:
                send(key)
            if len(keys) > 1:
                raise RuntimeError("after the charge")

        with Guard(f"sqlite:///{self.path}") as guard:
            return self._batches(guard, handle, self.begin).deliver([Sent(key) for key in KEYS])

    def deliver_async(self, send: Any) -> list[Any]:
        @asynccontextmanager
        async def begin() -> Any:
            with self.begin() as tx:
                yield tx

        async def handle(keys: list[str], *, tx: sqlite3.Connection) -> None:
            for key in keys:
                await send(key)
            if len(keys) > 1:
                raise RuntimeError("after the charge")

        async def main() -> list[Any]:
            async with AsyncGuard(f"sqlite:///{self.path}") as guard:
                return await self._batches(guard, handle, begin).deliver_async([Sent(key) for key in KEYS])

        return asyncio.run(main())

    def _batches(self, guard: Any, handle: Any, begin: Any) -> TransactionalBatches:
        return TransactionalBatches(guard, "credit", handle, begin, key=header(), missing_key="never", policy=None)


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    return Batches(tmp_path / "wallet.db")


def test_a_request_without_a_key_is_refused_and_no_message_is_blamed(
    batches: Batches, bank: Bank, server: Scripted
) -> None:
    async def send(key: str) -> None:
        await bank.async_client.post(URL, json={"for": key})

    with pytest.raises(UsageError, match=r"Nothing was sent\. Name its key in the header Idempotency-Key"):
        batches.deliver(lambda key: bank.client.post(URL, json={"for": key}))
    with pytest.raises(UsageError, match="Nothing was sent"):
        batches.deliver_async(send)
    with requests.Session() as session:
        session.mount("http://", Adapter())
        with pytest.raises(UsageError, match="Nothing was sent"):
            batches.deliver(lambda key: session.post(server.url, json={"for": key}))

    assert bank.keys == []
    assert server.got == []


def test_an_object_that_has_a_key_of_ours_is_refused_too(batches: Batches, bank: Bank) -> None:
    ready = bank.client.build_request("POST", URL)
    bank.client.send(ready)

    with pytest.raises(UsageError, match="Nothing was sent"):
        batches.deliver(lambda key: bank.client.send(ready))

    assert len(bank.keys) == 1


def test_a_key_that_is_named_is_sent_by_every_rerun(batches: Batches, bank: Bank) -> None:
    def send(key: str) -> None:
        bank.client.post(URL, json={"for": key}, headers={"Idempotency-Key": f'"charge-{key}"'})

    async def send_async(key: str) -> None:
        await bank.async_client.post(URL, json={"for": key}, headers={"Idempotency-Key": f'"charge-{key}-async"'})

    assert batches.deliver(send) == [ACK, ACK]
    assert batches.deliver_async(send_async) == [ACK, ACK]
    # The poll, and then each message alone; for the second worker both are duplicates.
    assert bank.keys == ['"charge-a"', '"charge-b"'] * 2


def test_a_delivery_or_an_intent_inside_of_a_batch_has_keys_of_its_own(batches: Batches, bank: Bank) -> None:
    kept = Guard("memory:")

    def charge(key: str) -> None:
        bank.client.post(URL, json={"for": key})

    def send(key: str) -> None:
        kept.run("charge", key, lambda: charge(key))
        with intent(f"charge-{key}", store=kept):
            charge(key)
            raise_once(key)

    failed: set[str] = set()

    def raise_once(key: str) -> None:
        if key not in failed:
            failed.add(key)
            raise ConnectionError("after the charge")

    batches.deliver(send)
    batches.deliver(send)

    assert len(set(bank.keys)) == 4


def test_current_says_that_there_is_no_single_delivery(batches: Batches) -> None:
    with pytest.raises(UsageError, match="Take the keys from the messages"):
        batches.deliver(lambda key: current())


def test_a_thread_that_outlives_its_batch_sends_what_it_likes(batches: Batches, bank: Bank) -> None:
    outlives: list[contextvars.Context] = []

    batches.deliver(lambda key: outlives.append(contextvars.copy_context()))
    outlives[0].run(bank.client.post, URL)

    assert len(bank.keys) == 1


def test_a_task_that_outlives_its_batch_sends_what_it_likes(bank: Bank) -> None:
    async def story() -> None:
        is_over = asyncio.Event()

        async def send_later() -> None:
            with pytest.raises(UsageError, match="Nothing was sent"):
                await bank.async_client.post(URL)
            started.set()
            await is_over.wait()
            await bank.async_client.post(URL)

        started = asyncio.Event()
        with in_batch():
            task = asyncio.create_task(send_later())
            await started.wait()
        is_over.set()
        await task

    asyncio.run(story())

    assert len(bank.keys) == 1
