"""An async guard that is closed waits for the renewals that it has cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from onefold import AsyncGuard, Policy
from onefold._concurrency.interrupts import brought_to_its_end
from onefold._model import Claim
from onefold.stores.memory import AsyncMemoryStore
from onefold.testing import use


class Lends(AsyncMemoryStore):
    """Renews on a connection that it gives back in a task of its own, as those on an engine of SQLAlchemy do."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_return = asyncio.Event(), asyncio.Event()
        self.lent = 0

    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        self.lent += 1
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            await brought_to_its_end(self._give_back(), bool)
        return [True for _ in claims]

    async def _give_back(self) -> None:
        await self.may_return.wait()
        self.lent -= 1


async def until_it_renews(guard: AsyncGuard, store: Lends) -> asyncio.Task[Any]:
    running = asyncio.create_task(guard.run("charge", "pay_1", asyncio.Event().wait))
    await store.asked.wait()
    asyncio.get_running_loop().call_soon(store.may_return.set)
    return running


def test_a_guard_that_is_closed_leaves_no_connection_behind(in_short: Policy) -> None:
    async def story() -> int:
        store = Lends()
        guard = AsyncGuard(store, policy=in_short)
        running = await until_it_renews(guard, store)
        await guard.aclose()
        running.cancel()
        return store.lent

    assert asyncio.run(story()) == 0


def test_a_store_that_was_swapped_for_a_test_is_left_in_order(in_short: Policy) -> None:
    async def story() -> int:
        store = Lends()
        guard = AsyncGuard("memory:", policy=in_short)
        async with use(guard, store):
            running = await until_it_renews(guard, store)
        running.cancel()
        return store.lent

    assert asyncio.run(story()) == 0


def test_a_renewal_that_hangs_does_not_keep_a_guard_from_being_closed(
    in_short: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onefold._heartbeat.async_guards.CLOSE_SECONDS", 0.05)

    async def story() -> None:
        store = Lends()
        guard = AsyncGuard(store, policy=in_short)
        running = await until_it_renews(guard, store)
        store.may_return = asyncio.Event()
        await guard.aclose()
        store.may_return.set()
        running.cancel()

    asyncio.run(story())

    assert "a guard was closed, and a renewal that is under way has not been answered within 0.05s" in caplog.text


@pytest.fixture
def in_short() -> Policy:
    """The shortest lease that there is: its first renewal is due soon."""
    return Policy(lease=0.3)
