"""What ends a claim is told to the store while handlers hold the whole pool, and costs no other claim its renewal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any, Final

import asyncpg
import psycopg_pool
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from onefold import AsyncGuard, Guard, Policy, StoreUnavailable, current
from onefold._model import Close, Ending, Released, State
from onefold.keys import address
from onefold.stores.base import Query
from tests.stores.test_renewals_apart import HOUR, claim_of, entry, locking, through
from tests.support import elsewhere, in_time

# Each is patient with its pool for 30 s, which is longer than this lease.
LEASE: Final = 2.0
SIZE: Final = 2

DONE: Final = Ending(state=State.DONE, ttl=HOUR)


def with_options(url: str, options: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{options}"


# A guard's source, and how to take one of its connections.
Source = tuple[Any, Callable[[Any], Any]]


@asynccontextmanager
async def ours(url: str) -> AsyncIterator[Source]:
    yield with_options(url, f"pool_size={SIZE}"), lambda guard: guard.store._pool.acquire()


@asynccontextmanager
async def psycopg_pooled(url: str) -> AsyncIterator[Source]:
    async with psycopg_pool.AsyncConnectionPool(url, min_size=0, max_size=SIZE, open=False) as pool:
        yield pool, lambda _guard: pool.connection()


@asynccontextmanager
async def asyncpg_pooled(url: str) -> AsyncIterator[Source]:
    async with asyncpg.create_pool(url, min_size=0, max_size=SIZE) as pool:
        yield pool, lambda _guard: pool.acquire()


@asynccontextmanager
async def engine_of(url: str) -> AsyncIterator[Source]:
    driver = "asyncpg" if url.startswith("postgresql") else "asyncmy"
    engine = create_async_engine(through(url, driver), pool_size=SIZE, max_overflow=0)
    yield engine, lambda _guard: engine.connect()
    await engine.dispose()


SOURCES: Final = {
    "postgres": ours,
    "mysql": ours,
    "psycopg_pool postgres": psycopg_pooled,
    "asyncpg postgres": asyncpg_pooled,
    "SQLAlchemy postgres": engine_of,
    "SQLAlchemy mysql": engine_of,
}


RARE: Final = {"psycopg_pool postgres", "SQLAlchemy postgres"}
WAYS: Final = [pytest.param(way, marks=pytest.mark.more) if way in RARE else way for way in SOURCES]


@pytest.mark.parametrize("way", WAYS)
def test_ends_and_steps_are_told_while_tasks_hold_the_pool(way: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(f"{way.rpartition(' ')[2]}_url")

    async def story() -> None:
        async with SOURCES[way](url) as (source, take), AsyncExitStack() as held:
            guard = AsyncGuard(source, policy=Policy(lease=LEASE))
            effects: list[str] = []

            inside = asyncio.Event()

            async def is_cancelled() -> None:
                inside.set()
                await asyncio.Event().wait()

            async def pays() -> str:
                for _ in range(SIZE):
                    await held.enter_async_context(take(guard))
                await current().step("charge", lambda: asyncio.sleep(0))
                effects.append("paid")
                return "paid"

            task = asyncio.ensure_future(guard.run("refund", "pay_1", is_cancelled))
            await inside.wait()
            outcome = await guard.run("charge", "pay_1", pays)
            task.cancel()
            await asyncio.wait({task})
            await held.aclose()

            assert outcome.recorded
            again = await guard.run("charge", "pay_1", pays)
            assert (again.replayed, again.value, effects) == (True, "paid", ["paid"])
            released = await guard.store.read(address("refund", "pay_1"))
            assert released is None or released.state is State.OPEN
            await guard.aclose()

    in_time(story())


def test_a_batch_is_ended_while_tasks_hold_the_pool(mysql_url: str) -> None:
    async def story() -> None:
        async with engine_of(mysql_url) as (engine, take), AsyncExitStack() as held:
            guard = AsyncGuard(engine)
            entries = [entry(key, LEASE) for key in "ab"]
            await guard.store.claim_all(entries)
            for _ in range(SIZE):
                await held.enter_async_context(take(guard))

            assert await guard.store.close_all([Close(claim_of(one), DONE) for one in entries]) == [True, True]
            await held.aclose()
            await guard.aclose()

    in_time(story())


@pytest.mark.parametrize("server", ["postgres", "mysql"])
def test_an_end_on_the_reserved_connection_waits_for_nobodys_row(server: str, request: pytest.FixtureRequest) -> None:
    """Else it would keep all renewals waiting behind it, for as long as another transaction holds the row."""
    url = request.getfixturevalue(f"{server}_url")
    guard = Guard(with_options(url, "pool_size=1&pool_timeout=50ms"))
    store = guard.store
    held, others = entry("held", HOUR), [entry(key, HOUR) for key in "abc"]
    store.claim_all([held, *others])
    claim = claim_of(held)
    ends: list[Callable[[], object]] = [
        lambda: store.finish(claim, DONE),
        lambda: store.release(claim),
        lambda: store.release(claim, Released(attempt=1, ttl=HOUR)),
        lambda: store.extend(claim, b"\x80"),
        lambda: store.close_all([Close(claim, DONE), Close(claim_of(others[0]), DONE)]),
    ]
    with ExitStack() as stack:
        stack.callback(guard.close)
        unlock = stack.enter_context(locking(url, "held"))
        stack.enter_context(store._pool.acquire())
        for end in ends:
            with pytest.raises(
                StoreUnavailable, match=rf"charge \[key {held.address.digest}\]: another transaction holds"
            ):
                elsewhere(end)
            assert store.extend_all([claim_of(one) for one in others[1:]]) == [True, True]
        unlock()
        assert store.extend(claim, b"\x80")
        assert store.finish(claim, DONE)
        assert not store.finish(claim_of(entry("held", HOUR)), DONE)
    states = {one.address.key: one.state for one in store.browse(Query(), 10)}
    assert states == {"held": State.DONE, "a": State.DONE, "b": State.RUNNING, "c": State.RUNNING}
    store.close()
