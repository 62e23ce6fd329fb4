"""Turn a row of a hand-made table into a finished record: one set of rules for imports and for `migrate_from`."""

from __future__ import annotations

import math
import secrets
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

from onefold._checks import with_article
from onefold._model import Address, Entry, State
from onefold.codecs import Codec, Unstorable
from onefold.errors import MissingKey, UsageError
from onefold.keys import address, checked_operation
from onefold.stores.table_reader import Now

# Seconds since 1970 reach this number in the year 5138; a larger one counts milliseconds.
MILLISECONDS_FROM: Final = 10**11

# The clocks of the writers differ a little, and a date is that of a zone. A time further in the future is in another
# zone or unit than it seems, or was never done.
AHEAD_MAX: Final = 300.0
AHEAD_MAX_OF_DATES: Final = 86_400.0


class Row(NamedTuple):
    """The values of one row."""

    key: Any
    scope: Any
    operation: Any
    at: Any
    result: Any
    now: Now
    # Its number among the rows that have a key, in the order in which they are read.
    number: int = 0


class Meaning(NamedTuple):
    """What all rows of a table have in common."""

    # The table's name, for the records' remarks.
    table: str
    # None: a column holds it.
    operation: str | None
    # How long a record is kept, from the time at which it was done.
    keep: float
    has_result: bool
    codec: Codec


def entry_of(row: Row, meaning: Meaning) -> Entry | None:
    """Return the finished record of a row; None if it was done longer ago than records are kept."""
    where, age = address_of(row, meaning), age_of(row.at, row.now)
    if age >= meaning.keep:
        return None
    result, omitted = _result(row, meaning)
    return Entry(
        address=where,
        # As random as that of a claim.
        token=secrets.token_bytes(16),
        state=State.DONE,
        ttl=meaning.keep - age,
        age=age,
        result=result,
        omitted=omitted,
        remark=f"imported from {meaning.table}",
    )


def address_of(row: Row, meaning: Meaning) -> Address:
    """Return whose record the row is. Raise `MissingKey` or `UsageError` if a guard could not have such an address."""
    if isinstance(row.key, (float, Decimal)):
        # A guard would quote it, and no message may contain a key.
        raise MissingKey("the key is not an integer, and a guard takes only a string, an integer or a UUID")
    operation = checked_operation(row.operation if meaning.operation is None else meaning.operation)
    return address(operation, row.key, _scope(row.scope))


def _scope(scope: Any) -> str | None:
    if scope is None or scope == "":
        return None
    # As text, as a guard gets it.
    return str(scope) if isinstance(scope, (int, UUID)) and not isinstance(scope, bool) else scope


def _result(row: Row, meaning: Meaning) -> tuple[bytes | None, bool]:
    """Return the result as a guard stores it, and whether it is left out because the table does not have it."""
    if not meaning.has_result:
        return None, True
    try:
        return (None, False) if row.result is None else (meaning.codec.encode(row.result, Any), False)
    except Unstorable:
        return None, True


def age_of(at: Any, now: Now) -> float:
    """Return how long ago this was, by the database's own clock; without a time it was now. Raise `UsageError`."""
    match at:
        case None:
            return 0.0
        case bool():
            ago = math.nan
        case int() | float() | Decimal():
            second = float(at) / 1_000 if at > MILLISECONDS_FROM else float(at)
            ago = now.aware.timestamp() - second
        case datetime():
            ago = ((now.naive if at.tzinfo is None else now.aware) - at) / timedelta(seconds=1)
        case date():
            ago = (now.naive - datetime.combine(at, time())) / timedelta(seconds=1)
        case str():
            return age_of(_parsed(at), now)
        case _:
            ago = math.nan
    if ago < -(AHEAD_MAX_OF_DATES if type(at) is date else AHEAD_MAX):
        raise UsageError(
            "its time is in the future: the column for `at` holds another time zone or unit, or times at which "
            "something is due"
        )
    if math.isnan(ago):
        raise UsageError(
            f"{with_article(type(at).__name__)} is not a time: the column for `at` has to hold times, or seconds since "
            "1970"
        )
    return max(ago, 0.0)


def _parsed(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise UsageError("the column for `at` holds a text that is not a time such as 2026-05-03 12:00:00") from None
