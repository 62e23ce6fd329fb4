"""The rules for a record inside a transaction: the statements to send and the meaning of the replies, sync and async.

After the handler the record has to exist still, in the transaction that wrote it. Nothing here sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSet, Sequence
from functools import cache
from typing import Any, Final, TypeVar

from onefold._concurrency.generators import Flow
from onefold._concurrency.interrupts import When
from onefold._concurrency.users_errors import add_note
from onefold._entry_points import CONNECTIONS, installed
from onefold._model import Claim, Ending, Entry, Gone, Record, Released
from onefold.errors import OnefoldError, StoreUnavailable, UsageError
from onefold.stores.sql.connection import (
    AsyncConnection,
    Connection,
    Database,
    ErrorClass,
    TransactionStatus,
    cause_of,
    dropped,
    lacks_tables,
)
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest

T = TypeVar("T")

# True however the transaction was ended: nobody can know here what the handler committed.
WHAT_STAYS: Final = (
    "What it committed stays, and so does the record that was committed with it: then the next delivery is answered as "
    "done, and what was not committed is not done again. The next delivery runs only if all of it was rolled back"
)

ENDED: Final = (
    "the handler ended the transaction by itself, or went back to a savepoint from before its record, so its record "
    "and its work were not committed together. Leave commit(), rollback() and close() to whoever began it, and let the "
    "database's errors propagate: a deadlock ends a transaction, too. On MySQL and MariaDB so does every statement "
    f"that commits by itself: DDL (CREATE, ALTER, DROP, TRUNCATE), LOCK TABLES, ANALYZE TABLE. {WHAT_STAYS}"
)

ABORTED: Final = (
    "a statement of the handler failed, and the handler continued: the database has aborted the transaction, and would "
    "silently roll it back at its end. Let the error propagate, or put what may fail into a savepoint"
)

FAILED_BEFORE: Final = (
    "a statement failed in this transaction before, and the database refuses everything until it is rolled back. "
    "Nothing ran. Roll back, or put what may fail into a savepoint"
)

INTERRUPTED: Final = (
    "a delivery inside this one was interrupted (a cancelled task, a timeout, Ctrl-C), and the handler around it "
    "continued: nothing that either of them wrote in the transaction is committed, and the next delivery runs. Let the "
    "interrupt propagate, or shield the delivery from it with asyncio.shield and await it"
)


# Packages between a driver and its caller, whose errors are the database's as well.
WRAPPERS: Final = frozenset({"aiosqlite", "psycopg_pool"})


@cache
def drivers() -> frozenset[str]:
    """Return the packages whose errors are the database's, also those that `Database.classify` does not classify."""
    return WRAPPERS.union(installed(CONNECTIONS))


def is_known(error: BaseException, database: Database) -> bool:
    """Return whether an error is the database's, its driver's or ours, rather than raised from outside."""
    if isinstance(error, OnefoldError) or cause_of(error, database) is not None:
        return True
    return any(parent.__module__.partition(".")[0] in drivers() for parent in type(error).__mro__)


class SqlFlows:
    """The operations of a store on a connection whose transaction is open, for sync and async alike.

    They raise the driver's errors.
    """

    database: Database
    conn: Any
    # Runs a generator on a connection borrowed from a pool.
    _run_on: Callable[..., Any]
    # A statement to send with the COMMIT.
    _check: str | None = None
    # Whether an interrupt has made sure that the transaction is not committed.
    _spoiled = False
    # Asks for so many batches of a purge after the caller's commit. None where nobody tells us of the commit.
    purge_after_commit: Callable[[int], None] | None = None

    def __init__(self, database: Database, conn: Any) -> None:
        self.database = database
        self.conn = conn

    @property
    def tx(self) -> Any:
        return self.conn.connection

    def knows(self, error: BaseException) -> bool:
        """Return whether an error is the database's or ours. Any other came from outside, as from a signal handler.

        On an open connection an OSError is neither: it says that somebody stopped waiting for the reply (asyncpg's
        `command_timeout`, an alarm). The statement may have been executed, and must not be committed.
        """
        return not isinstance(error, OSError) and is_known(error, self.database)

    def _say(self, flow: SqlFlow[T]) -> SqlFlow[T]:
        """Send a flow's statements; subclasses explain errors here that the driver cannot."""
        return flow

    def _explain(self, error: Exception) -> None:
        """Raise what the driver cannot know about its error."""

    # A claim that is one statement is sent without a flow around it: see `Dialect.asking`.

    def _asking(self, entry: Entry) -> SqlRequest | None:
        """Return the statement to send; None: only the flow of `_claiming` will do."""
        del entry
        return None

    def _answered(self, entry: Entry, reply: Reply) -> Record | Gone | None:
        """Return the answer of the claim; GONE: go on with the flow of `claim_again`."""
        return self.database.sql.answered(entry, reply)

    def _is_proven(self, claim: Claim) -> bool:
        """Return whether the record is certainly in the open transaction, without asking the server."""
        del claim
        return False

    def _check_transaction_status(self) -> None:
        check_open(self.conn)

    def _claiming(self, entry: Entry, replacing: Record | None) -> SqlFlow[Record | Gone | None]:
        found = yield from self.database.sql.claim_joined(entry, replacing)
        if found is None:
            yield from self.database.sql.mark(Claim(entry.address, entry.token))
        return found

    def _claiming_all(self, entries: Sequence[Entry]) -> SqlFlow[list[Record | Gone | None]]:
        return self.database.sql.claim_all(entries)

    def _finish(self, claim: Claim, ending: Ending) -> Flow[bool]:
        self._check_transaction_status()
        if not (yield from self._say(self._finishing(claim, ending))):
            raise UsageError(ENDED)
        return True

    def _finishing(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        return self.database.sql.finish_joined(claim, ending)

    def _release(self, claim: Claim, released: Released | None) -> Flow[bool]:
        if is_torn(self.conn):
            yield self.conn.spoil
        if self.conn.transaction_status() is not TransactionStatus.OPEN:
            # An aborted transaction takes the record back by itself.
            return True
        return (yield from self._say(self._releasing(claim, released)))

    def _releasing(self, claim: Claim, released: Released | None) -> SqlFlow[bool]:
        is_released = yield from self.database.sql.release(claim, released)
        yield from self.database.sql.unmark(claim)
        return is_released

    def _check_open(self, claim: Claim) -> Flow[None]:
        """Raise `UsageError` where the record is not in the open transaction, or none is open."""
        self._check_transaction_status()
        if not (yield from self._say(self._proving(claim))):
            raise UsageError(ENDED)

    def _proving(self, claim: Claim) -> SqlFlow[bool]:
        """Return whether the record still exists, in the transaction that wrote it."""
        return self.database.sql.still_there(claim)

    def _spoil(self, when: When) -> Flow[None]:
        # An interrupt in the handler counts as an error of the handler: the record was removed, and the caller
        # decides. But cancelled work must not be committed, if the connection is usable after `spoil`.
        if not when.is_inside or (when is When.CANCELLED and self.conn.spoils_gently):
            yield self.conn.spoil


def check_committable(conn: Connection | AsyncConnection, *, spoiled: bool) -> None:
    """Raise `UsageError` if a transaction of our own can no longer be committed, and say why."""
    if spoiled:
        raise UsageError(INTERRUPTED)
    check_open(conn)


def is_to_spoil(conn: Connection | AsyncConnection, when: When) -> bool:
    """Return whether a transaction of our own could be committed although a delivery in it was interrupted.

    After an interrupt in the handler of the outermost delivery it was rolled back. If it is still open, the interrupted
    handler belongs to a nested delivery, whose record was taken back but whose writes are still there.
    """
    if when.is_inside:
        return conn.transaction_status() in (TransactionStatus.OPEN, TransactionStatus.ABORTED)
    return conn.transaction_status() is not TransactionStatus.BROKEN


def is_torn(conn: Connection) -> bool:
    """Return whether an interrupt left an unread reply on this connection: nothing more must be sent on it.

    Connections whose drivers handle that themselves do not report it.
    """
    return bool(getattr(conn, "is_torn", False))


def check_open(conn: Connection | AsyncConnection) -> None:
    """Raise `UsageError` where later statements could not be committed together with the work."""
    match conn.transaction_status():
        case TransactionStatus.IDLE | TransactionStatus.CLOSED:
            raise UsageError(ENDED)
        case TransactionStatus.ABORTED:
            raise UsageError(ABORTED)


class FoundIn:
    """The databases where the tables were found, so that nobody has to look again.

    Where they were found and then missing, sessions may differ in their schemas, as with a schema for each tenant:
    from then on each transaction looks, because no session can speak for another.
    """

    def __init__(self, kind: Callable[[], MutableSet[Any]] = set) -> None:
        self._found = kind()
        self._varying = kind()

    def __contains__(self, database_id: object) -> bool:
        return database_id in self._found

    def add(self, database_id: object) -> None:
        if database_id not in self._varying:
            self._found.add(database_id)

    def lose(self, database_id: object, *, varies: bool) -> None:
        self._found.discard(database_id)
        if varies:
            self._varying.add(database_id)

    def clear(self) -> None:
        """Forget everything."""
        self._found.clear()
        self._varying.clear()


def tell_unusable(error: Exception, database: Database, found: FoundIn, database_id: object, *, first: bool) -> None:
    """Raise what a caller's driver cannot know: why the transaction is aborted. Leave all other errors to the driver.

    `found` holds the databases where the tables were seen; `first` tells that no statement of ours was sent before.
    """
    seen: BaseException | None = error
    while seen is not None:
        if database.sql.was_given_up(seen):
            # Not from an error of ours, which would name another reason.
            raise UsageError(FAILED_BEFORE if first else ABORTED) from (
                seen if isinstance(error, OnefoldError) else error
            )
        seen = seen.__cause__
    if lacks_tables(error, database) and not isinstance(error, StoreUnavailable):
        # Somebody has dropped them, or they are in the schema of another session.
        found.lose(database_id, varies=database.sql.searches_schemas)
        if database.sql.searches_schemas:
            # PostgreSQL has aborted the transaction. The next delivery looks again.
            raise dropped(database) from error


def tell_no_savepoint(error: Exception, database: Database) -> None:
    """Raise `UsageError` if our savepoint does not exist: the handler has ended its transaction."""
    info = cause_of(error, database)
    if info is not None and info.kind is ErrorClass.MISTAKE:
        raise UsageError(ENDED) from error


def tell_if_ended(
    error: BaseException, database: Database, conn: Connection | AsyncConnection, *, spoiled: bool
) -> None:
    """Note on a handler's error that the handler also ended the transaction, unless a database error ended it."""
    if spoiled:
        add_note(error, f"onefold: {INTERRUPTED}")
    elif (
        conn.transaction_status() in (TransactionStatus.IDLE, TransactionStatus.CLOSED)
        and cause_of(error, database) is None
    ):
        add_note(error, f"Also: {ENDED}")
