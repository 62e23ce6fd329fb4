"""Databases with hand-made tables, and every way in which a guard reads them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

from onefold import AsyncGuard, Guard, HandMadeTable, Outcome

Execute = Callable[..., None]


class Database(NamedTuple):
    """One of the three, and how to send statements to it."""

    kind: str
    url: str
    execute: Execute


def opened(kind: str, request: pytest.FixtureRequest, folder: Path) -> tuple[str, Callable[[], Any]]:
    if kind == "sqlite":
        return f"sqlite:///{folder}/shop.db", lambda: sqlite3.connect(folder / "shop.db")
    if kind == "postgres":
        url = request.getfixturevalue("postgres_url")
        return url, lambda: psycopg.connect(url)
    url = request.getfixturevalue("mysql_url")
    parts = urlsplit(url)
    options: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
    options |= {"password": parts.password or "", "database": parts.path[1:]}
    return url, lambda: pymysql.connect(**options)


@contextmanager
def made(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Database]:
    url, connect = opened(kind, request, folder)
    with closing(connect()) as connection:

        def execute(statement: str, rows: Sequence[Sequence[Any]] | None = None) -> None:
            cursor = connection.cursor()
            marked = statement.replace("%s", "?") if kind == "sqlite" else statement
            cursor.execute(marked) if rows is None else cursor.executemany(marked, rows)
            cursor.close()
            connection.commit()

        yield Database(kind, url, execute)


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    with made(request.param, request, tmp_path) as database:
        yield database


class Way(NamedTuple):
    """A database, and the driver by which a guard reads its tables."""

    database: Database
    url: str
    is_async: bool

    def execute(self, statement: str, rows: Sequence[Sequence[Any]] | None = None) -> None:
        self.database.execute(statement, rows)

    def table(self, name: str, **columns: Any) -> HandMadeTable:
        return HandMadeTable(self.url, name, **columns)

    def deliver(self, table: HandMadeTable, operation: str, *keys: Any, **options: Any) -> list[Outcome[Any]]:
        """Deliver to a guard that has nothing but this table; the handler returns "ran"."""
        if self.is_async:
            return asyncio.run(self._deliver(table, operation, keys, options))
        with Guard("memory:", migrate_from=table) as guard:
            return [guard.run(operation, key, lambda: "ran", **options) for key in keys]

    async def _deliver(
        self, table: HandMadeTable, operation: str, keys: Sequence[Any], options: dict[str, Any]
    ) -> list[Outcome[Any]]:
        async def handler() -> Any:
            return "ran"

        async with AsyncGuard("memory:", migrate_from=table) as guard:
            return [await guard.run(operation, key, handler, **options) for key in keys]


# The schemes by which a guard opens each database; an async guard, if there is a plus.
DRIVERS = {
    "sqlite": ("sqlite", "sqlite+"),
    "postgres": ("postgresql", "postgresql+", "postgresql+asyncpg"),
    "mysql": ("mysql", "mysql+"),
}


@pytest.fixture(params=[scheme for schemes in DRIVERS.values() for scheme in schemes])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Way]:
    kind = next(kind for kind, schemes in DRIVERS.items() if request.param in schemes)
    with made(kind, request, tmp_path) as database:
        named = f"{request.param.removesuffix('+')}:{database.url.partition(':')[2]}"
        yield Way(database, named, "+" in request.param)
