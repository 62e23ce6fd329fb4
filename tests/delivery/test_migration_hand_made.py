"""`Guard(new, migrate_from=HandMadeTable(...))`: rows count as done in every mode, and are copied when needed."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

from onefold import (
    AsyncGuard,
    Guard,
    HandMadeTable,
    InProgress,
    Policy,
    Record,
    RecordColumn,
    State,
    StoreUnavailable,
    UsageError,
    keys,
)
from onefold._concurrency.generators import Flow
from onefold._delivery import migration
from onefold._delivery.steps import Claiming
from onefold._model import Entry, Released
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from onefold.testing.simulate import Scenario, search
from tests.support import Clock, ProxyStore

CREATE = "CREATE TABLE processed (id VARCHAR(64) PRIMARY KEY, answer VARCHAR(64))"


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A database with a hand-made table, in which "old" is done."""
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as connection:
        connection.execute(CREATE)
        connection.execute("INSERT INTO processed VALUES ('old', 'receipt 17')")
        yield connection


@pytest.fixture
def table(shop: sqlite3.Connection, tmp_path: Path) -> HandMadeTable:
    return HandMadeTable(
        f"sqlite:///{tmp_path}/shop.db", "processed", key="id", operation="credit", result_column="answer"
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def new(clock: Clock) -> ProxyStore:
    return ProxyStore(MemoryStore(clock=clock))


@pytest.fixture
def guard(new: ProxyStore, table: HandMadeTable) -> Iterator[Guard]:
    with Guard(new, migrate_from=table) as guard:
        yield guard


def credit() -> str:
    return "credited"


def must_not_run() -> str:
    raise AssertionError("it ran")


OLD = keys.address("credit", "old")


def test_a_row_is_replayed_and_copied(guard: Guard, new: ProxyStore) -> None:
    outcome = guard.run("credit", "old", must_not_run)

    assert (outcome.value, outcome.replayed, outcome.remark) == ("receipt 17", True, "imported from processed")
    assert Guard(new).run("credit", "old", must_not_run).value == "receipt 17"


def test_a_copy_is_not_looked_up_again(guard: Guard, shop: sqlite3.Connection) -> None:
    guard.run("credit", "old", must_not_run)
    shop.execute("DROP TABLE processed")

    assert guard.run("credit", "old", must_not_run).replayed


def test_what_is_new_runs_once(guard: Guard) -> None:
    assert guard.run("credit", "new", credit).value == "credited"
    assert guard.run("credit", "new", must_not_run).replayed


def test_a_row_that_an_old_worker_writes_counts_at_once(guard: Guard, shop: sqlite3.Connection) -> None:
    shop.execute("INSERT INTO processed VALUES ('later', 'by an old worker')")

    assert guard.run("credit", "later", must_not_run).value == "by an old worker"


def test_seen_mode_does_not_run_it(new: ProxyStore, table: HandMadeTable) -> None:
    with Guard(new, migrate_from=table, policy=Policy(mode="seen")) as guard:
        assert guard.run("credit", "old", must_not_run).replayed
        assert guard.run("credit", "new", credit).value == "credited"


def test_a_batch_leaves_out_what_the_table_knows(guard: Guard) -> None:
    ran: list[str] = []

    outcomes: Any = guard.run_batch("credit", ["a", "old", "b"], key=str, handler=ran.append)

    assert [outcome.replayed for outcome in outcomes] == [False, True, False]
    assert ran == ["a", "b"]


def test_an_async_guard_does_the_same(table: HandMadeTable) -> None:
    async def main() -> None:
        async def must_not() -> str:
            return must_not_run()

        async def pay() -> str:
            return credit()

        async with AsyncGuard(AsyncMemoryStore(), migrate_from=table) as guard:
            assert (await guard.run("credit", "old", must_not)).value == "receipt 17"
            assert (await guard.run("credit", "new", pay)).value == "credited"
            with pytest.raises(UsageError, match="would count again"):
                await guard.forget("credit", "old")

    asyncio.run(main())


# What is known here, and what is in the table.


@pytest.mark.parametrize("after_crash", ["rerun", "hold", "skip"])
def test_a_claim_that_died_does_not_hide_a_row(guard: Guard, new: ProxyStore, clock: Clock, after_crash: Any) -> None:
    new.inner.claim(Entry(address=OLD, token=b"t" * 16, lease=30.0))
    with pytest.raises(InProgress):
        guard.run("credit", "old", must_not_run)

    clock.advance(31)

    policy = Policy(after_crash=after_crash)
    assert guard.run("credit", "old", must_not_run, policy=policy).value == "receipt 17"


def test_an_open_record_does_not_hide_a_row(guard: Guard, new: ProxyStore) -> None:
    left = Entry(address=OLD, token=b"t" * 16, lease=30.0)
    new.inner.claim(left)
    new.inner.release(left.as_claim(), Released(attempt=2, ttl=1000.0))

    assert guard.run("credit", "old", must_not_run).value == "receipt 17"


def test_a_handler_that_wrote_its_row_and_died_is_done(
    guard: Guard, new: ProxyStore, shop: sqlite3.Connection, clock: Clock
) -> None:
    def write_and_die() -> str:
        shop.execute("INSERT INTO processed VALUES ('new', 'written')")
        new.die()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard.run("credit", "new", write_and_die)
    new.down.clear()
    clock.advance(31)

    assert guard.run("credit", "new", must_not_run).value == "written"


def test_a_bypass_runs_although_the_row_is_there(guard: Guard) -> None:
    assert guard.run("credit", "old", credit, bypass=True).value == "credited"
    assert guard.run("credit", "old", must_not_run).value == "credited"


def test_a_bypass_that_died_leaves_what_was_done_here(
    guard: Guard, new: ProxyStore, shop: sqlite3.Connection, clock: Clock
) -> None:
    guard.run("credit", "new", credit)
    shop.execute("INSERT INTO processed VALUES ('new', 'the row')")

    def die() -> str:
        new.die()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard.run("credit", "new", die, bypass=True)
    new.down.clear()
    clock.advance(31)

    assert guard.run("credit", "new", must_not_run).value == "credited"


def test_what_would_count_again_is_not_forgotten(guard: Guard, shop: sqlite3.Connection) -> None:
    guard.run("credit", "old", must_not_run)

    with pytest.raises(UsageError, match="Nothing was forgotten"):
        guard.forget("credit", "old")
    assert guard.run("credit", "old", must_not_run).replayed
    shop.execute("DELETE FROM processed")

    assert guard.forget("credit", "old")
    assert not guard.run("credit", "old", credit).replayed


def test_read_shows_the_row(guard: Guard) -> None:
    record = guard.read("credit", "old")

    assert record is not None
    assert record.state is State.DONE


# Transactions.


def test_a_transactional_handler_does_not_run_for_a_row(tmp_path: Path, table: HandMadeTable) -> None:
    with Guard(f"sqlite:///{tmp_path}/shop.db", migrate_from=table) as guard:

        @guard.transactional("credit", key="id")
        def pay(id: str, *, tx: Any) -> str:  # noqa: A002
            return must_not_run() if id == "old" else credit()

        assert pay("old") == "receipt 17"  # type: ignore[call-arg]
        assert pay("new") == "credited"  # type: ignore[call-arg]


def test_within_writes_the_copy_in_the_callers_transaction(tmp_path: Path, table: HandMadeTable) -> None:
    """On SQLite, too, where the caller is the only writer."""
    store = f"sqlite:///{tmp_path}/shop.db?busy_timeout=100ms"
    with Guard(store, migrate_from=table) as guard, closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert guard.store is not None
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            assert guard.within(connection).run("credit", "old", must_not_run).value == "receipt 17"
            assert guard.within(connection).run("credit", "old", must_not_run).value == "receipt 17"
            assert guard.within(connection).run("credit", "new", credit).value == "credited"
            connection.rollback()
        assert Guard(store).read("credit", "old") is None
        with connection:
            sent: list[str] = []
            connection.set_trace_callback(sent.append)
            connection.execute("BEGIN IMMEDIATE")
            assert guard.within(connection).run("credit", "old", must_not_run).value == "receipt 17"
            connection.commit()
        assert Guard(store).read("credit", "old") is not None
        # No savepoint is left in the caller's transaction.
        begun = [statement.split()[0] for statement in sent if "SAVEPOINT" in statement]
        assert begun.count("SAVEPOINT") == begun.count("RELEASE") == 1


def send(connection: Any, statement: str) -> None:
    with closing(connection.cursor()) as cursor:
        cursor.execute(statement)


def begin(connection: Any) -> None:
    """Begin a transaction of the caller's; the servers' drivers do it by themselves."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("BEGIN IMMEDIATE")


@pytest.fixture(params=["postgres", "mysql", "sqlite"])
def joined(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Guard, Any]]:
    """A guard whose store and table are in one database, and a connection in a transaction of its caller's."""
    connection: Any
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db?busy_timeout=100ms"
        connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    else:
        url = request.getfixturevalue(f"{request.param}_url")
        connection = psycopg.connect(url) if request.param == "postgres" else pymysql_connection(url)
    send(connection, CREATE)
    send(connection, "INSERT INTO processed VALUES ('old', 'receipt 17')")
    connection.commit()
    table = HandMadeTable(url, "processed", key="id", operation="credit", result_column="answer")
    with closing(connection), Guard(url, migrate_from=table) as guard:
        assert guard.read("credit", "warm") is None
        begin(connection)
        yield guard, connection


def pymysql_connection(url: str) -> Any:
    parts = urlsplit(url)
    login: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
    connection = pymysql.connect(**login, password=parts.password or "", database=parts.path[1:])
    connection.begin()
    return connection


def test_fresh_leaves_out_what_the_table_knows(joined: tuple[Guard, Any]) -> None:
    guard, connection = joined
    within = guard.within(connection)

    fresh = within.fresh("credit", ["a", "old", "b", "a"], key=str)
    assert (fresh.new, fresh.seen, fresh.unsettled) == (["a", "b"], ["old", "a"], [])
    again = within.fresh("credit", ["a", "old", "c"], key=str)

    assert (again.new, again.seen) == (["c"], ["a", "old"])
    assert within.run("credit", "old", must_not_run).value == "receipt 17"


def test_a_bypass_within_a_transaction_runs(joined: tuple[Guard, Any]) -> None:
    guard, connection = joined

    assert guard.within(connection).run("credit", "old", credit, bypass=True).value == "credited"
    assert guard.within(connection).run("credit", "old", must_not_run).value == "credited"


def test_within_a_transaction_an_open_record_does_not_hide_a_row(joined: tuple[Guard, Any]) -> None:
    guard, connection = joined
    connection.commit()
    for key in ("old", "older"):
        send(connection, f"INSERT INTO processed VALUES ('{key}x', 'done')")
        left = Entry(address=keys.address("credit", f"{key}x"), token=b"t" * 16, lease=30.0)
        guard.store.claim(left)
        guard.store.release(left.as_claim(), Released(attempt=2, ttl=1000.0))
    connection.commit()
    begin(connection)

    assert guard.within(connection).run("credit", "oldx", must_not_run).value == "done"
    fresh = guard.within(connection).fresh("credit", ["olderx"], key=str)
    assert (fresh.new, fresh.seen) == ([], ["olderx"])


def test_a_handler_within_a_transaction_can_write_the_row_itself(joined: tuple[Guard, Any]) -> None:
    """The new worker goes on writing the row, so that old workers see it; it does not count as its own duplicate."""
    guard, connection = joined

    def write() -> str:
        send(connection, "INSERT INTO processed VALUES ('new', 'by the new worker')")
        return "credited"

    assert guard.within(connection).run("credit", "new", write).value == "credited"
    connection.commit()
    assert guard.run("credit", "new", must_not_run).value == "credited"


ASYNC_URLS = {"postgresql": "postgres_url", "postgresql+asyncpg": "postgres_url", "mysql": "mysql_url"}


@pytest.mark.parametrize("scheme", ASYNC_URLS)
def test_async_transactions_and_batches_leave_out_what_the_table_knows(
    scheme: str, request: pytest.FixtureRequest
) -> None:
    plain = request.getfixturevalue(ASYNC_URLS[scheme])
    with closing(psycopg.connect(plain) if "postgres" in scheme else pymysql_connection(plain)) as connection:
        send(connection, CREATE)
        send(connection, "INSERT INTO processed VALUES ('old', 'a'), ('older', 'b'), ('oldest', 'c'), ('seen', 'd')")
        connection.commit()
    url = f"{scheme}:{plain.partition(':')[2]}"
    table = HandMadeTable(url, "processed", key="id", operation="credit", result_column="answer")

    async def main() -> None:
        async with AsyncGuard(url, migrate_from=table) as guard:

            @guard.transactional("credit", key="id")
            async def pay(id: str, *, tx: Any) -> str:  # noqa: A002
                fresh = await guard.within(tx).fresh("credit", ["older", "newer", "newer"], key=str)
                assert (fresh.new, fresh.seen) == (["newer"], ["older", "newer"])

                async def must_not() -> str:
                    return must_not_run()

                assert (await guard.within(tx).run("credit", "oldest", must_not)).value == "c"
                return must_not_run() if id == "old" else credit()

            async def handle(message: str) -> str:
                return must_not_run() if message == "seen" else credit()

            assert await pay("old") == "a"  # type: ignore[call-arg]
            assert await pay("new") == "credited"  # type: ignore[call-arg]
            outcomes: Any = await guard.run_batch("credit", ["seen", "next"], key=str, handler=handle)
            assert [outcome.value for outcome in outcomes] == ["d", "credited"]

    asyncio.run(main())


# The database of the table does not answer.


@pytest.mark.parametrize("after_crash", ["rerun", "hold"])
def test_without_the_table_nothing_runs_and_nothing_is_left(
    new: ProxyStore, tmp_path: Path, clock: Clock, after_crash: Any
) -> None:
    away = HandMadeTable(f"sqlite:///{tmp_path}/away.db", "processed", key="id", operation="credit")
    with Guard(new, migrate_from=away, policy=Policy(after_crash=after_crash)) as guard:
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="there is no file"):
                guard.run("credit", "new", must_not_run)
            clock.advance(31)
        assert new.inner.read(keys.address("credit", "new")) is None
        assert not (tmp_path / "away.db").exists()

        with closing(sqlite3.connect(tmp_path / "away.db")) as connection:
            connection.execute(CREATE)
        assert guard.run("credit", "new", credit).attempt == 1


def test_after_a_wrong_name_nothing_is_left(new: ProxyStore, shop: sqlite3.Connection, tmp_path: Path) -> None:
    wrong = HandMadeTable(f"sqlite:///{tmp_path}/shop.db", "processd", key="id", operation="credit")
    with Guard(new, migrate_from=wrong) as guard, pytest.raises(UsageError, match="did you mean 'processed'"):
        guard.run("credit", "new", must_not_run)

    assert new.inner.read(keys.address("credit", "new")) is None


# What is refused.

URL = "sqlite:///shop.db"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: HandMadeTable(URL, "t", key="id"), "name the operation of all rows with operation="),
        (lambda: HandMadeTable(URL, "t", key="id", operation="a", operation_column="b"), "and not both"),
        (lambda: HandMadeTable(URL, "", key="id", operation="a"), "HandMadeTable(table='') has to be the name"),
        (lambda: HandMadeTable(URL, "t", key="", operation="a"), "HandMadeTable(key='') has to be the name"),
        (lambda: HandMadeTable(URL, "t", key="id", at=" ", operation="a"), "HandMadeTable(at=' ')"),
        (lambda: HandMadeTable(URL, "t", key="id", operation=" "), "operation=' ' has to be a name"),
        (lambda: HandMadeTable(URL, "t", key="id", operation="a", keep="soon"), "keep='soon' is not a duration"),
        (lambda: HandMadeTable(URL, "t", key="id", operation="a", keep=0), "with keep=0 no row would count"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        make()
    assert says in str(raised.value)


@pytest.mark.parametrize("kind", [Guard, AsyncGuard])
@pytest.mark.parametrize(
    ("database", "says"),
    [
        (
            "redis://:secret@localhost",
            "redis: has no tables to read. Name a database with mysql:, postgresql: or sqlite:",
        ),
        ("memory:", "memory: has no tables to read"),
        ("postgersql://localhost/shop", "did you mean"),
        (3, "is not a store"),
    ],
)
def test_a_database_without_tables_is_refused_when_the_guard_is_made(kind: Any, database: Any, says: str) -> None:
    table = HandMadeTable(database, "processed", key="id", operation="credit")

    with pytest.raises(UsageError) as raised:
        kind("memory:", migrate_from=table)
    assert says in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_record_in_a_callers_own_column_is_refused_with_it(table: HandMadeTable) -> None:
    with Guard("memory:", migrate_from=table) as guard, pytest.raises(UsageError, match="there is no migrate_from="):
        guard.within(None, record=RecordColumn("t", "c"))


def test_no_password_is_shown() -> None:
    table = HandMadeTable("postgresql://app:secret@db/shop", "processed", key="id", operation="credit")

    assert repr(table) == "HandMadeTable('postgresql://app:***@db/shop', 'processed')"


# What the simulator finds.


def story(**scenario: Any) -> str:
    found = search(Scenario(beats=0, faults=1, migrating="row", **scenario)).story
    assert found is not None, "nothing was found"
    return found.violation


@pytest.mark.parametrize("after_crash", ["rerun", "hold", "skip", "probe"])
def test_whatever_fails_a_row_is_not_run_again(after_crash: Any) -> None:
    assert search(Scenario(beats=0, faults=1, migrating="row", after_crash=after_crash)).story is None


def test_the_simulator_finds_an_abandoned_claim_that_hides_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "_stands_here", lambda record, _old: record is not None)

    assert story(after_crash="hold").startswith("8")


def test_the_simulator_finds_a_table_that_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def fenced(ours: Record, left: Record, old: migration.Old, _moved: list[Record]) -> Flow[bool]:
        copy = left.as_moved()
        return (yield old.ask(Claiming(copy, left))) is None and (yield Claiming(copy, ours)) is None

    monkeypatch.setattr(migration, "_replace", fenced)

    assert story(after_crash="hold").startswith("6")


def test_the_simulator_finds_a_row_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(_step: Claiming, _old: migration.Old, _moved: list[Record]) -> Flow[None]:
        return None
        yield

    monkeypatch.setattr(migration, "_unless_known", unread)

    assert story().startswith(("1", "4"))


def test_the_name_of_a_table_is_answered_with_what_to_write() -> None:
    with pytest.raises(UsageError, match=r"HandMadeTable\(url, 'processed_messages', key="):
        Guard("memory:", migrate_from="processed_messages")
