"""A claim lives on while handlers hold every connection that its store was given: the store renews on one of its own.

How long three leases take does not matter here: a handler waits, with everything in its hands, until another store
has seen the beats of three leases. A lease of an hour cannot run out meanwhile, however slow the machine is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

import asyncpg
import boto3
import psycopg
import psycopg_pool
import pytest
import redis
import redis.asyncio
from botocore.config import Config
from django.db import connections
from sqlalchemy import StaticPool, create_engine, event
from sqlalchemy.ext.asyncio import create_async_engine
from yarl import URL

from onefold import AsyncGuard, Guard, InProgress, Outcome, Policy, StoreUnavailable, current
from onefold.keys import address
from onefold.stores.dynamodb import AsyncDynamoDBStore
from tests.stores.django.project import alias_of, project
from tests.stores.dynamodb.tools import client_options, table_of
from tests.support import PATIENCE, eventually, in_time

ADDRESS: Final = address("charge", "pay_1")

# Of three leases, at three beats each.
BEATS: Final = 9

# Every connection that a handler can hold of the pools below.
SIZE: Final = 2

# How long a pool that has nothing to lend is waited for.
NO_PATIENCE: Final = 0.2


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> float:
    """A lease that no pause of the machine outlasts; its beats come twenty times a second all the same."""
    monkeypatch.setattr("onefold._heartbeat.beats.BEATS_PER_LEASE", 72_000)
    # So fast, a beat may well be late on a busy machine.
    for module in ("late", "renewal"):
        monkeypatch.setattr(f"onefold._heartbeat.{module}.patience", lambda _beats: PATIENCE)
    return 3_600.0


class Observer:
    """Another worker, with connections of its own."""

    def __init__(self, url: str) -> None:
        self.guard = Guard(url)

    def revision(self) -> int:
        found = self.guard.store.read(ADDRESS)
        assert found is not None
        return int(found.revision)

    def sees_three_leases(self) -> bool:
        """Whether the claim is renewed as often as in three leases, and is refused to others after that."""
        before = self.revision()
        beaten = eventually(lambda: self.revision() >= before + BEATS)
        with pytest.raises(InProgress):
            self.guard.run("charge", "pay_1", lambda: "theirs")
        return beaten

    def replays(self, value: str) -> bool:
        outcome = self.guard.run("charge", "pay_1", lambda: "theirs")
        return (outcome.value, outcome.replayed) == (value, True)


@pytest.fixture
def observer(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Observer]]:
    with ExitStack() as stack:

        def observed(url: str) -> Observer:
            found = Observer(url)
            stack.callback(found.guard.close)
            return found

        yield observed


# A source for a guard, how to hold all of it, and the URL of the same place for others.
Source = tuple[Any, Callable[[], Any], str]


@contextmanager
def all_of(take: Callable[[], Any], give_back: Callable[[Any], object]) -> Iterator[None]:
    taken = [take() for _ in range(SIZE)]
    try:
        yield
    finally:
        for one in taken:
            give_back(one)


@contextmanager
def psycopg_pool_of(request: pytest.FixtureRequest) -> Iterator[Source]:
    url = request.getfixturevalue("postgres_url")
    with psycopg_pool.ConnectionPool(url, min_size=0, max_size=SIZE, timeout=NO_PATIENCE, open=True) as pool:
        yield pool, lambda: all_of(pool.getconn, pool.putconn), url


@contextmanager
def psycopg_null_pool_of(request: pytest.FixtureRequest) -> Iterator[Source]:
    url = request.getfixturevalue("postgres_url")
    with psycopg_pool.NullConnectionPool(url, max_size=SIZE, timeout=NO_PATIENCE, open=True) as pool:
        yield pool, lambda: all_of(pool.getconn, pool.putconn), url


@contextmanager
def engine_of(url: str, seen: str, **options: Any) -> Iterator[Source]:
    engine = create_engine(url, **({"pool_size": SIZE, "max_overflow": 0, "pool_timeout": NO_PATIENCE} | options))
    yield engine, lambda: all_of(engine.connect, lambda one: one.close()), seen
    engine.dispose()


@contextmanager
def postgres_engine(request: pytest.FixtureRequest) -> Iterator[Source]:
    url = request.getfixturevalue("postgres_url")
    with engine_of(url.replace("postgresql://", "postgresql+psycopg://"), url) as opened:
        yield opened


@contextmanager
def mysql_engine(request: pytest.FixtureRequest) -> Iterator[Source]:
    url = request.getfixturevalue("mysql_url")
    with engine_of(url.replace("mysql://", "mysql+pymysql://").partition("?")[0], url) as opened:
        yield opened


@contextmanager
def sqlite_engine(request: pytest.FixtureRequest) -> Iterator[Source]:
    url = f"sqlite:///{request.getfixturevalue('tmp_path') / 'records.db'}"
    with engine_of(url, url.replace("sqlite:///", "sqlite:////")) as opened:
        yield opened


@contextmanager
def static_engine(request: pytest.FixtureRequest) -> Iterator[Source]:
    url = request.getfixturevalue("postgres_url")
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=StaticPool)
    yield engine, lambda: all_of(engine.connect, lambda one: one.close()), url
    engine.dispose()


@contextmanager
def redis_pool_of(request: pytest.FixtureRequest, kind: Any, **options: Any) -> Iterator[Source]:
    url = request.getfixturevalue("redis_url")
    pool = kind.from_url(url, max_connections=SIZE, **options)
    client = redis.Redis(connection_pool=pool)
    yield client, lambda: all_of(pool.get_connection, pool.release), url
    client.close()
    pool.disconnect()


@contextmanager
def redis_client(request: pytest.FixtureRequest) -> Iterator[Source]:
    with redis_pool_of(request, redis.ConnectionPool) as opened:
        yield opened


@contextmanager
def blocking_redis_client(request: pytest.FixtureRequest) -> Iterator[Source]:
    with redis_pool_of(request, redis.BlockingConnectionPool, timeout=NO_PATIENCE) as opened:
        yield opened


@contextmanager
def redis_cluster_client(request: pytest.FixtureRequest) -> Iterator[Source]:
    url = request.getfixturevalue("redis_cluster_url")
    client: Any = redis.RedisCluster.from_url(url.replace("redis+cluster://", "redis://"), max_connections=SIZE)
    pools = [client.get_redis_connection(node).connection_pool for node in client.get_primaries()]

    @contextmanager
    def hold() -> Iterator[None]:
        with ExitStack() as stack:
            for pool in pools:
                stack.enter_context(all_of(pool.get_connection, pool.release))
            yield

    yield client, hold, url
    client.close()
    # A cluster's client closes none of its nodes' connections.
    for pool in pools:
        pool.disconnect()


@contextmanager
def django_pool(request: pytest.FixtureRequest) -> Iterator[Source]:
    url = request.getfixturevalue("postgres_url")
    pool = {"min_size": 0, "max_size": SIZE, "timeout": NO_PATIENCE}
    with project(), alias_of("postgres", url, OPTIONS={"pool": pool}) as alias:

        def connect() -> Any:
            connection = connections[alias].copy()
            connection.ensure_connection()
            return connection

        def hold() -> Any:
            # The guard's own thread has one already, which Django keeps for it; it is given back here.
            connections[alias].close()
            return all_of(connect, lambda one: one.close())

        yield f"django://{alias}", hold, url
        connections[alias].close_pool()


def lent_by(guard: Guard) -> Any:
    """Every connection of a pool of ours, as handlers of `transactional` hold them."""
    stack = ExitStack()
    for _ in range(SIZE):
        stack.enter_context(guard.store._pool.acquire())
    return stack


SOURCES: Final = {
    "psycopg_pool": psycopg_pool_of,
    "psycopg_pool without a pool": psycopg_null_pool_of,
    "SQLAlchemy, psycopg": postgres_engine,
    "SQLAlchemy, StaticPool": static_engine,
    "SQLAlchemy, PyMySQL": mysql_engine,
    "SQLAlchemy, SQLite": sqlite_engine,
    "redis": redis_client,
    "redis, blocking": blocking_redis_client,
    "redis, cluster": redis_cluster_client,
    "Django, psycopg_pool": django_pool,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_handlers_that_hold_everything_do_not_cost_a_claim(
    kind: str, request: pytest.FixtureRequest, observer: Callable[[str], Observer], lease: float
) -> None:
    with SOURCES[kind](request) as (source, hold, url):
        other, effects = observer(url), []
        guard = Guard(source, policy=Policy(lease=lease))

        def handler() -> str:
            with hold():
                assert other.sees_three_leases()
            effects.append("paid")
            return "paid"

        outcome = guard.run("charge", "pay_1", handler)
        guard.close()

        assert (outcome.value, outcome.recorded, effects) == ("paid", True, ["paid"])
        assert other.replays("paid")


@pytest.mark.parametrize("server", ["postgres_url", "mysql_url"])
def test_handlers_that_hold_a_pool_of_ours_do_not_cost_a_claim(
    server: str, request: pytest.FixtureRequest, observer: Callable[[str], Observer], lease: float
) -> None:
    url = request.getfixturevalue(server)
    other = observer(url)
    guard = Guard(f"{url}{'&' if '?' in url else '?'}pool_size={SIZE}&pool_timeout=0.2s", policy=Policy(lease=lease))

    def handler() -> str:
        with lent_by(guard):
            assert other.sees_three_leases()
        return "paid"

    assert guard.run("charge", "pay_1", handler).recorded
    guard.close()
    assert other.replays("paid")


@pytest.mark.parametrize("kind", SOURCES)
def test_claims_are_ended_while_other_handlers_hold_everything(
    kind: str, request: pytest.FixtureRequest, observer: Callable[[str], Observer]
) -> None:
    with SOURCES[kind](request) as (source, hold, url), ExitStack() as held:
        guard = Guard(source, policy=Policy(lease=4))

        def handler(message: str) -> str:
            if message == "pay_2":
                held.enter_context(hold())
            return "paid"

        ended = guard.run_batch("charge", ["pay_1", "pay_2"], key=str, handler=handler)

        assert are_recorded(ended)
        held.close()
        outcome = guard.run("charge", "pay_3", lambda: with_a_step(held, hold))
        assert outcome.recorded
        held.close()
        guard.close()
        assert observer(url).replays("paid")


def are_recorded(ended: list[Outcome[str] | Exception]) -> bool:
    return all(isinstance(one, Outcome) and one.recorded for one in ended)


def with_a_step(held: ExitStack, hold: Callable[[], Any]) -> str:
    """Take everything inside a step, so that its log, too, is written while nothing is left."""
    current().step("take", lambda: held.enter_context(hold()))
    return "paid"


# The async counterpart.


@asynccontextmanager
async def all_async(
    take: Callable[[], Awaitable[Any]], give_back: Callable[[Any], Awaitable[object]]
) -> AsyncIterator[None]:
    taken = [await take() for _ in range(SIZE)]
    try:
        yield
    finally:
        for one in taken:
            await give_back(one)


@asynccontextmanager
async def async_psycopg_pool(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    url = request.getfixturevalue("postgres_url")
    pool = psycopg_pool.AsyncConnectionPool(url, min_size=0, max_size=SIZE, timeout=NO_PATIENCE, open=False)
    async with pool:
        yield pool, lambda: all_async(pool.getconn, pool.putconn), url


@asynccontextmanager
async def asyncpg_pool(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    url = request.getfixturevalue("postgres_url")
    async with asyncpg.create_pool(url, min_size=0, max_size=SIZE) as pool:
        yield pool, lambda: all_async(pool.acquire, pool.release), url


@asynccontextmanager
async def async_engine(url: str, seen: str) -> AsyncIterator[Source]:
    engine = create_async_engine(url, pool_size=SIZE, max_overflow=0, pool_timeout=NO_PATIENCE)
    yield engine, lambda: all_async(lambda: engine.connect().start(), lambda one: one.close()), seen
    await engine.dispose()


@asynccontextmanager
async def async_postgres_engine(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    url = request.getfixturevalue("postgres_url")
    async with async_engine(url.replace("postgresql://", "postgresql+asyncpg://"), url) as opened:
        yield opened


@asynccontextmanager
async def async_mysql_engine(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    url = request.getfixturevalue("mysql_url")
    async with async_engine(url.replace("mysql://", "mysql+asyncmy://").partition("?")[0], url) as opened:
        yield opened


@asynccontextmanager
async def async_sqlite_engine(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    path = request.getfixturevalue("tmp_path") / "records.db"
    async with async_engine(f"sqlite+aiosqlite:///{path}", f"sqlite:////{path}") as opened:
        yield opened


@asynccontextmanager
async def async_redis_client(request: pytest.FixtureRequest, patience: float = NO_PATIENCE) -> AsyncIterator[Source]:
    url = request.getfixturevalue("redis_url")
    pool = redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=SIZE, timeout=patience)
    client = redis.asyncio.Redis(connection_pool=pool)
    yield client, lambda: all_async(pool.get_connection, pool.release), url
    await client.aclose()
    await pool.disconnect()


@asynccontextmanager
async def patient_async_redis_client(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    """A pool that is waited for longer than any lease."""
    async with async_redis_client(request, PATIENCE) as opened:
        yield opened


@asynccontextmanager
async def async_redis_cluster_client(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    url = request.getfixturevalue("redis_cluster_url")
    client: Any = redis.asyncio.RedisCluster.from_url(url.replace("redis+cluster://", "redis://"), max_connections=SIZE)
    await client.initialize()

    @asynccontextmanager
    async def hold() -> AsyncIterator[None]:
        taken = [(node, node.acquire_connection()) for node in client.get_primaries() for _ in range(SIZE)]
        try:
            yield
        finally:
            for node, connection in taken:
                node.release(connection)

    yield client, hold, url
    await client.aclose()


@asynccontextmanager
async def aiobotocore_client(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    url = request.getfixturevalue("dynamodb_url")
    config = AioConfig(max_pool_connections=SIZE, connect_timeout=1, read_timeout=1)
    async with get_session().create_client("dynamodb", config=config, **client_options(url)) as client:

        @asynccontextmanager
        async def hold() -> AsyncIterator[None]:
            # As requests do whose answers take long.
            (session,) = client._endpoint.http_session._sessions.values()
            connector, timeout = session.connector, session.timeout
            made = session._request_class(
                "GET", URL(client_options(url)["endpoint_url"]), loop=asyncio.get_running_loop()
            )
            taken = [await connector.connect(made, [], timeout) for _ in range(SIZE)]
            try:
                yield
            finally:
                for one in taken:
                    one.close()

        yield lambda: AsyncDynamoDBStore(table_of(url), client=client), hold, url


ASYNC: Final = {
    "psycopg_pool": async_psycopg_pool,
    "asyncpg": asyncpg_pool,
    "SQLAlchemy, asyncpg": async_postgres_engine,
    "SQLAlchemy, asyncmy": async_mysql_engine,
    "SQLAlchemy, aiosqlite": async_sqlite_engine,
    "redis": async_redis_client,
    "redis, cluster": async_redis_cluster_client,
    "aiobotocore": aiobotocore_client,
}


@pytest.mark.parametrize("kind", ASYNC)
def test_tasks_that_hold_everything_do_not_cost_a_claim(
    kind: str, request: pytest.FixtureRequest, observer: Callable[[str], Observer], lease: float
) -> None:
    async def story() -> None:
        async with ASYNC[kind](request) as (source, hold, url):
            other, effects = observer(url), []
            guard = AsyncGuard(source, policy=Policy(lease=lease))

            async def handler() -> str:
                async with hold():
                    assert await asyncio.to_thread(other.sees_three_leases)
                effects.append("paid")
                return "paid"

            outcome = await guard.run("charge", "pay_1", handler)
            await guard.store.aclose()
            await guard.aclose()

            assert (outcome.value, outcome.recorded, effects) == ("paid", True, ["paid"])
            assert await asyncio.to_thread(other.replays, "paid")

    in_time(story())


@pytest.mark.parametrize("kind", [*ASYNC, "redis, patient"])
def test_claims_are_ended_while_other_tasks_hold_everything(
    kind: str, request: pytest.FixtureRequest, observer: Callable[[str], Observer]
) -> None:
    async def story() -> None:
        async with (ASYNC | {"redis, patient": patient_async_redis_client})[kind](request) as (source, hold, url):
            # The shortest that the store allows: an ending waits for a part of it.
            guard = AsyncGuard(source, policy=Policy(lease=30 if kind == "aiobotocore" else 4))
            async with AsyncExitStack() as held:

                async def handler(message: str) -> str:
                    if message == "pay_2":
                        await held.enter_async_context(hold())
                    return "paid"

                ended = await guard.run_batch("charge", ["pay_1", "pay_2"], key=str, handler=handler)

                assert are_recorded(ended)
            async with AsyncExitStack() as held:

                async def take() -> None:
                    await held.enter_async_context(hold())

                async def steps() -> str:
                    await current().step("take", take)
                    return "paid"

                assert (await guard.run("charge", "pay_3", steps)).recorded
            await guard.store.aclose()
            await guard.aclose()
            assert await asyncio.to_thread(observer(url).replays, "paid")

    in_time(story())


def test_a_blocking_client_of_dynamodb_never_waits_for_a_connection(dynamodb_url: str) -> None:
    """So that it needs none for renewals: where all are in use, it opens one more."""
    options: Any = client_options(dynamodb_url)
    client: Any = boto3.client("dynamodb", config=Config(max_pool_connections=1), **options)

    assert client._endpoint.http_session._manager.connection_pool_kw.get("block", False) is False
    client.close()


# The connection itself.


# Where a pool's own hook says in which schema the tables are.
IN_SCHEMA: Final = "SET search_path TO elsewhere"


@pytest.fixture
def elsewhere_url(postgres_url: str) -> str:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE SCHEMA elsewhere")
    return f"{postgres_url}?options=-csearch_path%3Delsewhere"


def configured_pool(url: str, stack: ExitStack) -> Any:
    def configure(connection: psycopg.Connection[Any]) -> None:
        connection.execute(IN_SCHEMA)
        connection.commit()

    return stack.enter_context(psycopg_pool.ConnectionPool(url, min_size=0, max_size=2, configure=configure, open=True))


def listening_engine(url: str, stack: ExitStack) -> Any:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    stack.callback(engine.dispose)

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        connection.execute(IN_SCHEMA)
        connection.commit()

    return engine


@pytest.mark.parametrize("make", [configured_pool, listening_engine])
def test_it_is_made_like_those_of_the_pool(
    make: Callable[[str, ExitStack], Any],
    postgres_url: str,
    elsewhere_url: str,
    observer: Callable[[str], Observer],
    lease: float,
) -> None:
    with ExitStack() as stack:
        other = observer(elsewhere_url)
        guard = Guard(make(postgres_url, stack), policy=Policy(lease=lease))
        stack.callback(guard.close)

        assert guard.run("charge", "pay_1", other.sees_three_leases).value


def test_it_is_made_like_those_of_an_asyncpg_pool(
    postgres_url: str, elsewhere_url: str, observer: Callable[[str], Observer], lease: float
) -> None:
    async def setup(connection: Any) -> None:
        await connection.execute(IN_SCHEMA)

    async def story() -> Any:
        other = observer(elsewhere_url)
        async with asyncpg.create_pool(postgres_url, min_size=0, setup=setup) as pool:
            guard = AsyncGuard(pool, policy=Policy(lease=lease))
            outcome = await guard.run("charge", "pay_1", lambda: asyncio.to_thread(other.sees_three_leases))
            await guard.aclose()
        return outcome.value

    assert in_time(story())


def served(url: str) -> int:
    """How many connections the server has, but for the one that asks."""
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"
        ).fetchone()
    assert found is not None
    return int(found[0])


def test_it_is_one_connection_opened_with_the_first_claim_and_closed_with_the_guard(postgres_url: str) -> None:
    with psycopg_pool.NullConnectionPool(postgres_url, open=True) as pool:
        guard = Guard(pool)
        guard.read("charge", "pay_1")
        assert eventually(lambda: served(postgres_url) == 0)

        for key in ("pay_1", "pay_2", "pay_2"):
            guard.run("charge", key, lambda: None)
        assert eventually(lambda: served(postgres_url) == 1)

        guard.close()
        assert eventually(lambda: served(postgres_url) == 0)


def test_where_it_cannot_be_opened_nothing_runs_and_the_error_says_why(postgres_url: str) -> None:
    ran: list[str] = []
    with psycopg_pool.ConnectionPool(postgres_url, min_size=1, max_size=1, open=True) as pool:
        pool.wait()
        pool.conninfo = "postgresql://127.0.0.1:1/nothing"
        guard = Guard(pool)

        with pytest.raises(StoreUnavailable) as refusal:
            guard.run("charge", "pay_1", lambda: ran.append("ran"))

        assert guard.read("charge", "pay_1") is None
        guard.close()
    assert ran == []
    assert "the connection for renewing claims" in str(refusal.value)
    assert "a store opens a connection of its own" in "".join(refusal.value.__notes__)


def test_it_is_opened_anew_after_the_server_has_closed_it(
    postgres_url: str, observer: Callable[[str], Observer], lease: float
) -> None:
    other = observer(postgres_url)
    guard = Guard(postgres_url, policy=Policy(lease=lease))

    def handler() -> str:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        assert other.sees_three_leases()
        return "paid"

    assert guard.run("charge", "pay_1", handler).recorded
    guard.close()


def test_a_new_event_loop_has_one_of_its_own(
    postgres_url: str, observer: Callable[[str], Observer], lease: float
) -> None:
    other = observer(postgres_url)
    guard = AsyncGuard(postgres_url.replace("postgresql://", "postgresql+asyncpg://"), policy=Policy(lease=lease))

    async def handler() -> str:
        assert await asyncio.to_thread(other.sees_three_leases)
        return "paid"

    async def earlier() -> None:
        await guard.run("charge", "earlier", earlier_handler)

    async def earlier_handler() -> None:
        """Nothing: it has been in another loop."""

    in_time(earlier())
    assert in_time(guard.run("charge", "pay_1", handler)).recorded
    in_time(guard.aclose())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_opens_one_of_its_own(
    postgres_url: str, observer: Callable[[str], Observer], lease: float
) -> None:
    other = observer(postgres_url)
    guard = Guard(postgres_url, policy=Policy(lease=lease))
    guard.run("charge", "earlier", lambda: None)

    pid = os.fork()
    if pid == 0:
        # In the child: the parent's connections stay the parent's, and its observer too.
        code = 1
        try:
            code = 0 if guard.run("charge", "child", lambda: guard.store._renewals.is_held).value else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def handler() -> str:
        assert other.sees_three_leases()
        return "paid"

    assert guard.run("charge", "pay_1", handler).recorded
    guard.close()
