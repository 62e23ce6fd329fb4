"""What a database says of itself, as flows: questions and their answers, without a judgement.

Nothing is made or changed: the tables are looked for and never made. What the server refuses to tell is `Untold`, so
that one missing permission does not hide the rest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from onefold.stores.base import Untold
from onefold.stores.sql.connection import Database, ErrorClass, cause_of
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.records import VERSION

Rows = Sequence[tuple[Any, ...]]

# Expired records are counted up to here: the rest would tell nothing more, and take long.
EXPIRED_COUNTED_MAX: Final = 10_000


def facts_of(database: Database) -> SqlFlow[dict[str, Any]]:
    """The facts of this database, whichever it is."""
    return database.sql.facts(database)


def rows(database: Database, statement: str) -> SqlFlow[Rows | Untold]:
    """The rows of a question. A lost connection is raised, and any other error is `Untold`."""
    try:
        reply: Reply = yield SqlRequest(statement, {}, rows=True)
    except Exception as error:
        info = cause_of(error, database)
        if info is None or info.kind is ErrorClass.LOST:
            raise
        return Untold(info.message)
    return [tuple(row) for row in reply.rows]


def row(database: Database, statement: str, names: Sequence[str]) -> SqlFlow[dict[str, Any]]:
    """The one row of a question, by these names; each `Untold` where there is none."""
    found = yield from rows(database, statement)
    if isinstance(found, Untold):
        return dict.fromkeys(names, found)
    if not found:
        return dict.fromkeys(names, Untold("the server has no row about it"))
    return dict(zip(names, found[0], strict=True))


def moment(database: Database, statement: str) -> SqlFlow[tuple[float, float, float] | Untold]:
    """The server's clock, between two looks at our own."""
    asked = time.time()
    found = yield from rows(database, statement)
    answered = time.time()
    return found if isinstance(found, Untold) else (asked, float(found[0][0]), answered)


def tables(database: Database) -> SqlFlow[dict[str, Any]]:
    """Whether our tables are there, and of which version they are."""
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
    """How long ago the oldest record expired, and how many are, from a statement of both."""
    return row(database, statement, ("expired_for", "expired_count"))
