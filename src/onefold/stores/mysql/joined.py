"""MySQL and MariaDB: records in the transaction of a caller's connection, whatever its driver.

Nothing here changes a table in it, because MySQL would commit it without a word. The tables are looked at, and made, on
another connection beside it, once for each process and database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from onefold._concurrency.generators import Work
from onefold._model import Claim, Entry, Gone, Record
from onefold.errors import NotInTransaction, StoreUnavailable
from onefold.stores.mysql.transaction_state import IN_TRANSACTION
from onefold.stores.reserved import came_to_nothing, connecting
from onefold.stores.sql.connection import Database, ErrorClass, TransactionStatus, cause_of
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.joined import explain
from onefold.stores.sql.joined_rules import SqlFlows
from onefold.stores.sql.tables import ensure

T = TypeVar("T")

# Host, port or socket, and database: as the connection was opened.
DatabaseId = tuple[Any, ...]

# Where the tables were looked at.
looked: Final[set[DatabaseId]] = set()

WHICH_DATABASE: Final = SqlRequest("SELECT DATABASE()", {}, rows=True)


class CallersRules(SqlFlows):
    """Records on a connection of the caller's, whose database may not have our tables yet."""

    # Opens a connection to another database of the same server.
    _connect: Callable[[Any, str], Any]
    _one_off: Callable[..., Any]

    def __init__(self, database: Database, conn: Any, database_id: DatabaseId) -> None:
        super().__init__(database, conn)
        self._database_id = database_id

    def _claiming(self, entry: Entry, replacing: Record | None) -> Work[Record | Gone | None]:
        found = yield from self._find(lambda: self.database.sql.claim_joined(entry, replacing))
        if found is None:
            yield from self._check_inside([entry])
            yield from self.database.sql.mark(Claim(entry.address, entry.token))
        return found

    def _claiming_all(self, entries: Sequence[Entry]) -> Work[list[Record | Gone | None]]:
        answers = yield from self._find(lambda: self.database.sql.claim_all(entries))
        yield from self._check_inside([entry for entry, found in zip(entries, answers, strict=True) if found is None])
        return answers

    def _check_inside(self, entries: Sequence[Entry]) -> Work[None]:
        """The driver believed that a transaction is open, and the server knows better: an error had ended it."""
        if self.conn.transaction_status() is TransactionStatus.IDLE:
            for entry in entries:
                yield from self.database.sql.release(Claim(entry.address, entry.token))
            raise not_in_transaction()

    def _find(self, flow: Callable[[], SqlFlow[T]]) -> Work[T]:
        """What is found in the tables, once they are there."""
        if self._database_id not in looked:
            yield from self._look()
        try:
            return (yield from flow())
        except Exception as error:
            if not lacks_tables(error, self.database):
                raise
        yield from self._make()
        return (yield from flow())

    def _look(self) -> Work[None]:
        try:
            yield from self._ensure()
        except Exception as error:
            # Without another connection: the tables may be there all the same.
            if not came_to_nothing(error) or cause_of(error, self.database) is None:
                raise
        looked.add(self._database_id)

    def _make(self) -> Work[None]:
        try:
            yield from self._ensure()
        except Exception as error:
            if came_to_nothing(error):
                raise cannot_make(self.database) from error
            raise

    def _ensure(self) -> Work[None]:
        """Find the tables, or make them, on another connection; `came_to_nothing` of an error says that it failed."""
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
    """Be inside a transaction. With autocommit off the first statement begins one, and that may be ours."""
    if not connection.get_autocommit():
        connection.server_status |= IN_TRANSACTION
    elif not connection.server_status & IN_TRANSACTION:
        raise not_in_transaction()


def not_in_transaction() -> NotInTransaction:
    return NotInTransaction(
        "this connection is in autocommit mode, and no transaction is open: the record and the work would not be "
        "committed together. Nothing ran. Call begin() before, or connect with autocommit=False"
    )


def lacks_tables(error: Exception, database: Database) -> bool:
    info = cause_of(error, database)
    return info is not None and info.kind is ErrorClass.NO_TABLES


def cannot_make(database: Database) -> StoreUnavailable:
    return StoreUnavailable(
        f"{database.name}: there are no tables of Onefold, and they cannot be made from here: that needs another "
        "connection, which failed. Nothing ran. Make them with the command `onefold schema URL --apply`"
    )
