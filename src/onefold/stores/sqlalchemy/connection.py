"""Send statements on a connection or session that somebody holds, inside its transaction.

The objects of a session are not touched, and nothing is flushed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.orm import Session

from onefold.errors import NotInTransaction
from onefold.stores.sql.connection import TransactionStatus
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sqlalchemy.drivers import driver_of, end_at_once, raw

Held = Connection | Session


class HeldConnection:
    """Send on a connection or session: join its transaction, or begin one."""

    def __init__(self, held: Held, tx: Any = None) -> None:
        # What a handler gets: the held one, or its async shell.
        self.connection: Any = held if tx is None else tx
        self.held = held
        self._inside: Inside | None = None
        self._savepoint: Any = None

    def send(self, request: SqlRequest) -> Reply:
        return self.enter().send(request)

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        return [self.send(request) for request in requests]

    def enter(self) -> Inside:
        """Enter a transaction. Raises `NotInTransaction` where everything would be committed at once."""
        if self._inside is None:
            self._inside = Inside(self.held)
        return self._inside

    def open(self) -> None:
        """Take a connection from the engine, and begin as SQLAlchemy does it: nothing is sent yet."""
        self.held.begin()
        if isinstance(self.held, Session):
            self.held.connection()

    def begin(self) -> None:
        if not self.held.in_transaction():
            self.open()
        try:
            self.enter()
        except NotInTransaction:
            # The engine is in autocommit mode, but this has to be a transaction.
            self.held.rollback()
            self._leave_autocommit()
            self.enter()

    def _leave_autocommit(self) -> None:
        if isinstance(self.held, Session):
            usual = self.held.get_bind().dialect.default_isolation_level
            self.held.connection(execution_options={"isolation_level": usual})
        else:
            self.held.execution_options(isolation_level=self.held.default_isolation_level)

    def run(self, statement: str) -> None:
        # By SQLAlchemy's own means: a session has to forget the objects whose rows are rolled back.
        if statement.startswith("SAVEPOINT "):
            self._savepoint = self.held.begin_nested()
        elif statement.startswith("ROLLBACK TO SAVEPOINT "):
            self._savepoint.rollback()
        else:
            self.enter().connection.exec_driver_sql(statement)

    def commit(self) -> None:
        self.held.commit()
        self._inside = None

    def rollback(self) -> None:
        self.held.rollback()
        self._inside = None

    @property
    def is_torn(self) -> bool:
        return self._inside is not None and self._inside.is_torn

    def transaction_status(self) -> TransactionStatus:
        return TransactionStatus.IDLE if self._inside is None else self._inside.transaction_status()

    def close(self) -> None:
        self.held.close()
        self._inside = None

    def spoil(self) -> None:
        """Close the driver's connection. SQLAlchemy refuses everything until its user has rolled back."""
        if self._inside is not None and not self._inside.connection.closed:
            self._inside.connection.invalidate()

    def abandon(self) -> None:
        """End the connection of an async driver, from outside the code that waits for it."""
        if self._inside is not None:
            end_connection(self._inside.connection)


def end_connection(connection: Connection) -> None:
    """End the connection of an async driver at once, unless SQLAlchemy has dropped it already."""
    if not (connection.closed or connection.invalidated):
        end_at_once(raw(connection))


class Inside:
    """Tell the transaction in which a connection or session is from the next one."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self.connection = held.connection() if isinstance(held, Session) else held
        if not self.connection.in_transaction():
            # As SQLAlchemy does it by itself with the first statement.
            self.connection.begin()
        self.driver = driver_of(self.connection.dialect)
        self.driver.enter(self.connection)
        self._whole = held.get_transaction()
        self._part = held.get_nested_transaction()
        self._given_up: Callable[[], bool] | None = None
        if self.driver.gives_up is not None:
            _watched.add(self)

    def send(self, request: SqlRequest) -> Reply:
        return self.driver.send(self.connection, request)

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        return [self.send(request) for request in requests]

    def failed(self, error: BaseException) -> None:
        """Note that a statement in this transaction failed, no matter whose."""
        if self.driver.gives_up is not None and self.driver.gives_up(error):
            part = self.connection.get_nested_transaction()
            # Rolling back to an earlier savepoint lets the caller continue.
            self._given_up = lambda: part is None or part.is_active

    @property
    def is_torn(self) -> bool:
        if self.driver.is_torn is None or self.connection.closed or self.connection.invalidated:
            return False
        return self.driver.is_torn(raw(self.connection))

    def transaction_status(self) -> TransactionStatus:
        if self.connection.invalidated:
            return TransactionStatus.BROKEN
        if self._held.get_transaction() is not self._whole:
            return TransactionStatus.IDLE
        if isinstance(self._held, Session) and not self._held.is_active:
            # A flush failed and has rolled back already. The session refuses everything until its user rolls back, too.
            return TransactionStatus.ABORTED
        if self._part is not None and not self._part.is_active:
            return TransactionStatus.IDLE
        if self._given_up is not None and self._given_up():
            return TransactionStatus.ABORTED
        return self.driver.transaction_status(raw(self.connection))


# The transactions whose drivers do not tell when the server gives them up.
_watched: WeakSet[Inside] = WeakSet()


def note_failure(context: ExceptionContext) -> None:
    """Notify the transactions on a connection that a statement has failed: an event of SQLAlchemy."""
    for inside in list(_watched):
        if inside.connection is context.connection:
            inside.failed(context.original_exception)
