"""An engine or a sessionmaker as the guard's own store: transactions of ours, on each driver, sync and async."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Connection, exc, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from onefold import Policy, RememberedFailure, StoreUnavailable, UsageError
from onefold.stores.mysql import orm as mysql
from tests.stores.sqlalchemy.wallet import (
    TILLS,
    AnyTill,
    Ledger,
    Till,
    add,
    daily,
    ledger_of,
    somebody_waits,
    statements,
    till,
)
from tests.support import PATIENCE, Died, Elsewhere, Handler


@pytest.fixture(params=daily(TILLS))
def way(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    found: tuple[str, str, str] = request.param
    return found


@pytest.fixture
def ledger(request: pytest.FixtureRequest, way: tuple[str, str, str]) -> Iterator[Ledger]:
    ledger = ledger_of(request, way[0])
    yield ledger
    ledger.close()


@pytest.fixture
def at(ledger: Ledger, way: tuple[str, str, str]) -> Iterator[AnyTill]:
    found = till(ledger, *way[1:])
    yield found
    found.close()


TX: dict[tuple[bool, str], type] = {
    (False, "engine"): Connection,
    (False, "sessionmaker"): Session,
    (True, "engine"): AsyncConnection,
    (True, "sessionmaker"): AsyncSession,
}


def test_the_record_commits_with_the_work_on_the_connection_or_session_of_the_source(
    at: AnyTill, ledger: Ledger, way: tuple[str, str, str]
) -> None:
    first = at.transactional("m1", add)
    second = at.transactional("m1", add)

    assert (first.replayed, second.replayed) == (False, True)
    assert (ledger.balance, ledger.records) == (10, ["m1"])
    assert [isinstance(tx, TX[way[1].startswith("async"), way[2]]) for tx in at.handed] == [True]


def test_nothing_is_committed_before_the_handler_returns(at: AnyTill, ledger: Ledger) -> None:
    def look(tx: Any) -> list[Any]:
        add(tx)
        return [ledger.balance, ledger.records]

    assert at.transactional("m1", look).value == [0, []]
    assert at.transactional("m1", look).value == [0, []]
    assert ledger.balance == 10


@pytest.mark.parametrize("error", [ValueError("no"), Died()])
def test_a_handler_that_raises_leaves_neither_record_nor_work(
    at: AnyTill, ledger: Ledger, error: BaseException
) -> None:
    def fail(tx: Any) -> None:
        add(tx)
        raise error

    with pytest.raises(type(error)) as raised:
        at.transactional("m1", fail)

    assert raised.value is error
    assert (ledger.balance, ledger.records) == (0, [])
    assert not at.transactional("m1", add).replayed


def test_a_statement_that_fails_shows_its_own_error_and_undoes_all(at: AnyTill, ledger: Ledger) -> None:
    starts: list[int] = []

    def overdraw(tx: Any) -> None:
        starts.append(1)
        add(tx, 5)
        add(tx, -10)

    with pytest.raises(exc.DBAPIError, match=r"(?i)constraint"):
        at.transactional("m1", overdraw)

    assert (len(starts), ledger.balance, ledger.records) == (1, 0, [])
    assert not at.transactional("m1", add).replayed


class Declined(Exception):
    """A final answer."""


@pytest.mark.parametrize("way_to_fail", ["by itself", "after a statement that failed"])
def test_a_remembered_failure_is_committed_and_what_its_handler_wrote_is_not(
    ledger: Ledger, way: tuple[str, str, str], way_to_fail: str
) -> None:
    at = till(ledger, *way[1:], policy=Policy(final_errors=(Declined,)))

    def decline(tx: Any) -> None:
        add(tx)
        if way_to_fail != "by itself":
            with suppress(exc.DBAPIError):
                add(tx, -100)
        raise Declined("too little money")

    with pytest.raises(Declined):
        at.transactional("m1", decline)
    with pytest.raises((Declined, RememberedFailure), match="too little money"):
        at.transactional("m1", add)
    at.close()

    assert (ledger.balance, ledger.records) == (0, ["m1"])


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_handler_that_ends_the_transaction_by_itself_is_told(at: AnyTill, ledger: Ledger, ending: str) -> None:
    def handler(tx: Any) -> None:
        getattr(tx, ending)()
        add(tx)

    with pytest.raises(UsageError, match="the handler ended the transaction by itself"):
        at.transactional("m1", handler)

    assert ledger.balance == 0


def test_the_engine_is_the_callers_and_stays_as_it_is(at: AnyTill, ledger: Ledger) -> None:
    at.transactional("m1", add)
    pool = at.sync_engine.pool
    if isinstance(at, Till):
        at.guard.close()
    else:
        at._runner.run(at.guard.aclose())

    assert at.sync_engine.pool is pool
    assert pool.checkedout() == 0  # type: ignore[attr-defined]
    assert pool.checkedin() >= 1  # type: ignore[attr-defined]


def test_an_engine_in_autocommit_mode_will_do_and_its_transactions_are_real_ones(
    ledger: Ledger, way: tuple[str, str, str]
) -> None:
    at = till(ledger, *way[1:], isolation_level="AUTOCOMMIT")

    def fail(tx: Any) -> None:
        add(tx)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        at.transactional("m1", fail)
    outcomes = [at.run("c1", Handler("paid")), at.run("c1", Handler("paid"))]
    outcomes += [at.transactional("m1", add), at.transactional("m1", add)]
    at.close()

    assert [one.replayed for one in outcomes] == [False, True, False, True]
    assert (ledger.balance, ledger.records) == (10, ["c1", "m1"])


CLAIMED: dict[str, tuple[int, int]] = {"sqlite": (2, 2), "postgres": (2, 1), "mariadb": (2, 1)}


def test_what_a_claim_costs_in_statements(at: AnyTill, ledger: Ledger) -> None:
    at.run("earlier", Handler())
    seen = statements(at.sync_engine)

    at.run("c1", Handler())
    new = len(seen)
    at.run("c1", Handler())

    assert (new, len(seen) - new) == CLAIMED[ledger.database]


# With the proof that it is still the same transaction: a look, or a savepoint.
COSTS = {"sqlite": (3, 4), "postgres": (2, 2), "mariadb": (3, 4)}


@pytest.mark.parametrize("result", [None, "receipt"])
def test_what_a_transaction_costs_in_statements(at: AnyTill, ledger: Ledger, result: str | None) -> None:
    expected = COSTS[ledger.database][result is not None]
    at.transactional("earlier", Handler(None))
    seen = statements(at.sync_engine)

    at.transactional("m1", lambda _: result)

    assert len([word for word in seen if word != "BEGIN"]) == expected


BREAKS = {
    "postgres": {
        "serialization failure": "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40001'; END $$",
        "deadlock": "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40P01'; END $$",
        "lost connection": "SELECT pg_terminate_backend(pg_backend_pid())",
    },
    "mariadb": {
        "serialization failure": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1205",
        "deadlock": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213",
        "lost connection": "KILL CONNECTION CONNECTION_ID()",
    },
}


@pytest.mark.parametrize("failure", ["serialization failure", "deadlock", "lost connection"])
@pytest.mark.parametrize("way", [way for way in TILLS if way[0] != "sqlite"], ids=" ".join, indirect=True)
def test_what_a_new_transaction_may_mend_is_tried_again(at: AnyTill, ledger: Ledger, failure: str) -> None:
    statement = BREAKS[ledger.database][failure]
    starts: list[int] = []

    def unlucky(tx: Any) -> str:
        starts.append(1)
        add(tx)
        if len(starts) < 3:
            tx.execute(text(statement))
        return "done"

    outcome = at.transactional("m1", unlucky)

    assert (outcome.value, outcome.replayed, len(starts)) == ("done", False, 3)
    assert (ledger.balance, ledger.records) == (10, ["m1"])


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize(
    "way", [way for way in TILLS if way[1] in ("postgresql+psycopg", "mysql+pymysql")], ids=" ".join, indirect=True
)
def test_of_two_deliveries_at_once_one_runs_and_the_other_replays(
    ledger: Ledger, way: tuple[str, str, str], isolation: str
) -> None:
    at = till(ledger, *way[1:], isolation_level=isolation)
    at.transactional("earlier", Handler(None))
    inside, go_on = threading.Event(), threading.Event()

    def slow(tx: Any) -> str:
        inside.set()
        assert go_on.wait(PATIENCE)
        add(tx)
        return "first"

    first = Elsewhere(lambda: at.transactional("m1", slow))
    assert inside.wait(PATIENCE)
    second = Elsewhere(lambda: at.transactional("m1", lambda _: "second"))
    somebody_waits(ledger)
    go_on.set()
    outcomes = [first.result(), second.result()]
    at.close()

    assert [(one.value, one.replayed) for one in outcomes] == [("first", False), ("first", True)]
    assert ledger.balance == 10


def test_without_tables_and_without_the_right_to_make_them_nothing_runs(
    ledger: Ledger, way: tuple[str, str, str]
) -> None:
    from onefold.stores.sqlalchemy import AsyncSqlAlchemyStore, SqlAlchemyStore

    handler = Handler()
    at = till(ledger, *way[1:])
    make: Any = SqlAlchemyStore if isinstance(at, Till) else AsyncSqlAlchemyStore
    at.guard = type(at.guard)(make(at.source, auto_schema=False))

    with pytest.raises(StoreUnavailable, match="onefold schema"):
        at.run("c1", handler)
    with pytest.raises(StoreUnavailable, match="onefold schema"):
        at.transactional("m1", handler)
    at.close()

    assert handler.starts == 0
    assert "onefold_records" not in ledger.tables()


@pytest.mark.parametrize("way", [way for way in TILLS if way[0] == "mariadb"], ids=" ".join, indirect=True)
def test_the_way_of_mysql_which_tells_less_works_too(
    at: AnyTill, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mysql, "sql_of", lambda _version: mysql.MYSQL)

    outcomes = [at.transactional("m1", add), at.transactional("m1", add), at.transactional("m2", lambda _: "paid")]
    outcomes += [at.transactional("m2", add), at.run("c1", Handler("paid")), at.run("c1", Handler("paid"))]

    assert [one.replayed for one in outcomes] == [False, True, False, True, False, True]
    assert (ledger.balance, ledger.records) == (10, ["c1", "m1", "m2"])
