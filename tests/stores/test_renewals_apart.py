"""The renewal of one claim never depends on another's: not on a row that is locked, nor on a server that is silent."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import psycopg
import pymysql
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onefold import AsyncGuard, Guard, StoreUnavailable
from onefold._heartbeat.async_guards import AsyncHeartbeat
from onefold._heartbeat.groups import TASKS_MAX, THREADS_MAX
from onefold._heartbeat.sync_guards import Heartbeat
from onefold._model import Address, Claim, Entry
from onefold.events import Teller
from onefold.stores.base import PartlyRenewed
from onefold.stores.mysql.dialect import MARIADB, MYSQL
from onefold.stores.postgres.dialect import POSTGRES
from onefold.stores.redis import AsyncRedisStore, RedisStore
from services.proxy import Proxy
from tests.stores.django.project import alias_of, project
from tests.stores.mysql import wallet as mysql_wallet
from tests.support import PATIENCE, Elsewhere, Heard, elsewhere, eventually, in_time

# An eighth of it is shorter than InnoDB's shortest wait: a locked row is not waited for, or for a moment.
LEASE: Final = 0.5

HOUR: Final = 3_600.0
BEATS: Final = 3


def entry(key: str, lease: float = LEASE) -> Entry:
    return Entry(address=Address("", "charge", key), token=os.urandom(16), lease=lease, ttl=2 * HOUR)


def claim_of(one: Entry) -> Claim:
    return Claim(one.address, one.token, one.lease, one.ttl)


def revision(store: Any, one: Entry) -> int:
    return int(store.read(one.address).revision)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats that come twenty times a second, of a lease of an hour, and nobody who loses patience."""
    monkeypatch.setattr("onefold._heartbeat.beats.BEATS_PER_LEASE", 72_000)
    for module in ("late", "renewal"):
        monkeypatch.setattr(f"onefold._heartbeat.{module}.patience", lambda _beats: PATIENCE)


# A row that is locked.


@contextmanager
def locking(url: str, key: str) -> Iterator[Callable[[], None]]:
    """Keep the row of this key in an open transaction; what is given ends it."""
    # By the whole address: InnoDB locks whatever it looks at.
    at = "SELECT 1 FROM onefold_records WHERE scope = '' AND operation = 'charge' AND key = %s"
    if url.startswith("postgresql"):
        connection: Any = psycopg.connect(url)
        connection.execute(f"{at} FOR UPDATE", (key,))
    else:
        parts = pymysql_options(url)
        connection = pymysql.connect(**parts)
        connection.cursor().execute(f"{at.replace('key', '`key`')} LOCK IN SHARE MODE", (key,))
    try:
        yield connection.rollback
    finally:
        connection.close()


def pymysql_options(url: str) -> dict[str, Any]:
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "password": parts.password or "",
        "database": parts.path[1:],
    }


def through(url: str, driver: str) -> str:
    return url.replace("://", f"+{driver}://", 1).partition("?")[0]


@contextmanager
def store_of(way: str, request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """A blocking store, and the URL of its database."""
    library, _, server = way.rpartition(" ")
    url = request.getfixturevalue(f"{server}_url")
    with ExitStack() as stack:
        source: Any = url
        if library == "SQLAlchemy":
            source = create_engine(through(url, "psycopg" if server == "postgres" else "pymysql"))
            stack.callback(source.dispose)
        elif library == "Django":
            stack.enter_context(project())
            name = "postgres" if server == "postgres" else "mariadb"
            source = f"django://{stack.enter_context(alias_of(name, url))}"
        guard = Guard(source)
        stack.callback(guard.close)
        yield guard.store, url


EVERYDAY: Final = ["postgres", "mysql", "SQLAlchemy mysql"]
MORE: Final = ["SQLAlchemy postgres", "Django postgres", "Django mysql"]
WAYS: Final = [*EVERYDAY, *(pytest.param(way, marks=pytest.mark.more) for way in MORE)]


def renewed(store: Any, entries: Sequence[Entry]) -> list[bool | None]:
    try:
        return list(store.extend_all([claim_of(one) for one in entries]))
    except PartlyRenewed as partly:
        return partly.answers


@pytest.mark.parametrize("way", WAYS)
def test_a_locked_row_costs_no_other_claim_its_renewal(way: str, request: pytest.FixtureRequest) -> None:
    with store_of(way, request) as (store, url):
        entries = [entry(key) for key in "abcd"]
        assert store.claim_all(entries) == [None] * 4
        # Another's by now.
        theirs = entry("d")
        before = store.read(theirs.address)
        assert store.claim(theirs, replacing=before) is None

        with locking(url, "b") as unlock:
            assert renewed(store, entries) == [True, None, True, False]
            assert store.read(entries[0].address).revision == 2
            assert store.read(entries[1].address).revision == 1
            unlock()
            assert renewed(store, entries) == [True, True, True, False]


@pytest.mark.parametrize(("sql", "clause"), [(MYSQL, "NOWAIT"), (MARIADB, "NOWAIT"), (POSTGRES, "SKIP LOCKED")])
def test_a_batch_does_not_wait_for_a_row_at_all(sql: Any, clause: str) -> None:
    # InnoDB would wait for 50 s, and then tell the same: no answer shows it.
    assert clause in next(sql.extend_all([claim_of(entry("a"))])).statement


@pytest.mark.parametrize("server", ["postgres", "mysql"])
@pytest.mark.parametrize("library", ["", pytest.param("SQLAlchemy", marks=pytest.mark.more)])
def test_a_locked_row_costs_no_other_claim_its_async_renewal(
    server: str, library: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    ours = through(url, "asyncpg" if server == "postgres" else "asyncmy")

    async def story() -> None:
        engine = create_async_engine(ours) if library else None
        guard = AsyncGuard(engine or (ours if server == "postgres" else url))
        entries = [entry(key) for key in "abc"]
        assert await guard.store.claim_all(entries) == [None] * 3
        with locking(url, "b") as unlock:
            with pytest.raises(PartlyRenewed, match="another transaction holds the row") as partly:
                await guard.store.extend_all([claim_of(one) for one in entries])
            assert partly.value.answers == [True, None, True]
            unlock()
            assert await guard.store.extend_all([claim_of(one) for one in entries]) == [True] * 3
        await guard.aclose()
        if engine is not None:
            await engine.dispose()

    in_time(story())


WAITS: Final = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


@pytest.mark.parametrize("way", ["postgres", "mysql", "SQLAlchemy mysql"])
def test_a_row_that_is_locked_for_a_moment_is_waited_for_after_the_others(
    way: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onefold.stores.sql.locked.WAIT_SECONDS", 2 * PATIENCE)
    answers: list[Any] = []
    with store_of(way, request) as (store, url):
        entries = [entry(key, HOUR) for key in "abc"]
        assert store.claim_all(entries) == [None] * 3
        with locking(url, "b") as unlock:
            beat = threading.Thread(target=lambda: answers.append(renewed(store, entries)))
            beat.start()
            # In this order: for a moment MariaDB counts whoever asks by NOWAIT, before the others are renewed.
            assert eventually(lambda: revision(store, entries[2]) == 2)
            assert eventually(lambda: somebody_waits(url))
            unlock()
            beat.join(PATIENCE)

    assert answers == [[True, True, True]]


@pytest.mark.parametrize("way", ["postgres", "mysql"])
def test_a_locked_row_is_not_waited_for_at_the_cost_of_a_shorter_lease(
    way: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the shorter one is not due now: it becomes due meanwhile, on the same connection."""
    monkeypatch.setattr("onefold.stores.sql.locked.WAIT_SECONDS", 2 * PATIENCE)
    with store_of(way, request) as (store, url):
        long, short = entry("long", HOUR), entry("short")
        assert store.claim_all([long]) == [None]
        assert store.claim(short) is None
        with locking(url, "long"):
            assert elsewhere(lambda: renewed(store, [long])) == [None]
        assert renewed(store, [long, short]) == [True, True]


@pytest.mark.parametrize("way", ["postgres", "mysql"])
def test_a_short_lease_begins_after_a_wait_that_is_too_long_for_it(
    way: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onefold.stores.sql.locked.WAIT_SECONDS", PATIENCE)
    with store_of(way, request) as (store, url):
        long, short = entry("long", HOUR), entry("short")
        store.claim(long)
        with locking(url, "long") as unlock:
            beat = Elsewhere(lambda: renewed(store, [long]))
            assert eventually(lambda: somebody_waits(url))
            claiming = Elsewhere(lambda: store.claim(short))
            assert eventually(lambda: store._leases.shortest == LEASE)
            assert store.read(short.address) is None
            unlock()
            assert (beat.result(), claiming.result()) == ([True], None)
        # What is known is not waited for again.
        assert not store._leases.meet(LEASE)


def somebody_waits(url: str) -> bool:
    if url.startswith("postgresql"):
        with psycopg.connect(url) as connection:
            return bool(connection.execute(WAITS).fetchone()[0])  # type: ignore[index]
    with pymysql.connect(**pymysql_options(url)) as other, other.cursor() as cursor:

        def rows(question: str) -> Sequence[Any]:
            cursor.execute(question)
            return list(cursor.fetchall())

        return mysql_wallet.transactions_waiting(rows) > 0


# What the heartbeat makes of it.


class Partly:
    """A store that has renewed one of two claims, and knows nothing of the other."""

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        raise PartlyRenewed([None if claim.address.key == "b" else True for claim in claims], "its row is locked")

    claim_all = close_all = extend_all


class AsyncPartly(Partly):
    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]:  # type: ignore[override]
        return super().extend_all(claims)

    claim_all = close_all = extend_all  # type: ignore[assignment]


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_what_was_not_renewed_is_late_and_not_lost(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    heard, claims = Heard(), [claim_of(entry(key, 30.0)) for key in "ab"]
    sent = time.monotonic() - 15.0
    teller = Teller([heard])
    if mode == "blocking":
        heartbeat = Heartbeat(Partly, teller)
        beats = heartbeat.beats
        beats.add(claims, sent)
        heartbeat.beat()
    else:

        async def story() -> Any:
            async_heartbeat = AsyncHeartbeat(AsyncPartly, teller)
            here = async_heartbeat._here()
            here.beats.add(claims, sent)
            await async_heartbeat.beat(here)
            async_heartbeat.close()
            return here.beats

        beats = in_time(story())

    assert beats[claims[0].token].left > 25.0
    assert 0.0 < beats[claims[1].token].left < 16.0
    assert [(event.kind.value, event.detail, event.address.key) for event in heard.events] == [
        ("not_renewed", "late", "b")
    ]
    assert "its row is locked" in caplog.text


class OneByOne:
    """A store that renews one by one, of which the claims of some keys are silent, or fail."""

    def __init__(self) -> None:
        self.silent = threading.Event()
        self.renewed: set[str] = set()
        self.at_once = self.most = 0
        self._lock = threading.Lock()

    def _enter(self, claim: Claim, step: int) -> None:
        with self._lock:
            self.at_once += step
            self.most = max(self.most, self.at_once)
        if claim.address.key == "fails":
            raise StoreUnavailable("it is throttled")

    def extend(self, claim: Claim) -> bool:
        try:
            self._enter(claim, +1)
            if claim.address.key == "silent":
                self.silent.wait(PATIENCE)
            self.renewed.add(claim.address.key)
            return True
        finally:
            self.at_once -= 1


class AsyncOneByOne(OneByOne):
    async def extend(self, claim: Claim) -> bool:  # type: ignore[override]
        try:
            self._enter(claim, +1)
            await asyncio.sleep(PATIENCE if claim.address.key == "silent" else 0)
            self.renewed.add(claim.address.key)
            return True
        finally:
            self.at_once -= 1


KEYS: Final = ["silent", "fails", *(str(number) for number in range(100))]


def are_renewed(beats: Any, claims: Sequence[Claim], since: float) -> bool:
    return all((beats[one.token].sent >= since) == (one.address.key not in ("silent", "fails")) for one in claims)


def test_of_a_store_that_renews_one_by_one_each_answer_counts_by_itself() -> None:
    store, claims, began = OneByOne(), [claim_of(entry(key, 30.0)) for key in KEYS], time.monotonic()
    heartbeat = Heartbeat(lambda: store, Teller())
    heartbeat.beats.add(claims, began - 15.0)

    heartbeat.beat()

    assert eventually(lambda: are_renewed(heartbeat.beats, claims, began))
    assert store.most <= THREADS_MAX
    # What is under way is not sent a second time.
    assert all(beat.claim.address.key != "silent" for beat in heartbeat.beats.due(began + 100.0))
    store.silent.set()
    heartbeat.close()


def test_of_a_store_that_renews_one_by_one_a_claim_that_is_due_alone_keeps_nobody_waiting() -> None:
    store, began = OneByOne(), time.monotonic()
    claims = [claim_of(entry(key, 30.0)) for key in ("silent", "b")]
    heartbeat = Heartbeat(lambda: store, Teller())
    try:
        for claim in claims:
            heartbeat.beats.add([claim], began - 15.0)
            elsewhere(heartbeat.beat)

        assert eventually(lambda: are_renewed(heartbeat.beats, claims, began))
    finally:
        store.silent.set()
        heartbeat.close()


def test_renewals_that_hang_are_so_many_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onefold._heartbeat.sync_guards.HANGING_MAX", 2)
    store, heard, began = OneByOne(), Heard(), time.monotonic()
    heartbeat = Heartbeat(lambda: store, Teller(heard))
    try:
        for _ in range(3):
            heartbeat.beats.add([claim_of(entry("silent", HOUR))], began - HOUR / 2)
            elsewhere(heartbeat.beat)

        assert [(event.kind.value, event.detail) for event in heard.events] == [("not_renewed", "late")]
        # It is sent with the next beat, for which there may be room.
        assert sum(not beat.under_way for beat in heartbeat.beats.values()) == 1
    finally:
        store.silent.set()
        heartbeat.close()


class Hanging:
    """A store that renews all at once, and does not answer."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        self.asked.set()
        assert self.answers.wait(PATIENCE)
        return [True] * len(claims)

    claim_all = close_all = extend_all


@pytest.mark.parametrize("kind", [Hanging, OneByOne])
def test_a_renewal_that_hangs_does_not_keep_a_heartbeat_from_being_closed(
    kind: type[Any], fast: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onefold._heartbeat.sync_guards.CLOSE_SECONDS", 0.05)
    store, before = kind(), set(threading.enumerate())
    heartbeat = Heartbeat(lambda: store, Teller())
    heartbeat.watch([claim_of(entry("silent", HOUR))], time.monotonic())
    assert eventually(lambda: any(beat.under_way for beat in heartbeat.beats.values()))

    elsewhere(heartbeat.close)

    assert "a guard was closed, and a renewal that is under way has not been answered within 0.05s" in caplog.text
    (store.answers if isinstance(store, Hanging) else store.silent).set()
    assert eventually(lambda: not {*threading.enumerate()} - before)
    assert not heartbeat.beats


def test_of_a_store_that_is_async_one_by_one_each_answer_counts_by_itself() -> None:
    store, claims, began = AsyncOneByOne(), [claim_of(entry(key, 30.0)) for key in KEYS], time.monotonic()

    async def story() -> Any:
        heartbeat = AsyncHeartbeat(lambda: store, Teller())
        here = heartbeat._here()
        here.beats.add(claims, began - 15.0)
        beat = asyncio.create_task(heartbeat.beat(here))
        assert await asyncio.to_thread(eventually, lambda: are_renewed(here.beats, claims, began))
        # The next beat does not wait for the silent one.
        assert here.timer is not None
        assert not beat.done()
        beat.cancel()
        heartbeat.close()

    in_time(story())
    assert store.most <= TASKS_MAX


# DynamoDB, where each claim is a request.


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_request_to_dynamodb_that_hangs_costs_no_other_claim_its_renewal(
    mode: str, dynamodb_url: str, fast: None
) -> None:
    entries = [entry(f"key-{number}", HOUR) for number in range(5)]
    claims = [claim_of(one) for one in entries]
    with Proxy(dynamodb_url) as proxy, Guard(dynamodb_url) as other:

        def others_are_renewed() -> bool:
            return all(revision(other.store, one) > BEATS for one in entries[1:])

        if mode == "blocking":
            store = Guard(f"{proxy.url()}&timeout={PATIENCE}s").store
            for one in entries:
                assert store.claim(one) is None
            fault = proxy.hold_request(b"key-0")
            heartbeat = Heartbeat(lambda: store, Teller())
            heartbeat.watch(claims, time.monotonic())
            assert eventually(others_are_renewed)
            fault.released.set()
            heartbeat.close()
            store.close()
            return

        async def story() -> None:
            store = AsyncGuard(f"{proxy.url()}&timeout={PATIENCE}s").store
            for one in entries:
                assert await store.claim(one) is None
            fault = proxy.hold_request(b"key-0")
            heartbeat = AsyncHeartbeat(lambda: store, Teller())
            heartbeat.watch(claims, time.monotonic())
            assert await asyncio.to_thread(eventually, others_are_renewed)
            fault.released.set()
            heartbeat.close()
            await store.aclose()

        in_time(story())


# A cluster of Redis, one primary of which is silent.

SILENT: Final = b"*3\r\n$5\r\nBLPOP\r\n$%d\r\n%b\r\n$2\r\n60\r\n"


def silencing(key: bytes) -> bytes:
    """A command after which this connection is not answered until something is pushed there."""
    return SILENT % (len(key), key)


def spread_over(sender: Any, keys: Callable[[Address], bytes]) -> tuple[list[Entry], list[Entry], Any, bytes]:
    """Claims at one primary, claims at the others, that primary, and a name of nothing that it has."""
    entries = [entry(f"key-{number}", HOUR) for number in range(30)]
    node = sender.node_of(keys(entries[0].address))
    here = [one for one in entries if sender.node_of(keys(one.address)) is node]
    name = next(name for name in (b"nothing-%d" % number for number in range(1_000)) if sender.node_of(name) is node)
    return here, [one for one in entries if one not in here], node, name


def test_a_silent_primary_costs_no_claim_of_the_others_its_renewal(redis_cluster_url: str, fast: None) -> None:
    store, other = RedisStore(f"{redis_cluster_url}?socket_timeout={PATIENCE}s"), RedisStore(redis_cluster_url)
    sender = store._renewing().sender
    here, elsewhere, node, name = spread_over(sender, store._key)
    assert store.claim_all([*here, *elsewhere]) == [None] * 30
    (connection,) = sender.connections._idle[sender._pool(node)]  # type: ignore[attr-defined]
    connection.send_packed_command([silencing(name)])
    heartbeat = Heartbeat(lambda: store, Teller())

    heartbeat.watch([claim_of(one) for one in (*here, *elsewhere)], time.monotonic())

    try:
        assert eventually(lambda: all(revision(other, one) > BEATS for one in elsewhere))
    finally:
        store._sender.client.rpush(name, b"something")  # type: ignore[union-attr]
        heartbeat.close()
        store.close()
        other.close()


def test_a_silent_primary_costs_no_claim_of_the_others_its_async_renewal(redis_cluster_url: str, fast: None) -> None:
    other = RedisStore(redis_cluster_url)

    async def story() -> None:
        store = AsyncRedisStore(f"{redis_cluster_url}?socket_timeout={PATIENCE}s")
        sender = await store._loops.renewals()
        here, elsewhere, node, name = spread_over(sender, store._key)
        assert await store.claim_all([*here, *elsewhere]) == [None] * 30
        await sender._connections[node.name].send_packed_command([silencing(name)])
        heartbeat = AsyncHeartbeat(lambda: store, Teller())
        heartbeat.watch([claim_of(one) for one in (*here, *elsewhere)], time.monotonic())
        assert await asyncio.to_thread(eventually, lambda: all(revision(other, one) > BEATS for one in elsewhere))
        heartbeat.close()
        await store.aclose()

    in_time(story())
    other.close()
