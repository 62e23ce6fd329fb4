"""Sessions with objects in them, and rows of the caller's as records (`RecordColumn`), on each driver."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
from sqlalchemy import exc, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from onefold import TX, AsyncGuard, Guard, Policy, RecordColumn, UsageError
from tests.stores.sqlalchemy.wallet import (
    ALL,
    TILLS,
    AnyDesk,
    Ledger,
    add,
    daily,
    desk,
    ledger_of,
    pay,
    statements,
    till,
)
from tests.support import Handler

SESSIONS = [way for way in ALL if way[2] == "session"]


class Base(DeclarativeBase):
    pass


class Payment(Base):
    __tablename__ = "payments"

    idempotency_key: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    amount: Mapped[int]


def paid(ledger: Ledger) -> list[str]:
    return [key for (key,) in ledger.rows("SELECT idempotency_key FROM payments ORDER BY 1")]


def payment(key: str = "pay_1", tenant: str = "") -> Payment:
    return Payment(idempotency_key=key, tenant=tenant, amount=500)


@pytest.fixture(params=daily(SESSIONS))
def way(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    found: tuple[str, str, str] = request.param
    return found


@pytest.fixture
def ledger(request: pytest.FixtureRequest, way: tuple[str, str, str]) -> Iterator[Ledger]:
    ledger = ledger_of(request, way[0])
    yield ledger
    ledger.close()


@pytest.fixture
def on(ledger: Ledger, way: tuple[str, str, str]) -> Iterator[AnyDesk]:
    found = desk(ledger, *way[1:])
    yield found
    found.close()


def test_what_a_handler_adds_to_the_session_commits_with_the_record(on: AnyDesk, ledger: Ledger) -> None:
    for _ in range(2):
        on.within("m1", lambda session: session.add(payment()))
        on.commit()

    assert (paid(ledger), ledger.records) == (["pay_1"], ["m1"])


def test_the_guard_flushes_nothing_and_expires_nothing(on: AnyDesk) -> None:
    # The tables are there: MySQL reads none that is younger than the transaction's snapshot.
    on.within("earlier", lambda session: session.add(payment("earlier")))
    on.commit()

    def look(session: Session) -> tuple[Payment, int]:
        loaded = session.get_one(Payment, "earlier")
        session.add(payment())
        return loaded, len(session.new)

    loaded, before = on.do(look)
    on.within("m1", lambda session: "receipt")

    assert on.do(lambda session: (len(session.new), loaded in session, "amount" in loaded.__dict__)) == (1, True, True)
    assert before == 1


def test_a_flush_that_fails_shows_its_own_error_and_the_next_delivery_runs(on: AnyDesk, ledger: Ledger) -> None:
    on.do(lambda session: session.add(payment()))
    on.commit()

    def twice(session: Session) -> None:
        session.expunge_all()
        session.add(payment())
        session.flush()

    with pytest.raises(exc.IntegrityError):
        on.within("m1", twice)
    on.rollback()
    again = on.within("m1", add)
    on.commit()

    assert not again.replayed
    assert (ledger.balance, ledger.records) == (10, ["m1"])


@pytest.mark.parametrize("result", [None, "receipt"])
def test_a_handler_that_goes_on_after_a_flush_that_failed_is_told(on: AnyDesk, result: str | None) -> None:
    on.do(lambda session: session.add(payment()))
    on.commit()

    def swallow(session: Session) -> str | None:
        session.expunge_all()
        session.add(payment())
        with suppress(exc.IntegrityError):
            session.flush()
        return result

    with pytest.raises(UsageError, match="put what may fail into a savepoint"):
        on.within("m1", swallow)
    on.rollback()


class Declined(Exception):
    """A final answer."""


@pytest.mark.parametrize("way", [way for way in TILLS if way[2] == "sessionmaker"], ids=" ".join, indirect=True)
@pytest.mark.parametrize("flushed", [False, True])
def test_what_a_remembered_failure_has_added_to_the_session_is_not_committed(
    ledger: Ledger, way: tuple[str, str, str], flushed: bool
) -> None:
    at = till(ledger, *way[1:], policy=Policy(final_errors=(Declined,)))

    def decline(session: Session) -> None:
        session.add(payment())
        if flushed:
            session.flush()
        raise Declined("too little money")

    with pytest.raises(Declined):
        at.transactional("m1", decline)
    at.close()

    assert (paid(ledger), ledger.records) == ([], ["m1"])


@pytest.mark.parametrize("way", [way for way in TILLS if way[2] == "sessionmaker"], ids=" ".join, indirect=True)
def test_what_fails_at_the_flush_of_the_commit_is_the_handlers_own_error(
    ledger: Ledger, way: tuple[str, str, str]
) -> None:
    at = till(ledger, *way[1:])
    at.transactional("earlier", lambda session: session.add(payment()))

    with pytest.raises(exc.IntegrityError):
        at.transactional("m1", lambda session: session.add(payment()))
    again = at.transactional("m1", add)
    at.close()

    assert not again.replayed
    assert (ledger.balance, ledger.records) == (10, ["earlier", "m1"])


# Rows of the caller's.

PAYMENT = RecordColumn("payments", "idempotency_key")


@pytest.mark.parametrize("way", daily(ALL), indirect=True)
def test_the_row_is_the_record_and_a_duplicate_does_not_run(on: AnyDesk, ledger: Ledger) -> None:
    first = on.within("pay_1", lambda held: pay(held, "pay_1"), PAYMENT)
    on.commit()
    second = on.within("pay_1", lambda held: pay(held, "pay_1"), PAYMENT)
    on.rollback()

    assert (first.value, first.replayed, first.omitted) == ("paid", False, False)
    assert (second.value_or(None), second.replayed, second.omitted) == (None, True, True)
    assert paid(ledger) == ["pay_1"]
    # MariaDB has no lock that ends with the transaction: there a record of ours is it.
    assert ("onefold_records" in ledger.tables()) is (ledger.database == "mariadb")


def test_an_object_that_is_not_flushed_yet_is_a_row_too(on: AnyDesk, ledger: Ledger) -> None:
    for _ in range(2):
        on.within("pay_1", lambda session: session.add(payment()), PAYMENT)
        on.commit()

    assert paid(ledger) == ["pay_1"]


def test_an_object_that_is_not_flushed_yet_is_a_row_in_a_transaction_of_the_guards_too(ledger: Ledger) -> None:
    engine = ledger.engine()
    with Guard(sessionmaker(engine)) as guard:

        @guard.transactional("pay", key="key", record=PAYMENT, fingerprint=None)
        def pay_by_object(key: str, *, tx: Session = TX) -> None:
            tx.add(payment())

        assert [pay_by_object.outcome("pay_1").replayed for _ in range(2)] == [False, True]
    engine.dispose()

    assert paid(ledger) == ["pay_1"]


def test_an_async_session_is_flushed_in_a_transaction_of_the_guards_too(ledger: Ledger) -> None:
    async def story() -> list[bool]:
        engine = ledger.async_engine()
        async with AsyncGuard(async_sessionmaker(engine)) as guard:

            @guard.transactional("pay", key="key", record=PAYMENT, fingerprint=None)
            async def pay_by_object(key: str, *, tx: AsyncSession = TX) -> None:
                tx.add(payment())

            replayed = [(await pay_by_object.outcome("pay_1")).replayed for _ in range(2)]
        await engine.dispose()
        return replayed

    assert asyncio.run(story()) == [False, True]
    assert paid(ledger) == ["pay_1"]


def test_an_object_whose_row_a_stranger_has_written_meanwhile_is_a_replay_and_no_error(ledger: Ledger) -> None:
    if ledger.database == "sqlite":
        pytest.skip("SQLite has one writer: a stranger waits")
    engine = ledger.engine()
    with Guard(sessionmaker(engine)) as guard:

        @guard.transactional("pay", key="key", record=PAYMENT, fingerprint=None)
        def pay_by_object(key: str, *, tx: Session = TX) -> None:
            ledger.execute("INSERT INTO payments VALUES ('pay_1', '', 1)")
            tx.add(payment())

        assert pay_by_object.outcome("pay_1").replayed
    engine.dispose()


@pytest.mark.parametrize("value", [None, "paid"])
def test_a_handler_that_forgets_to_write_the_row_is_told(on: AnyDesk, value: str | None) -> None:
    with pytest.raises(UsageError, match=r"has to write the row whose payments\.idempotency_key is the key"):
        on.within("pay_1", lambda _: value, PAYMENT)
    on.rollback()


def test_a_handler_that_fails_before_its_row_runs_again(on: AnyDesk) -> None:
    def fail(_session: Session) -> None:
        raise ValueError("declined")

    with pytest.raises(ValueError, match="declined"):
        on.within("pay_1", fail, PAYMENT)

    assert not on.within("pay_1", lambda session: pay(session, "pay_1"), PAYMENT).replayed


PARTIAL = "CREATE UNIQUE INDEX drafts_note ON drafts (note) WHERE part IS NOT NULL"


@pytest.mark.parametrize(
    "record",
    [
        RecordColumn("payments", "amount"),
        RecordColumn("payments", "nothing"),
        RecordColumn("nowhere", "idempotency_key"),
        RecordColumn("payments", "idempotency_key", scope="tenant"),
        RecordColumn("drafts", "name"),
        RecordColumn("drafts", "note"),
    ],
)
def test_a_column_without_a_unique_index_on_all_of_it_is_refused(
    on: AnyDesk, ledger: Ledger, record: RecordColumn
) -> None:
    ledger.execute("CREATE TABLE drafts (name VARCHAR(20), part VARCHAR(20), note VARCHAR(20), UNIQUE (name, part))")
    if ledger.database != "mariadb":
        ledger.execute(PARTIAL)
    handler = Handler()

    with pytest.raises(UsageError, match=r"has no unique index|has no column|there is no table"):
        on.within("pay_1", lambda _: handler(), record, scope="north" if record.scope else None)
    on.rollback()

    assert handler.starts == 0


def test_with_a_column_for_the_scope_two_tenants_may_use_the_same_key(on: AnyDesk, ledger: Ledger) -> None:
    ledger.execute("CREATE TABLE orders (number VARCHAR(20), tenant VARCHAR(20), UNIQUE (tenant, number))")
    record = RecordColumn("orders", "number", scope="tenant")

    def order(tenant: str, session: Session) -> None:
        session.execute(text("INSERT INTO orders VALUES ('7', :tenant)"), {"tenant": tenant})

    for tenant in ("north", "south", "north"):
        on.within("7", partial(order, tenant), record, scope=tenant)
    on.commit()

    assert ledger.rows("SELECT tenant FROM orders ORDER BY 1") == [("north",), ("south",)]


TYPES = {
    "a number": ("INTEGER", "7"),
    "a large number": ("BIGINT", str(2**40)),
    "a long text": ("VARCHAR(100)", "x" * 100),
    "a short text": ("CHAR(3)", "abc"),
}


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_of_column_will_do(on: AnyDesk, ledger: Ledger, kind: str) -> None:
    type_, key = TYPES[kind]
    quote = "`" if ledger.database == "mariadb" else '"'
    table, column = f"{quote}order{quote}", f"{quote}group{quote}"
    ledger.execute(f"CREATE TABLE {table} ({column} {type_} PRIMARY KEY)")
    insert = text(f"INSERT INTO {table} VALUES ('{key}')")

    outcomes = [
        on.within(key, lambda session: session.execute(insert).rowcount, RecordColumn("order", "group")) for _ in "12"
    ]
    on.commit()

    assert [one.replayed for one in outcomes] == [False, True]


@pytest.mark.parametrize("way", [way for way in SESSIONS if way[0] == "postgres"], ids=" ".join, indirect=True)
def test_a_uuid_is_a_key_too(on: AnyDesk, ledger: Ledger) -> None:
    ledger.execute("CREATE TABLE orders (id UUID PRIMARY KEY)")
    key = uuid.uuid4()
    insert = text(f"INSERT INTO orders VALUES ('{key}')")

    outcomes = [
        on.within(key, lambda session: session.execute(insert).rowcount, RecordColumn("orders", "id")) for _ in "12"
    ]
    on.commit()

    assert [one.replayed for one in outcomes] == [False, True]


def test_a_key_that_is_longer_than_its_column_is_no_duplicate_of_its_beginning(on: AnyDesk, ledger: Ledger) -> None:
    ledger.execute("CREATE TABLE orders (number VARCHAR(3) PRIMARY KEY)")
    ledger.execute("INSERT INTO orders VALUES ('abc')")
    handler = Handler()

    with suppress(UsageError, exc.DBAPIError):
        on.within("abcd", lambda _: handler(), RecordColumn("orders", "number"))
    on.rollback()

    assert handler.starts == 1


def test_a_bypass_is_refused_while_the_row_is_there(on: AnyDesk) -> None:
    handler = Handler()
    on.do(lambda session: pay(session, "pay_1"))

    with pytest.raises(UsageError, match="Delete the row before"):
        on.within("pay_1", lambda _: handler(), PAYMENT, bypass=True)
    on.rollback()

    assert handler.starts == 0


# What comes before the handler's INSERT and after it, and what a duplicate costs.
COSTS = {
    "sqlite": (["DELETE", "SELECT", "SELECT", "SAVEPOINT"], ["RELEASE", "SELECT"], ["DELETE", "SELECT", "SELECT"]),
    "postgres": (["SELECT", "SELECT", "SELECT"], ["WITH"], ["SELECT", "SELECT", "SELECT"]),
    "mariadb": (
        ["SELECT", "INSERT", "SELECT", "SAVEPOINT"],
        ["RELEASE", "SELECT"],
        ["SELECT", "INSERT", "SELECT", "SELECT"],
    ),
}


def test_what_a_delivery_costs_in_statements(on: AnyDesk, ledger: Ledger) -> None:
    before, after, duplicate = COSTS[ledger.database]
    on.within("earlier", lambda session: pay(session, "earlier"), PAYMENT)
    on.commit()
    on.do(add)
    seen = statements(on.sync_engine)

    on.within("pay_1", lambda session: pay(session, "pay_1"), PAYMENT)
    new = seen.copy()
    on.within("pay_1", lambda session: pay(session, "pay_1"), PAYMENT)

    assert new == [*before, "INSERT", *after]
    assert seen[len(new) :] == duplicate
