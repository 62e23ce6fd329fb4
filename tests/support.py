"""What the tests of edge cases share: a clock moved by hand, stores that misbehave on request, other threads."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, get_args, get_type_hints

from onefold import Event, Guard, Policy, StoreUnavailable
from onefold._model import Address, Claim, Close, Ending, Entry, Gone, Record, Released
from onefold._model import policy as _policy
from onefold.stores.base import Store
from onefold.stores.memory import AsyncMemoryStore, MemoryStore

T = TypeVar("T")

# Far more than any test needs; it bounds how long a broken one hangs.
PATIENCE: Final = 60.0

PROJECT: Final = Path(__file__).parent.parent

YEAR: Final = 365 * 86_400.0

# For a pytest of its own: the plugins that our tests need take longer to import than most of what it is asked to run.
PLUGINS: Final = ("anyio", "cacheprovider", "hypothesispytest", "schemathesis", "xdist")
WITHOUT_PLUGINS: Final = [word for plugin in PLUGINS for word in ("-p", f"no:{plugin}")]

EVERYTHING: Final = frozenset(
    {"claim", "take_over", "extend", "finish", "release", "read", "claim_all", "extend_all", "close_all", "annotate"}
)


class Clock:
    """The clock of a store, moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Script:
    """What a proxy does besides passing on, by the name of the operation; a claim that replaces is a "take_over"."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.answers: list[tuple[str, Any]] = []
        # The tokens whose leases were to be renewed.
        self.extended: list[bytes] = []
        # These fail before they are applied, and these after.
        self.down: set[str] = set()
        self.reply_lost: set[str] = set()
        # Called once each, before an operation is applied and after it.
        self.before: dict[str, Callable[[], Any]] = {}
        self.after: dict[str, Callable[[], Any]] = {}
        # The client library lost each reply, and sent the operation again.
        self.twice = False
        self._answered = threading.Condition()

    def die(self) -> None:
        """From now on nothing reaches the store."""
        self.down |= EVERYTHING

    def wait_for(self, operation: str, count: int) -> None:
        """Wait until so many of these operations were answered."""
        with self._answered:
            assert self._answered.wait_for(lambda: self.count(operation) >= count, PATIENCE), operation

    def count(self, operation: str) -> int:
        return sum(1 for name, _ in self.answers if name == operation)

    def begin(self, operation: str) -> None:
        self.calls[operation] += 1

    def refuse(self, operation: str) -> None:
        if operation in self.down:
            raise StoreUnavailable(f"the store did not answer to {operation}")

    def end(self, operation: str, answer: Any) -> Any:
        with self._answered:
            self.answers.append((operation, answer))
            self._answered.notify_all()
        if operation in self.reply_lost:
            raise StoreUnavailable(f"the answer to {operation} got lost")
        return answer


class ProxyStore(Script):
    """Passes everything on to a memory store, as the script says. It is not `Batching`."""

    def __init__(self, inner: MemoryStore | None = None) -> None:
        super().__init__()
        self.inner = MemoryStore() if inner is None else inner

    def ask(self, operation: str, send: Callable[[], T]) -> T:
        self.begin(operation)
        self.before.pop(operation, _nothing)()
        self.refuse(operation)
        answer = send()
        if self.twice:
            answer = send()
        self.after.pop(operation, _nothing)()
        self.end(operation, answer)
        return answer

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        name = "claim" if replacing is None else "take_over"
        return self.ask(name, lambda: self.inner.claim(entry, replacing=replacing))

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        self.extended.append(claim.token)
        return self.ask("extend", lambda: self.inner.extend(claim, notes))

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return self.ask("finish", lambda: self.inner.finish(claim, ending))

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        return self.ask("release", lambda: self.inner.release(claim, released))

    def read(self, address: Address) -> Record | None:
        return self.ask("read", lambda: self.inner.read(address))

    def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        return self.ask("annotate", lambda: self.inner.annotate(record, notes))

    def purge(self, limit: int) -> int:
        return self.inner.purge(limit)


class BatchingProxyStore(ProxyStore):
    """The same for a store that takes many addresses in one round trip."""

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return self.ask("claim_all", lambda: self.inner.claim_all(entries))

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return self.ask("extend_all", lambda: self.inner.extend_all(claims))

    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return self.ask("close_all", lambda: self.inner.close_all(closes))


class AsyncProxyStore(Script):
    """The async counterpart; what `before` and `after` return is awaited if it can be."""

    def __init__(self, inner: AsyncMemoryStore | None = None) -> None:
        super().__init__()
        self.inner = AsyncMemoryStore() if inner is None else inner

    async def ask(self, operation: str, send: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self.begin(operation)
        await _awaited(self.before.pop(operation, _nothing)())
        self.refuse(operation)
        answer = await send()
        await _awaited(self.after.pop(operation, _nothing)())
        self.end(operation, answer)
        return answer

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        name = "claim" if replacing is None else "take_over"
        return await self.ask(name, lambda: self.inner.claim(entry, replacing=replacing))

    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return await self.ask("extend", lambda: self.inner.extend(claim, notes))

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        return await self.ask("finish", lambda: self.inner.finish(claim, ending))

    async def release(self, claim: Claim, released: Released | None = None) -> bool:
        return await self.ask("release", lambda: self.inner.release(claim, released))

    async def read(self, address: Address) -> Record | None:
        return await self.ask("read", lambda: self.inner.read(address))

    async def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        return await self.ask("annotate", lambda: self.inner.annotate(record, notes))

    async def purge(self, limit: int) -> int:
        return await self.inner.purge(limit)


class AsyncBatchingProxyStore(AsyncProxyStore):
    """The same for an awaited store that takes many addresses in one round trip."""

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return await self.ask("claim_all", lambda: self.inner.claim_all(entries))

    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return await self.ask("extend_all", lambda: self.inner.extend_all(claims))

    async def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return await self.ask("close_all", lambda: self.inner.close_all(closes))


class Handler:
    """A handler that counts its starts, and returns a value or raises an error."""

    def __init__(self, value: Any = "ok", *, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error
        self._started: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> Any:
        self._started.append(args)
        if self.error is not None:
            raise self.error
        return self.value

    @property
    def starts(self) -> int:
        return len(self._started)


class Heard:
    """A listener that remembers: `Guard(..., on_event=heard)`."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def kinds(self) -> list[str]:
        return [event.kind.value for event in self.events]


class Died(BaseException):
    """The end of a process: whatever catches it can no longer reach the store."""


def die_running(
    store: MemoryStore, operation: str, key: str, policy: Policy | None = None, *, payload: object = None
) -> None:
    """A worker claims the key, starts its handler and dies. Its record stays behind, running."""
    connection = ProxyStore(store)

    def handler() -> None:
        connection.die()
        raise Died

    with Guard(connection, policy=policy) as guard:
        try:
            guard.run(operation, key, handler, payload=payload)
        except Died:
            return
    raise AssertionError("the worker did not die")


def end_lease(store: Store, address: Address) -> None:
    """End the lease of a claim that its owner cannot renew; no busy machine ends it too early."""
    found = store.read(address)
    assert found is not None
    assert store.extend(Claim(address, found.token, lease=0.0, ttl=found.ttl_left)), "it is nobody's"


def elsewhere(call: Callable[[], T]) -> T:
    """What the call returns or raises in a thread of its own: another worker, with no handler around it."""
    return Elsewhere(call).result()


class Elsewhere(Generic[T]):
    """A call that is under way in another thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout: float = PATIENCE) -> T:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise AssertionError("the other thread did not come to an end")
        if self._error is not None:
            raise self._error
        return self._values[0]

    def _run(self) -> None:
        try:
            self._values.append(self._call())
        except BaseException as error:
            self._error = error


def in_time(story: Coroutine[Any, Any, T]) -> T:
    """Play a story in an event loop of its own; one that hangs fails."""
    return asyncio.run(asyncio.wait_for(story, PATIENCE))


def in_own_context(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that inherits no running handler, as another worker would not."""
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold within our patience, for what only the worker's own clock can bring about."""
    end = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not holds():
        if time.monotonic() > end:
            return False
        pause.wait(0.001)
    return True


async def _awaited(value: Any) -> None:
    if inspect.isawaitable(value):
        await value


def values_of(field: str) -> set[str]:
    """Return the words that a field of a policy takes, as its annotation lists them."""
    taken = get_type_hints(Policy, vars(_policy))[field]
    values = {word for part in (taken, *get_args(taken)) for word in get_args(part) if isinstance(word, str)}
    assert values, f"{field} takes no words"
    return values


def _nothing() -> None:
    """The hook where there is none."""
