"""The flow charts: every way leads to a choice, every choice is there, and no arrow to a node that nobody has drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.project.test_docs import PAGES
from tests.support import PROJECT, values_of

CHOOSING: Final = (PROJECT / "docs" / "choosing.md").read_text(encoding="utf-8")
CHART: Final = re.compile(r"^```mermaid\nflowchart TD\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
# A node where it is drawn, by its shape; and an arrow between two of them.
DRAWN: Final = re.compile(r"\b(\w+)(?:\{\"|\(\[\"|\[\")")
ARROW: Final = re.compile(r"^ *(\w+).*? -\.?->(?:\|\"[^\"]*\"\|)? (\w+)", flags=re.MULTILINE)
CHOICE: Final = re.compile(r"(\w+)\(\[\"([^\"]*)\"\]\)")


def charts(page: Path) -> list[str]:
    return CHART.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [page for page in PAGES if charts(page)], ids=lambda page: page.name)
def test_every_arrow_joins_two_nodes_that_are_drawn(page: Path) -> None:
    for chart in charts(page):
        arrows = [end for arrow in ARROW.findall(chart) for end in arrow]

        assert arrows
        assert set(arrows) - set(DRAWN.findall(chart)) == set()


def test_every_way_of_the_chart_ends_in_a_choice() -> None:
    for chart in CHART.findall(CHOOSING):
        arrows = ARROW.findall(chart)
        begins, ends = {source for source, _ in arrows}, {target for _, target in arrows}

        assert ends - begins == {name for name, _ in CHOICE.findall(chart)}
        assert len(begins - ends) == 1, "it has one beginning"


def test_every_mode_and_every_after_crash_is_a_choice() -> None:
    choices = " ".join(words for _, words in CHOICE.findall(CHART.findall(CHOOSING)[0]))
    wanted = {*values_of("mode"), *values_of("after_crash"), "probe", "transactional", "within"}

    assert {word for word in wanted if not re.search(rf"\b{word}\b", choices)} == set()


def test_every_store_is_in_the_table() -> None:
    pages = {f"stores/{path.name}" for path in (PROJECT / "docs" / "stores").glob("*.md")}

    assert pages - set(re.findall(r"\]\(([^)#]+)", CHOOSING)) == set()


def test_a_mail_that_can_go_out_twice_is_not_concealed() -> None:
    for name in ("docs/choosing.md", "docs/queues/celery.md", "examples/celery_email.py", "README.md"):
        words = " ".join((PROJECT / name).read_text(encoding="utf-8").replace("*", "").split())

        assert re.search(r"(?i)rerun[^.]*\bmail|mail[^.]*\brerun", words), name
        assert re.search(r"(?i)sends it (again|twice)|sends a second mail|can go out twice", words), name
