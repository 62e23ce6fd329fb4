"""Which URLs name one store, however they are written. Pure.

It errs on the side of one store: two guards that write the same records are a lost message, and a finding too many is
a line to read.
"""

from __future__ import annotations

import posixpath
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

# Schemes of one protocol: the same address cannot be two of them.
ALIASES: Final = {
    "postgres": "postgresql",
    "mariadb": "mysql",
    "rediss": "redis",
    "valkey": "redis",
    "valkeys": "redis",
}

# How a store is reached, not where it is.
DRIVERS: Final = frozenset({"asyncmy", "asyncpg", "psycopg", "pymysql"})

PORTS: Final = {"postgresql": "5432", "mysql": "3306", "redis": "6379"}

# Options that say where records are; the others (time-outs, pools, certificates) say how they are reached.
PLACES: Final = frozenset(
    {"db", "dbname", "endpoint_url", "host", "hostaddr", "options", "port", "prefix", "region", "unix_socket"}
)
KNOWN: Final = frozenset({*PORTS, "dynamodb", "sqlite"})

THIS_MACHINE: Final = frozenset({"127.0.0.1", "[::1]"})


def identity(url: str) -> str:
    """Return the same text for every way to write the address of one store."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    scheme, _, how = parts.scheme.lower().partition("+")
    kind = ALIASES.get(scheme, scheme)
    if kind not in KNOWN:
        return url
    options = sorted((name, value) for name, value in parse_qsl(parts.query) if name in PLACES)
    way = "" if how in DRIVERS else how
    return f"{kind}+{way}://{_hosts(kind, parts.netloc)}/{_path(kind, way, parts.path)} {options}"


def _hosts(kind: str, netloc: str) -> str:
    """Return hosts and ports without a login: whoever connects, the records are the same."""
    if kind not in PORTS:
        # The name of a table, where capitals count.
        return netloc
    return ",".join(_host(kind, one) for one in netloc.rpartition("@")[2].lower().split(","))


def _host(kind: str, written: str) -> str:
    name, colon, port = written.rpartition(":")
    if not colon or written.endswith("]"):
        name, port = written, ""
    return f"{'localhost' if name in THIS_MACHINE or not name else name}:{port or PORTS[kind]}"


def _path(kind: str, way: str, path: str) -> str:
    found = unquote(path).removeprefix("/")
    if kind == "sqlite":
        return posixpath.normpath(found)
    # Without a number it is the first database.
    return found.rstrip("/") or ("0" if kind == "redis" and not way else "")


def is_in_memory(url: str) -> bool:
    """Return whether SQLite would keep this database in the memory of one connection."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "sqlite":
        return False
    path, _, query = unquote(rest).partition("?")
    return ":memory:" in path or not path.strip("/") or "mode=memory" in query
