"""Convert values to the text of a statement, and rows to records, for MySQL and MariaDB.

Nothing here depends on a session's character set, time zone or SQL mode, nor on a driver's converters: text and bytes
are sent as hexadecimal digits, and results are converted here.
"""

# ruff: noqa: S608 - statements are made of the names in `records`, and of values as hexadecimal digits

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar, cast

from onefold._model import KEY_MAX, OPERATION_MAX, SCOPE_MAX
from onefold.errors import UsageError
from onefold.stores.mysql.errors import DUPLICATE, number_of
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.records import KINDS_READ, PLACEHOLDER, TABLE, Parameters, located

T = TypeVar("T")

# A batch is sent in statements of about this size. Servers accept packets of 4 MiB (MySQL 5.7) to 64 MiB, and one
# result of 1 MiB, the default limit, has 2 MiB of hexadecimal digits.
STATEMENT_BYTES: Final = 1 << 20

# The size that every server accepts in one packet, so that the limit need not be queried.
PACKET_SURE: Final = 1_000_000

# In some SQL modes the server silently truncates values that are too long.
LONGEST: Final = {"scope": SCOPE_MAX, "operation": OPERATION_MAX, "key": KEY_MAX}


def filled(request: SqlRequest, where: str = "") -> str:
    """Return the statement with its values inlined, leaving nothing for a driver or a session to interpret.

    `where` is as in `located`.
    """
    if not request.values:
        return located(request.statement, where)
    parts = list(_parts(request.statement, where))
    parts[1::2] = [_checked(name, request.values[name]) for name in parts[1::2]]
    return "".join(parts)


# There are some twenty statements, and pages have a few forms.
@lru_cache(maxsize=128)
def _parts(statement: str, where: str) -> tuple[str, ...]:
    """Split a statement into alternating text and parameter names."""
    parts = PLACEHOLDER.split(statement)
    parts[::2] = [located(text, where) for text in parts[::2]]
    return tuple(parts)


def _checked(name: str, value: Any) -> str:
    text = literal(value)
    # Two digits per byte, and X'' around them.
    if name in LONGEST and len(text) > 2 * LONGEST[name] + 3:
        raise UsageError(f"{name}= has {len(text) // 2 - 1} bytes of UTF-8, and the limit is {LONGEST[name]}")
    return text


class Name(str):
    """A name of ours in a statement, not a value: that of a savepoint."""

    __slots__ = ()


def quoted(name: str) -> str:
    """Quote a name that is not ours."""
    return "`" + name.replace("`", "``") + "`"


def literal(value: str | bytes | float | None) -> str:
    match value:
        case None:
            return "NULL"
        case Name():
            return value
        case str():
            return f"X'{value.encode().hex()}'"
        case bytes():
            return f"X'{value.hex()}'"
        case float():
            text = repr(value)
            # Without an exponent it would be a decimal.
            return text if "e" in text else f"{text}e0"
    return str(int(value))


class Many(NamedTuple):
    """A statement about many records, in two halves: between them go a table of their values, and our table."""

    before: str
    after: str


def many(halves: Many, rows: Sequence[Parameters], *, back: bool = False) -> list[SqlRequest]:
    """Return the statements for many records: each placeholder becomes a column of a table that is sent along.

    Records are looked up, and locked, in the order of the rows, so that two overlapping batches do not deadlock.
    """
    names = sorted(set(PLACEHOLDER.findall(" ".join(halves))))
    before, after = (PLACEHOLDER.sub(r"asked_\1", half) for half in halves)
    selects = (f"SELECT {', '.join(_typed(_checked(name, row[name])) for name in names)}" for row in rows)
    named = ", ".join(f"NULL AS asked_{name}" for name in names)
    return [
        SqlRequest(
            f"{before} (SELECT {named} FROM DUAL WHERE FALSE UNION ALL {' UNION ALL '.join(batch)}) AS asked "
            f"STRAIGHT_JOIN {TABLE} {after}",
            {},
            rows=back,
        )
        for batch in batches_due(selects)
    ]


def _typed(text: str) -> str:
    """Mark hexadecimal digits as binary: in a UNION, MariaDB 10.11 silently truncates bare ones at 64 KiB."""
    return f"_binary {text}" if text.startswith("X") else text


def batches_due(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the parts of a batch, each small enough for one statement."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > STATEMENT_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def in_one(*statements: str) -> str:
    """Combine statements so that none runs after a failed one; MariaDB only, without `MULTI_STATEMENTS`."""
    return f"BEGIN NOT ATOMIC {'; '.join(statements)}; END"


# From rows to records.


def read_well(flow: SqlFlow[T]) -> SqlFlow[T]:
    """Convert the rows between a flow and its connection, and turn a duplicate-key error into a reply."""
    try:
        request = next(flow)
        while True:
            try:
                reply: Reply = yield request
            except Exception as error:
                if number_of(error) != DUPLICATE:
                    raise
                reply = Reply(0)
            request = flow.send(Reply(reply.written, [as_read(row) for row in reply.rows]))
    except StopIteration as end:
        return cast("T", end.value)


def _text(cell: bytes | str) -> str:
    return cell if isinstance(cell, str) else bytes(cell).decode()


_FORMS: Final[dict[str, Callable[[Any], Any]]] = {
    "text": _text,
    "integer": int,
    "seconds": float,
    "bytes": bytes,
    "flag": int,
}

# The converters of the columns in `READ`, and with the address before them.
_RECORD: Final = tuple(_FORMS[kind] for kind in KINDS_READ)
_ADDRESSED: Final = (_text, _text, _text, *_RECORD)


def as_read(row: Sequence[Any]) -> list[Any]:
    """Convert the columns of a record, whatever converters the connection has."""
    forms = _ADDRESSED if len(row) >= len(_ADDRESSED) else _RECORD
    # An extra column is for the connection.
    return [None if cell is None else form(cell) for cell, form in zip(row, forms, strict=False)]
