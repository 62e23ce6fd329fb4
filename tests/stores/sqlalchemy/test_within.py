"""`within` on SQLAlchemy's connections and sessions: each driver, sync and async (rows 14 to 18 and 25b)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from sqlalchemy import exc, text

from onefold import InsideItself, KeyReused, NotInTransaction, Outcome, Policy, StoreUnavailable, UsageError
from tests.stores.sqlalchemy.wallet import ALL, AnyDesk, Ledger, add, daily, desk, ledger_of, somebody_waits, statements
from tests.support import Died, Elsewhere, Handler


@pytest.fixture(params=daily(ALL))
def way(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    found: tuple[str, str, str] = request.param
    return found


@pytest.fixture
def ledger(request: pytest.FixtureRequest, way: tuple[str, str, str]) -> Iterator[Ledger]:
    ledger = ledger_of(request, way[0])
    yield ledger
    ledger.close()


@pytest.fixture
def on(ledger: Ledger, way: tuple[str, str, str]) -> Iterator[AnyDesk]:
    """A desk with a connection or session."""
    found = desk(ledger, *way[1:])
    yield found
    found.close()


def nothing(_held: Any) -> None:
    """A handler without a result."""


def test_the_record_commits_with_the_work_and_the_guards_own_store_is_never_opened(on: AnyDesk, ledger: Ledger) -> None:
    first = on.within("m1", add)
    seen_before_the_commit = ledger.balance, ledger.records
    on.commit()
    second = on.within("m1", add)
    on.commit()

    assert seen_before_the_commit == (0, [])
    assert (first.replayed, second.replayed) == (False, True)
    assert (ledger.balance, ledger.records) == (10, ["m1"])


def test_a_result_is_replayed(on: AnyDesk) -> None:
    outcomes = [on.within("m1", lambda _: {"paid": 5}) for _ in range(2)]

    assert [(one.value, one.replayed) for one in outcomes] == [({"paid": 5}, False), ({"paid": 5}, True)]


def test_the_callers_rollback_takes_the_record_back_and_the_next_delivery_runs(on: AnyDesk, ledger: Ledger) -> None:
    on.within("m1", add)
    on.rollback()
    again = on.within("m1", add)
    on.commit()

    assert not again.replayed
    assert (ledger.balance, ledger.records) == (10, ["m1"])


def test_a_savepoint_that_is_rolled_back_takes_the_record_back_and_nothing_else(on: AnyDesk, ledger: Ledger) -> None:
    on.within("m1", add)
    with on.savepoint() as part:
        on.within("m2", add)
        on.roll_back_to(part)
    on.commit()

    assert (ledger.balance, ledger.records) == (10, ["m1"])
    assert not on.within("m2", add).replayed


@pytest.mark.parametrize("error", [ValueError("no"), Died()])
def test_when_the_handler_raises_and_the_caller_commits_the_next_delivery_runs(
    on: AnyDesk, ledger: Ledger, error: BaseException
) -> None:
    def fail(_held: Any) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        on.within("m1", fail)
    on.do(lambda held: add(held, 1))
    on.commit()
    again = on.within("m1", add)
    on.commit()

    assert raised.value is error
    assert not again.replayed
    assert (ledger.balance, ledger.records) == (11, ["m1"])


def test_in_autocommit_mode_it_is_refused_before_anything_runs(ledger: Ledger, way: tuple[str, str, str]) -> None:
    handler = Handler()
    on = desk(ledger, *way[1:], autocommit=True)

    with pytest.raises(NotInTransaction, match="autocommit"):
        on.within("m1", lambda _: handler())
    on.close()

    assert (handler.starts, ledger.records) == (0, [])


def test_an_engine_that_is_in_autocommit_mode_from_its_making_is_refused(
    ledger: Ledger, way: tuple[str, str, str]
) -> None:
    on = desk(ledger, *way[1:], isolation_level="AUTOCOMMIT")

    with pytest.raises(NotInTransaction, match="autocommit"):
        on.within("m1", nothing)
    on.close()


def test_a_statement_that_fails_shows_its_own_error(on: AnyDesk, ledger: Ledger) -> None:
    with pytest.raises(exc.DBAPIError, match=r"(?i)constraint"):
        on.within("m1", lambda held: add(held, -1))
    on.rollback()
    again = on.within("m1", add)
    on.commit()

    assert not again.replayed
    assert (ledger.balance, ledger.records) == (10, ["m1"])


@pytest.mark.parametrize("way", [way for way in ALL if way[0] == "postgres"], ids=" ".join, indirect=True)
@pytest.mark.parametrize("result", [None, "receipt"])
def test_a_handler_that_goes_on_after_a_statement_that_ended_the_transaction_is_told(
    on: AnyDesk, ledger: Ledger, result: str | None
) -> None:
    def swallow(held: Any) -> str | None:
        with suppress(exc.IntegrityError):
            add(held, -1)
        return result

    with pytest.raises(UsageError, match="put what may fail into a savepoint"):
        on.within("m1", swallow)
    on.rollback()

    assert ledger.records == []


@pytest.mark.parametrize("way", [way for way in ALL if way[0] == "postgres"], ids=" ".join, indirect=True)
def test_a_transaction_in_which_a_statement_has_failed_before_is_refused(on: AnyDesk, ledger: Ledger) -> None:
    on.within("earlier", nothing)
    on.commit()
    with pytest.raises(exc.IntegrityError):
        on.do(lambda held: add(held, -1))

    with pytest.raises(UsageError, match="a statement failed in this transaction before"):
        on.within("m1", nothing)
    on.rollback()


@pytest.mark.parametrize("way", [way for way in ALL if way[0] == "mariadb"], ids=" ".join, indirect=True)
@pytest.mark.parametrize("result", [None, "receipt"])
def test_a_handler_that_goes_on_after_a_deadlock_is_told(on: AnyDesk, result: str | None) -> None:
    def swallow(held: Any) -> str | None:
        with suppress(exc.DBAPIError):
            held.execute(text("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213"))
        return result

    with pytest.raises(UsageError, match="put what may fail into a savepoint"):
        on.within("m1", swallow)
    on.rollback()


def test_a_handler_that_rolls_back_behind_the_librarys_back_is_told(on: AnyDesk, ledger: Ledger) -> None:
    on.do(lambda held: held.execute(text("SAVEPOINT by_hand")))

    def handler(held: Any) -> str:
        held.execute(text("ROLLBACK TO SAVEPOINT by_hand"))
        return "done"

    with pytest.raises(UsageError, match="went back to a savepoint from before its record"):
        on.within("m1", handler)
    on.rollback()


def test_a_handler_may_catch_what_fails_in_a_savepoint(on: AnyDesk, ledger: Ledger) -> None:
    def careful(held: Any) -> str:
        with suppress(exc.DBAPIError), held.begin_nested():
            add(held, -1)
        add(held)
        return "done"

    outcome = on.within("m1", careful)
    on.commit()

    assert outcome.value == "done"
    assert (ledger.balance, ledger.records) == (10, ["m1"])


@pytest.mark.parametrize("result", [None, "receipt"])
@pytest.mark.parametrize("way_out", ["commit", "rollback"])
def test_a_handler_that_ends_the_transaction_by_itself_is_told(on: AnyDesk, way_out: str, result: str | None) -> None:
    def handler(held: Any) -> str | None:
        getattr(held, way_out)()
        add(held)
        return result

    with pytest.raises(UsageError, match="the handler ended the transaction by itself"):
        on.within("m1", handler)
    on.rollback()


def test_a_handler_that_rolls_the_callers_savepoint_back_is_told(on: AnyDesk) -> None:
    with on.savepoint() as part:

        def handler(held: Any) -> None:
            part.rollback()
            add(held)

        with pytest.raises(UsageError, match="the handler ended the transaction by itself"):
            on.within("m1", handler)
    on.rollback()


def test_the_first_use_makes_the_tables_and_the_callers_transaction_goes_on(on: AnyDesk, ledger: Ledger) -> None:
    on.do(lambda held: add(held, 1))
    on.within("m1", add)
    seen_before_the_end = "onefold_records" in ledger.tables(), ledger.balance
    on.rollback()
    on.within("m2", add)
    on.commit()

    # SQLite lets one connection write at a time: its tables are made in the transaction.
    assert seen_before_the_end == (ledger.database != "sqlite", 0)
    assert (ledger.balance, ledger.records) == (10, ["m2"])


def test_the_tables_are_made_although_the_pool_has_no_connection_left(
    ledger: Ledger, way: tuple[str, str, str]
) -> None:
    on = desk(ledger, *way[1:], pool_size=1, max_overflow=0, pool_timeout=1)

    on.within("m1", add)
    on.commit()
    on.close()

    assert ledger.records == ["m1"]


def test_it_finds_out_when_somebody_has_dropped_the_tables(on: AnyDesk, ledger: Ledger) -> None:
    on.within("m1", add)
    on.commit()
    ledger.execute("DROP TABLE onefold_records")
    if ledger.database == "postgres":
        with pytest.raises(StoreUnavailable, match="Onefold's tables were dropped"):
            on.within("m2", add)
        on.rollback()

    on.within("m2", add)
    on.commit()

    assert ledger.records == ["m2"]


# On PostgreSQL, and on the others, where a savepoint proves that the transaction is still the same.
# The INSERT of PostgreSQL is in a WITH, which reads the record that refuses it.
COSTS: dict[str, tuple[Handler, list[str], list[str]]] = {
    "new": (Handler(None), ["WITH", "SELECT"], ["INSERT", "SAVEPOINT", "RELEASE"]),
    "new, with a result": (
        Handler("receipt"),
        ["WITH", "UPDATE"],
        ["INSERT", "SAVEPOINT", "RELEASE", "UPDATE"],
    ),
    "new, and it fails": (
        Handler(error=ValueError()),
        ["WITH", "DELETE"],
        ["INSERT", "SAVEPOINT", "DELETE", "RELEASE"],
    ),
}


@pytest.mark.parametrize("case", COSTS)
def test_what_a_delivery_costs_in_statements(on: AnyDesk, ledger: Ledger, case: str) -> None:
    handler, on_postgres, elsewhere = COSTS[case]
    expected = on_postgres if ledger.database == "postgres" else elsewhere
    on.within("known", lambda _: "receipt")
    on.commit()
    on.do(add)
    seen = statements(on.sync_engine)

    with suppress(ValueError):
        on.within("new", lambda _: handler())

    assert [word for word in seen if word != "BEGIN"] == expected


def test_a_duplicate_costs_two_statements_at_most(on: AnyDesk) -> None:
    on.within("known", lambda _: "receipt")
    on.commit()
    on.do(add)
    seen = statements(on.sync_engine)

    assert on.within("known", nothing).value == "receipt"

    assert len(seen) <= 2


def test_the_same_key_with_another_payload_is_refused(on: AnyDesk) -> None:
    on.within("m1", nothing, payload={"amount": 10})
    on.within("m1", nothing, payload={"amount": 10})

    with pytest.raises(KeyReused):
        on.within("m1", nothing, payload={"amount": 11})


def test_keys_are_compared_byte_by_byte_and_tenants_have_their_own(on: AnyDesk) -> None:
    keys = ["Key", "KEY", "key ", "kéy", "key", "k%y", "k:y", "%(key)s", ":key", "$1"]

    outcomes = [on.within(key, nothing, scope=scope) for scope in ("north", "south") for key in keys]

    assert not any(outcome.replayed for outcome in outcomes)
    assert on.within("%(key)s", nothing, scope="north").replayed


def test_a_bypass_runs_it_once_more(on: AnyDesk, ledger: Ledger) -> None:
    for bypass in (False, True, False):
        on.within("m1", add, bypass=bypass)
    on.commit()

    assert ledger.balance == 20


def test_a_policy_that_remembers_failures_is_refused(on: AnyDesk) -> None:
    with pytest.raises(UsageError, match="the rollback removes it"):
        on.within("m1", nothing, policy=Policy(final_errors=(ValueError,)))


@pytest.mark.parametrize("way", [("sqlite", "sqlite", "connection"), ("sqlite", "sqlite", "session")], indirect=True)
def test_a_handler_that_delivers_its_own_key_is_told(on: AnyDesk) -> None:
    with pytest.raises(InsideItself):
        on.within("m1", lambda _: on.within("m1", nothing))


def test_fresh_sorts_a_batch_and_records_the_new_ones(on: AnyDesk, ledger: Ledger) -> None:
    on.within("m2", nothing)
    on.commit()

    found = on.fresh(["m1", "m2", "m3", "m1"])
    on.commit()
    again = on.fresh(["m1", "m2", "m3"])

    assert (sorted(set(found.new)), found.unsettled) == (["m1", "m3"], [])
    assert "m2" in found.seen
    assert (again.new, again.seen) == ([], ["m1", "m2", "m3"])
    assert ledger.records == ["m1", "m2", "m3"]


def added(name: str, held: Any) -> str:
    add(held)
    return name


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize(
    "way", [way for way in ALL if way[0] != "sqlite" and not way[1].startswith("async")], ids=" ".join, indirect=True
)
def test_a_duplicate_in_another_transaction_waits_and_replays_or_runs(
    on: AnyDesk, ledger: Ledger, way: tuple[str, str, str], ending: str
) -> None:
    on.within("earlier", nothing)
    on.commit()
    other = desk(ledger, *way[1:], isolation_level="READ COMMITTED")

    def deliver() -> Outcome[Any]:
        outcome = other.within("m1", partial(added, "second"))
        other.commit()
        return outcome

    on.within("m1", partial(added, "first"))
    waiting = Elsewhere(deliver)
    somebody_waits(ledger)
    getattr(on, ending)()
    outcome = waiting.result()
    other.close()

    expected = ("first", True) if ending == "commit" else ("second", False)
    assert (outcome.value, outcome.replayed) == expected
    assert ledger.balance == 10
