"""One SQLite connection for one thread at a time: opened on demand, waits for other writers, safe across a fork."""

from __future__ import annotations

import enum
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple

from onefold._concurrency.generators import Flow
from onefold._concurrency.users_errors import passing
from onefold.durations import as_text
from onefold.errors import StoreUnavailable
from onefold.stores.sqlite.file_access import why_not_opened, why_not_written
from onefold.stores.sqlite.records import Records

Args = TypeVarTuple("Args")
T = TypeVar("T")

# How often a writer checks whether another process is done. SQLite's own waiting pauses ever longer, so that one of
# eight busy processes waits for seconds, and it does not wait at all while two processes switch a new file to WAL.
# Measured with eight: 1 ms costs half of the throughput, and 10 ms gains nothing.
BUSY_PAUSE: Final = 0.005

# How long a fork waits for all operations in progress in other threads: each ends within its busy_timeout, and only a
# user's transaction may take longer.
FORK_PATIENCE: Final = 10.0

# How long the exit of a process waits for a daemon thread that is still writing.
EXIT_PATIENCE: Final = 1.0

BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})

# Messages for people. All of these are problems of the environment, not of the calling code, and may be gone at the
# next delivery.
PROBLEMS: Final = {
    sqlite3.SQLITE_FULL: "the disk is full. Free some space, or purge records",
    sqlite3.SQLITE_READONLY: "the file cannot be written. Let this user write the file and its directory",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened. Is there such a directory, and may this user write to it?",
    sqlite3.SQLITE_PERM: "the file cannot be opened. May this user read and write it?",
    sqlite3.SQLITE_NOTADB: "this file is not an SQLite database. Name another one",
    sqlite3.SQLITE_CORRUPT: "the database is damaged. Restore it from a backup, or see `sqlite3 FILE .recover`",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write. Look at the system's log",
    sqlite3.SQLITE_NOMEM: "there is no memory left",
}

# Problems whose cause only a look at the file and its directories can tell, if the path is known.
OF_THE_FOLDER: Final = {
    sqlite3.SQLITE_READONLY: why_not_written,
    sqlite3.SQLITE_CANTOPEN: why_not_opened,
    sqlite3.SQLITE_PERM: why_not_opened,
}


def translated(path: str, error: sqlite3.Error) -> StoreUnavailable:
    """Translate an error of SQLite for people."""
    # For a directory SQLite reports a disk failure.
    why = why_not_opened if os.path.isdir(path) else OF_THE_FOLDER.get(code_of(error))
    problem = why(path) if why else PROBLEMS.get(code_of(error), f"SQLite says: {error}")
    return StoreUnavailable(f"{path}: {problem}")


def insist(
    attempt: Callable[[], Any], patience: float, too_busy: Callable[[], StoreUnavailable], sleep: Callable[[float], Any]
) -> Flow[None]:
    """Attempt something until no other connection writes; raise `too_busy()` when patience ends."""
    ends = time.monotonic() + patience
    while not (yield attempt):
        if time.monotonic() > ends:
            raise too_busy()
        yield partial(sleep, BUSY_PAUSE)


def code_of(error: sqlite3.Error) -> int:
    """Return SQLite's primary code: an extended one carries it in its lowest byte."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


class Later(enum.Enum):
    """Work was not done: somebody was in the way."""

    LATER = "later"


LATER: Final = Later.LATER


class SqliteConnection:
    """One connection, for one thread at a time. Opened on first use, and again after an error, a close or a fork."""

    def __init__(self, open_: Callable[[], Records], path: str, patience: float) -> None:
        self._open = open_
        self._path = path
        self._patience = patience
        self._turn = threading.Lock()
        self._user: int | None = None
        self._records: Records | None = None
        self._at_exit: weakref.finalize[Any, SqliteConnection] | None = None
        with _forking:
            _connections.add(self)

    def do(
        self,
        work: Callable[[Records, *Args], T],
        *args: *Args,
        together: bool = False,
        patience: float | None = None,
    ) -> T:
        """Run this work on the connection, and return its result; `together` makes all its writes one transaction.

        `patience` is for optional work: it limits the wait for other processes.
        """
        ends = time.monotonic() + (self._patience if patience is None else patience)
        # `with` on the bare lock: no interrupt can come between acquiring and releasing it.
        with self._turn:
            while True:
                try:
                    return self._attempt(work, args, together=together)
                except sqlite3.Error as error:
                    # A busy file means that nothing was written, and every operation may be sent twice.
                    if code_of(error) not in BUSY or time.monotonic() > ends:
                        raise self._translated(error) from error
                time.sleep(BUSY_PAUSE)

    def do_at_once(self, work: Callable[[Records, *Args], T], *args: *Args) -> T | Later:
        """Run this work if nobody is in the way, neither a thread nor another process; otherwise return LATER.

        So it does after any other error of SQLite: whoever asks has another way, which tells the error if it recurs.
        """
        if self._records is None or self._turn.locked():
            return LATER
        with self._turn:
            try:
                return self._attempt(work, args, together=False)
            except sqlite3.Error:
                return LATER

    @property
    def is_open(self) -> bool:
        return self._records is not None

    def open_now(self) -> bool:
        """Open the connection without waiting. Return False if creating the tables has to wait for another writer."""
        with self._turn:
            try:
                self._attempt(lambda _records: None, (), together=False)
            except sqlite3.Error as error:
                if code_of(error) not in BUSY:
                    raise self._translated(error) from error
                return False
        return True

    def close(self) -> None:
        with self._turn:
            self._drop()

    @passing
    def held(self) -> Iterator[Records]:
        """Hold the connection for a transaction that its user begins and ends."""
        self.do(lambda _records: None)
        with self._turn:
            self._user = threading.get_ident()
            try:
                yield self._opened()
            except sqlite3.Error:
                # The next transaction reopens the file, and so notices when the cause is gone.
                self._drop()
                raise
            finally:
                self._settle()

    def close_for_fork(self, patience: float) -> bool:
        """Close, and keep the lock until `reopen_after_fork`. Return False if it is in use."""
        # A signal handler may fork in the middle of an operation, and a user's code in the middle of a transaction.
        if self._user == threading.get_ident() or not self._turn.acquire(timeout=patience):
            return False
        self._drop()
        return True

    def reopen_after_fork(self) -> None:
        self._turn.release()

    def abandon(self) -> None:
        """Leave the parent's connection, inherited open by this child, neither used nor closed."""
        if self._at_exit is not None:
            _abandoned.append(self._at_exit.detach())
        self._turn, self._user, self._records, self._at_exit = threading.Lock(), None, None, None

    def _attempt(self, work: Callable[..., T], args: tuple[Any, ...], *, together: bool) -> T:
        records = self._records
        try:
            is_settled = records is None or not records.connection.in_transaction
        except sqlite3.Error:
            # A handler has closed it.
            is_settled = False
        if not is_settled:
            self._settle()
            records = self._records
        self._user = threading.get_ident()
        try:
            if records is None:
                records = self._opened()
            if not together:
                return work(records, *args)
            records.connection.execute("BEGIN IMMEDIATE")
            answer = work(records, *args)
            records.connection.execute("COMMIT")
            return answer
        finally:
            if records is None or records.connection.in_transaction:
                self._settle()
            else:
                self._user = None

    def _opened(self) -> Records:
        if self._records is None:
            records = self._open()
            self._at_exit = weakref.finalize(self, _close_in_turn, self._turn, records.connection)
            self._records = records
        return self._records

    def _settle(self) -> None:
        """Leave no transaction open after an interrupt: the next operation would become a part of it."""
        self._user = None
        if self._records is None:
            return
        try:
            if self._records.connection.in_transaction:
                self._records.connection.rollback()
        except sqlite3.Error:
            # A handler may have closed it.
            self._drop()

    def _drop(self) -> None:
        if self._records is not None and self._at_exit is not None:
            self._at_exit.detach()
            self._records.connection.close()
            self._records = self._at_exit = None

    def _translated(self, error: sqlite3.Error) -> StoreUnavailable:
        if code_of(error) in BUSY:
            return self.too_busy()
        # The next operation reopens the file, and so notices when the cause is gone.
        self._drop()
        return translated(self._path, error)

    def too_busy(self) -> StoreUnavailable:
        # A busy file means that nothing was written.
        return StoreUnavailable.unreached(
            f"{self._path}: another connection has been writing for {as_text(self._patience)}. Look for a transaction "
            "that was left open (a shell, a tool, a backup), or raise busy_timeout"
        )


def _close_in_turn(turn: threading.Lock, connection: sqlite3.Connection) -> None:
    """Close the connection of a store that nobody closed, unless a thread still uses it at exit."""
    if turn.acquire(timeout=EXIT_PATIENCE):
        connection.close()
        turn.release()


# Fork safety. SQLite tracks its locks on a file in the memory of the process. A child inherits that memory, but not the
# locks: a connection that it opens beside an inherited one holds no lock at all, and when the parent closes its own,
# the WAL is removed under the child and the child's commits are lost. So no connection may be open at a fork.
_connections: weakref.WeakSet[SqliteConnection] = weakref.WeakSet()
_forking = threading.Lock()
_closed: list[SqliteConnection] = []
_inherited: list[SqliteConnection] = []
_abandoned: list[Any] = []


def _before_fork() -> None:
    _forking.acquire()
    ends = time.monotonic() + FORK_PATIENCE
    for conn in list(_connections):
        closed = conn.close_for_fork(max(ends - time.monotonic(), 0.0))
        (_closed if closed else _inherited).append(conn)


def _after_fork() -> None:
    for conn in _closed:
        conn.reopen_after_fork()
    _closed.clear()
    _inherited.clear()
    _forking.release()


def _after_fork_in_child() -> None:
    for conn in _inherited:
        conn.abandon()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
