"""A backend that dies behind PgBouncer is a lost connection, and never the handler's mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from onefold.stores.postgres import orm as postgres_orm
from onefold.stores.postgres.psycopg import connection as psycopg_connection
from onefold.stores.sql.connection import ErrorClass
from tests.stores.postgres.tools import SCHEMA, another, balance, records
from tests.stores.sql.endings import CREDIT, DRIVERS, Bench, Driver, Hand, bench
from tests.support import eventually

# SQLAlchemy's asyncpg prepares statements, which do not live behind a pooler.
BEHIND = [one for one in DRIVERS if one.database == "postgres" and "postgresql+asyncpg" not in one.name]


@pytest.fixture(params=BEHIND, ids=lambda driver: driver.name)
def tried(request: pytest.FixtureRequest, postgres_url: str, pgbouncer_url: str) -> Iterator[Bench]:
    driver: Driver = request.param
    with another(postgres_url) as connection:
        connection.execute(SCHEMA)
    with bench(driver, pgbouncer_url) as made:
        yield made


@pytest.mark.parametrize("result", [None, "receipt"])
def test_a_backend_that_dies_before_the_commit_is_tried_again(
    tried: Bench, postgres_url: str, result: str | None
) -> None:
    runs = 0

    async def work(hand: Hand) -> Any:
        nonlocal runs
        runs += 1
        await hand.sql(CREDIT)
        if runs == 1:
            _kill_the_writer(postgres_url)
        return result

    outcome = tried.play(tried.transactional("m1", work))

    assert (outcome.replayed, outcome.value, runs) == (False, result, 2)
    assert (balance(postgres_url), records(postgres_url)) == (10, ["m1"])


def test_more_answers_than_were_asked_for_are_a_lost_connection_whoever_stands_between() -> None:
    """As psycopg says it where a pooler tells that the backend has died, and then the client sends a COMMIT."""
    error = psycopg.InternalError("received 2 results from command 'COMMIT'")

    found = psycopg_connection.classify(error), postgres_orm.classify(error)

    assert [one.kind for one in found if one is not None] == [ErrorClass.LOST, ErrorClass.LOST]


def _kill_the_writer(url: str) -> None:
    """End the backend whose transaction is open, and come back when it is gone."""
    inside = "FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
    with another(url) as connection:
        connection.execute(f"SELECT pg_terminate_backend(pid) {inside}")
        assert eventually(lambda: connection.execute(f"SELECT 1 {inside}").fetchone() is None)
