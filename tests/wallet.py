"""A wallet in an SQLite file, and sync and async workers that move money in it: for the tests of transactions."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from onefold import AsyncGuard, Guard, Outcome, Policy, RecordColumn
from onefold.stores.sql.records import TABLE

SCHEMA = """
CREATE TABLE wallet (account TEXT PRIMARY KEY, balance INTEGER NOT NULL CHECK (balance >= 0));
INSERT INTO wallet VALUES ('asha', 0);
CREATE TABLE payments (
    idempotency_key TEXT PRIMARY KEY, tenant TEXT NOT NULL DEFAULT '', amount INTEGER NOT NULL,
    account TEXT REFERENCES wallet (account) DEFERRABLE INITIALLY DEFERRED
);
"""


def create(path: Path) -> Path:
    with connected(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.executescript(SCHEMA)
    return path


@contextmanager
def connected(path: Path, **options: Any) -> Iterator[sqlite3.Connection]:
    """A connection of the caller's, as Python opens it."""
    with closing(sqlite3.connect(path, **options)) as connection:
        yield connection


def rows(path: Path, statement: str) -> list[Any]:
    """What another connection sees: what is committed."""
    with connected(path) as connection:
        return connection.execute(statement).fetchall()


def tables(path: Path) -> set[str]:
    return {name for (name,) in rows(path, "SELECT name FROM sqlite_master WHERE type = 'table'")}


def balance(path: Path) -> int:
    return int(rows(path, "SELECT balance FROM wallet WHERE account = 'asha'")[0][0])


def records(path: Path) -> list[str]:
    """The keys of the records that are committed."""
    return [key for (key,) in rows(path, f"SELECT key FROM {TABLE} ORDER BY key")] if TABLE in tables(path) else []


def add(connection: sqlite3.Connection, amount: int = 10) -> None:
    connection.execute("UPDATE wallet SET balance = balance + ? WHERE account = 'asha'", (amount,))


def never_opened() -> NoReturn:
    """The store of a guard that only joins: its records are in the caller's database."""
    raise AssertionError("within() opened the guard's own store")


class Blocking:
    """A worker with a `Guard`."""

    def __init__(self, source: Any, policy: Policy | None = None) -> None:
        self.guard = Guard(source, policy=policy)

    def transactional(
        self, key: str, work: Callable[[sqlite3.Connection], Any], *, bypass: bool = False
    ) -> Outcome[Any]:
        @self.guard.transactional("credit", key="key")
        def credit(key: str, *, tx: Any) -> Any:
            return work(tx)

        return credit.bypass(key) if bypass else credit.outcome(key)  # type: ignore[no-any-return]

    def within(
        self,
        connection: sqlite3.Connection,
        key: str,
        work: Callable[[], Any],
        record: RecordColumn | None = None,
        **options: Any,
    ) -> Outcome[Any]:
        return self.guard.within(connection, record=record).run("credit", key, work, **options)

    @contextmanager
    def lent(self) -> Iterator[sqlite3.Connection]:
        """The connection that the next transaction gets, if nobody else has one."""
        with self.guard.store.transaction() as transaction:
            yield transaction.tx

    def close(self) -> None:
        self.guard.close()


class Awaiting:
    """A worker with an `AsyncGuard`, each delivery in an event loop of its own."""

    def __init__(self, source: Any, policy: Policy | None = None) -> None:
        self.guard = AsyncGuard(source, policy=policy)

    def transactional(
        self, key: str, work: Callable[[sqlite3.Connection], Any], *, bypass: bool = False
    ) -> Outcome[Any]:
        @self.guard.transactional("credit", key="key")
        async def credit(key: str, *, tx: Any) -> Any:
            await asyncio.sleep(0)
            return work(tx)

        return asyncio.run(credit.bypass(key) if bypass else credit.outcome(key))  # type: ignore[call-arg]

    def within(
        self,
        connection: sqlite3.Connection,
        key: str,
        work: Callable[[], Any],
        record: RecordColumn | None = None,
        **options: Any,
    ) -> Outcome[Any]:
        async def handler() -> Any:
            await asyncio.sleep(0)
            return work()

        return asyncio.run(self.guard.within(connection, record=record).run("credit", key, handler, **options))

    @contextmanager
    def lent(self) -> Iterator[sqlite3.Connection]:
        with self.guard.store.sync.transaction() as transaction:
            yield transaction.tx

    def close(self) -> None:
        asyncio.run(self.guard.aclose())


Worker = Blocking | Awaiting
