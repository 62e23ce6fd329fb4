"""asyncmy: the links of PyMySQL, awaited. Connections belong to the event loop in which they were opened."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from asyncmy.connection import Connection
from asyncmy.constants import CLIENT, ER
from asyncmy.converters import conversions
from asyncmy.cursors import Cursor
from asyncmy.errors import MySQLError, OperationalError

from onefold._interrupts import heard
from onefold.stores.mysql.errors import NO_SAVEPOINT, meaning, not_connected, number_of
from onefold.stores.mysql.literals import PACKET_SURE, filled, in_one, quoted
from onefold.stores.mysql.transaction_state import IN_TRANSACTION, Watch
from onefold.stores.mysql.urls import READ_TIMEOUT, Place, unverified
from onefold.stores.sql.connection import Standing, Trouble
from onefold.stores.sql.dialect import Ask, Reply

T = TypeVar("T")

_DECODERS: Final[Any] = {kind: decode for kind, decode in conversions.items() if isinstance(kind, int)}


def trouble(error: BaseException) -> Trouble | None:
    return meaning(error) if isinstance(error, MySQLError) else None


# Its types know half of it.
_Connection: Any = Connection


class Watched(_Connection):  # type: ignore[misc]
    """A connection of our own, which remembers an error that has undone its transaction, and refuses to go on."""

    server_status: int

    def __init__(self, **options: Any) -> None:
        self.watch = Watch()
        self._preferred: ssl.SSLContext | None = None
        super().__init__(**options)

    def prefer_tls(self, context: ssl.SSLContext) -> None:
        """Use it if the server offers it; by itself asyncmy does not look."""
        self._preferred = context

    async def _get_server_information(self) -> None:
        await super()._get_server_information()
        if self._preferred is not None and self.server_capabilities & CLIENT.SSL:
            self._ssl_context = self._preferred
            self._client_flag |= CLIENT.SSL

    async def query(self, sql: str | bytes, unbuffered: bool = False) -> Any:  # noqa: FBT001, FBT002 - it is asyncmy's
        self.watch.check()
        return await self._seen(super().query(sql, unbuffered))

    async def begin(self) -> None:
        self.watch.check()
        await self._seen(super().begin())

    async def commit(self) -> None:
        self.watch.check()
        await self._seen(super().commit())

    async def rollback(self) -> None:
        await self._seen(super().rollback())

    async def _seen(self, answer: Awaitable[T]) -> T:
        try:
            # Where there is a time-out for reading, asyncmy waits by `asyncio.wait_for`, which may swallow.
            return await heard(answer)
        except MySQLError as error:
            self.watch.failed(error)
            raise
        except BaseException:
            # Cancelled between a question and its answer: the next one who asks would get that answer.
            break_off(self)
            raise


def break_off(connection: Any) -> None:
    """Close a connection at once; asyncmy's own `close` lets it still pass as connected."""
    if isinstance(connection, Watched):
        connection.watch.broken = True
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


class AsyncmyLink:
    """An `AsyncLink` on a connection whose transactions are its owner's."""

    connection: Any
    spoils_gently = False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._packet_max = PACKET_SURE
        # In front of our tables; empty: they are where the session is.
        self._where = ""

    async def send(self, ask: Ask) -> Reply:
        text = filled(ask, self._where)
        await self._check_size(text)
        async with self._cursor() as cursor:
            await cursor.execute(text)
            return Reply(cursor.rowcount, await cursor.fetchall() if ask.rows else ())

    async def send_all(self, asks: list[Ask]) -> list[Reply]:
        return [await self.send(ask) for ask in asks]

    async def run(self, statement: str) -> None:
        async with self._cursor() as cursor:
            await cursor.execute(statement)

    async def begin(self) -> None:
        await self.connection.begin()

    async def commit(self) -> None:
        await self.connection.commit()

    async def rollback(self) -> None:
        await self.connection.rollback()

    def standing(self) -> Standing:
        if is_closed(self.connection):
            return Standing.CLOSED
        if not self.connection.connected:
            return Standing.BROKEN
        return Standing.OPEN if in_transaction(self.connection) else Standing.IDLE

    async def close(self) -> None:
        await self.connection.ensure_closed()

    async def spoil(self) -> None:
        # MySQL has no transaction that refuses to be committed.
        if self.standing() is not Standing.IDLE:
            self.abandon()

    def abandon(self) -> None:
        break_off(self.connection)

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

    async def _check_size(self, text: str) -> None:
        """Sent all the same, it would be answered by a lost connection."""
        if len(text) < self._packet_max:
            return
        async with self._cursor() as cursor:
            await cursor.execute("SELECT @@max_allowed_packet")
            self._packet_max = int((await cursor.fetchall())[0][0])
        if len(text) >= self._packet_max:
            raise OperationalError(ER.NET_PACKET_TOO_LARGE, f"{len(text)} bytes, and {self._packet_max} are allowed")


class OwnLink(AsyncmyLink):
    """An `AsyncLink` on a connection of our own; where it stands we know best."""

    connection: Watched

    def __init__(self, connection: Watched) -> None:
        super().__init__(connection)
        self._begun = False

    async def begin(self) -> None:
        await self.connection.begin()
        self._begun = True

    async def commit(self) -> None:
        await self.connection.commit()
        self._begun = False

    async def rollback(self) -> None:
        await self.connection.rollback()
        self._begun = False

    def standing(self) -> Standing:
        if self.connection.watch.broken:
            return Standing.BROKEN
        if is_closed(self.connection):
            return Standing.CLOSED
        if not self.connection.connected:
            return Standing.BROKEN
        return Standing.OPEN if self._begun else Standing.IDLE

    async def send_all(self, asks: list[Ask]) -> list[Reply]:
        """In one message, and in one transaction."""
        if len(asks) == 1:
            return [await self.send(asks[0])]
        text = "; ".join(("BEGIN", *map(filled, asks), "COMMIT"))
        if len(text) >= self._packet_max:
            return await super().send_all(asks)
        replies = []
        try:
            async with self._cursor() as cursor:
                await cursor.execute(text)
                while await cursor.nextset():
                    replies.append(Reply(cursor.rowcount))
        except MySQLError as error:
            self.connection.watch.failed(error)
            if self.standing() is Standing.IDLE:
                await self.connection.rollback()
            raise
        return replies[: len(asks)]


class TransactionLink(OwnLink):
    """For transactions: the first statement begins one. Handlers may go to other databases."""

    def __init__(self, connection: Watched, database: str) -> None:
        super().__init__(connection)
        self._where = f"{quoted(database)}."

    async def begin(self) -> None:
        self.connection.watch.begin()
        self._begun = True

    async def commit_if(self, check: str) -> None:
        """Commit unless the check fails: both in one message."""
        try:
            await self.run(in_one(check, "COMMIT"))
        except MySQLError as error:
            if number_of(error) == NO_SAVEPOINT:
                # Nobody knows in which state the handler has left it.
                self.connection.watch.broken = True
            raise
        self._begun = False

    async def send_all(self, asks: list[Ask]) -> list[Reply]:
        return [await self.send(ask) for ask in asks]


async def for_operations(place: Place) -> OwnLink:
    return OwnLink(await _connected(place, autocommit=True, read_timeout=place.read_timeout))


async def for_transactions(place: Place) -> TransactionLink:
    return TransactionLink(
        await _connected(place, autocommit=False, init_command=place.isolation_statement), place.database
    )


async def beside(connection: Any, database: str) -> OwnLink:
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
    return OwnLink(other)


async def _connected(place: Place, **options: Any) -> Watched:
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
        ssl=place.tls,
        **options,
    )
    if place.tls_mode == "preferred" and place.unix_socket is None:
        connection.prefer_tls(unverified())
    try:
        # It bounds the greeting, too, which asyncmy's own connect_timeout does not.
        async with asyncio.timeout(place.connect_timeout):
            await connection.connect()
    except TimeoutError as error:
        raise OperationalError(*not_connected(error)) from error
    except OperationalError as error:
        raise OperationalError(*not_connected(error, error.__cause__)) from error
    return connection
