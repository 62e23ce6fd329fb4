"""Send statements of a store on what an engine lends, or on a connection beside the engine's pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from onefold.errors import NotInTransaction
from onefold.stores.reserved import connecting
from onefold.stores.sql.connection import TransactionStatus
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sqlalchemy.connection import HeldConnection, end_connection
from onefold.stores.sqlalchemy.drivers import driver_of, has_server


class Source:
    """Hold an engine, and open what a transaction of ours on it begins with: a connection, or a session."""

    def __init__(self, engine: Engine, opened: Callable[[], HeldConnection]) -> None:
        self.engine = engine
        self.in_autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        self.driver = driver_of(engine.dialect)
        self.opened = opened


def beside(engine: Engine) -> Source:
    """Return an engine with a pool of its own that connects as the given one does, with its events.

    Its connections are never lent to anybody else. The caller disposes of it.
    """
    other = Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=engine.hide_parameters)
    return Source(other, lambda: HeldConnection(other.connect()))


class StoresConnection:
    """Send on what an engine lends: statements that are committed at once, and transactions of ours."""

    def __init__(self, source: Source) -> None:
        self.connection: Any = None
        self._source = source
        self._transaction: HeldConnection | None = None
        # For statements that are committed at once; kept for the next one.
        self._alone: Connection | None = None
        # For several that are committed together.
        self._many: Connection | None = None

    def send(self, request: SqlRequest) -> Reply:
        if self._transaction is not None:
            return self._transaction.send(request)
        alone = self.open_alone()
        reply = self._source.driver.send(alone, request)
        alone.commit()
        return reply

    def open_alone(self) -> Connection:
        if self._alone is None:
            source = self._source
            engine = source.in_autocommit if source.driver.alone_in_autocommit else source.engine
            with connecting():
                self._alone = engine.connect()
        return self._alone

    @property
    def in_transaction(self) -> bool:
        return self._transaction is not None

    @property
    def is_closed(self) -> bool:
        """Whether the next statement has to take a connection from the engine."""
        return self._transaction is None and self._alone is None

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        if self._transaction is not None:
            return self._transaction.send_all(requests)
        connection = self.open_many()
        with connection:
            # An engine in autocommit mode has no transactions. Here it does without: everything may be sent twice.
            with suppress(NotInTransaction):
                self._source.driver.enter(connection)
            replies = [self._source.driver.send(connection, request) for request in requests]
            connection.commit()
        return replies

    def open_many(self) -> Connection:
        if self._many is None or self._many.closed:
            with connecting():
                self._many = self._source.engine.connect()
        return self._many

    def begin(self) -> None:
        self.open_transaction()
        self.enter()

    def open_transaction(self) -> None:
        self.close()
        self._transaction = self._source.opened()
        self.connection = self._transaction.connection
        self._transaction.open()

    def enter(self) -> None:
        self._open.begin()

    def run(self, statement: str) -> None:
        self._open.run(statement)

    def flush(self) -> None:
        """Send the pending changes of a session."""
        if isinstance(self._open.held, Session):
            self._open.held.flush()

    def commit(self) -> None:
        self._open.commit()

    def rollback(self) -> None:
        self._open.rollback()

    def transaction_status(self) -> TransactionStatus:
        return TransactionStatus.IDLE if self._transaction is None else self._transaction.transaction_status()

    @property
    def is_torn(self) -> bool:
        return self._transaction is not None and self._transaction.is_torn

    def spoil(self) -> None:
        if self._transaction is not None:
            self._transaction.spoil()

    def abandon(self) -> None:
        if self._transaction is not None:
            self._transaction.abandon()
        for connection in (self._alone, self._many):
            if connection is not None:
                end_connection(connection)

    def close(self) -> None:
        """Give everything back to the engine's pool, which rolls back what is open."""
        apart, self._alone, self._many = (self._alone, self._many), None, None
        transaction, self._transaction = self._transaction, None
        for connection in apart:
            if connection is not None:
                connection.close()
        if transaction is None:
            return
        if self._source.driver.unlock is not None and transaction.transaction_status() is not TransactionStatus.IDLE:
            # What was interrupted may hold a lock that only the end of the connection gives up.
            transaction.held.invalidate()
        transaction.close()

    @property
    def _open(self) -> HeldConnection:
        assert self._transaction is not None, "no transaction was begun"
        return self._transaction


class RenewalConnection(StoresConnection):
    """Renew claims on a connection outside the engine's pool, which is kept open."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(beside(engine))
        # A connection of SQLite may belong to the thread that opened it, and opening another takes no server's place.
        self._keeps = has_server(engine)
        self._broken = False

    def open(self) -> None:
        """Connect now: when claims have to be renewed, there may be no room left on the server."""
        self._broken = not self._keeps
        if self._keeps:
            self.open_alone()

    def open_many(self) -> Connection:
        return self.open_alone()

    def send(self, request: SqlRequest) -> Reply:
        with self._kept():
            return super().send(request)

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        with self._kept():
            # One by one, on the connection that is open: each renewal is good by itself.
            return [StoresConnection.send(self, request) for request in requests]

    @contextmanager
    def _kept(self) -> Iterator[None]:
        self._broken = True
        yield
        self._broken = not self._keeps

    def abandon(self) -> None:
        """End the connection, and take it from its pool, which would warn of one that was never returned."""
        connection, self._broken = self._alone, True
        try:
            super().abandon()
        finally:
            self._alone = None
            if connection is not None and not (connection.closed or connection.invalidated):
                connection.detach()

    def transaction_status(self) -> TransactionStatus:
        return TransactionStatus.BROKEN if self._broken else super().transaction_status()

    def close(self) -> None:
        super().close()
        self._source.engine.dispose()
