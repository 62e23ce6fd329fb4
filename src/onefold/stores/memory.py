"""The reference store: one process, one dictionary, O(1) per call. For tests, and for work that dies with its process.

It never drops a record before it expires. It can be bounded (`memory:?limit=10000`): when it is full of records that
are still needed, it refuses new ones, because forgetting one would let a duplicate run.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import msgspec
from msgspec.structs import replace

from onefold._concurrency.forks import set_lock
from onefold._model import GONE, Address, Claim, Close, Ending, Entry, Gone, Record, Released, State
from onefold.errors import OnefoldError, StoreUnavailable, UsageError
from onefold.stores.base import Query
from onefold.stores.kinds import StoreKind

KIND: Final = StoreKind(
    name="memory", has_transactions=False, in_process=True, has_our_clock=True, health="onefold.health.memory"
)

# On Python 3.11 accessing an enum's members is slow.
DONE: Final = State.DONE

# Each new record sweeps this many old ones: more than one, so that the sweep outruns the growth.
SWEPT_PER_CLAIM = 2


class Row(msgspec.Struct, frozen=True, gc=False):
    """A record as it is stored: durations have become times of the store's clock."""

    token: bytes
    revision: int
    state: State
    attempt: int
    leased_until: float
    expires: float
    began: float
    bypasses: int
    fingerprint: bytes | None
    notes: bytes | None
    result: bytes | None
    omitted: bool
    remark: str

    def is_live(self, now: float) -> bool:
        """Return whether a worker runs it at this time, as `Record.is_live` does for a record that was read."""
        return self.state is State.RUNNING and self.leased_until > now


class MemoryStore:
    """A `Store`, `Batching`, `Annotating` and `Browsable`; safe to share between threads."""

    _mutex: threading.Lock

    def __init__(self, *, limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if limit is not None and limit < 1:
            raise UsageError(f"limit={limit} has to be 1 or more")
        self._limit = limit
        self._clock = clock
        # In the order of the sweep, which moves rows to the end after checking them.
        self._rows: OrderedDict[Address, Row] = OrderedDict()
        # No record expires earlier: until then there is nothing to sweep.
        self._first_end = math.inf
        set_lock(self, "_mutex")

    def __len__(self) -> int:
        return len(self._rows)

    def facts(self) -> dict[str, object]:
        """Return the facts for `onefold doctor`; there is no server to report more."""
        return {"kind": "memory", "records": len(self._rows), "limit": self._limit}

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._rows)} records)"

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        with self._mutex:
            return self._claim(entry, replacing, self._clock())

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        with self._mutex:
            return self._extend(claim, notes, self._clock())

    def finish(self, claim: Claim, ending: Ending) -> bool:
        with self._mutex:
            return self._finish(claim, ending, self._clock())

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        with self._mutex:
            return self._release(claim, released, self._clock())

    def read(self, address: Address) -> Record | None:
        with self._mutex:
            now = self._clock()
            row = self._alive(address, now)
            return None if row is None else _record(address, row, now)

    def find_done(self, address: Address) -> Row | None:
        """Return the row if it is done and has no notes; None: claim it. No lock: a row is replaced, never changed."""
        row = self._rows.get(address)
        if row is None or row.state is not DONE or row.notes is not None or row.expires <= self._clock():
            return None
        return row

    def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        with self._mutex:
            now = self._clock()
            row = self._alive(record.address, now)
            if row is None:
                return GONE
            if not self._is_still(row, record):
                found = _record(record.address, row, now)
                return None if found.is_annotated(record, notes) else found
            self._put(record.address, replace(row, notes=notes, revision=row.revision + 1))
            return None

    def purge(self, limit: int) -> int:
        with self._mutex:
            now = self._clock()
            expired = [address for address, row in self._rows.items() if row.expires <= now][: max(limit, 0)]
            for address in expired:
                del self._rows[address]
            return len(expired)

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        with self._mutex:
            now = self._clock()
            # All or none: a full store refuses before it has written anything.
            self._make_room(now, len({entry.address for entry in entries if self._alive(entry.address, now) is None}))
            return [self._claim(entry, None, now) for entry in entries]

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        with self._mutex:
            now = self._clock()
            return [self._extend(claim, None, now) for claim in claims]

    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        with self._mutex:
            now = self._clock()
            return [
                self._finish(close.claim, close.by, now)
                if isinstance(close.by, Ending)
                else self._release(close.claim, close.by, now)
                for close in closes
            ]

    def knows(self, error: BaseException) -> bool:
        """Return whether an error is ours, or may be a subclass's own. Any other came from a signal handler."""
        return isinstance(error, OnefoldError) or type(self) is not MemoryStore

    def browse(self, query: Query, limit: int) -> list[Record]:
        with self._mutex:
            now = self._clock()
            records = [_record(address, row, now) for address, row in self._rows.items() if row.expires > now]
        chosen = [record for record in records if _matches(record, query)]
        return sorted(chosen, key=lambda record: record.address.parts)[:limit]

    def close(self) -> None:
        """Do nothing: the records live as long as the store does."""

    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Record | Gone | None:
        row = self._alive(entry.address, now)
        if row is None:
            if replacing is not None:
                return GONE
            if self._limit is not None or now >= self._first_end:
                self._make_room(now)
            revision = 1
        elif row.token == entry.token and entry.is_own(row.token, replacing):
            return None
        elif replacing is None or not self._is_still(row, replacing):
            return _record(entry.address, row, now)
        else:
            revision = entry.revision_after(replacing)
        # As in `_put`, which `_finish` does not call either: every delivery comes through both.
        expires = now + entry.ttl
        if expires < self._first_end:
            self._first_end = expires
        self._rows[entry.address] = Row(
            entry.token,
            revision,
            entry.state,
            entry.attempt,
            now + entry.lease,
            expires,
            now - entry.age,
            entry.bypasses,
            entry.fingerprint,
            entry.notes,
            entry.result,
            entry.omitted,
            entry.remark,
        )
        return None

    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        row = self._mine(claim, now)
        if row is None:
            return False
        if notes is not None and len(notes) >= len(row.notes or b""):
            row = replace(row, notes=notes)
        match row.state:
            case State.RUNNING:
                row = replace(row, leased_until=now + claim.lease, expires=now + claim.ttl)
            case State.HELD:
                pass
            case _:
                return False
        self._put(claim.address, replace(row, revision=row.revision + 1))
        return True

    def _finish(self, claim: Claim, ending: Ending, now: float) -> bool:
        row = self._mine(claim, now)
        if row is None:
            return False
        expires = now + ending.ttl
        if expires < self._first_end:
            self._first_end = expires
        self._rows[claim.address] = Row(
            row.token,
            row.revision + 1,
            ending.state,
            row.attempt,
            now,
            expires,
            row.began,
            row.bypasses,
            row.fingerprint,
            ending.notes,
            ending.result,
            ending.omitted,
            ending.remark,
        )
        return True

    def _release(self, claim: Claim, released: Released | None, now: float) -> bool:
        if self._alive(claim.address, now) is None:
            return True
        row = self._mine(claim, now)
        if row is None:
            return False
        if released is None:
            del self._rows[claim.address]
        else:
            opened = replace(
                row,
                revision=row.revision + 1,
                state=State.OPEN,
                attempt=released.attempt,
                leased_until=now,
                expires=now + released.ttl,
                notes=released.notes,
                remark=released.remark,
            )
            self._put(claim.address, opened)
        return True

    def _put(self, address: Address, row: Row) -> None:
        # First: an interrupt in between must not leave a row that is never swept.
        if row.expires < self._first_end:
            self._first_end = row.expires
        self._rows[address] = row

    def _alive(self, address: Address, now: float) -> Row | None:
        row = self._rows.get(address)
        return None if row is None or row.expires <= now else row

    def _mine(self, claim: Claim, now: float) -> Row | None:
        """Return the row, if this claim's token still owns it."""
        row = self._rows.get(claim.address)
        return None if row is None or row.expires <= now or row.token != claim.token else row

    def _is_still(self, row: Row, replacing: Record) -> bool:
        """Return whether the row is unchanged since it was found: neither token nor revision alone would be enough."""
        return row.token == replacing.token and row.revision == replacing.revision

    def _make_room(self, now: float, wanted: int = 1) -> None:
        """Sweep a few rows; at the limit, sweep everything before refusing."""
        if now >= self._first_end:
            self._sweep_some(SWEPT_PER_CLAIM, now)
        if self._limit is None or len(self._rows) + wanted <= self._limit:
            return
        self._sweep_some(len(self._rows), now)
        if len(self._rows) + wanted > self._limit:
            raise StoreUnavailable(
                f"the memory store is full: it holds limit={self._limit} records that are still needed. "
                "Raise the limit, keep records for a shorter time, or use a store with a disk"
            )

    def _sweep_some(self, steps: int, now: float) -> None:
        for _ in range(min(steps, len(self._rows))):
            oldest = next(iter(self._rows))
            if self._rows[oldest].expires <= now:
                del self._rows[oldest]
            else:
                self._rows.move_to_end(oldest)


class AsyncMemoryStore:
    """The async memory store. It never waits for anything, so it needs neither a loop nor a thread."""

    in_process: bool = True

    def __init__(self, *, limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.sync = MemoryStore(limit=limit, clock=clock)

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return self.sync.claim(entry, replacing=replacing)

    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return self.sync.extend(claim, notes)

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        return self.sync.finish(claim, ending)

    async def release(self, claim: Claim, released: Released | None = None) -> bool:
        return self.sync.release(claim, released)

    async def read(self, address: Address) -> Record | None:
        return self.sync.read(address)

    def find_done(self, address: Address) -> Row | None:
        """Return the row if it is done, as the sync store does: there is nothing to await."""
        return self.sync.find_done(address)

    async def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        return self.sync.annotate(record, notes)

    async def purge(self, limit: int) -> int:
        return self.sync.purge(limit)

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return self.sync.claim_all(entries)

    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return self.sync.extend_all(claims)

    async def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return self.sync.close_all(closes)

    async def browse(self, query: Query, limit: int) -> list[Record]:
        return self.sync.browse(query, limit)

    async def facts(self) -> dict[str, object]:
        """Return the facts, as the sync store does."""
        return self.sync.facts()

    async def aclose(self) -> None:
        """Do nothing: the records live as long as the store does."""


def open_store(url: str) -> MemoryStore:
    """Open `memory:` or `memory:?limit=10000`; each call creates a store of its own."""
    return MemoryStore(limit=_limit(url))


def open_async_store(url: str) -> AsyncMemoryStore:
    """Open a store for an `AsyncGuard`."""
    return AsyncMemoryStore(limit=_limit(url))


def check_url(url: str, *, is_async: bool) -> None:  # noqa: ARG001 - the same for both
    """Raise `UsageError` for a URL that cannot be opened."""
    MemoryStore(limit=_limit(url))


def _limit(url: str) -> int | None:
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    limit = options.pop("limit", None)
    if options or parts.path or parts.netloc or parts.fragment or parts.query.count("limit=") > 1:
        raise UsageError(f"{url!r}: a memory store is written as memory: or memory:?limit=10000")
    if limit is None:
        return None
    if not limit.isdecimal():
        raise UsageError(f"{url!r}: limit={limit!r} has to be a whole number")
    return int(limit)


# It names every field by hand, which is twice as fast as a copy by a list of names, as the rows of `_claim` and
# `_finish` do by position. They are in the path of each delivery, and the contract notices a field that is missing.
def _record(address: Address, row: Row, now: float) -> Record:
    return Record(
        address=address,
        token=row.token,
        revision=row.revision,
        state=row.state,
        attempt=row.attempt,
        lease_left=row.leased_until - now,
        ttl_left=row.expires - now,
        age=now - row.began,
        bypasses=row.bypasses,
        fingerprint=row.fingerprint,
        notes=row.notes,
        result=row.result,
        omitted=row.omitted,
        remark=row.remark,
    )


def _matches(record: Record, query: Query) -> bool:
    address = record.address
    wanted = (
        (query.scope, address.scope),
        (query.operation, address.operation),
        (query.key, address.key),
        (query.state, record.state),
    )
    if any(asked is not None and asked != found for asked, found in wanted):
        return False
    return query.after is None or address.parts > query.after.parts
