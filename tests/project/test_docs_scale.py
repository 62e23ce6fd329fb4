"""The page about scale: what it says that `onefold size` prints is what it prints."""

from __future__ import annotations

from pathlib import Path

from tests.project.pages import fits, follow
from tests.project.test_docs_tutorial import ENVIRONMENT
from tests.support import PROJECT


def test_the_sums_of_the_page_are_those_of_the_command(tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "scale.md").read_text(encoding="utf-8")

    printed = [*follow(page, tmp_path, ENVIRONMENT)]

    assert len(printed) == 2
    assert [one for one in printed if not fits(one)] == []
