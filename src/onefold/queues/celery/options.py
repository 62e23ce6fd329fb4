"""Check the options of a Celery task, under its name, before a message comes. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from celery.exceptions import Ignore, Reject, Retry

from onefold import Guard, Policy, UsageError
from onefold._checks import did_you_mean
from onefold.durations import seconds
from onefold.queues import keys
from onefold.queues._shared.options import check, check_options, check_transactions, takes_tx
from onefold.queues.keys import KeyOf

# The options of `guarded` in addition to Celery's.
OPTIONS: Final = ("key", "missing_key", "wait", "policy", "fingerprint")

# A task has few arguments: one that is only a little alike is another one.
ALIKE: Final = 0.8


def check_class(kind: Any) -> None:
    """Check what can be checked when a base class is defined: a guard and an operation may still come."""
    given = {name: getattr(kind, name, None) for name in ("guard", "operation", *OPTIONS)}
    with _named(kind.name or kind.__qualname__):
        _check_given(given)


def prepared(guard: Any, operation: str, run: Callable[..., Any], base: Any, options: Mapping[str, Any]) -> KeyOf:
    """Return how to find the key of this task's messages; refuse options that would fail for every message."""
    given = {name: getattr(base, name) for name in OPTIONS} | dict(options)
    with _named(str(given.get("name") or getattr(base, "name", None) or getattr(run, "__name__", base.__qualname__))):
        if guard is None:
            raise UsageError("it has no guard: set `guard = Guard(...)` in its base class, or pass guard=")
        if operation in (None, ""):
            raise UsageError("it has no operation: pass operation='send-welcome', the name that its keys belong to")
        _check_given(given)
        check(guard, Guard, operation, run, missing_key=given["missing_key"], policy=given["policy"])
        check_transactions(guard, run)
        _check_ends(given["policy"] or guard.policy)
        _check_names(given["fingerprint"], run)
        for option in given:
            # Celery accepts any option.
            if not hasattr(base, option) and (meant := did_you_mean(option, OPTIONS, ALIKE)):
                raise UsageError(f"unknown option {option!r}{meant}")
        # A guard from a file refuses an operation that is not in it.
        (guard.transactional if takes_tx(run) else guard.idempotent)(operation, key="key")
        return _key_of(given["key"], run)


@contextmanager
def _named(task: str) -> Iterator[None]:
    """Add the task's name to errors: Celery creates a task when its app is first used, far from the wrong line."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"the task {task}: {error}") from error


def _check_given(given: Mapping[str, Any]) -> None:
    guard, fingerprint = given.get("guard"), given["fingerprint"]
    if guard is not None and not isinstance(guard, Guard):
        raise UsageError(f"guard= is {type(guard).__name__}, and a worker of Celery takes Guard")
    check_options(given["missing_key"], given["policy"])
    if not isinstance(given["key"], str):
        keys.checked(given["key"])
    seconds(given["wait"], "wait")
    named = all(isinstance(one, str) for one in fingerprint) if isinstance(fingerprint, (list, tuple, str)) else False
    if fingerprint is not None and not named and not callable(fingerprint):
        raise UsageError(
            f"fingerprint={fingerprint!r:.60} has to name arguments ('amount', or ('amount', 'currency')), to be a "
            "function of them, or None"
        )


def _check_ends(policy: Policy) -> None:
    """Refuse a policy that treats Celery's own exceptions as an outcome: a task that asks for a retry is not done."""
    kinds = (*policy.remember, *(() if policy.after_crash == "rerun" else policy.unknown))
    for kind in kinds:
        if isinstance(kind, type) and any(issubclass(word, kind) for word in (Retry, Ignore, Reject)):
            raise UsageError(
                f"the policy takes every {kind.__name__} for an end, and with it Celery's Retry, Ignore and Reject: "
                "name the exceptions that are meant in remember= and unknown="
            )


def _check_names(fingerprint: Any, run: Callable[..., Any]) -> None:
    names = (fingerprint,) if isinstance(fingerprint, str) else fingerprint
    parameters = inspect.signature(run).parameters
    for name in names if isinstance(names, (list, tuple)) else ():
        if name not in parameters and name != "*":
            raise UsageError(
                f"fingerprint={name!r}: the task has no argument {name!r}{did_you_mean(name, parameters, ALIKE)}"
            )


def _key_of(key: object, run: Callable[..., Any]) -> KeyOf:
    if not isinstance(key, str):
        return keys.checked(key)
    name, parameters = key.partition(".")[0], inspect.signature(run).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if name and name not in parameters and not takes_any:
        raise UsageError(f"key={key!r}: the task has no argument {name!r}{did_you_mean(name, parameters, ALIKE)}")
    return keys.field(key)
