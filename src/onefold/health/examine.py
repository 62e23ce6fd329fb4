"""Examine one store: ask for facts, try the store out, and collect the judgements."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, Protocol, cast

from onefold.errors import OnefoldError
from onefold.health.report import Check, Report, green, red, unknown, untold, yellow
from onefold.health.trial import Trial, tried
from onefold.stores.base import Inspectable, Store
from onefold.stores.kinds import StoreKind, kind_of

Facts = Mapping[str, Any]

# A delivery makes two round trips. In one region they take a few milliseconds; longer means another continent, or an
# overloaded server.
ROUND_TRIP_SLOW: Final = 0.050

CONTRACT: Final = "Run onefold.testing.StoreContract on it"


class Judge(Protocol):
    """A module that judges the facts of one kind of store."""

    def judge(self, facts: Facts) -> list[Check]: ...
    def hindrance(self, facts: Facts) -> str | None:
        """Return why a store with these facts is not tried out; None if it is."""


def kind_of_facts(facts: Facts) -> StoreKind:
    """Return the kind of store that reports these facts, however it was reached."""
    return kind_of(str(facts.get("kind", "")))


def judge_of(facts: Facts) -> Judge | None:
    """Return the judge of these facts; None if there is none."""
    path = kind_of_facts(facts).health
    return cast("Judge", import_module(path)) if path else None


def examine(store: Store) -> Report:
    """Look at the store, and try it out. An error of the store becomes a check, and is not raised.

    It creates no tables, and leaves no record behind.
    """
    facts: Facts = {}
    silent = f"{type(store).__name__} reports nothing about itself"
    try:
        facts = store.facts() if isinstance(store, Inspectable) else {}
    except OnefoldError as error:
        return unreachable(str(error))
    except Exception as error:  # noqa: BLE001 - a third-party store may raise anything
        # Without its message, which may contain a password.
        silent = f"{type(store).__name__} raised {type(error).__name__} when it was asked"
    judge = judge_of(facts)
    checks = [unknown("server", silent)] if judge is None else judge.judge(facts)
    hindrance = None if judge is None else judge.hindrance(facts)
    if hindrance is not None:
        return Report((*checks, unknown("trial", f"not tried: {hindrance}"), clock(facts)))
    try:
        return Report((*checks, *trial(tried(store)), clock(facts)))
    except OnefoldError as error:
        return Report((*checks, red("trial", str(error), "Fix that first"), clock(facts)), reached=bool(facts))
    except Exception as error:  # noqa: BLE001 - a third-party store may raise anything
        # Without its message, which may contain a password.
        text = f"the store breaks its contract: it raised {type(error).__name__}, and not StoreUnavailable"
        return Report((*checks, red("trial", text, CONTRACT), clock(facts)))


def unreachable(text: str) -> Report:
    """Return the report of a store that could not be reached, or opened."""
    return Report((red("reach", text, "Fix that first: nothing else could be looked at"),), reached=False)


def trial(found: Trial) -> list[Check]:
    """Judge the result of a trial."""
    text = f"{found.round_trip * 1000:.1f} ms"
    if found.round_trip > ROUND_TRIP_SLOW:
        trip = yellow("round trip", f"{text}: a delivery makes two", "Bring the store nearer, or look at its load")
    else:
        trip = green("round trip", text)
    if found.broken:
        broken = red("trial", f"the store breaks its contract: {found.broken}", CONTRACT)
        return [broken, trip]
    return [green("trial", "claimed, refused to a second, finished, read and removed"), trip]


def clock(facts: Facts) -> Check:
    """Report how far the store's clock is from this machine's. It is not judged: leases use the store's own."""
    name, told = "clock", facts.get("clock")
    if refused := untold(name, told):
        return refused
    kind = kind_of_facts(facts)
    if kind.has_our_clock:
        return green(name, "this machine's own")
    if told is None:
        return unknown(name, "the store does not report its time")
    asked, theirs, answered = told
    ahead, margin = theirs - (asked + answered) / 2, (answered - asked) / 2
    margin = max(margin, kind.clock_margin)
    if abs(ahead) <= margin:
        return green(name, "the same as this machine's")
    which = "ahead of" if ahead > 0 else "behind"
    return green(
        name, f"{abs(ahead):.3g} s {which} this machine's, which does not matter: leases are by the store's own"
    )
