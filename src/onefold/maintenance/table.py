"""Read a hand-made table of finished deliveries: pages of rows, and nothing is written.

`processed_messages(message_id, processed_at)` is the usual one. Rows come in pages by their key, each page read at
once. Names of tables and columns are quoted, and values are never part of a statement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any, Final, NamedTuple

from onefold import UsageError
from onefold._checks import did_you_mean
from onefold.stores.hand_made.rows import Row
from onefold.stores.table_reader import Now, Reader

# Rows in memory at a time; with results, which may be large, fewer. Above the maximum only if one key has so many.
PAGE: Final = 2_000
PAGE_WITH_RESULTS: Final = 200
PAGE_MAX: Final = 64_000


class Table(NamedTuple):
    """The name of a table, and the meaning of its columns."""

    name: str
    key: str
    scope: str | None = None
    operation: str | None = None
    # When it was done.
    at: str | None = None
    result: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(column for column in self[1:] if column is not None)

    @property
    def named(self) -> tuple[str, ...]:
        """Return the columns that every row needs."""
        return tuple(column for column in (self.operation, self.key) if column is not None)

    @property
    def order(self) -> str:
        """Return the order by which rows are numbered. NULL has no place in it, except a scope, which is last."""
        return ", ".join((*(() if self.scope is None else (self.scope,)), *self.named))


class Page(NamedTuple):
    """Some rows, no two of one key; and how many others had a key that another row has."""

    rows: list[Row]
    merged: int = 0


def check(reader: Reader, table: Table) -> str:
    """Return the table's name, quoted. Raise `UsageError` if it, or one of the columns, does not exist."""
    known = [str(name) for (name,) in reader.rows(reader.tables)]
    for name in (table.name, *table.columns):
        if not name.strip() or "\0" in name:
            raise UsageError(f"{name!r} is not a valid table or column name")
    if table.name in known:
        quoted = reader.named(table.name)
    elif "." in table.name:
        quoted = ".".join(map(reader.named, table.name.split(".")))
    else:
        raise UsageError(f"{reader.name} has no table {table.name!r}{did_you_mean(table.name, known)}")
    columns = reader.columns(quoted)
    for column in table.columns:
        if column not in columns:
            raise UsageError(f"{table.name} has no column {column!r}{did_you_mean(column, columns)}")
    return quoted


def pages(reader: Reader, table: Table, quoted: str) -> Iterator[Page]:
    """Yield all rows that have a key, page by page."""
    numbers = count(1)
    if table.scope is None:
        yield from _pages(reader, table, quoted, table.named, numbers)
        return
    yield from _pages(reader, table, quoted, (table.scope, *table.named), numbers)
    # A row without a scope has no place in the order of scopes.
    yield from _pages(reader, table, quoted, table.named, numbers, absent=table.scope)


def _pages(
    reader: Reader,
    table: Table,
    quoted: str,
    ordered: tuple[str, ...],
    numbers: Iterator[int],
    *,
    absent: str | None = None,
) -> Iterator[Page]:
    """Yield rows in the order of these columns, none of which is NULL.

    A page begins with the last row of the previous page, because values that a database considers equal ("A" and "a",
    in many collations) may be on both sides of the border; rows that were already seen are left out.
    """
    size = PAGE if table.result is None else PAGE_WITH_RESULTS
    last: list[Any] | None = None
    seen: Counter[str] = Counter()
    while True:
        statement, values = _statement(reader, table, quoted, ordered, absent, last, size)
        now, found = reader.now(), reader.rows(statement, values)
        cells = [dict(zip(table.columns, row, strict=True)) for row in found]
        identities = [repr([row[column] for column in ordered]) for row in cells]
        here: Counter[str] = Counter()
        fresh: list[Row] = []
        merged = 0
        for identity, row in zip(identities, cells, strict=True):
            here[identity] += 1
            if here[identity] <= seen[identity]:
                continue
            number = next(numbers)
            if here[identity] == 1:
                fresh.append(_row(table, row, now, number))
            else:
                merged += 1
        if fresh or merged:
            yield Page(fresh, merged)
        if len(found) < size:
            return
        if not fresh and size >= PAGE_MAX:
            raise UsageError(
                f"{table.name} has more than {size} rows of one {table.key}: make a view of the distinct ones"
            )
        size = size if fresh else size * 2
        # Of repeated rows, only new ones are counted.
        last, seen = [cells[-1][column] for column in ordered], here if fresh else here | seen


def _statement(
    reader: Reader,
    table: Table,
    quoted: str,
    ordered: tuple[str, ...],
    absent: str | None,
    last: list[Any] | None,
    size: int,
) -> tuple[str, list[Any]]:
    names = [reader.named(column) for column in ordered]
    conditions = [f"{name} IS NOT NULL" for name in names]
    if absent is not None:
        conditions.append(f"{reader.named(absent)} IS NULL")
    values: list[Any] = []
    if last is not None:
        # The first one separately too: MySQL cannot seek in an index by a row comparison.
        conditions.append(f"{names[0]} >= {reader.mark}")
        conditions.append(f"({', '.join(names)}) >= ({', '.join([reader.mark] * len(names))})")
        values = [last[0], *last]
    statement = (
        f"SELECT {', '.join(map(reader.named, table.columns))} FROM {quoted} "  # noqa: S608 - names are quoted
        f"WHERE {' AND '.join(conditions)} ORDER BY {', '.join(names)} LIMIT {size}"
    )
    return statement, values


def unnamed(reader: Reader, table: Table, quoted: str) -> int:
    """Return how many rows have no key or no operation, and were in no page."""
    missing = " OR ".join(f"{reader.named(column)} IS NULL" for column in table.named)
    ((found,),) = reader.rows(f"SELECT count(*) FROM {quoted} WHERE {missing}")  # noqa: S608 - names are quoted
    return int(found)


def _row(table: Table, cells: dict[str, Any], now: Now, number: int) -> Row:
    key, scope, operation, at, result = (None if column is None else cells[column] for column in table[1:])
    return Row(key, scope, operation, at, result, now, number)
