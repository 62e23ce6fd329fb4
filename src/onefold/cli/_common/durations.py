"""Parse durations given as command options: only strings, as a shell passes them."""

from __future__ import annotations

import math

from onefold import UsageError
from onefold.cli._common.output import WRONG_USAGE, Refusal
from onefold.durations import UNITS, seconds


def seconds_of(text: str, option: str) -> float:
    """Return the seconds given as `--option`. Raises `Refusal`."""
    try:
        return seconds(text, option)
    except UsageError:
        pass
    units = ", ".join(UNITS)
    raise Refusal(
        f"{option} {text!r} is not a duration: write a number with a unit ({units}) such as 30s or 7d, or forever",
        WRONG_USAGE,
    )


def pause_of(text: str, option: str) -> float:
    """Return the seconds to wait, given as `--option`: neither zero nor forever."""
    pause = seconds_of(text, option)
    if not 0 < pause < math.inf:
        raise Refusal(f"{option} {text}: give it a time such as 60s", WRONG_USAGE)
    return pause
