"""Judge the facts of a SQLite file. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from onefold.health import sql
from onefold.health.report import Check, green, in_bytes, red, untold, yellow

Facts = Mapping[str, Any]

# Room for some hundred thousand records: time to act.
FREE_MIN: Final = 100 * 10**6

# SQLite truncates the log at some megabytes. A longer one is held by a reader that never ends.
LOG_LONG: Final = 64 * 10**6


def judge(facts: Facts) -> list[Check]:
    checks = [sql.tables(facts)]
    if "path" in facts:
        checks = [disk(facts), synchronous(facts), *checks]
    if "journal_mode" in facts:
        checks.insert(-1, journal(facts))
    if sql.has_tables(facts):
        checks += [sql.indexes(facts), sql.purge_lag(facts)]
    return checks


def hindrance(facts: Facts) -> str | None:
    """Return why the store is not tried out; None if it is."""
    return "the file cannot be written" if facts.get("writable") is False else sql.hindrance(facts)


def disk(facts: Facts) -> Check:
    name, free = "disk", facts["free_bytes"]
    text = f"{in_bytes(facts['file_bytes'])} of records, {in_bytes(free)} free"
    if not facts["writable"]:
        return red(
            name, "the file or its directory cannot be written: every claim is refused", "Let this user write to both"
        )
    if free < FREE_MIN:
        return yellow(name, f"{text}: when the disk is full, every claim is refused", "Make room")
    if facts["log_bytes"] > LOG_LONG:
        return yellow(
            name,
            f"{text}, but a log of {in_bytes(facts['log_bytes'])} that cannot be emptied",
            "Look for a reader that never ends: a shell, a tool, a backup",
        )
    return green(name, text)


def journal(facts: Facts) -> Check:
    name, mode = "journal", facts["journal_mode"]
    if refused := untold(name, mode):
        return refused
    if mode == "wal":
        return green(name, "WAL: readers and the writer do not wait for each other")
    return yellow(
        name,
        f"{mode}: another program has changed it, or no guard has used it yet; readers and writers wait for each other",
        "The next delivery switches it to WAL; with your own engine: PRAGMA journal_mode = WAL",
    )


def synchronous(facts: Facts) -> Check:
    if facts["synchronous"] == "full":
        return green("synchronous", "full: what was answered is on the disk")
    return yellow(
        "synchronous",
        f"{facts['synchronous']}: a power cut forgets the last records that were answered",
        "sync=full in the URL, which is the default",
    )
