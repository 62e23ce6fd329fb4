"""RQ's jobs: find the one that is performed, and settle it by its verdict."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from rq import Retry, get_current_job
from rq.exceptions import ShutDownImminentException
from rq.job import Job
from rq.results import Result
from rq.scheduler import RQScheduler
from rq.timeouts import BaseTimeoutException

from onefold.queues._shared.jobs.handler import Asked, Ended, Framework, GuardedJob, JobCall, is_in_progress
from onefold.queues._shared.verdict import HandlerRaised, Later, Never, reason_of

FRAMEWORK: Final = Framework(
    "job", (BaseTimeoutException, ShutDownImminentException), (), "RQ's Retry", returned=(Retry,)
)

# Where no scheduler runs, a job waits in its worker before it is enqueued again, this many seconds at most; and never
# longer than this part of the time that it may take.
PAUSE_MAX: Final = 5.0
PAUSE_PART: Final = 1 / 3

# The worker name of a job that RQ performs in the caller's own process, in a queue with `is_async=False`.
IN_CALLER: Final = "sync"

log = logging.getLogger("onefold.queues.rq")


def taken(function: Callable[..., Any]) -> Job | None:
    """Return the job for which a worker calls this function; None if this is a plain call."""
    job = get_current_job()
    if job is None or is_in_progress(job.id) or not any(one is function for one in _layers(job.func)):
        return None
    return job


def _layers(function: Any) -> Iterator[Any]:
    """Yield the function of a job, and what other decorators have wrapped."""
    while function is not None:
        yield getattr(function, "__func__", function)
        function = getattr(function, "__wrapped__", None)


def call_of(job: Job, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JobCall:
    """Return the message of a job, with the arguments of its call: those of a method have `self`."""
    return JobCall(job.origin or "", job.id, job.meta, args, kwargs)


def settled(guarded: GuardedJob, job: Job, call: JobCall, ended: Ended) -> Any:
    """Return the result of a job, or raise or return what makes RQ settle it by its verdict."""
    error = ended.error
    if error is None:
        return ended.value
    if isinstance(error, Asked):
        return error.value
    if job.worker_name == IN_CALLER:
        # Nobody would enqueue it again.
        raise error
    match ended.verdict:
        case HandlerRaised():
            guarded.tell_failed(log, call, error)
            raise error
        case Never(reason):
            raise rejected(guarded, job, call, reason, error)
        case Later() as later:
            return sent_again(guarded, job, call, later)
    if job.result_ttl == 0:
        # Nobody reads its result.
        return None
    with suppress(LookupError):
        return _result_of(job)
    raise rejected(guarded, job, call, reason_of(error), error)


def rejected(guarded: GuardedJob, job: Job, call: JobCall, reason: str, error: Exception) -> Exception:
    """Send a job to the FailedJobRegistry, without a retry."""
    guarded.tell_rejected(log, call, reason)
    job.retries_left = 0
    return error


def sent_again(guarded: GuardedJob, job: Job, call: JobCall, later: Later) -> Retry:
    """Return what makes RQ enqueue the job again, with its id, its key and its retries."""
    delay, counted = guarded.tell_later(log, call, later)
    job.meta = {**job.meta, **counted}
    # RQ adds one: it is counted for functions that return a Retry of their own.
    job.number_of_retries = (job.number_of_retries or 0) - 1
    if _has_scheduler(job):
        return Retry(max=sys.maxsize, interval=math.ceil(delay))
    # A time limit, or a shutdown, that ends the pause must not end the job.
    with suppress(*FRAMEWORK.interrupts):
        limit = job.timeout if isinstance(job.timeout, (int, float)) and job.timeout > 0 else math.inf
        time.sleep(min(delay, PAUSE_MAX, limit * PAUSE_PART))
    return Retry(max=sys.maxsize)


def _has_scheduler(job: Job) -> bool:
    """Return whether a scheduler works for this queue: without one, scheduled jobs stay where they are."""
    try:
        return bool(job.connection.exists(RQScheduler.get_locking_key(job.origin)))
    except Exception:  # noqa: BLE001 - then it waits here
        return False


def _result_of(job: Job) -> Any:
    """Return what an earlier execution of the same job has returned. Raise `LookupError` if RQ does not have it."""
    for result in job.results():
        if result.type == Result.Type.SUCCESSFUL:
            return result.return_value
    raise LookupError(job.id)
