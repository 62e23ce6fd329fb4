"""Tables of PostgreSQL that are not ours, read only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.stores.postgres.urls import settings_of
from onefold.stores.table_reader import Now, Reader, Rows, driver


class PostgresReader(Reader):
    tables = (
        "SELECT c.relname FROM pg_catalog.pg_class AS c WHERE pg_catalog.pg_table_is_visible(c.oid) "
        "AND c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relnamespace <> 'pg_catalog'::regnamespace"
    )

    def __init__(self, url: str) -> None:
        settings = settings_of(url)
        self.name = settings.name
        pools = driver("onefold.stores.postgres.psycopg.pool", "PostgreSQL", "postgres")
        self._connection = pools.Opener(settings)().connection
        self._connection.read_only = True

    def now(self) -> Now:
        ((aware, naive),) = self.rows("SELECT clock_timestamp(), clock_timestamp()::timestamp")
        return Now(aware, naive)

    def close(self) -> None:
        self._connection.close()

    def _asked(self, statement: str, values: Sequence[Any]) -> tuple[list[str], Rows]:
        import psycopg

        try:
            with self._connection.transaction():
                cursor = self._connection.execute(statement, list(values), prepare=False)
                return [column.name for column in cursor.description], cursor.fetchall()
        except psycopg.Error as error:
            raise self._failed(error) from error
