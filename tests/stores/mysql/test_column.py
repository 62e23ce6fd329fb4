"""`RecordColumn` on MariaDB, over PyMySQL and asyncmy: the caller's own row is the record."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from onefold import RecordColumn, UsageError
from services.proxy import Proxy
from tests.stores.mysql.wallet import DAILY_TYPES, Call, Ledger, Worker, Working
from tests.support import Handler
from tests.wallet import never_opened

PAYMENT = RecordColumn("payments", "idempotency_key")
COMMIT = Call("commit")


@pytest.fixture
def ledger(mysql_url: str) -> Ledger:
    return Ledger(mysql_url)


@pytest.fixture(params=DAILY_TYPES)
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = request.param(never_opened)
    yield worker
    worker.close()


@pytest.fixture
def connection(worker: Worker, ledger: Ledger) -> Iterator[Any]:
    with worker.connection(ledger.url) as connection:
        yield connection


def pay(key: str) -> Working:
    yield f"INSERT INTO payments VALUES ('{key}', '', 500)"
    return "paid"


def test_the_row_is_the_record_and_a_duplicate_does_not_run(worker: Worker, connection: Any, ledger: Ledger) -> None:
    first = worker.within(connection, "pay_1", lambda: pay("pay_1"), PAYMENT)
    worker.on(connection, COMMIT)
    second = worker.within(connection, "pay_1", lambda: pay("pay_1"), PAYMENT)
    worker.on(connection, COMMIT)

    assert (first.value, first.replayed, first.omitted) == ("paid", False, False)
    assert (second.value_or(None), second.replayed, second.omitted) == (None, True, True)
    assert ledger.rows("SELECT idempotency_key FROM payments") == [("pay_1",)]
    assert ledger.rows("SELECT operation, `key` FROM onefold_records") == [
        (b"record=payments.idempotency_key", b"pay_1")
    ]


def test_a_rollback_takes_the_row_back_and_the_next_delivery_runs(worker: Worker, connection: Any) -> None:
    worker.within(connection, "pay_1", lambda: pay("pay_1"), PAYMENT)
    worker.on(connection, Call("rollback"))

    assert not worker.within(connection, "pay_1", lambda: pay("pay_1"), PAYMENT).replayed


@pytest.mark.parametrize("value", [None, "paid"])
def test_a_handler_that_forgets_to_write_the_row_is_told(worker: Worker, connection: Any, value: str | None) -> None:
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
    worker: Worker, connection: Any, record: RecordColumn, said: str
) -> None:
    handler = Handler()

    with pytest.raises(UsageError, match=said):
        worker.within(connection, "pay_1", handler, record)

    assert handler.starts == 0


@pytest.mark.parametrize(
    "record",
    [
        RecordColumn("payments", "amount"),
        RecordColumn("payments", "idempotency_key", scope="tenant"),
        RecordColumn("drafts", "number"),
    ],
)
def test_a_column_without_a_unique_index_on_all_of_it_is_refused(
    worker: Worker, connection: Any, ledger: Ledger, record: RecordColumn
) -> None:
    ledger.execute("CREATE TABLE drafts (number VARCHAR(20), part VARCHAR(20), UNIQUE (number, part))")
    handler = Handler()

    with pytest.raises(UsageError, match="has no unique index"):
        worker.within(connection, "pay_1", handler, record, scope="north" if record.scope else None)

    assert handler.starts == 0


@pytest.mark.parametrize("other", ["PAY_1", "pay_1 ", "Pay_1"])
def test_a_key_that_the_collation_takes_for_another_is_refused_and_does_not_run(
    worker: Worker, connection: Any, ledger: Ledger, other: str
) -> None:
    """Nothing is taken for done that is not."""
    worker.within(connection, "pay_1", lambda: pay("pay_1"), PAYMENT)
    worker.on(connection, COMMIT)
    handler = Handler()

    with pytest.raises(
        UsageError, match=r"\(varchar\(50\) COLLATE utf8mb4_general_ci\) treats this key as equal to another one"
    ):
        worker.within(connection, other, handler, PAYMENT)
    worker.on(connection, COMMIT)

    assert handler.starts == 0
    assert ledger.rows("SELECT idempotency_key FROM payments") == [("pay_1",)]


COLUMNS = {
    "binary": ("VARBINARY(50)", "kéy"),
    "latin1": ("VARCHAR(50) CHARACTER SET latin1", "kéy"),
    "utf16": ("VARCHAR(50) CHARACTER SET utf16", "k👍y"),
    "a number": ("BIGINT", "7"),
    "a decimal": ("DECIMAL(20)", "7"),
    "a UUID": ("UUID", "123e4567-e89b-12d3-a456-426655440000"),
    "of one length": ("CHAR(20)", "key"),
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("charset", ["utf8mb4", "latin1"])
def test_every_column_that_the_database_keeps_unique_will_do(
    worker: Worker, connection: Any, ledger: Ledger, column: str, charset: str
) -> None:
    form, key = COLUMNS[column]
    ledger.execute(f"CREATE TABLE `order` (`Group` {form} NOT NULL, UNIQUE (`Group`))")
    worker.on(connection, f"SET NAMES {charset}")

    value = key if key.isdigit() else f"_utf8mb4 X'{key.encode().hex()}'"

    def write() -> Working:
        yield f"INSERT INTO `order` VALUES ({value})"

    outcomes = [worker.within(connection, key, write, RecordColumn("order", "group")) for _ in range(2)]

    assert [one.replayed for one in outcomes] == [False, True]


def test_with_a_column_for_the_scope_two_tenants_may_use_the_same_key(
    worker: Worker, connection: Any, ledger: Ledger
) -> None:
    ledger.execute("CREATE TABLE orders (number VARCHAR(20), tenant VARCHAR(20), UNIQUE (tenant, number))")
    record = RecordColumn("orders", "number", scope="tenant")

    def order(tenant: str) -> Working:
        yield f"INSERT INTO orders VALUES ('7', '{tenant}')"

    for tenant in ("north", "south", "north"):
        worker.within(connection, "7", partial(order, tenant), record, scope=tenant)
    worker.on(connection, COMMIT)

    assert ledger.rows("SELECT tenant FROM orders ORDER BY 1") == [("north",), ("south",)]


def test_what_a_delivery_costs_and_that_its_index_is_used(worker: Worker, ledger: Ledger) -> None:
    with Proxy(ledger.url) as proxy, worker.connection(proxy.url()) as connection:
        worker.within(connection, "pay_1", lambda: pay("pay_1"), PAYMENT)
        with proxy.counting() as count:
            worker.within(connection, "pay_2", lambda: pay("pay_2"), PAYMENT)
            worker.within(connection, "pay_2", lambda: pay("pay_2"), PAYMENT)
        worker.on(connection, COMMIT)

    texts = [message[5:].decode() for message in count.messages]
    new = ["SELECT", "INSERT", "SELECT", "SAVEPOINT", "INSERT", "RELEASE", "SELECT"]
    assert [text.split()[0] for text in texts] == [*new, "SELECT", "INSERT", "SELECT", "SELECT"]
    ((_, _, _, access, *_),) = ledger.rows(f"EXPLAIN {texts[2]}")
    assert access == "const"
