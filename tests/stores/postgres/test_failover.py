"""PostgreSQL fails over under Patroni: with a synchronous standby nothing that was confirmed is lost or runs twice.

With an asynchronous one it is, and that is shown. No test waits for a time: each asks Patroni who leads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from onefold import Guard
from onefold.health import Grade, examine
from services import patroni
from services import postgres as postgres_server
from services.patroni import Cluster
from services.processes import wait_until
from tests.stores.postgres.test_moved_primary import claimed
from tests.stores.postgres.tools import (
    DRIVERS,
    SCHEMA,
    Asyncpg,
    Hand,
    Psycopg,
    Worker,
    add,
    another,
    balance,
    records,
)

pytestmark = pytest.mark.more

# A frozen server takes the connection and does not answer; then the next one of the URL is asked.
PATIENCE = "&connect_timeout=4"


def database_of(cluster: Cluster) -> str:
    url = postgres_server.Database(cluster).url
    with another(url) as connection:
        connection.execute(SCHEMA)
    return url


def worker_on(url: str, kind: type[Worker]) -> Worker:
    return kind(url if kind is Asyncpg else url + PATIENCE)


@pytest.fixture
def url(own_patroni: Cluster) -> str:
    return database_of(own_patroni)


@pytest.fixture
def workers(url: str) -> Iterator[list[Worker]]:
    workers = [worker_on(url, kind) for kind in DRIVERS]
    yield workers
    for worker in workers:
        worker.close()


def once(strike: Callable[[], object]) -> tuple[Callable[[Hand], object], list[int]]:
    """A handler that is struck in its transaction, the first time it runs; and its starts."""
    starts: list[int] = []

    async def work(hand: Hand) -> None:
        starts.append(1)
        if len(starts) == 1:
            strike()
        await add(hand)

    return work, starts


def test_a_killed_primary_takes_nothing_with_it_and_the_delivery_in_flight_runs_once(
    own_patroni: Cluster, url: str, workers: list[Worker]
) -> None:
    for number, worker in enumerate(workers):
        worker.transactional(f"before-{number}", add)
        assert claimed(worker, f"claimed-{number}")
    old: list[patroni.Node] = []
    work, starts = once(lambda: old.append(own_patroni.kill_primary()))

    outcome = workers[0].transactional("in-flight", work)  # type: ignore[arg-type]

    # What was not committed is rolled back, and delivered again to the new primary.
    assert (outcome.replayed, len(starts)) == (False, 2)
    for number, worker in enumerate(workers):
        assert worker.transactional(f"before-{number}", add).replayed, "on a driver whose idle connections are dead"
        assert not claimed(worker, f"claimed-{number}")
        assert not worker.transactional(f"after-{number}", add).replayed
    assert balance(url) == 10 * (1 + 2 * len(workers))
    assert len(records(url)) == 1 + 3 * len(workers)

    old[0].daemon.start()
    own_patroni.settle()
    with Guard(url) as guard:
        told = {check.name: check for check in examine(guard.store).checks}["replication"]
    assert (told.grade, told.reason.partition(":")[0]) == (Grade.GREEN, "1 standby, 1 of them synchronous")


@pytest.mark.parametrize("kind", [Psycopg, Asyncpg])
def test_a_frozen_primary_that_comes_back_confirms_nothing(own_patroni: Cluster, url: str, kind: type[Worker]) -> None:
    def freeze_and_return() -> None:
        # From here on there are two that believe to lead, and the handler's transaction is on the old one.
        own_patroni.freeze_primary().daemon.cont()

    work, starts = once(freeze_and_return)

    with closing(worker_on(url, kind)) as worker:
        worker.transactional("before", add)
        outcome = worker.transactional("in-flight", work)  # type: ignore[arg-type]
        own_patroni.settle()

        assert not outcome.replayed
        assert worker.transactional("before", add).replayed
        assert worker.transactional("in-flight", add).replayed
    assert len(starts) >= 2, "the old one has confirmed it"
    assert (balance(url), records(url)) == (20, ["before", "in-flight"])


def test_an_asynchronous_standby_loses_what_was_confirmed_record_and_work_together(own_patroni_async: Cluster) -> None:
    cluster = own_patroni_async
    url = database_of(cluster)
    with closing(worker_on(url, Psycopg)) as worker:
        worker.transactional("replicated", add)
        wait_until(lambda: has_all(url), "the standby does not catch up")
        with Guard(url) as guard:
            told = {check.name: check for check in examine(guard.store).checks}["replication"]
            wait_until(lambda: has_all(url), "the standby does not catch up")

        receiver = cluster.stop_receiving()
        worker.transactional("lost", add)
        old = cluster.primary
        old.daemon.kill()
        patroni.end_receiver(receiver)
        cluster.replaced(old)

        assert (balance(url), records(url)) == (10, ["replicated"]), "they are lost together"
        assert worker.transactional("replicated", add).replayed
        # Whoever was told that it is done does not send it again. Who does, makes it good.
        assert not worker.transactional("lost", add).replayed
        assert (balance(url), records(url)) == (20, ["lost", "replicated"])
    assert told.grade is Grade.YELLOW
    assert "a fail-over can lose the last commits" in told.reason


def has_all(url: str) -> bool:
    """Whether the standby has on its disk what the primary has."""
    with another(url) as connection:
        found = connection.execute("SELECT flush_lsn >= pg_current_wal_lsn() FROM pg_stat_replication").fetchall()
    return found == [(True,)]
