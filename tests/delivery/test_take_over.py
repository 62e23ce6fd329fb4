"""A hand-made table is taken over without downtime: old workers, new ones and an import at once, effects counted apart.

The old code is what many teams have: it writes a row with the key of a message into `processed_messages`, in the
transaction of its effect. The new code has a guard with `migrate_from`, and goes on writing the row for as long as old
workers run. Each effect is a row in a table without any constraint, so that nothing but the code keeps it from
happening twice.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

from onefold import Guard, HandMadeTable
from onefold.maintenance.imports import Rows, Tally, importing
from onefold.maintenance.table import Table
from onefold.stores.table_reader import reading
from tests.support import PATIENCE

MESSAGES = [f"m{number:03}" for number in range(48)]


class Shop(NamedTuple):
    """A database with a hand-made table."""

    url: str
    connect: Callable[[], Any]
    begin: str
    mark: str

    def send(self, connection: Any, statement: str, *values: Any) -> list[Any]:
        cursor = connection.cursor()
        cursor.execute(statement.replace("%s", self.mark), values)
        rows = cursor.fetchall() if cursor.description else []
        cursor.close()
        return list(rows)

    def once(self, statement: str) -> list[Any]:
        with closing(self.connect()) as connection:
            rows = self.send(connection, statement)
            connection.commit()
            return rows

    def do(self, connection: Any, message: str, *, with_row: bool = True) -> None:
        """Have the effect, and record it in the hand-made table, in the transaction that is open."""
        if with_row:
            self.send(connection, "INSERT INTO processed_messages (message_id) VALUES (%s)", message)
        self.send(connection, "INSERT INTO effects VALUES (%s)", message)

    def effects(self) -> Counter[str]:
        return Counter(message for (message,) in self.once("SELECT message_id FROM effects"))

    @property
    def table(self) -> HandMadeTable:
        return HandMadeTable(self.url, "processed_messages", key="message_id", operation="credit", at="processed_at")


@pytest.fixture(params=["postgres", "mysql", "sqlite"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    if request.param == "sqlite":
        url, path = f"sqlite:///{tmp_path}/shop.db", str(tmp_path / "shop.db")
        found = Shop(url, lambda: sqlite3.connect(path, timeout=PATIENCE, isolation_level=None), "BEGIN IMMEDIATE", "?")
    elif request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        found = Shop(url, lambda: psycopg.connect(url), "", "%s")
    else:
        url = request.getfixturevalue("mysql_url")
        parts = urlsplit(url)
        login: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
        login |= {"password": parts.password or "", "database": parts.path[1:]}
        found = Shop(url, lambda: pymysql.connect(**login), "", "%s")
    found.once(
        "CREATE TABLE processed_messages (message_id VARCHAR(64) PRIMARY KEY, "
        "processed_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP)"
    )
    found.once("CREATE TABLE effects (message_id VARCHAR(64))")
    return found


# Handles one delivery. It raises if the message has to be delivered again.
Handle = Callable[[Any, str], None]


def old_worker(shop: Shop) -> Handle:
    """The code of before: look, have the effect and record it in one transaction; a conflict is a duplicate."""

    def handle(connection: Any, message: str) -> None:
        if shop.begin:
            shop.send(connection, shop.begin)
        if not shop.send(connection, "SELECT 1 FROM processed_messages WHERE message_id = %s", message):
            shop.do(connection, message)
        connection.commit()

    return handle


def within(shop: Shop, guard: Guard, *, with_row: bool) -> Handle:
    def handle(connection: Any, message: str) -> None:
        if shop.begin:
            shop.send(connection, shop.begin)
        guard.within(connection).run("credit", message, lambda: shop.do(connection, message, with_row=with_row))
        connection.commit()

    return handle


def transactional(shop: Shop, guard: Guard, *, with_row: bool) -> Handle:
    @guard.transactional("credit", key="message")
    def credit(message: str, *, tx: Any) -> None:
        shop.do(tx, message, with_row=with_row)

    return lambda _connection, message: credit(message)  # type: ignore[call-arg]


def claiming(shop: Shop, guard: Guard, *, with_row: bool) -> Handle:
    """The effect is in a transaction of the handler's own, apart from the record."""

    def handle(connection: Any, message: str) -> None:
        def credit() -> None:
            if shop.begin:
                shop.send(connection, shop.begin)
            try:
                shop.do(connection, message, with_row=with_row)
            except Exception:
                # Before the guard releases its claim: an open transaction would keep SQLite's only writer.
                connection.rollback()
                raise
            connection.commit()

        guard.run("credit", message, credit)

    return handle


NEW_WORKERS = [within, transactional, claiming]


def deliver(shop: Shop, messages: list[str], workers: list[Handle]) -> None:
    """Deliver every message to every worker, in an order of its own, and again until it is acknowledged."""
    ready = threading.Barrier(len(workers), timeout=PATIENCE)
    left = dict.fromkeys(range(len(workers)), "it has not begun")

    def work(number: int, handle: Handle) -> None:
        waiting = list(messages)
        random.Random(number).shuffle(waiting)
        with closing(shop.connect()) as connection:
            ready.wait()
            ends = time.monotonic() + PATIENCE
            while waiting and time.monotonic() < ends:
                message = waiting.pop(0)
                try:
                    handle(connection, message)
                except Exception as error:
                    connection.rollback()
                    left[number] = repr(error)
                    waiting.append(message)
        if not waiting:
            del left[number]

    threads = [threading.Thread(target=work, args=one, daemon=True) for one in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert left == {}


def import_rows(shop: Shop, store: Any) -> Tally:
    tally = Tally()
    with reading(shop.url) as reader:
        table = Table("processed_messages", "message_id", at="processed_at")
        for _ in importing(Rows(reader, table, "credit"), store, tally=tally):
            pass
    return tally


@pytest.mark.parametrize("new_worker", NEW_WORKERS)
def test_a_take_over_without_downtime_doubles_nothing_and_loses_nothing(shop: Shop, new_worker: Any) -> None:
    before, during, after = MESSAGES[:24], MESSAGES[24:36], MESSAGES[36:]
    # Before: only the old code.
    deliver(shop, before, [old_worker(shop)] * 2)

    # 1. New workers start, with migrate_from; old ones still run, and everything is delivered to both.
    with Guard(shop.url, migrate_from=shop.table) as guard:
        # Its tables are made before the race begins.
        assert guard.read("credit", "nothing") is None
        both = [old_worker(shop), new_worker(shop, guard, with_row=True)] * 2
        deliver(shop, before[:12] + during, both)
        assert shop.effects() == Counter(before + during)

        # 2. No old worker is left, so that nobody needs the rows. The import runs beside the deliveries.
        tallies: list[Tally] = []
        importer = threading.Thread(target=lambda: tallies.append(import_rows(shop, guard.store)), daemon=True)
        importer.start()
        deliver(shop, during + after, [new_worker(shop, guard, with_row=False)] * 3)
        importer.join(PATIENCE)
        assert tallies[0].unusable == 0

    # 3. Without migrate_from, and without the table.
    shop.once("DROP TABLE processed_messages")
    with Guard(shop.url) as guard:
        deliver(shop, MESSAGES, [new_worker(shop, guard, with_row=False)] * 2)

    assert shop.effects() == Counter(before + during + after)


@pytest.fixture
def guard(shop: Shop) -> Iterator[Guard]:
    with Guard(shop.url, migrate_from=shop.table) as guard:
        yield guard


def test_without_the_row_an_old_worker_does_it_again(shop: Shop, guard: Guard) -> None:
    """What the documentation warns of: an old worker knows nothing but the table."""
    deliver(shop, ["m1"], [within(shop, guard, with_row=False)])
    deliver(shop, ["m1"], [old_worker(shop)])

    assert shop.effects() == Counter(m1=2)


def test_what_an_old_worker_is_doing_apart_from_its_row_is_not_known(shop: Shop, guard: Guard) -> None:
    """What nobody can know: the old code has had its effect, and has not yet recorded it."""
    shop.once("INSERT INTO effects VALUES ('m1')")

    deliver(shop, ["m1"], [claiming(shop, guard, with_row=True)])

    assert shop.effects() == Counter(m1=2)


def test_in_one_transaction_with_its_row_an_old_worker_is_noticed(shop: Shop, guard: Guard) -> None:
    if shop.begin:
        pytest.skip("SQLite has one writer: two transactions with effects do not overlap")
    with closing(shop.connect()) as old:
        # The old worker is in the middle of its transaction.
        shop.do(old, "m1")
        new = threading.Thread(target=deliver, args=[shop, ["m1"], [within(shop, guard, with_row=True)]], daemon=True)
        new.start()
        # It is blocked by the row of the other transaction, or has not come there yet: both end alike.
        old.commit()
        new.join(PATIENCE)

    assert shop.effects() == Counter(m1=1)
