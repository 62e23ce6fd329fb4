"""Redis and Valkey: one string for each record, one script for each operation, one round trip for each call.

The clock is the server's, and so is the expiry of records. A failure is never hidden: errors of the server or the
client library become `StoreUnavailable`, and nothing runs unclaimed. `docs/stores/redis.md` lists what such a server
may lose (in a failover, by eviction, in a crash).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Final, NamedTuple, NoReturn, ParamSpec, TypeVar

from onefold._checks import at_least, finite, positive
from onefold._concurrency.generators import run, run_async
from onefold._model import Address, Claim, Close, Ending, Entry, Gone, Record, Released, State
from onefold.durations import Duration, as_text
from onefold.errors import OnefoldError, StoreUnavailable, UsageError
from onefold.stores.base import Query, Sample, StoredRecord
from onefold.stores.redis import clients, records
from onefold.stores.redis.connections.reserved import AsyncReservedSender, Renewals
from onefold.stores.redis.errors import is_failure, translated
from onefold.stores.redis.event_loops import Loops
from onefold.stores.redis.keys import Keys
from onefold.stores.redis.kind import KIND
from onefold.stores.redis.operations import Operations
from onefold.stores.redis.records import ScriptCall
from onefold.stores.redis.routing import RedisFlow, Topology, Wait, dispatch
from onefold.stores.redis.sender import Sender
from onefold.stores.redis.urls import PREFIX, Settings, parsed
from onefold.stores.redis.wakeups.threads import Listener
from onefold.stores.reserved import came_to_nothing, unsent

__all__ = ["KIND", "PREFIX", "AsyncRedisStore", "RedisStore", "adopt", "open_async_store", "open_store"]

P = ParamSpec("P")
T = TypeVar("T")

# On Python 3.11 accessing an enum's members is slow.
RUNNING: Final = State.RUNNING

# The prefix is in every key, and so in the memory of every record.
PREFIX_MAX: Final = 128

# A replica in the same network receives a write within a few milliseconds.
WAIT_TIMEOUT: Final = 1.0


class _Options:
    """The settings common to both stores."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._key, self._wait = terms.keys.of, terms.wait
        self._wait_for_claims = None if self._wait is None else self._wait._replace(at_once=False)
        self._operations = Operations(terms.keys, self._wait)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._terms.where!r})"


class RedisStore(_Options):
    """A `Store`, `Batching` and `Browsable` in Redis or Valkey; safe to share between threads, and across a fork.

    `source` is a URL, or your own client: `redis.Redis`, `redis.RedisCluster`, or those of Valkey's own library. From a
    URL it creates a client on first use, closes it in `close()`, and creates another if it is used after that.
    """

    def __init__(
        self,
        source: Any,
        *,
        prefix: str | None = None,
        wait_replicas: int | None = None,
        wait_timeout: Duration | None = None,
        wakeups: bool | None = None,
    ) -> None:
        super().__init__(_terms(source, prefix, wait_replicas, wait_timeout, wakeups, is_async=False))
        self._sender: Sender | None = None if self._terms.settings else clients.sender(source, ours=False)
        self._renewals = None if self._sender is None else Renewals(self._sender)
        self._opened: clients.Opened | None = None
        self._listener: Listener | None = None
        self._opening, self._pid = threading.Lock(), os.getpid()

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        if entry.state is RUNNING:
            self._reserve()
        call = records.claim(self._key(entry.address), entry, replacing)
        return records.claimed(entry.address, self._call(call, self._wait_for_claims))

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return bool(self._end(records.extend(self._key(claim.address), claim, notes)))

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return bool(self._end(records.finish(self._key(claim.address), claim, ending), self._wait))

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        return bool(self._end(records.release(self._key(claim.address), claim, released)))

    def read(self, address: Address) -> Record | None:
        return records.read_reply(address, self._call(records.read(self._key(address))))

    def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        call = records.annotate(self._key(record.address), record, notes)
        return records.claimed(record.address, self._call(call))

    def purge(self, limit: int) -> int:  # noqa: ARG002 - there is never anything to remove
        """Do nothing: the server removes expired records."""
        return 0

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        self._reserve()
        return self._dispatch(self._operations.claim_all, entries)

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        """Renew the leases on the connections reserved for it."""
        try:
            sender = self._renewing().sender
            return run(self._operations.extend_all(sender, claims), sender)
        except Exception as error:  # noqa: BLE001 - errors from outside the client library are raised unchanged
            _raise(error, self._terms.where)

    def renewal_groups(self, claims: Sequence[Claim]) -> list[list[int]]:
        """Return the indexes of the claims that are renewed together: one group for each primary."""
        return self._operations.renewal_groups(self._renewing().sender, claims)

    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        try:
            return self._dispatch(self._operations.close_all, closes)
        except StoreUnavailable as error:
            sender = self._reserved_after(error)
        return self._sent(self._operations.close_all(sender, closes), sender)

    def knows(self, error: BaseException) -> bool:
        """Return whether an error is ours, as all of the server's are. Any other came from a signal handler."""
        return isinstance(error, OnefoldError)

    def listen(self, address: Address) -> bool:
        """Wake those in this process who wait for this record when it ends. Return whether that can be expected."""
        if not self._terms.wakeups:
            return False
        sender = self._sender or self._open()
        if self._listener is None:
            self._listener = Listener(sender, self._terms.where, self._terms.keys)
        return self._listener.listen(address)

    def unlisten(self, address: Address) -> None:
        """Wake nobody any more for this record."""
        if self._listener is not None:
            self._listener.unlisten(address)

    def browse(self, query: Query, limit: int) -> list[Record]:
        return self._dispatch(self._operations.browse, query, limit)

    def sample(self, query: Query, limit: int) -> Sample:
        """Return some records from all over the servers; all of them, if there are few keys."""
        from onefold.stores.samples.redis_keys import sample

        return self._dispatch(sample, self._terms.keys, query, limit)

    def stored(self, address: Address) -> StoredRecord | None:
        """Return the string of this address, with its key, its remaining TTL and the server's time."""
        key = self._key(address)
        shown = self._call(records.read(key))
        return None if shown is None else StoredRecord("redis", records.as_stored(key, shown))

    def facts(self) -> dict[str, Any]:
        """Return what the servers report about themselves."""
        from onefold.stores.redis.facts import facts_of

        return self._dispatch(facts_of, self._terms.keys.prefix, self._wait)

    def close(self) -> None:
        """Close the connections that the store has opened, not your own client. Later use opens new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        if self._renewals is not None:
            self._renewals.close()
        opened, sender, self._opened = self._opened, self._sender, None
        if opened is not None and sender is not None:
            self._sender = self._renewals = None
            sender.connections.close()
            opened.close()

    def _reserve(self) -> None:
        """Open the connections for renewals. Without them no claim is made: nothing could keep it alive."""
        try:
            self._renewing().hold()
        except Exception as error:  # noqa: BLE001 - errors from outside the client library are raised unchanged
            with unsent():
                _raise(error, self._terms.where)

    def _renewing(self) -> Renewals:
        if self._renewals is None:
            self._open()
        assert self._renewals is not None
        return self._renewals

    def _end(self, call: ScriptCall, wait: Wait | None = None) -> Any:
        """Renew or end a claim, on a reserved connection if handlers hold all others."""
        try:
            return self._call(call, wait)
        except StoreUnavailable as error:
            sender = self._reserved_after(error)
        return self._sent(dispatch(sender, [call], wait), sender)[0]

    def _reserved_after(self, error: StoreUnavailable) -> Sender:
        """Return the sender for renewals if the client gave no connection; otherwise raise the error again."""
        if error.reached or self._renewals is None or not self._renewals.is_held:
            raise error
        return self._renewals.sender

    def _sent(self, flow: RedisFlow[T], sender: Sender) -> T:
        try:
            return run(flow, sender)
        except Exception as error:  # noqa: BLE001 - errors from outside the client library are raised unchanged
            _raise(error, self._terms.where)

    def _call(self, call: ScriptCall, wait: Wait | None = None) -> Any:
        try:
            sender = self._sender or self._open()
            return sender.call(call) if wait is None else run(dispatch(sender, [call], wait), sender)[0]
        except Exception as error:  # noqa: BLE001 - errors from outside the client library are raised unchanged
            _raise(error, self._terms.where)

    def _dispatch(
        self, operation: Callable[Concatenate[Topology, P], RedisFlow[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            sender = self._sender or self._open()
            return run(operation(sender, *args, **kwargs), sender)
        except Exception as error:  # noqa: BLE001 - errors from outside the client library are raised unchanged
            _raise(error, self._terms.where)

    def _open(self) -> Sender:
        assert self._terms.settings is not None
        if self._pid != os.getpid():
            # A thread of the parent may have held the lock at the fork.
            self._opening, self._pid = threading.Lock(), os.getpid()
        with self._opening:
            if self._sender is None:
                opened = clients.opened(self._terms.settings, is_async=False)
                sender = clients.sender(opened.client, ours=True)
                self._opened, self._renewals, self._sender = opened, Renewals(sender), sender
            return self._sender


class AsyncRedisStore(_Options):
    """The async Redis store. From a URL it creates a client for each event loop, and closes it with the loop."""

    def __init__(
        self,
        source: Any,
        *,
        prefix: str | None = None,
        wait_replicas: int | None = None,
        wait_timeout: Duration | None = None,
        wakeups: bool | None = None,
    ) -> None:
        super().__init__(_terms(source, prefix, wait_replicas, wait_timeout, wakeups, is_async=True))
        self._loops = Loops(self._terms.settings or source, self._terms.where, self._terms.keys)

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        if entry.state is RUNNING and self._loops.known_renewals() is None:
            await self._reserve()
        call = records.claim(self._key(entry.address), entry, replacing)
        return records.claimed(entry.address, await self._call(call, self._wait_for_claims))

    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return bool(await self._end(records.extend(self._key(claim.address), claim, notes), claim))

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        return bool(await self._end(records.finish(self._key(claim.address), claim, ending), claim, self._wait))

    async def release(self, claim: Claim, released: Released | None = None) -> bool:
        return bool(await self._end(records.release(self._key(claim.address), claim, released), claim))

    async def read(self, address: Address) -> Record | None:
        return records.read_reply(address, await self._call(records.read(self._key(address))))

    async def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        call = records.annotate(self._key(record.address), record, notes)
        return records.claimed(record.address, await self._call(call))

    async def purge(self, limit: int) -> int:  # noqa: ARG002 - there is never anything to remove
        """Do nothing: the server removes expired records."""
        return 0

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        await self._reserve()
        return await self._dispatch(self._operations.claim_all, entries)

    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        """Renew the leases on the connections reserved for it."""
        try:
            sender = await self._loops.renewals()
            return await run_async(self._operations.extend_all(sender, claims), sender)
        except Exception as error:  # noqa: BLE001 - errors from outside the client library are raised unchanged
            _raise(error, self._terms.where)

    def renewal_groups(self, claims: Sequence[Claim]) -> list[list[int]]:
        """Return the indexes of the claims that are renewed together: one group for each primary."""
        sender = self._loops.known_renewals()
        return [list(range(len(claims)))] if sender is None else self._operations.renewal_groups(sender, claims)

    async def close_all(self, closes: Sequence[Close]) -> list[bool]:
        claims = [close.claim for close in closes]
        return await self._sent_soon(lambda topology: self._operations.close_all(topology, closes), claims)

    async def listen(self, address: Address) -> bool:
        """Wake those in this event loop who wait for this record when it ends, as `RedisStore` does."""
        return self._terms.wakeups and await (await self._loops.listener()).listen(address)

    def unlisten(self, address: Address) -> None:
        """Wake nobody any more for this record."""
        self._loops.unlisten(address)

    async def browse(self, query: Query, limit: int) -> list[Record]:
        return await self._dispatch(self._operations.browse, query, limit)

    async def facts(self) -> dict[str, Any]:
        """Return what the servers report about themselves."""
        from onefold.stores.redis.facts import facts_of

        return await self._dispatch(facts_of, self._terms.keys.prefix, self._wait)

    async def aclose(self) -> None:
        """Close the connections opened in this event loop, not your own client. Later use opens new ones."""
        await self._loops.close()

    async def _reserve(self) -> None:
        """Open the connections for renewals, as `RedisStore` does."""
        try:
            await self._loops.renewals()
        except Exception as error:  # noqa: BLE001 - errors from outside the client library are raised unchanged
            with unsent():
                _raise(error, self._terms.where)

    async def _end(self, call: ScriptCall, claim: Claim, wait: Wait | None = None) -> Any:
        """Renew or end a claim, on a reserved connection if handlers hold all others."""
        if wait is not None:
            return (await self._sent_soon(lambda topology: dispatch(topology, [call], wait), [claim]))[0]
        try:
            here = self._loops.known()
            sender = here.sender if here is not None else await self._loops.sender()
            return await sender.call(call, claim)
        except Exception as error:  # noqa: BLE001 - errors from outside the client library are raised unchanged
            reserved = self._reserved_after(error)
        return (await self._sent(dispatch(reserved, [call]), reserved))[0]

    async def _sent_soon(self, flow_to: Callable[[Topology], RedisFlow[T]], claims: Sequence[Claim]) -> T:
        """Renew or end these claims, on reserved connections if handlers hold all others."""
        try:
            sender = await self._loops.sender()
            return await run_async(flow_to(sender), sender.soon(claims))
        except Exception as error:  # noqa: BLE001 - errors from outside the client library are raised unchanged
            reserved = self._reserved_after(error)
        return await self._sent(flow_to(reserved), reserved)

    def _reserved_after(self, error: Exception) -> AsyncReservedSender:
        """Return the sender for renewals if the client gave no connection; otherwise raise the error."""
        reserved = self._loops.known_renewals() if came_to_nothing(error) else None
        if reserved is None:
            _raise(error, self._terms.where)
        return reserved

    async def _sent(self, flow: RedisFlow[T], sender: AsyncReservedSender) -> T:
        try:
            return await run_async(flow, sender)
        except Exception as error:  # noqa: BLE001 - errors from outside the client library are raised unchanged
            _raise(error, self._terms.where)

    async def _call(self, call: ScriptCall, wait: Wait | None = None) -> Any:
        if wait is not None:
            return (await self._dispatch(dispatch, [call], wait))[0]
        try:
            here = self._loops.known()
            sender = here.sender if here is not None else await self._loops.sender()
            return await sender.call(call)
        except Exception as error:  # noqa: BLE001 - errors from outside the client library are raised unchanged
            _raise(error, self._terms.where)

    async def _dispatch(
        self, operation: Callable[Concatenate[Topology, P], RedisFlow[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            sender = await self._loops.sender()
            return await run_async(operation(sender, *args, **kwargs), sender)
        except Exception as error:  # noqa: BLE001 - errors from outside the client library are raised unchanged
            _raise(error, self._terms.where)


def open_store(url: str) -> RedisStore:
    """Open `redis://host:6379/0` and similar URLs; `docs/stores/redis.md` has all of them, with their options."""
    return RedisStore(url)


def open_async_store(url: str) -> AsyncRedisStore:
    """Open a store for an `AsyncGuard`."""
    return AsyncRedisStore(url)


def check_url(url: str, *, is_async: bool) -> None:
    """Raise `UsageError` for a URL or an option that is wrong. No client library is imported."""
    _terms(url, None, None, None, is_async=is_async)


def adopt(client: Any, *, is_async: bool) -> RedisStore | AsyncRedisStore:
    """Create a store on the caller's own client, which it never closes."""
    return AsyncRedisStore(client) if is_async else RedisStore(client)


def check_client(client: Any, *, is_async: bool) -> None:
    """Raise `UsageError` for a client that a guard of this kind (sync or async) does not take."""
    clients.check(client, is_async=is_async)


class Terms(NamedTuple):
    """The checked settings of a store. Without settings, the client is the caller's."""

    settings: Settings | None
    # The name for messages, without a password.
    where: str
    keys: Keys
    wait: Wait | None
    # Whether those who wait subscribe to the ends of records.
    wakeups: bool


def _terms(
    source: Any,
    prefix: str | None,
    wait_replicas: int | None,
    wait_timeout: Duration | None,
    wakeups: object = None,
    *,
    is_async: bool,
) -> Terms:
    settings: Settings | None = None
    said: dict[str, Any] = {}
    if isinstance(source, str):
        settings = parsed(source)
        said, where, patience = settings.store, settings.shown, settings.options["socket_timeout"]
    else:
        clients.check(source, is_async=is_async)
        where, patience = clients.server_name(source), clients.patience(source)
    keys = Keys(_checked_prefix(said.get("prefix", PREFIX) if prefix is None else prefix))
    replicas = at_least(0, said.get("wait_replicas", 0) if wait_replicas is None else wait_replicas, "wait_replicas")
    seconds = said.get("wait_timeout", WAIT_TIMEOUT) if wait_timeout is None else wait_timeout
    wait = Wait(replicas, _checked_wait(seconds, patience)) if replicas else None
    return Terms(settings, where, keys, wait, said.get("wakeups", True) if wakeups is None else bool(wakeups))


def _checked_prefix(prefix: object) -> str:
    if not isinstance(prefix, str) or not prefix or len(prefix.encode()) > PREFIX_MAX:
        raise UsageError(f"prefix={prefix!r} has to be a string of 1 to {PREFIX_MAX} bytes, such as {PREFIX!r}")
    return prefix


def _checked_wait(wait_timeout: Duration, patience: float | None) -> float:
    found = finite(positive(wait_timeout, "wait_timeout"), "wait_timeout")
    if patience is not None and found >= patience:
        raise UsageError(
            f"wait_timeout={wait_timeout!r} has to be shorter than the client's socket_timeout, {as_text(patience)}: "
            "the server's answer would come too late"
        )
    return found


def _raise(error: Exception, where: str) -> NoReturn:
    if not is_failure(error):
        raise error
    problem = translated(error, where)
    if isinstance(problem, StoreUnavailable):
        problem.reached = not came_to_nothing(error)
        # The client's error quotes the socket's: a traceback has it once.
        error.__suppress_context__ = True
    raise problem from error
