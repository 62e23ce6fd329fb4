"""Records by hand: `onefold ls`, `show`, `held`, `resolve` and `forget` on an SQLite file."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime as dt
import json
import math
import os
import pty
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from onefold import (
    Done,
    Failed,
    Guard,
    Held,
    Policy,
    Record,
    RememberedFailure,
    State,
    StoreUnavailable,
    UsageError,
    current,
)
from onefold._entry_points import STORES, installed
from onefold.cli._common import asking
from onefold.cli._common import find as _search
from onefold.cli._common import output as _shared
from onefold.cli.app import app
from onefold.cli.commands import records
from onefold.codecs import MsgspecCodec
from onefold.queues._shared.verdict import reason_of
from onefold.stores import kinds
from onefold.stores.base import Address, Claim, Ending, Entry, Query
from onefold.stores.memory import MemoryStore
from onefold.stores.sqlite import SqliteStore
from tests.support import PATIENCE, eventually

HOLD = Policy(after_crash="hold")

COMMANDS = get_command(app)

NASTY = ["it's; rm -rf /", "-rf", "--done", "esc\x1b[31mred", "tab\tand\nline", "[bold]x[/]", "café ☕", "$HOME `id`"]


class Shelf:
    """A store in a file, with what a test puts into it by hand, and the commands on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"
        self.store = SqliteStore(path, sync="normal")
        self.guard = Guard(self.store, policy=HOLD)

    def put(self, key: str, state: State = State.DONE, **fields: Any) -> Address:
        address = Address(fields.pop("scope", ""), fields.pop("operation", "charge"), key)
        entry = Entry(address=address, token=os.urandom(16), state=state, **fields)
        assert self.store.claim(entry) is None
        return address

    def hold(self, key: str, **fields: Any) -> Address:
        return self.put(key, State.HELD, **{"remark": "attempt 1 ended in TimeoutError"} | fields)

    def put_many(self, count: int) -> None:
        addresses = [Address("", "charge", f"pay_{number:06}") for number in range(count)]
        entries = [Entry(address=one, token=os.urandom(16), state=State.DONE, ttl=900.0) for one in addresses]
        assert self.store.claim_all(entries) == [None] * count

    def read(self, address: Address) -> Record | None:
        return self.store.read(address)

    def found(self, address: Address) -> Record:
        record = self.read(address)
        assert record is not None
        return record

    def run(self, *arguments: str, typed: str = "", **env: str) -> Result:
        runner = CliRunner(env={"ONEFOLD_STORE": self.url} | env)
        return runner.invoke(app, list(arguments), input=typed, catch_exceptions=False)

    def json(self, *arguments: str) -> Any:
        said = self.run(*arguments, "--format", "json")
        assert said.exit_code == 0, said.output
        return json.loads(said.stdout)

    def rows(self, *arguments: str) -> list[dict[str, str]]:
        said = self.run(*arguments)
        assert said.exit_code == 0, said.output
        heading, *lines = [line.split("\t") for line in said.stdout.splitlines()]
        return [dict(zip(heading, line, strict=True)) for line in lines]

    def keys(self, *arguments: str) -> list[str]:
        return [row["key"] for row in self.rows(*arguments)]


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    # The runner would build the commands for every run, which takes longer than most of them.
    monkeypatch.setattr("typer.testing._get_command", lambda _: COMMANDS, raising=False)
    made = Shelf(tmp_path / "records.db")
    made.store.purge(0)
    yield made
    made.guard.close()
    made.store.close()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port where nobody listens, and that nobody else gets meanwhile."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield int(kept.getsockname()[1])


@pytest.fixture
def scheme(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[str], Any]], None]:
    """Registers a URL scheme for one test, as an entry point would."""

    def register(name: str, open_store: Callable[[str], Any]) -> None:

        module = types.ModuleType(f"store_of_{name}")
        module.open_store = open_store  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        ours = {STORES: {name: module.__name__}}
        monkeypatch.setattr(kinds, "installed", lambda group: {**installed(group), **ours.get(group, {})})

    return register


def refused(said: Result, status: int) -> str:
    """The one line on standard error with which a command ended."""
    assert said.exit_code == status, said.output
    assert said.stdout == ""
    assert said.stderr.startswith("onefold: ")
    assert said.stderr.count("\n") == 1
    return said.stderr


# --- ls


def test_ls_says_in_a_line_what_a_record_is(shelf: Shelf) -> None:
    address = shelf.put("pay_1", State.RUNNING, scope="acme", attempt=2, age=200.0, lease=290.0, remark="second try")

    (row,) = shelf.rows("ls")

    assert row == {
        "scope": "acme",
        "operation": "charge",
        "key": "pay_1",
        "digest": address.digest,
        "state": "running",
        "attempt": "2",
        "age": "3m",
        "left": "lease 4m",
        "remark": "second try",
    }


def test_ls_says_how_long_a_record_lasts(shelf: Shelf) -> None:
    shelf.put("a", State.RUNNING, lease=0.0)
    shelf.put("b", State.DONE, ttl=3 * 86_400.0 + 60)
    shelf.put("c", State.HELD)

    assert [row["left"] for row in shelf.rows("ls")] == ["lease over", "3d", "forever"]


def test_ls_filters_by_operation_state_and_scope(shelf: Shelf) -> None:
    shelf.put("a", State.DONE, operation="charge")
    shelf.put("b", State.HELD, operation="charge", scope="acme")
    shelf.put("c", State.HELD, operation="mail")

    assert shelf.keys("ls", "--operation", "charge") == ["a", "b"]
    assert shelf.keys("ls", "--state", "held") == ["c", "b"]
    assert shelf.keys("ls", "--scope", "acme") == ["b"]
    assert shelf.keys("ls", "--scope", "") == ["a", "c"]
    assert shelf.keys("ls", "--operation", "charge", "--state", "held") == ["b"]


def test_ls_says_when_there_are_more_and_only_then(shelf: Shelf) -> None:
    shelf.put_many(60)

    by_default, two, exactly = shelf.run("ls"), shelf.run("ls", "--limit", "2"), shelf.run("ls", "--limit", "60")

    assert len(by_default.stdout.splitlines()) == 1 + 50
    assert len(two.stdout.splitlines()) == 1 + 2
    assert "more than these 2" in two.stderr
    assert "--all" in two.stderr.splitlines()[-1]
    assert exactly.stderr == ""


def test_ls_all_lists_every_record_once(shelf: Shelf) -> None:
    shelf.put_many(1_234)

    said = shelf.run("ls", "--all")

    assert [line.split("\t")[2] for line in said.stdout.splitlines()[1:]] == [f"pay_{n:06}" for n in range(1_234)]
    assert said.stderr == ""
    assert len(shelf.json("ls", "--all")) == 1_234


def test_ls_all_prints_as_it_reads_and_says_when_the_store_goes_away(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.put_many(10)
    monkeypatch.setattr(_search, "PAGE_FIRST", 2)
    monkeypatch.setattr(_search, "PAGE_MAX", 2)
    monkeypatch.setattr(records, "BATCH", 2)
    browse, asked = SqliteStore.browse, []

    def failing(self: SqliteStore, query: Query, limit: int) -> list[Record]:
        asked.append(limit)
        if len(asked) == 3:
            raise StoreUnavailable("the disk\nhas gone")
        return browse(self, query, limit)

    monkeypatch.setattr(SqliteStore, "browse", failing)

    said = shelf.run("ls", "--all")

    assert said.exit_code == 1
    assert len(said.stdout.splitlines()) == 1 + 4
    assert said.stderr == "onefold: the disk has gone\n"


def test_pages_grow_while_they_are_light_and_shrink_while_they_are_heavy(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        shelf.put(f"{number:03}", result=b"\x00" + b"x" * (1_000 if 30 <= number < 60 else 0))
    monkeypatch.setattr(_search, "PAGE_FIRST", 4)
    monkeypatch.setattr(_search, "PAGE_MAX", 16)
    monkeypatch.setattr(_search, "PAGE_BYTES", 4_000)
    asked = []

    class Noted:
        def browse(self, query: Query, limit: int) -> list[Record]:
            asked.append(limit)
            return shelf.store.browse(query, limit)

    found = list(_search.records(Noted(), Query()))

    assert [record.address.key for record in found] == [f"{number:03}" for number in range(100)]
    assert asked == [4, 8, 16, 16, 8, 4, 2, 4, 8, 16, 16]


def test_an_expired_record_is_not_there(scheme: Callable[[str, Callable[[str], Any]], None]) -> None:
    class Late(MemoryStore):
        """Shows expired records, as a store may."""

        def browse(self, query: Query, limit: int) -> list[Record]:
            address = Address("", "charge", "old")
            old = Record(
                address=address, token=b"t", revision=1, state=State.HELD, attempt=1, age=9, lease_left=0, ttl_left=-1
            )
            return [old] if query.after is None else []

    scheme("late", lambda url: Late())
    runner = CliRunner()

    assert runner.invoke(app, ["ls", "--store", "late:"]).stdout == ""
    assert "nothing is held" in runner.invoke(app, ["held", "--store", "late:"]).stderr
    assert runner.invoke(app, ["show", "old", "--store", "late:"]).exit_code == 1


def test_ls_as_json_has_stable_names_and_durations_in_seconds(shelf: Shelf) -> None:
    address = shelf.put("pay_1", State.HELD, age=10.0, remark="why")

    (fact,) = shelf.json("ls")

    assert 10.0 <= fact.pop("age") < 10.0 + PATIENCE
    assert fact == {
        "scope": "",
        "operation": "charge",
        "key": "pay_1",
        "digest": address.digest,
        "state": "held",
        "attempt": 1,
        "lease_left": 0.0,
        "ttl_left": None,
        "remark": "why",
    }


def test_an_empty_store_is_an_empty_list(shelf: Shelf) -> None:
    assert shelf.json("ls") == []
    assert shelf.json("ls", "--all") == []
    assert shelf.json("held") == []
    assert shelf.run("ls").stderr == "onefold: there are no records\n"
    assert shelf.run("ls", "--state", "held").stderr == "onefold: no record matches\n"


@pytest.mark.parametrize("key", NASTY)
def test_what_a_terminal_would_obey_is_shown_as_an_escape_and_is_exact_in_json(shelf: Shelf, key: str) -> None:
    shelf.put(key, remark=key)

    (row,) = shelf.rows("ls")
    (fact,) = shelf.json("ls")

    assert row["key"] == row["remark"] == _shared.visible(key)
    assert row["key"].isprintable()
    assert (fact["key"], fact["remark"]) == (key, key)


def test_a_key_that_the_output_cannot_encode_is_escaped(shelf: Shelf) -> None:
    shelf.put("café ☕")

    said = CliRunner(charset="latin-1").invoke(app, ["ls", "--store", shelf.url])

    assert b"\tcaf\xe9 \\u2615\t" in said.stdout_bytes
    assert (said.stderr, said.exit_code) == ("", 0)


# --- which store


def test_without_a_store_a_line_says_what_to_do() -> None:
    said = CliRunner(env={"ONEFOLD_STORE": None}).invoke(app, ["ls"])

    assert "--store" in refused(said, 2)
    assert "ONEFOLD_STORE" in said.stderr


def test_the_option_goes_before_the_environment(shelf: Shelf) -> None:
    shelf.put("pay_1")

    said = CliRunner(env={"ONEFOLD_STORE": "nonsense:"}).invoke(app, ["ls", "--store", shelf.url])

    assert "pay_1" in said.stdout


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "typo.db"

    said = CliRunner().invoke(app, ["held", "--store", f"sqlite:///{path}"])

    assert "typo.db" in refused(said, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["nonsense:", "sqlte:///x.db", "memory:", "x"])
def test_a_store_that_cannot_be_meant_is_wrong_usage(url: str) -> None:
    refused(CliRunner().invoke(app, ["ls", "--store", url]), 2)


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database " * 100)

    for arguments in (["ls"], ["held"], ["show", "k"], ["forget", "k", "--yes"]):
        assert "notes.txt" in refused(CliRunner().invoke(app, [*arguments, "--store", f"sqlite:///{path}"]), 1)


def test_a_store_that_cannot_list_its_records_is_one_line(scheme: Callable[[str, Callable[[str], Any]], None]) -> None:
    class Blind:
        def __init__(self, url: str) -> None:
            inner = MemoryStore()
            for name in ("claim", "extend", "finish", "release", "read", "purge", "close"):
                setattr(self, name, getattr(inner, name))

    scheme("blind", Blind)

    for arguments in (["ls"], ["held"], ["show", "k"], ["forget", "k", "--yes"]):
        assert "Blind cannot list" in refused(CliRunner().invoke(app, [*arguments, "--store", "blind:"]), 1)


def test_a_driver_that_is_not_installed_is_one_line(scheme: Callable[[str, Callable[[str], Any]], None]) -> None:
    def without_driver(url: str) -> Any:
        raise ModuleNotFoundError("No module named 'pgdriver'")

    scheme("pg", without_driver)

    assert "pgdriver" in refused(CliRunner().invoke(app, ["ls", "--store", "pg://host"]), 1)


# --- show


def test_show_finds_a_key_in_every_operation_and_scope(shelf: Shelf) -> None:
    shelf.put("pay_1", operation="charge")
    shelf.put("pay_1", operation="mail", scope="acme")
    shelf.put("pay_2", operation="charge")

    said = shelf.run("show", "pay_1")

    assert said.stdout.count("\nkey\tpay_1\n") == 2
    assert "pay_2" not in said.stdout
    assert len(shelf.json("show", "pay_1")) == 2
    assert [fact["operation"] for fact in shelf.json("show", "pay_1", "--scope", "acme")] == ["mail"]
    assert [fact["scope"] for fact in shelf.json("show", "pay_1", "--operation", "charge")] == [""]


def test_show_takes_the_digest_of_a_log_line(shelf: Shelf) -> None:
    shelf.put_many(300)
    address = shelf.put("the one", scope="acme")
    digest = address.digest

    assert [fact["key"] for fact in shelf.json("show", digest)] == ["the one"]
    assert [fact["key"] for fact in shelf.json("show", digest.upper())] == ["the one"]
    refused(shelf.run("show", digest, "--scope", ""), 1)


def test_a_key_that_looks_like_a_digest_is_a_key_first(shelf: Shelf) -> None:
    shelf.put("0123456789ab")

    assert [fact["key"] for fact in shelf.json("show", "0123456789ab")] == ["0123456789ab"]


def test_show_of_nothing_is_one_line(shelf: Shelf) -> None:
    shelf.put("pay_1")

    assert "no record of pay_2" in refused(shelf.run("show", "pay_2"), 1)
    assert "in operation mail" in refused(shelf.run("show", "pay_1", "--operation", "mail"), 1)
    refused(shelf.run("show", "0123456789ab", "--format", "json"), 1)


def test_show_says_every_field_in_words(shelf: Shelf) -> None:
    with contextlib.suppress(TimeoutError):
        shelf.guard.run("charge", "pay_1", _reserve_and_time_out, payload={"amount": 4200})
    record = shelf.found(Address("", "charge", "pay_1"))
    assert record.fingerprint is not None

    said = shelf.run("show", "pay_1").stdout
    arguments = dict(line.split("\t") for line in said.splitlines())

    assert arguments["state"].startswith("held: nobody knows")
    assert arguments["remark"] == "attempt 1 ended in TimeoutError"
    assert arguments["steps"] == "reserve, ship"
    assert arguments["kept"] == "until it is resolved"
    assert arguments["scope"] == "none"
    assert arguments["digest"].startswith(record.address.digest)
    assert arguments["fingerprint"] == record.fingerprint.hex()
    assert arguments["token"] == f"{record.token.hex()}, revision {record.revision}"
    assert arguments["result"] == "none"
    fields = set(record.__struct_fields__) - {"address", "lease_left", "ttl_left", "omitted", "revision"}
    assert fields <= arguments.keys() | {"notes"}


def test_show_as_json_has_bytes_in_base64(shelf: Shelf) -> None:
    with contextlib.suppress(TimeoutError):
        shelf.guard.run("charge", "pay_1", _reserve_and_time_out, payload={"amount": 4200})
    record = shelf.found(Address("", "charge", "pay_1"))

    (fact,) = shelf.json("show", "pay_1")

    assert base64.b64decode(fact["token"]) == record.token
    assert base64.b64decode(fact["fingerprint"]) == record.fingerprint
    assert base64.b64decode(fact["notes"]) == record.notes
    assert fact["steps"] == ["reserve", "ship"]
    assert (fact["result_form"], fact["result"], fact["result_bytes"]) == ("none", None, 0)


def test_show_tells_the_key_that_the_other_side_got(shelf: Shelf) -> None:
    sent: list[str] = []

    def charge() -> None:
        sent.append(current().key_for("gateway"))
        raise TimeoutError

    with contextlib.suppress(TimeoutError):
        shelf.guard.run("charge", "pay_1", charge, scope="acme")

    said = shelf.run("show", "pay_1", "--key-for", "gateway", "--key-for", "mail").stdout
    (fact,) = shelf.json("show", "pay_1", "--key-for", "gateway", "--key-for", "mail")

    assert f"key for\tgateway: {sent[0]}\n" in said
    assert fact["key_for"]["gateway"] == sent[0]
    assert len({*fact["key_for"].values(), *sent}) == 2
    assert "key for" not in shelf.run("show", "pay_1").stdout
    assert "key_for" not in shelf.json("show", "pay_1")[0]


@pytest.mark.parametrize("arguments", [("\udcff",), ("pay_1", "--key-for", "\udcff")])
def test_bytes_that_are_no_text_are_one_line(shelf: Shelf, arguments: tuple[str, ...]) -> None:
    shelf.put("pay_1")

    assert "'\\udcff' is not text in UTF-8" in refused(shelf.run("show", *arguments), 2)


def test_after_a_bypass_it_is_the_key_of_the_latest_run(shelf: Shelf) -> None:
    sent: list[str] = []

    for bypass in (False, True, True):
        shelf.guard.run("charge", "pay_1", lambda: sent.append(current().key_for("gateway")), bypass=bypass)

    (fact,) = shelf.json("show", "pay_1", "--key-for", "gateway")
    assert len(set(sent)) == 3
    assert fact["key_for"] == {"gateway": sent[-1]}
    record = shelf.guard.read("charge", "pay_1")
    assert record is not None
    assert record.key_for("gateway") == sent[-1]


def _reserve_and_time_out() -> None:
    current().step("reserve", lambda: 1)
    current().step("ship", lambda: b"label")
    raise TimeoutError


@dataclasses.dataclass
class Receipt:
    number: int
    at: dt.datetime
    signature: bytes


class Encrypting(MsgspecCodec):
    def encode(self, value: Any, returns: Any) -> bytes:
        return b"\x00" + bytes(byte ^ 0xA5 for byte in super().encode(value, returns))


AT = dt.datetime(2024, 5, 3, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("value", "returns", "form", "shown"),
    [
        ("sent", Any, "plain", "sent"),
        ({"a": [1, 2.5, None, True]}, Any, "plain", {"a": [1, 2.5, None, True]}),
        ({"raw": b"\x00\xff"}, Any, "plain", {"raw": {"base64": "AP8="}}),
        ({1: "one", b"k": 2}, Any, "plain", {"1": "one", '{"base64": "aw=="}': 2}),
        ([math.inf], Any, "plain", [{"float": "inf"}]),
        (
            Receipt(17, AT, b"\x01"),
            Receipt,
            "typed",
            {"number": 17, "at": AT.isoformat(), "signature": {"base64": "AQ=="}},
        ),
        (None, Any, "none", None),
    ],
)
def test_show_decodes_the_result(shelf: Shelf, value: Any, returns: Any, form: str, shown: Any) -> None:
    shelf.guard.run("charge", "pay_1", lambda: value, returns=returns)

    (fact,) = shelf.json("show", "pay_1")
    arguments = dict(line.split("\t") for line in shelf.run("show", "pay_1").stdout.splitlines())

    assert (fact["result_form"], fact["result"]) == (form, shown)
    assert arguments["result"] == ("none" if form == "none" else json.dumps(shown))


def test_show_of_a_result_that_was_not_kept_says_so(shelf: Shelf) -> None:
    shelf.guard.run("charge", "pay_1", lambda: "x", policy=Policy(keep_result=False))

    (fact,) = shelf.json("show", "pay_1")

    assert fact["result_form"] == "omitted"
    assert "was not kept" in shelf.run("show", "pay_1").stdout


@pytest.mark.parametrize(
    "stored",
    [
        Encrypting().encode("secret", Any),
        b"",
        b"\xff\x00",
        b"\x00\x81\x80\x01",
        b"\x00" + b"\x91" * 150 + b"\x01",
        b"\x00" + b"\x91" * 5_000 + b"\x01",
    ],
    ids=["encrypted", "empty", "another form", "a map as a key", "nested", "nested too deeply for Python"],
)
def test_show_gives_the_size_of_what_it_cannot_read(shelf: Shelf, stored: bytes) -> None:
    shelf.put("pay_1", result=stored, notes=stored)

    (fact,) = shelf.json("show", "pay_1")

    assert (fact["result_form"], fact["result"], fact["result_bytes"]) == ("unreadable", None, len(stored))
    assert f"result\t{len(stored)} bytes, which only the codec" in shelf.run("show", "pay_1").stdout


def test_show_of_a_failure_shows_the_error(shelf: Shelf) -> None:
    with contextlib.suppress(ValueError):
        shelf.guard.run("charge", "pay_1", _decline, policy=Policy(final_errors=[ValueError]))

    (fact,) = shelf.json("show", "pay_1")

    assert fact["result"] == {"type": "builtins.ValueError", "message": "declined", "args": ["declined"]}


def _decline() -> None:
    raise ValueError("declined")


# --- held


def test_held_lists_what_is_held_the_oldest_first(shelf: Shelf) -> None:
    shelf.hold("young", age=10.0)
    shelf.hold("oldest", age=9_000.0)
    shelf.hold("old", age=300.0, operation="mail")
    shelf.put("done")

    assert shelf.keys("held") == ["oldest", "old", "young"]
    assert [fact["key"] for fact in shelf.json("held")] == ["oldest", "old", "young"]
    assert shelf.keys("held", "--operation", "charge") == ["oldest", "young"]
    assert shelf.rows("held")[0]["remark"] == "attempt 1 ended in TimeoutError"
    assert shelf.rows("held")[0]["age"] == "2h"
    assert "`onefold show KEY --key-for NAME`" in shelf.run("held").stderr


def test_held_keeps_the_oldest_and_counts_the_others(shelf: Shelf) -> None:
    for number in range(10):
        shelf.hold(f"k{number}", age=float(number * 100))

    said = shelf.run("held", "--limit", "2")

    assert [line.split("\t")[2] for line in said.stdout.splitlines()[1:]] == ["k9", "k8"]
    assert "the oldest 2 of 10" in said.stderr
    assert "For all of them: --all" in said.stderr
    assert "the oldest" not in shelf.run("held", "--limit", "10").stderr


def test_held_lists_all_of_them_if_asked(shelf: Shelf) -> None:
    for number in range(60):
        shelf.hold(f"k{number}", age=9_000.0 - number)

    assert "For all of them: --all" in shelf.run("held").stderr
    assert shelf.keys("held", "--all") == [f"k{number}" for number in range(60)]
    assert "the oldest" not in shelf.run("held", "--all").stderr


@pytest.mark.parametrize("command", [["resolve", "--done", "--reason", "x"], ["forget"]])
def test_a_digest_never_changes_the_record_of_a_key_that_looks_like_it(shelf: Shelf, command: list[str]) -> None:
    meant = shelf.hold("tab\tkey", scope="victim")
    # Whoever knows a digest, from a log or an answer, may take it for a key of their own.
    twin = shelf.hold(meant.digest, scope="attacker")

    line = next(fact["resolve"] for fact in shelf.json("held") if fact["scope"] == "victim")
    by_digest = shelf.run(*command, "--digest", meant.digest, "--yes")

    assert f"--digest {meant.digest} --operation charge --scope victim" in line
    assert by_digest.exit_code == 0, by_digest.output
    assert shelf.found(twin).state is State.HELD
    gone = shelf.read(meant)
    assert gone is None or gone.state is State.DONE


@pytest.mark.parametrize("command", [["resolve", "--done", "--reason", "x"], ["forget"]])
def test_a_digest_in_the_place_of_a_key_changes_nothing_and_names_the_option(shelf: Shelf, command: list[str]) -> None:
    address = shelf.hold("pay_1")

    line = refused(shelf.run(*command, address.digest, "--yes"), 1)

    assert f"--digest {address.digest}" in line
    assert shelf.found(address).state is State.HELD


@pytest.mark.parametrize("arguments", [[], ["pay_1", "--digest", "0123456789ab"], ["--digest", "pay_1"]])
@pytest.mark.parametrize("command", [["show"], ["resolve", "--rerun", "--reason", "x", "--yes"], ["forget", "--yes"]])
def test_a_record_is_named_by_a_key_or_by_a_digest(shelf: Shelf, command: list[str], arguments: list[str]) -> None:
    address = shelf.hold("pay_1")
    # Several records can be resolved at once, however they are named; but each of them has to exist.
    both = command[0] == "resolve" and len(arguments) > 2

    refused(shelf.run(*command, *arguments), 1 if both else 2)

    assert shelf.found(address).state is State.HELD


@pytest.mark.parametrize("scopes", [[""], ["", "o'neil & sons"], ["acme", "line\nbreak"]])
def test_the_line_that_held_gives_resolves_this_record_and_no_other(shelf: Shelf, scopes: list[str]) -> None:
    held = {shelf.hold(key, scope=scope) for key in ("pay_1", *NASTY) for scope in scopes}

    for fact in shelf.json("held"):
        program, *arguments = shlex.split(fact["resolve"])
        said = shelf.run(*arguments, "--rerun", "--reason", "no trace", "--yes")

        assert fact["resolve"].isprintable()
        assert program == "onefold"
        assert said.exit_code == 0, said.output
        held.remove(Address(fact["scope"], fact["operation"], fact["key"]))
        assert {record.address for record in shelf.store.browse(Query(state=State.HELD), 100)} == held
    assert held == set()


def test_the_line_names_the_store_unless_the_environment_does(shelf: Shelf) -> None:
    shelf.hold("pay_1")

    named = CliRunner(env={"ONEFOLD_STORE": None}).invoke(app, ["held", "--store", shelf.url])

    assert f"onefold resolve pay_1 --operation charge --scope '' --store {shelf.url}\n" in named.stdout
    assert shelf.rows("held")[0]["resolve"] == "onefold resolve pay_1 --operation charge --scope ''"


def test_the_line_never_holds_a_password(shelf: Shelf, scheme: Callable[[str, Callable[[str], Any]], None]) -> None:
    shelf.hold("pay_1")
    scheme("pg", lambda url: SqliteStore(shelf.path))

    for url in ("pg://me:s3cret@host/db", "pg://host/db?password=s3cret"):
        said = CliRunner(env={"ONEFOLD_STORE": None}).invoke(app, ["held", "--store", url])

        assert "onefold resolve pay_1" in said.stdout
        assert "s3cret" not in said.output
        assert "add --store" in said.stderr


def test_held_tells_of_workers_that_died_and_were_not_marked_yet(shelf: Shelf) -> None:
    shelf.put("alive", State.RUNNING, lease=60.0)

    assert shelf.run("held").stderr == "onefold: nothing is held\n"

    shelf.put("dead", State.RUNNING, lease=0.0)

    assert "past the end of their lease: 1" in shelf.run("held").stderr


# --- resolve


def test_resolving_as_done_gives_every_duplicate_the_value(shelf: Shelf) -> None:
    address = shelf.hold("pay_1")

    said = shelf.run(
        "resolve", "pay_1", "--done", "--value", '{"receipt": [17, null]}', "--reason", "seen", "--by", "maria", "--yes"
    )

    assert said.exit_code == 0, said.output
    assert said.stdout.startswith(f"charge pay_1 [key {address.digest}]: resolved as done")
    assert re.fullmatch(r"resolved as done by maria at [-0-9T:]+Z: seen", shelf.found(address).history[0])
    assert shelf.guard.run("charge", "pay_1", pytest.fail).value == {"receipt": [17, None]}


def test_resolving_as_done_without_a_value_gives_none(shelf: Shelf) -> None:
    shelf.hold("pay_1")

    assert shelf.run("resolve", "pay_1", "--done", "--reason", "seen", "--yes").exit_code == 0

    assert shelf.guard.run("charge", "pay_1", pytest.fail).value is None


@pytest.mark.parametrize(("more", "message"), [(["--error", "declined"], "declined"), ([], "the bank says so")])
def test_resolving_as_failed_gives_every_duplicate_the_error(shelf: Shelf, more: list[str], message: str) -> None:
    shelf.hold("pay_1")

    assert shelf.run("resolve", "pay_1", "--failed", *more, "--reason", "the bank says so", "--yes").exit_code == 0

    with pytest.raises(RememberedFailure) as raised:
        shelf.guard.run("charge", "pay_1", pytest.fail)
    assert raised.value.message == message
    assert str(raised.value).endswith(f"failed for good before: {message}")


def test_a_text_is_said_as_it_is_and_an_exception_by_its_name(shelf: Shelf) -> None:
    shelf.hold("a")
    shelf.hold("b")

    shelf.guard.resolve("charge", "a", Failed("the card was declined"), by="maria", reason="the bank says so")
    shelf.guard.resolve("charge", "b", Failed(ValueError("declined")), by="maria", reason="the bank says so")

    with pytest.raises(RememberedFailure, match=r"before: the card was declined$") as said:
        shelf.guard.run("charge", "a", pytest.fail)
    assert (said.value.type_name, said.value.message) == ("", "the card was declined")
    # A dead letter tells that much and no more: the text may be about a customer.
    assert reason_of(said.value) == "it failed for good before, resolved by hand"
    with pytest.raises(RememberedFailure, match=r"before: builtins\.ValueError: declined$"):
        shelf.guard.run("charge", "b", pytest.fail)


@pytest.mark.parametrize(
    ("wrong", "arguments"),
    [(ValueError, "not ValueError"), (None, "not NoneType"), (17, "not int"), ("", "not an empty text")],
)
def test_what_is_neither_an_exception_nor_a_text_is_refused_at_once(wrong: Any, arguments: str) -> None:
    with pytest.raises(UsageError, match=arguments):
        Failed(wrong)


def test_an_empty_error_is_refused_before_anything_is_changed(shelf: Shelf) -> None:
    address = shelf.hold("pay_1")

    refused(shelf.run("resolve", "pay_1", "--failed", "--error", "", "--reason", "x", "--yes"), 2)

    assert shelf.found(address).state is State.HELD


def test_resolving_as_rerun_lets_the_next_delivery_run(shelf: Shelf) -> None:
    shelf.hold("pay_1", attempt=5)

    assert shelf.run("resolve", "pay_1", "--rerun", "--reason", "no trace", "--yes").exit_code == 0

    outcome = shelf.guard.run("charge", "pay_1", lambda: "ran")
    assert (outcome.value, outcome.replayed, outcome.attempt) == ("ran", False, 1)


def test_who_resolves_is_the_login_name_unless_given(shelf: Shelf) -> None:
    address = shelf.hold("pay_1")

    assert shelf.run("resolve", "pay_1", "--done", "--reason", "seen", "--yes", LOGNAME="jana").exit_code == 0

    assert re.fullmatch(r"resolved as done by jana at [-0-9T:]+Z: seen", shelf.found(address).history[0])


def test_a_user_without_a_login_name_has_to_give_one(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.hold("pay_1")

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nobody)

    assert "--by" in refused(shelf.run("resolve", "pay_1", "--done", "--reason", "seen", "--yes"), 2)


def test_a_resolved_record_is_kept_forever_unless_told_otherwise(shelf: Shelf) -> None:
    first, second = shelf.hold("a"), shelf.hold("b")

    assert shelf.run("resolve", "a", "--done", "--reason", "seen", "--yes").exit_code == 0
    assert shelf.run("resolve", "b", "--done", "--reason", "seen", "--yes", "--keep", "30d").exit_code == 0

    assert math.isinf(shelf.found(first).ttl_left)
    assert 29 * 86_400 < shelf.found(second).ttl_left <= 30 * 86_400


def test_a_worker_that_died_can_be_resolved_before_it_is_marked(shelf: Shelf) -> None:
    address = shelf.put("pay_1", State.RUNNING, lease=0.0)

    assert shelf.run("resolve", "pay_1", "--done", "--reason", "seen", "--yes").exit_code == 0

    assert shelf.found(address).state is State.DONE


def test_what_was_resolved_by_hand_can_be_corrected(shelf: Shelf) -> None:
    address = shelf.hold("pay_1")

    assert shelf.run("resolve", "pay_1", "--done", "--value", "{}", "--reason", "seen", "--yes").exit_code == 0
    assert shelf.run("resolve", "pay_1", "--done", "--value", '"r-1"', "--reason", "a typo", "--yes").exit_code == 0

    assert shelf.guard.run("charge", "pay_1", pytest.fail).value == "r-1"
    assert [one.rpartition(": ")[2] for one in shelf.found(address).history[:2]] == ["a typo", "seen"]


def test_show_after_a_correction_has_who_when_and_why_of_each_and_the_true_age(shelf: Shelf) -> None:
    shelf.hold("pay_1", age=7_200.0, attempt=3)
    for resolution, who in (("--done", "ada"), ("--failed", "bob")):
        assert shelf.run("resolve", "pay_1", resolution, "--reason", "looked", "--by", who, "--yes").exit_code == 0

    shown = shelf.run("show", "pay_1").stdout
    (fact,) = shelf.json("show", "pay_1")
    assert shelf.run("resolve", "pay_1", "--rerun", "--reason", "no trace", "--by", "eve", "--yes").exit_code == 0
    rerun = shelf.run("show", "pay_1").stdout

    assert re.search(r"^remark\tresolved as failed by bob at [-0-9T:]+Z: looked$", shown, re.MULTILINE)
    assert re.search(r"^history\t[-0-9T:]+Z resolved as done by ada: looked$", shown, re.MULTILINE)
    assert "\nhistory\tattempt 1 ended in TimeoutError\n" in shown
    assert "\nattempt\t3\n" in shown
    assert "\nage\t2h since its first claim" in shown
    assert (len(fact["history"]), fact["history"][0], fact["attempt"]) == (3, fact["remark"], 3)
    assert "\nattempt\t0 since it was resolved as a rerun\n" in rerun
    assert "s since it was resolved as a rerun\n" in rerun


def test_resolve_takes_the_digest(shelf: Shelf) -> None:
    address, other = shelf.hold("pay_1"), shelf.hold("pay_1", operation="mail")

    said = shelf.run("resolve", "--digest", address.digest.upper(), "--rerun", "--reason", "no trace", "--yes")

    assert said.exit_code == 0, said.output
    assert (shelf.found(address).state, shelf.found(other).state) == (State.OPEN, State.HELD)


def test_resolve_as_json_has_the_record_before_and_after(shelf: Shelf) -> None:
    shelf.hold("pay_1")

    fact = shelf.json("resolve", "pay_1", "--done", "--value", "7", "--reason", "seen", "--by", "maria", "--yes")

    assert (fact["resolved"], fact["by"], fact["reason"]) == ("done", "maria", "seen")
    assert (fact["count"], fact["left"], fact["dry_run"]) == (1, 0, False)
    (record,) = fact["records"]
    assert (record["before"]["state"], record["after"]["state"], record["after"]["result"]) == ("held", "done", 7)
    assert record["problem"] is None


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--reason", "x"], "exactly one"),
        (["--done", "--rerun", "--reason", "x"], "exactly one"),
        (["--done", "--failed", "--rerun", "--reason", "x"], "exactly one"),
        (["--rerun", "--value", "1", "--reason", "x"], "--value"),
        (["--done", "--error", "x", "--reason", "x"], "--error"),
        (["--done"], "--reason"),
        (["--done", "--reason", "  "], "--reason"),
        (["--done", "--reason", "x", "--by", ""], "--by"),
        (["--done", "--reason", "x", "--value", "paid"], "not JSON"),
        (["--done", "--reason", "x", "--value", ""], "not JSON"),
        (["--done", "--reason", "x", "--value", "NaN"], "not JSON"),
        (["--done", "--reason", "x", "--value", "[" * 9_000], "not JSON"),
        (["--done", "--reason", "x", "--value", "9" * 30], "cannot be stored"),
        (["--done", "--reason", "x", "--value", '"\\ud800"'], "cannot be stored"),
        (["--done", "--reason", "x", "--keep", "soon"], "keep='soon'"),
    ],
)
def test_wrong_usage_of_resolve_is_one_line_and_changes_nothing(shelf: Shelf, arguments: list[str], hint: str) -> None:
    address = shelf.hold("pay_1")
    before = shelf.found(address)

    assert hint in refused(shelf.run("resolve", "pay_1", "--yes", *arguments), 2)

    after = shelf.found(address)
    assert (after.token, after.revision, after.state) == (before.token, before.revision, State.HELD)


@pytest.mark.parametrize("command", [["resolve", "--done", "--reason", "x"], ["forget"]])
def test_nobody_is_asked_about_what_cannot_be_done(
    shelf: Shelf, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.put("pay_1", State.RUNNING, lease=100.0)
    monkeypatch.setattr(asking, "check_terminal", lambda: None)
    monkeypatch.setattr(asking, "agreed", pytest.fail)

    assert "Its lease ends in" in refused(shelf.run(*command, "pay_1"), 1)


@pytest.mark.parametrize("state", [State.DONE, State.FAILED, State.OPEN])
def test_what_is_not_held_cannot_be_resolved(shelf: Shelf, state: State) -> None:
    address = shelf.put("pay_1", state)

    assert f"is {state}, not held" in refused(shelf.run("resolve", "pay_1", "--rerun", "--reason", "x", "--yes"), 1)
    assert shelf.found(address).state is state


def test_what_is_running_can_neither_be_resolved_nor_forgotten(shelf: Shelf) -> None:
    address = shelf.put("pay_1", State.RUNNING, lease=100.0)

    assert "is running" in refused(shelf.run("resolve", "pay_1", "--rerun", "--reason", "x", "--yes"), 1)
    assert "is running" in refused(shelf.run("forget", "pay_1", "--yes"), 1)
    assert shelf.found(address).state is State.RUNNING


def test_a_record_that_changes_after_it_was_found_is_one_line(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    address = shelf.hold("pay_1")
    resolve = Guard.resolve

    def late(self: Guard, *args: Any, **kwargs: Any) -> Record:
        shelf.store.finish(Claim(address, shelf.found(address).token), Ending(state=State.DONE, ttl=60.0))
        return resolve(self, *args, **kwargs)

    monkeypatch.setattr(Guard, "resolve", late)

    assert "it is done, not held" in refused(shelf.run("resolve", "pay_1", "--rerun", "--reason", "x", "--yes"), 1)


@pytest.mark.parametrize("command", [["resolve", "--done", "--reason", "x"], ["forget"]])
def test_a_key_of_several_records_has_to_be_told_apart(shelf: Shelf, command: list[str]) -> None:
    addresses = [shelf.hold("pay_1"), shelf.hold("pay_1", operation="mail"), shelf.hold("pay_1", scope="acme")]

    said = shelf.run(*command, "pay_1", "--yes")

    assert said.exit_code == 2
    assert said.stdout == ""
    assert all(address.digest in said.stderr for address in addresses)
    assert "--operation and --scope" in said.stderr.splitlines()[-1]
    assert {shelf.found(address).state for address in addresses} == {State.HELD}
    assert shelf.run(*command, "pay_1", "--yes", "--operation", "charge", "--scope", "").exit_code == 0
    held = [address for address in addresses if (found := shelf.read(address)) and found.state is State.HELD]
    assert held == addresses[1:]


@pytest.mark.parametrize("command", [["resolve", "--done", "--reason", "x"], ["forget"]])
def test_without_a_terminal_nothing_is_changed_unasked(shelf: Shelf, command: list[str]) -> None:
    address = shelf.hold("pay_1")

    assert "--yes" in refused(shelf.run(*command, "pay_1"), 2)
    assert shelf.found(address).state is State.HELD


@pytest.mark.parametrize("command", [["resolve", "--done", "--reason", "x"], ["forget"]])
def test_what_changes_while_a_person_thinks_is_not_touched(
    shelf: Shelf, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = shelf.hold("pay_1")

    def meanwhile(question: str) -> bool:
        """Somebody else resolves it, it runs again, and is held again: not the run that was asked about."""
        shelf.guard.resolve("charge", "pay_1", Done("x"), by="another", reason="x")
        shelf.guard.forget("charge", "pay_1")
        shelf.hold("pay_1")
        return True

    monkeypatch.setattr(asking, "check_terminal", lambda: None)
    monkeypatch.setattr(asking, "agreed", meanwhile)
    said = shelf.run(*command, "pay_1")

    assert said.exit_code == 1
    assert "has changed in the meantime" in said.stderr.splitlines()[-1]
    assert shelf.found(address).state is State.HELD


def test_a_slow_owner_that_still_renews_its_lease_does_not_stop_a_person(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = shelf.hold("pay_1")

    def meanwhile(question: str) -> bool:
        return shelf.store.extend(Claim(address, shelf.found(address).token, lease=9.0))

    monkeypatch.setattr(asking, "check_terminal", lambda: None)
    monkeypatch.setattr(asking, "agreed", meanwhile)

    assert shelf.run("resolve", "pay_1", "--done", "--reason", "x").exit_code == 0
    assert shelf.found(address).state is State.DONE


# --- forget


@pytest.mark.parametrize("state", [State.DONE, State.FAILED, State.OPEN, State.HELD])
def test_what_is_forgotten_runs_at_the_next_delivery(shelf: Shelf, state: State) -> None:
    address = shelf.put("pay_1", state)

    said = shelf.run("forget", "pay_1", "--yes")

    assert said.stdout == f"charge pay_1 [key {address.digest}]: forgotten; the next delivery will run\n"
    assert shelf.read(address) is None
    assert shelf.guard.run("charge", "pay_1", lambda: "ran").value == "ran"


def test_forget_of_nothing_is_one_line(shelf: Shelf) -> None:
    refused(shelf.run("forget", "pay_1", "--yes"), 1)


def test_forget_as_json_has_what_was_forgotten(shelf: Shelf) -> None:
    shelf.put("pay_1", result=b"\x00\x07")

    fact = shelf.json("forget", "pay_1", "--yes")

    assert (fact["forgotten"], fact["before"]["result"]) == (True, 7)


# --- words


@pytest.mark.parametrize(
    ("seconds", "arguments"),
    [
        (0.0, "0s"),
        (-3.0, "0s"),
        (0.9, "0s"),
        (119.9, "119s"),
        (120.0, "2m"),
        (7_199.0, "119m"),
        (7_200.0, "2h"),
        (172_799.0, "47h"),
        (864_000.5, "10d"),
        (math.inf, "forever"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, arguments: str) -> None:
    assert _shared.about(seconds) == arguments


# --- as a process: pipes, signals and terminals

MAIN = "from onefold.cli import main; main()"


@contextlib.contextmanager
def process(
    shelf: Shelf, *arguments: str, stdout: int = subprocess.PIPE, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that is under way; one that does not end by itself is ended."""
    with subprocess.Popen(
        _command(*arguments),
        env=_environment(shelf) | env,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", MAIN, *arguments]


def _environment(shelf: Shelf) -> dict[str, str]:
    """With a buffer, as people have it: what is left in it at the end is what makes trouble."""
    # Nor does it matter what whoever runs these tests wants of colours.
    foreign = {"PYTHONUNBUFFERED", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
    inherited = {name: value for name, value in os.environ.items() if name not in foreign}
    return inherited | {"ONEFOLD_STORE": shelf.url}


CTRL_C = b"\x03"
# After so many seconds without an answer a person presses Ctrl-C again.
SILENCE = 2.0
# Makes its terminal the one whose Ctrl-C reaches it.
AT_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "


def on_a_terminal(shelf: Shelf, *arguments: str, answer: bytes = b"", **env: str) -> tuple[str, int]:
    """What a person sees, and the exit status; the answer is typed when the question comes."""
    person, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", f"{AT_TERMINAL}{MAIN}", *arguments],
        env=_environment(shelf) | {"TERM": "xterm", "COLUMNS": "80"} | env,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as running:
        os.close(terminal)
        try:
            seen = _watched(person, answer)
            return seen.decode(), running.wait(PATIENCE)
        finally:
            running.kill()
            os.close(person)


def _watched(person: int, answer: bytes) -> bytes:
    """Everything that comes until the other side closes the terminal."""
    seen, typed, until = b"", False, time.monotonic() + PATIENCE
    # Linux says with an error that nobody is left at the other side, others with an empty answer.
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            if select.select([person], [], [], SILENCE)[0]:
                if not (more := os.read(person, 65_536)):
                    break
                seen += more
            elif answer == CTRL_C:
                # Python sees a signal that comes just before its `read(2)` only after it: a person presses again.
                typed = False
            if answer and not typed and b"[y/N] " in seen:
                os.write(person, answer)
                typed = True
    return seen


def test_in_a_pipe_a_line_is_whole_and_plain(shelf: Shelf) -> None:
    shelf.hold("k" * 200, remark="a remark that is longer than any terminal is wide " * 5)

    with process(shelf, "ls", COLUMNS="40", FORCE_COLOR="1") as running:
        out, errors = running.communicate(timeout=PATIENCE)

    assert b"k" * 200 in out
    assert b"a remark that is longer than any terminal is wide " * 5 in out
    assert len(out.splitlines()) == 2
    assert out.decode().replace("\t", "").replace("\n", "").isprintable()
    assert errors == b""


def test_a_reader_that_has_seen_enough_ends_the_command_silently(shelf: Shelf) -> None:
    shelf.put_many(3_000)

    with process(shelf, "ls", "--all") as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline().startswith(b"scope\t")
        running.stdout.close()
        errors = running.stderr.read()
        status = running.wait(PATIENCE)

    assert (errors, status) == (b"", 141)


def test_ctrl_c_ends_a_long_output_with_130_and_no_traceback(shelf: Shelf) -> None:
    for number in range(300):
        shelf.put("pay_1", operation=f"operation_{number}")
    unread, pipe = os.pipe()

    with process(shelf, "show", "pay_1", stdout=pipe) as running:
        assert running.stderr is not None
        # Nobody reads, so that the command waits in the middle: with a full pipe, and a line in its buffer.
        assert eventually(lambda: not select.select([], [pipe], [], 0)[1] and _sleeps(running.pid))
        running.send_signal(signal.SIGINT)
        status = running.wait(PATIENCE)
        errors = running.stderr.read()
    os.close(unread)
    os.close(pipe)

    assert (errors, status) == (b"", 130)


def _sleeps(pid: int) -> bool:
    """Whether the process waits for something, where the system can say it."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(") ")[2].startswith("S")


def test_a_full_disk_is_one_line(shelf: Shelf) -> None:
    shelf.put_many(10)
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")

    with open("/dev/full", "wb") as full, process(shelf, "ls", stdout=full.fileno()) as running:
        _, errors = running.communicate(timeout=PATIENCE)

    assert running.returncode == 1
    assert errors == b"onefold: [Errno 28] No space left on device\n"


def test_a_terminal_gets_a_table_with_colours_and_whole_keys(shelf: Shelf) -> None:
    shelf.hold("[red]pay_1[/]" + "x" * 60)

    seen, status = on_a_terminal(shelf, "ls")

    assert status == 0
    assert "\x1b[33mheld" in seen
    # To be copied, although the terminal is narrower.
    assert f"[red]pay_1[/]{'x' * 60}" in seen


def test_a_terminal_that_wants_no_colour_gets_none_and_the_line_to_copy_is_whole(shelf: Shelf) -> None:
    shelf.hold("key with spaces " * 10)

    seen, status = on_a_terminal(shelf, "held", NO_COLOR="1")

    assert status == 0
    assert f"  onefold resolve '{'key with spaces ' * 10}' --operation charge --scope ''\r\n" in seen
    assert re.search(r"\x1b\[[\d;]*[34]\d", seen) is None


def test_looking_for_a_digest_shows_its_progress_on_a_terminal(shelf: Shelf) -> None:
    address = shelf.hold("pay_1")

    seen, status = on_a_terminal(shelf, "show", address.digest)

    assert status == 0
    assert f"looking for {address.digest}" in seen
    # The progress is gone before the record is printed.
    assert seen.rindex("looking for") < seen.index("pay_1")


@pytest.mark.parametrize(
    ("answer", "status", "state"), [(b"y\n", 0, State.DONE), (CTRL_C, 130, State.HELD)], ids=["yes", "ctrl-c"]
)
def test_resolve_shows_the_record_and_asks(shelf: Shelf, answer: bytes, status: int, state: State) -> None:
    address = shelf.hold("pay_1")

    seen, ended = on_a_terminal(
        shelf, "resolve", "pay_1", "--done", "--value", '"ok"', "--reason", "seen", answer=answer
    )

    assert (ended, shelf.found(address).state) == (status, state)
    assert "attempt 1 ended in TimeoutError" in seen
    assert 'every duplicate gets "ok"' in seen
    assert "Traceback" not in seen


@pytest.mark.parametrize(
    ("answer", "status"), [("y\n", 0), ("YES\n", 0), ("n\n", 1), ("\n", 1), ("", 1), ("yesterday\n", 1)]
)
def test_forget_says_what_it_means_and_takes_nothing_but_yes(
    shelf: Shelf, answer: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = shelf.put("pay_1", remark="why")
    monkeypatch.setattr(asking, "check_terminal", lambda: None)

    said = shelf.run("forget", "pay_1", typed=answer)

    assert said.exit_code == status
    assert (shelf.read(address) is None) is (status == 0)
    assert "remark\twhy\n" in said.stderr
    assert "The next delivery will run" in said.stderr


def test_the_question_does_not_get_into_the_json(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.hold("pay_1")
    monkeypatch.setattr(asking, "check_terminal", lambda: None)

    said = shelf.run("resolve", "pay_1", "--done", "--reason", "x", "--format", "json", typed="y\n")

    assert json.loads(said.stdout)["resolved"] == "done"
    assert "[y/N]" in said.stderr


def test_a_held_delivery_stays_refused_until_it_is_resolved(shelf: Shelf) -> None:
    """The whole way: a timeout, the hold, the list, the resolution, the replay."""
    with contextlib.suppress(TimeoutError):
        shelf.guard.run("charge", "pay_1", _reserve_and_time_out)
    with pytest.raises(Held):
        shelf.guard.run("charge", "pay_1", pytest.fail)

    (fact,) = shelf.json("held")
    arguments = shlex.split(fact["resolve"])[1:]
    assert shelf.run(*arguments, "--done", "--value", '"paid"', "--reason", "seen", "--yes").exit_code == 0

    assert shelf.guard.run("charge", "pay_1", pytest.fail).value == "paid"
    assert shelf.json("held") == []


@pytest.mark.parametrize("url", ["postgresql+asyncpg://localhost:1/shop", "mysql+asyncmy://localhost:1/shop"])
def test_a_url_for_an_async_guard_is_looked_at_by_the_blocking_driver(url: str) -> None:
    refused = CliRunner().invoke(app, ["ls", "--store", url])

    assert refused.exit_code == 1
    assert "AsyncGuard" not in refused.stderr
    assert "pymysql" not in refused.stderr
