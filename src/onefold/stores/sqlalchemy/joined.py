"""SQLAlchemy: inside the transaction of a caller's connection or session, sync and async."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine, exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from onefold.errors import UsageError
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sql.joined import AsyncJoinedRecords, JoinedRecords
from onefold.stores.sql.orm import send_finding
from onefold.stores.sqlalchemy.connection import (
    AsyncConnectionShell,
    Held,
    HeldConnection,
    Source,
    StoresConnection,
    database_of,
)
from onefold.stores.sqlalchemy.drivers import check_one_engine
from onefold.stores.sqlite import orm as sqlite
from onefold.transactions import Column


def join(connection: Any, record: Column | None, *, is_async: bool) -> JoinedRecords | AsyncJoinedRecords:
    """The store that works inside the transaction of this connection or session.

    It sends nothing yet, because it cannot be awaited: what is wrong with the transaction is told by its first
    operation, before anything runs.
    """
    held, tx = _held(connection, is_async=is_async)
    engine = _engine_of(held)
    database = database_of(engine)
    if record is not None:
        rows = database.sql.rows_of(record)
        conn = RowAndRecordConnection(held, tx) if rows.needs_tables else RowConnection(held, tx)
        database = database._replace(sql=rows)
        return AsyncJoinedRecords(database, AsyncConnectionShell(conn)) if is_async else JoinedRecords(database, conn)
    callers = CallersConnection(held, tx)
    return AsyncJoinedRecords(database, AsyncConnectionShell(callers)) if is_async else JoinedRecords(database, callers)


# By the dialect of the engine, which those that differ in their options only share: where the tables were found.
_found: WeakSet[Any] = WeakSet()


class CallersConnection(HeldConnection):
    """What is sent joins the caller's transaction; the first one finds the tables, or makes them."""

    _sent = False

    def send(self, request: SqlRequest) -> Reply:
        inside = self.enter()
        if inside.driver.makes_tables_inside:
            return sqlite.looked_up(inside.send, request)
        engine, first = inside.connection.engine, not self._sent
        database = database_of(engine)
        reply = send_finding(request, inside, database, _found, engine.dialect, lambda: _beside(engine), first=first)
        self._sent = True
        return reply


@contextmanager
def _beside(engine: Engine) -> Iterator[StoresConnection]:
    """A connection that does not come from the engine's pool.

    Of many callers that hold all of its connections, each would wait for the others.
    """
    other = Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=engine.hide_parameters)
    conn = StoresConnection(Source(other, lambda: HeldConnection(other.connect())))
    try:
        yield conn
    finally:
        conn.close()
        other.dispose()


class RowConnection(HeldConnection):
    """For a record that is a row of the caller's: our tables are not wanted."""

    def send(self, request: SqlRequest) -> Reply:
        if self._inside is not None and isinstance(self.held, Session):
            # The handler has run: what it has added to the session has to be seen.
            self.held.flush()
        return super().send(request)


class RowAndRecordConnection(RowConnection, CallersConnection):
    """For a row of the caller's with a record of ours beside it."""


def _held(connection: Any, *, is_async: bool) -> tuple[Held, Any]:
    """What the statements go through, and what the caller knows it as."""
    tx = connection() if isinstance(connection, (scoped_session, async_scoped_session)) else connection
    if not is_async and isinstance(tx, (Connection, Session)):
        return tx, tx
    if is_async and isinstance(tx, AsyncSession):
        return tx.sync_session, tx
    if is_async and isinstance(tx, AsyncConnection):
        if tx.sync_connection is None:
            raise UsageError("within(AsyncConnection): it is not connected yet. Enter it by `async with`, or await it")
        return tx.sync_connection, tx
    mine = "an AsyncGuard joins an AsyncConnection or an AsyncSession"
    if not is_async:
        mine = "a Guard joins a Connection or a Session"
    raise UsageError(f"within({type(connection).__name__}): {mine}. Nothing ran")


def _engine_of(held: Held) -> Engine:
    try:
        found = held.get_bind() if isinstance(held, Session) else held
    except exc.UnboundExecutionError as error:
        raise UsageError(
            f"within({type(held).__name__}): it is not clear which of its engines is meant. Pass "
            "session.connection(bind_arguments=...)"
        ) from error
    if isinstance(held, Session):
        check_one_engine(held, found.engine)
    return found.engine
