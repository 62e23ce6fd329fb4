"""A delivery that is cancelled at any moment, once or again and again, leaves its record and its effect, or neither.

Every async driver, every suspension, and every way in which asyncio and anyio cancel a task (row 41 of the edge cases).
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from itertools import combinations, product
from typing import Any

import asyncmy.connection
import psycopg
import pytest

from onefold import AsyncGuard
from tests.faults.cancel_tools import (
    DRIVERS,
    MOMENTS_MAX,
    WAYS,
    Driver,
    Environment,
    Moments,
    Story,
    combined,
    fresh,
    fresh_commits_all_the_same,
    prepare,
    transactional,
    transactional_row,
    within,
    within_commits_all_the_same,
    within_row,
    within_row_commits_all_the_same,
)
from tests.support import PATIENCE, in_time

# What is cancelled, and how the message is delivered again.
JOINED: dict[str, tuple[Story, Story]] = {
    "transactional": (transactional, transactional),
    "within": (within, within),
    "within, commits all the same": (within_commits_all_the_same, within),
    "a row": (transactional_row, transactional_row),
    "a row, within": (within_row, within_row),
    "a row, within, commits all the same": (within_row_commits_all_the_same, within_row),
    "fresh": (fresh, fresh),
    "fresh, commits all the same": (fresh_commits_all_the_same, fresh),
}


@pytest.fixture
def address(driver: str, request: pytest.FixtureRequest, tmp_path: Any) -> str:
    database = DRIVERS[driver].database
    found = str(tmp_path / "wallet.db") if database == "path" else str(request.getfixturevalue(database))
    prepare(database, found)
    return found


async def cancelled_everywhere(driver: Driver, address: str, story: str, way: str) -> int:
    """Cancel one delivery at each of its moments; return how many there were."""
    async with driver.opened(address) as environment:
        # Connections are open, and the tables are there.
        await transactional(environment, "first", lambda: None)
        await JOINED[story][1](environment, "second", lambda: None)
        for at in range(1, MOMENTS_MAX):
            if not await cancelled_once(driver, address, environment, story, Moments(at, way), f"m{at}"):
                return at - 1
    raise AssertionError("there is no end of it")


async def cancelled_once(
    driver: Driver, address: str, environment: Environment, story: str, moments: Moments, message: str
) -> bool:
    cancelled, again = JOINED[story]
    ended = await moments.run(cancelled(environment, message, moments.begin))
    if not moments.struck:
        assert ended is None
        return False
    where = f"at moment {moments.at}"
    if cancelled is again:
        assert was_cancelled(ended, moments), f"{where} it ended in {ended!r}"
    records, effects = driver.seen(address, message)
    assert records == effects, f"{where}: {records} records and {effects} effects"
    assert effects <= 1, f"{where}: {effects} effects"

    # The message comes again, on the same connections.
    await asyncio.wait_for(again(environment, message, lambda: None), PATIENCE)
    assert driver.seen(address, message) == (1, 1), f"{where}, and delivered again"
    return True


def was_cancelled(ended: BaseException | None, moments: Moments) -> bool:
    """Whether the cancellation has come out; a scope of anyio's finds nothing to cancel in a story's last turn."""
    return isinstance(ended, asyncio.CancelledError) or moments.caught or (ended is None and moments.way == "by anyio")


# Each driver, each story and each way is there; more of their combinations are for `make test-all` and `make soak`.
EVERYDAY = {
    ("psycopg", "transactional", "twice"),
    ("psycopg", "transactional", "by anyio"),
    ("psycopg", "within, commits all the same", "twice"),
    ("psycopg", "fresh, commits all the same", "five times"),
    ("psycopg, a pool of the caller's", "transactional", "at every turn"),
    ("asyncpg", "transactional", "once"),
    ("asyncpg", "within, commits all the same", "once"),
    ("asyncpg", "fresh", "by anyio"),
    ("asyncpg, a pool of the caller's", "transactional", "twice"),
    ("asyncmy", "transactional", "by anyio"),
    ("asyncmy", "within, commits all the same", "once"),
    ("sqlite", "transactional", "twice"),
    ("sqlite", "within", "once"),
    ("sqlalchemy, psycopg", "within, commits all the same", "twice"),
    ("sqlalchemy, asyncpg", "transactional", "twice"),
    ("sqlalchemy, asyncmy", "within", "by anyio"),
    ("sqlalchemy, aiosqlite", "fresh, commits all the same", "twice"),
    ("sqlalchemy, sessions on psycopg", "within", "at every turn"),
    ("sqlalchemy, sessions on asyncpg", "within, commits all the same", "by anyio"),
}


@pytest.mark.parametrize(("driver", "story", "way"), combined(EVERYDAY, DRIVERS, JOINED, WAYS))
def test_whatever_moment_is_cancelled_the_record_is_there_exactly_if_its_effect_is(
    driver: str, story: str, way: str, address: str
) -> None:
    moments = asyncio.run(cancelled_everywhere(DRIVERS[driver], address, story, way))

    assert moments > 0


@pytest.mark.parametrize("sizes", [(12, 8, 5), (15, 3, 5), (2, 2, 2), (5, 1, 7)])
def test_any_two_choices_meet_before_a_soak(sizes: tuple[int, ...]) -> None:
    choices = [[f"{which}{number}" for number in range(size)] for which, size in zip("abc", sizes, strict=True)]
    parameters = combined([("a0", "b0", "c0")], *choices)

    met = [one.values for one in parameters if "soak" not in [mark.name for mark in one.marks]]

    assert len(parameters) == math.prod(sizes)
    assert [one.values for one in parameters if not one.marks] == [("a0", "b0", "c0")]
    for left, right in combinations(range(3), 2):
        assert {(one[left], one[right]) for one in met} == set(product(choices[left], choices[right]))


def test_a_cancellation_that_a_driver_turns_into_a_lost_connection_is_not_tried_again(postgres_url: str) -> None:
    """As asyncmy's cursor does it, whose end fails on the connection that the cancellation has closed."""
    starts: list[int] = []

    async def story() -> None:
        inside = asyncio.Event()
        async with AsyncGuard(postgres_url) as guard:

            @guard.transactional("credit", key="message")
            async def credit(message: str, *, tx: Any) -> None:
                starts.append(1)
                inside.set()
                if len(starts) > 1:
                    return
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    await tx.close()
                    raise psycopg.OperationalError("the connection is lost") from None

            delivery = asyncio.ensure_future(credit("m1"))  # type: ignore[call-arg]
            await inside.wait()
            delivery.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(delivery, PATIENCE)

    in_time(story())

    assert starts == [1]


@pytest.mark.parametrize("swallows", ["connect", "query", "begin", "commit"])
def test_a_cancellation_that_asyncmy_swallows_is_raised_all_the_same(
    swallows: str, mysql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `asyncio.wait_for` of Python 3.11 swallows one that comes in the same turn as the answer."""
    held = getattr(asyncmy.connection.Connection, swallows)
    deliveries: list[asyncio.Task[None]] = []

    async def swallowing(connection: Any, *values: Any) -> Any:
        answer = await held(connection, *values)
        if deliveries and not deliveries[0].cancelling():
            deliveries[0].cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        return answer

    monkeypatch.setattr(asyncmy.connection.Connection, swallows, swallowing)

    async def story() -> None:
        async with AsyncGuard(mysql_url) as guard:

            @guard.transactional("credit", key="message")
            async def credit(message: str, *, tx: Any) -> None:
                async with tx.cursor() as cursor:
                    await cursor.execute("SELECT 1")

            deliveries.append(asyncio.ensure_future(credit("m1")))  # type: ignore[call-arg]
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(deliveries[0], PATIENCE)

    in_time(story())
