"""One record for each address in all partitions together, whoever writes it, and whatever is sealed meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel

from onefold import Guard, InProgress, Policy
from onefold.stores.base import Query
from tests.stores.postgres.partitions.tools import (
    drop,
    expire,
    guard_on,
    partitioned,
    seal,
    sealed,
    where,
)
from tests.stores.postgres.tools import SCHEMA, another, balance, rows, somebody_waits

LEVELS = [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]
OLD_SNAPSHOTS = LEVELS[1:]


def test_a_duplicate_is_replayed_whatever_partition_its_record_is_in(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        for number in range(4):
            guard.run("charge", f"k{number}", partial(int, number))
            assert seal(postgres_url)

        again = [guard.run("charge", f"k{number}", lambda: 99) for number in range(4)]

    assert [(one.value, one.replayed) for one in again] == [(number, True) for number in range(4)]
    assert len(sealed(postgres_url)) == 4
    assert {name for number in range(4) for name in where(postgres_url, f"k{number}")} == set(sealed(postgres_url))


def test_a_claim_is_finished_in_the_partition_where_it_was_made(postgres_url: str) -> None:
    def handler() -> int:
        assert seal(postgres_url)
        with ThreadPoolExecutor(1) as pool, pytest.raises(InProgress):
            pool.submit(other.run, "charge", "k", lambda: 1).result()
        return 7

    with guard_on(postgres_url) as guard, guard_on(postgres_url) as other:
        outcome = guard.run("charge", "k", handler)
        again = guard.run("charge", "k", lambda: 8)

    assert (outcome.value, outcome.recorded, again.value, again.replayed) == (7, True, 7, True)
    assert where(postgres_url, "k") == sealed(postgres_url)


def test_a_key_whose_record_has_expired_in_a_sealed_partition_runs_again(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
        seal(postgres_url)
        expire(postgres_url, ago=1)

        outcome = guard.run("charge", "k", lambda: 2)
        again = guard.run("charge", "k", lambda: 3)

        assert [one.address.key for one in guard.store.browse(Query(), 10)] == ["k"]
    assert (outcome.value, outcome.replayed, again.value, again.replayed) == (2, False, 2, True)


# As whoever renews or ends a record in its last moment. Others may still see the version that has expired.
RENEWAL = "UPDATE onefold_records SET expires = date_part('epoch', clock_timestamp()) + 3600, due = due + 7"


def test_whoever_renews_a_record_as_it_expires_is_waited_for(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
        seal(postgres_url)
        expire(postgres_url, ago=1)
        with psycopg.connect(postgres_url) as connection, ThreadPoolExecutor(1) as pool:
            connection.execute(RENEWAL.encode())
            waiting = pool.submit(guard.run, "charge", "k", lambda: pytest.fail("it ran twice"))
            somebody_waits(postgres_url)
            connection.commit()
            duplicate = waiting.result()

    assert (duplicate.value, duplicate.replayed) == (1, True)
    assert where(postgres_url, "k") == sealed(postgres_url)


@pytest.mark.parametrize("level", OLD_SNAPSHOTS)
def test_a_snapshot_in_which_a_renewed_record_has_expired_is_a_serialization_failure(
    postgres_url: str, level: IsolationLevel
) -> None:
    with guard_on(postgres_url) as guard, Guard(postgres_url) as joined:
        guard.run("charge", "k", lambda: 1)
        seal(postgres_url)
        expire(postgres_url, ago=1)
        with old_transaction(postgres_url, level) as connection:
            with another(postgres_url) as other:
                other.execute(RENEWAL.encode())

            with pytest.raises(psycopg.errors.SerializationFailure):
                joined.within(connection).run("charge", "k", lambda: pytest.fail("it ran twice"))
            connection.rollback()
            assert joined.within(connection).run("charge", "k", lambda: 2).replayed


def test_an_address_has_one_record_in_all_partitions_also_if_others_have_expired(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        for number in range(3):
            guard.run("charge", "k", partial(int, number))
            seal(postgres_url)
            expire(postgres_url, ago=1)
        batch = guard.run_batch("charge", ["k", "l"], key=str, handler=lambda _: 3)

        assert guard.run("charge", "k", lambda: 4).value == 3
    assert [one.value for one in batch] == [3, 3]  # type: ignore[union-attr]
    assert where(postgres_url, "k") == ["onefold_records"]


def test_a_transaction_that_is_rolled_back_leaves_the_expired_record(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard, psycopg.connect(postgres_url) as connection:
        guard.run("charge", "k", lambda: 1)
        seal(postgres_url)
        expire(postgres_url, ago=1)

        guard.within(connection).run("charge", "k", lambda: 2)
        connection.rollback()

        assert where(postgres_url, "k") == sealed(postgres_url)
        assert guard.run("charge", "k", lambda: 3).value == 3


def test_every_client_is_kept_out_also_one_that_knows_nothing_of_partitions(postgres_url: str) -> None:
    from sqlalchemy import create_engine

    with guard_on(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
    seal(postgres_url)

    engine = create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    with Guard(postgres_url) as plain, Guard(engine) as through:
        outcomes = [one.run("charge", "k", lambda: 2) for one in (plain, through)]
        batch = plain.run_batch("charge", ["k", "new"], key=str, handler=lambda _: 3)
    with psycopg.connect(postgres_url) as connection, Guard(postgres_url) as joined:
        outcomes.append(joined.within(connection).run("charge", "k", lambda: 4))
        fresh = joined.within(connection).fresh("charge", ["k", "newer"], key=str)
    engine.dispose()

    assert [(one.value, one.replayed) for one in outcomes] == [(1, True)] * 3
    assert [one.value for one in batch] == [1, 3]  # type: ignore[union-attr]
    assert (fresh.new, fresh.seen) == (["newer"], ["k"])


def test_nothing_is_sealed_while_a_transaction_that_has_claimed_is_open(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "first", lambda: 1)
        with psycopg.connect(postgres_url) as connection:
            guard.within(connection).run("charge", "k", lambda: 1)

            was_sealed = seal(postgres_url, wait="50ms")
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(guard.run, "charge", "k", lambda: 2)
                somebody_waits(postgres_url)
                connection.commit()
                duplicate = waiting.result()

        assert not was_sealed
        assert duplicate.replayed
        assert seal(postgres_url)
        assert guard.run("charge", "k", lambda: 3).replayed


@contextmanager
def old_transaction(url: str, level: IsolationLevel) -> Iterator[psycopg.Connection[Any]]:
    """A transaction whose snapshot is taken now, if its level has one."""
    with psycopg.connect(url) as connection:
        connection.isolation_level = level
        connection.execute("SELECT count(*) FROM pg_class")
        yield connection


@pytest.mark.parametrize("level", OLD_SNAPSHOTS)
def test_a_snapshot_from_before_a_sealing_is_a_serialization_failure(postgres_url: str, level: IsolationLevel) -> None:
    ran: list[str] = []
    with guard_on(postgres_url) as guard, Guard(postgres_url) as joined:
        guard.run("charge", "first", lambda: 1)
        with old_transaction(postgres_url, level) as connection:
            guard.run("charge", "k", lambda: 1)
            assert seal(postgres_url)

            with pytest.raises(psycopg.errors.SerializationFailure):
                joined.within(connection).run("charge", "k", lambda: ran.append("k"))
            connection.rollback()
            again = joined.within(connection).run("charge", "k", lambda: ran.append("k"))

    assert again.replayed
    assert ran == []


@pytest.mark.parametrize("level", OLD_SNAPSHOTS)
def test_a_snapshot_from_before_a_move_is_a_serialization_failure(postgres_url: str, level: IsolationLevel) -> None:
    with guard_on(postgres_url) as guard, Guard(postgres_url) as joined:
        guard.run("charge", "first", lambda: 1)
        guard.run("charge", "k", lambda: 1, keep="forever")
        seal(postgres_url)
        expire(postgres_url, "key = 'first'")
        with old_transaction(postgres_url, level) as connection:
            drop(postgres_url)
            assert where(postgres_url, "k") == ["onefold_records"]

            # Either it says so, or it sees the record: it never runs.
            with pytest.raises(psycopg.errors.SerializationFailure):
                joined.within(connection).run("charge", "k", lambda: pytest.fail("it ran twice"))
            connection.rollback()


def test_at_read_committed_a_transaction_from_before_a_sealing_replays(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard, Guard(postgres_url) as joined:
        guard.run("charge", "first", lambda: 1)
        with old_transaction(postgres_url, IsolationLevel.READ_COMMITTED) as connection:
            guard.run("charge", "k", lambda: 1)
            assert seal(postgres_url)

            assert joined.within(connection).run("charge", "k", lambda: 2).replayed


def test_transactional_tries_again_after_a_sealing(postgres_url: str) -> None:
    with another(postgres_url) as connection:
        connection.execute(SCHEMA.encode())
    url = f"{partitioned(postgres_url)}&isolation=serializable"
    with Guard(url) as guard:

        @guard.transactional("credit", key="key")
        def credit(key: str, *, tx: Any) -> None:
            tx.execute("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")

        for key in "abc":
            credit(key)  # type: ignore[call-arg]
            assert seal(postgres_url)
            credit(key)  # type: ignore[call-arg]

    assert balance(postgres_url) == 30


def test_a_number_that_was_restored_with_a_dump_hinders_nobody(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
        seal(postgres_url)
        with another(postgres_url) as connection:
            connection.execute("DROP TRIGGER onefold_partitions ON onefold_records")
            connection.execute(
                "CREATE TRIGGER onefold_partitions BEFORE INSERT ON onefold_records FOR EACH ROW "
                "EXECUTE FUNCTION onefold_records_once('9000000000000', '1')"
            )

        outcomes = [guard.run("charge", key, lambda: 2) for key in ("k", "new")]

    assert [one.replayed for one in outcomes] == [True, False]


@pytest.mark.parametrize("level", LEVELS)
def test_of_many_transactions_beside_a_sealer_each_key_is_credited_once(
    postgres_url: str, level: IsolationLevel
) -> None:
    keys, workers = 40, 4
    with another(postgres_url) as connection:
        connection.execute(SCHEMA.encode())
        connection.execute("CREATE TABLE effects (key text)")
    with guard_on(postgres_url) as guard:
        guard.run("charge", "first", lambda: 1)
    ended = threading.Event()
    seals: list[bool] = []

    def work() -> None:
        with Guard(postgres_url) as joined, psycopg.connect(postgres_url) as connection:
            connection.isolation_level = level
            for number in range(keys):
                deliver(joined, connection, f"k{number}")

    def deliver(joined: Guard, connection: psycopg.Connection[Any], key: str) -> None:
        for _ in range(1_000):
            try:
                connection.execute("SELECT count(*) FROM wallet")
                joined.within(connection).run(
                    "credit", key, lambda: connection.execute("INSERT INTO effects VALUES (%s)", [key]).rowcount
                )
                connection.commit()
            except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
                connection.rollback()
            else:
                return
        raise AssertionError("it was never committed")

    def turn() -> None:
        while not ended.is_set():
            seals.append(seal(postgres_url))

    with ThreadPoolExecutor(workers + 1) as pool:
        turning = pool.submit(turn)
        try:
            for done in [pool.submit(work) for _ in range(workers)]:
                done.result()
        finally:
            ended.set()
        turning.result()

    counted = Counter(key for (key,) in rows(postgres_url, "SELECT key FROM effects"))
    assert counted == {f"k{number}": 1 for number in range(keys)}
    assert any(seals)


def test_of_many_claims_beside_a_sealer_and_a_dropper_each_key_runs_once(postgres_url: str) -> None:
    keys, workers = 60, 4
    ran: list[str] = []
    with guard_on(postgres_url) as guard:
        guard.run("charge", "first", lambda: 1)
    ended = threading.Event()

    def work() -> None:
        with guard_on(postgres_url, policy=Policy(wait=30)) as guard:
            for number in range(keys):
                guard.run("charge", f"k{number}", partial(ran.append, f"k{number}"), keep="forever")

    def turn() -> None:
        while not ended.is_set():
            # All are kept forever: a partition that is sealed is emptied at once, and dropped.
            seal(postgres_url)

    with ThreadPoolExecutor(workers + 1) as pool:
        turning = pool.submit(turn)
        try:
            for done in [pool.submit(work) for _ in range(workers)]:
                done.result()
        finally:
            ended.set()
        turning.result()

    assert Counter(ran) == {f"k{number}": 1 for number in range(keys)}
    assert rows(postgres_url, "SELECT count(*) FROM onefold_records WHERE key ~ '^k'") == [(keys,)]


def test_an_empty_partition_is_read_by_its_index_at_once(postgres_url: str) -> None:
    """A prepared statement keeps its plan while the table grows."""
    with guard_on(postgres_url) as guard:
        guard.store.purge(1)
        first = plan(postgres_url)
        guard.run("charge", "k", lambda: 1)
    seal(postgres_url)

    assert "Index Scan using onefold_records_pkey" in first
    assert "Index Scan using onefold_records_pkey" in plan(postgres_url)


def plan(url: str) -> str:
    address = "scope = '' AND operation = 'a' AND key = 'b'"
    return "\n".join(line for (line,) in rows(url, f"EXPLAIN UPDATE onefold_records SET revision = 1 WHERE {address}"))
