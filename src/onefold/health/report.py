"""The doctor's report: checks with a grade, a reason and a fix. Data, without judgement."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

from onefold.stores.base import Untold


class Grade(StrEnum):
    """The result of a check."""

    GREEN = "green"
    # It works, but with less margin than it should: slower, fuller, or a rare crash may lose records.
    YELLOW = "yellow"
    # Records get lost, or deliveries are refused, in normal operation.
    RED = "red"
    # The store did not report it.
    UNKNOWN = "unknown"


class Check(NamedTuple):
    """One thing that was checked. `fix` is empty if there is nothing to do."""

    name: str
    grade: Grade
    reason: str
    fix: str = ""


class Report(NamedTuple):
    """All checks of one store. A store that could not be reached or opened has one check, which says so."""

    checks: tuple[Check, ...]
    reached: bool = True

    def count(self, grade: Grade) -> int:
        return sum(check.grade is grade for check in self.checks)


def green(name: str, reason: str) -> Check:
    return Check(name, Grade.GREEN, reason)


def yellow(name: str, reason: str, fix: str) -> Check:
    return Check(name, Grade.YELLOW, reason, fix)


def red(name: str, reason: str, fix: str) -> Check:
    return Check(name, Grade.RED, reason, fix)


def unknown(name: str, reason: str, fix: str = "") -> Check:
    return Check(name, Grade.UNKNOWN, reason, fix)


def untold(name: str, *facts: Any, fix: str = "") -> Check | None:
    """Return the check for a fact that the server did not report; None if it reported all of these."""
    whys = [fact.why for fact in facts if isinstance(fact, Untold)]
    return unknown(name, whys[0], fix) if whys else None


def worst(checks: Iterable[Check]) -> Check:
    """Return the worst of several checks of one thing; among equals, the first."""
    order = (Grade.RED, Grade.YELLOW, Grade.UNKNOWN, Grade.GREEN)
    return min(checks, key=lambda check: order.index(check.grade))


def counted(number: int, what: str) -> str:
    """Format a number of things for people: 1 record, 2,000 records."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def in_bytes(count: float) -> str:
    """Format a size for people: "10.0 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
