"""asyncmy: the adapters of PyMySQL, async. Connections belong to the event loop in which they were opened."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from asyncmy import errors
from asyncmy.connection import Connection
from asyncmy.constants import CLIENT
from asyncmy.converters import conversions
from asyncmy.cursors import Cursor
from asyncmy.errors import MySQLError, OperationalError

from onefold._concurrency.generators import run_async
from onefold._concurrency.interrupts import heard
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


# Its types know half of it.
_Connection: Any = Connection


class Watched(mysql.Watched, _Connection):  # type: ignore[misc]
    """A connection of our own."""

    server_status: int
    _preferred: ssl.SSLContext | None = None

    def prefer_tls(self, context: ssl.SSLContext) -> None:
        """Use it if the server offers it; by itself asyncmy does not look."""
        self._preferred = context

    async def _get_server_information(self) -> None:
        await super()._get_server_information()
        if self._preferred is not None and self.server_capabilities & CLIENT.SSL:
            self._ssl_context = self._preferred
            self._client_flag |= CLIENT.SSL

    async def _seen(self, request: Callable[..., Awaitable[T]], *values: Any) -> T:
        try:
            # Where there is a time-out for reading, asyncmy waits by `asyncio.wait_for`, which may swallow.
            return await heard(request(*values))
        except MySQLError as error:
            self.monitor.failed(error)
            raise
        except BaseException:
            # Cancelled between a question and its answer: the next one who asks would get that answer.
            break_off(self)
            raise


def break_off(connection: Any) -> None:
    """Close a connection at once; asyncmy's own `close` lets it still pass as connected."""
    if isinstance(connection, Watched):
        connection.monitor.broken = True
    connection._close_on_cancel()


def in_transaction(connection: Any) -> bool:
    """Whether one is open, by the server's last answer."""
    last = getattr(connection, "_result", None)
    if last is not None and last.rows is None and not last.unbuffered_active and not last.server_status:
        # asyncmy overlooks flags that are all off: autocommit off, and nothing open.
        return False
    return bool(connection.server_status & IN_TRANSACTION)


def is_closed(connection: Any) -> bool:
    """Whether it was closed by hand: what is lost, or cut off by a cancellation, has a reason, or keeps its stream."""
    return connection._transport is None and connection._close_reason is None


class AsyncmyConnection(mysql.Adapter):
    """An `AsyncConnection` on a connection whose transactions are its owner's."""

    spoils_gently = False
    _run = staticmethod(run_async)
    _errors = errors

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
        """A plain cursor with plain values, whatever the connection's owner wants for itself."""
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
    """An `AsyncConnection` on a connection of our own."""

    connection: Watched


class TransactionConnection(mysql.TransactionAdapter, OwnConnection):
    """An `AsyncConnection` for transactions of our own."""


async def for_operations(settings: Settings) -> OwnConnection:
    return OwnConnection(await _connected(settings, autocommit=True, read_timeout=settings.read_timeout))


async def for_transactions(settings: Settings) -> TransactionConnection:
    return TransactionConnection(
        await _connected(settings, autocommit=False, init_command=settings.isolation_statement), settings.database
    )


async def beside(connection: Any, database: str) -> OwnConnection:
    """On another connection to where this one is: for what must not be done in a caller's transaction."""
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
    return OwnConnection(other)


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
        # It bounds the greeting, too, which asyncmy's own connect_timeout does not.
        async with asyncio.timeout(settings.connect_timeout):
            await connection.connect()
    except TimeoutError as error:
        raise OperationalError(*not_connected(error)) from error
    except OperationalError as error:
        raise OperationalError(*not_connected(error, error.__cause__)) from error
    return connection
