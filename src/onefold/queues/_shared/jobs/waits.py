"""Count how often a job has come again, in its own headers, and how long it waits next. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from onefold.queues._shared.verdict import HELD_DELAY, Later

# How often a message has come again, and how often of these because it was held.
TIMES: Final = "x-onefold-times"
HELD: Final = "x-onefold-held"

# Each wait is twice as long, from a second up to a minute: a job of an hour does not keep a worker busy with
# duplicates.
DOUBLINGS_MAX: Final = 10


def again(later: Later, headers: Mapping[str, Any]) -> tuple[float, dict[str, int]]:
    """Return how long a message waits this time, and the counts that its headers get."""
    times = counted_in(headers, TIMES)
    delay = min(later.delay * 2 ** min(times, DOUBLINGS_MAX), max(HELD_DELAY, later.delay))
    return delay, {TIMES: times + 1, HELD: counted_in(headers, HELD) + later.limited}


def counted_in(headers: Mapping[str, Any] | None, name: str) -> int:
    """Return a count from one of our headers; 0 if it is missing or invalid."""
    found = (headers or {}).get(name, 0)
    return found if isinstance(found, int) and found > 0 else 0
