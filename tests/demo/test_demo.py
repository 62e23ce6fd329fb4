"""`onefold demo`: duplicates without the guard, one effect with it, and a failure where that is not so."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from onefold import Guard
from onefold.cli._common.output import Format, Refusal
from onefold.demo.command import TRANSACTIONAL, WITHOUT, _ended_gently, perform
from onefold.demo.consumers import OPERATION, Desk, Handler
from onefold.demo.scenes import FAILURE_POINTS, Side, verdict
from onefold.demo.wallet import Message, Wallet
from onefold.stores.sqlite import SqliteStore

COMMAND = [sys.executable, "-m", "onefold.demo"]
# Far more than anything here takes; it bounds how long a broken demo hangs.
PATIENCE = 300.0
# The quickest place is enough where it does not matter which one it is.
ONE_POINT = FAILURE_POINTS[4:]


def environment(folder: Path) -> dict[str, str]:
    """Everything temporary goes into this folder, and warnings are errors in every process."""
    return {**os.environ, "TMPDIR": str(folder), "PYTHONWARNINGS": "error"}


def run_demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment(folder)
    )


def processes_in(folder: Path) -> list[str]:
    """The processes that were told to work in this folder."""
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line]


@contextmanager
def begun(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A demo that is under way, in a group of its own; whatever a test does, none is left."""
    demo = subprocess.Popen(COMMAND, env=environment(folder), stderr=subprocess.PIPE, start_new_session=True)
    with demo:
        try:
            # Of the first three processes two are brokers, one for each side: at least one of these serves by now.
            wait_until(lambda: any(folder.glob("*/stderr-2")))
            yield demo
        finally:
            demo.kill()


def wait_until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The demo, run once, as JSON."""
    folder = tmp_path_factory.mktemp("demo")
    before = computed()

    done = run_demo(folder, "--format", "json")
    took = computed() - before

    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.iterdir()) == []
    assert processes_in(folder) == []
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts | {"computed": took}


def computed() -> float:
    """The seconds for which processes that this one has waited for, and theirs, had a processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_every_effect_is_duplicated_without_the_guard_and_happens_once_with_it(told: dict[str, Any]) -> None:
    assert told["holds"]
    assert told["mode"] == "transactional"
    assert [place["verdict"] for place in told["places"]] == ["once"] * 5
    for place in told["places"]:
        assert place["without"]["effects"] == place["without"]["deliveries"] >= 2
        assert place["with"]["effects"] == 1
        assert place["with"]["deliveries"] >= 2


def test_the_wallet_of_five_messages_is_exact_with_the_guard(told: dict[str, Any]) -> None:
    right = {"riya": 1700, "rahul": 1000, "asha": 4500}

    assert told["balances"]["right"] == told["balances"]["with"] == right
    assert all(told["balances"]["without"][account] > balance for account, balance in right.items())


def test_it_takes_less_than_twenty_seconds(told: dict[str, Any]) -> None:
    # Of its own work: for how long a disk, or others on this machine, keep it waiting is not the demo's.
    assert told["computed"] < 20
    assert told["seconds"] > 0


def test_in_the_crash_a_consumer_dies_after_its_effect_and_another_one_acknowledges(told: dict[str, Any]) -> None:
    for effects, events in ((2, told["crash"]["without"]), (1, told["crash"]["with"])):
        killed = next(event for event in events if event["who"] == "demo")
        victim, survivor = dict.fromkeys(event["pid"] for event in events if event["who"] == "consumer")
        assert killed["what"].endswith(f"(SIGKILL) consumer {victim}")
        assert [event["what"] for event in events if event["pid"] == victim][-1].startswith("commits the effect")
        assert sum(event["what"].startswith("commits the effect") for event in events) == effects
        assert events[-1] | {"at": 0} == {"at": 0, "who": "consumer", "pid": survivor, "what": "acks txn-004"}


def test_in_a_pipe_it_is_plain_and_another_store_is_left_as_it_was(tmp_path: Path) -> None:
    records, folder = tmp_path / "records.db", tmp_path / "tmp"
    folder.mkdir()

    done = run_demo(folder, "--store", f"sqlite:///{records}")

    assert (done.returncode, done.stderr) == (0, "")
    # Neither boxes nor colours.
    assert done.stdout.isascii()
    assert done.stdout.replace("\n", "").isprintable()
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["place", "deliveries", "effects", "without", "effects", "with", "verdict"]
    assert [line.split()[0] for line in lines[1:6]] == ["1", "2", "3", "4", "5"]
    assert all(line.endswith("1  once") for line in lines[1:6])
    assert [line.split()[::3] for line in lines[-5:-2]] == [["riya", "1700"], ["rahul", "1000"], ["asha", "4500"]]
    assert "(claim mode" in lines[-1]
    with closing(sqlite3.connect(records)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM onefold_records").fetchone() == (0,)
    assert list(folder.iterdir()) == []
    assert processes_in(tmp_path) == []


def forgetful(wallet: Wallet, _: Desk) -> Handler:
    """A guard whose record is gone as soon as it is written."""
    guard = Guard(SqliteStore(wallet.path))

    def handle(message: Message) -> str:
        with wallet.transaction() as tx:
            guard.within(tx).run(OPERATION, message.key, lambda: wallet.credit(tx, message))
            tx.execute("DELETE FROM onefold_records")
        return ""

    return handle


def too_early(wallet: Wallet, _: Desk) -> Handler:
    """A guard that takes a message for done before it is."""
    guard = Guard(SqliteStore(wallet.path))

    def handle(message: Message) -> str:
        with wallet.transaction() as tx:
            guard.within(tx).run(OPERATION, message.key, lambda: None)
        return ""

    return handle


def wrong_amount(wallet: Wallet, _: Desk) -> Handler:
    """A guard that keeps count, and a handler that cannot."""
    guard = Guard(SqliteStore(wallet.path))

    def handle(message: Message) -> str:
        with wallet.transaction() as tx:
            guard.within(tx).run(OPERATION, message.key, lambda: wallet.credit(tx, message._replace(amount=1)))
        return ""

    return handle


@pytest.mark.parametrize(
    ("without", "guarded", "status", "said"),
    [
        (WITHOUT, TRANSACTIONAL, 0, "every effect happened once"),
        (WITHOUT, Side("with", "tests.demo.test_demo:forgetful"), 1, "2 TIMES with the guard"),
        (WITHOUT, Side("with", "tests.demo.test_demo:too_early"), 1, "LOST with the guard"),
        (WITHOUT, Side("with", "tests.demo.test_demo:wrong_amount"), 1, "the balances with the guard are wrong"),
        (TRANSACTIONAL._replace(name="without"), TRANSACTIONAL, 1, "shows nothing"),
    ],
    ids=["whole", "forgetful", "too early", "wrong amount", "no duplicate"],
)
def test_it_fails_where_there_is_nothing_to_be_proud_of(
    without: Side, guarded: Side, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as end:
        perform(guarded, "transactional", Format.TABLE, without=without, points=ONE_POINT)

    assert end.value.exit_code == status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("without", "guarded", "expected"),
    [
        (2, 1, "once"),
        (3, 1, "once"),
        (2, 0, "LOST with the guard"),
        (2, 2, "2 TIMES with the guard"),
        (1, 1, "shows nothing: no duplicate without the guard"),
        (0, 1, "shows nothing: no duplicate without the guard"),
        (1, 2, "2 TIMES with the guard"),
    ],
)
def test_the_verdict(without: int, guarded: int, expected: str) -> None:
    assert verdict(without, guarded) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_it_finds_no_process_and_no_file_left(number: signal.Signals, tmp_path: Path) -> None:
    with begun(tmp_path) as demo:
        if number is signal.SIGINT:
            # Ctrl-C reaches all processes of a terminal.
            os.killpg(demo.pid, number)
        else:
            demo.send_signal(number)
        _, said = demo.communicate(timeout=PATIENCE)

    assert (demo.returncode, said) == (128 + number, b"")
    assert list(tmp_path.iterdir()) == []
    assert processes_in(tmp_path) == []


def test_no_process_outlives_a_demo_that_was_killed(tmp_path: Path) -> None:
    with begun(tmp_path) as demo:
        assert processes_in(tmp_path)

        demo.kill()
        demo.wait()

    wait_until(lambda: not processes_in(tmp_path))


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--store", "memory:"], 2, "inside one process"),
        (["--store", "sqlit:///x.db"], 2, "did you mean 'sqlite'?"),
        (["--store", "sqlite:////no/such/directory/x.db"], 1, "cannot be opened"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_line(tmp_path: Path, options: list[str], status: int, said: str) -> None:
    done = run_demo(tmp_path, *options)

    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_process_that_fails_is_one_line() -> None:
    with pytest.raises(Refusal, match=r"the consumer ended before 'end': .*no_such_handler"):
        perform(Side("with", "tests.demo.test_demo:no_such_handler"), "transactional", Format.TABLE, points=ONE_POINT)


def test_a_demo_that_was_stopped_says_so_whatever_else_fails_after_that() -> None:
    def fail_while_stopping() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except typer.Exit:
            raise ValueError("a process is still running") from None

    with pytest.raises(typer.Exit) as end, _ended_gently():
        fail_while_stopping()

    assert end.value.exit_code == 128 + signal.SIGTERM


def test_a_demo_that_fails_by_itself_shows_its_own_error() -> None:
    with pytest.raises(ValueError, match="its own"), _ended_gently():
        raise ValueError("its own")
