"""Add up absorbed duplicates by operation, and what they would have cost. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Context, Decimal, InvalidOperation
from typing import Final

import msgspec

from onefold import Record
from onefold.report.absorbed import Batch, Duplicates

# The amount of one delivery of this key; None if nobody knows it.
AmountOf = Callable[[Duplicates], Decimal | None]

# Digits before the point, and after it: enough for a country's budget in its smallest unit. More is no amount.
DIGITS_MAX: Final = 30

# Sums are exact: the digits of an amount, and those of a count.
EXACT: Final = Context(prec=4 * DIGITS_MAX)


class Figures(msgspec.Struct):
    """What was absorbed, of one operation or of all."""

    absorbed: int = 0
    refused: int = 0
    # Of the absorbed ones: the sum of those whose amount is known, and how many are not.
    saved: Decimal = Decimal(0)
    unknown: int = 0

    def add(self, absorbed: int, refused: int, amount: Decimal | None) -> None:
        self.absorbed += absorbed
        self.refused += refused
        if amount is None:
            self.unknown += absorbed
        else:
            self.saved = EXACT.fma(amount, absorbed, self.saved)


class Report(msgspec.Struct):
    """All figures, and the time from the first batch to the last."""

    operations: dict[str, Figures]
    total: Figures
    begin: float | None = None
    end: float | None = None
    # Lines that could not be read.
    broken: int = 0
    # Whether the counts come from the records: those have no times, and do not know who was refused.
    of_records: bool = False

    def add(self, operation: str, absorbed: int, refused: int, amount: Decimal | None) -> None:
        for figures in (self.operations.setdefault(operation, Figures()), self.total):
            figures.add(absorbed, refused, amount)

    def in_order(self) -> Report:
        """Return the report with its operations in the order of their names."""
        return msgspec.structs.replace(self, operations=dict(sorted(self.operations.items())))


def added_up(batches: Iterable[Batch | None], amount_of: AmountOf) -> Report:
    """Return the figures of all batches."""
    report = Report({}, Figures())
    for batch in batches:
        if batch is None:
            report.broken += 1
            continue
        report.begin = batch.begin if report.begin is None else min(report.begin, batch.begin)
        report.end = batch.end if report.end is None else max(report.end, batch.end)
        for one in batch.duplicates:
            report.add(one.operation, one.absorbed, one.refused, amount_of(one) if one.absorbed else None)
    return report.in_order()


def counted(records: Iterable[Record], amount_of: Callable[[Record], Decimal | None]) -> Report:
    """Return the figures of records that count their duplicates."""
    report = Report({}, Figures(), of_records=True)
    for record in records:
        if record.duplicates:
            report.add(record.address.operation, record.duplicates, 0, amount_of(record))
    return report.in_order()


def as_amount(value: object) -> Decimal | None:
    """Return a number, or a text that is one, as an amount; None for anything else, and for what nobody can add up."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        found = Decimal(str(value))
    except (InvalidOperation, ValueError):  # ValueError: an integer of thousands of digits
        return None
    return found if found.is_finite() and _is_of_bounded_size(found) else None


def _is_of_bounded_size(amount: Decimal) -> bool:
    exponent = amount.as_tuple().exponent
    return isinstance(exponent, int) and exponent >= -DIGITS_MAX and amount.adjusted() < DIGITS_MAX
