"""Django's database backends: how to send our statements, and how to read a connection's transaction status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from onefold.errors import UsageError
from onefold.stores.mysql import orm as mysql
from onefold.stores.postgres import orm as postgres
from onefold.stores.sql.connection import ErrorInfo, TransactionStatus
from onefold.stores.sql.dialect import Dialect, Reply, SqlRequest
from onefold.stores.sql.records import with_names
from onefold.stores.sqlite import orm as sqlite


class Vendor(NamedTuple):
    """The properties of the database behind a Django connection."""

    sql: Dialect
    send: Callable[[Any, SqlRequest], Reply]
    # The status of a driver's connection, as far as is known without asking the server.
    transaction_status: Callable[[Any], TransactionStatus]
    classify: Callable[[BaseException], ErrorInfo | None]
    # Whether the server still answers, where `transaction_status` does not show it after an error.
    is_alive: Callable[[Any], bool] = bool
    # Whether a reply was left unread, and whether that is possible after an exception that no driver raised.
    is_torn: Callable[[Any], bool] = lambda _found: False
    may_be_torn: Callable[[Any], bool] = lambda _found: False
    # Whether the reply read after the end of a transaction belongs to an earlier statement.
    is_behind: Callable[..., bool] = lambda _found, **_expected: False
    # Begins a transaction by hand.
    begin: str = "BEGIN"
    # See `Database`.
    lock: str | None = None
    unlock: str | None = None
    # Whether the tables are created on the caller's own connection, in its transaction.
    makes_tables_inside: bool = False


# Identifies a database of the settings.
DatabaseId = tuple[Any, ...]


def database_id_of(connection: Any) -> DatabaseId:
    settings = connection.settings_dict
    return connection.vendor, settings["HOST"], settings["PORT"], settings["NAME"], settings["USER"]


def vendor_of(connection: Any) -> Vendor:
    """Return the database behind this connection."""
    known = VENDORS.get(connection.vendor)
    if known is None:
        raise UsageError(
            f"the database {connection.alias!r} is {connection.display_name}, which is not known here. Known: "
            f"{', '.join(sorted(VENDORS))}"
        )
    return known._replace(sql=_mysql_sql(connection)) if known is MYSQL else known


def _reply(request: SqlRequest, cursor: Any) -> Reply:
    return Reply(0, cursor.fetchall()) if request.rows else Reply(cursor.rowcount)


def _send_sqlite(connection: Any, request: SqlRequest) -> Reply:
    with connection.cursor() as cursor:
        cursor.execute(with_names(request.statement), sqlite.with_clock(request))
        return _reply(request, cursor)


SQLITE: Final = Vendor(
    sqlite.SQLITE_ORM,
    _send_sqlite,
    sqlite.transaction_status,
    sqlite.classify,
    begin=sqlite.BEGIN,
    makes_tables_inside=True,
)


def _send_postgres(connection: Any, request: SqlRequest) -> Reply:
    with connection.cursor() as cursor:
        cursor.execute(with_names(request.statement), request.values)
        return postgres.plain(_reply(request, cursor))


POSTGRES: Final = Vendor(
    postgres.POSTGRES,
    _send_postgres,
    postgres.transaction_status,
    postgres.classify,
    is_torn=postgres.is_torn,
    may_be_torn=postgres.is_torn,
    lock=postgres.LOCK,
)


def _send_mysql(connection: Any, request: SqlRequest) -> Reply:
    with connection.cursor() as cursor:
        mysql.before(connection.connection)
        cursor.execute(mysql.filled(request))
        reply = _reply(request, cursor)
        if request.rows:
            mysql.after(connection.connection, [column[0] for column in cursor.description], reply.rows)
        return reply


MYSQL: Final = Vendor(
    mysql.MYSQL,
    _send_mysql,
    mysql.transaction_status,
    mysql.classify,
    mysql.is_alive,
    is_torn=mysql.is_torn,
    may_be_torn=mysql.may_be_torn,
    is_behind=mysql.is_behind,
    lock=mysql.LOCK,
    unlock=mysql.UNLOCK,
)

# The server's version is known after the first connection.
_mysql_versions: dict[DatabaseId, str] = {}


def _mysql_sql(connection: Any) -> Dialect:
    if connection.connection is not None:
        _mysql_versions[database_id_of(connection)] = connection.connection.get_server_info()
    return mysql.sql_of(_mysql_versions.get(database_id_of(connection), ""))


# By Django's name for the database.
VENDORS: Final[dict[str, Vendor]] = {"mysql": MYSQL, "postgresql": POSTGRES, "sqlite": SQLITE}
