"""Check the stores of all guarded tasks when a worker starts, or before its first task."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from celery.signals import worker_init

from onefold import Guard, Policy, RecordColumn
from onefold._concurrency.generators import run
from onefold.health.first_use import first_use_of
from onefold.health.startup import StoreProblems

_guards: WeakSet[Guard] = WeakSet()


def checks(guard: Guard, record: RecordColumn | None) -> None:
    """Remember a guard whose stores are checked when a worker starts. A row of the caller's is in no table of ours."""
    if record is None:
        _guards.add(guard)


def check_first(guard: Guard, policy: Policy) -> None:
    """Check a guard's stores once. Raise `UsageError` if they cannot be used."""
    first_use = first_use_of(guard)
    if not first_use.is_over:
        run(first_use.check(guard, policy))


@worker_init.connect(weak=False)
def _check_all(**_: Any) -> None:
    """Check before any process is forked. A worker whose tasks would all be refused does not start."""
    for guard in list(_guards):
        try:
            check_first(guard, guard.policy)
        except StoreProblems as problem:
            # Celery logs any other exception of a receiver, and starts.
            raise SystemExit(f"onefold: {problem}") from problem
