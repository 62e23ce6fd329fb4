"""PostgreSQL: a schema for each tenant, on a caller's connections of every driver.

A tenant that is new gets its tables at its second delivery at the latest, however busy the others are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from onefold import Guard, StoreUnavailable
from tests.stores.sql.endings import DRIVERS, Bench, Driver, Hand, bench
from tests.stores.sqlalchemy.wallet import Ledger

TENANTS = ("acme", "globex")


@pytest.fixture(params=[one for one in DRIVERS if one.database == "postgres"], ids=lambda one: one.name)
def driver(request: pytest.FixtureRequest) -> Driver:
    found: Driver = request.param
    return found


@pytest.fixture
def desk(driver: Driver, ledger: Ledger) -> Iterator[Bench]:
    for tenant in TENANTS:
        ledger.execute(f"CREATE SCHEMA {tenant}")
        ledger.execute(f"CREATE TABLE {tenant}.effects (name VARCHAR(50))")
    with bench(driver, ledger.address) as desk:
        yield desk


def test_a_new_tenant_gets_its_tables_while_another_is_busy(desk: Bench, ledger: Ledger) -> None:
    async def deliver(tenant: str) -> object:
        async def work(hand: Hand) -> str:
            await hand.sql(f"INSERT INTO effects VALUES ('{tenant}')")
            return tenant

        async with desk.connected() as hand:
            await hand.sql(f"SET LOCAL search_path TO {tenant}")
            outcome = await desk.within(hand, "m1", work)
            await desk.commit(hand)
            return outcome.value

    # Once somebody else's session has found its tables, the first transaction of another schema is rolled back.
    for tenant in TENANTS:
        with suppress(StoreUnavailable):
            desk.play(deliver(tenant))
    found = [desk.play(deliver(tenant)) for tenant in TENANTS * 2]

    assert found == [*TENANTS * 2]
    assert [ledger.rows(f"SELECT name FROM {tenant}.effects") for tenant in TENANTS] == [[("acme",)], [("globex",)]]


@pytest.mark.parametrize("driver", [one for one in DRIVERS if one.name == "psycopg"], ids=lambda one: one.name)
def test_sessions_of_one_engine_may_have_a_schema_each(desk: Bench, ledger: Ledger) -> None:
    del desk
    engine = ledger.engine()

    def deliver(guard: Guard, tenant: str) -> object:
        with Session(engine) as session, session.begin():
            session.execute(text(f"SET LOCAL search_path TO {tenant}"))
            return guard.within(session).run("credit", "m1", lambda: tenant).value

    with Guard("memory:") as guard:
        deliver(guard, "acme")
        with pytest.raises(StoreUnavailable, match="search_path"):
            deliver(guard, "globex")
        found = [deliver(guard, tenant) for tenant in TENANTS * 2]
    engine.dispose()

    assert found == [*TENANTS * 2]
