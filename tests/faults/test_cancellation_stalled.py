"""A server that does not answer: a time-out around a delivery ends it, whatever has to be cleaned up."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections import Counter
from pathlib import Path

import anyio
import pytest

from onefold._concurrency import interrupts as _interrupts
from services.proxy import Proxy
from tests.faults.cancel_tools import DRIVERS, prepare, transactional
from tests.faults.test_cancellation_claims import URLS, Story, guarded, run, run_batch
from tests.support import PATIENCE, in_time

# Those whose database is a server's. SQLAlchemy says goodbye to a connection by itself, and waits for the answer.
SERVED = [name for name, driver in DRIVERS.items() if driver.database != "path" and "sqlalchemy" not in name]


@pytest.fixture
def address(driver: str, request: pytest.FixtureRequest) -> str:
    database = DRIVERS[driver].database
    found = str(request.getfixturevalue(database))
    prepare(database, found)
    return found


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_interrupts, "CLEAN_UP_SECONDS", 0.05)


@pytest.mark.parametrize("driver", SERVED)
def test_a_time_out_ends_a_transaction_whose_server_is_silent_and_the_message_comes_again(
    driver: str, address: str
) -> None:
    async def story(proxy: Proxy) -> None:
        async with DRIVERS[driver].opened(proxy.url()) as environment:
            await transactional(environment, "first", lambda: None)
            proxy.stall()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await transactional(environment, "m1", lambda: None)
            proxy.resume()
            await transactional(environment, "m1", lambda: None)

    with Proxy(address) as proxy:
        in_time(story(proxy))

    assert DRIVERS[driver].seen(address, "m1") == (1, 1)


# psycopg waits some ten seconds by itself for the answer to what it has cancelled.
@pytest.mark.parametrize("driver", ["asyncpg", "asyncmy", pytest.param("psycopg", marks=pytest.mark.more)])
def test_a_time_out_ends_a_claim_whose_server_is_silent(driver: str, address: str) -> None:
    effects: Counter[str] = Counter()

    async def story(proxy: Proxy) -> None:
        async with DRIVERS[driver].opened(proxy.url()) as environment:
            await run(environment.guard, "first", effects)
            proxy.stall()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await run(environment.guard, "m1", effects)
            proxy.resume()

    with Proxy(address) as proxy:
        in_time(story(proxy))

    assert effects["m1"] == 0


CLAIMING = [*SERVED, "sqlalchemy, asyncpg", "sqlalchemy, asyncmy", "redis", "dynamodb"]


def claims_late(message: bytes) -> bool:
    """Whether the key is in it; keys are bytes, which some drivers write as digits."""
    return any(form in message for form in (b"late-claim", b"late-claim".hex().encode(), b64encode(b"late-claim")[:12]))


@pytest.mark.parametrize("story", [run, pytest.param(run_batch, marks=pytest.mark.more)])
@pytest.mark.parametrize("driver", CLAIMING)
def test_a_claim_that_reaches_its_server_after_the_cancellation_does_not_outlive_the_release(
    driver: str, story: Story, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    effects: Counter[str] = Counter()
    monkeypatch.setattr(_interrupts, "CLEAN_UP_SECONDS", PATIENCE)
    monkeypatch.setattr(_interrupts, "REPLY_SECONDS", PATIENCE)
    database = URLS.get(driver) or DRIVERS[driver].database
    address = str(request.getfixturevalue(database))

    async def cancelled(proxy: Proxy) -> None:
        monkeypatch.setattr(request, "getfixturevalue", lambda _: proxy.url(address))
        async with guarded(driver, request, str(tmp_path)) as guard:
            await story(guard, "first", effects)
            late = proxy.hold_request(claims_late)
            task = asyncio.create_task(story(guard, "late-claim", effects))
            assert await asyncio.to_thread(late.reached.wait, PATIENCE)
            task.cancel()
            # Whoever does not wait for the reply has sent the claim again by then, and released it.
            ended, _ = await asyncio.wait({task}, timeout=0.3)
            late.released.set()
            await asyncio.wait({task}, timeout=PATIENCE)
            assert task.cancelled()
            await story(guard, "late-claim", effects)
            assert not ended

    with Proxy(address) as proxy:
        in_time(cancelled(proxy))

    assert effects["late-claim"] == 1


def test_a_cancel_scope_of_anyio_does_not_keep_a_processor_busy_while_a_server_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_interrupts, "CLEAN_UP_SECONDS", PATIENCE)
    turns, cancelled = 50, list[int]()

    async def silent() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    async def story() -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            try:
                await _interrupts.brought_to_its_end(silent(), bool)
            finally:
                cancelled.append(_interrupts.cancellations())
        assert scope.cancelled_caught

    in_time(story())
    # Such a scope cancels at each turn of the event loop, and each wakes the task.
    assert 1 <= cancelled[0] < turns / 2
