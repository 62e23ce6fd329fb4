"""Read the arguments of a job: its key, its scope, and whether they can be fingerprinted. Pure."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from onefold import UsageError
from onefold._checks import with_article
from onefold.keys import joined
from onefold.queues import keys

# Values that JSON cannot express, or msgspec cannot write.
UNWRITABLE: Final = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)


def has_key(
    run: Callable[..., Any] | None, key_of: keys.KeyOf, args: Any, kwargs: Any, headers: Mapping[str, Any] | None
) -> bool:
    """Return whether a worker will find a key in this message; `run` is None if it does not look at the arguments."""
    try:
        body = b"" if run is None else body_of(run, tuple(args or ()), dict(kwargs or {}))
    except TypeError:
        # The framework refuses a wrong call in its own words; where that is turned off, the worker does.
        return True
    # Only `position()` reads the id, and who asks for that has been warned.
    return key_of(keys.Message(body, headers or {}, position="the id of the job")) is not None


def body_of(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the arguments by name, as JSON, for keys that are read from them.

    A wrong call raises the usual TypeError.
    """
    arguments = _spread(run, bound(run, args, kwargs))
    try:
        return msgspec.json.encode(arguments)
    except UNWRITABLE:
        # An amount of more than 64 bits is no reason to miss the key next to it.
        return msgspec.json.encode({name: found for name, found in arguments.items() if _can_be_written(found)})


def _spread(run: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as the sender named them: those caught by `**options` are next to the others."""
    kinds = inspect.signature(run).parameters.values()
    rest = next((one.name for one in kinds if one.kind is one.VAR_KEYWORD), None)
    return arguments if rest is None else {**arguments, **arguments.get(rest, {})}


def _can_be_written(found: object) -> bool:
    try:
        msgspec.json.encode(found)
    except UNWRITABLE:
        return False
    return True


def bound(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, with defaults and without `tx`. A wrong call raises the usual TypeError."""
    whole = inspect.signature(run)
    whole = whole.replace(parameters=[one for name, one in whole.parameters.items() if name != "tx"])
    found = whole.bind(*args, **kwargs)
    found.apply_defaults()
    return found.arguments


def scope_of(
    chosen: Any, operation: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Return whose message this is; None if that is the guard's to say. Raise `UsageError` if it names nobody."""
    if chosen is None:
        return None
    if callable(chosen):
        found = [chosen(*args, **kwargs)]
    else:
        arguments = _spread(run, bound(run, args, kwargs))
        found = [arguments.get(name) for name in ((chosen,) if isinstance(chosen, str) else chosen)]
    mistake = ScopeUnusable if callable(chosen) else UsageError
    tenants = [_tenant_of(one, operation, mistake) for one in found]
    return tenants[0] if len(tenants) == 1 else joined({str(at): one for at, one in enumerate(tenants)})


class ScopeUnusable(UsageError):
    """A function that finds the tenant has returned what names nobody: the worker's mistake, for every message."""


def _tenant_of(found: object, operation: str, mistake: type[UsageError]) -> str:
    """Return the name of a tenant, as a guard takes it. The text of another object may differ in each process."""
    if isinstance(found, (int, uuid.UUID)) and not isinstance(found, bool):
        return str(found)
    if isinstance(found, str) and found.strip():
        return found
    if inspect.iscoroutine(found):
        found.close()
    is_missing = found is None or isinstance(found, str)
    what = repr(found) if is_missing else with_article(type(found).__name__)
    kind = UsageError if is_missing else mistake
    raise kind(f"{operation}: its scope is {what}: scope= has to name a tenant or caller. Nothing ran")


def are_to_blame(chosen: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether what `fingerprint=` chooses of the arguments cannot be fingerprinted, in whatever worker."""
    if chosen is None:
        return False
    if callable(chosen):
        return not keys.can_be_compared(chosen(*args, **kwargs))
    arguments = bound(run, args, kwargs)
    names = arguments if chosen == "*" else (chosen,) if isinstance(chosen, str) else chosen
    return not keys.can_be_compared([arguments[name] for name in names])
