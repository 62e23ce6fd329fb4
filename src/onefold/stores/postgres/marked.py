"""Records in a transaction that the server itself shows to be open (`marks`): nobody has to ask for them again."""

from __future__ import annotations

from onefold._concurrency.generators import Flow
from onefold._concurrency.interrupts import When
from onefold._model import Claim, Ending, Entry, Gone, Record, Released
from onefold.stores.postgres.dialect import POSTGRES
from onefold.stores.postgres.marks import Marks
from onefold.stores.sql.dialect import SqlFlow
from onefold.stores.sql.joined import AsyncSqlTransaction, SqlTransaction, TransactionRules
from onefold.stores.sql.joined_rules import SqlFlows


class MarkedRules(SqlFlows):
    """Records on a connection that may have `marks`.

    That is one of a driver that shows what the server reports, and whether a statement of the transaction has failed.
    """

    # The claim whose record was written last, and its mark.
    _marked: tuple[Claim, int] | None = None

    @property
    def _marks(self) -> Marks | None:
        return getattr(self.conn, "marks", None)

    def _claiming(self, entry: Entry, replacing: Record | None) -> SqlFlow[Record | Gone | None]:
        marks, sql = self._marks, self.database.sql
        if marks is None or sql is not POSTGRES:
            return (yield from super()._claiming(entry, replacing))
        mark = marks.next(self.conn.reported())
        found = yield from POSTGRES.claim_joined(entry, replacing, mark)
        if found is None and mark is not None:
            self._unmark()
            marks.keep(mark)
            self._marked = entry.as_claim(), mark
        return found

    def _is_marked(self, claim: Claim) -> bool:
        """Return whether the server has shown that the record is still there."""
        marked = self._marked
        return marked is not None and marked[0].token == claim.token and self.conn.reported() == marked[1]

    def _proving(self, claim: Claim) -> SqlFlow[bool]:
        is_marked, marks = self._is_marked(claim), self._marks
        self._unmark()
        if is_marked:
            return True
        if marks is None or self.database.sql is not POSTGRES:
            return (yield from super()._proving(claim))
        backend = yield from POSTGRES.backend_of(claim)
        if backend is not None:
            marks.is_direct = backend == self.conn.backend
        return backend is not None

    def _finish(self, claim: Claim, ending: Ending) -> Flow[bool]:
        self._unmark()
        return super()._finish(claim, ending)

    def _release(self, claim: Claim, released: Released | None) -> Flow[bool]:
        self._unmark()
        return super()._release(claim, released)

    def _spoil(self, when: When) -> Flow[None]:
        self._unmark()
        return super()._spoil(when)

    def _unmark(self) -> None:
        marks = self._marks
        if self._marked is not None and marks is not None:
            marks.let_go()
        self._marked = None


class MarkedTransactionRules(MarkedRules, TransactionRules):
    """The same in a transaction of our own: the COMMIT needs no check."""

    def _checking(self, claim: Claim) -> str | None:
        return None if self._is_marked(claim) else super()._checking(claim)

    def _rollback(self, error: BaseException, *, to_savepoint: bool) -> Flow[bool]:
        if self._begun and not to_savepoint:
            self._unmark()
        return super()._rollback(error, to_savepoint=to_savepoint)


class PostgresTransaction(MarkedTransactionRules, SqlTransaction):
    """Transactions of our own, blocking."""


class AsyncPostgresTransaction(MarkedTransactionRules, AsyncSqlTransaction):
    """The async counterpart."""
