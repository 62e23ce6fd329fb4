"""Look up the record of an address in a hand-made table: one SELECT by the key, sync and async by the same rules.

A row counts only for exactly its own address. A database may consider more to be equal, such as "A" and "a".
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from onefold._checks import did_you_mean
from onefold._concurrency.generators import Flow, run, run_async
from onefold._model import Address, Record
from onefold.codecs import Codec
from onefold.errors import MissingKey, StoreUnavailable, UsageError
from onefold.stores.hand_made import HandMadeTable
from onefold.stores.hand_made.rows import Meaning, Row, address_of, age_of, entry_of
from onefold.stores.opening import open_store
from onefold.stores.sql.connection import Database
from onefold.stores.sql.dialect import SqlFlow
from onefold.stores.sql.foreign_tables import ROWS_MAX, Described, describe, find
from onefold.stores.table_reader import Now

# The kinds of columns that can hold a key.
KEYS = ("text", "integer", "uuid")


class LookupRules:
    """The lookups in one table, for sync and async alike."""

    _is_async: bool

    def __init__(self, table: HandMadeTable, codec: Codec) -> None:
        self.table = table
        self._store, self._ours = open_store(table.database, is_async=self._is_async)
        if not hasattr(self._store, "ask"):
            raise UsageError(f"{table!r}: {type(self._store).__name__} has no tables to read")
        self._meaning = Meaning(table.table, table.operation, table.keep, table.result_column is not None, codec)
        # Looked up on first use.
        self._described: Described | None = None
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.table!r})"

    def _check(self) -> Flow[None]:
        yield partial(self._store.ask, self._describe)

    def _read(self, address: Address) -> Flow[Record | None]:
        if not self._concerns(address):
            return None
        found: Record | None = yield partial(self._store.ask, partial(self._look_up, address))
        return found

    def _concerns(self, address: Address) -> bool:
        """Return whether the table can have this address."""
        table = self.table
        if table.operation not in (None, address.operation):
            if did_you_mean(address.operation, [str(table.operation)]):
                self._warn(f"{table!r} has operation={table.operation!r}: no row counts for {address.operation!r}")
            return False
        if address.scope and table.scope_column is None:
            raise UsageError(
                f"{address.operation} [key {address.digest}]: the delivery has a scope, and {table!r} names no "
                "scope_column=, so that none of its rows would count. Nothing ran. Name the column with the tenant; if "
                "there is none, make a view that has one"
            )
        return True

    def _look_up(self, address: Address, database: Database) -> SqlFlow[Record | None]:
        described = self._described or (yield from self._describe(database))
        table = self.table
        values = {table.key: address.key}
        if table.scope_column is not None:
            values[table.scope_column] = address.scope
        if table.operation_column is not None:
            values[table.operation_column] = address.operation
        read = (table.key, table.scope_column, table.operation_column, table.at, table.result_column)
        try:
            found = yield from find(database, table.table, described, read, values, latest=table.at)
        except StoreUnavailable:
            # The table may have changed: find out at the next delivery.
            self._described = None
            raise
        rows = [self._row(cells, described) for cells in found]
        its = [row for row in rows if self._is_of(row, address)]
        newest = self._newest(its, address)
        if newest is None and len(rows) == ROWS_MAX and not (its and self._are_in_order(its)):
            raise self._unusable(address, f"more than {ROWS_MAX} rows have a key that the database considers equal")
        return newest

    def _are_in_order(self, rows: Sequence[Row]) -> bool:
        """Return whether rows that were not read are older than these. Texts may sort otherwise than their times."""
        ages = [age_of(row.at, row.now) for row in rows]
        return ages == sorted(ages)

    def _describe(self, database: Database) -> SqlFlow[Described]:
        """Find the table and its columns, and warn if a lookup would read all of it."""
        table = self.table
        described = yield from describe(database, table.table, table.columns)
        key = described.columns[table.key]
        if key.kind not in KEYS:
            raise UsageError(
                f"{table.table}.{table.key} is of the type {key.type}, and a key is text, an integer or a UUID. Make a "
                "view that shows it as one of them"
            )
        others = [name for name in (table.scope_column, table.operation_column) if name is not None]
        if not described.is_indexed(table.key, others):
            self._warn(
                f"{table!r}: no index leads to the column {table.key!r}, so that every lookup reads the whole table. "
                "Create one"
            )
        self._described = described
        return described

    def _row(self, cells: Sequence[Any], described: Described) -> Row:
        key, scope, operation, at, result, *now = cells
        column = self.table.result_column
        if column is not None and described.columns[column].kind == "json" and isinstance(result, (str, bytes)):
            result = json.loads(result)
        return Row(key, scope, operation, at, result, _now(*now))

    def _is_of(self, row: Row, address: Address) -> bool:
        try:
            return address_of(row, self._meaning) == address
        except (MissingKey, UsageError):
            return False

    def _newest(self, rows: Sequence[Row], address: Address) -> Record | None:
        """Return the record of the row that counts longest; None if none of them counts any more."""
        try:
            entries = [entry for entry in (entry_of(row, self._meaning) for row in rows) if entry is not None]
        except UsageError as error:
            raise self._unusable(address, str(error)) from error
        return min(entries, key=lambda entry: entry.age).as_record() if entries else None

    def _unusable(self, address: Address, why: str) -> UsageError:
        """Create the error for a row with exactly this key that cannot be read: nothing runs then."""
        return UsageError(
            f"{address.operation} [key {address.digest}]: its row in {self.table.table} cannot be used: {why}. Nothing "
            "ran. Fix the row, or create a view that does"
        )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logging.getLogger("onefold").warning(text)


class TableLookup(LookupRules):
    """Read a hand-made table for a `Guard`; as thread-safe and fork-safe as a store."""

    _is_async = False

    def read(self, address: Address) -> Record | None:
        """Return the record of the row with this address, if there is one that still counts."""
        return run(self._read(address))

    def check(self) -> None:
        """Raise `UsageError` if the table or a column does not exist, `StoreUnavailable` if the database is down."""
        run(self._check())

    def close(self) -> None:
        """Close the connections that are ours."""
        if self._ours:
            self._store.close()


class AsyncTableLookup(LookupRules):
    """The async counterpart."""

    _is_async = True

    async def read(self, address: Address) -> Record | None:
        """Return the record of the row with this address, if there is one that still counts."""
        return await run_async(self._read(address))

    async def check(self) -> None:
        """Raise `UsageError` if the table or a column does not exist, `StoreUnavailable` if the database is down."""
        await run_async(self._check())

    async def aclose(self) -> None:
        """Close the connections that are ours."""
        if self._ours:
            await self._store.aclose()


def _now(aware: datetime | None = None, naive: datetime | None = None) -> Now:
    if aware is None or naive is None:
        # SQLite has no clock but the machine's, and its CURRENT_TIMESTAMP is in UTC.
        aware = datetime.now(UTC)
        return Now(aware, aware.replace(tzinfo=None))
    return Now(aware if aware.tzinfo else aware.replace(tzinfo=UTC), naive)
