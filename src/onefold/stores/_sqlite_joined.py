"""Records inside a transaction on an SQLite connection: the caller's, or one of our own.

Nothing here begins or ends a transaction of the caller's. A missing table is made inside the transaction, statement by
statement: SQLite rolls that back like everything else.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Final, TypeVar

from onefold._model import Address, Claim, Commit, Ending, Entry, Gone, Memory, Record
from onefold.errors import StoreUnavailable, UsageError
from onefold.stores._sql import SQLITE
from onefold.stores.sqlite import BUSY, BUSY_PAUSE, Records
from onefold.stores.sqlite import _code as code_of
from onefold.stores.sqlite import _schema as schema_of

T = TypeVar("T")

SAVEPOINT: Final = "onefold_handler"


class JoinedRecords:
    """The operations of a store on a connection whose transaction is open. It raises what the driver raises."""

    def __init__(self, records: Records) -> None:
        self.tx = records.connection
        self._records = records

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return self._do(lambda records: records.claim(entry, replacing=replacing))

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return self._do(lambda records: records.finish(claim, ending))

    def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        # Some errors end a transaction in SQLite; then the record is gone already, and must not be written anew.
        if not self.tx.in_transaction:
            return True
        return self._do(lambda records: records.release(claim, memory))

    def read(self, address: Address) -> Record | None:
        return self._do(lambda records: records.read(address))

    def _do(self, work: Callable[[Records], T]) -> T:
        try:
            return work(self._records)
        except sqlite3.OperationalError:
            if schema_of(self.tx) is not None:
                raise
        for statement in SQLITE.create:
            self.tx.execute(statement)
        return work(self._records)


class SqliteTransaction(JoinedRecords):
    """A transaction of our own, on a connection that the store lends."""

    def __init__(self, records: Records, path: str, patience: float) -> None:
        super().__init__(records)
        self._path = path
        self.patience = patience

    def begin(self) -> None:
        """Wait for other writers within the store's patience. IMMEDIATE: what is read now is still true at the end."""
        ends = time.monotonic() + self.patience
        while not self.begun():
            if time.monotonic() > ends:
                raise self.too_busy()
            time.sleep(BUSY_PAUSE)

    def begun(self) -> bool:
        try:
            self.tx.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if code_of(error) in BUSY:
                return False
            raise StoreUnavailable(f"{self._path}: {error}") from error
        return True

    def too_busy(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._path}: another transaction has been writing for {self.patience:g} s. Nothing ran. "
            "Keep transactions short, look for one that was left open, or raise busy_timeout"
        )

    def save(self) -> None:
        self.tx.execute(f"SAVEPOINT {SAVEPOINT}")

    def commit(self) -> Commit:
        if not self.tx.in_transaction:
            raise UsageError(
                "the handler ended the transaction by itself, so that its record and its work were not committed "
                "together. Leave commit() and rollback() to the guard"
            )
        try:
            self.tx.execute("COMMIT")
        except sqlite3.Error as error:
            # A COMMIT that fails has written nothing, whatever made it fail: SQLite is in this process.
            self._undo()
            if code_of(error) in BUSY:
                return Commit.CONFLICT
            raise StoreUnavailable(f"{self._path}: the transaction was not committed: {error}") from error
        return Commit.DONE

    def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        if to_savepoint and self.tx.in_transaction:
            self.tx.execute(f"ROLLBACK TO {SAVEPOINT}")
            return False
        self._undo()
        return isinstance(error, sqlite3.OperationalError) and code_of(error) in BUSY

    def _undo(self) -> None:
        if self.tx.in_transaction:
            self.tx.execute("ROLLBACK")


class AsyncJoinedRecords:
    """The same for an `AsyncGuard`. SQLite is in this process: there is nothing to wait for."""

    def __init__(self, sync: JoinedRecords) -> None:
        self.sync = sync
        self.tx = sync.tx

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return self.sync.claim(entry, replacing=replacing)

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        return self.sync.finish(claim, ending)

    async def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        return self.sync.release(claim, memory)

    async def read(self, address: Address) -> Record | None:
        return self.sync.read(address)


class AsyncSqliteTransaction(AsyncJoinedRecords):
    """A transaction of our own for an `AsyncGuard`; it waits for other writers without stopping the event loop."""

    sync: SqliteTransaction

    async def begin(self) -> None:
        from asyncio import sleep

        ends = time.monotonic() + self.sync.patience
        while not self.sync.begun():
            if time.monotonic() > ends:
                raise self.sync.too_busy()
            await sleep(BUSY_PAUSE)

    async def save(self) -> None:
        self.sync.save()

    async def commit(self) -> Commit:
        return self.sync.commit()

    async def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        return self.sync.rollback(error, to_savepoint=to_savepoint)
