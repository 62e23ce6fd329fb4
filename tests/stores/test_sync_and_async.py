"""A sync store, engine, pool or client is refused by an async guard, and the reverse, before the first delivery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import boto3
import psycopg_pool
import pytest
import redis
import redis.asyncio
from aiobotocore.session import AioSession
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from onefold import AsyncGuard, Guard, UsageError
from onefold.stores.memory import AsyncMemoryStore, MemoryStore

NOWHERE = "postgresql://127.0.0.1:1/nowhere"

BLOCKING: dict[str, Callable[[], Any]] = {
    "a store": MemoryStore,
    "an engine": lambda: create_engine("sqlite://"),
    "a sessionmaker": lambda: sessionmaker(create_engine("sqlite://")),
    "a pool": lambda: psycopg_pool.ConnectionPool(NOWHERE, open=False),
    "a client of Redis": redis.Redis,
    "a session of boto3": boto3.Session,
}
ASYNC: dict[str, Callable[[], Any]] = {
    "a store": AsyncMemoryStore,
    "an engine": lambda: create_async_engine("sqlite+aiosqlite://"),
    "a sessionmaker": lambda: async_sessionmaker(create_async_engine("sqlite+aiosqlite://")),
    "a pool": lambda: psycopg_pool.AsyncConnectionPool(NOWHERE, open=False),
    "a client of Redis": redis.asyncio.Redis,
    "a session of aiobotocore": AioSession,
}


@pytest.mark.parametrize("make", ASYNC.values(), ids=ASYNC)
def test_a_guard_refuses_what_is_async(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        Guard(make())
    with pytest.raises(UsageError):
        Guard("memory:", migrate_from=make())
    AsyncGuard(make())


@pytest.mark.parametrize("make", BLOCKING.values(), ids=BLOCKING)
def test_an_async_guard_refuses_what_blocks(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        AsyncGuard(make())
    with pytest.raises(UsageError):
        AsyncGuard("memory:", migrate_from=make())
    Guard(make())


@pytest.mark.parametrize("kind", [Guard, AsyncGuard])
@pytest.mark.parametrize("make", [Session, AsyncSession])
def test_a_session_is_for_within(kind: Any, make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match=r"For a connection or session that you hold: guard\.within"):
        kind(make())
