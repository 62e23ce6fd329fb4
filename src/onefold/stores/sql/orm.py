"""A caller's transaction through a library that stands between, such as SQLAlchemy or Django: what both need.

Our tables are made on another connection, beside the caller's transaction, which sees no DDL, no abort and no implicit
commit. Only SQLite makes them inside: a second connection would wait for the first, and it rolls DDL back, too.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSet
from contextlib import AbstractContextManager
from typing import Any, Final

from onefold._concurrency.generators import run
from onefold.errors import OnefoldError, StoreUnavailable, UsageError
from onefold.stores.sql.connection import Connection, Database, ErrorClass, cause_of
from onefold.stores.sql.dialect import Reply, Sends, SqlRequest
from onefold.stores.sql.joined import explain
from onefold.stores.sql.joined_rules import ABORTED
from onefold.stores.sql.tables import ensure, make_in

FAILED_BEFORE: Final = (
    "a statement failed in this transaction before, and the database refuses everything until it is rolled back. "
    "Nothing ran. Roll back, or put what may fail into a savepoint"
)

Beside = Callable[[], AbstractContextManager[Connection]]


def find_tables(database: Database, conn: Sends, beside: Beside) -> None:
    """Find the tables, or make them."""
    if not database.sql.searches_schemas:
        # A read on the caller's connection would begin a snapshot.
        _on_another(database, beside, lambda other: run(ensure(database, other), other))
        return
    # They are in a schema, and which one is a matter of the session.
    path = run(database.sql.missing_in(), conn)
    if path is not None:
        _on_another(database, beside, lambda other: run(make_in(database, path, other), other))


def _on_another(database: Database, beside: Beside, work: Callable[[Connection], None]) -> None:
    try:
        with beside() as other:
            work(other)
    except Exception as error:
        info = cause_of(error, database)
        if info is not None and info.kind is ErrorClass.LOST:
            raise cannot_make(database) from error
        explain(error, database)
        raise


def send_finding(
    request: SqlRequest,
    conn: Sends,
    database: Database,
    found: MutableSet[Any],
    database_id: object,
    beside: Beside,
    *,
    first: bool,
) -> Reply:
    """Send a statement once the tables are found, or made. `found` are the places where they were."""
    try:
        return _sent_there(request, conn, database, found, database_id, beside)
    except OnefoldError:
        raise
    except Exception as error:
        if not _lacks_tables(error, database, first=first):
            raise
        # Somebody has dropped them.
        found.discard(database_id)
        if database.sql.searches_schemas:
            # PostgreSQL has given the transaction up. The next delivery looks again.
            raise dropped(database) from error
    return _sent_there(request, conn, database, found, database_id, beside)


def _sent_there(
    request: SqlRequest, conn: Sends, database: Database, found: MutableSet[Any], database_id: object, beside: Beside
) -> Reply:
    if database_id not in found:
        find_tables(database, conn, beside)
        found.add(database_id)
    return conn.send(request)


def _lacks_tables(error: Exception, database: Database, *, first: bool) -> bool:
    """Also raises what the library cannot know: that the transaction was given up before."""
    seen: BaseException | None = error
    while seen is not None:
        if database.sql.was_given_up(seen):
            raise UsageError(FAILED_BEFORE if first else ABORTED) from error
        seen = seen.__cause__
    info = cause_of(error, database)
    return info is not None and info.kind is ErrorClass.NO_TABLES


def dropped(database: Database) -> StoreUnavailable:
    return StoreUnavailable(
        f"{database.name}: the tables of Onefold were dropped, or this session does not see them. Nothing ran. Roll "
        "back, and deliver it again: then they are looked for, and made"
    )


def cannot_make(database: Database) -> StoreUnavailable:
    return StoreUnavailable(
        f"{database.name}: there are no tables of Onefold, and they cannot be made from here: that needs another "
        "connection, which failed. Nothing ran. Make them with the command `onefold schema URL --apply`"
    )
