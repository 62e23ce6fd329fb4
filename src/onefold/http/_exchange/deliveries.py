"""One request, asked of a guard, sync or async.

A response is stored with its type. A person who resolves a request may have given a plain value, which is read without
one: it is read again, and becomes a response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from onefold import AsyncGuard, Guard, Outcome, Policy, ResultUnreadable
from onefold._concurrency.generators import Work, run, run_async
from onefold.http._answers.rules import NotFinal
from onefold.http._exchange.rules import GuardRequest
from onefold.http._requests.tenants import joined
from onefold.http._shared.messages import Answer, plain_answer


def deliver(
    guard: Guard, guard_request: GuardRequest, perform: Callable[[], Answer], policy: Policy
) -> Outcome[Answer]:
    """Run it once for this key, or find its response. Raises what the guard raises, and `NotFinal`."""
    return run(_deliver(guard, guard_request, perform, _gone, policy))


async def deliver_async(
    guard: AsyncGuard, guard_request: GuardRequest, perform: Callable[[], Awaitable[Answer]], policy: Policy
) -> Outcome[Answer]:
    """Await it once for this key, or find its answer. See `deliver`."""
    return await run_async(_deliver(guard, guard_request, perform, _gone_async, policy))


def _deliver(
    guard: Any, guard_request: GuardRequest, perform: Callable[[], Any], gone: Callable[[], Any], policy: Policy
) -> Work[Outcome[Answer]]:
    asks = _asks(guard, guard_request, policy)
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


def _asks(guard: Guard | AsyncGuard, guard_request: GuardRequest, policy: Policy) -> dict[str, Any]:
    """Return the arguments for the guard: for the caller, within the tenant that the guard itself may be for."""
    tenant = guard.address(guard_request.operation, guard_request.key).scope
    return {"scope": joined(tenant, guard_request.scope), "fingerprint": guard_request.fingerprint, "policy": policy}


def _as_answer(found: Outcome[Any]) -> Outcome[Answer]:
    """Turn a plain value into a response. Raises `TypeError` for a value that JSON cannot express."""
    return msgspec.structs.replace(found, value=plain_answer(found.value))


def _gone() -> Any:
    """Give the claim back: the record disappeared between the two reads, and nothing runs.

    The annotated return type is the type by which the record is read: any.
    """
    raise NotFinal


async def _gone_async() -> Any:
    raise NotFinal
