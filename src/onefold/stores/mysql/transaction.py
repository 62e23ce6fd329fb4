"""Transactions of our own on MySQL or MariaDB, which a handler's statement, or its error, can end without a word.

The transaction that wrote the record is marked by a savepoint. After the handler the server is asked for it: whatever
has ended that transaction, a statement, a procedure, DDL or an error, has taken the savepoint along.
"""

from __future__ import annotations

from onefold._generators import Work
from onefold._model import Claim, Ending, Entry, Gone, Record
from onefold.stores.sql.connection import Standing, cause_of
from onefold.stores.sql.dialect import Talk
from onefold.stores.sql.joined import AsyncSqlTransaction, SqlTransaction, TransactionRules
from onefold.stores.sql.joined_rules import ENDED


class Marking(TransactionRules):
    """The rules of a transaction on connections that remember an error which has undone it."""

    # The claim whose savepoint is set.
    _marked: Claim | None = None

    def _claiming(self, entry: Entry, replacing: Record | None) -> Talk[Record | Gone | None]:
        self._marked = None
        found = yield from self.database.sql.claim_marked(entry, replacing)
        if found is None:
            self._marked = Claim(entry.address, entry.token)
        return found

    def _proving(self, claim: Claim) -> Talk[bool]:
        return self._proven(self.database.sql.unmark(claim))

    def _finishing(self, claim: Claim, ending: Ending) -> Talk[bool]:
        return self._proven(self.database.sql.finish_marked(claim, ending))

    def _proven(self, talk: Talk[bool]) -> Talk[bool]:
        self._marked = None
        still = yield from talk
        if not still:
            # Nobody knows in which state the handler has left it: locked tables, autocommit, a transaction of its own.
            self.link.connection.watch.broken = True
        return still

    def _telling(self, error: BaseException) -> Talk[None]:
        """Add to a handler's error, which is the one to show, that it has ended the transaction, too."""
        watch = self.link.connection.watch
        if self._marked is None or watch.is_undone or self.link.standing() is not Standing.OPEN:
            return
        try:
            still = yield from self._proving(self._marked)
        except Exception:  # noqa: BLE001 - what is lost has committed nothing
            return
        if not still and cause_of(error, self.database) is None and ENDED not in str(error):
            error.add_note(f"Besides, {ENDED}")

    def _check_standing(self) -> None:
        super()._check_standing()
        self.link.connection.watch.check()

    def _rollback(self, error: BaseException, *, to_savepoint: bool) -> Work[bool]:
        if self._begun and to_savepoint:
            # After a deadlock there is no savepoint any more.
            self._check_standing()
        elif self._begun:
            yield from self._say(self._telling(error))
        return (yield from super()._rollback(error, to_savepoint=to_savepoint))


class MysqlTransaction(Marking, SqlTransaction):
    """Transactions of our own, blocking."""


class AsyncMysqlTransaction(Marking, AsyncSqlTransaction):
    """The same, awaited."""
