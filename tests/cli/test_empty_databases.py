"""Every command leaves an empty database as it was, table for table, unless it is told to write."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
import redis

from tests.cli.test_tables import COUNTS, LINES, Wrong, every, others, run
from tests.stores.dynamodb.tools import plain_client, table_of
from tests.support import PATIENCE

__all__ = ["others"]

# They write to the store that they are told to write to: see `test_what_writes_on_purpose_does`.
ON_PURPOSE = {
    "schema": ["--store", "{url}", "--apply"],
    "copy": ["--from", "{full}", "--to", "{url}"],
    "import": ["--from", "{shop}", "--table", "orders", "--key", "id", "--operation", "buy", "--to", "{url}"],
}


def sqlite_look(path: Path) -> object:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()


def postgres_look(url: str) -> object:
    """Relations, functions, types and schemas, wherever they are but in the server's own schemas."""
    ours = "n.nspname !~ '^(pg_|information_schema$)'"
    asked = [
        f"SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE {ours}",
        f"SELECT n.nspname, p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace WHERE {ours}",
        f"SELECT n.nspname, t.typname FROM pg_type t JOIN pg_namespace n ON n.oid = typnamespace WHERE {ours}",
        f"SELECT n.nspname FROM pg_namespace n WHERE {ours}",
    ]
    with psycopg.connect(url) as connection:
        return [sorted(connection.execute(statement.encode()).fetchall()) for statement in asked]


def mysql_look(url: str) -> object:
    parts = urlsplit(url)
    options: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
    options |= {"password": parts.password or "", "database": parts.path[1:]}
    with closing(pymysql.connect(**options)) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW FULL TABLES")
        tables = cursor.fetchall()
        cursor.execute("SELECT routine_name FROM information_schema.routines WHERE routine_schema = DATABASE()")
        return tables, cursor.fetchall()


def redis_look(url: str) -> object:
    with closing(redis.Redis.from_url(url, socket_timeout=PATIENCE)) as client:
        return sorted(client.scan_iter("*"))


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "redis", pytest.param("dynamodb", marks=pytest.mark.more)])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wrong]:
    """A database without a table, and an independent look at it."""
    match request.param:
        case "sqlite":
            path = tmp_path / "empty.db"
            sqlite3.connect(path).close()
            yield Wrong(f"sqlite:///{path}", lambda: sqlite_look(path))
        case "postgres":
            url = request.getfixturevalue("postgres_url")
            yield Wrong(url, lambda: postgres_look(url))
        case "mariadb":
            url = request.getfixturevalue("mysql_url")
            yield Wrong(url, lambda: mysql_look(url))
        case "redis":
            url = request.getfixturevalue("redis_url")
            yield Wrong(url, lambda: redis_look(url))
        case _:
            url = request.getfixturevalue("dynamodb_url")
            with plain_client(url) as client:
                # The server is shared: other tests create tables of other names.
                pages = client.get_paginator("list_tables")
                yield Wrong(
                    url, lambda: [x for page in pages.paginate() for x in page["TableNames"] if x == table_of(url)]
                )


@pytest.mark.parametrize("form", ["table", "json"])
def test_every_command_leaves_an_empty_database_as_it_was(
    empty: Wrong, others: dict[str, str], tmp_path: Path, form: str
) -> None:
    before = empty.look()
    known = others | {"url": empty.url, "new": f"sqlite:///{tmp_path}/new.db"}

    # `copy` without a dry run writes to {new}, and reads the empty database.
    for name, line in every(LINES) + every(COUNTS):
        said = run(name, *(word.format(**known) for word in line), "--format", form)

        assert empty.look() == before, (name, said.output)
        assert said.exit_code in (0, 1), (name, said.output)
        assert "Traceback" not in said.output


@pytest.mark.parametrize("name", sorted(ON_PURPOSE))
def test_what_writes_on_purpose_does(empty: Wrong, others: dict[str, str], name: str) -> None:
    before = empty.look()
    if name == "import":
        with closing(sqlite3.connect(others["shop"].removeprefix("sqlite:///"))) as connection, connection:
            connection.execute("INSERT INTO orders VALUES ('order_1')")

    said = run(name, *(word.format(**others | {"url": empty.url}) for word in ON_PURPOSE[name]))

    assert said.exit_code == 0, said.output
    # Redis needs no tables.
    assert (empty.look() != before) is not (name == "schema" and empty.url.startswith("redis"))
