"""The page of the architecture: every path that it names exists, and its picture shows the imports."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
GENERATE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate.py"))

# Where a path of the page begins: most are relative to the package.
STARTS = (ROOT / "src" / "onefold", ROOT / "src" / "onefold" / "_delivery", ROOT)


def test_every_path_that_the_page_names_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./-]+(?:\.py|\.md|\.toml|/))`", text))

    missing = sorted(path for path in named if not any((start / path).exists() for start in STARTS))

    assert len(named) > 20
    assert missing == []


def test_the_picture_leaves_out_what_follows_and_dots_the_weaker_of_two_ways() -> None:
    imports = Counter({("cli", "guards"): 3, ("guards", "rules"): 9, ("cli", "rules"): 5, ("rules", "guards"): 1})

    arrows, against = GENERATE["drawn"](imports)

    assert arrows == [("cli", "guards"), ("guards", "rules")]
    assert against == [("rules", "guards")]


def test_every_package_of_the_picture_is_reached_by_an_arrow_or_begins_one() -> None:
    picture = GENERATE["rooms"]()

    unlinked = [
        name
        for name in GENERATE["packages"]()
        if GENERATE["room_of"](name) == name
        and not re.search(rf"\b{GENERATE['_id'](name)} -|> {GENERATE['_id'](name)}$", picture, re.MULTILINE)
    ]

    assert unlinked == []
