"""Where records are: what a dispatch has to know about a client's servers, sync and async."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


def library_of(client: Any) -> str:
    """Return the client's package: redis, or valkey, which was forked from redis and has the same names."""
    roots = (kind.__module__.partition(".")[0] for kind in type(client).__mro__)
    return next((root for root in roots if root in ("redis", "valkey")), "redis")


def errors_of(client: Any) -> ModuleType:
    return import_module(f"{library_of(client)}.exceptions")


class Alone:
    """One server, or the primary that Sentinel names: its node is the client's pool."""

    client: Any
    clustered = False

    def node_of(self, _key: bytes) -> Any:
        return self.client.connection_pool

    def node_at(self, _host: str, _port: int) -> Any:
        return None

    def nodes(self) -> list[Any]:
        return [self.client.connection_pool]


class Cluster:
    """Many servers: their nodes are the client's."""

    client: Any
    clustered = True

    def node_of(self, key: bytes) -> Any:
        return self.client.get_node_from_key(key)

    def node_at(self, host: str, port: int) -> Any:
        return self.client.get_node(host=host, port=port)

    def nodes(self) -> list[Any]:
        return list(self.client.get_primaries())
