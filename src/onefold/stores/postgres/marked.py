"""Records in a transaction that the server itself shows to be open (`marks`): nobody has to ask for them again."""

from __future__ import annotations

from onefold._concurrency.generators import Flow
from onefold._concurrency.interrupts import When
from onefold._model import Claim, Ending, Entry, Gone, Record, Released
from onefold.stores.postgres.dialect import POSTGRES
from onefold.stores.postgres.marks import Marks
from onefold.stores.postgres.statements import usual
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.joined import OPEN, AsyncSqlTransaction, SqlTransaction, TransactionRules
from onefold.stores.sql.joined_rules import SqlFlows


class MarkedRules(SqlFlows):
    """Records on a connection that may have `marks`.

    That is one of a driver that shows what the server reports, and whether a statement of the transaction has failed.
    """

    # The token of the record that was written last, its mark, and where that is in use.
    _marked: tuple[bytes, int, Marks] | None = None
    # The mark in the statement that was sent last.
    _next: tuple[int, Marks] | None = None
    # Whether a statement of ours was sent in this transaction.
    _sent = False

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
            self._keep(entry, mark, marks)
        return found

    def _asking(self, entry: Entry) -> SqlRequest | None:
        if self.database.sql is not POSTGRES:
            return None
        marks = self._marks
        mark = None if marks is None else marks.next(self.conn.reported())
        self._next = None if marks is None or mark is None else (mark, marks)
        return usual.writing(entry, mark)

    def _answered(self, entry: Entry, reply: Reply) -> Record | Gone | None:
        self._sent = True
        found = POSTGRES.answered(entry, reply)
        if found is None and self._next is not None:
            self._keep(entry, *self._next)
        return found

    def _keep(self, entry: Entry, mark: int, marks: Marks) -> None:
        if self._marked is not None:
            self._unmark()
        marks.keep(mark)
        self._marked = entry.token, mark, marks

    def _is_marked(self, claim: Claim) -> bool:
        """Return whether the server has shown that the record is still there.

        Not while a statement is under way, which the handler has left to another task or thread: it may fail.
        """
        marked = self._marked
        return (
            marked is not None
            and marked[0] == claim.token
            and self.conn.reported() == marked[1]
            and self.conn.transaction_status() is OPEN
        )

    def _is_proven(self, claim: Claim) -> bool:
        if self._spoiled or not self._is_marked(claim):
            return False
        self._unmark()
        return True

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
        if self._marked is not None:
            self._marked[2].let_go()
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
