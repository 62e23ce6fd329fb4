"""`onefold redrive` on every broker: what it lists, sends back and leaves, and what its consumers make of that."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import onefold.cli.commands.redrive as command
from onefold import Guard, Record
from onefold.redrive import permissions
from onefold.redrive.brokers import open_letters, sqs
from onefold.redrive.letters import Letter
from onefold.stores.base import Address
from tests.processes import Stage
from tests.redrive.killed import Stopping
from tests.redrive.tools import REASON, Place

WHY = ("--by", "maria", "--reason", "INC-7: the refund was lost")


class Effects:
    """An independent count of what a handler did."""

    def __init__(self) -> None:
        self.done: list[bytes] = []
        self.broken: set[bytes] = set()

    def __call__(self, body: bytes) -> None:
        if body in self.broken:
            raise ValueError("card 4111 1111 1111 1111 was refused")
        self.done.append(body)


def record_of(place: Place, store: str, key: str) -> Record:
    with Guard(store) as guard:
        found = guard.read(place.operation, key)
    assert found is not None
    return found


def test_one_of_three_fails_is_fixed_and_sent_back_and_the_finished_are_absorbed(place: Place, store: str) -> None:
    """The redrive story: the deliberate one runs again, and its record says so."""
    effects = Effects()
    effects.broken = {b"two"}
    for key in ("one", "two", "three"):
        place.send(key, key.encode())
    place.deliver(store, effects, 3)
    assert sorted(effects.done) == [b"one", b"three"]
    # Somebody has moved the finished ones to the dead letters, too.
    place.bury("one", b"one")
    place.bury("three", b"three")

    effects.broken = set()
    listed = place.json()
    assert (listed["dry_run"], listed["would_send"], listed["left"]) == (True, 3, 0)
    assert {one["to"] for one in listed["messages"]} == {place.origin}
    said = place.redrive("--send")
    assert (said.exit_code, said.stdout) == (0, "3 sent back\n"), said.output
    place.deliver(store, effects, 3)
    assert sorted(effects.done) == [b"one", b"three", b"two"]
    assert place.listed() == 0

    place.bury("one", b"one")
    said = place.redrive("--send", "--bypass", *WHY, "--store", store)
    assert (said.exit_code, said.stdout) == (0, "1 sent back\n"), said.output
    place.deliver(store, effects, 1)
    assert sorted(effects.done) == [b"one", b"one", b"three", b"two"]
    record = record_of(place, store, "one")
    assert record.bypasses == 1
    (history,) = record.history
    assert re.fullmatch(r"bypassed as redrive by maria at 20\d\d-.*Z: INC-7: the refund was lost", history)


def test_a_bypass_that_is_delivered_again_or_redriven_again_is_absorbed(
    place: Place, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    effects = Effects()
    place.send("one", b"one")
    place.deliver(store, effects, 1)
    for day in (1, 2):
        monkeypatch.setattr(permissions, "moment", f"2030-01-0{day}T00:00:00Z".__str__)
        # As a redrive leaves it that was killed before it could remove the letter.
        place.bury("one", b"one")
        assert place.redrive("--send", "--bypass", *WHY, "--store", store).exit_code == 0
        place.deliver(store, effects, 1)
    assert effects.done == [b"one", b"one"]

    place.bury("one", b"one")
    again = ("--by", "maria", "--reason", "INC-8")
    assert place.redrive("--send", "--bypass", *again, "--store", store).exit_code == 0
    place.deliver(store, effects, 1)

    assert effects.done == [b"one"] * 3
    assert [line.rpartition(": ")[2] for line in record_of(place, store, "one").history] == [
        "INC-8",
        "the refund was lost",
    ]


def test_what_fails_in_a_bypass_comes_back_and_a_plain_redrive_of_it_is_absorbed(place: Place, store: str) -> None:
    effects = Effects()
    place.send("one", b"one")
    place.deliver(store, effects, 1)
    place.bury("one", b"one")
    effects.broken = {b"one"}

    assert place.redrive("--send", "--bypass", *WHY, "--store", store).exit_code == 0
    place.deliver(store, effects, 1)
    assert place.listed() == 1
    effects.broken = set()
    # Its header of the bypass does not go back with it.
    assert place.redrive("--send").exit_code == 0
    place.deliver(store, effects, 1)

    assert effects.done == [b"one"]
    assert place.listed() == 0


def test_without_send_nothing_is_sent_and_nothing_is_removed(place: Place, store: str) -> None:
    place.bury("one", b"secret body")

    for _ in range(2):
        said = place.redrive()
        assert said.exit_code == 0, said.output
        heading, line = said.stdout.splitlines()
        assert heading.split("\t") == ["position", "age", "operation", "digest", "to", "reason"]
        digest = Address("", place.operation, "one").digest
        assert line.split("\t")[2:] == [place.operation, digest, place.origin, REASON]
        assert said.stderr == "onefold: 1 message would be sent back. Pass --send to do it\n"
        assert "secret" not in said.output


def test_a_letter_that_came_from_nowhere_or_from_a_place_that_is_gone_stays(place: Place) -> None:
    place.bury("one", b"one", origin="")
    place.bury("two", b"two")
    place.bury("three", b"three", origin=f"{place.origin}-gone")

    said = place.redrive("--send")

    assert (said.exit_code, said.stdout) == (1, "1 sent back, 2 left among the dead letters\n"), said.output
    unknown, gone = said.stderr.splitlines()
    assert "stays: it does not say where it came from: name the place with --back-to" in unknown
    assert re.search(rf"stays: (there is no|no stream takes the) \w+ {place.origin}-gone", gone)
    assert [one["digest"] for one in place.json()["messages"]] == [
        Address("", place.operation, key).digest for key in ("one", "three")
    ]
    assert place.redrive("--send", "--back-to", place.origin).exit_code == 0
    assert place.listed() == 0


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--matching", "BROKE"], ["b"]),
        (["--digest", "{b}", "--digest", "{c}"], ["b", "c"]),
        (["--operation", "ship"], []),
        (["--older-than", "1d"], []),
        (["--newer-than", "1h", "--limit", "2"], ["a", "b"]),
    ],
    ids=["reason", "digest", "operation", "older", "limit"],
)
def test_only_what_is_asked_for_is_sent_back_in_order(place: Place, options: list[str], keys: list[str]) -> None:
    for key in "abc":
        place.bury(key, key.encode(), reason="it broke" if key == "b" else REASON)
    digests = {key: Address("", place.operation, key).digest for key in "abc"}
    asked = [one.format(**digests) for one in options]

    listed = place.json(*asked)
    sent = place.json("--send", *asked)

    assert [one["digest"] for one in listed["messages"]] == [digests[key] for key in keys]
    assert [one["digest"] for one in sent["messages"]] == [digests[key] for key in keys]
    assert (sent["dry_run"], sent["sent"]) == (False, len(keys))
    left = [one["digest"] for one in place.json()["messages"]]
    assert sorted(left) == sorted(digests[key] for key in "abc" if key not in keys)


def test_one_is_shown_with_its_headers_and_its_body_only_on_request(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "onefold")
    place.bury("one", b"secret body")
    (listed,) = place.json()["messages"]

    said = place.redrive("--show", listed["position"])
    without = place.json("--show", listed["position"])
    whole = place.json("--show", listed["position"], "--body")
    missing = place.redrive("--show", "99/99")

    assert "idempotency-key" in said.stdout
    assert REASON in said.stdout
    assert "secret" not in said.output
    assert "body" not in without
    assert (whole["body"], whole["headers"]["idempotency-key"], whole["to"]) == ("secret body", "one", place.origin)
    assert (missing.exit_code, missing.stderr) == (1, "onefold: there is no dead letter at 99/99\n")
    assert "secret" not in caplog.text
    assert place.listed() == 1


def test_a_message_that_fails_again_and_again_is_sent_back_once_a_run(place: Place, store: str) -> None:
    effects = Effects()
    effects.broken = {b"one"}
    place.bury("one", b"one")

    for _ in range(2):
        assert place.json("--send")["sent"] == 1
        place.deliver(store, effects, 1)

    assert place.listed() == 1
    assert effects.done == []


def test_what_comes_back_while_it_runs_is_left_for_the_next_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Returning(Stopping):
        """Each message fails as soon as it is back, and is a dead letter again."""

        def remove(self, letter: Letter) -> None:
            super().remove(letter)
            place.bury("one", b"one")

    place.bury("one", b"one")
    place.bury("one", b"one")
    with monkeypatch.context() as patched:
        patched.setattr(sqs, "PAUSE", sqs.CLOCK_TICK)
        patched.setattr(command, "open_letters", lambda *names: Returning(open_letters(*names), Stage(None)))  # type: ignore[arg-type]

        assert place.json("--send", "--limit", "50")["sent"] == 2

    assert place.listed() == 2


def test_a_letter_without_a_key_cannot_be_bypassed_and_stays(place: Place, store: str) -> None:
    place.bury(None, b"one")

    said = place.redrive("--send", "--bypass", *WHY, "--store", store)

    assert said.exit_code == 1
    assert "stays: it has no digest of a key, so no bypass can be allowed for it" in said.stderr
    assert place.listed() == 1


def test_a_store_that_is_not_the_consumers_is_noticed_and_the_letter_stays(place: Place, tmp_path: Path) -> None:
    place.bury("pay-1", b"one")
    other = f"sqlite:///{tmp_path / 'other.db'}"
    with Guard(other) as guard:
        guard.run("another", "pay-1", lambda: None)
        # Such as that of another stage, which has the same operations.
        guard.run(place.operation, "pay-2", lambda: None)

    said = place.redrive("--send", "--bypass", *WHY, "--store", other)

    assert (said.exit_code, place.listed()) == (1, 1)
    assert f"--store has no record of its operation, {place.operation}, with its digest: name the store" in said.stderr


def test_dead_letters_that_do_not_exist_are_one_line(place: Place) -> None:
    place.dead = "no-such-letters"

    said = place.redrive()

    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.startswith("onefold: ")
    assert said.stderr.count("\n") == 1
