"""A bypass that died, by hand: its duplicates still get the earlier ending, and nobody destroys that unawares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from onefold import Guard, Policy, Rerun, State
from onefold._delivery.earlier_ending import carrying
from onefold.cli.app import app
from onefold.stores.base import Entry
from onefold.stores.sqlite import SqliteStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "records.db", sync="normal")
    yield store
    store.close()


@pytest.fixture
def guard(store: SqliteStore) -> Guard:
    """A guard in whose store a bypass of a finished charge has died."""
    guard = Guard(store, policy=Policy(after_crash="hold"))
    guard.run("charge", "pay_1", lambda: "the receipt")
    found = guard.read("charge", "pay_1")
    assert found is not None
    entry = Entry(address=found.address, token=os.urandom(16), state=State.RUNNING, attempt=2, lease=0.0, ttl=900.0)
    assert store.claim(carrying(entry, found), replacing=found) is None
    return guard


def run(store: SqliteStore, *arguments: str) -> Result:
    return CliRunner(env={"ONEFOLD_STORE": f"sqlite:///{store.path}"}).invoke(app, list(arguments))


@pytest.mark.usefixtures("guard")
def test_show_says_that_a_bypass_died_and_what_duplicates_get(store: SqliteStore) -> None:
    said = run(store, "show", "pay_1").stdout

    assert "running: a bypass died; duplicates still get the earlier ending, which is done" in said


@pytest.mark.usefixtures("guard")
def test_held_does_not_ask_for_it_to_be_settled(store: SqliteStore) -> None:
    assert run(store, "held").stderr == "onefold: nothing is held\n"


@pytest.mark.parametrize("how", ["--done", "--failed", "--rerun"])
def test_resolve_refuses_to_destroy_the_earlier_ending(store: SqliteStore, guard: Guard, how: str) -> None:
    said = run(store, "resolve", "pay_1", how, "--reason", "it died", "--by", "ada", "--yes")

    assert said.exit_code != 0
    assert "is done, and a bypass of it died: there is nothing to resolve, and nothing was changed" in said.stderr
    assert guard.run("charge", "pay_1", pytest.fail).value == "the receipt"


def test_who_resolves_it_in_code_leaves_word_of_what_was_there(guard: Guard) -> None:
    guard.resolve("charge", "pay_1", Rerun(), by="ada", reason="the bank knows nothing of it")

    found = guard.read("charge", "pay_1")
    assert found is not None
    assert found.history[1] == "attempt 2, a bypass of what was done, was abandoned"
