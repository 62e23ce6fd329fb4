"""Redis's description, for modules that know no store."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import SplitResult, unquote

from onefold.stores.identity import Identity, host_and_port, hosts_in, server
from onefold.stores.kinds import StoreKind
from onefold.stores.redis.urls import DEPLOYMENTS, PORT, PREFIX, SENTINEL_PORT


def identity(_url: str, parts: SplitResult, options: dict[str, str]) -> Identity:
    """Return where the records are, ignoring the login."""
    way = parts.scheme.partition("+")[2]
    part = options.get("prefix", PREFIX)
    if way == "unix":
        path = os.path.normpath(unquote(parts.path))
        return Identity("redis", frozenset({path}), _number(options.get("db", "")), part)
    usual = str(SENTINEL_PORT if way == "sentinel" else PORT)
    found = (host_and_port(one) for one in hosts_in(parts).split(","))
    servers = frozenset(server(host, port or usual) for host, port in found)
    service, _, number = unquote(parts.path).strip("/").rpartition("/")
    if way == "sentinel" and not service:
        service, number = number, ""
    name = f"{service}/{_number(options.get('db', number))}"
    return Identity(f"redis+{way}" if way else "redis", servers, name, part)


def _number(written: str) -> str:
    """Return the number of a database; without one, the first."""
    return written.lstrip("0") or "0"


KIND: Final = StoreKind(
    name="Redis",
    has_transactions=False,
    expires_by_itself=True,
    may_evict=True,
    variants=tuple(way for way in DEPLOYMENTS if way),
    health="onefold.health.redis",
    identity=identity,
)
