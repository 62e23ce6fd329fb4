"""The PostgreSQL store: its tables, what it costs, how large it gets, and what can be wrong with a server."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import psycopg_pool
import pytest

from onefold import AsyncGuard, Guard, StoreUnavailable, UsageError
from onefold._model import Address, Claim, Close, Ending, Entry, Record, State
from onefold.stores.base import Query
from onefold.stores.postgres import (
    AsyncPostgresStore,
    PostgresStore,
    adopt,
    apply_schema,
    describe_schema,
    open_async_store,
    open_store,
)
from onefold.stores.postgres.dialect import POSTGRES
from onefold.stores.sql.records import VERSION
from services.proxy import Proxy
from services.servers import Server
from tests.stores.postgres.tools import (
    DAILY_DRIVERS,
    SCHEMA,
    Worker,
    add,
    another,
    balance,
    records,
    rows,
    tables,
    through_asyncpg,
)
from tests.stores.sql.versions import REFUSED, STILL_USABLE, TOO_NEW
from tests.support import PATIENCE, Elsewhere, Handler, eventually

DONE = Ending(state=State.DONE, ttl=86_400.0)


@pytest.fixture
def url(postgres_url: str) -> str:
    return postgres_url


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    store = open_store(url)
    yield store
    store.close()


def entry(key: str = "key", **fields: Any) -> Entry:
    usual: dict[str, Any] = {
        "address": Address("", "charge", key),
        "token": os.urandom(16),
        "lease": 30.0,
        "ttl": 86_430.0,
    }
    return Entry(**(usual | fields))


def claim_of(entry: Entry) -> Claim:
    return Claim(entry.address, entry.token, entry.lease, entry.ttl)


def one_line(refused: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(refused.value)
    assert "\n" not in message
    return message


def refused_by(url: str) -> str:
    """What each driver says of this URL, joined; and nothing has run."""
    handler, said = Handler(), []

    async def in_loop(source: str) -> None:
        async with AsyncGuard(source) as guard:
            await guard.run("charge", "key", handler)

    with Guard(url) as guard, pytest.raises(StoreUnavailable) as refused:
        guard.run("charge", "key", handler)
    said.append(one_line(refused))
    for source in (url, through_asyncpg(url)):
        with pytest.raises(StoreUnavailable) as refused:
            asyncio.run(in_loop(source))
        said.append(one_line(refused))
    assert handler.starts == 0
    password = urlsplit(url).password
    assert password is None or all(password not in message for message in said)
    return "\n".join(said)


# The tables.


def test_many_that_start_together_make_one_schema(url: str) -> None:
    stores = [open_store(url) for _ in range(8)]
    start = threading.Barrier(8)

    def claim(store: PostgresStore) -> bool:
        start.wait(PATIENCE)
        return store.claim(entry()) is None

    running = [Elsewhere(lambda store=store: claim(store)) for store in stores]  # type: ignore[misc]

    assert sum(thread.result() for thread in running) == 1
    assert rows(url, "SELECT version, usable_from FROM onefold_schema") == [(VERSION, 1)]
    for store in stores:
        store.close()


def in_version_1(url: str) -> None:
    with another(url) as connection:
        for statement in POSTGRES.versions[0]:
            connection.execute(statement.encode())


def test_tables_of_version_1_are_brought_to_version_2_and_keep_their_records(url: str) -> None:
    in_version_1(url)
    before = entry("before", state=State.DONE, result=b"receipt")
    with closing(open_store(f"{url}?auto_schema=no")) as old:
        # Usable as they are: whoever may not change them works on.
        assert old.claim(before) is None
        assert rows(url, "SELECT version FROM onefold_schema") == [(1,)]

        with closing(open_store(url)) as new:
            found = new.read(before.address)
            assert found is not None
            assert found.result == b"receipt"
            assert rows(url, "SELECT version, usable_from FROM onefold_schema") == [(VERSION, 1)]

            # Both work on one table meanwhile.
            running = entry("running")
            assert old.claim(running) is None
            assert isinstance(new.claim(entry("running")), Record)
            assert new.finish(claim_of(running), DONE)
            assert old.read(running.address) is not None


def test_a_table_of_a_newer_version_is_refused_and_nothing_runs(store: PostgresStore, url: str) -> None:
    store.claim(entry("before"))
    with another(url) as connection:
        connection.execute(TOO_NEW)

    assert f"are of {REFUSED}. Nothing ran. Upgrade Onefold" in refused_by(url)
    assert records(url) == ["before"]


def test_a_newer_version_that_says_so_is_still_usable(store: PostgresStore, url: str) -> None:
    store.claim(entry("before"))
    with another(url) as connection:
        connection.execute(STILL_USABLE)
        connection.execute("ALTER TABLE onefold_records ADD COLUMN later text NOT NULL DEFAULT ''")

    with closing(open_store(url)) as later:
        assert later.claim(entry()) is None
        assert isinstance(later.claim(entry()), Record)


def test_without_auto_schema_missing_tables_are_not_made_and_the_command_is_named(url: str) -> None:
    said = refused_by(f"{url}?auto_schema=no")

    assert said.count("`onefold schema --store URL --apply`") == 3
    assert tables(url) == set()


def test_tables_that_were_dropped_are_made_again(store: PostgresStore, url: str) -> None:
    store.claim(entry())
    with another(url) as connection:
        connection.execute("DROP TABLE onefold_records, onefold_schema")

    assert store.claim(entry()) is None
    assert records(url) == ["key"]


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg", "postgresql+asyncpg"])
def test_the_schema_can_be_applied_by_hand(url: str, scheme: str) -> None:
    own_url = url.replace("postgresql", scheme)

    done = [apply_schema(own_url) for _ in range(2)]

    assert tables(url) == {"onefold_records", "onefold_schema"}
    (line,) = done[0]
    assert line.endswith(f"Onefold's tables exist, version {VERSION}")
    assert str(urlsplit(url).password) not in line


def test_the_schema_that_is_described_is_the_one_that_is_made(url: str) -> None:
    def shape() -> list[Any]:
        return rows(
            url,
            "SELECT relname, relkind, reloptions, (SELECT array_agg(attname || format_type(atttypid, atttypmod) "
            "ORDER BY attnum) FROM pg_attribute WHERE attrelid = pg_class.oid AND attnum > 0), "
            "CASE relkind WHEN 'i' THEN pg_get_indexdef(oid) END "
            "FROM pg_class WHERE relname ~ '^onefold' ORDER BY relname",
        )

    with another(url) as connection:
        connection.execute(describe_schema(url).encode())
        by_hand = shape()
        connection.execute("DROP TABLE onefold_records, onefold_schema")
    apply_schema(url)

    assert shape() == by_hand
    assert len(by_hand) == 5


def test_a_person_can_read_the_records(store: PostgresStore, url: str) -> None:
    charged, sent = entry("pay_7f3a"), entry("mail_1", address=Address("tenant", "send-welcome", "mail_1"))
    store.claim_all([charged, sent])
    store.finish(claim_of(charged), DONE)

    found = rows(
        url,
        "SELECT scope, operation, key, state, now() - to_timestamp(changed) < '10 minutes' "
        "FROM onefold_records ORDER BY key",
    )

    assert found == [("tenant", "send-welcome", "mail_1", "running", True), ("", "charge", "pay_7f3a", "done", True)]


# What can be wrong.


def test_a_wrong_password_is_one_clear_line(url: str) -> None:
    parts = urlsplit(url)
    wrong = url.replace(f":{parts.password}@", ":s3cret-typo@")

    said = refused_by(wrong)

    assert said.count("password") >= 3
    assert said.count("Nothing ran") == 3


def test_a_server_that_is_absent_is_one_clear_line() -> None:
    said = refused_by("postgresql://onefold:s3cret@127.0.0.1:1/shop")

    assert said.count("Is the server up") == 3
    assert said.count("postgresql://onefold@127.0.0.1:1/shop") == 3


def test_a_database_that_does_not_exist_is_one_clear_line(url: str) -> None:
    said = refused_by(urlsplit(url)._replace(path="/nowhere").geturl())

    assert said.count('database "nowhere" does not exist') == 3


@contextmanager
def somebody_else(url: str, rights: str) -> Iterator[str]:
    """The URL of a user who has these rights."""
    name = f"clerk_{uuid.uuid4().hex[:8]}"
    with another(url) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 's3cret'; {rights.format(name)}".encode())
        try:
            parts = urlsplit(url)
            yield parts._replace(netloc=f"{name}:s3cret@{parts.hostname}:{parts.port}").geturl()
        finally:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE usename = %s", (name,)
            )
            connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


USAGE = "GRANT USAGE ON SCHEMA public TO {0}"
WORK = "GRANT SELECT, INSERT, UPDATE, DELETE ON onefold_records TO {0}; GRANT SELECT ON onefold_schema TO {0}"


def test_a_user_who_may_not_use_the_schema_is_one_clear_line(store: PostgresStore, url: str) -> None:
    store.claim(entry("before"))

    with somebody_else(url, "SELECT 1") as clerk:
        said = refused_by(clerk)

    assert said.count("Grant USAGE") == 3


def test_a_user_who_may_not_make_the_tables_is_one_clear_line(url: str) -> None:
    with somebody_else(url, USAGE) as clerk:
        said = refused_by(clerk)

    assert said.count("lacks a permission") == 3
    assert said.count("`onefold schema --store URL --apply`") == 3


def test_a_user_who_may_not_write_is_one_clear_line(store: PostgresStore, url: str) -> None:
    store.claim(entry("before"))

    with somebody_else(url, f"{USAGE}; GRANT SELECT ON onefold_records, onefold_schema TO {{0}}") as clerk:
        said = refused_by(clerk)

    assert said.count("Grant SELECT, INSERT, UPDATE and DELETE") == 3


def test_a_user_with_the_rights_that_the_error_names_can_work(store: PostgresStore, url: str) -> None:
    store.claim(entry("before"))
    with somebody_else(url, f"{USAGE}; {WORK}") as clerk, Guard(clerk) as guard:
        assert not guard.run("charge", "key", Handler()).replayed
        assert guard.store.purge(10) == 0


def test_a_database_that_can_only_be_read_is_one_clear_line(store: PostgresStore, url: str) -> None:
    store.claim(entry("before"))

    with somebody_else(url, f"{USAGE}; {WORK}; ALTER ROLE {{0}} SET default_transaction_read_only = on") as clerk:
        said = refused_by(clerk)

    assert said.count("Is this a replica? Name the primary") == 3


def test_too_many_connections_is_one_clear_line(url: str) -> None:
    with somebody_else(url, f"{USAGE}; ALTER ROLE {{0}} CONNECTION LIMIT 0") as clerk:
        said = refused_by(clerk)

    assert said.count("too many connections for role") == 3


def test_a_lock_timeout_is_one_clear_line(store: PostgresStore, url: str) -> None:
    mine = entry()
    store.claim(mine)

    with psycopg.connect(url) as holding, closing(open_store(f"{url}?options=-c%20lock_timeout%3D50")) as impatient:
        holding.execute("UPDATE onefold_records SET attempt = 7")
        with pytest.raises(StoreUnavailable, match="longer than lock_timeout"):
            impatient.extend(claim_of(mine))


def test_all_connections_in_use_is_one_clear_line(url: str) -> None:
    with closing(open_store(f"{url}?pool_size=1&pool_timeout=0.05s")) as store, store.transaction() as transaction:
        transaction.begin()

        with pytest.raises(StoreUnavailable, match="all 1 connections to the database have been in use"):
            store.read(entry().address)


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ("?pool_sise=3", "did you mean 'pool_size'"),
        ("?sslmod=require", "did you mean 'sslmode'"),
        ("?pool_size=0", "pool_size='0' has to be a whole number"),
        ("?pool_size=many", "pool_size='many' has to be a whole number"),
        ("?pool_timeout=forever", "pool_timeout"),
        ("?isolation=none", "isolation='none' is not one of"),
        ("?auto_schema=perhaps", "auto_schema='perhaps' has to be yes or no"),
    ],
)
def test_options_are_read_strictly(ending: str, says: str) -> None:
    for opened, scheme in ((open_store, "postgresql"), (open_async_store, "postgresql+asyncpg")):
        with pytest.raises(UsageError, match=says) as refused:
            opened(f"{scheme}://asha:s3cret@localhost/shop{ending}")
        assert "s3cret" not in one_line(refused)


@pytest.mark.parametrize("url", ["postgresql://asha:s3%cret@localhost/shop", "postgresql://asha:s3cret@[::1/shop"])
def test_a_url_that_cannot_be_read_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageError, match="%40 for @") as refused:
        open_store(url)

    assert "s3" not in one_line(refused)
    assert refused.value.__cause__ is None


def test_a_driver_that_is_async_or_unknown_is_refused() -> None:
    with pytest.raises(UsageError, match="asyncpg is for an AsyncGuard"):
        open_store("postgresql+asyncpg://localhost/shop")
    with pytest.raises(UsageError, match="driver='psycopg2' is not one of"):
        open_store("postgresql+psycopg2://localhost/shop")


def test_a_password_is_never_shown(url: str) -> None:
    password = str(urlsplit(url).password)

    shown = [repr(open_store(url)), repr(open_async_store(url)), repr(Guard(url)), str(open_store(url).database.name)]

    assert not any(password in text for text in shown)


# Pools of the caller's.


def test_a_pool_of_psycopg_is_used_and_given_back_as_it_was(url: str) -> None:
    with psycopg_pool.ConnectionPool(url, min_size=1, max_size=1, open=True) as pool:
        with Guard(pool) as guard:
            assert [guard.run("charge", "key", Handler("receipt")).replayed for _ in range(2)] == [False, True]
        # The guard is closed, and the pool is not.
        with pool.connection() as connection:
            assert (connection.autocommit, connection.info.transaction_status) == (False, 0)
            assert connection.execute("SELECT key FROM onefold_records").fetchall() == [("key",)]


@pytest.mark.parametrize("kind", [psycopg_pool.ConnectionPool, psycopg_pool.NullConnectionPool])
def test_a_pool_of_psycopg_lends_its_connections_to_transactions(url: str, kind: Any) -> None:
    options = {"row_factory": psycopg.rows.dict_row}
    with another(url) as connection:
        connection.execute(SCHEMA)

    with kind(url, min_size=0, max_size=2, open=True, kwargs=options) as pool, Guard(pool) as guard:

        @guard.transactional("credit", key="message")
        def credit(message: str, *, tx: Any) -> Any:
            tx.execute("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")
            return tx.execute("SELECT current_setting('transaction_isolation') AS level").fetchone()

        assert [credit("m1") for _ in range(2)] == [{"level": "read committed"}] * 2
    assert balance(url) == 10


def test_async_pools_lend_their_connections(url: str) -> None:
    with another(url) as connection:
        connection.execute(SCHEMA)

    async def credited(pool: Any) -> list[bool]:
        async with AsyncGuard(pool) as guard:

            @guard.transactional("credit", key="message")
            async def credit(message: str, *, tx: Any) -> None:
                async with tx.transaction():
                    await tx.execute("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")

            first = await credit.outcome("m1")  # type: ignore[call-arg]
            claimed = await guard.run("charge", "key", Handler())
            return [first.replayed, claimed.replayed]

    async def story() -> list[list[bool]]:
        async with psycopg_pool.AsyncConnectionPool(url, min_size=1, max_size=1, open=False) as pool:
            seen = [await credited(pool)]
            async with pool.connection() as connection:
                assert connection.autocommit is False
        async with psycopg_pool.AsyncNullConnectionPool(url, max_size=1, open=False) as pool:
            seen.append(await credited(pool))
        async with asyncpg.create_pool(url, min_size=1, max_size=1) as other:
            seen.append(await credited(other))
            async with other.acquire() as lent:
                assert not lent.is_in_transaction()
        return seen

    assert asyncio.run(story()) == [[False, False], [True, True], [True, True]]
    assert balance(url) == 10


def test_a_transaction_on_a_pool_of_the_callers_that_fails_gives_the_connection_back(url: str) -> None:
    def fail(tx: Any) -> None:
        raise ValueError("no")

    async def story() -> None:
        async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, AsyncGuard(pool) as guard:

            @guard.transactional("credit", key="message")
            async def credit(message: str, *, tx: Any) -> None:
                raise ValueError("no")

            for _ in range(3):
                with pytest.raises(ValueError, match="no"):
                    await credit("m1")  # type: ignore[call-arg]

    asyncio.run(story())
    with psycopg_pool.ConnectionPool(url, min_size=1, max_size=1, open=True) as pool, Guard(pool) as guard:

        @guard.transactional("credit", key="message")
        def credit(message: str, *, tx: Any) -> None:
            fail(tx)

        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                credit("m1")  # type: ignore[call-arg]


def test_a_single_connection_and_a_pool_of_the_other_kind_are_refused(url: str) -> None:
    with psycopg.connect(url) as connection, pytest.raises(UsageError, match="cannot live on a single connection"):
        adopt(connection, is_async=False)
    pool = psycopg_pool.ConnectionPool(url, open=False)
    with pytest.raises(UsageError, match="ConnectionPool belongs to a Guard, but this is an AsyncGuard"):
        adopt(pool, is_async=True)

    async def in_loop() -> None:
        other = psycopg_pool.AsyncConnectionPool(url, open=False)
        with pytest.raises(UsageError, match="AsyncConnectionPool belongs to an AsyncGuard, but this is a Guard"):
            adopt(other, is_async=False)
        connection = await asyncpg.connect(url)
        with pytest.raises(UsageError, match="cannot live on a single connection"):
            adopt(connection, is_async=True)
        await connection.close()

    asyncio.run(in_loop())


def test_a_pool_that_is_closed_or_used_up_is_one_clear_line(url: str) -> None:
    pool = psycopg_pool.ConnectionPool(url, min_size=1, max_size=1, open=True)
    with Guard(pool) as guard:
        guard.run("charge", "before", Handler())
        # Short only now: a connection that is opened takes its time.
        pool.timeout = 0.05
        with pool.connection(PATIENCE), pytest.raises(StoreUnavailable, match="your pool gave no connection"):
            guard.run("charge", "key", Handler())
        pool.close()
        with pytest.raises(StoreUnavailable, match="your pool gave no connection"):
            guard.run("charge", "key", Handler())


# Behind PgBouncer.


@pytest.mark.parametrize("driver", DAILY_DRIVERS)
def test_transactions_work_behind_pgbouncer_by_default(driver: type[Worker], url: str, pgbouncer_url: str) -> None:
    with another(url) as connection:
        connection.execute(SCHEMA)
    workers = [driver(pgbouncer_url) for _ in range(3)]

    def deliver(worker: Worker) -> None:
        for number in range(12):
            worker.transactional(f"m{number}", add)

    running = [Elsewhere(lambda worker=worker: deliver(worker)) for worker in workers]  # type: ignore[misc]
    for thread in running:
        thread.result()
    for worker in workers:
        worker.close()

    assert (balance(url), len(records(url))) == (120, 12)


@pytest.mark.parametrize("driver", DAILY_DRIVERS)
def test_a_caller_behind_pgbouncer_can_be_the_first_to_use_a_database(
    driver: type[Worker], url: str, pgbouncer_url: str
) -> None:
    from onefold.stores.postgres import joined as postgres_joined

    postgres_joined.looked.clear()
    with another(url) as connection:
        connection.execute(SCHEMA)
    worker = driver(pgbouncer_url)
    options = {"statement_cache_size": 0} if driver.__name__ == "Asyncpg" else {"prepare_threshold": None}

    async def story(worker: Worker) -> bool:
        async with worker.connected(**options) as caller, caller.transaction():
            outcome = await caller.within("m1", add)
            return outcome.replayed

    assert [worker.play(story), worker.play(story)] == [False, True]
    worker.close()


def test_statements_are_prepared_where_no_pooler_stands_between(url: str, pgbouncer_url: str) -> None:
    async def prepared(source: str) -> bool:
        store = open_async_store(source)
        for number in range(8):
            await store.claim(entry(f"key-{number}"))
        async with store._pool.acquire() as conn:
            opener = store._pool._connect  # type: ignore[attr-defined]
            if "asyncpg" not in source:
                assert (conn.connection.prepare_threshold is not None) == opener._session.prepare
        await store.aclose()
        return bool(opener._session.prepare)

    found = [asyncio.run(prepared(source)) for source in (url, through_asyncpg(url), pgbouncer_url)]
    behind = asyncio.run(prepared(through_asyncpg(pgbouncer_url)))
    asked = asyncio.run(prepared(f"{url}?prepare=no"))

    assert (found, behind, asked) == ([True, True, False], False, False)


# What it costs.


@contextmanager
def warm(url: str, scheme: str) -> Iterator[tuple[Proxy, Callable[[Callable[[Any], Any]], Any]]]:
    """A store whose connection is open and knows its statements, and a way to ask it. It does not purge beside."""
    with Proxy(url) as proxy:
        own_url = f"{proxy.url()}?purge=no"
        if scheme == "blocking":
            store = open_store(own_url)
            exercise(store, lambda answer: answer)
            yield proxy, lambda ask: ask(store)
            store.close()
            return
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            in_loop = open_async_store(own_url.replace("postgresql", scheme))
            exercise(in_loop, runner.run)
            yield proxy, lambda ask: runner.run(ask(in_loop))
            runner.run(in_loop.aclose())


def exercise(store: Any, answered: Callable[[Any], Any]) -> None:
    for number in range(2):
        mine, batch = entry(f"warm-{number}"), [entry(f"warm-{number}-{index}") for index in range(3)]
        answered(store.claim(mine))
        answered(store.extend(claim_of(mine)))
        answered(store.finish(claim_of(mine), DONE))
        answered(store.read(mine.address))
        answered(store.claim_all(batch))
        answered(store.extend_all([claim_of(one) for one in batch]))
        answered(store.close_all([Close(claim_of(one), DONE) for one in batch]))


@pytest.mark.parametrize("scheme", ["blocking", "postgresql", "postgresql+asyncpg"])
def test_a_new_key_costs_two_round_trips_a_duplicate_one_and_a_batch_of_500_asks_once(url: str, scheme: str) -> None:
    mine, batch = entry(), [entry(f"key-{number}") for number in range(500)]
    asks: list[Callable[[Any], Any]] = [
        lambda store: store.claim(mine),
        lambda store: store.finish(claim_of(mine), DONE),
        lambda store: store.claim(entry()),
        lambda store: store.claim_all(batch),
        lambda store: store.extend_all([claim_of(one) for one in batch]),
        lambda store: store.close_all([Close(claim_of(one), DONE) for one in batch]),
        lambda store: store.claim_all(batch),
    ]

    trips = []
    with warm(url, scheme) as (proxy, ask):
        for one in asks:
            with proxy.counting() as count:
                ask(one)
            trips.append(count.trips)

    assert trips == [1] * len(asks)


def test_a_duplicate_writes_nothing_and_takes_no_lock(store: PostgresStore, url: str) -> None:
    mine = entry()
    store.claim(mine)
    store.claim_all([entry("one"), entry("two")])
    before = rows(url, "SELECT key, xmin::text, xmax::text, ctid::text FROM onefold_records ORDER BY key")

    with another(url) as connection:

        def assigned() -> Any:
            return connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()

        def costs_no_number() -> bool:
            before = assigned()
            answers = [store.claim(entry()), *store.claim_all([entry("one"), entry("two")])]
            assert all(isinstance(answer, Record) for answer in answers)
            return bool(assigned() == before)

        # The numbers of transactions are the whole server's: a vacuum may take one meanwhile, but not each time.
        assert eventually(costs_no_number)

    assert rows(url, "SELECT key, xmin::text, xmax::text, ctid::text FROM onefold_records ORDER BY key") == before


def test_heartbeats_and_finishes_touch_no_index(store: PostgresStore, url: str) -> None:
    """An update that changes no column with an index leaves nothing for a vacuum to clean up in indexes."""
    entries = [entry(f"key-{number}", ttl=DONE.ttl) for number in range(20)]
    for one in entries:
        store.claim(one)
        store.extend(claim_of(one))
        store.finish(claim_of(one), DONE)

    store.close()
    # A connection tells what it has done when it ends.
    assert eventually(lambda: connected(url) == 0)
    ((updates, hot),) = rows(
        url, "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'onefold_records'"
    )

    assert updates == 40
    # A heartbeat or a finish now and then falls into the next ten minutes.
    assert hot >= 0.85 * updates


def plan(url: str, statement: str, **values: Any) -> str:
    with another(url) as connection:
        connection.execute("SET enable_seqscan = off; SET enable_sort = off")
        for name, value in values.items():
            statement = statement.replace(f":{name}", value)
        return "\n".join(step for (step,) in connection.execute(f"EXPLAIN {statement}".encode()))


def test_purge_finds_what_is_over_by_an_index(store: PostgresStore, url: str) -> None:
    store.purge(1)

    steps = plan(url, POSTGRES.remove_expired, limit="10")

    assert "Index Scan using onefold_records_due" in steps
    assert "Index Cond: (due <=" in steps


def test_held_records_are_found_by_an_index(store: PostgresStore, url: str) -> None:
    store.purge(1)
    statement, _ = POSTGRES.page(Query(state=State.HELD), 10)

    assert "Index Scan using onefold_records_held" in plan(url, statement, limit="10")


def test_a_page_is_found_by_the_primary_key(store: PostgresStore, url: str) -> None:
    store.purge(1)
    statement, _ = POSTGRES.page(Query(after=Address("", "a", "k")), 10)

    steps = plan(url, statement, after_scope="''", after_operation="'a'", after_key="'k'", limit="10")

    assert "Index Scan using onefold_records_pkey" in steps
    assert "Sort" not in steps


def test_a_record_that_stays_for_ever_or_for_a_million_years_is_no_problem(store: PostgresStore) -> None:
    forever, *long = (entry(str(ttl), ttl=ttl) for ttl in (float("inf"), 1e11, 1e12, 1e15, 1e300))

    assert store.claim_all([forever, *long]) == [None] * 5
    assert all(store.finish(claim_of(one), Ending(state=State.DONE, ttl=one.ttl)) for one in long)

    assert store.purge(10) == 0
    found = store.read(forever.address)
    assert found is not None
    assert found.ttl_left == float("inf")


# How large it gets.

RECORDS = 5_000
BYTES_MAX = 270


def test_a_finished_record_without_result_needs_no_more_than_its_budget(own_postgres: Server) -> None:
    """In the table and its indexes after a vacuum, with random keys of 36 characters, each claimed and finished.

    On a server of its own: dead rows are left where somebody else's transaction might still see them. The keys are the
    same in each run: by their order the index splits its pages, and its size varies by a tenth.
    """
    url = own_postgres.url
    chance = random.Random(3)
    with closing(open_store(f"{url}?options=-c%20synchronous_commit%3Doff")) as store:
        for _ in range(RECORDS):
            # As it stays when it is done: in one twentieth of all time, 30 s more would be another ten minutes.
            one = entry(str(uuid.UUID(int=chance.getrandbits(128))), ttl=DONE.ttl)
            assert store.claim(one) is None
            assert store.finish(claim_of(one), DONE)

    with another(url) as connection:
        connection.execute("VACUUM onefold_records")
    ((size,),) = rows(url, "SELECT pg_total_relation_size('onefold_records')")

    assert size / RECORDS <= BYTES_MAX


# Ends of loops and stores.


def connected(url: str) -> int:
    """How many connections of ours the server has; one that was closed is gone a moment later."""
    statement = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'onefold' AND datname = current_database()"
    return len(rows(url, statement))


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+asyncpg"])
def test_an_async_store_survives_new_event_loops_and_each_leaves_no_connection_behind(url: str, scheme: str) -> None:
    guard = AsyncGuard(url.replace("postgresql", scheme))

    async def deliver(key: str) -> bool:
        outcomes = await asyncio.gather(*(guard.run("charge", f"{key}-{n}", Handler()) for n in range(3)))
        return any(outcome.replayed for outcome in outcomes)

    seen = [asyncio.run(deliver(str(number))) for number in range(4)]

    assert seen == [False] * 4
    assert eventually(lambda: connected(url) == 0)


@pytest.mark.filterwarnings("ignore:unclosed")
@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+asyncpg"])
def test_loops_that_are_closed_abruptly_leave_no_connections_to_the_next(url: str, scheme: str) -> None:
    guard = AsyncGuard(url.replace("postgresql", scheme))

    async def deliver(number: int) -> None:
        await asyncio.gather(*(guard.run("charge", f"{number}-{n}", Handler()) for n in range(3)))

    for number in range(4):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(deliver(number))
        # Without `shutdown_asyncgens`, as in many a hand-made runner.
        loop.close()
    asyncio.run(deliver(4))
    gc.collect()

    assert eventually(lambda: connected(url) == 0)


def test_a_store_that_nobody_closes_is_closed_with_the_last_who_knows_it(url: str) -> None:
    store = open_store(url)
    store.purge(1)
    assert connected(url) == 1

    del store
    gc.collect()

    assert eventually(lambda: connected(url) == 0)


def test_a_closed_store_may_be_used_again(store: PostgresStore, url: str) -> None:
    store.claim(entry())
    store.close()
    assert eventually(lambda: connected(url) == 0)

    assert isinstance(store.claim(entry()), Record)


def test_stores_say_what_they_are(url: str) -> None:
    assert isinstance(open_async_store(url), AsyncPostgresStore)
    assert repr(open_store("postgresql://asha:s3cret@localhost:5432/shop?pool_size=3")) == (
        "PostgresStore('postgresql://asha@localhost:5432/shop')"
    )
