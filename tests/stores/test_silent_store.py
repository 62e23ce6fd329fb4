"""A store that does not answer, and whose connection does not break: what ends with the lease, and who is told.

A server that is stopped, or behind a network that drops everything, is silent; its driver may wait for minutes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from onefold import AsyncGuard, Guard, OutcomeUnknown, Policy, current
from onefold._concurrency import interrupts as _interrupts
from onefold.stores.base import Claim, Ending, Released
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from services.proxy import Proxy
from tests.faults.cancel_tools import DRIVERS
from tests.support import PATIENCE, eventually, in_time

# What a handler takes here is nothing, so that a whole lease passes only where somebody waits for the store.
SHORT = Policy(lease=0.5)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_interrupts, "CLEAN_UP_SECONDS", 0.05)


class Silent(AsyncMemoryStore):
    """A store that answers a claim, and then not any more."""

    in_process = False

    def __init__(self) -> None:
        super().__init__()
        self.is_silent = False

    async def _heard(self) -> None:
        if self.is_silent:
            await asyncio.Event().wait()

    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        await self._heard()
        return await super().extend(claim, notes)

    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        await self._heard()
        return await super().extend_all(claims)

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        await self._heard()
        return await super().finish(claim, ending)

    async def release(self, claim: Claim, released: Released | None = None) -> bool:
        await self._heard()
        return await super().release(claim, released)


def test_a_step_whose_log_the_store_does_not_take_raises_when_its_lease_is_over() -> None:
    store = Silent()

    async def charge() -> str:
        store.is_silent = True
        return "charged"

    async def handler() -> None:
        await current().step("charge", charge)
        raise AssertionError("the step is not written down, and the handler goes on")

    async def story() -> None:
        with pytest.raises(OutcomeUnknown, match=r"the step 'charge' has run.*did not answer before the lease ended"):
            await AsyncGuard(store, policy=SHORT).run("order", "o1", handler)

    in_time(story())


def test_a_result_that_the_store_does_not_take_is_returned_when_its_lease_is_over() -> None:
    store = Silent()

    async def handler() -> str:
        store.is_silent = True
        return "done"

    async def story() -> None:
        outcome = await AsyncGuard(store, policy=SHORT).run("order", "o1", handler)

        assert (outcome.value, outcome.recorded) == ("done", False)

    in_time(story())


@pytest.mark.parametrize("batch", [False, True])
def test_an_error_of_the_handler_is_raised_when_its_lease_is_over(batch: bool) -> None:
    store = Silent()

    async def handler(_message: str = "") -> str:
        store.is_silent = True
        raise ValueError("no")

    async def story() -> None:
        guard = AsyncGuard(store, policy=SHORT)
        if batch:
            (error,) = await guard.run_batch("order", ["o1"], key=str, handler=handler)
            assert isinstance(error, ValueError)
        else:
            with pytest.raises(ValueError, match="no"):
                await guard.run("order", "o1", handler)

    in_time(story())


# psycopg waits some ten seconds by itself for the answer to what it has cancelled.
@pytest.mark.parametrize("driver", ["asyncpg", "asyncmy", pytest.param("psycopg", marks=pytest.mark.more)])
def test_a_step_on_a_server_that_is_silent_raises_when_its_lease_is_over(
    driver: str, request: pytest.FixtureRequest
) -> None:
    address = str(request.getfixturevalue(DRIVERS[driver].database))

    async def story(proxy: Proxy) -> None:
        async with DRIVERS[driver].opened(proxy.url()) as environment:
            guard = environment.guard

            async def charge() -> str:
                proxy.stall()
                return "charged"

            async def handler() -> None:
                try:
                    await current().step("charge", charge)
                finally:
                    proxy.resume()

            await guard.run("order", "first", lambda: asyncio.sleep(0))
            with pytest.raises(OutcomeUnknown):
                await guard.run("order", "o1", handler, policy=Policy(lease=1))

    with Proxy(address) as proxy:
        in_time(story(proxy))


class Hanging(MemoryStore):
    """A store that claims, and whose renewals hang in their driver."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = threading.Event()
        self.may_go = threading.Event()

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        self.hangs.set()
        assert self.may_go.wait(PATIENCE)
        return super().extend_all(claims)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    store = Hanging()
    yield store
    store.may_go.set()


def test_a_renewal_that_hangs_keeps_no_claim_from_being_told_lost(
    hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "onefold")

    def told(guard: Guard, key: str, message: str) -> Callable[[], bool]:
        digest = guard.address("charge", key).digest
        return lambda: any(digest in line and message in line for line in caplog.messages)

    with Guard(hanging, policy=Policy(lease=0.3)) as guard:

        def second() -> bool:
            # Its own renewal is never sent: the one of the first claim does not come back.
            assert eventually(told(guard, "pay_2", "its lease"))
            assert eventually(lambda: current().lost)
            return eventually(told(guard, "pay_2", "has ended"))

        def first() -> bool:
            assert hanging.hangs.wait(PATIENCE)
            assert guard.run("charge", "pay_2", second).value
            assert current().lost
            hanging.may_go.set()
            return eventually(lambda: not current().lost)

        assert guard.run("charge", "pay_1", first).value
        assert told(guard, "pay_1", "has ended")()
