"""SQLAlchemy's dialects: how to send our statements through a driver, and how to read its transaction status.

Statements go through `exec_driver_sql`, in the driver's own form: SQLAlchemy compiles nothing, and the caller's events,
logs and pools see everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from sqlalchemy import exc

from onefold._driver_connections import register
from onefold.errors import NotInTransaction, UsageError
from onefold.stores.mysql import orm as mysql
from onefold.stores.postgres import orm as postgres
from onefold.stores.sql.connection import ErrorInfo, TransactionStatus
from onefold.stores.sql.dialect import Dialect, Reply, SqlRequest
from onefold.stores.sql.records import in_numbers, with_names
from onefold.stores.sqlite import orm as sqlite

if TYPE_CHECKING:
    from sqlalchemy import Connection, CursorResult, Engine
    from sqlalchemy.engine.interfaces import Dialect as Engines
    from sqlalchemy.orm import Session


class Driver(NamedTuple):
    """The properties of a driver below SQLAlchemy."""

    sql: Dialect
    send: Callable[[Connection, SqlRequest], Reply]
    # The status of a driver's connection, as far as is known without asking the server.
    transaction_status: Callable[[Any], TransactionStatus]
    classify: Callable[[BaseException], ErrorInfo | None]
    # Makes sure that a write transaction is open, or raises `NotInTransaction`.
    enter: Callable[[Connection], None]
    # Whether this error has aborted the whole transaction, where `transaction_status` cannot tell.
    gives_up: Callable[[BaseException], bool] | None = None
    # Whether a reply was left unread, and whether that is possible after an exception that no driver raised.
    is_torn: Callable[[Any], bool] | None = None
    may_be_torn: Callable[[Any], bool] | None = None
    # See `Database`.
    lock: str | None = None
    unlock: str | None = None
    # Whether a single statement is cheapest in autocommit mode. Where switching the mode takes a message to the server,
    # a short transaction is cheaper.
    alone_in_autocommit: bool = True
    # Whether the tables are created on the caller's own connection, in its transaction.
    makes_tables_inside: bool = False


def driver_of(dialect: Engines) -> Driver:
    """Return the driver below this engine."""
    known = DRIVERS.get((dialect.name, dialect.driver))
    if known is None:
        names = ", ".join(sorted({f"{name}+{driver}" for name, driver in DRIVERS}))
        raise UsageError(f"SQLAlchemy's {dialect.name}+{dialect.driver} is not known here. Known: {names}")
    # The server's version is known after the first connection.
    return known._replace(sql=mysql.sql_of(_version(dialect))) if known is MYSQL else known


def has_server(engine: Engine) -> bool:
    """Return whether the engine's connections lead to a server, and not to a file."""
    return driver_of(engine.dialect).sql.has_server


def _version(dialect: Engines) -> str:
    numbers = ".".join(str(part) for part in getattr(dialect, "server_version_info", None) or ())
    return f"{numbers}-MariaDB" if getattr(dialect, "is_mariadb", False) else numbers


def check_one_engine(session: Session, engine: Engine) -> None:
    """Raise `UsageError` if some classes or tables use another engine (`binds`), with separate transactions."""
    # Public in newer versions only.
    binds: Mapping[Any, Any] = getattr(session, "binds", None) or getattr(session, "_Session__binds", {})
    if any(bind.engine is not engine for bind in binds.values()):
        raise UsageError(
            "this session has several engines (binds=), and each commits separately: the record could be committed "
            "without the work. Pass the connection on which the work is done to within(): "
            "session.connection(bind_arguments=...). Nothing ran"
        )


def raw(connection: Connection) -> Any:
    """Return the driver's own connection."""
    return connection.connection.driver_connection


def _behind(held: Any) -> Any:
    """Return the object one level below SQLAlchemy's, if there is one already; connect and begin nothing."""
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    match held:
        case scoped_session() | async_scoped_session():
            return held()
        case AsyncSession():
            return held.sync_session
        case AsyncConnection():
            return held.sync_connection
        case Session():
            return _connection_of(held)
        case Connection() if not (held.closed or held.invalidated):
            return raw(held)
    return None


def _connection_of(session: Session) -> Connection | None:
    """Return the connection of a session. SQLAlchemy's own method would take one from the pool."""
    from sqlalchemy import Connection

    try:
        bind = session.get_bind()
    except exc.UnboundExecutionError:
        # It has several engines, and is refused for that reason.
        return None
    if isinstance(bind, Connection):
        return bind
    known = getattr(session.get_transaction(), "_connections", {}).get(bind)
    return None if known is None else known[0]


register("sqlalchemy", _behind)


def end_at_once(found: Any) -> None:
    """Close an async driver's connection without waiting, as SQLAlchemy does for garbage."""
    if hasattr(found, "pgconn"):
        found.pgconn.finish()
        return
    # asyncpg, asyncmy and aiosqlite.
    for way in ("terminate", "_close_on_cancel", "stop"):
        if hasattr(found, way):
            getattr(found, way)()
            return


def _executed(connection: Connection, request: SqlRequest, statement: str, values: Any) -> CursorResult[Any]:
    try:
        return connection.exec_driver_sql(statement, values or None)
    except exc.StatementError as error:
        # Keys and results must not appear in a log.
        error.statement, error.params = request.statement, None
        raise


def _reply(request: SqlRequest, result: CursorResult[Any]) -> Reply:
    # All rows: an open cursor keeps the connection busy.
    return Reply(0, result.fetchall()) if request.rows else Reply(result.rowcount)


# SQLite.


def _send_sqlite(connection: Connection, request: SqlRequest) -> Reply:
    # Python's sqlite3 takes named parameters, whatever style SQLAlchemy uses.
    return _reply(request, _executed(connection, request, request.statement, sqlite.with_clock(request)))


def _enter_sqlite(connection: Connection) -> None:
    sqlite.enter(_sqlite3(raw(connection)), connection.exec_driver_sql)


def _sqlite3(found: Any) -> Any:
    # An aiosqlite connection wraps one of sqlite3.
    return getattr(found, "_conn", found)


SQLITE: Final = Driver(
    sqlite.SQLITE_ORM,
    _send_sqlite,
    lambda found: sqlite.transaction_status(_sqlite3(found)),
    sqlite.classify,
    _enter_sqlite,
    makes_tables_inside=True,
)

# Servers.


def _enter_server(connection: Connection) -> None:
    if _in_autocommit(connection):
        raise NotInTransaction(
            "this connection is in autocommit mode: the record and the work would not be committed together. Nothing "
            "ran. Pass one without isolation_level='AUTOCOMMIT'"
        )


def _in_autocommit(connection: Connection) -> bool:
    dialect = cast("Any", connection.dialect)
    if hasattr(dialect, "detect_autocommit_setting"):
        return bool(dialect.detect_autocommit_setting(connection.connection.dbapi_connection))
    # Before SQLAlchemy 2.0.43.
    asked = connection.get_execution_options().get("isolation_level", dialect._on_connect_isolation_level)
    return bool(asked == "AUTOCOMMIT")


def _send_text(connection: Connection, request: SqlRequest) -> Reply:
    return postgres.plain(
        _reply(request, _executed(connection, request, with_names(request.statement), request.values))
    )


def _send_numbers(connection: Connection, request: SqlRequest) -> Reply:
    statement, names = in_numbers(request.statement)
    return _reply(request, _executed(connection, request, statement, tuple(request.values[name] for name in names)))


PSYCOPG: Final = Driver(
    postgres.POSTGRES,
    _send_text,
    postgres.transaction_status,
    postgres.classify,
    _enter_server,
    is_torn=postgres.is_torn,
    may_be_torn=postgres.is_torn,
    lock=postgres.LOCK,
)

ASYNCPG: Final = PSYCOPG._replace(
    send=_send_numbers,
    transaction_status=postgres.asyncpg_transaction_status,
    classify=postgres.asyncpg_classify,
    gives_up=postgres.asyncpg_gives_up,
    is_torn=None,
    may_be_torn=None,
)


def _send_mysql(connection: Connection, request: SqlRequest) -> Reply:
    found = raw(connection)
    mysql.before(found)
    result = _executed(connection, request, mysql.filled(request), None)
    reply = _reply(request, result)
    if request.rows:
        mysql.after(found, list(result.keys()), reply.rows)
    return reply


MYSQL: Final = Driver(
    mysql.MYSQL,
    _send_mysql,
    mysql.transaction_status,
    mysql.classify,
    _enter_server,
    gives_up=mysql.gives_up,
    is_torn=mysql.is_torn,
    may_be_torn=mysql.may_be_torn,
    lock=mysql.LOCK,
    unlock=mysql.UNLOCK,
    alone_in_autocommit=False,
)

# By SQLAlchemy's names for the database and the driver.
DRIVERS: Final[dict[tuple[str, str], Driver]] = {
    ("sqlite", "pysqlite"): SQLITE,
    ("sqlite", "aiosqlite"): SQLITE,
    ("postgresql", "psycopg"): PSYCOPG,
    ("postgresql", "psycopg2"): PSYCOPG,
    ("postgresql", "asyncpg"): ASYNCPG,
    **{(name, driver): MYSQL for name in ("mariadb", "mysql") for driver in ("asyncmy", "mysqldb", "pymysql")},
}
