"""The interface between SQL stores and a driver: an adapter around one connection, and the classes of its errors.

An adapter sends statements, and begins and ends transactions only when told to. One adapter per driver serves the
store, transactions of our own and transactions of a caller.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple, Protocol

from onefold.errors import StoreUnavailable
from onefold.stores.sql.dialect import Dialect, Reply, SqlRequest


class TransactionStatus(Enum):
    """The transaction status of a connection."""

    IDLE = "no transaction is open"
    OPEN = "a transaction is open"
    ABORTED = "a statement failed, and the database refuses everything until the transaction is rolled back"
    CLOSED = "whoever works on the connection has closed it"
    BROKEN = "the connection is lost"


class Connection(Protocol):
    """One blocking connection. Its methods raise the driver's errors."""

    # The object that a handler gets as `tx`.
    connection: Any

    def send(self, request: SqlRequest) -> Reply:
        """Send one statement: in the open transaction, or else in one of its own that commits at once."""

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        """Send several statements in one transaction, and in one network message where the driver supports it."""

    def begin(self) -> None:
        """Begin a transaction; BEGIN may be sent together with the first statement."""

    def run(self, statement: str) -> None:
        """Run a statement without values, such as SAVEPOINT or ROLLBACK TO."""

    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def transaction_status(self) -> TransactionStatus: ...
    def close(self) -> None: ...

    def spoil(self) -> None:
        """Make sure that a caller's transaction cannot be committed after an interrupt, whatever was sent.

        Let the database refuse the commit where possible; else roll back, or close the connection.
        """


class AsyncConnection(Protocol):
    """The async counterpart; `transaction_status` answers without a round trip."""

    connection: Any
    # Whether the connection is usable again after `spoil`, once its transaction is rolled back.
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
        """Close the connection at once, without telling the server, for callers that cannot wait."""


class ConnectionSource(Protocol):
    """A pool, ours or the caller's."""

    def acquire(self) -> AbstractContextManager[Connection]:
        """Lend an idle connection; the borrower ends every transaction that it began on it."""

    def drop_idle(self) -> None:
        """Close the idle connections, if they are ours."""


class AsyncConnectionSource(Protocol):
    """The async counterpart."""

    def acquire(self) -> AbstractAsyncContextManager[AsyncConnection]: ...
    async def drop_idle(self) -> None: ...


class Reserves(ConnectionSource, Protocol):
    """One connection of the store's own, opened before the first claim depends on it."""

    @property
    def is_held(self) -> bool: ...
    def let_go(self) -> None: ...


class AsyncReserves(AsyncConnectionSource, Protocol):
    """The async counterpart."""

    @property
    def is_held(self) -> bool: ...
    async def let_go(self) -> None: ...


class StoresPool(ConnectionSource, Protocol):
    """A pool that a store can be built on."""

    def reserve(self) -> Reserves:
        """Return one extra connection, opened with the same settings, for renewing claims."""


class AsyncStoresPool(AsyncConnectionSource, Protocol):
    """The async counterpart."""

    def reserve(self) -> AsyncReserves: ...


class ErrorClass(Enum):
    """The meaning of a driver's error for the store."""

    # The connection is lost: the request in flight may or may not have been applied.
    LOST = "lost"
    # A serialization failure or a deadlock: nothing was applied, and a new transaction may succeed.
    CONFLICT = "conflict"
    # Our tables do not exist.
    NO_TABLES = "no tables"
    # The data or the statement is wrong: raise it to its author, because a retry does not help.
    MISTAKE = "mistake"
    # The server takes no writes, perhaps since a fail-over: nothing was applied, and a new connection may find another.
    READ_ONLY = "read-only"
    # The database cannot do it now: unreachable, full, permission denied, wrong password.
    DOWN = "down"


class ErrorInfo(NamedTuple):
    """A driver's error, classified by its code, with a message that says what to do."""

    kind: ErrorClass
    message: str


class Database(NamedTuple):
    """A database as the SQL stores see it."""

    sql: Dialect
    # The database's name for messages, without a password.
    name: str
    # Returns None for an error that is not this driver's.
    classify: Callable[[BaseException], ErrorInfo | None]
    # Taken while the tables are created, so that only one of many processes that start together creates them. Sent on
    # the creating connection after its transaction begins; `unlock`, if any, is sent before the commit.
    lock: str | None = None
    unlock: str | None = None
    auto_schema: bool = True
    # Whether the store purges expired records in the background.
    purges: bool = True


def cause_of(error: BaseException, database: Database) -> ErrorInfo | None:
    """Classify an error, including one that we or a library in between have wrapped."""
    seen: BaseException | None = error
    while seen is not None:
        found = database.classify(seen)
        if found is not None:
            return found
        seen = seen.__cause__
    return None


def lacks_tables(error: BaseException, database: Database) -> bool:
    """Return whether an error was raised because our tables do not exist."""
    info = cause_of(error, database)
    return info is not None and info.kind is ErrorClass.NO_TABLES


def down(database: Database, info: ErrorInfo) -> StoreUnavailable:
    return StoreUnavailable(f"{database.name}: {info.message}")


def no_tables(database: Database) -> StoreUnavailable:
    return StoreUnavailable(
        f"{database.name}: there are no Onefold tables, and auto_schema=False. Nothing ran. Create them with the "
        "command `onefold schema --store URL --apply`"
    )


def not_laid_out(database: Database) -> StoreUnavailable:
    return StoreUnavailable(
        f"{database.name}: Onefold's table has no partitions yet, and may not be changed here (auto_schema=no, or a "
        "command other than schema). Nothing ran. Create them with the command `onefold schema --store URL --apply`, "
        "with partitions= in the URL: all records stay. Or leave partitions= out"
    )


def cannot_make(database: Database) -> StoreUnavailable:
    return StoreUnavailable(
        f"{database.name}: there are no Onefold tables, and they cannot be created from here: that needs another "
        "connection, which failed. Nothing ran. Create them with the command `onefold schema --store URL --apply`"
    )


def dropped(database: Database) -> StoreUnavailable:
    return StoreUnavailable(
        f"{database.name}: Onefold's tables were dropped, or are not in this session's search_path. Nothing ran. Roll "
        "back, and deliver it again: then they are looked up, and created"
    )
