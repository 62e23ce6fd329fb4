"""Transactions on PostgreSQL at the same time, on each driver: duplicates, deadlocks, isolation levels, batches.

Rows 16, 17, 20 and 25 of the edge cases. Whoever has to wait is seen to wait: by the server's own list of who blocks
whom, never by a pause.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import quote

import asyncpg
import psycopg
import pytest

from onefold import TX, AsyncGuard, Guard, Outcome
from onefold._model import Address, Entry, State
from onefold.stores.postgres import joined as postgres_joined
from onefold.stores.postgres import open_store
from tests.stores.postgres.tools import (
    DAILY_DRIVERS,
    SCHEMA,
    Caller,
    Hand,
    Worker,
    add,
    another,
    balance,
    never_opened,
    records,
    rows,
    somebody_waits,
    through_asyncpg,
)
from tests.support import PATIENCE, Elsewhere, Handler, eventually

LEVELS = ["read committed", "repeatable read", "serializable"]

# Clients only: PostgreSQL's own vacuum looks into each database now and then, and stays a while.
CONNECTED = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'"
)

SERIALIZATION = (psycopg.errors.SerializationFailure, asyncpg.SerializationError)


@pytest.fixture
def url(postgres_url: str) -> str:
    with another(postgres_url) as connection:
        connection.execute(SCHEMA)
    postgres_joined.looked.clear()
    return postgres_url


@pytest.fixture(params=DAILY_DRIVERS)
def driver(request: pytest.FixtureRequest) -> type[Worker]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def pair(driver: type[Worker], url: str) -> Iterator[Callable[..., tuple[Worker, Worker]]]:
    """Two workers that know each other by nothing but the database."""
    made: list[Worker] = []

    def make(level: str = "read committed", source: Any = None) -> tuple[Worker, Worker]:
        made.extend(driver(f"{url}?isolation={level}", source=source) for _ in range(2))
        return made[0], made[1]

    yield make
    for worker in made:
        worker.close()


class Slow:
    """Work that has begun, and ends when it is told how."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self._end = threading.Event()
        self._error: Exception | None = None

    async def __call__(self, hand: Hand) -> str:
        await add(hand)
        self.begun.set()
        # It blocks its own loop, where there is nothing else to do.
        assert self._end.wait(PATIENCE)
        if self._error is not None:
            raise self._error
        return "by the first"

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._end.set()


async def by_the_second(hand: Hand) -> str:
    await add(hand)
    return "by the second"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("error", [None, ValueError("rolled back")])
def test_of_two_transactions_at_once_the_second_waits_and_runs_only_if_the_first_rolls_back(
    pair: Callable[..., tuple[Worker, Worker]], url: str, error: Exception | None, level: str
) -> None:
    one, other = pair(level)
    slow = Slow()
    one.transactional("earlier", add)
    other.transactional("earlier", add)

    first = Elsewhere(partial(one.transactional, "m1", slow))
    assert slow.begun.wait(PATIENCE)
    second = Elsewhere(partial(other.transactional, "m1", by_the_second))
    somebody_waits(url)
    slow.end(error)

    if error is None:
        assert first.result().value == "by the first"
    else:
        with pytest.raises(ValueError, match="rolled back"):
            first.result()
    expected = (True, "by the first") if error is None else (False, "by the second")
    assert (second.result().replayed, second.result().value) == expected
    assert (balance(url), records(url)) == (20, ["earlier", "m1"])


def in_a_transaction(worker: Worker, work: Callable[[Hand], Any], level: str = "read committed") -> Outcome[Any]:
    """A delivery as a caller of `within` makes it."""

    async def story(worker: Worker) -> Outcome[Any]:
        async with worker.connected() as caller, caller.transaction():
            await caller.run(f"SET TRANSACTION ISOLATION LEVEL {level}")
            return await caller.within("m1", work)

    worker.url = worker.url.partition("?")[0]
    return worker.play(story)


@pytest.mark.parametrize("error", [None, ValueError("rolled back")])
def test_of_two_callers_transactions_at_once_the_second_waits_and_runs_only_if_the_first_rolls_back(
    pair: Callable[..., tuple[Worker, Worker]], url: str, error: Exception | None
) -> None:
    one, other = pair(source=never_opened)
    slow = Slow()

    first = Elsewhere(partial(in_a_transaction, one, slow))
    assert slow.begun.wait(PATIENCE)
    second = Elsewhere(partial(in_a_transaction, other, by_the_second))
    somebody_waits(url)
    slow.end(error)

    if error is None:
        assert first.result().value == "by the first"
    else:
        with pytest.raises(ValueError, match="rolled back"):
            first.result()
    expected = (True, "by the first") if error is None else (False, "by the second")
    assert (second.result().replayed, second.result().value) == expected
    assert (balance(url), records(url)) == (10, ["m1"])


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_callers_duplicate_that_waited_gets_the_drivers_serialization_error_and_nothing_runs(
    pair: Callable[..., tuple[Worker, Worker]], url: str, level: str
) -> None:
    one, other = pair(source=never_opened)
    slow, handler = Slow(), Handler()

    async def work(_: Hand) -> None:
        handler()

    first = Elsewhere(partial(in_a_transaction, one, slow, level))
    assert slow.begun.wait(PATIENCE)
    second = Elsewhere(partial(in_a_transaction, other, work, level))
    somebody_waits(url)
    slow.end()

    assert first.result().value == "by the first"
    with pytest.raises(SERIALIZATION):
        second.result()
    assert handler.starts == 0
    # Delivered again, it is replayed.
    assert in_a_transaction(other, work, level).replayed
    assert balance(url) == 10


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_record_that_came_after_the_callers_snapshot_is_a_serialization_error_and_nothing_runs(
    pair: Callable[..., tuple[Worker, Worker]], url: str, level: str
) -> None:
    one, other = pair(source=never_opened)
    in_a_transaction(one, add)
    handler = Handler()

    async def work(_: Hand) -> None:
        handler()

    async def story(worker: Worker) -> None:
        async with worker.connected() as caller, caller.transaction():
            await caller.run(f"SET TRANSACTION ISOLATION LEVEL {level}")
            await caller.run("SELECT * FROM wallet")
            with another(url) as connection:
                connection.execute("UPDATE onefold_records SET key = 'm2'")
            await caller.within("m2", work)

    other.url = url
    with pytest.raises(SERIALIZATION):
        other.play(story)

    assert handler.starts == 0


@pytest.mark.parametrize("level", LEVELS)
def test_transactions_that_change_the_same_rows_are_tried_again_until_each_has_its_effect(
    driver: type[Worker], url: str, level: str
) -> None:
    """At the stricter levels the wallet's own row makes serialization failures, over and over."""
    workers = [driver(f"{url}?isolation={level}") for _ in range(3)]

    def deliver(worker: Worker) -> None:
        for number in range(8):
            worker.transactional(f"m{number}", add)

    running = [Elsewhere(partial(deliver, worker)) for worker in workers]
    for thread in running:
        thread.result()
    for worker in workers:
        worker.close()

    assert (balance(url), len(records(url))) == (80, 8)


def test_a_deadlock_of_two_handlers_is_tried_again_and_both_have_their_effect(driver: type[Worker], url: str) -> None:
    one, other = driver(url), driver(url)
    one.transactional("earlier", add)
    other.transactional("earlier", add)
    met = threading.Barrier(2)
    starts: list[str] = []

    async def move(hand: Hand, first: str, second: str) -> None:
        starts.append(first)
        await hand.run(f"UPDATE wallet SET balance = balance + 1 WHERE account = '{first}'")
        if len(starts) <= 2:
            met.wait(PATIENCE)
        await hand.run(f"UPDATE wallet SET balance = balance + 1 WHERE account = '{second}'")

    running = [
        Elsewhere(partial(one.transactional, "m1", partial(move, first="asha", second="riya"))),
        Elsewhere(partial(other.transactional, "m2", partial(move, first="riya", second="asha"))),
    ]
    outcomes = [thread.result() for thread in running]
    one.close()
    other.close()

    assert [outcome.replayed for outcome in outcomes] == [False, False]
    # One of them was given up, and perhaps once more when it came back.
    assert len(starts) >= 3
    assert (balance(url), balance(url, "riya")) == (12, 2)


def entry(key: str, **fields: Any) -> Entry:
    usual: dict[str, Any] = {"address": Address("", "credit", key), "token": key.encode().rjust(16), "ttl": 60.0}
    return Entry(**(usual | {"state": State.DONE} | fields))


def test_overlapping_batches_in_opposite_order_do_not_deadlock(driver: type[Worker], url: str) -> None:
    keys = [f"m{number:02}" for number in range(40)]
    guards = [driver(url, source=never_opened) for _ in range(2)]
    begun, go_on = threading.Event(), threading.Event()

    async def fresh(caller: Caller, worker: Any, order: list[str]) -> Any:
        found = worker.guard.within(caller.connection).fresh("credit", order, key=lambda message: message)
        return found if isinstance(worker.guard, Guard) else await found

    async def one(worker: Worker) -> int:
        async with worker.connected() as caller, caller.transaction():
            found = await fresh(caller, worker, keys[:20])
            begun.set()
            assert go_on.wait(PATIENCE)
            found_more = await fresh(caller, worker, keys[20:])
        return len(found.new) + len(found_more.new)

    async def other(worker: Worker) -> int:
        async with worker.connected() as caller, caller.transaction():
            return len((await fresh(caller, worker, keys[::-1])).new)

    first = Elsewhere(partial(guards[0].play, one))
    assert begun.wait(PATIENCE)
    second = Elsewhere(partial(guards[1].play, other))
    somebody_waits(url)
    go_on.set()

    # The second waits at the first key, before it holds any: with keys[::-1] as given it would hold the last twenty.
    assert (first.result(), second.result()) == (40, 0)
    for guard in guards:
        guard.close()


def test_two_purgers_at_once_remove_each_record_once_and_do_not_wait_for_each_other(url: str) -> None:
    store = open_store(url)
    store.claim_all([entry(f"over-{number:03}") for number in range(100)])
    store.claim(entry("needed"))
    with another(url) as connection:
        connection.execute("UPDATE onefold_records SET expires = expires - 61, due = due - 1 WHERE key <> 'needed'")

    with psycopg.connect(url) as first:
        statement = type(store.database.sql).remove_expired.replace(":limit", "30")
        removed = first.execute(statement.encode()).rowcount
        # It is not committed yet, and holds its thirty; another one finds others.
        removed_meanwhile = store.purge(30)
        first.rollback()

    assert (removed, removed_meanwhile) == (30, 30)
    assert store.purge(1_000) == 70
    assert records(url) == ["needed"]
    store.close()


def test_a_purge_leaves_what_somebody_works_on(url: str) -> None:
    store = open_store(url)
    store.claim_all([entry("busy"), entry("over")])
    with another(url) as connection:
        connection.execute("UPDATE onefold_records SET expires = expires - 61, due = due - 1")

    with psycopg.connect(url) as somebody:
        somebody.execute("UPDATE onefold_records SET expires = expires + 1000 WHERE key = 'busy'")
        assert store.purge(10) == 1

    assert records(url) == ["busy"]
    store.close()


def test_a_claim_of_the_store_waits_for_a_transaction_and_then_says_what_is_in_the_way(url: str) -> None:
    with Guard(url) as guard:
        guard.read("credit", "none")
        with psycopg.connect(url) as connection:
            guard.within(connection).run("credit", "m1", Handler("receipt"))
            claiming = Elsewhere(lambda: guard.run("credit", "m1", Handler("another")))
            somebody_waits(url)

    assert (claiming.result().replayed, claiming.result().value) == (True, "receipt")


def test_tasks_of_one_loop_credit_each_message_once(url: str) -> None:
    async def deliver(source: str) -> list[bool]:
        async with AsyncGuard(source) as guard:

            @guard.transactional("credit", key="message")
            async def credit(message: str, *, tx: Any = TX) -> None:
                await tx.execute("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")

            outcomes = await asyncio.gather(*(credit.outcome(f"m{number % 14}") for number in range(20)))
            return [outcome.replayed for outcome in outcomes]

    assert sorted(asyncio.run(deliver(f"{url}?pool_size=3"))) == [False] * 14 + [True] * 6
    assert asyncio.run(deliver(f"{through_asyncpg(url)}?pool_size=3")) == [True] * 20
    assert (balance(url), len(records(url))) == (140, 14)


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+asyncpg"])
@pytest.mark.parametrize("where", ["in its handler", "waiting for another transaction"])
def test_a_task_that_is_cancelled_leaves_nothing_behind_and_the_next_delivery_runs(
    url: str, scheme: str, where: str
) -> None:
    async def deliver() -> bool:
        inside = asyncio.Event()
        async with AsyncGuard(url.replace("postgresql", scheme)) as guard:

            @guard.transactional("credit", key="message")
            async def credit(message: str, *, patient: bool, tx: Any = TX) -> None:
                await tx.execute("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")
                if patient:
                    inside.set()
                    await asyncio.Event().wait()

            await credit("earlier", patient=False)
            with psycopg.connect(url) as other:
                if where != "in its handler":
                    other.execute("UPDATE wallet SET balance = balance WHERE account = 'asha'")
                task = asyncio.create_task(credit("m1", patient=True))
                await (inside.wait() if where == "in its handler" else asyncio.to_thread(somebody_waits, url))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            before = records(url)
            outcome = await credit.outcome("m1", patient=False)
            return before == ["earlier"] and not outcome.replayed

    assert asyncio.run(deliver())
    assert (balance(url), records(url)) == (20, ["earlier", "m1"])
    assert eventually(lambda: rows(url, CONNECTED) == []), "a connection was left open"


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_claims_of_a_store_whose_server_is_strict_by_default_are_asked_again_until_one_has_won(
    url: str, level: str
) -> None:
    setting = quote(f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}")
    stores = [open_store(f"{url}?options={setting}") for _ in range(6)]

    def claim(number: int) -> list[bool]:
        return [stores[number].claim(entry(f"m{key}", token=os.urandom(16))) is None for key in range(20)]

    running = [Elsewhere(partial(claim, number)) for number in range(6)]
    won = [thread.result() for thread in running]

    assert [sum(one) for one in zip(*won, strict=True)] == [1] * 20
    assert rows(f"{url}?options={setting}", "SHOW transaction_isolation") == [(level,)]
    for store in stores:
        store.close()
