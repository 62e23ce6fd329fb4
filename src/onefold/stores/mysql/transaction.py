"""Transactions of our own on MySQL or MariaDB, which a handler's statement or error can end silently.

The transaction that wrote the record is marked by a savepoint. After the handler the savepoint is looked up on the
server: anything that ended that transaction, a statement, a procedure, DDL or an error, has removed the savepoint.
"""

from __future__ import annotations

from onefold._concurrency.generators import Flow
from onefold._concurrency.users_errors import add_note, text_of
from onefold._model import Claim, Ending, Entry, Gone, Record, Released
from onefold.stores.sql.connection import TransactionStatus, cause_of
from onefold.stores.sql.dialect import SqlFlow
from onefold.stores.sql.joined import AsyncSqlTransaction, SqlTransaction, TransactionRules
from onefold.stores.sql.joined_rules import ENDED


class Marking(TransactionRules):
    """The rules of a transaction on connections that note an error which has rolled it back."""

    # The claims whose savepoints are set: that of the delivery, and of those nested in it.
    _marked: tuple[Claim, ...] = ()

    def _begin(self) -> Flow[None]:
        self._marked = ()
        return super()._begin()

    def _claiming(self, entry: Entry, replacing: Record | None) -> SqlFlow[Record | Gone | None]:
        found = yield from self.database.sql.claim_marked(entry, replacing)
        if found is None:
            self._marked += (Claim(entry.address, entry.token),)
        return found

    def _proving(self, claim: Claim) -> SqlFlow[bool]:
        return self._proven(claim, self.database.sql.unmark(claim))

    def _finishing(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        return self._proven(claim, self.database.sql.finish_marked(claim, ending))

    def _releasing(self, claim: Claim, released: Released | None) -> SqlFlow[bool]:
        self._forget(claim)
        return super()._releasing(claim, released)

    def _forget(self, claim: Claim) -> None:
        """Forget a claim's released savepoint, and those that were set after it."""
        tokens = [marked.token for marked in self._marked]
        if claim.token in tokens:
            self._marked = self._marked[: tokens.index(claim.token)]

    def _proven(self, claim: Claim, flow: SqlFlow[bool]) -> SqlFlow[bool]:
        self._forget(claim)
        still = yield from flow
        if not still:
            # The handler may have left the session in any state: locked tables, autocommit, a transaction of its own.
            self.conn.connection.monitor.broken = True
        return still

    def _returning(self, error: BaseException) -> SqlFlow[None]:
        """Note on a handler's error, which stays the one to show, that the handler also ended the transaction."""
        monitor = self.conn.connection.monitor
        if not self._marked or monitor.is_undone or self.conn.transaction_status() is not TransactionStatus.OPEN:
            return
        try:
            still = yield from self._proving(self._marked[0])
        except Exception:  # noqa: BLE001 - a lost connection has committed nothing
            return
        if not still and cause_of(error, self.database) is None and ENDED not in text_of(error):
            add_note(error, f"Also: {ENDED}")

    def _check_transaction_status(self) -> None:
        super()._check_transaction_status()
        self.conn.connection.monitor.check()

    def _rollback(self, error: BaseException, *, to_savepoint: bool) -> Flow[bool]:
        if self._begun and to_savepoint:
            # After a deadlock the savepoint is gone.
            self._check_transaction_status()
        elif self._begun:
            yield from self._say(self._returning(error))
        return (yield from super()._rollback(error, to_savepoint=to_savepoint))


class MysqlTransaction(Marking, SqlTransaction):
    """Transactions of our own, blocking."""


class AsyncMysqlTransaction(Marking, AsyncSqlTransaction):
    """The async counterpart."""
