"""`onefold stats` and `onefold top`: how many records there are, and what runs now."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from onefold import Guard, Policy, Record, State
from onefold.cli.app import app
from onefold.cli.commands import stats as counting
from onefold.cli.commands import top as watching
from onefold.cli.commands.stats import count
from onefold.cli.commands.top import look
from onefold.stores import schema
from onefold.stores.base import Address, Claim, Ending, Entry, Query
from onefold.stores.memory import MemoryStore
from tests.cli.test_records import MAIN, Shelf, closed_port, process, refused, scheme, shelf
from tests.support import PATIENCE, Clock

__all__ = ["closed_port", "scheme", "shelf"]

NEXT_TO_NOTHING = "10ms"


# --- stats


def test_stats_counts_by_operation_and_state(shelf: Shelf) -> None:
    shelf.put("a", age=300.0), shelf.put("b", age=900.0)
    shelf.put("c", State.FAILED, age=600.0), shelf.hold("d", age=9_000.0)
    shelf.put("e", State.RUNNING, lease=60.0, operation="mail")
    shelf.put("f", State.RUNNING, lease=0.0, operation="mail")
    shelf.put("g", State.OPEN, operation="mail", scope="acme")

    charge, mail = shelf.rows("stats")

    assert charge == {
        "name": "-",
        "operation": "charge",
        "records": "4",
        "running": "0",
        "open": "0",
        "done": "2",
        "failed": "1",
        "held": "1",
        "abandoned": "0",
        "oldest": "2h",
        "newest": "5m",
    }
    assert (mail["records"], mail["running"], mail["open"], mail["abandoned"]) == ("3", "2", "1", "1")
    assert "7 records, 1 of them held (onefold held)" in shelf.run("stats").stderr


def test_stats_as_json_is_one_document(shelf: Shelf) -> None:
    shelf.put("a", age=300.0)

    (fact,) = shelf.json("stats")

    (operation,) = fact.pop("operations")
    assert fact.pop("bytes") > 0
    assert fact == {
        "name": None,
        "store": shelf.url,
        "records": 1,
        "estimated": False,
        "expired": 0,
        "expired_for": None,
    }
    assert 300.0 <= operation.pop("oldest") == operation.pop("newest") < 300.0 + PATIENCE
    assert operation == {
        "operation": "charge",
        "records": 1,
        "running": 0,
        "open": 0,
        "done": 1,
        "failed": 0,
        "held": 0,
        "abandoned": 0,
    }


def test_stats_counts_what_waits_for_a_purge(shelf: Shelf) -> None:
    shelf.put("a"), shelf.put("b", ttl=0.0), shelf.put("c", ttl=0.0)

    (fact,) = shelf.json("stats")

    assert (fact["records"], fact["expired"]) == (1, 2)
    assert fact["expired_for"] >= 0
    assert "2 expired" in shelf.run("stats").stderr
    assert "onefold purge" in shelf.run("stats").stderr


def test_stats_takes_one_scope_or_operation(shelf: Shelf) -> None:
    shelf.put("a", scope="acme"), shelf.put("b", operation="mail"), shelf.put("c")

    assert [row["operation"] for row in shelf.rows("stats", "--scope", "acme")] == ["charge"]
    assert [row["operation"] for row in shelf.rows("stats", "--scope", "")] == ["charge", "mail"]
    assert [row["records"] for row in shelf.rows("stats", "--operation", "mail")] == ["1"]


def test_stats_of_an_empty_store_says_so(shelf: Shelf) -> None:
    said = shelf.run("stats")

    assert (said.stdout, said.exit_code) == ("", 0)
    assert ": 0 records" in said.stderr
    assert shelf.json("stats")[0]["operations"] == []


def test_stats_goes_through_every_store_of_a_file(shelf: Shelf, tmp_path: Path) -> None:
    shelf.put("a")
    file = tmp_path / "onefold.yaml"
    file.write_text(f"stores:\n  money: {{url: '{shelf.url}'}}\n  again: {{url: '{shelf.url}'}}\nguards: {{}}\n")

    said = CliRunner().invoke(app, ["stats", "--store", str(file)])

    assert [line.split("\t")[:3] for line in said.stdout.splitlines()[1:]] == [
        ["money", "charge", "1"],
        ["again", "charge", "1"],
    ]
    assert len(said.stderr.splitlines()) == 2


def test_a_thousand_operations_are_counted_in_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "OPERATIONS_MAX", 3)
    store = MemoryStore()
    for number in range(10):
        Guard(store).run(f"operation {number}", "k", lambda: None)

    counts = count(store.browse(Query(), 99))

    assert {name: one.records for name, one in counts.items()} == {
        "(others)": 7,
        "operation 0": 1,
        "operation 1": 1,
        "operation 2": 1,
    }


@pytest.mark.parametrize("kind", ["postgres", "mysql", "redis", pytest.param("dynamodb", marks=pytest.mark.more)])
def test_stats_works_on_every_store(kind: str, request: pytest.FixtureRequest) -> None:
    url = str(request.getfixturevalue(f"{kind}_url"))
    with Guard(url) as guard:
        for number in range(150):
            guard.run("charge", number, lambda: "paid")

    (fact,) = json.loads(CliRunner().invoke(app, ["stats", "--store", url, "--format", "json"]).stdout)

    assert (fact["records"], fact["operations"][0]["done"]) == (150, 150)
    assert (fact["bytes"] is None) is (kind == "redis")
    assert "@" not in fact["store"]


@pytest.mark.parametrize("command", ["stats", "top"])
@pytest.mark.parametrize(
    ("url", "status", "says"),
    [
        ("", 2, "which store?"),
        ("sqlte:///x.db", 2, "did you mean 'sqlite'?"),
        ("sqlite:///{}/typo.db", 1, "there is no file"),
        ("memory:", 2, "memory store"),
        ("redis://me:geheim@127.0.0.1:{port}/0", 1, "it cannot be reached"),
    ],
)
def test_a_store_that_cannot_be_looked_at_is_one_line(
    command: str, url: str, status: int, says: str, tmp_path: Path, closed_port: int
) -> None:
    named = url.format(tmp_path, port=closed_port)

    line = refused(CliRunner(env={"ONEFOLD_STORE": None}).invoke(app, [command, "--store", named]), status)

    assert says in line
    assert "geheim" not in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["stats", "--store", "nowhere.yaml"], "there is no such file"),
        (["top", "--store", "sqlite:///x.db", "--interval", "soon"], "not a duration"),
        (["top", "--store", "sqlite:///x.db", "--interval", "0s"], "--interval"),
        (["top", "--store", "sqlite:///x.db", "--interval", "forever"], "--interval"),
    ],
)
def test_what_cannot_be_used_is_wrong_usage(arguments: list[str], says: str) -> None:
    assert says in refused(CliRunner().invoke(app, arguments), 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["top", "--store", "sqlite:///x.db", "--interval"],
        ["purge", "--store", "sqlite:///x.db", "--every"],
        ["doctor", "--store", "sqlite:///x.db", "--timeout"],
        [
            "import",
            "--from",
            "sqlite:///x.db",
            "--table",
            "t",
            "--key",
            "k",
            "--operation",
            "o",
            "--to",
            "memory:",
            "--keep",
        ],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("given", ["soon", "30", "-3s", "nans"])
def test_what_is_no_duration_is_told_in_the_words_of_a_shell(arguments: list[str], given: str) -> None:
    line = refused(CliRunner().invoke(app, [*arguments[:-1], f"{arguments[-1]}={given}"]), 2)

    assert f"{arguments[-1]} '{given}' is not a duration: write a number with a unit" in line
    assert "timedelta" not in line


# --- top


def running(store: Any, key: str, **fields: Any) -> Claim:
    address = Address(fields.pop("scope", ""), fields.pop("operation", "charge"), key)
    claim = Claim(address, os.urandom(16), lease=fields.pop("lease", 600.0), ttl=900.0)
    assert store.claim(Entry(address=address, token=claim.token, lease=claim.lease, ttl=900.0, **fields)) is None
    return claim


def test_top_says_what_runs_and_what_is_held(shelf: Shelf) -> None:
    # A minute short of the next word, so that a slow command says the same.
    running(shelf.store, "a", lease=239.0, age=10.0), running(shelf.store, "b", lease=400.0, age=361.0)
    running(shelf.store, "c", lease=0.0)
    shelf.hold("d"), shelf.hold("e", operation="mail"), shelf.put("f")

    charge, mail = shelf.rows("top", "--once")

    assert charge == {
        "operation": "charge",
        "running": "2",
        "next lease ends in": "3m",
        "abandoned": "1",
        "longest": "6m",
        "held": "1",
        "starts/s": "-",
        "ends/s": "-",
    }
    assert (mail["running"], mail["held"], mail["longest"]) == ("0", "1", "-")


def test_top_as_json_once_is_one_document(shelf: Shelf) -> None:
    running(shelf.store, "a", lease=200.0, age=10.0)

    fact = shelf.json("top", "--once")

    (operation,) = fact.pop("operations")
    assert abs(datetime.fromisoformat(fact.pop("time")).timestamp() - time.time()) < PATIENCE
    assert fact == {"partial": False, "estimated": False}
    assert 100.0 < operation.pop("lease_left") <= 200.0
    assert 10.0 <= operation.pop("longest") < 10.0 + PATIENCE
    assert operation == {
        "operation": "charge",
        "running": 1,
        "abandoned": 0,
        "held": 0,
        "starts": None,
        "ends": None,
    }


def test_top_as_json_is_a_line_whether_it_looks_once_or_again(shelf: Shelf) -> None:
    running(shelf.store, "a")

    assert shelf.run("top", "--once", "--format", "json").stdout.count("\n") == 1


def test_top_takes_a_file_with_one_store_and_says_what_it_has_where_there_are_more(
    shelf: Shelf, tmp_path: Path
) -> None:
    running(shelf.store, "a")
    file = tmp_path / "onefold.yaml"
    file.write_text(f"stores: {{money: {{url: '{shelf.url}'}}}}\nguards: {{}}\n")

    said = CliRunner().invoke(app, ["top", "--store", str(file), "--once"])
    file.write_text(f"stores: {{money: {{url: '{shelf.url}'}}, mail: {{url: 'memory:'}}}}\nguards: {{}}\n")
    line = refused(CliRunner().invoke(app, ["top", "--store", str(file), "--once"]), 2)

    assert said.stdout.splitlines()[1].split("\t")[:2] == ["charge", "1"]
    assert "onefold.yaml declares money, mail. Say which one, by its URL" in line


def test_one_record_is_said_in_the_singular(shelf: Shelf) -> None:
    shelf.put("a")

    assert ": 1 record, " in shelf.run("stats").stderr


def test_nothing_to_see_is_said(shelf: Shelf) -> None:
    said = shelf.run("top", "--once")

    assert (said.stdout, said.stderr, said.exit_code) == (
        "",
        "onefold: nothing is running, and nothing is held\n",
        0,
    )


def test_starts_and_ends_are_those_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = Clock(), MemoryStore()
    monkeypatch.setattr("onefold.cli.commands.top.time.monotonic", clock)
    first, second = running(store, "a"), running(store, "b")
    before = look(store, Query())
    store.finish(first, Ending(state=State.DONE, ttl=60.0))
    store.finish(second, Ending(state=State.DONE, ttl=60.0))
    for key in "cdef":
        running(store, key)
    # The same key again, under another claim.
    Guard(store, policy=Policy(keep="1h")).forget("charge", "a")
    running(store, "a")
    clock.advance(2.0)

    seen = look(store, Query(), before)

    line = seen.lines["charge"]
    assert (line.running, line.starts, line.ends) == (5, 2.5, 1.0)


def test_an_operation_stays_in_view_when_its_last_run_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = Clock(), MemoryStore()
    monkeypatch.setattr("onefold.cli.commands.top.time.monotonic", clock)
    claim = running(store, "a")
    before = look(store, Query())
    store.finish(claim, Ending(state=State.DONE, ttl=60.0))
    clock.advance(1.0)

    seen = look(store, Query(), before)

    assert (seen.lines["charge"].running, seen.lines["charge"].ends) == (0, 1.0)
    assert look(store, Query(), seen).lines["charge"].ends == 0.0


def test_a_look_is_bounded_and_says_so(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_MAX", 3)
    for number in range(5):
        running(shelf.store, f"{number}")

    said = shelf.run("top", "--once", "--exact")

    assert said.stdout.splitlines()[1].split("\t")[1] == "3"
    assert "only the first 3 of each kind are counted" in said.stderr


def test_it_rests_for_as_long_as_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rests = Clock(), []

    class Slow(MemoryStore):
        def browse(self, query: Query, limit: int) -> list[Record]:
            clock.advance(5.0)
            return super().browse(query, limit)

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("onefold.cli.commands.top.time.monotonic", clock)
    monkeypatch.setattr("onefold.cli.commands.top.time.sleep", rest)

    with pytest.raises(KeyboardInterrupt):
        for _ in watching.looks(Slow(), Query(), 2.0):
            pass

    assert rests == [10.0, 10.0]


@pytest.mark.parametrize("form", ["table", "json"])
def test_in_a_pipe_there_is_a_table_or_a_line_of_json_for_each_look_and_ctrl_c_ends_with_zero(
    shelf: Shelf, form: str
) -> None:
    running(shelf.store, "a")

    with process(shelf, "top", "--interval", NEXT_TO_NOTHING, "--format", form, PYTHONUNBUFFERED="1") as started:
        assert started.stdout is not None
        assert started.stderr is not None
        lines = [started.stdout.readline().decode() for _ in range(4)]
        started.send_signal(signal.SIGINT)
        assert started.wait(PATIENCE) == 0
        errors = started.stderr.read()

    assert errors == b""
    if form == "json":
        assert [json.loads(line)["operations"][0]["running"] for line in lines] == [1, 1, 1, 1]
    else:
        assert [line.split("\t")[0] for line in lines] == ["operation", "charge", "operation", "charge"]
        assert lines[3].rstrip("\n").split("\t")[-2:] == ["0.0", "0.0"]


def test_a_terminal_gets_a_live_view_and_leaves_it_with_ctrl_c(shelf: Shelf) -> None:
    running(shelf.store, "a", operation="[red]charge[/]")
    person, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, "top", "--store", shelf.url, "--interval", NEXT_TO_NOTHING],
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    ) as started:
        os.close(terminal)
        seen = b""
        try:
            while seen.count(b"Ctrl-C to quit") < 3:
                seen += os.read(person, 65_536)
            started.send_signal(signal.SIGINT)
            while more := _read(person):
                seen += more
            assert started.wait(PATIENCE) == 0
        finally:
            started.kill()
            os.close(person)

    assert b"[red]charge[/]" in seen
    assert b"Traceback" not in seen


def _read(person: int) -> bytes:
    try:
        return os.read(person, 65_536)
    except OSError:
        return b""


@pytest.mark.parametrize("kind", ["postgres", "mysql", "redis", pytest.param("dynamodb", marks=pytest.mark.more)])
def test_top_works_on_every_store(kind: str, request: pytest.FixtureRequest) -> None:
    url = str(request.getfixturevalue(f"{kind}_url"))
    with Guard(url) as guard:
        schema.apply(url)
        empty = CliRunner().invoke(app, ["top", "--store", url, "--once", "--format", "json"])
        running(guard.store, "a")
        guard.run("charge", "b", lambda: "paid")
        seen = CliRunner().invoke(app, ["top", "--store", url, "--once", "--format", "json"])

    assert json.loads(empty.stdout)["operations"] == []
    (operation,) = json.loads(seen.stdout)["operations"]
    assert (operation["running"], operation["held"]) == (1, 0)


def test_a_store_that_shows_what_has_expired_is_counted_right(
    scheme: Callable[[str, Callable[[str], Any]], None],
) -> None:
    class Late(MemoryStore):
        """Shows expired records, as a store may."""

        def browse(self, query: Query, limit: int) -> list[Record]:
            address = running(self, "old").address if query.after is None else None
            if address is None:
                return []
            record = self.read(address)
            assert record is not None
            return [replace(record, ttl_left=-1.0)]

    scheme("late", lambda url: Late())

    assert (
        json.loads(CliRunner().invoke(app, ["stats", "--store", "late:", "--format", "json"]).stdout)[0]["records"] == 0
    )
