"""A table that only callers' transactions write is purged too: after their commits, where a library tells of them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from onefold import AsyncGuard, Guard
from onefold.stores import background_purge
from onefold.stores.postgres.dialect import Postgres
from onefold.stores.sql.dialect import Dialect, SqlRequest
from onefold.stores.sqlite import SqliteStore
from onefold.stores.sqlite.dialect import Sqlite
from tests.maintenance.test_background_purge import CHANCE, connected, leave, rows
from tests.wallet import never_opened

pytestmark = pytest.mark.usefixtures("always")

# Nothing here waits for as long as this.
PATIENCE = 60.0


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little is purged after every delivery."""
    monkeypatch.setattr(background_purge, "chance", lambda *_: 0)


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with three expired records."""
    found = f"sqlite:///{tmp_path}/records.db"
    if request.param != "sqlite":
        found = str(request.getfixturevalue(f"{request.param}_url"))
    leave(found)
    return found


@pytest.fixture
def file(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path}/records.db"
    leave(found)
    return found


DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "mysql": "mysql+asyncmy"}


def engine_url(url: str, drivers: dict[str, str] = DRIVERS) -> str:
    scheme, _, rest = url.partition(":")
    return f"{drivers[scheme]}:{rest}"


@contextmanager
def engine_of(url: str, **options: Any) -> Iterator[Any]:
    engine = create_engine(engine_url(url), **options)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def django_alias(url: str, **options: Any) -> Iterator[str]:
    from tests.stores.django.project import alias_of, project

    kinds = {"sqlite": "sqlite", "postgresql": "postgres", "mysql": "mariadb"}
    scheme = url.partition(":")[0]
    name = url.removeprefix("sqlite:///") if scheme == "sqlite" else url
    with project(), alias_of(kinds[scheme], name, **options) as alias:
        yield alias


@contextmanager
def interposing(dialect: type[Dialect], before: Callable[[], object]) -> Iterator[None]:
    """Do something between a commit and the purge after it."""
    usual = dialect.impatient_purge

    def interposed(self: Any, limit: int, path: str | None = None) -> Any:
        before()
        return usual(self, limit, path)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(dialect, "impatient_purge", interposed)
        yield


def deliver(guard: Guard, held: Any, key: str = "k") -> None:
    guard.within(held).run("credit", key, lambda: None)


# A session.


def test_a_session_purges_after_its_commit(url: str) -> None:
    with engine_of(url) as engine, Session(engine) as session:
        deliver(Guard(never_opened), session)
        before = rows(url)
        session.commit()

    assert (before, rows(url)) == (3, 1)


def test_so_does_a_batch_of_fresh_messages(url: str) -> None:
    with engine_of(url) as engine, Session(engine) as session, session.begin():
        fresh = Guard(never_opened).within(session).fresh("credit", ["a", "b"], key=str)

    assert fresh.new == ["a", "b"]
    assert rows(url) == 2


def test_an_async_session_purges_after_its_commit(url: str) -> None:
    async def go() -> None:
        engine = create_async_engine(engine_url(url, ASYNC_DRIVERS))

        async def nothing() -> None: ...

        async with AsyncSession(engine) as session, session.begin():
            await AsyncGuard(never_opened).within(session).run("credit", "k", nothing)
        await engine.dispose()

    asyncio.run(go())

    assert rows(url) == 1


def test_a_rollback_and_a_savepoint_purge_nothing(postgres_url: str) -> None:
    leave(postgres_url)
    with engine_of(postgres_url) as engine, Session(engine) as session:
        guard = Guard(never_opened)
        deliver(guard, session)
        session.rollback()
        after_rollback = rows(postgres_url)
        with session.begin_nested():
            deliver(guard, session)
        after_savepoint = rows(postgres_url)
        session.rollback()
        session.execute(text("SELECT 1"))
        session.commit()

    assert (after_rollback, after_savepoint, rows(postgres_url)) == (3, 3, 3)


def test_a_delivery_in_a_savepoint_purges_after_the_commit_around_it(postgres_url: str) -> None:
    leave(postgres_url)
    with engine_of(postgres_url) as engine, Session(engine) as session:
        with session.begin_nested():
            deliver(Guard(never_opened), session)
        session.commit()

    assert rows(postgres_url) == 1


def test_a_session_purges_once_for_each_commit_that_recorded(file: str) -> None:
    purges: list[int] = []
    with engine_of(file) as engine, Session(engine) as session, interposing(Sqlite, lambda: purges.append(1)):
        for key in ("a", "b"):
            deliver(Guard(never_opened), session, key)
            session.commit()
        session.execute(text("SELECT 1"))
        session.commit()

    assert len(purges) == 2


def test_a_session_that_is_a_part_of_a_transaction_leaves_it_alone(postgres_url: str) -> None:
    leave(postgres_url)
    with engine_of(postgres_url) as engine, engine.begin() as connection:
        session = Session(connection, join_transaction_mode="create_savepoint")
        deliver(Guard(never_opened), session)
        session.commit()

    assert rows(postgres_url) == 4


# Django.


def test_a_block_of_djangos_purges_after_its_commit(url: str) -> None:
    from django.db import connections, transaction

    with django_alias(url) as alias:
        with transaction.atomic(using=alias):
            deliver(Guard(never_opened), connections[alias])
            before = rows(url)
        after = rows(url)

    assert (before, after) == (3, 1)


def test_a_block_that_is_rolled_back_purges_nothing(file: str) -> None:
    from django.db import connections, transaction

    with django_alias(file) as alias, transaction.atomic(using=alias):
        deliver(Guard(never_opened), connections[alias])
        transaction.set_rollback(True, using=alias)

    assert rows(file) == 3


def test_hooks_that_a_django_test_captures_purge_nothing(postgres_url: str) -> None:
    from django.db import connections, transaction
    from django.test import TestCase

    leave(postgres_url)
    with django_alias(postgres_url) as alias, transaction.atomic(using=alias):
        with TestCase.captureOnCommitCallbacks(using=alias, execute=True) as hooks:
            deliver(Guard(never_opened), connections[alias])
        transaction.set_rollback(True, using=alias)

    assert len(hooks) == 1
    assert rows(postgres_url) == 3


# Whose database, and whether.


@pytest.mark.parametrize("switched_off", ["url", "store", "opened"])
def test_a_guard_that_was_told_not_to_purge_does_not(file: str, switched_off: str) -> None:
    with closing(SqliteStore(file.removeprefix("sqlite:///"), purge=False)) as store, engine_of(file) as engine:
        source: Any = {"url": f"{file}?purge=no", "store": store, "opened": lambda: store}[switched_off]
        guard = Guard(source)
        if switched_off == "opened":
            guard.store  # noqa: B018 - it is opened there
        with Session(engine) as session, session.begin():
            deliver(guard, session)

    assert rows(file) == 4


def test_only_one_delivery_in_many_asks_for_it(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_purge, "chance", lambda *_: background_purge.ONE_IN)
    with engine_of(file) as engine, Session(engine) as session, session.begin():
        deliver(Guard(never_opened), session)

    assert rows(file) == 4


@pytest.mark.parametrize("orm", ["sqlalchemy", "django"])
def test_the_table_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orm: str) -> None:
    """Document 004's shape: nobody writes the table but transactions of the application's."""
    monkeypatch.setattr(background_purge, "chance", CHANCE)
    url = f"sqlite:///{tmp_path}/records.db"
    messages, batch = list(range(10_000)), 500
    guard = Guard(never_opened, keep=0.001)
    if orm == "sqlalchemy":
        with engine_of(url) as engine:
            for begin in range(0, len(messages), batch):
                with Session(engine) as session, session.begin():
                    guard.within(session).fresh("credit", messages[begin : begin + batch], key=str)
    else:
        from django.db import connections, transaction

        with django_alias(url) as alias:
            for begin in range(0, len(messages), batch):
                with transaction.atomic(using=alias):
                    guard.within(connections[alias]).fresh("credit", messages[begin : begin + batch], key=str)

    assert rows(url) < 2_500


# Nothing waits for it, and nothing fails.


@pytest.mark.parametrize("pool", [{"pool_size": 1, "max_overflow": 0}, {"poolclass": NullPool}], ids=["one", "none"])
def test_it_takes_no_connection_from_the_pool(url: str, pool: dict[str, Any]) -> None:
    patience = {} if "poolclass" in pool else {"pool_timeout": 2 * PATIENCE}
    with engine_of(url, **pool, **patience) as engine, Session(engine) as session:
        deliver(Guard(never_opened), session)
        took = duration(session.commit)

    assert took < PATIENCE
    assert rows(url) == 1


@pytest.mark.parametrize("orm", ["sqlalchemy", "django"])
def test_a_file_that_this_thread_writes_elsewhere_is_left_alone(file: str, orm: str) -> None:
    """SQLite has one writer: the purge would wait for a transaction that waits for the purge."""
    long, other = {"timeout": 2 * PATIENCE}, connected(file)
    with closing(other), interposing(Sqlite, lambda: other.execute("BEGIN IMMEDIATE")):
        if orm == "sqlalchemy":
            with engine_of(file, connect_args=long) as engine, Session(engine) as session:
                deliver(Guard(never_opened), session)
                took = duration(session.commit)
        else:
            from django.db import connections, transaction

            with django_alias(file, OPTIONS=long) as alias:
                block = transaction.atomic(using=alias)
                block.__enter__()
                deliver(Guard(never_opened), connections[alias])
                took = duration(lambda: block.__exit__(None, None, None))
        assert other.in_transaction

    assert took < PATIENCE
    assert rows(file) == 4


def duration(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def test_a_table_that_this_thread_has_locked_is_left_alone(postgres_url: str) -> None:
    leave(postgres_url)
    with closing(connected(postgres_url)) as other, engine_of(postgres_url) as engine, Session(engine) as session:
        deliver(Guard(never_opened), session)
        with interposing(Postgres, lambda: lock(other)):
            took = duration(session.commit)
        other.execute("ROLLBACK")

    assert took < PATIENCE
    assert rows(postgres_url) == 4


def lock(connection: Any) -> None:
    connection.execute("BEGIN")
    connection.execute("LOCK TABLE onefold_records IN ACCESS EXCLUSIVE MODE")


def test_a_purge_that_fails_fails_no_commit(
    file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = SqlRequest("SELECT no_such_column FROM onefold_records", {})
    monkeypatch.setattr(Sqlite, "impatient_purge", lambda _self, _limit: (yield wrong))
    caplog.set_level(logging.DEBUG, "onefold")
    with engine_of(file) as engine, Session(engine) as session, session.begin():
        deliver(Guard(never_opened), session)

    assert rows(file) == 4
    (said,) = [record for record in caplog.records if "the background purge failed" in record.message]
    assert said.levelno == logging.DEBUG


def test_two_threads_that_commit_do_not_wait_for_each_others_purges(file: str) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with engine_of(file, connect_args={"timeout": PATIENCE}) as engine:
                for at in range(20):
                    with Session(engine) as session, session.begin():
                        deliver(Guard(never_opened), session, f"{number}-{at}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert rows(file) == 40
