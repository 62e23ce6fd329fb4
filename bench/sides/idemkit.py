"""idemkit: its decorators for functions, on memory, Redis and PostgreSQL. Blocking calls cross to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from bench.measure import Side
from bench.sides import decorated, decorated_async, library, postgres_database, redis_prefix
from bench.sides.by_hand_async import CONNECTIONS
from services.house import House

TITLE = "idemkit"


def _config() -> Any:
    """The key is the payment; a scope of its own keeps idemkit from warning that it has none."""
    return library("idemkit").MethodConfig(key_fields=["payment_id"], scope=lambda *_args, **_kwargs: "bench")


@contextmanager
def _blocking(backend: Any) -> Iterator[Side]:
    try:
        yield decorated(TITLE, library("idemkit").idempotent_sync(backend=backend, config=_config()))
    finally:
        library("idemkit.core.sync_bridge").run_sync(backend.aclose())


@contextmanager
def memory(_house: House) -> Iterator[Side]:
    idemkit = library("idemkit")
    yield decorated(TITLE, idemkit.idempotent_sync(backend=idemkit.InMemoryBackend(), config=_config()))


@contextmanager
def redis(house: House) -> Iterator[Side]:
    backends = library("idemkit.backends.redis")
    with redis_prefix(house) as (url, prefix), _blocking(backends.RedisBackend.from_url(url, namespace=prefix)) as side:
        yield side


@contextmanager
def postgres(house: House) -> Iterator[Side]:
    backends = library("idemkit.backends.postgres")
    with postgres_database(house) as url:
        asyncio.run(backends.init_pg(url))
        with _blocking(backends.PostgresBackend.from_url(url)) as side:
            yield side


@asynccontextmanager
async def memory_async(_house: House) -> AsyncIterator[Side]:
    idemkit = library("idemkit")
    yield decorated_async(TITLE, idemkit.idempotent(backend=idemkit.InMemoryBackend(), config=_config()))


@asynccontextmanager
async def redis_async(house: House) -> AsyncIterator[Side]:
    """Over a pool whose callers wait: the usual one refuses the 101st connection, and idemkit the call."""
    from redis import asyncio as client

    idemkit = library("idemkit")
    with redis_prefix(house) as (url, prefix):
        pool = client.BlockingConnectionPool.from_url(url, max_connections=CONNECTIONS, timeout=None)
        async with idemkit.RedisBackend(client.Redis.from_pool(pool), namespace=prefix) as backend:
            yield decorated_async(TITLE, idemkit.idempotent(backend=backend, config=_config()))


@asynccontextmanager
async def postgres_async(house: House) -> AsyncIterator[Side]:
    idemkit, backends = library("idemkit"), library("idemkit.backends.postgres")
    with postgres_database(house) as url:
        await backends.init_pg(url)
        async with backends.PostgresBackend.from_url(url) as backend:
            yield decorated_async(TITLE, idemkit.idempotent(backend=backend, config=_config()))
