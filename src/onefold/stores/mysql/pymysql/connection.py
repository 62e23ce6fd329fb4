"""PyMySQL: a link on one connection, of our own or of a caller's.

What is our own is of two kinds. Operations of the store are committed at once, on connections that nobody else ever
sees. Transactions have autocommit off, so that BEGIN needs no message, and their connections are handed to handlers.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from pymysql.connections import Connection
from pymysql.constants import CLIENT, ER
from pymysql.converters import conversions
from pymysql.cursors import Cursor
from pymysql.err import MySQLError, OperationalError

from onefold.stores.mysql.errors import NO_SAVEPOINT, meaning, not_connected, number_of
from onefold.stores.mysql.literals import PACKET_SURE, filled, in_one, quoted
from onefold.stores.mysql.transaction_state import IN_TRANSACTION, Watch, is_torn
from onefold.stores.mysql.urls import READ_TIMEOUT, Place, unverified
from onefold.stores.sql.connection import Standing, Trouble
from onefold.stores.sql.dialect import Ask, Reply

_DECODERS: Final[Any] = {kind: decode for kind, decode in conversions.items() if isinstance(kind, int)}


def trouble(error: BaseException) -> Trouble | None:
    return meaning(error) if isinstance(error, MySQLError) else None


class Watched(Connection):
    """A connection of our own, which remembers an error that has undone its transaction, and refuses to go on."""

    _closed: bool
    server_status: int
    ctx: ssl.SSLContext
    _read_timeout: float | None

    def __init__(self, **options: Any) -> None:
        self.watch = Watch()
        super().__init__(**options)

    def query(self, sql: str | bytes, unbuffered: bool = False) -> int:  # noqa: FBT001, FBT002 - it is PyMySQL's
        self.watch.check()
        with self._seen():
            return super().query(sql, unbuffered)

    def begin(self) -> None:
        self.watch.check()
        with self._seen():
            super().begin()

    def commit(self) -> None:
        self.watch.check()
        with self._seen():
            super().commit()

    def rollback(self) -> None:
        with self._seen():
            super().rollback()

    @contextmanager
    def _seen(self) -> Iterator[None]:
        try:
            yield
        except MySQLError as error:
            self.watch.failed(error)
            raise
        except BaseException:
            break_off(self)
            raise


def in_transaction(connection: Any) -> bool:
    return bool(connection.server_status & IN_TRANSACTION)


def break_off(connection: Connection[Any]) -> None:
    """After an interrupt between a question and its answer, the next one who asks would get that answer."""
    with suppress(Exception):
        connection.close()


class PymysqlLink:
    """A `Link` on a connection whose transactions are its owner's."""

    connection: Any

    def __init__(self, connection: Connection[Any]) -> None:
        self.connection = connection
        self._packet_max = PACKET_SURE
        # In front of our tables; empty: they are where the session is.
        self._where = ""

    def send(self, ask: Ask) -> Reply:
        text = filled(ask, self._where)
        self._check_size(text)
        with self._cursor() as cursor:
            cursor.execute(text)
            rows = cursor.fetchall() if ask.rows else ()
            if ask.rows and cursor.description[-1][0] == "@@in_transaction":
                # PyMySQL takes no flags from an answer with rows.
                opened = IN_TRANSACTION if int(rows[0][-1]) else 0
                self.connection.server_status = self.connection.server_status & ~IN_TRANSACTION | opened
            return Reply(cursor.rowcount, rows)

    def send_all(self, asks: list[Ask]) -> list[Reply]:
        return [self.send(ask) for ask in asks]

    def run(self, statement: str) -> None:
        with self._cursor() as cursor:
            cursor.execute(statement)

    def begin(self) -> None:
        self.connection.begin()

    def commit(self) -> None:
        self.connection.commit()

    def rollback(self) -> None:
        self.connection.rollback()

    def standing(self) -> Standing:
        if not self.connection.open:
            return Standing.CLOSED if self.connection._closed else Standing.BROKEN
        if self.is_torn:
            return Standing.ABORTED
        return Standing.OPEN if in_transaction(self.connection) else Standing.IDLE

    @property
    def is_torn(self) -> bool:
        return bool(self.connection.open) and is_torn(self.connection)

    def close(self) -> None:
        self.connection.close()

    def spoil(self) -> None:
        # MySQL has no transaction that refuses to be committed.
        if self.standing() is not Standing.IDLE:
            break_off(self.connection)

    @contextmanager
    def _cursor(self) -> Iterator[Cursor]:
        """A plain cursor with plain values, whatever the connection's owner wants for itself."""
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

    def _check_size(self, text: str) -> None:
        """Sent all the same, it would be answered by a lost connection."""
        if len(text) < self._packet_max:
            return
        with self._cursor() as cursor:
            cursor.execute("SELECT @@max_allowed_packet")
            self._packet_max = int(cursor.fetchall()[0][0])
        if len(text) >= self._packet_max:
            raise OperationalError(ER.NET_PACKET_TOO_LARGE, f"{len(text)} bytes, and {self._packet_max} are allowed")


class OwnLink(PymysqlLink):
    """A `Link` on a connection of our own; where it stands we know best."""

    connection: Watched

    def __init__(self, connection: Watched) -> None:
        super().__init__(connection)
        self._begun = False

    def begin(self) -> None:
        self.connection.begin()
        self._begun = True

    def commit(self) -> None:
        self.connection.commit()
        self._begun = False

    def rollback(self) -> None:
        self.connection.rollback()
        self._begun = False

    def standing(self) -> Standing:
        if self.connection.watch.broken:
            return Standing.BROKEN
        if not self.connection.open:
            return Standing.CLOSED if self.connection._closed else Standing.BROKEN
        return Standing.OPEN if self._begun else Standing.IDLE

    def send_all(self, asks: list[Ask]) -> list[Reply]:
        """In one message, and in one transaction."""
        if len(asks) == 1:
            return [self.send(asks[0])]
        text = "; ".join(("BEGIN", *map(filled, asks), "COMMIT"))
        if len(text) >= self._packet_max:
            return super().send_all(asks)
        replies = []
        try:
            with self._cursor() as cursor:
                cursor.execute(text)
                while cursor.nextset():
                    replies.append(Reply(cursor.rowcount))
        except MySQLError:
            if self.standing() is Standing.IDLE:
                self.connection.rollback()
            raise
        return replies[: len(asks)]


class TransactionLink(OwnLink):
    """For transactions: the first statement begins one. Handlers may go to other databases."""

    def __init__(self, connection: Watched, database: str) -> None:
        super().__init__(connection)
        self._where = f"{quoted(database)}."

    def begin(self) -> None:
        self.connection.watch.begin()
        self._begun = True

    def commit_if(self, check: str) -> None:
        """Commit unless the check fails: both in one message."""
        try:
            self.run(in_one(check, "COMMIT"))
        except MySQLError as error:
            if number_of(error) == NO_SAVEPOINT:
                # Nobody knows in which state the handler has left it.
                self.connection.watch.broken = True
            raise
        self._begun = False

    def send_all(self, asks: list[Ask]) -> list[Reply]:
        return [self.send(ask) for ask in asks]


def for_operations(place: Place) -> OwnLink:
    # Several statements in one message; safe where nobody else writes any.
    return OwnLink(_connected(place, autocommit=True, client_flag=CLIENT.MULTI_STATEMENTS, timeout=place.read_timeout))


def for_transactions(place: Place) -> TransactionLink:
    return TransactionLink(_connected(place, autocommit=False, init_command=place.isolation_statement), place.database)


def beside(connection: Any, database: str) -> OwnLink:
    """On another connection to where this one is: for what must not be done in a caller's transaction."""
    tls: dict[str, Any] = {"ssl": connection.ctx} if connection._secure and connection.ssl else {"ssl_disabled": True}
    return OwnLink(
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


def _connected(place: Place, *, timeout: float | None = None, **options: Any) -> Watched:
    connection = Watched(
        host=place.host,
        port=place.port,
        unix_socket=place.unix_socket,
        user=place.user,
        password=place.password.encode(),
        database=place.database,
        charset="utf8mb4",
        program_name="onefold",
        connect_timeout=place.connect_timeout,
        # It bounds the greeting, too, which connect_timeout does not.
        read_timeout=place.connect_timeout,
        ssl=place.tls,
        ssl_disabled=place.tls is None,
        defer_connect=True,
        **options,
    )
    if place.tls_mode == "preferred":
        # As PyMySQL does it by itself, but for a context that is made once: reading certificates takes long.
        connection.ssl, connection.ctx = True, unverified()
    try:
        connection.connect()
    except OperationalError as error:
        raise OperationalError(*not_connected(error, getattr(error, "original_exception", None))) from error
    connection._read_timeout = timeout
    return connection
