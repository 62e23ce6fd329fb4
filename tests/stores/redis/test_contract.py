"""The whole contract on Redis 7, on Valkey 9, and on a cluster of each, sync and async.

Every day on one server, sync; the rest is for `make test-all`.
"""

from __future__ import annotations

from typing import Any

import pytest

from onefold.stores.redis import AsyncRedisStore, RedisStore
from onefold.testing import AsyncStoreContract, StoreContract


class OnServer:
    """The server's own clock passes, and other processes come by the same URL."""

    server: str
    expires_by_itself = True

    @pytest.fixture(autouse=True)
    def set_up(self, request: pytest.FixtureRequest) -> None:
        self.url: str = request.getfixturevalue(f"{self.server}_url")

    def process_source(self) -> Any:
        return self.url


class Blocking(OnServer, StoreContract):
    def open_store(self) -> RedisStore:
        return RedisStore(self.url)


class Async(OnServer, AsyncStoreContract):
    def open_store(self) -> AsyncRedisStore:
        return AsyncRedisStore(self.url)


class TestRedis(Blocking):
    server = "redis"


@pytest.mark.more
class TestRedisAsync(Async):
    server = "redis"


@pytest.mark.more
class TestValkey(Blocking):
    server = "valkey"


@pytest.mark.more
class TestValkeyAsync(Async):
    server = "valkey"


@pytest.mark.more
class TestRedisCluster(Blocking):
    server = "redis_cluster"


@pytest.mark.more
class TestRedisClusterAsync(Async):
    server = "redis_cluster"


@pytest.mark.more
class TestValkeyCluster(Blocking):
    server = "valkey_cluster"


@pytest.mark.more
class TestValkeyClusterAsync(Async):
    server = "valkey_cluster"
