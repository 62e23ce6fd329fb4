"""A renewal, or a batch, that is cancelled at any moment leaves no connection open (row 41 of the edge cases)."""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from typing import Any

import pytest

from onefold._model import Address, Claim, Entry
from tests.faults.cancel_tools import DRIVERS, MOMENTS_MAX, Driver, Moments, connected
from tests.support import PATIENCE, eventually

# SQLite has no server to ask: there a connection that is left open is a warning when it is collected. Clients only:
# PostgreSQL's own vacuum looks into each database now and then, and stays a while.
OTHERS = {
    "postgres_url": "SELECT pid, state, query FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid != pg_backend_pid() AND backend_type = 'client backend'",
    "mysql_url": "SELECT id, command, info FROM information_schema.processlist"
    " WHERE db = database() AND id != connection_id()",
}


def new_entry() -> Entry:
    return Entry(address=Address("", "charge", secrets.token_hex(8)), token=secrets.token_bytes(16), lease=3_600.0)


async def renewed(store: Any, begin: Callable[[], None]) -> None:
    entry = new_entry()
    await store.claim(entry)
    begin()
    await store.extend_all([Claim(entry.address, entry.token, 3_600.0, 7_200.0)])


async def claimed_together(store: Any, begin: Callable[[], None]) -> None:
    begin()
    await store.claim_all([new_entry(), new_entry()])


async def begun(store: Any, begin: Callable[[], None]) -> None:
    begin()
    async with store.transaction() as transaction:
        await transaction.begin()


STORIES = {"renewed": renewed, "claimed together": claimed_together, "begun": begun}


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    """Let nobody else close what was left open."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def patient_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no clean-up be given up on a busy machine: what is abandoned is closed by the garbage collector, later."""
    monkeypatch.setattr("onefold._concurrency.interrupts.CLEAN_UP_SECONDS", PATIENCE)


@pytest.fixture
def address(driver: str, request: pytest.FixtureRequest, tmp_path: Any) -> str:
    database = DRIVERS[driver].database
    return str(tmp_path / "wallet.db") if database == "path" else str(request.getfixturevalue(database))


async def cancelled_everywhere(driver: Driver, address: str, story: str, way: str) -> int:
    for at in range(1, MOMENTS_MAX):
        # Each on a store of its own, so that connections are opened, too.
        async with driver.opened(address) as environment:
            moments = Moments(at, way)
            await moments.run(STORIES[story](environment.guard.store, moments.begin))
        if not moments.struck:
            if driver.database == "path":
                # Whatever was left open says so here.
                gc.collect()
            return at - 1
    raise AssertionError("there is no end of it")


def left_open(driver: Driver, address: str) -> list[Any]:
    """The connections that stay, with what they did last."""
    others: list[Any] = []
    if driver.database == "path":
        return others
    with closing(connected(driver.database, address)) as connection:
        cursor = connection.cursor()

        def alone() -> bool:
            cursor.execute(OTHERS[driver.database])
            others[:] = cursor.fetchall()
            # Inside one transaction PostgreSQL shows the same sessions for ever, those that have ended since, too.
            connection.rollback()
            return not others

        eventually(alone)
    return others


# Every story, and every driver whose connections are opened in a way of its own; the rest is for `make test-all`.
EVERYDAY = {
    ("psycopg", "begun", "once"),
    ("asyncpg", "renewed", "at every turn"),
    ("asyncmy", "claimed together", "once"),
    ("sqlite", "renewed", "once"),
    ("sqlalchemy, asyncmy", "begun", "at every turn"),
    ("sqlalchemy, aiosqlite", "renewed", "once"),
    ("sqlalchemy, aiosqlite", "claimed together", "at every turn"),
}
COMBINATIONS = [
    pytest.param(*one, id="-".join(one), marks=() if one in EVERYDAY else pytest.mark.more)
    for one in product(DRIVERS, STORIES, ["once", "at every turn"])
]


# Where a pipeline's connection was ended, psycopg says so once more when the pipeline is collected.
@pytest.mark.filterwarnings("ignore:.*BasePipeline._exit_gen:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("driver", "story", "way"), COMBINATIONS)
def test_what_is_cancelled_leaves_no_connection_open(driver: str, story: str, way: str, address: str) -> None:
    found = asyncio.run(asyncio.wait_for(cancelled_everywhere(DRIVERS[driver], address, story, way), PATIENCE))

    assert found > 0
    assert left_open(DRIVERS[driver], address) == []
