"""The tables from one version of the library to the next: brought forward, and usable by both versions meanwhile."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from onefold import Guard, State, StoreUnavailable
from onefold.stores import sqlite
from onefold.stores.base import Query
from onefold.stores.sql import dialect as sql_dialect
from onefold.stores.sql import records as _sql
from onefold.stores.sql.records import VERSION
from onefold.stores.sqlite import SqliteStore
from onefold.stores.sqlite.dialect import SQLITE
from tests.stores.sql.versions import TOO_NEW

# As version 1 made them, letter by letter; what is here must never be changed.
VERSION_1 = """
CREATE TABLE onefold_records (
    scope TEXT NOT NULL COLLATE BINARY,
    operation TEXT NOT NULL COLLATE BINARY,
    key TEXT NOT NULL COLLATE BINARY,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    began REAL NOT NULL,
    changed REAL NOT NULL,
    lease_until REAL NOT NULL,
    expires REAL,
    bypasses INTEGER NOT NULL,
    remark TEXT NOT NULL,
    revision INTEGER NOT NULL,
    token BLOB NOT NULL,
    fingerprint BLOB,
    notes BLOB,
    omitted INTEGER NOT NULL,
    result BLOB,
    PRIMARY KEY (scope, operation, key)
);
CREATE INDEX onefold_records_expires ON onefold_records (expires) WHERE expires IS NOT NULL;
CREATE TABLE onefold_schema (version INTEGER NOT NULL, usable_from INTEGER NOT NULL);
INSERT INTO onefold_schema VALUES (1, 1);
INSERT INTO onefold_records VALUES ('', 'charge', 'old', 'done', 1, {now}, {now}, {now}, NULL, 0, '', 2,
    x'00112233445566778899aabbccddeeff', NULL, NULL, 0, x'00a56d61676963');
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that version 1 has used."""
    path = tmp_path / "records.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_1.format(now=time.time()))
    return path


@pytest.fixture
def old_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The code believes that it is of version 1."""
    for module in (_sql, sql_dialect, sqlite):
        monkeypatch.setattr(module, "VERSION", 1)
    yield
    monkeypatch.undo()


def version_of(path: Path) -> tuple[int, int]:
    with closing(sqlite3.connect(path)) as connection:
        (found,) = connection.execute("SELECT version, usable_from FROM onefold_schema").fetchall()
    return found  # type: ignore[no-any-return]


def test_every_version_has_its_step() -> None:
    assert len(SQLITE.versions) == VERSION


def test_the_tables_of_the_version_before_are_brought_forward_and_forget_nothing(path: Path) -> None:
    with Guard(f"sqlite:///{path}") as guard:
        again = guard.run("charge", "old", lambda: pytest.fail("it ran again"), returns=str)
        guard.run("charge", "new", lambda: "value")

    assert again.replayed
    assert again.value == "magic"
    assert version_of(path) == (2, 1)


def test_the_version_before_goes_on_working_on_the_tables_of_this_one(path: Path, old_library: None) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in SQLITE.versions[1]:
            connection.execute(statement)

    with Guard(f"sqlite:///{path}") as guard:
        guard.run("charge", "new", lambda: "value")
        again = guard.run("charge", "new", lambda: pytest.fail("it ran again"), returns=str)

    assert again.replayed
    assert version_of(path) == (2, 1)


def test_this_version_works_on_the_tables_of_the_one_before_where_it_may_not_change_them(path: Path) -> None:
    store = SqliteStore(path, auto_schema=False)

    with Guard(store) as guard:
        assert guard.run("charge", "old", lambda: pytest.fail("it ran again"), returns=str).replayed
        assert not guard.run("charge", "new", lambda: "value").replayed

    assert version_of(path) == (1, 1)
    store.close()


def test_within_works_on_the_tables_of_the_version_before_and_leaves_them_as_they_are(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, Guard("memory:") as guard, connection:
        assert guard.within(connection).run("charge", "old", lambda: pytest.fail("it ran"), returns=str).replayed

    assert version_of(path) == (1, 1)


def test_a_version_that_is_not_usable_any_more_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(TOO_NEW)

    with Guard(f"sqlite:///{path}") as guard, pytest.raises(StoreUnavailable, match="Upgrade Onefold"):
        guard.run("charge", "new", lambda: pytest.fail("it ran"))


def test_a_page_of_held_records_costs_only_them(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        store.browse(Query(state=State.HELD), 10)
    statement, values = SQLITE.page(Query(state=State.HELD), 10)
    with closing(sqlite3.connect(path)) as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}", values | {"now": 0.0}).fetchall()

    assert "onefold_records_held" in str(plan)
