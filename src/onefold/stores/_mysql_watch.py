"""What the errors of a handler's statements have done to a connection of ours.

Whether the transaction is still the one that wrote the record is not looked for here: a handler can end it in more ways
than a client sees. The server proves that, by a savepoint. Nothing here sends anything.
"""

from __future__ import annotations

from typing import Final

from onefold.stores._mysql_errors import UNDOING, meaning, number_of
from onefold.stores._sql_links import Kind

# The flag of the server's answers that says whether a transaction is open.
IN_TRANSACTION: Final = 1


class Watch:
    """Of one connection: what errors have left of its transaction, and of itself."""

    def __init__(self) -> None:
        # Not to be used again.
        self.broken = False
        self._lent = False
        self._undone_by: Exception | None = None

    def begin(self) -> None:
        """Begin a transaction whose connection is lent to a handler."""
        self._lent = True
        self._undone_by = None

    def failed(self, error: Exception) -> None:
        if meaning(error).kind is Kind.LOST:
            self.broken = True
        elif self._lent and number_of(error) in UNDOING:
            self._undone_by = error

    @property
    def is_undone(self) -> bool:
        """Whether an error has rolled the transaction back, as a deadlock does."""
        return self._undone_by is not None

    def check(self) -> None:
        """Raise the error that has undone the transaction, for whoever would go on without its record.

        A new transaction may succeed, as if the handler had let the error out.
        """
        if self._undone_by is not None:
            raise self._undone_by
