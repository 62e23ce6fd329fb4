"""Identify where a store's records are, however its URL is written: two URLs of one location are one store.

Nothing is opened, and doubts count as one store: two guards that unknowingly share records lose a message, while a
superfluous finding is only a line to read.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple
from urllib.parse import SplitResult, unquote

# Paths of sockets for servers on this machine.
SOCKETS: Final = re.compile(r"/(var/run|run|tmp)(/postgresql|/(mysqld/mysqld|mysql)\.sock)?")


class Identity(NamedTuple):
    """The location of a store's records."""

    kind: str
    # Any one of them leads there.
    servers: frozenset[str] = frozenset()
    # The database, file or table.
    name: str = ""
    # Separates records inside one database: a schema, or a prefix.
    part: str = ""
    # None: taken from the environment, and so possibly any.
    region: str | None = None
    # Whether it is in the memory of one connection, invisible to all others.
    volatile: bool = False

    def may_be(self, other: Identity) -> bool:
        """Return whether both are, or may be, the same store."""
        if (self.kind, self.name, self.part) != (other.kind, other.name, other.part):
            return False
        if not (self.servers & other.servers or self.servers == other.servers):
            return False
        return self.region == other.region or None in (self.region, other.region)


def hosts_in(parts: SplitResult) -> str:
    """Return hosts and ports without a login: the records are the same for every user."""
    return parts.netloc.rpartition("@")[2]


def host_and_port(written: str) -> tuple[str, str]:
    host, colon, port = written.rpartition(":")
    return (host, port) if colon and not written.endswith("]") else (written, "")


def server(written: str, port: str) -> str:
    """Return one canonical name for a server: this machine has several."""
    import ipaddress

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
