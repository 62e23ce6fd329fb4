"""Slow files first, where several processes share the work: a slow one that came last would keep them waiting.

How long each file takes is what the run before has measured; it is in pytest's cache. On a new machine it is what
`seconds.json` says, and `python -m tests.scheduling` writes that from the cache. The more tests a file has that is not
there, the earlier it comes. What `make test` leaves out of a file is measured separately: in most files it takes far
longer than the rest, and the order of `make test-all` is another one.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

CACHED = "onefold/seconds"
WRITTEN = Path(__file__).with_name("seconds.json")
# Of what takes less, the order does not matter.
WRITTEN_MIN = 2.0
MEASURED = pytest.StashKey[dict[str, float]]()

# What a longer run has in addition.
MARKS = ("more", "soak")

# Of a test about whose file nothing is known.
SECONDS = 0.05


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = defaultdict(float)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each process the same: they have to agree on the order."""
    node.workerinput["seconds"] = known(node.config)


# After those tests are gone that the run does not select.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds: dict[str, float] | None = getattr(config, "workerinput", {}).get("seconds")
    if seconds is None:
        return
    expected: dict[str, float] = defaultdict(float)
    parts = Counter((file_of(item.nodeid), mark_of(item)) for item in items)
    for (file, mark), tests in parts.items():
        expected[file] += seconds.get(part_of(file, mark), SECONDS * tests)
    slowest = sorted(expected, key=lambda file: expected[file], reverse=True)
    order = {file: number for number, file in enumerate(slowest)}
    items.sort(key=lambda item: order[file_of(item.nodeid)])


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def mark_of(item: pytest.Item) -> str:
    return next((mark for mark in MARKS if item.get_closest_marker(mark) is not None), "")


def part_of(file: str, mark: str) -> str:
    """Name the part of a file that a run selects: its everyday tests, or those that only a longer run has."""
    return f"{file} {mark}".rstrip()


def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport, config: pytest.Config) -> None:
    """Hear of every part of a test; only the process that started the others does."""
    if isinstance(report, pytest.TestReport):
        mark = next((mark for mark in MARKS if mark in report.keywords), "")
        config.stash[MEASURED][part_of(file_of(report.nodeid), mark)] += report.duration


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not config.getoption("keyword")
    if whole and config.getoption("numprocesses", None) and hasattr(config, "cache"):
        config.cache.set(CACHED, known(config) | config.stash[MEASURED])


def known(config: pytest.Config) -> dict[str, float]:
    """Return how long each part of a file took, here or where it was written."""
    written: dict[str, float] = json.loads(WRITTEN.read_text(encoding="utf-8"))
    return written | (config.cache.get(CACHED, {}) if hasattr(config, "cache") else {})


def write() -> None:
    """Write what this machine has measured, for others."""
    measured = json.loads((WRITTEN.parents[1] / ".pytest_cache" / "v" / CACHED).read_text(encoding="utf-8"))
    slow = {file: round(seconds, 1) for file, seconds in sorted(measured.items()) if seconds >= WRITTEN_MIN}
    WRITTEN.write_text(json.dumps(slow, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
