"""The public types, checked by mypy and pyright, both strict: what `tests/typing` expects to hold, and to be an error.

An expected error is marked by `# type: ignore[…]`. If it does not come, the comment is an error in both checkers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

from tests.support import PROJECT

EXPECTATIONS = sorted((PROJECT / "tests" / "typing").glob("[!_]*.py"))
EXAMPLES = sorted((PROJECT / "examples").glob("*.py"))

# mypy as a user runs it, without this project's settings; frameworks without types are imported as Any, and Dramatiq is
# typed in part.
USERS_CONFIG = """[mypy]
untyped_calls_exclude = dramatiq
[mypy-aiokafka.*,apscheduler.*,django.*]
ignore_missing_imports = True
"""


@pytest.fixture(scope="module")
def by_mypy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each file, in one run."""
    cache = PROJECT / ".mypy_cache" / "typing"
    options = ["--strict", "--no-error-summary", "--hide-error-context", "--cache-dir", str(cache)]
    config = tmp_path_factory.mktemp("mypy") / "mypy.ini"
    config.write_text(USERS_CONFIG)

    # mypy raises it for the whole process, and other tests count on it.
    limit = sys.getrecursionlimit()
    output, problems, _ = api.run([*options, "--config-file", str(config), *map(str, [*EXPECTATIONS, *EXAMPLES])])
    sys.setrecursionlimit(limit)

    assert not problems
    lines = [line for line in output.splitlines() if line]
    return {path.name: [line for line in lines if f"{path.name}:" in line] for path in [*EXPECTATIONS, *EXAMPLES]}


@pytest.fixture(scope="module")
def by_pyright() -> dict[str, list[str]]:
    """What pyright says of each file, in one run with the settings in pyproject.toml."""
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]

    output = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False).stdout

    report = json.loads(output)
    assert report["summary"]["filesAnalyzed"] >= len(EXPECTATIONS) + len(EXAMPLES)
    said: dict[str, list[str]] = {path.name: [] for path in [*EXPECTATIONS, *EXAMPLES]}
    for one in report["generalDiagnostics"]:
        path, line = Path(one["file"]), one["range"]["start"]["line"] + 1
        # Without the list of overloads: that of boto3 has a thousand lines.
        said.setdefault(path.name, []).append(f"{path.name}:{line}: {one['message'][:500]} [{one.get('rule')}]")
    return said


@pytest.fixture(params=["mypy", pytest.param("pyright", marks=pytest.mark.more)])
def said(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """What a checker says; `make types` runs pyright in the same way, for every change."""
    found: dict[str, list[str]] = request.getfixturevalue(f"by_{request.param}")
    return found


@pytest.mark.parametrize("path", EXPECTATIONS, ids=lambda path: path.stem)
def test_types_are_what_users_expect(said: dict[str, list[str]], path: Path) -> None:
    assert "\n".join(said[path.name]) == ""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_both_checkers_accept_the_examples(said: dict[str, list[str]], path: Path) -> None:
    assert "\n".join(said[path.name]) == ""


@pytest.mark.parametrize("path", EXPECTATIONS, ids=lambda path: path.stem)
def test_each_file_states_types_and_errors(path: Path) -> None:
    text = path.read_text()

    assert len(re.findall(r"assert_type\(", text)) >= 8
    assert len(re.findall(r"# type: ignore\[", text)) >= 8
