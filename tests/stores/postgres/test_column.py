"""`RecordColumn` on PostgreSQL, on each driver: the caller's own row is the record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from onefold import RecordColumn, UsageError
from services.proxy import Proxy
from tests.stores.postgres.tools import (
    DAILY_DRIVERS,
    SCHEMA,
    Asyncpg,
    Caller,
    Hand,
    Worker,
    another,
    never_opened,
    rows,
    tables,
)
from tests.support import Handler

PAYMENT = RecordColumn("payments", "idempotency_key")


@pytest.fixture
def url(postgres_url: str) -> str:
    with another(postgres_url) as connection:
        connection.execute(SCHEMA)
        connection.execute("CREATE TABLE drafts (key text, part text, note text, UNIQUE (key, part))")
        connection.execute("CREATE UNIQUE INDEX on_some ON drafts (note) WHERE part IS NOT NULL")
        connection.execute("CREATE TABLE orders (number text, tenant text, UNIQUE (tenant, number))")
    return postgres_url


@pytest.fixture(params=DAILY_DRIVERS)
def worker(request: pytest.FixtureRequest, url: str) -> Iterator[Worker]:
    worker = request.param(url, source=never_opened)
    yield worker
    worker.close()


def inside(worker: Worker, story: Callable[[Caller], Awaitable[Any]]) -> Any:
    """The story in one transaction of the caller's, committed at its end."""

    async def connected(worker: Worker) -> Any:
        async with worker.connected() as caller, caller.transaction():
            return await story(caller)

    return worker.play(connected)


def handling(handler: Handler) -> Callable[[Hand], Any]:
    async def work(_: Hand) -> Any:
        return handler()

    return work


async def pay(hand: Hand, key: str = "pay_1") -> str:
    await hand.run("INSERT INTO payments VALUES ($1, '', 500, 'asha')", key)
    return "paid"


def paid(url: str) -> list[str]:
    return [key for (key,) in rows(url, "SELECT idempotency_key FROM payments ORDER BY 1")]


def test_the_row_is_the_record_and_a_duplicate_does_not_run(worker: Worker, url: str) -> None:
    first, second = (inside(worker, lambda caller: caller.within("pay_1", pay, PAYMENT)) for _ in range(2))

    assert (first.value, first.replayed, first.omitted) == ("paid", False, False)
    assert (second.value_or(None), second.replayed, second.omitted) == (None, True, True)
    assert paid(url) == ["pay_1"]
    assert tables(url) == set()


def test_a_rollback_takes_the_row_back_and_the_next_delivery_runs(worker: Worker, url: str) -> None:
    async def roll_back(caller: Caller) -> None:
        await caller.within("pay_1", pay, PAYMENT)
        raise ValueError("rolled back")

    with suppress(ValueError):
        inside(worker, roll_back)
    again = inside(worker, lambda caller: caller.within("pay_1", pay, PAYMENT))

    assert not again.replayed
    assert paid(url) == ["pay_1"]


@pytest.mark.parametrize("value", [None, "paid"])
def test_a_handler_that_forgets_to_write_the_row_is_told(worker: Worker, value: str | None) -> None:
    with pytest.raises(UsageError, match=r"has to write the row whose payments\.idempotency_key is the key"):
        inside(worker, lambda caller: caller.within("pay_1", handling(Handler(value)), PAYMENT))


NOT_THERE = pytest.mark.parametrize(
    ("record", "said"),
    [
        (RecordColumn("payments", "nothing"), "payments has no column nothing"),
        (RecordColumn("nowhere", "idempotency_key"), "there is no table nowhere"),
    ],
)


@NOT_THERE
def test_a_table_or_column_that_is_not_there_is_refused_by_its_name(
    worker: Worker, record: RecordColumn, said: str
) -> None:
    handler = Handler()

    with pytest.raises(UsageError, match=said):
        inside(worker, lambda caller: caller.within("pay_1", handling(handler), record))

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
def test_a_column_without_a_unique_index_on_all_of_it_is_refused(worker: Worker, record: RecordColumn) -> None:
    handler = Handler()
    scope = "north" if record.scope else None

    with pytest.raises(UsageError, match="has no unique index"):
        inside(worker, lambda caller: caller.within("pay_1", handling(handler), record, scope=scope))

    assert handler.starts == 0


def test_a_key_is_a_value_and_never_a_part_of_a_statement(worker: Worker, url: str) -> None:
    key = "' OR 1 = 1 --"

    inside(worker, lambda caller: caller.within("pay_1", pay, PAYMENT))
    outcome = inside(worker, lambda caller: caller.within(key, partial(pay, key=key), PAYMENT))

    assert not outcome.replayed
    assert paid(url) == sorted([key, "pay_1"])


def test_with_a_column_for_the_scope_two_tenants_may_use_the_same_key(worker: Worker, url: str) -> None:
    record = RecordColumn("orders", "number", scope="tenant")

    async def order(hand: Hand, tenant: str) -> None:
        await hand.run("INSERT INTO orders VALUES ('7', $1)", tenant)

    async def story(caller: Caller) -> None:
        for tenant in ("north", "south", "north"):
            await caller.within("7", partial(order, tenant=tenant), record, scope=tenant)

    inside(worker, story)

    assert rows(url, "SELECT tenant FROM orders ORDER BY 1") == [("north",), ("south",)]


@pytest.mark.parametrize(
    ("record", "scope"), [(PAYMENT, "north"), (RecordColumn("orders", "number", scope="tenant"), None)]
)
def test_a_scope_without_its_column_and_a_column_without_its_scope_are_refused(
    worker: Worker, record: RecordColumn, scope: str | None
) -> None:
    handler = Handler()

    with pytest.raises(UsageError, match="both have one, or neither"):
        inside(worker, lambda caller: caller.within("7", handling(handler), record, scope=scope))

    assert handler.starts == 0


def test_a_bypass_is_refused_while_the_row_is_there(worker: Worker) -> None:
    handler = Handler()
    inside(worker, lambda caller: caller.within("pay_1", pay, PAYMENT))

    with pytest.raises(UsageError, match="Delete the row before"):
        inside(worker, lambda caller: caller.within("pay_1", handling(handler), PAYMENT, bypass=True))

    assert handler.starts == 0


TYPES = {"text": "7", "varchar(3)": "abc", "char(8)": "abc", "bigint": "7", "uuid": str(uuid4())}


@pytest.mark.parametrize("type_", TYPES)
def test_every_column_that_the_database_keeps_unique_will_do(worker: Worker, url: str, type_: str) -> None:
    key, record = TYPES[type_], RecordColumn("order", "group")
    with another(url) as connection:
        connection.execute(f'CREATE TABLE "order" ("group" {type_} UNIQUE)'.encode())

    async def write(hand: Hand) -> None:
        await hand.run(f"INSERT INTO \"order\" VALUES ('{key}')")

    outcomes = [inside(worker, lambda caller: caller.within(key, write, record)) for _ in range(2)]

    assert [one.replayed for one in outcomes] == [False, True]


def test_a_key_that_is_longer_than_its_column_is_not_cut(worker: Worker, url: str) -> None:
    with another(url) as connection:
        connection.execute("CREATE TABLE short (key varchar(3) UNIQUE)")
        connection.execute("INSERT INTO short VALUES ('abc')")
    handler = Handler()

    with pytest.raises(UsageError, match="short does not take what has to be written into key"):
        inside(worker, lambda caller: caller.within("abcd", handling(handler), RecordColumn("short", "key")))

    assert handler.starts == 1


def test_what_a_delivery_costs_in_statements(worker: Worker, url: str) -> None:
    async def story(caller: Caller) -> int:
        for number in range(3):
            await caller.within(f"earlier-{number}", partial(pay, key=f"earlier-{number}"), PAYMENT)
        with proxy.counting() as count:
            await caller.within("pay_1", pay, PAYMENT)
        return count.trips

    with Proxy(url) as proxy:
        worker.url = proxy.url()
        trips = inside(worker, story)

    # A lock and a look for the index, which asyncpg sends one after the other, a look for the row, the handler's own
    # statement, and a look after it.
    assert trips == (5 if isinstance(worker, Asyncpg) else 4)
