"""Look rows up in a table that is not ours, by its key: flows of SELECT statements, written once for every driver.

Nothing is ever written. Names of tables and columns are checked against the database's catalog and quoted; values are
parameters. A column is compared in its own type, so that its index serves.
"""

# ruff: noqa: S608 - the names in the statements were found in the catalog, and are quoted

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

from onefold._checks import did_you_mean
from onefold.errors import StoreUnavailable, UsageError
from onefold.stores.sql.connection import Database, ErrorClass, cause_of
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.facts import text

# Rows that a database considers equal to one key: "A" and "a" in many collations, or repeated rows.
ROWS_MAX: Final = 100

# An integer as `str` writes it: any other text is another key.
INTEGER: Final = re.compile(r"-?[1-9][0-9]{0,19}|0")
BIGINT: Final = range(-(2**63), 2**63)

# Characters that some driver would read as a placeholder.
PLACEHOLDERS: Final = frozenset(":%?\0")


class Column(NamedTuple):
    """A column of the table: how its values compare with a key, and its type for statements and people."""

    # "text", "integer" or "uuid", which can be a key; "json"; or "other".
    kind: str
    type: str
    # Whether a driver may not know the type: it is read as text.
    as_text: bool = False


class Catalog(Protocol):
    """How a database describes its tables, and compares a column with a value."""

    quote: str
    # The names of all tables and views that the session sees.
    tables: str
    # Of the table `:table` in `:schema`, both also quoted as `:quoted`. One row for each column: its name, its type,
    # whether a driver may not know the type, and whether it is a table, not a view.
    columns: str
    # One row for each column of each index, in order: the index, and the column (NULL: an expression).
    indexes: str
    # The time, with its zone, and as the database writes a time without one. Empty: the machine's clock in UTC.
    now: str
    # The integers that a column can hold, or be compared with.
    integers: range

    def kind_of(self, type_: str) -> str:
        """Return the kind of a column of this type."""

    def equal(self, quoted: str, column: Column, name: str) -> str:
        """Return the condition that a column has the value of this name, by an index where possible.

        There is a second one, `NAME_number`, which is an integer if the value is.
        """

    def read(self, quoted: str, column: Column) -> str:
        """Return the expression that reads the column."""


class Described(NamedTuple):
    """A table that exists, and has all the columns."""

    quoted: str
    columns: Mapping[str, Column]
    # The columns of each index, in order. None: it is a view, or otherwise without indexes of its own.
    indexes: tuple[tuple[str | None, ...], ...] | None

    def is_indexed(self, key: str, others: Collection[str]) -> bool:
        """Return whether an index leads to the key, perhaps after other columns whose values are known too."""
        if self.indexes is None:
            return True
        known = {key, *others}
        return any(key in index and set(index[: index.index(key)]) <= known for index in self.indexes)


def describe(database: Database, table: str, columns: Sequence[str]) -> SqlFlow[Described]:
    """Find the table and its columns. Raise `UsageError` for a name that does not exist, with the closest one."""
    catalog = database.sql.foreign
    for name in (table, *columns):
        if not name.strip() or PLACEHOLDERS & set(name):
            raise UsageError(f"{name!r} cannot be used as the name of a table or column: make a view with plain names")
    for schema, alone in ((None, table), table.split(".", 1) if "." in table else (None, table)):
        quoted = ".".join(_quoted(catalog, part) for part in (schema, alone) if part is not None)
        values = {"schema": schema, "table": alone, "quoted": quoted}
        found: Reply = yield from _ask(database, table, SqlRequest(catalog.columns, values, rows=True))
        if found.rows:
            break
    else:
        known: Reply = yield from _ask(database, table, SqlRequest(catalog.tables, {}, rows=True))
        near = did_you_mean(table, [str(text(name)) for (name,) in known.rows])
        raise UsageError(f"{database.name} has no table {table!r}{near}")
    there = {str(text(name)): _column(catalog, str(text(type_)), users) for name, type_, users, _ in found.rows}
    for name in columns:
        if name not in there:
            raise UsageError(f"{table} has no column {name!r}{did_you_mean(name, there)}")
    if not found.rows[0][3]:
        return Described(quoted, there, None)
    listed: Reply = yield from _ask(database, table, SqlRequest(catalog.indexes, values, rows=True))
    indexes: dict[Any, list[str | None]] = {}
    for index, name in listed.rows:
        indexes.setdefault(index, []).append(None if name is None else str(text(name)))
    return Described(quoted, there, tuple(tuple(index) for index in indexes.values()))


def find(
    database: Database,
    table: str,
    described: Described,
    read: Sequence[str | None],
    values: Mapping[str, str],
    latest: str | None = None,
) -> SqlFlow[list[tuple[Any, ...]]]:
    """Return the rows with these values, as the database compares them: the columns to read, and the time twice.

    An empty value also stands for NULL. Without a clock of the database's own, no time is returned. Of more than
    ROWS_MAX rows these are the last by the column `latest`, those without a value first.
    """
    catalog = database.sql.foreign
    conditions: list[str] = []
    given: dict[str, Any] = {}
    for number, (name, value) in enumerate(values.items()):
        column, quoted = described.columns[name], _quoted(catalog, name)
        if value == "":
            empty = f" OR {quoted} = ''" if column.kind == "text" else ""
            conditions.append(f"({quoted} IS NULL{empty})")
            continue
        whole = int(value) if INTEGER.fullmatch(value) and int(value) in catalog.integers else None
        prepared = _prepared(column, value, whole)
        if prepared is None:
            return []
        conditions.append(catalog.equal(quoted, column, f"value_{number}"))
        given |= {f"value_{number}": prepared, f"value_{number}_number": prepared if whole is None else whole}
    cells = ["NULL" if name is None else catalog.read(_quoted(catalog, name), described.columns[name]) for name in read]
    statement = (
        f"SELECT {', '.join(filter(None, (*cells, catalog.now)))} FROM {described.quoted} "
        f"WHERE {' AND '.join(conditions)}{_order(catalog, described, latest)} LIMIT {ROWS_MAX}"
    )
    reply: Reply = yield from _ask(database, table, SqlRequest(statement, given, rows=True))
    return [tuple(row) for row in reply.rows]


def _order(catalog: Catalog, described: Described, latest: str | None) -> str:
    # JSON has no order. The condition comes first, so that no index by time is taken instead of the key's.
    if latest is None or described.columns[latest].kind == "json":
        return ""
    quoted = _quoted(catalog, latest)
    return f" ORDER BY ({quoted} IS NULL) DESC, {quoted} DESC"


def _ask(database: Database, table: str, request: SqlRequest) -> SqlFlow[Reply]:
    """Send a statement, and report its errors ourselves: the store's messages are about its own tables."""
    try:
        reply: Reply = yield request
    except Exception as error:
        info = cause_of(error, database)
        if info is None or info.kind in (ErrorClass.LOST, ErrorClass.CONFLICT):
            raise
        raise StoreUnavailable(f"{database.name}: {table} cannot be read: {' '.join(str(error).split())}") from error
    return reply


def _column(catalog: Catalog, type_: str, as_text: Any) -> Column:
    return Column(catalog.kind_of(type_), type_, bool(as_text))


def _quoted(catalog: Catalog, name: str) -> str:
    return f"{catalog.quote}{name.replace(catalog.quote, 2 * catalog.quote)}{catalog.quote}"


def _prepared(column: Column, value: str, whole: int | None) -> str | None:
    """Return the value for a comparison with the column; None if no value of its type is written in this way."""
    if column.kind == "integer":
        return None if whole is None else value
    if column.kind == "uuid":
        try:
            return str(UUID(value))
        except ValueError:
            return None
    return value
