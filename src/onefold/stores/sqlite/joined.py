"""Write records inside a transaction on an SQLite connection: the caller's (see `within`), or one of our own.

A missing table is created inside the transaction, one statement at a time: SQLite rolls that back like everything else.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from onefold._concurrency.generators import run, run_async
from onefold._concurrency.interrupts import When
from onefold._concurrency.users_errors import add_note
from onefold._model import Address, Claim, Commit, Ending, Entry, Gone, Record, Released
from onefold.errors import OnefoldError, StoreUnavailable, UsageError
from onefold.stores.sql.joined_rules import INTERRUPTED, WHAT_STAYS
from onefold.stores.sqlite.connection import BUSY, PROBLEMS, code_of, insist, translated
from onefold.stores.sqlite.dialect import SQLITE
from onefold.stores.sqlite.records import Records

T = TypeVar("T")

SAVEPOINT: Final = "onefold_handler"

ENDED: Final = (
    "the handler ended the transaction by itself, or went back to a savepoint from before its record, so its "
    "record and its work were not committed together. "
    "Leave commit(), rollback(), executescript(), close() and `with connection:` to whoever began it. "
    f"{WHAT_STAYS}"
)


class JoinedRecords:
    """Perform the operations of a store on a connection whose transaction is open. Raises what the driver raises."""

    def __init__(self, records: Records) -> None:
        self.tx = records.connection
        self._records = records
        # What was claimed here.
        self._claims: list[Claim] = []

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        self._claims.append(Claim(entry.address, entry.token))
        found = self._do(lambda records: records.claim(entry, replacing=replacing))
        if found is None:
            self._records.mark()
        return found

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        self._claims += [Claim(entry.address, entry.token) for entry in entries]
        return self._do(lambda records: records.claim_all(entries))

    def wrote_nothing(self) -> None:
        """Note that the last claims found another writer in the way: there is nothing to take back."""
        self._claims = []

    def finish(self, claim: Claim, ending: Ending) -> bool:
        self._check_inside()
        if not self._do(lambda records: records.finish_joined(claim, ending)):
            raise UsageError(ENDED)
        return True

    def check_open(self, claim: Claim) -> None:  # noqa: ARG002 - its mark is the last one
        """Raise `UsageError` if the record is not in the open transaction, or none is open."""
        self._check_inside()
        if not self._records.unmark():
            raise UsageError(ENDED)

    def knows(self, error: BaseException) -> bool:
        """Return whether an error is SQLite's or ours. Any other came from outside, as from a signal handler."""
        return isinstance(error, (sqlite3.Error, OnefoldError))

    def judge(self, claim: Claim, error: BaseException) -> None:
        """Do nothing: a file has one writer at a time, so no other delivery can have written in between."""

    def _check_inside(self) -> None:
        if not self._is_inside():
            raise UsageError(ENDED)

    def _is_inside(self) -> bool:
        try:
            return self.tx.in_transaction
        except sqlite3.ProgrammingError:
            # It was closed.
            return False

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        # Some errors end a transaction in SQLite; then the record is gone already, and must not be written anew.
        if not self._is_inside():
            return True
        is_released = self._do(lambda records: records.release(claim, released))
        self._records.unmark()
        return is_released

    def read(self, address: Address) -> Record | None:
        return self._do(lambda records: records.read(address))

    def spoil(self, when: When) -> None:
        """Take the claim back or, if a handler has run, close the connection, so that its owner notices.

        A rollback would undo the owner's earlier work, and what they write after it would be committed.
        """
        # A handler's own interrupt counts like one of its errors: the record was removed.
        if when.is_inside or not self.tx.in_transaction:
            return
        if when is not When.BEFORE:
            self.tx.close()
            return
        for claim in self._claims:
            self._do(partial(_release, claim))

    def _do(self, work: Callable[[Records], T]) -> T:
        try:
            return work(self._records)
        except sqlite3.OperationalError as error:
            # A missing table has no code of its own; everything else is the driver's to tell.
            if code_of(error) != sqlite3.SQLITE_ERROR or self._records.schema_version():
                raise
        self._records.upgrade(0)
        return work(self._records)


def _release(claim: Claim, records: Records) -> bool:
    return records.release(claim, None)


class SqliteTransaction(JoinedRecords):
    """Run a transaction of our own, on a connection that the store lends."""

    def __init__(self, records: Records, path: str, patience: float) -> None:
        super().__init__(records)
        self._path = path
        self.patience = patience
        # Whether an interrupt has made sure that it is not committed.
        self._spoiled = False

    def begin(self) -> None:
        """Begin, waiting for other writers within `busy_timeout`.

        IMMEDIATE: what is read now is still true at the end.
        """
        if not self.begun():
            run(insist(self.begun, self.patience, self.too_busy, time.sleep))

    def begun(self) -> bool:
        try:
            self.tx.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if code_of(error) in BUSY:
                return False
            raise translated(self._path, error) from error
        return True

    def too_busy(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._path}: another transaction has been writing for {self.patience:g} s. Nothing ran. "
            "Keep transactions short, look for one that was left open, or raise busy_timeout"
        )

    def save(self) -> None:
        self.tx.execute(f"SAVEPOINT {SAVEPOINT}")

    def commit(self) -> Commit:
        self._check_inside()
        try:
            self.tx.execute("COMMIT")
        except sqlite3.IntegrityError:
            # A constraint that is checked at the end: the handler's own mistake, which trying again would not mend.
            self._undo()
            raise
        except sqlite3.Error as error:
            # A COMMIT that fails has written nothing, whatever made it fail: SQLite is in this process.
            self._undo()
            if code_of(error) in BUSY:
                return Commit.CONFLICT
            raise self._translated(error) from error
        return Commit.DONE

    def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        if to_savepoint and self._is_inside():
            self._undo_handler()
            return False
        if self._spoiled:
            add_note(error, f"onefold: {INTERRUPTED}")
        elif not self._is_inside() and not isinstance(error, sqlite3.Error):
            add_note(error, f"Also: {ENDED}")
        self._undo()
        # BEGIN IMMEDIATE has waited for all others: what is busy or locked now is of the handler's own making.
        return False

    def spoil(self, when: When) -> None:
        """Close the connection. After a rollback, later writes of a surrounding handler would be kept.

        After an interrupt in the outermost handler it was rolled back; in a nested one's it is still open.
        """
        if not when.is_inside or self._is_inside():
            self._spoiled = True
            self.tx.close()

    def _check_inside(self) -> None:
        if self._spoiled:
            raise UsageError(INTERRUPTED)
        super()._check_inside()

    def _do(self, work: Callable[[Records], T]) -> T:
        try:
            return super()._do(work)
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def _translated(self, error: sqlite3.Error) -> StoreUnavailable:
        problem = PROBLEMS.get(code_of(error), f"SQLite says: {error}")
        return StoreUnavailable(f"{self._path}: the transaction was not committed: {problem}")

    def _undo_handler(self) -> None:
        try:
            self.tx.execute(f"ROLLBACK TO {SAVEPOINT}")
        except sqlite3.OperationalError as error:
            if not SQLITE.lacks_savepoint(error):
                raise
            raise UsageError(ENDED) from error

    def _undo(self) -> None:
        if self._is_inside():
            self.tx.execute("ROLLBACK")


class AsyncJoinedRecords:
    """Offer `JoinedRecords` to an `AsyncGuard`. SQLite is in this process: there is nothing to wait for."""

    in_process: Final = True

    def __init__(self, sync: JoinedRecords) -> None:
        self.sync = sync
        self.tx = sync.tx

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return self.sync.claim(entry, replacing=replacing)

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return self.sync.claim_all(entries)

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        return self.sync.finish(claim, ending)

    async def release(self, claim: Claim, released: Released | None = None) -> bool:
        return self.sync.release(claim, released)

    async def read(self, address: Address) -> Record | None:
        return self.sync.read(address)

    async def check_open(self, claim: Claim) -> None:
        self.sync.check_open(claim)

    def knows(self, error: BaseException) -> bool:
        return self.sync.knows(error)

    async def judge(self, claim: Claim, error: BaseException) -> None:
        self.sync.judge(claim, error)

    async def spoil(self, when: When) -> None:
        self.sync.spoil(when)

    def abandon(self) -> None:
        """Close the connection, which rolls back: whatever still runs on it notices."""
        self.tx.close()


class AsyncSqliteTransaction(AsyncJoinedRecords):
    """Run a transaction of our own for an `AsyncGuard`; wait for other writers without blocking the event loop."""

    sync: SqliteTransaction

    async def begin(self) -> None:
        from asyncio import sleep

        if not self.sync.begun():
            await run_async(insist(self._begun, self.sync.patience, self.sync.too_busy, sleep))

    async def _begun(self) -> bool:
        return self.sync.begun()

    async def save(self) -> None:
        self.sync.save()

    async def commit(self) -> Commit:
        return self.sync.commit()

    async def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        return self.sync.rollback(error, to_savepoint=to_savepoint)
