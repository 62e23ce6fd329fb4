"""sqlite3: inside the transaction of a caller's connection."""

# ruff: noqa: S608 - the names in the statements were checked by `Column`, and are never values
# ruff: noqa: ARG002 - a row of the caller's has no leases, no memories and no place for a result

from __future__ import annotations

import sqlite3
from typing import Any, Final

from onefold._model import Address, Claim, Ending, Entry, Gone, Memory, Record, State
from onefold.errors import NotInTransaction, UsageError
from onefold.stores._sqlite_joined import AsyncCallersRecords, CallersRecords, JoinedRecords, text_as_str
from onefold.transactions import Column, not_unique

# The unique indexes, each with the columns in it; and the primary key, because INTEGER PRIMARY KEY has no index.
UNIQUE: Final = (
    "SELECT one.name, part.name FROM pragma_index_list(?) AS one, pragma_index_info(one.name) AS part "
    'WHERE one."unique" AND NOT one.partial '
    "UNION ALL SELECT '', name FROM pragma_table_info(?) WHERE pk"
)


def join(connection: sqlite3.Connection, record: Column | None, *, awaited: bool) -> Any:
    """The store that works inside this connection's transaction. Raises `NotInTransaction` where there is none."""
    begins = _begins(connection)
    if begins and not awaited:
        # With the right to write: what is read from now on is still true at the end.
        connection.execute("BEGIN IMMEDIATE")
    joined = JoinedRecords(CallersRecords(connection)) if record is None else ColumnRecords(connection, record)
    return AsyncCallersRecords(joined, begins=begins) if awaited else joined


def _begins(connection: sqlite3.Connection) -> bool:
    """Return whether a transaction has to be begun.

    Python's sqlite3 opens one by itself before the first write, unless it is told not to; then we are the first write.
    """
    if connection.in_transaction:
        return False
    if getattr(connection, "autocommit", -1) == -1 and connection.isolation_level is not None:
        return True
    raise NotInTransaction(
        "this connection is in autocommit mode, and no transaction is open: the record and the work would not be "
        "committed together. Nothing ran. Execute BEGIN IMMEDIATE before, or connect without isolation_level=None"
    )


class ColumnRecords(JoinedRecords):
    """The caller's own row is the record: it is there, or it is not. The handler writes it."""

    def __init__(self, connection: sqlite3.Connection, column: Column) -> None:
        super().__init__(CallersRecords(connection))
        self._column = column
        self._check_unique()

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        if replacing is not None:
            raise UsageError(
                f"{entry.address.operation} [key {entry.address.digest}]: bypass=True cannot run it again, because its "
                f"row in {self._column.table} is there. Nothing ran. Delete the row before"
            )
        if not self._is_there(entry.address):
            self._records.mark()
            return None
        return Record(
            address=entry.address,
            token=b"",
            revision=1,
            state=State.DONE,
            attempt=1,
            lease_left=0.0,
            stay_left=float("inf"),
            age=0.0,
            omitted=True,
            remark=f"the record is the row in {self._column.table}",
        )

    def finish(self, claim: Claim, ending: Ending) -> bool:
        self.check_open(claim)
        if not self._is_there(claim.address):
            raise UsageError(
                f"{claim.address.operation} [key {claim.address.digest}]: the handler has to write the row whose "
                f"{self._column.table}.{self._column.name} is the key, and it did not. Roll back, and deliver it again"
            )
        return True

    def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        if self._is_inside():
            self._records.unmark()
        return True

    def _is_there(self, address: Address) -> bool:
        column = self._column
        if bool(address.scope) != (column.scope is not None):
            raise UsageError(
                f"record={column!r} and a delivery with {'a' if address.scope else 'no'} scope: both "
                "have one, or neither. Name the tenant's column with Column(..., scope=...), and the tenant with scope="
            )
        # In quotes, because a table may be called `order`. That the columns exist was checked with their index.
        statement = f'SELECT 1 FROM "{column.table}" WHERE "{column.name}" = ?'
        values = [address.key]
        if column.scope is not None:
            statement += f' AND "{column.scope}" = ?'
            values.append(address.scope)
        return bool(self._rows(statement, values))

    def _rows(self, statement: str, values: list[str]) -> list[Any]:
        cursor = self.tx.cursor()
        # The connection is the caller's, who may want rows and text in another form.
        cursor.row_factory = None
        with text_as_str(self.tx):
            return cursor.execute(statement, values).fetchall()

    def _check_unique(self) -> None:
        """Two deliveries at once are kept apart by the index, and by nothing else."""
        column = self._column
        wanted = {name.lower(): name for name in (column.name, column.scope) if name}
        unique: dict[str, set[str | None]] = {}
        for index, name in self._rows(UNIQUE, [column.table, column.table]):
            unique.setdefault(index, set()).add(name and name.lower())
        if set(wanted) in unique.values():
            return
        there = self._rows("SELECT lower(name) FROM pragma_table_info(?)", [column.table])
        raise not_unique(column, wanted, {name for (name,) in there})
