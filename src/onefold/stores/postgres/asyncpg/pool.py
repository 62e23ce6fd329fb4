"""asyncpg's connections: opened for a pool of ours, or borrowed from a pool of the caller's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import asyncpg

from onefold.errors import StoreUnavailable
from onefold.stores.postgres.asyncpg.connection import CLOSE_SECONDS, AsyncpgConnection, Own, classify
from onefold.stores.postgres.errors import meaning, one_line
from onefold.stores.postgres.session import QUESTION, Session
from onefold.stores.postgres.urls import (
    APPLICATION,
    ASYNCPG_OPTIONS,
    CONNECT_SECONDS,
    Settings,
    check_options,
    one_by_one,
    unreadable,
)
from onefold.stores.sql.connection import TransactionStatus
from onefold.stores.sql.pool import PATIENCE, AsyncReserve

__all__ = ["AsyncOpener", "CallersPool", "classify"]

# How many prepared statements a connection caches; asyncpg's own default.
PREPARED_MAX: Final = 100

# Why there is no connection. The last one: the server is not of the kind that target_session_attrs asks for.
NOT_CONNECTED: Final = (
    *(OSError, asyncpg.PostgresError, asyncpg.InterfaceError),
    asyncpg.TargetServerAttributeNotMatched,
)


class AsyncOpener:
    """Opens connections."""

    def __init__(self, settings: Settings) -> None:
        check_options(settings, ASYNCPG_OPTIONS)
        self._settings = settings
        self._isolation = settings.isolation and settings.isolation.replace(" ", "_")
        self._session = Session(settings)

    async def __call__(self) -> AsyncpgConnection:
        session = self._session
        # Connect without a cache until the session is known: behind a pooler there must be none.
        prepares = bool(session.prepare)
        connection = await self._connected(prepare=prepares)
        if not session.is_known:
            try:
                session.learn(await connection.fetchrow(QUESTION), connection.get_server_pid())
            except BaseException:
                connection.terminate()
                raise
        if session.prepare and not prepares:
            await connection.close(timeout=CLOSE_SECONDS)
            connection = await self._connected(prepare=True)
        return AsyncpgConnection(connection, self._isolation, session.where)

    async def _connected(self, *, prepare: bool) -> Any:
        """Connect to the first server that answers and is of the wanted kind.

        asyncpg's own time limit is for all of them together: one that is frozen would hide the next.
        """
        *first, last = one_by_one(self._settings.url)
        for url in first:
            with suppress(StoreUnavailable):
                return await self._connected_to(url, prepare=prepare)
        return await self._connected_to(last, prepare=prepare)

    async def _connected_to(self, url: str, *, prepare: bool) -> Any:
        try:
            return await asyncpg.connect(
                url,
                timeout=CONNECT_SECONDS,
                connection_class=Own,
                statement_cache_size=PREPARED_MAX if prepare else 0,
                server_settings={"application_name": self._settings.options.get("application_name", APPLICATION)},
            )
        except (asyncpg.ClientConfigurationError, ValueError):
            # Without its cause, which quotes the URL.
            raise unreadable() from None
        except NOT_CONNECTED as error:
            raise unreachable(self._settings.name, error) from error


class CallersPool:
    """A pool of the caller's. It resets each returned connection itself, at the cost of one more message."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[AsyncpgConnection]:
        conn = AsyncpgConnection(await self._taken())
        try:
            yield conn
        finally:
            conn.forget_transaction()
            if conn.transaction_status() is not TransactionStatus.IDLE:
                # The pool replaces closed connections.
                conn.abandon()
            # Shielded by the pool itself. A connection that is lost only now has done its work, and the pool ends it.
            with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await self._pool.release(conn.connection)

    async def _taken(self) -> Any:
        try:
            return await self._pool.acquire(timeout=PATIENCE)
        except TimeoutError as error:
            raise StoreUnavailable.unreached(
                f"PostgreSQL: your pool gave no connection within {PATIENCE:g} s. Nothing ran. Is it large enough?"
            ) from error
        except NOT_CONNECTED as error:
            raise unreachable("PostgreSQL, through your pool", error) from error

    async def drop_idle(self) -> None:
        """Make the pool open new connections: others were probably lost with this one."""
        await self._pool.expire_connections()

    def reserve(self) -> AsyncReserve:
        """Return a connection outside the pool, opened with the pool's settings."""
        return AsyncReserve(self._opened)

    async def _opened(self) -> AsyncpgConnection:
        pool = self._pool
        try:
            connection = await pool._get_new_connection()
        except NOT_CONNECTED as error:
            raise unreachable("PostgreSQL, by the settings of your pool", error) from error
        if pool._setup is not None:
            # The setup may determine where the tables are: SET ROLE, SET search_path.
            try:
                await pool._setup(connection)
            except BaseException:
                connection.terminate()
                raise
        return AsyncpgConnection(connection)


def unreachable(name: str, error: Exception) -> StoreUnavailable:
    """Return the error for a connection that could not be opened."""
    if isinstance(error, asyncpg.PostgresError):
        message = meaning(error.sqlstate, str(error)).message
    elif isinstance(error, TimeoutError):
        message = f"no answer within {CONNECT_SECONDS:g} s"
    elif isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        message = "no server is of the kind that target_session_attrs asks for; perhaps a fail-over is under way"
    else:
        message = one_line(str(error))
    return StoreUnavailable.unreached(
        f"{name}: {message}. Nothing ran. Is the server up, and are host, port, user, password and database in the URL "
        "right?"
    )
