"""What a record and a delivery cost on each store, as measured, with the page that says how.

This is the only place of these numbers in code: the table in docs/operations.md is generated from it, and tests compare
it with the pages of the stores and with docs/benchmarks/scale.json.
"""

from __future__ import annotations

from typing import Final

import msgspec

# What the bytes below were measured with; a UUID has so many characters.
KEY_CHARACTERS: Final = 36

# How much of a UUID a Redis key takes.
UUID_BYTES: Final = 16


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """One store: bytes, seconds and limits. None: it does not apply, or nobody has measured it."""

    # The name for people; whether records take memory or disk.
    name: str
    in_memory: bool = False

    # Bytes of a finished record with a fingerprint, by the bytes of its result; kept for a while, not forever.
    bytes_by_result: tuple[tuple[int, float], ...]
    # What of it is the fingerprint.
    fingerprint_bytes: float
    # What each further character of a key adds, indexes included.
    key_character_bytes: float
    # What is saved by a record that commits with the caller's rows.
    transactional_saves: float | None = None
    # What is saved by a record that never expires.
    forever_saves: float = 0.0
    # What a Redis adds to each for hash tables that double: so many bytes for each of their slots, half of
    # them for what expires.
    slot_bytes: float = 0.0
    # What the provider adds to each record.
    billed_bytes: float = 0.0
    # How much more to provide than the records take: dead rows until a vacuum, a copy while a snapshot is written.
    headroom: float = 1.0
    why_headroom: str = ""

    # Round trips of a first call, in claim mode and beside the caller's own statements, and of a duplicate.
    round_trips: int = 2
    duplicate_round_trips: int = 1
    # Seconds of one connection without the network; a first call is a claim and a finish.
    first_seconds: float
    duplicate_seconds: float
    # Processor time of the server.
    server_seconds: float | None = None
    # Bytes of the log for a first call: with whole pages already logged since the last checkpoint, and without.
    log_bytes: tuple[int, int] | None = None
    # The most first calls in a second that one writer can do.
    writer_per_second: int | None = None
    # Records that one `onefold purge` removes in a second, with its pauses. None: the server removes them by itself.
    purge_per_second: int | None = None

    # Where the numbers are from, by the names of fields: a page of the documentation, or whose rule it is.
    sources: dict[str, str]


_PURGE: Final = "docs/purge.md: 1,000,000 in 18 s beside two workers, on PostgreSQL 18"
_SCALE: Final = "docs/benchmarks/scale.json, at 10 thousand and at 10 million records"
_CPU: Final = "make bench-scale, at 300,000 records: processor time of the server's processes"

_POSTGRES: Final = Costs(
    name="PostgreSQL",
    bytes_by_result=((0, 295), (36, 340), (300, 615), (1024, 1755)),
    fingerprint_bytes=41,
    # Once in the table, and once in an index that random keys leave 70 % full.
    key_character_bytes=2.4,
    transactional_saves=12,
    headroom=1.2,
    why_headroom="dead rows until a vacuum",
    first_seconds=1 / 850,
    duplicate_seconds=1 / 4600,
    server_seconds=0.00042,
    log_bytes=(740, 6_300),
    purge_per_second=55_000,
    sources={
        "bytes_by_result": "docs/stores/postgres.md#how-large",
        "fingerprint_bytes": "docs/stores/postgres.md#how-large",
        "key_character_bytes": "a character in the table, and one in an index that is 70 % full",
        "transactional_saves": "docs/stores/postgres.md#how-large",
        "headroom": "docs/stores/postgres.md#how-large",
        "first_seconds": "docs/stores/postgres.md#how-fast, psycopg",
        "duplicate_seconds": "docs/stores/postgres.md#how-fast, psycopg",
        "server_seconds": _CPU,
        "log_bytes": _SCALE,
        "purge_per_second": _PURGE,
    },
)

_MYSQL: Final = Costs(
    name="MySQL, MariaDB",
    bytes_by_result=((0, 370), (36, 430), (300, 890), (1024, 2020)),
    fingerprint_bytes=40,
    key_character_bytes=2.9,
    first_seconds=1 / 770,
    duplicate_seconds=1 / 2500,
    transactional_saves=0,
    purge_per_second=55_000,
    sources={
        "bytes_by_result": "docs/stores/mysql.md#how-large, as they grew on MariaDB 10.11",
        "fingerprint_bytes": "its 36 bytes and their length; not measured by itself",
        "key_character_bytes": "in the clustered index and in one more, each 70 % full",
        "transactional_saves": "not measured: none is assumed",
        "first_seconds": "docs/stores/mysql.md#how-fast, PyMySQL",
        "duplicate_seconds": "docs/stores/mysql.md#how-fast, PyMySQL",
        "purge_per_second": f"{_PURGE}; not measured here",
    },
)

_SQLITE: Final = Costs(
    name="SQLite",
    bytes_by_result=((0, 236), (36, 273), (300, 591), (1024, 1446)),
    fingerprint_bytes=38,
    key_character_bytes=2.4,
    transactional_saves=0,
    forever_saves=28,
    first_seconds=1 / 1800,
    duplicate_seconds=1 / 45_000,
    writer_per_second=1_800,
    purge_per_second=55_000,
    sources={
        "bytes_by_result": "docs/stores/sqlite.md",
        "fingerprint_bytes": "make bench-scale: 236 with one, and 198 without",
        "key_character_bytes": "a character in the table, and one in an index that is 70 % full",
        "transactional_saves": "not measured: none is assumed",
        "forever_saves": "docs/stores/sqlite.md",
        "first_seconds": "docs/stores/sqlite.md, sync=full",
        "duplicate_seconds": "docs/stores/sqlite.md",
        "writer_per_second": "docs/stores/sqlite.md, sync=full on a disk that syncs in 0.2 ms",
        "purge_per_second": f"{_PURGE}; not measured here",
    },
)

_REDIS: Final = Costs(
    name="Redis",
    in_memory=True,
    bytes_by_result=((0, 192), (36, 240), (300, 512), (1024, 1408)),
    fingerprint_bytes=32,
    key_character_bytes=1.1,
    forever_saves=31,
    slot_bytes=16,
    headroom=2.0,
    why_headroom="a copy while a snapshot is written",
    first_seconds=1 / 6000,
    duplicate_seconds=1 / 14_000,
    server_seconds=0.00008,
    sources={
        "bytes_by_result": "docs/stores/redis.md#how-to-size-it, less the 21 bytes of hash tables for 50,000 records",
        "fingerprint_bytes": "make bench-scale: 213 with one, and 181 without",
        "key_character_bytes": "docs/stores/redis.md#how-to-size-it: 16 to 29 for 20 characters that are not a UUID",
        "forever_saves": "docs/stores/redis.md#how-to-size-it: 42, less its part of the hash tables",
        "slot_bytes": "docs/stores/redis.md#how-to-size-it: 16 bytes while hash tables are full, 32 after they double",
        "headroom": "docs/stores/redis.md#how-to-size-it",
        "first_seconds": "docs/stores/redis.md#how-fast",
        "duplicate_seconds": "docs/stores/redis.md#how-fast",
        "server_seconds": _CPU,
    },
)

_VALKEY: Final = Costs(
    name="Valkey",
    in_memory=True,
    bytes_by_result=((0, 159), (36, 224), (300, 476), (1024, 1217)),
    fingerprint_bytes=32,
    key_character_bytes=1.1,
    forever_saves=15,
    headroom=2.0,
    why_headroom="a copy while a snapshot is written",
    first_seconds=1 / 6000,
    duplicate_seconds=1 / 14_000,
    server_seconds=0.00008,
    sources={
        "bytes_by_result": "docs/stores/redis.md#how-to-size-it",
        "fingerprint_bytes": "as Redis",
        "key_character_bytes": "as Redis",
        "forever_saves": "docs/stores/redis.md#how-to-size-it",
        "headroom": "docs/stores/redis.md#how-to-size-it",
        "first_seconds": "as Redis",
        "duplicate_seconds": "as Redis",
        "server_seconds": "as Redis",
    },
)

_DYNAMODB: Final = Costs(
    name="DynamoDB",
    bytes_by_result=((0, 192), (36, 234), (300, 498), (1024, 1222)),
    fingerprint_bytes=46,
    key_character_bytes=1,
    transactional_saves=0,
    forever_saves=13,
    billed_bytes=100,
    first_seconds=0.010,
    duplicate_seconds=0.005,
    sources={
        "bytes_by_result": "docs/stores/dynamodb.md, by AWS's rules",
        "fingerprint_bytes": "its 36 bytes, and the name of its attribute",
        "key_character_bytes": "AWS's rules",
        "transactional_saves": "docs/stores/dynamodb.md",
        "forever_saves": "docs/stores/dynamodb.md",
        "billed_bytes": "AWS adds them to each item",
        "first_seconds": "assumed: 5 ms for a request; AWS says single-digit milliseconds",
        "duplicate_seconds": "assumed, as above",
    },
)

# By the name that `--store` takes.
COSTS: Final[dict[str, Costs]] = {
    "postgres": _POSTGRES,
    "mysql": _MYSQL,
    "sqlite": _SQLITE,
    "redis": _REDIS,
    "valkey": _VALKEY,
    "dynamodb": _DYNAMODB,
}

# Other schemes of URLs, and whose costs they have.
ALIASES: Final = {"postgresql": "postgres", "mariadb": "mysql", "rediss": "redis", "valkeys": "valkey"}
