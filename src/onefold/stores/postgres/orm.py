"""PostgreSQL through a library that stands between, such as SQLAlchemy or Django: what both have to know."""

from __future__ import annotations

from typing import Any, Final

from onefold.stores.postgres.dialect import LOCK, POSTGRES
from onefold.stores.postgres.errors import meaning, one_line
from onefold.stores.sql.connection import ErrorClass, ErrorInfo, TransactionStatus
from onefold.stores.sql.dialect import Reply

__all__ = ["LOCK", "POSTGRES"]

# The modules of the drivers that a library may have below.
DRIVERS: Final = ("asyncpg", "psycopg", "psycopg2")

# libpq's words for a statement that is under way, and for a transaction that was given up. psycopg and psycopg2 pass
# them on.
ACTIVE: Final = 1
IN_ERROR: Final = 3


def classify(error: BaseException) -> ErrorInfo | None:
    """Classify an error of a driver: by its code, and where the server has sent none, by its class."""
    kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.partition(".")[0] in DRIVERS}
    if not kinds:
        return None
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if code is not None:
        return meaning(code, str(error))
    if kinds & {"OperationalError", "InternalError"}:
        # The server could not say anything any more; or a pooler before it has said more than was asked.
        return ErrorInfo(ErrorClass.LOST, f"the connection was lost, or did not come about: {one_line(str(error))}")
    return ErrorInfo(ErrorClass.MISTAKE, f"the driver says: {one_line(str(error))}")


def asyncpg_classify(error: BaseException) -> ErrorInfo | None:
    """Classify an error of asyncpg, which leaves what happens on the way to the server as it is.

    psycopg does not: there an OSError, a TimeoutError among them, was raised by a signal handler.
    """
    if isinstance(error, OSError):
        return ErrorInfo(ErrorClass.DOWN, f"the server is not reached: {error}")
    return classify(error)


def plain(reply: Reply) -> Reply:
    """With bytes where psycopg2 gives a view of the memory."""
    if not any(isinstance(cell, memoryview) for row in reply.rows for cell in row):
        return reply
    rows = [[bytes(cell) if isinstance(cell, memoryview) else cell for cell in row] for row in reply.rows]
    return Reply(reply.written, rows)


def is_torn(connection: Any) -> bool:
    """Return whether a statement is still under way: whoever waited for it was interrupted."""
    return not connection.closed and int(connection.info.transaction_status) == ACTIVE


def transaction_status(connection: Any) -> TransactionStatus:
    """Of a connection of psycopg or psycopg2."""
    if connection.closed:
        # psycopg2 counts: 1 is closed by hand, 2 is lost.
        lost = connection.broken if hasattr(connection, "broken") else connection.closed > 1
        return TransactionStatus.BROKEN if lost else TransactionStatus.CLOSED
    status = int(connection.info.transaction_status)
    if status == IN_ERROR:
        return TransactionStatus.ABORTED
    return TransactionStatus.OPEN if status else TransactionStatus.IDLE


def asyncpg_transaction_status(connection: Any) -> TransactionStatus:
    """It does not tell whether a transaction was given up."""
    if connection.is_closed():
        return TransactionStatus.BROKEN
    return TransactionStatus.OPEN if connection.is_in_transaction() else TransactionStatus.IDLE


def asyncpg_gives_up(error: BaseException) -> bool:
    """Whether the error came from the server, which gives a transaction up with every one."""
    found = error.__cause__ or error
    return getattr(found, "severity", None) is not None
