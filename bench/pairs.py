"""Each store beside the same work by hand on its raw driver.

By hand means the least that somebody would write: one statement that claims the key, one that ends it, one look at
a key that is done. What a guard does besides (fingerprints, leases, take-overs, the heartbeat) is in its time alone.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from bench.measure import Pair, Side
from onefold import Guard, Policy
from services import dynamodb, mariadb, postgres
from services.house import House

LEASE_SECONDS: Final = 30
KEEP_SECONDS: Final = 86_400


class Handler:
    """What all of them run: it does nothing but count."""

    def __init__(self) -> None:
        self.ran = 0

    def __call__(self) -> None:
        self.ran += 1

    def times(self) -> int:
        return self.ran


def guarded(guard: Guard, title: str) -> Side:
    """Claim mode, as most people use it: the payload is compared too."""
    handler = Handler()

    @guard.idempotent("charge", key="payment_id")
    def charge(payment_id: str, amount: int) -> None:  # noqa: ARG001 - they are what is delivered
        handler()

    def deliver(key: str) -> None:
        charge(key, 4200)

    return Side(title, deliver, deliver, handler.times)


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
def memory(_house: House) -> Iterator[Pair]:
    with Guard("memory:") as guard:
        yield Pair(guarded(guard, "idempotent"), _babelqueue(), 4.0, 4.0)


@contextmanager
def memory_run(_house: House) -> Iterator[Pair]:
    """Without a payload, which BabelQueue does not compare either."""
    with Guard("memory:") as guard:
        yield Pair(_run(guard), _babelqueue(), 4.0, 4.0)


@contextmanager
def memory_seen(_house: House) -> Iterator[Pair]:
    """What BabelQueue promises, and no more: one look, and one write after success."""
    with Guard("memory:", policy=Policy(mode="seen")) as guard:
        yield Pair(_run(guard), _babelqueue(), 4.0, 4.0)


def _run(guard: Guard) -> Side:
    handler = Handler()

    def handle() -> None:
        handler()

    def deliver(key: str) -> None:
        guard.run("charge", key, handle)

    return Side("run", deliver, deliver, handler.times)


def _babelqueue() -> Side:
    from babelqueue.idempotency import InMemoryStore, wrap

    handler = Handler()

    def handle(_data: object, _meta: object) -> None:
        handler()

    wrapped = wrap(InMemoryStore(), handle)

    def deliver(key: str) -> None:
        wrapped(4200, {"id": key})

    return Side("BabelQueue's wrap", deliver, deliver, handler.times)


@contextmanager
def sqlite(_house: House) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="onefold-bench-") as folder:
        raw = sqlite3.connect(Path(folder, "by_hand.db"), isolation_level=None)
        with Guard(f"sqlite:///{folder}/onefold.db?sync=full") as guard, closing(raw):
            # As the store has it: each commit is on the disk.
            raw.execute("PRAGMA journal_mode = WAL")
            raw.execute("PRAGMA synchronous = FULL")
            raw.execute("CREATE TABLE by_hand (id TEXT PRIMARY KEY, token BLOB, state TEXT, expires REAL, result BLOB)")
            yield Pair(guarded(guard, "idempotent"), _sql_by_hand(raw.execute, "?", "sqlite3"))


def _sql_by_hand(execute: Callable[..., Any], mark: str, driver: str) -> Side:
    """Three statements that every database understands."""
    insert = f"INSERT INTO by_hand (id, token, state, expires) VALUES ({mark}, {mark}, 'running', {mark})"
    update = f"UPDATE by_hand SET state = 'done', expires = {mark} WHERE id = {mark}"
    select = f"SELECT state, result FROM by_hand WHERE id = {mark}"

    def look(key: str) -> object:
        return execute(select, (key,)).fetchone()

    return hand_written(
        f"{driver}, 2 statements; 1",
        lambda key: execute(insert, (key, os.urandom(16), LEASE_SECONDS)),
        lambda key: execute(update, (KEEP_SECONDS, key)),
        look,
    )


@contextmanager
def redis(house: House) -> Iterator[Pair]:
    import redis as client

    prefix = f"bench-{secrets.token_hex(4)}"
    server = house["redis"]
    with client.Redis.from_url(server.url) as raw, Guard(f"{server.url}?prefix={prefix}") as guard:
        by_hand = hand_written(
            "redis-py, 2 commands; 1",
            lambda key: raw.set(f"{prefix}:by-hand:{key}", os.urandom(16), nx=True, px=LEASE_SECONDS * 1000),
            lambda key: raw.set(f"{prefix}:by-hand:{key}", b"done", px=KEEP_SECONDS * 1000),
            lambda key: raw.get(f"{prefix}:by-hand:{key}"),
        )
        try:
            yield Pair(guarded(guard, "idempotent"), by_hand, 1.25, 1.4)
        finally:
            for key in raw.scan_iter(f"{prefix}*", count=1_000):
                raw.delete(key)


POSTGRES_TABLE: Final = (
    "CREATE TABLE by_hand (id text PRIMARY KEY, token bytea, state text, expires float8, result bytea)"
)


@contextmanager
def postgres_claim(house: House) -> Iterator[Pair]:
    import psycopg

    with _database(postgres.Database(house["postgres"])) as url, Guard(url) as guard, psycopg.connect(url) as raw:
        raw.autocommit = True
        raw.execute(POSTGRES_TABLE)
        yield Pair(guarded(guard, "idempotent"), _sql_by_hand(raw.execute, "%s", "psycopg"))


@contextmanager
def postgres_joined(house: House) -> Iterator[Pair]:
    """A business transaction with a record in it: ours, and a hand-written INSERT."""
    import psycopg

    with _database(postgres.Database(house["postgres"])) as url, Guard(url) as guard, ExitStack() as connections:
        ours, raw = (connections.enter_context(psycopg.connect(url, autocommit=True)) for _ in range(2))
        raw.execute("CREATE TABLE by_hand (id text PRIMARY KEY, seen timestamptz NOT NULL DEFAULT now())")
        raw.execute("CREATE TABLE wallet (account text PRIMARY KEY, balance bigint NOT NULL)")
        raw.execute("INSERT INTO wallet VALUES ('ours', 0), ('by hand', 0)")
        # The table of the records is made on the store's own connection, never in the caller's transaction.
        guard.read("credit", "none")
        yield Pair(_within(guard, ours), _dedup_insert(raw), first_at_most=1.10)


CREDIT: Final = "UPDATE wallet SET balance = balance + 1 WHERE account = %s"


def _balance(connection: Any, account: str) -> int:
    return int(connection.execute("SELECT balance FROM wallet WHERE account = %s", [account]).fetchone()[0])


def _within(guard: Guard, connection: Any) -> Side:
    def credit() -> None:
        connection.execute(CREDIT, ["ours"])

    def deliver(key: str) -> None:
        with connection.transaction():
            guard.within(connection).run("credit", key, credit)

    return Side("within", deliver, deliver, lambda: _balance(connection, "ours"))


def _dedup_insert(connection: Any) -> Side:
    def deliver(key: str) -> None:
        with connection.transaction():
            inserted = connection.execute("INSERT INTO by_hand (id) VALUES (%s) ON CONFLICT DO NOTHING", [key])
            if inserted.rowcount:
                connection.execute(CREDIT, ["by hand"])

    return Side("psycopg, a dedup INSERT", deliver, deliver, lambda: _balance(connection, "by hand"))


@contextmanager
def mysql(house: House) -> Iterator[Pair]:
    database = mariadb.Database(house["mariadb"])
    database.empty()
    with _database(database) as url, Guard(url) as guard, closing(_pymysql(url)) as raw, raw.cursor() as cursor:

        def execute(statement: str, values: tuple[Any, ...] = ()) -> Any:
            cursor.execute(statement, values)
            return cursor

        columns = "token BINARY(16), state VARCHAR(10), expires DOUBLE, result LONGBLOB"
        execute(f"CREATE TABLE by_hand (id VARBINARY(255) PRIMARY KEY, {columns})")
        yield Pair(guarded(guard, "idempotent"), _sql_by_hand(execute, "%s", "PyMySQL"))


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


@contextmanager
def _database(database: Any) -> Iterator[str]:
    try:
        yield database.url
    finally:
        database.drop()


@contextmanager
def dynamo(house: House) -> Iterator[Pair]:
    import boto3

    server, prefix = house["dynamodb"], f"bench_{secrets.token_hex(4)}"
    for name, value in dynamodb.CREDENTIALS.items():
        os.environ.setdefault(name, value)
    raw = boto3.client("dynamodb", endpoint_url=server.url, region_name=dynamodb.REGION)
    table = f"{prefix}_by_hand"
    raw.create_table(
        TableName=table,
        KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    with Guard(dynamodb.store_url(server, f"{prefix}_records")) as guard, closing(raw):
        by_hand = hand_written(
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
        try:
            yield Pair(guarded(guard, "idempotent"), by_hand)
        finally:
            dynamodb.delete_tables(server, prefix)


PAIRS: Final = {
    "memory": memory,
    "memory, run": memory_run,
    "memory, seen": memory_seen,
    "sqlite": sqlite,
    "redis": redis,
    "postgres": postgres_claim,
    "postgres, joined": postgres_joined,
    "mariadb": mysql,
    "dynamodb": dynamo,
}
