"""Rows of a hand-made table count as done, by every driver: only for exactly their own address."""

from __future__ import annotations

import logging
import sqlite3
import uuid
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from onefold import Guard, Outcome, UsageError
from onefold.codecs import MsgspecCodec
from onefold.stores.hand_made import lookup, open_lookup
from onefold.stores.sql import foreign_tables
from tests.stores.hand_made.conftest import Database, Way


def ran(outcomes: list[Outcome[Any]]) -> list[bool]:
    return [not outcome.replayed for outcome in outcomes]


USUAL = "CREATE TABLE processed_messages (message_id VARCHAR(64) PRIMARY KEY, processed_at TIMESTAMP)"
INSERT = "INSERT INTO processed_messages VALUES (%s, %s)"


def ago(**time: float) -> str:
    return str(datetime.now(UTC).replace(tzinfo=None) - timedelta(**time))


def test_what_the_table_remembers_does_not_run(way: Way) -> None:
    way.execute(USUAL)
    way.execute(INSERT, [("m1", ago(days=1)), ('o\'brien "%s" :x', ago(days=2))])
    table = way.table("processed_messages", key="message_id", operation="credit", at="processed_at")

    outcomes = way.deliver(table, "credit", "m1", "m2", 'o\'brien "%s" :x', "M1", "m1 ")

    assert ran(outcomes) == [False, True, False, True, True]
    assert [outcome.omitted for outcome in outcomes] == [True, False, True, False, False]


def test_a_row_of_another_operation_does_not_count(way: Way) -> None:
    way.execute("CREATE TABLE seen (id VARCHAR(64), consumer VARCHAR(64), PRIMARY KEY (consumer, id))")
    way.execute("INSERT INTO seen VALUES (%s, %s)", [("m1", "credit"), ("m2", "refund"), ("m3", "Credit")])

    assert ran(way.deliver(way.table("seen", key="id", operation="other"), "credit", "m1")) == [True]
    by_column = way.table("seen", key="id", operation_column="consumer")
    assert ran(way.deliver(by_column, "credit", "m1", "m2", "m3")) == [False, True, True]


def test_a_tenant_has_its_own_keys(way: Way) -> None:
    way.execute("CREATE TABLE seen (id VARCHAR(64) NOT NULL, tenant VARCHAR(64), number INTEGER)")
    way.execute("INSERT INTO seen VALUES (%s, %s, %s)", [("m1", "t1", 1), ("m2", None, 2), ("m3", "", 3)])
    table = way.table("seen", key="id", operation="credit", scope_column="tenant")

    assert ran(way.deliver(table, "credit", "m1", "m2", "m3", scope="t1")) == [False, True, True]
    assert ran(way.deliver(table, "credit", "m1", scope="t2")) == [True]
    assert ran(way.deliver(table, "credit", "m1", "m2", "m3")) == [True, False, False]
    by_number = way.table("seen", key="id", operation="credit", scope_column="number")
    assert ran(way.deliver(by_number, "credit", "m1", "m2", scope="1")) == [False, True]


def test_without_a_column_for_the_scope_a_delivery_with_one_is_refused(way: Way) -> None:
    way.execute(USUAL)
    table = way.table("processed_messages", key="message_id", operation="credit")

    with pytest.raises(UsageError, match="names no scope_column="):
        way.deliver(table, "credit", "m1", scope="t1")


def test_integers_are_keys(way: Way) -> None:
    way.execute("CREATE TABLE seen (id BIGINT PRIMARY KEY)")
    large = 2**63 - 1
    way.execute("INSERT INTO seen VALUES (%s)", [(7,), (large,), (-3,)])
    table = way.table("seen", key="id", operation="credit")

    known = [7, "7", large, large - 1, -3]
    others = ["07", "7.0", " 7", "7e0", "seven", 2**63, 2**70, "+7", 8]
    assert ran(way.deliver(table, "credit", *known)) == [False, False, False, True, False]
    assert ran(way.deliver(table, "credit", *others)) == [True] * len(others)


def test_without_a_type_integers_and_texts_are_keys(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE seen (id PRIMARY KEY)")
        connection.executemany("INSERT INTO seen VALUES (?)", [(7,), ("8",), ("nine",)])
        connection.commit()
    database = Database("sqlite", f"sqlite:///{tmp_path}/shop.db", print)
    way = Way(database, database.url, is_async=False)

    outcomes = way.deliver(way.table("seen", key="id", operation="credit"), "credit", 7, 8, "nine", 10)

    assert ran(outcomes) == [False, False, False, True]


def test_uuids_are_keys(way: Way) -> None:
    known, other = uuid.uuid4(), uuid.uuid4()
    way.execute(f"CREATE TABLE seen (id {'UUID' if way.database.kind == 'postgres' else 'VARCHAR(36)'} PRIMARY KEY)")
    way.execute("INSERT INTO seen VALUES (%s)", [(str(known),)])
    table = way.table("seen", key="id", operation="credit")

    outcomes = way.deliver(table, "credit", known, str(known), other, str(known).upper(), "not one")

    assert ran(outcomes) == [False, False, True, True, True]


def test_other_texts_are_keys(way: Way) -> None:
    way.execute("CREATE TABLE seen (id CHAR(4) PRIMARY KEY)")
    way.execute("INSERT INTO seen VALUES (%s)", [("abcd",), ("ABCE",)])
    table = way.table("seen", key="id", operation="credit")

    assert ran(way.deliver(table, "credit", "abcd", "abce", "ABCE")) == [False, True, False]


def test_a_column_of_fixed_width_holds_keys_scopes_and_operations_of_any_length(way: Way) -> None:
    way.execute("CREATE TABLE seen (id CHAR(40) PRIMARY KEY, tenant CHAR(10), consumer CHAR(20), answer CHAR(9))")
    way.execute("INSERT INTO seen VALUES (%s, %s, %s, %s)", [("m1", "t1", "credit", "yes"), ("m2", "t2", "other", "")])
    columns = {"key": "id", "scope_column": "tenant", "operation_column": "consumer", "result_column": "answer"}

    outcomes = way.deliver(way.table("seen", **columns), "credit", "m1", "m2", "m3", scope="t1")

    assert ran(outcomes) == [False, True, True]
    assert outcomes[0].value == "yes"


def test_a_result_is_replayed(way: Way) -> None:
    way.execute("CREATE TABLE seen (id VARCHAR(64) PRIMARY KEY, answer VARCHAR(64), facts JSON, number BIGINT)")
    rows = [("m1", "receipt 17", '{"a": [1, "x"]}', 17), ("m2", None, '"text"', None)]
    way.execute("INSERT INTO seen VALUES (%s, %s, %s, %s)", rows)

    def values(column: str) -> list[Any]:
        table = way.table("seen", key="id", operation="credit", result_column=column)
        return [outcome.value for outcome in way.deliver(table, "credit", "m1", "m2")]

    assert values("answer") == ["receipt 17", None]
    assert values("number") == [17, None]
    # MariaDB and SQLite have no type for JSON: it is a text there.
    parsed = [{"a": [1, "x"]}, "text"]
    assert values("facts") == (parsed if way.database.kind == "postgres" else ['{"a": [1, "x"]}', '"text"'])


@pytest.mark.parametrize("keep", ["2d", timedelta(days=2)])
def test_a_row_counts_for_as_long_as_it_is_kept(way: Way, keep: Any) -> None:
    way.execute(USUAL)
    way.execute(INSERT, [("m1", ago(days=1)), ("m2", ago(days=3)), ("m3", None)])
    table = way.table("processed_messages", key="message_id", operation="credit", at="processed_at", keep=keep)

    assert ran(way.deliver(table, "credit", "m1", "m2", "m3")) == [False, True, False]


def test_of_several_rows_the_newest_counts(database: Database) -> None:
    database.execute("CREATE TABLE log (id VARCHAR(64), at TIMESTAMP)")
    rows = [("m1", ago(days=9)), ("m1", ago(hours=6)), ("m1", ago(hours=30))]
    database.execute("INSERT INTO log VALUES (%s, %s)", rows)
    table = Way(database, database.url, is_async=False).table("log", key="id", operation="credit", at="at", keep="2d")

    with Guard("memory:", migrate_from=table) as guard:
        record = guard.read("credit", "m1")

    assert record is not None
    assert 1.7 < record.ttl_left / 86_400 < 1.8


def test_more_rows_of_nearly_one_key_than_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (foreign_tables, lookup):
        monkeypatch.setattr(module, "ROWS_MAX", 2)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE seen (id TEXT COLLATE NOCASE)")
        connection.executemany("INSERT INTO seen VALUES (?)", [("AB",), ("Ab",), ("ab",)])
        connection.commit()
    database = Database("sqlite", f"sqlite:///{tmp_path}/shop.db", print)
    way = Way(database, database.url, is_async=False)
    table = way.table("seen", key="id", operation="credit")

    with pytest.raises(UsageError, match="more than 2 rows have a key that the database considers equal"):
        way.deliver(table, "credit", "ab")
    assert ran(way.deliver(table, "credit", "AB", "abc")) == [False, True]


REPEATED = "CREATE TABLE runs (job VARCHAR(64) NOT NULL, done_at VARCHAR(64))"
REPEATED_TIMES = "CREATE TABLE runs (job VARCHAR(64) NOT NULL, done_at TIMESTAMP NULL)"


@pytest.mark.parametrize("statement", [REPEATED, REPEATED_TIMES])
def test_of_more_rows_of_one_key_than_are_read_the_latest_counts(
    way: Way, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    for module in (foreign_tables, lookup):
        monkeypatch.setattr(module, "ROWS_MAX", 2)
    way.execute(statement)
    days = {"daily": (9, 8, 1, 7, 6), "past": (9, 8, 7), "unknown": (9, 8, None, 7)}
    rows = [(job, None if day is None else ago(days=day)) for job, each in days.items() for day in each]
    way.execute("INSERT INTO runs VALUES (%s, %s)", rows)
    table = way.table("runs", key="job", operation="report", at="done_at", keep="2d")

    assert ran(way.deliver(table, "report", "daily", "past", "unknown")) == [False, True, False]


def test_more_rows_of_one_key_than_are_read_are_refused_if_their_order_is_not_that_of_their_times(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (foreign_tables, lookup):
        monkeypatch.setattr(module, "ROWS_MAX", 2)
    way.execute(REPEATED)
    times = ["2020-01-01 10:00:00+00:00", "2020-01-01 11:00:00+14:00", "2020-01-01 09:00:00+00:00"]
    way.execute("INSERT INTO runs VALUES (%s, %s)", [("daily", time) for time in times])
    table = way.table("runs", key="job", operation="report", at="done_at", keep="2d")

    with pytest.raises(UsageError, match="more than 2 rows have a key that the database considers equal"):
        way.deliver(table, "report", "daily")


def test_in_doubt_about_its_row_a_delivery_does_not_run(way: Way) -> None:
    way.execute(USUAL)
    way.execute(INSERT, [("m1", ago(days=-9))])
    table = way.table("processed_messages", key="message_id", operation="credit", at="processed_at")

    with pytest.raises(UsageError, match="its row in processed_messages cannot be used: its time is in the future"):
        way.deliver(table, "credit", "m1")
    assert ran(way.deliver(table, "credit", "m2")) == [True]


def test_a_view_is_read(way: Way) -> None:
    way.execute(USUAL)
    way.execute(INSERT, [("m1", ago(days=1))])
    way.execute("CREATE VIEW done AS SELECT message_id AS id, 'credit' AS what FROM processed_messages")
    table = way.table("done", key="id", operation_column="what")

    assert ran(way.deliver(table, "credit", "m1", "m2")) == [False, True]


def test_a_schema_before_a_dot(way: Way) -> None:
    schema = {"sqlite": "main", "postgres": "legacy"}.get(way.database.kind) or way.database.url.rpartition("/")[2]
    if way.database.kind == "postgres":
        way.execute("CREATE SCHEMA legacy")
    way.execute(f"CREATE TABLE {schema}.seen (id VARCHAR(64) PRIMARY KEY)")
    way.execute(f"INSERT INTO {schema}.seen VALUES (%s)", [("m1",)])
    table = way.table(f"{schema.partition('?')[0]}.seen", key="id", operation="credit")

    assert ran(way.deliver(table, "credit", "m1", "m2")) == [False, True]


@pytest.mark.parametrize(
    ("name", "columns", "says"),
    [
        ("procesed_messages", {}, "has no table 'procesed_messages': did you mean 'processed_messages'?"),
        ("processed_messages", {"key": "mesage_id"}, "has no column 'mesage_id': did you mean 'message_id'?"),
        ("processed_messages", {"at": "procesed_at"}, "did you mean 'processed_at'?"),
        ("processed_messages", {"result_column": "result"}, "processed_messages has no column 'result'"),
        ("processed_messages; DROP TABLE x", {}, "has no table"),
        ("processed_messages", {"key": "a:b"}, "make a view with plain names"),
    ],
)
def test_a_wrong_name_is_refused_at_the_first_use(way: Way, name: str, columns: dict[str, Any], says: str) -> None:
    way.execute(USUAL)
    table = way.table(name, **{"key": "message_id", "operation": "credit", **columns})

    with pytest.raises(UsageError) as raised:
        way.deliver(table, "credit", "m1")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_type_that_no_key_has_is_refused(way: Way) -> None:
    if way.database.kind == "sqlite":
        pytest.skip("a column of SQLite may hold any value")
    way.execute("CREATE TABLE seen (id DECIMAL(20, 2) PRIMARY KEY)")

    with pytest.raises(UsageError, match="a key is text, an integer or a UUID"):
        way.deliver(way.table("seen", key="id", operation="credit"), "credit", "7")


def test_nothing_is_written_to_its_database(way: Way) -> None:
    way.execute(USUAL)
    way.execute(INSERT, [("m1", ago(days=1))])
    way.deliver(way.table("processed_messages", key="message_id", operation="credit"), "credit", "m1", "m2")

    from onefold.stores.table_reader import reading

    with reading(way.database.url) as reader:
        assert [name for (name,) in reader.rows(reader.tables) if name.startswith("onefold")] == []
        assert reader.rows("SELECT count(*) FROM processed_messages") == [(1,)]


# What is told.


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("create", "columns", "is_indexed"),
    [
        ("CREATE TABLE seen (id VARCHAR(64), tenant VARCHAR(64))", {}, False),
        ("CREATE TABLE seen (id VARCHAR(64), tenant VARCHAR(64), PRIMARY KEY (id, tenant))", {}, True),
        ("CREATE TABLE seen (id VARCHAR(64), tenant VARCHAR(64), PRIMARY KEY (tenant, id))", {}, False),
        (
            "CREATE TABLE seen (id VARCHAR(64), tenant VARCHAR(64), PRIMARY KEY (tenant, id))",
            {"scope_column": "tenant"},
            True,
        ),
        ("CREATE TABLE seen (id INTEGER PRIMARY KEY, tenant VARCHAR(64))", {}, True),
    ],
)
def test_a_key_without_an_index_is_told_once(
    database: Database, create: str, columns: dict[str, Any], is_indexed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    database.execute(create)
    way = Way(database, database.url, is_async=False)

    way.deliver(way.table("seen", key="id", operation="credit", **columns), "credit", "1", "2")

    said = [text for text in warnings(caplog) if "no index leads to the column 'id'" in text]
    assert len(said) == (0 if is_indexed else 1)


def test_an_operation_that_is_nearly_the_tables_is_told(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    database.execute(USUAL)
    way = Way(database, database.url, is_async=False)
    table = way.table("processed_messages", key="message_id", operation="credti")

    way.deliver(table, "credit", "m1", "m2")
    way.deliver(table, "refund", "m1")

    assert [text for text in warnings(caplog) if "no row counts for" in text] == [
        f"{table!r} has operation='credti': no row counts for 'credit'"
    ]


def test_a_table_that_changes_is_looked_at_again(database: Database) -> None:
    database.execute(USUAL)
    way = Way(database, database.url, is_async=False)
    table = way.table("processed_messages", key="message_id", operation="credit")

    with Guard("memory:", migrate_from=table) as guard:
        assert not guard.run("credit", "m1", lambda: "ran").replayed
        database.execute("ALTER TABLE processed_messages RENAME TO processed")
        with pytest.raises(Exception, match="processed_messages cannot be read"):
            guard.run("credit", "m2", lambda: "ran")
        with pytest.raises(UsageError, match="has no table 'processed_messages'"):
            guard.run("credit", "m2", lambda: "ran")
        database.execute("ALTER TABLE processed RENAME TO processed_messages")
        assert not guard.run("credit", "m2", lambda: "ran").replayed


def test_a_check_finds_what_the_first_use_would(way: Way) -> None:
    import asyncio

    way.execute(USUAL)

    def check(name: str) -> None:
        found: Any = open_lookup(
            way.table(name, key="message_id", operation="credit"), MsgspecCodec(), is_async=way.is_async
        )

        async def checked() -> None:
            try:
                await found.check()
            finally:
                await found.aclose()

        if way.is_async:
            asyncio.run(checked())
            return
        try:
            found.check()
        finally:
            found.close()

    check("processed_messages")
    with pytest.raises(UsageError, match="has no table 'processed'"):
        check("processed")
