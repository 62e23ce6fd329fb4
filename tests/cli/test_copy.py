"""`onefold copy` and `onefold import`: from store to store and from a table, for people, pipes and scripts."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onefold import Guard, Record, State, StoreUnavailable
from onefold.cli._common import find
from onefold.cli.app import app
from onefold.stores.base import Gone, Query
from onefold.stores.sqlite import SqliteStore
from tests.cli.test_records import MAIN, Shelf, closed_port, on_a_terminal, refused
from tests.support import PATIENCE

__all__ = ["closed_port"]


def onefold(*arguments: str) -> Result:
    return CliRunner(env={"ONEFOLD_STORE": None}).invoke(app, list(arguments), catch_exceptions=False)


def said(*arguments: str, status: int = 0) -> Any:
    """The JSON that a command prints."""
    result = onefold(*arguments, "--format", "json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path / "old.db")
    shelf.store.purge(0)
    yield shelf
    shelf.guard.close()
    shelf.store.close()


@pytest.fixture
def new(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/new.db"


# --- copy


def test_copy_says_what_it_did_and_a_second_run_that_it_was_done(old: Shelf, new: str) -> None:
    old.guard.run("charge", "pay_1", lambda: "paid")
    old.hold("pay_2", scope="acme")

    first, second = onefold("copy", "--from", old.url, "--to", new), onefold("copy", "--from", old.url, "--to", new)

    assert (first.stdout, first.stderr, first.exit_code) == ("2 copied, 0 already there\n", "", 0)
    assert (second.stdout, second.exit_code) == ("0 copied, 2 already there\n", 0)
    with Guard(new) as guard:
        assert guard.run("charge", "pay_1", pytest.fail).value == "paid"


def test_copy_as_json_has_all_counts(old: Shelf, new: str) -> None:
    old.put("a"), old.put("b", State.RUNNING, lease=60.0)

    assert said("copy", "--from", old.url, "--to", new, status=1) == {
        "seen": 2,
        "copied": 1,
        "updated": 0,
        "there": 0,
        "running": 1,
        "refused": 0,
        "complete": False,
        "dry_run": False,
    }


def test_what_runs_now_ends_with_one_and_a_line_so_that_a_script_runs_it_again(old: Shelf, new: str) -> None:
    old.put("a", State.RUNNING, lease=60.0)

    result = onefold("copy", "--from", old.url, "--to", new)

    assert result.exit_code == 1
    assert result.stdout == "0 copied, 0 already there, 1 running\n"
    assert result.stderr == (
        "onefold: a worker runs 1 of them, which were not copied. Run it again when they have ended\n"
    )


def test_what_ended_since_is_said(old: Shelf, new: str) -> None:
    old.put("a", State.OPEN)
    onefold("copy", "--from", old.url, "--to", new)
    old.guard.run("charge", "a", lambda: "paid")

    assert "1 would be finished in NEW" in onefold("copy", "--from", old.url, "--to", new, "--dry-run").stdout
    assert onefold("copy", "--from", old.url, "--to", new).stdout == (
        "0 copied, 1 finished in NEW, as they have ended in OLD, 0 already there\n"
    )


def test_a_dry_run_makes_no_file(old: Shelf, new: str, tmp_path: Path) -> None:
    old.put("a")

    result = onefold("copy", "--from", old.url, "--to", new, "--dry-run")

    assert (result.stdout, result.exit_code) == ("1 would be copied, 0 already there\n", 0)
    assert not (tmp_path / "new.db").exists()


def test_an_operation_that_matches_nothing_is_said_with_those_that_there_are(old: Shelf, new: str) -> None:
    old.put("a"), old.put("b", operation="mail"), old.put("c", scope="acme", operation="audit")

    result = onefold("copy", "--from", old.url, "--to", new, "--operation", "charg")

    assert (result.stdout, result.exit_code) == ("0 copied, 0 already there\n", 1)
    assert result.stderr == (
        "onefold: no record of OLD matches --operation charg: nothing was copied. "
        "Its operations are audit, charge, mail\n"
    )
    assert (
        said("copy", "--from", old.url, "--to", new, "--operation", "charg", "--dry-run", status=1)["complete"] is False
    )


def test_a_scope_that_matches_nothing_is_said(old: Shelf, new: str) -> None:
    old.put("a", scope="acme")

    for arguments in (["--scope", "acne"], ["--scope", "acne", "--operation", "charge"]):
        result = onefold("copy", "--from", old.url, "--to", new, *arguments)

        assert result.exit_code == 1
        assert "no record of OLD matches --scope acne" in result.stderr
        assert "Its operations" not in result.stderr, "it is the scope that has no records"
    within = onefold("copy", "--from", old.url, "--to", new, "--scope", "acme", "--operation", "mail")
    assert "matches --scope acme --operation mail: nothing was copied. Its operations are charge\n" in within.stderr


def test_only_the_first_records_are_looked_at_for_names(old: Shelf, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "LOOKED_AT_MAX", 2)
    monkeypatch.setattr(find, "NAMED_MAX", 1)
    old.put("a", operation="a"), old.put("b", operation="b"), old.put("c", operation="c")

    result = onefold("copy", "--from", old.url, "--to", new, "--operation", "d")

    assert result.stderr.endswith("Among its operations is a; `onefold stats` names all\n")


def test_an_empty_store_is_copied_with_a_word_about_it(old: Shelf, new: str) -> None:
    result = onefold("copy", "--from", old.url, "--to", new)

    assert (result.stdout, result.exit_code) == ("0 copied, 0 already there\n", 0)
    assert result.stderr == "onefold: there are no records in OLD\n"


def test_copy_takes_one_scope_or_operation(old: Shelf, new: str) -> None:
    old.put("a", scope="acme"), old.put("b", operation="mail"), old.put("c")

    assert said("copy", "--from", old.url, "--to", new, "--scope", "acme")["copied"] == 1
    assert said("copy", "--from", old.url, "--to", new, "--operation", "mail", "--scope", "")["copied"] == 1
    assert said("copy", "--from", old.url, "--to", new)["copied"] == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_copy_goes_to_a_database_by_whichever_driver_the_url_names(
    old: Shelf, postgres_url: str, is_async: bool
) -> None:
    old.put("a")
    url = postgres_url.replace("postgresql:", "postgresql+asyncpg:") if is_async else postgres_url

    assert said("copy", "--from", old.url, "--to", url)["copied"] == 1
    with Guard(postgres_url) as guard:
        assert guard.read("charge", "a") is not None


@pytest.mark.parametrize(
    ("source", "target", "status", "says"),
    [
        ("sqlite:///{}/typo.db", "sqlite:///{}/new.db", 1, "there is no file"),
        ("sqlte:///x.db", "sqlite:///{}/new.db", 2, "did you mean 'sqlite'?"),
        ("sqlite:///{}/old.db", "postgrs://me:geheim@host/x", 2, "did you mean 'postgres'?"),
        ("sqlite:///{}/old.db", "sqlite:///{}/old.db", 2, "the same store"),
        ("sqlite:///{}/old.db", "sqlite:///{}/./old.db", 2, "the same file"),
        ("memory:", "sqlite:///{}/new.db", 2, "memory store"),
        ("sqlite:///{}/old.db", "memory:", 2, "memory store"),
        ("sqlite:///{}/old.db", "sqlite:////no/such/folder/x.db", 1, "the file cannot be opened"),
        ("sqlite:///{}/old.db", "redis://me:geheim@127.0.0.1:{port}/0", 1, "it cannot be reached"),
        ("postgresql://me:geheim@127.0.0.1:{port}/x", "sqlite:///{}/new.db", 1, "127.0.0.1"),
        ("sqlite:///{}/notes.txt", "sqlite:///{}/new.db", 1, "not an SQLite database"),
    ],
)
def test_what_cannot_be_copied_is_one_line(
    old: Shelf, tmp_path: Path, source: str, target: str, status: int, says: str, closed_port: int
) -> None:
    (tmp_path / "notes.txt").write_text("not a database " * 100)
    urls = [url.format(tmp_path, port=closed_port) for url in (source, target)]

    line = refused(onefold("copy", "--from", urls[0], "--to", urls[1]), status)

    assert says in line
    assert "geheim" not in line


def test_a_store_that_goes_away_in_the_middle_is_one_line_with_how_far_it_came(
    old: Shelf, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old.put_many(1_200)
    claim_all, asked = SqliteStore.claim_all, []

    def failing(self: SqliteStore, entries: Any) -> list[Record | Gone | None]:
        asked.append(entries)
        if len(asked) == 2:
            raise StoreUnavailable("the disk\nis full")
        return claim_all(self, entries)

    monkeypatch.setattr(SqliteStore, "claim_all", failing)

    assert refused(onefold("copy", "--from", old.url, "--to", new), 1) == (
        "onefold: the disk is full. Until then: 500 copied, 0 already there. Run it again for the rest\n"
    )
    monkeypatch.undo()
    assert said("copy", "--from", old.url, "--to", new) == said("copy", "--from", old.url, "--to", new) | {
        "copied": 700,
        "there": 500,
    }


# Interrupts itself in the middle of the third batch: as if somebody pressed Ctrl-C there.
INTERRUPTED = """
import os, signal
from onefold.stores.sqlite import SqliteStore
claim_all, asked = SqliteStore.claim_all, []
def pressed(self, entries):
    asked.append(entries)
    if len(asked) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return claim_all(self, entries)
SqliteStore.claim_all = pressed
"""


def test_ctrl_c_ends_with_130_and_how_far_it_came_and_the_rest_is_copied_later(old: Shelf, new: str) -> None:
    old.put_many(2_000)

    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED + MAIN, "copy", "--from", old.url, "--to", new],
        check=False,
        capture_output=True,
        timeout=PATIENCE,
    )

    assert ended.returncode == 128 + signal.SIGINT
    assert ended.stdout == b""
    assert ended.stderr == b"onefold: stopped: 1,000 copied, 0 already there. Run it again for the rest\n"
    assert said("copy", "--from", old.url, "--to", new)["there"] >= 1_000
    with Guard(new) as guard:
        assert len(guard.store.browse(Query(), 9_999)) == 2_000


def test_a_terminal_sees_the_count_while_it_waits(old: Shelf, new: str) -> None:
    old.put_many(10)

    seen, status = on_a_terminal(old, "copy", "--from", old.url, "--to", new)

    assert status == 0
    assert "copying: 0 records" in seen or "copying: 10 records" in seen
    assert "10 copied, 0 already there" in seen


# --- import

YESTERDAY = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%d %H:%M:%S")


@pytest.fixture
def shop(tmp_path: Path) -> str:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE processed (message_id TEXT PRIMARY KEY, at TEXT, answer TEXT)")
        rows = [("m1", "2026-01-01 00:00:00", "one"), ("m2", YESTERDAY, "two")]
        connection.executemany("INSERT INTO processed VALUES (?, ?, ?)", rows)
        connection.commit()
    return f"sqlite:///{tmp_path}/shop.db"


USUAL = ("--table", "processed", "--key", "message_id", "--operation", "charge")


def test_import_says_what_it_did_and_can_be_run_again(shop: str, new: str) -> None:
    first, second = (
        onefold("import", "--from", shop, *USUAL, "--to", new),
        onefold("import", "--from", shop, *USUAL, "--to", new),
    )

    assert (first.stdout, first.stderr, first.exit_code) == ("2 imported, 0 already there\n", "", 0)
    assert (second.stdout, second.exit_code) == ("0 imported, 2 already there\n", 0)
    with Guard(new) as guard:
        assert guard.run("charge", "m1", pytest.fail).replayed


def test_import_reads_times_and_results(shop: str, new: str) -> None:
    more = ("--at", "at", "--keep", "30d", "--result-column", "answer")

    assert said("import", "--from", shop, *USUAL, *more, "--to", new) == {
        "seen": 2,
        "imported": 1,
        "there": 0,
        "over": 1,
        "merged": 0,
        "unusable": 0,
        "complete": True,
        "dry_run": False,
        "reasons": [],
    }
    with Guard(new) as guard:
        assert guard.run("charge", "m2", pytest.fail).value == "two"
        assert guard.run("charge", "m1", lambda: "ran").value == "ran"


def test_import_takes_scopes_and_operations_from_columns(shop: str, new: str) -> None:
    columns = ("--table", "processed", "--key", "message_id", "--scope-column", "at", "--operation-column", "answer")

    assert said("import", "--from", shop, *columns, "--to", new)["imported"] == 2
    with Guard(new) as guard:
        assert guard.read("two", "m2", scope=YESTERDAY) is not None


def test_a_dry_run_of_an_import_makes_no_file(shop: str, new: str, tmp_path: Path) -> None:
    result = onefold("import", "--from", shop, *USUAL, "--to", new, "--dry-run")

    assert (result.stdout, result.exit_code) == ("2 would be imported, 0 already there\n", 0)
    assert not (tmp_path / "new.db").exists()


def test_rows_that_cannot_be_used_end_with_one_and_a_line(shop: str, new: str) -> None:
    result = onefold("import", "--from", shop, *USUAL, "--at", "answer", "--to", new)

    assert result.exit_code == 1
    assert result.stdout == "0 imported, 0 already there, 2 not usable\n"
    assert result.stderr.startswith("onefold: 2 rows could not be used: the column for `at`")
    assert result.stderr.endswith(" (the first is row 1 in the order of message_id)\n")


def test_every_kind_of_reason_is_told_and_rows_of_one_key_are_counted(shop: str, new: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE log (id TEXT, at TEXT)")
        rows = [
            ("a", "soon"),
            ("b", "2999-01-01"),
            ("c", YESTERDAY),
            ("c", YESTERDAY),
            ("secret-" * 99, None),
            (None, None),
        ]
        connection.executemany("INSERT INTO log VALUES (?, ?)", rows)
        connection.commit()
    arguments = ("--table", "log", "--key", "id", "--operation", "charge", "--at", "at", "--to", new)

    result = onefold("import", "--from", shop, *arguments)
    document = json.loads(onefold("import", "--from", shop, *arguments, "--format", "json").stdout)

    assert result.exit_code == 1
    assert result.stdout == "1 imported, 0 already there, 1 of a key that another row has, 4 not usable\n"
    assert [line.partition(": ")[2][:24] for line in result.stderr.splitlines()] == ["1 row could not be used:"] * 4
    assert (document["seen"], document["merged"], document["unusable"]) == (6, 1, 4)
    assert [(reason["count"], reason["row"]) for reason in document["reasons"]] == [(1, 1), (1, 2), (1, 5), (1, None)]
    assert "secret" not in result.output + json.dumps(document)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["import", "--from", "{shop}", "--key", "message_id", "--to", "{new}"], 2, "--table NAME"),
        (
            ["import", "--from", "{shop}", "--table", "processed", "--key", "message_id", "--to", "{new}"],
            2,
            "--operation NAME",
        ),
        (["import", "--from", "{shop}", *USUAL, "--operation-column", "at", "--to", "{new}"], 2, "pass one of them"),
        (["import", "--from", "{shop}", *USUAL, "--to", "{new}", "--keep", "soon"], 2, "not a duration"),
        (["import", "--from", "{shop}", *USUAL, "--to", "{new}", "--keep", "0s"], 2, "--keep"),
        (["import", "--from", "{shop}", *USUAL, "--to", "sqlte:///x.db"], 2, "did you mean 'sqlite'?"),
        (["import", "--from", "sqlte:///x.db", *USUAL, "--to", "{new}"], 2, "did you mean 'sqlite'?"),
        (["import", "--from", "redis://localhost", *USUAL, "--to", "{new}"], 2, "has no tables to read"),
        (["import", "--from", "{shop}x", *USUAL, "--to", "{new}"], 1, "there is no file"),
        (["import", "--from", "{shop}", *USUAL, "--at", "att", "--to", "{new}"], 2, "did you mean 'at'?"),
        (
            ["import", "--from", "{shop}", *USUAL[2:], "--table", "proccessed", "--to", "{new}"],
            2,
            "did you mean 'processed'?",
        ),
        (["import", "--from", "postgresql://me:geheim@127.0.0.1:{port}/x", *USUAL, "--to", "{new}"], 1, "127.0.0.1"),
        (["import", "--from", "mysql://me:geheim@127.0.0.1:{port}/x", *USUAL, "--to", "{new}"], 1, "127.0.0.1"),
    ],
)
def test_what_cannot_be_imported_is_one_line(
    shop: str, new: str, arguments: list[str], status: int, says: str, tmp_path: Path, closed_port: int
) -> None:
    line = refused(onefold(*(word.format(shop=shop, new=new, port=closed_port) for word in arguments)), status)

    assert says in line
    assert "geheim" not in line
    assert not (tmp_path / "shop.dbx").exists()
