"""Send a statement that psycopg has prepared on a connection, without the work that a cursor does for each execution.

psycopg stays in charge: it counts, prepares and discards statements by the settings of the connection, and each
statement goes through a cursor until psycopg has prepared it. From then on its values are converted here, which is
possible because their types are written in the statement, and sent by psycopg's own functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from struct import Struct
from typing import Any, Final, NamedTuple

from psycopg import _preparing, generators
from psycopg.adapt import AdaptersMap, Transformer
from psycopg.errors import Error, error_from_result
from psycopg.postgres import register_default_adapters
from psycopg.postgres import types as postgres_types
from psycopg.pq import ExecStatus, TransactionStatus

from onefold.stores.sql.dialect import Reply
from onefold.stores.sql.records import PLACEHOLDER, Parameters, in_numbers

# psycopg's defaults: others may have changed those of a connection, or the global ones.
PLAIN: Final = AdaptersMap(types=postgres_types)
register_default_adapters(PLAIN)

BINARY: Final = 1
_UTF8: Final = b"UTF8"
_ANSWERED: Final = frozenset({ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK})

# On Python 3.11 accessing an enum's members is slow.
_IDLE: Final = TransactionStatus.IDLE
_IN_TRANSACTION: Final = TransactionStatus.INTRANS

Dump = Callable[[Any], bytes]

_size: Final = Struct("!i").pack
_array_head: Final = Struct("!iiiii").pack
_NULL: Final = _size(-1)


def _array_of(oid: int, dump: Dump) -> Dump:
    """Return the conversion of a list: a head (dimensions, NULLs, type, length, lower bound), and each item's size."""

    def dump_all(items: Sequence[Any]) -> bytes:
        found = [None if item is None else dump(item) for item in items]
        sized = [_NULL if item is None else _size(len(item)) + item for item in found]
        return _array_head(1, None in found, oid, len(found), 1) + b"".join(sized)

    return dump_all


# The type of a placeholder, the number by which the server knows it, and its binary form; then those of arrays.
_ITEMS: Final[dict[str, tuple[int, int, Dump]]] = {
    "text": (25, 1009, str.encode),
    "integer": (23, 1007, Struct("!i").pack),
    "smallint": (21, 1005, Struct("!h").pack),
    "double precision": (701, 1022, Struct("!d").pack),
    "bytea": (17, 1001, bytes),
}
_TYPES: Final[dict[str, tuple[int, Dump]]] = {
    **{name: (oid, dump) for name, (oid, _, dump) in _ITEMS.items()},
    **{f"{name}[]": (array, _array_of(oid, dump)) for name, (oid, array, dump) in _ITEMS.items()},
}

_CAST: Final = re.compile(rf"{PLACEHOLDER.pattern}::((?:{'|'.join(_ITEMS)})\b(?:\[\])?)")


class Statement(NamedTuple):
    """A statement for psycopg, and the binary form of its values."""

    text: bytes
    # The name of each value, and its conversion.
    values: tuple[tuple[str, Dump], ...]
    types: tuple[int, ...]
    formats: list[int]

    def params(self, given: Parameters) -> list[bytes | None]:
        return [None if (value := given[name]) is None else dump(value) for name, dump in self.values]

    def bound(self, given: Parameters) -> Values:
        return Values(self.text, self.params(given), self.types, self.formats)


class Values(NamedTuple):
    """Values as psycopg's cursors have them after the conversion: these are its own names."""

    query: bytes
    params: list[bytes | None]
    types: tuple[int, ...]
    formats: list[int]


@cache
def typed(statement: str, where: str) -> Statement | None:
    """Return the statement, or None if it does not tell the type of each of its values."""
    if not SUPPORTED:
        return None
    text, names = in_numbers(statement, where)
    casts = dict(_CAST.findall(statement))
    if not names or any(name not in casts for name in names):
        return None
    types = [_TYPES[casts[name]] for name in names]
    values = tuple((name, dump) for name, (_, dump) in zip(names, types, strict=True))
    return Statement(text.encode(), values, tuple(oid for oid, _ in types), [BINARY] * len(names))


def name_of(connection: Any, statement: Statement) -> bytes | None:
    """Return the name under which psycopg has prepared the statement, if it may be sent by that name now."""
    pgconn, key = connection.pgconn, (statement.text, statement.types)
    names = connection._prepared._names
    name: bytes | None = names.get(key)
    if name is None or pgconn.pipeline_status:
        return None
    status = pgconn.transaction_status
    if status != _IN_TRANSACTION and not (status == _IDLE and connection._autocommit):
        # psycopg begins the transaction, or explains why it cannot.
        return None
    if pgconn.parameter_status(b"client_encoding") != _UTF8:
        return None
    names.move_to_end(key)
    return name


# The server does not have the prepared statement any more, or its plan does not fit the table any more.
_STALE: Final = frozenset({"26000", "0A000"})


def forget_if_stale(connection: Any, statement: Statement, error: Error) -> None:
    """Let psycopg prepare a statement anew, as it does by itself after an error of a cursor."""
    if error.sqlstate in _STALE:
        connection._prepared._names.pop((statement.text, statement.types), None)


def send_with_begin(pgconn: Any, begin: bytes, name: bytes, statement: Statement, given: Parameters) -> Any:
    """Send BEGIN and the statement in one message; return the generator that waits for the statement's result.

    If the generator is interrupted, the connection is in an unknown state.
    """
    params = statement.params(given)
    pgconn.enter_pipeline_mode()
    pgconn.send_query_params(begin, None)
    pgconn.send_query_prepared(name, params, statement.formats, BINARY)
    pgconn.pipeline_sync()
    return _replies_after_begin(pgconn)


def _replies_after_begin(pgconn: Any) -> Generator[Any, Any, list[Any]]:
    yield from generators.send(pgconn)
    begun = yield from generators.fetch_many(pgconn)
    written = yield from generators.fetch_many(pgconn)
    yield from generators.fetch_many(pgconn)
    pgconn.exit_pipeline_mode()
    # After a BEGIN that failed, the statement was skipped.
    return list(written if begun[-1].status in _ANSWERED else begun)


# For reading rows: to make one takes longer than to read a row with it.
_transformers: Final[list[Any]] = []


def reply(results: Sequence[Any], *, rows: bool) -> Reply:
    """Return the reply of the server. Raises psycopg's errors."""
    result = results[-1]
    if result.status not in _ANSWERED:
        raise error_from_result(result)
    count = result.command_tuples or 0
    if not rows or not count:
        return Reply(count)
    try:
        # In one step: other threads do the same.
        transformer = _transformers.pop()
    except IndexError:
        transformer = Transformer(PLAIN)
    transformer.set_pgresult(result)
    found = transformer.load_rows(0, result.ntuples, tuple)
    _transformers.append(transformer)
    return Reply(count, found)


def _is_supported() -> bool:
    """Return whether this psycopg keeps its prepared statements where we look for them."""
    names = getattr(_preparing.PrepareManager(), "_names", None)
    return hasattr(names, "move_to_end") and hasattr(generators, "execute")


SUPPORTED: Final = _is_supported()
