"""`Column` over any link: the caller's own row is the record. It is there, or it is not; the handler writes it.

Talks, as those of a dialect, so that they are written once for every driver and both colours.
"""

# ruff: noqa: S608 - the names in the statements were checked by `Column`, and are never values
# ruff: noqa: ARG002 - a row of the caller's has no leases, no memories and no place for a result

from __future__ import annotations

import math
from typing import Final, NamedTuple

from onefold._model import Address, Claim, Ending, Entry, Gone, Memory, Record, State
from onefold.errors import UsageError
from onefold.stores._sql_dialect import Ask, Dialect, Reply, Talk
from onefold.transactions import Column


class Catalog(NamedTuple):
    """How a database is asked for unique indexes, and how it wants names and values."""

    # One row for each column of each unique index: the index, the column (NULL: an expression), the column's type.
    unique: str
    quote: str
    # A key is text, and the column may have another type.
    equal: str = "{column} = :{name}"
    # Whether `Number` and `number` are the same column.
    folds_case: bool = True


# The primary key besides, because INTEGER PRIMARY KEY has no index.
SQLITE: Final = Catalog(
    "SELECT one.name, part.name, '' FROM pragma_index_list(:table) AS one, pragma_index_info(one.name) AS part "
    'WHERE one."unique" AND NOT one.partial '
    "UNION ALL SELECT '', name, '' FROM pragma_table_info(:table) WHERE pk",
    quote='"',
)

# The type without its length (-1): a cast to char(3) would make `abcd` an `abc`.
POSTGRES: Final = Catalog(
    "SELECT CAST(one.indexrelid AS text), CAST(part.attname AS text), format_type(part.atttypid, -1) "
    "FROM pg_index AS one CROSS JOIN LATERAL unnest(one.indkey) WITH ORDINALITY AS place (number, nth) "
    "LEFT JOIN pg_attribute AS part ON part.attrelid = one.indrelid AND part.attnum = place.number "
    "WHERE one.indrelid = to_regclass(quote_ident(CAST(:table AS text))) "
    "AND one.indisunique AND one.indisvalid AND one.indpred IS NULL AND place.nth <= one.indnkeyatts",
    quote='"',
    equal="{column} = CAST(CAST(:{name} AS text) AS {type})",
    folds_case=False,
)

# By the column's own collation, so that its index is used; then byte by byte, because a collation may take `Key` for
# `KEY`: there the handler's own INSERT fails, and nothing is taken for done that is not.
MYSQL: Final = Catalog(
    "SELECT index_name, column_name, '' FROM information_schema.statistics "
    "WHERE table_schema = DATABASE() AND table_name = _utf8mb4 :table AND non_unique = 0",
    quote="`",
    equal="{column} = _utf8mb4 :{name} AND CAST(CONVERT({column} USING utf8mb4) AS BINARY) = :{name}",
)

CATALOGS: Final = {"mariadb": MYSQL, "mysql": MYSQL, "postgresql": POSTGRES, "sqlite": SQLITE}

# The columns that were found to be unique, each with the statement that looks for a row. For one database.
Known = dict[Column, str]


class Rows(Dialect):
    """The operations of a store, on rows of the caller's."""

    def __init__(self, column: Column, catalog: Catalog, known: Known) -> None:
        self._column = column
        self._catalog = catalog
        self._known = known

    def claim(self, entry: Entry, replacing: Record | None = None) -> Talk[Record | Gone | None]:
        address, table = entry.address, self._column.table
        if replacing is not None:
            raise UsageError(
                f"{address.operation} [key {address.digest}]: bypass=True cannot run it again, because its row in "
                f"{table} is there. Nothing ran. Delete the row before"
            )
        if not (yield from self._is_there(address)):
            return None
        return Record(
            address=address,
            token=b"",
            revision=1,
            state=State.DONE,
            attempt=1,
            lease_left=0.0,
            stay_left=math.inf,
            age=0.0,
            omitted=True,
            remark=f"the record is the row in {table}",
        )

    def finish(self, claim: Claim, ending: Ending) -> Talk[bool]:
        address, column = claim.address, self._column
        if not (yield from self._is_there(address)):
            raise UsageError(
                f"{address.operation} [key {address.digest}]: the handler has to write the row whose "
                f"{column.table}.{column.name} is the key, and it did not. Roll back, and deliver it again"
            )
        return True

    def release(self, claim: Claim, memory: Memory | None = None) -> Talk[bool]:
        yield from ()
        return True

    def _is_there(self, address: Address) -> Talk[bool]:
        column = self._column
        if bool(address.scope) != (column.scope is not None):
            raise UsageError(
                f"record={column!r} and a delivery with {'a' if address.scope else 'no'} scope: both "
                "have one, or neither. Name the tenant's column with Column(..., scope=...), and the tenant with scope="
            )
        statement = self._known.get(column)
        if statement is None:
            statement = self._known[column] = yield from self._looking()
        values = {"key": address.key} | ({"scope": address.scope} if column.scope else {})
        reply: Reply = yield Ask(statement, values, rows=True)
        return bool(reply.rows)

    def _looking(self) -> Talk[str]:
        """The statement that looks for a row, once the index is found: nothing else keeps two deliveries apart."""
        column, catalog = self._column, self._catalog
        reply: Reply = yield Ask(catalog.unique, {"table": column.table}, rows=True)
        wanted = {self._fold(name): name for name in (column.name, column.scope) if name}
        unique: dict[str, set[str | None]] = {}
        types: dict[str, str] = {}
        for index, name, type_ in reply.rows:
            unique.setdefault(index, set()).add(name and self._fold(name))
            types[self._fold(name or "")] = type_
        if set(wanted) not in unique.values():
            raise UsageError(
                f"record={column!r}: {column.table} has no unique index on {' and '.join(sorted(wanted.values()))}, so "
                "that two deliveries at once could both write. Create one, or leave record= out"
            )
        names = {"key": column.name} | ({"scope": column.scope} if column.scope else {})
        conditions = [
            catalog.equal.format(column=self._quoted(part), name=name, type=types[self._fold(part)])
            for name, part in names.items()
        ]
        return f"SELECT 1 FROM {self._quoted(column.table)} WHERE {' AND '.join(conditions)}"

    def _quoted(self, name: str) -> str:
        # In quotes, because a table may be called `order`.
        return f"{self._catalog.quote}{name}{self._catalog.quote}"

    def _fold(self, name: str) -> str:
        return name.lower() if self._catalog.folds_case else name
