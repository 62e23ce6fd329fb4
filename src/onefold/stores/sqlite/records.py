"""The operations of a store on one SQLite connection; they begin and end no transaction."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from onefold._concurrency.generators import run
from onefold._model import Address, Claim, Close, Ending, Entry, Gone, Record, Released, State
from onefold.stores.base import Query, StoredRecord
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sql.locked import all_known
from onefold.stores.sql.records import IN_DOUBT_SECONDS, Parameters, record
from onefold.stores.sqlite.dialect import (
    END_WITH_RESULT,
    END_WITHOUT_RESULT,
    INSERT_NEW,
    LOOK,
    LOOK_DONE,
    MARK,
    SQLITE,
    TAKES_NUMBERS,
)

# On Python 3.11 accessing an enum's members is slow.
RUNNING: Final = State.RUNNING
DONE: Final = State.DONE


class DoneRow(msgspec.Struct, frozen=True, gc=False):
    """What a replay needs of a record that is done."""

    attempt: int
    fingerprint: bytes | None
    result: bytes | None
    omitted: bool
    remark: str


class Records:
    """The operations on one connection, by one clock. They begin and end no transaction, and raise sqlite3 errors.

    The store uses them, and so do joined records in a caller's transaction.
    """

    def __init__(self, connection: sqlite3.Connection, clock: Callable[[], float] = time.time) -> None:
        self.connection = connection
        self._clock = clock

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        # As the flow of `SQLITE.claim` begins, without it: nearly every claim is the first one of its address, which
        # `INSERT_NEW` writes.
        if (
            TAKES_NUMBERS
            and replacing is None
            and entry.state is RUNNING
            and entry.attempt == 1
            and entry.notes is None
            and entry.result is None
            and not (entry.age or entry.bypasses or entry.remark or entry.omitted)
        ):
            address, ttl, fingerprint = entry.address, entry.ttl, entry.fingerprint
            values = (
                self._clock(),
                address.scope,
                address.operation,
                address.key,
                # For `bytes`, as for None, Python's sqlite3 looks for an adapter first.
                bytearray(entry.token),
                entry.lease,
                IN_DOUBT_SECONDS if ttl == math.inf else ttl,
                None if fingerprint is None else bytearray(fingerprint),
            )
            if self.connection.execute(INSERT_NEW, values).rowcount == 1:
                return None
            found = self.read(address)
            if found is not None:
                return None if entry.is_own(found.token) else found
        return run(SQLITE.claim(entry, replacing), self)

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        # SQLite is in this process: one statement per entry costs no round trip.
        return [self.claim(entry) for entry in entries]

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return run(SQLITE.extend(claim, notes), self)

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return all_known(run(SQLITE.extend_all(claims), self))

    def finish(self, claim: Claim, ending: Ending) -> bool:
        # As `SQLITE.finish`, without its flow: nearly every ending is that of a run that has returned.
        is_plain = ending.state is DONE and not ending.omitted and ending.notes is None and not ending.remark
        if not (TAKES_NUMBERS and is_plain):
            return run(SQLITE.finish(claim, ending), self)
        address, ttl, result = claim.address, ending.ttl, ending.result
        values = (
            self._clock(),
            address.scope,
            address.operation,
            address.key,
            bytearray(claim.token),
            None if ttl == math.inf else ttl,
        )
        if result is None:
            return self.connection.execute(END_WITHOUT_RESULT, values).rowcount == 1
        return self.connection.execute(END_WITH_RESULT, (*values, result)).rowcount == 1

    def mark(self) -> None:
        """Mark the transaction as `Dialect.mark` does, by a fast path: each joined delivery needs it twice."""
        self.connection.execute(f"SAVEPOINT {MARK}")

    def unmark(self) -> bool:
        """Return whether the marked transaction is still open."""
        try:
            self.connection.execute(f"RELEASE SAVEPOINT {MARK}")
        except sqlite3.OperationalError as error:
            if not SQLITE.lacks_savepoint(error):
                raise
            return False
        return True

    def finish_joined(self, claim: Claim, ending: Ending) -> bool:
        return self.unmark() and run(SQLITE.end_unmarked(claim, ending), self)

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        return run(SQLITE.release(claim, released), self)

    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return run(SQLITE.close_all(closes), self)

    def read(self, address: Address) -> Record | None:
        # As `SQLITE.read`, without its flow, by a statement with numbered values: every delivery comes here, and half
        # of the time would be ours.
        if not TAKES_NUMBERS:
            return run(SQLITE.read(address), self)
        cursor = self.connection.cursor()
        cursor.row_factory = None
        rows = cursor.execute(LOOK, (self._clock(), address.scope, address.operation, address.key)).fetchall()
        return record(address, rows[0]) if rows else None

    def find_done(self, address: Address) -> DoneRow | None:
        """Return what a replay needs of a record that is done and has no notes; None if there is none."""
        if not TAKES_NUMBERS:
            return None
        found = self.connection.execute(
            LOOK_DONE, (self._clock(), address.scope, address.operation, address.key)
        ).fetchall()
        if not found:
            return None
        attempt, fingerprint, result, omitted, remark = found[0]
        return DoneRow(attempt, fingerprint, result, omitted != 0, remark)

    def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        return run(SQLITE.annotate(record, notes), self)

    def browse(self, query: Query, limit: int) -> list[Record]:
        return run(SQLITE.browse(query, limit), self)

    def stored(self, address: Address) -> StoredRecord | None:
        return run(SQLITE.stored(address), self)

    def purge(self, limit: int) -> int:
        return run(SQLITE.purge(limit), self)

    def schema_version(self) -> int:
        """Return the version of the tables; 0: there are none."""
        return run(SQLITE.schema_version(), self)

    def upgrade(self, version: int) -> None:
        """Upgrade the tables from this version to ours."""
        run(SQLITE.upgrade(version), self)

    def send(self, request: SqlRequest) -> Reply:
        if not request.rows:
            return Reply(self._execute(request.statement, request.values).rowcount)
        return Reply(0, self._rows(request.statement, request.values))

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        return [self.send(request) for request in requests]

    def _rows(self, statement: str, values: Parameters) -> list[Any]:
        # Fetch all rows: an open cursor keeps its snapshot, and the WAL could not be emptied.
        return self._execute(statement, values).fetchall()

    def _execute(self, statement: str, values: Parameters) -> sqlite3.Cursor:
        cursor = self.connection.cursor()
        # The connection may be a caller's, with a row factory of its own.
        cursor.row_factory = None
        if ":now" in statement:
            values = values | {"now": self._clock()}
        return cursor.execute(statement, values)


@contextmanager
def text_as_str(connection: sqlite3.Connection) -> Iterator[None]:
    """Return text as `str` meanwhile: a caller may have set another form, and a cursor cannot change it."""
    wanted = connection.text_factory
    connection.text_factory = str
    try:
        yield
    finally:
        connection.text_factory = wanted
