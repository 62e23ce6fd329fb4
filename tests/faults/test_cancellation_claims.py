"""A claim whose delivery is cancelled at any moment is released or finished: the message comes again, and runs once.

`run`, batches and steps on every async store, cancelled at every suspension. The handler does its effect in one piece,
so that nothing is ever unknown: what was cancelled before it runs again, what was cancelled after it is replayed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from onefold import AsyncGuard, Outcome, current
from tests.faults.cancel_tools import DRIVERS, MOMENTS_MAX, WAYS, Moments, combined, prepare
from tests.support import PATIENCE

# The effects by message, in a system elsewhere.
Effects = Counter[str]
Story = Callable[[AsyncGuard, str, Effects], Coroutine[Any, Any, None]]


async def run(guard: AsyncGuard, message: str, effects: Effects) -> None:
    outcome = await guard.run("charge", message, lambda: charged(message, effects))
    assert outcome.value == "charged"


async def charged(message: str, effects: Effects) -> str:
    await asyncio.sleep(0)
    effects[message] += 1
    return "charged"


async def steps(guard: AsyncGuard, message: str, effects: Effects) -> None:
    async def handler() -> str:
        await current().step("reserve", lambda: charged(f"{message}, reserved", effects))
        return await charged(message, effects)

    assert (await guard.run("charge", message, handler)).value == "charged"
    assert effects[f"{message}, reserved"] == 1


async def run_batch(guard: AsyncGuard, message: str, effects: Effects) -> None:
    messages = [message, f"{message}, the second"]
    outcomes = await guard.run_batch("charge", messages, key=str, handler=lambda one: charged(one, effects))
    assert all(isinstance(one, Outcome) for one in outcomes), outcomes
    assert effects[messages[1]] == 1


STORIES: dict[str, Story] = {"run": run, "steps": steps, "run_batch": run_batch}
# The fixture that has the URL of each; the others are databases.
URLS = {"memory": "", "redis": "redis_url", "dynamodb": "dynamodb_url"}
STORES = (*URLS, *DRIVERS)
EVERYDAY = {
    ("memory", "steps", "at every turn"),
    ("redis", "run", "twice"),
    ("redis", "run_batch", "by anyio"),
    ("dynamodb", "run", "twice"),
    ("dynamodb", "run_batch", "by anyio"),
    ("psycopg", "run", "by anyio"),
    ("psycopg", "steps", "twice"),
    ("asyncpg", "run_batch", "once"),
    ("asyncmy", "run", "twice"),
    ("sqlite", "steps", "by anyio"),
    ("sqlite", "run_batch", "five times"),
    ("sqlalchemy, aiosqlite", "run", "at every turn"),
}


@asynccontextmanager
async def guarded(store: str, request: pytest.FixtureRequest, path: str) -> AsyncIterator[AsyncGuard]:
    if store in URLS:
        async with AsyncGuard(request.getfixturevalue(URLS[store]) if URLS[store] else "memory:") as guard:
            yield guard
        return
    database = DRIVERS[store].database
    address = path if database == "path" else str(request.getfixturevalue(database))
    prepare(database, address)
    async with DRIVERS[store].opened(address) as environment:
        yield environment.guard


@pytest.mark.parametrize(("store", "story", "way"), combined(EVERYDAY, STORES, STORIES, WAYS))
def test_whatever_moment_is_cancelled_the_message_runs_once_and_nothing_of_it_twice(
    store: str, story: str, way: str, request: pytest.FixtureRequest, tmp_path: Any
) -> None:
    async def cancelled_everywhere() -> int:
        async with guarded(store, request, str(tmp_path / "records.db")) as guard:
            await STORIES[story](guard, "first", Counter())
            for at in range(1, MOMENTS_MAX):
                if not await cancelled_once(guard, STORIES[story], Moments(at, way)):
                    return at - 1
        raise AssertionError("there is no end of it")

    assert asyncio.run(cancelled_everywhere()) > 0


async def cancelled_once(guard: AsyncGuard, story: Story, moments: Moments) -> bool:
    message, effects = f"m{moments.at}", Effects()

    async def cancelled() -> None:
        moments.begin()
        await story(guard, message, effects)

    ended = await moments.run(cancelled())
    if not moments.struck:
        assert ended is None
        return False
    assert isinstance(ended, asyncio.CancelledError) or moments.caught or moments.way == "by anyio", repr(ended)

    await asyncio.wait_for(story(guard, message, effects), PATIENCE)

    assert effects[message] == 1, f"cancelled at moment {moments.at}, it ran {effects[message]} times"
    return True
