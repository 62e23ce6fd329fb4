"""The limits: the same work by hand on the raw driver, blocking.

By hand means the least that somebody would write: one statement that claims the key, one that ends it, one look at
a key that is done. What a guard does besides (fingerprints, leases, take-overs, the heartbeat) is in its time alone.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from bench.measure import Side
from bench.sides import Handler, mariadb_database, postgres_database, redis_prefix
from services import dynamodb
from services.house import House
from services.servers import Server

LEASE_SECONDS: Final = 30
KEEP_SECONDS: Final = 86_400

INSERT: Final = "INSERT INTO by_hand (id, token, state, expires) VALUES ({0}, {0}, 'running', {0})"
UPDATE: Final = "UPDATE by_hand SET state = 'done', expires = {0} WHERE id = {0}"
SELECT: Final = "SELECT state, result FROM by_hand WHERE id = {0}"
POSTGRES_TABLE: Final = (
    "CREATE TABLE by_hand (id text PRIMARY KEY, token bytea, state text, expires float8, result bytea)"
)


def hand_written(
    title: str, claim: Callable[[str], object], finish: Callable[[str], object], look: Callable[[str], object]
) -> Side:
    handler = Handler()

    def deliver(key: str) -> None:
        claim(key)
        handler()
        finish(key)

    return Side(title, deliver, look, handler.times)


@contextmanager
def memory(_house: House) -> Iterator[Side]:
    """A set and its lock: no claim, no result, no expiry."""
    handler, seen, lock = Handler(), set[str](), threading.Lock()

    def deliver(key: str) -> None:
        with lock:
            if key in seen:
                return
        handler()
        with lock:
            seen.add(key)

    yield Side("a set with a lock", deliver, deliver, handler.times)


@contextmanager
def sqlite(_house: House, sync: str = "full") -> Iterator[Side]:
    """As durable as the store: `full` means that each commit is on the disk."""
    with tempfile.TemporaryDirectory(prefix="onefold-bench-") as folder, ExitStack() as stack:

        def connect() -> sqlite3.Connection:
            connection = sqlite3.connect(Path(folder, "by_hand.db"), isolation_level=None, check_same_thread=False)
            stack.callback(connection.close)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {sync}")
            connection.execute("PRAGMA busy_timeout = 60000")
            return connection

        execute = in_each_thread(connect)
        execute("CREATE TABLE by_hand (id TEXT PRIMARY KEY, token BLOB, state TEXT, expires REAL, result BLOB)")
        yield sql_by_hand(execute, "?", "sqlite3")


@contextmanager
def sqlite_normal(house: House) -> Iterator[Side]:
    with sqlite(house, sync="normal") as side:
        yield side


def sql_by_hand(execute: Callable[..., Any], mark: str, driver: str) -> Side:
    """Three statements that every database understands."""
    insert, update, select = (statement.format(mark) for statement in (INSERT, UPDATE, SELECT))

    def look(key: str) -> object:
        return execute(select, (key,)).fetchone()

    return hand_written(
        f"{driver}, 2 statements; 1",
        lambda key: execute(insert, (key, os.urandom(16), LEASE_SECONDS)),
        lambda key: execute(update, (KEEP_SECONDS, key)),
        look,
    )


def in_each_thread(connect: Callable[[], Any]) -> Callable[..., Any]:
    """Return the `execute` of a connection that each thread opens for itself."""
    local = threading.local()

    def execute(*arguments: Any) -> Any:
        try:
            bound = local.execute
        except AttributeError:
            bound = local.execute = connect().execute
        return bound(*arguments)

    return execute


@contextmanager
def redis(house: House) -> Iterator[Side]:
    import redis as client

    with redis_prefix(house) as (url, prefix), client.Redis.from_url(url) as raw:
        yield hand_written(
            "redis-py, 2 commands; 1",
            lambda key: raw.set(f"{prefix}:{key}", os.urandom(16), nx=True, px=LEASE_SECONDS * 1000),
            lambda key: raw.set(f"{prefix}:{key}", b"done", px=KEEP_SECONDS * 1000),
            lambda key: raw.get(f"{prefix}:{key}"),
        )


@contextmanager
def postgres(house: House) -> Iterator[Side]:
    import psycopg

    with postgres_database(house) as url, ExitStack() as stack:

        def connect() -> Any:
            return stack.enter_context(closing(psycopg.connect(url, autocommit=True)))

        execute = in_each_thread(connect)
        execute(POSTGRES_TABLE)
        yield sql_by_hand(execute, "%s", "psycopg")


@contextmanager
def mysql(house: House) -> Iterator[Side]:
    with mariadb_database(house) as url, closing(_pymysql(url)) as raw, raw.cursor() as cursor:

        def execute(statement: str, values: tuple[Any, ...] = ()) -> Any:
            cursor.execute(statement, values)
            return cursor

        columns = "token BINARY(16), state VARCHAR(10), expires DOUBLE, result LONGBLOB"
        execute(f"CREATE TABLE by_hand (id VARBINARY(255) PRIMARY KEY, {columns})")
        yield sql_by_hand(execute, "%s", "PyMySQL")


def _pymysql(url: str) -> Any:
    import pymysql

    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=parts.path.removeprefix("/"),
        autocommit=True,
    )


def dynamo_server(house: House) -> Server:
    """Return the emulator; whoever asks it has the credentials in the environment."""
    for name, value in dynamodb.CREDENTIALS.items():
        os.environ.setdefault(name, value)
    return house["dynamodb"]


@contextmanager
def dynamo_table(house: House, key: str = "key") -> Iterator[tuple[Any, str]]:
    """Yield a client and an empty table."""
    import boto3

    server, prefix = dynamo_server(house), f"bench_{secrets.token_hex(4)}"
    with closing(boto3.client("dynamodb", endpoint_url=server.url, region_name=dynamodb.REGION)) as client:
        client.create_table(
            TableName=prefix,
            KeySchema=[{"AttributeName": key, "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
        try:
            yield client, prefix
        finally:
            dynamodb.delete_tables(server, prefix)


@contextmanager
def dynamo(house: House) -> Iterator[Side]:
    with dynamo_table(house) as (raw, table):
        yield hand_written(
            "boto3, 2 requests; 1",
            lambda key: raw.put_item(
                TableName=table,
                Item={"key": {"S": key}, "token": {"B": os.urandom(16)}, "state": {"S": "running"}},
                ConditionExpression="attribute_not_exists(#k)",
                ExpressionAttributeNames={"#k": "key"},
            ),
            lambda key: raw.update_item(
                TableName=table,
                Key={"key": {"S": key}},
                UpdateExpression="SET #s = :done",
                ExpressionAttributeNames={"#s": "state"},
                ExpressionAttributeValues={":done": {"S": "done"}},
            ),
            lambda key: raw.get_item(TableName=table, Key={"key": {"S": key}}, ConsistentRead=True),
        )
