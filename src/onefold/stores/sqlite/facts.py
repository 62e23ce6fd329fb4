"""Collect the facts of an SQLite file, by statements and from its file system."""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from onefold._concurrency.generators import run
from onefold.errors import StoreUnavailable
from onefold.stores.base import Untold
from onefold.stores.sql import facts as sql_facts
from onefold.stores.sql.connection import Database, ErrorClass, ErrorInfo
from onefold.stores.sql.dialect import SqlFlow
from onefold.stores.sql.records import IN_DOUBT_SECONDS_MIN, TABLE
from onefold.stores.sqlite.connection import BUSY, code_of, translated
from onefold.stores.sqlite.dialect import SQLITE
from onefold.stores.sqlite.file_access import is_read_only, may
from onefold.stores.sqlite.records import Records

PURGE_INDEX: Final = f"{TABLE}_expires"
INDEXES: Final = (PURGE_INDEX, f"{TABLE}_held")

# By SQLite's own clock, which is the machine's.
_NOW: Final = "((julianday('now') - 2440587.5) * 86400.0)"

_EXPIRED: Final = f"{TABLE} WHERE expires <= {_NOW} ORDER BY expires LIMIT"

_OLDEST: Final = (
    f"SELECT (SELECT {_NOW} - expires FROM {_EXPIRED} 1), "
    f"(SELECT count(*) FROM (SELECT 1 FROM {_EXPIRED} {sql_facts.EXPIRED_COUNTED_MAX}))"
)

_IN_DOUBT: Final = sql_facts.counting_in_doubt(_NOW, within=f"expires >= {IN_DOUBT_SECONDS_MIN:.0f}", by="expires")

_INDEXES: Final = f"SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = '{TABLE}'"


def facts(database: Database) -> SqlFlow[dict[str, Any]]:
    """Collect the facts that statements report, over any connection."""
    found: dict[str, Any] = {"kind": "sqlite"}
    found |= yield from sql_facts.row(database, "PRAGMA journal_mode", ("journal_mode",))
    found |= yield from sql_facts.tables(database)
    if not found["version"] or isinstance(found["version"], Untold):
        return found
    found |= yield from sql_facts.indexes(
        database, _INDEXES, wanted=INDEXES, for_purge=PURGE_INDEX, oldest=_OLDEST, doubtful=_IN_DOUBT
    )
    return found


def facts_of_file(path: str, *, sync: str, auto_schema: bool) -> dict[str, Any]:
    """Collect the facts of our own file, and those of the file system. The file is opened for reading only."""
    told = {"kind": "sqlite", "path": path, "synchronous": sync} | _of_disk(path)
    database = Database(SQLITE, path, _classify, auto_schema=auto_schema)
    if not os.path.exists(path):
        return told | {"exists": False, "version": 0, "auto_schema": auto_schema}
    try:
        with closing(sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True, timeout=1.0)) as connection:
            return told | {"exists": True} | run(facts(database), Records(connection, time.time))
    except sqlite3.Error as error:
        if not told["writable"]:
            # Even a reader writes next to a file in WAL mode.
            return told | {"exists": True, "version": Untold(str(translated(path, error)))}
        raise translated(path, error) from error


def schema_exists(path: str) -> bool:
    """Return whether the file has our tables. Open it for reading only, and create nothing."""
    if not os.path.exists(path):
        return False
    try:
        with closing(sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True, timeout=1.0)) as connection:
            return Records(connection, time.time).schema_version() > 0
    except sqlite3.Error as error:
        if code_of(error) in BUSY:
            # A later read waits as long as the URL says, and then reports the problem.
            return True
        raise translated(path, error) from error


def _of_disk(path: str) -> dict[str, Any]:
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise StoreUnavailable(f"{path}: there is no such directory. Create it, or correct the URL")
    # The WAL and its index are created next to the file.
    writable = may(folder, os.W_OK) and (not os.path.exists(path) or may(path, os.W_OK))
    return {
        "writable": writable and not is_read_only(folder),
        "file_bytes": _size(path),
        "log_bytes": _size(f"{path}-wal"),
        "free_bytes": shutil.disk_usage(folder).free,
    }


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _classify(error: BaseException) -> ErrorInfo | None:
    if not isinstance(error, sqlite3.Error):
        return None
    if code_of(error) in BUSY:
        return ErrorInfo(ErrorClass.DOWN, "another connection holds the file for itself")
    return ErrorInfo(ErrorClass.LOST, f"SQLite says: {error}")
