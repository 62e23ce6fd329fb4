"""RQ: functions that run once for each key, in every kind of worker.

    @guarded(guard, "send-welcome")
    def send_welcome(user_id): ...

    send(queue, send_welcome, ("rahul",), key="signup-17")

The sender puts the key into the `meta` of the job. A duplicate gets the stored result. A job that has to come later is
enqueued again with its retries uncounted; what never can run goes to the FailedJobRegistry at once; errors of the
function are left to RQ's Retry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack, cast

from msgspec import UNSET, UnsetType

from onefold import AsyncGuard, Guard, Policy, PolicyFields, RecordColumn, UsageError
from onefold._model.policy import check_fields
from onefold.events import tell_sent
from onefold.queues._shared.consumer import MissingKeyRule
from onefold.queues._shared.jobs.handler import DEFAULT_KEY, KEY_KEYWORD, GuardedJob
from onefold.queues.keys import KEY_HEADER, Key, KeyOf, with_key

try:
    from rq import Queue

    from onefold.queues.rq import jobs as rq_jobs
    from onefold.queues.rq import loops as rq_loops
    from onefold.queues.rq.jobs import FRAMEWORK
except ImportError as error:
    raise UsageError("RQ is not installed: `pip install 'onefold[rq]'`") from error

__all__ = ["guarded", "send"]

P = ParamSpec("P")
R = TypeVar("R")


def guarded(
    guard: Guard | AsyncGuard,
    operation: str,
    *,
    key: KeyOf | str = DEFAULT_KEY,
    missing_key: MissingKeyRule = "never",
    scope: Any = None,
    fingerprint: Any = "*",
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the function of a job, to run once for each key. A parameter `tx` makes it transactional.

    `key` is the name of an argument, or one of `onefold.queues.keys`; by default `meta["idempotency-key"]`. `scope`
    names the argument that is the tenant, or several, or is a function of the arguments. `fingerprint` names the
    arguments that must be the same under one key. `record` is a row of your own that is the record, for a function with
    `tx`. `docs/queues/rq.md` explains each. Called anywhere but in a worker, it is a plain function, unguarded.
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
        made = _async_function(job) if job.is_async else _function(job)
        return cast("Callable[P, R]", made)

    return decorate


def _function(job: GuardedJob) -> Callable[..., Any]:
    @functools.wraps(job.handler)
    def function(*args: Any, **kwargs: Any) -> Any:
        taken = rq_jobs.taken(function)
        if taken is None:
            return job.handler(*args, **kwargs)
        call = rq_jobs.call_of(taken, args, kwargs)
        return rq_jobs.settled(job, taken, call, job.deliver(call))

    function.__onefold_job__ = job  # type: ignore[attr-defined]
    return function


def _async_function(job: GuardedJob) -> Callable[..., Any]:
    @functools.wraps(job.handler)
    def function(*args: Any, **kwargs: Any) -> Any:
        """Return an awaitable, as any async function; for a worker, which would await it, its result."""
        taken = rq_jobs.taken(function)
        if taken is None:
            return job.handler(*args, **kwargs)
        call = rq_jobs.call_of(taken, args, kwargs)
        return rq_jobs.settled(job, taken, call, rq_loops.awaited(job, call))

    function.__onefold_job__ = job  # type: ignore[attr-defined]
    return function


def send(
    queue: Queue,
    function: Callable[..., Any] | str,
    args: Any = (),
    kwargs: Any = None,
    *,
    key: Key | UnsetType = UNSET,
    meta: dict[str, Any] | None = None,
    **options: Any,
) -> str:
    """Enqueue a job under this key, or a new one. Return the key, to send it again.

    `options` are those of `Queue.enqueue_call`, such as `retry` and `timeout`.
    """
    headers = dict(meta or {})
    if KEY_KEYWORD in headers:
        headers[KEY_HEADER] = headers.pop(KEY_KEYWORD)
    chosen, headers = with_key(headers, key)
    tell_sent(queue.name, chosen)
    enqueue: Any = queue.enqueue_call
    enqueue(function, args=tuple(args), kwargs=dict(kwargs or {}), meta=headers, **options)
    return chosen
