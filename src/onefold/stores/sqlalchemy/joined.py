"""SQLAlchemy: inside the transaction of a caller's connection or session, sync and async."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from sqlalchemy import Connection, Engine, exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from onefold.errors import UsageError
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sql.joined import AsyncJoinedRecords, JoinedRecords
from onefold.stores.sql.joined_rules import FoundIn
from onefold.stores.sql.orm import SearchPath, purge_beside, send_finding
from onefold.stores.sqlalchemy.async_connection import AsyncConnectionShell
from onefold.stores.sqlalchemy.commits import after_commit
from onefold.stores.sqlalchemy.connection import Held, HeldConnection
from onefold.stores.sqlalchemy.database import database_of
from onefold.stores.sqlalchemy.drivers import check_one_engine
from onefold.stores.sqlalchemy.engine_connection import StoresConnection, beside
from onefold.stores.sqlite import orm as sqlite
from onefold.transactions import RecordColumn


def join(connection: Any, record: RecordColumn | None, *, is_async: bool) -> JoinedRecords | AsyncJoinedRecords:
    """Return the store that works inside the transaction of this connection or session.

    Nothing is sent yet, because this function is not awaited: problems with the transaction are raised by the first
    operation, before anything runs.
    """
    held, tx = _held(connection, is_async=is_async)
    engine = _engine_of(held)
    database = database_of(engine)
    path = SearchPath()
    conn: HeldConnection = CallersConnection(held, tx, path)
    if record is not None:
        rows = database.sql.rows_of(record)
        conn = RowAndRecordConnection(held, tx, path) if rows.needs_tables else RowConnection(held, tx)
        database = database._replace(sql=rows)
    joined: JoinedRecords | AsyncJoinedRecords = JoinedRecords(database, conn)
    if is_async:
        joined = AsyncJoinedRecords(database, AsyncConnectionShell(conn))
    # A connection outside of a session tells of its commit only beforehand.
    if isinstance(held, Session) and isinstance(conn, CallersConnection):
        joined.purge_after_commit = partial(_purge_after_commit, held, engine, path)
    return joined


def _purge_after_commit(session: Session, engine: Engine, path: SearchPath, batches: int) -> None:
    path.is_wanted = True
    after_commit(session, lambda due: purge_beside(database_of(engine), due, lambda: _beside(engine), path), batches)


# The engines' dialects for which the tables were found; engines that differ only in their options share one.
_found: Final = FoundIn(WeakSet)


class CallersConnection(HeldConnection):
    """A connection in the caller's transaction; its first statement finds or creates the tables."""

    _sent = False

    def __init__(self, held: Held, tx: Any, path: SearchPath) -> None:
        super().__init__(held, tx)
        self._path = path

    def send(self, request: SqlRequest) -> Reply:
        inside = self.enter()
        if inside.driver.makes_tables_inside:
            return sqlite.looked_up(inside.send, request)
        engine, first = inside.connection.engine, not self._sent
        database = database_of(engine)
        reply = send_finding(request, inside, database, _found, engine.dialect, lambda: _beside(engine), first=first)
        self._sent = True
        self._path.ask(database, inside)
        return reply


@contextmanager
def _beside(engine: Engine) -> Iterator[StoresConnection]:
    """Lend a connection that does not come from the engine's pool.

    If callers held all of its connections, they would all wait for each other.
    """
    source = beside(engine)
    conn = StoresConnection(source)
    try:
        yield conn
    finally:
        conn.close()
        source.engine.dispose()


class RowConnection(HeldConnection):
    """A connection for records that are the caller's own rows: our tables are not needed."""

    def send(self, request: SqlRequest) -> Reply:
        if self._inside is not None and isinstance(self.held, Session):
            # The handler has run: its pending changes to the session have to be visible.
            self.held.flush()
        return super().send(request)


class RowAndRecordConnection(RowConnection, CallersConnection):
    """A connection for a caller's row with a record of ours beside it."""


def _held(connection: Any, *, is_async: bool) -> tuple[Held, Any]:
    """Return the object that sends statements, and the object that the caller passed."""
    tx = connection() if isinstance(connection, (scoped_session, async_scoped_session)) else connection
    if not is_async and isinstance(tx, (Connection, Session)):
        return tx, tx
    if is_async and isinstance(tx, AsyncSession):
        return tx.sync_session, tx
    if is_async and isinstance(tx, AsyncConnection):
        if tx.sync_connection is None:
            raise UsageError(
                "within(AsyncConnection): it is not connected yet. Enter it with `async with`, or await it"
            )
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
