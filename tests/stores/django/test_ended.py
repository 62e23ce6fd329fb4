"""A handler that ends the transaction of a Django connection is told, whatever it does behind Django's back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("django")

from django.db import connections, transaction

from onefold import Guard, UsageError
from tests.stores.django.project import alias_of, ledger_at, project
from tests.stores.sql.hidden_endings import ENDINGS, PREPARED
from tests.stores.sqlalchemy.wallet import Ledger

CREDIT = "UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'"


@pytest.fixture(scope="module", autouse=True)
def _project() -> Iterator[None]:
    with project():
        yield


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    ledger = ledger_at(request, request.param)
    for statement in PREPARED[ledger.database]:
        ledger.execute(statement)
    yield ledger
    ledger.close()


@pytest.fixture
def connection(ledger: Ledger) -> Iterator[Any]:
    # A context for TLS is slow to make, and the server has none.
    options = {"OPTIONS": {"ssl_disabled": True}} if ledger.database == "mariadb" else {}
    with alias_of(ledger.database, ledger.address, **options) as alias:
        yield connections[alias]


def run(connection: Any, *statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def _raw_rollback(connection: Any) -> None:
    connection.connection.rollback()
    run(connection, CREDIT)


def _raw_commit(connection: Any) -> None:
    connection.connection.commit()
    run(connection, CREDIT)


WAYS: dict[str, Callable[[Any], None]] = {
    "close()": lambda connection: connection.close(),
    "ROLLBACK; BEGIN; write": lambda connection: run(connection, "ROLLBACK", "BEGIN", CREDIT),
    "COMMIT; BEGIN; write": lambda connection: run(connection, "COMMIT", "BEGIN", CREDIT),
    "the driver's rollback() and write": _raw_rollback,
    "the driver's commit() and write": _raw_commit,
}

RESULTS = {"without a result": None, "with a result": "receipt"}


def _within(guard: Guard, connection: Any, key: str, handler: Callable[[], Any]) -> None:
    with transaction.atomic(using=connection.alias):
        guard.within(connection).run("credit", key, handler)


def _transactional(guard: Guard, connection: Any, key: str, handler: Callable[[], Any]) -> None:
    @guard.transactional("credit", key="key")
    def credit(key: str, *, tx: Any) -> Any:
        return handler()

    credit(key)


MODES = {"within": _within, "transactional": _transactional}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_handler_that_ends_the_transaction_is_told(
    connection: Any, ledger: Ledger, mode: Callable[..., None]
) -> None:
    untold = {}
    hidden = {name: _says((*statements, CREDIT)) for name, statements in ENDINGS[ledger.database].items()}
    ways = WAYS | hidden | ({"DDL and write": _changes_a_table} if connection.vendor == "mysql" else {})
    with Guard(f"django://{connection.alias}") as guard:
        for name, way in ways.items():
            for case, result in RESULTS.items():
                try:
                    mode(guard, connection, f"{name} {case}", _ending(connection, way, result))
                except UsageError:
                    pass
                except Exception as error:
                    untold[name, case] = repr(error)
                else:
                    untold[name, case] = "nothing"
                connection.close()

        mode(guard, connection, "honest", _ending(connection, _uses_a_block, "receipt"))

    assert not untold, untold


def _says(statements: tuple[str, ...]) -> Callable[[Any], None]:
    return lambda connection: run(connection, *statements)


def _changes_a_table(connection: Any) -> None:
    run(connection, "CREATE TABLE IF NOT EXISTS made_by_a_handler (number INTEGER)", CREDIT)


def _uses_a_block(connection: Any) -> None:
    with suppress(ValueError), transaction.atomic(using=connection.alias):
        run(connection, CREDIT)
        raise ValueError("undone")
    with transaction.atomic(using=connection.alias):
        run(connection, CREDIT)


def _ending(connection: Any, way: Callable[[Any], None], result: str | None) -> Callable[[], Any]:
    def handler() -> Any:
        run(connection, CREDIT)
        way(connection)
        return result

    return handler


@pytest.mark.parametrize("ledger", ["postgres", "mariadb"], indirect=True)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_what_a_handler_writes_after_a_rollback_of_its_own_is_undone(
    connection: Any, ledger: Ledger, mode: Callable[..., None]
) -> None:
    with Guard(f"django://{connection.alias}") as guard, pytest.raises(UsageError):
        mode(guard, connection, "m1", _ending(connection, _says(("ROLLBACK", CREDIT)), None))

    assert (ledger.balance, ledger.records) == (0, [])


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_an_honest_handler_with_blocks_of_its_own_is_not_refused(
    connection: Any, ledger: Ledger, mode: Callable[..., None]
) -> None:
    with Guard(f"django://{connection.alias}") as guard:
        for case, result in RESULTS.items():
            mode(guard, connection, case, _ending(connection, _uses_a_block, result))

    assert (ledger.balance, ledger.records) == (40, sorted(RESULTS))
