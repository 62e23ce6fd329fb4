"""Join a guard to a transaction: the record is written on the same connection as the work, and commits with it.

Each driver has a module next to its store with `join(connection, record)`, for a transaction that the caller owns. It
is found by the module of the connection's class, and imported on use. A store itself knows how to open its own
transaction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple, cast
from weakref import WeakKeyDictionary

from onefold._entry_points import CONNECTIONS, installed
from onefold.errors import UsageError

# The default of a handler's argument `tx`, for type checkers: the guard passes the transaction, callers do not.
TX: Any = None

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class RecordColumn(NamedTuple):
    """The column of the caller's own table that *is* the record: `RecordColumn("payments", "idempotency_key")`.

    It needs a unique index, and the handler writes the row, with INSERT or INSERT ... ON CONFLICT. If it does not,
    Onefold does, provided that all other columns have defaults. Deliveries of one key run one after the other. With
    tenants, `scope` names their column, and the unique index covers both. `result` names the column in which Onefold
    keeps what the handler returned, and `fingerprint` the one that tells a reused key from a duplicate. On MySQL and
    MariaDB the lock between deliveries is a record in Onefold's own table.
    """

    table: str
    name: str
    scope: str | None = None
    result: str | None = None
    fingerprint: str | None = None


# The driver's `join` for each class of connections: looking it up takes a tenth of a joined delivery.
_joins: Final[WeakKeyDictionary[type, Callable[..., Any]]] = WeakKeyDictionary()


def join(connection: Any, record: RecordColumn | None, *, is_async: bool) -> Any:
    """Return the store that works inside the transaction of this connection."""
    kind = type(connection)
    join_it = _joins.get(kind)
    if join_it is None:
        _check_no_cursor(connection)
        join_it = _joins[kind] = _join_of(kind)
    return join_it(connection, None if record is None else checked(record), is_async=is_async)


def _check_no_cursor(connection: Any) -> None:
    """Refuse a cursor: the transaction belongs to its connection."""
    if not hasattr(connection, "fetchone"):
        return
    names = [name for name in ("connection", "db") if hasattr(connection, name)]
    instead = f"guard.within(cursor.{names[0]})" if names else "the connection that it was made by"
    raise UsageError(f"within({type(connection).__qualname__}): this is a cursor. Pass {instead}. Nothing ran")


def drivers() -> Mapping[str, str]:
    """Return the root of the module in which the class of a connection lives, and the module of its `join`."""
    return installed(CONNECTIONS)


def _join_of(kind: type) -> Callable[..., Any]:
    for parent in kind.__mro__:
        driver = drivers().get(parent.__module__.partition(".")[0])
        if driver is not None:
            return cast("Callable[..., Any]", import_module(driver).join)
    known = sorted(name for name in drivers() if not name.startswith("_"))
    raise UsageError(
        f"within({kind.__qualname__}): no driver is known for it. Known: {', '.join(known)}. Pass the connection or "
        "session on which your own statements run"
    )


def check_compared(record: RecordColumn | None, compared: object, option: str = "payload") -> None:
    """Raise `UsageError` if something has to be compared, and the caller's row has no place for its fingerprint."""
    if record is not None and record.fingerprint is None and compared is not None:
        leave_out = "leave payload= out" if option == "payload" else f"pass {option}=None"
        raise UsageError(
            f"record={record!r} has no place for a {option}=, so another payload would not be noticed. Nothing "
            f"ran. Name a column for it with RecordColumn(..., fingerprint=...), or {leave_out} and compare it with "
            "the row yourself"
        )


def not_unique(
    column: RecordColumn, wanted: Mapping[str, str], there: Collection[str], *, unique: bool = False
) -> UsageError:
    """Create the error for a column that cannot be the record: it does not exist, or two rows may have one key.

    `wanted` maps the names under which the columns would be `there`.
    """
    missing = [name for folded, name in sorted(wanted.items()) if folded not in there]
    if not there:
        message = f"there is no table {column.table} here, or this user may not see it. Check its name and its schema"
    elif missing or unique:
        message = f"{column.table} has no column {' and no column '.join(missing)}. Check its name"
    else:
        key = sorted(name for name in (column.name, column.scope) if name)
        message = (
            f"{column.table} has no unique index on {' and '.join(key)}, so two deliveries at "
            "once could both write. Create one, or leave record= out"
        )
    return UsageError(f"record={column!r}: {message}. Nothing ran")


def checked(record: RecordColumn) -> RecordColumn:
    """Return the column, if its names are valid identifiers: they become part of a statement."""
    given: object = record
    if not isinstance(given, RecordColumn):
        raise UsageError(f'record={given!r} has to be a RecordColumn, such as RecordColumn("payments", "payment_key")')
    names: tuple[object, ...] = record
    for name in names:
        if name is not None and not (isinstance(name, str) and NAME.fullmatch(name)):
            raise UsageError(f"record={record!r}: {name!r} is not the plain name of a table or column")
    columns = [name.lower() for name in record[1:] if name is not None]
    if len(set(columns)) < len(columns):
        raise UsageError(f"record={record!r}: one column has two roles. Give each its own")
    return record
