"""Many deliveries on the same few rows, where the database lets one of them commit: none of them uses up its tries."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pymysql
import pytest

from onefold import TX, Guard, Policy
from onefold.stores.mysql.urls import settings_of

TABLE = "CREATE TABLE hot (id integer PRIMARY KEY, balance integer NOT NULL)"
ROWS = "INSERT INTO hot VALUES (0, 0), (1, 0)"
READ = "SELECT balance FROM hot WHERE id = %s"
WRITE = "UPDATE hot SET balance = %s WHERE id = %s"


def deliver_all(url: str, add: Callable[[Any, int], None], workers: int, messages: int) -> int:
    """Deliver the messages, by as many threads: how many of them ran and were committed."""
    joint = "&" if "?" in url else "?"
    with Guard(f"{url}{joint}isolation=serializable&pool_size={workers}", policy=Policy(keep="1h")) as guard:

        @guard.transactional("credit", key="message")
        def credit(message: str, *, tx: Any = TX) -> None:
            add(tx, int(message) % 2)

        with ThreadPoolExecutor(workers) as threads:
            outcomes = list(threads.map(lambda number: credit.outcome(str(number)), range(messages)))
    return sum(not outcome.replayed for outcome in outcomes)


SIZES = [pytest.param(12, 40), pytest.param(30, 150, marks=pytest.mark.more)]


@pytest.mark.parametrize(("workers", "messages"), SIZES)
def test_on_hot_rows_of_postgres_every_delivery_is_committed(postgres_url: str, workers: int, messages: int) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute(TABLE)
        connection.execute(ROWS)

    def add(tx: psycopg.Connection[Any], row: int) -> None:
        found = tx.execute(READ, (row,)).fetchone()
        assert found is not None
        tx.execute(WRITE, (found[0] + 1, row))

    assert deliver_all(postgres_url, add, workers, messages) == messages

    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT sum(balance) FROM hot").fetchone() == (messages,)


@pytest.mark.parametrize(("workers", "messages"), SIZES)
def test_on_hot_rows_of_mariadb_every_delivery_is_committed(mysql_url: str, workers: int, messages: int) -> None:
    settings = settings_of(mysql_url, "pymysql")
    connection = pymysql.connect(
        host=settings.host,
        port=settings.port,
        user=settings.user,
        password=settings.password,
        database=settings.database,
    )
    with connection, connection.cursor() as cursor:
        cursor.execute(TABLE)
        cursor.execute(ROWS)
        connection.commit()

        def add(tx: Any, row: int) -> None:
            with tx.cursor() as cursor:
                cursor.execute(READ, (row,))
                cursor.execute(WRITE, (cursor.fetchone()[0] + 1, row))

        assert deliver_all(mysql_url, add, workers, messages) == messages

        cursor.execute("SELECT sum(balance) FROM hot")
        assert cursor.fetchone() == (messages,)
