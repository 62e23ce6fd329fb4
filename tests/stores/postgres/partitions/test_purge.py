"""A sealed partition is dropped once all of its records have expired; what has not expired stays, whatever happens."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from onefold import Guard, Held, OutcomeUnknown
from onefold._concurrency.generators import run
from onefold._model import Address, Claim, Ending, Entry, State
from onefold.maintenance.purge import purge
from onefold.stores.postgres import open_store
from onefold.stores.postgres.partitions import turning
from onefold.stores.postgres.partitions.dialect import Turned
from onefold.stores.sql.dialect import SqlRequest
from tests.stores.postgres.partitions.tools import (
    TURNING_ONLY,
    drop,
    expire,
    guard_on,
    partitioned,
    seal,
    sealed,
    where,
)
from tests.stores.postgres.tools import another, rows, somebody_waits


def fill(guard: Guard, *keys: str, **options: Any) -> None:
    for key in keys:
        guard.run("charge", key, lambda: 1, **options)


def test_a_partition_is_dropped_with_all_that_has_expired_in_it(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with guard_on(postgres_url) as guard, caplog.at_level(logging.INFO, "onefold"):
        fill(guard, "a", "b", "c")
        seal(postgres_url)
        fill(guard, "d")
        before = guard.store.purge(10)
        expire(postgres_url, "key <> 'd'")

        done = purge(guard.store, batch=2)

    assert (before, done.removed, done.finished) == (0, 3, True)
    assert sealed(postgres_url) == []
    assert rows(postgres_url, "SELECT key FROM onefold_records") == [("d",)]
    assert "dropped a partition of onefold_records: about 3 records" in caplog.text


def test_no_row_of_a_dropped_partition_is_deleted_by_itself(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        fill(guard, "a", "b", "c")
        seal(postgres_url)
        (part,) = sealed(postgres_url)
        # Not long enough ago for a drop, and too long for a delete.
        expire(postgres_url, "key <> 'c'")
        expire(postgres_url, "key = 'c'", ago=1)

        removed = [guard.store.purge(10), guard.store.purge(10)]

    assert removed == [0, 0]
    assert rows(postgres_url, f"SELECT count(*) FROM {part}") == [(3,)]


def test_what_has_expired_in_the_current_partition_is_deleted(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        fill(guard, "a", "b", "c")
        expire(postgres_url, "key <> 'c'")

        removed = [guard.store.purge(1), guard.store.purge(10)]

    assert removed == [1, 1]
    assert sealed(postgres_url) == []


def test_one_record_that_has_not_expired_keeps_its_partition(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        fill(guard, "a", "b", "c")
        seal(postgres_url)
        expire(postgres_url, "key <> 'c'")

        dropped = drop(postgres_url)

        assert guard.run("charge", "c", lambda: 2).replayed
    assert dropped == 0
    assert where(postgres_url, "c") == sealed(postgres_url)


def unknown() -> None:
    raise OutcomeUnknown("it may have happened")


def test_held_open_and_forever_outlive_their_partition(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        fill(guard, "over")
        fill(guard, "forever", keep="forever")
        with pytest.raises((OutcomeUnknown, Held)):
            guard.run("charge", "held", unknown, after_crash="hold")
        seal(postgres_url)
        expire(postgres_url, "key = 'over'")
        before = rows(postgres_url, "SELECT key, state, token, revision, result FROM onefold_records ORDER BY key")

        dropped = drop(postgres_url)

        after = rows(postgres_url, "SELECT key, state, token, revision, result FROM onefold_records ORDER BY key")
        assert guard.run("charge", "forever", lambda: 2).replayed
        with pytest.raises(Held):
            guard.run("charge", "held", lambda: 2)
    assert dropped == 1
    assert after == [row for row in before if row[0] != "over"]
    assert sealed(postgres_url) == []


def test_a_running_claim_keeps_its_partition(postgres_url: str) -> None:
    def handler() -> int:
        seal(postgres_url)
        drop(postgres_url)
        return len(sealed(postgres_url))

    with guard_on(postgres_url) as guard:
        outcome = guard.run("charge", "k", handler, after_crash="hold")
        again = guard.run("charge", "k", lambda: 2)

    assert (outcome.value, outcome.recorded, again.replayed) == (1, True, True)


def test_too_many_to_be_moved_are_left_and_the_others_deleted(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with guard_on(postgres_url) as guard:
        fill(guard, "over")
        guard.run_batch("charge", list(range(turning.MOVED_MAX + 1)), key=str, handler=lambda _: None, keep="forever")
        seal(postgres_url)
        expire(postgres_url, "key = 'over'")

        removed = guard.store.purge(10)

    assert removed == 1
    assert rows(postgres_url, f"SELECT count(*) FROM {sealed(postgres_url)[0]}") == [(turning.MOVED_MAX + 1,)]


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_a_record_that_is_renewed_as_its_partition_is_about_to_be_dropped_stays(postgres_url: str, level: str) -> None:
    """Edge case 20. The purge has looked, and waits for the lock of a transaction that keeps the record."""
    set_default(postgres_url, level)
    with guard_on(postgres_url) as guard:
        fill(guard, "a", "b")
        seal(postgres_url)
        expire(postgres_url)
        with psycopg.connect(postgres_url) as connection:
            later = "date_part('epoch', clock_timestamp()) + 3600"
            connection.execute(
                f"UPDATE onefold_records SET expires = {later}, due = floor(({later}) / 600) WHERE key = 'a'".encode()
            )
            with ThreadPoolExecutor(1) as pool:
                dropping = pool.submit(drop, postgres_url, "30s")
                somebody_waits(postgres_url)
                connection.commit()
                dropped = dropping.result()

        assert dropped == 0
        assert guard.run("charge", "a", lambda: 2).replayed


def set_default(url: str, level: str) -> None:
    """Let the transactions of all sessions that are opened from now on have this level."""
    with another(url) as connection:
        database = urlsplit(url).path.removeprefix("/")
        connection.execute(f"ALTER DATABASE {database} SET default_transaction_isolation TO '{level}'".encode())


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_a_claim_that_ends_as_its_record_is_about_to_be_moved_has_ended(postgres_url: str, level: str) -> None:
    """The purge has looked, and waits for the lock: what it moves is the record as it is then."""
    set_default(postgres_url, level)
    with guard_on(postgres_url) as guard:
        fill(guard, "over")
        with pytest.raises((OutcomeUnknown, Held)):
            guard.run("charge", "k", unknown, after_crash="hold")
        seal(postgres_url)
        expire(postgres_url, "key = 'over'")
        with psycopg.connect(postgres_url) as connection:
            # As a claim that ends, and is kept forever.
            connection.execute(
                "UPDATE onefold_records SET state = 'done', held = NULL, due = NULL, expires = NULL WHERE key = 'k'"
            )
            with ThreadPoolExecutor(1) as pool:
                dropping = pool.submit(drop, postgres_url, "30s")
                somebody_waits(postgres_url)
                connection.commit()
                dropping.result()

    assert sealed(postgres_url) == []
    assert rows(postgres_url, "SELECT key, state FROM onefold_records") == [("k", "done")]


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_a_claim_that_ends_while_its_record_is_moved_has_ended(postgres_url: str, level: str) -> None:
    """It waits behind the purge, and looks for its record where it was, or where it is now: not nowhere."""
    set_default(postgres_url, level)
    entry = Entry(address=Address("", "charge", "k"), token=b"t" * 16)
    store = open_store(partitioned(postgres_url))
    with Guard(store) as guard:
        fill(guard, "over")
        store.claim(entry)
        seal(postgres_url)
        expire(postgres_url, "key = 'over'")
        with psycopg.connect(postgres_url) as connection, ThreadPoolExecutor(2) as pool:
            connection.execute("SELECT count(*) FROM onefold_records")
            dropping = pool.submit(drop, postgres_url, "30s")
            somebody_waits(postgres_url)
            ending = pool.submit(
                store.finish, Claim(entry.address, entry.token), Ending(state=State.DONE, ttl=math.inf)
            )
            somebody_waits(postgres_url, 2)
            connection.commit()
            finished, dropped = ending.result(), dropping.result()
    store.close()

    assert (finished, dropped) == (True, 1)
    assert rows(postgres_url, "SELECT key, state FROM onefold_records") == [("k", "done")]


def test_a_lock_that_cannot_be_had_is_left_alone_for_a_while(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        fill(guard, "a")
        seal(postgres_url)
        expire(postgres_url)
        with psycopg.connect(postgres_url) as connection:
            connection.execute("SELECT count(*) FROM onefold_records")
            tried = [guard.store.purge(10)]
            note = rows(postgres_url, NOTE)
            connection.commit()
        # Nobody is in the way now, but it was tried a moment ago.
        tried.append(guard.store.purge(10))
        left = sealed(postgres_url)
        with another(postgres_url) as connection:
            connection.execute(f"COMMENT ON TABLE onefold_records_sealed IS 'locked {1.0}'".encode())
        tried.append(guard.store.purge(10))

    assert note[0][0].startswith("locked ")
    assert tried == [0, 0, 1]
    assert len(left) == 1
    assert sealed(postgres_url) == []


NOTE = "SELECT obj_description('onefold_records_sealed'::regclass, 'pg_class')"


def test_many_purges_at_once_drop_each_partition_once(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        for number in range(3):
            fill(guard, f"a{number}", f"b{number}")
            seal(postgres_url)
        expire(postgres_url)
        begin = threading.Barrier(4)

        def together(_: int) -> Any:
            begin.wait()
            return guard.store.purge(10)

        with ThreadPoolExecutor(4) as pool:
            removed = sum(pool.map(together, range(4)))
        removed += drop(postgres_url)

    assert sealed(postgres_url) == []
    # None is counted twice. One that another purge drops just after ours hides how many were in ours.
    assert 2 <= removed <= 6


@pytest.mark.parametrize(
    ("note", "dropped"),
    [
        ("dropped 6 7 1.5", True),
        ("dropped 6 8 1.5", False),
        ("moved 6 7 1.5", False),
        ("stuck a.b", False),
        (None, False),
    ],
)
def test_a_partition_is_counted_by_the_session_that_has_dropped_it(note: str | None, dropped: bool) -> None:
    """The others find its note as well: of four purges at once, each would count what one of them has dropped."""
    assert Turned(age=0.0, is_allowed=True, sealed=1, note=note, backend=7).has_dropped is dropped


class Pooled:
    """Sends each statement over another connection, as a pooler may."""

    def __init__(self, *connections: Any) -> None:
        self._connections = itertools.cycle(connections)

    def send(self, request: SqlRequest) -> Any:
        return next(self._connections).send(request)


def test_behind_a_pooler_a_purge_does_not_end_after_its_first_step(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        for number in range(3):
            fill(guard, f"over{number}")
            fill(guard, f"forever{number}", keep="forever")
            seal(postgres_url)
        expire(postgres_url, "key ~ 'over'")

        pool = guard.store._pool
        with pool.acquire() as one, pool.acquire() as another_one:
            run(TURNING_ONLY.turn("5s", 0), Pooled(one, another_one))

    assert sealed(postgres_url) == []
    assert rows(postgres_url, "SELECT count(*) FROM onefold_records") == [(3,)]


def test_a_view_on_a_partition_keeps_it_and_says_so(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        fill(guard, "a")
        with another(postgres_url) as connection:
            seal(postgres_url)
            connection.execute(f"CREATE VIEW mine AS SELECT key FROM {sealed(postgres_url)[0]}".encode())
        fill(guard, "b", "c")
        expire(postgres_url, "key <> 'c'")

        with pytest.raises(Exception, match="other objects depend on it"):
            guard.store.purge(10)
    assert len(sealed(postgres_url)) == 1
    # What has expired in the current partition is deleted all the same.
    assert rows(postgres_url, "SELECT key FROM ONLY onefold_records") == [("c",)]


def test_the_store_seals_by_itself_once_the_period_is_over(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        fill(guard, "a")
        guard.store.purge(10)
        young = sealed(postgres_url)
        with another(postgres_url) as connection:
            connection.execute("DROP TRIGGER onefold_partitions ON onefold_records")
            connection.execute(
                "CREATE TRIGGER onefold_partitions BEFORE INSERT ON onefold_records FOR EACH ROW "
                "EXECUTE FUNCTION onefold_records_once('1', '1')"
            )
        guard.store.purge(10)
        old = sealed(postgres_url)
        guard.store.purge(10)

    assert (len(young), len(old), len(sealed(postgres_url))) == (0, 1, 1)


def test_whoever_comes_second_does_not_seal_the_new_partition(postgres_url: str) -> None:
    """Both have seen that it was due; one of them has sealed it meanwhile."""
    with guard_on(postgres_url) as guard:
        fill(guard, "a")
        seal(postgres_url)
        fill(guard, "b")
        with another(postgres_url) as connection:
            connection.execute(turning.sealing(period=3600.0, wait="1s", retry=0).encode())

    assert len(sealed(postgres_url)) == 1


def test_an_empty_partition_is_not_sealed(postgres_url: str) -> None:
    store = open_store(partitioned(postgres_url))
    store.purge(1)
    store.close()

    assert not seal(postgres_url)


def test_no_more_are_sealed_than_a_claim_can_look_into(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turning, "_SEAL", turning._SEAL.replace(f">= {turning.SEALED_MAX}", ">= 2"))
    with guard_on(postgres_url) as guard:
        was_sealed = []
        for key in "abcd":
            fill(guard, key)
            was_sealed.append(seal(postgres_url))

    assert was_sealed == [True, True, False, False]
