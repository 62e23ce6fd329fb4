"""Deliver one request under a guard, sync or async.

A response is stored with its type. A person who resolves a request may have given a plain value, which is stored
without one: then it is read again without a type, and becomes a response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from onefold import AsyncGuard, Guard, Outcome, Policy, ResultUnreadable, StoreUnavailable, UsageError
from onefold._concurrency.generators import Flow, run, run_async
from onefold.health.first_use import first_use_of
from onefold.http._answers.rules import NotFinal
from onefold.http._exchange.rules import GuardRequest
from onefold.http._requests.tenants import joined
from onefold.http._shared.messages import Answer, plain_answer


def deliver(
    guard: Guard, guard_request: GuardRequest, perform: Callable[[], Answer], policy: Policy
) -> Outcome[Answer]:
    """Run the request once for its key, or find its response. Raise the guard's errors, and `NotFinal`."""
    return run(_deliver(guard, guard_request, perform, _gone, policy))


async def deliver_async(
    guard: AsyncGuard, guard_request: GuardRequest, perform: Callable[[], Awaitable[Answer]], policy: Policy
) -> Outcome[Answer]:
    """Await the request once for its key, or find its response. See `deliver`."""
    return await run_async(_deliver(guard, guard_request, perform, _gone_async, policy))


def _deliver(
    guard: Any, guard_request: GuardRequest, perform: Callable[[], Any], gone: Callable[[], Any], policy: Policy
) -> Flow[Outcome[Answer]]:
    asks = _asks(guard, guard_request, policy)
    first_use = first_use_of(guard)
    if not first_use.is_over:
        try:
            yield from first_use.check(guard, policy)
        except UsageError as problem:
            # Nothing is wrong with the application: once the store is set right, a retry succeeds.
            raise StoreUnavailable(str(problem)) from problem
    try:
        found: Outcome[Answer] = yield partial(
            guard.run, guard_request.operation, guard_request.key, perform, returns=Answer, **asks
        )
        return found
    except ResultUnreadable as unreadable:
        try:
            return _as_answer((yield partial(guard.run, guard_request.operation, guard_request.key, gone, **asks)))
        except (NotFinal, ResultUnreadable, TypeError):
            raise unreadable from None


async def check_first(guard: AsyncGuard, policy: Policy) -> None:
    """Check the guard's stores when an application starts. Raise `UsageError` if they cannot be used."""
    first_use = first_use_of(guard)
    if not first_use.is_over:
        await run_async(first_use.check(guard, policy))


def _asks(guard: Guard | AsyncGuard, guard_request: GuardRequest, policy: Policy) -> dict[str, Any]:
    """Return the arguments for the guard: the caller as scope, within the guard's own tenant if it has one."""
    tenant = guard.address(guard_request.operation, guard_request.key).scope
    return {"scope": joined(tenant, guard_request.scope), "payload": guard_request.payload, "policy": policy}


def _as_answer(found: Outcome[Any]) -> Outcome[Answer]:
    """Turn a plain value into a response. Raises `TypeError` for a value that JSON cannot express."""
    return msgspec.structs.replace(found, kept=plain_answer(found.value_or(None)))


def _gone() -> Any:
    """Give the claim back: the record disappeared between the two reads, and nothing runs.

    The annotated return type is the type by which the record is read: any.
    """
    raise NotFinal


async def _gone_async() -> Any:
    raise NotFinal
