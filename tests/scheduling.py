"""Slow files first, where several processes share the work: a slow one that came last would keep them waiting.

How long each file takes is what the run before has measured; it is in pytest's cache. Without one, the more tests a
file has, the earlier it comes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

CACHED = "onefold/seconds"
MEASURED = pytest.StashKey[Counter[str]]()

# Of a test about whose file nothing is known.
SECONDS = 0.05


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = Counter()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each process the same: they have to agree on the order."""
    cache = node.config.cache
    node.workerinput["seconds"] = cache.get(CACHED, {}) if cache is not None else {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known: dict[str, float] | None = getattr(config, "workerinput", {}).get("seconds")
    if known is None:
        return
    tests = Counter(map(file_of, items))
    slowest = sorted(tests, key=lambda file: known.get(file, SECONDS * tests[file]), reverse=True)
    place = {file: number for number, file in enumerate(slowest)}
    items.sort(key=lambda item: place[file_of(item)])


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> None:
    """Hear of every part of a test; only the process that started the others does."""
    config.stash[MEASURED][report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    whole = config.getoption("numprocesses", None) and not config.getoption("keyword")
    if whole and config.cache is not None:
        config.cache.set(CACHED, config.cache.get(CACHED, {}) | config.stash[MEASURED])
