"""`guard.check()`: what would show at the first delivery shows at start-up, with what to do, sync and async."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from onefold import AsyncGuard, Guard, HandMadeTable, OnefoldError, StoreUnavailable, UsageError
from onefold._concurrency.generators import run as run_flow
from onefold.health.first_use import FirstUse
from onefold.health.startup import StoreProblems
from onefold.stores.memory import MemoryStore
from services.house import House
from services.redis import named_client
from services.servers import Server
from tests.health.test_sql import NOBODY, run, set_for_session
from tests.health.test_trial import CannotFinish, Foreign
from tests.health.tools import left_behind, use
from tests.stores.postgres.tools import tables
from tests.stores.sql.versions import TOO_NEW

Check = Callable[..., None]


def check_sync(url: Any, **options: Any) -> None:
    with Guard(url, **options) as guard:
        guard.check()


def check_async(url: Any, **options: Any) -> None:
    async def check() -> None:
        async with AsyncGuard(url, **options) as guard:
            await guard.check()

    asyncio.run(check())


@pytest.fixture(params=[check_sync, check_async], ids=["sync", "async"])
def check(request: pytest.FixtureRequest) -> Check:
    return request.param  # type: ignore[no-any-return]


def problem_of(check: Check, url: Any, **options: Any) -> OnefoldError:
    with pytest.raises(OnefoldError) as caught:
        check(url, **options)
    return caught.value


@pytest.fixture(params=["postgres", "asyncpg", "mysql", "sqlite", "redis", "dynamodb", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return "memory:"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/onefold.db"
    if request.param == "asyncpg":
        return str(request.getfixturevalue("postgres_url")).replace("postgresql:", "postgresql+asyncpg:")
    return str(request.getfixturevalue(f"{request.param}_url"))


def test_a_store_that_works_passes_twice_and_nothing_is_left_behind(check: Check, url: str) -> None:
    if "asyncpg" in url:
        # Only an AsyncGuard takes it.
        check = check_async

    check(url)
    check(url)

    assert left_behind(url.replace("+asyncpg", "")) == 0


def test_missing_tables_are_an_error_only_where_the_guard_creates_none(check: Check, postgres_url: str) -> None:
    error = problem_of(check, f"{postgres_url}?auto_schema=no")

    assert isinstance(error, UsageError)
    assert "tables: there are none" in str(error)
    assert "onefold schema" in str(error)
    assert not set(tables(postgres_url))
    check(postgres_url)
    assert {"onefold_records", "onefold_schema"} <= set(tables(postgres_url))


def test_a_table_of_dynamodb_that_is_missing_and_not_created_is_an_error(check: Check, dynamodb_url: str) -> None:
    error = problem_of(check, f"{dynamodb_url}&auto_schema=no")

    assert isinstance(error, UsageError)
    assert "table: there is none" in str(error)


def test_tables_of_a_version_that_is_too_new_are_an_error(check: Check, postgres_url: str) -> None:
    use(postgres_url)
    run(postgres_url, TOO_NEW)

    assert "Upgrade Onefold" in str(problem_of(check, postgres_url))


def test_a_read_only_session_is_an_error(check: Check, postgres_url: str) -> None:
    use(postgres_url)

    error = problem_of(check, set_for_session(postgres_url, default_transaction_read_only="on"))

    assert isinstance(error, StoreProblems)
    assert not error.works
    assert "Reset default_transaction_read_only" in str(error)


def test_a_read_only_mysql_is_an_error_and_is_not_written_to(check: Check, harmed: Server) -> None:
    run(harmed.url, "SET GLOBAL read_only = 1")
    error = problem_of(check, harmed.url)
    run(harmed.url, "SET GLOBAL read_only = 0")

    assert "Name the primary" in str(error)
    assert left_behind(harmed.url) == 0


@pytest.fixture(scope="module")
def harmed(house: House) -> Iterator[Server]:
    with house.own("mariadb") as server:
        use(server.url)
        yield server


def test_a_user_who_may_create_no_tables_is_an_error(check: Check, postgres_url: str) -> None:
    run(
        postgres_url,
        "DROP ROLE IF EXISTS onefold_poor",
        "CREATE ROLE onefold_poor LOGIN PASSWORD 'poorsecret'",
        "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
        "GRANT USAGE ON SCHEMA public TO onefold_poor",
    )
    parts = urlsplit(postgres_url)
    poor = parts._replace(netloc=f"onefold_poor:poorsecret@{parts.netloc.rpartition('@')[2]}").geturl()

    error = problem_of(check, poor)
    run(postgres_url, "DROP OWNED BY onefold_poor", "DROP ROLE onefold_poor")

    assert isinstance(error, UsageError)
    assert "lacks a permission" in str(error)
    assert "poorsecret" not in str(error)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act for another user")
def test_a_file_that_cannot_be_written_is_an_error() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/onefold.db"
        use(url)
        os.chmod(folder, 0o755)
        os.seteuid(NOBODY)
        try:
            error = problem_of(check_sync, url)
        finally:
            os.seteuid(0)

    assert isinstance(error, UsageError)
    assert "cannot be written" in str(error)


@pytest.fixture(scope="module")
def own_redis(house: House) -> Iterator[Server]:
    with house.own("redis") as server:
        yield server


@pytest.fixture
def client(own_redis: Server) -> Iterator[Any]:
    with named_client(own_redis.url) as client:
        yield client
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("appendonly", "yes")


def test_an_evicting_redis_is_an_error_although_deliveries_work(check: Check, own_redis: Server, client: Any) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")

    error = problem_of(check, own_redis.url)

    assert isinstance(error, StoreProblems)
    assert error.works
    assert "maxmemory-policy is allkeys-lru" in str(error)
    assert "CONFIG SET maxmemory-policy noeviction" in str(error)
    assert client.dbsize() == 0


def test_what_only_a_crash_shows_is_logged_and_is_no_error(
    check: Check, own_redis: Server, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.config_set("appendonly", "no")
    client.config_set("save", "")

    check(own_redis.url)

    assert [(record.name, record.levelno) for record in caplog.records] == [("onefold", logging.WARNING)]
    assert "persistence: off" in caplog.text


def test_a_replica_of_redis_is_an_error(check: Check, redis_pair: Any) -> None:
    assert "Name the primary, or Sentinel" in str(problem_of(check, redis_pair.replica_url))


def test_every_problem_is_in_the_message(own_redis: Server, client: Any, postgres_url: str) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")

    error = problem_of(check_sync, own_redis.url, migrate_from=f"{postgres_url}?auto_schema=no")

    assert isinstance(error, StoreProblems)
    assert not error.works
    assert "eviction policy: " in str(error)
    assert "migrate_from: tables: there are none" in str(error)


def test_a_server_that_does_not_answer_is_unavailable(check: Check) -> None:
    for url in ("postgresql://u@127.0.0.1:1/app", "redis://127.0.0.1:1", "mysql://u@127.0.0.1:1/app"):
        assert isinstance(problem_of(check, url), StoreUnavailable)
        assert isinstance(problem_of(check, "memory:", migrate_from=url), StoreUnavailable)


def test_a_hand_made_table_has_to_be_there_with_its_columns(check: Check, tmp_path: Path) -> None:
    url, path = f"sqlite:///{tmp_path}/onefold.db", tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE processed (message_id TEXT PRIMARY KEY)")
    right, wrong = (
        HandMadeTable(f"sqlite:///{path}", "processed", key=column, operation="charge")
        for column in ("message_id", "mesage_id")
    )

    check(url, migrate_from=right)
    error = problem_of(check, url, migrate_from=wrong)

    assert isinstance(error, StoreProblems)
    assert "migrate_from: " in str(error)
    assert "did you mean 'message_id'?" in str(error)


class HasACheck(Foreign):
    def check(self) -> None:
        pytest.fail("a method of its own, which is nothing to us")


def test_an_old_store_of_somebody_elses_is_read_and_not_taken_for_a_table() -> None:
    check_sync("memory:", migrate_from=HasACheck())


def test_a_store_of_somebody_elses_is_tried_out() -> None:
    store = Foreign()

    check_sync(store)

    assert len(store.inside) == 0
    assert "breaks its contract" in str(problem_of(check_sync, CannotFinish()))


class Down(Foreign):
    def claim(self, entry: Any, *, replacing: Any = None) -> Any:
        raise StoreUnavailable("the server is away")


def test_a_store_that_reports_nothing_and_refuses_is_unavailable() -> None:
    assert isinstance(problem_of(check_sync, Down()), StoreUnavailable)


def test_a_closed_guard_says_so() -> None:
    guard = Guard("memory:")
    guard.close()

    with pytest.raises(UsageError, match="closed"):
        guard.check()


def test_a_check_of_records_in_memory_writes_nothing() -> None:
    store = MemoryStore(limit=1)
    with Guard(store) as guard:
        guard.run("charge", "pay_7f3a", lambda: 4200)
        guard.check()

    assert len(store) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_child_that_is_forked_during_a_check_makes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Guard(f"sqlite:///{tmp_path}/records.db") as guard:
        first = FirstUse()
        monkeypatch.setattr(guard, "check", lambda: throw(StoreProblems("a replica")))
        with pytest.raises(StoreProblems):
            run_flow(first.check(guard, guard.policy))
        on_its_way = first.check(guard, guard.policy)
        next(on_its_way)

        def mended() -> int:
            monkeypatch.setattr(guard, "check", lambda: None)
            run_flow(first.check(guard, guard.policy))
            return 0 if first.is_over else 1

        assert in_child(mended) == 0
        with pytest.raises(StoreProblems):
            run_flow(first.check(guard, guard.policy))
        on_its_way.close()


def throw(error: Exception) -> None:
    raise error


def in_child(call: Callable[[], int]) -> int:
    """Return what the call returns in a forked child; 2 if it raises."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = call()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
