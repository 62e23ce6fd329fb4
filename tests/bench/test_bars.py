"""The verdicts: each bar of a run, from its results alone."""

from __future__ import annotations

from typing import Any

import pytest

from bench.compare import bars
from bench.compare.bars import BARS, MET, MISSED, NOT_MEASURED, by_how_much
from bench.compare.contests import CONTESTS
from bench.compare.wording import figure
from tests.bench.samples import results


def verdict(work: str, must: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = [
        bar for bar in results()["bars"] if bar["work"] == work and bar["must"].startswith(must)
    ]
    (only,) = found
    return only


def test_a_bar_that_is_reached_says_by_how_much() -> None:
    found = verdict("Redis, first", "at most")

    assert (found["verdict"], found["found"], found["of"], found["by"]) == (MET, 1.04, "redis-py", "5 % under")


def test_a_bar_that_is_missed_says_by_how_much() -> None:
    found = verdict("Redis, duplicate", "at most")

    assert (found["verdict"], found["found"], found["by"]) == (MISSED, 1.3, "8 % over")


def test_ahead_of_every_peer_is_ahead_of_the_fastest_one() -> None:
    found = verdict("Redis, first", "ahead")

    assert (found["verdict"], found["found"], found["of"]) == (MET, 0.6, "exactly-once")


def test_a_figure_on_the_bar_reaches_it() -> None:
    found = verdict("PostgreSQL, within, duplicate", "at most")

    assert (found["verdict"], found["by"]) == (MET, "just")


def test_twice_as_fast_is_half_the_time() -> None:
    assert verdict("PostgreSQL, claim mode, first", "at least 2 ×")["found"] == 0.4
    assert verdict("PostgreSQL, claim mode, first", "at least 2 ×")["verdict"] == MET


def test_our_other_way_is_compared_with_the_limit() -> None:
    found = verdict("PostgreSQL, transactional, first", "faster")

    assert (found["verdict"], found["found"]) == (MET, 0.8)


def test_a_bar_tells_what_our_statements_take_alone() -> None:
    sides = [
        {"name": "Onefold", "role": "ours", "first": {"ratio": [1, 1, 1]}},
        {"name": "by hand", "role": "limit", "first": {"ratio": [1.5, 1.5, 1.5]}},
        {"name": "our statements alone", "role": "floor", "first": {"ratio": [1.2, 1.2, 1.2]}},
    ]
    bar = next(bar for bar in BARS if bar.work == "PostgreSQL, within, first")

    found = bar.judge({"contests": [{"name": "postgres-joined", "sides": sides}]})

    assert (found["found"], found["floor"]) == (1.5, 1.25)
    assert figure(found) == "1.50 × (by hand); our statements alone: 1.25 ×"
    assert "floor" not in verdict("Redis, first", "at most")


def test_growth_is_judged_by_the_store_that_grew_worst() -> None:
    found = verdict("Growth", "a claim")

    assert (found["verdict"], found["found"], found["of"]) == (MISSED, 2.0, "sqlite")


def test_growth_that_was_measured_in_turn_counts_as_it_was() -> None:
    rows = [
        {"store": "redis", "records": 10_000, "claim_us": 10.0, "ratio": 1.0},
        {"store": "redis", "records": 10_000_000, "claim_us": 30.0, "ratio": 1.1},
    ]

    found = bars.growth({"growth": rows})

    assert found is not None
    assert (found.value, found.of) == (1.1, "redis")


def test_bytes_are_compared_as_they_are() -> None:
    found = verdict("Redis, a finished record without result", "at most 230")

    assert (found["verdict"], found["found"], found["unit"]) == (MET, 221.4, " bytes")


@pytest.mark.parametrize("work", ["PostgreSQL, a finished record without result", "SQLite, claim mode, first"])
def test_what_has_no_figure_is_not_measured(work: str) -> None:
    assert {bar["verdict"] for bar in results()["bars"] if bar["work"] == work} == {NOT_MEASURED}


def test_a_contest_whose_own_side_is_missing_judges_nothing() -> None:
    assert verdict("ASGI middleware on Redis, first", "at most")["verdict"] == NOT_MEASURED


def test_a_run_of_nothing_misses_nothing() -> None:
    empty: dict[str, Any] = {"contests": [], "sizes": [], "growth": []}

    assert {bar["verdict"] for bar in bars.judge(empty)} == {NOT_MEASURED}


def test_every_bar_can_be_read_from_the_contests_that_there_are() -> None:
    everybody = {
        "contests": [
            {
                "name": contest.name,
                "sides": [
                    {
                        "name": one.name,
                        "role": one.role,
                        "first": {"ratio": [1, 1, 1]},
                        "duplicate": {"ratio": [1, 1, 1]},
                    }
                    for one in contest.entrants
                ],
                "throughput": [
                    {
                        "callers": callers,
                        "sides": [{"name": one.name, "role": one.role, "ratio": [1, 1, 1]} for one in contest.entrants],
                    }
                    for callers in contest.callers
                ],
            }
            for contest in CONTESTS
        ],
        "sizes": [{"store": store, "keys": "text", "bytes": 1.0} for store in ("redis", "postgres")],
        "growth": [{"store": "redis", "records": records, "claim_us": 1.0} for records in (10_000, 10_000_000)],
    }

    assert [bar.work for bar in BARS if bar.read(everybody) is None] == []


@pytest.mark.parametrize(
    ("value", "words"), [(1.1, "just"), (1.0, "9 % under"), (2.2, "100 % over"), (1.101, "just")], ids=str
)
def test_the_distance_is_in_percent_of_the_bar(value: float, words: str) -> None:
    assert by_how_much(value, 1.1) == words
