"""`RecordColumn` on PostgreSQL: whose row it is, in which transaction and schema, and whether the key is this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from onefold import Guard, InProgress, RecordColumn, UsageError
from tests.stores.sqlalchemy.wallet import Ledger
from tests.support import Handler
from tests.wallet import never_opened

PAYMENT = RecordColumn("payments", "idempotency_key")

INSERT = "INSERT INTO payments VALUES ('k1', '', 500)"
CREDIT = "UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'"


@pytest.fixture
def ledger(postgres_url: str) -> Iterator[Ledger]:
    with closing(Ledger("postgres", postgres_url)) as ledger:
        yield ledger


@pytest.fixture
def connection(ledger: Ledger) -> Iterator[psycopg.Connection[Any]]:
    with closing(psycopg.connect(ledger.address)) as connection:
        yield connection


def deliver(
    connection: psycopg.Connection[Any],
    *statements: str,
    key: str = "k1",
    record: RecordColumn = PAYMENT,
    then: Any = None,
) -> bool:
    """Whether it was replayed."""

    def handler() -> None:
        for statement in statements:
            connection.execute(statement.encode())

    return Guard(never_opened).within(connection, record=record).run("pay", key, then or handler).replayed


# Whose row it is.


@pytest.mark.parametrize(
    ("level", "conflict"),
    [
        ("READ COMMITTED", ""),
        ("READ COMMITTED", "ON CONFLICT DO NOTHING"),
        ("REPEATABLE READ", ""),
        ("REPEATABLE READ", "ON CONFLICT DO NOTHING"),
        ("REPEATABLE READ", "ON CONFLICT (idempotency_key) DO UPDATE SET amount = 1"),
        ("SERIALIZABLE", "ON CONFLICT (idempotency_key) DO UPDATE SET amount = 1"),
    ],
)
def test_a_row_that_a_stranger_has_committed_meanwhile_is_not_the_handlers(
    ledger: Ledger, connection: psycopg.Connection[Any], level: str, conflict: str
) -> None:
    """Its transaction has a later number than ours."""

    def handler() -> None:
        connection.execute(CREDIT)
        ledger.execute(INSERT)
        connection.execute(f"{INSERT} {conflict}".encode())

    connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
    with pytest.raises((InProgress, psycopg.errors.SerializationFailure)):
        deliver(connection, then=handler)
    connection.rollback()

    assert deliver(connection)
    assert ledger.balance == 0


@pytest.mark.parametrize(
    "statements",
    [
        (INSERT,),
        ("SAVEPOINT a", "SAVEPOINT b", INSERT, "RELEASE b", "RELEASE a", CREDIT),
        ("SAVEPOINT a", INSERT, "ROLLBACK TO a", INSERT),
        (INSERT, "SAVEPOINT a", "UPDATE payments SET amount = 1"),
    ],
    ids=lambda statements: " ".join(statement.split()[0] for statement in statements),
)
def test_a_row_is_the_handlers_behind_whatever_savepoint_it_was_written(
    ledger: Ledger, connection: psycopg.Connection[Any], statements: tuple[str, ...]
) -> None:
    def handler() -> None:
        for statement in statements:
            # Others write meanwhile, so that the numbers of our transactions are not one after the other.
            ledger.execute("UPDATE payments SET amount = 1 WHERE false")
            ledger.execute(f"INSERT INTO payments VALUES ('{len(seen)}', '', 1)")
            seen.append(connection.execute(statement.encode()))

    seen: list[Any] = []
    assert not deliver(connection, then=handler)
    connection.commit()
    assert deliver(connection)


# In which transaction.


@pytest.mark.parametrize(
    "setting",
    [
        "SET LOCAL TIME ZONE 'Asia/Kolkata'",
        "SET LOCAL DateStyle = 'German'",
        "SET LOCAL search_path = pg_catalog",
    ],
)
def test_a_handler_may_change_the_settings_of_the_session(
    ledger: Ledger, connection: psycopg.Connection[Any], setting: str
) -> None:
    assert not deliver(connection, INSERT, setting)
    connection.commit()

    assert deliver(connection)


def test_a_handler_that_goes_back_before_its_delivery_is_told_though_it_writes_the_row_again(
    ledger: Ledger, connection: psycopg.Connection[Any]
) -> None:
    """Its lock is gone: another delivery may be running."""
    deliver(connection, "INSERT INTO payments VALUES ('k0', '', 500)", key="k0")
    connection.execute("SAVEPOINT before")

    with pytest.raises(UsageError, match="went back to a savepoint from before its record"):
        deliver(connection, "ROLLBACK TO before", INSERT)


def test_a_handler_that_begins_another_transaction_is_told_though_it_writes_the_row_again(
    ledger: Ledger, connection: psycopg.Connection[Any]
) -> None:
    with pytest.raises(UsageError, match="ended the transaction by itself"):
        deliver(connection, "ROLLBACK", "BEGIN", INSERT)


def test_deliveries_inside_of_each_other_have_marks_of_their_own(
    ledger: Ledger, connection: psycopg.Connection[Any]
) -> None:
    def outer() -> None:
        connection.execute(INSERT)
        assert not deliver(connection, "INSERT INTO payments VALUES ('k2', '', 500)", key="k2")

    assert not deliver(connection, then=outer)
    (claims,) = connection.execute("SELECT current_setting('onefold.claims')").fetchone() or ("none",)
    connection.commit()

    assert claims == ""


# In which schema.


def test_the_index_is_looked_for_each_time_and_in_the_schema_of_the_session(
    ledger: Ledger, connection: psycopg.Connection[Any]
) -> None:
    def refused(schema: str, key: str) -> bool:
        connection.execute(f"SET LOCAL search_path = {schema}".encode())
        try:
            return deliver(connection, f"INSERT INTO pays VALUES ('{key}')", key=key, record=RecordColumn("pays", "k"))
        except UsageError as error:
            return "has no unique index" in str(error)
        finally:
            connection.commit()

    for schema, key in (("one", "PRIMARY KEY"), ("other", "NOT NULL")):
        ledger.execute(f"CREATE SCHEMA {schema}")
        ledger.execute(f"CREATE TABLE {schema}.pays (k text {key})")

    assert [refused("one", "k1"), refused("other", "k1")] == [False, True]
    ledger.execute("ALTER TABLE one.pays DROP CONSTRAINT pays_pkey")
    assert refused("one", "k2")


# Whether the key is this very one.

MERGING = {
    "integer": ("integer", "1", "01"),
    "char": ("char(8)", "ab", "ab "),
    "numeric": ("numeric(10, 2)", "1.00", "1"),
    "uuid": ("uuid", "123e4567-e89b-12d3-a456-426655440000", "123E4567-E89B-12D3-A456-426655440000"),
}


@pytest.mark.parametrize("type_", ["uuid", "integer", "date", "inet"])
def test_a_key_that_is_no_value_of_the_columns_type_is_refused_and_not_told(
    ledger: Ledger, connection: psycopg.Connection[Any], type_: str
) -> None:
    ledger.execute(f"CREATE TABLE orders (number {type_} UNIQUE)")
    record, handler = RecordColumn("orders", "number"), Handler()

    with pytest.raises(UsageError, match=rf"this is no value of orders\.number \({type_}\)") as raised:
        deliver(connection, key="secret key", record=record, then=handler)

    assert (handler.starts, raised.value.key) == (0, "secret key")
    assert "secret" not in str(raised.value)
    assert raised.value.__suppress_context__


@pytest.mark.parametrize("kind", MERGING)
def test_a_key_that_the_column_takes_for_another_is_refused_and_does_not_run(
    ledger: Ledger, connection: psycopg.Connection[Any], kind: str
) -> None:
    type_, key, other = MERGING[kind]
    ledger.execute(f"CREATE TABLE orders (number {type_} UNIQUE)")
    record, handler = RecordColumn("orders", "number"), Handler()

    assert not deliver(connection, f"INSERT INTO orders VALUES ('{key}')", key=key, record=record)
    connection.commit()
    assert deliver(connection, key=key, record=record)
    with pytest.raises(UsageError, match=r"orders\.number \(\w+.*\) treats this key as equal to another one"):
        deliver(connection, key=other, record=record, then=handler)

    assert handler.starts == 0
