"""Turn the rows of a hand-made table into finished records, so that a guard knows what they know.

Records that the store already has are never overwritten, so it can be run again at any time.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from onefold import FOREVER, MissingKey, Record, State, UsageError
from onefold.codecs import MsgspecCodec, Unstorable
from onefold.keys import address, checked_operation
from onefold.maintenance.copy import written
from onefold.maintenance.table import Row, Table, check, pages, unnamed
from onefold.stores.base import Entry
from onefold.stores.table_reader import Now, Reader

# Seconds since 1970 reach this number in the year 5138; a larger one counts milliseconds.
MILLISECONDS_FROM: Final = 10**11

# The clocks of the writers differ a little, and a date is that of a zone. A time further in the future is in another
# zone or unit than it seems, or was never done.
AHEAD_MAX: Final = 300.0
AHEAD_MAX_OF_DATES: Final = 86_400.0

# There are a handful of reasons; any more count as one.
REASONS_MAX: Final = 20


class Reason(msgspec.Struct):
    """Why some rows could not be used, and the number of the first of them. Never a key."""

    why: str
    row: int | None
    count: int = 0


class Tally(msgspec.Struct):
    """The count of rows so far, by what happened to them."""

    imported: int = 0
    there: int = 0
    # Longer ago than records are kept.
    over: int = 0
    # Rows whose key another row of the table has: they are one record.
    merged: int = 0
    # No usable key, operation or time.
    unusable: int = 0
    # By their message, without numbers.
    reasons: dict[str, Reason] = {}

    @property
    def seen(self) -> int:
        return self.imported + self.there + self.over + self.merged + self.unusable

    def leave(self, why: str, row: int | None, count: int = 1) -> None:
        self.unusable += count
        kind = re.sub("[0-9]+", "#", why)
        if kind not in self.reasons and len(self.reasons) >= REASONS_MAX:
            kind = why = "other reasons"
        self.reasons.setdefault(kind, Reason(why, row)).count += count


class Rows(NamedTuple):
    """The rows of a table, and what is known about all of them."""

    reader: Reader
    table: Table
    # None: a column says it.
    operation: str | None = None
    keep: float = FOREVER


def importing(rows: Rows, new: Any, *, tally: Tally, dry_run: bool = False) -> Iterator[Tally]:
    """Write a finished record for each row whose key `new` does not have; yield the tally after each page.

    `dry_run` only counts. Raises `UsageError` for a table or a column that does not exist, `StoreUnavailable` if one of
    the two does not answer.
    """
    if rows.operation is not None:
        checked_operation(rows.operation)
    quoted = check(rows.reader, rows.table)
    for page in pages(rows.reader, rows.table, quoted):
        tally.merged += page.merged
        _write(new, dict(_entries(page.rows, rows, tally)), tally, dry_run=dry_run)
        yield tally
    count = unnamed(rows.reader, rows.table, quoted)
    if count:
        tally.leave(f"it has no {' or no '.join(rows.table.named)}", None, count)
        yield tally


def _write(new: Any, entries: Mapping[int, Entry], tally: Tally, *, dry_run: bool) -> None:
    """Write them; each has the number of its row."""
    records = list(entries.values())
    answers = [new.read(entry.address) for entry in records] if dry_run else written(new, records)
    for number, answer in zip(entries, answers, strict=True):
        match answer:
            case None:
                tally.imported += 1
            case UsageError():
                tally.leave(str(answer), number)
            case Record() if answer.is_expired:
                tally.imported += 1
            case _:
                tally.there += 1


def _entries(page: Iterable[Row], rows: Rows, tally: Tally) -> Iterator[tuple[int, Entry]]:
    """Yield the records of usable rows, each with the number of its row."""
    for row in page:
        try:
            entry = entry_of(row, rows)
        except (MissingKey, UsageError) as error:
            tally.leave(str(error), row.number)
            continue
        if entry is None:
            tally.over += 1
        else:
            yield row.number, entry


def entry_of(row: Row, rows: Rows) -> Entry | None:
    """Return the finished record of a row. None: it was done longer ago than records are kept."""
    table = rows.table
    if isinstance(row.key, (float, Decimal)):
        # A guard would quote it, and no message may contain a key.
        raise MissingKey("the key is not an integer, and a guard takes only a string, an integer or a UUID")
    operation = checked_operation(row.operation if table.operation else rows.operation)
    where, age = address(operation, row.key, _scope(row.scope)), age_of(row.at, row.now)
    if age >= rows.keep:
        return None
    result, omitted = _result(row, table)
    return Entry(
        address=where,
        # As random as that of a claim.
        token=secrets.token_bytes(16),
        state=State.DONE,
        ttl=rows.keep - age,
        age=age,
        result=result,
        omitted=omitted,
        remark=f"imported from {table.name}",
    )


def _scope(scope: Any) -> str | None:
    if scope is None or scope == "":
        return None
    # As a guard is given it: as text.
    return str(scope) if isinstance(scope, (int, UUID)) and not isinstance(scope, bool) else scope


def _result(row: Row, table: Table) -> tuple[bytes | None, bool]:
    """Return the result as a guard stores it, and whether it is left out: what is not in the table is not known."""
    if table.result is None:
        return None, True
    try:
        return (None, False) if row.result is None else (MsgspecCodec().encode(row.result, Any), False)
    except Unstorable:
        return None, True


def age_of(at: Any, now: Now) -> float:
    """Return how long ago this was, by the database's own clock; without a time it was now. Raises `UsageError`."""
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
            "its time lies ahead: the column of --at holds another zone, another unit, or what is to be done"
        )
    if math.isnan(ago):
        raise UsageError(f"a {type(at).__name__} says no time: the column of --at holds times, or seconds since 1970")
    return max(ago, 0.0)


def _parsed(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise UsageError("the column of --at holds a text that is not a time such as 2026-05-03 12:00:00") from None
