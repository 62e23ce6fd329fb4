"""The pages about Dramatiq, RQ, taskiq, FastStream and Temporal say what the code does.

That their blocks run is tested with all other pages.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from onefold.queues import dramatiq, faststream, rq, taskiq, temporal
from onefold.queues._shared.dead_letters import DEAD_LETTER_DELAY
from onefold.queues._shared.options import WAIT
from onefold.queues._shared.verdict import HELD_MAX
from onefold.queues.faststream import messages as faststream_messages
from onefold.queues.rq import jobs as rq_jobs
from onefold.queues.taskiq import messages as taskiq_messages
from tests.support import PROJECT

PAGES: dict[str, Any] = {"dramatiq": dramatiq, "rq": rq, "taskiq": taskiq, "temporal": temporal}
DEFAULTS = {
    "missing_key": '`"never"`',
    "wait": f"{WAIT:g} s",
    "scope": "the guard's",
    "record": "`None`",
    "fingerprint": "all arguments",
}


def text_of(page: str) -> str:
    return (PROJECT / "docs" / "queues" / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_the_page_names_every_option_and_its_default(page: str) -> None:
    theirs = {"guard", "operation", "policy", "fields", "options", "labels", "broker", "task_name"}
    names = {*inspect.signature(PAGES[page].guarded).parameters} - theirs

    rows = {name: f"| `{name}` | {default} |" for name, default in DEFAULTS.items()} | {"key": "| `key` | "}
    if page in ("dramatiq", "taskiq"):
        rows["require_key"] = "| `require_key` | `True` |"
    if page == "temporal":
        rows["heartbeat"] = "| `heartbeat` | `False` |"
    # The fields of a policy have a page of their own, but for the one with another default.
    assert names | {"wait"} == {*rows}
    assert "| `policy`, `keep`, `after_crash`, … | the guard's |" in text_of(page)
    assert [row for row in rows.values() if row not in text_of(page)] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_page_names_the_public_names_and_the_bounds(page: str) -> None:
    text = text_of(page)

    assert [name for name in PAGES[page].__all__ if name not in text] == []
    assert f"{HELD_MAX:,} times" in text
    bounds = {"rq": rq_jobs.PAUSE_MAX, "taskiq": taskiq_messages.PAUSE_MAX}
    assert page not in bounds or f"for {bounds[page]:g} s at most" in text


def test_the_page_about_faststream_names_every_option_and_each_bound() -> None:
    text = text_of("faststream")
    names = {*inspect.signature(faststream.guarded).parameters} - {"guard", "operation", "policy", "fields"}

    assert [name for name in (*names, "wait") if f"| `{name}` |" not in text] == []
    assert [name for name in faststream.__all__ if f"`{name}`" not in text] == []
    for way in (faststream_messages.RABBITMQ, faststream_messages.KAFKA):
        assert f"after {way.in_place / 60:g} min" in text
        assert f"every minute for {way.in_place / 60:g} min" in text
    assert f"{HELD_MAX:,} times" in text
    assert f"tried again after {DEAD_LETTER_DELAY:g} s" in text
