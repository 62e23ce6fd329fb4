"""PyMySQL: inside the transaction of a caller's connection."""

from __future__ import annotations

from typing import Any

from onefold.errors import UsageError
from onefold.stores.mysql import joined as mysql_joined
from onefold.stores.mysql.dialect import LOCK, UNLOCK, dialect_of
from onefold.stores.mysql.own_column import MysqlRows
from onefold.stores.mysql.pymysql.connection import PymysqlConnection, beside, classify
from onefold.stores.sql.connection import Database
from onefold.stores.sql.joined import JoinedRecords
from onefold.stores.sql.pool import OneOff
from onefold.transactions import Column


def join(connection: Any, record: Column | None, *, is_async: bool) -> JoinedRecords:
    """The store that works inside this connection's transaction. Raises `NotInTransaction` where there is none."""
    if is_async:
        raise UsageError("within(PyMySQL's connection): an AsyncGuard joins a connection of asyncmy. Nothing ran")
    mysql_joined.enter(connection)
    settings = connection.host, connection.unix_socket or connection.port, connection.db
    name = f"mysql://{settings[0]}:{settings[1]}"
    database = Database(dialect_of(connection.server_version), name, classify, LOCK, UNLOCK)
    conn = PymysqlConnection(connection)
    if record is not None:
        database = database._replace(sql=MysqlRows(record, database.sql))
    return CallersRecords(database, conn, settings)


class CallersRecords(mysql_joined.CallersRules, JoinedRecords):
    """On a connection of PyMySQL's."""

    _connect = staticmethod(beside)
    _one_off = OneOff
