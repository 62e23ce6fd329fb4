"""Join the transaction of a caller's sqlite3 connection. Nothing here ends it."""

# ruff: noqa: S608 - statements are made of names, never of values

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from onefold._concurrency.generators import run
from onefold._model import Address, Entry, Gone, Record
from onefold.errors import NotInTransaction, StoreUnavailable
from onefold.stores.sql.records import TABLE, VERSION, Parameters
from onefold.stores.sql.statements import columns, values
from onefold.stores.sqlite.connection import BUSY, BUSY_PAUSE, code_of
from onefold.stores.sqlite.dialect import SQLITE, UNLESS_ALIVE
from onefold.stores.sqlite.joined import AsyncJoinedRecords, JoinedRecords
from onefold.stores.sqlite.own_column import RowRecords
from onefold.stores.sqlite.records import Records, text_as_str
from onefold.transactions import RecordColumn

T = TypeVar("T")

# Nobody has looked at the tables before a caller's connection comes with them, and a look of its own would cost every
# delivery a statement: the write and the read look by themselves, and find nothing in tables of a newer version.
USABLE: Final = f"(SELECT usable_from FROM onefold_schema) <= {VERSION}"
LOOKING: Final = {
    SQLITE.insert: f"INSERT INTO {TABLE} ({columns()}) SELECT {values()} WHERE {USABLE} {UNLESS_ALIVE}",
    SQLITE.look: f"{SQLITE.look} AND {USABLE}",
}


def join(connection: sqlite3.Connection, record: RecordColumn | None, *, is_async: bool) -> Any:
    """Return the store that works inside this connection's transaction. Raises `NotInTransaction` if there is none."""
    begins = must_begin(connection, "Execute BEGIN IMMEDIATE before, or connect without isolation_level=None")
    if begins and not is_async:
        # With the write lock, so that everything read from now on still holds at the end.
        connection.execute("BEGIN IMMEDIATE")
    records = CallersRecords(connection)
    joined = JoinedRecords(records) if record is None else RowRecords(records, record)
    return AsyncCallersRecords(joined, begins=begins) if is_async else joined


def must_begin(connection: Any, advice: str) -> bool:
    """Return whether a transaction has to be begun. Raises `NotInTransaction` with the advice in autocommit mode.

    Python's sqlite3 by default opens one itself before the first write; then ours is the first write.
    """
    if connection.in_transaction:
        return False
    if getattr(connection, "autocommit", -1) == -1 and connection.isolation_level is not None:
        return True
    raise NotInTransaction(
        "this connection is in autocommit mode, and no transaction is open: the record and the work would not be "
        f"committed together. Nothing ran. {advice}"
    )


class CallersRecords(Records):
    """Write records on a caller's connection: its tables may be of any version, and its rows have any form."""

    def read(self, address: Address) -> Record | None:
        found = super().read(address)
        if found is None:
            self.schema_version()
        return found

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        try:
            return run(SQLITE.claim(entry, replacing), self)
        except StoreUnavailable:
            # Nothing can be written into tables that are too new, nor be found in them: they say it better.
            self.schema_version()
            raise

    def _execute(self, statement: str, values: Parameters) -> sqlite3.Cursor:
        return super()._execute(LOOKING.get(statement, statement), values)

    def _rows(self, statement: str, values: Parameters) -> list[Any]:
        with text_as_str(self.connection):
            return super()._rows(statement, values)


class AsyncCallersRecords(AsyncJoinedRecords):
    """Write records on a caller's connection for an `AsyncGuard`: wait without blocking the event loop.

    SQLite itself would wait in the loop's thread for the connection's timeout, and the writer may be a task of that
    loop. `begins`: no transaction is open, and sqlite3 would begin one before the first write.
    """

    def __init__(self, sync: JoinedRecords, *, begins: bool) -> None:
        super().__init__(sync)
        self._begins = begins

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return await self._in_turn(partial(self.sync.claim, entry, replacing=replacing))

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return await self._in_turn(partial(self.sync.claim_all, entries))

    async def read(self, address: Address) -> Record | None:
        return await self._in_turn(partial(self.sync.read, address))

    async def _in_turn(self, request: Callable[[], T]) -> T:
        from asyncio import sleep

        began = time.monotonic()
        while True:
            with impatient(self.tx) as patience:
                try:
                    return self._asked(request)
                except sqlite3.OperationalError as error:
                    if not may_end(error) or time.monotonic() - began >= patience:
                        raise
                    self.sync.wrote_nothing()
            await sleep(BUSY_PAUSE)

    def _asked(self, request: Callable[[], T]) -> T:
        if self._begins and not self.tx.in_transaction:
            self.tx.execute("BEGIN IMMEDIATE")
        return request()


@contextmanager
def impatient(connection: sqlite3.Connection) -> Iterator[float]:
    """Make the connection wait for no other writer meanwhile. Yields how many seconds it would wait otherwise."""
    cursor = connection.cursor()
    cursor.row_factory = None
    ((milliseconds,),) = cursor.execute("PRAGMA busy_timeout")
    cursor.execute("PRAGMA busy_timeout = 0")
    try:
        yield milliseconds / 1_000
    finally:
        cursor.execute(f"PRAGMA busy_timeout = {milliseconds}")


def may_end(error: sqlite3.Error) -> bool:
    """Return whether a retry helps. A transaction that has read before another one wrote stays out of date."""
    return code_of(error) in BUSY and error.sqlite_errorcode != sqlite3.SQLITE_BUSY_SNAPSHOT
