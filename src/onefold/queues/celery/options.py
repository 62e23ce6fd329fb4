"""Check the options of a Celery task, under its name, before a message comes. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from celery.exceptions import Ignore, Reject, Retry

from onefold import Guard, Policy, PolicyFields, UsageError
from onefold._checks import did_you_mean
from onefold.queues import keys
from onefold.queues._shared.options import check, check_options, check_record, check_transactions, policy_of, takes_tx
from onefold.queues.keys import KeyOf

# The options of `guarded` in addition to Celery's.
OPTIONS: Final = ("key", "missing_key", "require_key", "policy", "fingerprint", "scope", "record")

# And those of a policy, as attributes of a base class or as options of `guarded`.
FIELDS: Final = tuple(PolicyFields.__optional_keys__)

# A task has few arguments: one that is only slightly similar is another one.
ALIKE: Final = 0.8


def check_class(kind: Any) -> None:
    """Check everything known when a base class is defined: a guard and an operation may be set later."""
    given = {name: getattr(kind, name, None) for name in ("guard", "operation", *OPTIONS)}
    given |= {name: getattr(kind, name) for name in FIELDS if hasattr(kind, name)}
    with _named(kind.name or kind.__qualname__):
        _check_given(given)


def policy_for(guard: Guard, policy: Policy | None, base: Any, options: Mapping[str, Any] | None = None) -> Policy:
    """Return the policy of a task: whole, or by fields of its base class and of its own options."""
    given = {name: getattr(base, name) for name in FIELDS if hasattr(base, name)}
    given |= {name: value for name, value in (options or {}).items() if name in FIELDS}
    return policy_of(guard, Guard, policy, given, policy_for)


def prepared(guard: Any, operation: str, run: Callable[..., Any], base: Any, options: Mapping[str, Any]) -> KeyOf:
    """Return how to find the key of this task's messages; refuse options that would fail for every message."""
    given = {name: getattr(base, name) for name in OPTIONS} | dict(options)
    with _named(str(given.get("name") or getattr(base, "name", None) or getattr(run, "__name__", base.__qualname__))):
        if guard is None:
            raise UsageError("it has no guard: set `guard = Guard(...)` in its base class, or pass guard=")
        if operation in (None, ""):
            raise UsageError("it has no operation: pass operation='send-welcome', the name that its keys belong to")
        _check_given(given)
        policy = policy_for(guard, given["policy"], base, options)
        check(guard, Guard, operation, run, missing_key=given["missing_key"], policy=policy)
        check_transactions(guard, run)
        _check_ends(policy)
        _check_names("fingerprint", given["fingerprint"], run)
        _check_names("scope", given["scope"], run)
        for option in given:
            # Celery accepts any option.
            if (
                option not in FIELDS
                and not hasattr(base, option)
                and (meant := did_you_mean(option, (*OPTIONS, *FIELDS), ALIKE))
            ):
                raise UsageError(f"unknown option {option!r}{meant}")
        check_record(given["record"], run, given["missing_key"])
        # A guard from a file refuses an operation that is not in it, and a row what it has no place for.
        if takes_tx(run):
            guard.transactional(
                operation, key="key", fingerprint=given["fingerprint"], record=given["record"], policy=policy
            )
        else:
            guard.idempotent(operation, key="key")
        return _key_of(given["key"], run)


@contextmanager
def _named(task: str) -> Iterator[None]:
    """Add the task's name to errors: Celery creates a task when its app is first used, far from the wrong line."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"the task {task}: {error}") from error


def _check_given(given: Mapping[str, Any]) -> None:
    guard = given.get("guard")
    if guard is not None and not isinstance(guard, Guard):
        raise UsageError(f"guard= is {type(guard).__name__}, but a Celery worker needs a Guard")
    check_options(given["missing_key"], given["policy"])
    if not isinstance(given["require_key"], bool):
        raise UsageError(f"require_key={given['require_key']!r:.60} has to be True or False")
    for name in given.keys() & FIELDS:
        Policy().replace(**{name: given[name]})
    if not isinstance(given["key"], str):
        keys.checked(given["key"])
    for option, several in (("fingerprint", ("amount", "currency")), ("scope", ("tenant", "region"))):
        chosen = given[option]
        named = isinstance(chosen, (list, tuple, str)) and all(isinstance(one, str) for one in chosen)
        if chosen is not None and not named and not callable(chosen):
            raise UsageError(
                f"{option}={chosen!r:.60} has to name arguments ({several[0]!r}, or {several!r}), to be a function of "
                "them, or None"
            )


def _check_ends(policy: Policy) -> None:
    """Refuse a policy that treats Celery's own exceptions as an outcome: a task that asks for a retry is not done."""
    kinds = (*policy.final_errors, *(() if policy.after_crash == "rerun" else policy.ambiguous_errors))
    for kind in kinds:
        if isinstance(kind, type) and any(issubclass(word, kind) for word in (Retry, Ignore, Reject)):
            raise UsageError(
                f"the policy treats every {kind.__name__} as final, and with it Celery's Retry, Ignore and Reject: "
                "name the exceptions that are meant in final_errors= and ambiguous_errors="
            )


def _check_names(option: str, given: Any, run: Callable[..., Any]) -> None:
    names = (given,) if isinstance(given, str) else given
    parameters = inspect.signature(run).parameters
    for name in names if isinstance(names, (list, tuple)) else ():
        if name not in parameters and name != "*":
            raise UsageError(
                f"{option}={name!r}: the task has no argument {name!r}{did_you_mean(name, parameters, ALIKE)}"
            )


def _key_of(key: object, run: Callable[..., Any]) -> KeyOf:
    if not isinstance(key, str):
        return keys.checked(key)
    name, parameters = key.partition(".")[0], inspect.signature(run).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if name and name not in parameters and not takes_any:
        raise UsageError(f"key={key!r}: the task has no argument {name!r}{did_you_mean(name, parameters, ALIKE)}")
    return keys.field(key)
