"""Ctrl-C, while a blocking guard waits for its store: a few change nothing, and none of them is needed for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from onefold import Guard, Policy, State
from onefold._concurrency import interrupts as _interrupts
from onefold._concurrency.interrupts import SENT_AGAIN_MAX
from onefold._model import Claim, Ending
from onefold.keys import address
from onefold.stores.memory import MemoryStore
from services.proxy import Proxy
from tests.support import Handler, eventually

CHARGE = address("charge", "pay_1")


class Interrupted(MemoryStore):
    """A store whose `finish` is interrupted so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times
        self.sent = 0

    def finish(self, claim: Claim, ending: Ending) -> bool:
        self.sent += 1
        if self.sent <= self._times:
            raise KeyboardInterrupt(f"number {self.sent}")
        return super().finish(claim, ending)


@pytest.mark.parametrize("times", range(1, SENT_AGAIN_MAX + 1))
def test_a_signal_that_comes_several_times_loses_no_result(times: int) -> None:
    store = Interrupted(times)

    with pytest.raises(KeyboardInterrupt, match="number 1"):
        Guard(store).run("charge", "pay_1", Handler("paid"))

    assert Guard(store).run("charge", "pay_1", pytest.fail).value == "paid"


@pytest.mark.parametrize(("seconds", "sent"), [(None, 1 + SENT_AGAIN_MAX), (0, 2)], ids=["too many", "too late"])
def test_whoever_goes_on_interrupting_ends_the_delivery_and_the_claim_stays_until_its_lease_ends(
    seconds: float | None, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seconds is not None:
        monkeypatch.setattr(_interrupts, "CLEAN_UP_SECONDS", seconds)
    store = Interrupted(1_000)
    guard = Guard(store, policy=Policy(after_crash="hold"))

    with pytest.raises(KeyboardInterrupt, match="number 1"):
        guard.run("charge", "pay_1", Handler("paid"))

    found = store.read(CHARGE)
    assert (store.sent, found and found.state) == (sent, State.RUNNING)
    # Nobody renews it any more.
    heartbeat = guard._context().heartbeat
    assert found is not None
    assert heartbeat is not None
    assert heartbeat.find(found.token) is None


CHILD = """
import sys
from onefold import Guard

guard = Guard(sys.argv[1])
guard.run("charge", "warm", lambda: None)
print("ready", flush=True)
sys.stdin.readline()
guard.run("charge", "pay_1", lambda: print("ran", flush=True))
"""


@contextmanager
def started(url: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", CHILD, url], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.more
def test_a_process_ends_by_ctrl_c_though_its_server_is_silent(postgres_url: str) -> None:
    with Proxy(postgres_url) as proxy, started(proxy.url()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        proxy.stall()
        process.stdin.write("\n")
        process.stdin.flush()

        def ended() -> bool:
            # The driver itself keeps one for a word to the server.
            process.send_signal(signal.SIGINT)
            try:
                return process.wait(0.5) is not None
            except subprocess.TimeoutExpired:
                return False

        assert eventually(ended)
        proxy.resume()
        assert process.stdout.read() == ""
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute("SELECT count(*) FROM onefold_records WHERE state = 'done'").fetchone()
    assert found == (1,)
