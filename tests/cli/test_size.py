"""`onefold size` says what a store has to hold and to do; what cannot be meant gets one line."""

from __future__ import annotations

import json
import shlex

import pytest
from typer.testing import CliRunner, Result

from onefold.cli._common.quantities import bytes_of, in_bytes, in_words, rate_of, share_of
from onefold.cli.app import app
from onefold.sizing import COSTS


def sized(line: str) -> Result:
    return CliRunner().invoke(app, ["size", *shlex.split(line)])


def test_one_store_is_explained_line_by_line() -> None:
    said = sized("--rate 2000/s --keep 30d --store postgres")

    assert said.exit_code == 0
    lines = {what: (about, because) for what, about, because in (row.split("\t") for row in said.stdout.splitlines())}
    assert lines["records"] == ("5.18 billion", "2,000/s kept for 30d")
    assert lines["disk, records"][0] == "1.39 TiB"
    assert lines["handlers at once"] == ("100", "each takes 50ms")
    assert lines["round trips"][0] == "4,000/s"
    assert lines["purge"][0] == "2,000/s"
    assert {"connections", "cores of the server", "log, a day", "disk, to provide"} <= lines.keys()


def test_what_is_for_the_peak_follows_its_line() -> None:
    said = sized("--rate 500/s --peak 4 --store postgres")

    whats = [line.split("\t")[0] for line in said.stdout.splitlines()]
    at_peak = whats[whats.index("peak") + 1 :]
    assert "peak\t2,000/s\t4 times the rate; what follows is for this moment" in said.stdout
    assert at_peak == ["round trips", "handlers at once", "connections", "cores of the server"]


@pytest.mark.parametrize(("store", "has"), [("postgres", "its indexes"), ("redis", "its key"), ("dynamodb", "its key")])
def test_only_a_database_with_indexes_is_said_to_have_them(store: str, has: str) -> None:
    said = sized(f"--rate 5/s --store {store}")

    (record,) = (line for line in said.stdout.splitlines() if line.startswith("a record\t"))
    assert f", with {has}" in record


def test_without_a_store_all_are_compared() -> None:
    said = sized("--rate 1bn/day --keep 7d")

    assert said.exit_code == 0
    assert [line.split("\t")[0] for line in said.stdout.splitlines()[1:]] == [costs.name for costs in COSTS.values()]
    assert "sqlite: SQLite has one writer" in said.stderr


def test_in_transactions_only_stores_that_have_them_are_compared() -> None:
    said = sized("--rate 10/s --mode transactional")

    assert [line.split("\t")[0] for line in said.stdout.splitlines()[1:]] == [
        *("PostgreSQL", "MySQL, MariaDB", "SQLite", "DynamoDB")
    ]


def test_a_url_names_its_store_and_is_not_opened() -> None:
    said = sized("--rate 10/s --store postgresql+asyncpg://me:geheim@127.0.0.1:1/shop --format json")

    assert said.exit_code == 0
    assert [*json.loads(said.stdout)["stores"]] == ["postgres"]
    assert "geheim" not in said.output


def test_json_has_the_numbers_and_what_they_were_made_of() -> None:
    said = sized("--rate 600/min --keep forever --store redis --result 1KiB --duplicates 5% --format json")

    found = json.loads(said.stdout)
    assert found["workload"]["rate"] == 10
    assert found["workload"]["keep"] is None
    assert found["workload"]["result"] == 1024
    assert found["stores"]["redis"]["records"] is None
    assert found["stores"]["redis"]["bytes_a_day"] > 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--rate 5", "--rate '5' is not a rate"),
        ("--rate 0/s", "more than nothing"),
        ("--rate 5/fortnight", "is not a rate"),
        ("--rate 1e99/s", "at most"),
        ("--rate 5/s --keep soon", "--keep 'soon' is not a duration"),
        ("--rate 5/s --keep 0s", "--keep: a record that is not kept"),
        ("--rate 5/s --duplicates most", "--duplicates 'most' is not a share"),
        ("--rate 5/s --duplicates 100%", "less than 100%"),
        ("--rate 5/s --duplicates 101%", "is not a share"),
        ("--rate 5/s --result 3GiB", "--result '3GiB' is not a size"),
        ("--rate 5/s --result 2MiB", "above 1 MiB is not kept"),
        ("--rate 5/s --handler forever", "--handler: give it a finite number"),
        ("--rate 5/s --peak 0", "--peak"),
        ("--rate 5/s --peak nan", "--peak"),
        ("--rate 5/s --store postgre", "Did you mean postgres?"),
        ("--rate 5/s --store memory:", "'memory' has no measured costs"),
        ("--rate 5/s --store redis --mode transactional", "Redis cannot commit with the rows of your database"),
        ("--rate 5/s --key 0", "See onefold size --help"),
        ("--keep 5d", "See onefold size --help"),
    ],
)
def test_what_cannot_be_meant_gets_one_line(line: str, says: str) -> None:
    said = sized(line)

    assert said.exit_code == 2
    assert said.stdout == ""
    assert said.stderr.count("\n") == 1
    assert says in said.stderr


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("2000/s", 2000),
        ("2,000/sec", 2000),
        ("60/min", 1),
        ("7.2k/hour", 2),
        ("1e9/day", 1e9 / 86400),
        ("1bn / d", 1e9 / 86400),
    ],
)
def test_rates_are_written_as_people_write_them(text: str, rate: float) -> None:
    assert rate_of(text, "--rate") == pytest.approx(rate)


def test_sizes_and_shares_are_written_as_people_write_them() -> None:
    assert [bytes_of(text, "--result") for text in ("300", "300B", "2KB", "1.5KiB")] == [300, 300, 2000, 1536]
    assert [share_of(text, "--duplicates") for text in ("5%", "0.05", "0")] == [0.05, 0.05, 0.0]


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0"), (0.0842, "0.0842"), (9.5, "9.5"), (950, "950"), (1234, "1,230"), (5.184e9, "5.18 billion")],
)
def test_numbers_are_said_with_three_digits(number: float, words: str) -> None:
    assert in_words(number) == words


@pytest.mark.parametrize(
    ("number", "words"), [(254, "254 bytes"), (2048, "2 KiB"), (1.53e12, "1.39 TiB"), (1e30, "867,000,000,000 EiB")]
)
def test_bytes_are_said_in_the_unit_that_fits(number: float, words: str) -> None:
    assert in_bytes(number) == words
