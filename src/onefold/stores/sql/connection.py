"""What a driver adds to the SQL stores: a link, which is one connection, and the meaning of the driver's errors.

A link sends statements and begins and ends transactions when it is told to, never by itself. Whoever writes a driver's
link writes it once for the store, for transactions of our own and for those of a caller.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple, Protocol

from onefold.errors import StoreUnavailable
from onefold.stores.sql.dialect import Ask, Dialect, Reply


class Standing(Enum):
    """Where a connection stands."""

    IDLE = "no transaction is open"
    OPEN = "a transaction is open"
    ABORTED = "a statement failed, and the database refuses everything until the transaction is rolled back"
    CLOSED = "whoever works on the connection has closed it"
    BROKEN = "the connection is lost"


class Link(Protocol):
    """One connection, blocking. It raises the driver's errors."""

    # What a handler gets as `tx`.
    connection: Any

    def send(self, ask: Ask) -> Reply:
        """One statement: in the open transaction, or where none is open in one of its own that commits at once."""

    def send_all(self, asks: list[Ask]) -> list[Reply]:
        """Several, in one network message where the driver can; all in one transaction."""

    def begin(self) -> None:
        """Begin a transaction; it may wait to be sent with the first statement."""

    def run(self, statement: str) -> None:
        """A statement without values: SAVEPOINT, ROLLBACK TO."""

    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def standing(self) -> Standing: ...
    def close(self) -> None: ...

    def spoil(self) -> None:
        """After an interrupt in a transaction of a caller's: make sure that it cannot be committed, whatever was sent.

        Let the database refuse it, where that is possible; else roll it back, or close the connection.
        """


class AsyncLink(Protocol):
    """The same, awaited; `standing` is known without asking."""

    connection: Any
    # Whether a connection can be used after `spoil`, once its transaction is rolled back.
    spoils_gently: bool

    async def send(self, ask: Ask) -> Reply: ...
    async def send_all(self, asks: list[Ask]) -> list[Reply]: ...
    async def begin(self) -> None: ...
    async def run(self, statement: str) -> None: ...
    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...
    def standing(self) -> Standing: ...
    async def close(self) -> None: ...
    async def spoil(self) -> None: ...

    def abandon(self) -> None:
        """Close the connection at once, without a word to the server: for whoever cannot wait."""


class Lends(Protocol):
    """A pool, ours or the caller's."""

    def lend(self) -> AbstractContextManager[Link]:
        """A link that is idle; whoever borrowed it ends what was begun on it."""

    def drop_idle(self) -> None:
        """Close what nobody uses, if it is ours."""


class LendsAwaited(Protocol):
    """The same, awaited."""

    def lend(self) -> AbstractAsyncContextManager[AsyncLink]: ...
    async def drop_idle(self) -> None: ...


class Reserves(Lends, Protocol):
    """One connection of the store's own, opened before the first claim counts on it."""

    @property
    def is_held(self) -> bool: ...
    def let_go(self) -> None: ...


class ReservesAwaited(LendsAwaited, Protocol):
    """The same, awaited."""

    @property
    def is_held(self) -> bool: ...
    async def let_go(self) -> None: ...


class StoresPool(Lends, Protocol):
    """A pool on which a store can be."""

    def reserve(self) -> Reserves:
        """Return one connection more, opened with the same settings, for the renewal of claims."""


class AsyncStoresPool(LendsAwaited, Protocol):
    """The same, awaited."""

    def reserve(self) -> ReservesAwaited: ...


class Kind(Enum):
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


class Trouble(NamedTuple):
    """An error of a driver, by its code: what it means, and words that say what to do."""

    kind: Kind
    words: str


class Database(NamedTuple):
    """A database as the SQL stores see it."""

    sql: Dialect
    # For messages: without a password.
    name: str
    # None: not an error of this driver.
    trouble: Callable[[BaseException], Trouble | None]
    # Around the making of the tables, so that of many that start together one makes them. Sent on the link that makes
    # them, after its transaction was begun; `unlock` before it is committed, where there is one.
    lock: str | None = None
    unlock: str | None = None
    auto_schema: bool = True
    # Whether the store purges a little as it works.
    purges: bool = True


def cause_of(error: BaseException, database: Database) -> Trouble | None:
    """The trouble behind an error, which may have been wrapped by us or by a library between."""
    seen: BaseException | None = error
    while seen is not None:
        found = database.trouble(seen)
        if found is not None:
            return found
        seen = seen.__cause__
    return None


def down(database: Database, trouble: Trouble) -> StoreUnavailable:
    return StoreUnavailable(f"{database.name}: {trouble.words}")


def no_tables(database: Database) -> StoreUnavailable:
    return StoreUnavailable(
        f"{database.name}: there are no tables of Onefold, and auto_schema=False. Nothing ran. "
        "Make them with the command `onefold schema URL --apply`"
    )
