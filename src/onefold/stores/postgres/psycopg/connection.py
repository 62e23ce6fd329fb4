"""psycopg 3, sync and async: adapters around connections of our own, on those that a caller's pool lends, and to a
caller's.

Statements go through cursors of our own, so that a caller's row factories, adapters and cursor classes do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.postgres import register_default_adapters
from psycopg.postgres import types as postgres_types
from psycopg.pq import TransactionStatus as PqStatus
from psycopg.rows import tuple_row

from onefold.stores.postgres.errors import SPOILING, meaning, one_line
from onefold.stores.sql.connection import ErrorClass, ErrorInfo, TransactionStatus
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sql.records import in_numbers, located

Connection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]

_STANDINGS: Final = {
    PqStatus.IDLE: TransactionStatus.IDLE,
    PqStatus.INTRANS: TransactionStatus.OPEN,
    PqStatus.INERROR: TransactionStatus.ABORTED,
}

# As psycopg has them by itself: others may have changed those of a connection, or those of all.
_PLAIN: Final = AdaptersMap(types=postgres_types)
register_default_adapters(_PLAIN)

PIPELINES: Final = psycopg.Pipeline.is_supported()


class _Cursor(psycopg.RawCursor[tuple[Any, ...]]):
    @property
    def adapters(self) -> AdaptersMap:
        return _PLAIN


class _AsyncCursor(psycopg.AsyncRawCursor[tuple[Any, ...]]):
    @property
    def adapters(self) -> AdaptersMap:
        return _PLAIN


@cache
def _numbered(statement: str, where: str) -> tuple[bytes, tuple[str, ...]]:
    text, names = in_numbers(statement, where)
    return text.encode(), names


class _Shared:
    """What is the same sync and async: where the connection stands, and a transaction that is yet to be begun."""

    connection: Any
    # In front of our tables; empty: they are where the session looks first.
    _where: str = ""
    # A BEGIN waits for the first statement, so that both are one network message.
    _waiting: bool = False
    # A transaction of ours is open, and a handler may have its connection.
    _lent: bool = False
    # Somebody was interrupted while the server was at work: what it did is not known.
    _interrupted: bool = False

    def transaction_status(self) -> TransactionStatus:
        if self._interrupted:
            return TransactionStatus.BROKEN
        if self._waiting:
            return TransactionStatus.OPEN
        found = _STANDINGS.get(self.connection.pgconn.transaction_status)
        if found is None:
            return (
                TransactionStatus.CLOSED
                if self.connection.closed and not self.connection.broken
                else TransactionStatus.BROKEN
            )
        if found is TransactionStatus.IDLE and self._lent:
            # The handler has ended our transaction: nobody knows how it has left the session, so it is not used again.
            return TransactionStatus.CLOSED
        return found

    def _lend(self) -> None:
        """Let what a handler sends after a commit or rollback of its own begin a transaction, which is then undone.

        In autocommit mode it would be committed at once. psycopg lets nobody leave that mode in a transaction, and to
        leave it before would take its own BEGIN, in a message apart.
        """
        self._lent, self.connection._autocommit = True, False

    def _take_back(self) -> None:
        self._lent, self.connection._autocommit = False, True

    def _waited(self) -> bool:
        waited, self._waiting = self._waiting, False
        return waited

    def _cannot_be_committed(self) -> bool:
        """Whether that is certain: no transaction is open, or the server has given it up."""
        return self.connection.pgconn.transaction_status in (PqStatus.IDLE, PqStatus.INERROR)

    def _is_at_rest(self) -> bool:
        """Whether the server waits for the next statement, after an answer that was read to its end."""
        connection = self.connection.pgconn
        return connection.transaction_status == PqStatus.INTRANS and not connection.pipeline_status

    def abandon(self) -> None:
        self._interrupted = True
        self.connection.pgconn.finish()

    def _rendered(self, request: SqlRequest) -> tuple[bytes, Sequence[Any]]:
        statement, names = _numbered(request.statement, self._where)
        return statement, [request.values[name] for name in names]

    def _commit_after(self, check: str) -> bytes:
        return f"{located(check, self._where)}; COMMIT".encode()


class PsycopgConnection(_Shared):
    """An adapter around a connection in autocommit mode, or on one whose transaction is its caller's."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._cursor = _Cursor(connection, row_factory=tuple_row)

    def send(self, request: SqlRequest) -> Reply:
        if self._waiting:
            return self.send_all([request])[0]
        try:
            return _reply(self._sent(self._cursor, request), request)
        except psycopg.Error:
            raise
        except BaseException:
            # Also an `Exception`, which a signal's handler may raise wherever we are.
            self._interrupted = True
            raise

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        try:
            return self._piped(requests) if PIPELINES else self._one_by_one(requests)
        except psycopg.Error:
            raise
        except BaseException:
            self._interrupted = True
            raise

    def _piped(self, requests: list[SqlRequest]) -> list[Reply]:
        cursors = [_Cursor(self.connection, row_factory=tuple_row) for _ in requests]
        with self.connection.pipeline():
            begins = self._waited()
            if begins:
                self._cursor.execute(begin_on(self.connection), prepare=False)
            for cursor, request in zip(cursors, requests, strict=True):
                self._sent(cursor, request)
        if begins:
            self._lend()
        return [_reply(cursor, request) for cursor, request in zip(cursors, requests, strict=True)]

    def _one_by_one(self, requests: list[SqlRequest]) -> list[Reply]:
        if self._waited():
            self._cursor.execute(begin_on(self.connection), prepare=False)
            self._lend()
        return [self.send(request) for request in requests]

    def _sent(self, cursor: _Cursor, request: SqlRequest) -> _Cursor:
        return cursor.execute(*self._rendered(request), binary=True)

    def begin(self) -> None:
        self._waiting = True

    def run(self, statement: str) -> None:
        self._cursor.execute(statement.encode(), prepare=False)

    def commit(self) -> None:
        if not self._waited():
            self.connection.commit()
            self._take_back()

    def commit_if(self, check: str) -> None:
        """Commit unless the check fails: both in one message. Without values it may hold several statements."""
        self._cursor.execute(self._commit_after(check), prepare=False)
        self._take_back()

    def rollback(self) -> None:
        if not self._waited():
            self.connection.rollback()
            self._take_back()

    def close(self) -> None:
        self.connection.close()

    def spoil(self) -> None:
        if self._is_at_rest():
            with suppress(psycopg.Error):
                self.run(SPOILING)
        if not self._cannot_be_committed():
            self.abandon()


class AsyncPsycopgConnection(_Shared):
    """The async counterpart."""

    spoils_gently = True

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self._cursor = _AsyncCursor(connection, row_factory=tuple_row)

    async def send(self, request: SqlRequest) -> Reply:
        if self._waiting:
            return (await self.send_all([request]))[0]
        try:
            return await _reply_async(await self._sent(self._cursor, request), request)
        except psycopg.Error:
            raise
        except BaseException:
            self._interrupted = True
            raise

    async def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        try:
            return await (self._piped(requests) if PIPELINES else self._one_by_one(requests))
        except psycopg.Error:
            raise
        except BaseException:
            self._interrupted = True
            raise

    async def _piped(self, requests: list[SqlRequest]) -> list[Reply]:
        cursors = [_AsyncCursor(self.connection, row_factory=tuple_row) for _ in requests]
        async with self.connection.pipeline():
            begins = self._waited()
            if begins:
                await self._cursor.execute(begin_on(self.connection), prepare=False)
            for cursor, request in zip(cursors, requests, strict=True):
                await self._sent(cursor, request)
        if begins:
            self._lend()
        return [await _reply_async(cursor, request) for cursor, request in zip(cursors, requests, strict=True)]

    async def _one_by_one(self, requests: list[SqlRequest]) -> list[Reply]:
        if self._waited():
            await self._cursor.execute(begin_on(self.connection), prepare=False)
            self._lend()
        return [await self.send(request) for request in requests]

    async def _sent(self, cursor: _AsyncCursor, request: SqlRequest) -> _AsyncCursor:
        return await cursor.execute(*self._rendered(request), binary=True)

    async def begin(self) -> None:
        self._waiting = True

    async def run(self, statement: str) -> None:
        await self._cursor.execute(statement.encode(), prepare=False)

    async def commit(self) -> None:
        if not self._waited():
            await self.connection.commit()
            self._take_back()

    async def commit_if(self, check: str) -> None:
        await self._cursor.execute(self._commit_after(check), prepare=False)
        self._take_back()

    async def rollback(self) -> None:
        if not self._waited():
            await self.connection.rollback()
            self._take_back()

    async def close(self) -> None:
        await self.connection.close()

    async def spoil(self) -> None:
        if self._is_at_rest():
            with suppress(psycopg.Error):
                await self.run(SPOILING)
        if not self._cannot_be_committed():
            self.abandon()


def _reply(cursor: _Cursor, request: SqlRequest) -> Reply:
    return Reply(cursor.rowcount, cursor.fetchall() if request.rows else ())


async def _reply_async(cursor: _AsyncCursor, request: SqlRequest) -> Reply:
    return Reply(cursor.rowcount, await cursor.fetchall() if request.rows else ())


def begin_on(connection: Connection | AsyncConnection) -> bytes:
    """How a transaction begins on this connection, whose owner may have chosen an isolation level."""
    level = connection.isolation_level
    return b"BEGIN" if level is None else f"BEGIN ISOLATION LEVEL {level.name.replace('_', ' ')}".encode()


def classify(error: BaseException) -> ErrorInfo | None:
    """What an error of psycopg means; None: it is not psycopg's."""
    if not isinstance(error, psycopg.Error):
        return None
    if error.sqlstate is not None:
        return meaning(error.sqlstate, error.diag.message_primary or str(error))
    if isinstance(error, (psycopg.OperationalError, psycopg.InternalError)):
        # The server could not say anything any more. Or it, or a pooler before it, has said more than was asked: that
        # the process behind has died, and then the answer.
        return ErrorInfo(ErrorClass.LOST, f"the connection was lost: {one_line(str(error))}")
    return ErrorInfo(ErrorClass.MISTAKE, f"psycopg says: {one_line(str(error))}")
