"""psycopg 3, sync and async: adapters around connections of our own, of a caller's pool, and of a caller's transaction.

Statements go through cursors of our own, so that a caller's row factories, adapters and cursor classes do not matter.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from typing import Any, Final

import psycopg
from psycopg import generators
from psycopg.adapt import AdaptersMap
from psycopg.pq import ConnStatus
from psycopg.pq import TransactionStatus as PqStatus
from psycopg.rows import tuple_row

from onefold._concurrency.generators import Flow, run, run_async
from onefold.errors import UsageError
from onefold.stores.postgres.errors import SPOILING, meaning, one_line
from onefold.stores.postgres.marks import PARAMETER
from onefold.stores.postgres.psycopg import prepared
from onefold.stores.sql.connection import ErrorClass, ErrorInfo, TransactionStatus
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sql.joined_rules import ABORTED
from onefold.stores.sql.records import in_numbers, located

Connection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]

_STATUSES: Final = {
    PqStatus.IDLE: TransactionStatus.IDLE,
    PqStatus.INTRANS: TransactionStatus.OPEN,
    PqStatus.INERROR: TransactionStatus.ABORTED,
}

_REPORTED: Final = PARAMETER.encode()

PIPELINES: Final = psycopg.Pipeline.is_supported()


class _Plain:
    """A cursor with psycopg's own adapters, which also takes values that are in their binary form already."""

    @property
    def adapters(self) -> AdaptersMap:
        return prepared.PLAIN

    def _convert_query(self, query: Any, params: Any = None) -> Any:
        if type(params) is prepared.Values:
            return params
        return super()._convert_query(query, params)  # type: ignore[misc]


class _Cursor(_Plain, psycopg.RawCursor[tuple[Any, ...]]):
    """A blocking cursor of ours."""


class _AsyncCursor(_Plain, psycopg.AsyncRawCursor[tuple[Any, ...]]):
    """The async counterpart."""


@cache
def _numbered(statement: str, where: str) -> tuple[bytes, tuple[str, ...]]:
    text, names = in_numbers(statement, where)
    return text.encode(), names


class Shared:
    """The common part of sync and async: the rules of a transaction, and its BEGIN, which is not sent at once.

    Each method returns its result or, if async, an awaitable of it.
    """

    # The driver of generators, and the class of our cursors.
    _run: Callable[[Flow[Any]], Any]
    _new_cursor: Callable[..., Any]
    # The qualifier of our tables; empty: the first schema of the session's search path.
    _where: str = ""
    # BEGIN is delayed until the first statement, so that both are one network message.
    _waiting: bool = False
    # A transaction of ours is open, and a handler may have its connection.
    _lent: bool = False
    # Interrupted while the server was working: the outcome of the statement is unknown.
    _interrupted: bool = False

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    @cached_property
    def _cursor(self) -> Any:
        # A statement that psycopg has prepared needs none.
        return self._new_cursor(self.connection, row_factory=tuple_row)

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Mark the connection on an interrupt: any error but psycopg's, because a signal handler may raise it."""
        try:
            yield
        except psycopg.Error:
            raise
        except BaseException:
            self._interrupted = True
            raise

    def transaction_status(self) -> TransactionStatus:
        if self._interrupted:
            return TransactionStatus.BROKEN
        if self._waiting:
            return TransactionStatus.OPEN
        found = _STATUSES.get(self.connection.pgconn.transaction_status)
        if found is None:
            return (
                TransactionStatus.CLOSED
                if self.connection.closed and not self.connection.broken
                else TransactionStatus.BROKEN
            )
        if found is TransactionStatus.IDLE and self._lent:
            # The handler ended our transaction, and the session may be in any state: do not reuse the connection.
            return TransactionStatus.CLOSED
        return found

    @property
    def backend(self) -> int:
        """Return the server's process, as the connection was told."""
        return self.connection.pgconn.backend_pid  # type: ignore[no-any-return]

    def reported(self) -> int | None:
        """Return the parameter of `marks` as the server has reported it last; None if it may have changed since."""
        pgconn = self.connection.pgconn
        if pgconn.status != ConnStatus.OK or pgconn.pipeline_status:
            return None
        found = pgconn.parameter_status(_REPORTED)
        return None if found is None else int(found)

    def run(self, statement: str) -> Any:
        return self._cursor.execute(statement.encode(), prepare=False)

    def _begin(self) -> None:
        self._waiting = True

    def _committing(self) -> Any:
        """Commit, unless a statement has failed: the server would roll back, and psycopg would not report it.

        Under the connection's lock: only then no statement is under way that the handler has left to another task.
        """
        if self.connection.pgconn.transaction_status == PqStatus.INERROR:
            raise UsageError(ABORTED)
        return self.connection._commit_gen()

    def rollback(self) -> Any:
        return self._run(self._end(self.connection.rollback))

    def _end(self, end: Callable[[], Any]) -> Flow[None]:
        if not self._waited():
            yield end
            self._take_back()

    def commit_if(self, check: str) -> Any:
        """Commit unless the check fails, in one message: a query without parameters may hold several statements."""
        return self._run(self._commit_if(check))

    def _commit_if(self, check: str) -> Flow[None]:
        try:
            yield partial(self.run, f"{located(check, self._where)}; COMMIT")
        except psycopg.errors.InFailedSqlTransaction as error:
            raise UsageError(ABORTED) from error
        self._take_back()

    def close(self) -> Any:
        return self.connection.close()

    def spoil(self) -> Any:
        return self._run(self._spoil())

    def _spoil(self) -> Flow[None]:
        if self._is_at_rest():
            with suppress(psycopg.Error):
                yield partial(self.run, SPOILING)
        if not self._cannot_be_committed():
            self.abandon()

    def abandon(self) -> None:
        self._interrupted = True
        self.connection.pgconn.finish()

    def _one_by_one(self, requests: list[SqlRequest]) -> Flow[list[Reply]]:
        if self._waited():
            yield partial(self._cursor.execute, begin_on(self.connection), prepare=False)
            self._lend()
        replies = []
        for request in requests:
            replies.append((yield partial(self.send, request)))  # noqa: PERF401 - no comprehension can yield
        return replies

    def send(self, request: SqlRequest) -> Any:
        raise NotImplementedError

    def _sent(self, cursor: Any, request: SqlRequest) -> Any:
        statement = prepared.typed(request.statement, self._where)
        if statement is not None:
            return cursor.execute(statement.text, statement.bound(request.values), binary=True)
        text, names = _numbered(request.statement, self._where)
        return cursor.execute(text, [request.values[name] for name in names], binary=True)

    def _prepared(self, statement: prepared.Statement | None, request: SqlRequest) -> Any:
        """Send a statement that psycopg has prepared, and a BEGIN before it that is due; None if it is not prepared."""
        name = None if statement is None else prepared.name_of(self.connection, statement)
        if statement is None or name is None:
            return None
        pgconn = self.connection.pgconn
        if not self._waiting:
            pgconn.send_query_prepared(name, statement.params(request.values), statement.formats, prepared.BINARY)
            return generators.execute(pgconn)
        if not PIPELINES:
            return None
        # From here on the state is the connection's own: it may turn out to be lost.
        self._waiting = False
        return prepared.send_with_begin(pgconn, begin_on(self.connection), name, statement, request.values)

    def _answered(self, results: Any, statement: prepared.Statement, request: SqlRequest, *, began: bool) -> Reply:
        try:
            reply = prepared.reply(results, rows=request.rows)
        except psycopg.Error as error:
            prepared.forget_if_stale(self.connection, statement, error)
            raise
        if began:
            self._lend()
        return reply

    def _lend(self) -> None:
        """Leave autocommit mode, so that statements after a handler's own commit or rollback can be undone.

        In autocommit mode they would be committed at once. psycopg does not allow leaving that mode inside a
        transaction, and leaving it before would make psycopg send its own BEGIN, in a separate message.
        """
        self._lent, self.connection._autocommit = True, False

    def _take_back(self) -> None:
        self._lent, self.connection._autocommit = False, True

    def _waited(self) -> bool:
        waited, self._waiting = self._waiting, False
        return waited

    def _cannot_be_committed(self) -> bool:
        """Return whether a commit is impossible: no transaction is open, or the server has aborted it."""
        return self.connection.pgconn.transaction_status in (PqStatus.IDLE, PqStatus.INERROR)

    def _is_at_rest(self) -> bool:
        """Return whether the server waits for the next statement, after a reply that was read to its end."""
        connection = self.connection.pgconn
        return connection.transaction_status == PqStatus.INTRANS and not connection.pipeline_status


class PsycopgConnection(Shared):
    """An adapter around a connection in autocommit mode, or around one in its caller's transaction.

    A caller's connection may be in pipeline mode, where replies have to be requested.
    """

    _run = staticmethod(run)
    _new_cursor = _Cursor

    def begin(self) -> None:
        self._begin()

    def commit(self) -> None:
        # `_end`, without a generator: every transaction comes here.
        if not self._waited():
            with self.connection.lock:
                self.connection.wait(self._committing())
            self._take_back()

    def send(self, request: SqlRequest) -> Reply:
        # `_marked`, without its context manager: every delivery comes here.
        try:
            connection, statement = self.connection, prepared.typed(request.statement, self._where)
            with connection.lock:
                begins = self._waiting
                waiting = self._prepared(statement, request)
                if statement is not None and waiting is not None:
                    return self._answered(connection.wait(waiting), statement, request, began=begins)
            if self._waiting or connection.pgconn.pipeline_status:
                return self.send_all([request])[0]
            return _reply(self._sent(self._cursor, request), request)
        except psycopg.Error:
            raise
        except BaseException:
            self._interrupted = True
            raise

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        with self._marked():
            return self._piped(requests) if PIPELINES else run(self._one_by_one(requests))

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


class AsyncPsycopgConnection(Shared):
    """The async counterpart."""

    spoils_gently = True
    _run = staticmethod(run_async)
    _new_cursor = _AsyncCursor

    async def begin(self) -> None:
        self._begin()

    async def commit(self) -> None:
        if not self._waited():
            async with self.connection.lock:
                await self.connection.wait(self._committing())
            self._take_back()

    async def send(self, request: SqlRequest) -> Reply:
        try:
            connection, statement = self.connection, prepared.typed(request.statement, self._where)
            async with connection.lock:
                begins = self._waiting
                waiting = self._prepared(statement, request)
                if statement is not None and waiting is not None:
                    return self._answered(await connection.wait(waiting), statement, request, began=begins)
            if self._waiting or connection.pgconn.pipeline_status:
                return (await self.send_all([request]))[0]
            return await _reply_async(await self._sent(self._cursor, request), request)
        except psycopg.Error:
            raise
        except BaseException:
            self._interrupted = True
            raise

    async def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        with self._marked():
            return await (self._piped(requests) if PIPELINES else run_async(self._one_by_one(requests)))

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


async def opened(connect: Callable[[], Awaitable[AsyncConnection]]) -> AsyncConnection:
    """Open a connection; if that is interrupted, it is closed at once.

    psycopg leaves that to the last reference. The traceback of the interrupt is one, and may live for long.
    """
    try:
        return await connect()
    except BaseException as error:
        error.__traceback__ = None
        raise


def _reply(cursor: _Cursor, request: SqlRequest) -> Reply:
    return Reply(cursor.rowcount, cursor.fetchall() if request.rows else ())


async def _reply_async(cursor: _AsyncCursor, request: SqlRequest) -> Reply:
    return Reply(cursor.rowcount, await cursor.fetchall() if request.rows else ())


def begin_on(connection: Connection | AsyncConnection) -> bytes:
    """Return the BEGIN for this connection, whose owner may have chosen an isolation level."""
    level = connection.isolation_level
    return b"BEGIN" if level is None else f"BEGIN ISOLATION LEVEL {level.name.replace('_', ' ')}".encode()


def classify(error: BaseException) -> ErrorInfo | None:
    """Classify an error of psycopg; return None for any other."""
    if not isinstance(error, psycopg.Error):
        return None
    if error.sqlstate is not None:
        return meaning(error.sqlstate, error.diag.message_primary or str(error))
    if isinstance(error, (psycopg.OperationalError, psycopg.InternalError)):
        # The server could not reply any more. Or it, or a pooler in front of it, has replied more than was asked: first
        # that the process behind has died, and then the answer.
        return ErrorInfo(ErrorClass.LOST, f"the connection was lost: {one_line(str(error))}")
    return ErrorInfo(ErrorClass.MISTAKE, f"psycopg says: {one_line(str(error))}")
