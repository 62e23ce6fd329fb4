"""Transactions of our own on MySQL or MariaDB, which a handler's statement, or its error, can end without a word.

The transaction that wrote the record is marked by a savepoint. After the handler the server is asked for it: whatever
has ended that transaction, a statement, a procedure, DDL or an error, has taken the savepoint along.
"""

from __future__ import annotations

from onefold._concurrency.generators import Work
from onefold._model import Claim, Ending, Entry, Gone, Record
from onefold.stores.sql.connection import TransactionStatus, cause_of
from onefold.stores.sql.dialect import SqlFlow
from onefold.stores.sql.joined import AsyncSqlTransaction, SqlTransaction, TransactionRules
from onefold.stores.sql.joined_rules import ENDED


class Marking(TransactionRules):
    """The rules of a transaction on connections that remember an error which has undone it."""

    # The claim whose savepoint is set.
    _marked: Claim | None = None

    def _claiming(self, entry: Entry, replacing: Record | None) -> SqlFlow[Record | Gone | None]:
        self._marked = None
        found = yield from self.database.sql.claim_marked(entry, replacing)
        if found is None:
            self._marked = Claim(entry.address, entry.token)
        return found

    def _proving(self, claim: Claim) -> SqlFlow[bool]:
        return self._proven(self.database.sql.unmark(claim))

    def _finishing(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        return self._proven(self.database.sql.finish_marked(claim, ending))

    def _proven(self, flow: SqlFlow[bool]) -> SqlFlow[bool]:
        self._marked = None
        still = yield from flow
        if not still:
            # Nobody knows in which state the handler has left it: locked tables, autocommit, a transaction of its own.
            self.conn.connection.monitor.broken = True
        return still

    def _returning(self, error: BaseException) -> SqlFlow[None]:
        """Add to a handler's error, which is the one to show, that it has ended the transaction, too."""
        monitor = self.conn.connection.monitor
        if self._marked is None or monitor.is_undone or self.conn.transaction_status() is not TransactionStatus.OPEN:
            return
        try:
            still = yield from self._proving(self._marked)
        except Exception:  # noqa: BLE001 - what is lost has committed nothing
            return
        if not still and cause_of(error, self.database) is None and ENDED not in str(error):
            error.add_note(f"Besides, {ENDED}")

    def _check_transaction_status(self) -> None:
        super()._check_transaction_status()
        self.conn.connection.monitor.check()

    def _rollback(self, error: BaseException, *, to_savepoint: bool) -> Work[bool]:
        if self._begun and to_savepoint:
            # After a deadlock there is no savepoint any more.
            self._check_transaction_status()
        elif self._begun:
            yield from self._say(self._returning(error))
        return (yield from super()._rollback(error, to_savepoint=to_savepoint))


class MysqlTransaction(Marking, SqlTransaction):
    """Transactions of our own, blocking."""


class AsyncMysqlTransaction(Marking, AsyncSqlTransaction):
    """The async counterpart."""
