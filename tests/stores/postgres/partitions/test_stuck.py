"""What keeps partitions from being sealed or dropped is bounded: by what is alive in them, and not by a wrong clock."""

from __future__ import annotations

import time

import psycopg
import pytest

from onefold._model import Address, Entry
from onefold.maintenance.purge import purge
from onefold.stores.postgres import open_store
from tests.stores.postgres.partitions.tools import drop, expire, guard_on, made_old, partitioned, seal, sealed
from tests.stores.postgres.tools import another, rows

LATER = 40 * 24 * 3600.0


def test_what_has_expired_is_deleted_in_each_partition_that_stays(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        for number in range(3):
            guard.run("charge", f"long{number}", lambda: 1, keep=LATER)
            guard.run("charge", f"short{number}", lambda: 1)
            seal(postgres_url)
        expire(postgres_url, "key ~ 'short'")

        removed = [guard.store.purge(10) for _ in range(4)]

    assert removed == [1, 1, 1, 0]
    assert rows(postgres_url, "SELECT key FROM onefold_records ORDER BY 1") == [(f"long{n}",) for n in range(3)]


def test_a_claim_that_runs_for_days_does_not_keep_what_has_expired_beside_it(postgres_url: str) -> None:
    store = open_store(partitioned(postgres_url))
    with guard_on(postgres_url) as guard:
        guard.run("charge", "short", lambda: 1)
        store.claim(Entry(address=Address("", "charge", "running"), token=b"t" * 16, lease=3600.0))
        seal(postgres_url)
        expire(postgres_url, "key = 'short'", ago=LATER)

        removed = guard.store.purge(10)
    store.close()

    assert removed == 1
    assert rows(postgres_url, "SELECT key FROM onefold_records") == [("running",)]


def test_a_purge_that_is_refused_something_deletes_all_that_has_expired_first(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        for key in "abcde":
            guard.run("charge", key, lambda: 1)
        expire(postgres_url)
        made_old(postgres_url)
        guard.run("charge", "alive", lambda: 1)
        with another(postgres_url) as connection:
            connection.execute("CREATE VIEW mine AS SELECT key FROM onefold_records")

        with pytest.raises(Exception, match="the table has the view mine"):
            purge(guard.store, batch=2)
    assert rows(postgres_url, "SELECT key FROM onefold_records") == [("alive",)]


def test_a_partition_that_was_dropped_by_hand_stops_no_purge(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "long", lambda: 1, keep=LATER)
        guard.run("charge", "short", lambda: 1)
        seal(postgres_url)
        expire(postgres_url, "key = 'short'")
        assert guard.store.purge(10) == 1
        with another(postgres_url) as connection:
            connection.execute(f"DROP TABLE {sealed(postgres_url)[0]}".encode())

        guard.run("charge", "new", lambda: 1)
        assert guard.store.purge(10) == 0


@pytest.mark.parametrize("ahead", [-LATER, LATER])
def test_a_clock_that_was_wrong_does_not_keep_the_partition_from_being_sealed(postgres_url: str, ahead: float) -> None:
    """It was a month fast, or slow, when the current partition began, and when a lock could not be had."""
    with guard_on(postgres_url) as guard:
        guard.run("charge", "a", lambda: 1)
        then = time.time() + ahead
        made_old(postgres_url, began=then)
        with another(postgres_url) as connection:
            connection.execute(f"COMMENT ON TABLE onefold_records_sealed IS 'locked {then}'".encode())

        guard.store.purge(10)

    assert len(sealed(postgres_url)) == 1


def test_a_lock_that_a_statement_timeout_ends_is_left_alone_for_a_while_too(postgres_url: str) -> None:
    """Otherwise every purge would let all claims wait for it again."""
    with guard_on(f"{postgres_url}?options=-cstatement_timeout%3D300ms") as guard:
        guard.run("charge", "a", lambda: 1)
        seal(postgres_url)
        expire(postgres_url)
        with psycopg.connect(postgres_url) as connection:
            connection.execute("SELECT count(*) FROM onefold_records")
            removed = guard.store.purge(10)
    note = rows(postgres_url, "SELECT obj_description('onefold_records_sealed'::regclass, 'pg_class')")

    assert removed == 0
    assert note[0][0].startswith("locked ")


def test_records_with_columns_of_the_users_own_are_moved(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "kept", lambda: 1, keep="forever")
        with another(postgres_url) as connection:
            connection.execute(
                "ALTER TABLE onefold_records ADD COLUMN mine text DEFAULT 'x', "
                "ADD COLUMN size integer GENERATED ALWAYS AS (length(key)) STORED"
            )
        seal(postgres_url)

        drop(postgres_url)

        assert guard.run("charge", "kept", lambda: 2).replayed
    assert sealed(postgres_url) == []
    assert rows(postgres_url, "SELECT key, mine, size FROM ONLY onefold_records") == [("kept", "x", 4)]
