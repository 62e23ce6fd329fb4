"""Our tables: found, or made and brought to our version, on whatever connection is at hand.

Generators, so that each connection sends what they yield, in its own way.
"""

from __future__ import annotations

from typing import Any

from onefold._concurrency.generators import Work
from onefold.stores.sql.connection import Database, no_tables
from onefold.stores.sql.dialect import SqlRequest
from onefold.stores.sql.records import VERSION


def ensure(database: Database, connection: Any) -> Work[None]:
    """Find the tables, or make them: of many that start together, one does."""
    version = yield from database.sql.form()
    if version < VERSION and database.auto_schema:
        yield connection.begin
        yield from make(database)
        yield connection.commit
    elif version == 0:
        raise no_tables(database)


def make(database: Database) -> Work[None]:
    """Make the tables, or bring them to our version, in a transaction that is open."""
    if database.lock is not None:
        yield SqlRequest(database.lock, {}, rows=True)
    yield from database.sql.upgrade((yield from database.sql.form()))
    if database.unlock is not None:
        yield SqlRequest(database.unlock, {}, rows=True)


def make_in(database: Database, path: str, connection: Any) -> Work[None]:
    """Make the tables in a transaction of their own, in the schema that a caller's session searches first."""
    yield connection.begin
    yield database.sql.searching(path)
    yield from make(database)
    yield connection.commit
