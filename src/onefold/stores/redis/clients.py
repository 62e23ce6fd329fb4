"""Create clients from settings, or adopt the caller's. A caller's client is never closed here."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

from onefold._checks import not_installed
from onefold.errors import UsageError
from onefold.stores.redis.async_sender import CONNECTIONS_MAX, AsyncClusterSender, AsyncSender
from onefold.stores.redis.connections.reserved import AsyncReservedClusterSender, AsyncReservedSender
from onefold.stores.redis.routing import library_of
from onefold.stores.redis.sender import ClusterSender, ConnectionCache, ConnectionPool, Sender
from onefold.stores.redis.urls import Settings

# One connection for each concurrent thread: the threads are the limit.
UNLIMITED: Final = 2**31


class Opened(NamedTuple):
    """A client of our own, and whatever else has to be closed with it."""

    client: Any
    besides: Sequence[Any] = ()

    def close(self) -> None:
        for client in (self.client, *self.besides):
            client.close()

    async def aclose(self) -> None:
        for client in (self.client, *self.besides):
            await client.aclose()


def opened(settings: Settings, *, is_async: bool) -> Opened:
    """Create a client, which the caller has to close. A sync cluster client queries the cluster at once."""
    redis = _library()
    namespace = import_module("redis.asyncio") if is_async else redis
    retry = import_module("redis.asyncio.retry" if is_async else "redis.retry").Retry
    no_backoff = import_module("redis.backoff").NoBackoff
    # Dispatches retry by themselves. RESP2, because nothing newer is needed.
    usual = {"protocol": 2, "max_connections": CONNECTIONS_MAX if is_async else UNLIMITED}
    options = usual | settings.options | settings.login | {"retry": retry(no_backoff(), 0)}
    if settings.kind == "unix":
        return Opened(namespace.Redis(unix_socket_path=settings.path, db=settings.database, **options))
    if settings.tls:
        options["ssl"] = True
    if settings.kind == "cluster":
        node = import_module("redis.asyncio.cluster" if is_async else "redis.cluster").ClusterNode
        nodes = [node(host, port) for host, port in settings.hosts]
        try:
            return Opened(namespace.RedisCluster(startup_nodes=nodes, **options))
        except BaseException:
            _close_asked(nodes)
            raise
    options["db"] = settings.database
    if settings.kind == "alone":
        ((host, port),) = settings.hosts
        return Opened(namespace.Redis(host=host, port=port, **options))
    asked = {name: options[name] for name in options if name.startswith(("socket_", "ssl", "retry", "protocol"))}
    sentinel_class = import_module("redis.asyncio.sentinel" if is_async else "redis.sentinel").Sentinel
    sentinel = sentinel_class(settings.hosts, sentinel_kwargs=asked | settings.sentinel_login, **options)
    return Opened(sentinel.master_for(settings.service), sentinel.sentinels)


def _close_asked(nodes: list[Any]) -> None:
    """Close the connections over which a client queried these nodes: a client that fails to open leaves them open."""
    for node in nodes:
        asked = getattr(node, "redis_connection", None)
        if asked is not None:
            asked.close()


def _library() -> Any:
    try:
        import redis
    except ImportError as error:
        raise not_installed("redis", "redis") from error
    return redis


def sender(client: Any, *, ours: bool) -> Sender:
    connections = ConnectionCache() if ours else ConnectionPool()
    return ClusterSender(client, connections) if _is_cluster(client) else Sender(client, connections)


def async_reserved_sender(client: Any) -> AsyncReservedSender:
    """Return the sender that renews claims, for one event loop."""
    return AsyncReservedClusterSender(client) if _is_cluster(client) else AsyncReservedSender(client)


def async_sender(client: Any, *, ours: bool) -> AsyncSender:
    """Return a sender for one event loop. Its connection limit is the client's own, or ours if that is lower."""
    if _is_cluster(client):
        limit = client.get_connection_kwargs().get("max_connections")
        return AsyncClusterSender(client, min(CONNECTIONS_MAX, limit or CONNECTIONS_MAX), ours=ours)
    return AsyncSender(client, min(CONNECTIONS_MAX, client.connection_pool.max_connections), ours=ours)


def check(client: Any, *, is_async: bool) -> None:
    """Raise `UsageError` for an object that is not a client, mixes up sync and async, or reads replicas."""
    names = _names(client)
    if not names & {"Redis", "Valkey", "RedisCluster", "ValkeyCluster"} or names & {"Pipeline", "ClusterPipeline"}:
        raise UsageError(
            f"{type(client).__name__} is not a Redis client. Pass a redis.Redis or a redis.RedisCluster; of Sentinel, "
            "sentinel.master_for(service); of a pool, redis.Redis(connection_pool=pool)"
        )
    if _is_async_client(client) != is_async:
        mine, other = ("an AsyncGuard", "a Guard") if is_async else ("a Guard", "an AsyncGuard")
        raise UsageError(
            f"{type(client).__module__}.{type(client).__name__} belongs to {other}, but this is {mine}: pass a "
            f"client of {library_of(client)}{'.asyncio' if is_async else ''}"
        )
    if getattr(getattr(client, "connection_pool", None), "is_master", True) is False:
        raise UsageError("this client asks replicas, which may not know of a claim yet: pass sentinel.master_for(…)")


def server_name(client: Any) -> str:
    """Return the location of a client's servers for messages, without a password."""
    if _is_cluster(client):
        return "Redis cluster"
    pool = client.connection_pool
    known = pool.connection_kwargs
    if hasattr(pool, "service_name"):
        return f"Redis {pool.service_name!r} by Sentinel"
    return f"Redis at {known.get('path') or '{}:{}'.format(known.get('host', 'localhost'), known.get('port', 6379))}"


def patience(client: Any) -> float | None:
    """Return how long the client waits for a reply."""
    options = client.get_connection_kwargs()
    found = options.get("socket_timeout")
    return float(found) if found is not None else None


def _names(client: Any) -> set[str]:
    return {kind.__name__ for kind in type(client).__mro__}


def _is_cluster(client: Any) -> bool:
    return bool(_names(client) & {"RedisCluster", "ValkeyCluster"})


def _is_async_client(client: Any) -> bool:
    return inspect.iscoroutinefunction(client.execute_command)
