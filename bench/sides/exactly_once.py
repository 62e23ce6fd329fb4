"""exactly-once: its decorator, on each of its stores. It sets `synchronous=NORMAL` on SQLite by itself."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any

from bench.measure import Side
from bench.sides import decorated, decorated_async, library, postgres_database, redis_prefix
from services.house import House

TITLE = "exactly-once"


def _once(store: Any, prefix: str = "charge") -> Any:
    return library("exactly_once").once(store, key=lambda payment_id, _amount: f"{prefix}:{payment_id}")


@contextmanager
def memory(_house: House) -> Iterator[Side]:
    yield decorated(TITLE, _once(library("exactly_once").Store.memory()))


@contextmanager
def sqlite(_house: House) -> Iterator[Side]:
    store = library("exactly_once").Store.sqlite
    with (
        tempfile.TemporaryDirectory(prefix="onefold-bench-") as folder,
        closing(store(f"{folder}/exactly_once.db")) as opened,
    ):
        yield decorated(TITLE, _once(opened))


@contextmanager
def redis(house: House) -> Iterator[Side]:
    store = library("exactly_once").Store.redis
    with redis_prefix(house) as (url, prefix), closing(store(url)) as opened:
        yield decorated(TITLE, _once(opened, prefix))


@contextmanager
def postgres(house: House) -> Iterator[Side]:
    store = library("exactly_once").Store.postgres
    with postgres_database(house) as url, closing(store(url)) as opened:
        yield decorated(TITLE, _once(opened))


@asynccontextmanager
async def memory_async(_house: House) -> AsyncIterator[Side]:
    yield decorated_async(TITLE, _once(library("exactly_once").Store.memory()))


@asynccontextmanager
async def redis_async(house: House) -> AsyncIterator[Side]:
    """It takes a URL, not a pool: one that allows a connection to each of 1,000 tasks."""
    store = library("exactly_once").Store.redis
    with redis_prefix(house) as (url, prefix), closing(store(f"{url}?max_connections=2000")) as opened:
        yield decorated_async(TITLE, _once(opened, prefix))
        await opened.aclose()


@asynccontextmanager
async def postgres_async(house: House) -> AsyncIterator[Side]:
    store = library("exactly_once").Store.postgres
    with postgres_database(house) as url, closing(store(url)) as opened:
        yield decorated_async(TITLE, _once(opened))
        await opened.aclose()
