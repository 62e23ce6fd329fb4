"""Every SQL store purges a little as it works: its table stays bounded, and no delivery is the worse for it."""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from onefold import AsyncGuard, Guard, Policy, UsageError
from onefold.stores import background_purge
from onefold.stores.postgres.dialect import Postgres
from onefold.stores.sql.dialect import SqlRequest
from onefold.stores.sqlite import AsyncSqliteStore, SqliteStore
from onefold.stores.sqlite.records import Records
from onefold.testing import Clock, StoreContract
from services import mariadb, postgres
from tests.wallet import never_opened

CHANCE = background_purge.chance

DELIVERIES = 20_000

# Of a store whose records have expired after a moment. To be more, chance would have to say "not now" 5,000
# times on end, which it does once in 10^10 runs.
FEW = 6_000

# In batches of 500 chance has no say: after each of them twice as many are purged.
BATCH = 500
FEW_AFTER_BATCHES = 2_500


# Whoever waits for a row on PostgreSQL gives up after a while.
BOUNDED = "options=-c%20lock_timeout%3D5s"


@pytest.fixture
def by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in production."""
    monkeypatch.setattr(background_purge, "chance", CHANCE)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little is purged after every delivery."""
    monkeypatch.setattr(background_purge, "chance", lambda *_: 0)


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/records.db?sync=normal"
    return str(request.getfixturevalue(f"{request.param}_url"))


def connected(url: str) -> Any:
    if url.startswith("sqlite"):
        return sqlite3.connect(url.removeprefix("sqlite:///").partition("?")[0], isolation_level=None)
    if url.startswith("postgres"):
        return postgres.connected(url)
    connection = mariadb.connected(url)
    connection.select_db(urlsplit(url).path[1:])
    return connection


def rows(url: str) -> int:
    """How many rows the table has, whatever their TTL."""
    with closing(connected(url)) as connection, closing(connection.cursor()) as cursor:
        cursor.execute("SELECT count(*) FROM onefold_records")
        return int(cursor.fetchone()[0])


def option(url: str, option_text: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{option_text}"


# When.


def test_so_many_batches_as_outrun_the_growth(by_chance: None) -> None:
    drawn = [background_purge.batches_due(ended) for ended in [1] * 40_000]

    assert 100 < sum(drawn) < 320
    assert background_purge.BATCH > 2 * background_purge.ONE_IN


def test_a_batch_purges_in_proportion(by_chance: None) -> None:
    assert {background_purge.batches_due(5 * background_purge.ONE_IN + 100) for _ in range(200)} == {5, 6}
    assert background_purge.batches_due(0) == 0


def test_it_takes_no_numbers_from_a_generator_that_the_application_has_seeded(by_chance: None) -> None:
    random.seed(7)
    before = random.getstate()

    background_purge.chance()

    assert random.getstate() == before


# The table stays bounded.


@pytest.mark.usefixtures("by_chance")
@pytest.mark.parametrize(
    ("purge", "deliveries"), [pytest.param(True, DELIVERIES, marks=pytest.mark.more), (False, FEW + 1_000)]
)
def test_one_delivery_after_the_other(tmp_path: Path, *, purge: bool, deliveries: int) -> None:
    clock, path = Clock(1_000_000.0), tmp_path / "records.db"
    with closing(SqliteStore(path, sync="normal", purge=purge, clock=clock)) as store:
        guard = Guard(store, policy=Policy(keep=100, lease=10))
        for number in range(deliveries):
            guard.run("charge", number, lambda: None)
            clock.advance(1.0)

    left = rows(f"sqlite:///{path}")
    assert left <= FEW if purge else left == deliveries


@pytest.mark.usefixtures("by_chance")
@pytest.mark.parametrize(
    ("server", "switch", "deliveries"),
    [
        pytest.param("postgres", "yes", DELIVERIES, marks=pytest.mark.more),
        ("postgres", "yes", 2 * FEW_AFTER_BATCHES),
        ("postgres", "no", 2 * FEW_AFTER_BATCHES),
        ("mysql", "yes", 2 * FEW_AFTER_BATCHES),
        ("mysql", "no", 2 * FEW_AFTER_BATCHES),
    ],
)
def test_one_batch_after_the_other(server: str, switch: str, deliveries: int, request: pytest.FixtureRequest) -> None:
    url = str(request.getfixturevalue(f"{server}_url"))
    with Guard(option(url, f"purge={switch}"), policy=Policy(keep=0.01, lease=30)) as guard:
        for begin in range(0, deliveries, BATCH):
            numbers = range(begin, begin + BATCH)
            guard.run_batch("charge", list(numbers), key=lambda number: number, handler=lambda _: None)

    left = rows(url)
    assert left <= FEW_AFTER_BATCHES if switch == "yes" else left == deliveries


# After what.


def leave(url: str, count: int = 3) -> None:
    """Records that have expired, by a store that does not purge."""
    with Guard(option(url, "purge=no"), policy=Policy(keep=0.001)) as guard:
        for number in range(count):
            guard.run("old", number, lambda: None)
    time.sleep(0.01)


def failing() -> None:
    raise RuntimeError("the bank is closed")


def by_claim(guard: Guard) -> None:
    guard.run("charge", "k", lambda: None)


def by_failing(guard: Guard) -> None:
    with pytest.raises(RuntimeError, match="the bank is closed"):
        guard.run("charge", "k", failing)


def by_seen(guard: Guard) -> None:
    guard.run("charge", "k", lambda: None, policy=Policy(mode="seen"))


def by_batch(guard: Guard) -> None:
    guard.run_batch("charge", ["k"], key=lambda key: key, handler=lambda _: None)


def by_transaction(guard: Guard) -> None:
    guard.transactional("charge", key="key")(lambda key, *, tx: None)("k")  # type: ignore[call-arg]


WAYS = [by_claim, by_failing, by_seen, by_batch, by_transaction]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_end_a_delivery_purges(url: str, way: Callable[[Guard], None]) -> None:
    leave(url)

    with Guard(url) as guard:
        way(guard)

    # A claim that was released leaves none, unless it is to count the attempts.
    assert rows(url) <= 1


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("way", WAYS)
def test_purge_no_in_the_url_switches_it_off(url: str, way: Callable[[Guard], None]) -> None:
    leave(url)

    with Guard(option(url, "purge=no")) as guard:
        way(guard)

    assert rows(url) >= 3


async def deliver_async(url: str, way: str) -> None:
    async def handle() -> None: ...

    async def credit(key: str, *, tx: Any) -> None: ...

    async with AsyncGuard(url) as guard:
        if way == "claim":
            await guard.run("charge", "k", handle)
        else:
            await guard.transactional("charge", key="key")(credit)("k")  # type: ignore[call-arg]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("way", ["claim", "transaction"])
@pytest.mark.parametrize(
    "driver", ["sqlite", "postgresql", "postgresql+asyncpg", "mysql"], ids=lambda driver: driver.replace("+", "-")
)
def test_so_do_the_async_stores(driver: str, way: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/records.db"
    if driver != "sqlite":
        url = str(request.getfixturevalue("mysql_url" if driver == "mysql" else "postgres_url"))
    leave(url)

    asyncio.run(deliver_async(url.replace("postgresql:", f"{driver}:") if "postgres" in driver else url, way))

    assert rows(url) == 1


@pytest.mark.usefixtures("always")
def test_so_does_a_store_on_an_engine_or_a_pool_of_yours(postgres_url: str) -> None:
    from psycopg_pool import ConnectionPool
    from sqlalchemy import create_engine

    from onefold.stores.postgres import adopt
    from onefold.stores.sqlalchemy import SqlAlchemyStore

    engine = create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    with ConnectionPool(postgres_url, min_size=1, open=True) as pool:
        for switched_on, left in ((False, 5), (True, 2)):
            for store in (SqlAlchemyStore(engine, purge=switched_on), adopt(pool, is_async=False, purge=switched_on)):
                with postgres.connected(postgres_url) as connection:
                    connection.execute("DROP TABLE IF EXISTS onefold_records, onefold_schema")
                leave(postgres_url)
                guard = Guard(store)  # type: ignore[arg-type]
                guard.run("charge", "k", lambda: None)
                guard.transactional("credit", key="key")(lambda key, *, tx: None)("k")  # type: ignore[call-arg]
                assert rows(postgres_url) == left
    engine.dispose()


@pytest.mark.usefixtures("always")
def test_the_clock_of_the_store_says_what_has_expired(tmp_path: Path) -> None:
    clock = Clock(1_000.0)
    with closing(SqliteStore(tmp_path / "records.db", clock=clock)) as store:
        guard = Guard(store, policy=Policy(keep=60))
        guard.run("charge", "first", lambda: None)
        guard.run("charge", "second", lambda: None)
        before = rows(f"sqlite:///{tmp_path}/records.db")
        clock.advance(61)
        guard.run("charge", "third", lambda: None)

    assert before == 2
    assert rows(f"sqlite:///{tmp_path}/records.db") == 1


@pytest.mark.more
@pytest.mark.usefixtures("always")
class TestTheContractHoldsWithAPurgeAfterEveryOperation(StoreContract):
    racers = 4

    @pytest.fixture(autouse=True)
    def set_up(self, tmp_path: Path) -> None:
        self.clock = Clock(time.time())
        self.path = tmp_path / "records.db"

    def process_source(self) -> Any:
        return partial(SqliteStore, self.path)

    def open_store(self) -> SqliteStore:
        return SqliteStore(self.path, sync="normal", clock=self.clock)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


# Beside the work.


@pytest.mark.usefixtures("always")
def test_a_purge_that_fails_fails_no_delivery(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = "SELECT no_such_column FROM onefold_records"
    for dialect in Postgres.__mro__[:-1]:
        if "background_purge" in vars(dialect):
            monkeypatch.setattr(dialect, "background_purge", lambda _self, _limit: (yield SqlRequest(wrong, {})))
    monkeypatch.setattr(Records, "purge", lambda self, _limit: self.connection.execute(wrong))

    with caplog.at_level(logging.DEBUG, "onefold"), Guard(url) as guard:
        outcome = guard.run("charge", "k", lambda: 4200)
        again = guard.run("charge", "k", lambda: 4200)

    assert (outcome.value, outcome.recorded, again.replayed) == (4200, True, True)
    (said,) = [record for record in caplog.records if "the background purge failed" in record.message]
    assert said.levelno == logging.DEBUG


@pytest.mark.usefixtures("always")
def test_a_purge_waits_for_no_other_writer_of_the_file(tmp_path: Path) -> None:
    """Somebody begins to write between the end of a delivery and the purge after it."""
    path = tmp_path / "records.db"
    other = sqlite3.connect(path, isolation_level=None)
    with closing(other), closing(SqliteStore(path, busy_timeout="2m")) as store:
        guard = Guard(store)
        guard.run("charge", "first", lambda: None)
        due = store.batches_due()
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()

        store.purge_batches(due)

        assert due == 1
        assert time.monotonic() - began < 60.0


@pytest.mark.usefixtures("always")
def test_a_record_that_others_work_on_is_left_to_them(postgres_url: str) -> None:
    leave(postgres_url)
    with postgres.connected(postgres_url) as connection, connection.transaction():
        connection.execute("SELECT 1 FROM onefold_records LIMIT 1 FOR UPDATE")

        with Guard(f"{postgres_url}?{BOUNDED}") as guard:
            guard.run("charge", "k", lambda: None)

        assert rows(postgres_url) == 2


@pytest.mark.usefixtures("always")
def test_in_a_transaction_of_yours_nothing_is_purged(url: str) -> None:
    """On your connection it would be a part of your work, and the guard's own store is not even opened."""
    leave(url)
    with closing(connected(url)) as connection:
        connection.cursor().execute("BEGIN")
        Guard(never_opened).within(connection).run("credit", "k", lambda: None)
        connection.commit()

    assert rows(url) == 4


def of_a_test(block: Any) -> Any:
    """As `django.test.TestCase` marks its blocks."""
    block._from_testcase = True
    return block


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_block_of_djangos_does_not_wait_for_a_purge_that_waits_for_it(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Around the delivery there is the block of a TestCase."""
    pytest.importorskip("django")
    from django.db import transaction

    from tests.stores.django.project import alias_of, project

    name = str(tmp_path / "records.db") if database == "sqlite" else str(request.getfixturevalue("postgres_url"))
    url = f"sqlite:///{name}" if database == "sqlite" else name
    leave(url)
    # It would wait for as long as this.
    patience = {"OPTIONS": {"timeout": 120}} if database == "sqlite" else {}
    with project(), alias_of(database, name, **patience) as alias, Guard(f"django://{alias}") as guard:
        began = time.monotonic()
        with of_a_test(transaction.atomic(using=alias)):
            guard.transactional("credit", key="key")(lambda key, *, tx: None)("k")  # type: ignore[call-arg]
        took = time.monotonic() - began
        # SQLite has one writer: there a purge has to wait for a delivery outside of a block.
        inside = rows(url)
        guard.run("charge", "k", lambda: None)

    assert took < 60.0
    assert (inside, rows(url)) == (4 if database == "sqlite" else 1, 2)


@pytest.mark.usefixtures("always")
def test_postgres_does_not_look_through_all_whose_end_is_near(postgres_url: str) -> None:
    """The ten minutes that its index counts in may hold a million records that have not expired yet."""
    with Guard(postgres_url) as guard:
        guard.run("charge", "k", lambda: None)
        with postgres.connected(postgres_url) as connection:
            connection.execute(
                "INSERT INTO onefold_records (scope, operation, key, state, attempt, began, changed, expires, due,"
                " remark, revision, token) SELECT '', 'charge', number::text, 'done', 1, 0, 0, 4e9, 1, '', 1, 'token'"
                " FROM generate_series(1, 5000) AS number"
            )
            connection.execute("ANALYZE onefold_records")
            statement = Postgres.remove_near.replace(":limit", "500")
            plan = "\n".join(line for (line,) in connection.execute(f"EXPLAIN ANALYZE {statement}").fetchall())

    assert "onefold_records_due" in plan
    assert "Seq Scan" not in plan
    assert "rows=5000" not in plan


# Words.


@pytest.mark.parametrize("scheme", ["sqlite:///x.db", "postgresql://localhost/x", "mysql://localhost/x"])
def test_the_option_is_yes_or_no(scheme: str) -> None:
    with pytest.raises(UsageError, match="purge='maybe' has to be yes or no"):
        Guard(f"{scheme}?purge=maybe").store  # noqa: B018 - it is opened there


def test_the_async_file_can_be_told_in_code(tmp_path: Path) -> None:
    store = AsyncSqliteStore(tmp_path / "records.db", purge=False)

    assert store.sync.batches_due(10_000) == 0


def test_memory_sweeps_as_it_works() -> None:
    from onefold.stores.memory import MemoryStore

    clock = Clock(1_000.0)
    store = MemoryStore(clock=clock)
    guard = Guard(store, policy=Policy(keep=100, lease=10))
    for number in range(DELIVERIES):
        guard.run("charge", number, lambda: None)
        clock.advance(1.0)

    assert len(store) < 1_000
