"""All servers by name: taken from the environment, from `python -m services up`, or started, at the first question.

The processes of a parallel run share the servers that take seconds to start: whoever asks first starts one, and it ends
with the run. What a test needs of it is its own: a database, a table, a topic, a queue. A Redis has no such parts (its
scripts, clients and settings are everybody's) and starts in no time: each process has its own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services import dynamodb, kafka, mariadb, nats, patroni, postgres, rabbitmq, redis, redis_cluster, state, temporal
from services.home import Home, Watchdog, open_to_all, root_folder
from services.processes import ServerFailed
from services.servers import Server


@dataclass(frozen=True)
class Kind:
    start: Callable[[Home], Server]
    # The variable that names a server to use instead.
    variable: str
    # One whose writes a kill cannot take back, for the tests that kill it.
    start_own: Callable[[Home], Server] | None = None
    # Whether the processes of a parallel run may use one and the same.
    shared: bool = False


KINDS = {
    "postgres": Kind(postgres.start_postgres, "ONEFOLD_POSTGRES_URL", shared=True),
    "mariadb": Kind(mariadb.start_mariadb, "ONEFOLD_MYSQL_URL", shared=True),
    "redis": Kind(redis.start_redis, "ONEFOLD_REDIS_URL", lambda home: redis.start_redis(home, durable=True)),
    "valkey": Kind(redis.start_valkey, "ONEFOLD_VALKEY_URL", lambda home: redis.start_valkey(home, durable=True)),
    "redis-pair": Kind(redis.start_pair, "ONEFOLD_REDIS_PAIR_URL", lambda home: redis.start_pair(home, durable=True)),
    "redis-sentinel": Kind(
        redis.start_sentinel,
        "ONEFOLD_REDIS_SENTINEL_URL",
        lambda home: redis.start_sentinel(home, down_after=redis.HASTY_MILLISECONDS),
    ),
    "redis-cluster": Kind(redis_cluster.start_redis_cluster, "ONEFOLD_REDIS_CLUSTER_URL"),
    "valkey-cluster": Kind(redis_cluster.start_valkey_cluster, "ONEFOLD_VALKEY_CLUSTER_URL"),
    "dynamodb": Kind(dynamodb.start_dynamodb, "ONEFOLD_DYNAMODB_URL", shared=True),
    "kafka": Kind(kafka.start_kafka, "ONEFOLD_KAFKA_URL", shared=True),
    "rabbitmq": Kind(rabbitmq.start_rabbitmq, "ONEFOLD_RABBITMQ_URL", shared=True),
    "nats": Kind(nats.start_nats, "ONEFOLD_NATS_URL", shared=True),
    "temporal": Kind(temporal.start_temporal, "ONEFOLD_TEMPORAL_URL", shared=True),
}
# Too large to be shared, and there to be harmed: only for the test or the soak that asks for one of its own.
OWN_ONLY: dict[str, Callable[[Home], Server]] = {
    "patroni": patroni.start_patroni,
    "patroni-async": lambda home: patroni.start_patroni(home, synchronous=False),
}
PGBOUNCER_VARIABLE = "ONEFOLD_PGBOUNCER_URL"
UP = "python -m services up"
NAMES = (*KINDS, "pgbouncer")
SHARED = {*(name for name, kind in KINDS.items() if kind.shared), "pgbouncer"}


class Run:
    """What the process that starts the others of a parallel run has of their shared servers: the folder and the end."""

    def __init__(self) -> None:
        self.folder = _new_folder()
        open_to_all(self.folder)
        self._watchdog = Watchdog(self.folder)
        self._watchdog.start()
        self._leases = state.Leases()
        for entry in state.recall_all():
            if entry.name in SHARED and self._leases.take(entry.name):
                state.remember(Server(entry.name, entry.url, entry.version, UP), self.folder)

    def close(self) -> None:
        self._watchdog.close("end")
        self._leases.close()


class House:
    """The servers of one test session, which may be one of several processes of a run."""

    def __init__(self, run: Path | None = None) -> None:
        """Share the servers in the folder `run`, if there is one."""
        self._shared_home = Home(run, watched=True, shared=True) if run is not None else None
        self._home: Home | None = None
        self._found: dict[str, Server | Exception] = {}
        self._leases = state.Leases()

    @property
    def home(self) -> Home:
        if self._home is None:
            self._home = Home(_new_folder(), watched=True)
        return self._home

    def __getitem__(self, name: str) -> Server:
        """The server; what failed once is not tried again."""
        if name not in self._found:
            try:
                self._found[name] = self._find(name)
            except Exception as error:
                self._found[name] = error
                raise
        found = self._found[name]
        if isinstance(found, Exception):
            raise found
        return found

    def _find(self, name: str) -> Server:
        variable = PGBOUNCER_VARIABLE if name == "pgbouncer" else KINDS[name].variable
        if variable in os.environ:
            return _class_of(name)(name, os.environ[variable], origin=variable)
        if self._shared_home is not None and name in SHARED:
            return self._shared(self._shared_home, name)
        # The PgBouncer of `up` stands before the PostgreSQL of `up`.
        if name != "pgbouncer" or self["postgres"].origin == UP:
            shared = self._leases.take(name)
            if shared is not None:
                return _class_of(name)(name, shared.url, shared.version, UP)
        return start(self.home, name, self.__getitem__)

    def _shared(self, home: Home, name: str) -> Server:
        """The run's server: whoever comes second waits until it is started. It has no processes to harm."""
        with state.locked(home.folder / f"{name}.lock"):
            entry = state.recall(name, home.folder)
            if entry is None:
                entry = state.remember(start(home, name, self.__getitem__), home.folder)
        return Server(name, entry.url, entry.version, entry.origin)

    @contextmanager
    def own(self, name: str) -> Iterator[Server]:
        """A server that nobody shares, to be harmed; it ends with the block."""
        begin = OWN_ONLY.get(name) or KINDS[name].start_own or KINDS[name].start
        server = whole(self.home, begin)
        try:
            yield server
        finally:
            server.end()

    def close(self) -> None:
        if self._home is not None:
            self._home.close()
        self._leases.close()


def _new_folder() -> Path:
    root_folder().mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root_folder()))


def start(home: Home, name: str, other: Callable[[str], Server]) -> Server:
    if name == "pgbouncer":
        behind = other("postgres")
        return whole(home, lambda home: postgres.start_pgbouncer(home, behind))
    return whole(home, KINDS[name].start)


def whole(home: Home, begin: Callable[[Home], Server]) -> Server:
    """All processes of a server, or none: a cluster that does not form leaves nothing behind.

    A port that was free may be another's a moment later: what does not start is tried once more, elsewhere.
    """
    for tries_left in (1, 0):
        before = len(home.daemons)
        try:
            return begin(home)
        except BaseException as error:
            for daemon in home.daemons[before:]:
                daemon.end()
            if not isinstance(error, ServerFailed) or not tries_left:
                raise
    raise AssertionError("the second failure was raised")


def _class_of(name: str) -> type[Server]:
    return redis.Pair if name == "redis-pair" else Server
