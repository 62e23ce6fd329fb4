"""The examples run, each with the one command that its first line names. They assert their own effects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))

# Far more than an example takes; it bounds how long a broken one hangs.
PATIENCE = 60.0


def test_there_are_examples() -> None:
    first = {"wallet", "card_charge", "held_email", "test_my_handler"}
    http = {"payments_api", "payments_client", "payments_django", "payments_flask"}
    assert {example.stem for example in EXAMPLES} >= first | http


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_the_example_runs_and_tells_its_story(example: Path, tmp_path: Path) -> None:
    tested = example.stem.startswith("test_")
    how = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if tested else ["-W", "error"]
    before = sorted(example.parent.rglob("*.db"))

    done = subprocess.run(
        [sys.executable, *how, str(example)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )

    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert len(done.stdout.splitlines()) >= (1 if tested else 3)
    assert list(tmp_path.iterdir()) == []
    assert sorted(example.parent.rglob("*.db")) == before


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_the_first_line_names_the_command(example: Path) -> None:
    first = example.read_text(encoding="utf-8").splitlines()[0]

    command = "pytest" if example.stem.startswith("test_") else "python"
    assert f"Run it: {command} examples/{example.name}" in first
