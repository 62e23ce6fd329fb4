"""The toy store of `docs/extending.md` is a store: the page's own five lines collect the whole contract."""

from __future__ import annotations

import types

from tests.project.test_docs import blocks_of
from tests.support import PROJECT

PAGE = PROJECT / "docs" / "extending.md"

_module = types.ModuleType("extending")
for _line, _block in blocks_of(PAGE):
    exec(compile("\n" * (_line - 1) + _block, str(PAGE), "exec"), _module.__dict__)

TestToyStore = _module.TestToyStore
TestToyStoreQuickly = _module.TestToyStoreQuickly


def test_the_page_shows_a_test_file_of_five_lines() -> None:
    (block,) = [block for _, block in blocks_of(PAGE) if "class TestToyStore(" in block]

    assert len([line for line in block.splitlines() if line.strip()]) <= 5
