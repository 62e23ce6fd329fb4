"""The benchmark of a purge runs and can be read by tools. No times are asserted: a busy machine is no failure."""

from __future__ import annotations

import json

import pytest

from bench import purge
from onefold.maintenance.purge import Purged


@pytest.mark.more
@pytest.mark.usefixtures("postgres")
def test_a_small_table_is_purged_beside_two_workers(capsys: pytest.CaptureFixture[str]) -> None:
    # In each of its parts at least one delivery has to begin, also on a busy machine.
    assert purge.main(["--rows", "20000", "--seconds", "5", "--batch", "200", "--format", "json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["purged"]["removed"], found["purged"]["batches"]) == (20_000, 10_000, 50)
    assert [phase["name"] for phase in found["phases"]] == ["before the first", "before each part", "while purging"]
    for phase in found["phases"]:
        assert phase["deliveries"] > 0
        assert 0 < phase["p50_ms"] <= phase["p99_ms"] <= phase["longest_ms"]
    assert found["met"] == (found["ratio"] <= found["at_most"])


def test_the_table_says_the_ratio_and_whether_it_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    names = (("before the first", 0.010), ("before each part", 0.010), ("while purging", 0.015))
    phases = [purge.Phase(name, 100, 0.002, p99, 0.1) for name, p99 in names]

    purge._show(purge.Measured(200, Purged(100, 1, 0.5, True), phases, (1.0, 2.0)))

    shown = capsys.readouterr().out
    assert "p99 while purging / before each part: 1.50, at most 2.0: met" in shown
    assert "100 of 200 records purged in 0.5 s and 1 batches" in shown
