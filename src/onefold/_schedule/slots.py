"""Planned times at equal distances, in UTC: which one a moment belongs to. Pure: it reads no clock.

A slot is `anchor + n * every`. A moment belongs to the last slot that has begun; one that begins within `early` has
begun: a scheduler that fires a little too soon, by its own clock, means the slot that it is too early for. So a moment
`m` belongs to the slot `s` if

    s - early <= m < s + every - early
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from onefold.durations import FOREVER, Duration, seconds
from onefold.errors import UsageError

# A Monday at midnight: days begin at midnight, weeks on Mondays.
ANCHOR: Final = datetime(2001, 1, 1, tzinfo=UTC)

# Schedulers, stores and clocks are not more exact than that.
EVERY_MIN: Final = 0.1

# How far ahead of its time a scheduler may be: this part of `every`, and this many seconds at most.
EARLY_PART: Final = 0.1
EARLY_MAX: Final = 5.0

# How much of `keep` a planned time may be late. The rest is for clocks that differ.
LATE_PART: Final = 0.9

# How many missed slots are made up for at once.
SLOTS_MAX: Final = 10_000

MICROSECOND: Final = timedelta(microseconds=1)


class Slots(NamedTuple):
    """Planned times at equal distances. Whole microseconds: no sum of them is rounded."""

    every: timedelta
    anchor: datetime
    early: timedelta

    def slot_of(self, moment: datetime) -> datetime:
        """Return the planned time to which a moment belongs."""
        since = moment + self.early - self.anchor
        return self.anchor + since // self.every * self.every

    def between(self, since: datetime, until: datetime) -> Iterator[datetime]:
        """Return the planned times after `since`, up to and including `until`. Raise `UsageError` for too many."""
        first = (since - self.anchor) // self.every + 1
        last = (until - self.anchor) // self.every
        if last - first >= SLOTS_MAX:
            raise UsageError(f"{last - first + 1} planned times since {text_of(since)}: the limit is {SLOTS_MAX}")
        return (self.anchor + number * self.every for number in range(first, last + 1))


def slots_of(every: Duration, anchor: datetime | None = None, early: Duration | None = None) -> Slots:
    """Return the checked slots. By default they begin on a Monday at midnight UTC."""
    distance = seconds(every, "every")
    if not EVERY_MIN <= distance < FOREVER:
        raise UsageError(f"every={every!r} has to be {EVERY_MIN:g} s or more, and not forever")
    tolerance = min(distance * EARLY_PART, EARLY_MAX) if early is None else seconds(early, "early")
    if tolerance >= distance:
        raise UsageError(f"early={early!r} has to be less than every={every!r}: a moment has one planned time")
    begin = ANCHOR if anchor is None else in_utc(anchor, "anchor")
    return Slots(timedelta(seconds=distance), begin, timedelta(seconds=tolerance))


def in_utc(moment: object, name: str) -> datetime:
    """Return a moment in UTC. Refuse one without a time zone: two machines would understand it differently."""
    if not isinstance(moment, datetime):
        raise UsageError(f"{name} has to be a datetime, not {type(moment).__name__}")
    if moment.utcoffset() is None:
        raise UsageError(f"{name}={moment.isoformat()} has no time zone: write datetime(..., tzinfo=UTC)")
    return moment.astimezone(UTC)


def text_of(planned: datetime) -> str:
    """Return the planned time as a key: `2026-11-18T14:00:00Z`. Equal moments have equal texts, in whatever zone."""
    return planned.astimezone(UTC).isoformat().removesuffix("+00:00") + "Z"


def is_too_late(planned: datetime, now: datetime, keep: float) -> bool:
    """Return whether the record of this planned time may be forgotten by now: nobody knows whether it ran."""
    return (now - planned) / timedelta(seconds=1) > keep * LATE_PART
