"""Temporal: activities whose effect happens once, however often Temporal runs them.

    @activity.defn
    @guarded(guard, "charge")
    async def charge(order: Order) -> Receipt: ...

Temporal runs an activity again if its worker has died or was too slow. The key is the same for all attempts of one
activity: namespace, workflow, run and activity id. An attempt that comes after the effect gets the stored result; one
that comes while another still runs is tried again later; what never can run fails without a retry; errors of the
function are left to the retry policy of the activity.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack, cast

from onefold import AsyncGuard, Guard, Policy, PolicyFields, RecordColumn, UsageError
from onefold._model.policy import check_fields
from onefold.queues._shared.consumer import MissingKeyRule
from onefold.queues._shared.jobs.handler import GuardedJob
from onefold.queues.keys import KeyOf

try:
    from onefold.queues.temporal import activities
    from onefold.queues.temporal.activities import FRAMEWORK
    from onefold.queues.temporal.heartbeat import Heartbeat
    from onefold.queues.temporal.keys import ActivityKey, per_run, per_workflow
except ImportError as error:
    raise UsageError("Temporal's SDK is not installed: `pip install 'onefold[temporal]'`") from error

__all__ = ["guarded", "per_run", "per_workflow"]

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_KEY = per_run()


def guarded(
    guard: Guard | AsyncGuard,
    operation: str,
    *,
    key: KeyOf | str = DEFAULT_KEY,
    missing_key: MissingKeyRule = "never",
    scope: Any = None,
    fingerprint: Any = "*",
    record: RecordColumn | None = None,
    heartbeat: bool = False,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the function of an activity, to run once for each key. A parameter `tx` makes it transactional.

    `key` is `per_run()`, by default; `per_workflow()`; the name of an argument; or one of `onefold.queues.keys`.
    `scope` names the argument that is the tenant, or several, or is a function of the arguments. `fingerprint` names
    the arguments that must be the same under one key. `record` is a row of your own that is the record, for a function
    with `tx`. `heartbeat=True` sends Temporal's heartbeat while the function runs. `docs/queues/temporal.md` explains
    each. Called anywhere but in its own activity, it is a plain function, unguarded.
    """
    check_fields(fields, guarded)
    given = {
        "key": key,
        "missing_key": missing_key,
        "scope": scope,
        "fingerprint": fingerprint,
        "record": record,
        "policy": policy,
        **fields,
    }

    def decorate(handler: Callable[P, R]) -> Callable[P, R]:
        name = str(getattr(handler, "__qualname__", "") or operation)
        job = GuardedJob(FRAMEWORK, name, guard, operation, handler, given)
        # What names an activity is not among its arguments.
        job.reads_arguments = not isinstance(key, ActivityKey)
        beats = Heartbeat(enabled=heartbeat)
        made = _async_activity(job, beats) if job.is_async else _activity(job, beats)
        made.__signature__ = _without_tx(handler)  # type: ignore[attr-defined]
        return cast("Callable[P, R]", made)

    return decorate


def _activity(job: GuardedJob, beats: Heartbeat) -> Callable[..., Any]:
    @functools.wraps(job.handler)
    def function(*args: Any, **kwargs: Any) -> Any:
        info = activities.taken(function)
        if info is None:
            return job.handler(*args, **kwargs)
        call = activities.call_of(info, args, kwargs)
        with beats.in_thread(info):
            ended = job.deliver(call)
        return activities.settled(job, info, call, ended)

    return function


def _async_activity(job: GuardedJob, beats: Heartbeat) -> Callable[..., Any]:
    @functools.wraps(job.handler)
    async def function(*args: Any, **kwargs: Any) -> Any:
        info = activities.taken(function)
        if info is None:
            return await job.handler(*args, **kwargs)
        call = activities.call_of(info, args, kwargs)
        async with beats.in_task(info):
            ended = await job.deliver_async(call)
        return activities.settled(job, info, call, ended)

    return function


def _without_tx(handler: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that Temporal sees: it passes the arguments of a workflow, which has no transaction."""
    whole = inspect.signature(handler)
    return whole.replace(parameters=[one for name, one in whole.parameters.items() if name != "tx"])
