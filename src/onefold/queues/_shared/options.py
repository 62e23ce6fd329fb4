"""Check an adapter's options before the first message, if they would fail for every one. Pure."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from onefold import AsyncGuard, Guard, Policy, RecordColumn, UsageError
from onefold._checks import STANDS_FOR
from onefold._model.policy import check_fields
from onefold.keys import checked_operation
from onefold.stores.opening import without_transactions
from onefold.transactions import check_compared

# How long a running duplicate waits in place, in seconds: that is cheaper than another delivery.
WAIT: Final = 5.0


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
    check_guard(guard, kind)
    if not callable(handler):
        raise UsageError(f"the handler has to be a function, not {type(handler).__name__}")
    inner = handler.func if isinstance(handler, functools.partial) else handler
    called = getattr(inner, "__call__", inner)  # noqa: B004 - an object with an async __call__ is an async handler
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (inner, called)):
        raise UsageError("the handler has a `yield`, and nobody would iterate over it: its work would be lost")
    handler_is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(called)
    if handler_is_async != is_async:
        have, want = ("async def", "def") if handler_is_async else ("def", "async def")
        raise UsageError(
            f"the handler is `{have}`, but with {type(guard).__name__} it has to be `{want}`: its work would be lost"
        )
    check_options(missing_key, policy)
    # Errors of the guard are raised now, not for each message.
    cast("Any", guard).check_policy(policy)
    checked_operation(operation)


def check_guard(guard: object, kind: type) -> None:
    """Refuse a guard that this client cannot call."""
    if not isinstance(guard, kind):
        client = "async" if kind is AsyncGuard else "blocking"
        raise UsageError(f"this client is {client}: it takes {kind.__name__}, but this is {type(guard).__name__}")


def policy_of(
    guard: Guard | AsyncGuard, kind: type, policy: Policy | None, fields: Mapping[str, Any], of: Callable[..., Any]
) -> Policy:
    """Return the policy for an adapter's messages: the one that is passed, or the guard's, with these fields.

    A running duplicate waits in place for `WAIT`, unless a field says otherwise.
    """
    check_guard(guard, kind)
    check_fields(fields, of)
    check_options("never", policy)
    return (policy or guard.policy).replace(**{"wait": WAIT, **fields})


def named_like(handler: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under the handler's name: a guard tells by it whether two of them share an operation."""
    inner = handler.func if isinstance(handler, functools.partial) else handler
    function.__module__ = handler.__module__
    function.__qualname__ = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    setattr(function, STANDS_FOR, inner)
    return function


def check_options(missing_key: object, policy: object) -> None:
    if missing_key not in ("never", "run"):
        raise UsageError(f"missing_key={missing_key!r} is neither 'never' nor 'run'")
    if policy is not None and not isinstance(policy, Policy):
        raise UsageError(f"policy= has to be a Policy, such as guard.policy.replace(...), not {type(policy).__name__}")


def check_transactions(guard: Any, handler: Callable[..., Any]) -> None:
    """Refuse a handler with tx if the guard's store is known to have no transactions, before it is opened."""
    kind = without_transactions(guard.source) if takes_tx(handler) else ""
    if kind:
        raise UsageError(
            f"the handler takes tx, and {kind} has no transactions of its own: take a store in your database, such as "
            "sqlite:///app.db, or leave tx out"
        )


def check_record(
    record: RecordColumn | None, handler: Callable[..., Any], missing_key: str, payload: object = None
) -> None:
    """Refuse a row as the record where there is no transaction for it, no key, or no place for the payload."""
    if record is None:
        return
    if not takes_tx(handler):
        raise UsageError(f"record={record!r} is a row in the transaction of the work: the handler has to take tx")
    if missing_key == "run":
        raise UsageError(f"record={record!r} has no row without a key, which missing_key='run' allows")
    check_compared(record, payload)


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
    """Return the signature; None if it is written in C, and has none."""
    try:
        return inspect.signature(handler)
    except ValueError:
        return None
