"""What a driver adds to the SQL stores: an adapter around one connection, and the meaning of the driver's errors.

An adapter sends statements and begins and ends transactions when it is told to, never by itself. Whoever writes a
driver's adapter writes it once for the store, for transactions of our own and for those of a caller.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple, Protocol

from onefold.errors import StoreUnavailable
from onefold.stores.sql.dialect import Dialect, Reply, SqlRequest


class TransactionStatus(Enum):
    """Where a connection stands."""

    IDLE = "no transaction is open"
    OPEN = "a transaction is open"
    ABORTED = "a statement failed, and the database refuses everything until the transaction is rolled back"
    CLOSED = "whoever works on the connection has closed it"
    BROKEN = "the connection is lost"


class Connection(Protocol):
    """One connection, blocking. It raises the driver's errors."""

    # What a handler gets as `tx`.
    connection: Any

    def send(self, request: SqlRequest) -> Reply:
        """One statement: in the open transaction, or where none is open in one of its own that commits at once."""

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        """Several, in one network message where the driver can; all in one transaction."""

    def begin(self) -> None:
        """Begin a transaction; it may wait to be sent with the first statement."""

    def run(self, statement: str) -> None:
        """A statement without values: SAVEPOINT, ROLLBACK TO."""

    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def transaction_status(self) -> TransactionStatus: ...
    def close(self) -> None: ...

    def spoil(self) -> None:
        """After an interrupt in a transaction of a caller's: make sure that it cannot be committed, whatever was sent.

        Let the database refuse it, where that is possible; else roll it back, or close the connection.
        """


class AsyncConnection(Protocol):
    """The async counterpart; `transaction_status` is known without asking."""

    connection: Any
    # Whether a connection can be used after `spoil`, once its transaction is rolled back.
    spoils_gently: bool

    async def send(self, request: SqlRequest) -> Reply: ...
    async def send_all(self, requests: list[SqlRequest]) -> list[Reply]: ...
    async def begin(self) -> None: ...
    async def run(self, statement: str) -> None: ...
    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...
    def transaction_status(self) -> TransactionStatus: ...
    async def close(self) -> None: ...
    async def spoil(self) -> None: ...

    def abandon(self) -> None:
        """Close the connection at once, without a word to the server: for whoever cannot wait."""


class ConnectionSource(Protocol):
    """A pool, ours or the caller's."""

    def acquire(self) -> AbstractContextManager[Connection]:
        """A connection that is idle; whoever borrowed it ends what was begun on it."""

    def drop_idle(self) -> None:
        """Close what nobody uses, if it is ours."""


class AsyncConnectionSource(Protocol):
    """The async counterpart."""

    def acquire(self) -> AbstractAsyncContextManager[AsyncConnection]: ...
    async def drop_idle(self) -> None: ...


class Reserves(ConnectionSource, Protocol):
    """One connection of the store's own, opened before the first claim counts on it."""

    @property
    def is_held(self) -> bool: ...
    def let_go(self) -> None: ...


class AsyncReserves(AsyncConnectionSource, Protocol):
    """The async counterpart."""

    @property
    def is_held(self) -> bool: ...
    async def let_go(self) -> None: ...


class StoresPool(ConnectionSource, Protocol):
    """A pool on which a store can be."""

    def reserve(self) -> Reserves:
        """Return one connection more, opened with the same settings, for the renewal of claims."""


class AsyncStoresPool(AsyncConnectionSource, Protocol):
    """The async counterpart."""

    def reserve(self) -> AsyncReserves: ...


class ErrorClass(Enum):
    """What an error of a driver means for us."""

    # The connection is gone: whatever was under way may have been applied or not.
    LOST = "lost"
    # A serialization failure or a deadlock: nothing was applied, and a new transaction may succeed.
    CONFLICT = "conflict"
    # Our tables are not there.
    NO_TABLES = "no tables"
    # The data or the statement is wrong: whoever wrote it has to know, and trying again does not help.
    MISTAKE = "mistake"
    # The database cannot do it now: absent, full, read-only, no permission, wrong password.
    DOWN = "down"


class ErrorInfo(NamedTuple):
    """An error of a driver, by its code: what it means, and words that say what to do."""

    kind: ErrorClass
    message: str


class Database(NamedTuple):
    """A database as the SQL stores see it."""

    sql: Dialect
    # For messages: without a password.
    name: str
    # None: not an error of this driver.
    classify: Callable[[BaseException], ErrorInfo | None]
    # Around the making of the tables, so that of many that start together one makes them. Sent on the connection that
    # makes them, after its transaction was begun; `unlock` before it is committed, where there is one.
    lock: str | None = None
    unlock: str | None = None
    auto_schema: bool = True
    # Whether the store purges a little as it works.
    purges: bool = True


def cause_of(error: BaseException, database: Database) -> ErrorInfo | None:
    """Classify an error, which may have been wrapped by us or by a library between."""
    seen: BaseException | None = error
    while seen is not None:
        found = database.classify(seen)
        if found is not None:
            return found
        seen = seen.__cause__
    return None


def down(database: Database, info: ErrorInfo) -> StoreUnavailable:
    return StoreUnavailable(f"{database.name}: {info.message}")


def no_tables(database: Database) -> StoreUnavailable:
    return StoreUnavailable(
        f"{database.name}: there are no tables of Onefold, and auto_schema=False. Nothing ran. "
        "Make them with the command `onefold schema URL --apply`"
    )
