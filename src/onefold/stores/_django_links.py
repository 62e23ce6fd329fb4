"""Links over Django's connections: outside of any transaction, in a caller's, and in one of ours.

Statements go through Django's own cursor, so that its loggers, wrappers and error classes stay in force. Transactions
of ours are blocks of `transaction.atomic()`, so that what a handler gives to `on_commit` runs after our commit.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final

from onefold._driver_connections import register
from onefold.errors import NotInTransaction, UsageError
from onefold.stores._django_vendors import Vendor, vendor_of
from onefold.stores._reserved import connecting
from onefold.stores._sql_dialect import Ask, Reply
from onefold.stores._sql_links import Database, Standing

OUTSIDE: Final = (
    "this connection is not in a transaction: the record and the work would not be committed together. Nothing ran. "
    "Put both into `with transaction.atomic():`"
)

# What a block of Django's is left with, so that it rolls back.
UNDO: Final = Exception("rolled back")


def database_of(connection: Any) -> Database:
    """The database behind a connection, as the SQL stores see it."""
    vendor = vendor_of(connection)
    return Database(vendor.sql, f"django://{connection.alias}", vendor.trouble, vendor.lock, vendor.unlock)


def in_transaction(connection: Any) -> bool:
    """Whether somebody has begun one: by a block, or by switching autocommit off."""
    if connection.connection is None:
        # Not connected: it does not know yet.
        return bool(connection.in_atomic_block or not connection.settings_dict["AUTOCOMMIT"])
    return bool(connection.in_atomic_block or not connection.autocommit)


def _driver_connection_of(connection: Any) -> Any:
    """The driver's connection behind a wrapper, or behind what stands for a thread's wrapper."""
    from django.db import connections
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.utils.connection import ConnectionProxy

    if isinstance(connection, BaseDatabaseWrapper):
        return connection.connection
    # By its type: `isinstance` would be answered by the wrapper.
    return connections[connection.alias] if type(connection) is ConnectionProxy else None


register("django", _driver_connection_of)


def beside(connection: Any) -> Any:
    """Return another connection with the same settings, outside of Django's own pool: handlers may hold all of that."""
    settings = deepcopy(connection.settings_dict)
    settings["OPTIONS"].pop("pool", None)
    found = type(connection)(settings, connection.alias)
    # Whichever thread borrows it has it to itself.
    found.inc_thread_sharing()
    return found


class StoresLink:
    """On a connection that is in nobody's transaction: what is sent is committed at once, unless we begin one."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.begun = False

    def send(self, ask: Ask) -> Reply:
        self._connect()
        return vendor_of(self.connection).send(self.connection, ask)

    def _connect(self) -> None:
        with connecting():
            self.connection.ensure_connection()

    def send_all(self, asks: list[Ask]) -> list[Reply]:
        if self.begun:
            return [self.send(ask) for ask in asks]
        self.begin()
        replies = [self.send(ask) for ask in asks]
        self.commit()
        return replies

    def begin(self) -> None:
        self._connect()
        # By hand: a block of Django's is on whichever connection the thread has, and this one may be another.
        self.run(vendor_of(self.connection).begin)
        self.begun = True

    def run(self, statement: str) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(statement)

    def commit(self) -> None:
        self.run("COMMIT")
        self.begun = False

    def rollback(self) -> None:
        self.run("ROLLBACK")
        self.begun = False

    def standing(self) -> Standing:
        return Standing.OPEN if self.begun else Standing.IDLE

    def close(self) -> None:
        self.begun = False
        self.connection.close()

    def spoil(self) -> None:
        self.close()


class RenewalLink(StoresLink):
    """On a connection that is kept for the renewal of claims."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        # A file has room for everybody; but over a fork nothing may be open there.
        self._keeps = connection.vendor != "sqlite"
        if self._keeps:
            # Now: when claims are to be renewed, there may be no room left on the server.
            connection.ensure_connection()

    def standing(self) -> Standing:
        return super().standing() if self._keeps else Standing.BROKEN


class InsideLink(StoresLink):
    """On a connection in a transaction of Django's: what is sent joins it."""

    def send(self, ask: Ask) -> Reply:
        self.enter()
        return super().send(ask)

    def send_all(self, asks: list[Ask]) -> list[Reply]:
        return [self.send(ask) for ask in asks]

    def enter(self) -> None:
        if not in_transaction(self.connection):
            raise NotInTransaction(OUTSIDE)
        self.connection.ensure_connection()

    @property
    def vendor(self) -> Vendor:
        return vendor_of(self.connection)

    def standing(self) -> Standing:
        connection = self.connection
        if connection.connection is None or connection.closed_in_transaction:
            # Django closes none by itself inside a block; and its block would end without a word.
            return Standing.CLOSED
        if not in_transaction(connection):
            return Standing.IDLE
        if connection.errors_occurred and not self.vendor.is_alive(connection.connection):
            return Standing.BROKEN
        return Standing.ABORTED if connection.needs_rollback else self.vendor.standing(connection.connection)

    def spoil(self) -> None:
        if self.connection.in_atomic_block:
            # Django refuses what follows, and rolls back at the end of the block.
            self.connection.set_rollback(True)
        elif self.connection.connection is not None:
            self.connection.rollback()


class AtomicLink(InsideLink):
    """On the thread's own connection, in a block of ours: what a handler does by models is in the transaction, too."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._block: Any = None
        self._part: Any = None

    def begin(self) -> None:
        from django.db import transaction

        if in_transaction(self.connection) and not _is_of_a_test(self.connection):
            raise UsageError(
                "transactional() opens a transaction of its own, and this thread is in one already: in a block of "
                "transaction.atomic(), perhaps that of ATOMIC_REQUESTS. Nothing ran. Join it with "
                "guard.within(connection), or call the function outside"
            )
        self._block = transaction.atomic(using=self.connection.alias, durable=True)
        self._block.__enter__()

    def run(self, statement: str) -> None:
        from django.db import transaction

        # By Django's own means: it forgets the hooks of what is rolled back.
        if statement.startswith("SAVEPOINT "):
            self._part = transaction.atomic(using=self.connection.alias)
            self._part.__enter__()
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

    def standing(self) -> Standing:
        return Standing.IDLE if self._block is None else super().standing()

    def close(self) -> None:
        """The connection is the thread's; only what was begun on it is ended."""
        self.rollback()

    def _leave(self, error: Exception | None) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None if error is None else type(error), error, None)

    def _leave_part(self, error: Exception | None) -> None:
        part, self._part = self._part, None
        if part is not None:
            part.__exit__(None if error is None else type(error), error, None)


def _is_of_a_test(connection: Any) -> bool:
    """Django's TestCase puts each test into a block of its own; Django, too, looks through that one."""
    return bool(connection.atomic_blocks and getattr(connection.atomic_blocks[-1], "_from_testcase", False))
