"""asyncmy: inside the transaction of a caller's connection."""

from __future__ import annotations

from typing import Any

from onefold.errors import UsageError
from onefold.stores.mysql import joined as mysql_joined
from onefold.stores.mysql.asyncmy.connection import AsyncmyConnection, beside, classify
from onefold.stores.sql.joined import AsyncJoinedRecords
from onefold.stores.sql.pool import AsyncOneOff
from onefold.transactions import RecordColumn


def join(connection: Any, record: RecordColumn | None, *, is_async: bool) -> AsyncJoinedRecords:
    """Return the store that works inside this connection's transaction. Raise `NotInTransaction` if there is none."""
    if not is_async:
        raise UsageError("within(asyncmy's connection): a Guard joins a connection of PyMySQL. Nothing ran")
    database_id = connection._host, connection._unix_socket or connection._port, connection._db
    return CallersRecords.join(connection, database_id, record)


class CallersRecords(mysql_joined.CallersRules, AsyncJoinedRecords):
    """Records on a caller's asyncmy connection."""

    _adapter = AsyncmyConnection
    _classify = staticmethod(classify)
    _connect = staticmethod(beside)
    _one_off = AsyncOneOff
