"""No command that only reads creates a table or a file, and on the wrong database each says so: on every store."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
from prometheus_client import CollectorRegistry
from typer.main import get_command
from typer.testing import CliRunner, Result

from onefold import Guard
from onefold.cli.app import COMMANDS, Tables, app
from onefold.metrics import prometheus, watched
from onefold.stores import schema
from onefold.stores.base import HasSchema
from onefold.stores.kinds import blocking
from onefold.stores.sqlite.dialect import SQLITE
from tests.stores.django.project import alias_of, project
from tests.stores.dynamodb.tools import plain_client, table_of
from tests.support import PATIENCE

CLICK: Any = get_command(app)

# Every way to use a command without writing: {url} is the store without tables, {full} one with a record,
# {shop} a database with a table of somebody's own.
WHY = ("--reason", "found on the statement", "--yes")
AT = ["--store", "{url}"]
ROWS = ("--table", "orders", "--key", "id", "--operation", "buy")
# Its store is opened before its broker.
REDRIVE = ("--broker", "amqp://127.0.0.1:1", "--dead-letters", "dead")
LINES: dict[str, list[list[str]]] = {
    "ls": [AT, ["--all", *AT]],
    "show": [["pay_1", *AT]],
    "held": [AT],
    "resolve": [["pay_1", "--done", *WHY, *AT], ["--operation", "charge", "--rerun", *WHY, "--dry-run", *AT]],
    "forget": [["pay_1", "--yes", *AT]],
    "erase": [[*AT, "--scope", "acme", "--dry-run"], [*AT, "--scope", "acme", "--yes"]],
    "redrive": [[*REDRIVE, "--bypass", "--reason", "INC-7", *AT]],
    "stats": [AT],
    "report": [[os.devnull, "--amount", "amount", *AT]],
    "top": [[*AT, "--once"]],
    "copy": [["--from", "{url}", "--to", "{new}", "--dry-run"], ["--from", "{url}", "--to", "{new}"]],
    "purge": [AT],
}
# These find no tables where they would write, which is no mistake: they say so, and count.
COUNTS: dict[str, list[list[str]]] = {
    "copy": [["--from", "{full}", "--to", "{url}", "--dry-run"]],
    "import": [["--from", "{shop}", *ROWS, "--to", "{url}", "--dry-run"]],
    "doctor": [AT],
    "schema": [AT],
}
# It creates its tables, as its help says, and has nothing to try out without them.
WRITES = {"demo"}

NO_TABLES = "no Onefold tables"


class Wrong(NamedTuple):
    """A database that is somebody else's, and what an independent look finds in it."""

    url: str
    look: Callable[[], object]


def sqlite_of_another(path: Path) -> Wrong:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id TEXT)")

    def look() -> object:
        with closing(sqlite3.connect(path)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master ORDER BY name").fetchall()
            return tables, connection.execute("PRAGMA journal_mode").fetchall()

    return Wrong(f"sqlite:///{path}", look)


def postgres_of_another(url: str) -> Wrong:
    def look() -> object:
        with psycopg.connect(url) as connection:
            return connection.execute(
                "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'public'::regnamespace ORDER BY 1"
            ).fetchall()

    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE orders (id TEXT)")
    return Wrong(url, look)


def mysql_of_another(url: str) -> Wrong:
    parts = urlsplit(url)
    options: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
    options |= {"password": parts.password or "", "database": parts.path[1:]}

    def asked(statement: str) -> object:
        with closing(pymysql.connect(**options)) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()

    asked("CREATE TABLE orders (id TEXT)")
    return Wrong(url, lambda: asked("SHOW TABLES"))


def dynamodb_without_table(url: str, client: Any) -> Wrong:
    def look() -> object:
        pages = client.get_paginator("list_tables").paginate()
        return table_of(url) in [name for page in pages for name in page["TableNames"]]

    return Wrong(url, look)


STORES = [
    "no file",
    "sqlite",
    "postgres",
    "asyncpg",
    "mariadb",
    pytest.param("dynamodb", marks=pytest.mark.more),
    "django",
]


@pytest.fixture(params=STORES)
def wrong(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wrong]:
    kind = request.param
    if kind == "no file":
        folder = tmp_path / "empty"
        folder.mkdir()
        yield Wrong(f"sqlite:///{folder}/typo.db", lambda: list(folder.iterdir()))
    elif kind == "sqlite":
        yield sqlite_of_another(tmp_path / "other.db")
    elif kind == "mariadb":
        yield mysql_of_another(request.getfixturevalue("mysql_url"))
    elif kind == "dynamodb":
        with plain_client(request.getfixturevalue("dynamodb_url")) as client:
            yield dynamodb_without_table(request.getfixturevalue("dynamodb_url"), client)
    elif kind == "django":
        other = sqlite_of_another(tmp_path / "django.db")
        with project(), alias_of("sqlite", str(tmp_path / "django.db")) as alias:
            yield other._replace(url=f"django://{alias}")
    else:
        other = postgres_of_another(request.getfixturevalue("postgres_url"))
        yield other if kind == "postgres" else other._replace(url=other.url.replace(":", "+asyncpg:", 1))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A store with a record, and a database with a table of somebody's own."""
    folder = tmp_path_factory.mktemp("others")
    with Guard(f"sqlite:///{folder}/full.db") as guard:
        guard.run("charge", "pay_1", lambda: 1)
    return {"full": f"sqlite:///{folder}/full.db", "shop": sqlite_of_another(folder / "shop.db").url}


@pytest.fixture
def arguments(wrong: Wrong, others: dict[str, str], tmp_path: Path) -> Callable[[list[str]], list[str]]:
    """Fill the places of a line."""
    known = others | {"url": wrong.url, "new": f"sqlite:///{tmp_path}/new.db"}
    return lambda line: [word.format(**known) for word in line]


def every(table: dict[str, list[list[str]]]) -> list[tuple[str, list[str]]]:
    return [(name, line) for name, lines in table.items() for line in lines]


def run(name: str, *line: str) -> Result:
    return CliRunner().invoke(app, [name, *line], catch_exceptions=False)


def test_every_command_that_opens_a_store_is_tried_without_tables() -> None:
    opening = {name for name, command in COMMANDS.items() if command.tables is not Tables.NONE}
    needing = {name for name, command in COMMANDS.items() if command.tables is Tables.NEEDS}

    assert set(CLICK.commands) == set(COMMANDS)
    assert LINES.keys() | COUNTS.keys() | WRITES == opening
    assert needing <= LINES.keys()
    assert not needing & COUNTS.keys()


def test_every_dry_run_is_tried_without_tables() -> None:
    dry = {name for name, one in CLICK.commands.items() if any("--dry-run" in option.opts for option in one.params)}

    tried = {name for table in (LINES, COUNTS) for name, lines in table.items() if any("--dry-run" in x for x in lines)}

    assert dry
    assert tried == dry


# The refusal comes before anything is printed: one form is enough for every day.
@pytest.mark.parametrize("form", ["json", pytest.param("table", marks=pytest.mark.more)])
def test_what_needs_tables_says_in_one_line_that_there_are_none_and_creates_none(
    wrong: Wrong, arguments: Callable[[list[str]], list[str]], form: str, tmp_path: Path
) -> None:
    before = wrong.look()
    for name, line in every(LINES):
        if name == "purge" and wrong.url.startswith("dynamodb:"):
            # DynamoDB removes records by itself: the store is not even opened.
            continue

        said = run(name, *arguments(line), "--format", form)

        assert said.exit_code == 1, (name, said.output)
        assert said.stdout == "", name
        assert said.stderr.count("\n") == 1, said.stderr
        assert NO_TABLES in said.stderr
        assert wrong.look() == before, name
        assert not (tmp_path / "new.db").exists(), name


def test_what_would_create_tables_creates_none_before_it_is_told_to(
    wrong: Wrong, arguments: Callable[[list[str]], list[str]]
) -> None:
    before = wrong.look()
    for name, line in every(COUNTS):
        said = run(name, *arguments(line))

        assert said.exit_code == (2 if name == "doctor" and "typo.db" in wrong.url else 0), (name, said.output)
        assert name in ("doctor", "schema") or NO_TABLES in said.stderr
        assert wrong.look() == before, name


def test_a_scrape_creates_no_tables_and_says_that_there_are_none(
    wrong: Wrong, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watched, "PATIENCE", PATIENCE)
    before, registry = wrong.look(), CollectorRegistry()
    uninstall = prometheus.install(registry=registry, stores={"money": wrong.url})

    up = registry.get_sample_value("onefold_store_up", {"store": "money"})
    uninstall()

    assert up == 0.0
    assert NO_TABLES in caplog.text
    assert wrong.look() == before


def test_of_several_stores_those_with_tables_are_counted_and_the_others_named(
    others: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "onefold.yaml"
    file.write_text(
        f"stores: {{typo: {{url: 'sqlite:///{tmp_path}/typo.db'}}, full: {{url: '{others['full']}'}}}}\n"
        "guards: {one: {store: typo}, two: {store: full}}\n"
    )

    said = run("stats", "--store", str(file), "--format", "json")

    typo, full = json.loads(said.stdout)
    assert said.exit_code == 1
    assert NO_TABLES in typo["error"]
    assert NO_TABLES in said.stderr
    assert (full["name"], full["records"]) == ("full", 1)


def test_a_file_that_is_no_database_is_told_before_anything_is_created(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("hello, this is no database")

    said = run("copy", "--from", f"sqlite:///{tmp_path}/notes.db", "--to", f"sqlite:///{tmp_path}/new.db")

    assert said.exit_code == 1
    assert "is not an SQLite database" in said.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["notes.db"]


def test_tables_of_an_older_version_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "older.db"
    with closing(sqlite3.connect(path)) as connection:
        for statement in SQLITE.versions[0]:
            connection.execute(statement)
        connection.commit()

    said = run("held", "--store", f"sqlite:///{path}")

    assert said.exit_code == 0, said.output
    with closing(sqlite3.connect(path)) as connection:
        assert [*connection.execute("SELECT version FROM onefold_schema")] == [(1,)]


def test_a_store_can_say_whether_its_tables_exist(wrong: Wrong) -> None:
    url = blocking(wrong.url)
    with Guard(url) as guard:
        assert isinstance(guard.store, HasSchema)
        before = guard.store.schema_exists()
    schema.apply(url)
    with Guard(url) as guard:
        after = guard.store.schema_exists()

    assert (before, after) == (False, True)
