"""An SQLAlchemy engine as the guard's own store: the whole contract on each database, sync and async.

All of it is for `make test-all`: the stores themselves have the contract every day, and the deliveries of
test_sqlalchemy_transactional.py and test_sqlalchemy_faults.py go through such an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from onefold.stores.sqlalchemy import AsyncSqlAlchemyStore, SqlAlchemyStore
from onefold.testing import AsyncStoreContract, StoreContract

pytestmark = pytest.mark.more


def opened(url: str) -> SqlAlchemyStore:
    # In another process, which ends without closing anything: it keeps no connection.
    return SqlAlchemyStore(create_engine(url, poolclass=NullPool))


def opened_async(url: str) -> AsyncSqlAlchemyStore:
    return AsyncSqlAlchemyStore(create_async_engine(url, poolclass=NullPool))


class OnAnEngine(StoreContract):
    """On an engine that is disposed of by its owner, here."""

    # Each process imports SQLAlchemy: a few are enough.
    racers = 4

    def on(self, url: str) -> Iterator[None]:
        self.url = url
        self.engine = create_engine(url, pool_size=16)
        yield
        self.engine.dispose()

    def process_source(self) -> partial[SqlAlchemyStore]:
        return partial(opened, self.url)

    def open_store(self) -> SqlAlchemyStore:
        return SqlAlchemyStore(self.engine)


class OnAnAsyncEngine(AsyncStoreContract):
    """The async counterpart."""

    racers = 4
    url: str

    def process_source(self) -> partial[AsyncSqlAlchemyStore]:
        return partial(opened_async, self.url)

    def open_store(self) -> AsyncSqlAlchemyStore:
        return WithItsEngine(create_async_engine(self.url, pool_size=16))


class WithItsEngine(AsyncSqlAlchemyStore):
    """Ends with the engine, which has to be disposed of in the event loop that used it."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self.engine = engine

    async def aclose(self) -> None:
        await super().aclose()
        await self.engine.dispose()


class TestSqlite(OnAnEngine):
    @pytest.fixture(autouse=True)
    def set_up(self, tmp_path: Path) -> Iterator[None]:
        yield from self.on(f"sqlite:///{tmp_path / 'records.db'}")


class TestAsyncSqlite(OnAnAsyncEngine):
    @pytest.fixture(autouse=True)
    def set_up(self, tmp_path: Path) -> None:
        self.url = f"sqlite+aiosqlite:///{tmp_path / 'records.db'}"


class TestPsycopg(OnAnEngine):
    @pytest.fixture(autouse=True)
    def set_up(self, postgres_url: str) -> Iterator[None]:
        yield from self.on(postgres_url.replace("postgresql:", "postgresql+psycopg:"))


class TestAsyncpg(OnAnAsyncEngine):
    @pytest.fixture(autouse=True)
    def set_up(self, postgres_url: str) -> None:
        self.url = postgres_url.replace("postgresql:", "postgresql+asyncpg:")


class TestPymysql(OnAnEngine):
    @pytest.fixture(autouse=True)
    def set_up(self, mysql_url: str) -> Iterator[None]:
        yield from self.on(mysql_url.replace("mysql:", "mysql+pymysql:"))


class TestAsyncmy(OnAnAsyncEngine):
    @pytest.fixture(autouse=True)
    def set_up(self, mysql_url: str) -> None:
        self.url = mysql_url.replace("mysql:", "mysql+asyncmy:")
