"""Bytes of a finished record without a result, with random keys of 36 characters: what a server says of itself."""

from __future__ import annotations

import uuid
from typing import Any, Final

from bench.compare.run import reason
from bench.sides import postgres_database, redis_prefix
from onefold import Guard
from services.house import House

RECORDS: Final = 20_000


def measure(house: House, records: int = RECORDS) -> list[dict[str, Any]]:
    found = []
    for store, measured in (("redis", redis), ("postgres", postgres)):
        try:
            found.append({"store": store, "records": records, **measured(house, records)})
        except Exception as error:  # noqa: BLE001 - a server that is missing is a row
            found.append({"store": store, "records": records, "missing": reason(error)})
    return found


def redis(house: House, records: int) -> dict[str, Any]:
    """Compare `used_memory` before and after: the server's hash tables are in it."""
    import redis as client

    with (
        redis_prefix(house) as (url, prefix),
        client.Redis.from_url(url) as raw,
        Guard(f"{url}?prefix={prefix}") as guard,
    ):
        guard.run("charge", str(uuid.uuid4()), _nothing)
        before = raw.info("memory")["used_memory"]
        _fill(guard, records)
        after = raw.info("memory")["used_memory"]
    return {"bytes": round((after - before) / records, 1)}


def postgres(house: House, records: int) -> dict[str, Any]:
    """The table with its indexes, after VACUUM."""
    from services.postgres import connected

    with postgres_database(house) as url, Guard(url) as guard, connected(url) as raw:
        guard.read("charge", "none")
        before = _relations(raw)
        _fill(guard, records)
        raw.execute("VACUUM")
        return {"bytes": round((_relations(raw) - before) / records, 1)}


def _relations(raw: Any) -> int:
    tables = "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class WHERE relkind = 'r'"
    return int(raw.execute(f"{tables} AND relnamespace = 'public'::regnamespace").fetchone()[0])


def _fill(guard: Guard, records: int) -> None:
    for _ in range(records):
        guard.run("charge", str(uuid.uuid4()), _nothing)


def _nothing() -> None:
    """A handler without a result."""
