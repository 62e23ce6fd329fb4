"""Turn the rows of a hand-made table into finished records of a guard.

Records that the store already has are never overwritten, so it can be run again at any time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from onefold import FOREVER, MissingKey, Record, UsageError
from onefold.codecs import MsgspecCodec
from onefold.keys import checked_operation
from onefold.maintenance.copy import written
from onefold.maintenance.table import Table, check, pages, unnamed
from onefold.stores.base import Entry
from onefold.stores.hand_made.rows import Meaning, Row, entry_of
from onefold.stores.table_reader import Reader

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
    # Older than records are kept.
    over: int = 0
    # Rows whose key another row of the table has: they are one record.
    merged: int = 0
    # No usable key, operation or time.
    unusable: int = 0
    # By message, without numbers.
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
    """The rows of a table, and the settings for all of them."""

    reader: Reader
    table: Table
    # None: a column holds it.
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
    table = rows.table
    meaning = Meaning(table.name, rows.operation, rows.keep, table.result is not None, MsgspecCodec())
    for row in page:
        try:
            entry = entry_of(row, meaning)
        except (MissingKey, UsageError) as error:
            tally.leave(str(error), row.number)
            continue
        if entry is None:
            tally.over += 1
        else:
            yield row.number, entry
