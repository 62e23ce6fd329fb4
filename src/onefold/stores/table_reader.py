"""Tables that are not ours, read over the stores' own drivers. Each database brings its reader.

It reads, and never writes: no reader is in a session that could.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from typing import Any, NamedTuple

from onefold.errors import StoreUnavailable, UsageError
from onefold.stores.kinds import blocking, kind_of, named, scheme_of, schemes
from onefold.stores.opening import module_of

Rows = list[tuple[Any, ...]]


class Now(NamedTuple):
    """The database's own time: with its zone, and as it writes a time without one."""

    aware: datetime
    naive: datetime


class Reader(ABC):
    """One connection. What the database says against a statement is raised as `StoreUnavailable`, in a line."""

    # For messages: without a password.
    name: str
    mark: str = "%s"
    quote: str = '"'
    tables: str

    def rows(self, statement: str, values: Sequence[Any] = ()) -> Rows:
        """All rows. `statement` has `mark` for each of the values, and is made of quoted names besides."""
        return self._asked(statement, values)[1]

    def columns(self, table: str) -> list[str]:
        """The names of the table's columns; `table` is quoted."""
        return self._asked(f"SELECT * FROM {table} WHERE 1 = 0", ())[0]  # noqa: S608 - the name is quoted

    def named(self, name: str) -> str:
        """The name of a table or column, quoted: it cannot be anything else in a statement."""
        quoted = self.quote + name.replace(self.quote, self.quote * 2) + self.quote
        return quoted if self.mark == "?" else quoted.replace("%", "%%")

    @abstractmethod
    def now(self) -> Now: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _asked(self, statement: str, values: Sequence[Any]) -> tuple[list[str], Rows]:
        """The names of the columns, and all rows."""

    def _failed(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"{self.name}: {' '.join(str(error).split())}")


@contextmanager
def reading(url: str) -> Iterator[Reader]:
    """A reader of the database behind this URL, the same as a guard takes; only for SQL databases."""
    module_of(url)
    path = kind_of(url).table_reader
    if not path:
        raise UsageError(f"{scheme_of(url)}: has no tables to read. Name a database by {_readable()}")
    reader: Reader = named(path)(blocking(url))
    try:
        yield reader
    finally:
        reader.close()


def _readable() -> str:
    """The schemes with tables, one for each kind."""
    readers = {kind_of(scheme).table_reader: f"{scheme}:" for scheme in sorted(schemes()) if _has_tables(scheme)}
    *first, last = sorted(readers.values())
    return f"{', '.join(first)} or {last}"


def _has_tables(scheme: str) -> bool:
    try:
        return bool(kind_of(scheme).table_reader)
    except UsageError:
        # What it needs is not installed.
        return False


def driver(module: str, what: str, extra: str) -> Any:
    """Import a module of ours that needs a driver."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{what} needs the package {error.name}: pip install 'onefold[{extra}]'") from error
