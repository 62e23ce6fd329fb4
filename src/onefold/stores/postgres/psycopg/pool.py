"""psycopg's connections, sync and async: opened for a pool of ours, or lent by a pool of the caller's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from inspect import isawaitable
from typing import Any, Final

import psycopg
from psycopg import IsolationLevel
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from onefold._concurrency.interrupts import brought_to_its_end
from onefold.errors import StoreUnavailable
from onefold.stores.postgres.errors import one_line
from onefold.stores.postgres.psycopg.connection import (
    AsyncConnection,
    AsyncPsycopgConnection,
    Connection,
    PsycopgConnection,
    classify,
)
from onefold.stores.postgres.session import QUESTION, Session
from onefold.stores.postgres.urls import APPLICATION, CONNECT_SECONDS, Settings, check_options, unreadable
from onefold.stores.sql.connection import TransactionStatus
from onefold.stores.sql.pool import AsyncReserve, Reserve

__all__ = ["AsyncOpener", "CallersAsyncPool", "CallersPool", "Opener", "classify"]

# Statements are prepared when they have been used so often, as psycopg has it by itself.
PREPARE_AFTER: Final = 5

# For messages: what is known of the place of a caller's pool.
POOLED: Final = "PostgreSQL, by the settings of your pool"


class Opener:
    """Opens connections, blocking."""

    def __init__(self, settings: Settings) -> None:
        self._name = settings.name
        self._parameters = _parameters(settings)
        self._level = settings.isolation and IsolationLevel[settings.isolation.upper().replace(" ", "_")]
        self._session = Session(settings)

    def __call__(self) -> PsycopgConnection:
        try:
            connection: Connection = psycopg.Connection.connect(autocommit=True, **self._parameters)
        except psycopg.OperationalError as error:
            raise unreachable(self._name, error) from error
        connection.isolation_level = self._level or None
        session = self._session
        if not session.is_known:
            try:
                answer = connection.execute(QUESTION.encode(), prepare=False).fetchone()
            except BaseException:
                connection.close()
                raise
            session.learn(answer, connection.info.backend_pid)
        connection.prepare_threshold = PREPARE_AFTER if session.prepare else None
        return OwnConnection(connection, session.where)


class AsyncOpener(Opener):
    """The async counterpart."""

    async def __call__(self) -> AsyncPsycopgConnection:  # type: ignore[override]
        try:
            connection: AsyncConnection = await psycopg.AsyncConnection.connect(autocommit=True, **self._parameters)
        except psycopg.OperationalError as error:
            raise unreachable(self._name, error) from error
        await connection.set_isolation_level(self._level or None)
        session = self._session
        if not session.is_known:
            try:
                answer = await (await connection.execute(QUESTION.encode(), prepare=False)).fetchone()
            except BaseException:
                await connection.close()
                raise
            session.learn(answer, connection.info.backend_pid)
        connection.prepare_threshold = PREPARE_AFTER if session.prepare else None
        return AsyncOwnConnection(connection, session.where)


def _parameters(settings: Settings) -> dict[str, Any]:
    """What libpq is told."""
    check_options(settings, [option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()])
    try:
        found: dict[str, Any] = conninfo_to_dict(settings.url)
    except psycopg.ProgrammingError:
        # Without its cause, which quotes the URL.
        raise unreadable() from None
    usual = {"connect_timeout": CONNECT_SECONDS, "fallback_application_name": APPLICATION, "client_encoding": "utf8"}
    return usual | found


class OwnConnection(PsycopgConnection):
    """On a connection of ours. Handlers may have left their session anywhere, and classes of their own."""

    def __init__(self, connection: Connection, where: str) -> None:
        super().__init__(connection)
        self._where = where

    def begin(self) -> None:
        super().begin()
        self.connection.row_factory, self.connection.cursor_factory = tuple_row, psycopg.Cursor


class AsyncOwnConnection(AsyncPsycopgConnection):
    """The async counterpart."""

    def __init__(self, connection: AsyncConnection, where: str) -> None:
        super().__init__(connection)
        self._where = where

    async def begin(self) -> None:
        await super().begin()
        self.connection.row_factory, self.connection.cursor_factory = tuple_row, psycopg.AsyncCursor


class CallersPool:
    """A pool of the caller's: its connections are in autocommit mode while we have them, and then as they were."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @contextmanager
    def acquire(self) -> Iterator[PsycopgConnection]:
        connection = self._taken()
        before, conn = connection.autocommit, None
        try:
            connection.autocommit = True
            conn = PsycopgConnection(connection)
            yield conn
        finally:
            if conn is not None and conn.transaction_status() is TransactionStatus.IDLE:
                connection.autocommit = before
            else:
                # The pool replaces what is closed.
                connection.close()
            self._pool.putconn(connection)

    def _taken(self) -> Connection:
        try:
            return self._pool.getconn()  # type: ignore[no-any-return]
        except psycopg.OperationalError as error:
            raise gave_none(error) from error

    def drop_idle(self) -> None:
        """A connection was lost, and others with it, perhaps: the pool shall look after them."""
        if not self._pool.closed:
            self._pool.check()

    def reserve(self) -> Reserve:
        """Return a connection outside of the pool, opened by its settings."""
        return Reserve(self._opened)

    def _opened(self) -> PsycopgConnection:
        pool = self._pool
        conninfo, kwargs = _now(pool.conninfo), _now(pool.kwargs)
        try:
            connection: Connection = pool.connection_class.connect(conninfo or "", **(kwargs or {}))
        except psycopg.OperationalError as error:
            raise unreachable(POOLED, error) from error
        try:
            if pool._configure is not None:
                # It may say where the tables are: SET ROLE, SET search_path.
                pool._configure(connection)
            connection.autocommit = True
        except BaseException:
            connection.close()
            raise
        return PsycopgConnection(connection)


class CallersAsyncPool:
    """The async counterpart."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[AsyncPsycopgConnection]:
        connection = await self._taken()
        before, conn = connection.autocommit, AsyncPsycopgConnection(connection)
        try:
            await connection.set_autocommit(True)
            yield conn
        finally:
            await brought_to_its_end(self._given_back(conn, autocommit=before), conn.abandon)

    async def _given_back(self, conn: AsyncPsycopgConnection, *, autocommit: bool) -> None:
        if conn.transaction_status() is TransactionStatus.IDLE:
            await conn.connection.set_autocommit(autocommit)
        else:
            # The pool replaces what is closed.
            conn.abandon()
        await self._pool.putconn(conn.connection)

    async def _taken(self) -> AsyncConnection:
        try:
            return await self._pool.getconn()  # type: ignore[no-any-return]
        except psycopg.OperationalError as error:
            raise gave_none(error) from error

    async def drop_idle(self) -> None:
        if not self._pool.closed:
            await self._pool.check()

    def reserve(self) -> AsyncReserve:
        """Return a connection outside of the pool, opened by its settings."""
        return AsyncReserve(self._opened)

    async def _opened(self) -> AsyncPsycopgConnection:
        pool = self._pool
        conninfo, kwargs = await _now_async(pool.conninfo), await _now_async(pool.kwargs)
        try:
            connection: AsyncConnection = await pool.connection_class.connect(conninfo or "", **(kwargs or {}))
        except psycopg.OperationalError as error:
            raise unreachable(POOLED, error) from error
        try:
            if pool._configure is not None:
                await pool._configure(connection)
            await connection.set_autocommit(True)
        except BaseException:
            await connection.close()
            raise
        return AsyncPsycopgConnection(connection)


def _now(setting: Any) -> Any:
    """Return a pool's setting, which may be a function that knows today's password."""
    return setting() if callable(setting) else setting


async def _now_async(setting: Any) -> Any:
    found = _now(setting)
    return await found if isawaitable(found) else found


def unreachable(name: str, error: psycopg.OperationalError) -> StoreUnavailable:
    """A connection that could not be opened. There is no code for why, but what libpq says holds no password."""
    says = one_line(str(error)).removeprefix("connection failed: ")
    return StoreUnavailable.unreached(
        f"{name}: {says}. Nothing ran. Is the server up, and are host, port, user, password and database in the URL "
        "right?"
    )


def gave_none(error: psycopg.OperationalError) -> StoreUnavailable:
    return StoreUnavailable.unreached(
        f"PostgreSQL: your pool gave no connection: {one_line(str(error))}. Nothing ran. Is it open and large enough, "
        "and is the server up?"
    )
