"""`RecordColumn` on SQLite, which has one writer at a time: a claim becomes that writer before it looks."""

# ruff: noqa: S608 - the names in the statements were checked by `RecordColumn`, and are never values

from __future__ import annotations

from typing import Final

from onefold._model import Entry
from onefold.stores.sql.dialect import SqlFlow, SqlRequest
from onefold.stores.sql.own_column import Catalog, Rows
from onefold.stores.sqlite.dialect import SQLITE

# The primary key is listed separately, because INTEGER PRIMARY KEY has no index.
CATALOG: Final = Catalog(
    "SELECT '', one.name, part.name, '' FROM pragma_index_list(:table) AS one, pragma_index_info(one.name) AS part "
    'WHERE one."unique" AND NOT one.partial '
    "UNION ALL SELECT '', '', name, '' FROM pragma_table_info(:table) WHERE pk",
    columns="SELECT name, type || COALESCE((SELECT ' COLLATE ' || part.coll FROM pragma_index_list(:table) AS one, "
    "pragma_index_xinfo(one.name) AS part WHERE one.\"unique\" AND part.key AND part.name = field.name LIMIT 1), '') "
    "FROM pragma_table_info(:table) AS field",
    quote='"',
    equal="{column} = :{name}",
    exact="CAST({column} AS TEXT) COLLATE BINARY = :{name}",
)


class SqliteRows(Rows):
    """The operations of a store on the caller's own rows in SQLite."""

    catalog = CATALOG

    def lacks_savepoint(self, error: BaseException) -> bool:
        return SQLITE.lacks_savepoint(error)

    def _was_written(self, entry: Entry) -> SqlFlow[bool]:
        yield from self._become_writer()
        yield from self._find()
        return (yield from self._is_there(entry.address))

    def _become_writer(self) -> SqlFlow[None]:
        """Take the write lock by an empty DELETE, because a transaction may have begun without it."""
        try:
            yield SqlRequest(f"DELETE FROM {self._quoted(self._column.table)} WHERE 0", {})
        except Exception as error:
            # A missing table, or a view, is reported soon after.
            if "locked" in str(error):
                raise
