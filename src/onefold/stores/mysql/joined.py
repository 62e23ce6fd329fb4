"""MySQL and MariaDB: records in the transaction of a caller's connection, whatever its driver.

No table is changed in that transaction, because MySQL would commit it implicitly. The tables are looked for and created
on a second connection, once per process and database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Self, TypeVar

from onefold._concurrency.generators import Flow
from onefold._model import Claim, Entry, Gone, Record
from onefold.errors import NotInTransaction
from onefold.stores.mysql.dialect import LOCK, UNLOCK, dialect_of
from onefold.stores.mysql.own_column import MysqlRows
from onefold.stores.mysql.transaction_state import IN_TRANSACTION
from onefold.stores.reserved import came_to_nothing, connecting
from onefold.stores.sql.connection import Database, ErrorInfo, TransactionStatus, cannot_make, cause_of, lacks_tables
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.joined import explain
from onefold.stores.sql.joined_rules import SqlFlows
from onefold.stores.sql.tables import ensure
from onefold.transactions import RecordColumn

T = TypeVar("T")

# Host, port or socket, and database, as the connection was opened.
DatabaseId = tuple[Any, ...]

# The databases whose tables were looked for.
looked: Final[set[DatabaseId]] = set()

WHICH_DATABASE: Final = SqlRequest("SELECT DATABASE()", {}, rows=True)


class CallersRules(SqlFlows):
    """Records on a caller's connection, whose database may not have our tables yet."""

    _adapter: Callable[[Any], Any]
    _classify: Callable[[BaseException], ErrorInfo | None]
    # Opens a connection to another database of the same server.
    _connect: Callable[[Any, str], Any]
    _one_off: Callable[..., Any]

    def __init__(self, database: Database, conn: Any, database_id: DatabaseId) -> None:
        super().__init__(database, conn)
        self._database_id = database_id

    @classmethod
    def join(cls, connection: Any, database_id: DatabaseId, record: RecordColumn | None) -> Self:
        """Return the store that works inside this connection's transaction."""
        enter(connection)
        name = f"mysql://{database_id[0]}:{database_id[1]}"
        database = Database(dialect_of(connection.server_version), name, cls._classify, LOCK, UNLOCK)
        if record is not None:
            database = database._replace(sql=MysqlRows(record, database.sql))
        return cls(database, cls._adapter(connection), database_id)

    def _claiming(self, entry: Entry, replacing: Record | None) -> Flow[Record | Gone | None]:
        found = yield from self._find(lambda: self.database.sql.claim_joined(entry, replacing))
        if found is None:
            yield from self._check_inside([entry])
            yield from self.database.sql.mark(Claim(entry.address, entry.token))
        return found

    def _claiming_all(self, entries: Sequence[Entry]) -> Flow[list[Record | Gone | None]]:
        answers = yield from self._find(lambda: self.database.sql.claim_all(entries))
        yield from self._check_inside([entry for entry, found in zip(entries, answers, strict=True) if found is None])
        return answers

    def _check_inside(self, entries: Sequence[Entry]) -> Flow[None]:
        """Raise if the server reports no transaction, contrary to the driver, because an error had ended it."""
        if self.conn.transaction_status() is TransactionStatus.IDLE:
            for entry in entries:
                yield from self.database.sql.release(Claim(entry.address, entry.token))
            raise not_in_transaction()

    def _find(self, flow: Callable[[], SqlFlow[T]]) -> Flow[T]:
        """Run a flow once the tables exist."""
        if self._database_id not in looked:
            yield from self._look()
        try:
            return (yield from flow())
        except Exception as error:
            if not lacks_tables(error, self.database):
                raise
        yield from self._make()
        return (yield from flow())

    def _look(self) -> Flow[None]:
        try:
            yield from self._ensure()
        except Exception as error:
            # The second connection failed, but the tables may exist all the same.
            if not came_to_nothing(error) or cause_of(error, self.database) is None:
                raise
        looked.add(self._database_id)

    def _make(self) -> Flow[None]:
        try:
            yield from self._ensure()
        except Exception as error:
            if came_to_nothing(error):
                raise cannot_make(self.database) from error
            raise

    def _ensure(self) -> Flow[None]:
        """Find or create the tables on a second connection; `came_to_nothing` says whether connecting failed."""
        with connecting():
            reply: Reply = yield WHICH_DATABASE
        other = self._one_off(partial(self._connect, self.tx, reply.rows[0][0]))
        try:
            yield partial(self._run_on, other, partial(ensure, self.database))
        except Exception as error:
            if not came_to_nothing(error):
                explain(error, self.database)
            raise


def enter(connection: Any) -> None:
    """Check that a transaction is open. With autocommit off the first statement begins one, even if it is ours."""
    if not connection.get_autocommit():
        connection.server_status |= IN_TRANSACTION
    elif not connection.server_status & IN_TRANSACTION:
        raise not_in_transaction()


def not_in_transaction() -> NotInTransaction:
    return NotInTransaction(
        "this connection is in autocommit mode, and no transaction is open: the record and the work would not be "
        "committed together. Nothing ran. Call begin() before, or connect with autocommit=False"
    )
