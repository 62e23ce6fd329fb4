"""The async face of SQLite never stops the event loop: whoever waits for another writer lets the other tasks go on.

The writer may be a task of the same loop: if the loop stood still it could not end, and the file would stay busy.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from onefold import TX, AsyncGuard, StoreUnavailable
from onefold._model import Address, Entry, Record
from onefold.stores.sqlite import AsyncSqliteStore
from onefold.stores.sqlite.connection import SqliteConnection
from tests.support import PATIENCE
from tests.wallet import connected, never_opened, records

Delivery = Callable[[AsyncGuard, Path], Awaitable[object]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.db"


@pytest.fixture
def found_busy(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once somebody has found another writer in the way."""
    found, attempt = threading.Event(), SqliteConnection._attempt

    def watched(line: SqliteConnection, work: Any, args: Any, *, together: bool) -> Any:
        try:
            return attempt(line, work, args, together=together)
        except sqlite3.OperationalError:
            found.set()
            raise

    monkeypatch.setattr(SqliteConnection, "_attempt", watched)
    return found


@asynccontextmanager
async def writing(path: Path) -> AsyncIterator[sqlite3.Connection]:
    """A connection of the application's, which has begun to write."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=0.0)
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
    finally:
        connection.close()


async def until(event: threading.Event) -> None:
    """Wait in the loop's own time: where it stands still this does not end."""
    assert await asyncio.to_thread(event.wait, PATIENCE)


async def nothing() -> None:
    pass


async def transactional(guard: AsyncGuard, path: Path) -> object:
    @guard.transactional("credit", key="message")
    async def credit(message: str, *, tx: sqlite3.Connection = TX) -> None:
        pass

    return await credit.outcome("m1")


async def claimed(guard: AsyncGuard, path: Path) -> object:
    return await guard.run("credit", "m1", nothing)


async def in_a_batch(guard: AsyncGuard, path: Path) -> object:
    async def handle(message: str) -> None:
        pass

    return await guard.run_batch("credit", ["m1", "m2"], key=str, handler=handle)


async def purged(guard: AsyncGuard, path: Path) -> object:
    return await guard.store.purge(1)


DELIVERIES: dict[str, Delivery] = {
    "transactional": transactional,
    "run": claimed,
    "run_batch": in_a_batch,
    "purge": purged,
}


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_on_a_new_file_a_writer_in_the_same_loop_is_waited_for(
    path: Path, found_busy: threading.Event, delivery: str
) -> None:
    async def deliver() -> None:
        async with AsyncGuard(f"sqlite:///{path}?busy_timeout={PATIENCE:g}s") as guard, writing(path) as other:
            waiting = asyncio.create_task(_delivered(DELIVERIES[delivery], guard, path))
            await until(found_busy)
            other.execute("COMMIT")
            await waiting

    asyncio.run(deliver())


async def _delivered(delivery: Delivery, guard: AsyncGuard, path: Path) -> None:
    await delivery(guard, path)


def entry(key: str) -> Entry:
    return Entry(address=Address("", "credit", key), token=os.urandom(16), lease=30.0, ttl=90.0)


def test_duplicates_are_answered_while_a_claim_waits_for_another_writer(
    path: Path, found_busy: threading.Event
) -> None:
    async def ask() -> None:
        store = AsyncSqliteStore(path, busy_timeout=PATIENCE)
        seen = entry("seen")
        await store.claim(seen)
        async with writing(path) as other:
            waiting = asyncio.create_task(store.claim(entry("new")))
            await until(found_busy)

            # Whoever writes may ask for them before its end.
            async with asyncio.timeout(PATIENCE / 2):
                assert isinstance(await store.read(seen.address), Record)
                assert isinstance(await store.claim(entry("seen")), Record)
                assert await store.claim(seen) is None
                assert [isinstance(one, Record) for one in await store.claim_all([entry("seen")])] == [True]

            assert not waiting.done()
            other.execute("COMMIT")
            assert await waiting is None
        await store.aclose()

    asyncio.run(ask())


def test_closing_does_not_stop_the_loop_for_a_claim_that_came_later(path: Path, found_busy: threading.Event) -> None:
    async def close() -> None:
        store = AsyncSqliteStore(path, busy_timeout=PATIENCE)
        await store.claim(entry("first"))
        async with writing(path) as other:
            begun, go_on = asyncio.Event(), threading.Event()
            close_now, loop = store.sync.close, asyncio.get_running_loop()

            def close_late() -> None:
                loop.call_soon_threadsafe(begun.set)
                assert go_on.wait(PATIENCE)
                close_now()

            store.sync.close = close_late  # type: ignore[method-assign]
            closing = asyncio.create_task(store.aclose())
            await begun.wait()
            claim = asyncio.create_task(store.claim(entry("second")))
            await asyncio.sleep(0)
            go_on.set()
            await until(found_busy)
            other.execute("COMMIT")
            assert await claim is None
            await closing
            store.sync.close = close_now  # type: ignore[method-assign]
        await store.aclose()

    asyncio.run(close())


# On connections of the caller's, which sqlite3 opens with a time-out of their own.


async def waiting_within(path: Path, connection: sqlite3.Connection) -> None:
    await AsyncGuard(never_opened).within(connection).run("credit", "m1", nothing)
    connection.execute("COMMIT")


async def waiting_for_fresh(path: Path, connection: sqlite3.Connection) -> None:
    fresh = await AsyncGuard(never_opened).within(connection).fresh("credit", ["m1"], key=str)
    assert fresh.new == ["m1"]
    connection.execute("COMMIT")


@pytest.mark.parametrize("begin", ["BEGIN", ""])
@pytest.mark.parametrize("delivery", [waiting_within, waiting_for_fresh])
def test_a_callers_connection_waits_for_a_writer_in_the_same_loop(path: Path, delivery: Any, begin: str) -> None:
    async def deliver() -> None:
        with connected(path, timeout=PATIENCE) as connection:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            connection.execute(begin)
            async with writing(path) as other:
                waiting = asyncio.create_task(delivery(path, connection))
                await asyncio.sleep(0.01)
                assert not waiting.done()
                other.execute("COMMIT")
                await waiting
            assert connection.execute("PRAGMA busy_timeout").fetchone() == (PATIENCE * 1_000,)

    asyncio.run(deliver())

    assert records(path) == ["m1"]


@pytest.mark.parametrize("begin", ["BEGIN", ""])
def test_a_delivery_that_is_cancelled_while_it_waits_on_a_callers_connection_has_taken_nothing(
    path: Path, begin: str
) -> None:
    async def deliver() -> None:
        with connected(path, timeout=PATIENCE) as connection:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            connection.execute(begin)
            async with writing(path) as other:
                waiting = asyncio.create_task(waiting_within(path, connection))
                await asyncio.sleep(0.01)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                other.execute("COMMIT")
            await waiting_within(path, connection)

    asyncio.run(deliver())

    assert records(path) == ["m1"]


def test_a_callers_connection_is_refused_after_its_own_time_out(path: Path) -> None:
    async def deliver() -> None:
        with connected(path, timeout=0.05) as connection:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            async with writing(path):
                with pytest.raises(sqlite3.OperationalError, match="locked"):
                    await waiting_within(path, connection)

    asyncio.run(deliver())


def test_a_callers_transaction_that_has_read_before_another_wrote_is_refused_at_once(path: Path) -> None:
    async def deliver() -> None:
        with connected(path, timeout=PATIENCE) as connection:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            connection.execute("BEGIN")
            connection.execute("SELECT * FROM sqlite_master").fetchall()
            async with writing(path) as other:
                other.execute("CREATE TABLE wallet (account TEXT)")
                other.execute("COMMIT")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                await asyncio.wait_for(waiting_within(path, connection), PATIENCE / 2)

    asyncio.run(deliver())


def test_a_task_that_is_cancelled_while_the_file_is_opened_leaves_nothing_behind(
    path: Path, found_busy: threading.Event
) -> None:
    async def deliver() -> None:
        async with AsyncGuard(f"sqlite:///{path}?busy_timeout={PATIENCE:g}s") as guard, writing(path) as other:
            waiting = asyncio.create_task(_delivered(transactional, guard, path))
            await until(found_busy)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            other.execute("COMMIT")

            await transactional(guard, path)

    asyncio.run(deliver())


def test_a_writer_that_does_not_end_is_refused_in_the_end(path: Path) -> None:
    async def deliver() -> None:
        async with AsyncGuard(f"sqlite:///{path}?busy_timeout=50ms") as guard, writing(path):
            for delivery in (transactional, claimed, purged):
                with pytest.raises(StoreUnavailable, match=r"has been writing for 0\.05s"):
                    await delivery(guard, path)

    asyncio.run(deliver())
