"""Makes finished records of the rows of a table that a team made by hand, so that a guard knows what they know.

What the store knows already is never overwritten, so that it can be run again at any time.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from onefold import FOREVER, MissingKey, Record, State, UsageError
from onefold.codecs import MsgspecCodec, Unstorable
from onefold.keys import address, checked_operation
from onefold.retention.copy import TOKEN_BYTES, written
from onefold.retention.table import Row, Table, check, pages, unnamed
from onefold.stores.base import Entry
from onefold.stores.plain import Now, Reader

# Seconds since 1970 reach this number in the year 5138; a larger one counts milliseconds.
MILLISECONDS_FROM: Final = 10**11


class Tally(msgspec.Struct):
    """What has become of the rows so far."""

    imported: int = 0
    there: int = 0
    # Longer ago than records are kept.
    over: int = 0
    # No usable key, operation or time; why, of the first.
    unusable: int = 0
    why: str = ""

    @property
    def seen(self) -> int:
        return self.imported + self.there + self.over + self.unusable

    def leave(self, why: object, count: int = 1) -> None:
        self.unusable += count
        self.why = self.why or str(why)


class Rows(NamedTuple):
    """The rows of a table, and what is known of all of them."""

    reader: Reader
    table: Table
    # None: a column says it.
    operation: str | None = None
    keep: float = FOREVER


def importing(rows: Rows, new: Any, *, tally: Tally, dry_run: bool = False) -> Iterator[Tally]:
    """Write a finished record for each row whose key `new` does not know; the tally, after each page.

    `dry_run` only counts. Raises `UsageError` for a table or a column that is not there, `StoreUnavailable` where one
    of the two does not answer.
    """
    if rows.operation is not None:
        checked_operation(rows.operation)
    place = check(rows.reader, rows.table)
    for page in pages(rows.reader, rows.table, place):
        _write(new, [*_entries(page, rows, tally)], tally, dry_run=dry_run)
        yield tally
    count = unnamed(rows.reader, rows.table, place)
    if count:
        tally.leave(f"there are rows without {' or '.join(rows.table.named)}", count)
        yield tally


def _write(new: Any, entries: Sequence[Entry], tally: Tally, *, dry_run: bool) -> None:
    answers = [new.read(entry.address) for entry in entries] if dry_run else written(new, entries)
    for answer in answers:
        match answer:
            case None:
                tally.imported += 1
            case UsageError():
                tally.leave(answer)
            case Record() if answer.stay_left <= 0:
                tally.imported += 1
            case _:
                tally.there += 1


def _entries(page: Iterable[Row], rows: Rows, tally: Tally) -> Iterator[Entry]:
    for row in page:
        try:
            entry = entry_of(row, rows)
        except (MissingKey, UsageError) as error:
            tally.leave(error)
            continue
        if entry is None:
            tally.over += 1
        else:
            yield entry


def entry_of(row: Row, rows: Rows) -> Entry | None:
    """The finished record of a row. None: it was done longer ago than records are kept."""
    table = rows.table
    operation = checked_operation(row.operation if table.operation else rows.operation)
    where, age = address(operation, row.key, _scope(row.scope)), age_of(row.at, row.now)
    if age >= rows.keep:
        return None
    result, omitted = _result(row, table)
    return Entry(
        address=where,
        token=secrets.token_bytes(TOKEN_BYTES),
        state=State.DONE,
        stay=rows.keep - age,
        age=age,
        result=result,
        omitted=omitted,
        remark=f"imported from {table.name}",
    )


def _scope(scope: Any) -> str | None:
    if scope is None or scope == "":
        return None
    # As a guard is given it: in words.
    return str(scope) if isinstance(scope, (int, UUID)) and not isinstance(scope, bool) else scope


def _result(row: Row, table: Table) -> tuple[bytes | None, bool]:
    """The result as a guard stores it, and whether it is left out: what is not in the table is not known."""
    if table.result is None:
        return None, True
    try:
        return (None, False) if row.result is None else (MsgspecCodec().encode(row.result, Any), False)
    except Unstorable:
        return None, True


def age_of(at: Any, now: Now) -> float:
    """How long ago this was, by the database's own clock; what has no time, or lies ahead, was now."""
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
    if math.isnan(ago):
        raise UsageError(f"a {type(at).__name__} says no time: the column of --at holds times, or seconds since 1970")
    return max(ago, 0.0)


def _parsed(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise UsageError("the column of --at holds a text that is no time such as 2026-05-03 12:00:00") from None
