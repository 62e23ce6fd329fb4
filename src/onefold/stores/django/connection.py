"""Adapters around Django's connections: outside any transaction, in a caller's, and in one of ours.

Statements go through Django's own cursor, so that its loggers, wrappers and error classes apply. Transactions of ours
are blocks of `transaction.atomic()`, so that hooks that a handler passes to `on_commit` run after our commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any, Final

from onefold._driver_connections import register
from onefold.errors import NotInTransaction, OnefoldError, UsageError
from onefold.stores.django.vendors import Vendor, vendor_of
from onefold.stores.reserved import connecting
from onefold.stores.sql.connection import Database, TransactionStatus
from onefold.stores.sql.dialect import Reply, SqlRequest

OUTSIDE: Final = (
    "this connection is not in a transaction: the record and the work would not be committed together. Nothing ran. "
    "Put both into `with transaction.atomic():`"
)

# Passed to a block's `__exit__`, so that it rolls back.
UNDO: Final = Exception("rolled back")


def database_of(connection: Any) -> Database:
    """Return the database of a connection, as the SQL stores see it."""
    vendor = vendor_of(connection)
    return Database(vendor.sql, f"django://{connection.alias}", vendor.classify, vendor.lock, vendor.unlock)


def in_transaction(connection: Any) -> bool:
    """Return whether a transaction was begun: by a block, or by switching autocommit off."""
    if connection.connection is None:
        # Not connected: `autocommit` is not set yet.
        return bool(connection.in_atomic_block or not connection.settings_dict["AUTOCOMMIT"])
    return bool(connection.in_atomic_block or not connection.autocommit)


def _driver_connection_of(connection: Any) -> Any:
    """Return the driver's connection behind a wrapper, or behind the proxy for a thread's wrapper."""
    from django.db import connections
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.utils.connection import ConnectionProxy

    if isinstance(connection, BaseDatabaseWrapper):
        return connection.connection
    # By its type: the proxy would pass `isinstance` on to the wrapper.
    return connections[connection.alias] if type(connection) is ConnectionProxy else None


register("django", _driver_connection_of)


def beside(connection: Any) -> Any:
    """Return another connection with the same settings, outside Django's own pool, which handlers may exhaust."""
    settings = deepcopy(connection.settings_dict)
    settings["OPTIONS"].pop("pool", None)
    found = type(connection)(settings, connection.alias)
    # Only one thread borrows it at a time.
    found.inc_thread_sharing()
    return found


class StoresConnection:
    """A connection outside any transaction: statements are committed at once, unless we begin one."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.begun = False

    def send(self, request: SqlRequest) -> Reply:
        self._connect()
        with self.unbroken():
            return vendor_of(self.connection).send(self.connection, request)

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """Close the connection if an exception from outside interrupts a statement before the end of its reply.

        The next statement would read that reply.
        """
        from django.db import Error

        try:
            yield
        except (Error, OnefoldError):
            raise
        except BaseException:
            self.break_off()
            raise

    def break_off(self) -> None:
        """Close the connection, if it may have an unread reply."""
        found = self.connection.connection
        if found is not None and (self._is_between() or vendor_of(self.connection).may_be_torn(found)):
            # Inside a block, Django keeps it, refuses further statements, and drops it at the end.
            with suppress(Exception):
                self.connection.close()

    def _is_between(self) -> bool:
        """Return whether Django was switching autocommit: then it does not know the driver's mode."""
        return False

    def _connect(self) -> None:
        with connecting():
            self.connection.ensure_connection()

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        if self.begun:
            return [self.send(request) for request in requests]
        self.begin()
        replies = [self.send(request) for request in requests]
        self.commit()
        return replies

    def begin(self) -> None:
        self._connect()
        # By hand: a block of Django's uses the thread's connection, and this may be another one.
        self.run(vendor_of(self.connection).begin)
        self.begun = True

    def run(self, statement: str) -> None:
        with self.unbroken(), self.connection.cursor() as cursor:
            cursor.execute(statement)

    def commit(self) -> None:
        self.run("COMMIT")
        self.begun = False

    def rollback(self) -> None:
        self.run("ROLLBACK")
        self.begun = False

    def transaction_status(self) -> TransactionStatus:
        return TransactionStatus.OPEN if self.begun else TransactionStatus.IDLE

    def close(self) -> None:
        self.begun = False
        self.connection.close()

    def spoil(self) -> None:
        self.close()


class RenewalConnection(StoresConnection):
    """A connection that is kept for renewing claims."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        # A file needs no reserved connection; and across a fork it must not be open.
        self._keeps = vendor_of(connection).sql.has_server
        if self._keeps:
            # Connect now: when claims have to be renewed, the server may have no connection left.
            connection.ensure_connection()

    def transaction_status(self) -> TransactionStatus:
        return super().transaction_status() if self._keeps else TransactionStatus.BROKEN


class InsideConnection(StoresConnection):
    """A connection in a Django transaction: statements join it."""

    def send(self, request: SqlRequest) -> Reply:
        self.enter()
        return super().send(request)

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        return [self.send(request) for request in requests]

    def enter(self) -> None:
        if not in_transaction(self.connection):
            raise NotInTransaction(OUTSIDE)
        self.connection.ensure_connection()

    @property
    def vendor(self) -> Vendor:
        return vendor_of(self.connection)

    @property
    def is_torn(self) -> bool:
        found = None if self.connection.closed_in_transaction else self.connection.connection
        return found is not None and self.vendor.is_torn(found)

    def transaction_status(self) -> TransactionStatus:
        connection = self.connection
        if connection.connection is None or connection.closed_in_transaction:
            # Django itself closes none inside a block; and its block would end silently.
            return TransactionStatus.CLOSED
        if not in_transaction(connection):
            return TransactionStatus.IDLE
        if connection.errors_occurred and not self.vendor.is_alive(connection.connection):
            return TransactionStatus.BROKEN
        return (
            TransactionStatus.ABORTED
            if connection.needs_rollback
            else self.vendor.transaction_status(connection.connection)
        )

    def spoil(self) -> None:
        if self.is_torn:
            self.break_off()
        if self.connection.in_atomic_block:
            # Django refuses further statements, and rolls back at the end of the block.
            self.connection.set_rollback(True)
        elif self.connection.connection is not None:
            self.connection.rollback()


class AtomicConnection(InsideConnection):
    """The thread's own connection, in a block of ours: a handler's changes to models are in the transaction, too."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._block: Any = None
        self._part: Any = None
        self._begins = False

    def begin(self) -> None:
        from django.db import transaction

        if in_transaction(self.connection) and not _is_of_a_test(self.connection):
            raise UsageError(
                "transactional() opens its own transaction, but this thread is already in one: in a block of "
                "transaction.atomic(), perhaps that of ATOMIC_REQUESTS. Nothing ran. Join it with "
                "guard.within(connection), or call the function outside"
            )
        self._begins = True
        self._block = self._entered(transaction.atomic(using=self.connection.alias, durable=True))
        self._begins = False
        self.connection.execute_wrappers.append(self._watched)

    def _watched(self, execute: Any, *statement: Any) -> Any:
        """Send a handler's statement; keep Django from continuing at a savepoint on a torn connection."""
        with self.unbroken():
            return execute(*statement)

    def _is_between(self) -> bool:
        # An error of an on_commit hook is raised after the transaction has ended.
        connection = self.connection
        return not connection.in_atomic_block and (self._begins or not connection.autocommit)

    def _entered(self, block: Any) -> Any:
        with self.unbroken():
            block.__enter__()
        return block

    def run(self, statement: str) -> None:
        from django.db import transaction

        # Through Django's own savepoints: Django then forgets the hooks of rolled-back work.
        if statement.startswith("SAVEPOINT "):
            self._part = self._entered(transaction.atomic(using=self.connection.alias))
        elif statement.startswith("ROLLBACK TO SAVEPOINT "):
            self._leave_part(UNDO)
        else:
            super().run(statement)

    def commit(self) -> None:
        self._leave_part(None)
        self._leave(None)

    def rollback(self) -> None:
        self._leave_part(UNDO)
        self._leave(UNDO)

    def transaction_status(self) -> TransactionStatus:
        return TransactionStatus.IDLE if self._block is None else super().transaction_status()

    def close(self) -> None:
        """End the transaction that was begun; the connection itself belongs to the thread."""
        self.rollback()

    def _leave(self, error: Exception | None) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        if self._watched in self.connection.execute_wrappers:
            self.connection.execute_wrappers.remove(self._watched)
        with self.unbroken():
            block.__exit__(None if error is None else type(error), error, None)
        self._check_in_step(error)

    def _check_in_step(self, error: Exception | None) -> None:
        """Close a connection that is out of sync because a handler's statement was interrupted and others followed.

        A nested block of Django's in the handler rolls back to its savepoint by itself.
        """
        connection = self.connection
        found = None if connection.in_atomic_block else connection.connection
        if found is None or not self.vendor.is_behind(found, autocommit=connection.autocommit):
            return
        with suppress(Exception):
            connection.close()
        if error is None:
            raise lost_answer()

    def _leave_part(self, error: Exception | None) -> None:
        part, self._part = self._part, None
        if part is not None:
            with self.unbroken():
                part.__exit__(None if error is None else type(error), error, None)


def lost_answer() -> Exception:
    """Return the driver's error for a COMMIT that was sent but whose reply was not received."""
    from pymysql.constants import CR
    from pymysql.err import OperationalError

    return OperationalError(CR.CR_SERVER_LOST, "a statement was interrupted before this one, and its answer came late")


def _is_of_a_test(connection: Any) -> bool:
    """Return whether the block belongs to Django's TestCase, which Django itself ignores in this check, too."""
    return bool(connection.atomic_blocks and getattr(connection.atomic_blocks[-1], "_from_testcase", False))
