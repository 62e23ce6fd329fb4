"""The fixtures that give tests their servers. A server starts when the first test asks for it, never before.

Session-wide, to look at: `postgres`, `pgbouncer`, `mariadb`, `redis_server`, `valkey`, `redis_cluster`,
`valkey_cluster`, `redis_pair`, `redis_sentinel`, `dynamodb`, `kafka`, `rabbitmq`, `nats_server`,
`temporal_server` (each has `.url` and `.version`).
Empty at the start of each test: `postgres_url`, `pgbouncer_url` (the same database), `mysql_url`, `redis_url`,
`valkey_url`, `redis_cluster_url`, `valkey_cluster_url`, `dynamodb_url` (the name of a table that does not exist yet).
Shared by all tests: `kafka_url`, with a new `kafka_topic` for each of them.
Shared by all tests: `rabbitmq_url`; a test gives its queues names that nobody else has, `rabbitmq_name` begins them.
Shared by all tests: `nats_url`; `nats_name` begins the names of a test's streams.
Shared by all tests: `temporal_address`; `temporal_name` begins the ids of a test's workflows, and is its task queue.
Shared by all tests: `sqs_url`, the emulator of DynamoDB; `sqs_name` begins the names of a test's queues.
Private to one test, to be killed, frozen and restarted: `own_postgres`, `own_mariadb`, `own_redis`, `own_valkey`,
`own_redis_pair`, `own_redis_sentinel`, `own_redis_cluster`, `own_kafka`, `own_rabbitmq`, `own_nats`, `own_temporal`,
and `own_patroni` with `own_patroni_async`, whose primary fails over. For a whole module: `with house.own("postgres") as
server`. The path of a program: `node`.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from services import dynamodb as dynamodb_server
from services import kafka as kafka_server
from services import mariadb as mariadb_server
from services import postgres as postgres_server
from services import programs
from services import redis as redis_servers
from services import temporal as temporal_servers
from services.house import House, Run
from services.programs import Missing, in_ci
from services.servers import Server

HOUSE = pytest.StashKey[House]()
RUN = pytest.StashKey[Run]()


def pytest_configure(config: pytest.Config) -> None:
    folder = getattr(config, "workerinput", {}).get("services")
    config.stash[HOUSE] = House(Path(folder) if folder else None)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[HOUSE].close()
    if RUN in config.stash:
        config.stash[RUN].close()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of a parallel run, before it starts, where the servers are that it shares with the others."""
    stash: pytest.Stash = node.config.stash
    if RUN not in stash:
        stash[RUN] = Run()
    node.workerinput["services"] = str(stash[RUN].folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were skipped, and why: a line for each reason, however many tests and files share it."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(_reason(report) for report in reports)
    if reasons:
        terminalreporter.write_line(f"tests skipped: {reasons.total()}", yellow=True)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number:>6} {reason}", yellow=True)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return told.removeprefix("Skipped: ")


@pytest.fixture(scope="session")
def house(request: pytest.FixtureRequest) -> House:
    return request.config.stash[HOUSE]


def found(request: pytest.FixtureRequest, name: str) -> Server:
    """The session's server of that name, or one line about what is missing."""
    with missing_told():
        return request.config.stash[HOUSE][name]


@contextmanager
def missing_told() -> Iterator[None]:
    """A missing server skips on a laptop and fails in CI."""
    try:
        yield
    except Missing as error:
        if in_ci():
            pytest.fail(f"CI needs every server: {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def node() -> str:
    """The program Node.js, for a client in another language."""
    with missing_told():
        return programs.node()


def session_server(name: str) -> Any:
    @pytest.fixture(scope="session")
    def server(request: pytest.FixtureRequest) -> Server:
        return found(request, name)

    return server


def own_server(name: str) -> Any:
    @pytest.fixture
    def server(house: House) -> Iterator[Server]:
        with missing_told(), house.own(name) as server:
            yield server

    return server


postgres = session_server("postgres")
pgbouncer = session_server("pgbouncer")
mariadb = session_server("mariadb")
redis_server = session_server("redis")
valkey = session_server("valkey")
redis_cluster = session_server("redis-cluster")
valkey_cluster = session_server("valkey-cluster")
redis_pair = session_server("redis-pair")
redis_sentinel = session_server("redis-sentinel")
dynamodb = session_server("dynamodb")
kafka = session_server("kafka")
rabbitmq = session_server("rabbitmq")
nats_server = session_server("nats")
temporal_server = session_server("temporal")

own_postgres = own_server("postgres")
own_mariadb = own_server("mariadb")
own_redis = own_server("redis")
own_valkey = own_server("valkey")
own_redis_pair = own_server("redis-pair")
own_redis_sentinel = own_server("redis-sentinel")
own_redis_cluster = own_server("redis-cluster")
own_kafka = own_server("kafka")
own_rabbitmq = own_server("rabbitmq")
own_nats = own_server("nats")
own_temporal = own_server("temporal")
own_patroni = own_server("patroni")
own_patroni_async = own_server("patroni-async")


@pytest.fixture(scope="session")
def postgres_database(postgres: Server) -> Iterator[postgres_server.Database]:
    database = postgres_server.Database(postgres)
    yield database
    database.drop()


@pytest.fixture
def postgres_url(postgres_database: postgres_server.Database) -> str:
    postgres_database.empty()
    return postgres_database.url


@pytest.fixture
def pgbouncer_url(postgres_url: str, pgbouncer: Server) -> str:
    return urlsplit(pgbouncer.url)._replace(path=urlsplit(postgres_url).path).geturl()


@pytest.fixture(scope="session")
def mariadb_database(mariadb: Server) -> Iterator[mariadb_server.Database]:
    database = mariadb_server.Database(mariadb)
    yield database
    database.drop()


@pytest.fixture
def mysql_url(mariadb_database: mariadb_server.Database) -> str:
    mariadb_database.empty()
    return mariadb_database.url


def emptied(name: str) -> Any:
    """The URL of a Redis, or of a cluster, whose data is gone."""

    @pytest.fixture(scope="session")
    def ours(request: pytest.FixtureRequest) -> Server:
        server = found(request, name.replace("_", "-"))
        if server.origin.startswith("ONEFOLD_") and redis_servers.holds_keys(server):
            pytest.fail(f"{server.origin} names a database with keys in it: name an empty one", pytrace=False)
        return server

    @pytest.fixture
    def url(request: pytest.FixtureRequest) -> str:
        server: Server = request.getfixturevalue(f"emptied_{name}")
        redis_servers.empty(server)
        return server.url

    return ours, url


emptied_redis, redis_url = emptied("redis")
emptied_valkey, valkey_url = emptied("valkey")
emptied_redis_cluster, redis_cluster_url = emptied("redis_cluster")
emptied_valkey_cluster, valkey_cluster_url = emptied("valkey_cluster")


@pytest.fixture(scope="session")
def dynamodb_tables(dynamodb: Server) -> Iterator[str]:
    """How the names of this session's tables begin."""
    prefix = f"onefold_{secrets.token_hex(4)}_"
    yield prefix
    dynamodb_server.delete_tables(dynamodb, prefix)


@pytest.fixture
def dynamodb_url(dynamodb: Server, dynamodb_tables: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in dynamodb_server.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return dynamodb_server.store_url(dynamodb, dynamodb_tables + secrets.token_hex(6))


@pytest.fixture
def rabbitmq_url(rabbitmq: Server) -> str:
    return rabbitmq.url


@pytest.fixture
def rabbitmq_name() -> str:
    """How the names of this test's queues and exchanges begin: AMQP has no word for emptying a broker."""
    return f"onefold-{secrets.token_hex(6)}"


@pytest.fixture
def nats_url(nats_server: Server) -> str:
    return nats_server.url


@pytest.fixture
def nats_name() -> str:
    """How the names of this test's streams begin. A dot would divide a subject."""
    return f"onefold-{secrets.token_hex(6)}"


@pytest.fixture
def temporal_address(temporal_server: Server) -> str:
    """The host and port, as clients take them."""
    return temporal_servers.address_of(temporal_server.url)


@pytest.fixture
def temporal_name() -> str:
    """How the ids of this test's workflows begin, and the name of its task queue."""
    return f"onefold-{secrets.token_hex(6)}"


@pytest.fixture
def sqs_url(dynamodb: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The endpoint. The same process serves DynamoDB."""
    for name, value in dynamodb_server.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return dynamodb.url


@pytest.fixture
def sqs_name() -> str:
    """How the names of this test's queues begin."""
    return f"onefold-{secrets.token_hex(6)}"


@pytest.fixture
def kafka_url(kafka: Server) -> str:
    """The bootstrap servers, as clients take them."""
    return kafka_server.bootstrap(kafka.url)


@pytest.fixture
def kafka_topic(kafka: Server) -> str:
    """A new topic with four partitions. Its name serves as the name of a new group as well."""
    topic = f"onefold-{secrets.token_hex(6)}"
    kafka_server.create_topic(kafka, topic)
    return topic
