"""PostgreSQL: records in the transaction of a caller's connection, whatever its driver.

The tables are looked for on that connection, once for each process and database. Where there are none, they are made on
another one beside it: the caller's transaction sees no DDL, and is not aborted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, TypeVar

from onefold.errors import NotInTransaction, StoreUnavailable, UsageError
from onefold.stores.sql.connection import AsyncLink, Database, Kind, Link, cause_of
from onefold.stores.sql.dialect import Talk, carry, carry_async
from onefold.stores.sql.joined import AsyncJoinedRecords, JoinedRecords, explain
from onefold.stores.sql.joined_rules import ABORTED
from onefold.stores.sql.orm import cannot_make
from onefold.stores.sql.pool import quietly, quietly_awaited
from onefold.stores.sql.store import make, make_awaited

T = TypeVar("T")

# Server, database and user, as the connection was opened.
Place = tuple[Any, ...]

# Where the tables were found.
looked: Final[set[Place]] = set()

FAILED_BEFORE: Final = (
    "a statement failed in this transaction before, and PostgreSQL refuses everything until it is rolled back. Nothing "
    "ran. Roll back, or put what may fail into a savepoint: connection.transaction()"
)


class CallersRecords(JoinedRecords):
    """Records on a connection of the caller's, whose database may not have our tables yet."""

    def __init__(self, database: Database, link: Link, place: Place, beside: Callable[[], Link]) -> None:
        super().__init__(database, link)
        self._place = place
        self._beside = beside
        self._sent = False

    def _do(self, talk: Talk[T]) -> T:
        try:
            if self._place not in looked:
                self._look()
            answer = super()._do(talk)
        except Exception as error:
            tell(error, self.database, self._place, first=not self._sent)
            raise
        self._sent = True
        return answer

    def _look(self) -> None:
        path = carry(self.database.sql.missing_in(), self.link)
        if path is not None:
            self._make(path)
        looked.add(self._place)

    def _make(self, path: str) -> None:
        try:
            other = self._beside()
        except Exception as error:
            raise cannot_make(self.database) from error
        try:
            other.begin()
            other.send(self.database.sql.searching(path))
            make(self.database, other)
            other.commit()
        except Exception as error:
            explain(error, self.database)
            raise
        finally:
            quietly(other.close)


class AsyncCallersRecords(AsyncJoinedRecords):
    """The same, awaited."""

    def __init__(
        self, database: Database, link: AsyncLink, place: Place, beside: Callable[[], Awaitable[AsyncLink]]
    ) -> None:
        super().__init__(database, link)
        self._place = place
        self._beside = beside
        self._sent = False

    async def _do(self, talk: Talk[T]) -> T:
        try:
            if self._place not in looked:
                await self._look()
            answer = await super()._do(talk)
        except Exception as error:
            tell(error, self.database, self._place, first=not self._sent)
            raise
        self._sent = True
        return answer

    async def _look(self) -> None:
        path = await carry_async(self.database.sql.missing_in(), self.link)
        if path is not None:
            await self._make(path)
        looked.add(self._place)

    async def _make(self, path: str) -> None:
        try:
            other = await self._beside()
        except Exception as error:
            raise cannot_make(self.database) from error
        try:
            await other.begin()
            await other.send(self.database.sql.searching(path))
            await make_awaited(self.database, other)
            await other.commit()
        except Exception as error:
            explain(error, self.database)
            raise
        finally:
            await quietly_awaited(other.close)


def tell(error: Exception, database: Database, place: Place, *, first: bool) -> None:
    """Raise what the caller's driver cannot know. Everything else is the driver's to say."""
    for seen in (error, error.__cause__):
        if seen is not None and database.sql.was_given_up(seen):
            raise UsageError(FAILED_BEFORE if first else ABORTED) from seen
    trouble = cause_of(error, database)
    if trouble is not None and trouble.kind is Kind.NO_TABLES and not isinstance(error, StoreUnavailable):
        looked.discard(place)
        raise StoreUnavailable(
            f"{database.name}: the tables of Onefold were dropped, or are not in this session's search_path. Nothing "
            "ran. Roll back, and deliver it again: then they are looked for, and made"
        ) from error


def not_in_transaction(how: str) -> NoReturn:
    raise NotInTransaction(
        "no transaction is open on this connection: the record and the work would not be committed together. "
        f"Nothing ran. {how}"
    )
