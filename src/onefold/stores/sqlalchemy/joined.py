"""SQLAlchemy: inside the transaction of a caller's connection or session, in both colours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine, exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from onefold.errors import UsageError
from onefold.stores.sql.dialect import Ask, Reply
from onefold.stores.sql.joined import AsyncJoinedRecords, JoinedRecords
from onefold.stores.sql.orm import send_finding
from onefold.stores.sqlalchemy.connection import AwaitedLink, Held, HeldLink, Source, StoresLink, database_of
from onefold.stores.sqlalchemy.drivers import check_one_engine
from onefold.stores.sqlite import orm as sqlite
from onefold.transactions import Column


def join(connection: Any, record: Column | None, *, awaited: bool) -> JoinedRecords | AsyncJoinedRecords:
    """The store that works inside the transaction of this connection or session.

    It sends nothing yet, because it cannot be awaited: what is wrong with the transaction is told by its first
    operation, before anything runs.
    """
    held, tx = _held(connection, awaited=awaited)
    engine = _engine_of(held)
    database = database_of(engine)
    if record is not None:
        rows = database.sql.rows_of(record)
        link = RowAndRecordLink(held, tx) if rows.needs_tables else RowLink(held, tx)
        database = database._replace(sql=rows)
        return AsyncJoinedRecords(database, AwaitedLink(link)) if awaited else JoinedRecords(database, link)
    callers = CallersLink(held, tx)
    return AsyncJoinedRecords(database, AwaitedLink(callers)) if awaited else JoinedRecords(database, callers)


# By the dialect of the engine, which those that differ in their options only share: where the tables were found.
_found: WeakSet[Any] = WeakSet()


class CallersLink(HeldLink):
    """What is sent joins the caller's transaction; the first one finds the tables, or makes them."""

    _sent = False

    def send(self, ask: Ask) -> Reply:
        inside = self.enter()
        if inside.driver.makes_tables_inside:
            return sqlite.looked_up(inside.send, ask)
        engine, first = inside.connection.engine, not self._sent
        database = database_of(engine)
        reply = send_finding(ask, inside, database, _found, engine.dialect, lambda: _beside(engine), first=first)
        self._sent = True
        return reply


@contextmanager
def _beside(engine: Engine) -> Iterator[StoresLink]:
    """A connection that does not come from the engine's pool.

    Of many callers that hold all of its connections, each would wait for the others.
    """
    other = Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=engine.hide_parameters)
    link = StoresLink(Source(other, lambda: HeldLink(other.connect())))
    try:
        yield link
    finally:
        link.close()
        other.dispose()


class RowLink(HeldLink):
    """For a record that is a row of the caller's: our tables are not wanted."""

    def send(self, ask: Ask) -> Reply:
        if self._inside is not None and isinstance(self.held, Session):
            # The handler has run: what it has added to the session has to be seen.
            self.held.flush()
        return super().send(ask)


class RowAndRecordLink(RowLink, CallersLink):
    """For a row of the caller's with a record of ours beside it."""


def _held(connection: Any, *, awaited: bool) -> tuple[Held, Any]:
    """What the statements go through, and what the caller knows it as."""
    tx = connection() if isinstance(connection, (scoped_session, async_scoped_session)) else connection
    if not awaited and isinstance(tx, (Connection, Session)):
        return tx, tx
    if awaited and isinstance(tx, AsyncSession):
        return tx.sync_session, tx
    if awaited and isinstance(tx, AsyncConnection):
        if tx.sync_connection is None:
            raise UsageError("within(AsyncConnection): it is not connected yet. Enter it by `async with`, or await it")
        return tx.sync_connection, tx
    mine = "an AsyncGuard joins an AsyncConnection or an AsyncSession"
    if not awaited:
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
