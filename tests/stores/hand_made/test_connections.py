"""How a hand-made table is reached: by an index, through pools and engines, and not at all while its server is down."""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from msgspec.structs import replace
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onefold import AsyncGuard, Guard, HandMadeTable, Policy, StoreUnavailable, UsageError
from onefold.stores.opening import open_store
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sql.foreign_tables import describe, find
from tests.stores.hand_made.conftest import Database

# By an index.


TYPES = {
    "sqlite": ("TEXT", "INTEGER", "VARCHAR(64)"),
    "postgres": ("TEXT", "VARCHAR(64)", "CHAR(36)", "SMALLINT", "INTEGER", "BIGINT", "UUID"),
    "mysql": ("VARCHAR(64)", "CHAR(36)", "INT", "BIGINT", "BIGINT UNSIGNED", "VARCHAR(64) CHARACTER SET latin1"),
}
KEY = {"UUID": "00000000-0000-0000-0000-000000000007"}
EXPLAIN = {"sqlite": "EXPLAIN QUERY PLAN", "postgres": "EXPLAIN", "mysql": "EXPLAIN"}


def test_every_type_of_key_is_found_by_its_index(database: Database) -> None:
    store, _ = open_store(database.url, is_async=False)
    for number, type_ in enumerate(TYPES[database.kind]):
        name, key = f"seen{number}", KEY.get(type_, "7")
        # Not a primary key: MySQL does not explain how it finds a row that it has already read.
        database.execute(f"CREATE TABLE {name} (id {type_} NOT NULL, more INTEGER)")
        database.execute(f"CREATE INDEX by_key{number} ON {name} (id)")
        plans: list[str] = []

        def explained(found: Any, name: str = name, key: str = key, plans: list[str] = plans) -> Any:
            described = yield from describe(found, name, ["id"])
            flow = find(found, name, described, ["id"], {"id": key})
            request = next(flow)
            assert isinstance(request, SqlRequest)
            if database.kind == "postgres":
                # A table without rows would be read as a whole.
                yield SqlRequest("SET enable_seqscan = off", {})
            reply: Reply = yield replace(request, statement=f"{EXPLAIN[database.kind]} {request.statement}")
            plans.append(str(reply.rows))

        store.ask(explained)

        assert f"by_key{number}" in plans[0], (type_, plans)
        # PostgreSQL can read a whole index, too.
        assert database.kind != "postgres" or "Index Cond" in plans[0], (type_, plans)
    store.close()


# Through pools and engines.

CREATE = "CREATE TABLE processed (id VARCHAR(64) PRIMARY KEY)"


def table(database: Any) -> HandMadeTable:
    return HandMadeTable(database, "processed", key="id", operation="credit")


@pytest.fixture
def shop(postgres_url: str) -> str:
    with psycopg.connect(postgres_url) as connection:
        connection.execute(CREATE)
        connection.execute("INSERT INTO processed VALUES ('old')")
    return postgres_url


def replayed(guard: Guard) -> list[bool]:
    return [guard.run("credit", key, lambda: None).replayed for key in ("old", "new")]


async def replayed_async(guard: AsyncGuard) -> list[bool]:
    async def nothing() -> None:
        pass

    return [(await guard.run("credit", key, nothing)).replayed for key in ("old", "new")]


def test_a_pool_of_the_callers(shop: str) -> None:
    with ConnectionPool(shop, open=True) as pool, Guard("memory:", migrate_from=table(pool)) as guard:
        assert replayed(guard) == [True, False]


def test_an_async_pool_of_the_callers(shop: str) -> None:
    async def main() -> list[bool]:
        async with (
            AsyncConnectionPool(shop, open=False) as pool,
            AsyncGuard("memory:", migrate_from=table(pool)) as guard,
        ):
            return await replayed_async(guard)

    assert asyncio.run(main()) == [True, False]


def test_an_engine_of_every_database(database: Database) -> None:
    database.execute(CREATE)
    database.execute("INSERT INTO processed VALUES (%s)", [("old",)])
    scheme = {"sqlite": "sqlite", "postgres": "postgresql+psycopg", "mysql": "mysql+pymysql"}[database.kind]
    engine = create_engine(f"{scheme}:{database.url.partition(':')[2]}")
    with Guard("memory:", migrate_from=table(engine)) as guard:
        assert replayed(guard) == [True, False]
    engine.dispose()


def test_an_async_engine_of_the_callers(shop: str) -> None:
    async def main() -> list[bool]:
        engine = create_async_engine(shop.replace("postgresql", "postgresql+asyncpg", 1))
        async with AsyncGuard("memory:", migrate_from=table(engine)) as guard:
            found = await replayed_async(guard)
        await engine.dispose()
        return found

    assert asyncio.run(main()) == [True, False]


def test_a_client_without_tables_is_refused(redis_url: str) -> None:
    import redis

    with (
        redis.Redis.from_url(redis_url) as client,
        Guard("memory:", migrate_from=table(client)) as guard,
        pytest.raises(UsageError, match="has no tables to read"),
    ):
        guard.run("credit", "new", lambda: None)


def test_many_threads_share_it(database: Database) -> None:
    database.execute(CREATE)
    database.execute("INSERT INTO processed VALUES (%s)", [(f"m{number}",) for number in range(20)])
    ran: list[str] = []
    with Guard("memory:", migrate_from=table(database.url)) as guard:

        def work() -> None:
            for number in range(20):
                guard.run("credit", f"m{number}", lambda: ran.append("twice"), policy=Policy(wait="10s"))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert ran == []


# Not at all.


@pytest.fixture
def nowhere() -> Iterator[int]:
    """A port where nobody listens, and that nobody else gets meanwhile."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


SCHEMES = ["postgresql", "postgresql+asyncpg", "mysql"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("is_async", [False, True])
def test_while_its_server_is_down_nothing_runs_and_nothing_is_left(nowhere: int, scheme: str, is_async: bool) -> None:
    from onefold import keys
    from onefold.stores.memory import AsyncMemoryStore, MemoryStore

    if "+" in scheme and not is_async:
        pytest.skip("asyncpg is for an async guard")
    away = table(f"{scheme}://app:secret@127.0.0.1:{nowhere}/shop")
    policy, address = Policy(after_crash="hold"), keys.address("credit", "new")

    async def main() -> None:
        new = AsyncMemoryStore()
        async with AsyncGuard(new, migrate_from=away, policy=policy) as guard:
            with pytest.raises(StoreUnavailable) as raised:
                await replayed_async(guard)
            assert "secret" not in str(raised.value)
        assert await new.read(address) is None

    if is_async:
        asyncio.run(main())
        return
    new = MemoryStore()
    with Guard(new, migrate_from=away, policy=policy) as guard, pytest.raises(StoreUnavailable) as raised:
        replayed(guard)
    assert "secret" not in str(raised.value)
    assert new.read(address) is None


def test_a_user_has_to_be_allowed_to_read_it_and_nothing_more(shop: str) -> None:
    user = f"onefold_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(shop) as connection:
        schema = connection.execute("SELECT current_schema()").fetchall()[0][0]
        connection.execute(f"CREATE ROLE {user} LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA {schema} TO {user}")
    try:
        parts = urlsplit(shop)
        url = parts._replace(netloc=f"{user}:x@{parts.netloc.rpartition('@')[2]}").geturl()
        with (
            Guard("memory:", migrate_from=table(url)) as guard,
            pytest.raises(StoreUnavailable, match="processed cannot be read: permission denied"),
        ):
            replayed(guard)
        with psycopg.connect(shop) as connection:
            connection.execute(f"GRANT SELECT ON processed TO {user}")
        with Guard("memory:", migrate_from=table(url)) as guard:
            assert replayed(guard) == [True, False]
    finally:
        with psycopg.connect(shop) as connection:
            connection.execute(f"DROP OWNED BY {user}; DROP ROLE {user}")
