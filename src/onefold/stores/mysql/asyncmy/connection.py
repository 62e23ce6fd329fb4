"""asyncmy: the adapters of PyMySQL, async. Connections belong to the event loop in which they were opened."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from asyncmy.connection import Connection
from asyncmy.constants import CLIENT
from asyncmy.converters import conversions
from asyncmy.cursors import Cursor
from asyncmy.errors import MySQLError, OperationalError

from onefold._concurrency.generators import run_async
from onefold._concurrency.interrupts import heard, replied
from onefold.stores.mysql import connection as mysql
from onefold.stores.mysql.errors import meaning, not_connected
from onefold.stores.mysql.transaction_state import IN_TRANSACTION
from onefold.stores.mysql.urls import READ_TIMEOUT, Settings, unverified
from onefold.stores.sql.connection import ErrorInfo, TransactionStatus
from onefold.stores.sql.dialect import Reply

T = TypeVar("T")

_DECODERS: Final[Any] = {kind: decode for kind, decode in conversions.items() if isinstance(kind, int)}


def classify(error: BaseException) -> ErrorInfo | None:
    return meaning(error) if isinstance(error, MySQLError) else None


# Its type hints are incomplete.
_Connection: Any = Connection


class Watched(mysql.Watched, _Connection):  # type: ignore[misc]
    """A connection of our own that monitors its transaction."""

    server_status: int
    _driver_error = MySQLError
    _preferred: ssl.SSLContext | None = None

    def prefer_tls(self, context: ssl.SSLContext) -> None:
        """Use TLS if the server offers it; asyncmy itself does not check."""
        self._preferred = context

    async def _get_server_information(self) -> None:
        await super()._get_server_information()
        if self._preferred is not None and self.server_capabilities & CLIENT.SSL:
            self._ssl_context = self._preferred
            self._client_flag |= CLIENT.SSL

    async def _seen(self, request: Callable[..., Awaitable[T]], *values: Any) -> T:
        with self._noted():
            # With a read timeout, asyncmy uses `asyncio.wait_for`, which may swallow a cancellation.
            return await heard(request(*values))

    def _break_off(self) -> None:
        break_off(self)


def break_off(connection: Any) -> None:
    """Close a connection at once; after asyncmy's own `close` it would still count as connected."""
    if isinstance(connection, Watched):
        connection.monitor.broken = True
    connection._close_on_cancel()


def in_transaction(connection: Any) -> bool:
    """Return whether a transaction is open, by the server's last reply."""
    last = getattr(connection, "_result", None)
    if last is not None and last.rows is None and not last.unbuffered_active and not last.server_status:
        # asyncmy ignores flags that are all off: autocommit off, and no transaction open.
        return False
    return bool(connection.server_status & IN_TRANSACTION)


def is_closed(connection: Any) -> bool:
    """Return whether it was closed by hand: a lost or cancelled connection has a reason, or keeps its stream."""
    return connection._transport is None and connection._close_reason is None


class AsyncmyConnection(mysql.Adapter):
    """An `AsyncConnection` around a connection whose transactions belong to its owner."""

    spoils_gently = False
    _run = staticmethod(run_async)
    _driver_error = MySQLError
    _operational_error = OperationalError

    async def _execute(self, text: str, *, rows: bool = False) -> Reply:
        async with self._cursor() as cursor:
            await cursor.execute(text)
            return Reply(cursor.rowcount, await cursor.fetchall() if rows else ())

    async def _execute_all(self, text: str) -> list[Reply]:
        replies = []
        async with self._cursor() as cursor:
            await cursor.execute(text)
            while await cursor.nextset():
                replies.append(Reply(cursor.rowcount))
        return replies

    @asynccontextmanager
    async def _cursor(self) -> AsyncIterator[Any]:
        """Open a plain cursor with plain values, whatever converters the connection's owner has set."""
        connection = self.connection
        wanted = connection._decoders, connection._use_unicode
        connection._decoders, connection._use_unicode = _DECODERS, True
        try:
            async with Cursor(connection) as cursor:
                yield cursor
        finally:
            connection._decoders, connection._use_unicode = wanted

    def transaction_status(self) -> TransactionStatus:
        return self._lost() or (TransactionStatus.OPEN if in_transaction(self.connection) else TransactionStatus.IDLE)

    def _lost(self) -> TransactionStatus | None:
        if is_closed(self.connection):
            return TransactionStatus.CLOSED
        return None if self.connection.connected else TransactionStatus.BROKEN

    async def close(self) -> None:
        await self.connection.ensure_closed()

    def abandon(self) -> None:
        break_off(self.connection)


class OwnConnection(mysql.OwnAdapter, AsyncmyConnection):
    """An `AsyncConnection` around a connection of our own."""

    connection: Watched


class OperationsConnection(OwnConnection):
    """An `AsyncConnection` for operations of the store, each of which a cancelled task completes.

    asyncmy can only close a connection whose reply is outstanding; the server would execute the statement all the same.
    """

    async def _execute(self, text: str, *, rows: bool = False) -> Reply:
        return await replied(super()._execute(text, rows=rows), self.abandon)

    async def _execute_all(self, text: str) -> list[Reply]:
        return await replied(super()._execute_all(text), self.abandon)


class TransactionConnection(mysql.TransactionAdapter, OwnConnection):
    """An `AsyncConnection` for transactions of our own."""


async def for_operations(settings: Settings) -> OperationsConnection:
    return OperationsConnection(await _connected(settings, autocommit=True, read_timeout=settings.read_timeout))


async def for_transactions(settings: Settings) -> TransactionConnection:
    return TransactionConnection(
        await _connected(settings, autocommit=False, init_command=settings.isolation_statement), settings.database
    )


async def beside(connection: Any, database: str) -> OperationsConnection:
    """Open another connection to the same server, for work that must stay out of a caller's transaction."""
    other = Watched(
        host=connection._host,
        port=connection._port,
        unix_socket=connection._unix_socket,
        user=connection._user,
        password=connection._password,
        password_creator=connection._password_creator,
        database=database,
        charset="utf8mb4",
        program_name="onefold",
        connect_timeout=connection._connect_timeout,
        read_timeout=READ_TIMEOUT,
        autocommit=True,
        ssl=connection._ssl_context,
        server_public_key=connection._server_public_key,
    )
    await other.connect()
    return OperationsConnection(other)


async def _connected(settings: Settings, **options: Any) -> Watched:
    connection = Watched(
        host=settings.host,
        port=settings.port,
        unix_socket=settings.unix_socket,
        user=settings.user,
        password=settings.password.encode(),
        database=settings.database,
        charset="utf8mb4",
        program_name="onefold",
        connect_timeout=settings.connect_timeout,
        ssl=settings.tls,
        **options,
    )
    if settings.tls_mode == "preferred" and settings.unix_socket is None:
        connection.prefer_tls(unverified())
    try:
        # Bounds the greeting, too, which asyncmy's own connect_timeout does not.
        async with asyncio.timeout(settings.connect_timeout):
            await connection.connect()
    except TimeoutError as error:
        raise OperationalError(*not_connected(error)) from error
    except OperationalError as error:
        raise OperationalError(*not_connected(error, error.__cause__)) from error
    return connection
