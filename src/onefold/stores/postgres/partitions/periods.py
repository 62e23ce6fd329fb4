"""The periods that `?partitions=` accepts."""

from __future__ import annotations

from typing import Final

from onefold._checks import one_of

HOUR: Final = 3600.0
DAY: Final = 24 * HOUR

# In seconds since the partition before was sealed, whatever the calendar says.
PERIODS: Final = {"hour": HOUR, "day": DAY, "week": 7 * DAY, "month": 30 * DAY}


def period(written: str) -> str:
    """Return the name of a period. Raise `UsageError` for any other word."""
    return one_of(written.lower(), tuple(PERIODS), "partitions")
