"""A hand-made table of finished deliveries, such as `processed_messages`, whose rows count as records.

The table is only read, by one lookup for each delivery that is not known yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from onefold.codecs import Codec
from onefold.durations import FOREVER, Duration, seconds
from onefold.errors import UsageError
from onefold.keys import checked_operation
from onefold.stores.kinds import kind_of, scheme_of
from onefold.stores.opening import check_source, without_password
from onefold.stores.sources import AsyncStoreSource, StoreSource
from onefold.stores.table_reader import readable

if TYPE_CHECKING:
    from onefold.stores.hand_made.lookup import AsyncTableLookup, TableLookup

COLUMNS: Final = ("key", "operation_column", "scope_column", "result_column", "at")


class HandMadeTable:
    """A table in which your own code has recorded what was done: `Guard(store, migrate_from=HandMadeTable(...))`.

    `database` is a URL of PostgreSQL, MySQL, MariaDB or SQLite, or a pool or engine; `table` may have its schema before
    a dot, and may be a view. The other names are those of `onefold import`: `key` is the column with the key;
    `operation` is the operation of all rows, `operation_column` the column that holds it; `scope_column` holds the
    tenant, `result_column` the result that duplicates get, and `at` the time when it was done. A row counts for as long
    as `keep` says, from `at` on.

    A row that is found counts as done. Nothing is ever written to the table.
    """

    def __init__(
        self,
        database: StoreSource | AsyncStoreSource,
        table: str,
        *,
        key: str,
        operation: str | None = None,
        operation_column: str | None = None,
        scope_column: str | None = None,
        result_column: str | None = None,
        at: str | None = None,
        keep: Duration = FOREVER,
    ) -> None:
        self.database = database
        self.table = table
        self.key = key
        self.operation = None if operation is None else checked_operation(operation)
        self.operation_column = operation_column
        self.scope_column = scope_column
        self.result_column = result_column
        self.at = at
        self.keep = seconds(keep, "keep")
        self._check()

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of all columns that are read."""
        return tuple(name for name in (getattr(self, field) for field in COLUMNS) if name is not None)

    def check_database(self, *, is_async: bool) -> None:
        """Raise `UsageError` for a database that has no tables, or that this kind of guard does not take."""
        check_source(self.database, is_async=is_async)
        if isinstance(self.database, str) and not kind_of(self.database).table_reader:
            raise UsageError(
                f"{self!r}: {scheme_of(self.database)}: has no tables to read. Name a database with {readable()}"
            )

    def _check(self) -> None:
        for field in ("table", *COLUMNS):
            name = getattr(self, field)
            optional = field not in ("table", "key")
            if not (isinstance(name, str) and name.strip()) and not (optional and name is None):
                raise UsageError(f"HandMadeTable({field}={name!r}) has to be the name of a table or column")
        if (self.operation is None) == (self.operation_column is None):
            raise UsageError(
                f"{self!r}: name the operation of all rows with operation=, or the column that holds it with "
                "operation_column=, and not both"
            )
        if self.keep == 0:
            raise UsageError(f"{self!r}: with keep=0 no row would count")

    def __repr__(self) -> str:
        database = self.database
        shown = repr(without_password(database)) if isinstance(database, str) else type(database).__name__
        return f"HandMadeTable({shown}, {self.table!r})"


def open_lookup(table: HandMadeTable, codec: Codec, *, is_async: bool) -> TableLookup | AsyncTableLookup:
    """Return a reader of the rows as records; it connects on first use."""
    from onefold.stores.hand_made.lookup import AsyncTableLookup, TableLookup

    return AsyncTableLookup(table, codec) if is_async else TableLookup(table, codec)
