"""`onefold erase`: a tenant that leaves is gone, and nobody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import Any

import pytest
from typer.testing import CliRunner

from onefold import Guard, State
from onefold.cli._common import asking
from onefold.cli.app import app
from onefold.cli.commands import erase as erasing
from onefold.stores.base import Address, Claim, Ending, Entry, Query
from tests.cli.test_records import MAIN, Shelf, closed_port, on_a_terminal, refused, shelf
from tests.support import PATIENCE

__all__ = ["closed_port", "shelf"]


def scopes(store: Any) -> list[str]:
    return sorted({record.address.scope for record in store.browse(Query(), 9_999)})


def fill(shelf: Shelf, count: int = 3) -> None:
    for scope in ("", "tenant-4", "tenant-42"):
        for number in range(count):
            shelf.put(f"k{number}", scope=scope)


@pytest.mark.parametrize("state", list(State))
def test_all_records_of_the_tenant_are_gone_and_those_of_others_stay(shelf: Shelf, state: State) -> None:
    fill(shelf)
    shelf.put("more", state, scope="tenant-42", operation="mail")

    said = shelf.run("erase", "--scope", "tenant-42", "--yes")

    assert (said.stdout, said.stderr, said.exit_code) == ("tenant-42: 4 erased\n", "", 0)
    assert scopes(shelf.store) == ["", "tenant-4"]
    assert len(shelf.store.browse(Query(), 99)) == 6


def test_what_runs_now_is_left_and_told_and_ends_with_one(shelf: Shelf) -> None:
    fill(shelf)
    address = shelf.put("runs", State.RUNNING, scope="tenant-42", lease=60.0)

    said = shelf.run("erase", "--scope", "tenant-42", "--yes")

    assert said.exit_code == 1
    assert said.stdout == "tenant-42: 3 erased, 1 left\n"
    assert said.stderr.startswith("onefold: 1 are left: a worker is running them, or they arrived during the erasure")
    assert shelf.store.finish(Claim(address, shelf.found(address).token), Ending(state=State.DONE, ttl=60.0))
    assert shelf.run("erase", "--scope", "tenant-42", "--yes").exit_code == 0


def test_what_comes_back_to_life_while_it_is_erased_is_left(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    address = shelf.put("k", State.OPEN, scope="tenant-42")
    forget = Guard.forget

    def late(self: Guard, *arguments: Any, **more: Any) -> bool:
        """Between the listing and the removal, a worker has taken it."""
        entry = Entry(address=address, token=os.urandom(16), lease=60.0)
        assert shelf.store.claim(entry, replacing=shelf.found(address)) is None
        return forget(self, *arguments, **more)

    monkeypatch.setattr(Guard, "forget", late)

    said = shelf.run("erase", "--scope", "tenant-42", "--yes")

    assert (said.stdout, said.exit_code) == ("tenant-42: 0 erased, 1 left\n", 1)
    assert shelf.found(address).state is State.RUNNING


def test_results_expired_are_removed_too(shelf: Shelf) -> None:
    """Nobody lists them any more, and until a purge they would be on the disk."""
    shelf.put("k", scope="tenant-42", ttl=0.001, result=b"\x00\xa6secret")
    shelf.put("l", scope="tenant-42")

    fact = shelf.json("erase", "--scope", "tenant-42", "--yes")

    assert (fact["erased"], fact["purged"], fact["left"]) == (1, 1, 0)


def test_erase_takes_one_operation(shelf: Shelf) -> None:
    shelf.put("a", scope="acme"), shelf.put("b", scope="acme", operation="mail")

    assert shelf.json("erase", "--scope", "acme", "--operation", "mail", "--yes") == {
        "scope": "acme",
        "found": 1,
        "operations": {"mail": 1},
        "erased": 1,
        "left": 0,
        "purged": 0,
        "dry_run": False,
    }
    assert [record.address.operation for record in shelf.store.browse(Query(), 9)] == ["charge"]


def test_a_dry_run_counts_and_changes_nothing(shelf: Shelf) -> None:
    fill(shelf)
    shelf.put("runs", State.RUNNING, scope="tenant-42", lease=60.0)

    said = shelf.run("erase", "--scope", "tenant-42", "--dry-run")
    fact = shelf.json("erase", "--scope", "tenant-42", "--dry-run")

    assert (said.stdout, said.exit_code) == ("tenant-42: 3 would be erased, 1 are running\n", 0)
    assert (fact["found"], fact["erased"], fact["left"]) == (4, 0, 1)
    assert len(shelf.store.browse(Query(), 99)) == 10


NOBODY = (
    "onefold: no record matches --scope nobody: nothing was erased. A scope is matched exactly, and `onefold ls` shows "
    "those in use: check its spelling, and the store\n"
)


@pytest.mark.parametrize("way", ["--yes", "--dry-run"])
def test_a_tenant_that_is_not_known_is_gone_already_or_was_misspelt(shelf: Shelf, way: str) -> None:
    fill(shelf)

    said = shelf.run("erase", "--scope", "nobody", way)

    assert said.stdout == f"nobody: 0 {'erased' if way == '--yes' else 'would be erased'}\n"
    assert (said.stderr, said.exit_code) == (NOBODY, 0)


def test_an_operation_that_the_tenant_does_not_have_is_answered_with_those_that_it_has(shelf: Shelf) -> None:
    fill(shelf)
    shelf.put("more", scope="tenant-42", operation="mail")
    shelf.put("others", scope="tenant-4", operation="ship")

    said = shelf.run("erase", "--scope", "tenant-42", "--operation", "charg", "--yes", "--format", "json")

    assert said.stderr == (
        "onefold: no record matches --scope tenant-42 --operation charg: nothing was erased. Its operations are "
        "charge, mail\n"
    )
    assert (json.loads(said.stdout)["erased"], said.exit_code) == (0, 0)


def test_a_second_run_has_nothing_left_to_erase_and_succeeds(shelf: Shelf) -> None:
    fill(shelf)
    shelf.run("erase", "--scope", "tenant-42", "--yes")

    said = shelf.run("erase", "--scope", "tenant-42", "--yes")

    assert (said.stdout, said.exit_code) == ("tenant-42: 0 erased\n", 0)


@pytest.mark.parametrize("arguments", [["--scope", ""], []], ids=["empty", "none"])
def test_an_empty_scope_is_a_variable_that_was_not_set_and_erases_nothing(shelf: Shelf, arguments: list[str]) -> None:
    fill(shelf)

    assert "--scope NAME" in refused(shelf.run("erase", *arguments, "--yes"), 2)
    assert len(shelf.store.browse(Query(), 99)) == 9


def test_without_a_terminal_nothing_is_erased_unasked(shelf: Shelf) -> None:
    fill(shelf)

    assert "--yes" in refused(shelf.run("erase", "--scope", "tenant-42"), 2)
    assert len(shelf.store.browse(Query(), 99)) == 9


@pytest.mark.parametrize(("answer", "status", "left"), [("y\n", 0, 6), ("n\n", 1, 9), ("", 1, 9)])
def test_the_question_says_how_many_and_what_it_means(
    shelf: Shelf, answer: str, status: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(shelf)
    monkeypatch.setattr(asking, "check_terminal", lambda: None)

    said = shelf.run("erase", "--scope", "tenant-42", typed=answer)

    assert "Erase 3 records of tenant-42 (charge 3)? Anything delivered for it after that will run" in said.stderr
    assert said.exit_code == status
    assert len(shelf.store.browse(Query(), 99)) == left


def test_a_person_is_asked_on_a_terminal(shelf: Shelf) -> None:
    fill(shelf)

    seen, status = on_a_terminal(shelf, "erase", "--scope", "tenant-42", answer=b"y\n")

    assert status == 0
    assert "tenant-42: 3 erased" in seen
    assert scopes(shelf.store) == ["", "tenant-4"]


# Interrupts itself when the tenth record is to be removed.
INTERRUPTED = """
import os, signal
from onefold import Guard
forget, asked = Guard.forget, []
def pressed(self, *arguments, **more):
    asked.append(arguments)
    if len(asked) == 10:
        os.kill(os.getpid(), signal.SIGINT)
    return forget(self, *arguments, **more)
Guard.forget = pressed
"""


def test_ctrl_c_ends_with_130_and_how_far_it_came(shelf: Shelf) -> None:
    fill(shelf, 300)

    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED + MAIN, "erase", "--store", shelf.url, "--scope", "tenant-42", "--yes"],
        check=False,
        capture_output=True,
        timeout=PATIENCE,
    )

    left = len(shelf.store.browse(Query(scope="tenant-42"), 999))
    assert ended.returncode == 128 + signal.SIGINT
    assert ended.stdout == b""
    assert ended.stderr.decode() == f"onefold: stopped: {300 - left} erased. Run it again for the rest\n"
    assert 0 < left < 300
    assert shelf.run("erase", "--scope", "tenant-42", "--yes").exit_code == 0
    assert len(shelf.store.browse(Query(), 999)) == 600


def test_the_end_waits_for_what_has_begun_and_lets_nothing_begin() -> None:
    """Also in a thread that no executor knows of, because the interrupt came in its start."""
    removals, begun, goes_on, removed = erasing.Removals(), Event(), Event(), list[bool]()

    def remove() -> None:
        with removals.one() as may_begin:
            begun.set()
            assert goes_on.wait(PATIENCE)
            removed.append(may_begin)

    def go_on_at_the_end() -> None:
        while not removals._is_over:
            sleep(0)
        goes_on.set()

    threads = [Thread(target=remove), Thread(target=go_on_at_the_end)]
    with removals:
        for thread in threads:
            thread.start()
        assert begun.wait(PATIENCE)
    seen = removed.copy()
    for thread in threads:
        thread.join(PATIENCE)

    assert seen == [True]
    with removals.one() as may_begin:
        assert not may_begin


@pytest.mark.parametrize("kind", ["postgres", "mysql", "redis", "dynamodb"])
def test_erase_works_on_every_store(kind: str, request: pytest.FixtureRequest) -> None:
    url = str(request.getfixturevalue(f"{kind}_url"))
    with Guard(url) as guard:
        for scope in ("acme", "acme2"):
            for number in range(5):
                guard.run("charge", number, lambda: "paid", scope=scope)

    said = CliRunner().invoke(app, ["erase", "--store", url, "--scope", "acme", "--yes"])

    assert (said.stdout, said.exit_code) == ("acme: 5 erased\n", 0)
    with Guard(url) as guard:
        assert scopes(guard.store) == ["acme2"]
        assert guard.read("charge", 1, scope="acme") is None


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["erase", "--scope", "x", "--yes"], 2, "which store?"),
        (["erase", "--store", "sqlte:///x.db", "--scope", "x", "--yes"], 2, "did you mean 'sqlite'?"),
        (["erase", "--store", "sqlite:///{}/typo.db", "--scope", "x", "--yes"], 1, "there is no file"),
        (["erase", "--store", "memory:", "--scope", "x", "--yes"], 2, "memory store"),
        (
            ["erase", "--store", "redis://me:geheim@127.0.0.1:{port}/0", "--scope", "x", "--yes"],
            1,
            "it cannot be reached",
        ),
    ],
)
def test_what_cannot_be_erased_is_one_line(
    arguments: list[str], status: int, says: str, tmp_path: Path, closed_port: int
) -> None:
    asked = [word.format(tmp_path, port=closed_port) for word in arguments]

    line = refused(CliRunner(env={"ONEFOLD_STORE": None}).invoke(app, asked), status)

    assert says in line
    assert "geheim" not in line
    assert list(tmp_path.iterdir()) == []


# --- keys as they are, or as the digest in a log


def test_forget_takes_the_digest_of_a_log_line(shelf: Shelf) -> None:
    fill(shelf)
    address = Address("tenant-42", "charge", "k1")

    assert shelf.run("forget", "--digest", address.digest.upper(), "--yes").exit_code == 0

    assert shelf.read(address) is None
    assert len(shelf.store.browse(Query(), 99)) == 8
    assert f"no record of the digest {address.digest}" in refused(
        shelf.run("forget", "--digest", address.digest, "--yes"), 1
    )


def test_the_digest_of_an_error_message_names_the_record(shelf: Shelf) -> None:
    shelf.hold("pay_1", scope="acme")
    try:
        shelf.guard.run("charge", "pay_1", pytest.fail, scope="acme")
    except Exception as error:
        digest = str(error).partition("[key ")[2].partition("]")[0]

    assert [fact["key"] for fact in json.loads(shelf.run("show", digest, "--format", "json").stdout)] == ["pay_1"]
    said = shelf.run("resolve", "--digest", digest, "--done", "--reason", "seen", "--yes")
    assert said.exit_code == 0, said.output
