"""The documents' own statements under eight deliveries at once, on every driver: one effect, and seven replays of it.

The table is the one of the articles: a key, a result, and when. Their handlers write it themselves, by a plain INSERT
or by a statement that keeps still about a row that is there; or they leave it to Onefold. The effects are counted by
somebody who knows nothing of Onefold.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Outcome, RecordColumn
from tests.stores.postgres.tools import ended
from tests.stores.sql.endings import CREDIT, DRIVERS, Driver, Hand, bench, maybe_await
from tests.stores.sqlalchemy.wallet import Ledger
from tests.support import PATIENCE

KEYS = RecordColumn("idempotency_keys", "key", result="result", fingerprint="fingerprint")

AT_ONCE = 8
# Each way to write the row, and one of them twice; in `make test-all` each of them several times, on every driver.
EVERY_DAY = 6
ROUNDS = 20
SOAK = 200

TABLES = {
    "sqlite": "CREATE TABLE idempotency_keys (key TEXT PRIMARY KEY, result JSON, fingerprint TEXT, "
    "created_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP)",
    "postgres": "CREATE TABLE idempotency_keys (key TEXT PRIMARY KEY, result JSONB, fingerprint TEXT, "
    "created_at TIMESTAMPTZ NOT NULL DEFAULT now())",
    "mariadb": "CREATE TABLE idempotency_keys (`key` VARCHAR(255) COLLATE utf8mb4_bin PRIMARY KEY, result JSON, "
    "fingerprint VARCHAR(255), created_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP)",
}

INSERT = "INSERT INTO idempotency_keys (key) VALUES ('{key}')"
STANDARD = {
    "INSERT": INSERT,
    "DO NOTHING": f"{INSERT} ON CONFLICT (key) DO NOTHING",
    "DO UPDATE": f"{INSERT} ON CONFLICT (key) DO UPDATE SET created_at = excluded.created_at",
    "left to Onefold": "",
}
MARIADB = INSERT.replace("(key)", "(`key`)")
WRITES = {
    "sqlite": STANDARD,
    "postgres": STANDARD,
    "mariadb": {
        "INSERT": MARIADB,
        "IGNORE": MARIADB.replace("INSERT", "INSERT IGNORE"),
        "DUPLICATE KEY": f"{MARIADB} ON DUPLICATE KEY UPDATE created_at = created_at",
        "REPLACE": MARIADB.replace("INSERT", "REPLACE"),
        "left to Onefold": "",
    },
}

# Drivers of our own stores, and one library above them.
DAILY = (
    "sqlite3",
    "psycopg",
    "psycopg async",
    "asyncpg",
    "pymysql",
    "asyncmy",
    "sqlalchemy postgresql+psycopg session",
)

Deliver = Callable[[str, str], Coroutine[Any, Any, Outcome[str]]]


class Racing:
    """A guard whose deliveries come all at once, each in a thread or a task of its own."""

    def __init__(self, source: Any, *, is_async: bool) -> None:
        self._source = source
        self._is_async = is_async
        self._guard: Any = AsyncGuard(source) if is_async else Guard(source)
        self._runs = itertools.count()
        self.deliver: Deliver = self._through(
            self._guard.transactional("pay", key="key", fingerprint="key", record=KEYS)
        )

    async def pay(self, hand: Hand, key: str, statement: str) -> str:
        if statement:
            await hand.sql(statement.format(key=key))
        await hand.sql(CREDIT)
        return f"receipt {next(self._runs)} of {key}"

    def _through(self, guarded: Any) -> Deliver:
        if self._is_async:

            async def pay_later(key: str, statement: str, *, tx: Any) -> str:
                return await self.pay(Hand(tx), key, statement)

            return guarded(pay_later).outcome  # type: ignore[no-any-return]

        def pay(key: str, statement: str, *, tx: Any) -> str:
            return ended(self.pay(Hand(tx), key, statement))

        outcome = guarded(pay).outcome

        async def deliver(key: str, statement: str) -> Outcome[str]:
            return outcome(key, statement)  # type: ignore[no-any-return]

        return deliver

    def run(self, keys: dict[str, str]) -> list[list[Outcome[str]]]:
        """Deliver each key eight times at once; a round begins when the one before it is over."""
        return asyncio.run(self._run_async(keys)) if self._is_async else self._run_in_threads(keys)

    def _run_in_threads(self, keys: dict[str, str]) -> list[list[Outcome[str]]]:
        together = threading.Barrier(AT_ONCE)

        def work(_: int) -> list[Outcome[str]]:
            found: list[Outcome[str]] = []
            try:
                for key, statement in keys.items():
                    together.wait(PATIENCE)
                    found.append(ended(self.deliver(key, statement)))
            except BaseException:
                # The others need not wait.
                together.abort()
                raise
            return found

        with self._guard, ThreadPoolExecutor(AT_ONCE) as threads:
            racing = [threads.submit(work, number) for number in range(AT_ONCE)]
            wait(racing)
            broken = [error for one in racing if (error := one.exception()) is not None]
            own = [error for error in broken if not isinstance(error, threading.BrokenBarrierError)]
            if broken:
                raise (own or broken)[0]
            ends = [list(one) for one in zip(*(one.result() for one in racing), strict=True)]
        self._dispose()
        return ends

    async def _run_async(self, keys: dict[str, str]) -> list[list[Outcome[str]]]:
        async with self._guard:
            racing = [
                await asyncio.gather(*(self.deliver(key, statement) for _ in range(AT_ONCE)))
                for key, statement in keys.items()
            ]
        await maybe_await(self._dispose())
        return racing

    def _dispose(self) -> Any:
        engine = getattr(self._source, "kw", {}).get("bind", self._source)
        return engine.dispose() if hasattr(engine, "dispose") else None


def check_rounds(racing: Racing, ledger: Ledger, rounds: int) -> None:
    """So many rounds, with each way to write the row in turn: one delivery runs in each, and seven get its result."""
    ways = itertools.cycle(WRITES[ledger.database].items())
    keys = {f"{name} {number}": statement for number, (name, statement) in zip(range(rounds), ways, strict=False)}

    for key, ends in zip(keys, racing.run(keys), strict=True):
        assert Counter(end.replayed for end in ends) == {False: 1, True: AT_ONCE - 1}, (key, ends)
        assert len({end.value for end in ends}) == 1, (key, ends)
    assert ledger.balance == 10 * rounds
    assert ledger.rows("SELECT count(*), count(result) FROM idempotency_keys") == [(rounds, rounds)]


@pytest.fixture
def ledger(ledger: Ledger) -> Ledger:
    ledger.execute(TABLES[ledger.database])
    return ledger


@pytest.fixture
def url(driver: Driver, ledger: Ledger) -> str:
    return f"sqlite:///{ledger.address}" if driver.database == "sqlite" else ledger.address


@pytest.mark.parametrize(
    ("driver", "rounds"),
    [
        *(pytest.param(one, EVERY_DAY, id=f"{one.name}") for one in DRIVERS if one.name in DAILY),
        *(pytest.param(one, ROUNDS, id=f"{one.name} for longer", marks=pytest.mark.more) for one in DRIVERS),
        *(pytest.param(one, SOAK, id=f"{one.name} in full", marks=pytest.mark.soak) for one in DRIVERS),
    ],
)
def test_of_eight_deliveries_at_once_one_has_its_effect_and_seven_are_replays_of_it(
    driver: Driver, rounds: int, url: str, ledger: Ledger
) -> None:
    check_rounds(Racing(driver.source(url), is_async=driver.is_async), ledger, rounds)


@pytest.mark.parametrize(
    "driver",
    [pytest.param(one, id=one.name, marks=() if one.name in DAILY else pytest.mark.more) for one in DRIVERS],
)
def test_of_eight_callers_at_once_each_in_a_transaction_of_its_own_seven_are_answered_from_the_row_of_one(
    driver: Driver, url: str, ledger: Ledger
) -> None:
    racing = Racing(driver.source(url), is_async=driver.is_async)
    with bench(driver, url) as callers:

        async def deliver(key: str, statement: str) -> Outcome[str]:
            async with callers.connected() as hand:
                outcome = await callers.within(hand, key, lambda hand: racing.pay(hand, key, statement), KEYS)
                await callers.commit(hand)
                return outcome

        racing.deliver = deliver
        check_rounds(racing, ledger, EVERY_DAY)


LEVELS = {
    "postgresql+psycopg": ("REPEATABLE READ", "SERIALIZABLE"),
    "mysql+pymysql": ("READ COMMITTED", "SERIALIZABLE"),
}


@pytest.mark.parametrize(
    ("driver", "level"),
    [
        pytest.param(driver, level, id=f"{scheme} {level}", marks=pytest.mark.more if level == "SERIALIZABLE" else ())
        for scheme, levels in LEVELS.items()
        for level in levels
        for driver in DRIVERS
        if driver.name == f"sqlalchemy {scheme} connection"
    ],
)
def test_at_other_isolation_levels_too_losers_meet_the_row_in_a_new_transaction(
    driver: Driver, level: str, url: str, ledger: Ledger
) -> None:
    check_rounds(Racing(driver.source(url).execution_options(isolation_level=level), is_async=False), ledger, 10)
