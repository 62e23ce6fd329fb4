"""A worker in Node shares a seen-set and claims with Python, on Redis and Valkey: the page is enough to write one."""

from __future__ import annotations

import itertools
import json
import queue
import random
import re
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from onefold import ClaimLost, Guard, InProgress, OutcomeUnknown, Policy, Rerun, current
from onefold.queues.babelqueue import IdempotencyStore
from onefold.stores.base import Address, Entry
from tests.record_format.stores import FOLDER
from tests.support import PATIENCE, PROJECT, end_lease, eventually

KEYS = 200
THREADS = 4

CHARGE = {"operation": "charge", "key": "pay_7f3a"}
AT = Address("", "charge", "pay_7f3a")


class Peer:
    """A process of Node that does what it is told."""

    def __init__(self, node: str, url: str) -> None:
        program = [node, str(Path(__file__).with_name("peer.mjs")), url]
        self.process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._numbers = itertools.count(1)
        self._said: dict[int, queue.Queue[dict[str, Any]]] = defaultdict(queue.Queue)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.hear(0) == {"ready": True}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            self._said[said.get("id", 0)].put(said)

    def begin(self, action: str, **arguments: Any) -> int:
        """Tell it to do something; its answers have this number."""
        assert self.process.stdin is not None
        number = next(self._numbers)
        self.process.stdin.write(json.dumps({"id": number, "do": action, **arguments}) + "\n")
        self.process.stdin.flush()
        return number

    def hear(self, number: int) -> dict[str, Any]:
        return self._said[number].get(timeout=PATIENCE)

    def do(self, action: str, **arguments: Any) -> Any:
        said = self.hear(self.begin(action, **arguments))
        assert "answer" in said, said
        return said["answer"]

    def began(self, number: int) -> int:
        """Wait until the handler of this delivery stands at its gate; which attempt it is."""
        return int(self.hear(number)["began"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture(params=["redis", pytest.param("valkey", marks=pytest.mark.more)])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def peer(node: str, url: str) -> Iterator[Peer]:
    peer = Peer(node, url)
    yield peer
    peer.close()


@pytest.fixture
def guard(url: str) -> Iterator[Guard]:
    with Guard(url) as guard:
        yield guard


@pytest.fixture
def ledger(url: str) -> Iterator[redis.Redis]:
    """Where both sides write down what they do, beside all records."""
    with redis.Redis.from_url(url.replace("valkey://", "redis://"), decode_responses=True) as client:
        yield client


def effects(ledger: redis.Redis) -> list[str]:
    return list(ledger.lrange("effects", 0, -1))  # type: ignore[arg-type]


def test_node_reads_and_writes_every_vector(peer: Peer) -> None:
    assert peer.do("vectors", path=str(FOLDER / "vectors.json")) == []


# A seen-set.


@pytest.mark.parametrize("mode", ["claim", "seen"])
def test_what_node_remembers_is_a_duplicate_in_python(peer: Peer, guard: Guard, mode: Any) -> None:
    peer.do("remember", address=CHARGE, keep=3600)

    outcome = guard.run("charge", "pay_7f3a", lambda: pytest.fail("it ran"), policy=Policy(mode=mode))

    assert outcome.replayed
    record = guard.read("charge", "pay_7f3a")
    assert record is not None
    assert 3590 < record.ttl_left <= 3600
    assert 0 <= record.age < 10


def test_what_python_remembers_is_seen_in_node_and_what_it_only_claims_is_not(peer: Peer, guard: Guard) -> None:
    store = IdempotencyStore(guard, operation="charge")
    assert not peer.do("seen", address=CHARGE)

    guard.run("charge", "pay_7f3a", lambda: peer.do("seen", address=CHARGE) and pytest.fail("it is not finished"))
    assert peer.do("seen", address=CHARGE)
    store.forget("pay_7f3a")
    assert not peer.do("seen", address=CHARGE)
    store.remember("pay_7f3a")

    assert peer.do("seen", address=CHARGE)


def test_node_does_not_overwrite_what_is_running_by_remembering_it(peer: Peer, guard: Guard) -> None:
    assert (
        guard.run("charge", "pay_7f3a", lambda: peer.do("remember", address=CHARGE, keep=60) or "mine").value == "mine"
    )

    assert guard.run("charge", "pay_7f3a", lambda: "again").value == "mine"


def test_what_python_has_released_is_finished_once_node_remembers_it(peer: Peer, guard: Guard) -> None:
    def in_doubt() -> None:
        raise OutcomeUnknown("?")

    with pytest.raises(OutcomeUnknown):
        guard.run("charge", "pay_7f3a", in_doubt, after_crash="hold")
    guard.resolve("charge", "pay_7f3a", Rerun(), by="maria", reason="nothing happened")

    peer.do("remember", address=CHARGE, keep=3600)

    assert guard.run("charge", "pay_7f3a", lambda: pytest.fail("it ran")).replayed
    record = guard.read("charge", "pay_7f3a")
    assert record is not None
    assert record.history[0].startswith("resolved as rerun by maria")


# Claims.


def test_while_node_runs_python_is_refused_or_waits_and_replays(peer: Peer, guard: Guard, ledger: redis.Redis) -> None:
    value = {"receipt": 17, "by": "node", "parts": [1, -5, 0.5, True, None, "ü"]}
    number = peer.begin("run", address=CHARGE, value=value, gated=True, lease=30)
    assert peer.began(number) == 1

    with pytest.raises(InProgress):
        guard.run("charge", "pay_7f3a", lambda: pytest.fail("it ran"))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(guard.run, "charge", "pay_7f3a", lambda: pytest.fail("it ran"), wait=PATIENCE)
        peer.do("open", gate=number)
        outcome = waiting.result(PATIENCE)

    assert peer.hear(number)["answer"] == {"value": value, "replayed": False, "attempt": 1}
    assert (outcome.value, outcome.replayed) == (value, True)
    assert effects(ledger) == ["pay_7f3a node"]


def test_while_python_runs_node_is_refused_or_waits_and_replays(peer: Peer, guard: Guard, ledger: redis.Redis) -> None:
    waiting: list[int] = []

    def charge() -> dict[str, int]:
        assert peer.hear(peer.begin("run", address=CHARGE))["error"] == "InProgress"
        waiting.append(peer.begin("run", address=CHARGE, wait=PATIENCE))
        return {"receipt": 17}

    guard.run("charge", "pay_7f3a", charge)

    assert peer.hear(waiting[0])["answer"] == {"value": {"receipt": 17}, "replayed": True, "attempt": 1}
    assert effects(ledger) == []


@pytest.mark.parametrize(("fails", "error"), [(False, "Error"), (True, "TypeError")])
def test_node_does_not_wait_forever_for_an_answer_on_a_connection_that_it_has_lost(
    peer: Peer, guard: Guard, fails: bool, error: str
) -> None:
    number = peer.begin("run", address=CHARGE, gated=True, fails=fails)
    peer.began(number)
    peer.do("cut")
    peer.do("open", gate=number)

    assert peer.hear(number)["error"] == error
    end_lease(guard.store, AT)
    assert guard.run("charge", "pay_7f3a", lambda: "python").attempt == 2


def test_what_fails_on_one_side_runs_on_the_other(peer: Peer, guard: Guard) -> None:
    assert peer.hear(peer.begin("run", address=CHARGE, fails=True))["error"] == "TypeError"
    with pytest.raises(ZeroDivisionError):
        guard.run("charge", "pay_7f3a", lambda: 1 / 0)
    assert peer.do("run", address=CHARGE, value="done")["attempt"] == 1

    assert guard.run("charge", "pay_7f3a", lambda: "?").value == "done"


def test_what_is_held_or_failed_for_good_in_python_is_so_in_node(peer: Peer, guard: Guard) -> None:
    def in_doubt() -> None:
        raise OutcomeUnknown("?")

    with pytest.raises(OutcomeUnknown):
        guard.run("charge", "pay_7f3a", in_doubt, after_crash="hold")
    with pytest.raises(ZeroDivisionError):
        guard.run("refund", "pay_7f3a", lambda: 1 / 0, final_errors=[ZeroDivisionError])

    assert peer.hear(peer.begin("run", address=CHARGE))["error"] == "Held"
    failed = peer.hear(peer.begin("run", address={**CHARGE, "operation": "refund"}))
    assert (failed["error"], failed["message"]) == ("RememberedFailure", "division by zero")


def test_a_claim_is_extended_finished_and_released_only_under_its_token(peer: Peer, guard: Guard) -> None:
    store: Any = guard.store
    old, new = (
        Entry(address=AT, token=b"o" * 16, lease=1.0, ttl=60.0),
        Entry(address=AT, token=b"n" * 16, lease=1.0, ttl=60.0),
    )
    assert store.claim(old) is None
    assert peer.do("extend", address=CHARGE, claim={"token": old.token.hex(), "lease": 60, "ttl": 120})
    found = store.read(AT)
    assert (found.revision, found.lease_left > 30, found.ttl_left > 90) == (2, True, True)

    assert store.claim(new, replacing=found) is None
    for action in ("extend", "finish", "release"):
        assert peer.do(action, address=CHARGE, claim={"token": old.token.hex(), "lease": 60, "ttl": 120}) is False
    assert peer.do("read", address=CHARGE) == {
        "state": "running",
        "attempt": 1,
        "revision": 1,
        "token": new.token.hex(),
    }
    assert peer.do("finish", address=CHARGE, claim={"token": new.token.hex()}, value="done")

    assert guard.run("charge", "pay_7f3a", lambda: "?").value == "done"
    assert peer.do("release", address=CHARGE, claim={"token": new.token.hex()})
    assert store.read(AT) is None


def test_what_node_does_not_know_it_leaves_to_python(peer: Peer, guard: Guard) -> None:
    """The log of a handler's steps, a bypass that died, and the last of the attempts."""

    def pays_and_fails() -> None:
        current().step("pay", lambda: "paid")
        raise KeyError

    with pytest.raises(KeyError):
        guard.run("charge", "pay_7f3a", pays_and_fails)
    store: Any = guard.store
    for operation, bypasses, attempt in (("refund", 1, 1), ("mail", 0, 5)):
        store.claim(
            Entry(
                address=Address("", operation, "pay_7f3a"),
                token=b"d" * 16,
                ttl=60.0,
                bypasses=bypasses,
                attempt=attempt,
            )
        )

    for operation in ("charge", "refund", "mail"):
        before = store.read(Address("", operation, "pay_7f3a"))
        assert peer.hear(peer.begin("run", address={**CHARGE, "operation": operation}))["error"] == "InProgress"
        after = store.read(before.address)
        assert (after.token, after.revision) == (before.token, before.revision)


# Crashes.


def test_the_lease_of_a_node_that_was_killed_is_taken_over_by_python(
    peer: Peer, guard: Guard, ledger: redis.Redis
) -> None:
    peer.began(peer.begin("run", address=CHARGE, gated=True))
    peer.close()
    end_lease(guard.store, AT)

    outcome = guard.run("charge", "pay_7f3a", lambda: ledger.rpush("effects", "pay_7f3a python") and "python")

    assert (outcome.value, outcome.attempt, outcome.replayed) == ("python", 2, False)
    assert effects(ledger) == ["pay_7f3a python"]


def test_the_heartbeat_of_node_keeps_python_out_for_longer_than_a_lease(peer: Peer, guard: Guard) -> None:
    store: Any = guard.store
    number = peer.begin("run", address=CHARGE, value="node", gated=True, lease=2.0)
    peer.began(number)
    assert eventually(lambda: store.read(AT).revision > 4), "four thirds of a lease"

    with pytest.raises(InProgress):
        guard.run("charge", "pay_7f3a", lambda: pytest.fail("it ran"))
    peer.do("open", gate=number)

    assert peer.hear(number)["answer"]["value"] == "node"


def test_the_lease_of_a_python_that_died_is_taken_over_by_node_and_its_late_owner_is_refused(
    peer: Peer, guard: Guard
) -> None:
    def stalled() -> str:
        # Its heartbeat is as good as dead: the record has got another owner's lease, which is over.
        store: Any = guard.store
        found = store.read(AT)
        abandoned = Entry(address=AT, token=b"d" * 16, lease=0.001, ttl=60.0, attempt=1)
        assert store.claim(abandoned, replacing=found) is None
        assert peer.do("run", address=CHARGE, value="node", wait=PATIENCE)["attempt"] == 2
        return "python"

    with pytest.raises(ClaimLost):
        guard.run("charge", "pay_7f3a", stalled)

    assert guard.run("charge", "pay_7f3a", lambda: "?").value == "node"


# Races.


def test_of_racing_workers_in_both_languages_exactly_one_runs_each_key(
    peer: Peer, guard: Guard, ledger: redis.Redis
) -> None:
    keys = [f"pay_{number}" for number in range(KEYS)]
    told: dict[str, list[int]] = {}
    outcomes: dict[str, list[Any]] = defaultdict(list)

    def deliver(key: str) -> None:
        def charge() -> str:
            ledger.rpush("effects", f"{key} python")
            return "python"

        outcomes[key].append(guard.run("charge", key, charge, wait=PATIENCE).value)

    def work(seed: int) -> None:
        for key in random.Random(seed).sample(keys, KEYS):
            deliver(key)

    def first() -> str:
        """Run one key in Python while Node begins with the others, so that each side has run something."""
        for key in keys:
            told[key] = [
                peer.begin("run", address={**CHARGE, "key": key}, value="node", wait=PATIENCE) for _ in range(2)
            ]
        assert eventually(lambda: any(one.endswith("node") for one in effects(ledger)))
        ledger.rpush("effects", f"{keys[0]} python")
        return "python"

    with ThreadPoolExecutor(THREADS + 1) as pool:
        started = pool.submit(guard.run, "charge", keys[0], first)
        assert eventually(lambda: bool(told))
        for working in [pool.submit(work, seed) for seed in range(THREADS)]:
            working.result(PATIENCE)
        started.result(PATIENCE)
    for key, numbers in told.items():
        outcomes[key] += [peer.hear(number)["answer"]["value"] for number in numbers]

    done = effects(ledger)
    assert Counter(one.split()[0] for one in done) == dict.fromkeys(keys, 1)
    assert {one.split()[1] for one in done} == {"node", "python"}
    for key, side in (one.split() for one in done):
        assert outcomes[key] == [side] * (THREADS + 2), key


def test_the_example_in_node_shares_its_record_with_python(node: str, url: str, guard: Guard) -> None:
    def run() -> str:
        program = [node, str(PROJECT / "examples" / "node" / "charge_once.mjs"), url, "pay_1"]
        return subprocess.run(program, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout

    assert run() == "charging pay_1\ndone: { receipt: 17 }\n"
    assert run() == "it was done before: { receipt: 17 }\n"
    assert guard.run("charge", "pay_1", dict).value == {"receipt": 17}


def test_the_programs_of_the_page_run_and_python_finds_what_they_have_done(
    node: str, url: str, guard: Guard, tmp_path: Path
) -> None:
    text = (PROJECT / "docs" / "record-format.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```js\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    client = (PROJECT / "examples" / "node" / "onefold.mjs").as_uri()

    def run(program: str) -> str:
        path = tmp_path / "page.mjs"
        path.write_text(program.replace("./onefold.mjs", client).replace("redis://localhost:6379/0", url))
        return subprocess.run([node, path], capture_output=True, text=True, check=True, timeout=PATIENCE).stdout

    said = [run(program) for program in programs for _ in range(2)]

    assert said == ["charging\n", "", "false { receipt: 17 }\n", "true { receipt: 17 }\n"]
    assert guard.run("charge", "pay_7f3a", pytest.fail).replayed
    assert guard.run("charge", "pay_8", pytest.fail).value == {"receipt": 17}


def test_a_duration_that_is_no_number_is_refused_before_anything_is_sent(peer: Peer, guard: Guard) -> None:
    said = peer.hear(peer.begin("remember", address=CHARGE, keep={"keep": 86400}))

    assert "a duration is a number of seconds, or Infinity, and not" in json.dumps(said)
    assert guard.read("charge", "pay_7f3a") is None
