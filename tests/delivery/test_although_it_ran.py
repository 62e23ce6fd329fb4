"""Errors of a store say that nothing ran. Where something has run, or is running, the sentence is left out."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from onefold.errors import although_it_ran
from tests.support import PROJECT


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts of messages below a node, their parts joined; docstrings and comments are none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in child.values)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        elif not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
            yield from texts(child)


def texts_that_nothing_ran() -> list[str]:
    sources = sorted((PROJECT / "src" / "onefold" / "stores").rglob("*.py"))
    found = [text for source in sources for text in texts(ast.parse(source.read_text()))]
    return [text for text in found if "nothing ran" in text.lower()]


def test_no_text_of_a_store_says_that_nothing_ran_although_it_ran() -> None:
    found = texts_that_nothing_ran()
    assert len(found) > 20

    for text in found:
        mended = although_it_ran(text)

        assert "nothing ran" not in mended.lower(), text
        assert "  " not in mended, text
        assert len(text) - len(mended) <= len(" Nothing ran."), text


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("the pool is empty. Nothing ran. Enlarge it", "the pool is empty. Enlarge it"),
        ("the pool is empty. Nothing ran", "the pool is empty"),
        ("the pool is empty. Nothing ran.", "the pool is empty."),
        ("Nothing ran. Enlarge the pool", "Enlarge the pool"),
        ("the pool is empty", "the pool is empty"),
    ],
)
def test_the_rest_of_the_text_stays(text: str, mended: str) -> None:
    assert although_it_ran(text) == mended
