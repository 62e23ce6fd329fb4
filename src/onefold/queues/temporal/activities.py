"""Temporal's activities: find the one that runs here, and settle it by its verdict."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory, CancelledError

from onefold import Held, InProgress, OnefoldError, RememberedFailure, UsageError
from onefold.queues._shared.jobs.handler import Ended, Framework, GuardedJob, JobCall, is_in_progress
from onefold.queues._shared.jobs.waits import HELD, TIMES
from onefold.queues._shared.verdict import HELD_DELAY, HandlerRaised, Later, Never, reason_of

# Raised into the thread of a sync activity, at any line.
FRAMEWORK: Final = Framework("activity", (CancelledError,), (), "Temporal's CancelledError")

# Where `activity.defn` leaves what it knows of a function.
DEFINITION: Final = "__temporal_activity_definition"

log = logging.getLogger("onefold.queues.temporal")


def taken(function: Callable[..., Any]) -> activity.Info | None:
    """Return the activity for which a worker calls this function; None if this is a plain call."""
    if not activity.in_activity():
        return None
    info = activity.info()
    if is_in_progress(_id_of(info)):
        return None
    definition = getattr(function, DEFINITION, None)
    if definition is None and info.activity_type != function.__name__:
        raise _misplaced(function, info)
    # The name of a dynamic activity is None: it is called for all.
    name = function.__name__ if definition is None else definition.name
    return info if name in (None, info.activity_type) else None


def _misplaced(function: Callable[..., Any], info: activity.Info) -> ApplicationError:
    return ApplicationError(
        f"{function.__name__} is guarded, and it cannot be told whether the activity {info.activity_type} is its own. "
        "Put @guarded(...) directly below @activity.defn(...), or on top of all decorators. Nothing ran",
        type=UsageError.__name__,
        # The worker is wrong, not the activity.
        next_retry_delay=timedelta(seconds=HELD_DELAY),
    )


def _id_of(info: activity.Info) -> str:
    return f"{info.workflow_run_id or info.activity_run_id} {info.activity_id}"


def call_of(info: activity.Info, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JobCall:
    """Return the message of an activity. How often it came before is known from its attempt.

    The second attempt may be the first that has to wait: the delays begin there.
    """
    counts = {TIMES: max(info.attempt - 2, 0), HELD: info.attempt - 1}
    return JobCall(info.task_queue, _id_of(info), counts, args, kwargs)


def settled(guarded: GuardedJob, info: activity.Info, call: JobCall, ended: Ended) -> Any:
    """Return the result of an activity, or raise what makes Temporal settle it by its verdict."""
    error = ended.error
    if error is None:
        return ended.value
    if isinstance(error, CancelledError):
        # Whoever has cancelled it waits for this one.
        raise error
    match ended.verdict:
        case HandlerRaised():
            guarded.tell_failed(log, call, error, info.attempt)
            raise error
        case Never(reason):
            guarded.tell_rejected(log, call, reason)
            raise never(error, reason) from (None if isinstance(error, OnefoldError) else error)
        case Later() as later:
            delay, _ = guarded.tell_later(log, call, later)
            raise again(later, delay) from None
    # It is done, and there is no result for the workflow.
    raise never(error, reason_of(error)) from None


def again(later: Later, delay: float) -> ApplicationError:
    """Return the error after which Temporal tries the activity again, in so many seconds.

    Its text has digests, not keys, and nothing of a driver's error: it stays in the history of the workflow.
    """
    kind = InProgress if later.error is None else type(later.error)
    is_normal = issubclass(kind, (InProgress, Held))
    return ApplicationError(
        later.reason.removeprefix(f"{kind.__name__}: "),
        type=kind.__name__,
        next_retry_delay=timedelta(seconds=delay),
        category=ApplicationErrorCategory.BENIGN if is_normal else ApplicationErrorCategory.UNSPECIFIED,
    )


def never(error: Exception, reason: str) -> ApplicationError:
    """Return the error that Temporal does not retry. A workflow knows it by its type: that of the error."""
    if isinstance(error, ApplicationError):
        return ApplicationError(error.message, *error.details, type=error.type, non_retryable=True)
    if isinstance(error, RememberedFailure) and error.type_name:
        return ApplicationError(error.message, type=error.type_name.rpartition(".")[2], non_retryable=True)
    kind = type(error).__name__
    text = reason.removeprefix(f"{kind}: ") if isinstance(error, OnefoldError) else str(error)
    return ApplicationError(text, type=kind, non_retryable=True)
