"""What the tests of the doctor share: the checks of a store by name, and what a trial has left behind."""

from __future__ import annotations

from typing import Any

from onefold import Guard
from onefold.health import Check, Grade, Report, examine
from onefold.health.trial import OPERATION
from onefold.stores.base import Query

GREEN, YELLOW, RED, UNKNOWN = Grade.GREEN, Grade.YELLOW, Grade.RED, Grade.UNKNOWN


def report_of(source: Any) -> Report:
    with Guard(source) as guard:
        return examine(guard.store)


def checks_of(source: Any) -> dict[str, Check]:
    """The checks of the store behind this URL, engine or client, by their names."""
    checks = report_of(source).checks
    assert len({check.name for check in checks}) == len(checks), "two checks have one name"
    return {check.name: check for check in checks}


def grades_of(source: Any) -> dict[str, Grade]:
    return {name: check.grade for name, check in checks_of(source).items()}


def use(source: Any) -> None:
    """One delivery, so that the tables are there."""
    with Guard(source) as guard:
        guard.run("charge", "pay_7f3a", lambda: 4200)


def left_behind(source: Any) -> int:
    """How many records of a trial are still there."""
    with Guard(source) as guard:
        return len(guard.store.browse(Query(operation=OPERATION), 10))
