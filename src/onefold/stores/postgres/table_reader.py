"""A read-only view of PostgreSQL tables that are not ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from onefold.stores.postgres.urls import settings_of
from onefold.stores.sql.foreign_tables import BIGINT, Column
from onefold.stores.table_reader import Now, Reader, Rows, driver

# The number of the type CHAR(n).
BPCHAR: Final = 1042

TABLES: Final = (
    "SELECT c.relname FROM pg_catalog.pg_class AS c WHERE pg_catalog.pg_table_is_visible(c.oid) "
    "AND c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relnamespace <> 'pg_catalog'::regnamespace"
)


class PostgresReader(Reader):
    tables = TABLES

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
                padded = [column.type_code == BPCHAR for column in cursor.description]
                rows = [_unpadded(row, padded) if any(padded) else row for row in cursor.fetchall()]
                return [column.name for column in cursor.description], rows
        except psycopg.Error as error:
            raise self._failed(error) from error


def _unpadded(row: tuple[Any, ...], padded: list[bool]) -> tuple[Any, ...]:
    """Return the cells of CHAR(n) without the blanks that PostgreSQL adds: they are no part of the value."""
    cells = zip(row, padded, strict=True)
    return tuple(cell.rstrip(" ") if is_padded and isinstance(cell, str) else cell for cell, is_padded in cells)


KINDS: Final = {
    "text": ("text", "character varying", "character", "bpchar", "name", "citext"),
    "integer": ("smallint", "integer", "bigint"),
    "uuid": ("uuid",),
    "json": ("json", "jsonb"),
}


class PostgresCatalog:
    """Describes tables of PostgreSQL, and compares their columns; see `stores.sql.foreign_tables`."""

    quote = '"'
    tables = TABLES
    # A domain is read as its base type. Drivers know PostgreSQL's own types, whose numbers are below 16384.
    columns = (
        "SELECT CAST(part.attname AS text), format_type(COALESCE(NULLIF(own.typbasetype, 0), own.oid), -1), "
        "COALESCE(NULLIF(own.typbasetype, 0), own.oid) >= 16384, main.relkind IN ('r', 'p', 'm') "
        "FROM pg_attribute AS part JOIN pg_type AS own ON own.oid = part.atttypid "
        "JOIN pg_class AS main ON main.oid = part.attrelid "
        "WHERE part.attnum > 0 AND NOT part.attisdropped AND part.attrelid = to_regclass(CAST(:quoted AS text))"
    )
    indexes = (
        "SELECT CAST(one.indexrelid AS bigint), CAST(part.attname AS text) FROM pg_index AS one "
        "CROSS JOIN LATERAL unnest(one.indkey) WITH ORDINALITY AS place (number, nth) "
        "LEFT JOIN pg_attribute AS part ON part.attrelid = one.indrelid AND part.attnum = place.number "
        "WHERE one.indrelid = to_regclass(CAST(:quoted AS text)) AND one.indisvalid AND one.indpred IS NULL "
        "ORDER BY one.indexrelid, place.nth"
    )
    now = "clock_timestamp(), CAST(clock_timestamp() AS timestamp)"
    integers = BIGINT

    def kind_of(self, type_: str) -> str:
        # An extension's type has the name of its schema before it, if that is not searched.
        plain = type_.rpartition(".")[2]
        return next((kind for kind, types in KINDS.items() if plain in types), "other")

    def equal(self, quoted: str, column: Column, name: str) -> str:
        # As text at first, so that every driver sends text.
        given = f"CAST(:{name} AS text)"
        if column.kind == "other":
            return f"CAST({quoted} AS text) = {given}"
        if column.kind == "integer":
            # Of all three types: an index compares across them, and nothing is out of range.
            return f"{quoted} = CAST({given} AS bigint)"
        if column.type in ("text", "character varying"):
            return f"{quoted} = {given}"
        return f"{quoted} = CAST({given} AS {'bpchar' if column.type == 'character' else column.type})"

    def read(self, quoted: str, column: Column) -> str:
        # Some drivers parse JSON, and others do not. CHAR(n) comes padded with blanks, which a cast removes.
        is_cast = column.as_text or column.kind == "json" or column.type in ("character", "bpchar")
        return f"CAST({quoted} AS text)" if is_cast else quoted
