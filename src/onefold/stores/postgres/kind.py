"""PostgreSQL's description, for modules that know no store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Final
from urllib.parse import SplitResult, unquote

from onefold.stores.identity import Identity, host_and_port, hosts_in, server
from onefold.stores.kinds import StoreKind

PORT: Final = "5432"

# The schema that is searched by default.
USUAL_SCHEMA: Final = "public"


def identity(_url: str, parts: SplitResult, options: dict[str, str]) -> Identity:
    """Return the database's identity as libpq would resolve it: the query wins, and a database defaults to its user."""
    login, _, _ = parts.netloc.rpartition("@")
    user = options.get("user") or unquote(login.partition(":")[0])
    name = options.get("dbname") or unquote(parts.path).strip("/") or user
    search = re.search(r"search_path\s*=\s*(\S+)", options.get("options", ""))
    schema = options.get("search_path") or (search[1] if search else USUAL_SCHEMA)
    return Identity("postgresql", frozenset(_servers(parts, options)), name, schema)


def _servers(parts: SplitResult, options: dict[str, str]) -> Iterator[str]:
    written = [host_and_port(one) for one in hosts_in(parts).split(",")]
    hosts = (options.get("hostaddr") or options.get("host") or "").split(",")
    if hosts == [""]:
        hosts = [host for host, _ in written]
    ports = options["port"].split(",") if options.get("port") else [port for _, port in written]
    # A single port applies to all hosts.
    more = repeat(ports[0] if len(ports) == 1 else "")
    for host, port in zip(hosts, chain(ports, more), strict=False):
        yield server(host, port or PORT)


KIND: Final = StoreKind(
    name="PostgreSQL",
    has_transactions=True,
    async_drivers=("asyncpg",),
    variants=("psycopg",),
    health="onefold.health.postgres",
    table_reader="onefold.stores.postgres.table_reader:PostgresReader",
    identity=identity,
)
