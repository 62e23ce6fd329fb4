"""What can go wrong around an engine: lost replies, forks, new event loops, full pools, wrong passwords and words."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Engine, String, create_engine, event, exc, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, declarative_base, scoped_session, sessionmaker
from sqlalchemy.pool import StaticPool

from onefold import AsyncGuard, Guard, StoreUnavailable, UsageError
from onefold.stores.sqlalchemy import SqlAlchemyStore
from onefold.stores.sqlalchemy.connection import _watched
from services.proxy import Proxy
from tests.stores.sqlalchemy.wallet import TILLS, AnyTill, Ledger, add, ledger_of, till
from tests.support import PATIENCE, Handler, eventually
from tests.wallet import never_opened

SERVERS = [way for way in TILLS if way[0] != "sqlite"]
ENGINES = [way for way in SERVERS if way[2] == "engine"]

# How the message begins; a psycopg that was in autocommit mode says BEGIN ISOLATION LEVEL READ COMMITTED.
COMMIT = (b"COMMIT\0", b"COMMIT;", b"\x03COMMIT")


@pytest.fixture(params=ENGINES, ids=" ".join)
def way(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    found: tuple[str, str, str] = request.param
    return found


@pytest.fixture
def ledger(request: pytest.FixtureRequest, way: tuple[str, str, str]) -> Iterator[Ledger]:
    ledger = ledger_of(request, way[0])
    yield ledger
    ledger.close()


@pytest.fixture
def proxy(ledger: Ledger) -> Iterator[Proxy]:
    with Proxy(ledger.address) as proxy:
        yield proxy


@pytest.fixture
def at(ledger: Ledger, way: tuple[str, str, str], proxy: Proxy) -> Iterator[AnyTill]:
    """On the other side of the proxy."""
    ledger.address = proxy.url()
    found = till(ledger, *way[1:])
    yield found
    found.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_whose_reply_is_lost_is_resolved_by_delivering_again(
    at: AnyTill, ledger: Ledger, proxy: Proxy, when: str
) -> None:
    at.transactional("earlier", Handler(None))
    starts: list[int] = []

    def work(tx: Any) -> str:
        starts.append(1)
        add(tx)
        return "done"

    cut = proxy.cut_before if when == "before" else proxy.cut_after
    fault = cut(lambda message: any(word in message for word in COMMIT))
    outcome = at.transactional("m1", work)

    assert fault.reached.is_set()
    assert (outcome.value, outcome.replayed) == ("done", False)
    assert len(starts) == (2 if when == "before" else 1)
    assert (ledger.balance, ledger.records) == (10, ["earlier", "m1"])


@pytest.mark.parametrize("message", range(1, 5))
def test_an_operation_whose_reply_is_lost_is_sent_again(at: AnyTill, proxy: Proxy, message: int) -> None:
    at.run("earlier", Handler())
    handler = Handler("paid")

    proxy.lose_reply(message)
    outcomes = [at.run("c1", handler), at.run("c1", handler)]

    assert [(one.value, one.replayed) for one in outcomes] == [("paid", False), ("paid", True)]
    assert handler.starts == 1


# SQLAlchemy commits and resets a MySQL connection by messages of their own.
TRIPS = {
    "postgres": {"new": 2, "duplicate": 1, "transaction": 5},
    "mariadb": {"new": 6, "duplicate": 3, "transaction": 6},
}


def test_what_a_delivery_costs_in_round_trips(at: AnyTill, ledger: Ledger, proxy: Proxy) -> None:
    # Some drivers prepare a statement that comes often.
    for number in range(8):
        at.run(f"earlier {number}", Handler())
        at.run(f"earlier {number}", Handler())
        at.transactional(f"earlier {number}", add)
    counted: dict[str, int] = {}

    deliveries: dict[str, Callable[[], Any]] = {
        "new": lambda: at.run("c1", Handler()),
        "duplicate": lambda: at.run("c1", Handler()),
        # BEGIN (but for MySQL, which needs none), the record, the work, the proof that it is still the same transaction
        # (a look, or a savepoint and its release), COMMIT, and a reset (in MySQL).
        "transaction": lambda: at.transactional("m1", add),
    }
    for what, deliver in deliveries.items():
        with proxy.counting() as count:
            deliver()
        counted[what] = count.trips

    assert counted == TRIPS[ledger.database]


@pytest.mark.parametrize("way", [way for way in ENGINES if way[1].endswith("psycopg")], ids=" ".join, indirect=True)
def test_behind_a_pooler_in_transaction_mode_everything_works(
    ledger: Ledger, way: tuple[str, str, str], request: pytest.FixtureRequest
) -> None:
    ledger.address = request.getfixturevalue("pgbouncer_url")
    at = till(ledger, *way[1:], connect_args={"prepare_threshold": None})

    for number in range(8):
        assert [at.run(str(number), Handler()).replayed for _ in range(2)] == [False, True]
        assert [at.transactional(str(number), add).replayed for _ in range(2)] == [False, True]
    at.close()

    assert ledger.balance == 80


def test_a_server_that_is_gone_refuses_in_one_line_without_the_password(
    at: AnyTill, ledger: Ledger, proxy: Proxy
) -> None:
    at.run("earlier", Handler())
    handler = Handler()
    password = ledger.address.partition("@")[0].rpartition(":")[2]
    proxy.close()

    with pytest.raises(StoreUnavailable) as refused:
        at.run("c1", handler)
    with pytest.raises(StoreUnavailable) as refused_too:
        at.transactional("m1", handler)

    assert handler.starts == 0
    for one in (refused, refused_too):
        assert password not in str(one.value)
        assert "\n" not in str(one.value)


def test_a_wrong_password_is_told_and_not_shown(ledger: Ledger, way: tuple[str, str, str]) -> None:
    password = ledger.address.partition("@")[0].rpartition(":")[2]
    ledger.address = ledger.address.replace(password, "swordfish")
    at = till(ledger, *way[1:])

    with pytest.raises(StoreUnavailable, match="password") as refused:
        at.run("c1", Handler())
    at.close()

    assert "swordfish" not in str(refused.value)


def test_no_error_shows_a_key(ledger: Ledger, way: tuple[str, str, str]) -> None:
    at = till(ledger, *way[1:])
    at.run("earlier", Handler())
    ledger.execute("ALTER TABLE onefold_records DROP COLUMN bypasses")

    with pytest.raises(StoreUnavailable) as refused:
        at.run("very-secret", Handler())
    at.close()

    told = f"{refused.value} {refused.value.__cause__} {refused.value.__cause__ and refused.value.__cause__.__cause__}"
    assert "very-secret" not in told
    assert b"very-secret".hex() not in told


def test_a_pool_without_a_free_connection_is_told(ledger: Ledger, way: tuple[str, str, str]) -> None:
    at = till(ledger, *way[1:], pool_size=1, max_overflow=0, pool_timeout=0.05)
    at.run("earlier", Handler())
    handler = Handler()

    def inside(_tx: Any) -> None:
        with pytest.raises(StoreUnavailable, match="all connections of the engine's pool are in use"):
            _run_elsewhere(at, handler)

    at.transactional("m1", inside)
    at.close()

    assert handler.starts == 0


def _run_elsewhere(at: AnyTill, handler: Callable[[], Any]) -> None:
    """A delivery in another thread, because an event loop is busy with the one around it."""
    from concurrent.futures import ThreadPoolExecutor

    def deliver() -> None:
        if isinstance(at.guard, Guard):
            at.guard.run("charge", "c1", handler)
        else:
            asyncio.run(at.guard.run("charge", "c1", _as_async(handler)))

    with ThreadPoolExecutor(1) as other:
        other.submit(deliver).result(PATIENCE)


def _as_async(handler: Callable[[], Any]) -> Any:
    async def in_loop() -> Any:
        return handler()

    return in_loop


# Processes and event loops.


def _deliver_in_a_child(guard: Guard, answers: Any) -> None:
    answers.put(guard.run("charge", "child", Handler("child")).value)
    answers.put(guard.run("charge", "parent", Handler("child")).value)


@pytest.mark.parametrize("way", [way for way in ENGINES if not way[1].startswith("async")], ids=" ".join, indirect=True)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_leaves_the_connections_of_its_parent_alone(ledger: Ledger, way: tuple[str, str, str]) -> None:
    at = till(ledger, *way[1:])
    assert isinstance(at.guard, Guard)
    at.run("parent", Handler("parent"))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    child = context.Process(target=_deliver_in_a_child, args=(at.guard, answers))
    child.start()
    during = [at.run(f"c{number}", Handler(number)).value for number in range(50)]
    child.join(PATIENCE)
    # One that hangs would keep the session from its end.
    child.kill()
    child.join()

    assert child.exitcode == 0
    assert [answers.get(), answers.get()] == ["child", "parent"]
    assert during == list(range(50))
    assert at.run("child", Handler("again")).value == "child"
    at.close()


CONNECTIONS = {
    "postgres": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND backend_type = 'client backend'",
    "mariadb": "SELECT count(*) FROM information_schema.processlist WHERE db = database()",
}


@pytest.mark.parametrize("way", [way for way in TILLS if way[1].startswith("async")], ids=" ".join, indirect=True)
def test_an_async_guard_survives_new_event_loops(ledger: Ledger, way: tuple[str, str, str]) -> None:
    engine = ledger.async_engine(way[1].removeprefix("async "))
    guard = AsyncGuard(engine if way[2] == "engine" else async_sessionmaker(engine))

    @guard.transactional("credit", key="key")
    async def credit(key: str, *, tx: Any) -> str:
        await tx.run_sync(add)
        return key

    async def deliver(number: int) -> list[Any]:
        paid = await guard.run("charge", str(number), _as_async(Handler(number)))
        return [paid.value, await credit(str(number))]  # type: ignore[call-arg]

    answers = [asyncio.run(deliver(number)) for number in range(3)]
    opened = CONNECTIONS.get(ledger.database)

    assert answers == [[0, "0"], [1, "1"], [2, "2"]]
    assert ledger.balance == 30
    # Each loop has closed its own at its end, and the server takes its time. One is that of the question.
    assert opened is None or eventually(lambda: ledger.rows(opened)[0][0] == 1)
    if ledger.database == "sqlite":
        asyncio.run(engine.dispose())


@pytest.mark.filterwarnings("ignore:unclosed", "ignore:.*while still open", "error:.*non-checked-in connection")
@pytest.mark.parametrize(
    "way",
    [way for way in TILLS if way[1].startswith("async") and way[0] != "sqlite" and way[2] == "engine"],
    ids=" ".join,
    indirect=True,
)
def test_loops_that_are_closed_abruptly_leave_no_connections_behind(ledger: Ledger, way: tuple[str, str, str]) -> None:
    guard = AsyncGuard(ledger.async_engine(way[1].removeprefix("async ")))

    async def deliver(number: int) -> Any:
        return (await guard.run("charge", str(number), _as_async(Handler(number)))).value

    for number in range(3):
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(deliver(number)) == number
        loop.close()
    assert asyncio.run(deliver(3)) == 3
    gc.collect()

    assert eventually(lambda: ledger.rows(CONNECTIONS[ledger.database])[0][0] == 1)


def test_nothing_is_kept_of_a_transaction_that_has_ended(ledger: Ledger, way: tuple[str, str, str]) -> None:
    at = till(ledger, *way[1:])
    for number in range(3):
        at.transactional(str(number), add)
    at.close()
    gc.collect()

    assert [inside for inside in _watched if inside.connection.engine is at.sync_engine] == []


# Words.


def test_what_is_no_engine_is_refused(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}")
    async_engine = create_async_engine(f"sqlite+aiosqlite:///{path}")

    wrong: Any

    with engine.connect() as connection, Session(engine) as session:
        for wrong in (connection, session, scoped_session(sessionmaker(engine)), async_engine):
            with pytest.raises(UsageError, match="a Guard takes an Engine or a sessionmaker"):
                Guard(wrong).run("charge", "c1", Handler())
        for wrong in (sessionmaker(), sessionmaker(binds={})):
            with pytest.raises(UsageError, match="has no engine of its own"):
                Guard(wrong).run("charge", "c1", Handler())
        with pytest.raises(UsageError, match="bound to one connection"):
            Guard(sessionmaker(connection)).run("charge", "c1", Handler())
    with pytest.raises(UsageError, match="an AsyncGuard takes an AsyncEngine or an async_sessionmaker"):
        asyncio.run(AsyncGuard(engine).run("charge", "c1", _as_async(Handler())))
    engine.dispose()


def test_a_session_of_several_engines_is_refused(path: Path) -> None:
    engine, other = (create_engine(f"sqlite:///{path}") for _ in range(2))
    base: Any = declarative_base()
    mapped = type("Wallet", (base,), {"__tablename__": "wallet", "account": Column(String, primary_key=True)})
    both, one = sessionmaker(engine, binds={mapped: other}), sessionmaker(engine, binds={mapped: engine})
    handler = Handler()

    with pytest.raises(UsageError, match="several engines"):
        Guard(both).run("charge", "c1", handler)
    with both.begin() as session, pytest.raises(UsageError, match="several engines"):
        Guard("memory:").within(session).run("charge", "c1", handler)
    assert handler.starts == 0

    with one.begin() as session:
        assert not Guard("memory:").within(session).run("charge", "c1", handler).replayed
    with both.begin() as session:
        meant = session.connection(bind_arguments={"mapper": mapped})
        assert Guard("memory:").within(meant).run("charge", "c1", handler).replayed
    for made in (engine, other):
        made.dispose()


def test_within_takes_the_connections_and_sessions_of_its_own_kind(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}")
    async_engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    wrong: Any

    with engine.connect() as connection:
        for wrong in (engine, sessionmaker(engine), async_engine.connect(), AsyncSession(async_engine)):
            with pytest.raises(UsageError, match="a Guard joins a Connection or a Session"):
                Guard(never_opened).within(wrong).run("credit", "m1", Handler())
        with pytest.raises(UsageError, match="an AsyncGuard joins an AsyncConnection or an AsyncSession"):
            asyncio.run(AsyncGuard(never_opened).within(connection).run("credit", "m1", _as_async(Handler())))
        with pytest.raises(UsageError, match="it is not connected yet"):
            asyncio.run(
                AsyncGuard(never_opened).within(async_engine.connect()).run("credit", "m1", _as_async(Handler()))
            )
        with pytest.raises(UsageError, match="not clear which of its engines is meant"):
            Guard(never_opened).within(Session()).run("credit", "m1", Handler())
    engine.dispose()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file::memory:?cache=shared&uri=true"])
def test_a_database_in_memory_is_refused_as_a_store(url: str) -> None:
    with pytest.raises(UsageError, match="For records in memory use memory:"):
        Guard(create_engine(url)).run("charge", "c1", Handler())


def test_a_database_in_memory_can_be_joined() -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    guard = Guard(never_opened)

    with engine.begin() as connection:
        outcomes = [guard.within(connection).run("credit", "m1", Handler("paid")) for _ in range(2)]

    assert [one.replayed for one in outcomes] == [False, True]
    engine.dispose()


def test_a_database_that_is_not_known_here_is_refused() -> None:
    class Oracle:
        name, driver = "oracle", "oracledb"

    from onefold.stores.sqlalchemy.drivers import driver_of

    with pytest.raises(UsageError, match=r"oracle\+oracledb is not known here.*postgresql\+asyncpg"):
        driver_of(Oracle())  # type: ignore[arg-type]


def test_an_engine_that_begins_its_transactions_by_hand_will_do(path: Path) -> None:
    """As SQLAlchemy's documentation has it for SQLite."""
    engine = create_engine(f"sqlite:///{path}")

    @event.listens_for(engine, "connect")
    def _by_hand(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    guard = Guard(engine)

    @guard.transactional("credit", key="key")
    def credit(key: str, *, tx: Any) -> str:
        add(tx)
        return key

    with engine.begin() as connection:
        guard.within(connection).run("credit", "m1", lambda: add(connection))
    values = [credit("m2"), credit("m2")]  # type: ignore[call-arg]
    with engine.connect() as connection:
        balance = connection.execute(text("SELECT balance FROM wallet")).scalar()
    engine.dispose()

    assert (values, balance) == (["m2", "m2"], 20)


def test_scoped_sessions_are_joined_by_the_session_that_is_current(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}")
    scoped = scoped_session(sessionmaker(engine))
    guard = Guard(never_opened)

    outcomes = [guard.within(scoped).run("credit", "m1", lambda: add(scoped())) for _ in range(2)]
    scoped.commit()
    scoped.remove()
    engine.dispose()

    assert [one.replayed for one in outcomes] == [False, True]


def test_async_scoped_sessions_are_joined_by_the_session_that_is_current(path: Path) -> None:
    async def deliver() -> list[bool]:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
        guard = AsyncGuard(never_opened)
        outcomes = [await guard.within(scoped).run("credit", "m1", lambda: scoped().run_sync(add)) for _ in range(2)]
        await scoped.commit()
        await scoped.remove()
        await engine.dispose()
        return [one.replayed for one in outcomes]

    assert asyncio.run(deliver()) == [False, True]


def test_the_engine_may_be_made_late(path: Path) -> None:
    def made() -> Engine:
        return engine

    guard = Guard(made)
    engine = create_engine(f"sqlite:///{path}")

    assert guard.run("charge", "c1", Handler("paid")).value == "paid"
    assert isinstance(guard.store, SqlAlchemyStore)
    guard.close()
    engine.dispose()


def test_an_error_of_the_driver_that_nobody_caused_is_the_callers_own(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}")
    guard = Guard(never_opened)

    with engine.begin() as connection, pytest.raises(exc.OperationalError, match="no such table: nowhere"):
        guard.within(connection).run("credit", "m1", lambda: connection.execute(text("SELECT 1 FROM nowhere")))
    engine.dispose()
