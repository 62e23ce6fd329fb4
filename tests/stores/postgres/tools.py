"""A wallet in PostgreSQL, and workers on each driver that move money in it: for the tests of stores and transactions.

Handlers and stories are coroutines, written once for every driver. On the blocking one nothing in them ever waits, so
that they are brought to their end by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, NoReturn, TypeVar

import asyncpg
import psycopg
import pytest
from psycopg.rows import tuple_row

from onefold import AsyncGuard, Guard, Outcome, Policy, RecordColumn
from tests.support import eventually

T = TypeVar("T")

SCHEMA = """
CREATE TABLE wallet (account text PRIMARY KEY, balance integer NOT NULL CHECK (balance >= 0));
INSERT INTO wallet VALUES ('asha', 0), ('riya', 0);
CREATE TABLE payments (
    idempotency_key text PRIMARY KEY, tenant text NOT NULL DEFAULT '', amount integer NOT NULL,
    account text REFERENCES wallet (account) DEFERRABLE INITIALLY DEFERRED
);
"""


def through_asyncpg(url: str) -> str:
    return url.replace("postgresql://", "postgresql+asyncpg://")


def ended(story: Coroutine[Any, Any, T]) -> T:
    """The end of a coroutine in which nothing waits."""
    try:
        story.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    story.close()
    raise AssertionError("a blocking driver does not wait")


class Hand:
    """Statements on a connection of whatever driver, with `$1` for the values."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def run(self, statement: str, *values: Any) -> list[Any]:
        """The rows that it gives back."""
        connection: Any = self.connection
        if isinstance(connection, psycopg.Connection):
            cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
            cursor.execute(statement.encode(), values)
            return cursor.fetchall() if cursor.description else []
        if isinstance(connection, psycopg.AsyncConnection):
            async_cursor = psycopg.AsyncRawCursor(connection, row_factory=tuple_row)
            await async_cursor.execute(statement.encode(), values)
            return await async_cursor.fetchall() if async_cursor.description else []
        return [tuple(row) for row in await connection.fetch(statement, *values)]

    @asynccontextmanager
    async def transaction(self, isolation: str | None = None) -> AsyncIterator[None]:
        """A transaction, or inside of one a savepoint, as each driver has them."""
        connection: Any = self.connection
        if isinstance(connection, psycopg.Connection):
            with connection.transaction():
                yield
        else:
            async with connection.transaction():
                yield


HandlerBody = Callable[[Hand], Awaitable[Any]]


async def add(hand: Hand, amount: int = 10) -> None:
    await hand.run("UPDATE wallet SET balance = balance + $1 WHERE account = 'asha'", amount)


class Caller(Hand):
    """Somebody with a connection of their own, and a guard that joins it."""

    def __init__(self, connection: Any, worker: Worker) -> None:
        super().__init__(connection)
        self._worker = worker

    async def within(
        self, key: str, work: HandlerBody, record: RecordColumn | None = None, **options: Any
    ) -> Outcome[Any]:
        return await self._worker.within(self, key, work, record, **options)


def never_opened() -> NoReturn:
    """The store of a guard that only joins: its records are in the caller's database."""
    raise AssertionError("within() opened the guard's own store")


class Worker:
    """One driver. `url` is where callers connect; `source` is the guard's own store."""

    # What the guard gets, for this URL.
    scheme = "postgresql"

    def __init__(self, url: str, policy: Policy | None = None, source: Any = None) -> None:
        self.url = url
        self.policy = policy
        self.source = url.replace("postgresql:", f"{self.scheme}:") if source is None else source

    def transactional(self, key: str, work: HandlerBody, *, bypass: bool = False) -> Outcome[Any]:
        raise NotImplementedError

    async def within(
        self, caller: Caller, key: str, work: HandlerBody, record: RecordColumn | None, **options: Any
    ) -> Outcome[Any]:
        raise NotImplementedError

    def play(self, story: Callable[[Worker], Coroutine[Any, Any, T]]) -> T:
        raise NotImplementedError

    def connected(self, **options: Any) -> AbstractAsyncContextManager[Caller]:
        """A connection of the caller's, as the driver opens it."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Psycopg(Worker):
    def __init__(self, url: str, policy: Policy | None = None, source: Any = None) -> None:
        super().__init__(url, policy, source)
        self.guard = Guard(self.source, policy=policy)

    def transactional(self, key: str, work: HandlerBody, *, bypass: bool = False) -> Outcome[Any]:
        @self.guard.transactional("credit", key="key")
        def credit(key: str, *, tx: Any) -> Any:
            return ended(_awaited(work(Hand(tx))))

        return credit.bypass(key) if bypass else credit.outcome(key)  # type: ignore[no-any-return]

    async def within(
        self, caller: Caller, key: str, work: HandlerBody, record: RecordColumn | None, **options: Any
    ) -> Outcome[Any]:
        def handler() -> Any:
            return ended(_awaited(work(caller)))

        return self.guard.within(caller.connection, record=record).run("credit", key, handler, **options)

    def play(self, story: Callable[[Worker], Coroutine[Any, Any, T]]) -> T:
        return ended(story(self))

    @asynccontextmanager
    async def connected(self, **options: Any) -> AsyncIterator[Caller]:
        with psycopg.connect(self.url, **options) as connection:
            yield Caller(connection, self)

    def close(self) -> None:
        self.guard.close()


class Awaiting(Worker):
    """All deliveries of one worker are in one event loop, so that connections are kept."""

    def __init__(self, url: str, policy: Policy | None = None, source: Any = None) -> None:
        super().__init__(url, policy, source)
        self.guard = AsyncGuard(self.source, policy=policy)
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)

    def transactional(self, key: str, work: HandlerBody, *, bypass: bool = False) -> Outcome[Any]:
        return self.runner.run(self.credited(key, work, bypass=bypass))

    async def credited(self, key: str, work: HandlerBody, *, bypass: bool = False) -> Outcome[Any]:
        @self.guard.transactional("credit", key="key")
        async def credit(key: str, *, tx: Any) -> Any:
            return await work(Hand(tx))

        return await (credit.bypass(key) if bypass else credit.outcome(key))  # type: ignore[call-arg]

    async def within(
        self, caller: Caller, key: str, work: HandlerBody, record: RecordColumn | None, **options: Any
    ) -> Outcome[Any]:
        async def handler() -> Any:
            return await work(caller)

        return await self.guard.within(caller.connection, record=record).run("credit", key, handler, **options)

    def play(self, story: Callable[[Worker], Coroutine[Any, Any, T]]) -> T:
        return self.runner.run(story(self))

    def close(self) -> None:
        self.runner.run(self.guard.aclose())
        self.runner.close()


class AsyncPsycopg(Awaiting):
    @asynccontextmanager
    async def connected(self, **options: Any) -> AsyncIterator[Caller]:
        async with await psycopg.AsyncConnection.connect(self.url, **options) as connection:
            yield Caller(connection, self)


class Asyncpg(Awaiting):
    scheme = "postgresql+asyncpg"

    @asynccontextmanager
    async def connected(self, **options: Any) -> AsyncIterator[Caller]:
        connection = await asyncpg.connect(self.url, **options)
        try:
            yield Caller(connection, self)
        finally:
            await connection.close()


DRIVERS: Sequence[type[Worker]] = (Psycopg, AsyncPsycopg, Asyncpg)
# psycopg's async connections differ from its others in the word `await`: they are for `make test-all`.
DAILY_DRIVERS = (Psycopg, pytest.param(AsyncPsycopg, marks=pytest.mark.more), Asyncpg)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


# What another connection sees: what is committed.


@contextmanager
def another(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def rows(url: str, statement: str) -> list[Any]:
    with another(url) as connection:
        return connection.execute(statement.encode()).fetchall()


def balance(url: str, account: str = "asha") -> int:
    return int(rows(url, f"SELECT balance FROM wallet WHERE account = '{account}'")[0][0])


def tables(url: str) -> set[str]:
    return {name for (name,) in rows(url, "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^onefold_'")}


def records(url: str) -> list[str]:
    """The keys of the records that are committed."""
    if "onefold_records" not in tables(url):
        return []
    return [key for (key,) in rows(url, "SELECT key FROM onefold_records ORDER BY key")]


def somebody_waits(url: str, count: int = 1) -> None:
    """Come back once so many connections wait for the lock of another."""
    with another(url) as connection:

        def waiting() -> bool:
            blocked = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND cardinality(pg_blocking_pids(pid)) > 0"
            ).fetchone()
            return blocked is not None and blocked[0] >= count

        assert eventually(waiting), "nobody waits"
