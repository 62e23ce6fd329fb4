"""PostgreSQL: records in a database that you run, with transactions in which they commit together with the work.

`postgresql://` is psycopg 3, sync and async; `postgresql+asyncpg://` is asyncpg, for an `AsyncGuard`. Connections are
opened on demand and kept in a pool of ours, or borrowed from a pool of yours, which is never closed here. The clock is
the server's. Nothing is kept in a session, so that it also works behind PgBouncer in transaction mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from onefold._checks import not_installed
from onefold._model import Address
from onefold.errors import UsageError
from onefold.stores.base import Query
from onefold.stores.postgres.dialect import LOCK, POSTGRES, Postgres
from onefold.stores.postgres.kind import KIND as KIND
from onefold.stores.postgres.marked import AsyncPostgresTransaction, PostgresTransaction
from onefold.stores.postgres.partitions.periods import PERIODS, period
from onefold.stores.postgres.urls import ASYNCPG_OPTIONS, LIBPQ_OPTIONS, Settings, check_options, settings_of
from onefold.stores.sql.connection import Database, ErrorInfo
from onefold.stores.sql.pool import AsyncPool, Pool
from onefold.stores.sql.records import VERSION
from onefold.stores.sql.store import AsyncSqlStore, SqlStore

EXTRAS: Final = {"psycopg": "postgres", "asyncpg": "asyncpg"}


class PostgresStore(SqlStore):
    """A `Store`, `Batching`, `Browsable` and `Joinable`; safe to share between threads, and across a fork."""

    # Hears of the ends of records, if the URL has `notify=true`.
    listener: Any = None

    def listen(self, address: Address) -> bool:
        """Wake those in this process who wait for this record when it ends. Return whether that can be expected."""
        return self.listener is not None and self.listener.listen(address)

    def unlisten(self, address: Address) -> None:
        """Wake nobody any more for this record."""
        if self.listener is not None:
            self.listener.unlisten(address)

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        super().close()

    def _new_transaction(self) -> PostgresTransaction:
        return PostgresTransaction(_untold(self.database), self._pool)


class AsyncPostgresStore(AsyncSqlStore):
    """The async counterpart; it survives a new event loop."""

    listener: Any = None

    async def listen(self, address: Address) -> bool:
        """Wake those in this event loop who wait for this record when it ends, as `PostgresStore` does."""
        return self.listener is not None and await self.listener.listen(address)

    def unlisten(self, address: Address) -> None:
        """Wake nobody any more for this record."""
        if self.listener is not None:
            self.listener.unlisten(address)

    async def aclose(self) -> None:
        if self.listener is not None:
            await self.listener.close()
        await super().aclose()

    def _new_transaction(self) -> AsyncPostgresTransaction:
        return AsyncPostgresTransaction(_untold(self.database), self._pool)


def _untold(database: Database) -> Database:
    """Return the database for a handler's transaction. It tells nobody: NOTIFY would lock the database at COMMIT."""
    return database if database.sql is POSTGRES else database._replace(sql=POSTGRES)


def open_store(url: str) -> PostgresStore:
    """Open a store at `postgresql://user:password@host:5432/database`, with options of libpq and of `urls.OPTIONS`."""
    return _opened(settings_of(url))


def open_async_store(url: str) -> AsyncPostgresStore:
    """Open a store for an `AsyncGuard`; `postgresql+asyncpg://` uses asyncpg."""
    return _opened_async(settings_of(url))


def check_url(url: str, *, is_async: bool) -> None:
    """Raise `UsageError` for a URL or an option that is wrong. No driver is imported."""
    settings = settings_of(url)
    _check_driver(settings, is_async=is_async)
    check_options(settings, ASYNCPG_OPTIONS if settings.driver == "asyncpg" else LIBPQ_OPTIONS)


def _check_driver(settings: Settings, *, is_async: bool) -> None:
    if settings.driver == "asyncpg" and not is_async:
        raise UsageError(f"{settings.name}: asyncpg is for an AsyncGuard. For a Guard write postgresql://")


def _opened(settings: Settings) -> PostgresStore:
    _check_driver(settings, is_async=False)
    with _installed("psycopg"):
        from onefold.stores.postgres.psycopg import pool as psycopg
    opener = psycopg.Opener(settings)
    pool = Pool(opener, size=settings.pool_size, patience=settings.pool_timeout)
    store = PostgresStore(_database(settings, psycopg.classify), pool)
    if settings.notify:
        from onefold.stores.postgres.psycopg.listener import Listener

        store.listener = Listener(opener, settings.name)
    return store


def _opened_async(settings: Settings) -> AsyncPostgresStore:
    driver: Any
    with _installed(settings.driver):
        if settings.driver == "asyncpg":
            from onefold.stores.postgres.asyncpg import pool as driver
        else:
            from onefold.stores.postgres.psycopg import pool as driver
    opener = driver.AsyncOpener(settings)
    pool = AsyncPool(opener, size=settings.pool_size, patience=settings.pool_timeout)
    store = AsyncPostgresStore(_database(settings, driver.classify), pool)
    if settings.notify:
        store.listener = _async_listener(settings, opener)
    return store


def _async_listener(settings: Settings, opener: Any) -> Any:
    from onefold.stores.postgres.wakeups.async_listener import AsyncListener

    if settings.driver == "asyncpg":
        from onefold.stores.postgres.asyncpg.listener import opens
    else:
        from onefold.stores.postgres.psycopg.listener import opens
    return AsyncListener(opens(opener), settings.name)


def adopt(
    client: Any, *, is_async: bool, purge: bool = True, partitions: str | None = None
) -> PostgresStore | AsyncPostgresStore:
    """Return a store on a caller's pool: psycopg_pool's, sync or async, or asyncpg's. The pool is never closed here."""
    check_client(client, is_async=is_async)
    settings = NAMELESS._replace(purge=purge, partitions=None if partitions is None else period(partitions))
    if _comes_from(client, "asyncpg", "Pool"):
        from onefold.stores.postgres.asyncpg import pool as asyncpg

        return AsyncPostgresStore(_database(settings, asyncpg.classify), asyncpg.CallersPool(client), ours=False)
    from onefold.stores.postgres.psycopg import pool as psycopg

    if is_async:
        return AsyncPostgresStore(_database(settings, psycopg.classify), psycopg.CallersAsyncPool(client), ours=False)
    return PostgresStore(_database(settings, psycopg.classify), psycopg.CallersPool(client), ours=False)


def check_client(client: Any, *, is_async: bool) -> None:
    """Raise `UsageError` if the client is not a pool, or is for the other kind of guard, sync or async."""
    kind = type(client).__name__
    client_is_async = _comes_from(client, "asyncpg", "Pool") or _comes_from(
        client, "psycopg_pool", "AsyncConnectionPool"
    )
    if not client_is_async and not _comes_from(client, "psycopg_pool", "ConnectionPool"):
        raise UsageError(
            f"store={kind}: an SQL store cannot live on a single connection. Pass a pool or a URL; or join the "
            "transaction of this connection by guard.within(connection)"
        )
    if client_is_async != is_async:
        mine, other = ("an AsyncGuard", "a Guard") if is_async else ("a Guard", "an AsyncGuard")
        raise UsageError(f"{kind} belongs to {other}, but this is {mine}")


# All that is known of a pool that the caller has made.
NAMELESS: Final = Settings("PostgreSQL, through your pool", "", "", {})


def describe_schema(url: str) -> str:
    """Return the statements that create the tables."""
    return _sql(settings_of(url)).script()


def apply_schema(url: str) -> list[str]:
    """Create the tables, or upgrade them to this version."""
    settings = settings_of(url)._replace(auto_schema=True)
    if settings.driver == "asyncpg":
        import asyncio

        asyncio.run(_apply(_opened_async(settings)))
    else:
        store = _opened(settings)
        try:
            store.browse(Query(), 0)
        finally:
            store.close()
    split = f", in partitions of a {settings.partitions}" if settings.partitions else ""
    return [f"{settings.name}: Onefold's tables exist, version {VERSION}{split}"]


async def _apply(store: AsyncPostgresStore) -> None:
    try:
        await store.browse(Query(), 0)
    finally:
        await store.aclose()


def _database(settings: Settings, classify: Callable[[BaseException], ErrorInfo | None]) -> Database:
    return Database(
        _sql(settings), settings.name, classify, lock=LOCK, auto_schema=settings.auto_schema, purges=settings.purge
    )


def _sql(settings: Settings) -> Postgres:
    if settings.partitions is not None:
        from onefold.stores.postgres.partitions.dialect import Partitioned, PartitionedNotifying

        kind = PartitionedNotifying if settings.notify else Partitioned
        return kind(settings.partitions, PERIODS[settings.partitions])
    if settings.notify:
        from onefold.stores.postgres.wakeups import NOTIFYING

        return NOTIFYING
    return POSTGRES


def _comes_from(client: Any, package: str, name: str) -> bool:
    """Return whether the client's class is or inherits from the named one, without importing the package."""
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == package for kind in type(client).__mro__)


@contextmanager
def _installed(driver: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise not_installed(driver, EXTRAS[driver]) from error
    except ImportError as error:
        # psycopg without libpq, say.
        reason = " ".join(str(error).split())
        raise UsageError(
            f"the driver {driver} cannot be imported ({reason}): pip install 'onefold[{EXTRAS[driver]}]'"
        ) from error
