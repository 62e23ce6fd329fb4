"""`onefold report` says what would have happened: as a table, as JSON, and as a page that needs nothing else."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onefold import Guard, current
from onefold.cli.app import app
from onefold.report import Absorbed
from onefold.report.figures import as_amount


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/onefold.db"


@pytest.fixture
def log(tmp_path: Path, url: str) -> Path:
    """Three payments: one came three times, one twice, one once; and a mail without an amount, twice."""
    path = tmp_path / "absorbed.jsonl"
    uninstall = Absorbed(path).install()

    def charge(amount: object) -> None:
        current().note(amount=amount)

    with Guard(url) as guard:
        for key, amount in (("a", 14200), ("a", 14200), ("a", 14200), ("b", "0.50"), ("b", "0.50"), ("c", 9)):
            guard.run("charge", key, partial(charge, amount))
        for _ in range(2):
            guard.run("mail", "m", lambda: {"to": "<asha>"})
            guard.run("refund", "r", lambda: {"amount": 7, "id": "x"})
    uninstall()
    return path


def reported(*words: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, words)])


def as_json(*words: object) -> dict[str, Any]:
    ended = reported(*words, "--format", "json")
    assert ended.exit_code == 0, ended.output
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_the_table_has_the_absorbed_ones_by_operation(log: Path) -> None:
    ended = reported(log)

    assert ended.exit_code == 0
    assert ended.stdout.splitlines() == [
        "operation\tabsorbed\trefused",
        "charge\t3\t0",
        "mail\t1\t0",
        "refund\t1\t0",
    ]
    assert "without Onefold, handlers would have run 5 times more" in ended.stderr


def test_an_amount_is_added_up_from_what_was_noted_or_from_the_result(log: Path, url: str) -> None:
    found = as_json(log, "--amount", "amount", "--store", url)

    assert [(one["operation"], one["saved"], one["unknown"]) for one in found["operations"]] == [
        ("charge", "28400.50", 0),
        ("mail", "0", 1),
        ("refund", "7", 0),
    ]
    assert (found["absorbed"], found["saved"], found["unknown"]) == (5, "28407.50", 1)
    assert found["begin"] <= found["end"]


def test_a_record_that_is_gone_is_unknown_and_not_guessed(log: Path, url: str) -> None:
    with Guard(url) as guard:
        guard.forget("charge", "a")

    found = as_json(log, "--amount", "amount", "--store", url)

    assert (found["operations"][0]["saved"], found["operations"][0]["unknown"]) == ("0.50", 2)


def test_a_delivery_that_failed_for_good_has_saved_nothing(tmp_path: Path, url: str) -> None:
    uninstall = Absorbed(tmp_path / "absorbed.jsonl").install()

    def fail() -> None:
        current().note(amount=5)
        raise ValueError("no funds")

    with Guard(url, final_errors=[ValueError]) as guard:
        for _ in range(2):
            with pytest.raises(ValueError, match="no funds"):
                guard.run("charge", "k", fail)
    uninstall()

    found = as_json(tmp_path / "absorbed.jsonl", "--amount", "amount", "--store", url)

    assert (found["absorbed"], found["saved"], found["unknown"]) == (1, "0", 1)


def test_several_files_are_added_up_and_one_named_twice_counts_once(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(log.read_bytes() + b"cut off")

    assert as_json(log, log)["absorbed"] == 5
    assert (as_json(log, other)["absorbed"], as_json(log, other)["broken"]) == (10, 1)


def test_the_page_needs_nothing_from_elsewhere(log: Path, url: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"

    ended = reported(log, "--amount", "amount", "--html", page, "--store", url)

    text = page.read_text(encoding="utf-8")
    assert ended.exit_code == 0
    assert "Without Onefold, handlers would have run 5 times more, and 28,407.50 would have moved twice, " in text
    assert "not counting 1 whose amount is unknown." in text
    assert "<td>charge</td><td>3</td><td>0</td><td>28400.50</td><td>0</td>" in text
    assert "<td>all</td><td>5</td><td>0</td><td>28407.50</td><td>1</td>" in text
    assert not re.search(r"(src|href)=|https?:|<script|@import|url\(", text)


def test_a_name_from_outside_is_no_markup_on_the_page(tmp_path: Path) -> None:
    log, page = tmp_path / "absorbed.jsonl", tmp_path / "report.html"
    log.write_text('{"begin":0,"end":1,"duplicates":[["<script>x</script>","","k",1,0]]}\n')

    assert reported(log, "--html", page).exit_code == 0
    assert "<script" not in page.read_text(encoding="utf-8")
    assert "&lt;script&gt;x" in page.read_text(encoding="utf-8")


def test_an_empty_file_is_a_report_too(tmp_path: Path) -> None:
    log, page = tmp_path / "absorbed.jsonl", tmp_path / "report.html"
    log.touch()

    found = as_json(log, "--html", page)

    assert (found["absorbed"], found["operations"], found["begin"]) == (0, [], None)
    assert "Nothing was absorbed." in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [["{tmp}/none.jsonl"], ["{tmp}"], ["{log}", "--html", "{tmp}"]])
def test_a_file_that_cannot_be_read_or_written_is_one_line_and_a_status(
    words: list[str], log: Path, tmp_path: Path
) -> None:
    ended = reported(*(word.format(tmp=tmp_path, log=log) for word in words))

    assert ended.exit_code == 2
    assert [line for line in ended.stderr.splitlines() if "Nothing was reported" in line or "not written" in line]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, "5"),
        (0.1, "0.1"),
        ("14200.00", "14200.00"),
        (True, None),
        ("ten", None),
        ("nan", None),
        ("9E+999999", None),
        ("1E-999999", None),
        ("0E+999999", None),
        (1e300, None),
        pytest.param(10**5000, None, id="vast"),
        ("9" * 31, None),
        ("9" * 30, "9" * 30),
        (None, None),
        ([], None),
    ],
)
def test_an_amount_is_a_number_or_the_text_of_one(value: object, expected: str | None) -> None:
    assert as_amount(value) == (None if expected is None else Decimal(expected))


@pytest.mark.parametrize("vast", ["9E+999999", "1E-999999", "9" * 5000])
def test_an_amount_of_any_size_takes_no_other_with_it(tmp_path: Path, url: str, vast: str) -> None:
    path = tmp_path / "absorbed.jsonl"
    uninstall = Absorbed(path).install()
    with Guard(url, count_duplicates=True) as guard:
        for key, amount in (("a", vast), ("b", "9" * 30), ("c", "0.01")):
            for _ in range(3):
                guard.run("charge", key, partial(dict, amount=amount))
    uninstall()

    for given in ([path], []):
        found = as_json(*given, "--amount", "amount", "--store", url, "--html", tmp_path / "page.html")

        assert (found["absorbed"], found["unknown"]) == (6, 2)
        assert Decimal(found["saved"]) == Decimal(str(2 * int("9" * 30)) + ".02")


@pytest.fixture
def counting(url: str) -> str:
    """The same, in records that count: a payment came three times, one once, and a mail without an amount twice."""

    def charge(amount: object) -> None:
        current().note(amount=amount)

    with Guard(url, count_duplicates=True) as guard:
        for key, amount in (("a", 14200), ("a", 14200), ("a", 14200), ("c", 9)):
            guard.run("charge", key, partial(charge, amount))
        for _ in range(2):
            guard.run("mail", "m", lambda: None)
    return url


def test_without_a_file_the_counts_are_those_of_the_records(counting: str) -> None:
    ended = reported("--store", counting, "--amount", "amount")

    assert ended.exit_code == 0
    assert ended.stdout.splitlines() == [
        "operation\tabsorbed\trefused\tsaved\tunknown",
        "charge\t2\t?\t28400\t0",
        "mail\t1\t?\t0\t1",
    ]
    assert "handlers would have run 3 times more, and 28,400 would have moved twice" in ended.stderr
    found = as_json("--store", counting)
    assert (found["absorbed"], found["refused"], found["begin"], found["end"]) == (3, None, None, None)


def test_counts_in_records_are_not_added_to_those_of_files(log: Path, url: str, tmp_path: Path) -> None:
    with Guard(url, count_duplicates=True) as guard:
        guard.run("charge", "a", lambda: None)

    assert as_json("--store", url)["absorbed"] == 1
    assert as_json(log, "--store", url)["absorbed"] == 5


def test_the_page_of_counted_records_says_what_it_counts(counting: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"

    assert reported("--store", counting, "--html", page).exit_code == 0

    assert "each since it was finished" in page.read_text(encoding="utf-8")


def test_without_a_count_nothing_was_absorbed(url: str) -> None:
    with Guard(url) as guard:
        for _ in range(2):
            guard.run("charge", "k", lambda: None)

    assert as_json("--store", url)["operations"] == []


def test_a_record_shows_its_count(counting: str) -> None:
    shown = CliRunner().invoke(app, ["show", "a", "--store", counting])
    other = CliRunner().invoke(app, ["show", "c", "--store", counting])
    (document,) = json.loads(CliRunner().invoke(app, ["show", "a", "--store", counting, "--format", "json"]).stdout)

    assert re.search(r"duplicates\W+2 answered from it", shown.stdout)
    assert "duplicates" not in other.stdout
    assert (document["duplicates"], document["steps"]) == (2, None)
