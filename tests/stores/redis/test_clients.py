"""Which clients and which URLs the Redis store takes, and what it says to the others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import redis
import redis.asyncio
import valkey
import valkey.asyncio

from onefold import AsyncGuard, Guard, StoreUnavailable, UsageError
from onefold._model import Close, State
from onefold.stores.base import Query
from onefold.stores.redis import AsyncRedisStore, RedisStore, adopt, open_async_store, open_store
from onefold.stores.redis.sender import named
from onefold.stores.redis.urls import parsed
from tests.stores.redis.tools import DONE, claim_of, entry

# Some of its classes have no types.
made: Any = redis


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


# Clients of the caller's own.

BROUGHT: dict[str, Callable[[int], Any]] = {
    "plain": lambda port: redis.Redis(port=port),
    "RESP3": lambda port: redis.Redis(port=port, protocol=3),
    "decoding": lambda port: redis.Redis(port=port, decode_responses=True),
    "decoding RESP3": lambda port: redis.Redis(port=port, decode_responses=True, protocol=3),
    "one connection": lambda port: redis.Redis(port=port, single_connection_client=True),
    "a blocking pool": lambda port: redis.Redis.from_pool(made.BlockingConnectionPool(port=port, max_connections=2)),
    "a subclass": lambda port: type("Mine", (redis.Redis,), {})(port=port),
    "valkey": lambda port: valkey.Valkey(port=port),
    "valkey, decoding": lambda port: valkey.Valkey(port=port, decode_responses=True),
}

ASYNC: dict[str, Callable[[int], Any]] = {
    "plain": lambda port: redis.asyncio.Redis(port=port),
    "RESP3": lambda port: redis.asyncio.Redis(port=port, protocol=3),
    "decoding": lambda port: redis.asyncio.Redis(port=port, decode_responses=True),
    "few connections": lambda port: redis.asyncio.Redis(port=port, max_connections=2),
    "a blocking pool": lambda port: redis.asyncio.Redis.from_pool(
        redis.asyncio.BlockingConnectionPool(port=port, max_connections=2)
    ),
    "valkey": lambda port: valkey.asyncio.Valkey(port=port),
}

CLUSTERS: dict[str, Callable[[int], Any]] = {
    "plain": lambda port: redis.RedisCluster("127.0.0.1", port),
    "decoding": lambda port: redis.RedisCluster("127.0.0.1", port, decode_responses=True),
    "valkey": lambda port: valkey.ValkeyCluster("127.0.0.1", port),
}

ASYNC_CLUSTERS: dict[str, Callable[[int], Any]] = {
    "plain": lambda port: redis.asyncio.RedisCluster("127.0.0.1", port),
    "decoding": lambda port: redis.asyncio.RedisCluster("127.0.0.1", port, decode_responses=True),
    "valkey": lambda port: valkey.asyncio.ValkeyCluster("127.0.0.1", port),
}


def works(store: Any) -> None:
    one, more = entry("one", result=bytes(range(256))), [entry(f"key-{number}") for number in range(20)]
    assert store.claim(one) is None
    assert store.claim(entry("one")).token == one.token
    assert store.claim_all(more) == [None] * 20
    assert store.finish(claim_of(one), DONE) is True
    assert [record.state for record in store.browse(Query(key="one"), 10)] == [State.DONE]


async def works_async(store: Any) -> None:
    one, more = entry("one", result=bytes(range(256))), [entry(f"key-{number}") for number in range(20)]
    assert await store.claim(one) is None
    assert (await store.claim(entry("one"))).token == one.token
    assert await asyncio.gather(*(store.claim(each) for each in more)) == [None] * 20
    assert await store.claim_all(more) == [None] * 20
    assert await store.finish(claim_of(one), DONE) is True
    assert [record.state for record in await store.browse(Query(key="one"), 10)] == [State.DONE]


@pytest.mark.parametrize("kind", BROUGHT)
def test_a_client_of_the_callers_own_is_used_and_not_closed(kind: str, redis_url: str) -> None:
    with BROUGHT[kind](port_of(redis_url)) as client:
        store = adopt(client, is_async=False)
        assert isinstance(store, RedisStore)

        works(store)

        connection = client.client_id()
        store.close()
        assert client.client_id() == connection


def counting(pool: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each request to the pool for a connection since."""
    asked: list[Any] = []
    take = pool.get_connection

    def counted(*command: str) -> Any:
        asked.append(command)
        return take(*command)

    monkeypatch.setattr(pool, "get_connection", counted)
    return asked


@pytest.mark.parametrize("library", [redis, valkey])
def test_a_busy_pool_of_the_callers_own_is_waited_for_once(
    library: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = library.BlockingConnectionPool(port=port_of(redis_url), max_connections=1, timeout=0.01)
    client = (library.Redis if library is redis else library.Valkey)(connection_pool=pool)
    store, claims = RedisStore(client), [entry("one"), entry("two")]
    with client, closing(store):
        assert store.claim_all(claims) == [None, None]
        busy = pool.get_connection(*named(pool.__class__))
        asked = counting(pool, monkeypatch)

        with pytest.raises(StoreUnavailable, match="all connections of the client are in use"):
            store.read(claims[0].address)
        assert len(asked) == 1
        assert store.finish(claim_of(claims[0]), DONE) is True
        assert len(asked) == 2
        assert store.close_all([Close(claim_of(claims[1]), DONE)]) == [True]
        assert len(asked) == 3
        pool.release(busy)
    pool.disconnect()


def test_a_busy_async_pool_of_the_callers_own_is_waited_for_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def waits() -> int:
        pool: Any = redis.asyncio.BlockingConnectionPool(port=port_of(redis_url), max_connections=1, timeout=0.01)
        store = AsyncRedisStore(redis.asyncio.Redis(connection_pool=pool))
        assert await store.claim(entry("one")) is None
        busy = await pool.get_connection()
        asked = counting(pool, monkeypatch)

        with pytest.raises(StoreUnavailable, match="all connections of the client are in use"):
            await store.read(entry("one").address)

        await pool.release(busy)
        await store.aclose()
        await pool.disconnect()
        return len(asked)

    assert asyncio.run(waits()) == 1


@pytest.mark.parametrize("kind", CLUSTERS)
def test_a_cluster_client_of_the_callers_own_is_used(kind: str, redis_cluster_url: str) -> None:
    with CLUSTERS[kind](port_of(redis_cluster_url)) as client:
        store: Any = adopt(client, is_async=False)
        with closing(store):
            works(store)


@pytest.mark.parametrize("kind", ASYNC)
def test_an_async_client_of_the_callers_own_is_used_and_not_closed(kind: str, redis_url: str) -> None:
    async def story() -> None:
        async with ASYNC[kind](port_of(redis_url)) as client:
            store = adopt(client, is_async=True)
            assert isinstance(store, AsyncRedisStore)

            await works_async(store)

            connection = await client.client_id()
            await store.aclose()
            assert await client.client_id() == connection

    asyncio.run(story())


@pytest.mark.parametrize("kind", ASYNC_CLUSTERS)
def test_an_async_cluster_client_of_the_callers_own_is_used(kind: str, redis_cluster_url: str) -> None:
    async def story() -> None:
        async with ASYNC_CLUSTERS[kind](port_of(redis_cluster_url)) as client:
            await works_async(adopt(client, is_async=True))

    asyncio.run(story())


@pytest.mark.parametrize("library", [redis, valkey], ids=["redis", "valkey"])
def test_a_cancelled_call_loses_no_connection_of_a_cluster_client(library: Any, redis_cluster_url: str) -> None:
    async def deliver() -> None:
        kind = getattr(library.asyncio, f"{library.__name__.capitalize()}Cluster")
        async with kind("127.0.0.1", port_of(redis_cluster_url), max_connections=2) as client:
            store: Any = adopt(client, is_async=True)
            await works_async(store)
            for number in range(20):
                task = asyncio.ensure_future(store.read(entry("one").address))
                for _ in range(number % 5 + 1):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
            assert (await store.read(entry("one").address)).state is State.DONE
            await store.aclose()

    asyncio.run(deliver())


def test_a_guard_takes_a_client(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        with Guard(client) as guard:
            assert guard.run("charge", "pay_7f3a", lambda: 4200).value == 4200
        assert client.ping()
        with Guard(lambda: client) as guard:
            assert guard.run("charge", "pay_7f3a", lambda: 1).replayed


def test_an_async_guard_takes_a_client(redis_url: str) -> None:
    async def charge() -> int:
        return 4200

    async def story() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            async with AsyncGuard(client) as guard:
                assert (await guard.run("charge", "pay_7f3a", charge)).value == 4200
            assert await client.ping()

    asyncio.run(story())


def test_a_store_takes_options_beside_a_client(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        store = RedisStore(client, prefix="mine:")
        store.claim(entry())

        assert client.keys() == [b"mine:\x00\x06chargekey"]
        store.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda port: redis.Redis(port=port).pipeline(),
        lambda port: redis.ConnectionPool(port=port),
        lambda port: made.Sentinel([("127.0.0.1", port)]),
        lambda _port: object(),
    ],
)
def test_what_is_no_client_is_refused(make: Callable[[int], Any]) -> None:
    with pytest.raises(UsageError, match=r"is not a Redis client\. Pass a redis\.Redis"):
        adopt(make(1), is_async=False)


def test_a_client_of_the_other_kind_is_refused() -> None:
    with pytest.raises(UsageError, match=r"redis.asyncio.client.Redis belongs to an AsyncGuard.*a client of redis$"):
        adopt(redis.asyncio.Redis(), is_async=False)
    with pytest.raises(UsageError, match=r"redis.client.Redis belongs to a Guard, .*a client of redis.asyncio$"):
        adopt(redis.Redis(), is_async=True)
    with pytest.raises(UsageError, match="belongs to an AsyncGuard"):
        Guard(redis.asyncio.Redis()).read("charge", "pay_7f3a")


def test_a_client_that_asks_replicas_is_refused() -> None:
    sentinel = made.Sentinel([("127.0.0.1", 1)])

    with pytest.raises(UsageError, match=r"this client asks replicas.*master_for"):
        adopt(sentinel.slave_for("mymaster"), is_async=False)


def test_a_wait_longer_than_the_clients_patience_is_refused(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, socket_timeout=0.5) as client, pytest.raises(UsageError, match="shorter than"):
        RedisStore(client, wait_replicas=1)


# URLs.


@pytest.mark.parametrize(
    ("url", "means"),
    [
        ("redis://", {"kind": "alone", "hosts": (("localhost", 6379),), "database": 0, "tls": False, "login": {}}),
        ("redis://example.org:7000/3", {"hosts": (("example.org", 7000),), "database": 3}),
        ("rediss://example.org", {"tls": True}),
        ("valkey://example.org", {"kind": "alone", "tls": False}),
        ("valkeys://example.org", {"tls": True}),
        ("redis://[::1]:7000", {"hosts": (("::1", 7000),)}),
        ("redis://:s%40fe@h", {"login": {"password": "s@fe"}}),
        ("redis://me:s:a%2Ffe@h", {"login": {"username": "me", "password": "s:a/fe"}}),
        ("redis+unix:///run/redis.sock", {"kind": "unix", "path": "/run/redis.sock", "hosts": ()}),
        ("redis+cluster://a:1,b", {"kind": "cluster", "hosts": (("a", 1), ("b", 6379))}),
        ("valkeys+cluster://a", {"kind": "cluster", "tls": True}),
        ("redis+sentinel://a,b:2/shop", {"kind": "sentinel", "hosts": (("a", 26379), ("b", 2)), "service": "shop"}),
        ("redis+sentinel://u:p@a/shop/4", {"database": 4, "login": {"username": "u", "password": "p"}}),
        ("redis+sentinel://a/shop?sentinel_password=x", {"sentinel_login": {"password": "x"}}),
        (
            "redis://h?prefix=a:&wait_replicas=2&wait_timeout=500ms",
            {"store": {"prefix": "a:", "wait_replicas": 2, "wait_timeout": 0.5}},
        ),
        ("redis://h", {"options": {"socket_timeout": 5.0, "socket_connect_timeout": 2.0}, "store": {}}),
        (
            "redis://h?socket_timeout=3&socket_connect_timeout=1500ms",
            {"options": {"socket_timeout": 3.0, "socket_connect_timeout": 1.5}},
        ),
    ],
)
def test_a_url_says_which_servers_and_how(url: str, means: dict[str, Any]) -> None:
    settings = parsed(url)._asdict()

    assert {name: settings[name] for name in means} == means


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (
            "redis+clutser://h",
            "write redis://, redis+unix://, redis+sentinel://, redis+cluster://: did you mean 'cluster'?",
        ),
        ("redis://h#1", "write redis://"),
        ("redis://h?prefx=a", "'prefx' is not one of prefix, wait_replicas, wait_timeout, wakeups"),
        ("redis://h?prefx=a", "did you mean 'prefix'?"),
        ("redis://h?sentinel_password=x", "'sentinel_password' is not one of"),
        ("redis://h?prefix=", "prefix='' has to be a string of 1 to 128 bytes"),
        ("redis://h?prefix=" + "p" * 129, "has to be a string of 1 to 128 bytes"),
        ("redis://h?wait_replicas=-1", "wait_replicas='-1' has to be a whole number, 0 or more"),
        (
            "redis://h?wait_replicas=1&wait_timeout=7s",
            "wait_timeout=7.0 has to be shorter than the client's socket_timeout, 5s",
        ),
        ("redis://h?socket_timeout=soon", "socket_timeout='soon' is not a duration"),
        ("redis://h?socket_timeout=0", "socket_timeout=0.0 has to be more than zero"),
        ("redis://h?socket_timeout=forever", "socket_timeout"),
        ("redis://h?max_connections=0", "max_connections=0 has to be a whole number, 1 or more"),
        ("redis://h?ssl_cert_reqs=no", "ssl_cert_reqs='no' is not one of"),
        ("redis://h?ssl_check_hostname=maybe", "ssl_check_hostname='maybe' has to be yes or no"),
        ("redis://h?client_name=", "client_name= is empty"),
        ("redis://h/shop", "'shop' is not a number of a database"),
        ("redis://h/1/2", "'1/2' is not a number of a database"),
        ("redis+cluster://h/1", "a cluster has only one database"),
        ("redis+sentinel://h", "names no service: write redis+sentinel://host:port/service"),
        ("redis://a,b", "names 2 servers: write redis+sentinel:// or redis+cluster://"),
        ("redis://h:x", "write host:port"),
        ("redis+unix://run/redis.sock", "write redis+unix:///path/to/socket"),
    ],
)
def test_a_wrong_url_says_what_to_write(url: str, says: str) -> None:
    for open_it in (open_store, open_async_store):
        with pytest.raises(UsageError) as refused:
            open_it(url)
        assert says in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:sesame@h?prefx=a", "me:***@h"),
        ("redis+sentinel://h/shop?sentinel_password=sesame&prefx=a", "sentinel_password=***&prefx=a"),
        ("redis+sentinel://me:sesame@h/shop?prefx=a&sentinel_password=ses@me", "sentinel_password=***"),
    ],
)
def test_a_wrong_url_shows_no_password(url: str, shown: str) -> None:
    with pytest.raises(UsageError) as refused:
        open_store(url)

    assert "ses" not in str(refused.value)
    assert shown in str(refused.value)
    with pytest.raises(UsageError) as refused:
        Guard(url)
    assert "ses" not in str(refused.value)


def test_a_url_asks_nobody() -> None:
    for url in ("redis://192.0.2.1", "redis+cluster://192.0.2.1", "redis+sentinel://192.0.2.1/shop"):
        open_store(url).close()
        open_async_store(url)


def test_a_database_and_a_name_are_what_the_url_says(redis_url: str) -> None:
    url = redis_url.removesuffix("/0") + "/5?client_name=onefold-test&health_check_interval=30s"
    store = open_store(url)
    store.claim(entry())

    with redis.Redis(port=port_of(redis_url), db=5) as client:
        assert client.dbsize() == 1
        assert any(connected["name"] == "onefold-test" for connected in client.client_list())
        client.flushdb()
    store.close()


def test_a_missing_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)

    with pytest.raises(UsageError, match=r"pip install 'onefold\[redis\]'"):
        open_store("redis://h").claim(entry())


@pytest.fixture
def sentinel_url(redis_sentinel: Any) -> str:
    return str(redis_sentinel.url)


def test_sentinel_names_the_primary(sentinel_url: str) -> None:
    store = open_store(f"{sentinel_url}?prefix=blocking:")
    works(store)
    store.close()

    async def story() -> None:
        async_store = open_async_store(f"{sentinel_url}?prefix=async:")
        await works_async(async_store)

    asyncio.run(story())


def test_a_sentinels_client_of_the_callers_own_is_used(sentinel_url: str) -> None:
    sentinel = made.Sentinel([("127.0.0.1", port_of(sentinel_url))])
    with sentinel.master_for("mymaster") as client, closing(RedisStore(client, prefix="brought:")) as store:
        works(store)
    for asked in sentinel.sentinels:
        asked.close()


def test_a_service_that_no_sentinel_knows_is_told(sentinel_url: str) -> None:
    with (
        closing(open_store(sentinel_url.replace("mymaster", "nobody"))) as store,
        pytest.raises(StoreUnavailable, match=r"no Sentinel knows a primary .*nobody"),
    ):
        store.claim(entry())
