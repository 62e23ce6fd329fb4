"""DynamoDB's clock, derived from its replies: each has a `Date`, in whole seconds.

Conditions in DynamoDB cannot use the time, so a client has to provide it. The machine's own time of day is never used:
it may be wrong. Instead the machine's monotonic counter is used, and its distance from the `Date` of replies.

That distance lies between two bounds, and every reply may tighten them. So there is no "now", but an earliest and a
latest one. A promise (a lease, a TTL) is counted from the latest, and is over only by the earliest: whatever two
clients know, neither ends a lease before its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple, Protocol

from onefold._concurrency.forks import set_lock

# A `Date` omits the fraction of the second.
RESOLUTION: Final = 1.0

# How far the clock of a DynamoDB machine may be off. They are kept within milliseconds; this is for a bad day.
CLOCK_MARGIN: Final = 1.0

# How much the machine's counter may be too fast or too slow: twice the 500 ppm by which clock adjustment slews it.
DRIFT: Final = 0.001

# After this long without a reply the bounds are too wide to be useful, and a reply is requested: by then they have
# drifted apart by 1.8 s each.
FRESH: Final = 1_800.0


class Now(NamedTuple):
    """The time, as far as it is known, in seconds since 1970; and the machine's counter."""

    earliest: float
    latest: float
    ticks: float


class Clock(Protocol):
    """A clock as a store sees it."""

    def ticks(self) -> float:
        """Return the machine's counter of seconds."""

    @property
    def is_fresh(self) -> bool:
        """Return whether the time is known."""

    def now(self) -> Now: ...

    def hear(self, date: str | None, sent: float) -> None:
        """Note the `Date` of a reply to a request that was sent when the counter was `sent`."""

    def was_behind(self, now: Now) -> bool:
        """Return whether replies have since shown a later time than `now`: durations counted from it are too short."""


def count_seconds() -> float:
    """Return monotonic seconds, including those that the machine slept if the system counts them."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class _Bounds(NamedTuple):
    """The time is at least `ticks + low` and at most `ticks + high`; known when the counter was `at`."""

    low: float
    high: float
    at: float

    def grown(self, ticks: float) -> _Bounds:
        """Return the bounds at a later time, widened: the counter may have drifted since."""
        growth = abs(ticks - self.at) * DRIFT
        return _Bounds(self.low - growth, self.high + growth, ticks)


class DateClock:
    """DynamoDB's clock, by the `Date` of its replies. Safe to share between threads, and across a fork."""

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
        # It was stamped after the request was sent, and before the reply arrived.
        heard = _Bounds(stamp - CLOCK_MARGIN - came, stamp + RESOLUTION + CLOCK_MARGIN - sent, came)
        with self._mutex:
            self._bounds = heard if self._bounds is None else _closer(self._bounds.grown(came), heard)

    def was_behind(self, now: Now) -> bool:
        bounds = self._bounds
        return bounds is not None and now.ticks + bounds.grown(now.ticks).low > now.latest


class GivenClock:
    """The caller's own clock, which is trusted completely: for tests that move it."""

    is_fresh = True

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def ticks(self) -> float:
        return self._read()

    def now(self) -> Now:
        read = self._read()
        return Now(read, read, read)

    def hear(self, date: str | None, sent: float) -> None:
        """Do nothing: this clock needs no replies."""

    def was_behind(self, now: Now) -> bool:  # noqa: ARG002 - it never is
        return False


def _closer(known: _Bounds, heard: _Bounds) -> _Bounds:
    """Combine both bounds.

    If they contradict each other, the machine slept uncounted, or was cloned: the latest counts.
    """
    low, high = max(known.low, heard.low), min(known.high, heard.high)
    return _Bounds(low, high, heard.at) if low <= high else heard


def _seconds(date: str | None) -> float | None:
    if not date:
        return None
    try:
        return parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
