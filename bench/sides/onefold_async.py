"""Our own sides, async."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.measure import Side
from bench.sides import decorated_async, postgres_database, redis_prefix
from onefold import AsyncGuard
from services.house import House


def guarded(guard: AsyncGuard) -> Side:
    return decorated_async("idempotent", guard.idempotent("charge", key="payment_id"))


@asynccontextmanager
async def memory(_house: House) -> AsyncIterator[Side]:
    async with AsyncGuard("memory:") as guard:
        yield guarded(guard)


@asynccontextmanager
async def redis(house: House) -> AsyncIterator[Side]:
    with redis_prefix(house) as (url, prefix):
        async with AsyncGuard(f"{url}?prefix={prefix}") as guard:
            yield guarded(guard)


@asynccontextmanager
async def postgres(house: House) -> AsyncIterator[Side]:
    """Over asyncpg, as idemkit does it."""
    with postgres_database(house) as url:
        async with AsyncGuard(url.replace("postgresql://", "postgresql+asyncpg://")) as guard:
            yield guarded(guard)
