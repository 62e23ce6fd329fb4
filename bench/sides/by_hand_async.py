"""The limits of async code: the same work by hand on the raw async driver, over a pool of connections."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from bench.measure import Side
from bench.sides import Handler, postgres_database, redis_prefix
from bench.sides.by_hand import INSERT, KEEP_SECONDS, LEASE_SECONDS, POSTGRES_TABLE, SELECT, UPDATE
from services.house import House

# More connections make neither server faster on a few cores; 1,000 tasks wait for one of them.
CONNECTIONS: Final = 16


def hand_written(
    title: str,
    claim: Callable[[str], Awaitable[Any]],
    finish: Callable[[str], Awaitable[Any]],
    look: Callable[[str], Awaitable[Any]],
) -> Side:
    handler = Handler()

    async def deliver(key: str) -> None:
        await claim(key)
        handler()
        await finish(key)

    return Side(title, deliver, look, handler.times)


@asynccontextmanager
async def memory(_house: House) -> AsyncIterator[Side]:
    handler, seen = Handler(), set[str]()

    async def deliver(key: str) -> None:
        if key not in seen:
            handler()
            seen.add(key)

    yield Side("a set", deliver, deliver, handler.times)


@asynccontextmanager
async def redis(house: House) -> AsyncIterator[Side]:
    from redis import asyncio as client

    with redis_prefix(house) as (url, prefix):
        pool = client.BlockingConnectionPool.from_url(url, max_connections=CONNECTIONS, timeout=None)
        async with client.Redis.from_pool(pool) as raw:
            yield hand_written(
                "redis.asyncio, 2 commands; 1",
                lambda key: raw.set(f"{prefix}:{key}", os.urandom(16), nx=True, px=LEASE_SECONDS * 1000),
                lambda key: raw.set(f"{prefix}:{key}", b"done", px=KEEP_SECONDS * 1000),
                lambda key: raw.get(f"{prefix}:{key}"),
            )


@asynccontextmanager
async def postgres(house: House) -> AsyncIterator[Side]:
    import asyncpg

    marks = ("$1", "$2", "$3")
    insert, update, select = (statement.format("{}").format(*marks) for statement in (INSERT, UPDATE, SELECT))
    with postgres_database(house) as url:
        async with asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS) as pool:
            await pool.execute(POSTGRES_TABLE)
            yield hand_written(
                "asyncpg, 2 statements; 1",
                lambda key: pool.execute(insert, key, os.urandom(16), LEASE_SECONDS),
                lambda key: pool.execute(update, KEEP_SECONDS, key),
                lambda key: pool.fetchrow(select, key),
            )
