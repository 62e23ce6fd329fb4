"""Every driver's connection in one hand, so that whatever ends a transaction can be tried on each of them.

Work is a coroutine that is written once. On a blocking driver nothing in it ever waits, and it is brought to its end by
hand.
"""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import asyncmy
import asyncpg
import psycopg
import pymysql
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from onefold import AsyncGuard, Guard, Outcome, RecordColumn
from onefold.stores.mysql import joined as mysql_joined
from onefold.stores.postgres import joined as postgres_joined
from tests.stores.mysql.wallet import parameters
from tests.stores.postgres.tools import ended, through_asyncpg

T = TypeVar("T")

CREDIT = "UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'"


class Hand:
    """A connection of whatever driver."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def sql(self, statement: str) -> Any:
        root = type(self.connection).__module__.partition(".")[0]
        if root == "sqlalchemy":
            return await maybe_await(self.connection.execute(text(statement)))
        if root == "django":
            with self.connection.cursor() as cursor:
                return cursor.execute(statement)
        if root == "pymysql":
            with self.connection.cursor() as cursor:
                return cursor.execute(statement)
        if root == "asyncmy" or isinstance(self.connection, asyncmy.connection.Connection):
            async with self.connection.cursor() as cursor:
                return await cursor.execute(statement)
        if isinstance(self.connection, pymysql.connections.Connection):
            with self.connection.cursor() as cursor:
                return cursor.execute(statement)
        return await maybe_await(self.connection.execute(statement))

    async def call(self, method: str) -> None:
        await maybe_await(getattr(self.connection, method)())

    async def raw(self, method: str) -> None:
        """On the driver's own connection, behind the back of the library above."""
        connection = self.connection
        if type(connection).__module__.startswith("django"):
            getattr(connection.connection, method)()
        elif hasattr(connection, "run_sync"):
            await connection.run_sync(lambda held: getattr(_inner(held), method)())
        else:
            getattr(_inner(connection), method)()


def _inner(held: Any) -> Any:
    connection = held.connection() if callable(held.connection) else held
    return connection.connection


async def maybe_await(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


HandlerBody = Callable[[Hand], Awaitable[Any]]


class Driver(NamedTuple):
    """How a caller connects by a driver, and what a guard of its own takes."""

    name: str
    database: str
    is_async: bool
    connect: Callable[[str], Any]
    source: Callable[[str], Any]
    begin: tuple[str, ...] = ()

    @property
    def library(self) -> str:
        return self.name.partition(" ")[0]


def _mysql(url: str) -> Any:
    # A context for TLS is slow to make, and the server has none.
    return pymysql.connect(**parameters(url), ssl_disabled=True)


async def _asyncmy(url: str) -> Any:
    return await asyncmy.connect(**parameters(url))


def _as(url: str, scheme: str) -> str:
    return f"{scheme}:{url.partition(':')[2]}"


def _sqlite(url: str) -> Any:
    return sqlite3.connect(url.removeprefix("sqlite:///"))


def _opened(engine: Any, kind: str) -> Any:
    return engine.connect() if kind == "connection" else _source(engine, kind)()


def _source(engine: Any, kind: str) -> Any:
    if kind == "connection":
        return engine
    return async_sessionmaker(engine) if hasattr(engine, "sync_engine") else sessionmaker(engine)


def _through_sqlalchemy(database: str, scheme: str, kind: str, create: Callable[..., Any]) -> Driver:
    options: dict[str, Any] = {"connect_args": {"ssl_disabled": True}} if scheme.endswith("pymysql") else {}

    def source(url: str) -> Any:
        # As many as deliver at once: further ones would be opened and closed for each delivery.
        return _source(create(_as(url, scheme), pool_size=8, **options), kind)

    def connect(url: str) -> Any:
        return _opened(create(_as(url, scheme), **options), kind)

    is_async = create is create_async_engine
    return Driver(f"sqlalchemy {scheme} {kind}", database, is_async, connect, source)


DRIVERS = (
    Driver("sqlite3", "sqlite", False, _sqlite, str),
    Driver("sqlite3 async", "sqlite", True, _sqlite, str),
    Driver("psycopg", "postgres", False, psycopg.connect, str),
    Driver("psycopg async", "postgres", True, psycopg.AsyncConnection.connect, str),
    Driver("asyncpg", "postgres", True, asyncpg.connect, through_asyncpg, ("BEGIN",)),
    Driver("pymysql", "mariadb", False, _mysql, str),
    Driver("asyncmy", "mariadb", True, _asyncmy, str),
    *(
        _through_sqlalchemy(database, scheme, kind, create_engine)
        for database, scheme in (
            ("sqlite", "sqlite"),
            ("postgres", "postgresql+psycopg"),
            ("mariadb", "mysql+pymysql"),
        )
        for kind in ("connection", "session")
    ),
    *(
        _through_sqlalchemy(database, scheme, kind, create_async_engine)
        for database, scheme, kind in (
            ("sqlite", "sqlite+aiosqlite", "connection"),
            ("postgres", "postgresql+psycopg_async", "connection"),
            ("postgres", "postgresql+asyncpg", "connection"),
            ("postgres", "postgresql+asyncpg", "session"),
            ("mariadb", "mysql+asyncmy", "connection"),
        )
    ),
)


class Bench:
    """One driver on one database: deliveries in transactions of the guard's, and in those of a caller."""

    def __init__(self, driver: Driver, url: str) -> None:
        self.driver = driver
        self._url = url
        source = driver.source(url)
        self._engine = getattr(source, "kw", {}).get("bind", source)
        self._guard: Any = AsyncGuard(source) if driver.is_async else Guard(source)
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop) if driver.is_async else None

    def play(self, story: Coroutine[Any, Any, T]) -> T:
        return ended(story) if self._runner is None else self._runner.run(story)

    async def transactional(self, key: str, work: HandlerBody) -> Outcome[Any]:
        if not self.driver.is_async:

            @self._guard.transactional("credit", key="key")  # type: ignore[untyped-decorator]
            def credit(key: str, *, tx: Any) -> Any:
                return ended(_coroutine(work(Hand(tx))))

            return credit.outcome(key)  # type: ignore[no-any-return]

        @self._guard.transactional("credit", key="key")  # type: ignore[untyped-decorator]
        async def credit_later(key: str, *, tx: Any) -> Any:
            return await work(Hand(tx))

        return await credit_later.outcome(key)  # type: ignore[no-any-return]

    async def within(self, hand: Hand, key: str, work: HandlerBody, record: RecordColumn | None = None) -> Outcome[Any]:
        joined = self._guard.within(hand.connection, record=record)
        if self.driver.is_async:
            return await joined.run("credit", key, lambda: work(hand))  # type: ignore[no-any-return]
        return joined.run("credit", key, lambda: ended(_coroutine(work(hand))))  # type: ignore[no-any-return]

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Hand]:
        connection = self.driver.connect(self._url)
        hand = Hand(await maybe_await(connection))
        if self.driver.library == "psycopg":
            # From its second delivery on, a connection knows by itself whether its transaction is still open.
            await self.within(hand, "first of its connection", _nothing)
            await hand.call("rollback")
        for statement in self.driver.begin:
            await hand.sql(statement)
        try:
            yield hand
        finally:
            with suppress(pymysql.Error):
                # PyMySQL minds what is closed already.
                await maybe_await(getattr(hand.connection, "ensure_closed", hand.connection.close)())
            engine = getattr(connection, "engine", None) or getattr(connection, "bind", None)
            if engine is not None and hasattr(engine, "dispose"):
                await maybe_await(engine.dispose())

    async def commit(self, hand: Hand) -> None:
        await (hand.sql("COMMIT") if self.driver.begin else hand.call("commit"))

    def close(self) -> None:
        async def closed() -> None:
            await maybe_await(self._guard.aclose() if self.driver.is_async else self._guard.close())
            if hasattr(self._engine, "dispose"):
                await maybe_await(self._engine.dispose())

        self.play(closed())
        if self._runner is not None:
            self._runner.close()


async def _nothing(_: Hand) -> None:
    """Do nothing, and return nothing."""


async def _coroutine(work: Awaitable[T]) -> T:
    return await work


@contextmanager
def bench(driver: Driver, url: str) -> Iterator[Bench]:
    # The tests empty a database that they have used before.
    postgres_joined.looked.clear()
    mysql_joined.looked.clear()
    made = Bench(driver, url)
    try:
        yield made
    finally:
        made.close()
