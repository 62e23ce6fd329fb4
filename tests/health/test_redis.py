"""The doctor on Redis and Valkey: each check is green on a server that is run well, and turns on one that is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from onefold import Guard
from onefold.health import examine
from services.house import House
from services.processes import wait_until
from services.redis import named_client, primaries
from services.servers import Server
from tests.health.tools import GREEN, RED, UNKNOWN, YELLOW, checks_of, grades_of, left_behind, report_of, use

LIMIT = 100 * 2**20

CHECKS = ("eviction policy", "evicted keys", "memory", "persistence", "fsync", "replication", "neighbours")


@pytest.fixture(scope="module", params=["redis", "valkey"])
def server(house: House, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A durable server of this module alone; each test sets it right before it makes one thing wrong."""
    with house.own(request.param) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with named_client(server.url) as client:
        client.flushall()
        client.config_resetstat()
        right = {"maxmemory": LIMIT, "maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "always"}
        for name, value in right.items():
            client.config_set(name, value)
        client.config_set("save", "")
        yield client


@pytest.mark.usefixtures("client")
def test_a_server_that_is_run_well_is_green(server: Server) -> None:
    use(server.url)

    found = checks_of(server.url)

    assert {name: check for name, check in found.items() if check.grade is not GREEN} == {}
    assert set(CHECKS) < set(found)
    assert found["neighbours"].reason == "none: 1 key looked at, all ours"
    assert left_behind(server.url) == 0


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
def test_a_policy_that_evicts_is_red(server: Server, client: Any, policy: str) -> None:
    client.config_set("maxmemory-policy", policy)

    found = checks_of(server.url)["eviction policy"]

    assert found.grade is RED
    assert policy in found.reason
    assert "noeviction" in found.fix


def test_evicted_keys_are_red_and_counted(server: Server, client: Any) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    for key in range(20):
        client.set(f"cache:{key}", b"x" * 100_000)
    client.config_set("maxmemory", client.info("memory")["used_memory"] - 1_000_000)
    client.set("cache:last", b"x")
    client.config_set("maxmemory", LIMIT)
    client.config_set("maxmemory-policy", "noeviction")
    # Not before: a slow server goes on evicting in its spare time.
    evicted = client.info("stats")["evicted_keys"]

    found = checks_of(server.url)["evicted keys"]

    assert evicted > 0
    assert found.grade is RED
    assert f"{evicted:,} keys" in found.reason


@pytest.mark.parametrize(("share", "grade"), [(0.5, GREEN), (0.85, YELLOW), (0.97, RED)])
def test_little_memory_left_is_yellow_and_nearly_none_is_red(
    server: Server, client: Any, share: float, grade: object
) -> None:
    # Made on the server: the buffers of a large command would be counted too, for a moment.
    client.setrange("onefold:filling", 8_000_000, b"x")
    client.config_set("maxmemory", int(client.info("memory")["used_memory"] / share))

    assert checks_of(server.url)["memory"].grade is grade


def test_no_limit_of_memory_is_yellow(server: Server, client: Any) -> None:
    client.config_set("maxmemory", 0)

    assert checks_of(server.url)["memory"].grade is YELLOW


def test_no_persistence_is_red_and_snapshots_alone_are_yellow(server: Server, client: Any) -> None:
    client.config_set("appendonly", "no")
    off = checks_of(server.url)["persistence"]
    client.config_set("save", "3600 1")
    snapshots = checks_of(server.url)["persistence"]

    assert (off.grade, snapshots.grade) == (RED, YELLOW)
    assert "A restart forgets every record" in off.reason
    assert "3600 1" in snapshots.reason


@pytest.mark.parametrize("setting", ["everysec", "no"])
def test_a_lazy_fsync_is_yellow(server: Server, client: Any, setting: str) -> None:
    client.config_set("appendfsync", setting)

    assert checks_of(server.url)["fsync"].grade is YELLOW


def test_keys_of_others_are_yellow_and_are_not_shown(server: Server, client: Any) -> None:
    use(server.url)
    client.set("session:secret-of-a-customer", b"x")

    found = checks_of(server.url)["neighbours"]

    assert found.grade is YELLOW
    assert "1 of 2 keys" in found.reason
    assert "secret" not in str(found)


def test_keys_in_other_databases_of_the_server_are_yellow(server: Server, client: Any) -> None:
    client.select(1)
    client.set("session:1", b"x")
    client.select(0)

    assert checks_of(server.url)["neighbours"].grade is YELLOW


def test_a_full_server_is_red_in_the_trial_and_nothing_is_left_behind(server: Server, client: Any) -> None:
    client.config_set("maxmemory", 1)

    report = report_of(server.url)
    client.config_set("maxmemory", LIMIT)

    trial = next(check for check in report.checks if check.name == "trial")
    assert (trial.grade, report.reached) == (RED, True)
    assert "maxmemory" in trial.reason
    assert client.dbsize() == 0


def test_what_a_managed_service_forbids_is_unknown_in_words(server: Server, client: Any) -> None:
    client.execute_command(
        *("ACL", "SETUSER", "managed", "reset", "on", ">secret", "~*", "+@all", "-config", "-cluster|info")
    )

    found = checks_of(server.url.replace("://", "://managed:secret@"))

    assert found["fsync"].grade is UNKNOWN
    assert "config" in found["fsync"].reason.lower()
    # INFO tells these too.
    assert found["eviction policy"].grade is GREEN
    assert found["persistence"].grade is GREEN
    assert found["trial"].grade is GREEN


def test_a_user_who_may_nothing_but_work_gets_unknowns_and_a_green_trial(server: Server, client: Any) -> None:
    """The permissions of docs/stores/redis.md."""
    allowed = ["+evalsha", "+eval", "+get", "+set", "+del", "+pttl", "+time", "+scan", "+wait"]
    client.execute_command("ACL", "SETUSER", "worker", "reset", "on", ">secret", "~onefold:*", *allowed)

    found = checks_of(server.url.replace("://", "://worker:secret@"))

    assert found["eviction policy"].grade is UNKNOWN
    assert "+info" in found["eviction policy"].fix
    assert found["trial"].grade is GREEN
    assert found["clock"].grade is GREEN


def test_a_guard_whose_connections_have_died_is_examined_all_the_same(server: Server, client: Any) -> None:
    with Guard(server.url) as guard:
        guard.run("charge", "pay_7f3a", lambda: 4200)
        client.client_kill_filter(_type="normal", skipme=True)

        report = examine(guard.store)

    assert report.reached
    assert report.count(GREEN) == len(report.checks)


def test_replicas_without_min_replicas_to_write_are_yellow(redis_pair: Server) -> None:
    with named_client(redis_pair.url) as client:
        without = checks_of(redis_pair.url)["replication"]
        client.config_set("min-replicas-to-write", 1)
        with_one = checks_of(redis_pair.url)["replication"]
        client.config_set("min-replicas-to-write", 0)

    assert (without.grade, with_one.grade) == (YELLOW, GREEN)
    assert "min-replicas-to-write" in without.fix


def test_a_replica_is_red_and_is_not_written_to(redis_pair: Any) -> None:
    found = checks_of(redis_pair.replica_url)

    assert found["replication"].grade is RED
    assert (found["trial"].grade, found["trial"].reason) == (UNKNOWN, "not tried: it is a replica")


def test_the_primary_behind_sentinel_is_examined(redis_sentinel: Server) -> None:
    found = grades_of(redis_sentinel.url)

    assert found["replication"] is YELLOW
    assert found["trial"] is GREEN


def test_a_whole_cluster_is_green_and_names_the_server_that_is_worst(redis_cluster_url: str) -> None:
    some, *_ = primaries(redis_cluster_url)
    with named_client(some) as client:
        client.config_set("maxmemory-policy", "allkeys-lfu")
        found = checks_of(redis_cluster_url)
        client.config_set("maxmemory-policy", "noeviction")

    assert (found["cluster"].grade, found["trial"].grade) == (GREEN, GREEN)
    assert "16,384 slots" in found["cluster"].reason
    assert found["eviction policy"].grade is RED
    assert found["eviction policy"].reason.startswith(some.partition("://")[2].partition("/")[0])


def test_a_cluster_without_all_of_its_slots_is_red(own_redis_cluster: Server) -> None:
    # The client asks the server of the URL for the layout, and refuses a cluster that has holes.
    asked = [url for url in primaries(own_redis_cluster.url) if urlsplit(url).port == own_redis_cluster.port]
    other = next(url for url in primaries(own_redis_cluster.url) if url not in asked)
    lose_slots(other)

    found = checks_of(own_redis_cluster.url)["cluster"]

    assert found.grade is RED
    assert "cluster_state is fail" in found.reason
    assert found.reason.startswith(urlsplit(other).netloc)


def lose_slots(url: str) -> None:
    with named_client(url) as client:
        client.execute_command("CLUSTER", "DELSLOTS", *_slots_of(client))
        wait_until(lambda: b"cluster_state:fail" in client.execute_command("CLUSTER", "INFO"), "the cluster goes on")


def _slots_of(client: Any) -> list[int]:
    """Some of the slots that this server has."""
    port = client.connection_pool.connection_kwargs["port"]
    for first, last, (_, its_port, *_), *_ in client.execute_command("CLUSTER", "SLOTS"):
        if its_port == port:
            return list(range(first, min(first + 10, last)))
    raise AssertionError("it has none")
