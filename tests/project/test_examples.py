"""The examples run, each with the one command that its first line names. They assert their own effects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PROJECT, WITHOUT_PLUGINS

EXAMPLES = sorted((PROJECT / "examples").glob("*.py"))

# Far more than an example takes; it bounds how long a broken one hangs.
PATIENCE = 300.0

# The examples that need a server, and the variable by which they are told of ours.
SERVERS = {
    "rabbitmq_worker": ("ONEFOLD_RABBITMQ_URL", "rabbitmq_url"),
    # It has a broker of its own, whose groups wait for three seconds before they begin.
    "kafka_wallet": ("ONEFOLD_KAFKA_URL", "kafka_url"),
}


def test_there_are_examples() -> None:
    first = {"wallet", "card_charge", "held_email", "test_my_handler"}
    http = {"payments_api", "payments_client", "payments_django", "payments_flask"}
    queues = {"charge_once", "celery_email", "kafka_wallet", "rabbitmq_worker"}
    assert {example.stem for example in EXAMPLES} >= first | http | queues


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_the_example_runs_and_tells_its_story(example: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    tested = example.stem.startswith("test_")
    how = ["-m", "pytest", "-q", *WITHOUT_PLUGINS] if tested else ["-W", "error"]
    before = sorted(example.parent.rglob("*.db"))
    variable, server = SERVERS.get(example.stem, ("", ""))
    named = {variable: str(request.getfixturevalue(server))} if server else {}

    done = subprocess.run(
        [sys.executable, *how, str(example)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), **named},
    )

    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert len(done.stdout.splitlines()) >= (1 if tested else 3)
    assert list(tmp_path.iterdir()) == []
    assert sorted(example.parent.rglob("*.db")) == before


def test_two_processes_on_redis_charge_once(redis_url: str, tmp_path: Path) -> None:
    example = next(example for example in EXAMPLES if example.stem == "charge_once")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example), redis_url],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "2 worker processes have emptied the queue: True" in done.stdout
    assert done.stdout.count("order 1042: 4200") == 1


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_the_first_line_names_the_command(example: Path) -> None:
    first = example.read_text(encoding="utf-8").splitlines()[0]

    command = "pytest" if example.stem.startswith("test_") else "python"
    assert f"Run it: {command} examples/{example.name}" in first
