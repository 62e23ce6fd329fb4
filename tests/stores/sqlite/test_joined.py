"""`transactional` on SQLite, sync and async: the record commits with the work (rows 15 to 19 of the edge cases)."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onefold import (
    Policy,
    RememberedFailure,
    StoreUnavailable,
)
from onefold.stores.sqlite import SqliteStore
from onefold.testing import Clock
from tests.stores.sql.versions import REFUSED, TOO_NEW
from tests.support import Died, Handler
from tests.wallet import Awaiting, Blocking, Worker, add, balance, connected, records, rows


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}?busy_timeout=0.2s"


@pytest.fixture(params=[Blocking, Awaiting])
def worker(request: pytest.FixtureRequest, url: str) -> Iterator[Worker]:
    worker = request.param(url)
    yield worker
    worker.close()


def test_the_record_commits_with_the_work(worker: Worker, path: Path) -> None:
    first = worker.transactional("m1", add)
    second = worker.transactional("m1", add)

    assert (first.replayed, second.replayed) == (False, True)
    assert (balance(path), records(path)) == (10, ["m1"])


def test_nothing_is_committed_before_the_handler_returns(worker: Worker, path: Path) -> None:
    def look(tx: sqlite3.Connection) -> tuple[int, list[str]]:
        add(tx)
        return balance(path), records(path)

    assert worker.transactional("m1", look).value == (0, [])


@pytest.mark.parametrize("error", [ValueError("no"), Died()])
def test_a_handler_that_raises_leaves_neither_record_nor_work(worker: Worker, path: Path, error: BaseException) -> None:
    def fail(tx: sqlite3.Connection) -> None:
        add(tx)
        raise error

    with pytest.raises(type(error)) as raised:
        worker.transactional("m1", fail)

    assert raised.value is error
    assert (balance(path), records(path)) == (0, [])
    assert not worker.transactional("m1", add).replayed


def test_a_result_is_replayed_and_a_none_too(worker: Worker) -> None:
    results = [worker.transactional("a", Handler([1])).value, worker.transactional("b", Handler(None)).value]
    replayed = [worker.transactional(key, Handler("not run")).value for key in ("a", "b")]

    assert results == replayed == [[1], None]


def test_a_bypass_runs_it_once_more(worker: Worker, path: Path) -> None:
    worker.transactional("m1", add)
    again = worker.transactional("m1", add, bypass=True)

    assert not again.replayed
    assert (balance(path), records(path)) == (20, ["m1"])


@pytest.mark.parametrize(("value", "writes"), [(None, []), ("receipt", ["UPDATE"])])
def test_a_delivery_costs_a_write_in_a_savepoint_and_a_result_one_more(
    worker: Worker, value: Any, writes: list[str]
) -> None:
    worker.transactional("earlier", Handler())
    seen: list[str] = []
    with worker.lent() as connection:
        connection.set_trace_callback(lambda statement: seen.append(statement.split()[0]))

    worker.transactional("m1", lambda tx: value)

    assert seen == ["BEGIN", "INSERT", "SAVEPOINT", "RELEASE", *writes, "COMMIT"]


class Declined(Exception):
    """A final answer."""


@pytest.mark.parametrize("worker_type", [Blocking, Awaiting])
def test_a_remembered_failure_is_committed_and_what_its_handler_wrote_is_not(
    worker_type: type[Worker], url: str, path: Path
) -> None:
    worker = worker_type(url, Policy(final_errors=(Declined,)))

    def decline(tx: sqlite3.Connection) -> None:
        add(tx)
        raise Declined("too little money")

    with pytest.raises(Declined):
        worker.transactional("m1", decline)
    with pytest.raises((Declined, RememberedFailure), match="too little money"):
        worker.transactional("m1", add)
    worker.close()

    assert (balance(path), records(path)) == (0, ["m1"])


def test_a_finished_record_is_forgotten_after_its_keep_time(path: Path) -> None:
    clock = Clock()
    store = SqliteStore(path, clock=clock)
    worker = Blocking(store, Policy(keep="1h"))

    worker.transactional("m1", add)
    clock.advance(3_599)
    worker.transactional("m1", add)
    clock.advance(2)
    worker.transactional("m1", add)
    store.close()

    assert balance(path) == 20


def test_a_handler_may_take_longer_than_its_record_is_kept(path: Path) -> None:
    clock = Clock()
    store = SqliteStore(path, clock=clock)
    worker = Blocking(store, Policy(keep="1h"))

    def work_for_long(tx: sqlite3.Connection) -> str:
        add(tx)
        clock.advance(3_601)
        return "done"

    outcome = worker.transactional("m1", work_for_long)
    store.close()

    assert outcome.value == "done"
    assert balance(path) == 10


def test_a_statement_that_fails_shows_its_own_error_and_undoes_all(worker: Worker, path: Path) -> None:
    def overdraw(tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO payments (idempotency_key, amount) VALUES ('m1', 5)")
        add(tx, -5)

    with pytest.raises(sqlite3.IntegrityError, match="CHECK constraint failed"):
        worker.transactional("m1", overdraw)

    assert (rows(path, "SELECT * FROM payments"), records(path)) == ([], [])
    assert not worker.transactional("m1", add).replayed


def test_what_a_handler_locks_itself_is_its_own_error_and_not_tried_again(worker: Worker) -> None:
    starts: list[int] = []

    def drop_what_is_being_read(tx: sqlite3.Connection) -> None:
        starts.append(1)
        tx.execute("CREATE TABLE drafts AS SELECT 1 UNION SELECT 2")
        reading = tx.execute("SELECT * FROM drafts")
        next(reading)
        tx.execute("DROP TABLE drafts")

    with pytest.raises(sqlite3.OperationalError, match="locked"):
        worker.transactional("m1", drop_what_is_being_read)

    assert len(starts) == 1


def test_a_constraint_that_fails_at_the_commit_shows_its_own_error_and_undoes_all(worker: Worker, path: Path) -> None:
    with worker.lent() as connection:
        connection.execute("PRAGMA foreign_keys = ON")

    def pay(tx: sqlite3.Connection) -> str:
        tx.execute("INSERT INTO payments VALUES ('m1', '', 5, 'nobody')")
        return "paid"

    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY constraint failed"):
        worker.transactional("m1", pay)

    assert (rows(path, "SELECT * FROM payments"), records(path)) == ([], [])
    assert not worker.transactional("m1", add).replayed


@pytest.fixture
def disk() -> Iterator[Callable[[int], None]]:
    """Fills the disk, so far as this process can tell: no file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_commit_that_the_disk_refuses_has_committed_nothing(
    worker: Worker, path: Path, disk: Callable[[int], None]
) -> None:
    worker.transactional("earlier", Handler())

    def fill(tx: sqlite3.Connection) -> None:
        add(tx)
        disk(path.with_name("wallet.db-wal").stat().st_size)

    with pytest.raises(StoreUnavailable, match="the transaction was not committed"):
        worker.transactional("m1", fill)
    disk(resource.RLIM_INFINITY)

    assert (balance(path), records(path)) == (0, ["earlier"])
    assert not worker.transactional("m1", add).replayed
    assert balance(path) == 10


def test_a_record_that_does_not_fit_on_the_disk_lets_nothing_run(worker: Worker, path: Path) -> None:
    worker.transactional("earlier", Handler())
    with worker.lent() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()
    handler = Handler(None)

    def deliver_many() -> None:
        for number in range(1_000):
            worker.transactional(f"{number}".ljust(250, "-"), handler)

    with pytest.raises(StoreUnavailable, match="the disk is full") as raised:
        deliver_many()

    assert isinstance(raised.value.__cause__, sqlite3.OperationalError)
    assert len(records(path)) == 1 + handler.starts


def test_tables_of_a_newer_version_let_nothing_run(worker: Worker, path: Path) -> None:
    worker.transactional("earlier", Handler())
    worker.close()
    with connected(path) as connection, connection:
        connection.execute(TOO_NEW)
    later, handler = type(worker)(f"sqlite:///{path}"), Handler()

    with pytest.raises(StoreUnavailable, match=REFUSED):
        later.transactional("m1", handler)
    later.close()

    assert handler.starts == 0
