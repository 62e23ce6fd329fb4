"""One who waits is interrupted or cancelled at every moment: it touches nothing, and leaves nothing behind."""

from __future__ import annotations

import gc
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, InProgress
from onefold._concurrency import waiters
from onefold._concurrency.waiters import ROOMS
from onefold._model import Address, Claim, Ending, Entry, State
from onefold.keys import address
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.faults.cancel_tools import MOMENTS_MAX, WAYS, Moments
from tests.faults.test_interrupts_anywhere import EVENTS_MAX, SoftTimeLimit, Strike
from tests.support import Handler, in_time

OWNER = b"o" * 16
# Long enough for a few looks.
WAIT_SECONDS = 0.02


def nobody_waits_for(of: Address) -> bool:
    """Whoever could not leave any more is gone with its frame, and its room with the next wake-up."""
    gc.collect()
    waiters.wake(of)
    return not ROOMS


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [SoftTimeLimit, KeyboardInterrupt])
def test_wherever_it_strikes_a_waiter_touches_nothing_and_leaves(error: type[BaseException]) -> None:
    store = MemoryStore()
    with Guard(store) as guard:
        for at in count(1):
            of, strike = address("charge", f"pay_{at}"), Strike(at, error)
            store.claim(Entry(address=of, token=OWNER, lease=30))
            with suppress(error, InProgress), strike.armed():
                guard.run("charge", of.key, Handler(), wait=WAIT_SECONDS)
            if not strike.where:
                break
            assert at < EVENTS_MAX
            found = store.read(of)
            assert found is not None
            assert (found.token, found.revision, found.state) == (OWNER, 1, State.RUNNING), strike.where
            assert nobody_waits_for(of), f"{strike.where} ({at})"

    assert at > 50


@pytest.mark.parametrize("way", WAYS)
def test_wherever_it_is_cancelled_a_waiting_task_touches_nothing_and_leaves(way: str) -> None:
    async def wait(guard: AsyncGuard, of: Address, moments: Moments) -> None:
        moments.begin()
        with suppress(InProgress):
            await guard.run("charge", of.key, Handler(), wait=WAIT_SECONDS)

    async def story() -> int:
        store = AsyncMemoryStore()
        async with AsyncGuard(store) as guard:
            at = 1
            for number in range(MOMENTS_MAX):
                of, moments = address("charge", f"pay_{number}"), Moments(at, way)
                await store.claim(Entry(address=of, token=OWNER, lease=30))
                await moments.run(wait(guard, of, moments))
                if not moments.struck:
                    if at > 1:
                        return at
                    # On a busy machine the time to wait may be over before anybody waits.
                    continue
                found: Any = await store.read(of)
                assert (found.token, found.revision, found.state) == (OWNER, 1, State.RUNNING)
                assert not ROOMS, f"cancelled {way} at moment {at}"
                await store.finish(Claim(of, OWNER), Ending(state=State.DONE, ttl=60, omitted=True))
                assert (await guard.run("charge", of.key, Handler(), wait=WAIT_SECONDS)).replayed
                at += 1
        raise AssertionError("it never came to an end")

    assert in_time(story()) > 1
