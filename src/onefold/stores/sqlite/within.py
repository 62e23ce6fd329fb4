"""Join the transaction of a caller's sqlite3 connection."""

# ruff: noqa: ARG002 - a row of the caller's has no memories

from __future__ import annotations

import sqlite3
from typing import Any

from onefold._concurrency.generators import run
from onefold._model import Claim, Ending, Entry, Gone, Record, Released
from onefold.errors import NotInTransaction, UsageError
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sqlite.joined import ENDED, AsyncCallersRecords, CallersRecords, JoinedRecords, text_as_str
from onefold.stores.sqlite.own_column import SqliteRows
from onefold.transactions import Column


def join(connection: sqlite3.Connection, record: Column | None, *, is_async: bool) -> Any:
    """Return the store that works inside this connection's transaction. Raises `NotInTransaction` if there is none."""
    begins = _begins(connection)
    if begins and not is_async:
        # With the right to write: what is read from now on is still true at the end.
        connection.execute("BEGIN IMMEDIATE")
    joined = JoinedRecords(CallersRecords(connection)) if record is None else ColumnRecords(connection, record)
    return AsyncCallersRecords(joined, begins=begins) if is_async else joined


def _begins(connection: sqlite3.Connection) -> bool:
    """Return whether a transaction has to be begun.

    Python's sqlite3 opens one by itself before the first write, unless it is told not to; then we are the first write.
    """
    if connection.in_transaction:
        return False
    if getattr(connection, "autocommit", -1) == -1 and connection.isolation_level is not None:
        return True
    raise NotInTransaction(
        "this connection is in autocommit mode, and no transaction is open: the record and the work would not be "
        "committed together. Nothing ran. Execute BEGIN IMMEDIATE before, or connect without isolation_level=None"
    )


class ColumnRecords(JoinedRecords):
    """Records that are the caller's own rows, which the handler writes."""

    def __init__(self, connection: sqlite3.Connection, column: Column) -> None:
        super().__init__(CallersRecords(connection))
        self._rows = SqliteRows(column)

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        found = run(self._rows.claim(entry, replacing), self)
        if found is None:
            run(self._rows.mark(Claim(entry.address, entry.token)), self)
        return found

    def finish(self, claim: Claim, ending: Ending) -> bool:
        self._check_inside()
        if not run(self._rows.finish_joined(claim, ending), self):
            raise UsageError(ENDED)
        return True

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        if self._is_inside():
            run(self._rows.unmark(claim), self)
        return True

    def send(self, request: SqlRequest) -> Reply:
        cursor = self.tx.cursor()
        # The connection is the caller's, who may want rows and text in another form.
        cursor.row_factory = None
        with text_as_str(self.tx):
            cursor.execute(request.statement, request.values)
            return Reply(cursor.rowcount, cursor.fetchall())

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        return [self.send(request) for request in requests]
