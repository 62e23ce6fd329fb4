"""What is said to a database about a record inside a transaction, and what its answers mean, sync and async.

After the handler the record has to be there still, in the transaction that wrote it. Nothing here sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from onefold._concurrency.generators import Work
from onefold._concurrency.interrupts import When
from onefold._model import Claim, Ending, Entry, Gone, Record, Released
from onefold.errors import OnefoldError, UsageError
from onefold.stores.sql.connection import AsyncConnection, Connection, Database, ErrorClass, TransactionStatus, cause_of
from onefold.stores.sql.dialect import SqlFlow

T = TypeVar("T")

# What is true of it, whichever way it was ended: nobody can know here what the handler committed.
WHAT_STAYS: Final = (
    "What it committed stays, and so does the record that was committed with it: then the next delivery is answered as "
    "done, and what came after is not made up for. Only where it was all rolled back does the next delivery run"
)

ENDED: Final = (
    "the handler ended the transaction by itself, or went back to a savepoint from before its record, so that its "
    "record and its work were not committed together. "
    "Leave commit(), rollback() and close() to whoever began it, and let the database's errors out: a deadlock ends a "
    "transaction, too. On MySQL and MariaDB so does every statement that commits by itself: DDL (CREATE, ALTER, DROP, "
    "TRUNCATE), LOCK TABLES, ANALYZE TABLE. "
    f"{WHAT_STAYS}"
)

ABORTED: Final = (
    "a statement of the handler failed, and the handler went on: the database has given the transaction up, and would "
    "roll it back at its end without a word. Let the error out, or put what may fail into a savepoint"
)

INTERRUPTED: Final = (
    "a delivery inside of this one was interrupted (a cancelled task, a time-out, Ctrl-C), and the handler around it "
    "went on: what was written in the transaction is not committed, of neither, and the next delivery runs. Let the "
    "interrupt out, or shield the delivery from it with asyncio.shield and await it"
)


# Whose errors are the database's, also those that `Database.classify` has no meaning for.
SPEAKERS: Final = frozenset(
    {"aiosqlite", "asyncmy", "asyncpg", "django", "psycopg", "psycopg_pool", "pymysql", "sqlalchemy", "sqlite3"}
)


def is_known(error: BaseException, database: Database) -> bool:
    """Return whether an error is the database's, its driver's or ours, and did not come from outside."""
    if isinstance(error, OnefoldError) or cause_of(error, database) is not None:
        return True
    return any(parent.__module__.partition(".")[0] in SPEAKERS for parent in type(error).__mro__)


class SqlFlows:
    """The operations of a store on a connection whose transaction is open, for sync and async alike.

    They raise what the driver raises.
    """

    database: Database
    conn: Any
    # Run a generator on a connection that a pool lends.
    _run_on: Callable[..., Any]
    # A statement that is to be sent with the COMMIT.
    _check: str | None = None
    # Whether an interrupt has made sure that the transaction is not committed.
    _spoiled = False

    def __init__(self, database: Database, conn: Any) -> None:
        self.database = database
        self.conn = conn

    @property
    def tx(self) -> Any:
        return self.conn.connection

    def knows(self, error: BaseException) -> bool:
        """Return whether an error is the database's or ours. Any other came from outside, as from a signal's handler.

        An OSError is none of theirs on a connection that is open: it says that somebody did not wait for the answer
        (asyncpg's `command_timeout`, an alarm). What was sent may have been executed, and must not be committed.
        """
        return not isinstance(error, OSError) and is_known(error, self.database)

    def _say(self, flow: SqlFlow[T]) -> SqlFlow[T]:
        """Say something to the database; whoever knows more of its errors than the driver adds that here."""
        return flow

    def _check_transaction_status(self) -> None:
        check_open(self.conn)

    def _claiming(self, entry: Entry, replacing: Record | None) -> SqlFlow[Record | Gone | None]:
        found = yield from self.database.sql.claim_joined(entry, replacing)
        if found is None:
            yield from self.database.sql.mark(Claim(entry.address, entry.token))
        return found

    def _claiming_all(self, entries: Sequence[Entry]) -> SqlFlow[list[Record | Gone | None]]:
        return self.database.sql.claim_all(entries)

    def _finish(self, claim: Claim, ending: Ending) -> Work[bool]:
        self._check_transaction_status()
        if not (yield from self._say(self._finishing(claim, ending))):
            raise UsageError(ENDED)
        return True

    def _finishing(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        return self.database.sql.finish_joined(claim, ending)

    def _release(self, claim: Claim, released: Released | None) -> Work[bool]:
        if is_torn(self.conn):
            yield self.conn.spoil
        if self.conn.transaction_status() is not TransactionStatus.OPEN:
            # A transaction that was given up takes the record back by itself.
            return True
        return (yield from self._say(self._releasing(claim, released)))

    def _releasing(self, claim: Claim, released: Released | None) -> SqlFlow[bool]:
        is_released = yield from self.database.sql.release(claim, released)
        yield from self.database.sql.unmark(claim)
        return is_released

    def _check_open(self, claim: Claim) -> Work[None]:
        """Raise `UsageError` where the record is not in the open transaction, or none is open."""
        self._check_transaction_status()
        if not (yield from self._say(self._proving(claim))):
            raise UsageError(ENDED)

    def _proving(self, claim: Claim) -> SqlFlow[bool]:
        """Whether the record is still there, in the transaction that wrote it."""
        return self.database.sql.still_there(claim)

    def _spoil(self, when: When) -> Work[None]:
        # A handler's own interrupt is as its errors are: the record was taken back, and the caller decides. But what
        # was cancelled is not to be committed, if the connection can be used after that.
        if not when.is_inside or (when is When.CANCELLED and self.conn.spoils_gently):
            yield self.conn.spoil


def check_committable(conn: Connection | AsyncConnection, *, spoiled: bool) -> None:
    """Raise `UsageError` where a transaction of our own cannot be committed any more, and say why."""
    if spoiled:
        raise UsageError(INTERRUPTED)
    check_open(conn)


def is_to_spoil(conn: Connection | AsyncConnection, when: When) -> bool:
    """Whether a transaction of our own could be committed although a delivery in it was interrupted.

    After an interrupt in the handler of the outermost delivery it was rolled back. If it is still open, the interrupted
    handler is a nested one's, whose record was taken back, and whose writes are there.
    """
    if when.is_inside:
        return conn.transaction_status() in (TransactionStatus.OPEN, TransactionStatus.ABORTED)
    return conn.transaction_status() is not TransactionStatus.BROKEN


def is_torn(conn: Connection) -> bool:
    """Return whether an interrupt has left an answer unread on this connection: nothing must be sent on it any more.

    Links whose drivers see to that themselves do not tell.
    """
    return bool(getattr(conn, "is_torn", False))


def check_open(conn: Connection | AsyncConnection) -> None:
    """Raise `UsageError` where what follows could not be committed together with the work."""
    match conn.transaction_status():
        case TransactionStatus.IDLE | TransactionStatus.CLOSED:
            raise UsageError(ENDED)
        case TransactionStatus.ABORTED:
            raise UsageError(ABORTED)


def tell_no_savepoint(error: Exception, database: Database) -> None:
    """Raise `UsageError` where our savepoint is not there: the handler has ended its transaction."""
    info = cause_of(error, database)
    if info is not None and info.kind is ErrorClass.MISTAKE:
        raise UsageError(ENDED) from error


def tell_if_ended(
    error: BaseException, database: Database, conn: Connection | AsyncConnection, *, spoiled: bool
) -> None:
    """Add to a handler's error that the handler has ended the transaction, too. An error of a database may end one."""
    if spoiled:
        error.add_note(f"onefold: {INTERRUPTED}")
    elif (
        conn.transaction_status() in (TransactionStatus.IDLE, TransactionStatus.CLOSED)
        and cause_of(error, database) is None
    ):
        error.add_note(f"Besides, {ENDED}")
