"""A caller's transaction through a library in between, such as SQLAlchemy or Django: the parts that both share.

Our tables are created on another connection, so that the caller's transaction sees no DDL, no abort and no implicit
commit. Only SQLite creates them inside: a second connection would wait for the first, and DDL is rolled back, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from onefold._concurrency.generators import run
from onefold.errors import OnefoldError
from onefold.stores.background_purge import BATCH, ignore_errors
from onefold.stores.sql.connection import Connection, Database, ErrorClass, cannot_make, cause_of, lacks_tables
from onefold.stores.sql.dialect import Reply, Sends, SqlRequest
from onefold.stores.sql.joined import explain
from onefold.stores.sql.joined_rules import FoundIn, tell_unusable
from onefold.stores.sql.tables import ensure, make_in

Beside = Callable[[], AbstractContextManager[Connection]]


def find_tables(database: Database, conn: Sends, beside: Beside) -> None:
    """Find the tables, or create them."""
    if not database.sql.searches_schemas:
        # A read on the caller's connection would begin a snapshot.
        _on_another(database, beside, lambda other: run(ensure(database, other), other))
        return
    # The session determines the schema that they are in.
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


class SearchPath:
    """The schemas that a caller's session searches, for a purge after its commit: it may be a tenant's own.

    Asked in the transaction, because they may be set for that alone; and only if a purge is due, which is rare.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.found: str | None = None

    def ask(self, database: Database, conn: Sends) -> None:
        if self.is_wanted and database.sql.searches_schemas:
            self.found, self.is_wanted = run(database.sql.search_path(), conn), False


def purge_beside(database: Database, due: int, beside: Beside, path: SearchPath) -> None:
    """Purge batches on a connection of our own, after a caller's commit: wait for nobody, and fail nothing."""
    with ignore_errors(database.name), beside() as conn:
        while due and run(database.sql.impatient_purge(BATCH, path.found), conn) == BATCH:
            due -= 1


def send_finding(
    request: SqlRequest,
    conn: Sends,
    database: Database,
    found: FoundIn,
    database_id: object,
    beside: Beside,
    *,
    first: bool,
) -> Reply:
    """Send a statement once the tables are found or created. `found` holds the databases where they were seen."""
    try:
        if first and database_id not in found:
            find_tables(database, conn, beside)
            found.add(database_id)
        return conn.send(request)
    except OnefoldError:
        raise
    except Exception as error:
        tell_unusable(error, database, found, database_id, first=first)
        if not lacks_tables(error, database):
            raise
    find_tables(database, conn, beside)
    found.add(database_id)
    return conn.send(request)
