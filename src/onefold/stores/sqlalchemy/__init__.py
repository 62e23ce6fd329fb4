"""Records in the database of an SQLAlchemy engine or sessionmaker, through its pool and its events.

The engine is the caller's: it is never closed. A handler of `transactional` gets a `Connection` from an engine and a
`Session` from a sessionmaker, and their async counterparts from the async ones.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from onefold._checks import not_installed
from onefold._concurrency.generators import Flow
from onefold._concurrency.interrupts import brought_to_its_end
from onefold.errors import UsageError

try:
    from sqlalchemy import Engine, exc
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker
    from sqlalchemy.util import greenlet_spawn
except ImportError as missing:
    raise not_installed("SQLAlchemy", "sqlalchemy") from missing

from onefold.stores.sql.pool import AsyncReserve, Reserve
from onefold.stores.sql.store import AsyncSqlStore, SqlRules, SqlStore
from onefold.stores.sqlalchemy.async_connection import AsyncConnectionShell
from onefold.stores.sqlalchemy.connection import HeldConnection
from onefold.stores.sqlalchemy.database import database_of
from onefold.stores.sqlalchemy.drivers import check_one_engine, driver_of, has_server
from onefold.stores.sqlalchemy.engine_connection import RenewalConnection, Source, StoresConnection

if TYPE_CHECKING:
    import asyncio

    from sqlalchemy.engine.interfaces import Dialect
    from sqlalchemy.pool import Pool


class SqlAlchemyRules(SqlRules):
    """The parts of a store that are specific to an engine."""

    _engine: Engine

    def _look(self) -> Flow[None]:
        if not self._looked:
            yield from super()._look()
            # The server's version is known after the first connection.
            self.database = self.database._replace(sql=database_of(self._engine).sql)


class SqlAlchemyStore(SqlAlchemyRules, SqlStore):
    """A `Store`, `Batching`, `Browsable` and `Joinable` on the database of an engine; as thread-safe as the engine."""

    def __init__(self, bind: Engine | sessionmaker[Any], *, auto_schema: bool = True, purge: bool = True) -> None:
        source = _source(bind)
        database = database_of(source.engine)._replace(auto_schema=auto_schema, purges=purge)
        super().__init__(database, EnginePool(source))
        self._engine = source.engine


class AsyncSqlAlchemyStore(SqlAlchemyRules, AsyncSqlStore):
    """The async counterpart, on an async engine. It survives a new event loop."""

    def __init__(
        self, bind: AsyncEngine | async_sessionmaker[Any], *, auto_schema: bool = True, purge: bool = True
    ) -> None:
        source = _async_source(bind)
        database = database_of(source.engine)._replace(auto_schema=auto_schema, purges=purge)
        super().__init__(database, AsyncEnginePool(source))
        self._engine = source.engine


def adopt(client: Any, *, is_async: bool) -> SqlAlchemyStore | AsyncSqlAlchemyStore:
    """Return a store on a caller's engine or sessionmaker."""
    check_client(client, is_async=is_async)
    return AsyncSqlAlchemyStore(client) if is_async else SqlAlchemyStore(client)


def check_client(client: Any, *, is_async: bool) -> None:
    """Raise `UsageError` for a client that this kind of guard, sync or async, does not take."""
    if isinstance(client, (AsyncEngine, async_sessionmaker) if is_async else (Engine, sessionmaker)):
        return
    mine = "an AsyncGuard takes an AsyncEngine or an async_sessionmaker"
    if not is_async:
        mine = "a Guard takes an Engine or a sessionmaker"
    raise UsageError(f"store={type(client).__name__}: {mine}. For a connection or session that you hold: guard.within")


class EnginePool:
    """Lends connections of an engine's pool; a forked child leaves its parent's connections alone."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._home: Home | None = None

    @contextmanager
    def acquire(self) -> Iterator[StoresConnection]:
        self._home = at_home(self._source.engine, self._home)
        conn = StoresConnection(self._source)
        try:
            yield conn
        finally:
            conn.close()

    def drop_idle(self) -> None:
        """Do nothing: the caller's pool itself drops suspect connections after one was lost."""

    def reserve(self) -> Reserve:
        """Return a connection outside the engine's pool, opened as the pool opens its own."""
        return Reserve(self._opened)

    def _opened(self) -> RenewalConnection:
        conn = RenewalConnection(self._source.engine)
        conn.open()
        return conn


class AsyncEnginePool:
    """The async counterpart; connections of one event loop are not left to the next."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._home: Home | None = None
        self._loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[AsyncConnectionShell]:
        import asyncio

        loop = asyncio.get_running_loop()
        self._home = at_home(self._source.engine, self._home, loop)
        if loop not in self._loops:
            self._loops.add(loop)
            await _close_at_the_end(self._source.engine, self._loops)
        conn = AsyncConnectionShell(StoresConnection(self._source))
        try:
            yield conn
        finally:
            await conn.close()

    async def drop_idle(self) -> None:
        """Do nothing: the caller's pool itself drops suspect connections after one was lost."""

    def reserve(self) -> AsyncReserve:
        """Return a connection outside the engine's pool, opened as the pool opens its own."""
        return AsyncReserve(self._opened)

    async def _opened(self) -> AsyncConnectionShell:
        conn = RenewalConnection(self._source.engine)
        is_async = AsyncConnectionShell(conn)
        try:
            await brought_to_its_end(greenlet_spawn(conn.open), is_async.abandon)
        except BaseException:
            await is_async.close()
            raise
        return is_async


class Home:
    """The process and the event loop in which an engine's pool was used."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop | None) -> None:
        self.pid = os.getpid()
        self.loop = loop
        self.pool: Pool = engine.pool


def at_home(engine: Engine, before: Home | None, loop: asyncio.AbstractEventLoop | None = None) -> Home:
    """Return the engine's home now. Leave unusable connections behind, and neither use nor close them here.

    A socket shared by two processes garbles both conversations. One of a closed event loop cannot be awaited; the
    garbage collector closes it.
    """
    if before is not None and before.pid == os.getpid() and before.loop is loop:
        return before
    if before is not None and before.pool is engine.pool and has_server(engine):
        inherited = before.pid != os.getpid()
        if inherited:
            _left_behind.append(engine.pool)
        if inherited or (before.loop is not None and before.loop.is_closed()):
            engine.dispose(close=False)
    return Home(engine, loop)


# Kept from the garbage collector, which would close connections of another process.
_left_behind: list[Pool] = []

# Generators that wait for the end of their event loops.
_waiting: set[AsyncGenerator[None, None]] = set()


async def _close_at_the_end(engine: Engine, loops: WeakSet[asyncio.AbstractEventLoop]) -> None:
    """Close the engine's idle connections when this event loop ends: no other could use or close them."""
    if not has_server(engine):
        return

    async def wait() -> AsyncGenerator[None, None]:
        # Asyncio closes its async generators before it closes an event loop.
        try:
            yield
        finally:
            _waiting.discard(waiting)
            # Several loops that share the engine also share its pool.
            if sum(not loop.is_closed() for loop in loops) == 1:
                await greenlet_spawn(engine.dispose)

    waiting = wait()
    _waiting.add(waiting)
    await anext(waiting)


def _source(bind: Engine | sessionmaker[Any]) -> Source:
    if isinstance(bind, Engine):
        return Source(_checked(bind), lambda: HeldConnection(bind.connect()))
    return Source(_engine_of(bind()), lambda: HeldConnection(bind()))


def _async_source(bind: AsyncEngine | async_sessionmaker[Any]) -> Source:
    if isinstance(bind, AsyncEngine):

        def opened() -> HeldConnection:
            connection = bind.sync_engine.connect()
            return HeldConnection(connection, AsyncConnection(bind, connection))

        return Source(_checked(bind.sync_engine), opened)

    def opened_session() -> HeldConnection:
        session = bind()
        return HeldConnection(session.sync_session, session)

    return Source(_engine_of(bind().sync_session), opened_session)


def schema_versions(dialect: Dialect) -> tuple[tuple[str, ...], ...]:
    """Return the statements that create the tables for this SQLAlchemy dialect, version by version."""
    return driver_of(dialect).sql.versions


def _engine_of(session: Session) -> Engine:
    try:
        found = session.get_bind()
    except exc.UnboundExecutionError as error:
        raise UsageError(f"this sessionmaker has no engine of its own, but the store needs one: {error}") from error
    if not isinstance(found, Engine):
        raise UsageError("this sessionmaker is bound to one connection, but the store needs an engine")
    check_one_engine(session, found)
    return _checked(found)


def _checked(engine: Engine) -> Engine:
    path = engine.url.database or ":memory:"
    if not has_server(engine) and (":memory:" in path or engine.url.query.get("mode") == "memory"):
        raise UsageError(
            "this engine's database is in the memory of one connection, and no other could see its records. For "
            "records in memory use memory:"
        )
    return engine
