"""Facts about a database, read by flows: questions and their answers, without judgement.

Nothing is created or changed: the tables are looked for, never made. A fact that the server refuses is `Untold`, so
that one missing permission does not hide the rest.
"""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from onefold.stores.base import Untold
from onefold.stores.sql.connection import Database, ErrorClass, cause_of
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.records import TABLE, VERSION

Rows = Sequence[tuple[Any, ...]]

# Records in doubt are counted up to here, those that have waited longest first.
IN_DOUBT_COUNTED_MAX: Final = 10_000

# Expired records are counted up to here: a larger number would tell nothing more, and take long.
EXPIRED_COUNTED_MAX: Final = 10_000


def facts_of(database: Database) -> SqlFlow[dict[str, Any]]:
    """Read the facts of this database, whichever it is."""
    return database.sql.facts(database)


def rows(database: Database, statement: str) -> SqlFlow[Rows | Untold]:
    """Query rows. Raise if the connection is lost; return `Untold` for any other database error."""
    try:
        reply: Reply = yield SqlRequest(statement, {}, rows=True)
    except Exception as error:
        info = cause_of(error, database)
        if info is None or info.kind is ErrorClass.LOST:
            raise
        return Untold(info.message)
    return [tuple(row) for row in reply.rows]


def row(database: Database, statement: str, names: Sequence[str]) -> SqlFlow[dict[str, Any]]:
    """Query one row and return its values by name; each is `Untold` if there is no row."""
    found = yield from rows(database, statement)
    if isinstance(found, Untold):
        return dict.fromkeys(names, found)
    if not found:
        return dict.fromkeys(names, Untold("the server has no row about it"))
    return dict(zip(names, found[0], strict=True))


def moment(database: Database, statement: str) -> SqlFlow[tuple[float, float, float] | Untold]:
    """Read the server's clock between two readings of our own."""
    asked = time.time()
    found = yield from rows(database, statement)
    answered = time.time()
    return found if isinstance(found, Untold) else (asked, float(found[0][0]), answered)


def tables(database: Database) -> SqlFlow[dict[str, Any]]:
    """Return whether our tables exist, and their version."""
    facts: dict[str, Any] = {"newest": VERSION, "auto_schema": database.auto_schema, "version": 0, "usable_from": 0}
    there = yield from rows(database, database.sql.count_tables)
    if isinstance(there, Untold):
        return facts | {"version": there}
    if there[0][0] != 2:
        return facts
    marked = yield from rows(database, database.sql.which_version)
    if isinstance(marked, Untold):
        return facts | {"version": marked}
    return facts | ({"version": int(marked[0][0]), "usable_from": int(marked[0][1])} if marked else {})


def expired(database: Database, statement: str) -> SqlFlow[dict[str, Any]]:
    """Return how long ago the oldest record expired and how many have, from a statement that selects both."""
    return row(database, statement, ("expired_for", "expired_count"))


def counting_in_doubt(now: str, *, within: str, by: str, literal: str = "") -> str:
    """Return the statement that counts held and abandoned records by operation, over a range of the purge index.

    Records that expire are not there. What a dead bypass has left is not in doubt: the outcome before it stands.
    """
    columns = "operation, state, lease_until, bypasses"
    found = f"SELECT {columns} FROM {TABLE} WHERE {within} ORDER BY {by} LIMIT {IN_DOUBT_COUNTED_MAX}"
    held = f"state = {literal}'held'"
    abandoned = f"state = {literal}'running' AND lease_until <= {now} AND COALESCE(bypasses, 0) = 0"
    counts = ", ".join(f"SUM(CASE WHEN {condition} THEN 1 ELSE 0 END)" for condition in (held, abandoned))
    return f"SELECT operation, {counts} FROM ({found}) AS counted GROUP BY operation"


def in_doubt(database: Database, statement: str) -> SqlFlow[dict[str, Any]]:
    """Return how many records are held, and how many are abandoned, by operation."""
    found = yield from rows(database, statement)
    if isinstance(found, Untold):
        return {"in_doubt": found}
    return {"in_doubt": {text(operation): (int(held), int(abandoned)) for operation, held, abandoned in found}}


def indexes(
    database: Database, statement: str, *, wanted: Sequence[str], for_purge: str, oldest: str, doubtful: str
) -> SqlFlow[dict[str, Any]]:
    """Return the indexes by name, and what they find: without the index for purges that would read the whole table.

    The first statement is of names, the others of what `expired` and `in_doubt` return.
    """
    named = yield from rows(database, statement)
    if isinstance(named, Untold):
        return {"indexes": named}
    there = sorted(text(name) for (name,) in named)
    facts: dict[str, Any] = {"indexes": there, "indexes_wanted": wanted, "purge_index": for_purge}
    if for_purge not in there:
        return facts | dict.fromkeys(("expired_for", "expired_count", "in_doubt"), Untold("the index is missing"))
    return facts | (yield from expired(database, oldest)) | (yield from in_doubt(database, doubtful))


def text(value: Any) -> Any:
    """Return text as `str`: some drivers give bytes for names and settings."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
