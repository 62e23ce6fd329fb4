"""`onefold schema`: what it prints can be applied by hand, and `--apply` does it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from onefold import Guard, StoreUnavailable
from onefold.cli.app import app
from onefold.stores.sql.records import VERSION
from tests.wallet import tables

OURS = {"onefold_records", "onefold_schema"}


def onefold(store: str | None = None, *arguments: str) -> Result:
    named = [] if store is None else ["--store", store]
    return CliRunner().invoke(app, ["schema", *named, *arguments])


def test_what_it_prints_makes_tables_that_a_guard_can_use(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    printed = onefold(f"sqlite:///{path}")
    assert not path.exists()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(printed.stdout)

    with Guard(f"sqlite:///{path}?auto_schema=no") as guard:
        guard.run("charge", "key", lambda: None)

    assert printed.exit_code == 0


def test_apply_makes_the_tables_and_doing_it_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records.db"

    first, second = (onefold(f"sqlite:///{path}", "--apply") for _ in range(2))

    assert tables(path) == OURS
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert f"version {VERSION}" in first.stdout
    assert first.stdout == second.stdout


def test_without_the_tables_the_error_names_the_command(tmp_path: Path) -> None:
    with (
        Guard(f"sqlite:///{tmp_path}/records.db?auto_schema=no") as guard,
        pytest.raises(StoreUnavailable, match="`onefold schema --store URL --apply`"),
    ):
        guard.run("charge", "key", lambda: pytest.fail("it ran"))


def test_as_json(tmp_path: Path) -> None:
    printed = json.loads(onefold(f"sqlite:///{tmp_path}/records.db", "--format", "json").stdout)

    assert "CREATE TABLE" in printed["schema"]
    assert printed["applied"] is None


def test_a_store_without_tables_says_so() -> None:
    printed = onefold("memory:")

    assert printed.exit_code == 0
    assert "needs no tables" in printed.stderr


@pytest.mark.parametrize(("arguments", "says"), [((), "which store?"), (("sqlit:///x.db",), "did you mean 'sqlite'?")])
def test_a_wrong_url_gets_one_line(arguments: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEFOLD_STORE", raising=False)

    refused = onefold(*arguments)

    assert refused.exit_code == 2
    assert says in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_an_option_that_is_neither_yes_nor_no_is_refused(tmp_path: Path) -> None:
    refused = onefold(f"sqlite:///{tmp_path}/records.db?auto_schema=perhaps")

    assert refused.exit_code == 2
    assert "auto_schema='perhaps' has to be yes or no" in refused.stderr
