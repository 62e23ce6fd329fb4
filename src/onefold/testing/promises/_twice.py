"""The store as the contract sees it: sync, and with every operation sent twice.

A reply may get lost, and a client library sends the operation again. So does the contract, always.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from onefold.stores.base import (
    Address,
    Annotating,
    AsyncAnnotating,
    AsyncBatching,
    AsyncBrowsable,
    AsyncStore,
    Batching,
    Browsable,
    Claim,
    Close,
    Ending,
    Entry,
    Gone,
    Query,
    Record,
    Released,
    Store,
)

T = TypeVar("T")


class EveryPower(Store, Batching, Annotating, Browsable, Protocol):
    """All operations of a store; whether it has a capability is checked before."""


class AsyncPower(AsyncStore, AsyncBatching, AsyncAnnotating, AsyncBrowsable, Protocol):
    """All operations of an async store."""


class Blocking:
    """An async store behind a sync interface, on one event loop."""

    def __init__(self, store: AsyncPower, runner: asyncio.Runner) -> None:
        self.store = store
        self._runner = runner

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return self._wait(self.store.claim(entry, replacing=replacing))

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return self._wait(self.store.extend(claim, notes))

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return self._wait(self.store.finish(claim, ending))

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        return self._wait(self.store.release(claim, released))

    def read(self, address: Address) -> Record | None:
        return self._wait(self.store.read(address))

    def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        return self._wait(self.store.annotate(record, notes))

    def purge(self, limit: int) -> int:
        return self._wait(self.store.purge(limit))

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return self._wait(self.store.claim_all(entries))

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return self._wait(self.store.extend_all(claims))

    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return self._wait(self.store.close_all(closes))

    def browse(self, query: Query, limit: int) -> list[Record]:
        return self._wait(self.store.browse(query, limit))

    def _wait(self, reply: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(reply)


class Twice:
    """Sends every operation twice, and expects equal answers."""

    def __init__(self, store: EveryPower) -> None:
        self.once = store

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        first = self.once.claim(entry, replacing=replacing)
        again = self.once.claim(entry, replacing=replacing)
        if first is None and replacing is not None and entry.token == replacing.token:
            # The record it wanted to replace has changed, and its token proves nothing: it was the owner's before.
            assert isinstance(again, Record), f"a mark sent twice was written twice, or got lost: {again!r}"
            assert again.state is entry.state
        else:
            self._agree("claim", first, again)
        return first

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return self._agree("extend", self.once.extend(claim, notes), self.once.extend(claim, notes))

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return self._agree("finish", self.once.finish(claim, ending), self.once.finish(claim, ending))

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        return self._agree("release", self.once.release(claim, released), self.once.release(claim, released))

    def read(self, address: Address) -> Record | None:
        return self.once.read(address)

    def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        return self._agree("annotate", self.once.annotate(record, notes), self.once.annotate(record, notes))

    def purge(self, limit: int) -> int:
        return self.once.purge(limit)

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        first, again = self.once.claim_all(entries), self.once.claim_all(entries)
        for one, other in zip(first, again, strict=True):
            self._agree("claim_all", one, other)
        return first

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return self._agree("extend_all", self.once.extend_all(claims), self.once.extend_all(claims))

    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return self._agree("close_all", self.once.close_all(closes), self.once.close_all(closes))

    def browse(self, query: Query, limit: int) -> list[Record]:
        return self.once.browse(query, limit)

    def _agree(self, operation: str, first: T, again: T) -> T:
        assert at_rest(first) == at_rest(again), f"{operation} sent twice: first {first!r}, then {again!r}"
        return first


def at_rest(answer: Any) -> Any:
    """Return a record without the fields that change as time passes; any other answer unchanged."""
    return replace(answer, lease_left=0.0, ttl_left=0.0, age=0.0) if isinstance(answer, Record) else answer
