"""The operations of a store on one SQLite connection, whoever's it is: it begins and ends no transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any, Final

from onefold._model import GONE, Address, Claim, Close, Ending, Entry, Gone, Memory, Record
from onefold.errors import StoreUnavailable
from onefold.stores._sql import (
    SQLITE,
    Parameters,
    is_own,
    of_address,
    of_claim,
    of_ending,
    of_entry,
    of_memory,
    record,
)
from onefold.stores.base import Query

# A record that is in the way of a claim can be released before it is read; each such race is one round.
ROUNDS_MAX: Final = 8


class Records:
    """The operations on one connection, by one clock. It begins and ends no transaction, and raises sqlite3 errors.

    A store works through it, and so does whoever writes a record in a transaction of the caller's.
    """

    def __init__(self, connection: sqlite3.Connection, clock: Callable[[], float] = time.time) -> None:
        self.connection = connection
        self._clock = clock

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        # It writes first and reads only when refused: in a caller's transaction a read before the write would
        # begin a snapshot, and SQLite refuses to write from an old one.
        statement, values = (SQLITE.insert if replacing is None else SQLITE.replace), of_entry(entry, replacing)
        for _ in range(ROUNDS_MAX):
            if self._writes(statement, values):
                return None
            found = self.read(entry.address)
            if found is not None:
                return None if is_own(found, entry, replacing) else found
            if replacing is not None:
                return GONE
        raise StoreUnavailable(
            f"{entry.address.operation} [key {entry.address.digest}]: its record came and went {ROUNDS_MAX} times "
            "during one claim. Deliver it again"
        )

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return self._writes(SQLITE.extend, of_claim(claim) | {"notes": notes})

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return self._writes(SQLITE.finish, of_claim(claim) | of_ending(ending))

    def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        if memory is None:
            released = self._writes(SQLITE.forget, of_claim(claim))
        else:
            released = self._writes(SQLITE.leave_open, of_claim(claim) | of_memory(memory))
        return released or self.read(claim.address) is None

    def close(self, close: Close) -> bool:
        """One ending of a batch."""
        if isinstance(close.by, Ending):
            return self.finish(close.claim, close.by)
        return self.release(close.claim, close.by)

    def read(self, address: Address) -> Record | None:
        rows = self._rows(SQLITE.read, of_address(address))
        return record(address, rows[0]) if rows else None

    def browse(self, query: Query, limit: int) -> list[Record]:
        return [record(Address(*row[:3]), row[3:]) for row in self._rows(*SQLITE.browse(query, limit))]

    def purge(self, limit: int) -> int:
        return self._execute(SQLITE.purge, {"limit": max(limit, 0)}).rowcount

    def _writes(self, statement: str, values: Parameters) -> bool:
        return self._execute(statement, values).rowcount == 1

    def _rows(self, statement: str, values: Parameters) -> list[Any]:
        # All of them: a cursor that is not at its end keeps its snapshot, and the WAL could not be emptied.
        return self._execute(statement, values).fetchall()

    def _execute(self, statement: str, values: Parameters) -> sqlite3.Cursor:
        cursor = self.connection.cursor()
        # The connection may be a caller's, who may want its rows in another form.
        cursor.row_factory = None
        return cursor.execute(statement, values | {"now": self._clock()})
