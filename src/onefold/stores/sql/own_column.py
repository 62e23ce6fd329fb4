"""`RecordColumn` over any connection: the caller's own row is the record. It exists or not; the handler writes it.

That a row exists after the handler proves nothing: a handler that writes it with `INSERT ... ON CONFLICT DO NOTHING`
carries on beside another delivery's row. So a claim takes a lock that only one delivery of a key can hold and that the
database releases with the transaction, and then looks. Each database has a module with its lock.

The operations are flows like those of a dialect, so that they are written once for every driver, sync and async. One
`Rows` serves one delivery. Nothing learned about a table is kept for the next delivery: tables change, and so does the
schema in which a session looks for them.
"""

# ruff: noqa: S608 - the names in the statements were checked by `RecordColumn`, and are never values
# ruff: noqa: ARG002 - a row of the caller's has no leases, no memories and no place for a result

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, NoReturn

from onefold._model import Address, Claim, Ending, Entry, Gone, Record, Released, State
from onefold.errors import InProgress, UsageError
from onefold.stores.sql.dialect import Dialect, Reply, SqlFlow, SqlRequest
from onefold.transactions import RecordColumn, not_unique


class Catalog(NamedTuple):
    """How to ask a database for unique indexes, and how it quotes names and compares values."""

    # One row for each column of each unique index: the table's schema, the index, the column (NULL: an expression), and
    # the column's type for a cast.
    unique: str
    # One row for each column of the table, with its type for people. It may be slow; it serves error messages.
    columns: str
    quote: str
    # Finds the row by its index, comparing as the index does: perhaps ignoring case or trailing blanks.
    equal: str
    # Whether the row found has exactly this key.
    exact: str
    # Whether `Number` and `number` are the same column.
    folds_case: bool = True


# When to retry if another delivery of the same key is in the way.
RETRY_AFTER: Final = 1.0


class Found(NamedTuple):
    """A table whose column is unique, named so that statements mean it whatever the handler sets."""

    table: str
    condition: str
    exact: str
    indexes: frozenset[str]
    # The types of the columns for the key and the scope, for a cast.
    types: dict[str, str]


class Rows(Dialect):
    """The operations of a store on the caller's own rows. Each database adds its lock."""

    catalog: Catalog
    # Whether a record of ours is written as well.
    needs_tables: bool = False
    _found: Found

    def __init__(self, column: RecordColumn) -> None:
        self._column = column

    def claim(self, entry: Entry, replacing: Record | None = None) -> SqlFlow[Record | Gone | None]:
        address, table = entry.address, self._column.table
        if replacing is not None:
            raise UsageError(
                f"{address.operation} [key {address.digest}]: bypass=True cannot run it again, because its row in "
                f"{table} is there. Nothing ran. Delete the row before"
            )
        self._check_scope(address)
        if not (yield from self._was_written(entry)):
            return None
        return Record(
            address=address,
            token=b"",
            revision=1,
            state=State.DONE,
            attempt=1,
            lease_left=0.0,
            ttl_left=math.inf,
            age=0.0,
            omitted=True,
            remark=f"the record is the row in {table}",
        )

    def finish_joined(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        if not (yield from self.unmark(claim)):
            return False
        if not (yield from self._is_there(claim.address)):
            raise self._unwritten(claim.address)
        return True

    def release(self, claim: Claim, released: Released | None = None) -> SqlFlow[bool]:
        yield from ()
        return True

    def _was_written(self, entry: Entry) -> SqlFlow[bool]:
        """Lock the key against other deliveries; return whether its row already exists."""
        raise NotImplementedError(f"{type(self).__name__} has to take a lock, and look")

    def _is_there(self, address: Address, after: str = "") -> SqlFlow[bool]:
        """Return whether there is a row with exactly this key."""
        found = self._found
        statement = f"SELECT {found.exact} FROM {found.table} WHERE {found.condition}{after}"
        reply: Reply = yield SqlRequest(statement, self._values(address), rows=True)
        if reply.rows and not reply.rows[0][0]:
            yield from self._refuse_merged(address)
        return bool(reply.rows)

    def _values(self, address: Address) -> dict[str, Any]:
        return {"key": address.key} | ({"scope": address.scope} if self._column.scope else {})

    def _unwritten(self, address: Address) -> UsageError:
        column = self._column
        return UsageError(
            f"{address.operation} [key {address.digest}]: the handler has to write the row whose "
            f"{column.table}.{column.name} is the key, and it did not. Roll back, and deliver it again"
        )

    def _refuse_merged(self, address: Address) -> SqlFlow[NoReturn]:
        """Raise the error for a key that the column changes, or confuses with another one."""
        column, there = self._column, (yield from self._columns())
        type_ = there.get(self._fold(column.name), "")
        raise UsageError(
            f"{address.operation} [key {address.digest}]: {column.table}.{column.name} ({type_}) treats this key as "
            "equal to another one, whose row is there, or changes it when it is stored. Roll back. Use a column of "
            "text that compares every character, as with a binary collation, or bring the keys into the form in which "
            "the database gives them back"
        )

    def _written_by_another(self, address: Address) -> InProgress:
        column, error = self._column, InProgress.about(address, retry_after=RETRY_AFTER)
        message = (
            f"{address.operation} [key {address.digest}]: the row in {column.table} whose {column.name} is the key "
            "was written by another transaction, not by this handler. Roll back, and deliver it again: then it is "
            "replayed"
        )
        error.args = (message,)
        return error

    def _check_scope(self, address: Address) -> None:
        column = self._column
        if bool(address.scope) != (column.scope is not None):
            raise UsageError(
                f"record={column!r} and a delivery with {'a' if address.scope else 'no'} scope: both "
                "have one, or neither. Name the tenant's column with RecordColumn(..., scope=...), and the tenant "
                "with scope="
            )

    def _find(self) -> SqlFlow[None]:
        """Find the table and its unique index: without one, the database would accept two rows with one key."""
        reply: Reply = yield self._finding()
        yield from self._take(reply)

    def _finding(self) -> SqlRequest:
        return SqlRequest(self.catalog.unique, {"table": self._column.table}, rows=True)

    def _take(self, reply: Reply) -> SqlFlow[None]:
        column = self._column
        wanted = {self._fold(name): name for name in (column.name, column.scope) if name}
        unique: dict[str, set[str | None]] = {}
        types: dict[str, str] = {}
        schema = ""
        for schema, index, name, type_ in reply.rows:  # noqa: B007 - it is the same in all of them
            unique.setdefault(index, set()).add(name and self._fold(name))
            types[self._fold(name or "")] = type_
        indexes = frozenset(index for index, columns in unique.items() if columns == set(wanted))
        if not indexes:
            raise not_unique(column, wanted, (yield from self._columns()))
        self._found = self._stated(schema, indexes, types)

    def _columns(self) -> SqlFlow[dict[str, str]]:
        """Return the columns of the table, with their types as text."""
        reply: Reply = yield SqlRequest(self.catalog.columns, {"table": self._column.table}, rows=True)
        return {self._fold(name): described for name, described in reply.rows}

    def _stated(self, schema: str, indexes: frozenset[str], types: dict[str, str]) -> Found:
        column, catalog = self._column, self.catalog
        names = {"key": column.name} | ({"scope": column.scope} if column.scope else {})
        types = {name: types[self._fold(part)] for name, part in names.items()}
        parts = [{"column": self._quoted(part), "name": name, "type": types[name]} for name, part in names.items()]
        table = self._quoted(column.table)
        # Keep a schema out of the statement whose name some driver would read as a placeholder.
        plain = schema and not set(schema) & set(":%?")
        return Found(
            f"{self._quoted(schema)}.{table}" if plain else table,
            " AND ".join(catalog.equal.format(**part) for part in parts),
            " AND ".join(catalog.exact.format(**part) for part in parts),
            indexes,
            types,
        )

    def _quoted(self, name: str) -> str:
        # Quoted, because a table may be called `order`. The schema's name was not checked.
        quote = self.catalog.quote
        return f"{quote}{name.replace(quote, 2 * quote)}{quote}"

    def _fold(self, name: str) -> str:
        return name.lower() if self.catalog.folds_case else name


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__
