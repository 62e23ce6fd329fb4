"""Row 13 of the edge cases: nested guards, threads, forked children, greenlets. Each keeps its own claim."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, InsideItself, Outcome, Policy, current
from onefold._model import Claim
from onefold.stores.memory import MemoryStore
from tests.support import PATIENCE, Elsewhere, Handler, ProxyStore, eventually, in_own_context, in_time

# A duplicate that waited for itself would hang as long as this.
PATIENT = Policy(wait=PATIENCE)


def test_nested_guards_keep_a_claim_each() -> None:
    store = MemoryStore()
    outer, inner = Guard(store), Guard(store)
    tokens: list[str] = []

    def pay() -> str:
        tokens.append(current().token)
        inner.run("mail", "pay_1", lambda: tokens.append(current().token))
        tokens.append(current().token)
        return "paid"

    outcome = outer.run("charge", "pay_1", pay)

    assert outcome.value == "paid"
    assert tokens[0] == tokens[2] != tokens[1]
    assert inner.run("charge", "pay_1", pytest.fail).replayed
    assert outer.run("mail", "pay_1", pytest.fail).replayed


def test_the_same_address_inside_itself_is_an_error_at_once() -> None:
    store = MemoryStore()
    guard, other = Guard(store, policy=PATIENT), Guard(store, policy=PATIENT)

    def handler() -> Outcome[Any]:
        return guard.run("mail", 1, lambda: other.run("charge", "pay_1", pytest.fail))

    with pytest.raises(InsideItself, match="operation or a key of its own"):
        guard.run("charge", "pay_1", handler, returns=Any)

    assert guard.read("charge", "pay_1") is None


def test_the_same_address_inside_itself_is_an_error_when_async_too() -> None:
    guard = AsyncGuard("memory:", policy=PATIENT)

    async def handler() -> None:
        await guard.run("charge", "pay_1", handler)

    with pytest.raises(InsideItself):
        asyncio.run(guard.run("charge", "pay_1", handler))


def test_the_same_address_inside_itself_is_an_error_in_a_batch_too() -> None:
    guard = Guard("memory:")

    def handler() -> list[str]:
        results = guard.run_batch("charge", ["pay_1", "pay_2"], key=str, handler=str)
        return [type(result).__name__ for result in results]

    assert guard.run("charge", "pay_1", handler).value == ["InsideItself", "Outcome"]


def test_a_task_that_outlives_its_handler_is_not_inside_it_any_more() -> None:
    guard = AsyncGuard("memory:")

    async def story() -> Outcome[str]:
        ended = asyncio.Event()

        async def later() -> Outcome[str]:
            await ended.wait()
            return await guard.run("charge", "pay_1", handler)

        async def handler() -> str:
            tasks.append(asyncio.create_task(later()))
            return "ok"

        tasks: list[asyncio.Task[Outcome[str]]] = []
        await guard.run("charge", "pay_1", handler)
        ended.set()
        return await tasks[0]

    assert in_time(story()).replayed


def test_two_tasks_on_one_async_guard_share_one_run() -> None:
    guard = AsyncGuard("memory:", policy=PATIENT)

    async def story() -> list[Outcome[str]]:
        inside, may_end = asyncio.Event(), asyncio.Event()

        async def handler() -> str:
            inside.set()
            await may_end.wait()
            return "ok"

        first = in_own_context(guard.run("charge", "pay_1", handler))
        await inside.wait()
        second = in_own_context(guard.run("charge", "pay_1", handler))
        may_end.set()
        return [await first, await second]

    assert [outcome.replayed for outcome in in_time(story())] == [False, True]


def test_many_threads_on_one_guard_run_each_key_once() -> None:
    guard = Guard("memory:", policy=PATIENT)
    handlers = [Handler(str(key)) for key in range(50)]

    def work() -> list[str]:
        return [guard.run("charge", key, handler).value for key, handler in enumerate(handlers)]

    workers = [Elsewhere(work) for _ in range(8)]
    values = [worker.result() for worker in workers]

    assert [handler.starts for handler in handlers] == [1] * 50
    assert values == [[str(key) for key in range(50)]] * 8


class ForkedBetweenBeats(ProxyStore):
    """Forks while no beat is under way: the child would inherit its locks, which nobody is left to open."""

    def __init__(self) -> None:
        super().__init__()
        self._beating = threading.Lock()

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        with self._beating:
            return super().extend(claim, notes)

    def status_of_a_child(self, work: Callable[[], int]) -> int:
        """What this work answers in a forked child, as its exit status."""
        with self._beating:
            child = os.fork()
        if child == 0:  # pragma: no cover - another process
            try:
                os._exit(work())
            finally:
                os._exit(99)
        ended: list[int] = []

        def has_ended() -> bool:
            pid, status = os.waitpid(child, os.WNOHANG)
            ended.extend([os.waitstatus_to_exitcode(status)] if pid else [])
            return bool(pid)

        if not eventually(has_ended):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the child does not end")
        return ended[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="THIS SYSTEM HAS NO FORK: that a guard survives one is not proven")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_is_forked_while_the_store_is_opened_opens_its_own() -> None:
    begun, forked, parent = threading.Event(), threading.Event(), os.getpid()

    def opened() -> MemoryStore:
        if os.getpid() == parent:
            begun.set()
            assert forked.wait(PATIENCE)
        return MemoryStore()

    guard = Guard(opened)
    opening = threading.Thread(target=lambda: guard.run("charge", "pay_1", lambda: "paid"))
    opening.start()
    assert begun.wait(PATIENCE)

    def deliver() -> int:
        return guard.run("charge", "pay_1", lambda: 7).value

    try:
        status = ForkedBetweenBeats().status_of_a_child(deliver)
    finally:
        forked.set()
        opening.join()

    assert status == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="THIS SYSTEM HAS NO FORK: that a guard survives one is not proven")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_has_claims_and_a_heartbeat_of_its_own(long_lease: float) -> None:
    proxy = ForkedBetweenBeats()
    guard = Guard(proxy, policy=Policy(lease=long_lease))
    guard.run("charge", "before the fork", lambda: proxy.wait_for("extend", 1))

    def child() -> int:
        guard.run("charge", "in the child", lambda: proxy.wait_for("extend", proxy.count("extend") + 2))
        return 0 if guard.run("charge", "before the fork", pytest.fail).replayed else 1

    assert proxy.status_of_a_child(child) == 0
    assert guard.read("charge", "in the child") is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="THIS SYSTEM HAS NO FORK: that a guard survives one is not proven")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_does_not_keep_its_parents_claims_alive(long_lease: float) -> None:
    proxy = ForkedBetweenBeats()
    guard = Guard(proxy, policy=Policy(lease=long_lease))

    def child() -> int:
        proxy.extended.clear()
        guard.run("charge", "in the child", lambda: proxy.wait_for("extend", proxy.count("extend") + 3))
        return len(set(proxy.extended))

    assert guard.run("charge", "in the parent", lambda: proxy.status_of_a_child(child)).value == 1


GEVENT = """
import gevent.monkey
gevent.monkey.patch_all()
import gevent
from onefold import Guard, Policy, State, current
from onefold._heartbeat import beats as heartbeat
heartbeat.BEATS_PER_LEASE = 36_000  # ten beats a second, and a lease that no pause of the machine outlasts
guard, starts = Guard("memory:", policy=Policy(wait=60, lease=3_600)), []
def handler(key):
    mine, first = current(), guard.read("charge", key).revision
    while guard.read("charge", key).revision < first + 4:  # the heartbeat is a greenlet now
        gevent.sleep(0.005)
    assert current() is mine and mine.key == str(key) and not mine.lost
    starts.append(key)
    return key
jobs = [gevent.spawn(lambda key=n % 5: guard.run("charge", key, lambda: handler(key)).value) for n in range(20)]
gevent.joinall(jobs, raise_error=True, timeout=60)
print(sorted(starts), [job.value for job in jobs] == [n % 5 for n in range(20)])
"""


def test_under_gevent_each_greenlet_keeps_its_own_claim() -> None:
    command = [sys.executable, "-c", GEVENT]

    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=2 * PATIENCE)

    assert (ran.stdout, ran.returncode) == ("[0, 1, 2, 3, 4] True\n", 0), ran.stderr
