"""The Redis store: round trips, scripts, keys, memory, pages, threads, forks and event loops."""

from __future__ import annotations

import asyncio
import gc
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from onefold import AsyncGuard, Guard, StoreUnavailable
from onefold._model import Address, Close, Ending, Record, Released, State
from onefold.keys import mint
from onefold.stores.base import Query, Untold
from onefold.stores.redis import AsyncRedisStore, RedisStore
from onefold.stores.redis import browse as redis_browse
from onefold.stores.redis.facts import _evicted
from onefold.stores.redis.keys import Keys
from services.proxy import Proxy
from services.redis import named_client, primaries
from tests.stores.redis.tools import DONE, MODES, claim_of, entry, opened
from tests.support import PATIENCE, eventually

SERVERS = ("redis", "valkey")
CLUSTERS = ("redis_cluster", "valkey_cluster")

# What a finished record without a result may cost, with a key of 36 characters.
BYTES_MAX = 230


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[*SERVERS, *CLUSTERS])
def url(request: pytest.FixtureRequest) -> str:
    """Each kind of server in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def store(mode: str, redis_url: str) -> Iterator[Any]:
    with opened(mode, redis_url) as store:
        yield store


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


# Round trips.


def test_each_operation_is_one_round_trip(mode: str, redis_url: str) -> None:
    with Proxy(redis_url) as proxy, opened(mode, proxy.url()) as store:
        first, second = entry("first"), entry("second")
        for one in (first, second):
            assert store.claim(one) is None
        _known(store)
        asked: list[Callable[[], Any]] = [
            lambda: store.claim(entry("third")),
            lambda: store.claim(entry("first")),
            lambda: store.claim(entry("first"), replacing=store_reads),
            lambda: store.extend(claim_of(first), b"notes"),
            lambda: store.finish(claim_of(first), DONE),
            lambda: store.release(claim_of(second), Released(ttl=60.0, attempt=1)),
            lambda: store.release(claim_of(second)),
            lambda: store.read(first.address),
        ]
        store_reads = store.read(first.address)

        for ask in asked:
            with proxy.counting() as count:
                ask()
            assert count.trips == 1


def test_a_new_key_costs_two_round_trips_and_a_duplicate_one(redis_url: str) -> None:
    with Proxy(redis_url) as proxy, Guard(proxy.url()) as guard:
        guard.run("charge", "to know the scripts", lambda: 1)

        with proxy.counting() as count:
            assert guard.run("charge", "pay_7f3a", lambda: 4200).value == 4200
        assert count.trips == 2

        with proxy.counting() as count:
            assert guard.run("charge", "pay_7f3a", lambda: 1).replayed
        assert count.trips == 1


def test_a_batch_of_five_hundred_asks_once(mode: str, redis_url: str) -> None:
    with Proxy(redis_url) as proxy, opened(mode, proxy.url()) as store:
        _known(store)
        # Batches take a connection of the pool, which is opened now.
        store.claim_all([entry("to connect")])
        entries = [entry(f"key-{number}", fingerprint=b"f" * 36) for number in range(500)]
        asked: list[Callable[[], Any]] = [
            lambda: store.claim_all(entries),
            lambda: store.claim_all([entry(f"key-{number}") for number in range(500)]),
            lambda: store.extend_all([claim_of(one) for one in entries]),
            lambda: store.close_all([Close(claim_of(one), DONE) for one in entries]),
        ]
        for ask in asked:
            with proxy.counting() as count:
                ask()
            assert count.trips == 1


def test_a_guards_batch_of_five_hundred_asks_once_before_and_once_after(redis_url: str) -> None:
    with Proxy(redis_url) as proxy, Guard(proxy.url()) as guard:
        _known(guard.store)

        with proxy.counting() as count:
            guard.run_batch("charge", range(500), key=str, handler=lambda number: number)
        assert count.trips == 2

        with proxy.counting() as count:
            outcomes = guard.run_batch("charge", range(500), key=str, handler=lambda number: -1)
        assert count.trips == 1
        assert [outcome.value for outcome in outcomes if not isinstance(outcome, Exception)] == list(range(500))


def test_a_batch_that_would_fill_a_buffer_goes_in_batches(store: Any) -> None:
    entries = [entry(f"key-{number}") for number in range(12)]
    assert store.claim_all(entries) == [None] * 12
    megabyte = Ending(state=State.DONE, ttl=60.0, result=b"r" * 2**20)

    assert store.close_all([Close(claim_of(one), megabyte) for one in entries]) == [True] * 12

    assert all(store.read(one.address).result == megabyte.result for one in entries)


def _known(store: Any) -> None:
    """Send every script once, so that the server knows them all."""
    one = entry("to know the scripts")
    store.claim(one)
    store.extend(claim_of(one))
    store.finish(claim_of(one), DONE)
    store.read(one.address)
    store.release(claim_of(one))


# Scripts that the server has forgotten.


def _forget_scripts(store_url: str) -> None:
    for url in primaries(store_url):
        with named_client(url) as client:
            client.script_flush()


def test_each_script_is_sent_again_where_the_server_has_forgotten_it(mode: str, url: str) -> None:
    with opened(mode, url) as store:
        one = entry()
        asked: list[tuple[Callable[[], Any], Any]] = [
            (lambda: store.claim(one), None),
            (lambda: store.extend(claim_of(one)), True),
            (lambda: store.finish(claim_of(one), DONE), True),
            (lambda: store.read(one.address).state, State.DONE),
            (lambda: store.release(claim_of(one)), True),
        ]
        for ask, answer in asked:
            _forget_scripts(url)

            assert ask() == answer


def test_a_batch_sends_forgotten_scripts_again(mode: str, url: str) -> None:
    entries = [entry(f"key-{number}") for number in range(100)]
    with opened(mode, url) as store:
        _forget_scripts(url)
        assert store.claim_all(entries) == [None] * 100
        _forget_scripts(url)
        assert store.extend_all([claim_of(one) for one in entries]) == [True] * 100
        _forget_scripts(url)
        ends: list[Any] = [DONE, Released(ttl=60.0, attempt=1), None, DONE]
        closes = [Close(claim_of(one), ends[number % 4]) for number, one in enumerate(entries)]
        assert store.close_all(closes) == [True] * 100


# Keys.


def test_a_key_can_be_read_by_people_and_parsed_by_us(store: Any, raw: Any) -> None:
    store.claim(entry("pay_7f3a", address=Address("shop", "charge", "pay_7f3a")))

    assert raw.keys() == [b"onefold:\x04shop\x06chargepay_7f3a"]
    assert raw.keys("onefold:*charge*pay_7f3a") == raw.keys()


@pytest.mark.parametrize(
    "address",
    [
        Address("", "o", "k"),
        Address("s" * 255, "o" * 128, "k" * 255),
        Address("\x06charge", "\x00", "\x00\x06x"),
        Address("ü", "é", "👍"),
    ],
)
def test_every_address_comes_back_from_its_key(address: Address) -> None:
    keys = Keys("onefold:")

    assert keys.address(keys.of(address)) == address


UUID = "0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b"


def test_a_uuid_takes_little_room_and_stays_apart_from_its_likes() -> None:
    keys = Keys("onefold:")
    likes = [UUID, UUID.upper(), UUID.replace("-", " "), UUID[:-1] + " ", UUID[9:] + UUID[:9], UUID.replace("-", "")]

    packed = [keys.of(Address("", "charge", like)) for like in likes]

    assert len(packed[0]) == len(packed[1]) - 19
    assert len(set(packed)) == len(likes)
    assert [keys.address(key) for key in packed] == [Address("", "charge", like) for like in likes]


@pytest.mark.parametrize(
    "foreign", [b"onefold:", b"onefold:lock", b"onefold:\x00", b"onefold:\x00\x00", b"onefold:\x01\xff\x01ok"]
)
def test_a_foreign_key_is_no_address(foreign: bytes) -> None:
    assert Keys("onefold:").address(foreign) is None


def test_stores_with_other_prefixes_do_not_see_each_other(mode: str, redis_url: str) -> None:
    with opened(mode, redis_url, prefix="a*[1]:") as one, opened(mode, f"{redis_url}?prefix=b:") as other:
        mine, theirs = entry(), entry()
        assert one.claim(mine) is None
        assert other.claim(theirs) is None

        assert [record.token for record in one.browse(Query(), 10)] == [mine.token]
        assert [record.token for record in other.browse(Query(), 10)] == [theirs.token]


def test_what_others_keep_under_the_prefix_is_left_alone(store: Any, raw: Any) -> None:
    raw.set("onefold:lock", "theirs")
    raw.hset("onefold:\x00\x06chargehash", "field", "theirs")
    assert store.claim(entry()) is None

    assert [record.address.key for record in store.browse(Query(), 10)] == ["key"]
    assert raw.get("onefold:lock") == b"theirs"


def test_another_programs_hash_in_the_place_of_a_record_is_told(store: Any, raw: Any) -> None:
    raw.hset("onefold:\x00\x06chargekey", "field", "theirs")

    with pytest.raises(StoreUnavailable, match=r"another program has stored its own data .* Choose another prefix"):
        store.claim(entry())


def test_a_record_of_a_later_form_is_told(store: Any, raw: Any) -> None:
    raw.set("onefold:\x00\x06chargekey", bytes(16) + b"\x82" + bytes(30))

    with pytest.raises(StoreUnavailable, match="not written by this version of Onefold"):
        store.claim(entry())


# Time.


def test_the_server_expires_records_by_itself(store: Any, raw: Any) -> None:
    one, two = entry("one", ttl=900.0), entry("two", ttl=math.inf)
    store.claim_all([one, two])
    (first, second) = (Keys("onefold:").of(each.address) for each in (one, two))

    assert 800_000 < raw.pttl(first) <= 900_000
    assert raw.pttl(second) == -1
    store.finish(claim_of(one), Ending(state=State.DONE, ttl=math.inf))
    store.finish(claim_of(two), Ending(state=State.DONE, ttl=500.0))
    assert raw.pttl(first) == -1
    assert 0 < raw.pttl(second) <= 500_000
    assert store.purge(100) == 0


@pytest.mark.parametrize("ttl", [1e10, 1e13, 1e300])
def test_a_ttl_of_many_lifetimes_is_kept_or_forever(store: Any, ttl: float) -> None:
    one = entry(ttl=ttl, lease=ttl, age=1e10)
    assert store.claim(one) is None

    record = store.read(one.address)
    assert record.ttl_left == math.inf or math.isclose(record.ttl_left, ttl, rel_tol=1e-6)
    assert record.lease_left > 1e9
    assert record.age > 1e9


def test_a_ttl_of_nothing_is_over_at_once(store: Any) -> None:
    one = entry(ttl=0.0)
    assert store.claim(one) is None

    assert eventually(lambda: store.read(one.address) is None)


def test_a_lease_is_told_to_the_millisecond_and_never_shorter(store: Any) -> None:
    one = entry(lease=1_000.0004)
    store.claim(one)

    assert 900.0 < store.read(one.address).lease_left <= 1_000.001


def test_a_late_heartbeat_leaves_the_ttl_of_a_held_record_as_it_is(store: Any) -> None:
    one = entry(ttl=9_000.0)
    store.claim(one)
    store.finish(claim_of(one), Ending(state=State.HELD, ttl=2_000.0))

    assert store.extend(claim_of(one), b"notes") is True

    found = store.read(one.address)
    assert (found.state, found.notes) == (State.HELD, b"notes")
    assert 1_000.0 < found.ttl_left <= 2_000.0


# Counts.


def test_counts_grow_beyond_the_byte_that_they_share(store: Any) -> None:
    one = entry(fingerprint=b"payload", notes=b"notes", remark="remark")
    store.claim(one)

    for revision in range(2, 40):
        assert store.extend(claim_of(one)) is True
        found = store.read(one.address)
        assert (found.revision, found.attempt, found.bypasses) == (revision, 1, 0)
        assert (found.fingerprint, found.notes, found.remark) == (b"payload", b"notes", "remark")


@pytest.mark.parametrize("attempt", [0, 15, 16, 70_000])
def test_an_open_record_keeps_any_number_of_attempts(store: Any, attempt: int) -> None:
    one = entry(fingerprint=b"f" * 36, result=b"kept")
    store.claim(one)

    assert store.release(claim_of(one), Released(ttl=60.0, attempt=attempt, notes=b"n", remark="r")) is True

    found = store.read(one.address)
    assert (found.state, found.attempt, found.revision, found.result) == (State.OPEN, attempt, 2, b"kept")
    assert (found.notes, found.remark, found.fingerprint) == (b"n", "r", b"f" * 36)


# Memory.


@pytest.mark.parametrize("server", SERVERS)
def test_a_finished_record_without_a_result_fits_its_budget(server: str, request: pytest.FixtureRequest) -> None:
    # The server's tables have just doubled, at a power of two: of their own share this is the most.
    count = 17_000
    url = request.getfixturevalue(f"{server}_url")
    with redis.Redis.from_url(url.replace("valkey", "redis")) as client, opened("blocking", url) as store:
        _finish(store, 1_000)
        client.flushall()
        before = client.info("memory")["used_memory"]

        _finish(store, count)

        assert client.dbsize() == count
        # The server moves its tables in its own time, and has each of them twice until then.
        assert eventually(lambda: (client.info("memory")["used_memory"] - before) / count <= BYTES_MAX)


def _finish(store: RedisStore, count: int) -> None:
    """So many records as a guard leaves them: with a fingerprint, kept for a day."""
    for _ in range(0, count, 1_000):
        entries = [entry(mint(), fingerprint=os.urandom(36)) for _ in range(1_000)]
        store.claim_all(entries)
        store.close_all([Close(claim_of(one), Ending(state=State.DONE, ttl=86_400.0)) for one in entries])


# Pages.


def _keys_of(records: list[Record]) -> list[str]:
    return [record.address.key for record in records]


def _filled(store: Any, count: int) -> list[str]:
    keys = [f"key-{number:04}" for number in range(count)]
    store.claim_all([entry(key, state=State.DONE if number % 3 else State.HELD) for number, key in enumerate(keys)])
    return keys


@pytest.mark.parametrize("state", [None, State.HELD])
def test_more_records_than_are_kept_for_a_listing_are_listed_all(
    mode: str, url: str, state: State | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_browse, "LISTED_MAX", 10)
    with opened(mode, url) as store:
        keys = _filled(store, 100)
        listed: list[Record] = []
        while page := store.browse(Query(state=state, after=listed[-1].address if listed else None), 7):
            listed += page
            if len(page) < 7:
                break

        assert _keys_of(listed) == (keys if state is None else keys[::3])


def test_a_listing_is_scanned_once_for_many_pages(mode: str, redis_url: str) -> None:
    with Proxy(redis_url) as proxy, opened(mode, proxy.url()) as store:
        keys = _filled(store, 500)
        with proxy.counting() as count:
            page = store.browse(Query(), 100)
            while len(page) % 100 == 0 and len(page) < 500:
                page += store.browse(Query(after=page[-1].address), 100)

        assert _keys_of(page) == keys
        assert sum(b"SCAN" in message for message in count.messages) <= 3


def test_a_page_is_full_although_records_vanish(store: Any) -> None:
    keys = _filled(store, 30)
    first = store.browse(Query(), 10)
    for record in [store.read(Address("", "charge", key)) for key in keys[12:18]]:
        assert store.release(claim_of(entry(record.address.key, token=record.token)))

    second = store.browse(Query(after=first[-1].address), 10)

    assert _keys_of(second) == [*keys[10:12], *keys[18:26]]


def test_a_new_listing_sees_what_is_new(store: Any) -> None:
    _filled(store, 5)
    assert len(store.browse(Query(), 10)) == 5
    store.claim(entry("key-9999"))

    assert len(store.browse(Query(), 10)) == 6
    assert _keys_of(store.browse(Query(operation="charge", key="key-9999"), 10)) == ["key-9999"]


# Threads, forks, and event loops.


@pytest.fixture
def since(raw: Any) -> Callable[[], int]:
    """Count the connections that were opened after the test has begun: what others left is collected at any time."""
    before = {client["id"] for client in raw.client_list()}
    return lambda: len({client["id"] for client in raw.client_list()} - before)


def test_many_threads_share_a_store(redis_url: str, since: Callable[[], int]) -> None:
    store = RedisStore(redis_url)
    start = threading.Barrier(40)

    def work(number: int) -> bool:
        start.wait(PATIENCE)
        mine = entry(f"key-{number}")
        return store.claim(mine) is None and store.finish(claim_of(mine), DONE)

    with ThreadPoolExecutor(40) as threads:
        assert all(threads.map(work, range(40)))
    store.close()

    assert eventually(lambda: since() == 0)


def test_a_closed_store_may_be_used_again(store: Any) -> None:
    one = entry()
    assert store.claim(one) is None
    if isinstance(store, RedisStore):
        store.close()
    else:
        store._runner.run(store.store.aclose())

    assert store.read(one.address).token == one.token


def test_a_closed_store_has_no_connections(redis_url: str, since: Callable[[], int]) -> None:
    store = RedisStore(redis_url)
    store.claim(entry())
    # One for operations, and one for renewals.
    assert eventually(lambda: since() == 2)

    store.close()

    assert eventually(lambda: since() == 0)


# From Python 3.12 on, a thread that another test has left behind would be a warning here.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_uses_no_connection_of_its_parent(redis_url: str, raw: Any) -> None:
    store = RedisStore(redis_url)
    store.claim(entry("parent"))
    mine = {client["id"] for client in raw.client_list()}
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def in_the_child() -> None:
        answers = [store.claim(entry(f"child-{number}")) for number in range(5)]
        there.send((answers, {client["id"] for client in redis.Redis.from_url(redis_url).client_list()}))
        there.close()

    child = context.Process(target=in_the_child)
    child.start()
    assert here.poll(PATIENCE)
    answers, seen = here.recv()
    # While the child works, the parent's connection is the parent's.
    assert [store.claim(entry(f"parent-{number}")) for number in range(5)] == [None] * 5
    child.join(PATIENCE)

    assert answers == [None] * 5
    assert len(seen - mine) == 3
    assert store.read(Address("", "charge", "child-4")) is not None
    store.close()


def test_an_async_store_survives_new_event_loops(redis_url: str, since: Callable[[], int]) -> None:
    store = AsyncRedisStore(redis_url)
    one = entry()

    async def again() -> Any:
        return await store.claim(one)

    for _ in range(3):
        assert asyncio.run(again()) is None
    gc.collect()

    # Each loop has closed its client as it ended.
    assert eventually(lambda: since() == 0)


def test_an_async_guard_survives_new_event_loops(url: str) -> None:
    guard = AsyncGuard(url)

    async def charge() -> int:
        return 4200

    async def deliver() -> Any:
        return await guard.run("charge", "pay_7f3a", charge)

    outcomes = [asyncio.run(deliver()) for _ in range(3)]
    gc.collect()

    assert [(outcome.value, outcome.replayed) for outcome in outcomes] == [(4200, False), (4200, True), (4200, True)]


def test_two_loops_at_the_same_time_have_a_client_each(redis_url: str) -> None:
    store = AsyncRedisStore(redis_url)
    start = threading.Barrier(2)

    async def work(name: str) -> list[Any]:
        start.wait(PATIENCE)
        return [await store.claim(entry(f"{name}-{number}")) for number in range(50)]

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda name: asyncio.run(work(name)), ("one", "two")))

    assert answers == [[None] * 50] * 2


def test_a_thousand_tasks_share_a_few_connections(url: str) -> None:
    async def work() -> list[Any]:
        # A slow machine takes long to begin a thousand tasks, and no connection is to be given up for it.
        store = AsyncRedisStore(f"{url}?socket_timeout=60s&socket_connect_timeout=60s")
        answers = await asyncio.gather(*(store.claim(entry(f"key-{number}")) for number in range(1_000)))
        await store.aclose()
        return list(answers)

    assert asyncio.run(work()) == [None] * 1_000


def test_a_cancelled_claim_leaves_no_reply_behind(redis_url: str) -> None:
    async def work() -> None:
        with Proxy(redis_url) as proxy:
            store = AsyncRedisStore(proxy.url())
            await store.claim(entry("first"))
            held = proxy.hold_reply(b"EVALSHA")
            mine = entry("second")
            task = asyncio.ensure_future(store.claim(mine))
            await asyncio.get_running_loop().run_in_executor(None, held.reached.wait, PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            held.released.set()

            # What the driver of a guard does: it sends the operation again.
            assert await store.claim(mine) is None
            found = await store.read(mine.address)
            assert found is not None
            assert found.token == mine.token
            await store.aclose()

    asyncio.run(work())


def test_an_interrupt_before_the_reply_leaves_no_reply_behind(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RedisStore(redis_url)
    first, second = entry("first"), entry("second")
    assert store.claim(first) is None
    read = redis.Connection.read_response

    def interrupted(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(redis.Connection, "read_response", read)
        raise KeyboardInterrupt

    monkeypatch.setattr(redis.Connection, "read_response", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.claim(second)

    found = store.read(first.address)
    assert found is not None
    assert found.token == first.token
    store.close()


def test_evictions_are_summed_over_the_servers_that_report_them() -> None:
    assert _evicted([{"evicted_keys": "3"}, {"evicted_keys": "4"}, {}, Untold("forbidden")]) == 7
    assert isinstance(_evicted([{}, Untold("forbidden")]), Untold)


def test_a_repr_shows_the_server_and_no_password(redis_url: str) -> None:
    secret = redis_url.replace("redis://", "redis://me:sesame@")

    for store in (RedisStore(secret), AsyncRedisStore(secret)):
        assert "sesame" not in repr(store)
        assert repr(store).endswith(f"RedisStore({redis_url.replace('redis://', 'redis://me:***@')!r})")
    with redis.Redis.from_url(secret) as client:
        assert "sesame" not in repr(RedisStore(client))
