"""Celery beat: a scheduler that sends each task under a key of its planned time.

    app.conf.beat_scheduler = "onefold.schedulers.celery_beat:PersistentScheduler"

Two beats then send two messages with one key, and a task of `onefold.queues.celery` runs once.
"""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from onefold import UsageError
from onefold._schedule.slots import EARLY_MAX, slots_of, text_of
from onefold.queues.keys import KEY_HEADER, is_header

try:
    from celery import beat
    from celery.schedules import crontab, schedule
    from celery.utils.time import remaining
except ImportError as error:
    raise UsageError("Celery is not installed: `pip install 'onefold[celery]'`") from error

__all__ = ["KeyedByPlannedTime", "PersistentScheduler", "Scheduler", "planned_of"]

# Has the planned time, for tasks that want to know it.
PLANNED_HEADER: Final = "onefold-planned"

# How far back the last time of a crontab is looked for: first where it is likely to be, at last over a leap year.
LOOK_BACK: Final = tuple(timedelta(minutes=2**power) for power in (1, 7, 12, 15, 17, 22))

# The finest unit of a crontab.
MINUTE: Final = timedelta(minutes=1)

EARLY: Final = timedelta(seconds=EARLY_MAX)


class KeyedByPlannedTime:
    """Makes any scheduler of Celery beat send its entries under a key: inherit from this one first.

    The key is the name of the entry and its planned time. An entry that has a key in its headers keeps it.
    """

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **options: Any) -> Any:  # noqa: FBT001, FBT002 - Celery's
        """Send an entry that is due."""
        if advance:
            # Before the key is added: it belongs to this time only.
            entry = self.reserve(entry)  # type: ignore[attr-defined]
        keyed = copy.copy(entry)
        keyed.options = _with_key(entry, planned_time(entry.schedule))
        return super().apply_async(keyed, producer=producer, advance=False, **options)  # type: ignore[misc]


class Scheduler(KeyedByPlannedTime, beat.Scheduler):
    """Celery's scheduler that remembers nothing."""


class PersistentScheduler(KeyedByPlannedTime, beat.PersistentScheduler):
    """Celery's default scheduler, which keeps its times in a file."""


def _with_key(entry: Any, planned: datetime) -> dict[str, Any]:
    options = dict(entry.options or {})
    headers = dict(options.get("headers") or {})
    if not any(is_header(name, KEY_HEADER) for name in headers):
        headers[KEY_HEADER] = f"{entry.name} {text_of(planned)}"
    return {**options, "headers": {**headers, PLANNED_HEADER: text_of(planned)}}


def planned_of(request: Any) -> datetime | None:
    """Return the planned time of a task that runs, from `task.request`; None if no beat of ours has sent it."""
    found = (request.headers or {}).get(PLANNED_HEADER)
    return None if found is None else datetime.fromisoformat(found)


def planned_time(due: Any, now: datetime | None = None) -> datetime:
    """Return the planned time of a schedule that is due: the last one that has begun.

    It depends on the schedule and the clock only, not on when this beat has run before: two beats find the same.
    """
    moment = datetime.now(UTC) if now is None else now
    if isinstance(due, crontab):
        return _last(due, moment + EARLY)
    if isinstance(due, schedule):
        return slots_of(due.seconds).slot_of(moment)
    raise UsageError(
        f"a schedule of type {type(due).__name__} has no planned time that two beats agree on: use a crontab, or an "
        "interval"
    )


def _last(due: crontab, until: datetime) -> datetime:
    for back in LOOK_BACK:
        before = until - back
        if _next(due, before) <= until:
            return _latest(due, before, until)
    raise UsageError(f"{due!r} has no time in the last eight years")


def _latest(due: crontab, before: datetime, until: datetime) -> datetime:
    """Return the last time up to a moment, of those after `before`. There may be one in each minute of many days."""
    since = until
    while since - before > MINUTE:
        middle = before + (since - before) / 2
        if _next(due, middle) <= until:
            before = middle
        else:
            since = middle
    return _next(due, before)


def _next(due: crontab, moment: datetime) -> datetime:
    """Return the first time after a moment, as Celery finds it, in UTC."""
    start, delta, now = due.remaining_delta(_before_repeated(due, moment))
    # In UTC before they are added up: the sum of a local time and a duration ignores that clocks are changed.
    return now.astimezone(UTC) + remaining(start, delta, now)


def _before_repeated(due: crontab, moment: datetime) -> datetime:
    """Return the end of a local hour that comes twice, for a moment in its repetition; for others, the moment.

    Celery plans nothing in a repetition; but asked what comes after a moment in it, it answers for the first time.
    """
    # In the schedule's own time zone, whatever that is given as.
    local = due.remaining_delta(moment)[0]
    if not local.fold:
        return moment
    begin = moment.replace(second=0, microsecond=0)
    while (begin - MINUTE).astimezone(local.tzinfo).fold:
        begin -= MINUTE
    return begin - timedelta.resolution
