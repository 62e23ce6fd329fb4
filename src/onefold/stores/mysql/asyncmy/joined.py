"""asyncmy: inside the transaction of a caller's connection."""

from __future__ import annotations

from typing import Any

from onefold.errors import UsageError
from onefold.stores.mysql import joined as mysql_joined
from onefold.stores.mysql.asyncmy.connection import AsyncmyConnection, beside, classify
from onefold.stores.mysql.dialect import LOCK, UNLOCK, dialect_of
from onefold.stores.mysql.own_column import MysqlRows
from onefold.stores.sql.connection import Database
from onefold.stores.sql.joined import AsyncJoinedRecords
from onefold.stores.sql.pool import AsyncOneOff
from onefold.transactions import Column


def join(connection: Any, record: Column | None, *, is_async: bool) -> AsyncJoinedRecords:
    """The store that works inside this connection's transaction. Raises `NotInTransaction` where there is none."""
    if not is_async:
        raise UsageError("within(asyncmy's connection): a Guard joins a connection of PyMySQL. Nothing ran")
    mysql_joined.enter(connection)
    settings = connection._host, connection._unix_socket or connection._port, connection._db
    name = f"mysql://{settings[0]}:{settings[1]}"
    database = Database(dialect_of(connection.server_version), name, classify, LOCK, UNLOCK)
    conn = AsyncmyConnection(connection)
    if record is not None:
        database = database._replace(sql=MysqlRows(record, database.sql))
    return CallersRecords(database, conn, settings)


class CallersRecords(mysql_joined.CallersRules, AsyncJoinedRecords):
    """On a connection of asyncmy's, async."""

    _connect = staticmethod(beside)
    _one_off = AsyncOneOff
