"""What a guard takes as its store: a URL, a store, a pool, an engine, a client, a session, or a function."""

from typing import Any, assert_type

import asyncpg
import boto3
import botocore.session
import psycopg
import psycopg_pool
import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster
import sqlalchemy
import sqlalchemy.ext.asyncio
import valkey
import valkey.asyncio
from botocore.client import BaseClient
from mypy_boto3_dynamodb import DynamoDBClient
from mypy_boto3_dynamodb.service_resource import Table

from onefold import AsyncGuard, AsyncStore, Guard, Store
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from onefold.stores.sqlite import SqliteStore


def make_store() -> MemoryStore:
    return MemoryStore()


async def make_pool() -> "asyncpg.Pool[asyncpg.Record]":
    return await asyncpg.create_pool("postgresql://db/shop")


assert_type(Guard("memory:"), Guard)
assert_type(Guard(MemoryStore()), Guard)
assert_type(Guard(SqliteStore(":memory:"), migrate_from="redis://old"), Guard)
assert_type(Guard(make_store), Guard)
assert_type(Guard(MemoryStore), Guard)
assert_type(Guard(lambda: "memory:"), Guard)
assert_type(AsyncGuard("memory:"), AsyncGuard)
assert_type(AsyncGuard(AsyncMemoryStore()), AsyncGuard)
assert_type(AsyncGuard(make_pool), AsyncGuard)


def right(
    store: Store,
    pool: psycopg_pool.ConnectionPool[psycopg.Connection[Any]],
    plain_pool: psycopg_pool.ConnectionPool,
    engine: sqlalchemy.Engine,
    redis_client: redis.Redis,
    cluster: redis.cluster.RedisCluster,
    valkey_client: valkey.Valkey,
    any_client: BaseClient,
    dynamodb: DynamoDBClient,
    table: Table,
    session: boto3.Session,
    core: botocore.session.Session,
) -> None:
    Guard(store)
    Guard(pool)
    Guard(plain_pool)
    Guard(engine)
    Guard(redis_client)
    Guard(cluster)
    Guard(valkey_client)
    Guard(any_client)
    Guard(dynamodb)
    Guard(table)
    Guard(session)
    Guard(core)


def right_async(
    store: AsyncStore,
    pool: psycopg_pool.AsyncConnectionPool[psycopg.AsyncConnection[Any]],
    plain_pool: psycopg_pool.AsyncConnectionPool,
    asyncpg_pool: "asyncpg.Pool[asyncpg.Record]",
    engine: sqlalchemy.ext.asyncio.AsyncEngine,
    redis_client: redis.asyncio.Redis,
    cluster: redis.asyncio.cluster.RedisCluster,
    valkey_client: valkey.asyncio.Valkey,
) -> None:
    AsyncGuard(store)
    AsyncGuard(pool)
    AsyncGuard(plain_pool)
    AsyncGuard(asyncpg_pool)
    AsyncGuard(engine)
    AsyncGuard(redis_client)
    AsyncGuard(cluster)
    AsyncGuard(valkey_client)


def wrong(store: Store, connection: psycopg.Connection[Any]) -> None:
    Guard(3)  # type: ignore[arg-type]
    Guard(None)  # type: ignore[arg-type]
    Guard(object())  # type: ignore[arg-type]
    Guard(b"memory:")  # type: ignore[arg-type]
    Guard(["memory:"])  # type: ignore[arg-type]
    Guard({"url": "memory:"})  # type: ignore[arg-type]
    Guard(AsyncMemoryStore())  # type: ignore[arg-type]
    Guard(Guard("memory:"))  # type: ignore[arg-type]
    Guard(connection)  # type: ignore[arg-type]
    Guard("memory:", migrate_from=3)  # type: ignore[arg-type]
    Guard("memory:", migrate_from=AsyncMemoryStore())  # type: ignore[arg-type]
    AsyncGuard(3)  # type: ignore[arg-type]
    AsyncGuard(None)  # type: ignore[arg-type]
    AsyncGuard(store)  # type: ignore[arg-type]
    AsyncGuard(MemoryStore())  # type: ignore[arg-type]
