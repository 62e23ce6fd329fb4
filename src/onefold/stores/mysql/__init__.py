"""MySQL and MariaDB: records in a table of your database, over PyMySQL, or over asyncmy for an `AsyncGuard`.

The clock is the server's own. A guard on the application's database can commit records together with the work. A server
error is never hidden: it becomes `StoreUnavailable`, and nothing runs unclaimed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from onefold._checks import not_installed
from onefold._concurrency.generators import Flow, run
from onefold.stores.mysql.dialect import LOCK, MYSQL, UNLOCK, Mysql, dialect_of
from onefold.stores.mysql.kind import KIND as KIND
from onefold.stores.mysql.transaction import AsyncMysqlTransaction, MysqlTransaction
from onefold.stores.mysql.urls import Settings, settings_of
from onefold.stores.sql.connection import Database
from onefold.stores.sql.pool import AsyncPool, Pool
from onefold.stores.sql.records import VERSION
from onefold.stores.sql.store import AsyncSqlStore, SqlRules, SqlStore
from onefold.stores.sql.tables import ensure


class MysqlRules(SqlRules):
    """The parts of a store that are specific to MySQL and MariaDB."""

    # The driver's package here, and the class of the connection pool.
    _driver: str
    _pool_of: Callable[..., Any]

    def __init__(self, url: str, *, dialect: Mysql | None = None) -> None:
        """Initialize; with `dialect=None` the server's greeting determines the dialect."""
        settings, driver = settings_of(url, self._driver), _driver(self._driver)
        bounds: dict[str, Any] = {"size": settings.pool_size, "patience": settings.pool_timeout}
        super().__init__(
            _database(settings, driver, dialect),
            self._pool_of(partial(driver.for_operations, settings), **bounds),
        )
        # Connections for handlers differ: autocommit is off, and one message is one statement.
        self._lending = self._pool_of(partial(driver.for_transactions, settings), **bounds)
        self._dialect = dialect

    def _meet(self, connection: Any) -> Flow[None]:
        sql = self._dialect or dialect_of(connection.connection.server_version)
        self.database = self.database._replace(sql=sql)
        return ensure(self.database, connection)


class MysqlStore(MysqlRules, SqlStore):
    """A `Store`, `Batching`, `Browsable` and `Joinable`; safe to share between threads, and across a fork."""

    _driver = "pymysql"
    _pool_of = Pool

    def close(self) -> None:
        super().close()
        self._lending.drop_idle()

    def _new_transaction(self) -> MysqlTransaction:
        return MysqlTransaction(self.database, self._lending)


class AsyncMysqlStore(MysqlRules, AsyncSqlStore):
    """The async counterpart; it survives a new event loop."""

    _driver = "asyncmy"
    _pool_of = AsyncPool

    async def aclose(self) -> None:
        await super().aclose()
        await self._lending.drop_idle()

    def _new_transaction(self) -> AsyncMysqlTransaction:
        return AsyncMysqlTransaction(self.database, self._lending)


def open_store(url: str) -> MysqlStore:
    """Open a store at `mysql://user:password@host:3306/database` or `mariadb://`; see `docs/stores/mysql.md`."""
    return MysqlStore(url)


def open_async_store(url: str) -> AsyncMysqlStore:
    """Open a store for an `AsyncGuard`."""
    return AsyncMysqlStore(url)


def check_url(url: str, *, is_async: bool) -> None:
    """Raise `UsageError` for a URL or an option that is wrong. No driver is imported, and no certificate is read."""
    settings_of(url, "asyncmy" if is_async else "pymysql", certificates=False)


def describe_schema(url: str) -> str:
    """Return the statements that create the tables; they are no-ops where their work is already done."""
    settings_of(url, "pymysql")
    statements = (statement.strip() for version in MYSQL.versions for statement in version)
    return "".join(f"{statement};\n" for statement in statements)


def apply_schema(url: str) -> list[str]:
    """Create or upgrade the tables; return what was done."""
    settings, driver = settings_of(url, "pymysql"), _driver("pymysql")
    database = _database(settings, driver, None)._replace(auto_schema=True)
    store = SqlStore(database, Pool(partial(driver.for_operations, settings), size=1))
    try:
        before = run(store._send(lambda _: database.sql.schema_version(), store._pool, look=False))
        run(store._look())
    finally:
        store.close()
    if before == VERSION:
        return [f"{settings.name}: Onefold's tables exist, in version {VERSION}"]
    if before == 0:
        return [f"{settings.name}: created Onefold's tables, in version {VERSION}"]
    return [f"{settings.name}: upgraded Onefold's tables from version {before} to version {VERSION}"]


def _database(settings: Settings, driver: Any, dialect: Mysql | None) -> Database:
    return Database(
        dialect or MYSQL, settings.name, driver.classify, LOCK, UNLOCK, settings.auto_schema, settings.purge
    )


def _driver(name: str) -> Any:
    try:
        return import_module(f"onefold.stores.mysql.{name}.connection")
    except ModuleNotFoundError as error:
        raise not_installed(name if error.name is None else error.name, "mysql") from error
