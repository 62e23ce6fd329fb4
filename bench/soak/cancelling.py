"""Workers whose deliveries are tasks, and are cancelled at random: once, several times, at every turn, or by anyio.

Each has several deliveries under way in one event loop, on one async driver, in transactional mode. What was cancelled
is not acknowledged, and comes again. Whoever waits for ever after a cancellation, or swallows it, is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import anyio

from bench.soak.plan import Message
from bench.soak.workers import HANDLER_PAUSE, OPERATION, Desk, Verdict
from onefold import TX, AsyncGuard, Outcome, StoreUnavailable

# Half of all deliveries are cancelled, somewhere in the time that one usually takes.
CANCELLED: Final = 0.5
WITHIN_SECONDS: Final = 0.012

# So many of them by a scope of anyio's, which cancels at every turn; the others by asyncio.
BY_ANYIO: Final = 0.3

# In how many turns of the loop a delivery is cancelled; None is in each until it has ended.
TURNS: Final = (1, 1, 2, 5, None)

# After a cancellation, whoever has not ended by then waits for ever.
ENDS_WITHIN: Final = 60.0

Delivers = Callable[[Message], Awaitable[Outcome[None]]]


class Driver(NamedTuple):
    """An async driver: where its database is, what its guard gets, and how its statements are sent."""

    environment: str
    source: Callable[[str], Any]
    execute: Callable[[Any, str, Sequence[Any]], Awaitable[object]]
    # Imported before the workers are forked: eight times the same would take longer than a short run.
    modules: tuple[str, ...]


async def _numbered(tx: Any, statement: str, values: Sequence[Any]) -> None:
    for number in range(len(values)):
        statement = statement.replace("?", f"${number + 1}", 1)
    await tx.execute(statement, *values)


async def _marked(tx: Any, statement: str, values: Sequence[Any]) -> None:
    await tx.execute(statement.replace("?", "%s"), values)


async def _by_cursor(tx: Any, statement: str, values: Sequence[Any]) -> None:
    async with tx.cursor() as cursor:
        await cursor.execute(statement.replace("?", "%s"), values)


async def _blocking(tx: Any, statement: str, values: Sequence[Any]) -> None:
    tx.execute(statement, values)


async def _named(tx: Any, statement: str, values: Sequence[Any]) -> None:
    from sqlalchemy import text

    named = {f"v{number}": value for number, value in enumerate(values)}
    for name in named:
        statement = statement.replace("?", f":{name}", 1)
    await tx.execute(text(statement), named)


def _bare(url: str) -> str:
    """Without the options of our own."""
    return url.partition("?")[0]


def _engine(scheme: str) -> Callable[[str], Any]:
    def made(url: str) -> Any:
        from sqlalchemy.ext.asyncio import create_async_engine

        # Writers of one file wait for each other as long as they do in our own store.
        options = {"connect_args": {"timeout": ENDS_WITHIN}} if "sqlite" in scheme else {}
        return create_async_engine(f"{scheme}:{_bare(url).partition(':')[2]}", **options)

    return made


POSTGRES: Final = "onefold.stores.postgres"
SQLALCHEMY: Final = ("sqlalchemy.ext.asyncio", "onefold.stores.sqlalchemy", "onefold.stores.sql.orm")

DRIVERS: Final[dict[str, Driver]] = {
    "psycopg": Driver("postgres", _bare, _marked, (POSTGRES, "onefold.stores.postgres.psycopg.pool")),
    "asyncpg": Driver(
        "postgres",
        lambda url: _bare(url).replace("postgresql:", "postgresql+asyncpg:"),
        _numbered,
        (POSTGRES, "onefold.stores.postgres.asyncpg.pool"),
    ),
    "asyncmy": Driver(
        "mariadb", lambda url: url, _by_cursor, ("onefold.stores.mysql", "onefold.stores.mysql.asyncmy.connection")
    ),
    "sqlite": Driver("sqlite", lambda url: url, _blocking, ("onefold.stores.sqlite", "onefold.stores.sqlite.joined")),
    "sqlalchemy+psycopg": Driver("postgres", _engine("postgresql+psycopg"), _named, (*SQLALCHEMY, "psycopg")),
    "sqlalchemy+asyncpg": Driver("postgres", _engine("postgresql+asyncpg"), _named, (*SQLALCHEMY, "asyncpg")),
    "sqlalchemy+asyncmy": Driver("mariadb", _engine("mysql+asyncmy"), _named, (*SQLALCHEMY, "asyncmy")),
    "sqlalchemy+aiosqlite": Driver("sqlite", _engine("sqlite+aiosqlite"), _named, (*SQLALCHEMY, "aiosqlite")),
}


def preload(driver: str) -> None:
    """Import what the workers need; `onefold` itself imports its stores on use."""
    for module in DRIVERS[driver].modules:
        importlib.import_module(module)


# From here on: inside the process.


def work(desk: Desk, inbox: Connection, others: Sequence[Connection]) -> None:
    """One worker: deliver, cancel, acknowledge, until the queue is closed or somebody kills us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()
    # It tells of each connection whose polite end was cancelled, too.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    with contextlib.suppress(EOFError, BrokenPipeError):
        asyncio.run(_consume(desk, inbox))


async def _consume(desk: Desk, inbox: Connection) -> None:
    loop, closed, under_way = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()
    async with _delivering(desk) as deliver:

        async def answer(number: int, message: Message) -> None:
            inbox.send((number, await _verdict(deliver, message)))

        def receive() -> None:
            try:
                while inbox.poll():
                    task = loop.create_task(answer(*inbox.recv()))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
            except EOFError:
                closed.set()

        loop.add_reader(inbox.fileno(), receive)
        await closed.wait()


@asynccontextmanager
async def _delivering(desk: Desk) -> AsyncIterator[Delivers]:
    driver = DRIVERS[desk.plan.driver]
    async with AsyncGuard(driver.source(desk.url), policy=desk.plan.policy) as guard:

        @guard.transactional(OPERATION, key="id")
        async def credit(id: str, account: str, amount: int, *, tx: Any = TX) -> None:  # noqa: A002
            await driver.execute(tx, "UPDATE wallet SET balance = balance + ? WHERE account = ?", [amount, account])
            await asyncio.sleep(random.uniform(0, HANDLER_PAUSE))
            await driver.execute(tx, "INSERT INTO calls VALUES (?, ?, ?)", [id, id, amount])

        yield lambda message: credit.outcome(*message)


async def _verdict(deliver: Delivers, message: Message) -> Verdict:
    began = time.monotonic()
    kind, _, detail = (await _became(deliver, message)).partition(": ")
    return Verdict(kind, began, time.monotonic(), detail)


async def _became(deliver: Delivers, message: Message) -> str:
    """What became of one delivery, which somebody perhaps has cancelled."""
    scope = anyio.CancelScope() if random.random() < BY_ANYIO else None
    task = asyncio.create_task(_delivered(deliver, message, scope))
    struck = random.random() < CANCELLED and await _strike(task, scope)
    await asyncio.wait({task}, timeout=ENDS_WITHIN)
    if not task.done():
        return "error: it was cancelled, and waits for ever" if struck else "error: it waits for ever"
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    if isinstance(error, StoreUnavailable):
        return f"busy: {error}"
    if error is not None:
        return f"error: {error!r}"
    # A scope of anyio's finds nothing to cancel in the last turn of a delivery.
    if struck and scope is None:
        return "error: it was cancelled, and the cancellation was swallowed"
    return "replayed" if task.result().replayed else "ran"


async def _delivered(deliver: Delivers, message: Message, scope: anyio.CancelScope | None) -> Outcome[None]:
    if scope is None:
        return await deliver(message)
    with scope:
        return await deliver(message)
    # The scope has caught it.
    raise asyncio.CancelledError


async def _strike(task: asyncio.Task[Any], scope: anyio.CancelScope | None) -> bool:
    """Cancel it after a moment; False: it had ended before."""
    await asyncio.wait({task}, timeout=random.uniform(0, WITHIN_SECONDS))
    if scope is not None:
        scope.cancel()
        return True
    turns, struck = random.choice(TURNS), False
    ends = time.monotonic() + ENDS_WITHIN
    while turns != 0 and time.monotonic() < ends and task.cancel():
        struck = True
        turns = None if turns is None else turns - 1
        await asyncio.sleep(0)
    return struck
