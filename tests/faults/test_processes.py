"""Real processes on one SQLite file: killed at any step, stopped past their lease, forked.

Children report the step at which they stand and wait there, so that no test depends on luck. What has to follow is said
by the tables of `docs/concepts.md` and `docs/guarantees.md`.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from onefold import (
    TX,
    Done,
    Guard,
    Held,
    InProgress,
    NotDone,
    Outcome,
    Policy,
    Record,
    State,
    Unknown,
    current,
)
from tests.processes import Child, Notes, Stage, child, guard_on, lapse
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "SIGSTOP"), reason="THIS SYSTEM HAS NO SIGNALS: what a kill leaves behind is not proven"
)

# No pause of the machine outlasts it; a test that needs its end brings it about (`lapse`).
LEASE = 3_600.0

POLICIES = {
    "rerun": Policy(lease=LEASE),
    "hold": Policy(lease=LEASE, after_crash="hold"),
    "skip": Policy(lease=LEASE, after_crash="skip"),
    "a probe: done": Policy(lease=LEASE, after_crash=lambda _running: Done("as the probe says")),
    "a probe: not done": Policy(lease=LEASE, after_crash=lambda _running: NotDone()),
    "a probe: unknown": Policy(lease=LEASE, after_crash=lambda _running: Unknown()),
}


class Books:
    """What handlers did to one key, whichever process they ran in."""

    def __init__(self, directory: Path, key: str) -> None:
        self.starts = Notes(directory / f"{key}.starts")
        # The key that the system downstream was given with each effect.
        self.effects = Notes(directory / f"{key}.effects")

    def handle(self, value: str, stage: Stage | None = None) -> str:
        self.starts.add(value)
        if stage is not None:
            stage.at("in the handler")
        self.effects.add(current().key_for("gateway"))
        if stage is not None:
            stage.at("after the effect")
        return value


def again(path: Path, key: str, books: Books, policy: Policy) -> Outcome[str]:
    """The next delivery, from this process."""
    with guard_on(path) as guard:
        return guard.run("charge", key, lambda: books.handle("second"), policy=policy)


def read(path: Path, key: str) -> Record | None:
    with guard_on(path) as guard:
        return guard.read("charge", key)


# Killed, in claim mode.


class Left(NamedTuple):
    """What a process leaves behind that is killed at a step."""

    state: State | None
    starts: int
    effects: int


STEPS = {
    "before the claim": Left(None, starts=0, effects=0),
    "after the claim": Left(State.RUNNING, starts=0, effects=0),
    "in the handler": Left(State.RUNNING, starts=1, effects=0),
    "after the effect": Left(State.RUNNING, starts=1, effects=1),
    "before the finish": Left(State.RUNNING, starts=1, effects=1),
    "after the finish": Left(State.DONE, starts=1, effects=1),
}


class Then(NamedTuple):
    """What the next delivery has to come to."""

    answer: str
    value: str | None
    state: State
    attempt: int


NEW = Then("ran", "second", State.DONE, attempt=1)
REPLAYED = Then("replayed", "first", State.DONE, attempt=1)

# "running, lease over, ..." in docs/concepts.md.
ABANDONED = {
    "rerun": Then("ran", "second", State.DONE, attempt=2),
    "hold": Then("held", None, State.HELD, attempt=1),
    "skip": Then("skipped", None, State.DONE, attempt=1),
    "a probe: done": Then("replayed", "as the probe says", State.DONE, attempt=1),
    "a probe: not done": Then("ran", "second", State.DONE, attempt=2),
    "a probe: unknown": Then("held", None, State.HELD, attempt=1),
}


def deliver(stage: Stage, path: Path, key: str, way: str) -> Any:
    """The part of a child: one delivery."""
    books = Books(path.parent, key)
    with guard_on(path, stage, policy=POLICIES[way]) as guard:
        return guard.run("charge", key, lambda: books.handle("first", stage)).value


def key_of(step: str, way: str) -> str:
    return f"{step}, {way}"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file on which a process was killed at each step, under each policy, with a key for each."""
    path = tmp_path_factory.mktemp("killed") / "records.db"
    for step in STEPS:
        for way in POLICIES:
            with child(deliver, path, key_of(step, way), way, stops=(step,)) as doomed:
                doomed.reaches(step)
                doomed.kill()
    lapse(path)
    return path


@pytest.mark.parametrize("way", POLICIES)
@pytest.mark.parametrize("step", STEPS)
def test_after_a_kill_at_any_step_the_next_delivery_does_what_the_tables_say(step: str, way: str, killed: Path) -> None:
    key, left = key_of(step, way), STEPS[step]
    books = Books(killed.parent, key)
    found = read(killed, key)
    assert (found and found.state, len(books.starts.read()), len(books.effects.read())) == left

    then = what_comes(killed, key, books, way)

    expected = {None: NEW, State.RUNNING: ABANDONED[way], State.DONE: REPLAYED}[left.state]
    assert then == expected
    ran = int(expected.answer == "ran")
    assert len(books.starts.read()) == left.starts + ran
    assert len(books.effects.read()) == left.effects + ran
    assert len(set(books.effects.read())) <= 1, "downstream, every attempt has the same key"
    settled = expected._replace(answer="replayed" if ran else expected.answer)
    assert what_comes(killed, key, books, way) == settled


def what_comes(path: Path, key: str, books: Books, way: str) -> Then:
    try:
        outcome = again(path, key, books, POLICIES[way])
    except Held:
        answer, value = "held", None
    else:
        value = outcome.value_or(None)
        answer = "skipped" if outcome.omitted else "replayed" if outcome.replayed else "ran"
    record = read(path, key)
    assert record is not None
    return Then(answer, value, record.state, record.attempt)


def test_while_the_lease_of_a_killed_process_lives_a_delivery_is_told_to_come_later(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with child(run_for_long, path, stops=("in the handler",)) as doomed:
        doomed.reaches("in the handler")
        doomed.kill()

    with guard_on(path) as guard, pytest.raises(InProgress) as refused:
        guard.run("charge", "pay_1", pytest.fail)

    assert 0 < refused.value.retry_after <= 1


def run_for_long(stage: Stage, path: Path) -> None:
    with guard_on(path, stage, policy=POLICIES["rerun"]) as guard:
        guard.run("charge", "pay_1", lambda: stage.at("in the handler"))


# Killed, in transactional mode.


def open_wallet(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE wallet (balance INTEGER NOT NULL)")
        connection.execute("INSERT INTO wallet VALUES (0)")


def balance(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        ((found,),) = connection.execute("SELECT balance FROM wallet")
        return int(found)


def credit_in_ours(path: Path, value: str, stage: Stage | None = None) -> Outcome[str]:
    """In a transaction of the guard's."""
    with guard_on(path, stage) as guard:

        @guard.transactional("credit", key="message")
        def credit(message: str, *, tx: sqlite3.Connection = TX) -> str:
            tx.execute("UPDATE wallet SET balance = balance + 100")
            return value

        return credit.outcome("m-1")


def credit_in_theirs(path: Path, value: str, stage: Stage | None = None) -> Outcome[str]:
    """In a transaction of the caller's."""
    at = (lambda _step: None) if stage is None else stage.at
    with guard_on(path) as guard, closing(sqlite3.connect(path, timeout=PATIENCE)) as connection:

        def credit() -> str:
            connection.execute("UPDATE wallet SET balance = balance + 100")
            return value

        at("before BEGIN")
        connection.execute("BEGIN IMMEDIATE")
        outcome = guard.within(connection).run("credit", "m-1", credit)
        at("before COMMIT")
        connection.commit()
        at("after COMMIT")
        return outcome


def credit(stage: Stage, path: Path, whose: str) -> None:
    CREDITS[whose](path, "first", stage)


CREDITS = {"ours": credit_in_ours, "the caller's": credit_in_theirs}


@pytest.mark.parametrize("whose", CREDITS)
@pytest.mark.parametrize(
    ("step", "left", "then"),
    [("before BEGIN", 0, "second"), ("before COMMIT", 0, "second"), ("after COMMIT", 100, "first")],
)
def test_after_a_kill_at_any_step_of_a_transaction_its_effect_happens_once(
    whose: str, step: str, left: int, then: str, tmp_path: Path
) -> None:
    path = tmp_path / "wallet.db"
    open_wallet(path)
    with child(credit, path, whose, stops=(step,)) as doomed:
        doomed.reaches(step)
        doomed.kill()
    assert balance(path) == left

    outcome = CREDITS[whose](path, "second")

    assert (outcome.value, outcome.replayed, outcome.attempt) == (then, then == "first", 1)
    assert balance(path) == 100
    assert CREDITS[whose](path, "third").value == then
    assert balance(path) == 100


def test_a_delivery_waits_for_the_open_transaction_of_another_process_and_runs_when_that_is_killed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "wallet.db"
    open_wallet(path)
    with (
        child(credit, path, "ours", stops=("before COMMIT",)) as doomed,
        child(credit_and_say, path, stops=("before BEGIN", "behind another transaction")) as next_one,
    ):
        doomed.reaches("before COMMIT")
        next_one.reaches("before BEGIN")
        next_one.go_on()
        next_one.reaches("behind another transaction")
        doomed.kill()
        next_one.go_on()

        assert next_one.hear() == ("second", False)
    assert balance(path) == 100


def credit_and_say(stage: Stage, path: Path) -> tuple[str, bool]:
    outcome = credit_in_ours(path, "second", stage)
    return outcome.value, outcome.replayed


# Stopped past the lease, and continued.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.db"


@pytest.fixture
def stopped(path: Path, request: pytest.FixtureRequest) -> Iterator[Child]:
    """A process that is stopped inside its handler; how its policy goes on after a crash is the parameter."""
    with child(deliver, path, "pay_1", request.param, stops=("in the handler",)) as sleeper:
        sleeper.reaches("in the handler")
        freeze(sleeper, path)
        yield sleeper


def freeze(sleeper: Child, path: Path) -> None:
    """Stop it, and end its lease; but not while its heartbeat writes, or all others would wait until it goes on."""

    def is_frozen() -> bool:
        sleeper.signal(signal.SIGSTOP)
        try:
            lapse(path)
        except sqlite3.OperationalError:
            sleeper.signal(signal.SIGCONT)
            return False
        return True

    assert eventually(is_frozen)


def thaw(sleeper: Child) -> None:
    """Continue it; by its own clock, too, its lease is over."""
    sleeper.signal(signal.SIGCONT)
    sleeper.go_on(after=2 * LEASE)


@pytest.mark.parametrize("stopped", ["rerun", "a probe: not done"], indirect=True)
def test_a_process_stopped_past_its_lease_gets_claim_lost_and_the_record_is_the_successors(
    stopped: Child, path: Path, request: pytest.FixtureRequest
) -> None:
    books = Books(path.parent, "pay_1")
    policy = POLICIES[request.node.callspec.params["stopped"]]
    assert again(path, "pay_1", books, policy).value == "second"
    successors = read(path, "pay_1")

    thaw(stopped)

    assert stopped.hear() == ("ClaimLost", "first")
    record = read(path, "pay_1")
    assert record is not None
    assert successors is not None
    assert (record.token, record.revision) == (successors.token, successors.revision)
    assert (record.state, record.attempt) == (State.DONE, 2)
    assert again(path, "pay_1", books, policy).value == "second"
    assert books.starts.read() == ["first", "second"]
    assert len(set(books.effects.read())) == 1


@pytest.mark.parametrize("stopped", ["hold"], indirect=True)
def test_a_process_stopped_past_its_lease_is_marked_held_and_turns_held_into_done(stopped: Child, path: Path) -> None:
    books = Books(path.parent, "pay_1")
    with pytest.raises(Held):
        again(path, "pay_1", books, POLICIES["hold"])
    held = read(path, "pay_1")
    assert held is not None
    assert held.state is State.HELD

    thaw(stopped)

    assert stopped.hear() == "first"
    record = read(path, "pay_1")
    assert record is not None
    assert (record.state, record.token) == (State.DONE, held.token)
    outcome = again(path, "pay_1", books, POLICIES["hold"])
    assert (outcome.value, outcome.replayed) == ("first", True)
    assert books.starts.read() == ["first"]


@pytest.mark.parametrize("stopped", ["skip"], indirect=True)
def test_a_process_stopped_past_its_lease_was_skipped_and_is_told(stopped: Child, path: Path) -> None:
    books = Books(path.parent, "pay_1")
    assert again(path, "pay_1", books, POLICIES["skip"]).omitted

    thaw(stopped)

    assert stopped.hear() == ("ClaimLost", "first")
    assert again(path, "pay_1", books, POLICIES["skip"]).omitted
    assert books.starts.read() == ["first"]


def test_the_heartbeat_of_a_stopped_process_does_not_revive_the_claim_of_its_successor(path: Path) -> None:
    books = Books(path.parent, "pay_1")
    with child(watch_over, path, stops=("in the handler",)) as sleeper:
        sleeper.reaches("in the handler")
        freeze(sleeper, path)
        with child(take_over, path, stops=("in the handler",)) as successor:
            successor.reaches("in the handler")
            successor.kill()
        before = read(path, "pay_1")
        assert before is not None
        assert before.attempt == 2

        thaw(sleeper)

        assert sleeper.hear() == "refused and lost"
        after = read(path, "pay_1")
        assert after is not None
        assert (after.token, after.revision) == (before.token, before.revision)
        assert after.lease_left < before.lease_left
        assert sleeper.hear() == ("ClaimLost", "first")
    lapse(path)
    assert again(path, "pay_1", books, POLICIES["rerun"]).attempt == 3


def watch_over(stage: Stage, path: Path) -> Any:
    """A handler that looks after its claim until the store has refused its heartbeat."""
    pytest.MonkeyPatch().setattr("onefold._heartbeat.beats.BEATS_PER_LEASE", 36_000)

    def handler() -> str:
        mine = current()
        stage.at("in the handler")
        assert mine.beat is not None
        refused = eventually(lambda: mine.beat is not None and mine.beat.refused)
        stage.tell("refused and lost" if refused and mine.lost else "still mine")
        return "first"

    with guard_on(path, stage, policy=POLICIES["rerun"]) as guard:
        return guard.run("charge", "pay_1", handler).value


def take_over(stage: Stage, path: Path) -> Any:
    with guard_on(path, stage, policy=POLICIES["rerun"]) as guard:
        guard.run("charge", "pay_1", lambda: stage.at("in the handler"))


# Killed with many claims in its hands.

FINISHED = ["m-1", "m-2"]
STARTED = ["m-3", "m-4"]
UNSTARTED = ["m-5", "m-6"]
MESSAGES = [*FINISHED, *STARTED, *UNSTARTED]


def batch(stage: Stage, path: Path, way: str) -> None:
    """Two messages are finished by a batch of their own; then a batch of all, which stops in the fourth."""
    starts = Notes(path.parent / "starts")

    def handler(message: str) -> str:
        starts.add(message)
        stage.at(f"in {message}")
        return message

    with guard_on(path, stage, policy=POLICIES[way]) as guard:
        guard.run_batch("charge", FINISHED, key=str, handler=handler)
        guard.run_batch("charge", MESSAGES, key=str, handler=handler)


def batch_again(path: Path, way: str) -> dict[str, str]:
    """What a batch of all comes to, message by message."""

    def word(result: Outcome[str] | Exception) -> str:
        if isinstance(result, Exception):
            return type(result).__name__
        return "replayed" if result.replayed else f"ran, attempt {result.attempt}"

    with guard_on(path, policy=POLICIES[way]) as guard:
        results = guard.run_batch("charge", MESSAGES, key=str, handler=str)
    return dict(zip(MESSAGES, map(word, results), strict=True))


@pytest.mark.parametrize(
    ("way", "started", "unstarted"),
    [
        ("hold", "Held", "ran, attempt 1"),
        ("rerun", "ran, attempt 2", "ran, attempt 2"),
        ("a probe: not done", "ran, attempt 2", "ran, attempt 1"),
    ],
)
def test_after_a_kill_amid_a_batch_only_what_had_started_is_unknown(
    way: str, started: str, unstarted: str, path: Path
) -> None:
    with child(batch, path, way, stops=("in m-4",)) as doomed:
        doomed.reaches("in m-4")
        doomed.kill()
    lapse(path)
    assert Notes(path.parent / "starts").read() == [*FINISHED, *STARTED]

    results = batch_again(path, way)

    assert [results[message] for message in FINISHED] == ["replayed"] * 2
    assert [results[message] for message in STARTED] == [started] * 2
    assert [results[message] for message in UNSTARTED] == [unstarted] * 2
    settled = batch_again(path, way)
    assert settled == {message: "Held" if results[message] == "Held" else "replayed" for message in MESSAGES}


@pytest.mark.parametrize(("step", "then"), [("before the finish", "Held"), ("after the finish", "replayed")])
def test_a_batch_killed_at_its_last_round_trip_has_finished_all_or_none(step: str, then: str, path: Path) -> None:
    with child(batch_alone, path, stops=(step,)) as doomed:
        doomed.reaches(step)
        doomed.kill()
    lapse(path)

    assert batch_again(path, "hold") == dict.fromkeys(MESSAGES, then)


def batch_alone(stage: Stage, path: Path) -> None:
    with guard_on(path, stage, policy=POLICIES["hold"]) as guard:
        guard.run_batch("charge", MESSAGES, key=str, handler=str)


# Forked.

FORKED = """
import logging, os, sqlite3, sys, time
from onefold import Guard, Policy, TX, current
from onefold._heartbeat import beats

path, parent_may, child_may = sys.argv[1], os.pipe(), os.pipe()
# No pause of the machine outlasts this lease; its beats come ten times a second all the same. A late one is logged.
beats.BEATS_PER_LEASE = 36_000
logging.disable(logging.WARNING)
guard = Guard(f"sqlite:///{path}?busy_timeout=60s", policy=Policy(wait=60, lease=3_600.0))

@guard.idempotent("charge", key="id")
def charge(id: int) -> None:
    tell("charge", id)

@guard.transactional("credit", key="id")
def credit(id: int, *, tx: sqlite3.Connection = TX) -> None:
    tx.execute("UPDATE wallet SET balance = balance + 1")

def keep_the_lease() -> bool:
    renewed, ends = guard.read("charge", "long").revision + 4, time.monotonic() + 60
    while guard.read("charge", "long").revision < renewed:
        if time.monotonic() > ends:
            return False
        time.sleep(0.005)
    return not current().lost

def tell(*values: object) -> None:
    os.write(1, (" ".join(map(str, values)) + "\\n").encode())

# Everything is open and at work before the fork: connections, and the thread of the heartbeat.
charge("before"), credit("before")
child = os.fork()
mine, theirs = (parent_may, child_may) if child else (child_may, parent_may)
os.write(theirs[1], b"!"), os.read(mine[0], 1)
for id in range(30):
    charge(id), credit(id)
if child == 0:
    tell("kept", guard.run("charge", "long", keep_the_lease).value)
    # The parent's connections are closed by now: what is written here must not go with them.
    os.read(mine[0], 1)
    charge("after"), credit("after")
    os._exit(0)
guard.close()
os.write(theirs[1], b"!")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="THIS SYSTEM HAS NO FORK: that a guard survives one is not proven")
def test_two_processes_share_a_guard_that_was_made_and_used_before_the_fork(path: Path) -> None:
    open_wallet(path)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, str(path)]

    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=3 * PATIENCE)

    assert (ran.returncode, ran.stderr) == (0, "")
    charged = sorted(line for line in ran.stdout.splitlines() if line.startswith("charge"))
    assert charged == sorted(["charge before", "charge after", *(f"charge {number}" for number in range(30))])
    assert "kept True" in ran.stdout
    assert balance(path) == 32
    with Guard(f"sqlite:///{path}") as guard:
        assert guard.run("charge", 7, pytest.fail).replayed
        assert guard.run("credit", 7, pytest.fail).replayed
