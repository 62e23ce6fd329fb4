"""The page of the founding documents: each point names tests that exist, or says plainly that it is not there yet."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.project.test_docs_edge_cases import GENERATE
from tests.support import PROJECT

PAGE: Final = (PROJECT / "docs" / "seeds.md").read_text(encoding="utf-8")
ROWS: Final = list(GENERATE["ROW"].finditer(PAGE))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"row {row['number']}")
def test_every_point_names_a_test_or_says_that_it_is_not_there_yet(row: re.Match[str]) -> None:
    named, cell = GENERATE["NAMED"].findall(row["tests"]), row["tests"].strip()

    assert bool(named) != cell.startswith("**not yet**: ")
    assert len(cell) > len("**not yet**: "), "it says what is missing"


def test_points_are_numbered_in_order() -> None:
    assert [int(row["number"]) for row in ROWS] == list(range(1, len(ROWS) + 1))
    # Lines of a table that the pattern does not fit would be left out silently.
    assert len(ROWS) == len(re.findall(r"^\| \d", PAGE, flags=re.MULTILINE))


def test_each_document_has_its_module_of_tests_and_each_module_its_document() -> None:
    named = set(re.findall(r"\(\.\./tests/seeds/(test_\w+\.py)\)", PAGE))

    assert named == {path.name for path in (PROJECT / "tests" / "seeds").glob("test_*.py")}
    assert re.findall(r"^\| ([A-E]) \| (?:an essay|the |BabelQueue)", PAGE, flags=re.MULTILINE)[:5] == list("ABCDE")


def test_every_test_of_the_seeds_is_a_point_of_the_page() -> None:
    cited = {name for row in ROWS for name in GENERATE["NAMED"].findall(row["tests"])}
    written = {
        name
        for path in (PROJECT / "tests" / "seeds").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }

    assert written - cited == set()
