"""Records count their duplicates on every store, sync and async, and never keep a duplicate waiting for a lock."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from onefold import AsyncGuard, Guard, Record
from onefold.stores.sql.records import TABLE
from tests.support import in_time

KINDS = (
    *("memory", "sqlite", "postgres", "pgbouncer", "mysql", "dynamodb"),
    *("redis", "valkey", "redis_cluster", "valkey_cluster"),
)


@pytest.fixture
def memory_url() -> str:
    return "memory:"


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/records.db"


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


def told(record: Record | None) -> dict[str, Any]:
    """Everything that a count must not change."""
    assert record is not None
    left_out = {"revision", "notes", "lease_left", "ttl_left", "age"}
    return {name: getattr(record, name) for name in record.__struct_fields__ if name not in left_out}


@pytest.mark.parametrize("keep", ["1h", "forever"])
def test_a_record_counts_what_it_answers(url: str, keep: str) -> None:
    with Guard(url, count_duplicates=True, keep=keep) as guard:
        guard.run("charge", "k", lambda: {"paid": 7}, payload=1)
        before = guard.read("charge", "k")

        outcomes = [guard.run("charge", "k", lambda: None, payload=1) for _ in range(20)]

        after = guard.read("charge", "k")
    assert before is not None
    assert after is not None
    assert [outcome.value for outcome in outcomes] == [{"paid": 7}] * 20
    assert (before.duplicates, after.duplicates, after.revision) == (0, 20, before.revision + 20)
    assert told(after) == told(before)
    assert after.ttl_left <= before.ttl_left


def test_a_record_counts_what_it_answers_async(url: str) -> None:
    async def paid() -> str:
        return "paid"

    async def story() -> int:
        async with AsyncGuard(url, count_duplicates=True) as guard:
            for _ in range(4):
                await guard.run("charge", "k", paid)
            batch = await guard.run_batch("charge", ["k"], key=str, handler=lambda _: paid())
            record = await guard.read("charge", "k")
        assert [getattr(one, "value", one) for one in batch] == ["paid"]
        assert record is not None
        return record.duplicates

    assert in_time(story()) == 4


@contextmanager
def locked_row(url: str, tmp_path: Path) -> Iterator[None]:
    """Hold the record, as a transaction of somebody else does. On MariaDB, the claim itself would wait for it."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(tmp_path / "records.db", isolation_level=None)) as file:
            file.execute("BEGIN IMMEDIATE")
            yield
            file.execute("ROLLBACK")
    else:
        with psycopg.connect(url) as session:
            session.execute(f"SELECT 1 FROM {TABLE} FOR UPDATE")
            yield
            session.rollback()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_locked_record_answers_and_is_not_counted(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = str(request.getfixturevalue(f"{kind}_url"))
    with Guard(url, count_duplicates=True) as guard:
        guard.run("charge", "k", lambda: "paid")
        with locked_row(url, tmp_path):
            during = guard.run("charge", "k", lambda: "again")
        assert guard.run("charge", "k", lambda: None).value == "paid"
        record = guard.read("charge", "k")

    assert (during.value, during.replayed) == ("paid", True)
    assert record is not None
    assert record.duplicates == 1


def test_a_duplicate_inside_a_transaction_of_the_same_file_does_not_wait_for_itself(tmp_path: Path) -> None:
    """The transaction around it has the only right to write, and ends after it."""
    guard = Guard(f"sqlite:///{tmp_path}/records.db?busy_timeout=60s")
    guard.run("mail", "m", lambda: "sent")

    @guard.transactional("credit", key="id")
    def credit(id: str, *, tx: Any = None) -> str:  # noqa: A002 - the name of the key
        tx.execute("CREATE TABLE IF NOT EXISTS wallet (balance)")
        return guard.run("mail", "m", lambda: "again", count_duplicates=True).value

    assert credit("c") == "sent"
    guard.close()
