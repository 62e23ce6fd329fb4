"""A hand-made table as records: every row that has a key, in pages, on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import math
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
from msgspec.structs import asdict

from onefold import Guard, ResultNotKept, State, StoreUnavailable, UsageError
from onefold.maintenance import imports
from onefold.maintenance import table as tables
from onefold.maintenance.imports import Rows, Tally, importing
from onefold.maintenance.table import Table
from onefold.stores.base import Query
from onefold.stores.hand_made.rows import age_of
from onefold.stores.memory import MemoryStore
from onefold.stores.table_reader import Now, Reader, reading

DAY = 86_400.0

Execute = Callable[..., None]


class Database:
    """One of the three, with a connection to make tables by."""

    def __init__(self, kind: str, url: str, execute: Execute) -> None:
        self.kind = kind
        self.url = url
        self.execute = execute

    def fill(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        marked = statement if self.kind != "sqlite" else statement.replace("%s", "?")
        self.execute(marked, rows)


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
        connect: Callable[[], Any] = lambda: sqlite3.connect(f"{tmp_path}/shop.db")  # noqa: E731
    elif request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        connect = lambda: psycopg.connect(url)  # noqa: E731
    else:
        url = request.getfixturevalue("mysql_url")
        parts = urlsplit(url)
        options: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
        options |= {"password": parts.password or "", "database": parts.path[1:]}
        connect = lambda: pymysql.connect(**options)  # noqa: E731
    with closing(connect()) as connection:

        def execute(statement: str, rows: Sequence[Sequence[Any]] | None = None) -> None:
            cursor = connection.cursor()
            if rows is None:
                cursor.execute(statement)
            else:
                cursor.executemany(statement, rows)
            cursor.close()
            connection.commit()

        yield Database(request.param, url, execute)


def run(
    url: str, table: Table, new: Any, *, operation: str | None = "charge", keep: float = math.inf, dry_run: bool = False
) -> Tally:
    tally = Tally()
    with reading(url) as reader:
        for _ in importing(Rows(reader, table, operation, keep), new, tally=tally, dry_run=dry_run):
            pass
    return tally


def counts(tally: Tally) -> dict[str, int]:
    return {name: count for name, count in asdict(tally).items() if name != "reasons" and count}


PROCESSED = "CREATE TABLE processed_messages (message_id VARCHAR(64) PRIMARY KEY, processed_at TIMESTAMP)"
USUAL = Table("processed_messages", "message_id", at="processed_at")


@pytest.fixture
def processed(database: Database) -> Database:
    database.execute(PROCESSED)
    return database


def rows_of(count: int, ago: timedelta = timedelta(0)) -> list[tuple[str, Any]]:
    at = datetime.now(UTC).replace(tzinfo=None) - ago
    return [(f"m{number:05}", str(at)) for number in range(count)]


INSERT = "INSERT INTO processed_messages VALUES (%s, %s)"


def test_what_the_table_remembers_does_not_run_again(processed: Database) -> None:
    processed.fill(INSERT, rows_of(3, timedelta(days=1)))
    new = MemoryStore()

    assert counts(run(processed.url, USUAL, new)) == {"imported": 3}

    outcome = Guard(new).run("charge", "m00001", pytest.fail)
    assert (outcome.replayed, outcome.omitted) == (True, True)
    assert outcome.remark == "imported from processed_messages"
    assert Guard(new).run("charge", "m00003", lambda: "ran").value == "ran"


def test_a_function_that_returns_nothing_is_replayed_and_one_that_does_is_told(processed: Database) -> None:
    processed.fill(INSERT, rows_of(1))
    new = MemoryStore()
    run(processed.url, USUAL, new)
    guard = Guard(new)

    @guard.idempotent("charge", key="key", fingerprint=None)
    def handle(key: str) -> None:
        pytest.fail(key)

    @guard.idempotent("charge", key="key", fingerprint=None)
    def answer(key: str) -> int:
        pytest.fail(key)

    handle("m00000")
    with pytest.raises(ResultNotKept):
        answer("m00000")


def test_a_record_stays_as_long_as_it_is_kept_less_its_age(processed: Database) -> None:
    processed.fill(INSERT, rows_of(1, timedelta(days=10)))
    new = MemoryStore()

    run(processed.url, USUAL, new, keep=30 * DAY)

    (record,) = new.browse(Query(), 9)
    assert record.state is State.DONE
    # A time without a zone is in that of the server.
    assert record.age == pytest.approx(10 * DAY, abs=DAY)
    assert record.ttl_left == pytest.approx(20 * DAY, abs=DAY)


def test_what_was_done_longer_ago_than_it_is_kept_is_left_out_and_counted(processed: Database) -> None:
    processed.fill(INSERT, [("old", rows_of(1, timedelta(days=40))[0][1]), ("young", rows_of(1)[0][1]), ("new", None)])
    new = MemoryStore()

    assert counts(run(processed.url, USUAL, new, keep=30 * DAY)) == {"imported": 2, "over": 1}
    assert [record.address.key for record in new.browse(Query(), 9)] == ["new", "young"]


def test_a_second_run_imports_only_what_is_new_and_overwrites_nothing(processed: Database) -> None:
    processed.fill(INSERT, rows_of(5))
    new = MemoryStore()
    Guard(new).run("charge", "m00002", lambda: "ours")

    assert counts(run(processed.url, USUAL, new, dry_run=True)) == {"imported": 4, "there": 1}
    assert len(new) == 1
    assert counts(run(processed.url, USUAL, new)) == {"imported": 4, "there": 1}
    assert counts(run(processed.url, USUAL, new)) == {"there": 5}
    assert Guard(new).run("charge", "m00002", pytest.fail).value == "ours"


def test_every_row_is_read_once_over_many_pages(processed: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PAGE", 7)
    processed.fill(INSERT, rows_of(100))
    new = MemoryStore()

    assert counts(run(processed.url, USUAL, new)) == {"imported": 100}
    assert len(new) == 100


def test_a_column_of_fixed_width_holds_keys_of_any_length(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PAGE", 2)
    database.execute("CREATE TABLE seen (id CHAR(40) PRIMARY KEY, tenant CHAR(10))")
    database.fill("INSERT INTO seen VALUES (%s, %s)", [(f"m{number}", "t1") for number in range(7)])
    new = MemoryStore()

    assert counts(run(database.url, Table("seen", "id", scope="tenant"), new)) == {"imported": 7}

    addresses = [record.address for record in new.browse(Query(), 9)]
    assert [(one.scope, one.key) for one in addresses] == [("t1", f"m{number}") for number in range(7)]


def test_keys_that_a_collation_takes_for_equal_are_not_lost_between_pages(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "PAGE", 2)
    loose = {"sqlite": "COLLATE NOCASE", "mysql": "COLLATE utf8mb4_general_ci", "postgres": ""}[database.kind]
    size = "CHARACTER SET utf8mb4" if database.kind == "mysql" else ""
    database.execute(f"CREATE TABLE seen (id VARCHAR(20) {size} {loose} NOT NULL)")
    keys = ["abc", "Abc", "aBc", "abC", "ABC", "b", "B", "c", "c", "c"]
    database.fill("INSERT INTO seen VALUES (%s)", [(key,) for key in keys])
    new = MemoryStore()

    tally = run(database.url, Table("seen", "id"), new)

    assert {record.address.key for record in new.browse(Query(), 99)} == set(keys)
    assert counts(tally) == {"imported": 8, "merged": 2}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_every_row_of_a_key_that_comes_several_times_is_counted_once(
    processed: Database, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(tables, "PAGE", size)
    processed.execute("CREATE TABLE log (id VARCHAR(20))")
    keys = ["a", *["b"] * 6, "c", *["d"] * 3, "e"]
    processed.fill("INSERT INTO log VALUES (%s)", [(key,) for key in keys])

    tally = run(processed.url, Table("log", "id"), MemoryStore())

    assert counts(tally) == {"imported": 5, "merged": 7}
    assert tally.seen == len(keys)


def test_a_key_with_more_rows_than_memory_is_told(processed: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PAGE", 2)
    monkeypatch.setattr(tables, "PAGE_MAX", 4)
    processed.execute("CREATE TABLE log (id VARCHAR(20))")
    processed.fill("INSERT INTO log VALUES (%s)", [("same",)] * 20)

    with pytest.raises(UsageError, match="a view of the distinct ones"):
        run(processed.url, Table("log", "id"), MemoryStore())


def test_scopes_operations_and_results_come_from_columns(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PAGE_WITH_RESULTS", 3)
    database.execute("CREATE TABLE seen (tenant INTEGER, consumer VARCHAR(20), id INTEGER, answer VARCHAR(50))")
    # The same id for many tenants and consumers: a page may end in the middle of them.
    rows = [
        (tenant, consumer, 7, f"{tenant}{consumer}") for tenant in (1, 2, 3, None) for consumer in ("charge", "mail")
    ]
    database.fill("INSERT INTO seen VALUES (%s, %s, %s, %s)", [*rows, (4, "mail", 7, None)])
    new = MemoryStore()

    tally = run(database.url, Table("seen", "id", "tenant", "consumer", None, "answer"), new, operation=None)

    assert counts(tally) == {"imported": 9}
    assert Guard(new).run("mail", 7, pytest.fail, scope="2").value == "2mail"
    assert Guard(new).run("charge", 7, pytest.fail).value == "Nonecharge"
    assert Guard(new).run("mail", 7, pytest.fail, scope="4").value is None


def test_rows_without_a_usable_key_are_counted_and_told(processed: Database) -> None:
    processed.execute("CREATE TABLE seen (id VARCHAR(300), op VARCHAR(20))")
    rows = [("ok", "charge"), (None, "charge"), ("x", None), ("", "charge"), ("k" * 256, "charge")]
    processed.fill("INSERT INTO seen VALUES (%s, %s)", rows)
    new = MemoryStore()

    tally = run(processed.url, Table("seen", "id", operation="op"), new, operation=None)

    assert counts(tally) == {"imported": 1, "unusable": 4}
    assert [(reason.count, reason.row) for reason in tally.reasons.values()] == [(1, 1), (1, 2), (2, None)]
    assert all("key" in reason.why or "op" in reason.why for reason in tally.reasons.values())
    assert not any("kkk" in reason.why for reason in tally.reasons.values())


def test_each_kind_of_reason_is_told_once_with_the_first_of_its_rows(
    processed: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "PAGE", 2)
    processed.execute("CREATE TABLE seen (id VARCHAR(600), at VARCHAR(40))")
    rows = [("a", "soon"), ("b", None), ("b", None), ("c", "2999-01-01"), ("d", "later"), ("k" * 300, None)]
    processed.fill("INSERT INTO seen VALUES (%s, %s)", [*rows, ("k" * 301, None), (None, None)])

    tally = run(processed.url, Table("seen", "id", at="at"), MemoryStore())

    assert counts(tally) == {"imported": 1, "merged": 1, "unusable": 6}
    told = {reason.why: (reason.count, reason.row) for reason in tally.reasons.values()}
    assert list(told.values()) == [(2, 1), (1, 4), (2, 6), (1, None)]
    assert [message for message in told if "in the future" in message] == [list(told)[1]]


def test_reasons_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "REASONS_MAX", 2)
    tally = Tally()

    for letter in "abcd":
        tally.leave(f"the reason {letter}", 1)

    assert [(reason.why, reason.count) for reason in tally.reasons.values()] == [
        ("the reason a", 1),
        ("the reason b", 1),
        ("other reasons", 2),
    ]


def test_a_key_that_is_no_whole_number_is_refused_and_not_quoted(processed: Database) -> None:
    processed.execute("CREATE TABLE seen (id DOUBLE PRECISION)")
    processed.fill("INSERT INTO seen VALUES (%s)", [(4242.5,), (17.25,)])

    tally = run(processed.url, Table("seen", "id"), MemoryStore())

    assert [(reason.count, reason.row) for reason in tally.reasons.values()] == [(2, 1)]
    assert not any("4242" in reason.why or "17.25" in reason.why for reason in tally.reasons.values())


def test_a_json_column_comes_back_as_it_was_stored(database: Database) -> None:
    column = {"postgres": "JSONB", "mysql": "TEXT", "sqlite": "TEXT"}[database.kind]
    database.execute(f"CREATE TABLE seen (id INTEGER, answer {column})")
    database.fill("INSERT INTO seen VALUES (%s, %s)", [(1, '{"receipt": 17}')])
    new = MemoryStore()

    run(database.url, Table("seen", "id", result="answer"), new)

    # MariaDB and SQLite have no type for it: a text is a text.
    expected = {"receipt": 17} if database.kind == "postgres" else '{"receipt": 17}'
    assert Guard(new).run("charge", 1, pytest.fail).value == expected


NASTY = ['a"b', "a`b", "a'b; DROP TABLE seen; --", "select", "per%cent %s", "sp ace", "ünï"]


@pytest.mark.parametrize("name", NASTY)
def test_a_name_is_a_name_and_nothing_else(database: Database, name: str) -> None:
    with reading(database.url) as reader:
        table, column = reader.named(name), reader.named(f"{name} id")
    if database.kind == "postgres":
        # psycopg reads no marks where there are no values.
        table, column = table.replace("%%", "%"), column.replace("%%", "%")
    elif database.kind == "mysql":
        table, column = table.replace("%%", "%"), column.replace("%%", "%")
    database.execute(f"CREATE TABLE {table} ({column} INTEGER)")
    database.execute(f"INSERT INTO {table} VALUES (1)")
    new = MemoryStore()

    assert counts(run(database.url, Table(name, f"{name} id"), new)) == {"imported": 1}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (Table("procesed_messages", "message_id"), "did you mean 'processed_messages'?"),
        (Table("processed_messages", "mesage_id"), "did you mean 'message_id'?"),
        (Table("processed_messages", "message_id", at="at; DROP TABLE x"), "no column 'at; DROP TABLE x'"),
        (Table("processed_messages; DROP TABLE processed_messages", "message_id"), "no table"),
        (Table(" ", "message_id"), "is not a valid table or column name"),
    ],
)
def test_what_is_not_there_is_told_with_the_nearest_name(processed: Database, table: Table, says: str) -> None:
    with pytest.raises(UsageError, match=".*".join(says.split("?"))):
        run(processed.url, table, MemoryStore())

    assert counts(run(processed.url, USUAL, MemoryStore())) == {}


def test_a_table_in_another_schema_and_a_view_can_be_read(processed: Database) -> None:
    processed.fill(INSERT, rows_of(2))
    processed.execute("CREATE VIEW seen AS SELECT message_id AS id FROM processed_messages")
    schema = {"sqlite": "main", "postgres": "public", "mysql": urlsplit(processed.url).path[1:]}[processed.kind]

    assert counts(run(processed.url, Table("seen", "id"), MemoryStore())) == {"imported": 2}
    assert counts(run(processed.url, USUAL._replace(name=f"{schema}.processed_messages"), MemoryStore())) == {
        "imported": 2
    }
    with pytest.raises(StoreUnavailable):
        run(processed.url, USUAL._replace(name="nowhere.processed_messages"), MemoryStore())


def test_the_reader_writes_nothing(processed: Database) -> None:
    with reading(processed.url) as reader, pytest.raises(StoreUnavailable):
        reader.rows("INSERT INTO processed_messages (message_id) VALUES ('x')")

    with reading(processed.url) as reader:
        assert reader.rows("SELECT count(*) FROM processed_messages") == [(0,)]
        assert not {str(name) for (name,) in reader.rows(reader.tables)} & {"onefold_records", "onefold_schema"}


def test_the_table_may_be_in_the_database_of_the_store(processed: Database) -> None:
    processed.fill(INSERT, rows_of(1_500))

    with Guard(processed.url) as guard:
        assert counts(run(processed.url, USUAL, guard.store)) == {"imported": 1_500}
        assert guard.run("charge", "m01499", pytest.fail).replayed


@pytest.mark.parametrize("url", ["redis://localhost", "memory:", "dynamodb://table"])
def test_a_store_without_tables_cannot_be_imported_from(url: str) -> None:
    with pytest.raises(UsageError, match="has no tables to read"), reading(url):
        pass


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="there is no file"), reading(f"sqlite:///{tmp_path}/x.db"):
        pass
    assert list(tmp_path.iterdir()) == []


# --- when it was done

AWARE = datetime(2026, 5, 3, 12, tzinfo=UTC)
NOW = Now(AWARE, datetime(2026, 5, 3, 14))  # noqa: DTZ001 - of a server that is two hours ahead


@pytest.mark.parametrize(
    ("at", "age"),
    [
        (None, 0.0),
        (AWARE - timedelta(hours=3), 3 * 3_600.0),
        (datetime(2026, 5, 3, 13), 3_600.0),  # noqa: DTZ001
        (date(2026, 5, 3), 14 * 3_600.0),
        ("2026-05-03 13:00:00", 3_600.0),
        ("2026-05-03T11:00:00Z", 3_600.0),
        (AWARE.timestamp() - 60, 60.0),
        (int(AWARE.timestamp()) - 60, 60.0),
        (Decimal(int(AWARE.timestamp())) - 60, 60.0),
        ((int(AWARE.timestamp()) - 60) * 1_000, 60.0),
        # Clocks differ, and a date is that of a zone.
        (AWARE + timedelta(minutes=4), 0.0),
        (date(2026, 5, 4), 0.0),
    ],
)
def test_an_age_is_counted_by_the_clock_of_the_database(at: Any, age: float) -> None:
    assert age_of(at, NOW) == pytest.approx(age, abs=0.001)


@pytest.mark.parametrize(
    "at",
    [
        AWARE + timedelta(minutes=6),
        datetime(2026, 5, 3, 15),  # noqa: DTZ001
        date(2026, 5, 5),
        "2026-05-04 14:00:00",
        AWARE.timestamp() + 3_600,
        # Microseconds.
        int(AWARE.timestamp()) * 1_000_000,
        math.inf,
    ],
)
def test_what_lies_ahead_is_refused_and_not_taken_for_now(at: Any) -> None:
    with pytest.raises(UsageError, match="in the future: the column for `at` holds another time zone"):
        age_of(at, NOW)


@pytest.mark.parametrize("at", ["soon", "", b"x", True, math.nan, uuid.uuid4()])
def test_what_says_no_time_is_refused_and_not_taken_for_now(at: Any) -> None:
    with pytest.raises(UsageError, match="for `at`"):
        age_of(at, NOW)


def test_the_clock_of_a_database_is_read(processed: Database) -> None:
    with reading(processed.url) as reader:
        assert isinstance(reader, Reader)
        assert reader.now().aware.timestamp() == pytest.approx(time.time(), abs=30.0)
