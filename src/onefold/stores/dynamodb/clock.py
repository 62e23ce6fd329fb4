"""DynamoDB's clock, as far as its replies tell it: each is stamped with a `Date`, in whole seconds.

Conditions in DynamoDB cannot ask for the time, so that a client has to bring it. The machine's own time of day is never
used: it may be wrong. What is used is the machine's counter of seconds, and how far it is from the `Date` of replies.

That distance lies between two bounds, and every reply may move them closer. So there is no "now", but an earliest and
a latest one. What is promised (a lease, a stay) is counted from the latest, and whether it is over is asked of the
earliest: whatever the two clients know, neither ends a lease before its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple, Protocol

from onefold._forks import set_lock

# A `Date` leaves out the part of the second that had passed.
RESOLUTION: Final = 1.0

# How far the clock of a machine of DynamoDB may be from the right time. They are kept within milliseconds; this is for
# a bad day.
CLOCK_MARGIN: Final = 1.0

# How much the machine's counter may be too quick or too slow: twice the 500 ppm by which time keeping slews it.
DRIFT: Final = 0.001

# After so long without a reply the bounds are too wide to be of use, and a reply is asked for: by then they have moved
# apart by 1.8 s each.
FRESH: Final = 1_800.0


class Now(NamedTuple):
    """The time, as far as it is known, in seconds since 1970; and what the machine's counter said."""

    earliest: float
    latest: float
    ticks: float


class Clock(Protocol):
    """What a store needs of a clock."""

    def ticks(self) -> float:
        """The machine's counter of seconds."""

    @property
    def is_fresh(self) -> bool:
        """Whether it can say what time it is."""

    def now(self) -> Now: ...

    def hear(self, date: str | None, sent: float) -> None:
        """A reply has come, with this `Date`, to a request that was sent when the counter said `sent`."""

    def was_behind(self, now: Now) -> bool:
        """Whether replies have shown since that it was later than `now` said: what was counted from it is too short."""


def count_seconds() -> float:
    """Seconds that only go on. Where the system can, it counts those that the machine slept too."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class _Bounds(NamedTuple):
    """The time is at least `ticks + low` and at most `ticks + high`; known when the counter said `at`."""

    low: float
    high: float
    at: float

    def grown(self, ticks: float) -> _Bounds:
        """The same bounds later: the counter may have gone wrong since."""
        growth = abs(ticks - self.at) * DRIFT
        return _Bounds(self.low - growth, self.high + growth, ticks)


class DateClock:
    """The clock of DynamoDB, by the `Date` of its replies. Safe to share between threads, and over a fork."""

    _mutex: threading.Lock

    def __init__(self, ticks: Callable[[], float] = count_seconds) -> None:
        self.ticks = ticks
        self._bounds: _Bounds | None = None
        set_lock(self, "_mutex")

    @property
    def is_fresh(self) -> bool:
        bounds = self._bounds
        return bounds is not None and self.ticks() - bounds.at < FRESH

    def now(self) -> Now:
        assert self._bounds is not None, "no reply has come yet"
        ticks = self.ticks()
        bounds = self._bounds.grown(ticks)
        return Now(ticks + bounds.low, ticks + bounds.high, ticks)

    def hear(self, date: str | None, sent: float) -> None:
        stamp = _seconds(date)
        if stamp is None:
            return
        came = self.ticks()
        # It was stamped after the request was sent, and before the reply came.
        heard = _Bounds(stamp - CLOCK_MARGIN - came, stamp + RESOLUTION + CLOCK_MARGIN - sent, came)
        with self._mutex:
            self._bounds = heard if self._bounds is None else _closer(self._bounds.grown(came), heard)

    def was_behind(self, now: Now) -> bool:
        bounds = self._bounds
        return bounds is not None and now.ticks + bounds.grown(now.ticks).low > now.latest


class GivenClock:
    """A clock of the caller's own, which is believed to the letter: for tests that move it."""

    is_fresh = True

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def ticks(self) -> float:
        return self._read()

    def now(self) -> Now:
        read = self._read()
        return Now(read, read, read)

    def hear(self, date: str | None, sent: float) -> None:
        """It has heard enough."""

    def was_behind(self, now: Now) -> bool:  # noqa: ARG002 - it never is
        return False


def _closer(known: _Bounds, heard: _Bounds) -> _Bounds:
    """What both say. Where they contradict each other, the machine slept uncounted, or was copied: the last counts."""
    low, high = max(known.low, heard.low), min(known.high, heard.high)
    return _Bounds(low, high, heard.at) if low <= high else heard


def _seconds(date: str | None) -> float | None:
    if not date:
        return None
    try:
        return parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
