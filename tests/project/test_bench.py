"""The quick benchmark runs and can be read by tools. No times are asserted: a busy machine is no failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bench import pairs, quick
from bench.measure import Pair, Side, SideFailed, Turned, Turns, fresh_keys, measure, turns
from services.programs import Missing
from tests.support import Clock

CALLS = ("first", "duplicate")


def measured(capsys: pytest.CaptureFixture[str], *stores: str) -> list[dict[str, Any]]:
    options = [word for store in stores for word in ("--only", store)]
    assert quick.main(["--rounds", "1", "--format", "json", *options]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


@pytest.mark.more
def test_one_round_on_the_stores_without_a_server_gives_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(capsys, "memory", "memory, run", "sqlite")

    assert [row["store"] for row in rows] == ["memory", "memory, run", "sqlite"]
    for row in rows:
        assert row["rounds"] == 1
        for call in CALLS:
            found = row[call]
            assert found["ratio"] == pytest.approx(found["ours_us"] / found["by_hand_us"], rel=0.1)
            assert found["met"] == (None if found["at_most"] is None else found["ratio"] <= found["at_most"])


def test_where_warming_up_is_cut_short_there_are_no_more_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("bench.measure.time", SimpleNamespace(monotonic=clock))

    def taking(seconds: float) -> Callable[[], float]:
        def call() -> float:
            clock.advance(seconds)
            return seconds

        return call

    # So slow that the time for warming up is over at once; and its duplicates so fast that it never is.
    first = _ended(turns(1, fresh_keys(2), seconds=30.0, rounds=2), taking(2.0))
    duplicates = _ended(turns(1, first.keys, seconds=30.0, rounds=2), taking(0.1))

    assert first.times == [[2.0, 2.0]]
    assert duplicates.times == [[0.1, 0.1]]


def _ended(turns: Turns, call: Callable[[], float]) -> Turned:
    try:
        next(turns)
        while True:
            turns.send(call())
    except StopIteration as end:
        turned: Turned = end.value
        return turned


def test_a_server_that_is_missing_is_a_row_that_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_house: Any) -> Any:
        raise Missing("redis-server is not installed: apt-get install redis-server")

    monkeypatch.setitem(pairs.PAIRS, "redis", missing)

    (row,) = measured(capsys, "redis")

    assert row == {"store": "redis", "missing": "redis-server is not installed: apt-get install redis-server"}


def test_the_table_has_both_calls_of_a_store_and_what_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    quick.main(["--rounds", "1", "--only", "memory"])

    shown = capsys.readouterr().out
    assert [call for call in CALLS if call not in shown] == []
    assert "BabelQueue" in shown


def test_what_is_fast_because_it_does_nothing_is_no_measurement() -> None:
    lazy, as_lazy = (Side("lazy", lambda _key: None, lambda _key: None, lambda: 0) for _ in range(2))

    with pytest.raises(SideFailed, match="lazy: the handler ran 0 times"):
        measure(Pair(lazy, as_lazy), seconds=1.0, rounds=1)
