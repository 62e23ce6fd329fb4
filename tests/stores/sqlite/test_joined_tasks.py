"""Transactions on SQLite in tasks of one event loop: several at once, and some that are cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import sqlite3
import threading
from pathlib import Path

import pytest

from onefold import TX, AsyncGuard
from tests.support import PATIENCE
from tests.wallet import Awaiting, Blocking, add, balance, connected, never_opened, records

WORKER_TYPES = pytest.mark.parametrize("worker_type", [Blocking, Awaiting])


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}?busy_timeout=30s&sync=normal"


def test_tasks_that_wait_inside_their_transactions_credit_each_message_once(url: str, path: Path) -> None:
    async def deliver() -> list[bool]:
        async with AsyncGuard(url) as guard:

            @guard.transactional("credit", key="message")
            async def credit(message: str, *, tx: sqlite3.Connection = TX) -> None:
                await asyncio.sleep(0)
                add(tx)
                await asyncio.sleep(0)

            outcomes = await asyncio.gather(*(credit.outcome(f"m{number % 14}") for number in range(20)))
            return [outcome.replayed for outcome in outcomes]

    assert sorted(asyncio.run(deliver())) == [False] * 14 + [True] * 6
    assert (balance(path), len(records(path))) == (140, 14)


def test_tasks_that_share_the_callers_transaction_credit_each_message_once(path: Path) -> None:
    async def deliver(connection: sqlite3.Connection) -> None:
        within = AsyncGuard(never_opened).within(connection)

        async def credit() -> None:
            await asyncio.sleep(0)
            add(connection)

        await asyncio.gather(*(within.run("credit", f"m{number % 14}", credit) for number in range(20)))

    with connected(path) as connection, connection:
        asyncio.run(deliver(connection))

    assert (balance(path), len(records(path))) == (140, 14)


def test_tasks_with_connections_of_their_own_credit_each_message_once(path: Path) -> None:
    async def credit(guard: AsyncGuard, message: str) -> None:
        with connected(path, timeout=0.0, isolation_level=None) as connection:
            while True:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    break
                except sqlite3.OperationalError:
                    # Waiting in the driver would stop the loop, and with it the task that is writing.
                    await asyncio.sleep(0.001)

            async def work() -> None:
                await asyncio.sleep(0)
                add(connection)

            await guard.within(connection).run("credit", message, work)
            connection.execute("COMMIT")

    async def deliver() -> None:
        guard = AsyncGuard(never_opened)
        await asyncio.gather(*(credit(guard, f"m{number % 14}") for number in range(20)))

    asyncio.run(deliver())

    assert (balance(path), len(records(path))) == (140, 14)


@pytest.mark.parametrize("where", ["in its handler", "waiting for its turn"])
def test_a_task_that_is_cancelled_leaves_nothing_behind_and_the_next_delivery_runs(
    url: str, path: Path, kept_waiting: threading.Event, writing: sqlite3.Connection, where: str
) -> None:
    writing.execute("COMMIT")

    async def deliver() -> bool:
        inside = asyncio.Event()
        async with AsyncGuard(url) as guard:

            @guard.transactional("credit", key="message")
            async def credit(message: str, *, patient: bool, tx: sqlite3.Connection = TX) -> None:
                add(tx)
                if patient:
                    inside.set()
                    await asyncio.Event().wait()

            await credit("earlier", patient=False)
            if where == "waiting for its turn":
                writing.execute("BEGIN IMMEDIATE")
            task = asyncio.create_task(credit("m1", patient=True), context=contextvars.Context())
            await (inside.wait() if where == "in its handler" else asyncio.to_thread(kept_waiting.wait, PATIENCE))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            if writing.in_transaction:
                writing.execute("COMMIT")
            before = records(path)
            outcome = await credit.outcome("m1", patient=False)
            return before == ["earlier"] and not outcome.replayed

    assert asyncio.run(deliver())
    assert (balance(path), records(path)) == (20, ["earlier", "m1"])
