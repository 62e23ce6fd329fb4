"""Guard the jobs of schedulers: two of them fire, and each planned time runs once.

`guard.scheduled` decorates a job. The adapters tell it the planned time: `apscheduler` and `celery_beat`. For any other
scheduler, `planned_at` does; `planned_times` lists the times that were missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from onefold._schedule.planned import now, planned_here
from onefold._schedule.slots import in_utc, slots_of
from onefold.durations import Duration

__all__ = ["planned_at", "planned_times"]


@contextmanager
def planned_at(planned: datetime) -> Iterator[None]:
    """Say for which time the scheduled functions that are called inside were planned."""
    token = planned_here.set(in_utc(planned, "planned"))
    try:
        yield
    finally:
        planned_here.reset(token)


def planned_times(
    every: Duration, *, since: datetime, until: datetime | None = None, anchor: datetime | None = None
) -> list[datetime]:
    """Return the planned times after `since`, up to `until` (by default now), to make up for those that were missed.

    Run the job for each: those that ran are replayed, and run no second time. Raises `UsageError` for more than 10,000.
    """
    end = now() if until is None else in_utc(until, "until")
    return list(slots_of(every, anchor).between(in_utc(since, "since"), end))
