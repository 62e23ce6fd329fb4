"""Django: inside a caller's block of `transaction.atomic()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from onefold.errors import UsageError
from onefold.stores.django.connection import InsideConnection, StoresConnection, beside, database_of, in_transaction
from onefold.stores.django.vendors import database_id_of
from onefold.stores.sql.connection import Database
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sql.joined import JoinedRecords
from onefold.stores.sql.joined_rules import FoundIn
from onefold.stores.sql.orm import SearchPath, purge_beside, send_finding
from onefold.stores.sqlite import orm as sqlite
from onefold.transactions import RecordColumn


def join(connection: Any, record: RecordColumn | None, *, is_async: bool) -> JoinedRecords:
    """Return the store that works inside this connection's transaction. Its first operation checks for one."""
    from django.db import connections
    from django.db.backends.base.base import BaseDatabaseWrapper

    if is_async:
        raise UsageError(
            "within(Django's connection): Django has no async transactions, so an AsyncGuard cannot join one. "
            "Nothing ran. Use a Guard, in sync code"
        )
    # `django.db.connection` is a proxy for the thread's connection.
    wrapper = connection if isinstance(connection, BaseDatabaseWrapper) else connections[connection.alias]
    database = database_of(wrapper)
    if record is None:
        return _purging(database, wrapper)
    rows = database.sql.rows_of(record)
    database = database._replace(sql=rows)
    if not rows.needs_tables:
        return JoinedRecords(database, InsideConnection(wrapper))
    return _purging(database, wrapper)


def _purging(database: Database, connection: Any) -> JoinedRecords:
    path = SearchPath()
    joined = JoinedRecords(database, CallersConnection(connection, path))
    joined.purge_after_commit = partial(_purge_after_commit, connection, path)
    return joined


def _purge_after_commit(connection: Any, path: SearchPath, batches: int) -> None:
    # Elsewhere Django would call it at once, or refuse it.
    if connection.in_atomic_block:
        path.is_wanted = True
        connection.on_commit(partial(_purge, connection, path, batches))


def _purge(connection: Any, path: SearchPath, batches: int) -> None:
    # A test that captures its hooks calls them in a transaction; and a database in memory has only one connection.
    if not in_transaction(connection) and not (connection.vendor == "sqlite" and connection.is_in_memory_db()):
        purge_beside(database_of(connection), batches, lambda: _outside_of_pools(connection), path)


# The databases where the tables were found.
_found: Final = FoundIn()


class CallersConnection(InsideConnection):
    """A connection in the caller's transaction; its first statement finds or creates the tables."""

    _sent = False

    def __init__(self, connection: Any, path: SearchPath) -> None:
        super().__init__(connection)
        self._path = path

    def send(self, request: SqlRequest) -> Reply:
        connection, inside = self.connection, InsideConnection(self.connection)
        self.enter()
        if self.vendor.makes_tables_inside:
            sqlite.enter(connection.connection, self.run)
            return sqlite.looked_up(inside.send, request)
        database, database_id, first = database_of(connection), database_id_of(connection), not self._sent
        reply = send_finding(request, inside, database, _found, database_id, lambda: _beside(connection), first=first)
        self._sent = True
        self._path.ask(database, inside)
        return reply


@contextmanager
def _outside_of_pools(connection: Any) -> Iterator[StoresConnection]:
    other = beside(connection)
    try:
        yield StoresConnection(other)
    finally:
        other.close()


@contextmanager
def _beside(connection: Any) -> Iterator[StoresConnection]:
    other = connection.copy()
    try:
        yield StoresConnection(other)
    finally:
        other.close()
