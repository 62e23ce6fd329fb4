"""`transactional` on PostgreSQL, on each driver: the record commits with the work (rows 15 to 19 of the edge cases)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import asyncpg
import psycopg
import pytest

from onefold import TX, Guard, InsideItself, KeyReused, Policy, RememberedFailure, StoreUnavailable, UsageError
from onefold.stores.sql.records import VERSION
from services.proxy import Proxy
from tests.stores.postgres.tools import (
    DAILY_DRIVERS,
    SCHEMA,
    Asyncpg,
    Hand,
    Worker,
    add,
    another,
    balance,
    records,
    rows,
)
from tests.stores.sql.versions import REFUSED, TOO_NEW
from tests.support import Died, Elsewhere, Handler

VIOLATIONS = (psycopg.errors.IntegrityError, asyncpg.IntegrityConstraintViolationError)


@pytest.fixture
def url(postgres_url: str) -> str:
    with another(postgres_url) as connection:
        connection.execute(SCHEMA)
    return postgres_url


@pytest.fixture(params=DAILY_DRIVERS)
def driver(request: pytest.FixtureRequest) -> type[Worker]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def worker(driver: type[Worker], url: str) -> Iterator[Worker]:
    worker = driver(url)
    yield worker
    worker.close()


def returning(value: Any) -> Callable[[Hand], Any]:
    async def work(hand: Hand) -> Any:
        await add(hand)
        return value

    return work


def raising(error: BaseException) -> Callable[[Hand], Any]:
    async def work(hand: Hand) -> None:
        await add(hand)
        raise error

    return work


def test_the_record_commits_with_the_work(worker: Worker, url: str) -> None:
    first = worker.transactional("m1", add)
    second = worker.transactional("m1", add)

    assert (first.replayed, second.replayed) == (False, True)
    assert (balance(url), records(url)) == (10, ["m1"])


def test_nothing_is_committed_before_the_handler_returns(worker: Worker, url: str) -> None:
    async def look(hand: Hand) -> list[Any]:
        await add(hand)
        return [balance(url), records(url)]

    assert worker.transactional("m1", look).value == [0, []]


@pytest.mark.parametrize("error", [ValueError("no"), Died()])
def test_a_handler_that_raises_leaves_neither_record_nor_work(worker: Worker, url: str, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        worker.transactional("m1", raising(error))

    assert raised.value is error
    assert (balance(url), records(url)) == (0, [])
    assert not worker.transactional("m1", add).replayed


def test_a_result_is_replayed_and_a_none_too(worker: Worker) -> None:
    results = [worker.transactional("a", returning([1])).value, worker.transactional("b", returning(None)).value]
    replayed = [worker.transactional(key, returning("not run")).value for key in ("a", "b")]

    assert results == replayed == [[1], None]


def test_a_bypass_runs_it_once_more(worker: Worker, url: str) -> None:
    worker.transactional("m1", add)
    again = worker.transactional("m1", add, bypass=True)

    assert not again.replayed
    assert (balance(url), records(url)) == (20, ["m1"])


class Declined(Exception):
    """A final answer."""


@pytest.mark.parametrize("statement_fails", [False, True])
def test_a_remembered_failure_is_committed_and_what_its_handler_wrote_is_not(
    driver: type[Worker], url: str, statement_fails: bool
) -> None:
    worker = driver(url, Policy(final_errors=(Declined,)))

    async def decline(hand: Hand) -> None:
        await add(hand)
        try:
            await add(hand, -100 if statement_fails else 0)
        except VIOLATIONS as error:
            raise Declined("too little money") from error
        raise Declined("too little money")

    with pytest.raises(Declined):
        worker.transactional("m1", decline)
    with pytest.raises((Declined, RememberedFailure), match="too little money"):
        worker.transactional("m1", add)
    worker.close()

    assert (balance(url), records(url)) == (0, ["m1"])


def test_a_statement_that_fails_shows_its_own_error_and_undoes_all(worker: Worker, url: str) -> None:
    async def overdraw(hand: Hand) -> None:
        await hand.run("INSERT INTO payments (idempotency_key, amount) VALUES ('m1', 5)")
        await add(hand, -5)

    with pytest.raises(VIOLATIONS, match="wallet_balance_check"):
        worker.transactional("m1", overdraw)

    assert (rows(url, "SELECT * FROM payments"), records(url)) == ([], [])
    assert not worker.transactional("m1", add).replayed


@pytest.mark.parametrize("value", [None, "receipt"])
def test_a_handler_that_goes_on_after_a_statement_failed_is_told(worker: Worker, url: str, value: Any) -> None:
    async def swallow(hand: Hand) -> Any:
        with suppress(*VIOLATIONS):
            await add(hand, -5)
        return value

    with pytest.raises(UsageError, match="a statement of the handler failed, and the handler continued"):
        worker.transactional("m1", swallow)

    assert records(url) == []
    assert not worker.transactional("m1", add).replayed


def test_what_may_fail_can_be_put_into_a_savepoint(worker: Worker, url: str) -> None:
    async def careful(hand: Hand) -> str:
        await add(hand)
        with pytest.raises(VIOLATIONS):
            async with hand.transaction():
                await add(hand, -50)
        return "done"

    assert worker.transactional("m1", careful).value == "done"
    assert (balance(url), records(url)) == (10, ["m1"])


def test_a_constraint_that_fails_at_the_commit_shows_its_own_error_and_undoes_all(worker: Worker, url: str) -> None:
    async def pay(hand: Hand) -> str:
        await hand.run("INSERT INTO payments VALUES ('m1', '', 5, 'nobody')")
        return "paid"

    with pytest.raises(VIOLATIONS, match="payments_account_fkey"):
        worker.transactional("m1", pay)

    assert (rows(url, "SELECT * FROM payments"), records(url)) == ([], [])
    assert not worker.transactional("m1", add).replayed


@pytest.mark.parametrize("value", [None, "receipt"])
@pytest.mark.parametrize("way", ["COMMIT", "ROLLBACK"])
def test_a_handler_that_ends_the_transaction_by_itself_is_told(worker: Worker, way: str, value: Any) -> None:
    async def end(hand: Hand) -> Any:
        await add(hand)
        await (
            hand.run(way)
            if isinstance(hand.connection, (psycopg.Connection, psycopg.AsyncConnection))
            else hand.connection.execute(way)
        )
        return value

    with pytest.raises(UsageError, match="the handler ended the transaction by itself"):
        worker.transactional("m1", end)

    assert not worker.transactional("m2", add).replayed


def test_a_handler_that_ends_the_transaction_and_raises_is_told_besides_its_own_error(worker: Worker) -> None:
    async def end(hand: Hand) -> None:
        await (hand.connection.execute("COMMIT") if isinstance(worker, Asyncpg) else hand.run("COMMIT"))
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as raised:
        worker.transactional("m1", end)

    assert "ended the transaction by itself" in raised.value.__notes__[0]


def test_the_handler_gets_a_connection_of_the_driver(worker: Worker) -> None:
    seen: list[type] = []

    async def look(hand: Hand) -> None:
        seen.append(type(hand.connection))

    worker.transactional("m1", look)

    assert issubclass(seen[0], (psycopg.Connection, psycopg.AsyncConnection, asyncpg.Connection))


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_the_isolation_level_of_the_url_is_that_of_the_transaction(driver: type[Worker], url: str, level: str) -> None:
    worker = driver(f"{url}?isolation={level.replace(' ', '-')}")

    async def look(hand: Hand) -> Any:
        return (await hand.run("SELECT current_setting('transaction_isolation')"))[0][0]

    outcome = worker.transactional("m1", look)
    worker.close()

    assert outcome.value == level


def test_a_finished_record_is_forgotten_after_its_keep_time(driver: type[Worker], url: str) -> None:
    worker = driver(url, Policy(keep="1h"))
    worker.transactional("m1", add)

    with another(url) as connection:
        connection.execute("UPDATE onefold_records SET expires = expires - 3601")
    again = worker.transactional("m1", add)
    once_more = worker.transactional("m1", add)
    worker.close()

    assert (again.replayed, once_more.replayed) == (False, True)
    assert balance(url) == 20


def test_the_tables_are_made_on_first_use(worker: Worker, url: str) -> None:
    worker.transactional("m1", add)

    assert rows(url, "SELECT version, usable_from FROM onefold_schema") == [(VERSION, 1)]


def test_tables_that_were_dropped_let_nothing_run_and_are_made_for_the_next_delivery(worker: Worker, url: str) -> None:
    worker.transactional("m1", add)
    with another(url) as connection:
        connection.execute("DROP TABLE onefold_records, onefold_schema")

    with pytest.raises(StoreUnavailable, match="onefold schema"):
        worker.transactional("m2", add)
    outcome = worker.transactional("m2", add)

    assert not outcome.replayed
    assert (balance(url), records(url)) == (20, ["m2"])


def test_tables_of_a_newer_version_let_nothing_run(driver: type[Worker], url: str) -> None:
    worker = driver(url)
    worker.transactional("earlier", add)
    worker.close()
    with another(url) as connection:
        connection.execute(TOO_NEW)
    later, handler = driver(url), Handler()

    async def work(hand: Hand) -> None:
        handler()

    with pytest.raises(StoreUnavailable, match=REFUSED):
        later.transactional("m1", work)
    later.close()

    assert handler.starts == 0


def test_the_same_key_with_another_payload_is_refused_and_changes_nothing(url: str) -> None:
    with Guard(url) as guard:

        @guard.transactional("credit", key="message")
        def credit(message: str, amount: int, *, tx: psycopg.Connection[Any] = TX) -> None:
            tx.execute("UPDATE wallet SET balance = balance + %s WHERE account = 'asha'", (amount,))

        credit("m1", 10)
        with pytest.raises(KeyReused):
            credit("m1", 11)

    assert balance(url) == 10


def nested(guard: Guard, *, then: BaseException | None = None) -> Callable[[str], None]:
    """A transfer whose two halves are deliveries themselves."""

    @guard.transactional("half", key="message")
    def half(message: str, amount: int, *, tx: psycopg.Connection[Any] = TX) -> None:
        tx.execute("UPDATE wallet SET balance = balance + %s WHERE account = 'asha'", (amount,))

    @guard.transactional("whole", key="message")
    def whole(message: str, *, tx: psycopg.Connection[Any] = TX) -> None:
        half(f"{message}/1", 3)
        half(f"{message}/2", 4)
        half(f"{message}/2", 4)
        if then is not None:
            raise then

    return whole


def test_a_transactional_function_inside_another_joins_its_transaction(url: str) -> None:
    with Guard(url) as guard:
        nested(guard)("m1")
        nested(guard)("m1")

    assert (balance(url), records(url)) == (7, ["m1", "m1/1", "m1/2"])


def test_when_the_outer_one_rolls_back_the_inner_records_and_their_work_go_too(url: str) -> None:
    with Guard(url) as guard, pytest.raises(ValueError, match="after all"):
        nested(guard, then=ValueError("after all"))("m1")

    assert (balance(url), records(url)) == (0, [])


def test_the_same_address_within_the_transaction_of_its_own_handler_is_told(url: str) -> None:
    with Guard(url) as guard:

        @guard.transactional("credit", key="message")
        def credit(message: str, *, tx: psycopg.Connection[Any] = TX) -> None:
            guard.within(tx).run("credit", message, lambda: None)

        with pytest.raises(InsideItself):
            credit("m1")


def test_what_a_handler_does_to_its_connection_the_next_one_does_not_see(url: str) -> None:
    seen: list[Any] = []
    with Guard(url) as guard:

        @guard.transactional("look", key="message")
        def look(message: str, *, tx: psycopg.Connection[Any] = TX) -> None:
            seen.append(tx.execute("SELECT 1 AS one").fetchone())
            tx.row_factory = psycopg.rows.dict_row

        look("m1")
        look("m2")

    assert seen == [(1,), (1,)]


# What it costs on the wire, on connections that are open.


@pytest.mark.parametrize(("value", "more"), [(None, 0), ("receipt", 1)])
def test_begin_and_the_record_are_one_message_and_a_result_is_one_more(
    driver: type[Worker], url: str, value: Any, more: int
) -> None:
    with Proxy(url) as proxy:
        worker = driver(proxy.url())
        for number in range(3):
            worker.transactional(f"earlier-{number}", returning(value))

        with proxy.counting() as count:
            worker.transactional("m1", returning(value))
        worker.close()

    # The record with BEGIN, the handler's own statement, COMMIT; asyncpg sends BEGIN alone.
    begin_alone = 1 if driver is Asyncpg else 0
    assert count.trips == 3 + begin_alone + more, count.messages


def test_threads_that_deliver_the_same_messages_credit_each_of_them_once(url: str) -> None:
    messages = {f"m{number}" for number in range(40)}

    def deliver(guard: Guard) -> None:
        @guard.transactional("credit", key="message")
        def credit(message: str, *, tx: psycopg.Connection[Any] = TX) -> None:
            tx.execute("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")

        for message in messages:
            credit(message)

    with Guard(f"{url}?pool_size=4") as guard:
        running = [Elsewhere(lambda: deliver(guard)) for _ in range(8)]
        for thread in running:
            thread.result()

    assert (balance(url), set(records(url))) == (400, messages)
