"""What servers, networks and workers can do to the Redis store: each of it by hand, on real ones."""

from __future__ import annotations

import gc
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
import redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MaxConnectionsError,
    RedisClusterException,
    ResponseError,
)

from onefold import ClaimLost, Guard, Held, InProgress, Policy, StoreUnavailable, UsageError, current
from onefold._model import Address, Close, Released, State
from onefold.stores.redis import RedisStore
from onefold.stores.redis.errors import CLUSTER_PERMISSIONS, PERMISSIONS, translated
from services.house import House
from services.processes import HOST, Daemon, wait_until
from services.proxy import Proxy
from services.redis import Pair
from services.redis_cluster import HASTY_MILLISECONDS, replace_after
from services.servers import Server
from tests.processes import Stage, child
from tests.stores.redis.tools import DONE, MODES, claim_of, entry, opened
from tests.support import PATIENCE, end_lease, eventually

# No machine is so busy that it ends by itself: see `end_lease`.
LEASE = 300.0

# For a store whose server may take its time, and whose replicas may.
PATIENT = "socket_timeout=120s&wait_timeout=60s"

# A server is given up before it ends, or nobody could keep a claim alive.
USUAL_LEASE = 30.0


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def asking(url: str) -> Iterator[Any]:
    """A client for the test's own questions."""
    with redis.Redis.from_url(url.replace("valkey", "redis"), socket_timeout=PATIENCE) as client:
        yield client


# A reply is lost, or a request, or a connection.


def operations(store: Any) -> dict[str, tuple[Callable[[], Any], Any]]:
    """Each operation, ready to be sent, with the answer that it must have however often it arrives."""
    one, two, three = entry("one"), entry("two"), entry("three")
    for each in (two, three):
        assert store.claim(each) is None
    many = [entry(f"many-{number}") for number in range(20)]
    return (
        {
            "claim": (lambda: store.claim(one), None),
            "take over": (lambda: store.claim(entry("two", token=one.token), replacing=store_two), None),
            "extend": (lambda: store.extend(claim_of(three), b"notes"), True),
            "finish": (lambda: store.finish(claim_of(three), DONE), True),
            "read": (lambda: store.read(three.address).state, State.DONE),
            "leave open": (lambda: store.release(claim_of(three), Released(ttl=60.0, attempt=2)), True),
            "release": (lambda: store.release(claim_of(three)), True),
            "claim all": (lambda: store.claim_all(many), [None] * 20),
            "extend all": (lambda: store.extend_all([claim_of(each) for each in many]), [True] * 20),
            "close all": (lambda: store.close_all([Close(claim_of(each), DONE) for each in many]), [True] * 20),
        }
        if (store_two := store.read(two.address))
        else {}
    )


@pytest.mark.parametrize("fault", ["cut_after", "cut_before"])
def test_an_operation_whose_reply_or_request_is_lost_is_sent_again(mode: str, fault: str, redis_url: str) -> None:
    with Proxy(redis_url) as proxy, opened(mode, proxy.url()) as store:
        for name, (ask, answer) in operations(store).items():
            struck = getattr(proxy, fault)(b"EVALSHA")

            assert ask() == answer, name
            assert struck.reached.is_set(), name


def test_a_reply_that_is_lost_again_and_again_is_told(mode: str, redis_url: str) -> None:
    with Proxy(redis_url) as proxy, opened(mode, proxy.url()) as store:
        store.claim(entry("first"))
        faults = [proxy.cut_after(b"EVALSHA") for _ in range(10)]

        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            store.claim(entry("second"))

        # A single call goes a shorter way first.
        assert sum(fault.reached.is_set() for fault in faults) == 4


def test_connections_that_died_in_idleness_are_no_failure(redis_url: str) -> None:
    with Proxy(redis_url) as proxy, opened("blocking", proxy.url()) as store:
        together = threading.Barrier(12)

        def work(number: int) -> Any:
            together.wait(PATIENCE)
            return store.claim(entry(f"key-{number}"))

        with ThreadPoolExecutor(12) as threads:
            assert list(threads.map(work, range(12))) == [None] * 12
        for round_ in range(3):
            proxy.cut_all()
            assert store.claim(entry(f"after-{round_}")) is None


def test_a_server_that_restarts_knows_the_records_and_gets_the_scripts_again(mode: str, own_redis: Server) -> None:
    with opened(mode, own_redis.url) as store:
        mine = entry()
        assert store.claim(mine) is None
        own_redis.kill()
        own_redis.restart()

        assert store.finish(claim_of(mine), DONE) is True
        assert store.read(mine.address).result == b"result"


def test_a_server_that_is_gone_is_told_and_found_again(mode: str, own_redis: Server) -> None:
    with opened(mode, own_redis.url) as store:
        mine = entry()
        assert store.claim(mine) is None
        own_redis.kill()
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{own_redis.port}/0: it cannot be reached"):
            store.extend(claim_of(mine))
        assert time.monotonic() - began < USUAL_LEASE

        own_redis.restart()

        assert store.extend(claim_of(mine)) is True


def test_a_server_that_hangs_is_given_up_in_time_and_not_asked_again(mode: str, own_redis: Server) -> None:
    with Proxy(own_redis.url) as proxy, opened(mode, f"{proxy.url()}?socket_timeout=1s") as store:
        one, two = entry("one"), entry("two")
        # On a busy machine a second may be too short for any answer.
        _until_answered(lambda: store.claim(one) is None)
        own_redis.stop()
        # Whatever is sent: who asks again has to introduce itself first.
        held = [proxy.hold_request(lambda _: True) for _ in range(5)]
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="did not answer in time"):
            store.claim(two)
        assert time.monotonic() - began < USUAL_LEASE
        assert [fault.reached.is_set() for fault in held] == [True, False, False, False, False]
        for fault in held:
            fault.released.set()
        own_redis.cont()

        # The late reply of the first is nobody's.
        _until_answered(lambda: store.claim(two) is None)
        _until_answered(lambda: store.read(one.address).token == one.token)


# Servers that refuse.


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:{}/0", "redis+cluster://127.0.0.1:{}", "redis+sentinel://127.0.0.1:{}/shop"]
)
def test_an_absent_server_is_told(mode: str, url: str) -> None:
    began = time.monotonic()
    # Nobody listens there, and nobody else can.
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        with opened(mode, url.format(taken.getsockname()[1])) as store, pytest.raises(StoreUnavailable) as told:
            store.claim(entry())

    assert url.partition("{")[0] in str(told.value)
    assert "cannot be reached" in str(told.value) or "no Sentinel knows a primary" in str(told.value)
    assert told.value.__cause__ is not None
    assert time.monotonic() - began < USUAL_LEASE


def test_a_traceback_about_an_absent_server_has_the_clients_error_and_nothing_behind_it(mode: str) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        with (
            opened(mode, f"redis://127.0.0.1:{taken.getsockname()[1]}/0") as store,
            pytest.raises(StoreUnavailable) as told,
        ):
            store.claim(entry())

    shown = "".join(traceback.format_exception(told.value))
    assert shown.count("Traceback (most recent call last)") == 2, shown


def test_a_wrong_password_is_told_and_never_shown(mode: str, own_redis: Server) -> None:
    with asking(own_redis.url) as client:
        client.config_set("requirepass", "sesame")
    for login in ("", ":wrong-sesame@", "nobody:wrong-sesame@"):
        url = own_redis.url.replace("redis://", f"redis://{login}")
        with opened(mode, url) as store, pytest.raises(StoreUnavailable, match="refuses the login") as told:
            store.claim(entry())
        assert "sesame" not in str(told.value)

    with opened(mode, own_redis.url.replace("redis://", "redis://:sesame@")) as store:
        assert store.claim(entry()) is None


def test_a_missing_permission_is_told_and_the_documented_ones_are_enough(mode: str, own_redis: Server) -> None:
    url = own_redis.url.replace("redis://", "redis://worker:sesame@")
    with asking(own_redis.url) as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", ">sesame", "~onefold:*", "+get")
        with opened(mode, url) as store, pytest.raises(StoreUnavailable, match="lacks a permission") as told:
            store.claim(entry())
        assert PERMISSIONS in str(told.value)

        client.execute_command("ACL", "SETUSER", "worker", *PERMISSIONS.split())

    waiting = f"{url}?wait_replicas=1&wait_timeout=10ms"
    with opened(mode, waiting) as store, pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
        store.claim(entry())
    with opened(mode, url) as store:
        for name, (ask, answer) in operations(store).items():
            assert ask() == answer, name
        assert len(store.browse(_all(), 100)) > 20


def _all() -> Any:
    from onefold.stores.base import Query

    return Query()


def test_a_read_only_replica_is_told(mode: str, redis_pair: Pair) -> None:
    told = r"it is a read-only replica\. Name the primary"
    with opened(mode, redis_pair.replica_url) as store, pytest.raises(StoreUnavailable, match=told):
        store.claim(entry())


def test_a_full_server_is_told_and_nothing_runs(own_redis: Server) -> None:
    ran: list[str] = []
    with asking(own_redis.url) as client, Guard(own_redis.url) as guard:
        assert guard.run("charge", "before", lambda: 4200).value == 4200
        client.config_set("maxmemory", 1)

        with pytest.raises(StoreUnavailable, match="it is full: it has reached maxmemory"):
            guard.run("charge", "pay_7f3a", lambda: ran.append("pay_7f3a"))
        # A duplicate needs no memory.
        assert guard.run("charge", "before", lambda: 1).replayed

        assert ran == []
        client.config_set("maxmemory", 0)
        guard.run("charge", "pay_7f3a", lambda: ran.append("pay_7f3a"))
        assert ran == ["pay_7f3a"]


def test_a_full_server_refuses_a_batch_and_nothing_of_it_runs(own_redis: Server) -> None:
    with asking(own_redis.url) as client, Guard(own_redis.url) as guard:
        guard.run_batch("charge", ["before"], key=str, handler=str)
        client.config_set("maxmemory", 1)

        outcomes = guard.run_batch("charge", ["one", "two"], key=str, handler=str)

        assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 2
        client.config_set("maxmemory", 0)
        assert [guard.read("charge", key) for key in ("one", "two")] == [None, None]


def test_a_script_that_keeps_the_server_busy_is_told(mode: str, own_redis: Server) -> None:
    with asking(own_redis.url) as client, opened(mode, own_redis.url) as store:
        store.claim(entry("first"))
        client.config_set("lua-time-limit", 1)
        ended = threading.Event()

        def endless() -> None:
            with asking(own_redis.url) as other, pytest.raises(ResponseError, match="killed"):
                other.eval("while true do end", 0)
            ended.set()

        thread = threading.Thread(target=endless)
        thread.start()
        wait_until(lambda: _is_busy(client), "the script does not run")

        with pytest.raises(StoreUnavailable, match="another client's script takes too long"):
            store.claim(entry("second"))

        client.script_kill()
        thread.join(PATIENCE)
        assert ended.is_set()
        assert store.claim(entry("second")) is None


def _is_busy(client: Any) -> bool:
    try:
        client.ping()
    except ResponseError as error:
        return str(error).startswith("BUSY")
    return False


def test_a_server_that_lacks_replicas_is_told(mode: str, own_redis: Server) -> None:
    with asking(own_redis.url) as client, opened(mode, own_redis.url) as store:
        client.config_set("min-replicas-to-write", 1)

        with pytest.raises(StoreUnavailable, match="fewer replicas than its min-replicas-to-write"):
            store.claim(entry())


def test_one_server_is_no_cluster_and_a_cluster_is_not_one_server(
    mode: str, redis_url: str, redis_cluster_url: str
) -> None:
    alone, told = redis_url.replace("redis://", "redis+cluster://").removesuffix("/0"), "the server is in no cluster"
    with opened(mode, alone) as store, pytest.raises(UsageError, match=told):
        store.claim(entry())
    one, told = redis_cluster_url.replace("redis+cluster://", "redis://"), "the server belongs to a cluster"
    with opened(mode, one) as store, pytest.raises(UsageError, match=told):
        store.claim_all([entry(f"key-{number}") for number in range(20)])


@pytest.mark.parametrize("login", ["", "nobody:wrong@"])
def test_a_cluster_that_cannot_be_opened_leaves_no_connection_open(mode: str, login: str, own_redis: Server) -> None:
    alone = own_redis.url.replace("redis://", f"redis+cluster://{login}").removesuffix("/0")
    # Whatever is forgotten is closed when it is found by chance.
    gc.disable()
    try:
        with opened(mode, alone) as store, pytest.raises((UsageError, StoreUnavailable)):
            store.claim(entry())

        with redis.Redis.from_url(own_redis.url) as client:
            assert eventually(lambda: len(client.client_list()) == 1)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (BusyLoadingError("Redis is loading the dataset in memory"), "still loading its data"),
        (AuthenticationError("Authentication required."), "refuses the login, or requires one"),
        (ClusterDownError("The cluster is down"), "the cluster is down"),
        (MaxConnectionsError("Too many connections"), "Raise its max_connections"),
        (RedisClusterException("Redis Cluster cannot be connected."), "it cannot be reached"),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots"), "cannot write to its disk"),
        (ResponseError("unknown command 'EVALSHA'"), "the server says: unknown command 'EVALSHA'"),
        (OSError(104, "Connection reset by peer"), "it cannot be reached"),
    ],
)
def test_every_refusal_has_words_that_help(error: Exception, says: str) -> None:
    told = translated(error, "redis://h:6379/0")

    assert isinstance(told, StoreUnavailable)
    assert str(told).startswith("redis://h:6379/0: ")
    assert says in str(told)


# Replicas, and what a fail-over loses.


def test_a_claim_that_was_not_replicated_is_lost_in_a_fail_over(own_redis_pair: Pair) -> None:
    mine = entry()
    with opened("blocking", own_redis_pair.url) as store:
        # From here on the replica hears nothing more, and the primary does not know yet.
        url = own_redis_pair.promote()
        assert store.claim(mine) is None
        own_redis_pair.kill()

    with opened("blocking", url) as store:
        # Documented: the claim of a second worker is written too, both run, and the first is told.
        assert store.claim(entry()) is None
        assert store.finish(claim_of(mine), DONE) is False


def test_a_claim_that_would_be_lost_is_refused_where_replicas_have_to_confirm(own_redis_pair: Pair) -> None:
    with opened("blocking", own_redis_pair.url, wait_replicas=1, wait_timeout="200ms") as store:
        own_redis_pair.promote()

        with pytest.raises(StoreUnavailable, match="a failover could lose it"):
            store.claim(entry())


def test_a_claim_that_a_replica_has_confirmed_survives_a_fail_over(mode: str, own_redis_pair: Pair) -> None:
    with opened(mode, f"{own_redis_pair.url}?{PATIENT}", wait_replicas=1) as store:
        mine, ended = entry("mine"), entry("ended")
        assert store.claim(mine) is None
        assert store.claim(ended) is None
        assert store.finish(claim_of(ended), DONE) is True
        own_redis_pair.kill()
    url = own_redis_pair.promote()

    with opened(mode, url) as store:
        assert store.claim(entry("mine")).token == mine.token
        assert store.claim(entry("ended")).result == b"result"
        assert store.finish(claim_of(mine), DONE) is True


def test_waiting_for_a_replica_costs_a_claim_one_round_trip_and_an_end_none(mode: str, redis_pair: Pair) -> None:
    options = f"{PATIENT}&wait_replicas=1&prefix={mode}:"
    with Proxy(redis_pair.url) as proxy, opened(mode, f"{proxy.url()}?{options}") as store:
        mine, many = entry("mine"), [entry(f"key-{number}") for number in range(100)]
        store.claim(mine)
        store.finish(claim_of(mine), DONE)
        asked: list[tuple[int, int, Callable[[], Any]]] = [
            (2, 1, lambda: store.claim(entry("another"))),
            # A duplicate has written nothing, and so it waits for nobody.
            (1, 0, lambda: store.claim(entry("mine"))),
            (1, 1, lambda: store.finish(claim_of(mine), DONE)),
            (2, 1, lambda: store.claim_all(many)),
            (1, 0, lambda: store.claim_all([entry(f"key-{number}") for number in range(100)])),
            (1, 1, lambda: store.close_all([Close(claim_of(each), DONE) for each in many])),
        ]
        for trips, waits, ask in asked:
            with proxy.counting() as count:
                ask()
            assert (count.trips, b"".join(count.messages).count(b"WAIT")) == (trips, waits)


def test_too_few_replicas_are_told_and_nothing_runs(own_redis_pair: Pair) -> None:
    ran: list[str] = []
    url = f"{own_redis_pair.url}?wait_replicas=1"
    with Guard(f"{url}&wait_timeout=200ms") as hasty, Guard(f"{url}&{PATIENT}") as patient:
        assert patient.run("charge", "before", lambda: 4200).value == 4200
        own_redis_pair.daemons[1].stop()

        with pytest.raises(StoreUnavailable, match=r"only 0 of 1 replicas confirmed it within 0\.2s"):
            hasty.run("charge", "pay_7f3a", lambda: ran.append("pay_7f3a"))
        # What is done is answered, and waits for nobody longer than that.
        assert hasty.run("charge", "before", lambda: 1).replayed

        assert ran == []
        own_redis_pair.daemons[1].cont()
        # The claim in doubt was taken back: nobody has to wait for its lease.
        patient.run("charge", "pay_7f3a", lambda: ran.append("pay_7f3a"))
    assert ran == ["pay_7f3a"]


def test_sentinel_leads_to_the_new_primary(mode: str, own_redis_sentinel: Server) -> None:
    primary, *_ = own_redis_sentinel.daemons
    with opened(mode, f"{own_redis_sentinel.url}?wait_replicas=1&{PATIENT}") as store:
        mine = entry(ttl=900.0)
        assert store.claim(mine) is None
        primary.kill()

        # There is no replica left that could confirm anything: whoever only extends need not wait for one.
        _until_answered(lambda: store.extend(claim_of(mine)))

        assert store.read(mine.address).token == mine.token


def _until_answered(ask: Callable[[], Any]) -> Any:
    """Ask until the servers have found their new order. Until then, every answer has to be `StoreUnavailable`."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            answer = ask()
        except StoreUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            assert answer is True
            return answer


# Clusters that move.


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A cluster of this file's own: its slots are moved, and one of its servers dies."""
    from services.fixtures import HOUSE, missing_told

    house: House = request.config.stash[HOUSE]
    with missing_told(), house.own("redis-cluster") as server:
        yield server


class Slot:
    """The slot of a key, and the way from the server that has it to another one."""

    def __init__(self, url: str, key: bytes) -> None:
        cluster: Any = redis.RedisCluster
        self.client = cluster.from_url(url.replace("+cluster", ""))
        self.number = self.client.keyslot(key)
        owner = self.client.get_node_from_key(key)
        other = next(node for node in self.client.get_primaries() if node.name != owner.name)
        self.owner: Any = redis.Redis(owner.host, owner.port)
        self.other: Any = redis.Redis(other.host, other.port)

    def begin(self) -> None:
        self.other.execute_command("CLUSTER SETSLOT", self.number, "IMPORTING", _id(self.owner))
        self.owner.execute_command("CLUSTER SETSLOT", self.number, "MIGRATING", _id(self.other))

    def end(self) -> None:
        for node in (self.other, self.owner):
            node.execute_command("CLUSTER SETSLOT", self.number, "NODE", _id(self.other))
        # Whoever comes next may ask any of them.
        assert eventually(lambda: all(self._is_there(node) for node in self.client.get_primaries()))

    def _is_there(self, node: Any) -> bool:
        port = self.other.get_connection_kwargs()["port"]
        with redis.Redis(node.host, node.port) as asked:
            told: Any = asked.execute_command("CLUSTER", "SLOTS")
        return any(first <= self.number <= last and node[1] == port for first, last, node, *_ in told)

    def close(self) -> None:
        for client in (self.client, self.owner, self.other):
            client.close()


def _port(daemon: Daemon) -> int:
    return int(daemon.command[list(daemon.command).index("--port") + 1])


def _id(node: Any) -> bytes:
    found: bytes = node.execute_command("CLUSTER MYID")
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_cluster_that_refuses_its_user_says_why(cluster: Server, mode: str) -> None:
    url = cluster.url.replace("redis+cluster://", "redis+cluster://worker:sesame@")

    def may(*permissions: str) -> None:
        for daemon in cluster.daemons:
            with asking(f"redis://127.0.0.1:{_port(daemon)}/0") as client:
                client.execute_command("ACL", "SETUSER", "worker", "reset", "on", ">sesame", "~onefold:*", *permissions)

    may(*PERMISSIONS.split())
    with opened(mode, url) as store, pytest.raises(StoreUnavailable, match="lacks a permission") as told:
        store.claim(entry())
    assert CLUSTER_PERMISSIONS in str(told.value)
    with opened(mode, url.replace("sesame", "wrong")) as store, pytest.raises(StoreUnavailable, match="login"):
        store.claim(entry())

    may(*PERMISSIONS.split(), *CLUSTER_PERMISSIONS.split())
    with opened(mode, url) as store:
        mine = entry(f"{mode}-allowed")
        assert store.claim_all([mine, *(entry(f"{mode}-{number}-allowed") for number in range(20))]) == [None] * 21
        assert store.finish(claim_of(mine), DONE) is True


@pytest.mark.parametrize("mode", MODES)
def test_a_slot_that_moves_is_followed(cluster: Server, mode: str) -> None:
    with opened(mode, cluster.url) as store:
        # A slot of its own: a server that has keys in one does not give it away.
        tag = f"{{{mode}}}"
        one, two = entry(f"one{tag}"), entry(f"two{tag}")
        neighbours = [entry(f"{mode}-{number}") for number in range(50)]
        assert store.claim_all(neighbours) == [None] * 50
        slot = Slot(cluster.url, tag.encode())
        slot.begin()

        # On its way: the server that has it sends us to the one that will (ASK).
        assert store.claim(one) is None
        assert store.claim_all([*neighbours, one, two]) == [None] * 52
        assert store.extend(claim_of(one)) is True
        slot.end()

        # Arrived: what we have learned of the cluster is old (MOVED).
        assert store.finish(claim_of(one), DONE) is True
        assert store.close_all([Close(claim_of(each), DONE) for each in (*neighbours, one, two)]) == [True] * 52
        assert store.read(one.address).result == b"result"
        slot.close()


def test_a_cluster_that_replaces_a_server_is_followed(cluster: Server) -> None:
    with opened("blocking", cluster.url) as store, opened("async", cluster.url) as async_store:
        entries = [entry(f"key-{number}", ttl=900.0) for number in range(60)]
        assert store.claim_all(entries) == [None] * 60
        assert async_store.extend_all([claim_of(each) for each in entries]) == [True] * 60
        slot = Slot(cluster.url, b"any")
        port = slot.owner.get_connection_kwargs()["port"]
        victim = next(daemon for daemon in cluster.daemons if _port(daemon) == port)
        # A connection waits for what was written before its own last command.
        slot.owner.ping()
        assert slot.owner.wait(1, int(PATIENCE * 1000)) == 1
        slot.close()
        for daemon in cluster.daemons:
            replace_after(_port(daemon), HASTY_MILLISECONDS)
        victim.kill()

        _until_answered(lambda: all(store.extend_all([claim_of(each) for each in entries])))
        _until_answered(lambda: all(async_store.extend_all([claim_of(each) for each in entries])))
        for each in entries:
            assert store.finish(claim_of(each), DONE) is True
            assert async_store.claim(each) is None


# Workers.


def zombie(stage: Stage, url: str) -> Any:
    """Claims, and is stopped inside its handler."""

    def handler() -> str:
        stage.at("in the handler")
        return "first"

    with Guard(url, policy=Policy(lease=LEASE)) as guard:
        try:
            return guard.run("charge", "pay_1", handler).value
        except ClaimLost as error:
            return "ClaimLost", error.value


@pytest.mark.parametrize("server", ["redis", "valkey", "redis_cluster"])
def test_a_zombie_of_another_process_is_told(server: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(f"{server}_url")
    with child(zombie, url, stops=("in the handler",)) as sleeper, Guard(url, policy=Policy(lease=LEASE)) as guard:
        sleeper.reaches("in the handler")
        with pytest.raises(InProgress):
            guard.run("charge", "pay_1", lambda: "second")
        sleeper.signal(signal.SIGSTOP)
        end_lease(guard.store, Address("", "charge", "pay_1"))

        patient = guard.policy.replace(wait=PATIENCE)
        outcome = guard.run("charge", "pay_1", lambda: f"second, attempt {current().attempt}", policy=patient)
        assert outcome.value == "second, attempt 2"
        sleeper.signal(signal.SIGCONT)
        sleeper.go_on()

        assert sleeper.hear() == ("ClaimLost", "first")
        assert guard.run("charge", "pay_1", lambda: "third").value == "second, attempt 2"


def test_a_worker_that_was_killed_leaves_a_hold_that_never_expires(redis_url: str) -> None:
    policy = Policy(lease=LEASE, after_crash="hold")
    with child(killed, redis_url, stops=("in the handler",)) as worker, Guard(redis_url, policy=policy) as guard:
        worker.reaches("in the handler")
        worker.kill()
        end_lease(guard.store, Address("", "charge", "pay_1"))

        with pytest.raises(Held):
            guard.run("charge", "pay_1", lambda: "second", policy=policy.replace(wait=PATIENCE))
    with asking(redis_url) as client:
        (key,) = client.keys()
        assert client.pttl(key) == -1


def killed(stage: Stage, url: str) -> None:
    with Guard(url, policy=Policy(lease=LEASE, after_crash="hold")) as guard:
        guard.run("charge", "pay_1", lambda: stage.at("in the handler"))


def test_an_adopted_client_survives_a_lost_reply_too(redis_url: str) -> None:
    with Proxy(redis_url) as proxy, redis.Redis.from_url(proxy.url()) as client, closing(RedisStore(client)) as store:
        one = entry()
        assert store.claim(one) is None
        for ask, answer in ((lambda: store.extend(claim_of(one)), True), (lambda: store.claim(one), None)):
            struck = proxy.cut_after(b"EVALSHA")

            assert ask() is answer
            assert struck.reached.is_set()
