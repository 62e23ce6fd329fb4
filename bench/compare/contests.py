"""Who is compared with whom: a table. A side is named by its module and function in `bench/sides/`."""

from __future__ import annotations

import importlib
from typing import Any, Final, NamedTuple

# What a side is to the reader.
OURS: Final = "ours"
LIMIT: Final = "limit"
PEER: Final = "peer"
# Remembers what it has seen, and claims nothing: concurrent duplicates run twice.
SEEN_ONLY: Final = "seen only"
# An engine to adopt, with a server or a runtime of its own: of another weight.
ENGINE: Final = "engine"
# Our own other way to do the same.
OTHER_WAY: Final = "other way"
# Our own statements on the raw driver: what the record itself costs.
FLOOR: Final = "floor"


class Entrant(NamedTuple):
    name: str
    role: str
    # `module.function` in bench/sides.
    side: str
    # The distribution whose version is told.
    package: str = ""
    # Why it is not measured here, where that is known beforehand.
    missing: str = ""

    def opener(self) -> Any:
        """Import the side's module, which may need a library that is not installed; return its function."""
        module, function = self.side.split(".")
        return getattr(importlib.import_module(f"bench.sides.{module}"), function)


class Contest(NamedTuple):
    name: str
    title: str
    entrants: tuple[Entrant, ...]
    is_async: bool = False
    # How much of the time it gets: slow rivals need more of it.
    weight: float = 1.0
    rounds_max: int | None = None
    # How many callers at once, for the throughput.
    callers: tuple[int, ...] = ()
    # Deliveries of one side before it is the next one's turn.
    burst: int = 3
    note: str = ""


def ours(side: str, name: str = "Onefold") -> Entrant:
    return Entrant(name, OURS, side, "onefold")


def limit(name: str, side: str) -> Entrant:
    return Entrant(name, LIMIT, side)


def floor(side: str) -> Entrant:
    return Entrant("our statements alone", FLOOR, f"statements.{side}")


def exactly_once(side: str) -> Entrant:
    return Entrant("exactly-once", PEER, f"exactly_once.{side}", "exactly-once")


def idemkit(side: str) -> Entrant:
    return Entrant("idemkit", PEER, f"idemkit.{side}", "idemkit")


def agent_once(side: str) -> Entrant:
    return Entrant("agent-once", PEER, f"agent_once.{side}", "agent-once")


def powertools(side: str) -> Entrant:
    return Entrant("Powertools", PEER, f"powertools.{side}", "aws-lambda-powertools")


def dbos(side: str) -> Entrant:
    return Entrant("DBOS", ENGINE, f"dbos.{side}", "dbos")


CALLERS: Final = (1, 4, 16)
MANY: Final = 1_000

# idemkit's memory refuses more than 10,000 records, and looks at all of them at each call.
MEMORY_ROUNDS: Final = 2_000
# A call of microseconds would feel the cold caches that a slow neighbour leaves behind.
MEMORY_BURST: Final = 50

CONTESTS: Final = (
    Contest(
        "memory",
        "Memory",
        (
            ours("onefold.memory"),
            Entrant("run without a payload", OTHER_WAY, "onefold.memory_run", "onefold"),
            limit("a set with a lock", "by_hand.memory"),
            Entrant("BabelQueue", SEEN_ONLY, "babelqueue.memory", "babelqueue"),
            exactly_once("memory"),
            idemkit("memory"),
        ),
        weight=0.6,
        rounds_max=MEMORY_ROUNDS,
        burst=MEMORY_BURST,
        note="BabelQueue's wrap is the bare set of the bars: it claims nothing while a handler runs, and "
        "compares no payload. Neither does `run` without one.",
    ),
    Contest(
        "memory-async",
        "Memory, async",
        (
            ours("onefold_async.memory"),
            limit("a set", "by_hand_async.memory"),
            exactly_once("memory_async"),
            idemkit("memory_async"),
        ),
        is_async=True,
        weight=0.4,
        rounds_max=MEMORY_ROUNDS,
        burst=MEMORY_BURST,
    ),
    Contest(
        "sqlite",
        "SQLite, each commit on the disk (sync=full)",
        (ours("onefold.sqlite"), limit("sqlite3", "by_hand.sqlite"), floor("sqlite"), agent_once("sqlite")),
        callers=(1, 4),
        note="agent-once keeps SQLite's default, which is full.",
    ),
    Contest(
        "sqlite-normal",
        "SQLite, synced at checkpoints (sync=normal)",
        (
            ours("onefold.sqlite_normal"),
            limit("sqlite3", "by_hand.sqlite_normal"),
            floor("sqlite_normal"),
            exactly_once("sqlite"),
        ),
        weight=0.5,
        note="exactly-once sets synchronous=NORMAL itself.",
    ),
    Contest(
        "redis",
        "Redis, claim mode",
        (
            ours("onefold.redis"),
            limit("redis-py", "by_hand.redis"),
            exactly_once("redis"),
            idemkit("redis"),
            powertools("redis"),
        ),
        callers=CALLERS,
    ),
    Contest(
        "redis-async",
        "Redis, claim mode, async",
        (
            ours("onefold_async.redis"),
            limit("redis.asyncio", "by_hand_async.redis"),
            exactly_once("redis_async"),
            idemkit("redis_async"),
        ),
        is_async=True,
        callers=(*CALLERS, MANY),
    ),
    Contest(
        "postgres",
        "PostgreSQL, claim mode",
        (
            ours("onefold.postgres"),
            limit("psycopg", "by_hand.postgres"),
            floor("claim"),
            exactly_once("postgres"),
            idemkit("postgres"),
            agent_once("postgres"),
            dbos("postgres"),
        ),
        weight=2.0,
        callers=CALLERS,
        note="DBOS runs the call as a workflow with one step: an engine of another weight.",
    ),
    Contest(
        "postgres-async",
        "PostgreSQL, claim mode, async",
        (
            ours("onefold_async.postgres"),
            limit("asyncpg", "by_hand_async.postgres"),
            exactly_once("postgres_async"),
            idemkit("postgres_async"),
            agent_once("postgres_async"),
        ),
        is_async=True,
        weight=2.0,
        callers=(*CALLERS, MANY),
    ),
    Contest(
        "postgres-joined",
        "PostgreSQL, the record in the business transaction",
        (
            ours("joined.within"),
            limit("a dedup INSERT", "joined.by_hand"),
            floor("within"),
            Entrant("transactional", OTHER_WAY, "joined.transactional", "onefold"),
        ),
        weight=1.5,
        note="Onefold is `within` here; `transactional` is its other way, which opens the transaction itself.",
    ),
    Contest(
        "postgres-joined-async",
        "PostgreSQL, the record in the business transaction, async",
        (ours("joined.within_async"), limit("a dedup INSERT", "joined.by_hand_async")),
        is_async=True,
    ),
    Contest(
        "postgres-batch",
        "PostgreSQL, a batch of 100 in one transaction",
        (
            ours("joined.fresh"),
            limit("INSERT … unnest", "joined.fresh_by_hand"),
            floor("batch"),
            Entrant("one by one", OTHER_WAY, "joined.one_by_one", "onefold"),
        ),
        weight=2.0,
        burst=1,
        note="One call is a batch of 100 messages; one by one, each message has a transaction of its own.",
    ),
    Contest(
        "mariadb",
        "MariaDB, claim mode",
        (ours("onefold.mysql"), limit("PyMySQL", "by_hand.mysql")),
        weight=0.7,
    ),
    Contest(
        "dynamodb",
        "DynamoDB, claim mode, on an emulator",
        (
            ours("onefold.dynamo"),
            limit("boto3", "by_hand.dynamo"),
            powertools("dynamo"),
            Entrant("idemkit", PEER, "", "idemkit", "its aioboto3 needs an older botocore than the emulator does"),
        ),
        weight=1.5,
        note="The emulator takes most of the time: read what one request costs from your own table.",
    ),
    Contest(
        "http",
        "The ASGI middleware on Redis, with a handler of 1 ms",
        (
            ours("http.onefold"),
            limit("the bare app", "http.bare"),
            Entrant("idemkit", PEER, "http.idemkit", "idemkit"),
            Entrant("asgi-idempotency-header", PEER, "http.asgi_idempotency_header", "asgi-idempotency-header"),
            Entrant(
                "fastapi-idempotency-key",
                PEER,
                # For a version that replays.
                "http.fastapi_idempotency_key",
                "fastapi-idempotency-key",
                "its Redis backend (0.1.1) stores each response with an empty fingerprint, and so refuses every "
                "duplicate as another payload (422)",
            ),
        ),
        is_async=True,
        weight=1.5,
        note="The duplicate is a replay; the bare app has none, and runs its handler again.",
    ),
    Contest(
        "steps",
        "A handler of three durable steps",
        (
            ours("steps.onefold"),
            limit("asyncpg", "steps.by_hand"),
            dbos("three_steps"),
            Entrant("Restate", ENGINE, "restate.steps", "restate-sdk"),
            Entrant("Temporal", ENGINE, "temporal.steps", "temporalio"),
        ),
        is_async=True,
        weight=2.0,
        burst=1,
        note=(
            "Restate and Temporal are engines of another weight: servers that own the call, retry it and keep its "
            "history. Temporal's is its development server, with its history in SQLite. The ratio says what a call "
            "costs there, not that one replaces the other."
        ),
    ),
)
