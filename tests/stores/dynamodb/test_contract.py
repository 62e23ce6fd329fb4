"""The DynamoDB store: the whole contract sync and async, from threads, tasks and processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from onefold.stores.dynamodb import AsyncDynamoDBStore, DynamoDBStore
from onefold.testing import AsyncStoreContract, Clock, StoreContract
from services.dynamodb import CREDENTIALS, store_url
from tests.stores.dynamodb.tools import client_options, table_of


@pytest.fixture(scope="module")
def client(dynamodb: Any, dynamodb_tables: str) -> Iterator[Any]:
    """One client for all tests: to make one takes longer than most of them."""
    from botocore.session import Session

    options: Any = client_options(store_url(dynamodb, dynamodb_tables))
    session = Session()
    session.set_credentials(*CREDENTIALS.values())
    client = session.create_client("dynamodb", **options)
    yield client
    client.close()


@pytest.fixture(scope="module")
def session() -> Any:
    from aiobotocore.session import AioSession

    return AioSession()


@pytest.fixture(autouse=True)
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of forks was started before the credentials were in the environment."""
    monkeypatch.setattr("onefold.testing.promises._processes.START_METHOD", "spawn")


class TestContract(StoreContract):
    """From threads, and from processes."""

    # Leases have to be of ten seconds or more; nobody waits for them, because the clock is moved.
    unit = 30.0

    @pytest.fixture(autouse=True)
    def set_up(self, client: Any, dynamodb_url: str) -> None:
        # The other processes have the server's clock, so that ours begins there.
        self.clock = Clock(time.time())
        self.client, self.url = client, dynamodb_url

    def process_source(self) -> Any:
        return self.url

    def open_store(self) -> DynamoDBStore:
        return DynamoDBStore(table_of(self.url), client=self.client, clock=self.clock)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


@pytest.mark.more
class TestAsyncContract(AsyncStoreContract):
    """From tasks, and from processes."""

    unit = 30.0

    @pytest.fixture(autouse=True)
    def set_up(self, session: Any, dynamodb_url: str) -> None:
        self.clock = Clock(time.time())
        self.session, self.url = session, dynamodb_url

    def process_source(self) -> Any:
        return self.url

    def open_store(self) -> AsyncDynamoDBStore:
        options = client_options(self.url)
        return AsyncDynamoDBStore(
            table_of(self.url),
            endpoint_url=options["endpoint_url"],
            region=options["region_name"],
            client=self.session,
            clock=self.clock,
        )

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
