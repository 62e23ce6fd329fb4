"""The PostgreSQL store: the whole contract on each driver, directly and behind PgBouncer in transaction mode.

Every day on the usual sync and async driver; the rest is for `make test-all`.
"""

from __future__ import annotations

from typing import Any

import pytest

from onefold.stores.base import AsyncStore, Store
from onefold.stores.postgres import open_async_store, open_store
from onefold.testing import AsyncStoreContract, StoreContract
from tests.stores.postgres.tools import through_asyncpg


class TestPsycopg(StoreContract):
    @pytest.fixture(autouse=True)
    def set_up(self, postgres_url: str) -> None:
        self.url = postgres_url

    def process_source(self) -> Any:
        return self.url

    def open_store(self) -> Store:
        return open_store(self.url)


class Async(AsyncStoreContract):
    url: str

    def process_source(self) -> Any:
        return self.url

    def open_store(self) -> AsyncStore:
        return open_async_store(self.url)


@pytest.mark.more
class TestAsyncPsycopg(Async):
    @pytest.fixture(autouse=True)
    def set_up(self, postgres_url: str) -> None:
        self.url = postgres_url


class TestAsyncpg(Async):
    @pytest.fixture(autouse=True)
    def set_up(self, postgres_url: str) -> None:
        self.url = through_asyncpg(postgres_url)


@pytest.mark.more
class TestPsycopgBehindPgBouncer(TestPsycopg):
    @pytest.fixture(autouse=True)
    def set_up(self, pgbouncer_url: str) -> None:
        self.url = pgbouncer_url


@pytest.mark.more
class TestAsyncpgBehindPgBouncer(Async):
    @pytest.fixture(autouse=True)
    def set_up(self, pgbouncer_url: str) -> None:
        self.url = through_asyncpg(pgbouncer_url)
