"""Find URLs that name one store, however they are written. It opens nothing.

If in doubt, it assumes one store: two guards that write the same records are a lost message, and a superfluous finding
is a line to read.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

# Schemes of one protocol: the same address cannot be two of them.
ALIASES: Final = {
    "postgres": "postgresql",
    "mariadb": "mysql",
    "rediss": "redis",
    "valkey": "redis",
    "valkeys": "redis",
}

PORTS: Final = {"postgresql": "5432", "mysql": "3306", "redis": "6379"}
SENTINEL_PORT: Final = "26379"

# How a server on this machine is reached without a network.
SOCKETS: Final = re.compile(r"/(var/run|run|tmp)(/postgresql|/(mysqld/mysqld|mysql)\.sock)?")

# The schema that is searched anyway.
USUAL_SCHEMA: Final = "public"
# The defaults of a URL that names none.
USUAL_TABLE: Final = "onefold_records"
USUAL_PREFIX: Final = "onefold:"


class Place(NamedTuple):
    """Where a store has its records."""

    kind: str
    # Any of them leads there.
    servers: frozenset[str] = frozenset()
    # The database, file or table.
    name: str = ""
    # What separates records in one database: a schema, or a prefix.
    part: str = ""
    # None: that of the environment, which may be any.
    region: str | None = None

    def may_be(self, other: Place) -> bool:
        """Return whether both are, or may be, one store."""
        if (self.kind, self.name, self.part) != (other.kind, other.name, other.part):
            return False
        if not (self.servers & other.servers or self.servers == other.servers):
            return False
        return self.region == other.region or None in (self.region, other.region)


def place_of(url: str) -> Place:
    """Return the place that a URL names."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return Place(url)
    scheme, _, way = parts.scheme.lower().partition("+")
    options = dict(parse_qsl(parts.query))
    match ALIASES.get(scheme, scheme):
        case "postgresql":
            return _postgresql(parts, options)
        case "mysql":
            return _mysql(parts, options)
        case "redis":
            return _redis(parts, way, options)
        case "sqlite":
            # A file in the working directory, as the store would open it here.
            return Place("sqlite", name=os.path.abspath(unquote(parts.path).removeprefix("/")))
        case "dynamodb":
            server = frozenset({options["endpoint_url"].lower().rstrip("/")} if "endpoint_url" in options else ())
            # The name of a table is case-sensitive.
            table = f"{parts.netloc}{parts.path}".rstrip("/") or USUAL_TABLE
            return Place("dynamodb", server, table, region=options.get("region"))
        case other:
            return Place(other, name=url.partition(":")[2])


def _postgresql(parts: SplitResult, options: dict[str, str]) -> Place:
    """Return the place of a PostgreSQL URL: libpq prefers the query; a database is named after its user by default."""
    login, _, _ = parts.netloc.rpartition("@")
    user = options.get("user") or unquote(login.partition(":")[0])
    name = options.get("dbname") or unquote(parts.path).strip("/") or user
    search = re.search(r"search_path\s*=\s*(\S+)", options.get("options", ""))
    schema = options.get("search_path") or (search[1] if search else USUAL_SCHEMA)
    return Place("postgresql", frozenset(_postgresql_servers(parts, options)), name, schema)


def _postgresql_servers(parts: SplitResult, options: dict[str, str]) -> Iterator[str]:
    written = [_host_and_port(one) for one in _hosts(parts).split(",")]
    hosts = (options.get("hostaddr") or options.get("host") or "").split(",")
    if hosts == [""]:
        hosts = [host for host, _ in written]
    ports = options["port"].split(",") if options.get("port") else [port for _, port in written]
    # A single port applies to all hosts.
    more = repeat(ports[0] if len(ports) == 1 else "")
    for host, port in zip(hosts, chain(ports, more), strict=False):
        yield _server(host, port or PORTS["postgresql"])


def _mysql(parts: SplitResult, options: dict[str, str]) -> Place:
    if "unix_socket" in options:
        server = _server(options["unix_socket"], PORTS["mysql"])
    else:
        host, port = _host_and_port(_hosts(parts))
        server = _server(host, port or PORTS["mysql"])
    return Place("mysql", frozenset({server}), unquote(parts.path).strip("/"))


def _redis(parts: SplitResult, way: str, options: dict[str, str]) -> Place:
    part = options.get("prefix", USUAL_PREFIX)
    if way == "unix":
        return Place("redis", frozenset({os.path.normpath(unquote(parts.path))}), _number(options.get("db", "")), part)
    usual = SENTINEL_PORT if way == "sentinel" else PORTS["redis"]
    found = (_host_and_port(one) for one in _hosts(parts).split(","))
    servers = frozenset(_server(host, port or usual) for host, port in found)
    service, _, number = unquote(parts.path).strip("/").rpartition("/")
    if way == "sentinel" and not service:
        service, number = number, ""
    return Place(f"redis+{way}" if way else "redis", servers, f"{service}/{_number(options.get('db', number))}", part)


def _number(written: str) -> str:
    """Return the number of the database; the first by default."""
    return written.lstrip("0") or "0"


def _hosts(parts: SplitResult) -> str:
    """Return hosts and ports without a login: whoever connects, the records are the same."""
    return parts.netloc.rpartition("@")[2]


def _host_and_port(written: str) -> tuple[str, str]:
    host, colon, port = written.rpartition(":")
    return (host, port) if colon and not written.endswith("]") else (written, "")


def _server(written: str, port: str) -> str:
    host = unquote(written)
    if host.startswith("/"):
        return f"localhost:{port}" if SOCKETS.fullmatch(host.rstrip("/")) else f"{os.path.normpath(host)}:{port}"
    host = host.lower().strip("[]").rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{host or 'localhost'}:{port.lstrip('0')}"
    here = address.is_loopback or address.is_unspecified
    return f"{'localhost' if here else address.compressed}:{port.lstrip('0')}"


def is_in_memory(url: str) -> bool:
    """Return whether SQLite would keep this database in the memory of one connection."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "sqlite":
        return False
    path, _, query = unquote(rest).partition("?")
    return ":memory:" in path or not path.strip("/") or "mode=memory" in query
