"""The simulator's waiters: wake-ups that are lost, late, spurious or doubled cost time, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from onefold._model import Record
from onefold.codecs import MsgspecCodec
from onefold.testing.simulate import EVERYDAY, Scenario, _world, search

WAITS = 0.01


def test_waiters_are_simulated_under_every_policy() -> None:
    ways = {scenario.after_crash for scenario in EVERYDAY}

    assert {scenario.after_crash for scenario in EVERYDAY if scenario.wait} == ways
    assert any(scenario.wait and scenario.workers > 2 and scenario.faults for scenario in EVERYDAY)


@pytest.mark.parametrize("workers", [2, 3])
def test_without_a_fault_everybody_who_waits_is_woken(workers: int) -> None:
    report = search(Scenario(wait=WAITS, workers=workers, faults=0, looks=False))

    assert report.story is None, f"\n{report.story}"
    assert report.histories > 10


def test_who_never_looks_by_itself_would_wait_for_ever_after_a_lost_wake_up() -> None:
    story = search(Scenario(wait=WAITS, faults=1, looks=False)).story

    assert story is not None
    assert (story.number, story.violation) == (8, "8: somebody waits for ever")


def test_what_one_waiter_hands_to_another_is_compared_with_what_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    woken = _world._woken

    def wrongly(worker: Any, found: Record | None = None) -> Any:
        if found is not None:
            found = msgspec.structs.replace(found, result=MsgspecCodec().encode("another result", Any))
        return woken(worker, found)

    monkeypatch.setattr(_world, "_woken", wrongly)
    story = search(Scenario(wait=WAITS, workers=3, faults=0)).story

    assert story is not None
    assert story.number == 5
    assert any("is woken" in line for line in story.lines)
