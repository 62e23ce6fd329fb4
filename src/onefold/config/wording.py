"""Format values for messages: durations as people write them, values shortened. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from onefold.durations import UNITS

# People say "48h" for two days of retention, and "14d" for two weeks.
DAYS_FROM: Final = 3 * UNITS["d"]

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
