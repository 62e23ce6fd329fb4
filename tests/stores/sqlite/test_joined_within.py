"""`within` on SQLite, sync and async: a transaction that the caller owns (rows 14 to 18 and 25b of the edge cases)."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from onefold import Guard, InsideItself, KeyReused, NotInTransaction, Policy, StoreUnavailable, UsageError
from onefold.stores.sql.records import VERSION
from tests.stores.sql.versions import REFUSED
from tests.support import Died, Handler
from tests.wallet import Awaiting, Blocking, Worker, add, balance, connected, never_opened, records, tables

HAS_AUTOCOMMIT = sys.version_info >= (3, 12)


@pytest.fixture(params=[Blocking, Awaiting])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = request.param(never_opened)
    yield worker
    worker.close()


def test_the_record_commits_with_the_work_and_the_guards_own_store_is_never_opened(
    worker: Worker, connection: sqlite3.Connection, path: Path
) -> None:
    with connection:
        first = worker.within(connection, "m1", lambda: add(connection))
        seen_before_the_commit = balance(path), records(path)
    with connection:
        second = worker.within(connection, "m1", lambda: add(connection))

    assert seen_before_the_commit == (0, [])
    assert (first.replayed, second.replayed) == (False, True)
    assert (balance(path), records(path)) == (10, ["m1"])


def test_the_callers_rollback_takes_the_record_back_and_the_next_delivery_runs(
    worker: Worker, connection: sqlite3.Connection, path: Path
) -> None:
    worker.within(connection, "m1", lambda: add(connection))
    connection.rollback()
    with connection:
        again = worker.within(connection, "m1", lambda: add(connection))

    assert not again.replayed
    assert (balance(path), records(path)) == (10, ["m1"])


def test_a_savepoint_that_is_rolled_back_takes_the_record_back_and_nothing_else(
    worker: Worker, connection: sqlite3.Connection, path: Path
) -> None:
    connection.execute("BEGIN")
    worker.within(connection, "m1", lambda: add(connection))
    connection.execute("SAVEPOINT part")
    worker.within(connection, "m2", lambda: add(connection))
    connection.execute("ROLLBACK TO part")
    connection.execute("COMMIT")

    assert (balance(path), records(path)) == (10, ["m1"])
    assert not worker.within(connection, "m2", lambda: add(connection)).replayed


@pytest.mark.parametrize("error", [ValueError("no"), Died()])
def test_when_the_handler_raises_and_the_caller_commits_the_next_delivery_runs(
    worker: Worker, connection: sqlite3.Connection, path: Path, error: BaseException
) -> None:
    with connection:
        with pytest.raises(type(error)) as raised:
            worker.within(connection, "m1", Handler(error=error))
        add(connection, 1)
    with connection:
        again = worker.within(connection, "m1", lambda: add(connection))

    assert raised.value is error
    assert not again.replayed
    assert (balance(path), records(path)) == (11, ["m1"])


@pytest.mark.parametrize(
    "options",
    [
        {"isolation_level": None},
        pytest.param({"autocommit": True}, marks=pytest.mark.skipif(not HAS_AUTOCOMMIT, reason="Python 3.12")),
    ],
)
def test_an_autocommit_connection_is_refused_before_anything_runs(
    worker: Worker, path: Path, options: dict[str, Any]
) -> None:
    handler = Handler()

    with connected(path, **options) as connection, pytest.raises(NotInTransaction, match="autocommit"):
        worker.within(connection, "m1", handler)

    assert (handler.starts, records(path)) == (0, [])


IN_TRANSACTION: dict[str, tuple[dict[str, Any], str, str]] = {
    "Python begins it": ({}, "", "COMMIT"),
    "Python begins it immediately": ({"isolation_level": "IMMEDIATE"}, "", "COMMIT"),
    "begun by hand": ({}, "BEGIN", "COMMIT"),
    "begun by hand in autocommit mode": ({"isolation_level": None}, "BEGIN IMMEDIATE", "COMMIT"),
    "a savepoint in autocommit mode": ({"isolation_level": None}, "SAVEPOINT one", "RELEASE one"),
}
if HAS_AUTOCOMMIT:
    IN_TRANSACTION["autocommit is off"] = ({"autocommit": False}, "", "")
    IN_TRANSACTION["begun by hand where autocommit is on"] = ({"autocommit": True}, "BEGIN", "COMMIT")


@pytest.mark.parametrize("how", IN_TRANSACTION)
def test_every_way_to_be_in_a_transaction_will_do(worker: Worker, path: Path, how: str) -> None:
    options, begin, end = IN_TRANSACTION[how]

    def deliver() -> bool:
        with connected(path, **options) as connection:
            connection.execute(begin)
            outcome = worker.within(connection, "m1", lambda: add(connection))
            connection.execute(end) if end else connection.commit()
            return outcome.replayed

    assert [deliver(), deliver()] == [False, True]
    assert (balance(path), records(path)) == (10, ["m1"])


def test_a_statement_that_fails_shows_its_own_error(worker: Worker, connection: sqlite3.Connection, path: Path) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="CHECK constraint failed"), connection:
        worker.within(connection, "m1", lambda: add(connection, -1))

    assert records(path) == []


def test_an_error_that_ends_the_transaction_is_shown_and_nothing_is_written_after_it(
    worker: Worker, connection: sqlite3.Connection, path: Path
) -> None:
    def abort() -> None:
        add(connection)
        connection.execute("INSERT OR ROLLBACK INTO wallet VALUES ('asha', 0)")

    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE constraint failed"):
        worker.within(connection, "m1", abort)

    assert not connection.in_transaction
    assert (balance(path), records(path)) == (0, [])


@pytest.mark.parametrize("way", ["commit", "rollback"])
def test_a_handler_with_a_result_that_ends_the_transaction_by_itself_is_told(
    worker: Worker, connection: sqlite3.Connection, way: str
) -> None:
    def handler() -> str:
        getattr(connection, way)()
        return "receipt"

    with pytest.raises(UsageError, match="the handler ended the transaction by itself"):
        worker.within(connection, "m1", handler)


def test_the_first_use_makes_the_tables_in_the_callers_transaction_and_a_rollback_undoes_them(
    worker: Worker, connection: sqlite3.Connection, path: Path
) -> None:
    before = tables(path)
    add(connection, 1)
    worker.within(connection, "m1", lambda: add(connection))
    seen_before_the_end = tables(path), balance(path)
    connection.rollback()

    assert seen_before_the_end == (before, 0)
    assert (tables(path), balance(path)) == (before, 0)


def test_after_a_first_use_that_was_rolled_back_the_next_one_works(
    worker: Worker, connection: sqlite3.Connection, path: Path
) -> None:
    worker.within(connection, "m1", lambda: add(connection))
    connection.rollback()
    with connection:
        worker.within(connection, "m1", lambda: add(connection))
        worker.within(connection, "m1", lambda: add(connection))

    assert (balance(path), records(path)) == (10, ["m1"])
    with Blocking(f"sqlite:///{path}").guard as guard:
        assert guard.read("credit", "m1") is not None


def in_newer_tables(connection: sqlite3.Connection, *, usable_from: int) -> None:
    with connection:
        connection.execute("UPDATE onefold_schema SET version = ?, usable_from = ?", (VERSION + 2, usable_from))


@pytest.mark.parametrize("column", ["token", "a_new_name"])
@pytest.mark.parametrize("key", ["known", "new"])
def test_tables_of_a_newer_version_are_refused_in_one_line_and_nothing_runs(
    worker: Worker, connection: sqlite3.Connection, path: Path, key: str, column: str
) -> None:
    with connection:
        worker.within(connection, "known", Handler("receipt"))
    in_newer_tables(connection, usable_from=VERSION + 1)
    connection.execute(f"ALTER TABLE onefold_records RENAME COLUMN token TO {column}")
    connection.row_factory = sqlite3.Row
    handler = Handler()

    with pytest.raises(StoreUnavailable, match=REFUSED) as raised, connection:
        worker.within(connection, key, handler)

    assert "\n" not in str(raised.value)
    assert (handler.starts, records(path)) == (0, ["known"])


def test_tables_of_a_newer_version_that_can_be_used_are_used(worker: Worker, connection: sqlite3.Connection) -> None:
    with connection:
        worker.within(connection, "known", Handler("receipt"))
    in_newer_tables(connection, usable_from=1)

    with connection:
        outcomes = [worker.within(connection, key, Handler("another")) for key in ("known", "new")]

    assert [(one.replayed, one.value) for one in outcomes] == [(True, "receipt"), (False, "another")]


STATEMENTS: dict[str, tuple[Handler, list[str]]] = {
    "new": (Handler(None), ["INSERT", "SAVEPOINT", "RELEASE"]),
    "new, with a result": (Handler("receipt"), ["INSERT", "SAVEPOINT", "RELEASE", "UPDATE"]),
    "new, and it fails": (Handler(error=ValueError()), ["INSERT", "SAVEPOINT", "DELETE", "RELEASE"]),
    "known": (Handler(None), ["INSERT", "SELECT"]),
}


@pytest.mark.parametrize("case", STATEMENTS)
def test_what_a_delivery_costs_in_statements(worker: Worker, connection: sqlite3.Connection, case: str) -> None:
    handler, expected = STATEMENTS[case]
    with connection:
        worker.within(connection, "known", Handler("receipt"))
    connection.execute("BEGIN IMMEDIATE")
    seen: list[str] = []
    connection.set_trace_callback(lambda statement: seen.append(statement.split()[0]))

    with suppress(ValueError):
        worker.within(connection, case.partition(",")[0], handler)
    connection.set_trace_callback(None)

    # How long the connection waits is not asked of the file.
    assert [word for word in seen if word != "PRAGMA"] == expected
    assert seen.count("PRAGMA") <= 3


def test_a_policy_that_remembers_failures_is_refused(worker: Worker, connection: sqlite3.Connection) -> None:
    handler = Handler()

    with pytest.raises(UsageError, match="the rollback removes it"):
        worker.within(connection, "m1", handler, policy=Policy(final_errors=(ValueError,)))

    assert handler.starts == 0
    assert not connection.in_transaction


def test_the_same_key_with_another_payload_is_refused(worker: Worker, connection: sqlite3.Connection) -> None:
    handler = Handler()

    with connection:
        worker.within(connection, "m1", handler, payload={"amount": 10})
        worker.within(connection, "m1", handler, payload={"amount": 10})
        with pytest.raises(KeyReused):
            worker.within(connection, "m1", handler, payload={"amount": 11})

    assert handler.starts == 1


def test_two_tenants_may_use_the_same_key(worker: Worker, connection: sqlite3.Connection) -> None:
    tenants = ("north", "south", "north")

    outcomes = [worker.within(connection, "m1", Handler(), scope=tenant) for tenant in tenants]

    assert [outcome.replayed for outcome in outcomes] == [False, False, True]


def test_a_bypass_runs_it_once_more(worker: Worker, connection: sqlite3.Connection, path: Path) -> None:
    with connection:
        worker.within(connection, "m1", lambda: add(connection))
        worker.within(connection, "m1", lambda: add(connection), bypass=True)
        worker.within(connection, "m1", lambda: add(connection))

    assert balance(path) == 20


def test_a_handler_that_delivers_its_own_key_is_told(connection: sqlite3.Connection) -> None:
    worker = Blocking(never_opened)

    with pytest.raises(InsideItself), connection:
        worker.within(connection, "m1", lambda: worker.within(connection, "m1", Handler()))


def test_deliveries_of_other_keys_may_be_inside_of_each_other(connection: sqlite3.Connection, path: Path) -> None:
    worker = Blocking(never_opened)

    with connection:
        worker.within(connection, "m1", lambda: worker.within(connection, "m2", lambda: add(connection)).value)

    assert (balance(path), records(path)) == (10, ["m1", "m2"])


FORMS: dict[str, Callable[[sqlite3.Connection], None]] = {
    "rows by name": lambda connection: setattr(connection, "row_factory", sqlite3.Row),
    "dictionaries": lambda connection: setattr(connection, "row_factory", lambda cursor, row: {"a row": row}),
    "bytes": lambda connection: setattr(connection, "text_factory", bytes),
    "shouted": lambda connection: setattr(connection, "text_factory", lambda text: text.decode().upper()),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_in_which_the_caller_wants_rows_and_text_does_not_matter_and_stays(
    worker: Worker, connection: sqlite3.Connection, form: str
) -> None:
    FORMS[form](connection)
    wanted = connection.row_factory, connection.text_factory

    with connection:
        outcomes = [worker.within(connection, "m1", Handler("Receipt")) for _ in range(2)]

    assert [(one.replayed, one.value) for one in outcomes] == [(False, "Receipt"), (True, "Receipt")]
    assert (connection.row_factory, connection.text_factory) == wanted


def test_a_connection_of_a_class_of_the_callers_own_will_do(worker: Worker, path: Path) -> None:
    class Traced(sqlite3.Connection):
        """As tracing libraries have it."""

    with connected(path, factory=Traced) as connection, connection:
        worker.within(connection, "m1", lambda: add(connection))

    assert records(path) == ["m1"]


def test_what_is_no_connection_is_refused_before_anything_runs(worker: Worker) -> None:
    handler = Handler()
    wrong: Any = object()

    with pytest.raises(UsageError, match="no driver is known"):
        worker.within(wrong, "m1", handler)

    assert handler.starts == 0


def test_a_handler_without_a_result_that_ends_the_transaction_is_told(
    path: Path, connection: sqlite3.Connection
) -> None:
    guard = Guard(never_opened)

    with pytest.raises(UsageError, match="ended the transaction by itself"):
        guard.within(connection).run("credit", "m1", connection.rollback)

    assert balance(path) == 0


def test_a_handler_that_commits_is_told_that_its_record_stays(path: Path, connection: sqlite3.Connection) -> None:
    guard = Guard(never_opened)

    def impatient() -> None:
        connection.execute("UPDATE wallet SET balance = balance + 100")
        connection.commit()
        connection.execute("UPDATE wallet SET balance = balance + 1000")

    with pytest.raises(
        UsageError, match="the next delivery is answered as done, and what was not committed is not done again"
    ):
        guard.within(connection).run("credit", "m1", impatient)
    connection.rollback()

    assert balance(path) == 100
    assert guard.within(connection).run("credit", "m1", pytest.fail).replayed
