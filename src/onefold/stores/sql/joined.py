"""Records inside a transaction on a database server: the caller's, or one of our own, over any driver.

Nothing here begins or ends a transaction of the caller's, and nothing here makes a table in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Final, TypeVar

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
from onefold.stores.sql.dialect import Talk, carry, carry_async
from onefold.stores.sql.joined_rules import (
    ENDED,
    Talks,
    check_committable,
    check_open,
    is_to_spoil,
    is_torn,
    tell_if_ended,
    tell_no_savepoint,
)

T = TypeVar("T")

SAVEPOINT: Final = "onefold_handler"


class JoinedRecords(Talks):
    """The operations of a store on a link whose transaction is open. It raises what the driver raises."""

    def __init__(self, database: Database, link: Link) -> None:
        self.database = database
        self.link = link

    @property
    def tx(self) -> Any:
        return self.link.connection

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return self._do(self._claiming(entry, replacing))

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return self._do(self.database.sql.claim_all(entries))

    def finish(self, claim: Claim, ending: Ending) -> bool:
        self._check_standing()
        if not self._do(self._finishing(claim, ending)):
            raise UsageError(ENDED)
        return True

    def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        if is_torn(self.link):
            self.link.spoil()
        if self.link.standing() is not Standing.OPEN:
            # A transaction that was given up takes the record back by itself.
            return True
        return self._do(self._releasing(claim, memory))

    def read(self, address: Address) -> Record | None:
        return self._do(self.database.sql.read(address))

    def check_open(self, claim: Claim) -> None:
        """Raise `UsageError` where the record is not in the open transaction, or none is open."""
        self._check_standing()
        if not self._do(self._proving(claim)):
            raise UsageError(ENDED)

    def judge(self, claim: Claim, error: BaseException) -> None:
        self._do(self.database.sql.judge(claim, error))

    def _check_standing(self) -> None:
        check_open(self.link)

    def spoil(self, when: When) -> None:
        # A handler's own interrupt is as its errors are: the record was taken back, and the caller decides.
        if not when.is_inside:
            self.link.spoil()

    def _do(self, talk: Talk[T]) -> T:
        return carry(talk, self.link)


class SqlTransaction(JoinedRecords):
    """Transactions of our own, one after the other, each on a link that the pool lends."""

    link: Link

    def __init__(self, database: Database, pool: Lends) -> None:
        self.database = database
        self._pool = pool
        self._lent = ExitStack()
        self._begun = False

    @property
    def tx(self) -> Any:
        # None before it is begun: there is no connection yet.
        return self.link.connection if self._begun else None

    def begin(self) -> None:
        try:
            self._begin()
        except Exception as error:
            if not is_lost(error, self.database):
                explain(error, self.database)
                raise
            # A server that was restarted has ended what waits in the pool. Nothing has run: once more, on a new one.
            self.let_go()
            self._pool.drop_idle()
            self._begin_once_more()

    def _begin(self) -> None:
        self.let_go()
        self.link = self._lent.enter_context(self._pool.lend())
        self._begun, self._check, self._spoiled = True, None, False
        self.link.begin()

    def _begin_once_more(self) -> None:
        try:
            self._begin()
        except Exception as error:
            explain(error, self.database)
            raise

    def save(self) -> None:
        self.link.run(f"SAVEPOINT {SAVEPOINT}")

    def check_open(self, claim: Claim) -> None:
        check = self._checking(claim)
        if check is not None:
            self._check_standing()
            self._check = check
        elif self.link.standing() is not Standing.BROKEN:
            # What is lost has committed nothing, and the COMMIT says so.
            super().check_open(claim)

    def finish(self, claim: Claim, ending: Ending) -> bool:
        self._check = None
        return super().finish(claim, ending)

    def commit(self) -> Commit:
        self._check_standing()
        try:
            self._committing()
        except Exception as error:
            if not self.knows(error):
                # From outside, and perhaps before the answer was read: a ROLLBACK would be told that.
                self.link.spoil()
                raise
            return self._after_commit(error)
        return Commit.DONE

    def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        if not self._begun:
            return False
        if to_savepoint and self.link.standing() in (Standing.OPEN, Standing.ABORTED) and not is_torn(self.link):
            self._undo_handler()
            return False
        again = tries_again(error, self.database, self.link) and not self._spoiled
        tell_if_ended(error, self.database, self.link, spoiled=self._spoiled)
        self._undo()
        if self.link.standing() is Standing.BROKEN:
            # What waits in the pool was probably cut with it.
            self._pool.drop_idle()
        return again

    def _check_standing(self) -> None:
        check_committable(self.link, spoiled=self._spoiled)

    def _undo_handler(self) -> None:
        try:
            self.link.run(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
        except Exception as error:
            tell_no_savepoint(error, self.database)
            raise

    def spoil(self, when: When) -> None:
        """Leave nothing that could be committed: it may be a nested delivery that was interrupted, and be caught."""
        if self._begun and is_to_spoil(self.link, when):
            self._spoiled = True
            self.link.spoil()

    def let_go(self) -> None:
        """Give the link back."""
        if self._begun:
            try:
                self._undo()
            finally:
                self._begun = False
                self._lent.close()

    def _do(self, talk: Talk[T]) -> T:
        try:
            return super()._do(talk)
        except Exception as error:
            explain(error, self.database)
            raise

    def _after_commit(self, error: Exception) -> Commit:
        trouble = cause_of(error, self.database)
        unknown = trouble is not None and trouble.kind is Kind.LOST
        self._undo()
        if self.database.sql.says_gone(error):
            raise UsageError(ENDED) from error
        if unknown:
            self._pool.drop_idle()
            return Commit.UNKNOWN
        return refused_commit(error, self.database, trouble)

    def _undo(self) -> None:
        if is_torn(self.link):
            self.link.spoil()
        if self.link.standing() in (Standing.OPEN, Standing.ABORTED):
            try:
                self.link.rollback()
            except Exception as error:
                # The pool closes what it cannot use again, and that rolls back too. But an interrupt goes on.
                if not self.knows(error):
                    self.link.spoil()
                    raise


class AsyncJoinedRecords(Talks):
    """The same, awaited."""

    # Its operations wait for a server.
    in_process: Final = False

    def __init__(self, database: Database, link: AsyncLink) -> None:
        self.database = database
        self.link = link

    @property
    def tx(self) -> Any:
        return self.link.connection

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return await self._do(self._claiming(entry, replacing))

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return await self._do(self.database.sql.claim_all(entries))

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        await self._check_standing()
        if not await self._do(self._finishing(claim, ending)):
            raise UsageError(ENDED)
        return True

    async def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        if self.link.standing() is not Standing.OPEN:
            # A transaction that was given up takes the record back by itself.
            return True
        return await self._do(self._releasing(claim, memory))

    async def read(self, address: Address) -> Record | None:
        return await self._do(self.database.sql.read(address))

    async def check_open(self, claim: Claim) -> None:
        """Raise `UsageError` where the record is not in the open transaction, or none is open."""
        await self._check_standing()
        if not await self._do(self._proving(claim)):
            raise UsageError(ENDED)

    async def judge(self, claim: Claim, error: BaseException) -> None:
        await self._do(self.database.sql.judge(claim, error))

    async def _check_standing(self) -> None:
        check_open(self.link)

    async def spoil(self, when: When) -> None:
        # A handler's own interrupt is as its errors are: the record was taken back, and the caller decides. But what
        # was cancelled is not to be committed, if the connection can be used after that.
        if not when.is_inside or (when is When.CANCELLED and self.link.spoils_gently):
            await self.link.spoil()

    def abandon(self) -> None:
        self.link.abandon()

    async def _do(self, talk: Talk[T]) -> T:
        return await carry_async(talk, self.link)


class AsyncSqlTransaction(AsyncJoinedRecords):
    """The same, awaited."""

    link: AsyncLink

    def __init__(self, database: Database, pool: LendsAwaited) -> None:
        self.database = database
        self._pool = pool
        self._lent = AsyncExitStack()
        self._begun = False

    @property
    def tx(self) -> Any:
        return self.link.connection if self._begun else None

    async def begin(self) -> None:
        try:
            await self._begin()
        except Exception as error:
            if not is_lost(error, self.database):
                explain(error, self.database)
                raise
            await self.let_go()
            await self._pool.drop_idle()
            await self._begin_once_more()

    async def _begin(self) -> None:
        await self.let_go()
        self.link = await self._lent.enter_async_context(self._pool.lend())
        self._begun, self._check, self._spoiled = True, None, False
        await self.link.begin()

    async def _begin_once_more(self) -> None:
        try:
            await self._begin()
        except Exception as error:
            explain(error, self.database)
            raise

    async def save(self) -> None:
        await self.link.run(f"SAVEPOINT {SAVEPOINT}")

    async def check_open(self, claim: Claim) -> None:
        check = self._checking(claim)
        if check is not None:
            await self._check_standing()
            self._check = check
        elif self.link.standing() is not Standing.BROKEN:
            # What is lost has committed nothing, and the COMMIT says so.
            await super().check_open(claim)

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        self._check = None
        return await super().finish(claim, ending)

    async def commit(self) -> Commit:
        await self._check_standing()
        try:
            await self._committing()
        except Exception as error:
            if not self.knows(error):
                await self.link.spoil()
                raise
            return await self._after_commit(error)
        return Commit.DONE

    async def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        if not self._begun:
            return False
        if to_savepoint and self.link.standing() in (Standing.OPEN, Standing.ABORTED):
            await self._undo_handler()
            return False
        again = tries_again(error, self.database, self.link) and not self._spoiled
        tell_if_ended(error, self.database, self.link, spoiled=self._spoiled)
        await self._undo()
        if self.link.standing() is Standing.BROKEN:
            await self._pool.drop_idle()
        return again

    async def _check_standing(self) -> None:
        check_committable(self.link, spoiled=self._spoiled)

    async def _undo_handler(self) -> None:
        try:
            await self.link.run(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
        except Exception as error:
            tell_no_savepoint(error, self.database)
            raise

    async def spoil(self, when: When) -> None:
        """Leave nothing that could be committed. What was interrupted on the way is closed when it is let go."""
        if self._begun and is_to_spoil(self.link, when):
            self._spoiled = True
            await self.link.spoil()

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
            await self._undo()
        finally:
            await self._lent.aclose()

    async def _do(self, talk: Talk[T]) -> T:
        try:
            return await super()._do(talk)
        except Exception as error:
            explain(error, self.database)
            raise

    async def _after_commit(self, error: Exception) -> Commit:
        trouble = cause_of(error, self.database)
        unknown = trouble is not None and trouble.kind is Kind.LOST
        await self._undo()
        if self.database.sql.says_gone(error):
            raise UsageError(ENDED) from error
        if unknown:
            await self._pool.drop_idle()
            return Commit.UNKNOWN
        return refused_commit(error, self.database, trouble)

    async def _undo(self) -> None:
        if self.link.standing() in (Standing.OPEN, Standing.ABORTED):
            try:
                await self.link.rollback()
            except Exception as error:
                if not self.knows(error):
                    await self.link.spoil()
                    raise


# The rules, for both colours.


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
