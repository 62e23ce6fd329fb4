"""A handler that ends the transaction is told, also where it is done in a way that no client can see.

By a procedure, by DDL, in a comment that the server executes: each of them goes on in another transaction, in which
there is no record, and that one is not committed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg_pool import ConnectionPool

from onefold import Guard, UsageError
from onefold.stores import mysql
from onefold.stores.mysql.dialect import MYSQL
from tests.stores.sql.endings import CREDIT, DRIVERS, Bench, Driver, Hand, bench
from tests.stores.sql.hidden_endings import ENDINGS, PREPARED, Statements
from tests.stores.sqlalchemy.wallet import Ledger

# SQLAlchemy's sessions and the drivers below it were tried by themselves; these differ in who sends what.
EVERY_DAY = {
    *("sqlite3", "psycopg", "psycopg async", "asyncpg", "pymysql", "asyncmy"),
    *("sqlalchemy mysql+pymysql connection", "sqlalchemy mysql+asyncmy connection"),
}


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
def ledger(ledger: Ledger) -> Ledger:
    for statement in PREPARED[ledger.database]:
        ledger.execute(statement)
    return ledger


@pytest.fixture
def tried(driver: Driver, ledger: Ledger) -> Iterator[Bench]:
    url = f"sqlite:///{ledger.address}" if driver.database == "sqlite" else ledger.address
    with bench(driver, url) as made:
        yield made


RESULTS = {"without a result": None, "with a result": "receipt"}


def told_of_all(tried: Bench, ledger: Ledger, mode: Any) -> dict[tuple[str, str], str]:
    """Return what went wrong: endings that were not told, and those after which something was committed."""
    wrong: dict[tuple[str, str], str] = {}
    for name, statements in ENDINGS[tried.driver.database].items():
        for case, result in RESULTS.items():
            before = ledger.balance
            try:
                tried.play(mode(tried, f"{name} {case}", ending(statements, result)))
            except UsageError:
                pass
            except Exception as error:
                wrong[name, case] = repr(error)
            else:
                wrong[name, case] = "nothing"
            if ledger.balance - before > 10:
                wrong[name, case] = "what came after was committed"
    return wrong


def ending(statements: Statements, result: str | None) -> Any:
    async def work(hand: Hand) -> Any:
        for statement in (CREDIT, *statements, CREDIT):
            await hand.sql(statement)
        return result

    return work


async def honest(hand: Hand) -> str:
    await hand.sql("SAVEPOINT mine")
    await hand.sql(CREDIT)
    await hand.sql("RELEASE SAVEPOINT mine")
    return "receipt"


async def in_transactional(tried: Bench, key: str, work: Any) -> None:
    await tried.transactional(key, work)


async def in_within(tried: Bench, key: str, work: Any) -> None:
    async with tried.connected() as hand:
        await tried.within(hand, key, work)
        await tried.commit(hand)


MODES = {"transactional": in_transactional, "within": in_within}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_handler_that_ends_the_transaction_unseen_is_told_and_nothing_more_is_committed(
    tried: Bench, ledger: Ledger, mode: Any
) -> None:
    wrong = told_of_all(tried, ledger, mode)

    assert not wrong, wrong
    # Whatever these left behind in a connection, the next delivery has a good one.
    before = ledger.balance
    tried.play(mode(tried, "honest", honest))
    assert ledger.balance - before == 10
    assert "honest" in ledger.records


@pytest.mark.parametrize(
    "driver", [one for one in DRIVERS if one.name in ("pymysql", "asyncmy")], ids=lambda driver: driver.name
)
def test_mysqls_own_way_which_takes_a_message_more_tells_it_too(
    tried: Bench, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mysql, "dialect_of", lambda _version: MYSQL)

    assert not told_of_all(tried, ledger, in_transactional)


@pytest.mark.parametrize(
    "driver", [one for one in DRIVERS if one.name in ("pymysql", "asyncmy")], ids=lambda driver: driver.name
)
def test_a_handler_that_ends_the_transaction_unseen_and_raises_is_told_besides_its_own_error(
    tried: Bench, ledger: Ledger
) -> None:
    untold = []
    for name, statements in ENDINGS["mariadb"].items():

        async def work(hand: Hand, statements: Statements = statements) -> None:
            for statement in statements:
                await hand.sql(statement)
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine") as raised:
            tried.play(tried.transactional(name, work))
        if not any("ended the transaction" in note for note in getattr(raised.value, "__notes__", ())):
            untold.append(name)

    assert not untold
    tried.play(tried.transactional("honest", honest))
    assert (ledger.balance, "honest" in ledger.records) == (10, True)


@pytest.mark.parametrize(
    "driver", [one for one in DRIVERS if one.name in ("sqlite3", "sqlite3 async")], ids=lambda driver: driver.name
)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_an_error_of_sqlite_that_rolls_back_all_is_told_to_whoever_goes_on(
    tried: Bench, ledger: Ledger, mode: Any
) -> None:
    async def work(hand: Hand) -> None:
        await hand.sql(CREDIT)
        with pytest.raises(sqlite3.IntegrityError):
            await hand.sql("INSERT OR ROLLBACK INTO wallet VALUES ('asha', 0)")
        await hand.sql("BEGIN")
        await hand.sql(CREDIT)

    with pytest.raises(UsageError, match="ended the transaction by itself"):
        tried.play(mode(tried, "m1", work))

    assert (ledger.balance, ledger.records) == (0, [])


# Where a driver opens a transaction by itself, what follows an end of the handler's own is in one, too.

OPENING = {"psycopg", "psycopg async", "pymysql", "asyncmy", "sqlalchemy postgresql+psycopg connection"}


async def _rolls_back(hand: Hand) -> None:
    await hand.call("rollback")


async def _says_rollback(hand: Hand) -> None:
    await hand.sql("ROLLBACK")


@pytest.mark.parametrize("driver", [one for one in DRIVERS if one.name in OPENING], ids=lambda driver: driver.name)
def test_what_a_handler_writes_after_a_rollback_of_its_own_is_undone(tried: Bench, ledger: Ledger) -> None:
    for way in (_rolls_back, _says_rollback):

        async def work(hand: Hand, way: Any = way) -> None:
            await hand.sql(CREDIT)
            await way(hand)
            await hand.sql(CREDIT)

        with pytest.raises(UsageError, match="ended the transaction by itself"):
            tried.play(tried.transactional("m1", work))

    assert (ledger.balance, ledger.records) == (0, [])
    tried.play(tried.transactional("m1", honest))
    assert (ledger.balance, ledger.records) == (10, ["m1"])


@pytest.mark.parametrize("autocommit", [False, True])
def test_on_a_callers_pool_it_is_undone_too_and_its_connections_stay_as_they_were(
    postgres_url: str, *, autocommit: bool
) -> None:
    ledger = Ledger("postgres", postgres_url)
    with (
        ConnectionPool(postgres_url, min_size=1, max_size=1, kwargs={"autocommit": autocommit}) as pool,
        Guard(pool) as guard,
    ):

        @guard.transactional("credit", key="key")
        def credit(key: str, *, tx: Any, ends: bool = False) -> None:
            assert not tx.autocommit
            if ends:
                tx.rollback()
            tx.execute(CREDIT)

        with pytest.raises(UsageError, match="ended the transaction by itself"):
            credit("m1", ends=True)  # type: ignore[call-arg]
        assert (ledger.balance, ledger.records) == (0, [])

        credit("m1")  # type: ignore[call-arg]
        # An operation of the store on the same connection is committed at once.
        guard.run("charge", "m2", lambda: None)
        assert (ledger.balance, ledger.records) == (10, ["m1", "m2"])
        with pool.connection() as connection:
            assert connection.autocommit is autocommit
    ledger.close()
