"""psycopg's connections, sync and async: opened for a pool of ours, or borrowed from a pool of the caller's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from inspect import isawaitable
from typing import Any, Final

import psycopg
from psycopg import IsolationLevel
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from onefold._concurrency.generators import Flow, run, run_async
from onefold._concurrency.interrupts import brought_to_its_end
from onefold.errors import StoreUnavailable
from onefold.stores.postgres.errors import one_line
from onefold.stores.postgres.marks import marks_of
from onefold.stores.postgres.psycopg.connection import (
    AsyncPsycopgConnection,
    PsycopgConnection,
    Shared,
    classify,
    opened,
)
from onefold.stores.postgres.session import QUESTION, Session
from onefold.stores.postgres.urls import APPLICATION, CONNECT_SECONDS, Settings, check_options, unreadable
from onefold.stores.sql.connection import TransactionStatus
from onefold.stores.sql.pool import AsyncReserve, Reserve

__all__ = ["AsyncOpener", "CallersAsyncPool", "CallersPool", "Opener", "classify"]

# A statement is prepared after this many uses; psycopg's own default.
PREPARE_AFTER: Final = 5

# The name of a caller's pool in messages.
POOLED: Final = "PostgreSQL, by the settings of your pool"


class _Own(Shared):
    """A connection of ours. Handlers may have changed its search path, row factory and cursor class."""

    _cursor_factory: Any

    def __init__(self, connection: Any, session: Session) -> None:
        super().__init__(connection)
        self._where = session.where
        self.marks = marks_of(connection)
        self.marks.is_direct = session.is_direct

    def _begin(self) -> None:
        self.connection.row_factory, self.connection.cursor_factory = tuple_row, self._cursor_factory
        super()._begin()


class OwnConnection(_Own, PsycopgConnection):
    """A blocking connection of ours."""

    _cursor_factory = psycopg.Cursor


class AsyncOwnConnection(_Own, AsyncPsycopgConnection):
    """The async counterpart."""

    _cursor_factory = psycopg.AsyncCursor


def _connected_at_once(connect: Callable[[], Any]) -> Any:
    return connect()


class Opener:
    """Opens blocking connections."""

    _run: Callable[[Flow[Any]], Any] = staticmethod(run)
    _connect: Callable[[Callable[[], Any]], Any] = staticmethod(_connected_at_once)
    _connection: Any = psycopg.Connection
    _adapter: Callable[..., Any] = OwnConnection

    def __init__(self, settings: Settings) -> None:
        self._name = settings.name
        self._parameters = _parameters(settings)
        self._level = settings.isolation and IsolationLevel[settings.isolation.upper().replace(" ", "_")]
        self._session = Session(settings)

    def __call__(self) -> Any:
        return self._run(self._open())

    def _open(self) -> Flow[Any]:
        connect = partial(self._connection.connect, autocommit=True, **self._parameters)
        connection = yield from _connected(partial(self._connect, connect), self._name)
        with _finished_unless_opened(connection):
            yield partial(connection.set_isolation_level, self._level or None)
            session = self._session
            if not session.is_known:
                cursor = yield partial(connection.execute, QUESTION.encode(), prepare=False)
                session.learn((yield cursor.fetchone), connection.info.backend_pid)
            connection.prepare_threshold = PREPARE_AFTER if session.prepare else None
            return self._adapter(connection, session)


class AsyncOpener(Opener):
    """The async counterpart."""

    _run = staticmethod(run_async)
    _connect = staticmethod(opened)
    _connection = psycopg.AsyncConnection
    _adapter = AsyncOwnConnection


def _connected(connect: Callable[[], Any], name: str) -> Flow[Any]:
    try:
        return (yield connect)
    except psycopg.OperationalError as error:
        raise unreachable(name, error) from error


@contextmanager
def _finished_unless_opened(connection: Any) -> Iterator[None]:
    """Finish a connection on which anything fails or is interrupted before it is handed over."""
    try:
        yield
    except BaseException:
        # At once: an interrupt closes the generator, which must not yield any more.
        connection.pgconn.finish()
        raise


def _parameters(settings: Settings) -> dict[str, Any]:
    """Return the parameters for libpq."""
    check_options(settings, [option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()])
    try:
        found: dict[str, Any] = conninfo_to_dict(settings.url)
    except psycopg.ProgrammingError:
        # Without its cause, which quotes the URL.
        raise unreadable() from None
    usual = {"connect_timeout": CONNECT_SECONDS, "fallback_application_name": APPLICATION, "client_encoding": "utf8"}
    return usual | found


class _CallersRules:
    """A pool of the caller's: its connections are in autocommit mode while borrowed, and restored afterwards."""

    _run: Callable[[Flow[Any]], Any]
    _connect: Callable[[Callable[[], Any]], Any]
    # Returns the value of a setting, which may be a function.
    _setting: Callable[[Any], Any]
    _adapter: Callable[[Any], Any]

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def _restore(self, conn: Any, *, autocommit: bool) -> Flow[None]:
        if conn.transaction_status() is TransactionStatus.IDLE:
            yield partial(conn.connection.set_autocommit, autocommit)
        else:
            # The pool replaces closed connections.
            conn.abandon()

    def drop_idle(self) -> Any:
        """Make the pool check its connections: others were probably lost with this one."""
        return self._run(self._drop_idle())

    def _drop_idle(self) -> Flow[None]:
        if not self._pool.closed:
            yield self._pool.check

    def _opened(self) -> Any:
        return self._run(self._open())

    def _open(self) -> Flow[Any]:
        """Open a connection outside the pool, with the pool's settings."""
        pool = self._pool
        conninfo, kwargs = (yield partial(self._setting, pool.conninfo)), (yield partial(self._setting, pool.kwargs))
        connect = partial(pool.connection_class.connect, conninfo or "", **(kwargs or {}))
        connection = yield from _connected(partial(self._connect, connect), POOLED)
        with _finished_unless_opened(connection):
            if pool._configure is not None:
                # The hook may determine where the tables are: SET ROLE, SET search_path.
                yield partial(pool._configure, connection)
            yield partial(connection.set_autocommit, True)
            return self._adapter(connection)


@contextmanager
def _lending() -> Iterator[None]:
    try:
        yield
    except psycopg.OperationalError as error:
        raise gave_none(error) from error


def _now(setting: Any) -> Any:
    """Return a pool's setting, calling it if it is a function (for rotating passwords)."""
    return setting() if callable(setting) else setting


async def _now_async(setting: Any) -> Any:
    found = _now(setting)
    return await found if isawaitable(found) else found


class CallersPool(_CallersRules):
    """A blocking pool of the caller's."""

    _run = staticmethod(run)
    _connect = staticmethod(_connected_at_once)
    _setting = staticmethod(_now)
    _adapter = PsycopgConnection

    @contextmanager
    def acquire(self) -> Iterator[PsycopgConnection]:
        """Lend a connection. Wherever an interrupt strikes, the pool gets it back: nobody else would return it."""
        taken: list[Any] = []
        conn: PsycopgConnection | None = None
        try:
            with _lending():
                # In one expression: between the pool's answer and the list, no interrupt is noticed.
                taken.append(self._pool.getconn())
            autocommit = taken[0].autocommit
            conn = self._adapter(taken[0])
            conn.connection.set_autocommit(True)
            yield conn
        finally:
            try:
                if conn is not None:
                    run(self._restore(conn, autocommit=autocommit))
            except BaseException:
                # In an unknown mode; the pool replaces it.
                taken[0].pgconn.finish()
                raise
            finally:
                for connection in taken:
                    self._pool.putconn(connection)

    def reserve(self) -> Reserve:
        """Return a connection outside the pool, opened with the pool's settings."""
        return Reserve(self._opened)


class CallersAsyncPool(_CallersRules):
    """The async counterpart."""

    _run = staticmethod(run_async)
    _connect = staticmethod(opened)
    _setting = staticmethod(_now_async)
    _adapter = AsyncPsycopgConnection

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[AsyncPsycopgConnection]:
        with _lending():
            conn = self._adapter(await self._pool.getconn())
        autocommit = conn.connection.autocommit
        try:
            await conn.connection.set_autocommit(True)
            yield conn
        finally:
            await brought_to_its_end(self._give_back(conn, autocommit=autocommit), conn.abandon)

    async def _give_back(self, conn: AsyncPsycopgConnection, *, autocommit: bool) -> None:
        await run_async(self._restore(conn, autocommit=autocommit))
        await self._pool.putconn(conn.connection)

    def reserve(self) -> AsyncReserve:
        """Return a connection outside the pool, opened with the pool's settings."""
        return AsyncReserve(self._opened)


def unreachable(name: str, error: psycopg.OperationalError) -> StoreUnavailable:
    """Return the error for a failed connection. libpq gives no code, but its message holds no password."""
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
