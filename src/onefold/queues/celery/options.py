"""Check the options of a Celery task, under its name, before a message comes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from celery.exceptions import Ignore, Reject, Retry

from onefold import Guard, Policy, UsageError
from onefold._checks import did_you_mean
from onefold.queues._shared.jobs.options import ALIKE, FIELDS, check_ends, check_given, check_names, key_of, named
from onefold.queues._shared.options import check, check_record, check_transactions, policy_of, takes_tx
from onefold.queues.keys import KeyOf

# The options of `guarded` in addition to Celery's.
OPTIONS: Final = ("key", "missing_key", "require_key", "policy", "fingerprint", "scope", "record")


def check_class(kind: Any) -> None:
    """Check everything known when a base class is defined: a guard and an operation may be set later."""
    given = {name: getattr(kind, name, None) for name in ("guard", "operation", *OPTIONS)}
    given |= {name: getattr(kind, name) for name in FIELDS if hasattr(kind, name)}
    with named("task", kind.name or kind.__qualname__):
        _check_given(given)


def policy_for(guard: Guard, policy: Policy | None, base: Any, options: Mapping[str, Any] | None = None) -> Policy:
    """Return the policy of a task: whole, or by fields of its base class and of its own options."""
    given = {name: getattr(base, name) for name in FIELDS if hasattr(base, name)}
    given |= {name: value for name, value in (options or {}).items() if name in FIELDS}
    return policy_of(guard, Guard, policy, given, policy_for)


def prepared(guard: Any, operation: str, run: Callable[..., Any], base: Any, options: Mapping[str, Any]) -> KeyOf:
    """Return how to find the key of this task's messages; refuse options that would fail for every message."""
    given = {name: getattr(base, name) for name in OPTIONS} | dict(options)
    with named(
        "task", str(given.get("name") or getattr(base, "name", None) or getattr(run, "__name__", base.__qualname__))
    ):
        if guard is None:
            raise UsageError("it has no guard: set `guard = Guard(...)` in its base class, or pass guard=")
        if operation in (None, ""):
            raise UsageError("it has no operation: pass operation='send-welcome', the name that its keys belong to")
        _check_given(given)
        policy = policy_for(guard, given["policy"], base, options)
        check(guard, Guard, operation, run, missing_key=given["missing_key"], policy=policy)
        check_transactions(guard, run)
        check_ends(policy, (Retry, Ignore, Reject), "Celery's Retry, Ignore and Reject")
        check_names("task", "fingerprint", given["fingerprint"], run)
        check_names("task", "scope", given["scope"], run)
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
        return key_of("task", given["key"], run)


def _check_given(given: Mapping[str, Any]) -> None:
    guard = given.get("guard")
    if guard is not None and not isinstance(guard, Guard):
        raise UsageError(f"guard= is {type(guard).__name__}, but a Celery worker needs a Guard")
    check_given(given)
