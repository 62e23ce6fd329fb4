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
    FAILED_BEFORE,
    AsyncCallersRecords,
    CallersRecords,
    DatabaseId,
    not_in_transaction,
)
from onefold.stores.postgres.own_column import PostgresRows
from onefold.stores.postgres.psycopg.connection import (
    AsyncConnection,
    AsyncPsycopgConnection,
    Connection,
    PsycopgConnection,
    classify,
)
from onefold.stores.sql.connection import Database
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sql.joined import AsyncJoinedRecords, JoinedRecords
from onefold.stores.sql.pool import AsyncOneOff, OneOff
from onefold.transactions import Column

# Another connection to the same server is opened at once, or not at all.
CONNECT_SECONDS: Final = 5


def join(connection: Any, record: Column | None, *, is_async: bool) -> JoinedRecords | AsyncJoinedRecords:
    """The store that works inside this connection's transaction. Raises `NotInTransaction` where there is none."""
    if isinstance(connection, psycopg.AsyncConnection) is not is_async:
        mine = "an AsyncGuard joins a psycopg.AsyncConnection" if is_async else "a Guard joins a psycopg.Connection"
        raise UsageError(f"within({type(connection).__name__}): {mine}. Nothing ran")
    _check_inside(connection)
    settings, database = _met.get(connection) or _meet(connection)
    if record is not None:
        database = database._replace(sql=PostgresRows(record))
        if is_async:
            return AsyncJoinedRecords(database, AsyncCallersConnection(connection))
        return JoinedRecords(database, CallersConnection(connection))
    if is_async:
        other = AsyncOneOff(partial(_beside_async, connection))
        return AsyncCallersRecords(database, AsyncCallersConnection(connection), settings, other)
    return CallersRecords(database, CallersConnection(connection), settings, OneOff(partial(_beside, connection)))


def _check_inside(connection: Connection | AsyncConnection) -> None:
    """psycopg begins a transaction by itself before the first statement, unless it is told not to; it may be ours."""
    match connection.pgconn.transaction_status:
        case TransactionStatus.IDLE if connection.autocommit:
            not_in_transaction("Enter `with connection.transaction()` before, or connect without autocommit=True")
        # In pipeline mode the server has not said yet where it stands.
        case TransactionStatus.ACTIVE if connection.autocommit and not connection._num_transactions:
            not_in_transaction(
                "Enter `with connection.transaction()` in the pipeline, or sync it after a BEGIN of yours"
            )
        case TransactionStatus.INERROR:
            raise UsageError(FAILED_BEFORE)


# Who was joined before: to ask libpq where a connection leads takes longer than the rest of a join.
_met: WeakKeyDictionary[Any, tuple[DatabaseId, Database]] = WeakKeyDictionary()


def _meet(connection: Connection | AsyncConnection) -> tuple[DatabaseId, Database]:
    info = connection.info
    settings = info.host, info.port, info.dbname, info.user
    name = f"postgresql://{info.host}:{info.port}/{info.dbname}"
    _met[connection] = met = settings, Database(POSTGRES, name, classify, lock=LOCK)
    return met


class CallersConnection(PsycopgConnection):
    """On a connection that may be in pipeline mode, where answers have to be asked for."""

    def send(self, request: SqlRequest) -> Reply:
        return self.send_all([request])[0] if self.connection.pgconn.pipeline_status else super().send(request)


class AsyncCallersConnection(AsyncPsycopgConnection):
    """The async counterpart."""

    async def send(self, request: SqlRequest) -> Reply:
        return (
            (await self.send_all([request]))[0]
            if self.connection.pgconn.pipeline_status
            else await super().send(request)
        )


def _beside(connection: Connection) -> PsycopgConnection:
    return PsycopgConnection(psycopg.Connection.connect(autocommit=True, **_parameters(connection)))


async def _beside_async(connection: AsyncConnection) -> AsyncPsycopgConnection:
    return AsyncPsycopgConnection(await psycopg.AsyncConnection.connect(autocommit=True, **_parameters(connection)))


def _parameters(connection: Connection | AsyncConnection) -> dict[str, Any]:
    """What the connection was opened with. Behind a pooler nothing must be prepared."""
    info = connection.info
    password = {"password": info.password} if info.password else {}
    return info.get_parameters() | password | {"connect_timeout": CONNECT_SECONDS, "prepare_threshold": None}
