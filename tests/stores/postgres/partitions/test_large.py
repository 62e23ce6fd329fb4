"""A large table is not locked for long: neither while it gets its partitions, nor while one of them is dropped."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from onefold import Guard, StoreUnavailable
from onefold.stores.postgres.partitions import dialect, layout
from onefold.stores.schema import apply
from tests.health.test_sql import run
from tests.stores.postgres.partitions.test_purge import set_default
from tests.stores.postgres.partitions.tools import drop, expire, guard_on, partitioned, seal, sealed
from tests.stores.postgres.tools import another, rows, somebody_waits

TRIGGERS = "SELECT tgname FROM pg_trigger WHERE tgname = 'onefold_partitions'"

# As an application writes many, without statistics: nobody has analyzed the table yet.
MANY = (
    "INSERT INTO onefold_records (began, changed, attempt, revision, scope, operation, key, state, token, remark, "
    "expires, due) SELECT 0, 0, 1, 1, '', 'charge', 'many' || number, 'done', '\\x00', '', 0, 0 "
    "FROM generate_series(1, 60000) AS number"
)


@pytest.fixture
def plain(postgres_url: str) -> str:
    """A table that is not partitioned, with one record."""
    with Guard(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
    return postgres_url


def test_a_large_table_is_refused_until_its_index_is_built(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "LAYOUT", layout.LAYOUT.replace(str(layout.BUILT_BYTES), "0"))

    with guard_on(plain) as guard, pytest.raises(StoreUnavailable, match=r"too large .* Build it first: ") as refused:
        guard.run("charge", "l", lambda: 1)
    before = rows(plain, TRIGGERS)
    (statement,) = re.findall(r"(CREATE INDEX CONCURRENTLY .*)", str(refused.value))
    run(plain, statement)
    apply(partitioned(plain))

    assert before == []
    assert rows(plain, TRIGGERS)


def test_an_index_that_was_not_built_to_its_end_is_not_relied_upon(plain: str) -> None:
    with another(plain) as connection:
        connection.execute("CREATE INDEX onefold_records_kept ON onefold_records (due) WHERE due IS NULL")
        connection.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'onefold_records_kept'::regclass")

    with guard_on(plain) as guard, pytest.raises(StoreUnavailable, match="is not valid") as refused:
        guard.run("charge", "l", lambda: 1)
    (statement,) = re.findall(r"(REINDEX INDEX CONCURRENTLY .*)", str(refused.value))
    run(plain, statement)
    apply(partitioned(plain))

    assert rows(plain, TRIGGERS)


def test_a_partition_is_not_read_as_a_whole_under_its_lock(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
    with another(postgres_url) as connection:
        connection.execute("ALTER TABLE onefold_records SET (autovacuum_enabled = off)")
        connection.execute(MANY.encode())
        connection.execute("SELECT pg_stat_force_next_flush()")
    seal(postgres_url)
    (part,) = sealed(postgres_url)
    expire(postgres_url, "key = 'k'", ago=-7200)

    drop(postgres_url)

    scans = f"SELECT seq_scan FROM pg_stat_user_tables WHERE relid = '{part}'::regclass"
    before = rows(postgres_url, scans)
    drop(postgres_url)
    assert rows(postgres_url, scans) == before


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
@pytest.mark.parametrize("there", ["a table", "nothing"])
def test_of_many_processes_that_start_together_one_makes_the_partitions(plain: str, level: str, there: str) -> None:
    """At REPEATABLE READ, whoever has waited for another would not see yet what that one has made."""
    set_default(plain, level)
    if there == "nothing":
        with another(plain) as connection:
            connection.execute("DROP TABLE onefold_records, onefold_schema")
    begin = threading.Barrier(4)

    def start(number: int) -> bool:
        with guard_on(plain) as guard:
            begin.wait()
            return guard.run("charge", f"new{number}", lambda: 1).replayed

    with psycopg.connect(plain) as connection, ThreadPoolExecutor(4) as pool:
        # Nobody gets past the first lock before all have asked for it.
        connection.execute("SELECT pg_advisory_xact_lock(31365104204213348)")
        starting = [pool.submit(start, number) for number in range(4)]
        somebody_waits(plain, 4)
        connection.commit()
        replayed = [one.result() for one in starting]

    assert replayed == [False] * 4
    assert len(rows(plain, TRIGGERS)) == 1
    assert rows(plain, "SELECT count(*) FROM onefold_schema") == [(1,)]


def test_nobody_waits_behind_a_table_that_cannot_be_partitioned_yet(
    plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction has been open for long: every delivery of the new workers would lock all claims out for seconds."""
    monkeypatch.setattr(dialect, "LAYOUT", layout.LAYOUT.replace(layout.LONG_OPEN, "0 seconds"))
    with psycopg.connect(plain) as connection, Guard(plain) as old:
        old.within(connection).run("charge", "open", lambda: 1)

        with guard_on(plain) as guard, pytest.raises(StoreUnavailable, match="is still open, in process"):
            guard.run("charge", "l", lambda: 1)
        connection.commit()

    with guard_on(plain) as guard:
        assert not guard.run("charge", "l", lambda: 1).replayed
    assert rows(plain, TRIGGERS)
