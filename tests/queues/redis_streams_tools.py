"""Streams on a real Redis or Valkey, and sync and async workers of a group, each in a thread with its own client."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Literal, Self

import pytest
import redis
import redis.asyncio

from onefold import AsyncGuard, Guard
from onefold.queues._redis_streams.consumer import Delivery
from onefold.queues.keys import header
from onefold.queues.redis_streams import AsyncGuardedConsumer, GuardedConsumer, guarded
from services.redis import named_client
from tests.support import PATIENCE

Kind = Literal["sync", "async"]
KINDS: Final = ("sync", "async")

# A worker on a server. Every day all tests run on the first, and the most important ones on the second, too.
_ALL: Final = [("sync", "valkey_url"), ("async", "redis_url"), ("sync", "redis_url"), ("async", "valkey_url")]
FEW_SIDES: Final = [*_ALL[:1], *(pytest.param(one, marks=pytest.mark.more) for one in _ALL[1:])]
SIDES: Final = [*_ALL[:2], *(pytest.param(one, marks=pytest.mark.more) for one in _ALL[2:])]
on_both = pytest.mark.parametrize("side", SIDES, ids="-".join, indirect=True)

GROUP: Final = "workers"


def until(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


def client_of(url: str, **options: Any) -> Any:
    return redis.Redis.from_url(as_redis(url), **options)


def async_client_of(url: str, **options: Any) -> Any:
    return redis.asyncio.Redis.from_url(as_redis(url), **options)


def as_redis(url: str) -> str:
    """Return the URL with the scheme that redis-py knows."""
    return f"redis://{url.partition('://')[2]}"


class Environment:
    """A stream, another one for its dead letters, and a client to look at both."""

    def __init__(self, url: str, stream: str = "charges") -> None:
        self.url = url
        self.stream = stream
        self.dead = f"{stream}.dead"

    @property
    def server(self) -> Any:
        return named_client(self.url)

    def send(self, body: bytes = b"{}", *, times: int = 1, **headers: Any) -> list[bytes]:
        """As somebody else's client would; `idempotency_key="pay-1"` is the field `idempotency-key`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with self.server as server:
            return [server.xadd(self.stream, {**named, "body": body}) for _ in range(times)]

    def send_keyed(self, key: str, body: bytes = b"{}", *, times: int = 1) -> list[bytes]:
        return self.send(body, times=times, idempotency_key=key)

    def pending(self) -> list[dict[str, Any]]:
        """Each entry that somebody has: its id, its consumer, its idle time and its deliveries."""
        with self.server as server:
            found: list[dict[str, Any]] = server.xpending_range(self.stream, GROUP, "-", "+", 1000)
            return found

    def is_settled(self) -> bool:
        """Whether every entry was read, and is acknowledged."""
        with self.server as server:
            groups = server.xinfo_groups(self.stream) if server.exists(self.stream) else []
            if not groups:
                return False
            (group,) = groups
            newest = server.xrevrange(self.stream, count=1)
            read = not newest or _number(group["last-delivered-id"]) >= _number(newest[0][0])
            return bool(read and not group["pending"])

    def settled(self) -> None:
        until(self.is_settled, "everything is settled")

    def consumers(self) -> list[bytes]:
        with self.server as server:
            return [one["name"] for one in server.xinfo_consumers(self.stream, GROUP)]

    def letters(self) -> list[dict[bytes, bytes]]:
        with self.server as server:
            return [fields for _, fields in server.xrange(self.dead)]

    def letter(self) -> dict[bytes, bytes]:
        until(self.letters, "a dead letter is there")
        (found,) = self.letters()
        return found


def _number(entry_id: bytes) -> tuple[int, int]:
    first, _, second = entry_id.partition(b"-")
    return int(first), int(second)


class Worker:
    """One that consumes in a thread until it is told to stop; it settles what it has begun before it goes."""

    def __init__(
        self,
        kind: Kind,
        environment: Environment,
        store: Any,
        handler: Callable[..., Any],
        *,
        url: str | None = None,
        client: dict[str, Any] | None = None,
        consumer: str | None = None,
        batch: int | None = None,
        fails: bool = False,
        **options: Any,
    ) -> None:
        self.errors: list[BaseException] = []
        self.callback: GuardedConsumer | AsyncGuardedConsumer | None = None
        self.guard: Any = None
        self._jobs: Any = None
        self._environment = environment
        self._fails = fails
        self._url = url or environment.url
        self._client = client or {}
        self._how = {"consumer": consumer, "batch": batch}
        self._options: dict[str, Any] = {
            "key": header(),
            "stream": environment.stream,
            "group": GROUP,
            "dead_letter": environment.dead,
        } | options
        self._ready = threading.Event()
        run = self._sync if kind == "sync" else self._async
        self._thread = threading.Thread(target=self._caught, args=(run, store, handler), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop()
        self.join()
        if kind is None and self.errors and not self._fails:
            raise self.errors[0]

    def stop(self) -> None:
        if self.callback is not None:
            self.callback.stop()

    def join(self) -> None:
        self._thread.join(2 * PATIENCE)
        assert not self._thread.is_alive()

    @property
    def jobs(self) -> Any:
        """What it has taken and not settled."""
        if self._jobs is None:
            until(lambda: self.has_begun or self.errors, "it consumes")
            assert self.callback is not None
            (loop,) = self.callback._loops
            self._jobs = loop.jobs
        return self._jobs

    @property
    def has_begun(self) -> bool:
        return self.callback is not None and bool(self.callback._loops)

    def _caught(self, run: Callable[..., None], *arguments: Any) -> None:
        try:
            run(*arguments)
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._ready.set()

    def _sync(self, store: Any, handler: Callable[..., Any]) -> None:
        with Guard(store) as guard, client_of(self._url, **self._client) as client:
            self.guard = guard
            self.callback = guarded(guard, "charge", handler, **self._options)
            self._ready.set()
            self.callback.consume(client, **self._how)  # type: ignore[arg-type]

    def _async(self, store: Any, handler: Callable[..., Any]) -> None:
        asyncio.run(self._consume(store, as_async(handler)))

    async def _consume(self, store: Any, handler: Callable[..., Any]) -> None:
        async with AsyncGuard(store) as guard, async_client_of(self._url, **self._client) as client:
            self.guard = guard
            callback = self.callback = guarded(guard, "charge", handler, **self._options)
            self._ready.set()
            await callback.consume(client, **self._how)  # type: ignore[arg-type]


def as_async(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler as an async guard wants it; what blocks is in a thread, what has a transaction stays with it."""

    async def simple(delivery: Delivery) -> None:
        await asyncio.to_thread(handler, delivery)

    async def transactional(delivery: Delivery, *, tx: Any) -> None:
        handler(delivery, tx=tx)

    if inspect.iscoroutinefunction(handler):
        return handler
    return transactional if "tx" in inspect.signature(handler).parameters else simple


class Handled:
    """A handler that counts, fails as often as it is told to, and waits where it is told to."""

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

    @property
    def bodies(self) -> list[bytes]:
        return [one.body for one in self.calls]
