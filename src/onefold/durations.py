"""Durations: seconds, a `timedelta`, or strings such as "30s", "24h", "7d" and "forever"."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Final

from onefold.errors import UsageError

FOREVER: Final = math.inf

Duration = float | timedelta | str

UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def seconds(duration: Duration, name: str) -> float:
    """Return the duration in seconds; errors refer to the argument as `name`."""
    found = _seconds(duration)
    if found is None or math.isnan(found):
        raise UsageError(
            f"{name}={duration!r} is not a duration: use seconds, a timedelta, "
            f'or a number with a unit ({", ".join(UNITS)}) such as "30s" or "7d", or "forever"'
        )
    if found < 0:
        raise UsageError(f"{name}={duration!r} is negative: a duration is zero or more")
    return found


def _seconds(duration: object) -> float | None:
    if isinstance(duration, bool):
        return None
    if isinstance(duration, (int, float)):
        try:
            return float(duration)
        except OverflowError:
            return None
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    if isinstance(duration, str):
        return _parsed(duration.strip().lower())
    return None


def _parsed(text: str) -> float | None:
    if text == "forever":
        return FOREVER
    for unit in sorted(UNITS, key=len, reverse=True):
        if text.endswith(unit):
            try:
                return float(text.removesuffix(unit)) * UNITS[unit]
            except ValueError:
                return None
    return None


def as_text(duration: float) -> str:
    """Format the duration as a person writes it: "30s", "24h", "forever"."""
    if duration == FOREVER:
        return "forever"
    for unit in ("w", "d", "h", "m", "s"):
        count = duration / UNITS[unit]
        if count >= 1 and count == int(count) and (unit != "w" or count > 1):
            return f"{int(count)}{unit}"
    return f"{duration:g}s"
