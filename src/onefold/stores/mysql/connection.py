"""The common part of PyMySQL and asyncmy: our adapters around their connections, and connections of our own.

Our own connections are of two kinds. Operations of the store are committed at once, on connections that nobody else
sees. Transactions have autocommit off, so that BEGIN needs no message, and their connections are lent to handlers.

Each method returns its result or, on asyncmy, an awaitable of it. A driver's module adds how to send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from onefold._concurrency.generators import Flow
from onefold.stores.mysql.errors import NO_SAVEPOINT, number_of
from onefold.stores.mysql.statements.literals import PACKET_SURE, filled, in_one, quoted
from onefold.stores.mysql.transaction_state import TransactionMonitor
from onefold.stores.sql.connection import TransactionStatus
from onefold.stores.sql.dialect import Reply, SqlRequest

NET_PACKET_TOO_LARGE: Final = 1153


class Watched:
    """A connection of our own. After an error that rolled its transaction back, it refuses to continue."""

    # The class of the MySQL driver's errors, as in `Adapter`.
    _driver_error: type[Exception]
    # Calls a method of the driver's inside `_noted`.
    _seen: Callable[..., Any]

    def __init__(self, **options: Any) -> None:
        self.monitor = TransactionMonitor()
        super().__init__(**options)

    def query(self, sql: str | bytes, unbuffered: bool = False) -> Any:  # noqa: FBT001, FBT002 - it is the driver's
        self.monitor.check()
        return self._seen(super().query, sql, unbuffered)  # type: ignore[misc]

    def begin(self) -> Any:
        self.monitor.check()
        return self._seen(super().begin)  # type: ignore[misc]

    def commit(self) -> Any:
        self.monitor.check()
        return self._seen(super().commit)  # type: ignore[misc]

    def rollback(self) -> Any:
        return self._seen(super().rollback)  # type: ignore[misc]

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note the driver's error. Close after any other: it came between a request and its reply."""
        try:
            yield
        except self._driver_error as error:
            self.monitor.failed(error)
            raise
        except BaseException:
            # The next request would read that reply.
            self._break_off()
            raise

    def _break_off(self) -> None:
        """Close the connection at once."""
        raise NotImplementedError


class Adapter:
    """An adapter around a connection whose transactions belong to its owner."""

    connection: Any
    # The driver of generators.
    _run: Callable[[Flow[Any]], Any]
    # Classes of the MySQL driver's errors. Not their module: the attribute `err` of PyMySQL is a second copy of it once
    # somebody has called `install_as_MySQLdb` and imported `MySQLdb.err`.
    _driver_error: type[Exception]
    _operational_error: Callable[..., Exception]
    # The qualifier of our tables; empty: the session's current database.
    _where = ""
    _packet_max = PACKET_SURE

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def _execute(self, text: str, *, rows: bool = False) -> Any:
        """Send a statement through a plain cursor; return its `Reply`."""
        raise NotImplementedError

    def _execute_all(self, text: str) -> Any:
        """Send several statements in one message; return a `Reply` for each but the first."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Close the connection at once."""
        raise NotImplementedError

    def transaction_status(self) -> TransactionStatus:
        raise NotImplementedError

    def _lost(self) -> TransactionStatus | None:
        """Return how the connection ended, lost or closed by hand; None: it is open."""
        raise NotImplementedError

    def send(self, request: SqlRequest) -> Any:
        text = filled(request, self._where)
        if len(text) >= self._packet_max:
            return self._run(self._send_large(text, rows=request.rows))
        return self._execute(text, rows=request.rows)

    def _send_large(self, text: str, *, rows: bool) -> Flow[Reply]:
        """Send a large statement if the server accepts its size; otherwise it would drop the connection."""
        limit: Reply = yield partial(self._execute, "SELECT @@max_allowed_packet", rows=True)
        self._packet_max = int(limit.rows[0][0])
        if len(text) >= self._packet_max:
            raise self._operational_error(
                NET_PACKET_TOO_LARGE, f"{len(text)} bytes, but only {self._packet_max} are allowed"
            )
        reply: Reply = yield partial(self._execute, text, rows=rows)
        return reply

    def send_all(self, requests: list[SqlRequest]) -> Any:
        return self._run(self._one_by_one(requests))

    def _one_by_one(self, requests: list[SqlRequest]) -> Flow[list[Reply]]:
        replies = []
        for request in requests:
            replies.append((yield partial(self.send, request)))  # noqa: PERF401 - no comprehension can yield
        return replies

    def run(self, statement: str) -> Any:
        return self._execute(statement)

    def begin(self) -> Any:
        return self.connection.begin()

    def commit(self) -> Any:
        return self.connection.commit()

    def rollback(self) -> Any:
        return self.connection.rollback()

    def spoil(self) -> Any:
        return self._run(self._spoil())

    def _spoil(self) -> Flow[None]:
        # MySQL has no transaction that refuses to be committed.
        if self.transaction_status() is not TransactionStatus.IDLE:
            self.abandon()
        yield from ()


class OwnAdapter(Adapter):
    """An adapter around a connection of our own, which tracks its transaction itself."""

    _begun = False

    def begin(self) -> Any:
        return self._run(self._begin())

    def _begin(self) -> Flow[None]:
        yield self.connection.begin
        self._begun = True

    def commit(self) -> Any:
        return self._run(self._end(self.connection.commit))

    def rollback(self) -> Any:
        return self._run(self._end(self.connection.rollback))

    def _end(self, end: Callable[[], Any]) -> Flow[None]:
        yield end
        self._begun = False

    def transaction_status(self) -> TransactionStatus:
        if self.connection.monitor.broken:
            return TransactionStatus.BROKEN
        return self._lost() or (TransactionStatus.OPEN if self._begun else TransactionStatus.IDLE)

    def send_all(self, requests: list[SqlRequest]) -> Any:
        """Send all in one message and in one transaction."""
        if len(requests) == 1:
            return super().send_all(requests)
        text = "; ".join(("BEGIN", *map(filled, requests), "COMMIT"))
        if len(text) >= self._packet_max:
            return super().send_all(requests)
        return self._run(self._send_in_one(text, len(requests)))

    def _send_in_one(self, text: str, count: int) -> Flow[list[Reply]]:
        try:
            replies: list[Reply] = yield partial(self._execute_all, text)
        except self._driver_error as error:
            self.connection.monitor.failed(error)
            if self.transaction_status() is TransactionStatus.IDLE:
                yield self.connection.rollback
            raise
        return replies[:count]


class TransactionAdapter(OwnAdapter):
    """An adapter for transactions: the first statement begins one. Handlers may switch to other databases."""

    def __init__(self, connection: Any, database: str) -> None:
        super().__init__(connection)
        self._where = f"{quoted(database)}."

    def _begin(self) -> Flow[None]:
        self.connection.monitor.begin()
        self._begun = True
        yield from ()

    def commit_if(self, check: str) -> Any:
        """Commit unless the check fails, in one message."""
        return self._run(self._commit_if(check))

    def _commit_if(self, check: str) -> Flow[None]:
        try:
            yield partial(self.run, in_one(check, "COMMIT"))
        except self._driver_error as error:
            if number_of(error) == NO_SAVEPOINT:
                # The handler may have left the session in any state.
                self.connection.monitor.broken = True
            raise
        self._begun = False

    def send_all(self, requests: list[SqlRequest]) -> Any:
        return self._run(self._one_by_one(requests))
