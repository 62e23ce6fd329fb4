"""Describe the database of an engine to the SQL stores, and listen to what goes wrong on it."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import Engine, event, exc
from sqlalchemy.engine import ExceptionContext

from onefold.stores.sql.connection import Database, ErrorClass, ErrorInfo
from onefold.stores.sqlalchemy.connection import note_failure
from onefold.stores.sqlalchemy.drivers import driver_of, raw

LOST: Final = ErrorInfo(ErrorClass.LOST, "the connection to the database was lost")
EXHAUSTED: Final = ErrorInfo(
    ErrorClass.DOWN, "all connections of the engine's pool are in use. Keep transactions short, or raise pool_size"
)

_databases: WeakKeyDictionary[Any, Database] = WeakKeyDictionary()


def database_of(engine: Engine) -> Database:
    """Return the database of an engine. Engines that differ in their options only have the same."""
    known = _databases.get(engine.dialect)
    sql = driver_of(engine.dialect).sql
    if known is None:
        known = _databases[engine.dialect] = _database(engine)
    if known.sql is not sql:
        # Which server it is shows with the first connection.
        known = _databases[engine.dialect] = known._replace(sql=sql)
    return known


def _database(engine: Engine) -> Database:
    driver = driver_of(engine.dialect)
    if driver.gives_up is not None:
        event.listen(engine, "handle_error", note_failure)
    if driver.may_be_torn is not None:
        event.listen(engine, "handle_error", _drop_torn)

    def classify(error: BaseException) -> ErrorInfo | None:
        if isinstance(error, exc.TimeoutError):
            return EXHAUSTED
        if isinstance(error, exc.DBAPIError) and error.connection_invalidated:
            return LOST
        # SQLAlchemy names the driver's error as the cause of its own, where it is looked at next.
        return driver.classify(error)

    # Without the options, among which there may be a password, too.
    name = engine.url.set(query={}).render_as_string(hide_password=True)
    return Database(driver.sql, name, classify, driver.lock, driver.unlock)


def _drop_torn(context: ExceptionContext) -> None:
    """Make SQLAlchemy drop a connection on which any statement was interrupted, even a handler's.

    SQLAlchemy itself does so after Ctrl-C, but not after an `Exception` from a signal handler. Back in the pool, its
    next user would get the answer that nobody has read.
    """
    connection = context.connection
    if context.sqlalchemy_exception is not None or connection is None or connection.closed or connection.invalidated:
        return
    may_be_torn = driver_of(connection.dialect).may_be_torn
    if may_be_torn is not None and may_be_torn(raw(connection)):
        context.is_disconnect = True
        context.invalidate_pool_on_disconnect = False
