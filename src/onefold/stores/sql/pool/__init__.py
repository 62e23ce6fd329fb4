"""Connections kept for the next operation: few, bounded, and never shared across a fork or between event loops.

A dead connection is detected by using it: then all idle ones are dropped with it, because a server that restarts ends
them all. Connections that nobody closes are closed with the pool, the process or the event loop.

A pool of our own, because no other serves all drivers: PyMySQL has none. psycopg_pool connects in threads of its own,
which a forked child does not have; its async pool, asyncpg's and asyncmy's belong to one event loop. SQLAlchemy's would
be one more package. And an interrupt must not break the lock of a pool (`slots`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from onefold._concurrency.generators import Flow, run, run_async
from onefold.stores.sql.connection import AsyncConnection, AsyncConnectionSource, Connection, ConnectionSource
from onefold.stores.sql.pool.common import PATIENCE, SIZE, inherited
from onefold.stores.sql.pool.tasks import AsyncOneOff, AsyncPool, AsyncReserve
from onefold.stores.sql.pool.threads import OneOff, Pool, Reserve

__all__ = [
    "PATIENCE",
    "SIZE",
    "AsyncOneOff",
    "AsyncPool",
    "AsyncReserve",
    "OneOff",
    "Pool",
    "Reserve",
    "inherited",
    "run_on",
    "run_on_async",
]

T = TypeVar("T")


def run_on(pool: ConnectionSource, work: Callable[[Connection], Flow[T]]) -> T:
    """Run work on a connection borrowed from the pool."""
    with pool.acquire() as conn:
        return run(work(conn), conn)


async def run_on_async(pool: AsyncConnectionSource, work: Callable[[AsyncConnection], Flow[T]]) -> T:
    async with pool.acquire() as conn:
        return await run_async(work(conn), conn)
