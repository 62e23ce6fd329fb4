"""`onefold resolve` for many records at once: chosen, shown, confirmed, and each resolved only as it was shown."""

from __future__ import annotations

import functools
import json
import re
import shlex
import signal
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from onefold import Done, Guard, Held, Policy, Record, State, StoreUnavailable
from onefold._model import Address, Claim, Ending
from onefold.cli._common import asking
from onefold.cli.app import app
from tests.cli.test_records import MAIN, Shelf, on_a_terminal, refused, shelf
from tests.support import PATIENCE

__all__ = ["shelf"]

WHY = ("--reason", "the bank has no trace", "--by", "maria")


def sixty(shelf: Shelf) -> list[Address]:
    return [shelf.hold(f"pay_{number:02}", age=60.0 * number) for number in range(60)]


def states(shelf: Shelf, addresses: list[Address]) -> set[State]:
    return {shelf.found(address).state for address in addresses}


def test_several_keys_and_digests_are_resolved_at_once(shelf: Shelf) -> None:
    chosen = [shelf.hold(key) for key in ("a", "b", "c")]
    other = shelf.hold("d")

    said = shelf.run("resolve", "a", "b", "a", "--digest", chosen[2].digest, "--rerun", *WHY, "--yes")

    assert said.exit_code == 0, said.output
    assert len(said.stdout.splitlines()) == 3
    assert "3 records resolved as rerun: the next delivery will run" in said.stderr
    assert states(shelf, chosen) == {State.OPEN}
    assert shelf.found(other).state is State.HELD


def test_a_key_without_a_record_among_several_changes_nothing(shelf: Shelf) -> None:
    address = shelf.hold("a")

    assert "no record of b" in refused(shelf.run("resolve", "a", "b", "--rerun", *WHY, "--yes"), 1)
    assert shelf.found(address).state is State.HELD


def test_sixty_held_records_are_resolved_by_a_filter(shelf: Shelf) -> None:
    held = sixty(shelf)
    others = [shelf.hold("x", operation="mail"), shelf.put("y"), shelf.put("z", State.RUNNING, lease=60.0)]
    before = states(shelf, others)

    fact = shelf.json("resolve", "--operation", "charge", "--done", "--value", "1", *WHY, "--yes")

    assert (fact["resolved"], fact["by"], fact["count"], fact["left"]) == ("done", "maria", 60, 0)
    assert [one["before"]["key"] for one in fact["records"][:2]] == ["pay_59", "pay_58"]
    assert {one["after"]["state"] for one in fact["records"]} == {"done"}
    assert states(shelf, held) == {State.DONE}
    assert states(shelf, others) == before


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (["--older-than", "58m"], {"pay_58", "pay_59"}),
        (["--remark", "connection RESET"], {"odd"}),
        (["--scope", "acme"], {"odd"}),
        (["--scope", "acme", "--older-than", "1h"], set()),
        (["--operation", "mail"], {"letter"}),
    ],
)
def test_a_filter_chooses_by_age_remark_scope_and_operation(shelf: Shelf, options: list[str], chosen: set[str]) -> None:
    sixty(shelf)
    shelf.hold("odd", scope="acme", remark="attempt 2 ended in Connection reset by peer")
    shelf.hold("letter", operation="mail")

    tried = shelf.json("resolve", *options, "--rerun", *WHY, "--dry-run")
    said = shelf.json("resolve", *options, "--rerun", *WHY, "--yes")

    for fact, dry in ((tried, True), (said, False)):
        assert {one["before"]["key"] for one in fact["records"]} == chosen
        assert (fact["count"], fact["dry_run"]) == (len(chosen), dry)
    assert len(shelf.json("held", "--limit", "100")) == 62 - len(chosen)


def test_a_dry_run_is_a_table_and_changes_nothing(shelf: Shelf) -> None:
    held = sixty(shelf)

    said = shelf.run("resolve", "--older-than", "50m", "--rerun", *WHY, "--dry-run")

    assert said.exit_code == 0, said.output
    heading, *lines = said.stdout.splitlines()
    assert heading.split("\t") == ["scope", "operation", "key", "digest", "attempt", "age", "remark"]
    assert len(lines) == 10
    assert "10 records would be resolved as rerun" in said.stderr
    assert states(shelf, held) == {State.HELD}


def test_a_filter_that_matches_nothing_says_so(shelf: Shelf) -> None:
    shelf.hold("a")

    said = shelf.run("resolve", "--operation", "charge", "--remark", "no such words", "--rerun", *WHY, "--yes")

    assert (said.exit_code, said.stdout) == (0, "")
    assert said.stderr == (
        "onefold: nothing that is held matches: nothing was resolved. "
        "To correct what was resolved before, name its keys\n"
    )


@pytest.mark.parametrize("command", [("held",), ("resolve", "--rerun", *WHY, "--yes")])
def test_an_operation_or_scope_that_no_record_has_is_a_typo(shelf: Shelf, command: tuple[str, ...]) -> None:
    empty = shelf.run(*command, "--operation", "charg")
    shelf.hold("a")

    misspelt = shelf.run(*command, "--operation", "charg")
    elsewhere = shelf.run(*command, "--scope", "acme")

    assert empty.exit_code == 0
    assert (misspelt.exit_code, elsewhere.exit_code) == (1, 1)
    assert "no record matches --operation charg" in misspelt.stderr
    assert "Its operations are charge" in misspelt.stderr
    assert "check its spelling" in elsewhere.stderr
    assert [record["state"] for record in shelf.json("ls")] == ["held"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "which records?"),
        (["--scope", ""], "which records?"),
        (["--operation", "charge", "--remark", " "], "--remark is empty"),
        (["a", "--older-than", "1h"], "instead of keys"),
        (["--digest", "0123456789ab", "--remark", "x"], "instead of keys"),
        (["--older-than", "soon"], "not a duration"),
    ],
)
def test_a_choice_that_cannot_be_used_is_one_line(shelf: Shelf, arguments: list[str], says: str) -> None:
    address = shelf.hold("x")

    assert says in refused(shelf.run("resolve", *arguments, "--rerun", *WHY, "--yes"), 2)
    assert shelf.found(address).state is State.HELD


@pytest.mark.parametrize(("answer", "status", "after"), [(b"y\n", 0, State.OPEN), (b"n\n", 1, State.HELD)])
def test_at_a_terminal_the_records_are_shown_before_the_question(
    shelf: Shelf, answer: bytes, status: int, after: State
) -> None:
    held = sixty(shelf)

    seen, ended = on_a_terminal(shelf, "resolve", "--operation", "charge", "--rerun", *WHY, answer=answer)

    assert ended == status, seen
    shown, asked, _ = seen.partition("Resolve these 60 records as rerun, so that the next delivery will run? [y/N] ")
    assert asked
    assert all(address.digest in shown for address in held)
    assert states(shelf, held) == {after}


def test_what_changes_while_a_person_thinks_is_left_and_named_and_the_others_are_resolved(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = sixty(shelf)
    slow = shelf.found(held[9])

    def meanwhile(_question: str) -> bool:
        shelf.guard.resolve("charge", "pay_07", Done("receipt"), by="ada", reason="on the statement")
        shelf.guard.forget("charge", "pay_08")
        assert shelf.store.finish(Claim(held[9], slow.token), Ending(state=State.DONE, ttl=60.0))
        return shelf.store.extend(Claim(held[10], shelf.found(held[10]).token, lease=9.0))

    monkeypatch.setattr(asking, "check_terminal", lambda: None)
    monkeypatch.setattr(asking, "agreed", meanwhile)
    said = shelf.run("resolve", "--operation", "charge", "--rerun", *WHY)

    assert said.exit_code == 1
    assert len(said.stdout.splitlines()) == 57
    assert f"charge [key {held[7].digest}]: it has changed in the meantime, and was left as it is now" in said.stderr
    assert f"charge [key {held[8].digest}]: there is no record of it" in said.stderr
    assert f"charge [key {held[9].digest}]: it is done, not held" in said.stderr
    assert "57 records resolved as rerun: the next delivery will run; 3 left as they are" in said.stderr
    assert shelf.found(held[7]).state is State.DONE
    # Its owner is only slow: the run that was shown is the run that is resolved.
    assert shelf.found(held[10]).state is State.OPEN


def test_what_is_not_held_among_several_is_left_and_named(shelf: Shelf) -> None:
    held, done = shelf.hold("a"), shelf.put("b")
    running = shelf.put("c", State.RUNNING, lease=60.0)

    said = shelf.run("resolve", "a", "b", "c", "--rerun", *WHY, "--yes", "--format", "json")

    assert said.exit_code == 1
    fact = json.loads(said.stdout)
    assert (fact["count"], fact["left"]) == (1, 2)
    assert [one["problem"] is None for one in fact["records"]] == [True, False, False]
    assert "is done, not held" in said.stderr
    assert "is running" in said.stderr
    assert states(shelf, [held]) == {State.OPEN}
    assert (shelf.found(done).state, shelf.found(running).state) == (State.DONE, State.RUNNING)


def test_a_store_that_goes_away_in_the_middle_is_told_with_what_was_done(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, resolve, count = sixty(shelf), Guard.resolve, 0

    def failing(self: Guard, *args: Any, **kwargs: Any) -> Record:
        nonlocal count
        count += 1
        if count > 20:
            raise StoreUnavailable("the server is gone")
        return resolve(self, *args, **kwargs)

    monkeypatch.setattr(Guard, "resolve", failing)
    said = shelf.run("resolve", "--operation", "charge", "--rerun", *WHY, "--yes")
    monkeypatch.setattr(Guard, "resolve", resolve)

    assert said.exit_code == 1
    assert len(said.stdout.splitlines()) == 20
    assert said.stderr == "onefold: the server is gone. Until then: 20 resolved. Run it again for the rest\n"
    again = shelf.json("resolve", "--operation", "charge", "--rerun", *WHY, "--yes")
    assert (again["count"], states(shelf, held)) == (40, {State.OPEN})


INTERRUPTED = """
import os, signal
from onefold import Guard
resolve, count = Guard.resolve, 0
def interrupted(self, *args, **kwargs):
    global count
    count += 1
    if count > 20:
        os.kill(os.getpid(), signal.SIGINT)
    return resolve(self, *args, **kwargs)
Guard.resolve = interrupted
"""


def test_ctrl_c_in_the_middle_is_told_with_what_was_done(shelf: Shelf) -> None:
    held = sixty(shelf)
    arguments = ["resolve", "--operation", "charge", "--rerun", *WHY, "--yes", "--store", shelf.url]

    command = [sys.executable, "-c", INTERRUPTED + MAIN, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)

    told = len(ended.stdout.splitlines())
    assert ended.returncode == 128 + signal.SIGINT, ended.stderr
    assert f"stopped: {told} resolved. Run it again for the rest" in ended.stderr
    # The one in progress may have been written, too.
    assert sum(shelf.found(address).state is State.OPEN for address in held) - told in (0, 1)


def test_each_resolution_is_added_to_the_history_with_who_when_and_why(shelf: Shelf) -> None:
    address = shelf.hold("a", age=7_200.0)
    for resolution, who in (("--done", "ada"), ("--failed", "bob"), ("--rerun", "eve")):
        said = shelf.run("resolve", "a", resolution, "--reason", f"{who} has looked", "--by", who, "--yes")
        assert said.exit_code == 0, said.output

    shown = shelf.run("show", "a").stdout.splitlines()

    assert [re.sub(r"[-0-9]{10}T[0-9:]{8}Z", "TIME", line) for line in shown if line.startswith("history")] == [
        "history\tTIME resolved as rerun by eve: eve has looked",
        "history\tTIME resolved as failed by bob: bob has looked",
        "history\tTIME resolved as done by ada: ada has looked",
        "history\tattempt 1 ended in TimeoutError",
    ]
    assert len(shelf.found(address).history) == 4


def test_a_value_unlike_the_other_results_of_its_operation_is_warned_of(shelf: Shelf) -> None:
    shelf.guard.run("charge", "before", lambda: "receipt 16", returns=str)
    shelf.hold("a")
    shelf.hold("b")
    shelf.hold("c")

    number = shelf.run("resolve", "a", "--done", "--value", "17", *WHY, "--yes")
    text = shelf.run("resolve", "b", "--done", "--value", '"receipt 17"', *WHY, "--yes")

    missing = shelf.run("resolve", "c", "--done", *WHY, "--yes")

    assert number.exit_code == text.exit_code == missing.exit_code == 0
    assert "--value is missing, and other results of charge are text: every duplicate gets None" in missing.stderr
    assert "--value is a number, and other results of charge are text" in number.stderr
    assert text.stderr == ""


def test_a_rerun_of_many_runs_each_of_them_once(shelf: Shelf) -> None:
    sixty(shelf)
    ran: list[int] = []

    assert shelf.run("resolve", "--operation", "charge", "--rerun", *WHY, "--yes").exit_code == 0
    for number in [*range(60), *range(60)]:
        shelf.guard.run("charge", f"pay_{number:02}", functools.partial(ran.append, number))

    assert ran == [*range(60)]


def test_the_error_of_a_held_delivery_has_a_command_that_can_be_copied(shelf: Shelf) -> None:
    address = shelf.hold("pay 1", operation="charge a card", scope="acme")

    with pytest.raises(Held) as refusal:
        shelf.guard.run("charge a card", "pay 1", pytest.fail, scope="acme")
    command = refusal.value.command
    program, *arguments = shlex.split(command)
    said = shelf.run(*arguments, "--rerun", *WHY, "--yes")

    assert f"`{command}`" in str(refusal.value)
    assert "pay 1" not in command
    assert program == "onefold"
    assert said.exit_code == 0, said.output
    assert shelf.found(address).state is State.OPEN


def test_show_says_since_when_the_age_counts(shelf: Shelf) -> None:
    def age() -> str:
        return next(line for line in shelf.run("show", "a").stdout.splitlines() if line.startswith("age\t"))

    shelf.hold("a")
    first = age()
    assert shelf.run("resolve", "a", "--rerun", *WHY, "--yes").exit_code == 0
    waiting = age()
    shelf.guard.run("charge", "a", lambda: "ran")
    rerun = age()
    shelf.guard.run("charge", "a", lambda: "ran", bypass=True)
    both = age()
    shelf.guard.forget("charge", "a")
    shelf.guard.run("charge", "a", lambda: "ran")
    shelf.guard.run("charge", "a", lambda: "ran", bypass=True)

    assert first.endswith(" since its first claim")
    assert waiting.endswith(" since it was resolved as a rerun")
    assert rerun.endswith(" since it was resolved as a rerun")
    assert both.endswith(" since it was bypassed, or resolved as a rerun, whichever was later")
    assert age().endswith(" since it was bypassed")


@pytest.mark.parametrize("server", ["postgres_url", "mysql_url", "redis_url", "dynamodb_url"])
def test_on_every_server_each_is_resolved_unless_it_changed(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url: str = request.getfixturevalue(server)
    keys = [f"pay_{number}" for number in range(12)]
    with Guard(url, policy=Policy(after_crash="hold")) as guard:
        for key in keys:
            with pytest.raises(TimeoutError):
                guard.run("charge", key, raising)

        def meanwhile(_question: str) -> bool:
            guard.resolve("charge", keys[3], Done("receipt"), by="ada", reason="on the statement")
            return True

        monkeypatch.setattr(asking, "check_terminal", lambda: None)
        monkeypatch.setattr(asking, "agreed", meanwhile)
        said = CliRunner().invoke(app, ["resolve", "--remark", "timeouterror", "--rerun", *WHY, "--store", url])

        assert said.exit_code == 1
        assert "11 records resolved as rerun: the next delivery will run; 1 left as it is" in said.stderr
        assert [guard.run("charge", key, lambda: "ran").value for key in keys[:4]] == ["ran"] * 3 + ["receipt"]
        found = guard.read("charge", keys[0])
        assert found is not None
        assert [line.partition(" at ")[0] for line in found.history] == [
            "resolved as rerun by maria",
            "attempt 1 ended in TimeoutError",
        ]


def raising() -> str:
    raise TimeoutError
