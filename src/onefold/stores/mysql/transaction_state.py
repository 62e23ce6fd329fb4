"""The effect of the errors of a handler's statements on a connection of ours.

Whether the transaction is still the one that wrote the record is not determined here: a handler can end it in more ways
than a client sees. The server proves that by a savepoint. Nothing here sends anything.
"""

from __future__ import annotations

from typing import Any, Final

from onefold.stores.mysql.errors import UNDOING, meaning, number_of
from onefold.stores.sql.connection import ErrorClass

# The flags of a server's reply that tell whether a transaction is open, and whether statements commit at once.
IN_TRANSACTION: Final = 1
AUTOCOMMIT: Final = 2


def is_torn(connection: Any) -> bool:
    """Return whether a statement was sent and none of its reply was read: the next one would read that reply.

    PyMySQL only. Other drivers wait in C, where a signal handler's exception cannot interrupt.
    """
    # PyMySQL counts the packets of a reply from 1, the one expected first.
    return may_be_torn(connection) and connection._next_seq_id == 1


def may_be_torn(connection: Any) -> bool:
    """Return whether a reply may be unread after an exception that no driver raised, even if partly read."""
    # PyMySQL drops its last result when it sends, and sets the next one when all of it was read. COMMIT has none.
    return hasattr(connection, "_next_seq_id") and getattr(connection, "_result", None) is None


def is_behind(connection: Any, *, autocommit: bool) -> bool:
    """Return whether the reply read after the end of a transaction belongs to an earlier statement."""
    if not hasattr(connection, "_next_seq_id"):
        return False
    # Each reply has the flags of its time, and Django changes this one at the end.
    return bool(connection.server_status & AUTOCOMMIT) != autocommit


class TransactionMonitor:
    """The state of one connection and its transaction after errors."""

    def __init__(self) -> None:
        # Not to be reused.
        self.broken = False
        self._lent = False
        self._undone_by: Exception | None = None

    def begin(self) -> None:
        """Begin a transaction whose connection is lent to a handler."""
        self._lent = True
        self._undone_by = None

    def failed(self, error: Exception) -> None:
        if meaning(error).kind is ErrorClass.LOST:
            self.broken = True
        elif self._lent and number_of(error) in UNDOING:
            self._undone_by = error

    @property
    def is_undone(self) -> bool:
        """Return whether an error has rolled the transaction back, as a deadlock does."""
        return self._undone_by is not None

    def check(self) -> None:
        """Raise the error that has rolled the transaction back, before work continues without its record.

        A new transaction may succeed, as if the handler had let the error out.
        """
        if self._undone_by is not None:
            raise self._undone_by
