"""A handler of three steps, each remembered before the next one begins: ours on PostgreSQL, and by hand."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, Final

from bench.measure import Side
from bench.sides import AMOUNT, Handler, postgres_database
from bench.sides.by_hand import KEEP_SECONDS, LEASE_SECONDS
from onefold import AsyncGuard, current
from services.house import House

STEPS: Final = ("reserve", "pay", "ship")


@asynccontextmanager
async def onefold(house: House) -> AsyncIterator[Side]:
    handler = Handler()

    async def step() -> int:
        return AMOUNT

    with postgres_database(house) as url:
        async with AsyncGuard(url.replace("postgresql://", "postgresql+asyncpg://")) as guard:

            @guard.idempotent("order", key="order_id")
            async def order(order_id: str, amount: int) -> None:  # noqa: ARG001 - they are what is delivered
                handler()
                for name in STEPS:
                    await current().step(name, step)

            def deliver(key: str) -> Awaitable[Any]:
                return order(key, AMOUNT)

            yield Side("three steps", deliver, deliver, handler.times)


@asynccontextmanager
async def by_hand(house: House) -> AsyncIterator[Side]:
    """An INSERT, an UPDATE for each step, and one at the end."""
    import asyncpg

    handler = Handler()
    insert = "INSERT INTO by_hand (id, token, state, expires) VALUES ($1, $2, 'running', $3)"
    log = "UPDATE by_hand SET steps = steps || $2::text WHERE id = $1"
    finish = "UPDATE by_hand SET state = 'done', expires = $2 WHERE id = $1"
    with postgres_database(house) as url:
        connection = await asyncpg.connect(url)
        columns = "id text PRIMARY KEY, token bytea, state text, expires float8, steps text[] DEFAULT '{}'"
        await connection.execute(f"CREATE TABLE by_hand ({columns})")

        async def deliver(key: str) -> None:
            await connection.execute(insert, key, os.urandom(16), LEASE_SECONDS)
            handler()
            for name in STEPS:
                await connection.execute(log, key, name)
            await connection.execute(finish, key, KEEP_SECONDS)

        def look(key: str) -> Awaitable[Any]:
            found: Awaitable[Any] = connection.fetchrow("SELECT state, steps FROM by_hand WHERE id = $1", key)
            return found

        yield Side("asyncpg, 5 statements; 1", deliver, look, handler.times)
        await connection.close()
