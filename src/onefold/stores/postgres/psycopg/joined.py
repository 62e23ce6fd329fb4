"""psycopg 3: inside the transaction of a caller's connection, sync and async."""

from __future__ import annotations

from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import TransactionStatus

from onefold.errors import UsageError
from onefold.stores.postgres.dialect import LOCK, POSTGRES
from onefold.stores.postgres.joined import (
    AsyncCallersRecords,
    CallersRecords,
    DatabaseId,
    not_in_transaction,
)
from onefold.stores.postgres.marks import Marks, marks_of
from onefold.stores.postgres.own_column import PostgresRows
from onefold.stores.postgres.psycopg.connection import (
    AsyncConnection,
    AsyncPsycopgConnection,
    Connection,
    PsycopgConnection,
    classify,
    opened,
)
from onefold.stores.sql.connection import Database
from onefold.stores.sql.joined import AsyncJoinedRecords, JoinedRecords
from onefold.stores.sql.joined_rules import FAILED_BEFORE
from onefold.transactions import RecordColumn

# A second connection to the same server opens quickly, or not at all.
CONNECT_SECONDS: Final = 5

# On Python 3.11 accessing an enum's members is slow.
_IN_TRANSACTION: Final = TransactionStatus.INTRANS


def join(connection: Any, record: RecordColumn | None, *, is_async: bool) -> JoinedRecords | AsyncJoinedRecords:
    """Return the store that works inside this connection's transaction. Raise `NotInTransaction` if there is none."""
    if isinstance(connection, psycopg.AsyncConnection) is not is_async:
        mine = "an AsyncGuard joins a psycopg.AsyncConnection" if is_async else "a Guard joins a psycopg.Connection"
        raise UsageError(f"within({type(connection).__name__}): {mine}. Nothing ran")
    if connection.pgconn.transaction_status != _IN_TRANSACTION:
        _check_inside(connection)
    database_id, database, marks = _met.get(connection) or _meet(connection)
    if record is not None:
        database = database._replace(sql=PostgresRows(record))
        if is_async:
            return AsyncJoinedRecords(database, AsyncCallersConnection(connection, marks))
        return JoinedRecords(database, CallersConnection(connection, marks))
    if is_async:
        conn = AsyncCallersConnection(connection, marks)
        return AsyncCallersRecords(database, conn, database_id, partial(_beside_async, connection))
    return CallersRecords(database, CallersConnection(connection, marks), database_id, partial(_beside, connection))


def _check_inside(connection: Connection | AsyncConnection) -> None:
    """Raise unless a transaction is open, or psycopg will begin one by itself before the first statement."""
    match connection.pgconn.transaction_status:
        case TransactionStatus.IDLE if connection.autocommit:
            not_in_transaction("Enter `with connection.transaction()` before, or connect without autocommit=True")
        # In pipeline mode the server has not reported its status yet.
        case TransactionStatus.ACTIVE if connection.autocommit and not connection._num_transactions:
            not_in_transaction(
                "Enter `with connection.transaction()` in the pipeline, or sync it after a BEGIN of yours"
            )
        case TransactionStatus.INERROR:
            raise UsageError(FAILED_BEFORE)


# Connections joined before: asking libpq about a connection takes longer than the rest of a join.
_met: WeakKeyDictionary[Any, tuple[DatabaseId, Database, Marks]] = WeakKeyDictionary()


def _meet(connection: Connection | AsyncConnection) -> tuple[DatabaseId, Database, Marks]:
    info = connection.info
    database_id = info.host, info.port, info.dbname, info.user
    name = f"postgresql://{info.host}:{info.port}/{info.dbname}"
    _met[connection] = met = database_id, Database(POSTGRES, name, classify, lock=LOCK), marks_of(connection)
    return met


class CallersConnection(PsycopgConnection):
    """A connection with a transaction of its caller's."""

    def __init__(self, connection: Any, marks: Marks) -> None:
        self.connection = connection
        self.marks = marks


class AsyncCallersConnection(AsyncPsycopgConnection):
    """The async counterpart."""

    def __init__(self, connection: Any, marks: Marks) -> None:
        self.connection = connection
        self.marks = marks


def _beside(connection: Connection) -> PsycopgConnection:
    return PsycopgConnection(psycopg.Connection.connect(autocommit=True, **_parameters(connection)))


async def _beside_async(connection: AsyncConnection) -> AsyncPsycopgConnection:
    connect = partial(psycopg.AsyncConnection.connect, autocommit=True, **_parameters(connection))
    return AsyncPsycopgConnection(await opened(connect))


def _parameters(connection: Connection | AsyncConnection) -> dict[str, Any]:
    """Return the parameters that the connection was opened with; prepare nothing, for poolers."""
    info = connection.info
    password = {"password": info.password} if info.password else {}
    return info.get_parameters() | password | {"connect_timeout": CONNECT_SECONDS, "prepare_threshold": None}
