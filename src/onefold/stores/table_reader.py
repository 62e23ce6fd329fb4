"""Read tables that are not ours, over the stores' own drivers. Each database brings its reader.

A reader never writes: its session is read-only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from typing import Any, NamedTuple

from onefold._checks import not_installed
from onefold.errors import StoreUnavailable, UsageError
from onefold.stores.kinds import blocking, kind_of, named, scheme_of, schemes
from onefold.stores.opening import module_of

Rows = list[tuple[Any, ...]]


class Now(NamedTuple):
    """The database's own time: with its zone, and as it writes a time without one."""

    aware: datetime
    naive: datetime


class Reader(ABC):
    """One connection. Database errors are raised as `StoreUnavailable`, on one line."""

    # The name for messages, without a password.
    name: str
    mark: str = "%s"
    quote: str = '"'
    tables: str

    def rows(self, statement: str, values: Sequence[Any] = ()) -> Rows:
        """Return all rows. `statement` has `mark` for each value, and otherwise only quoted names."""
        return self._asked(statement, values)[1]

    def columns(self, table: str) -> list[str]:
        """Return the names of the table's columns; `table` is quoted."""
        return self._asked(f"SELECT * FROM {table} WHERE 1 = 0", ())[0]  # noqa: S608 - the name is quoted

    def named(self, name: str) -> str:
        """Return the name of a table or column, quoted, so that it cannot be anything else in a statement."""
        quoted = self.quote + name.replace(self.quote, self.quote * 2) + self.quote
        return quoted if self.mark == "?" else quoted.replace("%", "%%")

    @abstractmethod
    def now(self) -> Now: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _asked(self, statement: str, values: Sequence[Any]) -> tuple[list[str], Rows]:
        """Return the names of the columns, and all rows."""

    def _failed(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"{self.name}: {' '.join(str(error).split())}")


@contextmanager
def reading(url: str) -> Iterator[Reader]:
    """Open a reader for the database of a guard's URL; only for SQL databases."""
    module_of(url)
    path = kind_of(url).table_reader
    if not path:
        raise UsageError(f"{scheme_of(url)}: has no tables to read. Name a database with {readable()}")
    reader: Reader = named(path)(blocking(url))
    try:
        yield reader
    finally:
        reader.close()


def readable() -> str:
    """Return the schemes with tables, one for each kind."""
    readers = {kind_of(scheme).table_reader: f"{scheme}:" for scheme in sorted(schemes()) if _has_tables(scheme)}
    *first, last = sorted(readers.values())
    return f"{', '.join(first)} or {last}"


def _has_tables(scheme: str) -> bool:
    try:
        return bool(kind_of(scheme).table_reader)
    except UsageError:
        # A dependency is not installed.
        return False


def driver(module: str, what: str, extra: str) -> Any:
    """Import a module of ours that needs a driver."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise not_installed(error.name or what, extra) from error
