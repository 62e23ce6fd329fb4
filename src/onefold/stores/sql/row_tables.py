"""What is known about a table of the caller's whose rows are records: see `own_column`. Data without I/O."""

from __future__ import annotations

from typing import NamedTuple

from onefold.stores.sql.row_values import Form, Result


class Catalog(NamedTuple):
    """How to ask a database for unique indexes, and how it quotes names and compares values."""

    # One row for each column of each unique index: the table's schema, the index, the column (NULL: an expression), and
    # the column's type for a cast.
    unique: str
    # One row for each column of the table, with its type for people. It serves error messages, and the columns for a
    # result and a fingerprint.
    columns: str
    # One row for each column that an INSERT has to fill: it has no default, and the database does not make its value.
    unfilled: str
    quote: str
    # Finds the row by its index, comparing as the index does: perhaps ignoring case or trailing blanks.
    equal: str
    # Whether the row found has exactly this key.
    exact: str
    # The key or the scope as the column takes it.
    value: str
    # Reads a column that is not of bytes, as text or as its bytes; and writes text, JSON and bytes.
    read: str
    write: str
    write_json: str
    write_bytes: str
    # What follows an INSERT, so that a row of another writer's is no error.
    unless_there: str = ""
    # Whether `Number` and `number` are the same column.
    folds_case: bool = True
    # Whether an UPDATE counts the rows that it has found, rather than those that it has changed.
    counts_matched: bool = True


class Found(NamedTuple):
    """A table whose column is unique, named so that statements mean it whatever the handler sets."""

    table: str
    condition: str
    exact: str
    indexes: frozenset[str]
    # The types of the columns for the key and the scope, for a cast.
    types: dict[str, str]
    schema: str
    # The columns for the result and the fingerprint, those that there are.
    kept: dict[str, Kept]


class Kept(NamedTuple):
    """A column in which something is kept, and how it is read and written."""

    column: str
    type: str
    form: Form
    read: str
    write: str


class Row(NamedTuple):
    """What the row of a finished delivery keeps beside its key."""

    result: Result
    fingerprint: bytes | None
