"""asyncmy: inside the transaction of a caller's connection, awaited.

Nothing here changes a table in it, because MySQL would commit it without a word. The tables are looked at, and made, on
another connection beside it, once for each process and database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from onefold._generators import run_async
from onefold._model import Claim, Entry, Gone, Record
from onefold.errors import UsageError
from onefold.stores.mysql import joined as _mysql
from onefold.stores.mysql.asyncmy.connection import AsyncmyLink, OwnLink, beside, trouble
from onefold.stores.mysql.dialect import LOCK, UNLOCK, dialect_of
from onefold.stores.mysql.own_column import MysqlRows
from onefold.stores.sql.connection import Database, Standing, cause_of
from onefold.stores.sql.dialect import Talk
from onefold.stores.sql.joined import AsyncJoinedRecords, explain
from onefold.stores.sql.pool import quietly_awaited
from onefold.stores.sql.tables import ensure
from onefold.transactions import Column

T = TypeVar("T")


def join(connection: Any, record: Column | None, *, awaited: bool) -> AsyncJoinedRecords:
    """The store that works inside this connection's transaction. Raises `NotInTransaction` where there is none."""
    if not awaited:
        raise UsageError("within(asyncmy's connection): a Guard joins a connection of PyMySQL. Nothing ran")
    _mysql.enter(connection)
    place = connection._host, connection._unix_socket or connection._port, connection._db
    name = f"mysql://{place[0]}:{place[1]}"
    database = Database(dialect_of(connection.server_version), name, trouble, LOCK, UNLOCK)
    link = AsyncmyLink(connection)
    if record is not None:
        database = database._replace(sql=MysqlRows(record, database.sql))
    return CallersRecords(database, link, place)


class CallersRecords(AsyncJoinedRecords):
    """Records on a connection of the caller's, whose database may not have our tables yet."""

    def __init__(self, database: Database, link: AsyncmyLink, place: _mysql.Place) -> None:
        super().__init__(database, link)
        self._place = place

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        found = await self._found(lambda: self.database.sql.claim_joined(entry, replacing))
        if found is None:
            await self._check_inside([entry])
            await self._do(self.database.sql.mark(Claim(entry.address, entry.token)))
        return found

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        answers = await self._found(lambda: self.database.sql.claim_all(entries))
        await self._check_inside([entry for entry, found in zip(entries, answers, strict=True) if found is None])
        return answers

    async def _check_inside(self, entries: Sequence[Entry]) -> None:
        """The driver believed that a transaction is open, and the server knows better: an error had ended it."""
        if self.link.standing() is Standing.IDLE:
            for entry in entries:
                await self._do(self.database.sql.release(Claim(entry.address, entry.token)))
            raise _mysql.not_in_transaction()

    async def _found(self, talk: Callable[[], Talk[T]]) -> T:
        """What is found in the tables, once they are there."""
        if self._place not in _mysql.looked:
            await self._look()
        try:
            return await self._do(talk())
        except Exception as error:
            if not _mysql.lacks_tables(error, self.database):
                raise
        await self._make()
        return await self._do(talk())

    async def _look(self) -> None:
        try:
            other = await self._beside()
        except Exception as error:
            # The tables may be there all the same.
            if cause_of(error, self.database) is None:
                raise
        else:
            await self._ensure(other)
        _mysql.looked.add(self._place)

    async def _make(self) -> None:
        try:
            other = await self._beside()
        except Exception as error:
            raise _mysql.cannot_make(self.database) from error
        await self._ensure(other)

    async def _beside(self) -> OwnLink:
        reply = await self.link.send(_mysql.WHICH_DATABASE)
        return await beside(self.tx, reply.rows[0][0])

    async def _ensure(self, other: OwnLink) -> None:
        try:
            await run_async(ensure(self.database, other), other)
        except Exception as error:
            explain(error, self.database)
            raise
        finally:
            await quietly_awaited(other.close)
