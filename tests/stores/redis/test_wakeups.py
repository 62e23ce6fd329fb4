"""Waiters of other processes are told of the end of a record: by a message, which is sent only if somebody waits."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
import redis

from onefold import AsyncGuard, Guard, Policy
from onefold._concurrency.waiters import ROOMS
from onefold._model import State
from onefold.stores.redis import AsyncRedisStore, RedisStore, wakeups
from onefold.stores.redis.errors import PERMISSIONS, WAKEUP_PERMISSIONS
from onefold.stores.redis.keys import Keys
from services.proxy import Proxy
from services.servers import Server
from tests.delivery.waiting_tools import CHARGE, LONG, until, waiting, without_polls  # noqa: F401 - a fixture
from tests.processes import Stage, child
from tests.stores.redis.tools import DONE, MODES, claim_of, entry, opened
from tests.support import PATIENCE, Elsewhere, Handler, eventually, in_time

CROWD = 8
CHANNEL = Keys("onefold:").of(CHARGE)
SERVERS = ("redis_url", "valkey_url", "redis_cluster_url", "valkey_cluster_url")


@pytest.fixture(params=SERVERS)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@contextmanager
def asking(url: str) -> Iterator[Any]:
    """A client for the test's own questions, at the server that has the record."""
    if "+cluster" in url:
        port = int(url.partition("?")[0].rsplit(":", 1)[1].strip("/").split(",")[0])
        with closing(redis.RedisCluster(host="127.0.0.1", port=port)) as cluster:
            yield cluster.get_redis_connection(cluster.get_node_from_key(CHANNEL))  # type: ignore[no-untyped-call]
        return
    with redis.Redis.from_url(url.replace("valkey", "redis")) as client:
        yield client


def subscribers(client: Any) -> int:
    return int(client.execute_command("PUBSUB", "NUMSUB", CHANNEL)[1])


def own(stage: Stage, url: str, ending: str = "returns", lease: float = 30.0) -> str:
    """Run the delivery in a process of its own; it stops inside its handler."""

    def handler() -> str:
        stage.at("inside")
        if ending == "raises":
            raise ValueError("declined")
        return "charged"

    with Guard(url) as guard:
        return str(guard.run("charge", "pay_1", handler, lease=lease).value)


@contextmanager
def owner(url: str, ending: str = "returns", lease: float = 30.0) -> Iterator[Any]:
    with child(own, url, ending, lease, stops=("inside",)) as process:
        process.reaches("inside")
        yield process


@pytest.mark.usefixtures("without_polls")
def test_threads_are_woken_by_an_owner_in_another_process(url: str) -> None:
    with owner(url) as process, Guard(url) as guard, asking(url) as client:
        crowd = [Elsewhere(lambda: guard.run("charge", "pay_1", Handler(), wait=LONG).value) for _ in range(CROWD)]
        assert eventually(lambda: waiting() == CROWD and subscribers(client) == 1)
        process.go_on()

        assert [one.result() for one in crowd] == ["charged"] * CROWD

    assert not ROOMS


@pytest.mark.usefixtures("without_polls")
def test_tasks_are_woken_by_an_owner_in_another_process(url: str) -> None:
    async def story(process: Any, client: Any) -> list[Any]:
        async with AsyncGuard(url) as guard:
            crowd = [asyncio.create_task(guard.run("charge", "pay_1", Handler(), wait=LONG)) for _ in range(CROWD)]
            await until(lambda: waiting() == CROWD and subscribers(client) == 1)
            process.go_on()
            return [outcome.value for outcome in await asyncio.gather(*crowd)]

    with owner(url) as process, asking(url) as client:
        assert in_time(story(process, client)) == ["charged"] * CROWD

    assert not ROOMS


@pytest.mark.usefixtures("without_polls")
def test_a_release_in_another_process_wakes_one_who_runs_and_the_others_wait_on(redis_url: str) -> None:
    handler = Handler("again")
    with owner(redis_url, "raises") as process, Guard(redis_url) as guard, asking(redis_url) as client:
        crowd = [Elsewhere(lambda: guard.run("charge", "pay_1", handler, wait=LONG).value) for _ in range(CROWD)]
        assert eventually(lambda: waiting() == CROWD and subscribers(client) == 1)
        process.go_on()

        assert [one.result() for one in crowd] == ["again"] * CROWD

    assert handler.starts == 1


@pytest.mark.usefixtures("without_polls")
def test_looks_at_the_store_are_few_however_many_wait(redis_url: str) -> None:
    """The first look of each, one after the subscription, and one after the end; the owner claims and finishes."""
    with owner(redis_url) as process, Guard(redis_url) as guard, asking(redis_url) as client:
        client.config_resetstat()
        crowd = [Elsewhere(lambda: guard.run("charge", "pay_1", Handler(), wait=LONG)) for _ in range(CROWD)]
        assert eventually(lambda: waiting() == CROWD and subscribers(client) == 1)
        process.go_on()
        for one in crowd:
            one.result()
        calls = client.info("commandstats")

    scripts = sum(calls.get(name, {"calls": 0})["calls"] for name in ("cmdstat_evalsha", "cmdstat_eval"))
    # A script that the server does not know yet is sent once more, with its text.
    assert CROWD + 2 <= scripts - 1 <= CROWD + 2 + 2
    assert calls["cmdstat_subscribe"]["calls"] == 1
    assert calls["cmdstat_publish"]["calls"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_published_if_nobody_waits(mode: str, redis_url: str) -> None:
    with opened(mode, redis_url) as store, asking(redis_url) as client:
        client.config_resetstat()
        for number, end in enumerate((store.finish, lambda claim, _: store.release(claim))):
            one = entry(f"pay_{number}")
            store.claim(one)
            end(claim_of(one), DONE)

        assert "cmdstat_publish" not in client.info("commandstats")


def test_one_who_marks_a_record_held_tells_of_it(redis_url: str) -> None:
    """The record that it replaces was running: somebody may wait for its end."""
    one = entry("pay_1")
    with closing(RedisStore(redis_url)) as store, redis.Redis.from_url(redis_url) as client:
        store.claim(one)
        with client.pubsub() as heard:
            heard.subscribe(CHANNEL)
            assert heard.get_message(timeout=PATIENCE) is not None
            assert store.claim(entry("pay_1", state=State.HELD, token=one.token), replacing=store.read(CHARGE)) is None

            assert heard.get_message(timeout=PATIENCE)["data"] == b""


def test_one_who_waits_for_a_killed_owner_takes_over_when_the_lease_ends(redis_url: str) -> None:
    handler = Handler("again")
    with owner(redis_url, lease=1.0) as process, Guard(redis_url) as guard:
        one = Elsewhere(lambda: guard.run("charge", "pay_1", handler, lease=1.0, wait=LONG).value)
        assert eventually(lambda: waiting() == 1)
        process.kill()

        assert one.result() == "again"

    assert handler.starts == 1


@pytest.mark.parametrize("mode", MODES)
def test_who_may_not_subscribe_polls_and_is_told_once(
    mode: str, own_redis: Server, caplog: pytest.LogCaptureFixture
) -> None:
    url = own_redis.url.replace("redis://", "redis://worker:sesame@")
    with asking(own_redis.url) as client:
        rules = ["on", ">sesame", "resetchannels", "~onefold:*", *PERMISSIONS.split()]
        client.execute_command("ACL", "SETUSER", "worker", *rules)
        with caplog.at_level(logging.WARNING, "onefold"), opened(mode, url) as store:
            one = entry("pay_1")
            assert store.claim(one) is None
            listen = store.listen if mode == "blocking" else lambda of: store._wait(store.store.listen(of))

            assert [listen(CHARGE), listen(CHARGE)] == [False, False]
            # Whoever may not publish ends its records all the same.
            assert store.finish(claim_of(one), DONE) is True
        assert [line.getMessage() for line in caplog.records if "may not subscribe" in line.getMessage()].__len__() == 1

        client.execute_command("ACL", "SETUSER", "worker", "&onefold:*", *WAKEUP_PERMISSIONS.split())
        with opened(mode, url) as store:
            listen = store.listen if mode == "blocking" else lambda of: store._wait(store.store.listen(of))
            assert listen(CHARGE) is True


@pytest.mark.parametrize("mode", MODES)
def test_wake_ups_can_be_switched_off(mode: str, redis_url: str) -> None:
    for source, options in ((f"{redis_url}?wakeups=false", {}), (redis_url, {"wakeups": False})):
        with opened(mode, source, **options) as store, asking(redis_url) as client:
            listen = store.listen if mode == "blocking" else lambda of, it=store: it._wait(it.store.listen(of))

            assert listen(CHARGE) is False
            assert subscribers(client) == 0


def test_the_connection_is_closed_with_the_store_and_its_thread_ends(redis_url: str) -> None:
    before = threading.active_count()
    store = RedisStore(redis_url)
    with asking(redis_url) as client:
        assert store.listen(CHARGE) is True
        assert subscribers(client) == 1
        store.close()

        assert eventually(lambda: subscribers(client) == 0)
    assert eventually(lambda: threading.active_count() == before)


def test_the_connection_is_closed_when_nobody_has_waited_for_a_while(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(wakeups, "LOOK_SECONDS", 0.01)
    with closing(RedisStore(redis_url)) as store, asking(redis_url) as client:
        assert store.listen(CHARGE) is True
        store.unlisten(CHARGE)

        assert eventually(lambda: subscribers(client) == 0)
        assert store.listen(CHARGE) is True


def test_the_task_ends_when_nobody_has_waited_for_a_while(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "IDLE_SECONDS", 0.02)

    async def story(client: Any) -> None:
        store = AsyncRedisStore(redis_url)
        before = len(asyncio.all_tasks())
        assert await store.listen(CHARGE) is True
        assert subscribers(client) == 1
        store.unlisten(CHARGE)
        await until(lambda: subscribers(client) == 0 and len(asyncio.all_tasks()) == before)
        assert await store.listen(CHARGE) is True
        await store.aclose()
        await until(lambda: subscribers(client) == 0)
        assert len(asyncio.all_tasks()) == before

    with asking(redis_url) as client:
        in_time(story(client))


def test_a_server_that_accepts_a_connection_and_is_silent_holds_up_nobody(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "SUBSCRIBE_SECONDS", 0.01)
    with Proxy(redis_url) as proxy, closing(RedisStore(proxy.url())) as store:
        store.claim(entry("pay_1"))
        proxy.stall()
        addresses = [entry(f"pay_{number}").address for number in range(CROWD)]
        crowd = [Elsewhere(partial(store.listen, address)) for address in addresses]

        assert [one.result() for one in crowd] == [False] * CROWD

        proxy.resume()


def test_a_channel_that_nobody_wants_is_left_with_the_next_subscription(redis_url: str) -> None:
    other = entry("pay_2").address
    with closing(RedisStore(redis_url)) as store, asking(redis_url) as client:
        store.listen(CHARGE)
        store.unlisten(CHARGE)
        assert subscribers(client) == 1
        store.listen(other)

        assert eventually(lambda: subscribers(client) == 0)


def test_who_waits_when_the_connection_is_lost_looks_and_subscribes_again(redis_url: str) -> None:
    with owner(redis_url) as process, Guard(redis_url) as guard, asking(redis_url) as client:
        one = Elsewhere(lambda: guard.run("charge", "pay_1", Handler(), wait=LONG).value)
        assert eventually(lambda: waiting() == 1 and subscribers(client) == 1)
        (first,) = client.client_list(_type="pubsub")
        client.client_kill_filter(_id=first["id"])
        assert eventually(lambda: subscribers(client) == 1 and first["id"] not in ids(client))
        process.go_on()

        assert one.result() == "charged"


def ids(client: Any) -> list[str]:
    return [line["id"] for line in client.client_list(_type="pubsub")]


def test_a_callers_pool_that_is_all_busy_lends_nothing_for_it(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, max_connections=1) as client, asking(redis_url) as other:
        store = RedisStore(client)
        held = client.connection_pool.get_connection()
        try:
            assert store.listen(CHARGE) is True
            assert subscribers(other) == 1
        finally:
            client.connection_pool.release(held)
        store.close()


def test_a_stopped_owner_costs_its_lease_and_no_delivery(redis_url: str) -> None:
    policy = Policy(lease=1.0, wait=LONG)
    with owner(redis_url, lease=1.0) as process, Guard(redis_url, policy=policy) as guard:
        one = Elsewhere(lambda: guard.run("charge", "pay_1", Handler("again")).value)
        assert eventually(lambda: waiting() == 1)
        process.signal(signal.SIGSTOP)

        assert one.result() == "again"
        process.signal(signal.SIGCONT)


def test_wherever_a_client_moves_its_channels_every_one_is_wanted_once() -> None:
    channels = wakeups.Channels()
    for number in count(1):
        address = entry(f"pay_{number}").address
        commands = channels.want(b"%d" % number, address)
        assert commands[-1] == (b"SUBSCRIBE", b"%d" % number)
        assert channels.want(b"%d" % number, address) == []
        channels.forget(b"%d" % number)
        if number == 3:
            break

    assert channels.want(b"9", CHARGE)[0] == (b"UNSUBSCRIBE", b"3")
