"""Judge the facts that all SQL stores share: the tables, their indexes, the purge backlog. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from onefold.durations import as_text
from onefold.health.report import Check, counted, green, in_bytes, red, unknown, untold, yellow
from onefold.stores.base import Untold

Facts = Mapping[str, Any]

# A purge every minute keeps the backlog within minutes; an hour means that none runs.
PURGE_LAG: Final = 3_600.0

# A store counts no further.
COUNTED_MAX: Final = 10_000

# For a smaller table a full scan is as fast as an index, and the planner is right to use it.
ROWS_MANY: Final = 10_000

APPLY: Final = "onefold schema --store URL --apply"


def tables(facts: Facts) -> Check:
    name, version, newest = "tables", facts["version"], facts.get("newest", 0)
    if refused := untold(name, version):
        return refused
    if version == 0 and facts["auto_schema"]:
        return yellow(name, "there are none yet: the first delivery creates them", APPLY)
    if version == 0:
        return red(name, "there are none, and auto_schema=no: every delivery is refused", APPLY)
    if facts["usable_from"] > newest:
        return red(
            name, f"version {version}, but this Onefold only knows version {newest}: it refuses them", "Upgrade Onefold"
        )
    if version < newest:
        return yellow(name, f"version {version}; this Onefold creates version {newest}", APPLY)
    return green(name, f"version {version}")


def hindrance(facts: Facts) -> str | None:
    """Return why the store is not tried out; None if it is. A trial must not create or change its tables."""
    version = facts["version"]
    if isinstance(version, Untold):
        return "it is not known whether its tables exist"
    if version == 0:
        return "its tables do not exist yet, and the doctor creates none"
    if version < facts["newest"] and facts["auto_schema"]:
        return f"its tables are of version {version}, and the doctor does not change them"
    return None


def has_tables(facts: Facts) -> bool:
    return "indexes" in facts


def indexes(facts: Facts) -> Check:
    name, there = "indexes", facts["indexes"]
    if refused := untold(name, there):
        return refused
    # An older version of the tables has fewer.
    missing = [one for one in facts["indexes_wanted"] if one not in there]
    if facts["purge_index"] in missing:
        return yellow(
            name, f"{facts['purge_index']} is missing or invalid: a purge reads the whole table", f"{APPLY}, or REINDEX"
        )
    if missing:
        return yellow(name, f"{', '.join(missing)} is missing or invalid: `onefold held` reads the whole table", APPLY)
    plan, rows = facts.get("plan"), facts.get("live_rows")
    if isinstance(plan, str) and isinstance(rows, int) and rows >= ROWS_MANY and facts["purge_index"] not in plan:
        return yellow(
            name, f"{rows:,} rows, and the server's plan for a purge does not use {facts['purge_index']}", "ANALYZE"
        )
    return green(name, f"{', '.join(facts['indexes_wanted'])} are there")


def purge_lag(facts: Facts) -> Check:
    name, since, count = "purge", facts["expired_for"], facts["expired_count"]
    if refused := untold(name, since, count):
        return refused
    if not count or since is None:
        return green(name, "no record is expired")
    more = " or more" if count >= COUNTED_MAX else ""
    text = f"expired: {counted(count, 'record')}{more}, the oldest by {as_text(round(float(since)))}"
    if since > PURGE_LAG:
        return yellow(
            name,
            f"{text}: nothing purges, and the table grows. Nothing does where all records come from within() or "
            "fresh() on a driver's own connection",
            "Run `onefold purge --store URL --every 60s`, or `onefold purge --store URL` on a schedule",
        )
    return green(name, text)


def size(facts: Facts) -> Check:
    rows, total = facts.get("live_rows"), facts.get("table_bytes")
    if refused := untold("size", rows, total):
        return refused
    if rows is None or total is None:
        return unknown("size", "the server does not say")
    return green("size", f"about {counted(rows, 'record')}, {in_bytes(float(total))} with indexes")
