"""The first minute of the README: a newcomer copies its commands into an empty folder, and sees what it shows.

`make wheel` does the same with the wheel, in an environment of its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.project.pages import Printed, fits, follow
from tests.project.test_docs_tutorial import ENVIRONMENT
from tests.support import PROJECT

README: Final = (PROJECT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[Printed]:
    folder = tmp_path_factory.mktemp("readme")
    told = list(follow(README, folder, ENVIRONMENT))
    assert (folder / "stderr").read_text(encoding="utf-8") == ""
    return told


def test_the_readme_prints_what_it_says(printed: list[Printed]) -> None:
    shown = [one for one in printed if one.expected]

    assert [one for one in shown if not fits(one)] == []
    assert len(shown) == 2


def test_the_second_run_charges_nothing(printed: list[Printed]) -> None:
    first, second, *_ = (one.actual for one in printed)

    assert (first.count("charging"), second.count("charging")) == (1, 0)
    assert (first.count("(replayed)"), second.count("(replayed)")) == (1, 2)


def test_the_demo_holds(printed: list[Printed]) -> None:
    assert "with the guard every effect happened once" in printed[-1].actual


def test_an_installation_comes_first_and_a_duplicate_three_commands_later() -> None:
    first = next(re.finditer(r"^```sh\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE))[1]
    commands = re.sub(r"<<'END'\n.*?^END$", "<<END", first, flags=re.DOTALL | re.MULTILINE).split("\n")

    assert [line for line in commands if line] == ["pip install onefold", "cat > charge.py <<END", "python charge.py"]


def test_a_page_that_prints_something_else_is_found(tmp_path: Path) -> None:
    page = "```sh\necho one two\n```\n\n```text\none …\n```\n\n```sh\necho three\n```\n\n```text\nfour\n```\n"

    assert [fits(one) for one in follow(page, tmp_path, {})] == [True, False]


def test_the_list_of_pages_has_every_page() -> None:
    pages = {f"docs/{path.relative_to(PROJECT / 'docs').as_posix()}" for path in (PROJECT / "docs").rglob("*.md")}

    assert pages - set(re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)) == set()
