"""A server that does not answer: a time-out around a delivery ends it, whatever has to be cleaned up."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from onefold._concurrency import interrupts as _interrupts
from services.proxy import Proxy
from tests.faults.cancel_tools import DRIVERS, prepare, transactional
from tests.faults.test_cancellation_claims import run
from tests.support import in_time

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
