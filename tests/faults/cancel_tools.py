"""Deliveries that are cancelled at a chosen moment, on every driver that has an async face.

A moment is a suspension: each task of the event loop is counted as it waits, those that the library and the drivers
start among them, and at the n-th time the delivery is cancelled: once, several times in a row, at every turn of the
loop until it has ended, or by a cancel scope of anyio.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from itertools import product
from typing import Any, Final, NamedTuple

import anyio
import asyncmy
import asyncpg
import psycopg
import psycopg_pool
import pymysql
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from onefold import AsyncGuard, RecordColumn
from tests.stores.mysql.wallet import parameters
from tests.stores.postgres.tools import through_asyncpg
from tests.support import PATIENCE

EFFECTS: Final = "CREATE TABLE effects (message VARCHAR(60) NOT NULL)"

# A caller's own table, whose rows are records.
REQUESTS: Final = "CREATE TABLE requests (number VARCHAR(60) PRIMARY KEY, answer TEXT)"
ROW: Final = RecordColumn("requests", "number", result="answer")

# How often a delivery is cancelled; None is at every turn, until it has ended.
WAYS: Final[dict[str, int | None]] = {"once": 1, "twice": 2, "five times": 5, "at every turn": None, "by anyio": 0}

# More than any delivery has: a bound for the loops over them.
MOMENTS_MAX: Final = 400

# What others see: how many records and how many effects of a message are committed, in one look.
# On MySQL a record of ours is beside a caller's row: it is the lock.
SEEN: Final = (
    "SELECT (SELECT count(*) FROM onefold_records WHERE {key} = '{message}' AND operation NOT LIKE 'record=%') + "
    "(SELECT count(*) FROM requests WHERE number = '{message}'), "
    "(SELECT count(*) FROM effects WHERE message = '{message}')"
)


def combined(everyday: Collection[tuple[str, ...]], *choices: Collection[str]) -> list[Any]:
    """Return every combination of three choices, marked with the run that it is for.

    In `make test-all` any two choices meet: two decide, and the shortest of the three follows from them. What all three
    together may find in addition is for `make soak`.
    """
    shortest = min(range(3), key=lambda which: len(choices[which]))

    def mark(places: tuple[int, ...]) -> Any:
        decided = sum(place for which, place in enumerate(places) if which != shortest)
        return pytest.mark.more if places[shortest] == decided % len(choices[shortest]) else pytest.mark.soak

    every = [list(enumerate(choice)) for choice in choices]
    parameters: list[Any] = []
    for one in product(*every):
        places, names = zip(*one, strict=True)
        marks = () if names in everyday else mark(places)
        parameters.append(pytest.param(*names, id="-".join(names), marks=marks))
    return parameters


class Moments:
    """The suspensions of all tasks, once it is told that they matter; at one of them somebody strikes."""

    def __init__(self, at: int, way: str) -> None:
        self.at = at
        self.seen = 0
        # Cancellations that reached a task which had not ended.
        self.struck = 0
        self.caught = False
        self.way = way
        self._armed = False
        self._task: asyncio.Task[Any] | None = None
        self._scope: anyio.CancelScope | None = None

    def begin(self) -> None:
        """From here on."""
        self._armed = True

    async def run(self, story: Coroutine[Any, Any, None]) -> BaseException | None:
        """What the story ended in."""
        asyncio.get_running_loop().set_task_factory(self._counted)
        try:
            self._task = asyncio.create_task(self._scoped(story) if self.way == "by anyio" else story)
            await asyncio.wait({self._task}, timeout=PATIENCE)
            assert self._task.done(), f"cancelled {self.way} at moment {self.at}, it waits for ever"
            self._armed = False
            return asyncio.CancelledError() if self._task.cancelled() else self._task.exception()
        finally:
            asyncio.get_running_loop().set_task_factory(None)

    async def _scoped(self, story: Coroutine[Any, Any, None]) -> None:
        with anyio.CancelScope() as self._scope:
            await story
        self.caught = self._scope.cancelled_caught

    def _counted(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(Counted(work, self), loop=loop, **options)

    def suspended(self) -> None:
        """A task waits."""
        if self._armed:
            self.seen += 1
            if self.seen == self.at:
                loop = asyncio.get_running_loop()
                loop.call_soon(self._strike, loop, WAYS[self.way])

    def _strike(self, loop: asyncio.AbstractEventLoop, times: int | None) -> None:
        assert self._task is not None
        if self._scope is not None:
            self.struck += 1
            self._scope.cancel()
        elif self._task.cancel():
            self.struck += 1
            left = None if times is None else times - 1
            if left != 0:
                loop.call_soon(self._strike, loop, left)


class Counted(Coroutine[Any, Any, Any]):
    """The coroutine of a task, each of whose suspensions is a moment."""

    def __init__(self, work: Any, moments: Moments) -> None:
        self._work = work
        self._moments = moments

    def send(self, value: Any) -> Any:
        waiting = self._work.send(value)
        self._moments.suspended()
        return waiting

    def throw(self, *error: Any) -> Any:
        waiting = self._work.throw(*error)
        self._moments.suspended()
        return waiting

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._work.__await__()  # type: ignore[no-any-return]


class Environment(NamedTuple):
    """A driver at work: its guard, transactions of a caller's, and the effect of a delivery on either."""

    guard: AsyncGuard
    # A connection or session of a caller's in a transaction, which is committed at the end, or rolled back.
    begun: Callable[[], AbstractAsyncContextManager[Any]]
    credit: Callable[[Any, str], Coroutine[Any, Any, None]]


class Driver(NamedTuple):
    """One async driver, or one way to use it."""

    # The fixture that has the address of an empty database.
    database: str
    opened: Callable[[str], AbstractAsyncContextManager[Environment]]

    def seen(self, address: str, message: str) -> tuple[int, int]:
        """Records and effects of this message, as another connection sees them."""
        statement = SEEN.format(key="`key`" if self.database == "mysql_url" else "key", message=message)
        with closing(connected(self.database, address)) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            return tuple(map(int, cursor.fetchone()))  # type: ignore[return-value]


def connected(database: str, address: str) -> Any:
    """Another connection, of a driver that blocks."""
    if database == "mysql_url":
        return pymysql.connect(**parameters(address))
    return psycopg.connect(address) if database == "postgres_url" else sqlite3.connect(address, timeout=PATIENCE)


def prepare(database: str, address: str) -> None:
    with closing(connected(database, address)) as connection:
        for statement in (EFFECTS, REQUESTS):
            connection.cursor().execute(statement)
        connection.commit()


def _insert(mark: str) -> str:
    return f"INSERT INTO effects VALUES ({mark})"


async def _credit_psycopg(tx: Any, message: str) -> None:
    await tx.execute(_insert("%s"), (message,))


async def _credit_asyncpg(tx: Any, message: str) -> None:
    await tx.execute(_insert("$1"), message)


async def _credit_asyncmy(tx: Any, message: str) -> None:
    async with tx.cursor() as cursor:
        await cursor.execute(_insert("%s"), (message,))


async def _credit_sqlite(tx: Any, message: str) -> None:
    await asyncio.sleep(0)
    tx.execute(_insert("?"), (message,))


async def _credit_sqlalchemy(tx: Any, message: str) -> None:
    await tx.execute(text(_insert(":message")), {"message": message})


@asynccontextmanager
async def _psycopg(url: str) -> AsyncIterator[Environment]:
    @asynccontextmanager
    async def begun() -> AsyncIterator[Any]:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection, connection.transaction():
            yield connection

    async with AsyncGuard(url) as guard:
        yield Environment(guard, begun, _credit_psycopg)


@asynccontextmanager
async def _psycopg_pool(url: str) -> AsyncIterator[Environment]:
    opened = psycopg_pool.AsyncConnectionPool(url, min_size=1, max_size=2, open=False, timeout=PATIENCE)
    async with opened as pool, AsyncGuard(pool) as guard:
        # As most people have it: psycopg begins by itself, and the pool commits or rolls back.
        yield Environment(guard, pool.connection, _credit_psycopg)


@asynccontextmanager
async def _asyncpg(url: str) -> AsyncIterator[Environment]:
    @asynccontextmanager
    async def begun() -> AsyncIterator[Any]:
        connection = await asyncpg.connect(url)
        try:
            async with connection.transaction():
                yield connection
        finally:
            await connection.close()

    async with AsyncGuard(through_asyncpg(url)) as guard:
        yield Environment(guard, begun, _credit_asyncpg)


@asynccontextmanager
async def _asyncpg_pool(url: str) -> AsyncIterator[Environment]:
    async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool, AsyncGuard(pool) as guard:

        @asynccontextmanager
        async def begun() -> AsyncIterator[Any]:
            async with pool.acquire() as connection, connection.transaction():
                yield connection

        yield Environment(guard, begun, _credit_asyncpg)


@asynccontextmanager
async def _asyncmy(url: str) -> AsyncIterator[Environment]:
    @asynccontextmanager
    async def begun() -> AsyncIterator[Any]:
        connection = await asyncmy.connect(**parameters(url))
        try:
            await connection.begin()
            yield connection
            await connection.commit()
        finally:
            await connection.ensure_closed()

    async with AsyncGuard(url) as guard:
        yield Environment(guard, begun, _credit_asyncmy)


@asynccontextmanager
async def _sqlite(path: str) -> AsyncIterator[Environment]:
    @asynccontextmanager
    async def begun() -> AsyncIterator[Any]:
        with closing(sqlite3.connect(path, timeout=PATIENCE)) as connection, connection:
            yield connection

    async with AsyncGuard(f"sqlite:///{path}") as guard:
        yield Environment(guard, begun, _credit_sqlite)


def _sqlalchemy(driver: str, *, session: bool = False) -> Callable[[str], AbstractAsyncContextManager[Environment]]:
    @asynccontextmanager
    async def opened(address: str) -> AsyncIterator[Environment]:
        url = f"{driver}:///{address}" if "sqlite" in driver else f"{driver}:{address.partition(':')[2]}"
        engine = create_async_engine(url)
        makes: Any = async_sessionmaker(engine) if session else engine
        try:
            async with AsyncGuard(makes) as guard:
                yield Environment(guard, makes.begin, _credit_sqlalchemy)
        finally:
            await engine.dispose()

    return opened


DRIVERS: Final[dict[str, Driver]] = {
    "psycopg": Driver("postgres_url", _psycopg),
    "psycopg, a pool of the caller's": Driver("postgres_url", _psycopg_pool),
    "asyncpg": Driver("postgres_url", _asyncpg),
    "asyncpg, a pool of the caller's": Driver("postgres_url", _asyncpg_pool),
    "asyncmy": Driver("mysql_url", _asyncmy),
    "sqlite": Driver("path", _sqlite),
    "sqlalchemy, psycopg": Driver("postgres_url", _sqlalchemy("postgresql+psycopg")),
    "sqlalchemy, asyncpg": Driver("postgres_url", _sqlalchemy("postgresql+asyncpg")),
    "sqlalchemy, asyncmy": Driver("mysql_url", _sqlalchemy("mysql+asyncmy")),
    "sqlalchemy, aiosqlite": Driver("path", _sqlalchemy("sqlite+aiosqlite")),
    "sqlalchemy, sessions on psycopg": Driver("postgres_url", _sqlalchemy("postgresql+psycopg", session=True)),
    "sqlalchemy, sessions on asyncpg": Driver("postgres_url", _sqlalchemy("postgresql+asyncpg", session=True)),
}

# What is cancelled: it says when it begins to matter, and delivers one message.
Story = Callable[[Environment, str, Callable[[], None]], Coroutine[Any, Any, None]]


async def transactional(environment: Environment, message: str, begin: Callable[[], None]) -> None:
    await _transacted(environment, message, begin, None)


async def transactional_row(environment: Environment, message: str, begin: Callable[[], None]) -> None:
    await _transacted(environment, message, begin, ROW)


async def _transacted(
    environment: Environment, message: str, begin: Callable[[], None], record: RecordColumn | None
) -> None:
    @environment.guard.transactional("credit", key="message", record=record, fingerprint=None)
    async def credit(message: str, *, tx: Any) -> str:
        await environment.credit(tx, message)
        return "credited"

    begin()
    assert await credit(message) == "credited"  # type: ignore[call-arg]


async def within(
    environment: Environment, message: str, begin: Callable[[], None], record: RecordColumn | None = None
) -> None:
    async with environment.begun() as connection:
        begin()
        await _credited_within(environment, connection, message, record)


async def within_row(environment: Environment, message: str, begin: Callable[[], None]) -> None:
    await within(environment, message, begin, ROW)


async def within_commits_all_the_same(
    environment: Environment, message: str, begin: Callable[[], None], record: RecordColumn | None = None
) -> None:
    """A caller who has a time-out around the delivery, and goes on. A commit that is refused tells them."""
    with suppress(Exception):
        async with environment.begun() as connection:
            begin()
            with suppress(asyncio.CancelledError):
                await _credited_within(environment, connection, message, record)


async def within_row_commits_all_the_same(environment: Environment, message: str, begin: Callable[[], None]) -> None:
    await within_commits_all_the_same(environment, message, begin, ROW)


async def _credited_within(
    environment: Environment, connection: Any, message: str, record: RecordColumn | None
) -> None:
    async def handler() -> str:
        await environment.credit(connection, message)
        return "credited"

    outcome = await environment.guard.within(connection, record=record).run("credit", message, handler)
    assert outcome.value == "credited"


async def fresh(environment: Environment, message: str, begin: Callable[[], None]) -> None:
    async with environment.begun() as connection:
        begin()
        found = await environment.guard.within(connection).fresh("credit", [message, f"{message}-2"], key=str)
        for new in found.new:
            await environment.credit(connection, new)


async def fresh_commits_all_the_same(environment: Environment, message: str, begin: Callable[[], None]) -> None:
    with suppress(Exception):
        async with environment.begun() as connection:
            begin()
            new: Any = ()
            with suppress(asyncio.CancelledError):
                new = (
                    await environment.guard.within(connection).fresh("credit", [message, f"{message}-2"], key=str)
                ).new
            for one in new:
                await environment.credit(connection, one)
