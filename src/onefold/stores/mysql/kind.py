"""MySQL's and MariaDB's description, for modules that know no store."""

from __future__ import annotations

from typing import Final
from urllib.parse import SplitResult, unquote

from onefold.stores.identity import Identity, host_and_port, hosts_in, server
from onefold.stores.kinds import StoreKind
from onefold.stores.mysql.urls import PORT


def identity(_url: str, parts: SplitResult, options: dict[str, str]) -> Identity:
    if "unix_socket" in options:
        where = server(options["unix_socket"], str(PORT))
    else:
        host, port = host_and_port(hosts_in(parts))
        where = server(host, port or str(PORT))
    return Identity("mysql", frozenset({where}), unquote(parts.path).strip("/"))


KIND: Final = StoreKind(
    name="MySQL",
    has_transactions=True,
    async_drivers=("asyncmy",),
    variants=("pymysql",),
    health="onefold.health.mysql",
    table_reader="onefold.stores.mysql.table_reader:MysqlReader",
    identity=identity,
)
