"""Know whether the transaction that wrote a record is still open, without asking the server.

The server reports some of its parameters by itself, each time that they change. The statement that writes a record also
raises one of them until the end of the transaction. The server takes that back with the record, and reports it: at
COMMIT, at ROLLBACK, and when somebody goes back to a savepoint from before, however that was said. So while the
connection has the raised value as the last one reported, and its transaction is open, the record is there.

The parameter is `scram_iterations` (PostgreSQL 16 and newer), and it is raised by one: nobody sees it, and it changes
nothing, except that a password that is set in the same transaction is hashed once more. Whatever else the connection
reports proves nothing: then the server is asked.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

PARAMETER: Final = "scram_iterations"

# Far below what the server allows.
MARK_MAX: Final = 2_000_000_000

# In the statement that writes the record: evaluated only if it is written.
MARKING: Final = f"set_config('{PARAMETER}', :mark::text, true)"


class Marks:
    """The marks on one connection. Each is higher than all that are in use, and than all that the server may restore.

    Before the first mark of a transaction the parameter has its own value, and each later one is higher. So whatever
    a savepoint restores is lower than the marks that were set after it. A handler that has ended its transaction keeps
    its mark in use, until it has been told.
    """

    def __init__(self) -> None:
        # Whether the connection leads to the server itself. None: nobody has asked yet. A pooler lends a connection
        # from transaction to transaction, and need not pass on what the server reports.
        self.is_direct: bool | None = None
        self._in_use = 0
        self._highest = 0

    def next(self, reported: int | None) -> int | None:
        """Return the mark for a new record, or None if it would prove nothing."""
        if reported is None or not self.is_direct:
            return None
        mark = max(self._highest if self._in_use else 0, reported) + 1
        return mark if mark <= MARK_MAX else None

    def keep(self, mark: int) -> None:
        """Note that a record was written with this mark."""
        self._in_use += 1
        self._highest = mark

    def let_go(self) -> None:
        """Note that one of them is not needed any more."""
        self._in_use -= 1


# One for each connection, whoever delivers on it.
_known: Final[WeakKeyDictionary[Any, Marks]] = WeakKeyDictionary()


def marks_of(connection: Any) -> Marks:
    """Return the marks of a driver's connection."""
    found = _known.get(connection)
    if found is None:
        found = _known[connection] = Marks()
    return found
