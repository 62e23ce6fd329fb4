"""Tables of SQLite that are not ours, read only."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from onefold.errors import StoreUnavailable
from onefold.stores.sqlite import open_store
from onefold.stores.table_reader import Now, Reader, Rows


class SqliteReader(Reader):
    mark = "?"
    tables = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"

    def __init__(self, url: str) -> None:
        self.name = open_store(url).path
        if not os.path.exists(self.name):
            raise StoreUnavailable(f"there is no file {self.name}")
        self._connection = sqlite3.connect(self.name, isolation_level=None)
        self._connection.execute("PRAGMA query_only = ON")

    def now(self) -> Now:
        # As CURRENT_TIMESTAMP: the machine's clock, in UTC.
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
