"""PostgreSQL through a library in between, such as SQLAlchemy or Django: the parts that both share."""

from __future__ import annotations

from typing import Any, Final

from onefold.stores.postgres.dialect import LOCK, POSTGRES
from onefold.stores.postgres.errors import meaning, one_line
from onefold.stores.sql.connection import ErrorClass, ErrorInfo, TransactionStatus
from onefold.stores.sql.dialect import Reply

__all__ = ["LOCK", "POSTGRES"]

# The modules of the drivers that a library may use.
DRIVERS: Final = ("asyncpg", "psycopg", "psycopg2")

# libpq's codes for a statement in progress and for an aborted transaction; psycopg and psycopg2 pass them on.
ACTIVE: Final = 1
IN_ERROR: Final = 3


def classify(error: BaseException) -> ErrorInfo | None:
    """Classify a driver's error by its code or, if the server sent none, by its class."""
    kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.partition(".")[0] in DRIVERS}
    if not kinds:
        return None
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if code is not None:
        return meaning(code, str(error))
    if kinds & {"OperationalError", "InternalError"}:
        # The server could not reply any more; or a pooler in front of it has replied more than was asked.
        return ErrorInfo(ErrorClass.LOST, f"the connection was lost, or could not be made: {one_line(str(error))}")
    return ErrorInfo(ErrorClass.MISTAKE, f"the driver says: {one_line(str(error))}")


def asyncpg_classify(error: BaseException) -> ErrorInfo | None:
    """Classify an error of asyncpg, which does not wrap network errors.

    psycopg does: there an OSError, including TimeoutError, was raised by a signal handler.
    """
    if isinstance(error, OSError):
        return ErrorInfo(ErrorClass.DOWN, f"the server cannot be reached: {error}")
    return classify(error)


def plain(reply: Reply) -> Reply:
    """Replace psycopg2's memoryviews by bytes."""
    if not any(isinstance(cell, memoryview) for row in reply.rows for cell in row):
        return reply
    rows = [[bytes(cell) if isinstance(cell, memoryview) else cell for cell in row] for row in reply.rows]
    return Reply(reply.written, rows)


def is_torn(connection: Any) -> bool:
    """Return whether a statement is still in progress because the wait for it was interrupted."""
    return not connection.closed and int(connection.info.transaction_status) == ACTIVE


def transaction_status(connection: Any) -> TransactionStatus:
    """Return the transaction status of a connection of psycopg or psycopg2."""
    if connection.closed:
        # psycopg2 counts: 1 is closed by hand, 2 is lost.
        lost = connection.broken if hasattr(connection, "broken") else connection.closed > 1
        return TransactionStatus.BROKEN if lost else TransactionStatus.CLOSED
    status = int(connection.info.transaction_status)
    if status == IN_ERROR:
        return TransactionStatus.ABORTED
    return TransactionStatus.OPEN if status else TransactionStatus.IDLE


def asyncpg_transaction_status(connection: Any) -> TransactionStatus:
    """Return the transaction status of an asyncpg connection, which does not show whether it was aborted."""
    if connection.is_closed():
        return TransactionStatus.BROKEN
    return TransactionStatus.OPEN if connection.is_in_transaction() else TransactionStatus.IDLE


def asyncpg_gives_up(error: BaseException) -> bool:
    """Return whether the error came from the server, which aborts the transaction on every error."""
    found = error.__cause__ or error
    return getattr(found, "severity", None) is not None
