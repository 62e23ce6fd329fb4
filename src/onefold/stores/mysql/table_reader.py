"""Tables of MySQL and MariaDB that are not ours, read only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC
from typing import Any

from onefold.errors import StoreUnavailable
from onefold.stores.mysql.urls import settings_of
from onefold.stores.table_reader import Now, Reader, Rows, driver


class MysqlReader(Reader):
    quote = "`"
    tables = "SELECT table_name FROM information_schema.tables WHERE table_schema = database()"

    def __init__(self, url: str) -> None:
        settings = settings_of(url, "pymysql")
        self.name = settings.name
        connections = driver("onefold.stores.mysql.pymysql.connection", "MySQL", "mysql")
        try:
            self._connection = connections.for_transactions(settings).connection
        except Exception as error:
            if connections.classify(error) is None:
                raise
            raise StoreUnavailable(f"{self.name}: {error.args[-1]}") from error

    def now(self) -> Now:
        ((aware, naive),) = self.rows("SELECT UTC_TIMESTAMP(6), NOW(6)")
        return Now(aware.replace(tzinfo=UTC), naive)

    def close(self) -> None:
        self._connection.close()

    def _asked(self, statement: str, values: Sequence[Any]) -> tuple[list[str], Rows]:
        from pymysql.constants import FIELD_TYPE
        from pymysql.err import MySQLError

        try:
            with self._connection.cursor() as cursor:
                cursor.execute("START TRANSACTION READ ONLY")
                cursor.execute(statement, tuple(values))
                described = [(column[0], column[1] == FIELD_TYPE.JSON) for column in cursor.description]
                rows = [*cursor.fetchall()]
            self._connection.rollback()
        except MySQLError as error:
            raise StoreUnavailable(f"{self.name}: {error.args[-1]}") from error
        return [name for name, _ in described], [_parsed(row, described) for row in rows]


def _parsed(row: tuple[Any, ...], described: list[tuple[str, bool]]) -> tuple[Any, ...]:
    """A column of JSON comes as text, and is a value; other texts are texts."""
    cells = zip(row, described, strict=True)
    return tuple(json.loads(cell) if is_json and isinstance(cell, str) else cell for cell, (_, is_json) in cells)
