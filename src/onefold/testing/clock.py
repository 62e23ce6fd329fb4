"""A clock that only a test moves."""

from __future__ import annotations

import math
import threading

from onefold.durations import Duration, seconds
from onefold.errors import UsageError


class Clock:
    """A clock that stands still: `MemoryStore(clock=clock)`, then `clock.advance("31s")`. Thread-safe."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._mutex = threading.Lock()

    def __call__(self) -> float:
        """Return the time in seconds, like `time.monotonic`."""
        return self._now

    def advance(self, duration: Duration) -> None:
        """Let this much time pass: seconds, a `timedelta`, or strings such as "30s" and "24h"."""
        passed = seconds(duration, "duration")
        if math.isinf(passed):
            raise UsageError('duration="forever": a clock can be moved far, but not to the end of time')
        with self._mutex:
            self._now += passed

    def __repr__(self) -> str:
        return f"Clock({self._now:g})"
