"""Where records are kept: one file, or a server of our own that can be killed and started again.

All that differs from store to store is here. Servers are started for the soak alone and end with it.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote, unquote, urlsplit

from bench.soak.effects import Ledger, sqlite_connection
from bench.soak.plan import Mode
from services import mariadb, postgres, redis
from services.house import House
from services.patroni import Cluster
from services.servers import Server

CLAIM_MODES: Final[tuple[Mode, ...]] = ("rerun", "hold")
ALL_MODES: Final[tuple[Mode, ...]] = ("transactional", *CLAIM_MODES)

# The stores, and the modes that each can do.
STORES: Final[dict[str, tuple[Mode, ...]]] = {
    "sqlite": ALL_MODES,
    "postgres": ALL_MODES,
    "mariadb": ALL_MODES,
    "redis": CLAIM_MODES,
    "patroni": ALL_MODES,
    "patroni-async": ALL_MODES,
}

# Those whose primary is always struck: that is what they are for. They have to be named: `all` is without them.
FAILING_OVER: Final = ("patroni", "patroni-async")

CONNECT_SECONDS_MAX: Final = 30

# A server that is there has to answer, however long its disk takes. One that is killed refuses at once.
PATIENCE: Final = "120s"


class Room(NamedTuple):
    """Empty tables for one run: the store's URL, and the effects that can share a transaction with it."""

    url: str
    ledger: Ledger | None = None


class Environment(Protocol):
    """A store that runs can be made on, one after the other."""

    title: str
    has_server: bool
    # Whether it may lose what it has confirmed: then that is counted, and is no violation.
    loses: bool

    def room(self, folder: Path) -> Room: ...
    def kill(self) -> None: ...
    def restart(self) -> None: ...
    def leave_evidence(self, folder: Path) -> None: ...


@contextmanager
def opened(store: str, house: House, *, sync: str) -> Iterator[Environment]:
    """The environment of this store; `Missing` where this machine does not have its server."""
    if store == "sqlite":
        yield File(sync)
        return
    with house.own(store) as server:
        if isinstance(server, Cluster):
            from bench.soak.failover import FailingOver

            yield FailingOver(server)
            return
        yield Served(server, ROOMS[store])


class File:
    """SQLite: everything is in the folder of the run, and there is no server to strike."""

    has_server = False
    loses = False

    def __init__(self, sync: str) -> None:
        self.title = f"sqlite {sqlite3.sqlite_version}, sync={sync}"
        self._sync = sync

    def room(self, folder: Path) -> Room:
        path = folder / "records.db"
        url = f"sqlite:///{quote(str(path))}?sync={self._sync}&busy_timeout={PATIENCE}"
        return Room(url, Ledger(partial(sqlite_connection, path)))

    def kill(self) -> None:
        raise AssertionError("a file has no server")

    restart = kill

    def leave_evidence(self, folder: Path) -> None:
        """The file itself is in the folder already."""


class Served:
    """A server, and how one makes an empty room there."""

    has_server = True
    loses = False

    def __init__(self, server: Server, furnished: Callable[[Server], Room]) -> None:
        self.title = f"{server.name} {server.version}"
        self._server = server
        self._furnished = furnished

    def room(self, folder: Path) -> Room:  # noqa: ARG002 - nothing of it lies in the run's own folder
        return self._furnished(self._server)

    def kill(self) -> None:
        self._server.kill()

    def restart(self) -> None:
        """Back on the same port, with the same data; it answers when this returns."""
        self._server.restart()

    def leave_evidence(self, folder: Path) -> None:
        for daemon in self._server.daemons:
            shutil.copy(daemon.log, folder / f"{daemon.name}.log")


def _postgres_room(server: Server) -> Room:
    import psycopg

    url = postgres.Database(server).url
    patient = f"{url}?connect_timeout={PATIENCE.removesuffix('s')}&pool_timeout={PATIENCE}"
    return Room(patient, Ledger(partial(psycopg.connect, url, connect_timeout=CONNECT_SECONDS_MAX), "%s"))


def _mariadb_room(server: Server) -> Room:
    database = mariadb.Database(server)
    database.empty()
    url = f"{database.url}?connect_timeout={PATIENCE}&read_timeout={PATIENCE}&pool_timeout={PATIENCE}"
    return Room(url, Ledger(partial(_mariadb_connection, database.url), "%s"))


def _mariadb_connection(url: str) -> Any:
    import pymysql

    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=parts.path.removeprefix("/"),
        connect_timeout=CONNECT_SECONDS_MAX,
    )


def _redis_room(server: Server) -> Room:
    redis.empty(server)
    return Room(f"{server.url}?socket_timeout={PATIENCE}&socket_connect_timeout={PATIENCE}")


ROOMS: Final[dict[str, Callable[[Server], Room]]] = {
    "postgres": _postgres_room,
    "mariadb": _mariadb_room,
    "redis": _redis_room,
}
