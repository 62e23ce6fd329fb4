"""Transactions on SQLite at the same time: threads, processes, and writers that do not end (rows 16 and 17)."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onefold import TX, Guard, Outcome, Policy, StoreUnavailable
from onefold.stores.sqlite.joined import SqliteTransaction
from tests.support import PATIENCE, Died, Elsewhere, Handler, elsewhere
from tests.wallet import Awaiting, Blocking, Worker, add, balance, connected, never_opened, records

WORKER_TYPES = pytest.mark.parametrize("worker_type", [Blocking, Awaiting])


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}?busy_timeout=30s&sync=normal"


class Slow:
    """Work that has begun, and ends when it is told how."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self._end = threading.Event()
        self._error: Exception | None = None

    def __call__(self, connection: sqlite3.Connection) -> str:
        add(connection)
        self.begun.set()
        assert self._end.wait(PATIENCE)
        if self._error is not None:
            raise self._error
        return "by the first"

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._end.set()


def by_the_second(connection: sqlite3.Connection) -> str:
    add(connection)
    return "by the second"


@WORKER_TYPES
@pytest.mark.parametrize("error", [None, ValueError("rolled back")])
def test_of_two_transactions_at_once_the_second_waits_and_runs_only_if_the_first_rolls_back(
    worker_type: type[Worker], url: str, path: Path, kept_waiting: threading.Event, error: Exception | None
) -> None:
    one, other, slow = worker_type(url), worker_type(url), Slow()

    first = Elsewhere(partial(one.transactional, "m1", slow))
    assert slow.begun.wait(PATIENCE)
    second = Elsewhere(partial(other.transactional, "m1", by_the_second))
    assert kept_waiting.wait(PATIENCE)
    slow.end(error)

    if error is None:
        assert first.result().value == "by the first"
    else:
        with pytest.raises(ValueError, match="rolled back"):
            first.result()
    expected = (True, "by the first") if error is None else (False, "by the second")
    assert (second.result().replayed, second.result().value) == expected
    assert (balance(path), records(path)) == (10, ["m1"])
    one.close()
    other.close()


def in_a_transaction_of_its_own(path: Path, work: Callable[[sqlite3.Connection], Any]) -> Outcome[Any]:
    """A delivery as a caller of `within` makes it; SQLite itself waits for the other writer."""
    with connected(path, timeout=PATIENCE) as connection, connection:
        return Blocking(never_opened).within(connection, "m1", lambda: work(connection))


@pytest.mark.parametrize("error", [None, ValueError("rolled back")])
def test_of_two_callers_transactions_at_once_the_second_waits_and_runs_only_if_the_first_rolls_back(
    path: Path, error: Exception | None
) -> None:
    slow = Slow()

    first = Elsewhere(partial(in_a_transaction_of_its_own, path, slow))
    assert slow.begun.wait(PATIENCE)
    with connected(path, timeout=0.0) as impatient, pytest.raises(sqlite3.OperationalError, match="locked"):
        Blocking(never_opened).within(impatient, "m1", Handler())
    second = Elsewhere(partial(in_a_transaction_of_its_own, path, by_the_second))
    slow.end(error)

    if error is None:
        assert first.result().value == "by the first"
    else:
        with pytest.raises(ValueError, match="rolled back"):
            first.result()
    expected = (True, "by the first") if error is None else (False, "by the second")
    assert (second.result().replayed, second.result().value) == expected
    assert (balance(path), records(path)) == (10, ["m1"])


@WORKER_TYPES
def test_a_transactional_function_waits_within_its_bound_and_then_nothing_has_run(
    worker_type: type[Worker], path: Path, writing: sqlite3.Connection
) -> None:
    writing.execute("COMMIT")
    worker, handler = worker_type(f"sqlite:///{path}?busy_timeout=0.05s"), Handler()
    worker.transactional("earlier", Handler())
    writing.execute("BEGIN IMMEDIATE")

    with pytest.raises(StoreUnavailable, match=r"writing for 0\.05 s\. Nothing ran"):
        worker.transactional("m1", handler)
    writing.execute("ROLLBACK")

    assert handler.starts == 0
    assert not worker.transactional("m1", handler).replayed
    worker.close()


@WORKER_TYPES
def test_a_transactional_function_that_had_to_wait_runs_when_the_other_writer_ends(
    worker_type: type[Worker], url: str, path: Path, kept_waiting: threading.Event, writing: sqlite3.Connection
) -> None:
    writing.execute("COMMIT")
    worker = worker_type(url)
    worker.transactional("earlier", Handler())
    writing.execute("BEGIN IMMEDIATE")

    waiting = Elsewhere(partial(worker.transactional, "m1", add))
    assert kept_waiting.wait(PATIENCE)
    writing.execute("COMMIT")

    assert not waiting.result().replayed
    assert balance(path) == 10
    worker.close()


@WORKER_TYPES
@pytest.mark.parametrize("begin", ["", "BEGIN", "BEGIN IMMEDIATE"])
@pytest.mark.usefixtures("writing")
def test_within_lets_the_drivers_busy_error_surface_and_nothing_runs(
    worker_type: type[Worker], path: Path, begin: str
) -> None:
    handler = Handler()

    def deliver(connection: sqlite3.Connection) -> None:
        connection.execute(begin)
        worker_type(never_opened).within(connection, "m1", handler)

    with connected(path, timeout=0.0) as connection, pytest.raises(sqlite3.OperationalError) as raised:
        deliver(connection)

    assert raised.value.sqlite_errorcode == sqlite3.SQLITE_BUSY
    assert handler.starts == 0


@WORKER_TYPES
def test_a_caller_who_has_read_before_another_wrote_gets_the_drivers_error_and_nothing_runs(
    worker_type: type[Worker], path: Path
) -> None:
    handler = Handler()
    elsewhere(partial(in_a_transaction_of_its_own, path, add))

    with connected(path) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT * FROM wallet").fetchall()
        with connected(path) as other, other:
            add(other)
        with pytest.raises(sqlite3.OperationalError) as raised:
            worker_type(never_opened).within(connection, "m2", handler)

    assert raised.value.sqlite_errorcode == sqlite3.SQLITE_BUSY_SNAPSHOT
    assert handler.starts == 0


THREADS, CREDITS = 8, 50
# Three of ten deliveries are of a message that another thread delivers too.
SHARED = CREDITS * 3 // 10


def messages_of(thread: int) -> list[str]:
    own = [f"{thread}-{number}" for number in range(CREDITS - SHARED)]
    shared = [f"shared-{number}" for number in range(SHARED)]
    return own[:10] + shared + own[10:]


MESSAGES = {message for thread in range(THREADS) for message in messages_of(thread)}


def credit_by_transactional(guard: Guard, _path: Path, messages: list[str]) -> None:
    @guard.transactional("credit", key="message")
    def credit(message: str, *, tx: sqlite3.Connection = TX) -> None:
        add(tx)

    for message in messages:
        credit(message)


def credit_by_within(guard: Guard, path: Path, messages: list[str]) -> None:
    with connected(path, timeout=PATIENCE) as connection:
        connection.execute("PRAGMA synchronous = NORMAL")
        for message in messages:
            with connection:
                guard.within(connection).run("credit", message, lambda: add(connection))


@pytest.mark.parametrize("credit", [credit_by_transactional, credit_by_within])
def test_threads_that_deliver_the_same_messages_credit_each_of_them_once(
    url: str, path: Path, credit: Callable[[Guard, Path, list[str]], None]
) -> None:
    with Guard(url) as guard:
        running = [Elsewhere(partial(credit, guard, path, messages_of(thread))) for thread in range(THREADS)]
        for thread in running:
            thread.result(2 * PATIENCE)

    assert (balance(path), set(records(path))) == (10 * len(MESSAGES), MESSAGES)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@WORKER_TYPES
def test_a_forked_child_goes_on_with_the_guard_of_its_parent_also_when_that_has_closed_it(
    worker_type: type[Worker], url: str, path: Path
) -> None:
    worker = worker_type(url)
    worker.transactional("before", add)
    closed, close = os.pipe()

    child = os.fork()
    if child == 0:
        done = False
        try:
            os.read(closed, 1)
            outcomes = [worker.transactional(key, add) for key in ("before", "in the child")]
            done = [outcome.replayed for outcome in outcomes] == [True, False]
        finally:
            os._exit(0 if done else 1)
    worker.transactional("after", add)
    worker.close()
    os.write(close, b".")
    _, status = os.waitpid(child, 0)
    os.close(closed)
    os.close(close)

    assert os.waitstatus_to_exitcode(status) == 0
    assert (balance(path), records(path)) == (30, ["after", "before", "in the child"])


@WORKER_TYPES
def test_an_interrupt_at_the_commit_leaves_no_transaction_open(
    worker_type: type[Worker], url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_type(url)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(SqliteTransaction, "commit", Handler(error=Died()))
        with pytest.raises(Died):
            worker.transactional("m1", add)

    with connected(path, timeout=0.0, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
    assert not worker.transactional("m1", add).replayed
    assert balance(path) == 10
    worker.close()


@WORKER_TYPES
def test_records_of_two_guards_on_one_file_are_the_same_records(
    worker_type: type[Worker], url: str, path: Path
) -> None:
    """`transactional` on a file, and `within` on a connection to it."""
    worker = worker_type(url, Policy())
    worker.transactional("m1", add)

    with connected(path) as connection, connection:
        outcome = worker.within(connection, "m1", lambda: add(connection), payload=None)
    worker.close()

    assert outcome.replayed
    assert balance(path) == 10
