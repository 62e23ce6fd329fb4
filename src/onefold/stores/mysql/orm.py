"""MySQL and MariaDB through a library in between, such as SQLAlchemy or Django: the parts that both share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.stores.mysql.dialect import LOCK, MARIADB, MYSQL, UNLOCK, dialect_of
from onefold.stores.mysql.errors import UNDOING, meaning, number_of
from onefold.stores.mysql.statements.literals import filled
from onefold.stores.mysql.transaction_state import IN_TRANSACTION, is_behind, is_torn, may_be_torn
from onefold.stores.sql.connection import ErrorInfo, TransactionStatus
from onefold.stores.sql.dialect import Dialect

__all__ = ["LOCK", "MARIADB", "MYSQL", "UNLOCK", "filled", "is_behind", "is_torn", "may_be_torn"]

# The modules of the drivers that a library may use.
DRIVERS = ("MySQLdb", "asyncmy", "pymysql")


def sql_of(version: str) -> Dialect:
    """Return the dialect for the server's version. MySQL's works on MariaDB, too, at the cost of a statement."""
    return dialect_of(version)


def classify(error: BaseException) -> ErrorInfo | None:
    """Classify an error of a driver; return None for any other."""
    for kind in type(error).__mro__:
        if kind.__module__.partition(".")[0] in DRIVERS:
            return meaning(error)
    return None


def gives_up(error: BaseException) -> bool:
    """Return whether the server has rolled back the whole transaction, not only the statement."""
    return number_of(error) in UNDOING


def before(connection: Any) -> None:
    """Assume an open transaction before a statement is sent, for replies that carry no flags."""
    if hasattr(connection, "server_status"):
        connection.server_status |= IN_TRANSACTION


def after(connection: Any, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Update the transaction flag after a reply, if our statement selected `@@in_transaction`."""
    if hasattr(connection, "server_status") and rows and columns[-1] == "@@in_transaction":
        opened = IN_TRANSACTION if int(rows[0][-1]) else 0
        connection.server_status = connection.server_status & ~IN_TRANSACTION | opened


def transaction_status(connection: Any) -> TransactionStatus:
    """Return the status by the server's last reply. A driver that does not report it (mysqlclient) counts as open."""
    if not getattr(connection, "open", getattr(connection, "connected", True)):
        return TransactionStatus.CLOSED if getattr(connection, "_closed", False) else TransactionStatus.BROKEN
    if is_torn(connection):
        return TransactionStatus.ABORTED
    if not hasattr(connection, "server_status"):
        return TransactionStatus.OPEN
    last = getattr(connection, "_result", None)
    if hasattr(connection, "connected") and last is not None and last.rows is None and not last.server_status:
        # asyncmy ignores flags that are all off: autocommit off, and no transaction open.
        return TransactionStatus.IDLE
    return TransactionStatus.OPEN if connection.server_status & IN_TRANSACTION else TransactionStatus.IDLE


def is_alive(connection: Any) -> bool:
    """Ping the server; its reply also updates the flags."""
    try:
        # An older PyMySQL would reconnect by default, hiding that the transaction is gone.
        connection.ping(False) if hasattr(connection, "server_status") else connection.ping()
    except Exception:  # noqa: BLE001 - any error means that there is no reply
        return False
    return True
