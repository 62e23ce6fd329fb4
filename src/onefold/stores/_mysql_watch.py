"""What became of a transaction of ours while a handler used its connection.

A handler that commits, or changes a table (which commits without a word), or goes on after a deadlock (which has rolled
everything back), would end with its record and its work apart. The driver's connection class is told of every statement
and tells it here. Nothing here sends anything.
"""

from __future__ import annotations

import re
from typing import Final

from onefold.errors import UsageError
from onefold.stores._mysql_errors import UNDOING, meaning, number_of
from onefold.stores._sql_joined_talks import ENDED
from onefold.stores._sql_links import Kind

# The flag of the server's answers that says whether a transaction is open.
IN_TRANSACTION: Final = 1

# These end what is open, and the flag does not show it: another one is open afterwards, or the answer brings no flag.
_ENDS: Final = re.compile(
    r"\s*(BEGIN(?!\s+NOT)|START\s+TRANSACTION|(COMMIT|ROLLBACK)(\s+WORK)?\s+AND|LOCK\s+TABLES?|"
    r"(ANALYZE|OPTIMIZE|REPAIR|CHECK)\s+(\w+\s+)?TABLE)\b",
    re.IGNORECASE,
)


class Watch:
    """Of one connection: what happened since its transaction was begun."""

    def __init__(self) -> None:
        # Not to be used again.
        self.broken = False
        self.begin()

    def begin(self) -> None:
        self._ended = False
        self._given_up: Exception | None = None

    def ended(self) -> None:
        """Whoever uses the connection has committed, rolled back or begun anew."""
        self._ended = True

    def answered(self, statement: str | bytes, *, in_transaction: bool) -> None:
        text = statement.decode(errors="replace") if isinstance(statement, bytes) else statement
        if not in_transaction or _ENDS.match(text):
            self._ended = True

    def failed(self, error: Exception) -> None:
        if meaning(error).kind is Kind.LOST:
            self.broken = True
        elif number_of(error) in UNDOING:
            self._given_up = error

    def check(self, *, in_transaction: bool) -> None:
        """Raise what keeps the record and the work from being committed together."""
        if self._given_up is not None:
            # A new transaction may succeed, as if the handler had let the error out.
            raise self._given_up
        if self._is_over(in_transaction):
            raise UsageError(ENDED)

    def note(self, error: BaseException, *, in_transaction: bool) -> None:
        """The handler's own error is the one to show; that it ended the transaction, too, is said besides."""
        if self._given_up is None and self._is_over(in_transaction):
            error.add_note(f"Besides, {ENDED}")

    def _is_over(self, in_transaction: bool) -> bool:  # noqa: FBT001
        if self.broken or (in_transaction and not self._ended):
            return False
        # Nobody knows in which state the handler has left it: locked tables, autocommit, a transaction of its own.
        self.broken = True
        return True
