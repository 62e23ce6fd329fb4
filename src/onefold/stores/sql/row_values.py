"""Results and fingerprints in columns of the caller's own row, in forms that people can read. Pure.

A column of bytes keeps what the codec made. Any other column keeps JSON: the value itself, if it reads back unchanged,
and otherwise `{"$onefold": ...}` around the codec's bytes, as for bytes, times or an encrypted result. NULL says that
no result was kept; a handler that returned None has left `null`.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, Final, NamedTuple

import msgspec

from onefold._model import Ending
from onefold.codecs import PLAIN

# The only member of an object in which the codec's bytes are kept, as base64.
WRAPPED: Final = "$onefold"

# MariaDB takes no JSON that is nested more than 32 times, and MySQL none more than 100.
DEPTH_MAX: Final = 30

_BYTES: Final = re.compile(r"bytea|\w*blob|(var)?binary", re.IGNORECASE)

_unread: Final = (msgspec.DecodeError, msgspec.EncodeError, UnicodeDecodeError, OverflowError, binascii.Error)


class Form(NamedTuple):
    """The form of a value in a column, by the column's type."""

    is_bytes: bool
    is_json: bool
    # The bare numbers that become the database's own, and may lose their last digits: see `SqliteRows`.
    changes: tuple[type, ...] = ()


def form_of(described: str) -> Form:
    """Return the form for a column whose type is described for people."""
    kind = described.lower()
    return Form(_BYTES.match(kind) is not None, kind in ("json", "jsonb"))


def stored_result(ending: Ending, form: Form) -> str | bytes | None:
    """Return what a column keeps of an ending's result; None if nothing is to be kept."""
    if ending.omitted:
        return None
    if form.is_bytes:
        return b"" if ending.result is None else ending.result
    return "null" if ending.result is None else _as_json(ending.result, form)


def _as_json(stored: bytes, form: Form) -> str:
    try:
        text = msgspec.json.encode(msgspec.msgpack.decode(stored[1:])).decode()
        value = msgspec.json.decode(text)
        if msgspec.msgpack.encode(value) == stored[1:] and _is_kept(value) and not _is_changed(value, form):
            return text
    except (*_unread, TypeError, ValueError, RecursionError):
        # The bytes of a codec of the caller's, or a value that JSON does not have.
        pass
    return msgspec.json.encode({WRAPPED: base64.b64encode(stored).decode()}).decode()


def _is_kept(value: Any, depth: int = 0) -> bool:
    """Return whether a database keeps this JSON.

    `jsonb` refuses NUL, and writes numbers without exponents and zero without a sign; MariaDB refuses deep nesting.
    """
    match value:
        case dict():
            if depth >= DEPTH_MAX or WRAPPED in value:
                return False
            return all(_is_kept(part, depth + 1) for pair in value.items() for part in pair)
        case list():
            return depth < DEPTH_MAX and all(_is_kept(part, depth + 1) for part in value)
        case float():
            return "e" not in repr(value) and repr(value) != "-0.0"
        case str():
            return "\0" not in value
    return True


def _is_changed(value: Any, form: Form) -> bool:
    """Return whether this is a bare number of which the column would make another."""
    return type(value) in form.changes or (bool(form.changes) and type(value) is int and not -(2**63) <= value < 2**63)


class Result(NamedTuple):
    """What a row keeps of a result: bytes for the codec, or None for the value None."""

    kept: bytes | None = None
    omitted: bool = True


def read_result(cell: Any, form: Form) -> Result:
    """Return the result in a column. What nobody can read counts as not kept: the work is done all the same."""
    if cell is None:
        return Result()
    if form.is_bytes:
        return Result(bytes(cell) or None, omitted=False)
    try:
        value = msgspec.json.decode(_text(cell))
        if value is None:
            return Result(omitted=False)
        if isinstance(value, dict) and value.keys() == {WRAPPED}:
            return Result(base64.b64decode(value[WRAPPED], validate=True), omitted=False)
        return Result(PLAIN + msgspec.msgpack.encode(value), omitted=False)
    except (*_unread, TypeError, ValueError):
        return Result()


def stored_fingerprint(fingerprint: bytes | None, form: Form) -> str | bytes | None:
    """Return what a column keeps of a fingerprint."""
    if fingerprint is None or form.is_bytes:
        return fingerprint
    return f'"{fingerprint.hex()}"' if form.is_json else fingerprint.hex()


def read_fingerprint(cell: Any, form: Form) -> bytes | None:
    """Return the fingerprint in a column; None if there is none, or if somebody else has filled the column."""
    if cell is None:
        return None
    if form.is_bytes:
        return bytes(cell)
    try:
        return bytes.fromhex(_text(cell).strip('"'))
    except ValueError:
        return None


def _text(cell: Any) -> str:
    return cell if isinstance(cell, str) else bytes(cell).decode()


# What is known about the table: see `own_column`.


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
