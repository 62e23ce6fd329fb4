"""In a parallel run the files that took longest the last time come first, each in one piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.scheduling import WRITTEN, known
from tests.scheduling import pytest_collection_modifyitems as put_in_order
from tests.support import PROJECT

COLLECTED = ["fast.py::a", "fast.py::b", "slow.py::a", "slow.py::b", "new.py::a"]


def ordered(names: Sequence[str] = COLLECTED, **config: Any) -> list[str]:
    def marked(name: str) -> Callable[[str], bool | None]:
        return lambda mark: True if name.endswith(mark) else None

    items: Any = [SimpleNamespace(nodeid=name, get_closest_marker=marked(name)) for name in names]
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


def test_what_only_a_longer_run_has_is_measured_separately() -> None:
    seconds = {"one.py": 5.0, "two.py": 1.0, "two.py more": 9.0}
    everyday = ["two.py::a", "one.py::a"]

    assert ordered(everyday, workerinput={"seconds": seconds}) == ["one.py::a", "two.py::a"]
    longer = [*everyday, "two.py::a more"]
    assert ordered(longer, workerinput={"seconds": seconds}) == ["two.py::a", "two.py::a more", "one.py::a"]


def test_a_run_in_one_process_keeps_the_order_of_the_files() -> None:
    assert ordered() == COLLECTED


def test_a_first_run_knows_what_was_measured_elsewhere_and_a_later_one_what_was_measured_here() -> None:
    written = json.loads(WRITTEN.read_text(encoding="utf-8"))
    slowest = max(written, key=written.get)
    cache = SimpleNamespace(get=lambda _key, _default: {slowest: 0.5})

    assert known(SimpleNamespace()) == written  # type: ignore[arg-type]
    assert known(SimpleNamespace(cache=cache)) == written | {slowest: 0.5}  # type: ignore[arg-type]


def test_every_file_that_was_measured_is_still_there() -> None:
    parts = json.loads(WRITTEN.read_text(encoding="utf-8"))

    assert [part for part in parts if not (PROJECT / part.partition(" ")[0]).is_file()] == []
