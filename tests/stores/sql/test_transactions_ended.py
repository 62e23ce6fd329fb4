"""A handler that ends the transaction it was given is told, however it does it, and on every driver.

What has to hold after a handler: its record is still there, in the transaction that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import asyncpg
import pytest

from onefold import UsageError
from tests.stores.sql.endings import CREDIT, DRIVERS, Bench, Driver, Hand, bench
from tests.stores.sqlalchemy.wallet import Ledger

Way = Callable[[Hand], Any]


async def _rolls_back(hand: Hand) -> None:
    await hand.call("rollback")


async def _commits(hand: Hand) -> None:
    await hand.call("commit")


async def _says_rollback_and_begins(hand: Hand) -> None:
    await hand.sql("ROLLBACK")
    await hand.sql("BEGIN")
    await hand.sql(CREDIT)


async def _says_commit_and_begins(hand: Hand) -> None:
    await hand.sql("COMMIT")
    await hand.sql("BEGIN")
    await hand.sql(CREDIT)


async def _changes_a_table(hand: Hand) -> None:
    await hand.sql("CREATE TABLE IF NOT EXISTS made_by_a_handler (number INTEGER)")
    await hand.sql(CREDIT)


async def _rolls_back_behind_the_librarys_back(hand: Hand) -> None:
    await hand.raw("rollback")
    await hand.sql(CREDIT)


async def _commits_behind_the_librarys_back(hand: Hand) -> None:
    await hand.raw("commit")
    await hand.sql(CREDIT)


async def _closes(hand: Hand) -> None:
    await hand.call("close")


def _and_writes(way: Way) -> Way:
    async def both(hand: Hand) -> None:
        await way(hand)
        await hand.sql(CREDIT)

    return both


def ways(driver: Driver) -> dict[str, Way]:
    """How a handler can end a transaction by this driver."""
    found: dict[str, Way] = {"close()": _closes}
    if driver.library != "asyncpg":
        found |= {"rollback()": _rolls_back, "commit()": _commits}
        found |= {"rollback() and write": _and_writes(_rolls_back), "commit() and write": _and_writes(_commits)}
    found |= {"ROLLBACK; BEGIN; write": _says_rollback_and_begins, "COMMIT; BEGIN; write": _says_commit_and_begins}
    if driver.database == "mariadb":
        found["DDL and write"] = _changes_a_table
    if driver.library == "sqlalchemy":
        found["the driver's rollback() and write"] = _rolls_back_behind_the_librarys_back
        found["the driver's commit() and write"] = _commits_behind_the_librarys_back
    return found


# The drivers below SQLAlchemy were tried by themselves; one of each database is enough for every day.
EVERY_DAY = {driver.name for driver in DRIVERS if driver.library != "sqlalchemy"} | {
    "sqlalchemy sqlite session",
    "sqlalchemy postgresql+psycopg connection",
    "sqlalchemy postgresql+asyncpg session",
    "sqlalchemy mysql+asyncmy connection",
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
def tried(driver: Driver, ledger: Ledger) -> Iterator[Bench]:
    url = f"sqlite:///{ledger.address}" if driver.database == "sqlite" else ledger.address
    with bench(driver, url) as made:
        yield made


RESULTS = {"without a result": None, "with a result": "receipt"}


def ending(way: Way, result: str | None) -> Way:
    async def work(hand: Hand) -> Any:
        await hand.sql(CREDIT)
        await way(hand)
        return result

    return work


def test_in_transactional_a_handler_that_ends_the_transaction_is_told(tried: Bench) -> None:
    untold = {}
    for number, (name, way) in enumerate(ways(tried.driver).items()):
        for case, result in RESULTS.items():
            try:
                tried.play(tried.transactional(f"{number} {case}", ending(way, result)))
            except UsageError:
                continue
            except Exception as error:
                untold[name, case] = repr(error)
            else:
                untold[name, case] = "nothing"

    assert not untold, untold
    assert not tried.play(tried.transactional("m1", ending(_does_nothing, None))).replayed


def test_in_within_a_handler_that_ends_the_transaction_is_told(tried: Bench) -> None:
    untold = {}

    async def story(key: str, way: Way, result: str | None) -> str | None:
        async with tried.connected() as hand:
            try:
                await tried.within(hand, key, ending(way, result))
            except UsageError:
                return None
            except asyncpg.ConnectionDoesNotExistError:
                # It does not tell a connection that was closed from one that was lost.
                return None if way is _closes else "lost"
            except Exception as error:
                return repr(error)
            return "nothing"

    for number, (name, way) in enumerate(ways(tried.driver).items()):
        for case, result in RESULTS.items():
            told = tried.play(story(f"{number} {case}", way, result))
            if told is not None:
                untold[name, case] = told

    assert not untold, untold


async def _does_nothing(_: Hand) -> None:
    """Honest."""


async def _uses_a_savepoint(hand: Hand) -> None:
    await hand.sql("SAVEPOINT mine")
    await hand.sql(CREDIT)
    await hand.sql("ROLLBACK TO SAVEPOINT mine")
    await hand.sql(CREDIT)
    await hand.sql("RELEASE SAVEPOINT mine")


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_an_honest_handler_with_savepoints_of_its_own_is_not_refused(
    tried: Bench, ledger: Ledger, result: str | None
) -> None:
    async def story() -> None:
        async with tried.connected() as hand:
            for key in ("w1", "w2"):
                await tried.within(hand, key, ending(_uses_a_savepoint, result))
            await tried.commit(hand)

    tried.play(tried.transactional("t1", ending(_uses_a_savepoint, result)))
    tried.play(story())

    assert (ledger.balance, ledger.records) == (60, ["t1", "w1", "w2"])


def test_joined_deliveries_can_be_nested_and_an_inner_one_can_be_undone(tried: Bench, ledger: Ledger) -> None:
    async def story() -> None:
        async def outer(hand: Hand) -> str:
            await tried.within(hand, "inner", ending(_does_nothing, None))
            await hand.sql("SAVEPOINT mine")
            await tried.within(hand, "undone", ending(_does_nothing, None))
            await hand.sql("ROLLBACK TO SAVEPOINT mine")
            return "receipt"

        async with tried.connected() as hand:
            await tried.within(hand, "outer", outer)
            await tried.commit(hand)

    tried.play(story())

    assert (ledger.balance, ledger.records) == (10, ["inner", "outer"])


def test_a_handler_that_goes_back_to_a_savepoint_from_before_is_told(tried: Bench, ledger: Ledger) -> None:
    async def goes_back(hand: Hand) -> None:
        await hand.sql("ROLLBACK TO SAVEPOINT earlier")
        await hand.sql(CREDIT)

    async def story(key: str, result: str | None) -> None:
        async with tried.connected() as hand:
            await hand.sql("UPDATE wallet SET balance = balance WHERE account = 'asha'")
            await hand.sql("SAVEPOINT earlier")
            with pytest.raises(UsageError):
                await tried.within(hand, key, ending(goes_back, result))

    for case, result in RESULTS.items():
        tried.play(story(case, result))

    assert (ledger.balance, ledger.records) == (0, [])


@pytest.mark.parametrize(
    "driver", [one for one in DRIVERS if one.name in ("sqlite3", "psycopg", "pymysql")], ids=lambda driver: driver.name
)
def test_a_cursor_is_refused_with_the_name_of_what_to_pass(tried: Bench) -> None:
    async def story() -> None:
        async with tried.connected() as hand:
            with pytest.raises(UsageError, match=r"this is a cursor. Pass guard\.within\(cursor\.connection\)"):
                await tried.within(Hand(hand.connection.cursor()), "m1", ending(_does_nothing, None))

    tried.play(story())
