"""PostgreSQL: records in the transaction of a caller's connection, whatever its driver.

The tables are looked for on that connection, once per process and database, and for each transaction if sessions differ
in their schemas. If there are none, they are created on a second connection: the caller's transaction sees no DDL, and
is not aborted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from onefold._concurrency.generators import Flow
from onefold._model import Entry
from onefold.errors import NotInTransaction
from onefold.stores.postgres.marked import MarkedRules
from onefold.stores.reserved import came_to_nothing
from onefold.stores.sql.connection import Database, cannot_make
from onefold.stores.sql.dialect import SqlFlow, SqlRequest
from onefold.stores.sql.joined import AsyncJoinedRecords, JoinedRecords, explain
from onefold.stores.sql.joined_rules import FoundIn, tell_unusable
from onefold.stores.sql.pool import AsyncOneOff, OneOff
from onefold.stores.sql.tables import make_in

T = TypeVar("T")

# Server, database and user, as the connection was opened.
DatabaseId = tuple[Any, ...]

# The databases where the tables were found.
looked: Final = FoundIn()


class CallersRules(MarkedRules):
    """Records on a caller's connection, whose database may not have our tables yet."""

    _one_off: type[OneOff | AsyncOneOff]

    def __init__(self, database: Database, conn: Any, database_id: DatabaseId, beside: Callable[[], Any]) -> None:
        """Initialize; `beside` opens a second connection to the same database."""
        self.database = database
        self.conn = conn
        self._database_id = database_id
        self._beside = beside

    def _say(self, flow: SqlFlow[T]) -> SqlFlow[T]:
        try:
            if not self._sent and self._database_id not in looked:
                yield from self._look()
            answer = yield from flow
        except Exception as error:
            self._explain(error)
            raise
        self._sent = True
        return answer

    def _explain(self, error: Exception) -> None:
        tell_unusable(error, self.database, looked, self._database_id, first=not self._sent)

    def _asking(self, entry: Entry) -> SqlRequest | None:
        if not self._sent and self._database_id not in looked:
            return None
        return super()._asking(entry)

    def _look(self) -> Flow[None]:
        path = yield from self.database.sql.missing_in()
        if path is not None:
            yield from self._make(path)
        looked.add(self._database_id)

    def _make(self, path: str) -> Flow[None]:
        try:
            yield partial(self._run_on, self._one_off(self._beside), partial(make_in, self.database, path))
        except Exception as error:
            if came_to_nothing(error):
                raise cannot_make(self.database) from error
            explain(error, self.database)
            raise


class CallersRecords(CallersRules, JoinedRecords):
    """The records of a blocking connection."""

    _one_off = OneOff


class AsyncCallersRecords(CallersRules, AsyncJoinedRecords):
    """The async counterpart."""

    _one_off = AsyncOneOff


def not_in_transaction(how: str) -> NoReturn:
    raise NotInTransaction(
        "no transaction is open on this connection: the record and the work would not be committed together. "
        f"Nothing ran. {how}"
    )
