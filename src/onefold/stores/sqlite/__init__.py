"""The embedded default: records in one SQLite file, for all processes of one machine.

A record is on disk before its claim is answered (`sync="full"`). The clock is the machine's wall clock, because SQLite
has no server: setting the clock back makes leases and TTLs longer. A failure of the file is never hidden: errors of
SQLite become `StoreUnavailable`, and nothing runs unclaimed.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from onefold._checks import finite, one_of, positive
from onefold._concurrency.generators import Flow, run, run_async
from onefold._concurrency.users_errors import passing, passing_async
from onefold._model import Address, Claim, Close, Ending, Entry, Gone, Record, Released, State
from onefold.durations import Duration, as_text
from onefold.errors import OnefoldError, UsageError
from onefold.stores import background_purge
from onefold.stores.base import Query, Sample, StoredRecord
from onefold.stores.sql.records import VERSION
from onefold.stores.sqlite.connection import LATER, SqliteConnection, insist
from onefold.stores.sqlite.dialect import SQLITE
from onefold.stores.sqlite.kind import KIND as KIND
from onefold.stores.sqlite.opening import SYNCS, Sync, connect
from onefold.stores.sqlite.records import DoneRow, Records
from onefold.stores.sqlite.thread import OneThread
from onefold.stores.sqlite.urls import parsed

if TYPE_CHECKING:
    from onefold.stores.sql.connection import Database
    from onefold.stores.sqlite.joined import AsyncSqliteTransaction, SqliteTransaction
    from onefold.transactions import RecordColumn

T = TypeVar("T")

# On Python 3.11 accessing an enum's members is slow.
DONE: Final = State.DONE

# The first version with ON CONFLICT DO UPDATE (2018).
SQLITE_VERSION_MIN: Final = (3, 24)

# Connections kept for later transactions: SQLite allows one writer at a time, so that few are enough.
IDLE_MAX: Final = 4

# SQLite counts it in milliseconds, in 32 bits; and a longer wait is not for a writer, but for a mistake.
BUSY_TIMEOUT_MAX: Final = 3_600.0

# How long a background purge waits for other writers: if the file is that busy, the next purge does the work.
BACKGROUND_PURGE_PATIENCE: Final = 0.1

# How long an annotation waits for other writers: somebody waits for the answer to a duplicate.
ANNOTATION_PATIENCE: Final = 0.1


class SqliteStore:
    """A `Store`, `Batching` and `Browsable` in one file; safe to share between threads, and across a fork.

    It opens connections on first use, closes them in `close()`, and opens them again if it is used after that.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sync: Sync = "full",
        busy_timeout: Duration = 5.0,
        auto_schema: bool = True,
        purge: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = _checked_path(path)
        self.patience = _checked_timeout(busy_timeout)
        self.purges = purge
        self._told: dict[str, Any] = {"sync": sync, "auto_schema": auto_schema}
        self._connect = partial(connect, self.path, one_of(sync, SYNCS, "sync"), clock, self._told)
        # SQLite lets one connection write at a time, and threads that wait for it poll; a queue of our own in front of
        # one connection is quicker and fairer. Duplicates only read: on a connection of their own they never wait for a
        # disk. A connection for each thread would add nothing, and would outlive its thread.
        self._reading = self._new_connection()
        self._writing = self._new_connection()
        # A duplicate that is only counted does not queue behind claims, which may wait for another writer.
        self._annotating = self._new_connection()
        # Whether the last address that was claimed was free. Most are; duplicates often come many in a row. What is
        # expected is tried first: a write, or a look on the connection for reading.
        self._expects_new = True
        # For transactions: each has a connection to itself while it lasts.
        self._idle: list[SqliteConnection] = []
        # For tables that are not ours: the file need not have ours.
        self._foreign: SqliteConnection | None = None

    def _new_connection(self) -> SqliteConnection:
        return SqliteConnection(self._connect, self.path, self.patience)

    def __repr__(self) -> str:
        return f"SqliteStore({self.path!r})"

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        if replacing is None:
            if self._expects_new:
                found = self._writing.do_at_once(Records.claim, entry)
                if found is not LATER:
                    self._expects_new = found is None
                    if entry.state is DONE:
                        self._purge_after(1)
                    return found
            found = self.read(entry.address)
            self._expects_new = found is None
            if found is not None:
                return _in_the_way(found, entry)
        return self.write_claim(entry, replacing)

    def find_done(self, address: Address) -> DoneRow | None:
        """Return the record if it is done and has no notes; None: claim it."""
        if self._expects_new:
            return None
        # Without patience: a claim that follows has its own.
        found = self._reading.do(Records.find_done, address, patience=0.0)
        self._expects_new = found is None
        return found

    def write_claim(self, entry: Entry, replacing: Record | None) -> Record | Gone | None:
        """Claim an address whose record was looked up before."""
        return self._end(lambda records: records.claim(entry, replacing=replacing), int(entry.state is State.DONE))

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return self._writing.do(lambda records: records.extend(claim, notes))

    def finish(self, claim: Claim, ending: Ending) -> bool:
        finished = self._writing.do(Records.finish, claim, ending)
        if self.purges and background_purge.chance(claim.token) == 0:
            self.purge_batches(1)
        return finished

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        return self._end(lambda records: records.release(claim, released))

    def read(self, address: Address) -> Record | None:
        return self._reading.do(Records.read, address)

    def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        return self._annotating.do(lambda records: records.annotate(record, notes), patience=ANNOTATION_PATIENCE)

    def purge(self, limit: int) -> int:
        return self._writing.do(lambda records: records.purge(limit))

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        found = self.find_all(entries)
        return self.write_claims(entries) if found is None else found

    def find_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None] | None:
        """Answer a batch of duplicates without a write. Return None if something has to be written."""
        found = self._reading.do(lambda records: [records.read(entry.address) for entry in entries])
        if None in found:
            return None
        known = zip(cast("list[Record]", found), entries, strict=True)
        return [_in_the_way(one, entry) for one, entry in known]

    def write_claims(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        """Claim addresses whose records were looked up before, in one transaction."""
        ended = sum(entry.state is State.DONE for entry in entries)
        return self._end(lambda records: records.claim_all(entries), ended, together=True)

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return self._writing.do(lambda records: records.extend_all(claims), together=True)

    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return self._end(lambda records: records.close_all(closes), len(closes), together=True)

    def knows(self, error: BaseException) -> bool:
        """Return whether an error is ours, as all of SQLite's are. Any other came from a signal handler."""
        return isinstance(error, (OnefoldError, sqlite3.Error))

    def browse(self, query: Query, limit: int) -> list[Record]:
        return self._reading.do(lambda records: records.browse(query, limit))

    def stored(self, address: Address) -> StoredRecord | None:
        """Return the row of this address, column by column."""
        return self._reading.do(lambda records: records.stored(address))

    def sample(self, query: Query, limit: int) -> Sample:
        """Return some records from all over the file; all of them, if there are few."""
        return self._reading.do(lambda records: run(SQLITE.sampler().sample(query, limit), records))

    def unsettled(self, limit: int) -> list[Record]:
        """Return the records that are kept longest, except those that are finished and kept forever."""
        return self._reading.do(lambda records: run(SQLITE.sampler().unsettled(limit), records))

    def newest(self, limit: int) -> list[Record]:
        """Return the records that were written last."""
        return self._reading.do(lambda records: run(SQLITE.sampler().newest(limit), records))

    def facts(self) -> dict[str, Any]:
        """Return the facts of the file and its disk; the file is looked up, and never created."""
        from onefold.stores.sqlite.facts import facts_of_file

        return facts_of_file(self.path, **self._told)

    def ask(self, flow_of: Callable[[Database], Flow[T]]) -> T:
        """Run statements that only read tables which are not ours. Ours are neither looked for nor created."""
        from onefold.stores.sqlite import table_reader

        if self._foreign is None:
            self._foreign = table_reader.connection_to(self.path, self.patience)
        return self._foreign.do(lambda records: run(flow_of(table_reader.database_of(self.path)), records))

    @property
    def auto_schema(self) -> bool:
        """Return whether missing tables are created on first use, and older ones upgraded."""
        return bool(self._told["auto_schema"])

    @auto_schema.setter
    def auto_schema(self, wanted: bool) -> None:
        self._told["auto_schema"] = wanted

    def schema_exists(self) -> bool:
        """Return whether the file and its tables exist. Create and change nothing."""
        from onefold.stores.sqlite.facts import schema_exists

        return schema_exists(self.path)

    @passing
    def transaction(self) -> Iterator[SqliteTransaction]:
        """Open a transaction in this file, on a connection that is not shared meanwhile."""
        with self.transaction_alone() as transaction:
            yield transaction
        due = self.batches_due()
        if due:
            self.purge_batches(due)

    def row_transaction(self, record: RecordColumn) -> Any:
        """Open a transaction whose records are the caller's own rows: there is nothing to purge."""
        return self.transaction_alone(record)

    @passing
    def transaction_alone(self, record: RecordColumn | None = None) -> Iterator[SqliteTransaction]:
        """Open a transaction without the background purge after it."""
        with self.lent() as conn, self.transaction_on(conn, record) as transaction:
            yield transaction

    @passing
    def transaction_on(self, conn: SqliteConnection, record: RecordColumn | None = None) -> Iterator[SqliteTransaction]:
        """Return a transaction on a connection borrowed for it."""
        from onefold.stores.sqlite.joined import SqliteTransaction

        with conn.held() as records:
            if record is None:
                yield SqliteTransaction(records, self.path, self.patience)
                return
            from onefold.stores.sqlite.own_column import RowTransaction

            yield RowTransaction(records, self.path, self.patience, record)

    @passing
    def lent(self) -> Iterator[SqliteConnection]:
        """Lend a connection to a transaction. It may not be open yet."""
        try:
            conn = self._idle.pop()
        except IndexError:
            conn = self._new_connection()
        try:
            yield conn
        finally:
            if len(self._idle) < IDLE_MAX:
                self._idle.append(conn)
            else:
                conn.close()

    def _end(self, work: Callable[[Records], T], ended: int = 1, *, together: bool = False) -> T:
        """Run a closing operation, then maybe purge a batch."""
        answer = self._writing.do(work, together=together)
        self._purge_after(ended)
        return answer

    def _purge_after(self, ended: int) -> None:
        """Maybe purge a batch after this many deliveries have ended."""
        due = self.batches_due(ended) if ended else 0
        if due:
            self.purge_batches(due)

    def batches_due(self, ended: int = 1) -> int:
        """Return how many batches to purge now, alongside the work: usually none."""
        return background_purge.batches_due(ended) if self.purges else 0

    def purge_batches(self, due: int) -> None:
        """Purge batches; errors are left to the next purge."""
        with background_purge.ignore_errors(self.path):
            while due and self._writing.do(_purge_batch, patience=BACKGROUND_PURGE_PATIENCE) == background_purge.BATCH:
                due -= 1

    def close(self) -> None:
        """Close all connections. Later use of the store opens new ones."""
        for conn in (self._reading, self._writing, self._annotating, self._foreign, *self._idle):
            if conn is not None:
                conn.close()


class AsyncSqliteStore:
    """The async SQLite store. Threads of its own wait on behalf of all event loops: one reads, and one writes."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sync: Sync = "full",
        busy_timeout: Duration = 5.0,
        auto_schema: bool = True,
        purge: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.sync = SqliteStore(
            path, sync=sync, busy_timeout=busy_timeout, auto_schema=auto_schema, purge=purge, clock=clock
        )
        # A read never queues behind a claim that waits for another writer: that writer may be a task awaiting the read.
        self._reader = OneThread("onefold-sqlite-reads")
        self._writer = OneThread("onefold-sqlite-writes")
        self._annotator = OneThread("onefold-sqlite-annotations")

    def __repr__(self) -> str:
        return f"AsyncSqliteStore({self.sync.path!r})"

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        if replacing is None:
            found = await self.read(entry.address)
            if found is not None:
                return _in_the_way(found, entry)
        return await self._writer.request(self.sync.write_claim, entry, replacing)

    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return await self._writer.request(self.sync.extend, claim, notes)

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        return await self._writer.request(self.sync.finish, claim, ending)

    async def release(self, claim: Claim, released: Released | None = None) -> bool:
        return await self._writer.request(self.sync.release, claim, released)

    async def read(self, address: Address) -> Record | None:
        return await self._reader.request(self.sync.read, address)

    async def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        return await self._annotator.request(self.sync.annotate, record, notes)

    async def purge(self, limit: int) -> int:
        return await self._writer.request(self.sync.purge, limit)

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        found = await self._reader.request(self.sync.find_all, entries)
        return await self._writer.request(self.sync.write_claims, entries) if found is None else found

    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return await self._writer.request(self.sync.extend_all, claims)

    async def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return await self._writer.request(self.sync.close_all, closes)

    async def browse(self, query: Query, limit: int) -> list[Record]:
        return await self._reader.request(self.sync.browse, query, limit)

    async def ask(self, flow_of: Callable[[Database], Flow[T]]) -> T:
        """Run statements that only read tables which are not ours. Ours are neither looked for nor created."""
        return await self._reader.request(self.sync.ask, flow_of)

    async def facts(self) -> dict[str, Any]:
        """Return the facts of the file and its disk; the file is looked up, and never created."""
        return await self._reader.request(self.sync.facts)

    @passing_async
    async def transaction(self) -> AsyncIterator[AsyncSqliteTransaction]:
        """Open a transaction in this file. The handler's statements run in the event loop's own thread."""
        async with self.row_transaction(None) as transaction:
            yield transaction
        due = self.sync.batches_due()
        if due:
            await self._writer.request(self.sync.purge_batches, due)

    @passing_async
    async def row_transaction(self, record: RecordColumn | None) -> AsyncIterator[AsyncSqliteTransaction]:
        """Open a transaction whose records are the caller's own rows, or ours, without a purge after it."""
        from onefold.stores.sqlite.joined import AsyncSqliteTransaction

        with self.sync.lent() as conn:
            await self._open(conn)
            with self.sync.transaction_on(conn, record) as transaction:
                yield AsyncSqliteTransaction(transaction)

    async def _open(self, conn: SqliteConnection) -> None:
        """Open the file if needed, waiting for other writers because the tables may have to be created."""
        from asyncio import sleep

        if not conn.is_open:
            attempt = partial(self._reader.request, conn.open_now)
            await run_async(insist(attempt, self.sync.patience, conn.too_busy, sleep))

    async def aclose(self) -> None:
        """Close the connections and end the threads. Later use of the store opens new ones."""
        await self._reader.end(_nothing)
        await self._annotator.end(_nothing)
        await self._writer.end(self.sync.close)


def open_store(url: str) -> SqliteStore:
    """Open `sqlite:///relative.db` or `sqlite:////absolute/path.db`, with the options of `docs/stores/sqlite.md`."""
    path, options = parsed(url)
    return SqliteStore(path, **options)


def open_async_store(url: str) -> AsyncSqliteStore:
    """Open a store for an `AsyncGuard`."""
    path, options = parsed(url)
    return AsyncSqliteStore(path, **options)


def check_url(url: str, *, is_async: bool) -> None:  # noqa: ARG001 - the same for both
    """Raise `UsageError` for a URL or an option that is wrong. Nothing is opened."""
    open_store(url)


def describe_schema(url: str) -> str:
    """Return the statements that create the tables."""
    parsed(url)
    return SQLITE.script()


def apply_schema(url: str) -> list[str]:
    """Create the tables, or upgrade them to this version."""
    path, options = parsed(url)
    store = SqliteStore(path, **(options | {"auto_schema": True}))
    try:
        store.browse(Query(), 0)
    finally:
        store.close()
    return [f"{store.path}: Onefold's tables exist, version {VERSION}"]


def _in_the_way(found: Record, entry: Entry) -> Record | None:
    return None if entry.is_own(found.token) else found


def _nothing() -> None:
    pass


def _purge_batch(records: Records) -> int:
    return records.purge(background_purge.BATCH)


def _checked_path(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if text == ":memory:":
        raise UsageError(
            "path=':memory:': no other connection could see its records. For records in memory use memory:"
        )
    if not text or "\0" in text:
        raise UsageError(f"path={text!r} has to name a file")
    if sqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
        needed = ".".join(map(str, SQLITE_VERSION_MIN))
        raise UsageError(f"this Python has SQLite {sqlite3.sqlite_version}, but the store needs {needed} or newer")
    # Absolute from now on: a process that changes its directory must not switch to another file.
    return os.path.abspath(text)


def _checked_timeout(busy_timeout: Duration) -> float:
    found = finite(positive(busy_timeout, "busy_timeout"), "busy_timeout")
    if found > BUSY_TIMEOUT_MAX:
        raise UsageError(f"busy_timeout={busy_timeout!r} is more than {as_text(BUSY_TIMEOUT_MAX)}")
    return found
