"""`RecordColumn` on SQLite, sync and async: the caller's own row is the record."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from onefold import TX, Guard, KeyReused, RecordColumn, ResultNotKept, UsageError
from tests.support import PATIENCE, Handler
from tests.wallet import Awaiting, Blocking, Worker, never_opened, rows, tables

PAYMENT = RecordColumn("payments", "idempotency_key")


@pytest.fixture(params=[Blocking, Awaiting])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = request.param(never_opened)
    yield worker
    worker.close()


def pay(connection: sqlite3.Connection, key: str, tenant: str = "") -> str:
    connection.execute("INSERT INTO payments VALUES (?, ?, 500, 'asha')", (key, tenant))
    return "paid"


def paid(path: Path) -> list[str]:
    return [key for (key,) in rows(path, "SELECT idempotency_key FROM payments ORDER BY 1")]


def test_the_row_is_the_record_and_a_duplicate_does_not_run(
    worker: Worker, connection: sqlite3.Connection, path: Path
) -> None:
    with connection:
        first = worker.within(connection, "pay_1", lambda: pay(connection, "pay_1"), PAYMENT)
    with connection:
        second = worker.within(connection, "pay_1", lambda: pay(connection, "pay_1"), PAYMENT)

    assert (first.value, first.replayed, first.omitted) == ("paid", False, False)
    assert (second.value_or(None), second.replayed, second.omitted) == (None, True, True)
    assert paid(path) == ["pay_1"]
    assert "onefold_records" not in tables(path)


def test_a_row_with_a_place_for_them_replays_its_result_and_refuses_another_payload(
    worker: Worker, connection: sqlite3.Connection
) -> None:
    connection.execute("CREATE TABLE requests (number TEXT PRIMARY KEY, answer TEXT, print TEXT)")
    record = RecordColumn("requests", "number", result="answer", fingerprint="print")

    with connection:
        worker.within(connection, "r1", lambda: "answered", record, payload={"amount": 5})
    with connection:
        again = worker.within(connection, "r1", lambda: "again", record, payload={"amount": 5})
    with connection, pytest.raises(KeyReused):
        worker.within(connection, "r1", lambda: "another", record, payload={"amount": 9})

    assert (again.value, again.replayed) == ("answered", True)


def test_a_rollback_takes_the_row_back_and_the_next_delivery_runs(
    worker: Worker, connection: sqlite3.Connection, path: Path
) -> None:
    worker.within(connection, "pay_1", lambda: pay(connection, "pay_1"), PAYMENT)
    connection.rollback()
    with connection:
        again = worker.within(connection, "pay_1", lambda: pay(connection, "pay_1"), PAYMENT)

    assert not again.replayed
    assert paid(path) == ["pay_1"]


def test_a_handler_that_fails_before_its_row_runs_again(worker: Worker, connection: sqlite3.Connection) -> None:
    with connection, pytest.raises(ValueError, match="declined"):
        worker.within(connection, "pay_1", Handler(error=ValueError("declined")), PAYMENT)

    with connection:
        assert not worker.within(connection, "pay_1", lambda: pay(connection, "pay_1"), PAYMENT).replayed


@pytest.mark.parametrize("value", [None, "paid"])
def test_a_handler_that_forgets_to_write_the_row_is_told(
    worker: Worker, connection: sqlite3.Connection, value: str | None
) -> None:
    with pytest.raises(UsageError, match=r"has to write the row whose payments\.idempotency_key is the key"):
        worker.within(connection, "pay_1", Handler(value), PAYMENT)


NOT_THERE = pytest.mark.parametrize(
    ("record", "said"),
    [
        (RecordColumn("payments", "nothing"), "payments has no column nothing"),
        (RecordColumn("nowhere", "idempotency_key"), "there is no table nowhere"),
    ],
)


@NOT_THERE
def test_a_table_or_column_that_is_not_there_is_refused_by_its_name(
    worker: Worker, connection: sqlite3.Connection, record: RecordColumn, said: str
) -> None:
    handler = Handler()

    with pytest.raises(UsageError, match=said):
        worker.within(connection, "pay_1", handler, record)

    assert handler.starts == 0


def test_a_fingerprint_has_no_place_in_the_row_and_is_refused(worker: Worker, connection: sqlite3.Connection) -> None:
    handler = Handler()

    with pytest.raises(UsageError, match="has no place for a payload="):
        worker.within(connection, "pay_1", handler, PAYMENT, payload={"amount": 5})

    assert handler.starts == 0


@pytest.mark.parametrize(
    "record",
    [
        RecordColumn("payments", "amount"),
        RecordColumn("payments", "idempotency_key", scope="tenant"),
        RecordColumn("drafts", "key"),
        RecordColumn("drafts", "note"),
    ],
)
def test_a_column_without_a_unique_index_on_all_of_it_is_refused(
    worker: Worker, connection: sqlite3.Connection, record: RecordColumn
) -> None:
    connection.execute("CREATE TABLE drafts (key TEXT, part TEXT, note TEXT, UNIQUE (key, part))")
    connection.execute("CREATE UNIQUE INDEX some ON drafts (note) WHERE part IS NOT NULL")
    handler = Handler()

    with pytest.raises(UsageError, match="has no unique index"):
        worker.within(connection, "pay_1", handler, record, scope="north" if record.scope else None)

    assert handler.starts == 0


@pytest.mark.parametrize(
    "record",
    [
        RecordColumn("payments; DROP TABLE payments", "idempotency_key"),
        RecordColumn("payments", "idempotency_key = '' OR 1 = 1 --"),
        RecordColumn("payments", "idempotency_key", scope='tenant" OR "1" = "1'),
        RecordColumn("main.payments", "idempotency_key"),
        RecordColumn("payments\n", "idempotency_key"),
        RecordColumn("", "idempotency_key"),
    ],
)
def test_what_is_not_a_plain_name_is_refused_before_it_becomes_part_of_a_statement(
    worker: Worker, connection: sqlite3.Connection, record: RecordColumn
) -> None:
    handler = Handler()

    with pytest.raises(UsageError, match="is not the plain name of a table or column"):
        worker.within(connection, "pay_1", handler, record, scope="north")

    assert handler.starts == 0


def test_a_key_is_a_value_and_never_a_part_of_a_statement(worker: Worker, connection: sqlite3.Connection) -> None:
    with connection:
        pay(connection, "pay_1")

    assert not worker.within(connection, "' OR 1 = 1 --", lambda: pay(connection, "' OR 1 = 1 --"), PAYMENT).replayed


def test_with_a_column_for_the_scope_two_tenants_may_use_the_same_key(
    worker: Worker, connection: sqlite3.Connection, path: Path
) -> None:
    connection.execute("CREATE TABLE orders (number TEXT, tenant TEXT, UNIQUE (tenant, number))")
    record = RecordColumn("orders", "number", scope="tenant")

    def order(tenant: str) -> None:
        connection.execute("INSERT INTO orders VALUES ('7', ?)", (tenant,))

    with connection:
        for tenant in ("north", "south", "north"):
            worker.within(connection, "7", partial(order, tenant), record, scope=tenant)

    assert rows(path, "SELECT tenant FROM orders ORDER BY 1") == [("north",), ("south",)]


@pytest.mark.parametrize(
    ("record", "scope"), [(PAYMENT, "north"), (RecordColumn("orders", "number", scope="tenant"), None)]
)
def test_a_scope_without_its_column_and_a_column_without_its_scope_are_refused(
    worker: Worker, connection: sqlite3.Connection, record: RecordColumn, scope: str | None
) -> None:
    connection.execute("CREATE TABLE orders (number TEXT, tenant TEXT, UNIQUE (tenant, number))")
    handler = Handler()

    with pytest.raises(UsageError, match="both have one, or neither"):
        worker.within(connection, "7", handler, record, scope=scope)

    assert handler.starts == 0


def test_a_bypass_is_refused_while_the_row_is_there(worker: Worker, connection: sqlite3.Connection) -> None:
    handler = Handler()
    with connection:
        pay(connection, "pay_1")

    with pytest.raises(UsageError, match="Delete the row before"):
        worker.within(connection, "pay_1", handler, PAYMENT, bypass=True)

    assert handler.starts == 0


@pytest.mark.parametrize(
    ("table", "record"),
    [
        ('CREATE TABLE "order" ("group" TEXT UNIQUE)', RecordColumn("order", "group")),
        ("CREATE TABLE Orders (Number TEXT UNIQUE)", RecordColumn("orders", "number")),
        ("CREATE TABLE orders (number INTEGER PRIMARY KEY)", RecordColumn("orders", "number")),
        ("CREATE TABLE orders (number TEXT PRIMARY KEY) WITHOUT ROWID", RecordColumn("orders", "number")),
    ],
)
def test_every_column_that_the_database_keeps_unique_will_do(
    worker: Worker, connection: sqlite3.Connection, table: str, record: RecordColumn
) -> None:
    connection.execute(table)
    insert = f'INSERT INTO "{record.table}" VALUES (7)'

    outcomes = [worker.within(connection, "7", lambda: connection.execute(insert).rowcount, record) for _ in range(2)]

    assert [one.replayed for one in outcomes] == [False, True]


def test_the_form_in_which_the_caller_wants_rows_and_text_does_not_matter(
    worker: Worker, connection: sqlite3.Connection
) -> None:
    connection.row_factory, connection.text_factory = (lambda cursor, row: {"a row": row}), bytes

    outcomes = [worker.within(connection, "pay_1", lambda: pay(connection, "pay_1"), PAYMENT) for _ in range(2)]

    assert [one.replayed for one in outcomes] == [False, True]


def test_what_a_delivery_costs_in_statements(worker: Worker, connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    seen: list[str] = []
    # What begins with dashes is SQLite's own work for a statement; how long it waits is not asked of the file.
    unasked = ("--", "PRAGMA busy_timeout")
    connection.set_trace_callback(lambda text: None if text.startswith(unasked) else seen.append(text.split()[0]))

    worker.within(connection, "pay_1", lambda: pay(connection, "pay_1"), PAYMENT)
    new = seen.copy()
    seen.clear()
    worker.within(connection, "pay_1", lambda: pay(connection, "pay_1"), PAYMENT)
    connection.set_trace_callback(None)

    # The first one writes nothing, and waits for other writers.
    assert new == ["DELETE", "SELECT", "SELECT", "SAVEPOINT", "INSERT", "RELEASE", "SELECT"]
    assert seen == ["DELETE", "SELECT", "SELECT"]


MERGING = {
    "without case": ("TEXT COLLATE NOCASE", "abc", "ABC"),
    "without blanks": ("TEXT COLLATE RTRIM", "a", "a "),
    "a number": ("INTEGER", "1", "01"),
    "a row's number": ("INTEGER PRIMARY KEY", "1", "1.0"),
}


@pytest.mark.parametrize("kind", MERGING)
def test_a_key_that_the_column_takes_for_another_is_refused_and_does_not_run(
    worker: Worker, connection: sqlite3.Connection, kind: str
) -> None:
    type_, key, other = MERGING[kind]
    connection.execute(f"CREATE TABLE orders (number {type_} UNIQUE)")
    record, handler = RecordColumn("orders", "number"), Handler()

    def write() -> None:
        connection.execute("INSERT INTO orders VALUES (?)", (key,))

    assert [worker.within(connection, key, write, record).replayed for _ in range(2)] == [False, True]
    with pytest.raises(
        UsageError, match=r"orders\.number \((TEXT|INTEGER).*\) treats this key as equal to another one"
    ):
        worker.within(connection, other, handler, record)

    assert handler.starts == 0


def test_a_key_that_the_column_does_not_keep_is_refused_after_the_handler(
    worker: Worker, connection: sqlite3.Connection
) -> None:
    connection.execute("CREATE TABLE orders (number INTEGER UNIQUE)")

    def write() -> None:
        connection.execute("INSERT INTO orders VALUES ('01')")

    with pytest.raises(UsageError, match="changes it when it is stored"):
        worker.within(connection, "01", write, RecordColumn("orders", "number"))


def test_a_transaction_that_began_without_writing_waits_for_another_writer_before_it_looks(path: Path) -> None:
    connections = [sqlite3.connect(path, isolation_level=None, timeout=PATIENCE, check_same_thread=False) for _ in "12"]
    asking = threading.Event()

    def deliver(connection: sqlite3.Connection) -> bool:
        connection.execute("BEGIN")
        connection.set_trace_callback(lambda _: asking.set())
        run = Guard(never_opened).within(connection, record=PAYMENT).run
        return run("pay", "pay_1", lambda: pay(connection, "pay_1")).replayed

    with ThreadPoolExecutor(1) as threads:
        first = deliver(connections[0])
        asking.clear()
        second = threads.submit(deliver, connections[1])
        asking.wait(PATIENCE)
        connections[0].execute("COMMIT")
        replayed = second.result(PATIENCE)
        connections[1].execute("COMMIT")
    for connection in connections:
        connection.close()

    assert (first, replayed) == (False, True)
    assert paid(path) == ["pay_1"]


def test_a_duplicate_of_a_function_that_returns_none_by_its_annotation_misses_no_value(
    connection: sqlite3.Connection, path: Path
) -> None:
    with Guard(f"sqlite:///{path}") as guard:

        @guard.transactional("pay", key="key", record=PAYMENT, fingerprint=None)
        def annotated(key: str, *, tx: sqlite3.Connection = TX) -> None:
            pay(tx, key)

        @guard.transactional("pay", key="key", record=PAYMENT, fingerprint=None)
        def bare(key, *, tx=TX):  # type: ignore[no-untyped-def]
            pay(tx, key)

        annotated("pay_1")
        annotated("pay_1")  # the row has no place for a result, and none is missing

        with pytest.raises(ResultNotKept, match="If the function returns nothing, annotate it with `-> None`"):
            bare("pay_1")
    assert paid(path) == ["pay_1"]
