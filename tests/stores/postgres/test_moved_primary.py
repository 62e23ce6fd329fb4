"""The primary is elsewhere: URLs that name several servers, and connections whose server takes no writes any more.

With a real fail-over: `test_failover`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from onefold import StoreUnavailable
from onefold.stores.postgres.asyncpg import pool as asyncpg_pool
from onefold.stores.postgres.errors import meaning
from onefold.stores.sql.connection import ErrorClass
from services import postgres as postgres_server
from services.house import House
from tests.stores.postgres.tools import (
    DAILY_DRIVERS,
    SCHEMA,
    Asyncpg,
    Awaiting,
    Hand,
    Psycopg,
    Worker,
    add,
    another,
    balance,
    records,
    rows,
)
from tests.support import eventually

# Far more than it takes; it bounds how long a broken one hangs.
PATIENCE = 60.0

WAITS = "wait_event = 'SyncRep'"


@pytest.fixture
def url(postgres_url: str) -> str:
    with another(postgres_url) as connection:
        connection.execute(SCHEMA)
    return postgres_url


@pytest.fixture(params=DAILY_DRIVERS)
def worker_type(request: pytest.FixtureRequest) -> type[Worker]:
    return request.param  # type: ignore[no-any-return]


@contextmanager
def working(worker: Worker) -> Iterator[Worker]:
    try:
        yield worker
    finally:
        worker.close()


def claimed(worker: Worker, key: str) -> bool:
    """Deliver in claim mode; whether it ran."""
    if isinstance(worker, Psycopg):
        return not worker.guard.run("charge", key, lambda: None).replayed
    assert isinstance(worker, Awaiting)

    async def charge() -> None: ...

    return not worker.runner.run(worker.guard.run("charge", key, charge)).replayed


async def turn_read_only(hand: Hand) -> None:
    """As a server does that becomes a replica and keeps its connections."""
    await hand.run("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
    await add(hand)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        # A standby, or a primary that was demoted.
        ("25006", ErrorClass.READ_ONLY),
        # Ended by an administrator or by the end of the server; after a crash of another; not ready.
        *(("57P01", ErrorClass.LOST), ("57P02", ErrorClass.LOST), ("57P03", ErrorClass.LOST)),
    ],
)
def test_the_codes_of_a_fail_over_are_of_their_kind(code: str, kind: ErrorClass) -> None:
    assert meaning(code, "text").kind is kind


# A server that takes no writes any more.


def test_a_delivery_on_a_connection_that_turned_read_only_runs_on_a_new_one(
    url: str, worker_type: type[Worker]
) -> None:
    with working(worker_type(url)) as worker:
        worker.transactional("earlier", turn_read_only)

        outcome = worker.transactional("m1", add)

        assert not outcome.replayed
        assert worker.transactional("m1", add).replayed
    assert (balance(url), records(url)) == (20, ["earlier", "m1"])


def test_a_claim_on_a_connection_that_turned_read_only_is_made_on_a_new_one(
    url: str, worker_type: type[Worker]
) -> None:
    with working(worker_type(url)) as worker:
        worker.transactional("earlier", turn_read_only)

        assert claimed(worker, "c1")
        assert not claimed(worker, "c1")


def test_a_server_that_stays_read_only_is_told_at_once_and_nothing_runs(url: str, worker_type: type[Worker]) -> None:
    name = urlsplit(url).path[1:]
    with working(worker_type(url)) as worker:
        worker.transactional("earlier", add)
        with another(url) as connection:
            connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
            connection.execute(
                # Other tests are at work in other databases of this server.
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'onefold' AND datname = current_database()"
            )

        with pytest.raises(StoreUnavailable, match=r"it is read-only\. Is this a replica\?"):
            worker.transactional("m1", add)
        with pytest.raises(StoreUnavailable, match=r"it is read-only\. Is this a replica\?"):
            claimed(worker, "c1")

        with another(url) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only".encode())
        # The same guard, as soon as the server takes writes again.
        assert not worker.transactional("m1", add).replayed
    assert (balance(url), records(url)) == (20, ["earlier", "m1"])


def test_a_handler_that_chose_a_read_only_transaction_is_told_and_not_run_again(
    url: str, worker_type: type[Worker]
) -> None:
    starts: list[int] = []

    async def work(hand: Hand) -> None:
        starts.append(1)
        await hand.run("SET TRANSACTION READ ONLY")
        await add(hand)

    with working(worker_type(url)) as worker, pytest.raises(Exception, match="read-only transaction") as raised:
        worker.transactional("m1", work)

    assert not isinstance(raised.value, StoreUnavailable)
    assert starts == [1]
    assert rows(url, "SELECT count(*) FROM onefold_records") == [(0,)]


# A synchronous standby that does not confirm.


@pytest.mark.parametrize("cut", ["pg_terminate_backend", "pg_cancel_backend"])
@pytest.mark.parametrize("kind", [Psycopg, Asyncpg])
def test_a_commit_whose_wait_for_a_standby_is_cut_short_has_one_effect(
    kind: type[Worker], cut: str, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is committed here, and not there: the server says so in a warning, or not at all."""
    for name, value in {"wal_level": "replica", "max_wal_senders": "2"}.items():
        monkeypatch.setitem(postgres_server.SETTINGS, name, value)
    starts: list[int] = []

    async def work(hand: Hand) -> None:
        starts.append(1)
        await add(hand)

    with house.own("postgres") as server, another(server.url) as connection, working(kind(server.url)) as worker:
        connection.execute(SCHEMA)
        worker.transactional("earlier", add)
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'absent'")
        connection.execute("SELECT pg_reload_conf()")
        assert eventually(lambda: rows(server.url, "SHOW synchronous_standby_names") == [("absent",)])
        with ThreadPoolExecutor(1) as pool:
            delivered = pool.submit(worker.transactional, "m1", work)
            # Once for each session that waits: the resolution of the first may wait as well.
            assert eventually(lambda: rows(server.url, f"SELECT {cut}(pid) FROM pg_stat_activity WHERE {WAITS}") != [])
            assert not delivered.result(PATIENCE).replayed

        assert worker.transactional("m1", add).replayed
        assert (len(starts), balance(server.url), records(server.url)) == (1, 20, ["earlier", "m1"])


# A URL that names several servers.


def naming(url: str, *first: int) -> str:
    """The URL with other servers before the one that is there."""
    parts = urlsplit(url)
    credentials, _, host = parts.netloc.rpartition("@")
    hosts = ",".join([*(f"127.0.0.1:{port}" for port in first), host])
    return parts._replace(netloc=f"{credentials}@{hosts}", query="target_session_attrs=read-write").geturl()


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that is frozen: the system takes the connection, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def refusing() -> Iterator[int]:
    """The port of a server that is not there. It is bound, so that nobody else can listen on it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_a_url_may_name_several_servers_and_the_one_that_is_there_is_used(
    url: str, refusing: int, worker_type: type[Worker]
) -> None:
    with working(worker_type(naming(url, refusing))) as worker:
        assert not worker.transactional("m1", add).replayed
        assert claimed(worker, "c1")
    assert records(url) == ["c1", "m1"]


def test_a_server_that_does_not_answer_does_not_hide_the_next_one(
    url: str, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # psycopg has the option connect_timeout, for each server; asyncpg's own is for all of them together.
    monkeypatch.setattr(asyncpg_pool, "CONNECT_SECONDS", 0.5)

    with working(Asyncpg(naming(url, silent))) as worker:
        assert not worker.transactional("m1", add).replayed
        assert claimed(worker, "c1")
    assert records(url) == ["c1", "m1"]


def test_where_no_server_is_the_primary_that_is_told(url: str, refusing: int, worker_type: type[Worker]) -> None:
    # This one is a primary: here it is a standby that is asked for and not found, which reads the same.
    nowhere = naming(url, refusing).replace("read-write", "standby")

    with working(worker_type(nowhere)) as worker, pytest.raises(StoreUnavailable, match="Nothing ran") as raised:
        worker.transactional("m1", add)

    assert not raised.value.reached
    assert "lost track" not in str(raised.value)
    assert records(url) == []


def test_several_servers_are_named_in_errors_without_the_password(refusing: int) -> None:
    url = naming("postgresql://clerk:s3cret@127.0.0.1:1/db", refusing)

    with working(Asyncpg(url)) as worker, pytest.raises(StoreUnavailable) as raised:
        worker.transactional("m1", add)

    assert f"clerk@127.0.0.1:{refusing},127.0.0.1:1/db" in str(raised.value)
    assert "s3cret" not in _everything(raised.value)


def _everything(error: BaseException | None) -> str:
    said: list[Any] = []
    while error is not None:
        said += [error, *getattr(error, "__notes__", ())]
        error = error.__cause__
    return "\n".join(map(str, said))
