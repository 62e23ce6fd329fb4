"""The types of everything that a guard takes as its store: a URL, a store, a pool, an engine, a client, or a function.

The classes of pools and clients belong to packages that are imported on use, so they are described by the names that
they have. Whether one is sync or async is checked when a guard is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from onefold.stores.base import AsyncStore, Store


class PsycopgPool(Protocol):
    """A pool of psycopg_pool."""

    @property
    def getconn(self) -> Any: ...
    @property
    def putconn(self) -> Any: ...


class AsyncpgPool(Protocol):
    """A pool of asyncpg."""

    @property
    def acquire(self) -> Any: ...
    @property
    def release(self) -> Any: ...


class Engine(Protocol):
    """An engine of SQLAlchemy."""

    @property
    def dialect(self) -> Any: ...
    @property
    def connect(self) -> Any: ...


class RedisClient(Protocol):
    """A client of redis-py or valkey-py, of one server or of a cluster."""

    @property
    def execute_command(self) -> Any: ...
    @property
    def pipeline(self) -> Any: ...


class DynamoDBClient(Protocol):
    """A client or a `Table` of boto3, aioboto3 or aiobotocore."""

    @property
    def put_item(self) -> Any: ...
    @property
    def get_item(self) -> Any: ...


class AnyClient(Protocol):
    """A client of boto3 or aiobotocore, annotated as one of any service: without stubs for DynamoDB they all are."""

    @property
    def meta(self) -> Any: ...
    @property
    def get_paginator(self) -> Any: ...


class Session(Protocol):
    """A session of boto3 or aioboto3."""

    @property
    def client(self) -> Any: ...
    @property
    def region_name(self) -> Any: ...


class CoreSession(Protocol):
    """A session of botocore or aiobotocore."""

    @property
    def create_client(self) -> Any: ...
    @property
    def get_credentials(self) -> Any: ...


Opened = PsycopgPool | AsyncpgPool | Engine | RedisClient | DynamoDBClient | AnyClient | Session | CoreSession

# A function is called on first use, and returns any of the others.
StoreSource = str | Store | Opened | Callable[[], Any]
AsyncStoreSource = str | AsyncStore | Opened | Callable[[], Any]
