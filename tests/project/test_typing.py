"""The public types, checked by mypy --strict: what `tests/typing` expects to hold, and to be an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

from tests.support import PROJECT

EXAMPLES = sorted((PROJECT / "tests" / "typing").glob("[!_]*.py"))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each file, in one run; an expected error that does not come is an unused ignore."""
    cache = PROJECT / ".mypy_cache" / "typing"
    options = ["--strict", "--no-error-summary", "--hide-error-context", "--cache-dir", str(cache)]
    config = tmp_path_factory.mktemp("mypy") / "mypy.ini"
    config.write_text("[mypy]\n")
    output, problems, _ = api.run([*options, "--config-file", str(config), *map(str, EXAMPLES)])
    assert not problems
    lines = [line for line in output.splitlines() if line]
    return {path.name: [line for line in lines if f"{path.name}:" in line] for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_types_are_what_users_expect(said: dict[str, list[str]], path: Path) -> None:
    assert "\n".join(said[path.name]) == ""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_states_types_and_errors(path: Path) -> None:
    text = path.read_text()

    assert len(re.findall(r"assert_type\(", text)) >= 8
    assert len(re.findall(r"# type: ignore\[", text)) >= 8
