"""The MySQL store on MariaDB: the whole contract sync and async, and on the way that only MySQL needs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from onefold import StoreUnavailable, UsageError
from onefold._concurrency.generators import run
from onefold._model import Address, Claim, Close, Ending, Entry, State
from onefold.stores import mysql
from onefold.stores.base import Query
from onefold.stores.mysql import AsyncMysqlStore, MysqlStore, apply_schema, describe_schema
from onefold.stores.mysql.dialect import MARIADB, MYSQL, Mysql
from onefold.stores.mysql.pymysql.connection import PymysqlConnection
from onefold.stores.mysql.statements.literals import filled
from onefold.stores.sql.dialect import SqlRequest
from onefold.stores.sql.records import VERSION
from onefold.testing import AsyncStoreContract, StoreContract
from services.proxy import Proxy
from tests.stores.mysql.wallet import DAILY_TYPES, Ledger, Worker, connected
from tests.support import PATIENCE, Handler


def entry(key: str = "key", **fields: Any) -> Entry:
    usual: dict[str, Any] = {
        "address": Address("", "charge", key),
        "token": os.urandom(16),
        "lease": 3_600.0,
        "ttl": 86_400.0,
    }
    return Entry(**(usual | fields))


def claim_of(entry: Entry) -> Claim:
    return Claim(entry.address, entry.token, entry.lease, entry.ttl)


DONE = Ending(state=State.DONE, ttl=3_600.0, result=b"result")


class TestContract(StoreContract):
    """From threads, and from processes."""

    @pytest.fixture(autouse=True)
    def set_up(self, mysql_url: str) -> None:
        self.url = mysql_url

    def process_source(self) -> Any:
        return self.url

    def open_store(self) -> MysqlStore:
        return MysqlStore(self.url)


@pytest.mark.more
class TestAsyncContract(AsyncStoreContract):
    """From tasks, and from processes."""

    @pytest.fixture(autouse=True)
    def set_up(self, mysql_url: str) -> None:
        self.url = mysql_url

    def process_source(self) -> Any:
        return self.url

    def open_store(self) -> AsyncMysqlStore:
        return AsyncMysqlStore(self.url)


@pytest.mark.more
class TestContractWithoutReturning(StoreContract):
    """MySQL's way, as far as MariaDB can show it."""

    @pytest.fixture(autouse=True)
    def set_up(self, mysql_url: str) -> None:
        self.url = mysql_url

    def process_source(self) -> Any:
        return partial(MysqlStore, self.url, dialect=MYSQL)

    def open_store(self) -> MysqlStore:
        return MysqlStore(self.url, dialect=MYSQL)


@pytest.mark.more
class TestAsyncContractWithoutReturning(AsyncStoreContract):
    """MySQL's way, async."""

    @pytest.fixture(autouse=True)
    def set_up(self, mysql_url: str) -> None:
        self.url = mysql_url

    def process_source(self) -> Any:
        return partial(AsyncMysqlStore, self.url, dialect=MYSQL)

    def open_store(self) -> AsyncMysqlStore:
        return AsyncMysqlStore(self.url, dialect=MYSQL)


# What it costs.


@pytest.fixture(params=[MARIADB, MYSQL], ids=["with RETURNING", "without RETURNING"])
def dialect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mysql:
    found: Mysql = request.param
    monkeypatch.setattr(mysql, "dialect_of", lambda _version: found)
    return found


@pytest.fixture
def ledger(mysql_url: str) -> Ledger:
    return Ledger(mysql_url)


@pytest.mark.parametrize("worker_type", DAILY_TYPES)
def test_a_new_key_is_two_round_trips_and_a_duplicate_is_one(
    ledger: Ledger, worker_type: type[Worker], dialect: Mysql
) -> None:
    with Proxy(ledger.url) as proxy:
        worker = worker_type(proxy.url())
        worker.run("earlier", Handler())
        with proxy.counting() as new:
            worker.run("pay_1", Handler("paid"))
        with proxy.counting() as duplicate:
            worker.run("pay_1", Handler("paid"))
        worker.close()

    assert new.trips == 2
    assert duplicate.trips == (1 if dialect.insert_returns else 2)


@pytest.mark.parametrize("worker_type", DAILY_TYPES)
def test_a_batch_of_500_asks_once_and_ends_with_one_message(
    ledger: Ledger, worker_type: type[Worker], dialect: Mysql
) -> None:
    messages = [f"message-{number:03}" for number in range(500)]

    def handle(message: str) -> str:
        if message.endswith("7"):
            raise ValueError(message)
        return message.upper()

    with Proxy(ledger.url) as proxy:
        worker = worker_type(f"{proxy.url()}?purge=no")
        worker.run("earlier", Handler())
        with proxy.counting() as first:
            outcomes = worker.run_batch(messages, handle)
        with proxy.counting() as second:
            again = worker.run_batch(messages, handle)
        worker.close()

    assert [isinstance(one, ValueError) for one in outcomes] == [message.endswith("7") for message in messages]
    assert sum(1 for one in again if getattr(one, "replayed", False)) == 450
    # A claim in which everything is known costs MySQL a read, too.
    claims = 1 if dialect.insert_returns else 2
    assert (first.trips, second.trips) == (claims + 1, claims + 1)


@pytest.mark.parametrize("open_store", [MysqlStore, partial(MysqlStore, dialect=MYSQL)])
def test_a_batch_of_large_results_is_sent_in_batches_and_nothing_is_cut(
    ledger: Ledger, open_store: Callable[[str], MysqlStore]
) -> None:
    """30 MB in all, twice as many in hexadecimal digits, where the server takes 16 MB in a packet."""
    sizes = [0, 1, 300, 65_535, 65_536, 100_000, 1_048_576, 3_000_000]
    results = [os.urandom(size) for size in sizes] + [None] + [os.urandom(200_000)] * 120
    entries = [entry(f"key-{number:03}", notes=result) for number, result in enumerate(results)]
    endings = [Ending(state=State.DONE, ttl=3_600.0, result=result, notes=result) for result in results]

    with closing(open_store(ledger.url)) as store:
        assert store.claim_all(entries[:10]) == [None] * 10
        claimed = [store.read(one.address) for one in entries[:10]]
        store.claim_all([entry(f"key-{number:03}", token=one.token) for number, one in enumerate(entries)])
        assert store.close_all([Close(claim_of(one), by) for one, by in zip(entries, endings, strict=True)]) == [
            True
        ] * len(entries)
        finished = [store.read(one.address) for one in entries]

    assert [one and one.notes for one in claimed] == results[:10]
    assert [one and one.result for one in finished] == results
    assert [one and one.notes for one in finished] == results


def test_a_batch_of_strangers_and_owners_is_told_apart(ledger: Ledger, dialect: Mysql) -> None:
    mine, done, gone, other = (entry(key) for key in ("mine", "done", "gone", "other"))
    stranger = entry("other")
    claims = [claim_of(one) for one in (mine, done, gone, stranger)]

    with closing(MysqlStore(ledger.url)) as store:
        store.claim_all([mine, done, other])
        store.finish(claim_of(done), DONE)

        extended = store.extend_all(claims)
        finished = store.close_all([Close(claim, DONE) for claim in claims])
        released = store.close_all([Close(claim) for claim in claims])

    assert extended == [True, False, False, False]
    assert finished == [True, True, False, False]
    assert released == [True, True, True, False]
    assert ledger.records == ["other"]


# The schema.


def test_many_that_start_together_make_one_schema(ledger: Ledger) -> None:
    start = threading.Barrier(8, timeout=PATIENCE)

    def claim() -> bool:
        with closing(MysqlStore(ledger.url)) as store:
            start.wait()
            return store.claim(entry()) is None

    with ThreadPoolExecutor(8) as threads:
        won = [one.result(PATIENCE) for one in [threads.submit(claim) for _ in range(8)]]

    assert sorted(won) == [False] * 7 + [True]
    assert ledger.rows("SELECT version, usable_from FROM onefold_schema") == [(VERSION, 1)]


def test_the_previous_version_migrates_forward_and_both_work_on_it(ledger: Ledger) -> None:
    for statement in MYSQL.versions[0]:
        ledger.execute(statement)
    careful = MysqlStore(f"{ledger.url}?auto_schema=no")
    assert careful.claim(entry("by the old form")) is None
    assert ledger.rows("SELECT version FROM onefold_schema") == [(1,)]

    with closing(careful), closing(MysqlStore(ledger.url)) as store:
        assert store.claim(entry("by the new one")) is None
        assert careful.claim(entry("by the old one")) is None

    assert ledger.rows("SELECT version FROM onefold_schema") == [(VERSION,)]
    assert len(ledger.records) == 3


def test_a_schema_that_was_left_half_made_is_completed(ledger: Ledger) -> None:
    for done in range(4):
        ledger.execute("DROP TABLE IF EXISTS onefold_records, onefold_schema")
        for statement in [one for version in MYSQL.versions for one in version][:done]:
            ledger.execute(statement)

        with closing(MysqlStore(ledger.url)) as store:
            assert store.claim(entry()) is None
        assert ledger.rows("SELECT version FROM onefold_schema") == [(VERSION,)]


@pytest.mark.parametrize("worker_type", DAILY_TYPES)
def test_without_auto_schema_missing_tables_are_not_made(ledger: Ledger, worker_type: type[Worker]) -> None:
    worker, handler = worker_type(f"{ledger.url}?auto_schema=no"), Handler()

    with pytest.raises(StoreUnavailable, match="`onefold schema --store URL --apply`"):
        worker.run("pay_1", handler)
    worker.close()

    assert handler.starts == 0
    assert ledger.tables == {"wallet", "payments"}


def test_the_schema_command_describes_and_applies(ledger: Ledger) -> None:
    described = describe_schema(ledger.url)
    said = [apply_schema(ledger.url), apply_schema(ledger.url)]

    assert "CREATE TABLE IF NOT EXISTS onefold_records" in described
    assert ["created Onefold's tables" in said[0][0], f"exist, in version {VERSION}" in said[1][0]] == [True, True]
    made = ledger.rows("SHOW CREATE TABLE onefold_records")
    ledger.execute("DROP TABLE onefold_records, onefold_schema")
    for statement in described.split(";\n")[:-1]:
        ledger.execute(statement)
    assert ledger.rows("SHOW CREATE TABLE onefold_records") == made
    with closing(MysqlStore(f"{ledger.url}?auto_schema=no")) as store:
        assert store.claim(entry()) is None


# The plans.


def test_a_page_and_a_purge_cost_what_they_give(ledger: Ledger) -> None:
    with closing(MysqlStore(ledger.url)) as store:
        store.claim_all([entry(f"key-{number:04}") for number in range(1_000)])
    ledger.execute("ANALYZE TABLE onefold_records")
    statement, values = MARIADB.page(Query(after=Address("", "charge", "key-0500")), 10)

    page = explained(ledger, filled(SqlRequest(statement, values)))
    purge = explained(ledger, filled(SqlRequest(MARIADB.remove_expired, {"limit": 10})))

    assert [(table, access, index) for table, access, index in page] == [("onefold_records", "range", "PRIMARY")]
    assert ("onefold_records", "range", "onefold_records_expires") in purge
    assert ("onefold_records", "eq_ref", "PRIMARY") in purge


def explained(ledger: Ledger, statement: str) -> list[tuple[Any, ...]]:
    return [(table, access, index) for _, _, table, access, _, index, *_ in ledger.rows(f"EXPLAIN {statement}")]


def test_pages_of_records_follow_each_other_whole(ledger: Ledger) -> None:
    addresses = [
        Address(scope, operation, key)
        for scope in ("", "a", "b")
        for operation in ("x", "y")
        for key in ("1", "2", "3")
    ]
    with closing(MysqlStore(ledger.url)) as store:
        store.claim_all([entry(address=address) for address in addresses])
        found: list[Address] = []
        while page := store.browse(Query(after=found[-1] if found else None), 4):
            found += [one.address for one in page]

    assert found == addresses


def test_a_part_of_an_address_that_is_too_long_is_refused_and_never_cut(ledger: Ledger) -> None:
    with closing(MysqlStore(ledger.url)) as store:
        for address in (Address("", "charge", "k" * 256), Address("", "o" * 129, "k"), Address("s" * 256, "o", "k")):
            with pytest.raises(UsageError, match="and the limit is"):
                store.claim(entry(address=address))

    assert ledger.records == []


def test_the_character_set_of_the_connection_does_not_matter(ledger: Ledger) -> None:
    with closing(MysqlStore(ledger.url)) as store, connected(ledger.url, autocommit=True) as connection:
        mine = entry()
        store.claim(mine)
        with connection.cursor() as cursor:
            cursor.execute("SET character_set_connection = utf16, collation_connection = utf16_bin")

        assert run(MARIADB.extend(claim_of(mine)), PymysqlConnection(connection)) is True
        assert run(MARIADB.extend_all([claim_of(mine)]), PymysqlConnection(connection)) == [True]


def test_a_person_can_read_the_records(ledger: Ledger) -> None:
    with closing(MysqlStore(ledger.url)) as store:
        store.claim(entry("pay_7f3a", address=Address("", "charge", "pay_7f3a")))

    rows = ledger.rows(
        "SELECT CONVERT(operation USING utf8mb4), CONVERT(`key` USING utf8mb4), CONVERT(state USING utf8mb4), "
        "ABS(TIMESTAMPDIFF(SECOND, FROM_UNIXTIME(changed), NOW())) < 600 FROM onefold_records"
    )

    assert rows == [("charge", "pay_7f3a", "running", 1)]


def test_a_closed_store_may_be_used_again(ledger: Ledger) -> None:
    store = MysqlStore(ledger.url)
    mine = entry()
    assert store.claim(mine) is None
    store.close()

    assert store.finish(claim_of(mine), DONE)
    store.close()
