"""Check an adapter's options before the first message, if they would fail for every one. Pure."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from onefold import OPERATION_MAX, Policy, UsageError
from onefold.stores.opening import without_transactions


def takes_tx(handler: Callable[..., Any]) -> bool:
    """Return whether the handler takes the transaction in which its record is written."""
    signature = _signature_of(handler)
    return signature is not None and "tx" in signature.parameters


def check(
    guard: Any,
    kind: type,
    operation: object,
    handler: Callable[..., Any],
    *,
    missing_key: str = "never",
    policy: object = None,
    is_async: bool = False,
) -> None:
    """Refuse, before the first message, options that would fail for every one of them."""
    if not isinstance(guard, kind):
        client = "async" if is_async else "blocking"
        raise UsageError(f"this client is {client}: it takes {kind.__name__}, and this is {type(guard).__name__}")
    if not callable(handler):
        raise UsageError(f"the handler is {type(handler).__name__}, and has to be a function")
    inner = handler.func if isinstance(handler, functools.partial) else handler
    called = getattr(inner, "__call__", inner)  # noqa: B004 - an object with an async __call__ is an async handler
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (inner, called)):
        raise UsageError("the handler has a `yield`, and nobody would go through it: its work would be lost")
    handler_is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(called)
    if handler_is_async != is_async:
        have, want = ("async def", "def") if handler_is_async else ("def", "async def")
        raise UsageError(f"the handler is `{have}`, and this client calls `{want}`: its work would be lost")
    check_options(missing_key, policy)
    # What the guard refuses is raised now, not for each message.
    cast("Any", guard).check_policy(policy)
    if not isinstance(operation, str) or not operation.strip() or len(operation.encode()) > OPERATION_MAX:
        raise UsageError(f"operation={operation!r:.60} has to be a name such as 'charge'")


def check_options(missing_key: object, policy: object) -> None:
    if missing_key not in ("never", "run"):
        raise UsageError(f"missing_key={missing_key!r} is neither 'never' nor 'run'")
    if policy is not None and not isinstance(policy, Policy):
        raise UsageError(f"policy= is {type(policy).__name__}, and has to be a Policy, such as guard.policy.but(...)")


def check_transactions(guard: Any, handler: Callable[..., Any]) -> None:
    """Refuse a handler with tx if the guard's store is known to have no transactions, before it is opened."""
    kind = without_transactions(guard.source) if takes_tx(handler) else ""
    if kind:
        raise UsageError(
            f"the handler takes tx, and {kind} has no transactions of its own: take a store in your database, such as "
            "sqlite:///app.db, or leave tx out"
        )


def whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r} has to be a whole number, {least} or more")
    return value


def check_arguments(handler: Callable[..., Any]) -> None:
    """Refuse a handler that cannot be called: it would send every message to the dead letters."""
    signature = _signature_of(handler)
    if signature is None:
        return
    try:
        signature.bind(None, **({"tx": None} if takes_tx(handler) else {}))
    except TypeError as error:
        raise UsageError(f"the handler is called with only the message, or also with tx=...: {error}") from error


def _signature_of(handler: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature. None: it is written in C, and has none."""
    try:
        return inspect.signature(handler)
    except ValueError:
        return None
