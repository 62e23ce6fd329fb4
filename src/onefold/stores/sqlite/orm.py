"""SQLite through a library such as SQLAlchemy or Django.

The library sends the statements and wraps the errors. Nothing here ends a transaction.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec.structs import replace

from onefold._concurrency.generators import run
from onefold._model import Entry, Gone, Record
from onefold.stores.sql.connection import ErrorClass, ErrorInfo, TransactionStatus
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.records import Parameters, of_address, of_entry, record
from onefold.stores.sqlite.connection import BUSY, PROBLEMS, code_of
from onefold.stores.sqlite.dialect import SQLITE, Sqlite
from onefold.stores.sqlite.within import LOOKING, must_begin

BEGIN: Final = "BEGIN IMMEDIATE"

# The statement or the data is wrong.
MISTAKES: Final = frozenset(
    {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG}
)


class SqliteOrm(Sqlite):
    """SQLite as a SQL store: a batch is many statements in one transaction."""

    def claim_all(self, entries: Sequence[Entry]) -> SqlFlow[list[Record | Gone | None]]:
        # SQLite is in this process, so that one statement per entry costs no round trip.
        requests: list[SqlRequest] = []
        for entry in entries:
            requests += (
                SqlRequest(self.insert, of_entry(entry)),
                SqlRequest(self.look, of_address(entry.address), rows=True),
            )
        replies: list[Reply] = yield requests
        answers: list[Record | Gone | None] = []
        for entry, wrote, looked in zip(entries, replies[::2], replies[1::2], strict=True):
            if wrote.written == 1:
                answers.append(None)
            elif looked.rows:
                found = record(entry.address, looked.rows[0])
                answers.append(None if entry.is_own(found.token) else found)
            else:
                # It expired between the two.
                answers.append((yield from self.claim(entry)))
        return answers


SQLITE_ORM: Final = SqliteOrm()


def with_clock(request: SqlRequest) -> Parameters:
    """Return the values, with the machine's clock if the statement needs it: SQLite has no other."""
    return request.values | {"now": time.time()} if ":now" in request.statement else request.values


def transaction_status(connection: Any) -> TransactionStatus:
    try:
        return TransactionStatus.OPEN if connection.in_transaction else TransactionStatus.IDLE
    except sqlite3.ProgrammingError:
        return TransactionStatus.CLOSED


def enter(connection: Any, send: Callable[[str], object]) -> None:
    """Enter a transaction with the write lock: what is read from now on is still true at the end."""
    if must_begin(connection, "Begin a transaction before"):
        send(BEGIN)


def looked_up(send: Callable[[SqlRequest], Reply], request: SqlRequest) -> Reply:
    """Send a statement on a caller's connection, whose database may have no tables of ours, or newer ones.

    Missing tables are created in the caller's own transaction, one statement at a time: SQLite rolls them back like
    everything else, and a second connection would wait for the first.
    """
    looking = replace(request, statement=LOOKING.get(request.statement, request.statement))
    sender = _Sender(send)
    try:
        reply = send(looking)
    except Exception as error:
        # A missing table has no code of its own; all other errors are left to the driver.
        if _code(error) != sqlite3.SQLITE_ERROR or run(SQLITE.schema_version(), sender):
            raise
        run(SQLITE.upgrade(0), sender)
        return send(looking)
    if request.statement == SQLITE.look and not reply.rows and not run(SQLITE.schema_version(), sender):
        # Nothing may be written into tables of unknown version. Tables that are too new have raised just now.
        run(SQLITE.upgrade(0), sender)
    return reply


class _Sender:
    def __init__(self, send: Callable[[SqlRequest], Reply]) -> None:
        self.send = send

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        return [self.send(request) for request in requests]


def classify(error: BaseException) -> ErrorInfo | None:
    """Classify an error of SQLite."""
    if not isinstance(error, sqlite3.Error):
        return None
    code = code_of(error)
    if code in BUSY:
        return ErrorInfo(ErrorClass.DOWN, "another connection has been writing for too long. Keep transactions short")
    if code in PROBLEMS:
        return ErrorInfo(ErrorClass.DOWN, PROBLEMS[code])
    if code in MISTAKES or isinstance(error, sqlite3.ProgrammingError):
        return ErrorInfo(ErrorClass.MISTAKE, f"SQLite says: {error}")
    return ErrorInfo(ErrorClass.DOWN, f"SQLite says: {error}")


def _code(error: BaseException) -> int:
    """Return the code of the error, or of the one that a library has wrapped."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, sqlite3.Error):
        seen = seen.__cause__
    return 0 if seen is None else code_of(seen)
