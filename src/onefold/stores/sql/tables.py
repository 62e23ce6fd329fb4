"""Find our tables, or create and upgrade them, on any connection.

The functions are generators, so that each connection sends their statements in its own way.
"""

from __future__ import annotations

from typing import Any

from onefold._concurrency.generators import Flow
from onefold.stores.sql.connection import Database, no_tables, not_laid_out
from onefold.stores.sql.dialect import SqlRequest
from onefold.stores.sql.records import VERSION


def ensure(database: Database, connection: Any) -> Flow[None]:
    """Find the tables, or create them; of many processes that start together, one does."""
    version = yield from database.sql.schema_version()
    is_laid_out = version > 0 and (yield from database.sql.is_laid_out())
    if database.auto_schema and (version < VERSION or not is_laid_out):
        yield connection.begin
        yield from database.sql.begin_making()
        yield from make(database)
        yield connection.commit
    elif version == 0:
        raise no_tables(database)
    elif not is_laid_out:
        raise not_laid_out(database)


def make(database: Database) -> Flow[None]:
    """Create the tables, or upgrade them to our version, in an open transaction."""
    if database.lock is not None:
        yield SqlRequest(database.lock, {}, rows=True)
    yield from database.sql.upgrade((yield from database.sql.schema_version()))
    yield from database.sql.lay_out()
    if database.unlock is not None:
        yield SqlRequest(database.unlock, {}, rows=True)


def make_in(database: Database, path: str, connection: Any) -> Flow[None]:
    """Create the tables in a transaction of their own, in the schema that a caller's session searches first."""
    yield connection.begin
    yield from database.sql.begin_making()
    yield database.sql.searching(path)
    yield from make(database)
    yield connection.commit
