"""A read-only view of MySQL and MariaDB tables that are not ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC
from typing import Any, Final

from onefold.errors import StoreUnavailable
from onefold.stores.mysql.urls import settings_of
from onefold.stores.sql.foreign_tables import Column
from onefold.stores.table_reader import Now, Reader, Rows, driver

TABLES: Final = "SELECT table_name FROM information_schema.tables WHERE table_schema = database()"


class MysqlReader(Reader):
    quote = "`"
    tables = TABLES

    def __init__(self, url: str) -> None:
        settings = settings_of(url, "pymysql")
        self.name = settings.name
        pymysql = driver("onefold.stores.mysql.pymysql.connection", "MySQL", "mysql")
        try:
            self._connection = pymysql.for_transactions(settings).connection
        except Exception as error:
            if pymysql.classify(error) is None:
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
    """Parse columns of JSON, which arrive as text; leave other texts alone."""
    cells = zip(row, described, strict=True)
    return tuple(json.loads(cell) if is_json and isinstance(cell, str) else cell for cell, (_, is_json) in cells)


KINDS: Final = {
    "text": ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "uuid"),
    "integer": ("tinyint", "smallint", "mediumint", "int", "bigint"),
    "json": ("json",),
}

# The table that is asked about.
_ITS: Final = (
    "table_schema = COALESCE(CONVERT(:schema USING utf8mb4), DATABASE()) AND table_name = CONVERT(:table USING utf8mb4)"
)


class MysqlCatalog:
    """Describes tables of MySQL and MariaDB, and compares their columns; see `stores.sql.foreign_tables`."""

    quote = "`"
    tables = TABLES
    columns = (
        "SELECT column_name, data_type, 0, "  # noqa: S608 - no value is in it
        f"(SELECT COUNT(*) FROM information_schema.tables WHERE {_ITS} AND table_type = 'BASE TABLE') "
        f"FROM information_schema.columns WHERE {_ITS}"
    )
    indexes = (
        "SELECT index_name, column_name FROM information_schema.statistics "  # noqa: S608 - no value is in it
        f"WHERE {_ITS} ORDER BY index_name, seq_in_index"
    )
    now = "UTC_TIMESTAMP(6), NOW(6)"
    # BIGINT UNSIGNED, too.
    integers = range(-(2**63), 2**64)

    def kind_of(self, type_: str) -> str:
        return next((kind for kind, types in KINDS.items() if type_.lower() in types), "other")

    def equal(self, quoted: str, column: Column, name: str) -> str:
        # Compared with text, a large integer is rounded.
        return f"{quoted} = :{name}_number" if column.kind == "integer" else f"{quoted} = _utf8mb4 :{name}"

    def read(self, quoted: str, column: Column) -> str:
        del column
        return quoted
