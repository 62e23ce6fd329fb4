"""The page of edge cases: each row names tests that exist, and each number that a test cites has a row."""

from __future__ import annotations

import ast
import io
import re
import runpy
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
GENERATE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate.py"))
ROWS = list(GENERATE["ROW"].finditer((ROOT / "docs" / "edge-cases.md").read_text(encoding="utf-8")))
NUMBERS = [row["number"] for row in ROWS]

# "Row 41 of the edge cases", "rows 16, 17, 20 and 25", "Rows 1 to 13e".
CITED = re.compile(r"\b[Rr]ows? (\d+[a-z]?\b(?:(?:, | and | to )\d+[a-z]?\b)*)")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"row {row['number']}")
def test_every_row_names_a_test(row: re.Match[str]) -> None:
    assert GENERATE["NAMED"].findall(row["tests"]) != []


def test_rows_are_numbered_once_and_in_order() -> None:
    def order(number: str) -> tuple[int, str]:
        digits = number.rstrip("abcdefghijklmnopqrstuvwxyz")
        return int(digits), number[len(digits) :]

    assert sorted(set(NUMBERS), key=order) == NUMBERS
    assert NUMBERS[0] == "1"


def test_every_number_that_a_test_cites_has_a_row() -> None:
    cited = {
        number
        for path in (ROOT / "tests").rglob("*.py")
        for title in prose_of(path)
        for numbers in CITED.findall(title)
        for number in re.findall(r"\d+[a-z]?", numbers)
    }

    assert {"1", "13a", "58"} <= cited
    assert cited - set(NUMBERS) == set()


def prose_of(path: Path) -> Iterator[str]:
    """Yield the comments of a file and the docstring at its top; nothing of a file that cites no row anywhere."""
    source = path.read_text(encoding="utf-8")
    if not CITED.search(source):
        return
    yield ast.get_docstring(ast.parse(source)) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_a_test_that_does_not_exist_is_named_with_its_row() -> None:
    with pytest.raises(AssertionError, match=r"row 7 names tests that do not exist: test_of_nothing"):
        GENERATE["linked_tests"]("| 7 | situation | what happens | test_of_nothing |\n")


def test_a_name_becomes_a_link_to_where_the_test_is_and_a_stale_link_is_mended() -> None:
    name = "test_rows_are_numbered_once_and_in_order"
    title = "rows are numbered once and in order"
    here = Path(__file__).relative_to(ROOT).as_posix()
    moved, stale = (f"[{title}](../{path}#{name})" for path in (here, "tests/elsewhere/test_it.py"))
    cells = [f"| 7 | situation | what happens | {cell} |" for cell in (name, stale, moved)]

    assert {GENERATE["linked_tests"](cell) for cell in cells} == {cells[-1]}
