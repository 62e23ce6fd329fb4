"""PostgreSQL: records in the transaction of a caller's connection, whatever its driver.

The tables are looked for on that connection, once for each process and database. Where there are none, they are made on
another one beside it: the caller's transaction sees no DDL, and is not aborted.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from onefold._concurrency.generators import Work
from onefold.errors import NotInTransaction, StoreUnavailable, UsageError
from onefold.stores.reserved import came_to_nothing
from onefold.stores.sql.connection import Database, ErrorClass, cause_of
from onefold.stores.sql.dialect import SqlFlow
from onefold.stores.sql.joined import AsyncJoinedRecords, JoinedRecords, explain
from onefold.stores.sql.joined_rules import ABORTED, SqlFlows
from onefold.stores.sql.orm import cannot_make
from onefold.stores.sql.pool import AsyncOneOff, OneOff
from onefold.stores.sql.tables import make_in

T = TypeVar("T")

# Server, database and user, as the connection was opened.
DatabaseId = tuple[Any, ...]

# Where the tables were found.
looked: Final[set[DatabaseId]] = set()

FAILED_BEFORE: Final = (
    "a statement failed in this transaction before, and PostgreSQL refuses everything until it is rolled back. Nothing "
    "ran. Roll back, or put what may fail into a savepoint: connection.transaction()"
)


class CallersRules(SqlFlows):
    """Records on a connection of the caller's, whose database may not have our tables yet."""

    def __init__(self, database: Database, conn: Any, database_id: DatabaseId, beside: OneOff | AsyncOneOff) -> None:
        super().__init__(database, conn)
        self._database_id = database_id
        self._beside = beside
        self._sent = False

    def _say(self, flow: SqlFlow[T]) -> SqlFlow[T]:
        try:
            if self._database_id not in looked:
                yield from self._look()
            answer = yield from flow
        except Exception as error:
            tell(error, self.database, self._database_id, first=not self._sent)
            raise
        self._sent = True
        return answer

    def _look(self) -> Work[None]:
        path = yield from self.database.sql.missing_in()
        if path is not None:
            yield from self._make(path)
        looked.add(self._database_id)

    def _make(self, path: str) -> Work[None]:
        try:
            yield partial(self._run_on, self._beside, partial(make_in, self.database, path))
        except Exception as error:
            if came_to_nothing(error):
                raise cannot_make(self.database) from error
            explain(error, self.database)
            raise


class CallersRecords(CallersRules, JoinedRecords):
    """On a connection that blocks."""


class AsyncCallersRecords(CallersRules, AsyncJoinedRecords):
    """The async counterpart."""


def tell(error: Exception, database: Database, database_id: DatabaseId, *, first: bool) -> None:
    """Raise what the caller's driver cannot know. Everything else is the driver's to say."""
    for seen in (error, error.__cause__):
        if seen is not None and database.sql.was_given_up(seen):
            raise UsageError(FAILED_BEFORE if first else ABORTED) from seen
    info = cause_of(error, database)
    if info is not None and info.kind is ErrorClass.NO_TABLES and not isinstance(error, StoreUnavailable):
        looked.discard(database_id)
        raise StoreUnavailable(
            f"{database.name}: the tables of Onefold were dropped, or are not in this session's search_path. Nothing "
            "ran. Roll back, and deliver it again: then they are looked for, and made"
        ) from error


def not_in_transaction(how: str) -> NoReturn:
    raise NotInTransaction(
        "no transaction is open on this connection: the record and the work would not be committed together. "
        f"Nothing ran. {how}"
    )
