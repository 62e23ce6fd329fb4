"""What SQLAlchemy's dialects are to us: how a driver is sent our statements, and where its connections stand.

Statements go through `exec_driver_sql`, as the driver wants them: SQLAlchemy compiles nothing, and the caller's events,
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
    """What we have to know of a driver below SQLAlchemy."""

    sql: Dialect
    send: Callable[[Connection, SqlRequest], Reply]
    # Where a connection of the driver's stands, as far as is known without asking the server.
    transaction_status: Callable[[Any], TransactionStatus]
    classify: Callable[[BaseException], ErrorInfo | None]
    # Be inside a transaction, with the right to write; or raise `NotInTransaction`.
    enter: Callable[[Connection], None]
    # Whether the server has given the whole transaction up with this error; where `transaction_status` does not know.
    gives_up: Callable[[BaseException], bool] | None = None
    # Whether an answer was left unread, and whether that may be so after an exception that no driver raised.
    is_torn: Callable[[Any], bool] | None = None
    may_be_torn: Callable[[Any], bool] | None = None
    # See `Database`.
    lock: str | None = None
    unlock: str | None = None
    # Whether a statement alone is cheapest in autocommit mode. Where changing the mode is a message to the server, a
    # short transaction is.
    alone_in_autocommit: bool = True
    # Whether the tables are made on the caller's own connection, in its transaction.
    makes_tables_inside: bool = False


def driver_of(dialect: Engines) -> Driver:
    """The driver below this engine."""
    known = DRIVERS.get((dialect.name, dialect.driver))
    if known is None:
        names = ", ".join(sorted({f"{name}+{driver}" for name, driver in DRIVERS}))
        raise UsageError(f"SQLAlchemy's {dialect.name}+{dialect.driver} is not known here. Known are: {names}")
    # Which server it is shows with the first connection.
    return known._replace(sql=mysql.sql_of(_version(dialect))) if known.sql.name == "MySQL" else known


def _version(dialect: Engines) -> str:
    numbers = ".".join(str(part) for part in getattr(dialect, "server_version_info", None) or ())
    return f"{numbers}-MariaDB" if getattr(dialect, "is_mariadb", False) else numbers


def check_one_engine(session: Session, engine: Engine) -> None:
    """Raise `UsageError` where some classes or tables are on another engine (`binds`): its transactions are apart."""
    # Public in newer versions only.
    binds: Mapping[Any, Any] = getattr(session, "binds", None) or getattr(session, "_Session__binds", {})
    if any(bind.engine is not engine for bind in binds.values()):
        raise UsageError(
            "this session has several engines (binds=), and each commits by itself: the record could stay where the "
            "work does not. Pass the connection on which the work is done to within(): "
            "session.connection(bind_arguments=...). Nothing ran"
        )


def raw(connection: Connection) -> Any:
    """The driver's own connection."""
    return connection.connection.driver_connection


def _behind(held: Any) -> Any:
    """What stands behind an object of SQLAlchemy's, as far as it has one already; nothing is connected or begun."""
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
    """The connection that a session works on. SQLAlchemy's own way to ask would take one from the pool."""
    from sqlalchemy import Connection

    try:
        bind = session.get_bind()
    except exc.UnboundExecutionError:
        # It has several engines, and is refused for that.
        return None
    if isinstance(bind, Connection):
        return bind
    known = getattr(session.get_transaction(), "_connections", {}).get(bind)
    return None if known is None else known[0]


register("sqlalchemy", _behind)


def end_at_once(found: Any) -> None:
    """Close an async driver's own connection without waiting, as SQLAlchemy does it for what is garbage."""
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
        # Keys and results are nobody's to read in a log.
        error.statement, error.params = request.statement, None
        raise


def _reply(request: SqlRequest, result: CursorResult[Any]) -> Reply:
    # All rows: a cursor that is not at its end keeps the connection busy.
    return Reply(0, result.fetchall()) if request.rows else Reply(result.rowcount)


# SQLite.


def _send_sqlite(connection: Connection, request: SqlRequest) -> Reply:
    # Python's sqlite3 takes names, whatever SQLAlchemy writes by itself.
    return _reply(request, _executed(connection, request, request.statement, sqlite.with_clock(request)))


def _enter_sqlite(connection: Connection) -> None:
    sqlite.enter(_sqlite3(raw(connection)), connection.exec_driver_sql)


def _sqlite3(found: Any) -> Any:
    # An aiosqlite connection has one of sqlite3 inside.
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

# By the names that SQLAlchemy has for the database and the driver.
DRIVERS: Final[dict[tuple[str, str], Driver]] = {
    ("sqlite", "pysqlite"): SQLITE,
    ("sqlite", "aiosqlite"): SQLITE,
    ("postgresql", "psycopg"): PSYCOPG,
    ("postgresql", "psycopg2"): PSYCOPG,
    ("postgresql", "asyncpg"): ASYNCPG,
    **{(name, driver): MYSQL for name in ("mariadb", "mysql") for driver in ("asyncmy", "mysqldb", "pymysql")},
}
