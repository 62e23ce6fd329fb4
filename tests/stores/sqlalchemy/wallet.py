"""A wallet in a database of each kind, and desks on which SQLAlchemy's connections and sessions lie, sync and async.

Work is written in sync words. An async desk runs it by `run_sync`, so that each promise is written once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from onefold import AsyncGuard, Fresh, Guard, Outcome, Policy, RecordColumn
from onefold.stores.base import Record
from onefold.stores.sql.records import TABLE
from tests.stores.mysql import wallet as mysql_wallet
from tests.support import eventually
from tests.wallet import never_opened

T = TypeVar("T")

Held = Connection | Session
HandlerBody = Callable[[Any], Any]

# For each database: the fixture with its URL, a blocking driver, and async ones.
DATABASES = {
    "sqlite": ("path", "sqlite", ("sqlite+aiosqlite",)),
    "postgres": ("postgres_url", "postgresql+psycopg", ("postgresql+psycopg", "postgresql+asyncpg")),
    "mariadb": ("mysql_url", "mysql+pymysql", ("mysql+asyncmy",)),
}

SCHEMA = (
    "CREATE TABLE wallet (account VARCHAR(50) PRIMARY KEY, balance INTEGER NOT NULL, CHECK (balance >= 0))",
    "INSERT INTO wallet VALUES ('asha', 0)",
    "CREATE TABLE payments (idempotency_key VARCHAR(50) PRIMARY KEY, tenant VARCHAR(50) NOT NULL, amount INTEGER)",
)


class Ledger:
    """What others see of the database: what is committed."""

    def __init__(self, database: str, address: str) -> None:
        self.database = database
        self.address = address
        self._engine = create_engine(self.url(DATABASES[database][1]))
        with self._engine.begin() as connection:
            for statement in SCHEMA if database != "sqlite" else ():
                connection.exec_driver_sql(statement)

    def url(self, driver: str) -> str:
        if self.database == "sqlite":
            return f"{driver}:///{self.address}"
        return f"{driver}:{self.address.partition(':')[2]}"

    def engine(self, **options: Any) -> Engine:
        return create_engine(self.url(DATABASES[self.database][1]), **options)

    def async_engine(self, driver: str | None = None, **options: Any) -> AsyncEngine:
        return create_async_engine(self.url(driver or DATABASES[self.database][2][-1]), **options)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with self._engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(statement))]

    def execute(self, statement: str) -> None:
        with self._engine.begin() as connection:
            connection.execute(text(statement))

    def tables(self) -> set[str]:
        with self._engine.connect() as connection:
            return set(inspect(connection).get_table_names())

    @property
    def balance(self) -> int:
        return int(self.rows("SELECT balance FROM wallet WHERE account = 'asha'")[0][0])

    @property
    def records(self) -> list[str]:
        """The keys of the records."""
        if TABLE not in self.tables():
            return []
        keys = [key for (key,) in self.rows(f"SELECT {self.key} FROM {TABLE} ORDER BY 1")]
        return [key.decode() if isinstance(key, bytes) else key for key in keys]

    @property
    def key(self) -> str:
        return "`key`" if self.database == "mariadb" else "key"

    def close(self) -> None:
        self._engine.dispose()


def add(held: Held, amount: int = 10) -> None:
    held.execute(text("UPDATE wallet SET balance = balance + :amount WHERE account = 'asha'"), {"amount": amount})


def pay(held: Held, key: str, tenant: str = "") -> str:
    held.execute(
        text("INSERT INTO payments (idempotency_key, tenant, amount) VALUES (:key, :tenant, 500)"),
        {"key": key, "tenant": tenant},
    )
    return "paid"


WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND cardinality(pg_blocking_pids(pid)) > 0"
)


def somebody_waits(ledger: Ledger) -> None:
    """Come back once a transaction waits for another."""

    def waiting() -> bool:
        if ledger.database == "mariadb":
            return mysql_wallet.transactions_waiting(ledger.rows) > 0
        return bool(ledger.rows(WAITING)[0][0])

    assert eventually(waiting), "nobody waits"


class Desk:
    """A connection or a session of a caller's who blocks."""

    def __init__(self, engine: Engine, kind: str, *, autocommit: bool = False) -> None:
        self.engine = engine
        self.guard = Guard(never_opened)
        self.x: Any = self._opened(kind, "AUTOCOMMIT" if autocommit else None)

    def _opened(self, kind: str, isolation: str | None) -> Held:
        engine = self.engine if isolation is None else self.engine.execution_options(isolation_level=isolation)
        return engine.connect() if kind == "connection" else Session(engine)

    @property
    def sync_engine(self) -> Engine:
        return self.engine

    def do(self, work: Callable[[Any], T]) -> T:
        """Work of the caller's, in the same transaction."""
        return work(self.x)

    def within(self, key: Any, work: HandlerBody, record: RecordColumn | None = None, **options: Any) -> Outcome[Any]:
        return self.guard.within(self.x, record=record).run("credit", key, lambda: work(self.x), **options)

    def fresh(self, messages: list[str]) -> Fresh[str]:
        return self.guard.within(self.x).fresh("credit", messages, key=str)

    def commit(self) -> None:
        self.x.commit()

    def rollback(self) -> None:
        self.x.rollback()

    def close(self) -> None:
        self.x.close()
        self.engine.dispose()
        self.guard.close()

    @contextmanager
    def savepoint(self) -> Iterator[Any]:
        """A savepoint that the block may roll back."""
        yield self.x.begin_nested()

    def roll_back_to(self, savepoint: Any) -> None:
        savepoint.rollback()


class AsyncDesk:
    """The same for a caller who awaits, in an event loop of the desk's own."""

    def __init__(self, engine: AsyncEngine, kind: str, *, autocommit: bool = False) -> None:
        self.engine = engine
        self.guard = AsyncGuard(never_opened)
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.x: Any = self._runner.run(self._opened(kind, "AUTOCOMMIT" if autocommit else None))

    async def _opened(self, kind: str, isolation: str | None) -> Any:
        engine = self.engine if isolation is None else self.engine.execution_options(isolation_level=isolation)
        return await engine.connect() if kind == "connection" else AsyncSession(engine)

    @property
    def sync_engine(self) -> Engine:
        return self.engine.sync_engine

    def run(self, awaitable: Awaitable[T]) -> T:
        async def in_loop() -> T:
            return await awaitable

        return self._runner.run(in_loop())

    def do(self, work: Callable[[Any], T]) -> T:
        found: T = self.run(self.x.run_sync(work))
        return found

    def within(self, key: Any, work: HandlerBody, record: RecordColumn | None = None, **options: Any) -> Outcome[Any]:
        async def handler() -> Any:
            return await self.x.run_sync(work)

        return self.run(self.guard.within(self.x, record=record).run("credit", key, handler, **options))

    def fresh(self, messages: list[str]) -> Fresh[str]:
        return self.run(self.guard.within(self.x).fresh("credit", messages, key=str))

    def commit(self) -> None:
        self.run(self.x.commit())

    def rollback(self) -> None:
        self.run(self.x.rollback())

    def close(self) -> None:
        self.run(self.x.close())
        self.run(self.engine.dispose())
        self.run(self.guard.aclose())
        self._runner.close()

    @contextmanager
    def savepoint(self) -> Iterator[Any]:
        yield self.do(lambda held: held.begin_nested())

    def roll_back_to(self, savepoint: Any) -> None:
        self.do(lambda _: savepoint.rollback())


AnyDesk = Desk | AsyncDesk


def desk(ledger: Ledger, driver: str, kind: str, **options: Any) -> AnyDesk:
    """A desk on which a connection or a session lies; an async one where the driver's name says so."""
    autocommit = options.pop("autocommit", False)
    if driver.startswith("async "):
        engine = ledger.async_engine(driver.removeprefix("async "), **options)
        return AsyncDesk(engine, kind, autocommit=autocommit)
    return Desk(ledger.engine(**options), kind, autocommit=autocommit)


# Which connections and sessions are tried on which database: every driver, each kind at least sync and async.
KINDS = {
    "sqlite": [
        ("sqlite", "connection"),
        ("sqlite", "session"),
        ("async sqlite+aiosqlite", "connection"),
        ("async sqlite+aiosqlite", "session"),
    ],
    "postgres": [
        ("postgresql+psycopg", "connection"),
        ("postgresql+psycopg", "session"),
        ("async postgresql+psycopg", "session"),
        ("async postgresql+asyncpg", "connection"),
        ("async postgresql+asyncpg", "session"),
    ],
    "mariadb": [
        ("mysql+pymysql", "connection"),
        ("mysql+pymysql", "session"),
        ("async mysql+asyncmy", "connection"),
        ("async mysql+asyncmy", "session"),
    ],
}

ALL = [(database, driver, kind) for database, ways in KINDS.items() for driver, kind in ways]

# Each database, and each kind of connection sync and async; all of their combinations are for `make test-all`.
EVERYDAY = {
    ("sqlite", "connection"),
    ("async sqlite+aiosqlite", "session"),
    ("postgresql+psycopg", "session"),
    ("async postgresql+asyncpg", "connection"),
    ("mysql+pymysql", "connection"),
}


def daily(ways: list[tuple[str, str, str]]) -> list[Any]:
    """Mark for `make test-all` what is not for every day; an engine hands out connections, a sessionmaker sessions."""
    handed_out = {"engine": "connection", "sessionmaker": "session"}
    return [
        pytest.param(
            (database, driver, kind),
            id=f"{database} {driver} {kind}",
            marks=() if (driver, handed_out.get(kind, kind)) in EVERYDAY else pytest.mark.more,
        )
        for database, driver, kind in ways
    ]


def ledger_of(request: Any, database: str) -> Ledger:
    address: str | Path = request.getfixturevalue(DATABASES[database][0])
    return Ledger(database, str(address))


def statements(engine: Engine) -> list[str]:
    """From now on: the first word of each statement that goes to the database."""
    seen: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def _note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement.split(maxsplit=1)[0])

    return seen


class Till:
    """A guard on an engine or sessionmaker, and `transactional` deliveries through it."""

    def __init__(self, engine: Engine, kind: str, policy: Policy | None = None) -> None:
        self.engine = engine
        self.source: Any = engine if kind == "engine" else sessionmaker(engine)
        self.guard = Guard(self.source, policy=policy)
        # What handlers got.
        self.handed: list[Any] = []

    @property
    def sync_engine(self) -> Engine:
        return self.engine

    def transactional(self, key: str, work: HandlerBody) -> Outcome[Any]:
        @self.guard.transactional("credit", key="key")
        def credit(key: str, *, tx: Any) -> Any:
            self.handed.append(tx)
            return work(tx)

        return credit.outcome(key)  # type: ignore[no-any-return]

    def run(self, key: str, work: Callable[[], Any]) -> Outcome[Any]:
        return self.guard.run("charge", key, work)

    def read(self, key: str, operation: str = "charge") -> Record | None:
        return self.guard.read(operation, key)

    def close(self) -> None:
        self.guard.close()
        self.engine.dispose()


class AsyncTill:
    """The async counterpart, in an event loop of its own."""

    def __init__(self, engine: AsyncEngine, kind: str, policy: Policy | None = None) -> None:
        self.engine = engine
        self.source: Any = engine if kind == "engine" else async_sessionmaker(engine)
        self.guard = AsyncGuard(self.source, policy=policy)
        self.handed: list[Any] = []
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)

    @property
    def sync_engine(self) -> Engine:
        return self.engine.sync_engine

    def transactional(self, key: str, work: HandlerBody) -> Outcome[Any]:
        @self.guard.transactional("credit", key="key")
        async def credit(key: str, *, tx: Any) -> Any:
            self.handed.append(tx)
            return await tx.run_sync(work)

        return self._runner.run(credit.outcome(key))  # type: ignore[call-arg]

    def run(self, key: str, work: Callable[[], Any]) -> Outcome[Any]:
        async def handler() -> Any:
            return work()

        async def delivered() -> Outcome[Any]:
            return await self.guard.run("charge", key, handler)

        return self._runner.run(delivered())

    def read(self, key: str, operation: str = "charge") -> Record | None:
        return self._runner.run(self.guard.read(operation, key))

    def close(self) -> None:
        self._runner.run(self.guard.aclose())
        self._runner.run(self.engine.dispose())
        self._runner.close()


AnyTill = Till | AsyncTill

TILLS = [
    ("sqlite", "sqlite", "engine"),
    ("sqlite", "sqlite", "sessionmaker"),
    ("sqlite", "async sqlite+aiosqlite", "engine"),
    ("sqlite", "async sqlite+aiosqlite", "sessionmaker"),
    ("postgres", "postgresql+psycopg", "engine"),
    ("postgres", "postgresql+psycopg", "sessionmaker"),
    ("postgres", "async postgresql+psycopg", "engine"),
    ("postgres", "async postgresql+asyncpg", "engine"),
    ("postgres", "async postgresql+asyncpg", "sessionmaker"),
    ("mariadb", "mysql+pymysql", "engine"),
    ("mariadb", "mysql+pymysql", "sessionmaker"),
    ("mariadb", "async mysql+asyncmy", "engine"),
    ("mariadb", "async mysql+asyncmy", "sessionmaker"),
]


def till(ledger: Ledger, driver: str, kind: str, policy: Policy | None = None, **options: Any) -> AnyTill:
    if driver.startswith("async "):
        return AsyncTill(ledger.async_engine(driver.removeprefix("async "), **options), kind, policy)
    return Till(ledger.engine(**options), kind, policy)
