"""Batches, transactions and kept offsets, both clients: neighbours of a poison message are finished."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from onefold import Guard, Policy, UsageError
from onefold.queues.kafka_offsets import Offsets
from onefold.queues.keys import body, header
from tests.queues.kafka_tools import (
    SHORT_SESSION_MS,
    WORKERS,
    Wallet,
    awaited_transaction,
    committed,
    headers_of,
    letters_in,
    produce,
    value_of,
)
from tests.support import PATIENCE, Handler


@pytest.fixture(params=sorted(WORKERS))
def worker(request: pytest.FixtureRequest) -> Any:
    return WORKERS[request.param]


@pytest.fixture
def wallet(tmp_path: Path) -> Wallet:
    return Wallet(tmp_path / "wallet.db")


@pytest.fixture
def store(wallet: Wallet) -> str:
    return f"sqlite:///{wallet.path}"


def offsets_of(worker: Any, wallet: Wallet) -> Offsets:
    transaction: Callable[[], Any] = awaited_transaction(wallet.begin) if worker.is_async else wallet.begin
    offsets = Offsets(transaction, group="wallet")
    with wallet.begin() as tx:
        offsets.create(tx)
    return offsets


class TestWholeBatches:
    """`handle.batch`, in claim mode."""

    def test_of_two_equal_keys_one_runs(self, worker: Any, kafka_url: str, kafka_topic: str) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"), ("a", b"1"), ("b", b"2"))
        seen: list[bytes] = []

        with worker(kafka_url, kafka_topic, lambda message: seen.append(value_of(message)), poll=10) as one:
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 3)

        assert seen == [b"1", b"2"]

    def test_one_poison_message_does_not_fail_its_neighbours(
        self, worker: Any, kafka_url: str, kafka_topic: str
    ) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"), ("p", b"poison"), ("b", b"2"))
        produce(kafka_url, kafka_topic, ("c", b"elsewhere"), partition=1)
        seen: list[bytes] = []
        commits: list[int] = []

        def handler(message: Any) -> None:
            if value_of(message) == b"poison":
                commits.append(committed(kafka_url, kafka_topic, kafka_topic))
                raise ValueError("cannot be done")
            seen.append(value_of(message))

        with worker(kafka_url, kafka_topic, handler, poll=10, attempts=3) as one:
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 3)
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic, 1) == 1)

        # The neighbours ran once, at once; the offset stayed below the unfinished one.
        assert sorted(seen) == [b"1", b"2", b"elsewhere"]
        assert len(commits) == 3
        assert max(commits) <= 1
        (letter,) = letters_in(kafka_url, f"{kafka_topic}.dead", 1)
        assert headers_of(letter)["x-onefold-offset"] == b"1"

    @pytest.mark.parametrize("poll", [0, 10], ids=["one by one", "batches"])
    def test_a_used_key_with_another_body_is_buried_where_bodies_are_compared(
        self, worker: Any, kafka_url: str, kafka_topic: str, poll: int
    ) -> None:
        produce(kafka_url, kafka_topic, ("a", b"10 EUR"), ("a", b"10 EUR"), ("a", b"99 EUR"))
        seen: list[bytes] = []

        def handler(message: Any) -> None:
            seen.append(value_of(message))

        with worker(kafka_url, kafka_topic, handler, poll=poll, payload=body()) as one:
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 3)

        assert seen == [b"10 EUR"]
        (letter,) = letters_in(kafka_url, f"{kafka_topic}.dead", 1)
        assert letter.value() == b"99 EUR"
        assert b"another payload" in headers_of(letter)["x-onefold-reason"]

    def test_nothing_is_committed_above_what_is_held_until_that_is_buried(
        self, worker: Any, kafka_url: str, kafka_topic: str, wallet: Wallet, store: str
    ) -> None:
        with Guard(store, policy=Policy(after_crash="hold")) as guard, pytest.raises(TimeoutError):
            guard.run("credit", "held", Handler(error=TimeoutError()))
        produce(kafka_url, kafka_topic, ("a", b"1"), ("held", b"held"), ("b", b"2"))
        seen: list[bytes] = []

        def handler(message: Any) -> None:
            seen.append(value_of(message))

        # The second one of a group waits for the session of the first, on the mock.
        config = {"session_timeout_ms" if worker.is_async else "session.timeout.ms": SHORT_SESSION_MS}
        made: dict[str, Any] = {"poll": 10, "store": store, "consumer_config": config}
        with worker(kafka_url, kafka_topic, handler, **made) as one:
            one.until(lambda: len(seen) == 2)
            for _ in range(3):
                one.step()
        assert seen == [b"1", b"2"]
        assert committed(kafka_url, kafka_topic, kafka_topic) == 1

        with worker(kafka_url, kafka_topic, handler, **made, held_times=0) as one:
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 3)
        assert seen == [b"1", b"2"]
        (letter,) = letters_in(kafka_url, f"{kafka_topic}.dead", 1)
        assert b"Held" in headers_of(letter)["x-onefold-reason"]


class TestOneTransaction:
    """`guarded_batches`: a poll is one transaction."""

    def test_a_poll_is_one_call_and_duplicates_are_left_out(
        self, worker: Any, kafka_url: str, kafka_topic: str, wallet: Wallet, store: str
    ) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"), ("a", b"1"), ("b", b"2"))

        with worker(kafka_url, kafka_topic, wallet.credit_all, store=store, poll=10, transaction=wallet.begin) as one:
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 3)

        assert wallet.credits == ["1", "2"]
        assert sum(wallet.calls) == 2

    def test_a_used_key_with_another_body_is_buried_where_bodies_are_compared(
        self, worker: Any, kafka_url: str, kafka_topic: str, wallet: Wallet, store: str
    ) -> None:
        produce(kafka_url, kafka_topic, ("a", b"10 EUR"), ("a", b"10 EUR"), ("a", b"99 EUR"))
        options = {"store": store, "poll": 10, "transaction": wallet.begin, "payload": body()}

        with worker(kafka_url, kafka_topic, wallet.credit_all, **options) as one:
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 3)

        assert wallet.credits == ["10 EUR"]
        (letter,) = letters_in(kafka_url, f"{kafka_topic}.dead", 1)
        assert letter.value() == b"99 EUR"

    def test_a_poison_message_fails_alone(
        self, worker: Any, kafka_url: str, kafka_topic: str, wallet: Wallet, store: str
    ) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"), ("p", b"poison"), ("b", b"2"), (None, b"keyless"))

        with worker(
            kafka_url, kafka_topic, wallet.credit_all, store=store, poll=10, transaction=wallet.begin, attempts=2
        ) as one:
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 4)

        assert sorted(wallet.credits) == ["1", "2"]
        letters = letters_in(kafka_url, f"{kafka_topic}.dead", 2)
        assert {letter.value() for letter in letters} == {b"poison", b"keyless"}

    def test_a_database_that_is_away_fails_no_message(
        self, worker: Any, kafka_url: str, kafka_topic: str, wallet: Wallet, store: str
    ) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"))
        wallet.down, refused = True, []
        begin = wallet.begin

        def opened() -> Any:
            refused.append(wallet.down)
            return begin()

        with worker(
            kafka_url, kafka_topic, wallet.credit_all, store=store, poll=10, transaction=opened, attempts=1
        ) as one:
            one.until(lambda: bool(refused))
            assert committed(kafka_url, kafka_topic, kafka_topic) == 0
            wallet.down = False
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 1)

        assert wallet.credits == ["1"]

    def test_the_offsets_are_kept_with_the_work_and_below_what_is_unfinished(
        self, worker: Any, kafka_url: str, kafka_topic: str, wallet: Wallet, store: str
    ) -> None:
        offsets = offsets_of(worker, wallet)
        produce(kafka_url, kafka_topic, ("a", b"1"), ("p", b"poison"), ("b", b"2"))
        produce(kafka_url, kafka_topic, ("c", b"3"), partition=1)

        with worker(
            kafka_url,
            kafka_topic,
            wallet.credit_all,
            store=store,
            poll=10,
            transaction=wallet.begin,
            offsets=offsets,
            backoff=PATIENCE,
        ) as one:
            one.until(lambda: len(wallet.credits) == 3)

        assert wallet.next_offsets() == [(kafka_topic, 0, 1), (kafka_topic, 1, 1)]

    # aiokafka has no cooperative protocol.
    @pytest.mark.parametrize(
        ("client", "strategy"), [("aiokafka", None), ("confluent", "range"), ("confluent", "cooperative-sticky")]
    )
    def test_a_group_that_has_lost_its_offsets_begins_where_the_work_is(
        self, client: str, strategy: str | None, kafka_url: str, kafka_topic: str, wallet: Wallet, store: str
    ) -> None:
        worker = WORKERS[client]
        offsets, read = offsets_of(worker, wallet), []
        produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))

        def key(message: Any) -> object:
            read.append(message.body)
            return header()(message)

        config = {} if strategy is None else {"partition.assignment.strategy": strategy}
        made: dict[str, Any] = {"store": store, "offsets": offsets, "key": key, "consumer_config": config}
        with worker(kafka_url, kafka_topic, wallet.credit, **made) as one:
            one.until(lambda: len(wallet.credits) == 2)
        produce(kafka_url, kafka_topic, ("c", b"3"))
        with worker(kafka_url, kafka_topic, wallet.credit, group=f"{kafka_topic}.new", **made) as one:
            one.until(lambda: len(wallet.credits) == 3)

        assert read == [b"1", b"2", b"3"]
        assert wallet.next_offsets() == [(kafka_topic, 0, 3)]


class TestOffsets:
    """The table by itself."""

    def test_they_never_go_back(self, wallet: Wallet) -> None:
        offsets = Offsets(wallet.begin, group="wallet")

        with wallet.begin() as tx:
            offsets.create(tx)
            for next_offset in (5, 3, 7, 6):
                offsets.save(tx, "payments", 0, next_offset)

        assert offsets.load([("payments", 0), ("payments", 1)]) == {("payments", 0): 7}
        assert Offsets(wallet.begin, group="other").load([("payments", 0)]) == {}

    def test_they_go_back_with_the_work(self, wallet: Wallet) -> None:
        offsets = Offsets(wallet.begin, group="wallet")
        with wallet.begin() as tx:
            offsets.create(tx)

        def fail(tx: Any) -> None:
            offsets.save(tx, "payments", 0, 5)
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"), wallet.begin() as tx:
            fail(tx)

        assert offsets.load([("payments", 0)]) == {}

    @pytest.mark.parametrize("driver", ["psycopg", "sqlalchemy", "session", "pymysql"])
    def test_they_are_kept_by_every_driver(
        self, driver: str, postgres_url: str, request: pytest.FixtureRequest
    ) -> None:
        if driver == "pymysql":
            transaction = _pymysql(request.getfixturevalue("mysql_url"))
        else:
            transaction = _on_postgres(driver, postgres_url)
        offsets = Offsets(transaction, group="wallet")

        with transaction() as tx:
            offsets.create(tx)
        for next_offset in (5, 3, 7, 7):
            with transaction() as tx:
                offsets.save(tx, "payments", 2, next_offset)

        assert offsets.load([("payments", 2)]) == {("payments", 2): 7}

    @pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "sqlalchemy"])
    def test_they_are_kept_by_every_async_driver(self, driver: str, postgres_url: str) -> None:
        async def story() -> Any:
            transaction = _on_postgres_async(driver, postgres_url)
            offsets = Offsets(transaction, group="wallet")
            async with transaction() as tx:
                await offsets.create_async(tx)
            for next_offset in (5, 3, 7, 7):
                async with transaction() as tx:
                    await offsets.save_async(tx, "payments", 2, next_offset)
            return await offsets.load_async([("payments", 2)])

        assert asyncio.run(story()) == {("payments", 2): 7}

    def test_a_table_has_a_plain_name(self, wallet: Wallet) -> None:
        with pytest.raises(UsageError, match="plain name"):
            Offsets(wallet.begin, group="g", table="x; DROP TABLE credits")

    def test_they_need_a_transaction(self, worker: Any, kafka_url: str, kafka_topic: str, wallet: Wallet) -> None:
        with pytest.raises(UsageError, match="has to take tx"):
            worker(kafka_url, kafka_topic, lambda _: None, offsets=Offsets(wallet.begin, group="g"))


class _Counting(sqlite3.Connection):
    """A connection that knows its cursors."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.opened: list[sqlite3.Cursor] = []

    def cursor(self, *given: Any) -> Any:
        self.opened.append(super().cursor(*given))
        return self.opened[-1]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_statement_that_fails_leaves_no_cursor_open(is_async: bool) -> None:
    offsets = Offsets(lambda: None, group="wallet")

    def save(tx: Any) -> None:
        if is_async:
            asyncio.run(offsets.save_async(tx, "payments", 0, 1))
        else:
            offsets.save(tx, "payments", 0, 1)

    with closing(sqlite3.connect(":memory:", factory=_Counting)) as tx:
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            save(tx)
        (cursor,) = tx.opened
        with pytest.raises(sqlite3.ProgrammingError, match="closed cursor"):
            cursor.fetchone()


def _on_postgres(driver: str, url: str) -> Callable[[], Any]:
    import psycopg
    import sqlalchemy
    from sqlalchemy.orm import sessionmaker
    from sqlalchemy.pool import NullPool

    if driver == "psycopg":
        return lambda: psycopg.connect(url)
    engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    return engine.begin if driver == "sqlalchemy" else sessionmaker(engine).begin


def _pymysql(url: str) -> Callable[[], Any]:
    from urllib.parse import urlsplit

    import pymysql

    @contextmanager
    def transaction() -> Iterator[Any]:
        parts = urlsplit(url)
        connection = pymysql.connect(
            host=parts.hostname,
            port=parts.port or 3306,
            user=parts.username,
            password=parts.password or "",
            database=parts.path.lstrip("/"),
        )
        with connection:
            yield connection
            connection.commit()

    return transaction


def _on_postgres_async(driver: str, url: str) -> Callable[[], Any]:
    from contextlib import asynccontextmanager

    import asyncpg
    import psycopg
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    @asynccontextmanager
    async def opened() -> Any:
        if driver == "psycopg":
            async with await psycopg.AsyncConnection.connect(url) as connection:
                yield connection
            return
        raw = await asyncpg.connect(url)
        async with raw.transaction():
            yield raw
        await raw.close()

    if driver != "sqlalchemy":
        return opened
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"), poolclass=NullPool)
    return engine.begin
