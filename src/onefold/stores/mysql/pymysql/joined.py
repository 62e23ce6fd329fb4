"""PyMySQL: inside the transaction of a caller's connection.

Nothing here changes a table in it, because MySQL would commit it without a word. The tables are looked at, and made, on
another connection beside it, once for each process and database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from onefold._generators import run
from onefold._model import Claim, Entry, Gone, Record
from onefold.errors import UsageError
from onefold.stores.mysql import joined as _mysql
from onefold.stores.mysql.dialect import LOCK, UNLOCK, dialect_of
from onefold.stores.mysql.own_column import MysqlRows
from onefold.stores.mysql.pymysql.connection import OwnLink, PymysqlLink, beside, trouble
from onefold.stores.sql.connection import Database, Standing, cause_of
from onefold.stores.sql.dialect import Talk
from onefold.stores.sql.joined import JoinedRecords, explain
from onefold.stores.sql.pool import quietly
from onefold.stores.sql.tables import ensure
from onefold.transactions import Column

T = TypeVar("T")


def join(connection: Any, record: Column | None, *, awaited: bool) -> JoinedRecords:
    """The store that works inside this connection's transaction. Raises `NotInTransaction` where there is none."""
    if awaited:
        raise UsageError("within(PyMySQL's connection): an AsyncGuard joins a connection of asyncmy. Nothing ran")
    _mysql.enter(connection)
    place = connection.host, connection.unix_socket or connection.port, connection.db
    name = f"mysql://{place[0]}:{place[1]}"
    database = Database(dialect_of(connection.server_version), name, trouble, LOCK, UNLOCK)
    link = PymysqlLink(connection)
    if record is not None:
        database = database._replace(sql=MysqlRows(record, database.sql))
    return CallersRecords(database, link, place)


class CallersRecords(JoinedRecords):
    """Records on a connection of the caller's, whose database may not have our tables yet."""

    def __init__(self, database: Database, link: PymysqlLink, place: _mysql.Place) -> None:
        super().__init__(database, link)
        self._place = place

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        found = self._found(lambda: self.database.sql.claim_joined(entry, replacing))
        if found is None:
            self._check_inside([entry])
            self._do(self.database.sql.mark(Claim(entry.address, entry.token)))
        return found

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        answers = self._found(lambda: self.database.sql.claim_all(entries))
        self._check_inside([entry for entry, found in zip(entries, answers, strict=True) if found is None])
        return answers

    def _check_inside(self, entries: Sequence[Entry]) -> None:
        """The driver believed that a transaction is open, and the server knows better: an error had ended it."""
        if self.link.standing() is Standing.IDLE:
            for entry in entries:
                self._do(self.database.sql.release(Claim(entry.address, entry.token)))
            raise _mysql.not_in_transaction()

    def _found(self, talk: Callable[[], Talk[T]]) -> T:
        """What is found in the tables, once they are there."""
        if self._place not in _mysql.looked:
            self._look()
        try:
            return self._do(talk())
        except Exception as error:
            if not _mysql.lacks_tables(error, self.database):
                raise
        self._make()
        return self._do(talk())

    def _look(self) -> None:
        try:
            other = self._beside()
        except Exception as error:
            # The tables may be there all the same.
            if cause_of(error, self.database) is None:
                raise
        else:
            self._ensure(other)
        _mysql.looked.add(self._place)

    def _make(self) -> None:
        try:
            other = self._beside()
        except Exception as error:
            raise _mysql.cannot_make(self.database) from error
        self._ensure(other)

    def _beside(self) -> OwnLink:
        return beside(self.tx, self.link.send(_mysql.WHICH_DATABASE).rows[0][0])

    def _ensure(self, other: OwnLink) -> None:
        try:
            run(ensure(self.database, other), other)
        except Exception as error:
            explain(error, self.database)
            raise
        finally:
            quietly(other.close)
