"""asyncpg: inside the transaction of a caller's connection, which may come from a pool."""

from __future__ import annotations

from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import asyncpg

from onefold.errors import UsageError
from onefold.stores.postgres.asyncpg.connection import AsyncpgConnection, classify, inner
from onefold.stores.postgres.dialect import LOCK, POSTGRES
from onefold.stores.postgres.joined import AsyncCallersRecords, DatabaseId, not_in_transaction
from onefold.stores.postgres.own_column import PostgresRows
from onefold.stores.sql.connection import Database
from onefold.stores.sql.joined import AsyncJoinedRecords
from onefold.transactions import RecordColumn

# A second connection to the same server opens quickly, or not at all.
CONNECT_SECONDS: Final = 5.0


def join(connection: Any, record: RecordColumn | None, *, is_async: bool) -> AsyncJoinedRecords:
    """Return the store that works inside this connection's transaction. Raise `NotInTransaction` if there is none."""
    if not is_async:
        raise UsageError(f"within({type(connection).__name__}): asyncpg is for an AsyncGuard. Nothing ran")
    if isinstance(connection, asyncpg.Pool):
        raise UsageError("within(Pool): pass one of its connections: `async with pool.acquire() as connection`")
    if not connection.is_in_transaction():
        not_in_transaction("Enter `async with connection.transaction()` before")
    database_id, database = _met.get(inner(connection)) or _meet(inner(connection))
    conn = AsyncpgConnection(connection)
    if record is not None:
        return AsyncJoinedRecords(database._replace(sql=PostgresRows(record)), conn)
    return AsyncCallersRecords(database, conn, database_id, partial(_beside, inner(connection)))


# Connections joined before.
_met: WeakKeyDictionary[Any, tuple[DatabaseId, Database]] = WeakKeyDictionary()


def _meet(connection: Any) -> tuple[DatabaseId, Database]:
    database_id = _database_id(connection)
    name = f"postgresql://{database_id[0]}/{database_id[1]}"
    _met[connection] = met = database_id, Database(POSTGRES, name, classify, lock=LOCK)
    return met


def _database_id(connection: Any) -> DatabaseId:
    """Return the server, database and user that asyncpg was connected with."""
    parameters, address = connection._params, connection._addr
    server = ":".join(map(str, address)) if isinstance(address, tuple) else str(address)
    return server, parameters.database, parameters.user


async def _beside(connection: Any) -> AsyncpgConnection:
    parameters, address = connection._params, connection._addr
    host, port = address if isinstance(address, tuple) else (address, None)
    other = await asyncpg.connect(
        host=host,
        port=port,
        user=parameters.user,
        password=parameters.password,
        database=parameters.database,
        ssl=_encryption(parameters),
        timeout=CONNECT_SECONDS,
        # Behind a pooler nothing must be prepared.
        statement_cache_size=0,
    )
    return AsyncpgConnection(other)


def _encryption(parameters: Any) -> Any:
    """Return the TLS setting: the context alone would insist on encryption even where it was only preferred."""
    mode = parameters.sslmode.name
    return mode if mode in ("disable", "allow", "prefer") else parameters.ssl
