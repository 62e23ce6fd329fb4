"""APScheduler 3: executors that tell a scheduled job for which time it was planned.

    scheduler = BackgroundScheduler(executors={"default": ThreadPoolExecutor(10)})
    scheduler.add_job(invoice_run, "cron", minute=0)

APScheduler itself tells that to listeners only, not to the job.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from onefold import UsageError
from onefold._schedule.planned import planned_here

try:
    from apscheduler.executors import asyncio as asyncio_executor
    from apscheduler.executors import pool
except ImportError as error:
    raise UsageError("APScheduler 3 is not installed: `pip install 'onefold[apscheduler]'`") from error

__all__ = ["AsyncIOExecutor", "TellsPlannedTime", "ThreadPoolExecutor"]


class _RunTimes(list[datetime]):
    """The planned times of a job. An executor takes one after the other, and calls the job for each that it takes."""

    def __iter__(self) -> Iterator[datetime]:
        # The loop runs where the job is called: in a thread of a pool, or in a task.
        for planned in super().__iter__():
            planned_here.set(planned)
            yield planned
        planned_here.set(None)


class TellsPlannedTime:
    """Makes any executor of APScheduler tell its jobs their planned times: inherit from this one first."""

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> Any:
        return super()._do_submit_job(job, _RunTimes(run_times))  # type: ignore[misc]


class ThreadPoolExecutor(TellsPlannedTime, pool.ThreadPoolExecutor):  # type: ignore[misc] # APScheduler is untyped
    """APScheduler's executor for functions."""


class AsyncIOExecutor(TellsPlannedTime, asyncio_executor.AsyncIOExecutor):  # type: ignore[misc] # as above
    """APScheduler's executor for an `AsyncIOScheduler`, and for async functions."""
