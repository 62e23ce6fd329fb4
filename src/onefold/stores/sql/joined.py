"""Records inside a transaction on a database server: the caller's, or one of our own, over any driver.

Nothing here begins or ends a transaction of the caller's, and nothing here makes a table in it. The rules are
generators of requests (`_generators`), written once for sync and async.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any, Final, TypeVar

from onefold._generators import Work, run, run_async
from onefold._interrupts import When, brought_to_its_end
from onefold._model import Address, Claim, Commit, Ending, Entry, Gone, Memory, Record
from onefold.errors import OnefoldError, UsageError
from onefold.stores.sql.connection import (
    AsyncLink,
    Database,
    Kind,
    Lends,
    LendsAwaited,
    Link,
    Standing,
    Trouble,
    cause_of,
    down,
)
from onefold.stores.sql.dialect import Talk
from onefold.stores.sql.joined_rules import (
    ENDED,
    Talks,
    check_committable,
    is_to_spoil,
    is_torn,
    tell_if_ended,
    tell_no_savepoint,
)
from onefold.stores.sql.pool import run_on, run_on_async

T = TypeVar("T")

SAVEPOINT: Final = "onefold_handler"


class JoinedRecords(Talks):
    """The operations of a store on a link whose transaction is open. It raises what the driver raises."""

    link: Link
    _run_on = staticmethod(run_on)

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return run(self._say(self._claiming(entry, replacing)), self.link)

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return run(self._say(self._claiming_all(entries)), self.link)

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return run(self._finish(claim, ending), self.link)

    def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        return run(self._release(claim, memory), self.link)

    def read(self, address: Address) -> Record | None:
        return run(self._say(self.database.sql.read(address)), self.link)

    def check_open(self, claim: Claim) -> None:
        """Raise `UsageError` where the record is not in the open transaction, or none is open."""
        run(self._check_open(claim), self.link)

    def judge(self, claim: Claim, error: BaseException) -> None:
        run(self._say(self.database.sql.judge(claim, error)), self.link)

    def spoil(self, when: When) -> None:
        """Leave nothing that could be committed."""
        run(self._spoil(when))


class AsyncJoinedRecords(Talks):
    """The same, awaited."""

    # Its operations wait for a server.
    in_process: Final = False

    link: AsyncLink
    _run_on = staticmethod(run_on_async)

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return await run_async(self._say(self._claiming(entry, replacing)), self.link)

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return await run_async(self._say(self._claiming_all(entries)), self.link)

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        return await run_async(self._finish(claim, ending), self.link)

    async def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        return await run_async(self._release(claim, memory), self.link)

    async def read(self, address: Address) -> Record | None:
        return await run_async(self._say(self.database.sql.read(address)), self.link)

    async def check_open(self, claim: Claim) -> None:
        """Raise `UsageError` where the record is not in the open transaction, or none is open."""
        await run_async(self._check_open(claim), self.link)

    async def judge(self, claim: Claim, error: BaseException) -> None:
        await run_async(self._say(self.database.sql.judge(claim, error)), self.link)

    async def spoil(self, when: When) -> None:
        """Leave nothing that could be committed."""
        await run_async(self._spoil(when))

    def abandon(self) -> None:
        self.link.abandon()


class TransactionRules(Talks):
    """Transactions of our own, one after the other, each on a link that the pool lends."""

    # None before the first is begun.
    link: Any = None
    # Keep what the pool lends until it is let go.
    _enter: Callable[[Any], Any]

    def __init__(self, database: Database, pool: Any) -> None:
        self.database = database
        self._pool = pool
        self._begun = False

    @property
    def tx(self) -> Any:
        return self.link.connection if self._begun else None

    def let_go(self) -> Any:
        """Give the link back."""
        raise NotImplementedError

    def _begin(self) -> Work[None]:
        for is_last in (False, True):
            try:
                if self._begun:
                    yield self.let_go
                self.link = yield partial(self._enter, self._pool.lend())
                self._begun, self._check, self._spoiled = True, None, False
                yield self.link.begin
            except Exception as error:
                if is_last or not is_lost(error, self.database):
                    explain(error, self.database)
                    raise
            else:
                return
            # A server that was restarted has ended what waits in the pool. Nothing has run: once more, on a new one.
            yield self.let_go
            yield self._pool.drop_idle

    def _check_open(self, claim: Claim) -> Work[None]:
        check = self._checking(claim)
        if check is not None:
            self._check_standing()
            self._check = check
        elif self.link.standing() is not Standing.BROKEN:
            # What is lost has committed nothing, and the COMMIT says so.
            yield from super()._check_open(claim)

    def _checking(self, claim: Claim) -> str | None:
        """How the record can be checked with the COMMIT, in one message; None: it has to be checked before."""
        return self.database.sql.checking(claim) if hasattr(self.link, "commit_if") else None

    def _finish(self, claim: Claim, ending: Ending) -> Work[bool]:
        self._check = None
        return super()._finish(claim, ending)

    def _commit(self) -> Work[Commit]:
        self._check_standing()
        try:
            yield self.link.commit if self._check is None else partial(self.link.commit_if, self._check)
        except Exception as error:
            if not self.knows(error):
                # From outside, and perhaps before the answer was read: a ROLLBACK would be told that.
                yield self.link.spoil
                raise
            return (yield from self._after_commit(error))
        return Commit.DONE

    def _after_commit(self, error: Exception) -> Work[Commit]:
        trouble = cause_of(error, self.database)
        unknown = trouble is not None and trouble.kind is Kind.LOST
        yield from self._undo()
        if self.database.sql.says_gone(error):
            raise UsageError(ENDED) from error
        if unknown:
            yield self._pool.drop_idle
            return Commit.UNKNOWN
        return refused_commit(error, self.database, trouble)

    def _rollback(self, error: BaseException, *, to_savepoint: bool) -> Work[bool]:
        if not self._begun:
            return False
        if to_savepoint and self.link.standing() in (Standing.OPEN, Standing.ABORTED) and not is_torn(self.link):
            yield from self._undo_handler()
            return False
        again = tries_again(error, self.database, self.link) and not self._spoiled
        tell_if_ended(error, self.database, self.link, spoiled=self._spoiled)
        yield from self._undo()
        if self.link.standing() is Standing.BROKEN:
            # What waits in the pool was probably cut with it.
            yield self._pool.drop_idle
        return again

    def _undo_handler(self) -> Work[None]:
        try:
            yield partial(self.link.run, f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
        except Exception as error:
            tell_no_savepoint(error, self.database)
            raise

    def _undo(self) -> Work[None]:
        if is_torn(self.link):
            yield self.link.spoil
        if self.link.standing() in (Standing.OPEN, Standing.ABORTED):
            try:
                yield self.link.rollback
            except Exception as error:
                # The pool closes what it cannot use again, and that rolls back too. But an interrupt goes on.
                if not self.knows(error):
                    yield self.link.spoil
                    raise

    def _check_standing(self) -> None:
        check_committable(self.link, spoiled=self._spoiled)

    def _spoil(self, when: When) -> Work[None]:
        """Leave nothing that could be committed: it may be a nested delivery that was interrupted, and be caught.

        What was interrupted on the way is closed when it is let go.
        """
        if self._begun and is_to_spoil(self.link, when):
            self._spoiled = True
            yield self.link.spoil

    def _say(self, talk: Talk[T]) -> Talk[T]:
        try:
            return (yield from talk)
        except Exception as error:
            explain(error, self.database)
            raise


class SqlTransaction(TransactionRules, JoinedRecords):
    """Transactions of our own, blocking."""

    def __init__(self, database: Database, pool: Lends) -> None:
        super().__init__(database, pool)
        self._lent = ExitStack()
        self._enter = self._lent.enter_context

    def begin(self) -> None:
        run(self._begin())

    def save(self) -> None:
        self.link.run(f"SAVEPOINT {SAVEPOINT}")

    def commit(self) -> Commit:
        return run(self._commit())

    def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        return run(self._rollback(error, to_savepoint=to_savepoint), self.link)

    def let_go(self) -> None:
        """Give the link back."""
        if self._begun:
            try:
                run(self._undo())
            finally:
                self._begun = False
                self._lent.close()


class AsyncSqlTransaction(TransactionRules, AsyncJoinedRecords):
    """The same, awaited."""

    def __init__(self, database: Database, pool: LendsAwaited) -> None:
        super().__init__(database, pool)
        self._lent = AsyncExitStack()
        self._enter = self._lent.enter_async_context

    async def begin(self) -> None:
        await run_async(self._begin())

    async def save(self) -> None:
        await self.link.run(f"SAVEPOINT {SAVEPOINT}")

    async def commit(self) -> Commit:
        return await run_async(self._commit())

    async def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        return await run_async(self._rollback(error, to_savepoint=to_savepoint), self.link)

    def abandon(self) -> None:
        if self._begun:
            self.link.abandon()

    async def let_go(self) -> None:
        """Give the link back, whatever cancels us meanwhile: in a transaction it must not stay, nor be used again."""
        if self._begun:
            self._begun = False
            await brought_to_its_end(self._give_back(), self.link.abandon)

    async def _give_back(self) -> None:
        try:
            await run_async(self._undo())
        finally:
            await self._lent.aclose()


def explain(error: Exception, database: Database) -> None:
    """Raise what a driver's error means, in words. What is no driver's error, or has its words, is left alone."""
    trouble = cause_of(error, database)
    if trouble is not None and not isinstance(error, OnefoldError):
        raise down(database, trouble) from error


def is_lost(error: Exception, database: Database) -> bool:
    """Whether the connection was lost. One that could not be opened has its words already."""
    trouble = cause_of(error, database)
    return trouble is not None and trouble.kind is Kind.LOST and not isinstance(error, OnefoldError)


def tries_again(error: BaseException, database: Database, link: Link | AsyncLink) -> bool:
    """Whether a new transaction may succeed. A connection lost before COMMIT has committed nothing."""
    trouble = cause_of(error, database)
    if trouble is None:
        return False
    return trouble.kind is Kind.CONFLICT or (trouble.kind is Kind.LOST and link.standing() is Standing.BROKEN)


def refused_commit(error: Exception, database: Database, trouble: Trouble | None) -> Commit:
    """After a COMMIT that the server answered with an error: nothing was written."""
    if trouble is None or trouble.kind is Kind.MISTAKE:
        # A constraint that is checked at the end: the handler's own mistake, which trying again would not mend.
        raise error
    if trouble.kind is Kind.CONFLICT:
        return Commit.CONFLICT
    raise down(database, trouble) from error
