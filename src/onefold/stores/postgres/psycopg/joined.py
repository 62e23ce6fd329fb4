"""psycopg 3: inside the transaction of a caller's connection, in both colours."""

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
    Place,
    not_in_transaction,
)
from onefold.stores.postgres.own_column import PostgresRows
from onefold.stores.postgres.psycopg.connection import (
    AsyncConnection,
    AsyncPsycopgLink,
    Connection,
    PsycopgLink,
    trouble,
)
from onefold.stores.sql.connection import Database
from onefold.stores.sql.dialect import Ask, Reply
from onefold.stores.sql.joined import AsyncJoinedRecords, JoinedRecords
from onefold.stores.sql.pool import AsyncOneOff, OneOff
from onefold.transactions import Column

# Another connection to the same server is opened at once, or not at all.
CONNECT_SECONDS: Final = 5


def join(connection: Any, record: Column | None, *, awaited: bool) -> JoinedRecords | AsyncJoinedRecords:
    """The store that works inside this connection's transaction. Raises `NotInTransaction` where there is none."""
    if isinstance(connection, psycopg.AsyncConnection) is not awaited:
        mine = "an AsyncGuard joins a psycopg.AsyncConnection" if awaited else "a Guard joins a psycopg.Connection"
        raise UsageError(f"within({type(connection).__name__}): {mine}. Nothing ran")
    _check_inside(connection)
    place, database = _met.get(connection) or _meet(connection)
    if record is not None:
        database = database._replace(sql=PostgresRows(record))
        if awaited:
            return AsyncJoinedRecords(database, AsyncCallersLink(connection))
        return JoinedRecords(database, CallersLink(connection))
    if awaited:
        other = AsyncOneOff(partial(_beside_awaited, connection))
        return AsyncCallersRecords(database, AsyncCallersLink(connection), place, other)
    return CallersRecords(database, CallersLink(connection), place, OneOff(partial(_beside, connection)))


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
_met: WeakKeyDictionary[Any, tuple[Place, Database]] = WeakKeyDictionary()


def _meet(connection: Connection | AsyncConnection) -> tuple[Place, Database]:
    info = connection.info
    place = info.host, info.port, info.dbname, info.user
    name = f"postgresql://{info.host}:{info.port}/{info.dbname}"
    _met[connection] = met = place, Database(POSTGRES, name, trouble, lock=LOCK)
    return met


class CallersLink(PsycopgLink):
    """On a connection that may be in pipeline mode, where answers have to be asked for."""

    def send(self, ask: Ask) -> Reply:
        return self.send_all([ask])[0] if self.connection.pgconn.pipeline_status else super().send(ask)


class AsyncCallersLink(AsyncPsycopgLink):
    """The same, awaited."""

    async def send(self, ask: Ask) -> Reply:
        return (await self.send_all([ask]))[0] if self.connection.pgconn.pipeline_status else await super().send(ask)


def _beside(connection: Connection) -> PsycopgLink:
    return PsycopgLink(psycopg.Connection.connect(autocommit=True, **_parameters(connection)))


async def _beside_awaited(connection: AsyncConnection) -> AsyncPsycopgLink:
    return AsyncPsycopgLink(await psycopg.AsyncConnection.connect(autocommit=True, **_parameters(connection)))


def _parameters(connection: Connection | AsyncConnection) -> dict[str, Any]:
    """What the connection was opened with. Behind a pooler nothing must be prepared."""
    info = connection.info
    password = {"password": info.password} if info.password else {}
    return info.get_parameters() | password | {"connect_timeout": CONNECT_SECONDS, "prepare_threshold": None}
