"""Bytes of a finished record without a result, with random keys of 36 characters: what a server says of itself."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from typing import Any, Final

from bench.compare.run import reason
from bench.sides import postgres_database, redis_prefix
from onefold import Guard
from services.house import House

RECORDS: Final = 20_000

# Both have 36 characters; a store may keep a UUID as its 16 bytes.
TEXT: Final = "text"
KEYS: Final[dict[str, Callable[[], str]]] = {TEXT: lambda: secrets.token_hex(18), "UUID": lambda: str(uuid.uuid4())}


def measure(house: House, records: int = RECORDS) -> list[dict[str, Any]]:
    found = []
    for store, measured in (("redis", redis), ("postgres", postgres)):
        for keys, make in KEYS.items():
            row = {"store": store, "keys": keys, "records": records}
            try:
                found.append({**row, "bytes": round(measured(house, make, records), 1)})
            except Exception as error:  # noqa: BLE001 - a server that is missing is a row
                found.append({**row, "missing": reason(error)})
    return found


def redis(house: House, make: Callable[[], str], records: int) -> float:
    """Compare `used_memory` before and after: the server's hash tables are in it."""
    import redis as client

    with (
        redis_prefix(house) as (url, prefix),
        client.Redis.from_url(url) as raw,
        Guard(f"{url}?prefix={prefix}") as guard,
    ):
        guard.run("charge", make(), _nothing)
        before = raw.info("memory")["used_memory"]
        _fill(guard, make, records)
        after = raw.info("memory")["used_memory"]
    return float(after - before) / records


def postgres(house: House, make: Callable[[], str], records: int) -> float:
    """The table with its indexes, after VACUUM."""
    from services.postgres import connected

    with postgres_database(house) as url, Guard(url) as guard, connected(url) as raw:
        guard.read("charge", "none")
        before = _relations(raw)
        _fill(guard, make, records)
        raw.execute("VACUUM")
        return (_relations(raw) - before) / records


def _relations(raw: Any) -> int:
    tables = "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class WHERE relkind = 'r'"
    return int(raw.execute(f"{tables} AND relnamespace = 'public'::regnamespace").fetchone()[0])


def _fill(guard: Guard, make: Callable[[], str], records: int) -> None:
    for _ in range(records):
        guard.run("charge", make(), _nothing)


def _nothing() -> None:
    """A handler without a result."""
