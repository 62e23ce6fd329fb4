"""PostgreSQL: a schema for each tenant, on a caller's connections of every driver.

A tenant that is new gets its tables at its second delivery at the latest, however busy the others are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from onefold import AsyncGuard, Guard, StoreUnavailable
from onefold.stores import background_purge
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


EXPIRED = (
    "INSERT INTO {}.onefold_records (began, changed, expires, due, attempt, revision, scope, operation, key, state, "
    "token, remark) VALUES (0, 0, 1, 0, 1, 1, '', 'credit', 'old', 'done', '', '')"
)


def in_a_session(ledger: Ledger, tenant: str) -> object:
    engine = ledger.engine()
    with Session(engine) as session, session.begin():
        session.execute(text(f"SET LOCAL search_path TO {tenant}"))
        outcome = Guard("memory:").within(session).run("credit", "m1", lambda: tenant)
    engine.dispose()
    return outcome.value


def in_an_async_session(ledger: Ledger, tenant: str) -> object:
    async def work() -> str:
        return tenant

    async def deliver() -> object:
        engine = create_async_engine(ledger.engine().url)
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(text(f"SET LOCAL search_path TO {tenant}"))
            outcome = await AsyncGuard("memory:").within(session).run("credit", "m1", work)
        await engine.dispose()
        return outcome.value

    return asyncio.run(deliver())


def in_a_block_of_djangos(ledger: Ledger, tenant: str) -> object:
    pytest.importorskip("django")
    from django.db import connections, transaction

    from tests.stores.django.project import alias_of, project

    with project(), alias_of("postgres", ledger.address) as alias, transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute(f"SET LOCAL search_path TO {tenant}")
        return Guard("memory:").within(connections[alias]).run("credit", "m1", lambda: tenant).value


@pytest.mark.parametrize("way", [in_a_session, in_an_async_session, in_a_block_of_djangos])
@pytest.mark.parametrize("driver", [one for one in DRIVERS if one.name == "psycopg"], ids=lambda one: one.name)
def test_the_purge_after_a_commit_is_in_the_schema_of_the_tenant(
    way: Callable[[Ledger, str], object], desk: Bench, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    del desk
    for tenant in TENANTS:
        in_a_session(ledger, tenant)
        ledger.execute(EXPIRED.format(tenant))
    monkeypatch.setattr(background_purge, "chance", lambda: 0)

    assert way(ledger, "globex") == "globex"

    kept = [ledger.rows(f"SELECT key FROM {tenant}.onefold_records ORDER BY key") for tenant in TENANTS]
    assert kept == [[("m1",), ("old",)], [("m1",)]]
