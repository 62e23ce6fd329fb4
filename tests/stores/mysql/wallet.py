"""A wallet in MariaDB, and sync and async workers that move money in it: for the tests of the MySQL store.

Work is a generator: it yields statements, or calls of the connection, and gets rows. Each worker sends them by its own
driver, so that a promise is written once for PyMySQL and for asyncmy.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote, urlsplit

import asyncmy
import asyncmy.converters
import asyncmy.cursors
import asyncmy.errors
import pymysql
import pymysql.converters
import pymysql.cursors
import pytest

from onefold import AsyncGuard, Fresh, Guard, Outcome, Policy, RecordColumn
from onefold.stores.sql.records import TABLE
from tests.support import eventually

SCHEMA = (
    "CREATE TABLE wallet (account VARCHAR(50) PRIMARY KEY, balance INTEGER NOT NULL, CHECK (balance >= 0))",
    "INSERT INTO wallet VALUES ('asha', 0), ('ben', 0)",
    "CREATE TABLE payments (idempotency_key VARCHAR(50) PRIMARY KEY, tenant VARCHAR(50) NOT NULL, amount INTEGER)",
)


class Call(NamedTuple):
    """A method of the connection, for work to yield."""

    method: str
    arguments: tuple[Any, ...] = ()


HandlerBody = Callable[..., Any]
Working = Generator[str | Call, Any, Any]


def add(tx: Any = None, amount: int = 10, account: str = "asha") -> Working:
    yield f"UPDATE wallet SET balance = balance + {amount} WHERE account = '{account}'"


def deadlocking(other: Any) -> Working:
    """Work that becomes the victim of a deadlock, because the other connection has written more."""
    with other.cursor() as cursor:
        cursor.execute("UPDATE wallet SET balance = balance + 1 WHERE account = 'ben'")
        cursor.execute("INSERT INTO payments VALUES ('a', '', 1), ('b', '', 1), ('c', '', 1), ('d', '', 1)")
    yield "SELECT * FROM wallet WHERE account = 'asha' LOCK IN SHARE MODE"
    crossing = threading.Thread(target=done, args=(other, add()))
    crossing.start()
    try:
        yield "UPDATE wallet SET balance = balance + 1 WHERE account = 'ben'"
    finally:
        crossing.join()
        other.rollback()


def parameters(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "database": parts.path[1:],
    }


class Ledger:
    """What others see of the database: what is committed."""

    def __init__(self, url: str) -> None:
        self.url = url
        for statement in SCHEMA:
            self.execute(statement)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with connected(self.url, autocommit=True) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def execute(self, statement: str) -> None:
        self.rows(statement)

    @property
    def tables(self) -> set[str]:
        return {name for (name,) in self.rows("SHOW TABLES")}

    @property
    def balance(self) -> int:
        return int(self.rows("SELECT balance FROM wallet WHERE account = 'asha'")[0][0])

    @property
    def records(self) -> list[str]:
        """The keys of the records that are committed."""
        if TABLE not in self.tables:
            return []
        return [key.decode() for (key,) in self.rows(f"SELECT `key` FROM {TABLE} ORDER BY 1")]

    @property
    def now(self) -> tuple[int, list[str]]:
        return self.balance, self.records


def transactions_waiting(rows: Callable[[str], Sequence[Any]]) -> int:
    """How many transactions wait for a lock in this database; other tests may use the same server.

    `information_schema.innodb_trx` would do only for one who asks: it shows what it showed before to whoever asks
    within a tenth of a second after anybody, and so nothing new to two who ask for ever.
    """
    ((database,),) = rows("SELECT database()")
    ((_, _, told),) = rows("SHOW ENGINE INNODB STATUS")
    return len(re.findall(rf"FOR THIS LOCK TO BE GRANTED:\n.*`{database}`\.", told))


def waiting_for_rows(ledger: Ledger, count: int) -> None:
    """Until so many transactions wait for a row."""
    assert eventually(lambda: transactions_waiting(ledger.rows) >= count), "nobody waits"


@contextmanager
def connected(url: str, **options: Any) -> Iterator[Any]:
    """A connection of PyMySQL, as its users open one."""
    # A context for TLS is slow to make, and the server has none.
    with closing(pymysql.connect(**(parameters(url) | {"ssl_disabled": True} | options))) as connection:
        yield connection


class Blocking:
    """A worker with a `Guard`, over PyMySQL."""

    driver: Any = pymysql
    error: Any = pymysql
    converters: Any = pymysql.converters.conversions
    dictionaries: ClassVar[Any] = {"cursorclass": pymysql.cursors.DictCursor}
    unbuffered: ClassVar[Any] = {"cursorclass": pymysql.cursors.SSCursor}

    def __init__(self, source: Any, policy: Policy | None = None) -> None:
        self.guard = Guard(source, policy=policy)

    def transactional(self, key: str, work: HandlerBody, *, bypass: bool = False) -> Outcome[Any]:
        @self.guard.transactional("credit", key="key")
        def credit(key: str, *, tx: Any) -> Any:
            return done(tx, work(tx))

        return credit.bypass(key) if bypass else credit.outcome(key)  # type: ignore[no-any-return]

    def within(
        self, connection: Any, key: str, work: HandlerBody, record: RecordColumn | None = None, **options: Any
    ) -> Outcome[Any]:
        within = self.guard.within(connection, record=record)
        return within.run("credit", key, lambda: done(connection, work()), **options)

    def fresh(self, connection: Any, keys: list[str]) -> Fresh[str]:
        return self.guard.within(connection).fresh("credit", keys, key=lambda key: key)

    def run(self, key: str, handler: Callable[[], Any], **options: Any) -> Outcome[Any]:
        return self.guard.run("charge", key, handler, **options)

    def run_batch(self, messages: list[str], handler: Callable[[str], Any]) -> list[Any]:
        return self.guard.run_batch("charge", messages, key=lambda message: message, handler=handler)

    @contextmanager
    def connection(self, url: str, **options: Any) -> Iterator[Any]:
        with connected(url, **options) as connection:
            yield connection

    def on(self, connection: Any, *steps: str | Call) -> Any:
        """What the last of these statements and calls gives."""
        return self.do(connection, one_by_one(*steps))

    def do(self, connection: Any, work: Working) -> Any:
        return done(connection, work)

    def store(self, name: str, *arguments: Any) -> Any:
        return getattr(self.guard.store, name)(*arguments)

    def close(self) -> None:
        self.guard.close()


class Awaiting:
    """A worker with an `AsyncGuard`, over asyncmy, in one event loop."""

    driver: Any = asyncmy
    error: Any = asyncmy.errors
    converters: Any = asyncmy.converters.conversions
    dictionaries: ClassVar[Any] = {"cursor_cls": asyncmy.cursors.DictCursor}
    unbuffered: ClassVar[Any] = {"cursor_cls": asyncmy.cursors.SSCursor}

    def __init__(self, source: Any, policy: Policy | None = None) -> None:
        self.guard = AsyncGuard(source, policy=policy)
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)

    def transactional(self, key: str, work: HandlerBody, *, bypass: bool = False) -> Outcome[Any]:
        @self.guard.transactional("credit", key="key")
        async def credit(key: str, *, tx: Any) -> Any:
            return await in_loop(tx, work(tx))

        return self._runner.run(credit.bypass(key) if bypass else credit.outcome(key))  # type: ignore[call-arg]

    def within(
        self, connection: Any, key: str, work: HandlerBody, record: RecordColumn | None = None, **options: Any
    ) -> Outcome[Any]:
        async def handler() -> Any:
            return await in_loop(connection, work())

        within = self.guard.within(connection, record=record)
        return self._runner.run(within.run("credit", key, handler, **options))

    def fresh(self, connection: Any, keys: list[str]) -> Fresh[str]:
        return self._runner.run(self.guard.within(connection).fresh("credit", keys, key=lambda key: key))

    def run(self, key: str, handler: Callable[[], Any], **options: Any) -> Outcome[Any]:
        async def handle() -> Any:
            return handler()

        return self._runner.run(self.guard.run("charge", key, handle, **options))

    def run_batch(self, messages: list[str], handler: Callable[[str], Any]) -> list[Any]:
        async def handle(message: str) -> Any:
            return handler(message)

        batch = self.guard.run_batch("charge", messages, key=lambda message: message, handler=handle)
        return self._runner.run(batch)

    @contextmanager
    def connection(self, url: str, **options: Any) -> Iterator[Any]:
        async def connect() -> Any:
            return await asyncmy.connect(**(parameters(url) | options))

        connection = self._runner.run(connect())
        try:
            yield connection
        finally:
            self._runner.run(connection.ensure_closed())

    def on(self, connection: Any, *steps: str | Call) -> Any:
        return self.do(connection, one_by_one(*steps))

    def do(self, connection: Any, work: Working) -> Any:
        return self._runner.run(in_loop(connection, work))

    def store(self, name: str, *arguments: Any) -> Any:
        return self._runner.run(getattr(self.guard.store, name)(*arguments))

    def close(self) -> None:
        self._runner.run(self.guard.aclose())
        self._runner.close()


Worker = Blocking | Awaiting
WORKER_TYPES: list[type[Worker]] = [Blocking, Awaiting]
# Where it is about the rules, which both share, and not about what a driver does by itself.
DAILY_TYPES = [Blocking, pytest.param(Awaiting, marks=pytest.mark.more)]


def one_by_one(*steps: str | Call) -> Working:
    """Work that gives what its last step gives."""
    rows = None
    for step in steps:
        rows = yield step
    return rows


def done(connection: Any, work: Any) -> Any:
    """Bring work to its end over PyMySQL; what is no work is its own value. Errors are raised inside of it."""
    if not inspect.isgenerator(work):
        return work
    try:
        step: Any = next(work)
        while True:
            try:
                rows = _sent(connection, step)
            except Exception as error:
                step = work.throw(error)
            else:
                step = work.send(rows)
    except StopIteration as end:
        return end.value


def _sent(connection: Any, step: str | Call) -> Any:
    if isinstance(step, Call):
        return getattr(connection, step.method)(*step.arguments)
    with connection.cursor() as cursor:
        cursor.execute(step)
        return cursor.fetchall()


async def in_loop(connection: Any, work: Any) -> Any:
    """The same over asyncmy."""
    await asyncio.sleep(0)
    if not inspect.isgenerator(work):
        return work
    try:
        step: Any = next(work)
        while True:
            try:
                rows = await _sent_async(connection, step)
            except Exception as error:
                step = work.throw(error)
            else:
                step = work.send(rows)
    except StopIteration as end:
        return end.value


async def _sent_async(connection: Any, step: str | Call) -> Any:
    if isinstance(step, Call):
        return await getattr(connection, step.method)(*step.arguments)
    async with connection.cursor() as cursor:
        await cursor.execute(step)
        return await cursor.fetchall()
