"""`transactional` on MariaDB, over PyMySQL and asyncmy: the record commits with the work (rows 15 to 19)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from onefold import Guard, Policy, RememberedFailure, StoreUnavailable, UsageError
from onefold.stores import mysql
from onefold.stores.mysql.dialect import MARIADB, MYSQL, Mysql
from services.proxy import Proxy
from tests.stores.mysql.wallet import DAILY_TYPES, Awaiting, Blocking, Call, Ledger, Worker, Working, add, one_by_one
from tests.stores.sql.versions import REFUSED, TOO_NEW
from tests.support import Died, Handler


@pytest.fixture
def ledger(mysql_url: str) -> Ledger:
    return Ledger(mysql_url)


@pytest.fixture(params=DAILY_TYPES)
def worker(request: pytest.FixtureRequest, ledger: Ledger) -> Iterator[Worker]:
    worker = request.param(ledger.url)
    yield worker
    worker.close()


def test_the_record_commits_with_the_work(worker: Worker, ledger: Ledger) -> None:
    first = worker.transactional("m1", add)
    second = worker.transactional("m1", add)

    assert (first.replayed, second.replayed) == (False, True)
    assert ledger.now == (10, ["m1"])


def test_nothing_is_committed_before_the_handler_returns(worker: Worker, ledger: Ledger) -> None:
    def look(tx: Any) -> Working:
        yield from add(tx)
        return ledger.now

    assert worker.transactional("m1", look).value == (0, [])


@pytest.mark.parametrize("error", [ValueError("no"), Died()])
def test_a_handler_that_raises_leaves_neither_record_nor_work(
    worker: Worker, ledger: Ledger, error: BaseException
) -> None:
    def fail(tx: Any) -> Working:
        yield from add(tx)
        raise error

    with pytest.raises(type(error)) as raised:
        worker.transactional("m1", fail)

    assert raised.value is error
    assert ledger.now == (0, [])
    assert not worker.transactional("m1", add).replayed


def test_a_result_is_replayed_and_a_none_too(worker: Worker) -> None:
    results = [worker.transactional("a", Handler([1])).value, worker.transactional("b", Handler(None)).value]
    replayed = [worker.transactional(key, Handler("not run")).value for key in ("a", "b")]

    assert results == replayed == [[1], None]


def test_a_bypass_runs_it_once_more(worker: Worker, ledger: Ledger) -> None:
    worker.transactional("m1", add)
    again = worker.transactional("m1", add, bypass=True)

    assert not again.replayed
    assert ledger.now == (20, ["m1"])


class Declined(Exception):
    """A final answer."""


@pytest.mark.parametrize("worker_type", DAILY_TYPES)
def test_a_remembered_failure_is_committed_and_what_its_handler_wrote_is_not(
    worker_type: type[Worker], ledger: Ledger
) -> None:
    worker = worker_type(ledger.url, Policy(final_errors=(Declined,)))

    def decline(tx: Any) -> Working:
        yield from add(tx)
        raise Declined("too little money")

    with pytest.raises(Declined):
        worker.transactional("m1", decline)
    with pytest.raises((Declined, RememberedFailure), match="too little money"):
        worker.transactional("m1", add)
    worker.close()

    assert ledger.now == (0, ["m1"])


def test_a_finished_record_is_forgotten_after_its_keep_time(worker: Worker, ledger: Ledger) -> None:
    worker.transactional("m1", add)
    ledger.execute("UPDATE onefold_records SET expires = 1")

    assert not worker.transactional("m1", add).replayed
    assert worker.transactional("m1", add).replayed
    assert ledger.now == (20, ["m1"])


def test_a_statement_that_fails_shows_its_own_error_and_undoes_all(worker: Worker, ledger: Ledger) -> None:
    def overdraw(tx: Any) -> Working:
        yield "INSERT INTO payments VALUES ('m1', '', 5)"
        yield from add(tx, -5)

    with pytest.raises(worker.error.OperationalError, match="CONSTRAINT"):
        worker.transactional("m1", overdraw)

    assert (ledger.rows("SELECT * FROM payments"), ledger.records) == ([], [])
    assert not worker.transactional("m1", add).replayed


def test_a_statement_that_fails_may_be_caught_and_the_rest_is_committed(worker: Worker, ledger: Ledger) -> None:
    def overdraw(tx: Any) -> Working:
        yield from add(tx)
        with pytest.raises(worker.error.OperationalError):
            yield from add(tx, -50)
        yield from add(tx, 1)

    worker.transactional("m1", overdraw)

    assert ledger.now == (11, ["m1"])


# What ends a transaction.

WAYS_TO_END_IT: dict[str, str | Call] = {
    "commit": Call("commit"),
    "rollback": Call("rollback"),
    "begin": Call("begin"),
    "autocommit": Call("autocommit", (True,)),
    "COMMIT": "COMMIT",
    "START TRANSACTION": " start  transaction",
    "a new table": "CREATE OR REPLACE TABLE drafts (number INTEGER)",
    "a changed table": "ALTER TABLE payments COMMENT = 'changed'",
    "locked tables": "LOCK TABLES wallet WRITE",
    "a chain": "COMMIT AND CHAIN",
    "upkeep": "ANALYZE TABLE wallet",
}


@pytest.mark.parametrize("way", WAYS_TO_END_IT)
@pytest.mark.parametrize("worker_type", DAILY_TYPES)
def test_a_handler_that_ends_the_transaction_by_itself_is_told_whatever_it_does_then(
    worker_type: type[Worker], ledger: Ledger, way: str
) -> None:
    worker = worker_type(ledger.url)

    def ending(value: Any, then: list[str]) -> Working:
        yield from add()
        yield WAYS_TO_END_IT[way]
        yield from one_by_one(*then)
        return value

    for value in (None, "receipt"):
        for then in ([], ["SELECT 1"], ["UPDATE wallet SET balance = balance + 1"]):
            with pytest.raises(UsageError, match="the handler ended the transaction by itself") as told:
                worker.transactional(f"{value} {then}", lambda _tx: ending(value, then))  # noqa: B023
            assert "On MySQL and MariaDB so does every statement that commits by itself: DDL" in str(told.value)

    # The next one gets the connection as if nothing had been.
    with pytest.raises(ValueError, match="no"):
        worker.transactional("failed", failing)
    worker.transactional("done", add)
    worker.close()
    assert {"failed", "done"} & set(ledger.records) == {"done"}


@pytest.mark.parametrize("value", [None, "receipt"])
def test_a_handler_that_closes_the_connection_is_told(worker: Worker, ledger: Ledger, value: str | None) -> None:
    def handler(tx: Any) -> Working:
        yield from add(tx)
        yield Call("close" if isinstance(worker, Blocking) else "ensure_closed")
        return value

    with pytest.raises(UsageError, match="the handler ended the transaction by itself"):
        worker.transactional("m1", handler)

    assert not worker.transactional("m1", add).replayed
    assert ledger.now == (10, ["m1"])


def failing(tx: Any) -> Working:
    yield from add(tx, 1_000)
    raise ValueError("no")


@pytest.mark.parametrize("way", ["commit", "autocommit", "locked tables"])
def test_a_handler_that_ends_the_transaction_and_raises_is_told_besides_its_own_error(
    worker: Worker, ledger: Ledger, way: str
) -> None:
    def handler(tx: Any) -> Working:
        yield WAYS_TO_END_IT[way]
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as raised:
        worker.transactional("m1", handler)

    assert "ended the transaction by itself" in raised.value.__notes__[0]
    # The next one gets a connection that nobody has changed.
    assert not worker.transactional("m2", add).replayed
    with pytest.raises(ValueError, match="no"):
        worker.transactional("m3", failing)
    assert "m3" not in ledger.records


def test_an_error_of_a_nested_delivery_is_no_end_of_the_transaction(ledger: Ledger) -> None:
    sent: list[int] = []
    with Guard(ledger.url) as guard:

        @guard.transactional("inner", key="key")
        def inner(key: str, *, tx: Any) -> None:
            raise ValueError("mine")

        @guard.transactional("outer", key="key")
        def outer(key: str, *, tx: Any) -> None:
            sent.append(tx.thread_id())
            inner(key)  # type: ignore[call-arg]

        for number in range(2):
            with pytest.raises(ValueError, match="mine") as raised:
                outer(f"m{number}")  # type: ignore[call-arg]
            assert not hasattr(raised.value, "__notes__")

    assert sent[0] == sent[1], "the connection was thrown away"


# What it costs.


WORD = re.compile(rb"INSERT|RELEASE|SAVEPOINT|SELECT|UPDATE|COMMIT")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("new", None, ["INSERT SAVEPOINT", "RELEASE SAVEPOINT COMMIT"]),
        ("new", "receipt", ["INSERT SAVEPOINT", "RELEASE SAVEPOINT UPDATE", "COMMIT"]),
        ("known", "receipt", ["INSERT SAVEPOINT", "SELECT", "COMMIT"]),
    ],
)
@pytest.mark.parametrize("dialect", [MARIADB, MYSQL], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("worker_type", DAILY_TYPES)
def test_a_delivery_costs_one_message_and_a_result_one_more_and_the_commit(
    worker_type: type[Worker],
    dialect: Mysql,
    ledger: Ledger,
    key: str,
    value: Any,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mysql, "dialect_of", lambda _version: dialect)
    with Proxy(ledger.url) as proxy:
        worker = worker_type(proxy.url())
        worker.transactional("known", Handler("receipt"))

        with proxy.counting() as count:
            worker.transactional(key, Handler(value))
        worker.close()

    sent = [b" ".join(WORD.findall(message)).decode() for message in count.messages]
    if dialect is MYSQL:
        # It cannot have the proof in the same message.
        one_by_one = " ".join(expected).replace("INSERT SAVEPOINT SELECT", "INSERT SELECT")
        expected = re.findall(r"RELEASE SAVEPOINT|\w+", one_by_one)
    assert sent == expected


# Tables.


def test_tables_of_a_newer_version_let_nothing_run(worker: Worker, ledger: Ledger) -> None:
    worker.transactional("earlier", Handler())
    ledger.execute(TOO_NEW)
    later, handler = type(worker)(ledger.url), Handler()

    with pytest.raises(StoreUnavailable, match=REFUSED):
        later.transactional("m1", handler)
    later.close()

    assert handler.starts == 0


def test_a_session_that_a_handler_changed_does_not_harm_the_next_one(worker: Worker, ledger: Ledger) -> None:
    def change(tx: Any) -> Working:
        yield "SET time_zone = '+13:00', sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES', NAMES latin1"
        yield "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE"

    worker.transactional("m1", change)

    assert worker.transactional("m1", add).replayed
    assert not worker.transactional("kéy", add).replayed
    assert ledger.now == (10, ["kéy", "m1"])


@pytest.mark.parametrize("level", ["read-committed", "repeatable-read", "serializable"])
@pytest.mark.parametrize("worker_type", [Blocking, Awaiting])
def test_the_url_says_in_which_isolation_handlers_run(worker_type: type[Worker], ledger: Ledger, level: str) -> None:
    worker = worker_type(f"{ledger.url}?isolation={level}")

    def look(tx: Any) -> Working:
        rows = yield "SELECT @@tx_isolation"
        return rows[0][0]

    assert worker.transactional("m1", look).value == level.upper()
    worker.close()
