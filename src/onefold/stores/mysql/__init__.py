"""MySQL and MariaDB: records in a table of your database, over PyMySQL, or over asyncmy for an `AsyncGuard`.

The clock is the server's own. A guard that is given the database of the application can commit records together with
the work. It never hides what the server says: that becomes `StoreUnavailable`, and nothing runs unclaimed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from onefold._concurrency.generators import Work, run
from onefold.errors import UsageError
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
    """What a store on MySQL or MariaDB does in its own way."""

    # Its module here, and the pool of its connections.
    _driver: str
    _pool_of: Callable[..., Any]

    def __init__(self, url: str, *, dialect: Mysql | None = None) -> None:
        """`dialect`: None is whatever the server says that it is."""
        settings, connections = settings_of(url, self._driver), _driver(self._driver)
        bounds: dict[str, Any] = {"size": settings.pool_size, "patience": settings.pool_timeout}
        super().__init__(
            _database(settings, connections, dialect),
            self._pool_of(partial(connections.for_operations, settings), **bounds),
        )
        # Connections for handlers differ: autocommit is off, and one message is one statement.
        self._lending = self._pool_of(partial(connections.for_transactions, settings), **bounds)
        self._dialect = dialect

    def _meet(self, connection: Any) -> Work[None]:
        sql = self._dialect or dialect_of(connection.connection.server_version)
        self.database = self.database._replace(sql=sql)
        return ensure(self.database, connection)


class MysqlStore(MysqlRules, SqlStore):
    """A `Store`, `Batching`, `Browsable` and `Joinable`; safe to share between threads, and over a fork."""

    _driver = "pymysql"
    _pool_of = Pool

    def close(self) -> None:
        super().close()
        self._lending.drop_idle()

    def _new_transaction(self) -> MysqlTransaction:
        return MysqlTransaction(self.database, self._lending)


class AsyncMysqlStore(MysqlRules, AsyncSqlStore):
    """The same store, async; it survives a new event loop."""

    _driver = "asyncmy"
    _pool_of = AsyncPool

    async def aclose(self) -> None:
        await super().aclose()
        await self._lending.drop_idle()

    def _new_transaction(self) -> AsyncMysqlTransaction:
        return AsyncMysqlTransaction(self.database, self._lending)


def open_store(url: str) -> MysqlStore:
    """`mysql://user:password@host:3306/database`, or `mariadb://`; `docs/stores/mysql.md` has the options."""
    return MysqlStore(url)


def open_async_store(url: str) -> AsyncMysqlStore:
    """The same for an `AsyncGuard`."""
    return AsyncMysqlStore(url)


def describe_schema(url: str) -> str:
    """The statements that make the tables; they do nothing where their work is done."""
    settings_of(url, "pymysql")
    statements = (statement.strip() for version in MYSQL.versions for statement in version)
    return "".join(f"{statement};\n" for statement in statements)


def apply_schema(url: str) -> list[str]:
    """Make the tables, or bring them to today's form; what was done."""
    settings, connections = settings_of(url, "pymysql"), _driver("pymysql")
    database = _database(settings, connections, None)._replace(auto_schema=True)
    store = SqlStore(database, Pool(partial(connections.for_operations, settings), size=1))
    try:
        before = run(store._send(lambda _: database.sql.form(), store._pool, look=False))
        run(store._look())
    finally:
        store.close()
    if before == VERSION:
        return [f"{settings.name}: the tables of Onefold are there, in version {VERSION}"]
    if before == 0:
        return [f"{settings.name}: made the tables of Onefold, in version {VERSION}"]
    return [f"{settings.name}: brought the tables of Onefold from version {before} to version {VERSION}"]


def _database(settings: Settings, connections: Any, dialect: Mysql | None) -> Database:
    return Database(
        dialect or MYSQL, settings.name, connections.classify, LOCK, UNLOCK, settings.auto_schema, settings.purge
    )


def _driver(name: str) -> Any:
    try:
        return import_module(f"onefold.stores.mysql.{name}.connection")
    except ModuleNotFoundError as error:
        raise UsageError(f"MySQL needs the package {error.name}: pip install 'onefold[mysql]'") from error
