"""Format values for messages: durations as people write them, values shortened. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from onefold.durations import UNITS

# People say "48h" for two days of retention, and "14d" for two weeks.
DAYS_FROM: Final = 3 * UNITS["d"]

# From three of a unit on, a proposed duration is a whole number of it.
ROUND_FROM: Final = 3

# More digits than these are hard to read: "90m" is at once an hour and a half, "140m" has to be worked out.
DIGITS_MAX: Final = 2

# A wrong value is shown up to here: it may be a whole document.
SHOWN_MAX: Final = 60


def said(duration: float) -> str:
    """Return the duration in one unit, as it can be written into the file: "90s", "48h", "14d", "forever"."""
    if math.isinf(duration):
        return "forever"
    for unit in ("d", "h", "m", "s"):
        count = duration / UNITS[unit]
        if count >= 1 and count == int(count) and (unit != "d" or duration >= DAYS_FROM):
            return f"{int(count)}{unit}"
    # Above a second it is exact to the thousandth: no "1e+06s".
    return f"{duration:.3f}".rstrip("0").rstrip(".") + "s"


def spelled(duration: float) -> str:
    """Return the duration in as many units as it needs, to be read: "48h 15m", where `said` has "2895m"."""
    duration = round(duration, 3)
    short = said(duration)
    if math.isinf(duration) or len(short.rstrip("smhd.")) <= DIGITS_MAX:
        return short
    parts, left = [], duration
    for unit in ("d", "h", "m"):
        if unit != "d" or duration >= DAYS_FROM:
            count, left = divmod(left, UNITS[unit])
            parts += [f"{int(count)}{unit}"] if count else []
    return " ".join([*parts, said(left)] if round(left, 3) else parts)


def above(duration: float) -> float:
    """Return a round duration that is not shorter, to be proposed: 49h for 48 hours and a quarter."""
    if math.isinf(duration):
        return duration
    for unit in ("d", "h", "m", "s"):
        # Below three of a unit the next whole one would be half as long again.
        if duration >= ROUND_FROM * UNITS[unit]:
            return math.ceil(round(duration / UNITS[unit], 9)) * UNITS[unit]
    return duration


def below(duration: float) -> float:
    """Return a round duration that is clearly shorter: 23h for a day, 6d for a week, 59m for an hour."""
    for unit in ("d", "h", "m", "s"):
        whole = math.ceil(duration / UNITS[unit]) - 1
        if whole >= 1 and (unit != "d" or duration >= DAYS_FROM):
            return whole * UNITS[unit]
    return duration / 2


def shown(value: object) -> str:
    """Return a wrong value as a message shows it."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case Mapping():
            return "a table"
        case list():
            return "a list"
        case _:
            text = repr(value)
            return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
