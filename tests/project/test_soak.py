"""The soak in its short form: it holds with a guard, and shows that it can fail without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.soak.__main__ import _asked, main
from bench.soak.effects import Bank
from bench.soak.environments import FAILING_OVER, Environment, Room
from bench.soak.losses import losses, told
from bench.soak.plan import SHORT, Mode, Plan
from bench.soak.queue import Queue
from bench.soak.verdict import NOTHING, Found, violations
from bench.soak.workers import Desk, Verdict
from services.house import House
from services.programs import Missing, in_ci
from tests.support import PROJECT

# Far more than it takes; it bounds how long a broken one hangs.
PATIENCE = 900.0

# The soak on a Redis that keeps nothing on disk.
FORGETFUL = """
import sys
from services import house, redis
house.KINDS["redis"] = house.Kind(redis.start_redis, "ONEFOLD_REDIS_URL")
from bench.soak.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def soak(
    *options: str, folder: Path, program: tuple[str, str] = ("-m", "bench.soak")
) -> subprocess.CompletedProcess[str]:
    # A kill takes nothing back from the operating system: only a power cut could tell the two kinds of sync apart.
    command = [sys.executable, *program, "--short", "--sync", "normal", "--directory", str(folder), *options]
    # A table of its full width, and without colours.
    plain = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"} | {"COLUMNS": "200"}
    ran = subprocess.run(command, cwd=PROJECT, env=plain, check=False, capture_output=True, text=True, timeout=PATIENCE)
    if "skipped: " in ran.stdout and not in_ci():
        pytest.skip(ran.stdout.splitlines()[-1])
    return ran


def row(name: str, ran: subprocess.CompletedProcess[str]) -> list[str]:
    found = re.search(rf"^{name} +(.+)$", ran.stdout, re.MULTILINE)
    assert found is not None, ran.stdout + ran.stderr
    return found[1].split()


@pytest.mark.more
class TestRuns:
    """Real ones, in processes of their own."""

    # `make soak SHORT=1`, which CI runs, is the same as these two.
    @pytest.mark.soak
    def test_under_random_kills_the_effects_are_what_the_guarantees_say(self, tmp_path: Path) -> None:
        ran = soak("--seed", "7", folder=tmp_path)

        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert ran.stdout.startswith("seed 7,")
        assert row("kills", ran) == ["8", "8", "8"]
        assert row("stops past the lease", ran) == ["0", "2", "2"]
        assert row("effects", ran)[0] == "1,400"
        assert row("effects downstream, by key", ran)[1] == "1,400"
        assert not list(tmp_path.iterdir()), "what holds leaves no files"

    @pytest.mark.soak
    def test_under_random_cancellations_beside_kills_every_effect_is_there_once(self, tmp_path: Path) -> None:
        ran = soak("--cancel", "--store", "sqlite", folder=tmp_path)

        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert row("effects", ran) == row("messages done", ran) == ["105", "105"]
        assert all(int(number) > 0 for number in row("cancelled", ran))

    def test_without_a_guard_the_soak_fails_with_evidence(self, tmp_path: Path) -> None:
        ran = soak("--without-guard", folder=tmp_path)

        assert ran.returncode == 1, ran.stdout + ran.stderr
        kept = re.findall(r"^sqlite, (\w+): \d+ violations; the files are in (.+)$", ran.stdout, re.MULTILINE)
        assert [mode for mode, _ in kept] == ["transactional", "rerun", "hold"]
        assert all((Path(folder) / "violations.txt").read_text() for _, folder in kept), "the evidence is kept"
        assert re.search(r"m-\d{5}: its effect did not happen exactly once \(effects 2, ", ran.stdout)
        assert re.search(r"m-\d{5}: a start that nothing explains \(effects 2, ", ran.stdout)
        assert re.search(r"m-\d{5}: it ran twice under hold \(effects 2, ", ran.stdout)

    def test_a_server_that_is_killed_in_the_middle_loses_nothing_and_doubles_nothing(self, tmp_path: Path) -> None:
        ran = soak("--store", "postgres", "--mode", "transactional", "--strike-server", folder=tmp_path)

        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert row("kills of the server", ran) == ["1"]
        assert row("effects", ran) == ["1,400"]
        assert row("messages done", ran) == ["1,400"]

    def test_a_server_that_forgets_is_found_out(self, tmp_path: Path) -> None:
        options = ("--store", "redis", "--mode", "hold", "--strike-server")
        ran = soak(*options, folder=tmp_path, program=("-c", FORGETFUL))

        assert ran.returncode == 1, ran.stdout + ran.stderr
        (kept,) = tmp_path.iterdir()
        assert re.search(r"m-\d{5}: it ran twice under hold", (kept / "violations.txt").read_text())
        assert (kept / "redis.log").exists(), "the server's own words are kept"


class Server:
    """An environment whose server exists only in name."""

    title = "a server"
    has_server = True

    def __init__(self, *, loses: bool = False) -> None:
        self.loses = loses

    def room(self, folder: Path) -> Room:
        raise AssertionError

    def kill(self) -> None: ...
    def restart(self) -> None: ...
    def leave_evidence(self, folder: Path) -> None: ...


def a_queue(mode: Mode, folder: Path, *, loses: bool = False) -> Queue:
    plan = Plan("server", mode, SHORT._replace(messages=1, deliveries=2), 7, folder, True, True, 1.0)
    environment: Environment = Server(loses=loses)
    queue = Queue(Desk(plan, "", Bank(folder / "bank.db")), environment)
    queue.strikes.clear()
    return queue


def wrong(queue: Queue, found: Found) -> list[str]:
    """What is said about the one message there is, without its details."""
    return [line.partition(" (")[0] for line in violations(queue, found)]


def found(queue: Queue, state: str, *, starts: int = 1, calls: int = 1) -> Found:
    (message,) = queue.plan.messages
    return NOTHING._replace(
        starts=Counter({message.id: starts}),
        calls=Counter({message.id: calls}),
        keys={message.id: {"key"}},
        charges=Counter({message.id: min(calls, 1)}),
        states={message.id: state},
    )


class TestVerdicts:
    """What explains what."""

    def test_a_server_that_is_there_has_to_answer(self, tmp_path: Path) -> None:
        queue = a_queue("rerun", tmp_path)

        queue._settle(0, Verdict("busy", 1.0, 2.0, "no answer"))

        assert queue.errors == ["m-00000: busy, and the server was there. no answer"]

    def test_during_an_outage_it_need_not(self, tmp_path: Path) -> None:
        queue = a_queue("rerun", tmp_path)
        queue.outages._past.append((1.5, 3.0))

        queue._settle(0, Verdict("busy", 1.0, 2.0))

        assert not queue.errors
        assert queue.hits["outage"]["m-00000"] == 1

    @pytest.mark.parametrize("hit", ["kill", "outage"])
    def test_what_is_held_was_struck(self, hit: str, tmp_path: Path) -> None:
        queue = a_queue("hold", tmp_path)
        queue.counts.update(kill=1)

        assert wrong(queue, found(queue, "held")) == ["m-00000: it is held, and neither a kill nor an outage hit it"]
        queue.hits[hit]["m-00000"] += 1
        assert wrong(queue, found(queue, "held")) == []

    def test_under_rerun_a_second_start_follows_a_run_that_could_not_be_remembered(self, tmp_path: Path) -> None:
        queue = a_queue("rerun", tmp_path)
        queue.counts.update(server=1)

        again = found(queue, "done", starts=2, calls=2)

        assert wrong(queue, again) == ["m-00000: a start that nothing explains"]
        queue.forgotten["m-00000"] += 1
        assert wrong(queue, again) == []

    def test_an_outage_leaves_no_more_in_doubt_than_the_workers_had_begun(self, tmp_path: Path) -> None:
        queue = a_queue("hold", tmp_path)
        queue.counts.update(server=1)

        queue.forgotten["m-00000"] = 9

        assert wrong(queue, found(queue, "done")) == ["9 runs were not remembered, and the server was killed 1 times"]

    def test_a_claim_is_not_taken_over_before_its_lease_has_ended(self, tmp_path: Path) -> None:
        queue = a_queue("rerun", tmp_path)

        queue._settle(0, Verdict("early", 1.0, 2.0, "too early"))

        assert queue.errors == ["m-00000: too early"]

    def test_but_where_a_store_may_lose_it_is_free_at_once(self, tmp_path: Path) -> None:
        queue = a_queue("rerun", tmp_path, loses=True)

        queue._settle(0, Verdict("early", 1.0, 2.0, "too early"))

        assert not queue.errors
        assert queue.told["m-00000"] == 1

    def test_what_is_lost_is_lost_together(self, tmp_path: Path) -> None:
        queue = a_queue("transactional", tmp_path, loses=True)
        (message,) = queue.plan.messages
        both, neither = found(queue, "done"), NOTHING

        assert wrong(queue, both) == wrong(queue, neither) == []
        assert wrong(queue, both._replace(states={})) == ["m-00000: its effect and its record are not lost together"]
        assert wrong(queue, neither._replace(states={message.id: "done"})) == wrong(queue, both._replace(states={}))
        assert losses(queue.plan, neither)["acknowledged, its effect lost"] == "1"
        assert told(queue.plan, neither).startswith("1 of 1 acknowledged credits are lost")

    def test_a_lost_record_explains_a_second_run_but_nothing_explains_none(self, tmp_path: Path) -> None:
        queue = a_queue("hold", tmp_path, loses=True)
        twice = found(queue, "done", starts=2, calls=2)

        assert wrong(queue, twice) == []
        assert losses(queue.plan, twice)["effects that happened again"] == "1"
        assert wrong(queue, found(queue, "done", calls=0)) == [
            "m-00000: its effect outside, which no store can lose, did not happen"
        ]

    def test_sums_are_exact(self, tmp_path: Path) -> None:
        queue = a_queue("rerun", tmp_path)
        (message,) = queue.plan.messages

        doubled = found(queue, "done")._replace(balances={message.account: 2 * message.amount})

        assert wrong(queue, doubled) == [
            f"{message.account} has {2 * message.amount}, and should have {message.amount}"
        ]


class TestTheCommand:
    """What it is asked, and what it refuses."""

    @pytest.mark.parametrize(("ci", "code"), [("false", 0), ("true", 1)])
    def test_a_missing_server_is_told_and_skipped_but_ci_needs_it(
        self, ci: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def missing(_house: House, name: str) -> object:
            raise Missing(f"{name} is not installed")

        monkeypatch.setattr(House, "own", missing)
        monkeypatch.setitem(os.environ, "CI", ci)

        assert main(["--short", "--store", "mariadb"]) == code
        assert "mariadb is not installed" in capsys.readouterr().out

    def test_fail_overs_have_to_be_asked_for(self) -> None:
        everything = _asked(["--store", "all"]).modes_by_store
        named = _asked(["--store", "patroni"]).modes_by_store

        assert not set(everything) & set(FAILING_OVER)
        assert list(named) == ["patroni"]

    @pytest.mark.parametrize(
        "options",
        [
            ["--store", "redis", "--mode", "transactional"],
            ["--store", "sqlite", "--strike-server"],
            ["--cancel", "--mode", "hold"],
            ["--cancel", "--store", "postgres", "--strike-server"],
            ["--cancel", "--store", "redis"],
        ],
    )
    def test_what_a_store_cannot_do_is_refused(self, options: list[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(options)
