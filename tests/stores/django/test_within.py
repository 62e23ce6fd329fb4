"""`within` in Django's `transaction.atomic()`: savepoints, hooks, and statements that fail, on each database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("django")

from django.db import Error, IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from onefold import AsyncGuard, KeyReused, NotInTransaction, Policy, RecordColumn, StoreUnavailable, UsageError
from tests.stores.django.project import Counter, alias_of, ledger_at, payments, project
from tests.stores.sqlalchemy.wallet import Ledger
from tests.support import Died, Handler
from tests.wallet import never_opened


@pytest.fixture(scope="module", autouse=True)
def _project() -> Iterator[None]:
    with project():
        yield


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    ledger = ledger_at(request, request.param)
    yield ledger
    ledger.close()


@pytest.fixture
def at(ledger: Ledger) -> Iterator[Counter]:
    with alias_of(ledger.database, ledger.address) as alias:
        yield Counter(alias, ledger)


def nothing() -> None:
    """A handler without a result."""


def test_the_record_commits_with_the_work_and_the_guards_own_store_is_never_opened(at: Counter, ledger: Ledger) -> None:
    with at.atomic():
        first = at.within("m1", at.add)
        seen_before_the_commit = ledger.balance, ledger.records
    with at.atomic():
        second = at.within("m1", at.add)

    assert seen_before_the_commit == (0, [])
    assert (first.replayed, second.replayed) == (False, True)
    assert (ledger.balance, ledger.records) == (10, ["m1"])


def test_what_a_handler_does_by_models_commits_with_the_record(at: Counter, ledger: Ledger) -> None:
    for _ in range(2):
        with at.atomic():
            at.within("m1", at.pay)

    assert ledger.rows("SELECT idempotency_key FROM payments") == [("pay_1",)]
    assert ledger.records == ["m1"]


def test_a_result_is_replayed(at: Counter) -> None:
    with at.atomic():
        outcomes = [at.within("m1", lambda: {"paid": 5}) for _ in range(2)]

    assert [(one.value, one.replayed) for one in outcomes] == [({"paid": 5}, False), ({"paid": 5}, True)]


def test_outside_of_a_transaction_it_is_refused_before_anything_runs(at: Counter, ledger: Ledger) -> None:
    handler = Handler()

    with pytest.raises(NotInTransaction, match=r"transaction\.atomic"):
        at.within("m1", handler)

    assert (handler.starts, ledger.records) == (0, [])


def test_a_transaction_without_a_block_will_do(at: Counter, ledger: Ledger) -> None:
    transaction.set_autocommit(False, using=at.alias)
    at.within("m1", at.add)
    transaction.rollback(using=at.alias)
    at.within("m2", at.add)
    transaction.commit(using=at.alias)
    transaction.set_autocommit(True, using=at.alias)

    assert (ledger.balance, ledger.records) == (10, ["m2"])


def test_the_callers_rollback_takes_the_record_back_and_the_next_delivery_runs(at: Counter, ledger: Ledger) -> None:
    with suppress(ValueError), at.atomic():
        at.within("m1", at.add)
        raise ValueError("no")
    with at.atomic():
        again = at.within("m1", at.add)

    assert not again.replayed
    assert (ledger.balance, ledger.records) == (10, ["m1"])


def test_an_inner_block_that_is_rolled_back_takes_the_record_back_and_nothing_else(at: Counter, ledger: Ledger) -> None:
    with at.atomic():
        at.within("m1", at.add)
        with suppress(ValueError), at.atomic():
            at.within("m2", at.add)
            raise ValueError("no")

    assert (ledger.balance, ledger.records) == (10, ["m1"])


@pytest.mark.parametrize("error", [ValueError("no"), Died()])
def test_when_the_handler_raises_and_the_caller_commits_the_next_delivery_runs(
    at: Counter, ledger: Ledger, error: BaseException
) -> None:
    with at.atomic():
        with pytest.raises(type(error)) as raised:
            at.within("m1", Handler(error=error))
        at.add(1)
    with at.atomic():
        again = at.within("m1", at.add)

    assert raised.value is error
    assert not again.replayed
    assert (ledger.balance, ledger.records) == (11, ["m1"])


def test_a_statement_that_fails_shows_its_own_error(at: Counter, ledger: Ledger) -> None:
    with pytest.raises(Error, match=r"(?i)constraint"), at.atomic():
        at.within("m1", lambda: at.add(-1))

    assert (ledger.balance, ledger.records) == (0, [])


@pytest.mark.parametrize("result", [None, "receipt"])
@pytest.mark.parametrize("ledger", ["postgres"], indirect=True)
def test_a_handler_that_goes_on_after_a_statement_that_ended_the_transaction_is_told(
    at: Counter, ledger: Ledger, result: str | None
) -> None:
    def swallow() -> str | None:
        with suppress(IntegrityError):
            at.add(-1)
        return result

    with pytest.raises(UsageError, match="put what may fail into a savepoint"), at.atomic():
        at.within("m1", swallow)

    assert ledger.records == []


@pytest.mark.parametrize("result", [None, "receipt"])
def test_a_handler_that_goes_on_although_the_block_is_to_be_rolled_back_is_told(
    at: Counter, ledger: Ledger, result: str | None
) -> None:
    at.pay()

    def swallow() -> str | None:
        with suppress(IntegrityError):
            at.pay()
        return result

    with pytest.raises(UsageError, match="put what may fail into a savepoint"), at.atomic():
        at.within("m1", swallow)

    assert ledger.records == []


@pytest.mark.parametrize("ledger", ["postgres"], indirect=True)
def test_a_transaction_in_which_a_statement_has_failed_before_is_refused(at: Counter) -> None:
    with at.atomic():
        at.within("earlier", nothing)
    with suppress(ValueError), at.atomic():
        with suppress(IntegrityError):
            at.add(-1)

        with pytest.raises(UsageError, match="a statement failed in this transaction before"):
            at.within("m1", nothing)

        raise ValueError("no")


def test_a_handler_may_catch_what_fails_in_a_block_of_its_own(at: Counter, ledger: Ledger) -> None:
    def careful() -> str:
        with suppress(Error), at.atomic():
            at.add(-1)
        at.add()
        return "done"

    with at.atomic():
        outcome = at.within("m1", careful)

    assert outcome.value == "done"
    assert (ledger.balance, ledger.records) == (10, ["m1"])


def test_hooks_run_after_the_callers_commit_and_not_after_a_rollback(at: Counter) -> None:
    seen: list[str] = []

    def handler(name: str) -> None:
        transaction.on_commit(lambda: seen.append(name), using=at.alias)

    with at.atomic():
        at.within("m1", lambda: handler("first"))
        with suppress(ValueError), at.atomic():
            at.within("m2", lambda: handler("second"))
            raise ValueError("no")
        before = seen.copy()

    assert (before, seen) == ([], ["first"])


def test_the_first_use_makes_the_tables_and_the_callers_transaction_goes_on(at: Counter, ledger: Ledger) -> None:
    with suppress(ValueError), at.atomic():
        at.add(1)
        at.within("m1", at.add)
        seen_before_the_end = "onefold_records" in ledger.tables(), ledger.balance
        raise ValueError("no")
    with at.atomic():
        at.within("m2", at.add)

    # SQLite lets one connection write at a time: its tables are made in the transaction.
    assert seen_before_the_end == (ledger.database != "sqlite", 0)
    assert (ledger.balance, ledger.records) == (10, ["m2"])


def test_it_finds_out_when_somebody_has_dropped_the_tables(at: Counter, ledger: Ledger) -> None:
    with at.atomic():
        at.within("m1", at.add)
    ledger.execute("DROP TABLE onefold_records")
    if ledger.database == "postgres":
        with pytest.raises(StoreUnavailable, match="Onefold's tables were dropped"), at.atomic():
            at.within("m2", at.add)

    with at.atomic():
        at.within("m2", at.add)

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
def test_what_a_delivery_costs_in_statements(at: Counter, ledger: Ledger, case: str) -> None:
    handler, on_postgres, elsewhere = COSTS[case]
    expected = on_postgres if ledger.database == "postgres" else elsewhere
    with at.atomic():
        at.within("earlier", nothing)

    with at.atomic(), CaptureQueriesContext(at.connection) as seen, suppress(ValueError):
        at.within("m1", handler)

    assert [query["sql"].split()[0] for query in seen] == expected


def test_keys_are_compared_byte_by_byte_and_tenants_have_their_own(at: Counter) -> None:
    keys = ["Key", "KEY", "key ", "kéy", "key", "k%y", "k:y", "%(key)s", ":key", "%s"]

    with at.atomic():
        outcomes = [at.within(key, nothing, scope=scope) for scope in ("north", "south") for key in keys]
        again = at.within("%(key)s", nothing, scope="north")

    assert not any(outcome.replayed for outcome in outcomes)
    assert again.replayed


def test_the_same_key_with_another_payload_is_refused_and_a_bypass_runs_once_more(at: Counter, ledger: Ledger) -> None:
    with at.atomic():
        at.within("m1", at.add, payload={"amount": 10})
        with pytest.raises(KeyReused):
            at.within("m1", at.add, payload={"amount": 11})
        at.within("m1", at.add, payload={"amount": 10}, bypass=True)

    assert ledger.balance == 20


def test_fresh_sorts_a_batch_and_records_the_new_ones(at: Counter, ledger: Ledger) -> None:
    with at.atomic():
        at.within("m2", nothing)
        found = at.guard.within(at.connection).fresh("credit", ["m1", "m2", "m3"], key=str)

    assert (found.new, found.seen, found.unsettled) == (["m1", "m3"], ["m2"], [])
    assert ledger.records == ["m1", "m2", "m3"]


def test_a_policy_that_remembers_failures_is_refused(at: Counter) -> None:
    with pytest.raises(UsageError, match="the rollback removes it"), at.atomic():
        at.within("m1", nothing, policy=Policy(final_errors=(ValueError,)))


PAYMENT = RecordColumn("payments", "idempotency_key")


def test_a_row_of_the_callers_is_the_record(at: Counter, ledger: Ledger) -> None:
    outcomes = []
    for _ in range(2):
        with at.atomic():
            outcomes.append(at.within("pay_1", at.pay, PAYMENT))

    assert [one.replayed for one in outcomes] == [False, True]
    assert payments().objects.using(at.alias).count() == 1
    assert ("onefold_records" in ledger.tables()) is (ledger.database == "mariadb")
    with pytest.raises(UsageError, match="has no unique index"), at.atomic():
        at.within("pay_2", at.pay, RecordColumn("payments", "amount"))
    with pytest.raises(UsageError, match="has to write the row"), at.atomic():
        at.within("pay_2", nothing, PAYMENT)
    with pytest.raises(NotInTransaction):
        at.within("pay_2", at.pay, PAYMENT)


# Words.


def test_the_connection_that_django_calls_current_will_do() -> None:
    with transaction.atomic():
        outcomes = [Counter("default", None).guard.within(connection).run("credit", "m1", nothing) for _ in "12"]  # type: ignore[arg-type]
        transaction.set_rollback(True)

    assert [one.replayed for one in outcomes] == [False, True]


def test_an_async_guard_is_refused() -> None:
    async def handler() -> None:
        """Not run."""

    def deliver() -> Any:
        return asyncio.run(AsyncGuard(never_opened).within(connection).run("credit", "m1", handler))

    with pytest.raises(UsageError, match="Django has no async transactions"):
        deliver()
