"""The capacity model says what was measured, and its sums can be done by hand."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from onefold._model import KEY_MAX
from onefold.cli.commands import size as command
from onefold.sizing import COSTS, Contradiction, Workload, size
from onefold.sizing.model import between
from tests.support import PROJECT

SCALE: dict[str, Any] = json.loads((PROJECT / "docs" / "benchmarks" / "scale.json").read_text(encoding="utf-8"))
LARGEST = {row["store"]: row for row in SCALE["growth"]}

# A record of `guard.run` without a payload, kept for a month: what the benchmark fills in.
PLAIN = Workload(rate=1.0, keep=86_400.0, fingerprint=False)

# So far an estimate may be from what was measured.
OFF_BY = 0.1


@pytest.mark.parametrize("store", LARGEST)
def test_the_bytes_of_the_model_are_those_measured_in_the_largest_store(store: str) -> None:
    row = LARGEST[store]
    keep = 30 * 86_400.0

    found = size(Workload(rate=row["records"] / keep, keep=keep, fingerprint=False), COSTS[store])

    assert found.records == pytest.approx(row["records"])
    assert found.record_bytes == pytest.approx(row["bytes"], rel=OFF_BY)
    assert found.bytes == pytest.approx(row["bytes"] * row["records"], rel=OFF_BY)


@pytest.mark.parametrize("row", SCALE["bytes"], ids=lambda row: str(row["store"]))
def test_the_bytes_of_a_fingerprint_are_those_measured(row: dict[str, Any]) -> None:
    keep = 30 * 86_400.0

    found = size(Workload(rate=row["records"] / keep, keep=keep), COSTS[row["store"]])

    assert found.record_bytes == pytest.approx(row["bytes"], rel=OFF_BY)


def test_the_log_of_postgres_is_that_of_a_small_and_of_a_large_store() -> None:
    small, *_, large = [row["log_bytes_per_first_call"] for row in SCALE["growth"] if row["store"] == "postgres"]

    # A checkpoint more or less between two calls is a tenth of it.
    assert COSTS["postgres"].log_bytes == pytest.approx((small, large), rel=0.3)


@pytest.mark.parametrize("store", COSTS)
def test_every_number_has_a_source(store: str) -> None:
    costs = COSTS[store]
    defaults = dict(zip(reversed(costs.__struct_fields__), reversed(costs.__struct_defaults__), strict=False))
    numbers = {
        name
        for name in costs.__struct_fields__
        if name not in ("name", "in_memory", "sources", "why_headroom", "round_trips", "duplicate_round_trips")
        and getattr(costs, name) != defaults.get(name)
    }

    assert set(costs.sources) == numbers


PAGES = {"postgres": "postgres", "mysql": "mysql", "sqlite": "sqlite", "valkey": "redis", "dynamodb": "dynamodb"}


@pytest.mark.parametrize("store", PAGES)
def test_the_bytes_are_those_of_the_store_s_page(store: str) -> None:
    page = (PROJECT / "docs" / "stores" / f"{PAGES[store]}.md").read_text(encoding="utf-8")
    numbers = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", page)}

    said = [
        bytes_ if store != "postgres" or not result else bytes_ - 295 for result, bytes_ in COSTS[store].bytes_by_result
    ]

    assert [number for number in said if number not in numbers] == []


def test_redis_has_the_bytes_of_its_page_for_as_many_records_as_were_measured_there() -> None:
    for result, said in ((0, 213), (36, 261), (300, 533), (1024, 1429)):
        found = size(Workload(rate=50_000 / 86_400, keep=86_400.0, result=result), COSTS["redis"])

        assert found.record_bytes == pytest.approx(said, abs=1)


def test_records_are_new_keys_times_their_keep() -> None:
    found = size(Workload(rate=2_000, keep=30 * 86_400.0, duplicates=0.25), COSTS["postgres"])

    assert found.records == 1_500 * 30 * 86_400
    assert found.records_a_day == 1_500 * 86_400
    assert found.purge == 1_500
    assert found.round_trips == 1_500 * 2 + 500


def test_a_billion_deliveries_a_day_are_ordinary_sums() -> None:
    found = size(Workload(rate=1e9 / 86_400, keep=7 * 86_400.0), COSTS["postgres"])

    assert found.records == pytest.approx(7e9)
    assert found.bytes == pytest.approx(7e9 * 295)
    assert found.round_trips == pytest.approx(23_148, rel=0.001)


def test_what_is_kept_forever_only_grows() -> None:
    found = size(Workload(rate=1.0, keep=math.inf), COSTS["redis"])

    assert (found.records, found.bytes, found.provide, found.purge) == (None, None, None, 0.0)
    assert found.bytes_a_day == pytest.approx(86_400 * 171, rel=OFF_BY)
    assert any("only grows" in warning for warning in found.warnings)


def test_a_transaction_holds_its_connection_while_the_handler_runs() -> None:
    claim, joined = (
        size(Workload(rate=1_000, keep=86_400.0, handler=0.05, mode=mode), COSTS["postgres"])
        for mode in ("claim", "transactional")
    )

    assert joined.handlers == claim.handlers == 50
    assert claim.connections is not None
    assert joined.connections is not None
    # Twice the fifty that Little's law says, because they are to be busy half of the time.
    assert joined.connections - claim.connections == 100
    assert joined.record_bytes < claim.record_bytes


def test_the_peak_raises_rates_and_leaves_records_as_they_are() -> None:
    mean, peak = (size(Workload(rate=100.0, keep=60.0, peak=times), COSTS["redis"]) for times in (1.0, 3.0))

    assert peak.records == mean.records
    assert peak.round_trips == 3 * mean.round_trips
    assert peak.cores == pytest.approx(3 * (mean.cores or 0))


@pytest.mark.parametrize(("at", "expected"), [(0, 10.0), (5, 15.0), (10, 20.0), (20, 40.0), (30, 60.0), (120, 240.0)])
def test_between_two_measurements_a_line_is_drawn_and_continued_after_the_last(at: int, expected: float) -> None:
    assert between([(0, 10.0), (10, 20.0), (30, 60.0)], at) == expected


def test_a_longer_key_takes_more_on_every_store() -> None:
    for costs in COSTS.values():
        short, usual, long = (size(Workload(rate=1.0, keep=1e5, key=key), costs).record_bytes for key in (8, 36, 100))

        assert short < usual < long


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"duplicates": 1.0}, "--duplicates"),
        ({"keep": 0.0}, "--keep"),
        ({"peak": 0.5}, "--peak"),
        ({"mode": "transactional"}, "Redis cannot commit with the rows of your database"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(Contradiction, match=says):
        size(Workload(**({"rate": 1.0, "keep": 60.0} | wrong)), COSTS["redis"])


def test_a_store_that_cannot_keep_up_is_told() -> None:
    (warning,) = size(Workload(rate=5_000, keep=60.0), COSTS["sqlite"]).warnings

    assert "one writer" in warning


def test_the_longest_key_of_the_command_is_that_of_the_library() -> None:
    assert command.KEY_MAX == KEY_MAX
