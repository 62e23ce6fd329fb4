"""What a handler leaves of its session: a record of a store that was opened by a URL never goes anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from onefold.stores.sql.records import located
from tests.stores.mysql.wallet import WORKER_TYPES, Ledger, Working
from tests.stores.mysql.wallet import Worker as MysqlWorker
from tests.stores.postgres.tools import DRIVERS, Hand, Worker, another, rows

ELSEWHERE = "onefold_elsewhere"


@pytest.fixture
def url(postgres_url: str) -> Iterator[str]:
    with another(postgres_url) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {ELSEWHERE} CASCADE; CREATE SCHEMA {ELSEWHERE}".encode())
        yield postgres_url
        connection.execute(f"DROP SCHEMA {ELSEWHERE} CASCADE".encode())


@pytest.fixture(params=DRIVERS)
def worker(request: pytest.FixtureRequest, url: str) -> Iterator[Worker]:
    worker = request.param(url)
    yield worker
    worker.close()


@pytest.fixture
def ledger(mysql_url: str) -> Iterator[Ledger]:
    ledger = Ledger(mysql_url)
    ledger.execute(f"CREATE OR REPLACE DATABASE {ELSEWHERE}")
    yield ledger
    ledger.execute(f"DROP DATABASE {ELSEWHERE}")


@pytest.fixture(params=WORKER_TYPES)
def mysql_worker(request: pytest.FixtureRequest, ledger: Ledger) -> Iterator[MysqlWorker]:
    worker = request.param(ledger.url)
    yield worker
    worker.close()


async def go_elsewhere(hand: Hand) -> str:
    await hand.run(f"SET search_path TO {ELSEWHERE}")
    return "elsewhere"


async def stay(_hand: Hand) -> None:
    pass


def has_tables_too(url: str) -> None:
    with another(url) as connection:
        for table in ("onefold_records", "onefold_schema"):
            connection.execute(f"CREATE TABLE {ELSEWHERE}.{table} (LIKE public.{table} INCLUDING ALL)".encode())


@pytest.mark.parametrize("is_there", [False, True], ids=["no tables there", "tables there"])
def test_a_search_path_that_a_handler_leaves_takes_no_record_along(worker: Worker, url: str, is_there: bool) -> None:
    worker.transactional("first", stay)
    if is_there:
        has_tables_too(url)

    outcomes = [worker.transactional(key, go_elsewhere) for key in ("m1", "m2", "m2", "m1")]

    assert [(one.value, one.replayed) for one in outcomes] == [
        *[("elsewhere", False)] * 2,
        *[("elsewhere", True)] * 2,
    ]
    assert rows(url, "SELECT key FROM public.onefold_records ORDER BY key") == [("first",), ("m1",), ("m2",)]
    if is_there:
        assert rows(url, f"SELECT key FROM {ELSEWHERE}.onefold_records") == []


def test_a_search_path_of_one_transaction_is_as_good(worker: Worker, url: str) -> None:
    async def for_now(hand: Hand) -> Any:
        await hand.run(f"SET LOCAL search_path TO {ELSEWHERE}")
        return (await hand.run("SELECT current_schema()"))[0][0]

    outcomes = [worker.transactional("m1", for_now) for _ in range(2)]

    assert [(one.value, one.replayed) for one in outcomes] == [(ELSEWHERE, False), (ELSEWHERE, True)]
    assert rows(url, "SELECT key FROM public.onefold_records") == [("m1",)]


@pytest.mark.parametrize("name", ["it's", 'the "new" one', "100%", ":state", "Ünï-code"])
def test_the_tables_are_where_the_url_says_whatever_that_is_called(
    worker: Worker, url: str, request: pytest.FixtureRequest, name: str
) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    with another(url) as connection:
        connection.execute(f"CREATE SCHEMA {quoted}".encode())
        connection.execute(
            f"ALTER ROLE CURRENT_USER IN DATABASE {database_of(url)} SET search_path TO {quoted}".encode()
        )
    try:
        outcomes = [worker.transactional("m1", go_elsewhere) for _ in range(2)]
        assert [one.replayed for one in outcomes] == [False, True]
        assert rows(url, f"SELECT key FROM {quoted}.onefold_records") == [("m1",)]
    finally:
        with another(url) as connection:
            connection.execute(f"ALTER ROLE CURRENT_USER IN DATABASE {database_of(url)} RESET ALL".encode())
            connection.execute(f"DROP SCHEMA {quoted} CASCADE".encode())


def database_of(url: str) -> str:
    with another(url) as connection:
        return connection.info.dbname


@pytest.mark.parametrize("is_there", [False, True], ids=["no tables there", "tables there"])
def test_a_database_that_a_handler_goes_to_takes_no_record_along(
    mysql_worker: MysqlWorker, ledger: Ledger, is_there: bool
) -> None:
    def go(_tx: Any = None) -> Working:
        yield f"USE {ELSEWHERE}"
        return "elsewhere"

    def nothing(_tx: Any = None) -> Working:
        yield "SELECT 1"

    mysql_worker.transactional("first", nothing)
    if is_there:
        ledger.execute(f"CREATE TABLE {ELSEWHERE}.onefold_records LIKE onefold_records")

    outcomes = [mysql_worker.transactional(key, go) for key in ("m1", "m2", "m2", "m1")]

    assert [(one.value, one.replayed) for one in outcomes] == [
        *[("elsewhere", False)] * 2,
        *[("elsewhere", True)] * 2,
    ]
    assert ledger.records == ["first", "m1", "m2"]
    if is_there:
        assert ledger.rows(f"SELECT * FROM {ELSEWHERE}.onefold_records") == []


def test_names_are_put_in_front_of_our_tables_and_of_nothing_else() -> None:
    statement = "SELECT onefold_records.key FROM onefold_records, my_onefold_records, onefold_records_due"

    assert located(statement, '"a".') == (
        'SELECT "a".onefold_records.key FROM "a".onefold_records, my_onefold_records, onefold_records_due'
    )
    assert located("to_regclass('onefold_schema')", '"it\'s".') == "to_regclass('\"it''s\".onefold_schema')"
    assert located(statement, "") is statement
