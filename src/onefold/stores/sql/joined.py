"""Records inside a transaction on a database server: the caller's, or one of our own, over any driver.

Nothing here begins or ends a transaction of the caller's, or creates a table in it. The rules are generators of
requests (`_concurrency.generators`), written once for sync and async.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import Any, Final, TypeVar

from onefold._concurrency import forks
from onefold._concurrency.generators import Flow, run, run_async
from onefold._concurrency.interrupts import When, brought_to_its_end
from onefold._model import GONE, Address, Claim, Commit, Ending, Entry, Gone, Record, Released
from onefold.errors import OnefoldError, UsageError
from onefold.stores.sql.connection import (
    AsyncConnection,
    AsyncConnectionSource,
    Connection,
    ConnectionSource,
    Database,
    ErrorClass,
    ErrorInfo,
    TransactionStatus,
    cause_of,
    down,
)
from onefold.stores.sql.dialect import SqlFlow
from onefold.stores.sql.joined_rules import (
    ENDED,
    SqlFlows,
    check_committable,
    is_known,
    is_to_spoil,
    is_torn,
    tell_if_ended,
    tell_no_savepoint,
)
from onefold.stores.sql.pool import inherited, run_on, run_on_async
from onefold.transactions import RecordColumn

T = TypeVar("T")

SAVEPOINT: Final = "onefold_handler"

# On Python 3.11 accessing an enum's members is slow.
OPEN: Final = TransactionStatus.OPEN
IDLE: Final = TransactionStatus.IDLE


class JoinedRecords(SqlFlows):
    """The operations of a store on a connection whose transaction is open. They raise the driver's errors."""

    conn: Connection
    _run_on = staticmethod(run_on)

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        request = self._asking(entry) if replacing is None else None
        if request is None:
            return run(self._say(self._claiming(entry, replacing)), self.conn)
        try:
            reply = self.conn.send(request)
        except Exception as error:
            self._explain(error)
            raise
        found = self._answered(entry, reply)
        return run(self._say(self.database.sql.claim_again(entry)), self.conn) if found is GONE else found

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return run(self._say(self._claiming_all(entries)), self.conn)

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return run(self._finish(claim, ending), self.conn)

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        return run(self._release(claim, released), self.conn)

    def read(self, address: Address) -> Record | None:
        return run(self._say(self.database.sql.read(address)), self.conn)

    def check_open(self, claim: Claim) -> None:
        """Raise `UsageError` where the record is not in the open transaction, or none is open."""
        if not self._is_proven(claim):
            run(self._check_open(claim), self.conn)

    def judge(self, claim: Claim, error: BaseException) -> None:
        run(self._say(self.database.sql.judge(claim, error)), self.conn)

    def spoil(self, when: When) -> None:
        """Make sure that nothing can be committed."""
        run(self._spoil(when))


class AsyncJoinedRecords(SqlFlows):
    """The async counterpart."""

    # Its operations wait for a server.
    in_process: Final = False

    conn: AsyncConnection
    _run_on = staticmethod(run_on_async)

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        request = self._asking(entry) if replacing is None else None
        if request is None:
            return await run_async(self._say(self._claiming(entry, replacing)), self.conn)
        try:
            reply = await self.conn.send(request)
        except Exception as error:
            self._explain(error)
            raise
        found = self._answered(entry, reply)
        return await run_async(self._say(self.database.sql.claim_again(entry)), self.conn) if found is GONE else found

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return await run_async(self._say(self._claiming_all(entries)), self.conn)

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        return await run_async(self._finish(claim, ending), self.conn)

    async def release(self, claim: Claim, released: Released | None = None) -> bool:
        return await run_async(self._release(claim, released), self.conn)

    async def read(self, address: Address) -> Record | None:
        return await run_async(self._say(self.database.sql.read(address)), self.conn)

    async def check_open(self, claim: Claim) -> None:
        """Raise `UsageError` where the record is not in the open transaction, or none is open."""
        if not self._is_proven(claim):
            await run_async(self._check_open(claim), self.conn)

    async def judge(self, claim: Claim, error: BaseException) -> None:
        await run_async(self._say(self.database.sql.judge(claim, error)), self.conn)

    async def spoil(self, when: When) -> None:
        """Make sure that nothing can be committed."""
        await run_async(self._spoil(when))

    def abandon(self) -> None:
        self.conn.abandon()


class TransactionRules(SqlFlows):
    """Transactions of our own, one after the other, each on a connection borrowed from the pool."""

    # None before the first transaction begins.
    conn: Any = None
    # Whether the records are rows that the handler writes: pending changes of a session have to be sent first.
    _reads_the_work = False
    # The pool's context manager, from which the connection is borrowed. Not in an `ExitStack`: an interrupt in there
    # leaves a reference cycle, and so the pool would get it back only from the garbage collector.
    _lent: Any = None

    def __init__(self, database: Database, pool: Any) -> None:
        self.database = database
        self._pool = pool
        self._begun = False
        # Whether a server has refused our record because it takes no writes.
        self._refused = False
        self._generation = forks.generation

    @property
    def tx(self) -> Any:
        return self.conn.connection if self._begun else None

    def knows(self, error: BaseException) -> bool:
        """Return whether an error is the database's or ours, including an OSError on the way to the server.

        No caller can commit after such an error: the transaction is ours, and is rolled back.
        """
        return is_known(error, self.database)

    def keep_in_rows(self, column: RecordColumn) -> None:
        """Let the caller's own rows be the records of this transaction."""
        self.database = self.database._replace(sql=self.database.sql.rows_of(column))
        self._reads_the_work = True

    def _borrow(self, lent: Any) -> Any:
        """Enter the pool's context manager, and keep it until the connection is returned."""
        raise NotImplementedError

    def let_go(self) -> Any:
        """Return the connection to the pool."""
        raise NotImplementedError

    def _begin(self) -> Flow[None]:
        for is_last in (False, True):
            try:
                if self._begun:
                    yield self.let_go
                if self._refused:
                    # Our own connection, which is idle now, among them.
                    yield self._pool.drop_idle
                self.conn = yield partial(self._borrow, self._pool.acquire())
                self._begun, self._check, self._spoiled = True, None, False
                yield self.conn.begin
            except Exception as error:
                if is_last or not is_lost(error, self.database):
                    explain(error, self.database)
                    raise
            else:
                return
            # A restarted server has closed the idle connections of the pool. Nothing has run: retry once on a new one.
            yield self.let_go
            yield self._pool.drop_idle

    def _check_open(self, claim: Claim) -> Flow[None]:
        check = self._checking(claim)
        if check is not None:
            self._check_transaction_status()
            self._check = check
        elif self.conn.transaction_status() is not TransactionStatus.BROKEN:
            # A lost connection has committed nothing, and the COMMIT reports it.
            yield from super()._check_open(claim)

    def _checking(self, claim: Claim) -> str | None:
        """Return a check that is sent with the COMMIT, or None if the record has to be checked beforehand."""
        return self.database.sql.checking(claim) if hasattr(self.conn, "commit_if") else None

    def _finish(self, claim: Claim, ending: Ending) -> Flow[bool]:
        self._check = None
        if self._reads_the_work and hasattr(self.conn, "flush"):
            yield self.conn.flush
        return (yield from super()._finish(claim, ending))

    def _commit(self) -> Flow[Commit]:
        self._check_transaction_status()
        try:
            yield self.conn.commit if self._check is None else partial(self.conn.commit_if, self._check)
        except Exception as error:
            if not self.knows(error):
                # Interrupted from outside, perhaps before the reply was read: a ROLLBACK would read that reply as its
                # own.
                yield self.conn.spoil
                raise
            return (yield from self._after_commit(error))
        return Commit.DONE

    def _after_commit(self, error: Exception) -> Flow[Commit]:
        info = cause_of(error, self.database)
        unknown = info is not None and info.kind is ErrorClass.LOST
        yield from self._undo()
        if self.database.sql.says_gone(error):
            raise UsageError(ENDED) from error
        if unknown:
            yield self._pool.drop_idle
            return Commit.UNKNOWN
        return refused_commit(error, self.database, info)

    def _rollback(self, error: BaseException, *, to_savepoint: bool) -> Flow[bool]:
        if not self._begun:
            return False
        if (
            to_savepoint
            and self.conn.transaction_status() in (TransactionStatus.OPEN, TransactionStatus.ABORTED)
            and not is_torn(self.conn)
        ):
            yield from self._undo_handler()
            return False
        again = (tries_again(error, self.database, self.conn) or self._is_refused(error)) and not self._spoiled
        tell_if_ended(error, self.database, self.conn, spoiled=self._spoiled)
        yield from self._undo()
        if self.conn.transaction_status() is TransactionStatus.BROKEN:
            # The idle connections of the pool were probably lost with it.
            yield self._pool.drop_idle
        return again

    def _is_refused(self, error: BaseException) -> bool:
        """Return whether the server took no record of ours, for the first time: another one may, after a fail-over.

        An error of the handler's own statement is its author's: our record was written before.
        """
        info = cause_of(error, self.database)
        if not isinstance(error, OnefoldError) or info is None or info.kind is not ErrorClass.READ_ONLY:
            return False
        before, self._refused = self._refused, True
        return not before

    def _undo_handler(self) -> Flow[None]:
        try:
            yield partial(self.conn.run, f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
        except Exception as error:
            tell_no_savepoint(error, self.database)
            raise

    def _undo(self) -> Flow[None]:
        if is_torn(self.conn):
            yield self.conn.spoil
        if self.conn.transaction_status() in (TransactionStatus.OPEN, TransactionStatus.ABORTED):
            try:
                yield self.conn.rollback
            except Exception as error:
                # The pool closes an unusable connection, which rolls back too. But an interrupt has to propagate.
                if not self.knows(error):
                    yield self.conn.spoil
                    raise

    def _is_over(self) -> bool:
        """Return whether there is nothing to undo."""
        return self.conn.transaction_status() is IDLE and not is_torn(self.conn)

    def _check_transaction_status(self) -> None:
        if self._spoiled or self.conn.transaction_status() is not OPEN:
            check_committable(self.conn, spoiled=self._spoiled)

    def _spoil(self, when: When) -> Flow[None]:
        """Make sure that nothing can be committed: a nested delivery may have been interrupted, and its error caught.

        A connection interrupted in the middle of a request is closed when it is returned.
        """
        if self._begun and is_to_spoil(self.conn, when):
            self._spoiled = True
            yield self.conn.spoil

    def _is_ours(self) -> bool:
        """Return whether a connection has to be given back. A child that a handler has forked leaves it alone."""
        if self._begun and self._generation != forks.generation:
            self._begun = False
            inherited.append(self._lent)
        return self._begun

    def _say(self, flow: SqlFlow[T]) -> SqlFlow[T]:
        try:
            return (yield from flow)
        except Exception as error:
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        explain(error, self.database)


class SqlTransaction(TransactionRules, JoinedRecords):
    """Transactions of our own, blocking."""

    _pool: ConnectionSource

    def _borrow(self, lent: AbstractContextManager[Connection]) -> Connection:
        found = lent.__enter__()
        self._lent = lent
        return found

    def begin(self) -> None:
        run(self._begin())

    def save(self) -> None:
        self.conn.run(f"SAVEPOINT {SAVEPOINT}")

    def commit(self) -> Commit:
        return run(self._commit())

    def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        return run(self._rollback(error, to_savepoint=to_savepoint), self.conn)

    def let_go(self) -> None:
        """Give the connection back."""
        if self._is_ours():
            try:
                if not self._is_over():
                    run(self._undo())
            finally:
                self._begun = False
                lent, self._lent = self._lent, None
                lent.__exit__(None, None, None)


class AsyncSqlTransaction(TransactionRules, AsyncJoinedRecords):
    """The async counterpart."""

    _pool: AsyncConnectionSource

    async def _borrow(self, lent: AbstractAsyncContextManager[AsyncConnection]) -> AsyncConnection:
        found = await lent.__aenter__()
        self._lent = lent
        return found

    async def begin(self) -> None:
        await run_async(self._begin())

    async def save(self) -> None:
        await self.conn.run(f"SAVEPOINT {SAVEPOINT}")

    async def commit(self) -> Commit:
        return await run_async(self._commit())

    async def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        return await run_async(self._rollback(error, to_savepoint=to_savepoint), self.conn)

    def abandon(self) -> None:
        if self._begun:
            self.conn.abandon()

    async def let_go(self) -> None:
        """Return the connection despite cancellation: it must neither stay in a transaction nor be reused in one."""
        if self._is_ours():
            self._begun = False
            await brought_to_its_end(self._give_back(), self.conn.abandon)

    async def _give_back(self) -> None:
        try:
            if not self._is_over():
                await run_async(self._undo())
        finally:
            lent, self._lent = self._lent, None
            await lent.__aexit__(None, None, None)


def explain(error: Exception, database: Database) -> None:
    """Raise the meaning of a driver's error as `StoreUnavailable`; leave our errors and other errors alone."""
    info = cause_of(error, database)
    if info is not None and not isinstance(error, OnefoldError):
        raise down(database, info) from error


def is_lost(error: Exception, database: Database) -> bool:
    """Return whether the connection was lost. A failure to connect has been explained already."""
    info = cause_of(error, database)
    return info is not None and info.kind is ErrorClass.LOST and not isinstance(error, OnefoldError)


def tries_again(error: BaseException, database: Database, conn: Connection | AsyncConnection) -> bool:
    """Return whether a new transaction may succeed. A connection lost before COMMIT has committed nothing."""
    info = cause_of(error, database)
    if info is None:
        return False
    return info.kind is ErrorClass.CONFLICT or (
        info.kind is ErrorClass.LOST and conn.transaction_status() is TransactionStatus.BROKEN
    )


def refused_commit(error: Exception, database: Database, info: ErrorInfo | None) -> Commit:
    """Handle a COMMIT that the server answered with an error: nothing was written."""
    if info is None or info.kind is ErrorClass.MISTAKE:
        # A deferred constraint: the handler's own mistake, which a retry would not fix.
        raise error
    if info.kind is ErrorClass.CONFLICT:
        return Commit.CONFLICT
    raise down(database, info) from error
