"""MariaDB, several connections at once: duplicates that wait, deadlocks, batches that overlap (rows 16, 17, 20, 25)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from onefold import Outcome
from onefold.stores import mysql
from onefold.stores.mysql import joined as mysql_joined
from onefold.stores.mysql.dialect import MARIADB, MYSQL, Mysql
from tests.stores.mysql.wallet import (
    DAILY_TYPES,
    Blocking,
    Call,
    Ledger,
    Worker,
    Working,
    add,
    connected,
    deadlocking,
    waiting_for_rows,
)
from tests.support import PATIENCE, Handler
from tests.wallet import never_opened

COMMIT, ROLLBACK = Call("commit"), Call("rollback")

LEVELS = ["read-committed", "repeatable-read", "serializable"]


@pytest.fixture
def ledger(mysql_url: str) -> Ledger:
    return Ledger(mysql_url)


@pytest.fixture(params=[MARIADB, MYSQL], ids=["with RETURNING", "without RETURNING"])
def dialect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mysql:
    found: Mysql = request.param
    for module in (mysql, mysql_joined):
        monkeypatch.setattr(module, "dialect_of", lambda _version: found)
    return found


@pytest.fixture(params=DAILY_TYPES)
def worker_type(request: pytest.FixtureRequest) -> type[Worker]:
    found: type[Worker] = request.param
    return found


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


class Paused:
    """Work that stops in its middle until it is told to go on, or to fail."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def __call__(self, tx: Any = None) -> Working:
        yield from add(tx)
        self.reached.set()
        assert self.released.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return "first"

    def release(self, error: Exception | None = None) -> None:
        self.error = error
        self.released.set()


def adding(tx: Any = None) -> Working:
    yield from add(tx)
    return "later"


@contextmanager
def workers(count: int, make: Callable[[], Worker]) -> Iterator[list[Worker]]:
    made = [make() for _ in range(count)]
    yield made
    for worker in made:
        worker.close()


@pytest.mark.parametrize("level", LEVELS)
def test_a_duplicate_waits_for_the_first_one_and_replays_it(
    ledger: Ledger, worker_type: type[Worker], level: str, threads: ThreadPoolExecutor
) -> None:
    first = Paused()
    with workers(4, lambda: worker_type(f"{ledger.url}?isolation={level}")) as (owner, *others):
        owner.transactional("earlier", Handler())
        running = threads.submit(owner.transactional, "m1", first)
        assert first.reached.wait(PATIENCE)
        late = [threads.submit(other.transactional, "m1", adding) for other in others]
        waiting_for_rows(ledger, 3)
        first.release()

        outcomes = [one.result(PATIENCE) for one in (running, *late)]

    assert [(one.value, one.replayed) for one in outcomes] == [("first", False)] + [("first", True)] * 3
    assert ledger.now == (10, ["earlier", "m1"])


@pytest.mark.parametrize("level", LEVELS)
def test_when_the_first_one_rolls_back_one_of_those_who_wait_runs_and_the_others_replay_it(
    ledger: Ledger, worker_type: type[Worker], level: str, threads: ThreadPoolExecutor
) -> None:
    """All of them get a lock at once, and all want more: a deadlock, which is tried again."""
    first = Paused()
    with workers(4, lambda: worker_type(f"{ledger.url}?isolation={level}")) as (owner, *others):
        owner.transactional("earlier", Handler())
        running = threads.submit(owner.transactional, "m1", first)
        assert first.reached.wait(PATIENCE)
        late = [threads.submit(other.transactional, "m1", adding) for other in others]
        waiting_for_rows(ledger, 3)
        first.release(ValueError("declined"))

        with pytest.raises(ValueError, match="declined"):
            running.result(PATIENCE)
        outcomes = [one.result(PATIENCE) for one in late]

    assert sorted(one.replayed for one in outcomes) == [False, True, True]
    assert {one.value for one in outcomes} == {"later"}
    assert ledger.now == (10, ["earlier", "m1"])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", [COMMIT, ROLLBACK])
def test_duplicates_within_the_callers_transactions_end_right(
    ledger: Ledger, worker_type: type[Worker], level: str, way: Call, threads: ThreadPoolExecutor
) -> None:
    with workers(4, lambda: worker_type(never_opened)) as (owner, *others), owner.connection(ledger.url) as connection:
        owner.within(connection, "earlier", Handler())
        owner.on(connection, COMMIT)
        owner.within(connection, "m1", add)
        late = [threads.submit(delivered, other, ledger.url, level) for other in others]
        waiting_for_rows(ledger, 3)
        owner.on(connection, way)

        replayed = [one.result(PATIENCE).replayed for one in late]

    assert sorted(replayed) == ([True] * 3 if way is COMMIT else [False, True, True])
    assert ledger.now == (10, ["earlier", "m1"])


def delivered(worker: Worker, url: str, level: str) -> Outcome[Any]:
    """A delivery as a careful caller makes it: what the database gives up is tried again in a new transaction."""
    with worker.connection(url) as connection:
        worker.on(connection, f"SET SESSION TRANSACTION ISOLATION LEVEL {level.replace('-', ' ')}")
        while True:
            try:
                outcome = worker.within(connection, "m1", add)
                worker.on(connection, COMMIT)
                return outcome
            except worker.error.OperationalError as error:
                if error.args[0] != 1213:
                    raise
                worker.on(connection, ROLLBACK)


def test_duplicates_of_what_is_done_do_not_wait_for_each_other(ledger: Ledger, worker_type: type[Worker]) -> None:
    """Each of them locks the record till the end of its transaction, but lets others do the same."""
    with workers(1, lambda: worker_type(never_opened)) as (worker,), worker.connection(ledger.url) as first:
        worker.within(first, "m1", Handler("receipt"))
        worker.on(first, COMMIT)
        with worker.connection(ledger.url) as second:
            worker.on(second, "SET SESSION innodb_lock_wait_timeout = 1")

            outcomes = [worker.within(connection, "m1", Handler()) for connection in (first, second, first)]

    assert [one.value for one in outcomes] == ["receipt"] * 3


# Deadlocks of the handlers' own.


def test_a_deadlock_between_handlers_is_tried_again(
    ledger: Ledger, worker_type: type[Worker], threads: ThreadPoolExecutor
) -> None:
    meet = threading.Barrier(2, timeout=PATIENCE)
    starts: list[str] = []

    def move(first: str, second: str) -> Callable[[Any], Working]:
        def work(tx: Any) -> Working:
            starts.append(first)
            yield from add(tx, account=first)
            if starts.count(first) == 1:
                meet.wait()
            yield from add(tx, account=second)

        return work

    with workers(2, lambda: worker_type(ledger.url)) as (one, other):
        one.transactional("earlier", Handler())
        moves = [
            threads.submit(one.transactional, "m1", move("asha", "ben")),
            threads.submit(other.transactional, "m2", move("ben", "asha")),
        ]
        assert [move.result(PATIENCE).replayed for move in moves] == [False, False]

    assert len(starts) == 3
    assert ledger.now == (20, ["earlier", "m1", "m2"])


def test_a_handler_that_goes_on_after_a_deadlock_is_run_again_and_nothing_is_lost(
    ledger: Ledger, worker_type: type[Worker]
) -> None:
    """The deadlock has rolled back the record with the work; a COMMIT would say that all is well."""
    starts: list[int] = []
    with connected(ledger.url) as other, workers(1, lambda: worker_type(ledger.url)) as (worker,):

        def careless(tx: Any) -> Working:
            starts.append(1)
            yield from add(tx)
            if len(starts) == 1:
                with pytest.raises(worker.error.OperationalError, match="Deadlock"):
                    yield from deadlocking(other)

        outcome = worker.transactional("m1", careless)

    assert (outcome.replayed, len(starts)) == (False, 2)
    assert ledger.now == (10, ["m1"])


def test_after_a_deadlock_nothing_more_can_be_committed_on_that_connection(
    ledger: Ledger, worker_type: type[Worker]
) -> None:
    """What a handler that swallowed it commits by itself would be done once more when it is run again."""
    starts: list[int] = []
    with connected(ledger.url) as other, workers(1, lambda: worker_type(ledger.url)) as (worker,):

        def stubborn(tx: Any) -> Working:
            starts.append(1)
            if len(starts) == 1:
                with pytest.raises(worker.error.OperationalError, match="Deadlock"):
                    yield from deadlocking(other)
                for step in ("UPDATE wallet SET balance = balance + 100", Call("begin"), Call("commit")):
                    with pytest.raises(worker.error.OperationalError, match="Deadlock"):
                        yield step
                yield Call("rollback")
                with pytest.raises(worker.error.OperationalError, match="Deadlock"):
                    yield "UPDATE wallet SET balance = balance + 100"
                return
            yield from add(tx)

        worker.transactional("m1", stubborn)

    assert len(starts) == 2
    assert ledger.now == (10, ["m1"])


def test_a_row_that_stays_locked_for_too_long_is_tried_again_in_a_new_transaction(
    ledger: Ledger, worker_type: type[Worker]
) -> None:
    """By default the server rolls back the statement only; we roll back all of it."""
    starts: list[int] = []
    with connected(ledger.url) as other, workers(1, lambda: worker_type(ledger.url)) as (worker,):
        with other.cursor() as cursor:
            cursor.execute("UPDATE wallet SET balance = balance + 100 WHERE account = 'asha'")

        def wait(tx: Any) -> Working:
            starts.append(1)
            yield "SET SESSION innodb_lock_wait_timeout = 1"
            yield from add(tx, account="ben")
            if len(starts) == 2:
                other.rollback()
            yield from add(tx)

        worker.transactional("m1", wait)

    assert len(starts) == 2
    assert ledger.rows("SELECT balance FROM wallet ORDER BY account") == [(10,), (10,)]


def test_a_record_that_is_newer_than_the_snapshot_is_a_conflict_where_the_server_wants_it_so(
    ledger: Ledger, worker_type: type[Worker]
) -> None:
    """MariaDB's innodb_snapshot_isolation, which newer ones have by default: error 1020 ends the transaction."""
    with workers(1, lambda: worker_type(never_opened)) as (worker,), worker.connection(ledger.url) as connection:
        worker.within(connection, "earlier", Handler())
        worker.on(connection, COMMIT, "SET SESSION innodb_snapshot_isolation = ON", "SELECT * FROM onefold_records")
        with worker.connection(ledger.url) as other:
            worker.within(other, "m1", Handler("receipt"))
            worker.on(other, COMMIT)

        with pytest.raises(worker.error.OperationalError) as raised:
            worker.within(connection, "m1", Handler())
        worker.on(connection, ROLLBACK)
        outcome = worker.within(connection, "m1", Handler())

    assert raised.value.args[0] == 1020
    assert (outcome.replayed, outcome.value) == (True, "receipt")


# Many at once.


@pytest.mark.parametrize("level", LEVELS)
def test_many_workers_on_few_keys_keep_the_sum_exact(ledger: Ledger, level: str, threads: ThreadPoolExecutor) -> None:
    keys = [f"m{number}" for number in range(12)]

    def deliver(worker: Worker, turn: int) -> None:
        for number in range(len(keys) * 2):
            worker.transactional(keys[(number * (turn + 1)) % len(keys)], add)

    with workers(4, lambda: Blocking(f"{ledger.url}?isolation={level}")) as made:
        done = [threads.submit(deliver, worker, turn) for turn, worker in enumerate(made)]
        for one in done:
            one.result(PATIENCE)

    assert ledger.balance == 10 * len(ledger.records)
    assert set(ledger.records) <= set(keys)


@pytest.mark.usefixtures("dialect")
def test_overlapping_batches_in_opposite_order_never_wait_for_each_other_in_a_circle(
    ledger: Ledger, worker_type: type[Worker], threads: ThreadPoolExecutor
) -> None:
    with workers(3, lambda: worker_type(never_opened)) as made:

        def poll(worker: Worker, turn: int) -> list[str]:
            new: list[str] = []
            with worker.connection(ledger.url) as connection:
                for number in range(10):
                    keys = [f"{number}-{message:03}" for message in range(60)][:: -1 if turn % 2 else 1]
                    new += worker.fresh(connection, keys[turn * 5 :]).new
                    worker.on(connection, COMMIT)
            return new

        found: list[Future[list[str]]] = [threads.submit(poll, worker, turn) for turn, worker in enumerate(made)]
        new = [key for one in found for key in one.result(PATIENCE)]

    assert (
        sorted(new)
        == sorted(ledger.records)
        == [f"{number}-{message:03}" for number in range(10) for message in range(60)]
    )


@pytest.mark.usefixtures("dialect")
def test_a_purge_passes_by_what_somebody_works_on(ledger: Ledger, worker_type: type[Worker]) -> None:
    with workers(2, lambda: worker_type(ledger.url)) as (worker, other), other.connection(ledger.url) as connection:
        for number in range(5):
            worker.run(f"m{number}", Handler())
        ledger.execute("UPDATE onefold_records SET expires = 1")
        other.on(
            connection,
            "SELECT * FROM onefold_records WHERE scope = '' AND operation = 'charge' AND `key` = 'm2' FOR UPDATE",
        )

        removed = [worker.store("purge", 3), worker.store("purge", 3)]

        # The lock is held till the end of the block: whoever had waited for it would have got an error.
        assert removed == [3, 1]
    assert ledger.records == ["m2"]
