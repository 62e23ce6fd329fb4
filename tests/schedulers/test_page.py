"""The page about schedulers says what the code does. That its blocks run is tested with all other pages."""

from __future__ import annotations

import inspect

from onefold import AsyncGuard, Guard, schedulers
from onefold._schedule import planned, slots
from onefold.schedulers import apscheduler, celery_beat
from tests.support import PROJECT

PAGE = (PROJECT / "docs" / "schedulers.md").read_text(encoding="utf-8")


def test_the_page_names_every_option() -> None:
    own = {"every", "anchor", "early", "scope", "fingerprint", "returns", "policy"}

    for kind in (Guard, AsyncGuard):
        assert set(inspect.signature(kind.scheduled).parameters) == own | {"self", "operation", "fields"}
    assert [name for name in (*own, "keep", "wait") if f"`{name}`" not in PAGE] == []


def test_the_page_names_the_public_names() -> None:
    shown = {*schedulers.__all__, *apscheduler.__all__, *celery_beat.__all__}

    assert [name for name in shown if name not in PAGE] == []


def test_the_page_has_the_bounds() -> None:
    assert f"{slots.EVERY_MIN:g} s or more" in PAGE
    assert slots.EARLY_PART == 0.1
    assert f"a tenth of `every`, {slots.EARLY_MAX:g} s at most" in PAGE
    assert f"{planned.KEEP_INTERVALS} × `every` at least" in PAGE
    assert f"`every`, {planned.WAIT_MAX / 3600:g} h at most" in PAGE
    assert f"older than {slots.LATE_PART * 100:.0f} % of `keep`" in PAGE
    assert f"{slots.SLOTS_MAX:,} times at most" in PAGE
    assert f"Monday, {slots.ANCHOR:%Y-%m-%d %H:%M} UTC" in PAGE
    assert slots.ANCHOR.isoweekday() == 1
