"""`RecordColumn` under two deliveries at once, on every driver: the effect happens once, however the row is written.

The handlers write their rows as people do: by a plain INSERT, and by the statements that keep still about a row that is
there already. A second delivery finds the row of the first, and is replayed; or it is told to come again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from onefold import InProgress, RecordColumn
from onefold.stores.mysql import orm as mysql
from onefold.stores.postgres import orm as postgres
from onefold.stores.sql.connection import ErrorClass
from tests.stores.sql.endings import CREDIT, DRIVERS, Bench, Driver, Hand, bench
from tests.stores.sqlalchemy.wallet import Ledger
from tests.support import PATIENCE

PAYMENT = RecordColumn("payments", "idempotency_key")

ROUNDS = 4

INSERT = "INSERT INTO payments (idempotency_key, tenant, amount) VALUES ('{key}', '', 500)"

# By database: the ways to write a row that may be there.
WRITES: dict[str, dict[str, str]] = {
    "sqlite": {
        "INSERT": INSERT,
        "DO NOTHING": f"{INSERT} ON CONFLICT DO NOTHING",
        "DO UPDATE": f"{INSERT} ON CONFLICT (idempotency_key) DO UPDATE SET amount = 500",
    },
    "postgres": {
        "INSERT": INSERT,
        "DO NOTHING": f"{INSERT} ON CONFLICT (idempotency_key) DO NOTHING",
        "DO UPDATE": f"{INSERT} ON CONFLICT (idempotency_key) DO UPDATE SET amount = 500",
    },
    "mariadb": {
        "INSERT": INSERT,
        "IGNORE": INSERT.replace("INSERT", "INSERT IGNORE"),
        "DUPLICATE KEY": f"{INSERT} ON DUPLICATE KEY UPDATE amount = 500",
        "REPLACE": INSERT.replace("INSERT", "REPLACE"),
    },
}

EVERY_DAY = ("sqlite3", "psycopg", "asyncpg", "pymysql", "asyncmy", "sqlalchemy postgresql+psycopg session")


@pytest.fixture(
    params=[
        pytest.param(driver, id=driver.name, marks=() if driver.name in EVERY_DAY else pytest.mark.more)
        for driver in DRIVERS
    ]
)
def driver(request: pytest.FixtureRequest) -> Driver:
    found: Driver = request.param
    return found


@pytest.fixture
def url(driver: Driver, ledger: Ledger) -> str:
    return f"sqlite:///{ledger.address}" if driver.database == "sqlite" else ledger.address


def paying(key: str, statement: str) -> Callable[[Hand], Any]:
    async def work(hand: Hand) -> None:
        await hand.sql(statement.format(key=key))
        await hand.sql(CREDIT)

    return work


def deliver(made: Bench, key: str, statement: str, together: threading.Barrier, *settings: str) -> str:
    """One delivery in a transaction of its own: what became of it."""

    async def story() -> str:
        async with made.connected() as hand:
            for setting in settings:
                await hand.sql(setting)
            together.wait(PATIENCE)
            try:
                outcome = await made.within(hand, key, paying(key, statement), PAYMENT)
            except Exception as error:
                if not tells_to_come_again(error):
                    raise
                return "again"
            await made.commit(hand)
            return "replayed" if outcome.replayed else "ran"

    return made.play(story())


def tells_to_come_again(error: BaseException) -> bool:
    """Whether it is `InProgress`, or the database's own word for it."""
    if isinstance(error, InProgress):
        return True
    info = postgres.classify(error) or mysql.classify(error)
    if info is not None and info.kind is ErrorClass.CONFLICT:
        return True
    return error.__cause__ is not None and tells_to_come_again(error.__cause__)


def race(driver: Driver, url: str, key: str, statement: str, *settings: str) -> list[str]:
    together = threading.Barrier(2)
    with bench(driver, url) as one, bench(driver, url) as other, ThreadPoolExecutor(2) as threads:
        racing = [threads.submit(deliver, made, key, statement, together, *settings) for made in (one, other)]
        return sorted(future.result(PATIENCE) for future in racing)


def test_two_deliveries_at_once_credit_once_and_the_later_one_is_replayed(
    driver: Driver, url: str, ledger: Ledger
) -> None:
    ends = {}
    for name, statement in WRITES[driver.database].items():
        for number in range(ROUNDS):
            ends[name, number] = race(driver, url, f"{name} {number}", statement)

    assert {tuple(found) for found in ends.values()} <= {("ran", "replayed"), ("again", "ran")}, ends
    assert ("ran", "replayed") in {tuple(found) for found in ends.values()}
    assert (ledger.balance, len(ledger.rows("SELECT * FROM payments"))) == (10 * len(ends), len(ends))


# What a transaction begins with, for each level.
LEVELS = {
    "postgres": [f"SET TRANSACTION ISOLATION LEVEL {level}" for level in ("REPEATABLE READ", "SERIALIZABLE")],
    "mariadb": [
        f"SET SESSION TRANSACTION ISOLATION LEVEL {level}"
        for level in ("READ UNCOMMITTED", "READ COMMITTED", "SERIALIZABLE")
    ],
}


@pytest.mark.parametrize(
    "driver",
    [
        pytest.param(one, id=one.name, marks=() if one.name in ("psycopg", "pymysql") else pytest.mark.more)
        for one in DRIVERS
        if one.database in LEVELS
    ],
)
def test_at_other_isolation_levels_it_credits_once_too_and_losers_come_again(
    driver: Driver, url: str, ledger: Ledger
) -> None:
    ends = {}
    for level in LEVELS[driver.database]:
        for name, statement in WRITES[driver.database].items():
            ends[level, name] = race(driver, url, f"{level} {name}"[-50:], statement, level)

    assert {tuple(found) for found in ends.values()} <= {("ran", "replayed"), ("again", "ran")}, ends
    assert (ledger.balance, len(ledger.rows("SELECT * FROM payments"))) == (10 * len(ends), len(ends))


@pytest.mark.parametrize("driver", [one for one in DRIVERS if one.name == "psycopg"], ids=["psycopg"])
def test_a_row_that_was_committed_behind_a_snapshot_is_no_error_of_the_handlers(
    driver: Driver, url: str, ledger: Ledger
) -> None:
    """The caller has read before, so that its transaction does not see what another one commits now."""
    ends = {}

    async def story(made: Bench, key: str, statement: str) -> None:
        async with made.connected() as hand:
            await hand.sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await hand.sql("SELECT 1")
            ledger.execute(INSERT.format(key=key))
            with pytest.raises((InProgress, psycopg.errors.SerializationFailure)) as raised:
                await made.within(hand, key, paying(key, statement), PAYMENT)
            ends[key] = raised.type

    with bench(driver, url) as made:
        for name, statement in WRITES["postgres"].items():
            made.play(story(made, name, statement))

    assert ends["INSERT"] is InProgress
    assert ledger.balance == 0
