"""`RecordColumn` on SQLite, which has one writer at a time: a claim becomes that writer before it looks."""

# ruff: noqa: S608 - the names in the statements were checked by `RecordColumn`, and are never values
# ruff: noqa: ARG002 - a row of the caller's has no memories

from __future__ import annotations

import re
import sqlite3
from typing import Any, Final

from onefold._concurrency.generators import run
from onefold._model import Address, Claim, Ending, Entry, Gone, Record, Released
from onefold.errors import UsageError
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.own_column import Rows
from onefold.stores.sql.row_values import Catalog, Form, Row
from onefold.stores.sqlite.dialect import SQLITE
from onefold.stores.sqlite.joined import ENDED, JoinedRecords, SqliteTransaction
from onefold.stores.sqlite.records import Records, text_as_str
from onefold.transactions import RecordColumn

# The primary key is listed separately, because INTEGER PRIMARY KEY has no index.
CATALOG: Final = Catalog(
    "SELECT '', one.name, part.name, '' FROM pragma_index_list(:table) AS one, pragma_index_info(one.name) AS part "
    'WHERE one."unique" AND NOT one.partial '
    "UNION ALL SELECT '', '', name, '' FROM pragma_table_info(:table) WHERE pk",
    columns="SELECT name, type || COALESCE((SELECT ' COLLATE ' || part.coll FROM pragma_index_list(:table) AS one, "
    "pragma_index_xinfo(one.name) AS part WHERE one.\"unique\" AND part.key AND part.name = field.name LIMIT 1), '') "
    "FROM pragma_table_info(:table) AS field",
    unfilled="SELECT name FROM pragma_table_info(:table) WHERE dflt_value IS NULL "
    "AND NOT (pk AND upper(type) = 'INTEGER')",
    quote='"',
    equal="{column} = :{name}",
    exact="CAST({column} AS TEXT) COLLATE BINARY = :{name}",
    value=":{name}",
    read="CAST({column} AS TEXT)",
    write=":{name}",
    write_json=":{name}",
    write_bytes=":{name}",
)


class SqliteRows(Rows):
    """The operations of a store on the caller's own rows in SQLite."""

    catalog = CATALOG

    def lacks_savepoint(self, error: BaseException) -> bool:
        return SQLITE.lacks_savepoint(error)

    def _was_written(self, entry: Entry) -> SqlFlow[Row | None]:
        yield from self._become_writer()
        yield from self._find()
        return (yield from self._is_there(entry.address))

    def _refuses_value(self, error: BaseException) -> bool:
        return isinstance(error, (sqlite3.IntegrityError, sqlite3.DataError))

    def _form(self, described: str) -> Form:
        # Text that looks like a number is stored as one, unless the type is of text or of bytes. `JSON` is neither.
        form, kind = super()._form(described), described.upper()
        if form.is_bytes or not kind or (re.search("CHAR|CLOB|TEXT|BLOB", kind) and "INT" not in kind):
            return form
        is_real = re.search("REAL|FLOA|DOUB", kind) and "INT" not in kind
        return form._replace(changes=(float, int) if is_real else (float,))

    def _become_writer(self) -> SqlFlow[None]:
        """Take the write lock by an empty DELETE, because a transaction may have begun without it."""
        try:
            yield SqlRequest(f"DELETE FROM {self._quoted(self._column.table)} WHERE 0", {})
        except Exception as error:
            # A missing table, or a view, is reported soon after.
            if "locked" in str(error):
                raise


class RowRecords(JoinedRecords):
    """Records that are the caller's own rows."""

    def __init__(self, records: Records, column: RecordColumn) -> None:
        super().__init__(records)
        self._rows = SqliteRows(column)

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        found = self._run(self._rows.claim(entry, replacing))
        if found is None:
            self._run(self._rows.mark(Claim(entry.address, entry.token)))
        return found  # type: ignore[no-any-return]

    def finish(self, claim: Claim, ending: Ending) -> bool:
        self._check_inside()
        if not self._run(self._rows.finish_joined(claim, ending)):
            raise UsageError(ENDED)
        return True

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        if self._is_inside():
            self._run(self._rows.unmark(claim))
        return True

    def read(self, address: Address) -> Record | None:
        return self._run(self._rows.read(address))  # type: ignore[no-any-return]

    def _run(self, flow: SqlFlow[Any]) -> Any:
        return run(flow, self)

    def send(self, request: SqlRequest) -> Reply:
        cursor = self.tx.cursor()
        # The connection may be the caller's, with a row factory and text factory of its own.
        cursor.row_factory = None
        with text_as_str(self.tx):
            cursor.execute(request.statement, request.values)
            return Reply(cursor.rowcount, cursor.fetchall())

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        return [self.send(request) for request in requests]


class RowTransaction(RowRecords, SqliteTransaction):
    """A transaction of our own, for records that are the caller's own rows."""

    def __init__(self, records: Records, path: str, patience: float, column: RecordColumn) -> None:
        SqliteTransaction.__init__(self, records, path, patience)
        self._rows = SqliteRows(column)

    def _run(self, flow: SqlFlow[Any]) -> Any:
        try:
            return super()._run(flow)
        except sqlite3.Error as error:
            raise self._translated(error) from error
