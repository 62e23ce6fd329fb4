"""The whole contract on a partitioned table, and once more with a partition sealed after each claim."""

from __future__ import annotations

from typing import Any

import pytest

from onefold.stores.base import AsyncStore, Store
from onefold.stores.postgres import open_async_store, open_store
from onefold.testing import AsyncStoreContract, StoreContract
from tests.stores.postgres.partitions.tools import partitioned, sealing
from tests.stores.postgres.tools import through_asyncpg


# Its subclasses are marked with it.
@pytest.mark.more
class TestPsycopg(StoreContract):
    @pytest.fixture(autouse=True)
    def set_up(self, postgres_url: str) -> None:
        self.url = partitioned(postgres_url)

    def process_source(self) -> Any:
        return self.url

    def open_store(self) -> Store:
        return open_store(self.url)


class TestPsycopgSealing(TestPsycopg):
    def open_store(self) -> Store:
        return sealing(open_store(self.url))  # type: ignore[no-any-return]


class TestPsycopgThatNotifies(TestPsycopg):
    @pytest.fixture(autouse=True)
    def set_up(self, postgres_url: str) -> None:
        self.url = f"{partitioned(postgres_url)}&notify=yes"


class TestPsycopgBehindPgBouncer(TestPsycopg):
    @pytest.fixture(autouse=True)
    def set_up(self, pgbouncer_url: str) -> None:
        self.url = partitioned(pgbouncer_url)


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
        self.url = partitioned(postgres_url)


@pytest.mark.more
class TestAsyncpg(Async):
    @pytest.fixture(autouse=True)
    def set_up(self, postgres_url: str) -> None:
        self.url = partitioned(through_asyncpg(postgres_url))


@pytest.mark.more
class TestAsyncpgSealing(TestAsyncpg):
    def open_store(self) -> AsyncStore:
        return sealing(open_async_store(self.url))  # type: ignore[no-any-return]
