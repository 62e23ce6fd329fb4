"""Streams on a real NATS server, and guarded consumers of them: push and pull, each with a connection of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig

from onefold import AsyncGuard
from onefold.queues import nats as onefold_nats
from onefold.queues._nats.consumer import Delivery
from onefold.queues.keys import header
from onefold.queues.nats import GuardedCallback, guarded
from tests.support import PATIENCE

Mode = Literal["push", "pull"]
MODES: Final = ("push", "pull")

DURABLE: Final = "workers"

# A server that is gone is tried again soon.
RECONNECT: Final[dict[str, Any]] = {"reconnect_time_wait": 0.05, "max_reconnect_attempts": -1}


async def _quiet(_error: Exception) -> None:
    """Lost connections are what these tests are about: nats-py would log each."""


async def connected(url: str, **options: Any) -> Client:
    return await nats.connect(url, **{"error_cb": _quiet, **RECONNECT, **options})


async def until(holds: Callable[[], Any], what: str) -> None:
    """Wait until it holds; it may have to be awaited."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while True:
        found = holds()
        if await found if isinstance(found, Awaitable) else found:
            return
        assert asyncio.get_running_loop().time() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.01)


def lasting_longer(client: Client, seconds: float) -> list[str]:
    """Have this client's requests for messages last longer at the server; return the subjects of those sent since."""
    publish, sent = client.publish, list[str]()

    async def publish_longer(subject: str, payload: bytes = b"", *rest: Any, **options: Any) -> None:
        if ".CONSUMER.MSG.NEXT." in subject:
            request = json.loads(payload)
            if "expires" in request and not request.get("no_wait"):
                request["expires"] += int(seconds * 1e9)
                payload = json.dumps(request).encode()
                sent.append(subject)
        await publish(subject, payload, *rest, **options)

    client.publish = publish_longer  # type: ignore[method-assign]
    return sent


class Environment:
    """A stream, another one for its dead letters, and a connection to look at both."""

    def __init__(self, url: str, name: str, *, dead: bool = True, **config: Any) -> None:
        self.url = url
        self.stream = name
        self.subject = f"{name}.charges"
        self.dead = f"{name}.dead"
        self.config = config
        self._has_dead = dead
        self.advisories: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        self.client = await connected(self.url)
        self.js: JetStreamContext = self.client.jetstream()
        await self.js.add_stream(name=self.stream, subjects=[self.subject, f"{self.subject}.>"])
        if self._has_dead:
            await self.add_dead_letters()
        await self.client.subscribe(f"$JS.EVENT.ADVISORY.CONSUMER.*.{self.stream}.>", cb=self._heard)
        await self.client.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in (self.stream, f"{self.stream}-dead"):
            with suppress(nats.errors.Error):
                await self.js.delete_stream(stream)
        await self.client.close()

    async def _heard(self, message: Msg) -> None:
        self.advisories.append(json.loads(message.data) | {"kind": message.subject.split(".")[4]})

    def heard(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.advisories if one["kind"] == kind]

    async def add_dead_letters(self) -> None:
        await self.js.add_stream(name=f"{self.stream}-dead", subjects=[self.dead])

    async def send(self, body: bytes = b"{}", *, times: int = 1, **headers: str) -> None:
        """As somebody else's client would; `idempotency_key="pay-1"` is the header `idempotency-key`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for _ in range(times):
            await self.js.publish(self.subject, body, headers=named or None)

    async def send_keyed(self, key: str, body: bytes = b"{}", *, times: int = 1) -> None:
        await self.send(body, times=times, idempotency_key=key)

    async def info(self) -> Any:
        return await self.js.consumer_info(self.stream, DURABLE)

    async def is_settled(self, messages: int) -> bool:
        """Whether the server waits for no word about any of these messages."""
        with suppress(nats.errors.Error):
            info = await self.info()
            return (info.num_pending, info.num_ack_pending) == (0, 0) and (info.ack_floor.stream_seq or 0) >= messages
        return False

    async def settled(self, messages: int) -> None:
        await until(lambda: self.is_settled(messages), f"{messages} messages are settled")

    async def letters(self) -> list[Msg]:
        """All dead letters; they stay."""
        found = await self.js.stream_info(f"{self.stream}-dead")
        names = range(found.state.first_seq or 1, found.state.last_seq + 1)
        raw = [await self.js.get_msg(f"{self.stream}-dead", seq) for seq in names if found.state.messages]
        return [Msg(self.client, one.subject or "", "", one.data or b"", one.headers) for one in raw]

    async def letter(self) -> Msg:
        await until(self.letters, "a dead letter is there")
        (found,) = await self.letters()
        return found

    async def count(self, kind: str) -> int:
        """How many advisories of this kind have come by now."""
        await self.client.flush()
        return len(self.heard(kind))


@dataclass
class Worker:
    callback: GuardedCallback
    guard: AsyncGuard
    client: Client
    js: JetStreamContext
    _stop: Callable[[], Awaitable[None]]
    consuming: asyncio.Task[None] | None = None
    _stopped: list[bool] = field(default_factory=list)

    async def stop(self) -> bool:
        """Unsubscribe, and settle what runs."""
        if not self._stopped:
            await self._stop()
            self._stopped.append(await self.callback.drain(within=PATIENCE))
        return self._stopped[0]


@asynccontextmanager
async def worker(
    environment: Environment,
    store: Any,
    handler: Callable[..., Any],
    *,
    mode: Mode = "pull",
    url: str | None = None,
    manual_ack: bool = True,
    drains: bool = True,
    **options: Any,
) -> AsyncIterator[Worker]:
    patched = pytest.MonkeyPatch()
    # A fetch that is under way is waited for by `drain`.
    patched.setattr(onefold_nats, "FETCH_SECONDS", 0.1)
    client = await connected(url or environment.url)
    js, config = client.jetstream(), ConsumerConfig(**environment.config)
    asked: dict[str, Any] = {"key": header(), "dead_letter": environment.dead} | options
    async with AsyncGuard(store) as guard:
        callback = guarded(guard, "charge", handler, **asked)
        if mode == "push":
            push = await js.subscribe(environment.subject, DURABLE, cb=callback, manual_ack=manual_ack, config=config)
            stop: Callable[[], Awaitable[None]] = push.unsubscribe
        else:
            pull = await js.pull_subscribe(environment.subject, DURABLE, config=config)
            stop = _nothing
        one = Worker(callback, guard, client, js, stop)
        if mode == "pull":
            one.consuming = asyncio.create_task(callback.consume(pull))
        try:
            yield one
            if drains:
                assert await one.stop()
        finally:
            if one.consuming is not None:
                if not drains:
                    one.consuming.cancel()
                with suppress(asyncio.CancelledError, nats.errors.Error):
                    await asyncio.wait_for(one.consuming, PATIENCE)
            await client.close()
            patched.undo()


async def _nothing() -> None:
    """A pull subscription ends with `drain`."""


class Handled:
    """A handler that counts, fails as often as it is told to, and waits where it is told to."""

    def __init__(self, failures: int = 0, error: type[Exception] = ValueError) -> None:
        self.calls: list[Delivery] = []
        self._failures = failures
        self._error = error
        self.gate: asyncio.Event | None = None

    async def __call__(self, delivery: Delivery) -> None:
        self.calls.append(delivery)
        if len(self.calls) <= self._failures:
            raise self._error("not for the log: 4200")
        if self.gate is not None:
            await self.gate.wait()

    @property
    def bodies(self) -> list[bytes]:
        return [one.body for one in self.calls]
