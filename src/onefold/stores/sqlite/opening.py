"""Open an SQLite file for a store: its pragmas, its journal mode and its tables. Never wait for another writer."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from onefold.errors import StoreUnavailable
from onefold.stores.sql.records import VERSION
from onefold.stores.sqlite.records import Records

Sync = Literal["full", "normal"]
SYNCS: Final = ("full", "normal")


def connect(path: str, sync: Sync, clock: Callable[[], float], told: Mapping[str, Any]) -> Records:
    auto_schema = bool(told["auto_schema"])
    if not auto_schema and not os.path.exists(path):
        raise StoreUnavailable(_no_tables(path))
    # No waiting here: the `SqliteConnection` waits, or the event loop.
    connection = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA synchronous = {sync}")
        # Without it macOS reports "synced" while the data is still in the disk's cache. Elsewhere it is ignored.
        connection.execute(f"PRAGMA fullfsync = {int(sync == 'full')}")
        records = Records(connection, clock)
        if not auto_schema:
            # The file may be another application's: keep its journal mode.
            _ensure_schema(records, path, create=False)
        _turn_to_wal(connection, path)
        _ensure_schema(records, path, create=auto_schema)
    except BaseException:
        connection.close()
        raise
    return records


def _turn_to_wal(connection: sqlite3.Connection, path: str) -> None:
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchall()[0][0]
    if mode != "wal":
        raise StoreUnavailable(f"{path}: the file stays in journal mode {mode!r}, but the store needs 'wal'")


def _ensure_schema(records: Records, path: str, *, create: bool) -> None:
    version = records.schema_version()
    if version < VERSION and create:
        # Of two processes that start together the second waits here, and then finds the tables.
        records.connection.execute("BEGIN IMMEDIATE")
        records.upgrade(records.schema_version())
        records.connection.execute("COMMIT")
        version = VERSION
    if version == 0:
        raise StoreUnavailable(_no_tables(path))


def _no_tables(path: str) -> str:
    return (
        f"{path}: there are no Onefold tables, and auto_schema=False. Create them with the command "
        "`onefold schema --store URL --apply`"
    )
