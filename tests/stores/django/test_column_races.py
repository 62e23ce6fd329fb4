"""`RecordColumn` through Django, under two deliveries at once, on each database: the effect happens once."""

from __future__ import annotations

import itertools
import threading
from collections import Counter as Counted
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("django")

from onefold import TX, Guard, Outcome, RecordColumn
from tests.stores.django.project import Counter, alias_of, ledger_at, project
from tests.stores.sql.test_column_races import WRITES, tells_to_come_again
from tests.stores.sql.test_row_races import AT_ONCE, EVERY_DAY, KEYS, ROUNDS, TABLES
from tests.stores.sql.test_row_races import WRITES as WAYS
from tests.stores.sqlalchemy.wallet import Ledger
from tests.support import PATIENCE

PAYMENT = RecordColumn("payments", "idempotency_key")

# Django's own level on MySQL is READ COMMITTED.
LEVELS: dict[str, dict[str, Any]] = {
    "sqlite": {"": {"timeout": PATIENCE}},
    "postgres": {level: {} for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")},
    "mariadb": {level: {"isolation_level": level.lower()} for level in ("READ COMMITTED", "REPEATABLE READ")},
}


@pytest.fixture(scope="module", autouse=True)
def _project() -> Iterator[None]:
    with project():
        yield


@pytest.fixture(params=LEVELS)
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    ledger = ledger_at(request, request.param)
    yield ledger
    ledger.close()


def deliver(at: Counter, level: str, key: str, statement: str, together: threading.Barrier) -> str:
    """One delivery in a transaction of its own, on this thread's connection: what became of it."""

    def pay() -> None:
        at.execute(statement.format(key=key))
        at.add()

    def run() -> Any:
        with at.atomic():
            if at.ledger.database == "postgres":
                at.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            together.wait(PATIENCE)
            return at.within(key, pay, PAYMENT)

    try:
        return "replayed" if run().replayed else "ran"
    except Exception as error:
        if not tells_to_come_again(error):
            raise
        return "again"
    finally:
        at.connection.close()


def test_two_deliveries_at_once_credit_once_and_the_later_one_is_replayed_or_comes_again(ledger: Ledger) -> None:
    ends = {}
    for level, options in LEVELS[ledger.database].items():
        with alias_of(ledger.database, ledger.address, OPTIONS=options) as alias, ThreadPoolExecutor(2) as threads:
            for name, statement in WRITES[ledger.database].items():
                together, at = threading.Barrier(2), Counter(alias, ledger)
                key = f"{level} {name}"
                racing = [threads.submit(deliver, at, level, key, statement, together) for _ in range(2)]
                ends[key] = sorted(future.result(PATIENCE) for future in racing)

    assert {tuple(found) for found in ends.values()} <= {("ran", "replayed"), ("again", "ran")}, ends
    assert (ledger.balance, len(ledger.rows("SELECT * FROM payments"))) == (10 * len(ends), len(ends))


@pytest.mark.parametrize("rounds", [EVERY_DAY, pytest.param(ROUNDS, marks=pytest.mark.more)])
def test_of_eight_deliveries_at_once_one_has_its_effect_and_seven_are_replays_of_it(
    ledger: Ledger, rounds: int
) -> None:
    ledger.execute(TABLES[ledger.database])
    ways = itertools.cycle(WAYS[ledger.database].items())
    keys = {f"{name} {number}": statement for number, (name, statement) in zip(range(rounds), ways, strict=False)}
    options = {"timeout": PATIENCE} if ledger.database == "sqlite" else {}

    with alias_of(ledger.database, ledger.address, OPTIONS=options) as alias:
        for key, ends in zip(keys, eight_at_once(alias, ledger, keys), strict=True):
            assert Counted(end.replayed for end in ends) == {False: 1, True: AT_ONCE - 1}, (key, ends)
            assert {end.value for end in ends} == {f"receipt of {key}"}

    assert ledger.balance == 10 * rounds
    assert ledger.rows("SELECT count(*), count(result) FROM idempotency_keys") == [(rounds, rounds)]


def eight_at_once(alias: str, ledger: Ledger, keys: dict[str, str]) -> list[tuple[Outcome[str], ...]]:
    """Each key in a round of its own, on the connections of eight threads."""
    at, together = Counter(alias, ledger), threading.Barrier(AT_ONCE)
    with Guard(f"django://{alias}") as guard:

        @guard.transactional("pay", key="key", record=KEYS)
        def pay(key: str, *, tx: Any = TX) -> str:
            if keys[key]:
                at.execute(keys[key].format(key=key))
            at.add()
            return f"receipt of {key}"

        def work(_: int) -> list[Outcome[str]]:
            try:
                return [pay.outcome(key) for key in keys if together.wait(PATIENCE) >= 0]
            except BaseException:
                together.abort()
                raise
            finally:
                at.connection.close()

        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(zip(*threads.map(work, range(AT_ONCE)), strict=True))
