"""The toy store of `docs/extending.md` is a store: the page's own five lines collect the whole contract."""

from __future__ import annotations

import sys
import types

import pytest
from typer.testing import CliRunner

from onefold import AsyncGuard, Guard, UsageError
from onefold._entry_points import installed
from onefold.cli.app import app
from onefold.stores import kinds
from onefold.testing import use
from tests.project.test_docs import blocks_of
from tests.support import PROJECT

PAGE = PROJECT / "docs" / "extending.md"

_module = types.ModuleType("extending")
for _line, _block in blocks_of(PAGE):
    exec(compile("\n" * (_line - 1) + _block, str(PAGE), "exec"), _module.__dict__)

TestToyStore = _module.TestToyStore
TestToyStoreQuickly = _module.TestToyStoreQuickly


@pytest.fixture
def toy_url(monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL by which the page's store is opened, as if its module were installed. It has no async store."""
    monkeypatch.setitem(sys.modules, "extending", _module)
    monkeypatch.setattr(_module, "open_store", lambda _url: _module.ToyStore(), raising=False)
    monkeypatch.setattr(kinds, "installed", lambda group: {**installed(group), "toy": "extending"})
    monkeypatch.setitem(sys.modules, "toy_health", types.ModuleType("toy_health"))
    return "toy://shelf"


def test_the_store_of_the_page_is_opened_by_a_url_and_needs_no_close(toy_url: str) -> None:
    with Guard(toy_url) as guard:
        assert guard.run("charge", "pay_1", lambda: 1).value == 1
        with use(guard, toy_url):
            assert guard.read("charge", "pay_1") is None


def test_a_command_says_what_the_store_of_the_page_cannot_do(toy_url: str) -> None:
    said = CliRunner().invoke(app, ["ls", "--store", toy_url])

    assert said.exit_code == 1
    assert "ToyStore cannot list its records" in said.stderr


def test_an_async_guard_says_that_there_is_no_async_store(toy_url: str) -> None:
    with pytest.raises(UsageError, match="this kind of store has no async form: use a Guard"):
        AsyncGuard(toy_url).store  # noqa: B018


def test_the_page_shows_a_test_file_of_five_lines() -> None:
    (block,) = [block for _, block in blocks_of(PAGE) if "class TestToyStore(" in block]

    assert len([line for line in block.splitlines() if line.strip()]) <= 5
