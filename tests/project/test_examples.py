"""The examples run, each with the one command that its first line names. They assert their own effects."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.project.test_extras import extras_in, normalized
from tests.support import PROJECT, WITHOUT_PLUGINS

EXAMPLES = sorted((PROJECT / "examples").glob("*.py"))

# Far more than an example takes; it bounds how long a broken one hangs.
PATIENCE = 300.0

# The examples that need a server, and the variable by which they are told of ours.
SERVERS = {
    "nats_worker": ("ONEFOLD_NATS_URL", "nats_url"),
    "rabbitmq_worker": ("ONEFOLD_RABBITMQ_URL", "rabbitmq_url"),
    "sqs_worker": ("ONEFOLD_SQS_URL", "sqs_url"),
    # It has a broker of its own, whose groups wait for three seconds before they begin.
    "kafka_wallet": ("ONEFOLD_KAFKA_URL", "kafka_url"),
    "dramatiq_email": ("ONEFOLD_REDIS_URL", "redis_url"),
    "redis_streams_worker": ("ONEFOLD_REDIS_URL", "redis_url"),
    "rq_email": ("ONEFOLD_REDIS_URL", "redis_url"),
    "temporal_charge": ("ONEFOLD_TEMPORAL_ADDRESS", "temporal_address"),
    "taskiq_email": ("ONEFOLD_REDIS_URL", "redis_url"),
    "faststream_worker": ("ONEFOLD_NATS_URL", "nats_url"),
}


# With no extra, with one, and with several.
NEEDY = {"wallet", "rabbitmq_worker", "payments_api"}


def test_there_are_examples() -> None:
    first = {"wallet", "card_charge", "held_email", "test_my_handler"}
    http = {"payments_api", "payments_client", "payments_django", "payments_flask"}
    queues = {"charge_once", "babelqueue_charge", "celery_email", "kafka_wallet", "nats_worker", "rabbitmq_worker"}
    queues |= {"dramatiq_email", "redis_streams_worker", "rq_email", "scheduled_report", "taskiq_email"}
    queues |= {"faststream_worker", "lambda_charge", "sqs_worker", "temporal_charge"}
    assert {example.stem for example in EXAMPLES} >= first | http | queues


@pytest.mark.parametrize(
    "example",
    # Of those that need a server, one every day: the pages of the others run the same.
    [
        pytest.param(one, marks=pytest.mark.more if one.stem in SERVERS and one.stem != "rabbitmq_worker" else ())
        for one in EXAMPLES
    ],
    ids=lambda example: example.stem,
)
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
    example = next(example for example in EXAMPLES if example.stem == "babelqueue_charge")
    done = subprocess.run(
        # BabelQueue has no way to close its own connection to Redis.
        [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", str(example), redis_url],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )

    # The server of the tests keeps nothing over a restart, which is told.
    said = [line for line in done.stderr.splitlines() if "persistence: off" not in line]
    assert (done.returncode, said) == (0, [])
    assert "2 worker processes have emptied the queue: True" in done.stdout
    assert done.stdout.count("order 1042: 4200") == 1


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_the_first_line_names_the_command(example: Path) -> None:
    first = example.read_text(encoding="utf-8").splitlines()[0]

    command = "pytest" if example.stem.startswith("test_") else "python"
    assert f"Run it: {command} examples/{example.name}" in first


# Import a file as if only these packages were installed: those that others brought are hidden.
WITH_ONLY = """
import importlib.abc, runpy, sys
from importlib.metadata import packages_distributions

example, *installed = sys.argv[1:]
owners = packages_distributions()

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        root = name.partition(".")[0]
        if root in owners and not {owner.lower().replace("_", "-") for owner in owners[root]} & set(installed):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
runpy.run_path(example, run_name="imported")
"""


@pytest.mark.parametrize(
    "example",
    # Each imports a whole framework: a few are enough every day.
    [pytest.param(one, marks=() if one.stem in NEEDY else pytest.mark.more) for one in EXAMPLES],
    ids=lambda example: example.stem,
)
def test_the_example_says_which_extras_it_needs(example: Path, tmp_path: Path) -> None:
    (line,) = re.findall(
        r"It needs `pip install ([^`]+)`", ast.get_docstring(ast.parse(example.read_text("utf-8"))) or ""
    )

    done = subprocess.run(
        [sys.executable, "-c", WITH_ONLY, str(example), *brought_by(shlex.split(line))],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=tmp_path,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert (extras_in(line) == []) == ("and no extra" in example.read_text("utf-8") or "pytest" in line)


def test_an_example_without_an_extra_that_it_imports_is_found(tmp_path: Path) -> None:
    example = next(example for example in EXAMPLES if example.stem == "babelqueue_charge")
    command = [sys.executable, "-c", WITH_ONLY, str(example), *brought_by(["onefold[celery]"])]

    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=tmp_path)

    assert "No module named 'babelqueue'" in done.stderr


def brought_by(requirements: list[str]) -> set[str]:
    """Return the packages that an install line brings, with those that they need in turn."""
    found: set[str] = set()
    ahead = {(normalized(one.name), extra) for one in map(Requirement, requirements) for extra in ("", *one.extras)}
    seen: set[tuple[str, str]] = set()
    while ahead:
        name, extra = here = ahead.pop()
        seen.add(here)
        found.add(name)
        needed = [Requirement(one) for one in distribution(name).requires or ()]
        wanted = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})]
        ahead |= {(normalized(one.name), inner) for one in wanted for inner in ("", *one.extras)} - seen
    return found
