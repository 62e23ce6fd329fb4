"""Steps that a handler takes at once, in threads or in tasks: none that has returned is forgotten by the store."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from onefold import AsyncGuard, Guard, Held, Policy, State, StoreUnavailable, current
from onefold._model import Claim, Ending
from onefold.keys import address
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import PATIENCE, Clock

CHARGE = address("charge", "pay_1")
MANY = 20

# Turns of an event loop: far more than the tasks of a test need.
PATIENCE_TURNS = 10_000


class Killed(BaseException):
    """The end of a process: under `hold` its claim stays, as after a kill."""


class Store(MemoryStore):
    """Its first write of a log stands still until `go_on`, or fails as `failure`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.writes = 0
        self.under_way = threading.Event()
        self.go_on = threading.Event()
        self.failure: BaseException | None = None

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        if notes is not None:
            self.writes += 1
            if self.writes == 1:
                self.under_way.set()
                assert self.go_on.wait(PATIENCE)
                if self.failure is not None:
                    raise self.failure
        return super().extend(claim, notes)


class AsyncStore(AsyncMemoryStore):
    # What it does takes time here, and can be cancelled.
    in_process = False

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.writes = 0
        self.under_way = asyncio.Event()
        self.go_on = asyncio.Event()
        self.failure: BaseException | None = None

    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        if notes is not None:
            self.writes += 1
            if self.writes == 1:
                self.under_way.set()
                await self.go_on.wait()
                if self.failure is not None:
                    raise self.failure
        return await super().extend(claim, notes)


class Steps:
    """The steps of a handler, and how often each has run."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.dies = True

    def run(self, name: str) -> str:
        self.ran[name] += 1
        return name

    def end(self) -> None:
        if self.dies:
            self.dies = False
            raise Killed


NAMES = [f"step {number}" for number in range(MANY)]


def wait_for_log(names: list[str]) -> None:
    """Wait until these steps have run, and wait for their turn to be written."""
    log = current()._log
    ends = time.monotonic() + PATIENCE
    while log is not None and any(name not in log for name in names):
        assert time.monotonic() < ends
        time.sleep(0.001)


def by_threads(steps: Steps, store: Store) -> None:
    """Take the first step, whose write stands still, and then all others at once."""
    context = contextvars.copy_context()
    take = current().step
    with ThreadPoolExecutor(MANY) as pool:
        taken = [pool.submit(context.copy().run, take, NAMES[0], lambda: steps.run(NAMES[0]))]
        assert store.under_way.wait(PATIENCE)
        taken += [pool.submit(context.copy().run, take, name, lambda name=name: steps.run(name)) for name in NAMES[1:]]
        wait_for_log(NAMES)
        store.go_on.set()
        assert [one.result(PATIENCE) for one in taken] == NAMES
    steps.end()


async def ran(steps: Steps, count: int) -> None:
    """Let the tasks go on until so many steps have run: each of them then waits for its turn."""
    for _ in range(PATIENCE_TURNS):
        if len(steps.ran) == count:
            return
        await asyncio.sleep(0)
    raise AssertionError(steps.ran)


async def by_tasks(steps: Steps, store: AsyncStore) -> None:
    async def take(name: str) -> str:
        async def part() -> str:
            return steps.run(name)

        return await current().step(name, part)

    taken = [asyncio.create_task(take(NAMES[0]))]
    await store.under_way.wait()
    taken += [asyncio.create_task(take(name)) for name in NAMES[1:]]
    await ran(steps, MANY)
    store.go_on.set()
    assert await asyncio.gather(*taken) == NAMES
    steps.end()


FAILURES = [None, StoreUnavailable("not now")]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_run_that_dies_after_steps_taken_at_once_has_forgotten_none_of_them(failure: Exception | None) -> None:
    clock, steps = Clock(), Steps()
    store = Store(clock)
    store.failure = failure

    with pytest.raises(Killed):
        Guard(store, policy=Policy(after_crash="hold")).run("charge", "pay_1", lambda: by_threads(steps, store))
    clock.advance(31)
    outcome = Guard(store).run("charge", "pay_1", lambda: by_threads(steps, store))

    assert (outcome.attempt, steps.ran) == (2, Counter(NAMES))
    # The one that stood still, and one with all the others.
    assert store.writes <= 3


@pytest.mark.parametrize("failure", FAILURES)
def test_the_same_by_tasks(failure: Exception | None) -> None:
    async def main() -> None:
        clock, steps = Clock(), Steps()
        store = AsyncStore(clock)
        store.failure = failure
        async with AsyncGuard(store, policy=Policy(after_crash="hold")) as guard:
            with pytest.raises(Killed):
                await guard.run("charge", "pay_1", lambda: by_tasks(steps, store))
        clock.advance(31)
        async with AsyncGuard(store) as guard:
            outcome = await guard.run("charge", "pay_1", lambda: by_tasks(steps, store))

        assert (outcome.attempt, steps.ran) == (2, Counter(NAMES))
        assert store.writes <= 3

    asyncio.run(main())


@pytest.mark.parametrize("which", [0, 1])
def test_a_step_that_is_cancelled_while_it_writes_or_waits_for_its_turn_stops_no_other_and_is_kept(which: int) -> None:
    """It has run: whatever is raised out of it, the next attempt must not run it again."""

    async def main() -> None:
        clock, steps = Clock(), Steps()
        store = AsyncStore(clock)

        async def take(name: str) -> None:
            async def part() -> str:
                return steps.run(name)

            await current().step(name, part)

        async def handler() -> None:
            if steps.ran:
                await asyncio.gather(*(take(name) for name in NAMES[:3]))
                return
            first = asyncio.create_task(take(NAMES[0]))
            await store.under_way.wait()
            others = [asyncio.create_task(take(name)) for name in NAMES[1:3]]
            await ran(steps, 3)
            cancelled = [first, *others][which]
            cancelled.cancel()
            await asyncio.sleep(0)
            cancelled.cancel()
            store.go_on.set()
            ended = await asyncio.gather(first, *others, return_exceptions=True)
            assert [isinstance(one, asyncio.CancelledError) for one in ended] == [n == which for n in range(3)]
            raise Killed

        async with AsyncGuard(store, policy=Policy(after_crash="hold")) as guard:
            with pytest.raises(Killed):
                await guard.run("charge", "pay_1", handler)
        clock.advance(31)
        async with AsyncGuard(store) as guard:
            await guard.run("charge", "pay_1", handler)

        assert steps.ran == Counter(NAMES[:3])

    asyncio.run(main())


def test_a_write_that_is_under_way_when_the_handler_ends_does_not_overtake_the_log_of_a_held_record() -> None:
    clock, steps = Clock(), Steps()
    store = Store(clock)
    threads: list[threading.Thread] = []

    def begin(name: str) -> None:
        context = contextvars.copy_context()
        run = context.run
        threads.append(threading.Thread(target=run, args=(current().step, name, lambda: steps.run(name))))
        threads[-1].start()

    def handler() -> None:
        begin("first")
        assert store.under_way.wait(PATIENCE)
        begin("second")
        wait_for_log(["second"])
        raise TimeoutError

    guard = Guard(store, policy=Policy(after_crash="hold"))
    real_finish = store.finish

    def finish(claim: Claim, ending: Ending) -> bool:
        finished = real_finish(claim, ending)
        store.go_on.set()
        for thread in threads:
            thread.join(PATIENCE)
        return finished

    store.finish = finish  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        guard.run("charge", "pay_1", handler)

    found = store.read(CHARGE)
    assert found is not None
    assert found.state is State.HELD
    assert set(msgspec.msgpack.decode(found.notes or b"")) == {"first", "second"}
    with pytest.raises(Held):
        guard.run("charge", "pay_1", handler)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_was_forked_while_another_thread_began_its_steps_can_take_its_own() -> None:
    current_module = sys.modules["onefold.current"]
    with current_module._making:
        child = os.fork()
        if child == 0:
            os._exit(0 if current_module._making.acquire(blocking=False) else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
