"""In a parallel run the files that took longest the last time come first, each in one piece."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.scheduling import pytest_collection_modifyitems as put_in_order

COLLECTED = ["fast.py::a", "fast.py::b", "slow.py::a", "slow.py::b", "new.py::a"]


def ordered(**config: Any) -> list[str]:
    items: Any = [SimpleNamespace(nodeid=name) for name in COLLECTED]
    put_in_order(SimpleNamespace(**config), items)  # type: ignore[arg-type]
    return [item.nodeid for item in items]


@pytest.mark.parametrize(
    ("seconds", "first"),
    [
        ({"slow.py": 9.0, "fast.py": 0.01}, ["slow.py::a", "slow.py::b", "new.py::a", "fast.py::a", "fast.py::b"]),
        # Nothing was measured: the more tests, the earlier.
        ({}, COLLECTED),
    ],
)
def test_the_slow_files_come_first(seconds: dict[str, float], first: list[str]) -> None:
    assert ordered(workerinput={"seconds": seconds}) == first


def test_a_run_in_one_process_keeps_the_order_of_the_files() -> None:
    assert ordered() == COLLECTED
