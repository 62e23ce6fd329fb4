"""The embedded default: records in one SQLite file, for all processes of one machine.

A record is on the disk before its claim is answered (`sync="full"`). The clock is the machine's own wall clock, because
SQLite has no server that could have one: a clock that is set back makes leases and stays longer. It never hides a
failure of the file: what SQLite reports becomes `StoreUnavailable`, and nothing runs unclaimed.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from onefold._checks import did_you_mean, finite, one_of, positive
from onefold._model import GONE, Address, Claim, Close, Ending, Entry, Gone, Memory, Record
from onefold.durations import Duration, in_words
from onefold.errors import StoreUnavailable, UsageError
from onefold.stores._sql import (
    SQLITE,
    VERSION,
    Parameters,
    is_own,
    of_address,
    of_claim,
    of_ending,
    of_entry,
    of_memory,
    record,
)
from onefold.stores.base import Query

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from onefold.stores._sqlite_joined import AsyncSqliteTransaction, SqliteTransaction

P = ParamSpec("P")
T = TypeVar("T")

Sync = Literal["full", "normal"]
SYNCS: Final = ("full", "normal")

# The first with ON CONFLICT DO UPDATE (2018).
SQLITE_VERSION_MIN: Final = (3, 24)

# SQLite counts it in milliseconds, in 32 bits; and who waits longer does not wait for a writer, but for a mistake.
BUSY_TIMEOUT_MAX: Final = 3_600.0

# A record that is in the way of a claim can be released before it is read; each such race is one round.
ROUNDS_MAX: Final = 8

# How often a writer asks whether another process is done. SQLite's own waiting pauses ever longer, so that of eight
# busy processes one waits for seconds, and it does not wait at all where two turn a new file to WAL. Measured with
# eight: 1 ms costs half of the throughput, and 10 ms gains nothing.
BUSY_PAUSE: Final = 0.005

# How long a fork waits for all operations of other threads that are under way: each ends within its busy_timeout, and
# only a transaction of a user's may take longer.
FORK_PATIENCE: Final = 10.0

# How long the end of a process waits for a daemon thread that is still writing.
EXIT_PATIENCE: Final = 1.0


class Records:
    """The operations on one connection, by one clock. It begins and ends no transaction, and raises sqlite3 errors.

    A store works through it, and so does whoever writes a record in a transaction of the caller's.
    """

    def __init__(self, connection: sqlite3.Connection, clock: Callable[[], float] = time.time) -> None:
        self.connection = connection
        self._clock = clock

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        # It writes first and reads only when refused: in a caller's transaction a read before the write would
        # begin a snapshot, and SQLite refuses to write from an old one.
        statement, values = (SQLITE.insert if replacing is None else SQLITE.replace), of_entry(entry, replacing)
        for _ in range(ROUNDS_MAX):
            if self._writes(statement, values):
                return None
            found = self.read(entry.address)
            if found is not None:
                return None if is_own(found, entry, replacing) else found
            if replacing is not None:
                return GONE
        raise StoreUnavailable(
            f"{entry.address.operation} [key {entry.address.digest}]: its record came and went {ROUNDS_MAX} times "
            "during one claim. Deliver it again"
        )

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return self._writes(SQLITE.extend, of_claim(claim) | {"notes": notes})

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return self._writes(SQLITE.finish, of_claim(claim) | of_ending(ending))

    def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        if memory is None:
            released = self._writes(SQLITE.forget, of_claim(claim))
        else:
            released = self._writes(SQLITE.leave_open, of_claim(claim) | of_memory(memory))
        return released or self.read(claim.address) is None

    def close(self, close: Close) -> bool:
        """One ending of a batch."""
        if isinstance(close.by, Ending):
            return self.finish(close.claim, close.by)
        return self.release(close.claim, close.by)

    def read(self, address: Address) -> Record | None:
        rows = self._rows(SQLITE.read, of_address(address))
        return record(address, rows[0]) if rows else None

    def browse(self, query: Query, limit: int) -> list[Record]:
        return [record(Address(*row[:3]), row[3:]) for row in self._rows(*SQLITE.browse(query, limit))]

    def purge(self, limit: int) -> int:
        return self._execute(SQLITE.purge, {"limit": max(limit, 0)}).rowcount

    def _writes(self, statement: str, values: Parameters) -> bool:
        return self._execute(statement, values).rowcount == 1

    def _rows(self, statement: str, values: Parameters) -> list[Any]:
        # All of them: a cursor that is not at its end keeps its snapshot, and the WAL could not be emptied.
        return self._execute(statement, values).fetchall()

    def _execute(self, statement: str, values: Parameters) -> sqlite3.Cursor:
        cursor = self.connection.cursor()
        # The connection may be a caller's, who may want its rows in another form.
        cursor.row_factory = None
        return cursor.execute(statement, values | {"now": self._clock()})


class Line:
    """One connection, for one thread at a time. Opened on first use, and again after an error, a close or a fork."""

    def __init__(self, open_: Callable[[], Records], path: str, patience: float) -> None:
        self._open = open_
        self._path = path
        self._patience = patience
        self._turn = threading.Lock()
        self._user: int | None = None
        self._records: Records | None = None
        self._at_exit: weakref.finalize[Any, Line] | None = None
        with _forking:
            _lines.add(self)

    def do(self, work: Callable[[Records], T], *, together: bool = False) -> T:
        """What this work answers on the connection; `together` makes all that it writes one transaction."""
        ends = time.monotonic() + self._patience
        # The turn is taken by `with` on the bare lock: an interrupt cannot come between taking and giving it back.
        with self._turn:
            while True:
                try:
                    return self._attempt(work, together=together)
                except sqlite3.Error as error:
                    # Whoever finds the file busy has written nothing, and every operation may be sent twice.
                    if _code(error) not in BUSY or time.monotonic() > ends:
                        raise self._translated(error) from error
                time.sleep(BUSY_PAUSE)

    def close(self) -> None:
        with self._turn:
            self._drop()

    @contextmanager
    def held(self) -> Iterator[Records]:
        """The connection for as long as a transaction of somebody else's takes, who begins and ends it."""
        self.do(lambda _records: None)
        with self._turn:
            self._user = threading.get_ident()
            try:
                yield self._opened()
            finally:
                self._settle()

    def close_for_fork(self, patience: float) -> bool:
        """Close, and keep the turn until `reopen_after_fork`. False: it is in use."""
        # A signal's handler forks in the middle of an operation, and a user's in the middle of a transaction.
        if self._user == threading.get_ident() or not self._turn.acquire(timeout=patience):
            return False
        self._drop()
        return True

    def reopen_after_fork(self) -> None:
        self._turn.release()

    def abandon(self) -> None:
        """In a child that could not be spared its parent's connection: neither use nor close it."""
        if self._at_exit is not None:
            _abandoned.append(self._at_exit.detach())
        self._turn, self._user, self._records, self._at_exit = threading.Lock(), None, None, None

    def _attempt(self, work: Callable[[Records], T], *, together: bool) -> T:
        self._settle()
        self._user = threading.get_ident()
        try:
            records = self._opened()
            if not together:
                return work(records)
            records.connection.execute("BEGIN IMMEDIATE")
            answer = work(records)
            records.connection.execute("COMMIT")
            return answer
        finally:
            self._settle()

    def _opened(self) -> Records:
        if self._records is None:
            records = self._open()
            self._at_exit = weakref.finalize(self, _close_in_turn, self._turn, records.connection)
            self._records = records
        return self._records

    def _settle(self) -> None:
        """Leave no transaction open, whatever interrupted it: the next operation would become a part of it."""
        self._user = None
        if self._records is not None and self._records.connection.in_transaction:
            try:
                self._records.connection.rollback()
            except sqlite3.Error:
                self._drop()

    def _drop(self) -> None:
        if self._records is not None and self._at_exit is not None:
            self._at_exit.detach()
            self._records.connection.close()
            self._records = self._at_exit = None

    def _translated(self, error: sqlite3.Error) -> StoreUnavailable:
        if _code(error) in BUSY:
            return StoreUnavailable(self._busy())
        # The next operation opens the file anew, and so finds out when the cause is gone.
        self._drop()
        return StoreUnavailable(f"{self._path}: {PROBLEMS.get(_code(error), f'SQLite says: {error}')}")

    def _busy(self) -> str:
        return (
            f"{self._path}: another connection has been writing for {in_words(self._patience)}. Look for a transaction "
            "that was left open (a shell, a tool, a back-up), or raise busy_timeout"
        )


def _close_in_turn(turn: threading.Lock, connection: sqlite3.Connection) -> None:
    """For a store that nobody closed. A thread that is still at it as the process ends is not disturbed."""
    if turn.acquire(timeout=EXIT_PATIENCE):
        connection.close()
        turn.release()


class SqliteStore:
    """A `Store`, `Batching` and `Browsable` in one file; safe to share between threads, and over a fork.

    It opens connections on first use, closes them in `close()`, and opens them again if it is used after that.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sync: Sync = "full",
        busy_timeout: Duration = 5.0,
        auto_schema: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = _checked_path(path)
        self._patience = _checked_timeout(busy_timeout)
        self._connect = partial(_connect, self.path, one_of(sync, SYNCS, "sync"), clock, auto_schema=auto_schema)
        # SQLite lets one connection write at a time, and threads that wait for it poll; a queue of our own before one
        # connection is quicker and fairer. Duplicates only read: on a line of their own they never wait for a disk.
        # A connection for each thread would add nothing, and would outlive its thread.
        self._reading = self._line()
        self._writing = self._line()
        # For transactions: each has a connection to itself while it lasts.
        self._idle: list[Line] = []

    def _line(self) -> Line:
        return Line(self._connect, self.path, self._patience)

    def __repr__(self) -> str:
        return f"SqliteStore({self.path!r})"

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        if replacing is None:
            found = self.read(entry.address)
            if found is not None:
                return None if is_own(found, entry) else found
        return self._writing.do(lambda records: records.claim(entry, replacing=replacing))

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return self._writing.do(lambda records: records.extend(claim, notes))

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return self._writing.do(lambda records: records.finish(claim, ending))

    def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        return self._writing.do(lambda records: records.release(claim, memory))

    def read(self, address: Address) -> Record | None:
        return self._reading.do(lambda records: records.read(address))

    def purge(self, limit: int) -> int:
        return self._writing.do(lambda records: records.purge(limit))

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        found = self._reading.do(lambda records: [records.read(entry.address) for entry in entries])
        if None in found:
            return self._writing.do(lambda records: [records.claim(entry) for entry in entries], together=True)
        known = zip(cast("list[Record]", found), entries, strict=True)
        return [None if is_own(one, entry) else one for one, entry in known]

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return self._writing.do(lambda records: [records.extend(claim) for claim in claims], together=True)

    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return self._writing.do(lambda records: [records.close(close) for close in closes], together=True)

    def browse(self, query: Query, limit: int) -> list[Record]:
        return self._reading.do(lambda records: records.browse(query, limit))

    @contextmanager
    def transaction(self) -> Iterator[SqliteTransaction]:
        """A transaction in this file, on a connection that nobody else uses meanwhile."""
        from onefold.stores._sqlite_joined import SqliteTransaction

        try:
            line = self._idle.pop()
        except IndexError:
            line = self._line()
        try:
            with line.held() as records:
                yield SqliteTransaction(records, self.path, self._patience)
        finally:
            self._idle.append(line)

    def close(self) -> None:
        """Close all connections. Whoever uses the store after that opens new ones."""
        for line in (self._reading, self._writing, *self._idle):
            line.close()


class AsyncSqliteStore:
    """The same store, awaited. One thread of its own does the waiting, in the order of the calls, for every loop."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sync: Sync = "full",
        busy_timeout: Duration = 5.0,
        auto_schema: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.sync = SqliteStore(path, sync=sync, busy_timeout=busy_timeout, auto_schema=auto_schema, clock=clock)
        self._worker: ThreadPoolExecutor | None = None
        self._worker_pid = 0

    def __repr__(self) -> str:
        return f"AsyncSqliteStore({self.sync.path!r})"

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return await self._ask(self.sync.claim, entry, replacing=replacing)

    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return await self._ask(self.sync.extend, claim, notes)

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        return await self._ask(self.sync.finish, claim, ending)

    async def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        return await self._ask(self.sync.release, claim, memory)

    async def read(self, address: Address) -> Record | None:
        return await self._ask(self.sync.read, address)

    async def purge(self, limit: int) -> int:
        return await self._ask(self.sync.purge, limit)

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return await self._ask(self.sync.claim_all, entries)

    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return await self._ask(self.sync.extend_all, claims)

    async def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return await self._ask(self.sync.close_all, closes)

    async def browse(self, query: Query, limit: int) -> list[Record]:
        return await self._ask(self.sync.browse, query, limit)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSqliteTransaction]:
        """A transaction in this file. What the handler does on it is done in the event loop's own thread."""
        from onefold.stores._sqlite_joined import AsyncSqliteTransaction

        with self.sync.transaction() as transaction:
            yield AsyncSqliteTransaction(transaction)

    async def aclose(self) -> None:
        """Close the connections and end the thread. Whoever uses the store after that opens new ones."""
        await self._ask(self.sync.close)
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()

    async def _ask(self, ask: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        from asyncio import get_running_loop

        return await get_running_loop().run_in_executor(self._thread(), partial(ask, *args, **kwargs))

    def _thread(self) -> ThreadPoolExecutor:
        # A forked child inherits the object, but not its thread.
        if self._worker is None or self._worker_pid != os.getpid():
            from concurrent.futures import ThreadPoolExecutor

            self._worker_pid = os.getpid()
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="onefold-sqlite")
        return self._worker


def open_store(url: str) -> SqliteStore:
    """`sqlite:///relative.db` or `sqlite:////absolute/path.db`, with `?sync=normal` and `?busy_timeout=5s`."""
    path, options = _parsed(url)
    return SqliteStore(path, **options)


def open_async_store(url: str) -> AsyncSqliteStore:
    """The same for an `AsyncGuard`."""
    path, options = _parsed(url)
    return AsyncSqliteStore(path, **options)


OPTIONS: Final = ("sync", "busy_timeout")


def _parsed(url: str) -> tuple[str, dict[str, Any]]:
    parts = urlsplit(url)
    if parts.netloc or parts.fragment or not parts.path.startswith("/"):
        raise UsageError(f"{url!r}: write sqlite:///relative.db or sqlite:////absolute/path.db")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in OPTIONS:
            raise UsageError(f"{url!r}: {name!r} is none of {', '.join(OPTIONS)}{did_you_mean(name, OPTIONS)}")
    return unquote(parts.path[1:]), options


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
        raise UsageError(f"this Python has SQLite {sqlite3.sqlite_version}, and the store needs {needed} or newer")
    # Absolute from now on: a process that changes its directory must not go on in another file.
    return os.path.abspath(text)


def _checked_timeout(busy_timeout: Duration) -> float:
    found = finite(positive(busy_timeout, "busy_timeout"), "busy_timeout")
    if found > BUSY_TIMEOUT_MAX:
        raise UsageError(f"busy_timeout={busy_timeout!r} is more than {in_words(BUSY_TIMEOUT_MAX)}")
    return found


def _connect(path: str, sync: Sync, clock: Callable[[], float], *, auto_schema: bool) -> Records:
    if not auto_schema and not os.path.exists(path):
        raise StoreUnavailable(_no_tables(path))
    # It does not wait for others: the line does.
    connection = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA synchronous = {sync}")
        # Without it a Mac says "synced" while the data is still in the disk's own memory. Elsewhere it is ignored.
        connection.execute(f"PRAGMA fullfsync = {int(sync == 'full')}")
        _turn_to_wal(connection, path)
        _ensure_schema(connection, path, create=auto_schema)
    except BaseException:
        connection.close()
        raise
    return Records(connection, clock)


def _turn_to_wal(connection: sqlite3.Connection, path: str) -> None:
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchall()[0][0]
    if mode != "wal":
        raise StoreUnavailable(f"{path}: the file stays in journal mode {mode!r}, and the store needs 'wal'")


def _ensure_schema(connection: sqlite3.Connection, path: str, *, create: bool) -> None:
    found = _schema(connection)
    if found is None and create:
        # Of two processes that start together the second waits here, and then finds everything made.
        connection.execute("BEGIN IMMEDIATE")
        for statement in SQLITE.create:
            connection.execute(statement)
        connection.execute("COMMIT")
        found = _schema(connection)
    if found is None:
        raise StoreUnavailable(_no_tables(path))
    version, usable_from = found
    if usable_from > VERSION:
        raise StoreUnavailable(
            f"{path}: its tables are of version {version}, and this Onefold knows version {VERSION}. Upgrade Onefold"
        )


def _schema(connection: sqlite3.Connection) -> tuple[int, int] | None:
    if connection.execute(SQLITE.count_tables).fetchall() != [(2,)]:
        return None
    rows = connection.execute(SQLITE.version).fetchall()
    return rows[0] if rows else None


def _no_tables(path: str) -> str:
    return f"{path}: there are no tables of Onefold, and auto_schema=False. Make them with the command `onefold schema`"


BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})

# What to tell a person. All of it is of the place, not of the code that calls, and may be over at the next delivery.
PROBLEMS: Final = {
    sqlite3.SQLITE_FULL: "the disk is full. Free some space, or purge records",
    sqlite3.SQLITE_READONLY: "the file cannot be written. Let this user write the file and its directory",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened. Is there such a directory, and may this user write to it?",
    sqlite3.SQLITE_PERM: "the file cannot be opened. May this user read and write it?",
    sqlite3.SQLITE_NOTADB: "this file is not an SQLite database. Name another one",
    sqlite3.SQLITE_CORRUPT: "the database is damaged. Restore it from a back-up, or see `sqlite3 FILE .recover`",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write. Look at the system's log",
    sqlite3.SQLITE_NOMEM: "there is no memory left",
}


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary code: an extended one carries it in its lowest byte."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


# Over a fork. SQLite notes in the memory of the process which locks it has on a file. A child inherits the notes, but
# not the locks: a connection that it opens beside an inherited one holds no lock at all, and when the parent closes its
# own, the WAL is removed under the child and what the child commits is lost. So nothing may be open at a fork.
_lines: weakref.WeakSet[Line] = weakref.WeakSet()
_forking = threading.Lock()
_closed: list[Line] = []
_inherited: list[Line] = []
_abandoned: list[Any] = []


def _before_fork() -> None:
    _forking.acquire()
    ends = time.monotonic() + FORK_PATIENCE
    for line in list(_lines):
        closed = line.close_for_fork(max(ends - time.monotonic(), 0.0))
        (_closed if closed else _inherited).append(line)


def _after_fork() -> None:
    for line in _closed:
        line.reopen_after_fork()
    _closed.clear()
    _inherited.clear()
    _forking.release()


def _after_fork_in_child() -> None:
    for line in _inherited:
        line.abandon()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
