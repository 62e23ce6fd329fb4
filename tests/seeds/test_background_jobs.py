"""The dispatch "Why Your Background Jobs Need Idempotency Keys": its job, its table on PostgreSQL, its SETNX on Redis.

Where it contradicts itself, or what others know:

- "the key describes the operation, `charge_{customer}_{order}_{amount}`" and "in practice generate a UUID when you
  enqueue": both survive a retry of the job; only the first survives a second enqueueing of the same charge.
- its Ruby job looks for the key and inserts it later; two sections on, it says that only an insert that conflicts
  coordinates two workers. Here the insert comes first.
- its SQL has PL/pgSQL's GET DIAGNOSTICS and IF in a plain script, which PostgreSQL refuses: read as one function.
- it allows SETNX where the effect is idempotent. What SETNX costs is an effect that never happens, so what has to hold
  is that it may be lost.
- a job's id is said to change on retry. Celery's and Sidekiq's stay for a retry, and are new for a second enqueueing.

`docs/recipes/jobs.md` has both jobs as recipes.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg
import pytest
import redis

from onefold import TX, Guard, HandMadeTable, InProgress, RecordColumn
from onefold.testing import crash_at
from tests.stores.postgres.tools import another, rows
from tests.support import PATIENCE, Elsewhere, end_lease

KEY: Final = "charge_123_456_9900"

# Its table, to the letter of its columns; and what the job does.
SCHEMA: Final = """
CREATE TABLE idempotency_keys (
    key text PRIMARY KEY,
    result jsonb,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE charges (customer integer, amount_cents integer);
"""


@pytest.fixture
def url(postgres_url: str) -> str:
    with another(postgres_url) as connection:
        connection.execute(SCHEMA)
    return postgres_url


def charges(url: str) -> list[Any]:
    return rows(url, "SELECT customer, amount_cents FROM charges")


def charge(connection: Any) -> None:
    connection.execute("INSERT INTO charges VALUES (123, 9900)")


def by_hand(url: str, key: str, _guard: Guard) -> bool:
    """The dispatch's SQL: insert, and stop if nothing was inserted."""
    with psycopg.connect(url) as connection:
        inserted = connection.execute(
            "INSERT INTO idempotency_keys (key) VALUES (%s) ON CONFLICT (key) DO NOTHING", (key,)
        ).rowcount
        if inserted == 0:
            connection.rollback()
            return False
        charge(connection)
        return True


def transactional(_url: str, key: str, guard: Guard) -> bool:
    @guard.transactional("charge", key="idempotency_key")
    def perform(idempotency_key: str, *, tx: Any = TX) -> None:
        charge(tx)

    return not perform.outcome(key).replayed


def in_its_table(url: str, key: str, guard: Guard) -> bool:
    """The table of the dispatch stays: its row is the record."""
    with psycopg.connect(url) as connection:

        def perform() -> None:
            connection.execute("INSERT INTO idempotency_keys (key) VALUES (%s)", (key,))
            charge(connection)

        within = guard.within(connection, record=RecordColumn("idempotency_keys", "key"))
        return not within.run("charge", key, perform).replayed


WAYS: Final[dict[str, Callable[[str, str, Guard], bool]]] = {
    "by hand": by_hand,
    "transactional": transactional,
    "its own table": in_its_table,
}


@pytest.fixture
def guard(url: str) -> Iterator[Guard]:
    with Guard(url, keep="72h") as guard:
        guard.check()
        yield guard


@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_runs_again_charges_once(url: str, guard: Guard, way: str) -> None:
    ran = [WAYS[way](url, KEY, guard) for _ in range(2)]

    assert ran == [True, False]
    assert charges(url) == [(123, 9900)]


@pytest.mark.parametrize("way", WAYS)
def test_of_two_workers_at_once_one_charges(url: str, guard: Guard, way: str) -> None:
    both = [Elsewhere(lambda: WAYS[way](url, KEY, guard)) for _ in range(2)]

    assert sorted(one.result() for one in both) == [False, True]
    assert charges(url) == [(123, 9900)]


def test_without_the_transaction_both_workers_find_no_key_and_both_charge(url: str) -> None:
    both_have_looked = threading.Barrier(2)

    def check_execute_record() -> None:
        with another(url) as connection:
            found = connection.execute("SELECT 1 FROM idempotency_keys WHERE key = %s", (KEY,)).fetchone()
            both_have_looked.wait(PATIENCE)
            if found is None:
                charge(connection)
                connection.execute("INSERT INTO idempotency_keys (key) VALUES (%s) ON CONFLICT DO NOTHING", (KEY,))

    for one in [Elsewhere(check_execute_record) for _ in range(2)]:
        one.result()

    assert charges(url) == [(123, 9900)] * 2


def test_a_worker_that_dies_half_way_leaves_neither_key_nor_charge(url: str, guard: Guard) -> None:
    with crash_at("after_handler", guard):
        transactional(url, KEY, guard)
    assert (charges(url), rows(url, "SELECT key FROM onefold_records")) == ([], [])

    assert transactional(url, KEY, guard)
    assert charges(url) == [(123, 9900)]


def test_the_key_is_an_argument_of_the_job_and_not_the_id_of_the_job(url: str, guard: Guard) -> None:
    """Enqueued twice, a job has two ids. The caller's key is the same, whether it is a UUID or says what is done."""

    def enqueued_twice(key_of: Callable[[str], str]) -> list[str]:
        runs: list[str] = []
        for job_id in ("job-1", "job-2"):
            guard.run("job", key_of(job_id), lambda job_id=job_id: runs.append(job_id))  # type: ignore[misc]
        return runs

    for key in (str(uuid.uuid4()), "welcome_email_7"):
        assert enqueued_twice(lambda _job_id, key=key: key) == ["job-1"]  # type: ignore[misc]
    assert enqueued_twice(lambda job_id: job_id) == ["job-1", "job-2"]


def test_a_result_is_kept_beside_the_key_and_the_next_caller_gets_it(guard: Guard) -> None:
    """Its table has a column for the result, which none of its code fills."""
    first, again = (guard.run("charge", KEY, lambda: {"receipt": 17}) for _ in range(2))

    assert (first.value, again.value, again.replayed) == ({"receipt": 17}, {"receipt": 17}, True)


def test_its_own_table_keeps_the_result_and_eight_workers_at_once_all_get_it(url: str, guard: Guard) -> None:
    """The table stays as it is, without a column of ours; Onefold writes the row, because the job writes none."""
    record = RecordColumn("idempotency_keys", "key", result="result")
    all_here = threading.Barrier(8)

    @guard.transactional("charge", key="idempotency_key", record=record, fingerprint=None)
    def perform(idempotency_key: str, *, tx: Any = TX) -> dict[str, int]:
        charge(tx)
        return {"receipt": 17}

    def deliver() -> bool:
        all_here.wait(PATIENCE)
        outcome = perform.outcome(KEY)
        assert outcome.value == {"receipt": 17}
        return outcome.replayed

    workers = [Elsewhere(deliver) for _ in range(8)]

    assert sorted(worker.result() for worker in workers) == [False] + [True] * 7
    assert charges(url) == [(123, 9900)]
    assert rows(url, "SELECT key, result FROM idempotency_keys") == [(KEY, {"receipt": 17})]


def test_the_rows_of_its_table_count_when_a_team_moves_to_the_guard(url: str) -> None:
    by_hand(url, KEY, Guard("memory:"))
    table = HandMadeTable(
        url, "idempotency_keys", key="key", operation="charge", at="created_at", keep="72h", result_column="result"
    )

    with Guard(url, migrate_from=table) as guard:
        assert guard.run("charge", KEY, lambda: pytest.fail("it ran")).replayed


def test_keys_older_than_72_hours_are_cleaned_up_and_younger_ones_are_not(url: str, guard: Guard) -> None:
    """Its DELETE from a cron job, and ours: a key that has expired counts as gone, and is removed in small batches."""
    for way, keys in ((by_hand, "hand"), (transactional, "ours")):
        for age in ("old", "new"):
            way(url, f"{keys}-{age}", guard)
    with another(url) as connection:
        connection.execute("UPDATE idempotency_keys SET created_at = now() - interval '73 hours' WHERE key LIKE '%old'")
        connection.execute("UPDATE onefold_records SET expires = expires - 73 * 3600, due = 0 WHERE key LIKE '%old'")
        connection.execute("DELETE FROM idempotency_keys WHERE created_at < now() - interval '72 hours'")

    assert guard.store.purge(limit=100) == 1
    assert rows(url, "SELECT key FROM idempotency_keys") == [("hand-new",)]
    assert rows(url, "SELECT key FROM onefold_records") == [("ours-new",)]


class Setnx:
    """The dispatch's job without a database: SET NX EX 86400, and then the work."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.done: list[str] = []

    def perform(self, key: str, work: Callable[[], None]) -> None:
        if self.client.set(f"idem:{key}", "1", nx=True, ex=86400):
            work()


class Guarded(Setnx):
    """The same with a guard: whatever happens to the first run, there is no second."""

    def __init__(self, client: Any, url: str) -> None:
        super().__init__(client)
        self.guard = Guard(url, keep="24h", after_crash="skip", ambiguous_errors=(Exception,))

    def perform(self, key: str, work: Callable[[], None]) -> None:
        self.guard.run("job", key, work)


@pytest.fixture(params=["setnx", "guard"])
def job(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Setnx]:
    client = redis.Redis.from_url(redis_url)
    job = Setnx(client) if request.param == "setnx" else Guarded(client, redis_url)
    yield job
    if isinstance(job, Guarded):
        job.guard.close()
    client.close()


def test_of_two_workers_racing_on_one_key_one_does_the_work(job: Setnx) -> None:
    for one in [Elsewhere(lambda: suppressed(job, lambda: job.done.append("done"))) for _ in range(2)]:
        one.result()

    assert job.done == ["done"]


def suppressed(job: Setnx, work: Callable[[], None]) -> None:
    """A guard tells the second worker that the first is at it; SETNX just returns."""
    try:
        job.perform("metric-1", work)
    except InProgress:
        assert isinstance(job, Guarded)


def test_a_job_that_fails_after_it_has_the_key_is_not_tried_again(job: Setnx) -> None:
    """The price, as the dispatch says: the key remains, and the work is not done."""

    def fail() -> None:
        raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        job.perform("metric-1", fail)
    job.perform("metric-1", lambda: job.done.append("done"))

    assert job.done == []


def test_its_key_is_gone_after_a_day(job: Setnx) -> None:
    job.perform("metric-1", lambda: None)

    (name,) = job.client.keys()
    assert 86400 - 60 < job.client.ttl(name) <= 86400


def test_a_worker_that_dies_with_the_key_leaves_the_job_undone(redis_url: str) -> None:
    """At most once: after the lease, the next delivery counts it as done; SETNX refuses it for the whole day."""
    done: list[str] = []
    with Guard(redis_url, keep="24h", after_crash="skip", ambiguous_errors=(Exception,)) as guard:
        with crash_at("after_claim", guard):
            guard.run("job", "metric-1", lambda: done.append("never"))
        end_lease(guard.store, guard.address("job", "metric-1"))
        outcome = guard.run("job", "metric-1", lambda: done.append("again"))

    assert (done, outcome.replayed, outcome.omitted) == ([], True, True)
