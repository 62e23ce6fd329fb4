"""MySQL and MariaDB through a library that stands between, such as SQLAlchemy or Django: what both have to know."""

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

# The modules of the drivers that a library may have below.
DRIVERS = ("MySQLdb", "asyncmy", "pymysql")


def sql_of(version: str) -> Dialect:
    """By what the server says of itself. MySQL's way works on MariaDB, too, at the cost of a statement."""
    return dialect_of(version)


def classify(error: BaseException) -> ErrorInfo | None:
    """What an error of a driver means."""
    for kind in type(error).__mro__:
        if kind.__module__.partition(".")[0] in DRIVERS:
            return meaning(error)
    return None


def gives_up(error: BaseException) -> bool:
    """Whether the server has rolled the whole transaction back, and not only the statement."""
    return number_of(error) in UNDOING


def before(connection: Any) -> None:
    """A statement is going to be sent: where its answer brings no flags, nothing has changed."""
    if hasattr(connection, "server_status"):
        connection.server_status |= IN_TRANSACTION


def after(connection: Any, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Rows came, and with them, where our statement asks for it, whether a transaction is open."""
    if hasattr(connection, "server_status") and rows and columns[-1] == "@@in_transaction":
        opened = IN_TRANSACTION if int(rows[0][-1]) else 0
        connection.server_status = connection.server_status & ~IN_TRANSACTION | opened


def transaction_status(connection: Any) -> TransactionStatus:
    """Where a connection stands by the server's last answer. What does not tell (mysqlclient), is believed."""
    if not getattr(connection, "open", getattr(connection, "connected", True)):
        return TransactionStatus.CLOSED if getattr(connection, "_closed", False) else TransactionStatus.BROKEN
    if is_torn(connection):
        return TransactionStatus.ABORTED
    if not hasattr(connection, "server_status"):
        return TransactionStatus.OPEN
    last = getattr(connection, "_result", None)
    if hasattr(connection, "connected") and last is not None and last.rows is None and not last.server_status:
        # asyncmy overlooks flags that are all off: autocommit off, and nothing open.
        return TransactionStatus.IDLE
    return TransactionStatus.OPEN if connection.server_status & IN_TRANSACTION else TransactionStatus.IDLE


def is_alive(connection: Any) -> bool:
    """Asks the server, whose answer brings its flags, too."""
    try:
        # By itself an older PyMySQL would connect anew, and nobody would see that the transaction is gone.
        connection.ping(False) if hasattr(connection, "server_status") else connection.ping()
    except Exception:  # noqa: BLE001 - whatever it is, there is no answer
        return False
    return True
