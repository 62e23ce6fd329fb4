"""A plain, read-only connection to a database, by the URL and the driver of its store: for tables that are not ours.

It creates no tables and writes nothing. Each page is read in its own transaction, so that nobody waits for us.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, Final, NamedTuple

from onefold.errors import StoreUnavailable, UsageError
from onefold.stores.opening import module_of, schemes

Rows = list[tuple[Any, ...]]

# A tool is not in a hurry: it uses the sync driver of the same database.
_AWAITED: Final = re.compile(r"^(postgresql|postgres|mysql|mariadb)\+(asyncpg|asyncmy):", re.IGNORECASE)


class Now(NamedTuple):
    """The database's own time: with its zone, and as it writes a time without one."""

    aware: datetime
    naive: datetime


class Reader(ABC):
    """One connection. A database error is raised as `StoreUnavailable`, in one line."""

    # For messages: without a password.
    name: str
    mark: str = "%s"
    quote: str = '"'
    tables: str

    def rows(self, statement: str, values: Sequence[Any] = ()) -> Rows:
        """Return all rows. `statement` has `mark` for each of the values, and quoted names."""
        return self._asked(statement, values)[1]

    def columns(self, table: str) -> list[str]:
        """Return the names of the table's columns; `table` is quoted."""
        return self._asked(f"SELECT * FROM {table} WHERE 1 = 0", ())[0]  # noqa: S608 - the name is quoted

    def named(self, name: str) -> str:
        """Return the name of a table or column, quoted: it cannot be anything else in a statement."""
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
    """Open a reader for the database behind this URL, the same as a guard takes; only for SQL databases."""
    module_of(url)
    scheme = url.partition(":")[0].lower().partition("+")[0]
    kinds: dict[str, Callable[[str], Reader]] = {
        "sqlite": _Sqlite,
        "postgresql": _Postgres,
        "postgres": _Postgres,
        "mysql": _Mysql,
        "mariadb": _Mysql,
    }
    kind = kinds.get(scheme) if scheme in schemes() else None
    if kind is None:
        raise UsageError(f"{scheme}: has no tables to read. Name a database by sqlite:, postgresql: or mysql:")
    reader = kind(_AWAITED.sub(r"\1:", url))
    try:
        yield reader
    finally:
        reader.close()


class _Sqlite(Reader):
    mark = "?"
    tables = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"

    def __init__(self, url: str) -> None:
        from onefold.stores.sqlite import open_store

        self.name = open_store(url).path
        if not os.path.exists(self.name):
            raise StoreUnavailable(f"there is no file {self.name}")
        self._connection = sqlite3.connect(self.name, isolation_level=None)
        self._connection.execute("PRAGMA query_only = ON")

    def now(self) -> Now:
        # Like CURRENT_TIMESTAMP: the machine's clock, in UTC.
        aware = datetime.fromtimestamp(time.time(), UTC)
        return Now(aware, aware.replace(tzinfo=None))

    def close(self) -> None:
        self._connection.close()

    def _asked(self, statement: str, values: Sequence[Any]) -> tuple[list[str], Rows]:
        try:
            cursor = self._connection.execute(statement, values)
            return [column[0] for column in cursor.description], cursor.fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from error


class _Postgres(Reader):
    tables = (
        "SELECT c.relname FROM pg_catalog.pg_class AS c WHERE pg_catalog.pg_table_is_visible(c.oid) "
        "AND c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relnamespace <> 'pg_catalog'::regnamespace"
    )

    def __init__(self, url: str) -> None:
        from onefold.stores.postgres.urls import place_of

        place = place_of(url)
        self.name = place.name
        pools = _driver("postgres.psycopg.pool", "PostgreSQL", "postgres")
        self._connection = pools.Opener(place)().connection
        self._connection.read_only = True

    def now(self) -> Now:
        ((aware, naive),) = self.rows("SELECT clock_timestamp(), clock_timestamp()::timestamp")
        return Now(aware, naive)

    def close(self) -> None:
        self._connection.close()

    def _asked(self, statement: str, values: Sequence[Any]) -> tuple[list[str], Rows]:
        import psycopg

        try:
            with self._connection.transaction():
                cursor = self._connection.execute(statement, list(values), prepare=False)
                return [column.name for column in cursor.description], cursor.fetchall()
        except psycopg.Error as error:
            raise self._failed(error) from error


class _Mysql(Reader):
    quote = "`"
    tables = "SELECT table_name FROM information_schema.tables WHERE table_schema = database()"

    def __init__(self, url: str) -> None:
        from onefold.stores.mysql.urls import place_of

        place = place_of(url, "pymysql")
        self.name = place.name
        links = _driver("mysql.pymysql.connection", "MySQL", "mysql")
        try:
            self._connection = links.for_transactions(place).connection
        except Exception as error:
            if links.trouble(error) is None:
                raise
            raise StoreUnavailable(f"{self.name}: {error.args[-1]}") from error

    def now(self) -> Now:
        ((aware, naive),) = self.rows("SELECT UTC_TIMESTAMP(6), NOW(6)")
        return Now(aware.replace(tzinfo=UTC), naive)

    def close(self) -> None:
        self._connection.close()

    def _asked(self, statement: str, values: Sequence[Any]) -> tuple[list[str], Rows]:
        from pymysql.constants import FIELD_TYPE
        from pymysql.err import MySQLError

        try:
            with self._connection.cursor() as cursor:
                cursor.execute("START TRANSACTION READ ONLY")
                cursor.execute(statement, tuple(values))
                described = [(column[0], column[1] == FIELD_TYPE.JSON) for column in cursor.description]
                rows = [*cursor.fetchall()]
            self._connection.rollback()
        except MySQLError as error:
            raise StoreUnavailable(f"{self.name}: {error.args[-1]}") from error
        return [name for name, _ in described], [_parsed(row, described) for row in rows]


def _parsed(row: tuple[Any, ...], described: list[tuple[str, bool]]) -> tuple[Any, ...]:
    """Parse JSON columns, which come as text; other texts stay texts."""
    cells = zip(row, described, strict=True)
    return tuple(json.loads(cell) if is_json and isinstance(cell, str) else cell for cell, (_, is_json) in cells)


def _driver(module: str, what: str, extra: str) -> Any:
    try:
        return import_module(f"onefold.stores.{module}")
    except ModuleNotFoundError as error:
        raise UsageError(f"{what} needs the package {error.name}: pip install 'onefold[{extra}]'") from error
