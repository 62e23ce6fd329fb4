"""PyMySQL: inside the transaction of a caller's connection."""

from __future__ import annotations

from typing import Any

from onefold.errors import UsageError
from onefold.stores.mysql import joined as mysql_joined
from onefold.stores.mysql.pymysql.connection import PymysqlConnection, beside, classify
from onefold.stores.sql.joined import JoinedRecords
from onefold.stores.sql.pool import OneOff
from onefold.transactions import RecordColumn


def join(connection: Any, record: RecordColumn | None, *, is_async: bool) -> JoinedRecords:
    """Return the store that works inside this connection's transaction. Raise `NotInTransaction` if there is none."""
    if is_async:
        raise UsageError("within(PyMySQL's connection): an AsyncGuard joins a connection of asyncmy. Nothing ran")
    database_id = connection.host, connection.unix_socket or connection.port, connection.db
    return CallersRecords.join(connection, database_id, record)


class CallersRecords(mysql_joined.CallersRules, JoinedRecords):
    """Records on a caller's PyMySQL connection."""

    _adapter = PymysqlConnection
    _classify = staticmethod(classify)
    _connect = staticmethod(beside)
    _one_off = OneOff
