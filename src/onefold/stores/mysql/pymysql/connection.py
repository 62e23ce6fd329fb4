"""PyMySQL: our adapters around its connections, our own or a caller's."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from pymysql.connections import Connection
from pymysql.constants import CLIENT
from pymysql.converters import conversions
from pymysql.cursors import Cursor
from pymysql.err import MySQLError, OperationalError

from onefold._concurrency.generators import run
from onefold.stores.mysql import connection as mysql
from onefold.stores.mysql.errors import meaning, not_connected
from onefold.stores.mysql.transaction_state import IN_TRANSACTION, is_torn
from onefold.stores.mysql.urls import READ_TIMEOUT, Settings, unverified
from onefold.stores.sql.connection import ErrorInfo, TransactionStatus
from onefold.stores.sql.dialect import Reply

T = TypeVar("T")

_DECODERS: Final[Any] = {kind: decode for kind, decode in conversions.items() if isinstance(kind, int)}


def classify(error: BaseException) -> ErrorInfo | None:
    return meaning(error) if isinstance(error, MySQLError) else None


class Watched(mysql.Watched, Connection):
    """A connection of our own that monitors its transaction."""

    _closed: bool
    server_status: int
    ctx: ssl.SSLContext
    _read_timeout: float | None
    _driver_error = MySQLError

    def _seen(self, request: Callable[..., T], *values: Any) -> T:
        with self._noted():
            return request(*values)

    def _break_off(self) -> None:
        break_off(self)


def in_transaction(connection: Any) -> bool:
    return bool(connection.server_status & IN_TRANSACTION)


def break_off(connection: Connection[Any]) -> None:
    """Close a connection after an interrupt between request and reply: the next request would read that reply."""
    with suppress(Exception):
        connection.close()


class PymysqlConnection(mysql.Adapter):
    """A `Connection` around a connection whose transactions belong to its owner."""

    _run = staticmethod(run)
    _driver_error = MySQLError
    _operational_error = OperationalError

    def _execute(self, text: str, *, rows: bool = False) -> Reply:
        with self._cursor() as cursor:
            cursor.execute(text)
            found = cursor.fetchall() if rows else ()
            if rows and cursor.description[-1][0] == "@@in_transaction":
                # PyMySQL does not read the flags of a reply with rows.
                opened = IN_TRANSACTION if int(found[0][-1]) else 0
                self.connection.server_status = self.connection.server_status & ~IN_TRANSACTION | opened
            return Reply(cursor.rowcount, found)

    def _execute_all(self, text: str) -> list[Reply]:
        replies = []
        with self._cursor() as cursor:
            cursor.execute(text)
            while cursor.nextset():
                replies.append(Reply(cursor.rowcount))
        return replies

    @contextmanager
    def _cursor(self) -> Iterator[Cursor]:
        """Open a plain cursor with plain values, whatever converters the connection's owner has set."""
        connection = self.connection
        wanted = connection.decoders, connection.use_unicode
        connection.decoders, connection.use_unicode = _DECODERS, True
        try:
            with connection.cursor(Cursor) as cursor:
                yield cursor
        except MySQLError:
            raise
        except BaseException:
            break_off(connection)
            raise
        finally:
            connection.decoders, connection.use_unicode = wanted

    def transaction_status(self) -> TransactionStatus:
        lost = self._lost()
        if lost is not None:
            return lost
        if self.is_torn:
            return TransactionStatus.ABORTED
        return TransactionStatus.OPEN if in_transaction(self.connection) else TransactionStatus.IDLE

    def _lost(self) -> TransactionStatus | None:
        if self.connection.open:
            return None
        return TransactionStatus.CLOSED if self.connection._closed else TransactionStatus.BROKEN

    @property
    def is_torn(self) -> bool:
        return bool(self.connection.open) and is_torn(self.connection)

    def close(self) -> None:
        self.connection.close()

    def abandon(self) -> None:
        break_off(self.connection)


class OwnConnection(mysql.OwnAdapter, PymysqlConnection):
    """A `Connection` around a connection of our own."""

    connection: Watched


class TransactionConnection(mysql.TransactionAdapter, OwnConnection):
    """A `Connection` for transactions of our own."""


def for_operations(settings: Settings) -> OwnConnection:
    # Several statements in one message; safe because nobody else writes any.
    return OwnConnection(
        _connected(settings, autocommit=True, client_flag=CLIENT.MULTI_STATEMENTS, timeout=settings.read_timeout)
    )


def for_transactions(settings: Settings) -> TransactionConnection:
    return TransactionConnection(
        _connected(settings, autocommit=False, init_command=settings.isolation_statement), settings.database
    )


def beside(connection: Any, database: str) -> OwnConnection:
    """Open another connection to the same server, for work that must stay out of a caller's transaction."""
    tls: dict[str, Any] = {"ssl": connection.ctx} if connection._secure and connection.ssl else {"ssl_disabled": True}
    return OwnConnection(
        Watched(
            host=connection.host,
            port=connection.port,
            unix_socket=connection.unix_socket,
            bind_address=connection.bind_address,
            user=connection.user,
            password=connection.password,
            database=database,
            charset="utf8mb4",
            program_name="onefold",
            connect_timeout=connection.connect_timeout,
            read_timeout=READ_TIMEOUT,
            autocommit=True,
            server_public_key=connection.server_public_key,
            **tls,
        )
    )


def _connected(settings: Settings, *, timeout: float | None = None, **options: Any) -> Watched:
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
        # Bounds the greeting, too, which connect_timeout does not.
        read_timeout=settings.connect_timeout,
        ssl=settings.tls,
        ssl_disabled=settings.tls is None,
        defer_connect=True,
        **options,
    )
    if settings.tls_mode == "preferred":
        # As PyMySQL itself does, but with a context that is created once: loading certificates takes long.
        connection.ssl, connection.ctx = True, unverified()
    try:
        connection.connect()
    except OperationalError as error:
        raise OperationalError(*not_connected(error, getattr(error, "original_exception", None))) from error
    connection._read_timeout = timeout
    return connection
