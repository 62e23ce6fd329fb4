"""What a row of the caller's keeps of a delivery in a transaction of the guard's, and what is refused."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
import pymysql
import pytest

from onefold import TX, Guard, InProgress, KeyReused, Policy, RecordColumn, ResultNotKept, UsageError
from tests.stores.postgres.tools import ended
from tests.stores.sql.endings import CREDIT, DRIVERS, Driver, Hand
from tests.stores.sql.test_row_races import KEYS, TABLES, WRITES
from tests.stores.sqlalchemy.wallet import Ledger

PLAIN = RecordColumn("idempotency_keys", "key")
PAYMENT = RecordColumn("payments", "idempotency_key")


@pytest.fixture(
    params=[one for one in DRIVERS if one.name in ("sqlite3", "psycopg", "pymysql")], ids=lambda one: one.name
)
def driver(request: pytest.FixtureRequest) -> Driver:
    found: Driver = request.param
    return found


@pytest.fixture
def ledger(ledger: Ledger) -> Ledger:
    ledger.execute(TABLES[ledger.database])
    return ledger


@pytest.fixture
def guard(driver: Driver, ledger: Ledger) -> Iterator[Guard]:
    url = f"sqlite:///{ledger.address}" if driver.database == "sqlite" else ledger.address
    with Guard(url) as guard:
        yield guard


def sql(tx: Any, statement: str) -> None:
    ended(Hand(tx).sql(statement))


@dataclass
class Receipt:
    amount: int
    at: datetime
    proof: bytes


def nested(depth: int) -> dict[str, Any]:
    return {"in": nested(depth - 1)} if depth else {}


RESULTS: list[tuple[Any, Any]] = [
    (Any, {"receipt": "7e1a", "lines": [1, 2.5, None, True]}),
    (Any, "paid"),
    (type(None), None),
    (bytes, b"\0\xff"),
    (Any, 1e300),
    (Any, 0.1 + 0.2),
    (Any, -0.0),
    (Any, 99.0),
    (Any, 99),
    (Any, 2**63 + 5),
    (Any, nested(40)),
    (Any, "nul \0 inside"),
    (Receipt, Receipt(4200, datetime(2026, 5, 3, tzinfo=UTC), b"\0")),
]


@pytest.mark.parametrize("type_", ["JSON", "TEXT", "bytes"])
def test_a_duplicate_gets_the_result_that_is_kept_in_the_row(guard: Guard, ledger: Ledger, type_: str) -> None:
    kinds = {"sqlite": "BLOB", "postgres": "BYTEA", "mariadb": "LONGBLOB"}
    kept = kinds[ledger.database] if type_ == "bytes" else type_
    ledger.execute(f"CREATE TABLE requests (number VARCHAR(50) PRIMARY KEY, answer {kept})")
    record = RecordColumn("requests", "number", result="answer")

    for number, (returns, value) in enumerate(RESULTS):

        @guard.transactional(f"pay {number}", key="key", record=record, fingerprint=None, returns=returns)
        def pay(key: str, *, value: Any = value, tx: Any = TX) -> Any:
            sql(tx, f"INSERT INTO requests (number) VALUES ('{key}')")
            return value

        first, second = pay.outcome(f"k{number}"), pay.outcome(f"k{number}")

        assert (first.value, first.replayed) == (value, False)
        assert (second.value, second.replayed, second.omitted) == (value, True, False)
        # 1 equals 1.0, and 0.0 equals -0.0.
        assert isinstance(value, dict) or repr(second.value) == repr(value)


def test_people_can_read_the_result_in_the_row(guard: Guard, ledger: Ledger) -> None:
    @guard.transactional("pay", key="key", record=KEYS)
    def pay(key: str, *, tx: Any = TX) -> dict[str, int]:
        return {"amount": 4200}

    pay("k1")
    path = {
        "sqlite": "json_extract(result, '$.amount')",
        "postgres": "CAST(result->>'amount' AS integer)",
        "mariadb": "CAST(JSON_VALUE(result, '$.amount') AS INTEGER)",
    }[ledger.database]

    assert ledger.rows(f"SELECT {path} FROM idempotency_keys") == [(4200,)]


def test_the_same_key_with_another_payload_is_refused_and_nothing_runs(guard: Guard, ledger: Ledger) -> None:
    @guard.transactional("pay", key="key", record=KEYS)
    def pay(key: str, amount: int, *, tx: Any = TX) -> None:
        sql(tx, CREDIT)

    pay("k1", 4200)
    with pytest.raises(KeyReused):
        pay("k1", 9900)
    pay("k1", 4200)

    assert ledger.balance == 10


def test_a_row_without_a_place_for_a_result_replays_without_a_value(guard: Guard, ledger: Ledger) -> None:
    @guard.transactional("pay", key="key", record=PAYMENT, fingerprint=None)
    def pay(key: str, *, tx: Any = TX) -> str:
        sql(tx, f"INSERT INTO payments (idempotency_key, tenant, amount) VALUES ('{key}', '', 500)")
        return "paid"

    assert pay("k1") == "paid"
    again = pay.outcome("k1")

    assert (again.replayed, again.omitted, again.value_or(None)) == (True, True, None)
    with pytest.raises(ResultNotKept, match="the record is the row in payments"):
        pay("k1")


@pytest.mark.parametrize("policy", [Policy(keep_result=False), Policy(max_result_bytes=3)])
def test_a_result_that_is_not_to_be_kept_leaves_its_column_empty(guard: Guard, ledger: Ledger, policy: Policy) -> None:
    @guard.transactional("pay", key="key", record=KEYS, policy=policy)
    def pay(key: str, *, tx: Any = TX) -> str:
        return "paid in full"

    pay("k1")

    assert pay.outcome("k1").omitted
    assert ledger.rows("SELECT result FROM idempotency_keys") == [(None,)]


def test_a_result_of_somebody_elses_that_nobody_can_read_counts_as_not_kept(guard: Guard, ledger: Ledger) -> None:
    ledger.execute("CREATE TABLE requests (number VARCHAR(50) PRIMARY KEY, answer VARCHAR(50), print VARCHAR(255))")
    ledger.execute("INSERT INTO requests VALUES ('k1', 'not JSON', 'not ours')")
    record = RecordColumn("requests", "number", result="answer", fingerprint="print")

    @guard.transactional("pay", key="key", record=record)
    def pay(key: str, amount: int, *, tx: Any = TX) -> str:
        raise AssertionError("it is done")

    again = pay.outcome("k1", 5)

    assert (again.replayed, again.omitted) == (True, True)


def test_a_handler_that_forgets_its_row_is_told_which_columns_only_it_can_fill(guard: Guard, ledger: Ledger) -> None:
    @guard.transactional("pay", key="key", record=PAYMENT, fingerprint=None)
    def pay(key: str, *, tx: Any = TX) -> None:
        sql(tx, CREDIT)

    with pytest.raises(UsageError, match=r"pay \[key \w+\]: the handler has to write the row whose payments") as raised:
        pay("k1")

    assert "amount" in str(raised.value)
    assert "have none" in str(raised.value)
    assert (ledger.balance, ledger.rows("SELECT * FROM payments")) == (0, [])


def test_a_table_with_nothing_else_to_fill_gets_its_row_from_onefold(guard: Guard, ledger: Ledger) -> None:
    @guard.transactional("pay", key="key", record=KEYS)
    def pay(key: str, *, tx: Any = TX) -> str:
        sql(tx, CREDIT)
        return "paid"

    assert [pay("k1"), pay("k1")] == ["paid", "paid"]
    assert ledger.balance == 10
    assert [key for (key,) in ledger.rows(f"SELECT {quoted(ledger, 'key')} FROM idempotency_keys")] == ["k1"]


def test_a_column_that_may_be_null_but_has_no_default_is_for_the_handler_to_fill(guard: Guard, ledger: Ledger) -> None:
    @guard.transactional("pay", key="key", record=PLAIN, fingerprint=None)
    def pay(key: str, *, tx: Any = TX) -> None: ...

    with pytest.raises(UsageError, match="result, fingerprint have none"):
        pay("k1")


def test_a_handler_that_rolls_back_itself_leaves_no_row_and_runs_again(guard: Guard, ledger: Ledger) -> None:
    rolls_back = [True, False]

    @guard.transactional("pay", key="key", record=KEYS)
    def pay(key: str, *, tx: Any = TX) -> str:
        sql(tx, WRITES[ledger.database]["INSERT"].format(key=key))
        sql(tx, CREDIT)
        if rolls_back.pop(0):
            tx.rollback()
        return "paid"

    with pytest.raises(UsageError, match="ended the transaction by itself"):
        pay("k1")
    assert (ledger.balance, ledger.rows("SELECT * FROM idempotency_keys")) == (0, [])

    assert pay.outcome("k1").replayed is False
    assert ledger.balance == 10


def test_a_handler_that_raises_leaves_no_row_and_its_own_error(guard: Guard, ledger: Ledger) -> None:
    @guard.transactional("pay", key="key", record=KEYS)
    def pay(key: str, *, tx: Any = TX) -> str:
        sql(tx, CREDIT)
        raise InProgress("of the handler's own making")

    with pytest.raises(InProgress, match="of the handler's own making"):
        pay("k1")

    assert (ledger.balance, ledger.rows("SELECT * FROM idempotency_keys")) == (0, [])


@pytest.mark.parametrize("way", ["INSERT", "left to Onefold"])
def test_a_row_that_a_stranger_commits_meanwhile_is_replayed_and_no_error_of_the_database(
    guard: Guard, ledger: Ledger, way: str
) -> None:
    if ledger.database == "sqlite":
        pytest.skip("SQLite has one writer: a stranger waits")
    statement = WRITES[ledger.database][way]

    @guard.transactional("pay", key="key", record=KEYS)
    def pay(key: str, *, tx: Any = TX) -> str:
        ledger.execute(WRITES[ledger.database]["INSERT"].format(key=key))
        if statement:
            sql(tx, statement.format(key=key))
        sql(tx, CREDIT)
        return "paid"

    outcome = pay.outcome("k1")

    assert (outcome.replayed, outcome.omitted, ledger.balance) == (True, True, 0)


def test_a_handler_that_writes_its_row_twice_gets_its_own_error(guard: Guard, ledger: Ledger) -> None:
    runs = []

    @guard.transactional("pay", key="key", record=KEYS)
    def pay(key: str, *, tx: Any = TX) -> None:
        runs.append(key)
        for _ in range(2):
            sql(tx, WRITES[ledger.database]["INSERT"].format(key=key))

    with pytest.raises((sqlite3.IntegrityError, psycopg.errors.UniqueViolation, pymysql.IntegrityError)):
        pay("k1")

    assert len(runs) <= 3
    assert ledger.rows("SELECT * FROM idempotency_keys") == []


def test_rows_of_nested_deliveries_commit_together_or_not_at_all(guard: Guard, ledger: Ledger) -> None:
    @guard.transactional("line", key="key", record=KEYS)
    def line(key: str, *, tx: Any = TX) -> str:
        sql(tx, CREDIT)
        return f"line {key}"

    @guard.transactional("order", key="key", record=PAYMENT, fingerprint=None)
    def order(key: str, fails: bool, *, tx: Any = TX) -> list[str]:
        sql(tx, f"INSERT INTO payments (idempotency_key, tenant, amount) VALUES ('{key}', '', 500)")
        lines = [line("a"), line("b"), line("a")]
        if fails:
            raise ValueError("after all")
        return lines

    with pytest.raises(ValueError, match="after all"):
        order("o1", fails=True)
    assert (ledger.balance, ledger.rows("SELECT * FROM idempotency_keys")) == (0, [])

    assert order("o1", fails=False) == ["line a", "line b", "line a"]
    assert line.outcome("b").replayed
    assert ledger.balance == 20


def test_names_that_are_words_of_sql_are_quoted(guard: Guard, ledger: Ledger) -> None:
    q = [quoted(ledger, name) for name in ("order", "select", "where", "group", "from")]
    ledger.execute(
        f"CREATE TABLE {q[0]} ({q[1]} VARCHAR(50), {q[2]} VARCHAR(50), {q[3]} TEXT, {q[4]} VARCHAR(255), "
        f"PRIMARY KEY ({q[1]}, {q[2]}))"
    )
    record = RecordColumn("order", "select", scope="where", result="group", fingerprint="from")

    @guard.transactional("pay", key="key", scope="tenant", record=record)
    def pay(key: str, tenant: str, *, tx: Any = TX) -> str:
        return tenant

    assert [pay("k1", "one"), pay("k1", "two"), pay("k1", "one")] == ["one", "two", "one"]
    assert len(ledger.rows(f"SELECT * FROM {q[0]}")) == 2


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (RecordColumn("idempotency_keys", "key", result="answer"), "idempotency_keys has no column answer"),
        (RecordColumn("idempotency_keys", "result"), "idempotency_keys has no unique index on result"),
        (RecordColumn("nothing", "key", result="result"), "there is no table nothing here"),
    ],
)
def test_a_row_that_cannot_be_the_record_is_refused_before_anything_runs(
    guard: Guard, ledger: Ledger, record: RecordColumn, says: str
) -> None:
    @guard.transactional("pay", key="key", record=record, fingerprint=None)
    def pay(key: str, *, tx: Any = TX) -> None:
        raise AssertionError("it must not run")

    with pytest.raises(UsageError, match=says):
        pay("k1")


@pytest.mark.parametrize("columns", ["answer VARCHAR(3), print VARCHAR(255)", "answer TEXT, print VARCHAR(20)"])
def test_outside_the_strict_mode_of_mysql_nothing_is_cut_either(guard: Guard, ledger: Ledger, columns: str) -> None:
    if ledger.database != "mariadb":
        pytest.skip("the others refuse it")
    ledger.execute(f"CREATE TABLE requests (number VARCHAR(50) PRIMARY KEY, {columns})")
    record = RecordColumn("requests", "number", result="answer", fingerprint="print")

    @guard.transactional("pay", key="key", record=record)
    def pay(key: str, *, tx: Any = TX) -> int:
        sql(tx, "SET SESSION sql_mode = ''")
        sql(tx, CREDIT)
        return 12345

    with pytest.raises(UsageError, match=r"requests does not take what has to be written into answer \("):
        pay("k1")

    assert (ledger.balance, ledger.rows("SELECT * FROM requests")) == (0, [])


def test_a_result_that_does_not_fit_names_its_column_and_nothing_is_committed(guard: Guard, ledger: Ledger) -> None:
    if ledger.database == "sqlite":
        pytest.skip("SQLite has no lengths")
    ledger.execute("CREATE TABLE requests (number VARCHAR(50) PRIMARY KEY, answer VARCHAR(5))")

    @guard.transactional("pay", key="key", record=RecordColumn("requests", "number", result="answer"), fingerprint=None)
    def pay(key: str, *, tx: Any = TX) -> str:
        sql(tx, CREDIT)
        return "a long answer"

    with pytest.raises(UsageError, match=r"requests does not take what has to be written into .*answer"):
        pay("k1")
    assert (ledger.balance, ledger.rows("SELECT * FROM requests")) == (0, [])


def test_a_row_that_is_there_is_not_run_over_by_a_bypass(guard: Guard, ledger: Ledger) -> None:
    @guard.transactional("pay", key="key", record=KEYS)
    def pay(key: str, *, tx: Any = TX) -> None:
        sql(tx, CREDIT)

    pay("k1")
    with pytest.raises(UsageError, match=r"bypass=True cannot run it again.*Delete the row before"):
        pay.bypass("k1")
    assert ledger.balance == 10


def test_onefolds_own_tables_are_only_made_where_they_are_the_lock(guard: Guard, ledger: Ledger) -> None:
    @guard.transactional("pay", key="key", record=KEYS)
    def pay(key: str, *, tx: Any = TX) -> None: ...

    pay("k1")

    assert ("onefold_records" in ledger.tables()) is (ledger.database != "postgres")


def quoted(ledger: Ledger, name: str) -> str:
    quote = "`" if ledger.database == "mariadb" else '"'
    return f"{quote}{name}{quote}"


# What is wrong with the declaration is told by it, and needs no database.


@pytest.mark.parametrize(
    ("record", "options", "says"),
    [
        (PLAIN, {}, r"has no place for a fingerprint=.*RecordColumn\(..., fingerprint=...\), or pass fingerprint=None"),
        (PLAIN, {"fingerprint": "amount"}, "has no place for a fingerprint="),
        (KEYS, {"final_errors": (ValueError,)}, "cannot remember a failure"),
        (RecordColumn('keys"; DROP TABLE keys; --', "key"), {}, "is not the plain name of a table or column"),
        (RecordColumn("keys", "key", result="a b"), {}, "is not the plain name of a table or column"),
        (RecordColumn("keys", "key", result="Key"), {}, "one column has two roles"),
        (("keys", "key"), {}, "has to be a RecordColumn"),
    ],
)
def test_a_row_that_can_keep_no_such_record_is_refused_when_the_handler_is_decorated(
    record: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        Guard("sqlite:///never.db").transactional("pay", key="key", record=record, **options)


def test_a_row_has_no_earlier_store() -> None:
    guard = Guard("sqlite:///never.db", migrate_from="memory:")

    with pytest.raises(UsageError, match="no migrate_from="):
        guard.transactional("pay", key="key", record=KEYS)
