"""The benchmark of scale runs, fills in what deliveries leave, and draws what it found. No times are asserted."""

from __future__ import annotations

import json
import sqlite3
import xml.etree.ElementTree as ET
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bench.scale import __main__ as scale
from bench.scale import growth, waiters
from bench.scale.filling import OPERATION, TEMPLATE, SqlitePlace, key_of, write_template
from bench.scale.page import page
from bench.scale.pictures import pictures
from onefold import Guard
from tests.support import PROJECT

BENCHMARKS = PROJECT / "docs" / "benchmarks"
# So many records are enough to see a store work.
FEW = "200"


def measured(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert scale.main(["--quick", "--rounds", "2", "--records", FEW, "--format", "json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.more
@pytest.mark.usefixtures("postgres", "redis_server")
def test_every_store_is_filled_and_measured_beside_a_small_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, "--part", "growth")

    assert [row["store"] for row in found["growth"]] == ["postgres", "redis", "sqlite"]
    for row in found["growth"]:
        assert row["records"] == int(FEW)
        assert row["met"] == (row["ratio"] <= row["at_most"])
        assert min(row["claim_us"], row["duplicate_us"], row["bytes"]) > 0
        assert row["claim_us"] < row["first_us"]
    assert found["growth"][0]["log_bytes_per_first_call"] > 0
    assert [row["store"] for row in found["bytes"]] == ["postgres", "redis", "sqlite"]


def test_a_record_that_is_filled_in_differs_from_a_real_one_in_key_token_and_times_only(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path / "onefold.db")
    write_template(place.url)

    place.fill(0, 3, lambda _done: None)

    with closing(sqlite3.connect(tmp_path / "onefold.db")) as connection:
        connection.row_factory = sqlite3.Row
        rows = {row["key"]: dict(row) for row in connection.execute("SELECT * FROM onefold_records")}
    real = rows.pop(TEMPLATE)
    assert set(rows) == {key_of(number) for number in range(3)}
    for row in rows.values():
        assert {name for name in real if row[name] != real[name]} == {
            *("key", "token", "began", "changed", "lease_until", "expires")
        }
        assert len(row["token"]) == len(real["token"])


def test_records_that_a_guard_does_not_replay_are_no_measurement(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path / "onefold.db")
    write_template(place.url)
    place.fill(0, 3, lambda _done: None)
    with Guard(place.url) as guard:
        guard.forget(OPERATION, key_of(1))

    with pytest.raises(AssertionError, match="has run"):
        growth._check(place, 3)


def test_every_waiting_duplicate_is_answered_and_its_looks_are_counted(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path / "onefold.db")
    write_template(place.url)

    found = list(waiters.measure("sqlite", place, (1, 3), 0.05))

    assert [(one.where, one.waiters) for one in found] == [
        (where, number) for where in (waiters.SAME, waiters.ANOTHER) for number in (1, 3)
    ]
    # Each has to ask at least once.
    assert all(one.reads >= one.waiters for one in found)


def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCHMARKS / "scale.json").read_text(encoding="utf-8"))
    return found


def test_the_page_and_its_pictures_are_made_of_the_committed_numbers() -> None:
    assert (BENCHMARKS / "scale.md").read_text(encoding="utf-8") == page(document()), "run bench.scale.__main__.save"
    for name, drawn in pictures(document()).items():
        assert (BENCHMARKS / name).read_text(encoding="utf-8") == drawn


def test_the_pictures_can_be_read_by_machines_and_say_what_they_show() -> None:
    drawn = pictures(document())

    assert set(drawn) == {f"scale-{name}.svg" for name in ("growth", "bytes", "waiters", "purge")}
    for picture in drawn.values():
        root = ET.fromstring(picture)
        assert [child.tag.rpartition("}")[2] for child in root[:2]] == ["title", "desc"]


def test_what_is_saved_is_what_was_measured(tmp_path: Path) -> None:
    found = document() | {"note": "Beside a compiler."}

    scale.save(found, tmp_path)

    assert json.loads((tmp_path / "scale.json").read_text(encoding="utf-8")) == found
    assert "**Beside a compiler.**" in (tmp_path / "scale.md").read_text(encoding="utf-8")


def test_a_ratio_above_the_bar_is_missed_and_the_page_says_so() -> None:
    slow, quick = (growth.Times([seconds], [seconds], [seconds]) for seconds in (1.6e-3, 1e-3))

    row = growth.Grown("sqlite", 1_000, slow, quick, 200.0, None, None, None).as_json()

    assert (row["ratio"], row["met"]) == (1.6, False)
    assert "1.60 | 1.5: missed" in page(document() | {"growth": [row]})
