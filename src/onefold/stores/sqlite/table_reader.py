"""A read-only view of SQLite tables that are not ours."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from onefold.errors import StoreUnavailable
from onefold.stores.sql.connection import Database, ErrorClass, ErrorInfo
from onefold.stores.sql.foreign_tables import BIGINT, Column
from onefold.stores.sqlite.connection import BUSY, SqliteConnection, code_of
from onefold.stores.sqlite.dialect import SQLITE
from onefold.stores.sqlite.records import Records
from onefold.stores.sqlite.urls import parsed
from onefold.stores.table_reader import Now, Reader, Rows

TABLES: Final = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"


def opened(path: str, *, timeout: float, check_same_thread: bool = True) -> sqlite3.Connection:
    """Open a file that exists, only for reading; its journal mode stays as it is."""
    if not os.path.exists(path):
        raise StoreUnavailable(f"there is no file {path}")
    connection = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=check_same_thread)
    connection.execute("PRAGMA query_only = ON")
    return connection


class SqliteReader(Reader):
    mark = "?"
    tables = TABLES

    def __init__(self, url: str) -> None:
        path, _ = parsed(url)
        self.name = os.path.abspath(path)
        self._connection = opened(self.name, timeout=5.0)

    def now(self) -> Now:
        # Like CURRENT_TIMESTAMP: the machine's clock, in UTC.
        aware = datetime.fromtimestamp(time.time(), UTC)
        return Now(aware, aware.replace(tzinfo=None))

    def close(self) -> None:
        self._connection.close()

    def _asked(self, statement: str, values: Sequence[Any]) -> tuple[list[str], Rows]:
        try:
            cursor = self._connection.execute(statement, values)
            return [column[0] for column in cursor.description], cursor.fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from error


def connection_to(path: str, patience: float) -> SqliteConnection:
    """Return a connection for lookups in tables of this file, for one thread at a time; it is opened on first use."""
    return SqliteConnection(lambda: Records(opened(path, timeout=0.0, check_same_thread=False)), path, patience)


def database_of(path: str) -> Database:
    """Return the file as a database, for `stores.sql.foreign_tables`."""
    return Database(SQLITE, path, _classified)


def _classified(error: BaseException) -> ErrorInfo | None:
    if not isinstance(error, sqlite3.Error):
        return None
    kind = ErrorClass.CONFLICT if code_of(error) in BUSY else ErrorClass.MISTAKE
    return ErrorInfo(kind, str(error))


class SqliteCatalog:
    """Describes tables of SQLite, and compares their columns; see `stores.sql.foreign_tables`."""

    quote = '"'
    tables = TABLES
    columns = (
        "SELECT name, type, 0, (SELECT COUNT(*) FROM sqlite_master WHERE lower(name) = lower(:table) "
        "AND type = 'table') FROM pragma_table_info(:table, COALESCE(:schema, 'main'))"
    )
    # The primary key is listed separately, because INTEGER PRIMARY KEY has no index.
    indexes = (
        "SELECT one.name, part.name FROM pragma_index_list(:table) AS one, pragma_index_info(one.name) AS part "
        "WHERE NOT one.partial UNION ALL SELECT '', name FROM pragma_table_info(:table) WHERE pk = 1"
    )
    now = ""
    integers = BIGINT

    def kind_of(self, type_: str) -> str:
        # A column of any type may hold any value.
        del type_
        return "text"

    def equal(self, quoted: str, column: Column, name: str) -> str:
        # Without a type, the text '7' and the integer 7 differ.
        del column
        return f"{quoted} IN (:{name}, :{name}_number)"

    def read(self, quoted: str, column: Column) -> str:
        del column
        return quoted
