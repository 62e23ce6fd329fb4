"""Decorate a job of a scheduler: find its planned time, and make that its key. One copy for sync and async guards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Final

from onefold._handlers.arguments import TX_NAME, as_written, name_of
from onefold._model.policy import Policy, check_fields
from onefold._schedule.slots import LATE_PART, Slots, in_utc, is_too_late, slots_of, text_of
from onefold.durations import Duration, as_text
from onefold.errors import UsageError

# The parameter that receives the planned time, by its name; a caller may pass it, too.
PLANNED_NAME: Final = "planned"

# A record is kept for at least so many intervals: a scheduler that was down comes back late.
KEEP_INTERVALS: Final = 3

# How long a second scheduler waits for the run of the first, to take over if it dies: the interval, up to an hour.
WAIT_MAX: Final = 3_600.0

# The planned time of the job that a scheduler runs here, if it says so. Set by the adapters.
planned_here: ContextVar[datetime | None] = ContextVar("onefold_planned", default=None)

# The key of the call that is being made.
_key: ContextVar[str] = ContextVar("onefold_planned_key")

# The planned time that a caller has passed to a job which catches it in `**options`: no argument for the guard.
_caught: ContextVar[dict[str, datetime]] = ContextVar("onefold_planned_caught")


class Plan:
    """When a job is planned. Without slots its scheduler has to say so."""

    def __init__(self, operation: str, slots: Slots | None) -> None:
        self._operation = operation
        self._slots = slots

    def defaults(self, policy: Policy) -> dict[str, float]:
        """Return the fields of the policy that follow from the interval."""
        if self._slots is None:
            return {}
        every = self._slots.every.total_seconds()
        return {"keep": max(policy.keep, KEEP_INTERVALS * every), "wait": max(policy.wait, min(every, WAIT_MAX))}

    def planned_time(self, passed: object = None) -> datetime:
        """Return the planned time of a call: the caller's, or the scheduler's, or that of the clock."""
        found = planned_here.get() if passed is None else passed
        if found is None and self._slots is None:
            raise UsageError(
                f"{self._operation}: it has no planned time. Pass every=, use an executor of "
                f"onefold.schedulers.apscheduler, or call it with {PLANNED_NAME}=. Nothing ran"
            )
        moment = now() if found is None else in_utc(found, PLANNED_NAME)
        return moment if self._slots is None else self._slots.slot_of(moment)

    def check_late(self, planned: datetime, keep: float) -> None:
        """Refuse a planned time so long ago that its record may be forgotten."""
        if is_too_late(planned, now(), keep):
            raise UsageError(
                f"{self._operation}: it was planned for {text_of(planned)}, and records are kept for {as_text(keep)}: "
                f"once {LATE_PART:.0%} of that have passed, nobody knows whether it ran. Nothing ran. Pass a longer "
                "keep=, or run it with .bypass() if you know that it did not"
            )


def now() -> datetime:
    return datetime.now(UTC)


def planned_slots(every: Duration | None, anchor: datetime | None, early: Duration | None) -> Slots | None:
    """Return the slots of a job; None if its scheduler says when it is planned."""
    if every is not None:
        return slots_of(every, anchor, early)
    if anchor is not None or early is not None:
        raise UsageError("anchor= and early= belong to every=: without it, the scheduler's own times are the keys")
    return None


def scheduled(
    guard: Any,
    operation: str,
    slots: Slots | None,
    policy: Policy | None,
    fields: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator of `Guard.scheduled` and `AsyncGuard.scheduled`."""
    if callable(operation):
        raise UsageError(
            "@guard.scheduled needs its arguments: write for example "
            f"@guard.scheduled({name_of(operation).rpartition('.')[2]!r}, every='1h')"
        )
    check_fields(fields, type(guard).scheduled)
    plan = Plan(operation, slots)
    chosen = guard.policy.replace(**plan.defaults(guard.policy)) if policy is None else policy
    if fields:
        chosen = chosen.replace(**fields)

    def decorate(function: Callable[..., Any]) -> Any:
        joins = TX_NAME in inspect.signature(function).parameters
        way = guard.transactional if joins else guard.idempotent
        called = _with_caught(function) if _catches_planned(inspect.signature(function)) else function
        return _planned(plan, way(operation, key=_key_of_call, policy=chosen, **options)(called))

    return decorate


def _catches_planned(signature: inspect.Signature) -> bool:
    """Return whether a planned time that a caller passes is caught by `**options`, which takes any name."""
    parameters = signature.parameters
    return PLANNED_NAME not in parameters and any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _with_caught(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a job that gets the planned time only where its caller has passed it: it may hand all keywords on."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **kwargs, **_caught.get())

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs, **_caught.get())

    return called


def _key_of_call(*_: Any, **__: Any) -> str:
    return _key.get()


def _planned(plan: Plan, guarded: Any) -> Any:
    """Wrap a guarded function, so that each way to call it has the planned time as its key."""
    signature = inspect.signature(guarded)
    call = _Call(plan, signature, guarded.policy.keep)
    is_async = inspect.iscoroutinefunction(inspect.unwrap(guarded))
    make = _async_way if is_async else _way
    return as_written(
        make(call, guarded, guarded, bypass=False),
        SimpleNamespace(signature=signature),  # type: ignore[arg-type]
        guarded.policy,
        outcome=make(call, guarded, guarded.outcome, bypass=False),
        bypass=make(call, guarded, guarded.bypass, bypass=True),
    )


class _Call:
    """How one function is called: with its planned time, if it takes that, and under its key."""

    def __init__(self, plan: Plan, signature: inspect.Signature, keep: float) -> None:
        self._plan = plan
        self._signature = signature
        self._takes_planned = PLANNED_NAME in signature.parameters
        self._catches_planned = _catches_planned(signature)
        self._keep = keep

    @contextmanager
    def made(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, bypass: bool
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Give the arguments of the call, while its key is set."""
        passed = None
        if self._takes_planned:
            bound = self._signature.bind_partial(*args, **kwargs)
            passed = bound.arguments.get(PLANNED_NAME)
        elif self._catches_planned:
            passed = kwargs.pop(PLANNED_NAME, None)
        planned = self._plan.planned_time(passed)
        if not bypass:
            self._plan.check_late(planned, self._keep)
        if self._takes_planned:
            bound.arguments[PLANNED_NAME] = planned
            args, kwargs = bound.args, bound.kwargs
        token = _key.set(text_of(planned))
        caught = _caught.set({} if passed is None or self._takes_planned else {PLANNED_NAME: planned})
        try:
            yield args, kwargs
        finally:
            _caught.reset(caught)
            _key.reset(token)


def _way(call: _Call, function: Any, guarded: Callable[..., Any], *, bypass: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def way(*args: Any, **kwargs: Any) -> Any:
        with call.made(args, kwargs, bypass=bypass) as (args, kwargs):
            return guarded(*args, **kwargs)

    return way


def _async_way(call: _Call, function: Any, guarded: Callable[..., Any], *, bypass: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    async def way(*args: Any, **kwargs: Any) -> Any:
        with call.made(args, kwargs, bypass=bypass) as (args, kwargs):
            return await guarded(*args, **kwargs)

    return way
