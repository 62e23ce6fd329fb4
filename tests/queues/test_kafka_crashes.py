"""A Kafka worker killed after the effect and before the commit of its offset; and messages on their way out."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer

from onefold import Guard, MissingKey, Policy, current
from onefold.queues._kafka import partitions as kafka_partitions
from services.kafka import bootstrap
from services.servers import Server
from tests.processes import Notes, Stage, child, lapse
from tests.queues.kafka_tools import SHORT_SESSION_MS, WORKERS, committed, headers_of, letters_in, produce, value_of

# No pause of the machine outlasts it; after a kill its end is brought about.
LEASE = 3_600.0

# A message that fails waits for longer than its test.
LONG = 3_600.0


@pytest.fixture(params=["confluent", pytest.param("aiokafka", marks=pytest.mark.more)])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stopping_consumer(client: str, stage: Stage) -> type[Any]:
    """A consumer that comes on the stage before an offset is committed."""

    class StoppingConsumer(Consumer):
        def commit(self, *args: Any, **kwargs: Any) -> Any:
            stage.at("before the commit")
            return super().commit(*args, **kwargs)

    class StoppingAsyncConsumer(AIOKafkaConsumer):  # type: ignore[misc]
        async def commit(self, offsets: Any = None) -> None:
            stage.at("before the commit")
            await super().commit(offsets)

    return StoppingConsumer if client == "confluent" else StoppingAsyncConsumer


def credit_in_transaction(stage: Stage, client: str, url: str, topic: str, store: str) -> None:
    mark = "?" if store.startswith("sqlite") else "%s"

    def credit(message: Any, *, tx: Any) -> Any:
        return tx.execute(f"INSERT INTO credits VALUES ({mark})", (value_of(message).decode(),))

    _work(stage, client, url, topic, credit, store=store)


def credit_batches(stage: Stage, client: str, url: str, topic: str, path: Path) -> None:
    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")

    def credit(messages: list[Any], *, tx: sqlite3.Connection) -> None:
        tx.executemany("INSERT INTO credits VALUES (?)", [(value_of(message).decode(),) for message in messages])

    _work(stage, client, url, topic, credit, messages=2, store=f"sqlite:///{path}", poll=10, transaction=begin)


def charge_by_claim(stage: Stage, client: str, url: str, topic: str, path: Path, after_crash: Any) -> None:
    def charge(_message: Any) -> None:
        Notes(path / "charges").add(current().key_for("gateway"))
        stage.at("after the effect")

    policy = Policy(lease=LEASE, after_crash=after_crash)
    _work(stage, client, url, topic, charge, store=f"sqlite:///{path / 'records.db'}", policy=policy, held_times=0)


def _work(stage: Stage, client: str, url: str, topic: str, handler: Any, *, messages: int = 1, **options: Any) -> None:
    # The broker gives the partitions of the dead one to the next when its session has ended.
    name = "session.timeout.ms" if client == "confluent" else "session_timeout_ms"
    options |= {"consumer_kind": stopping_consumer(client, stage), "consumer_config": {name: 1500}}
    with WORKERS[client](url, topic, handler, **options) as worker:
        worker.until(lambda: committed(url, topic, topic) == messages)


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.more)])
def test_a_worker_killed_before_the_commit_leaves_one_effect_in_transactional_mode(
    client: str, kafka_url: str, kafka_topic: str, tmp_path: Path, database: str, request: pytest.FixtureRequest
) -> None:
    store = f"sqlite:///{tmp_path / 'w.db'}" if database == "sqlite" else request.getfixturevalue("postgres_url")

    def ask(statement: str) -> list[Any]:
        if database == "postgres":
            with psycopg.connect(store) as postgres:
                cursor = postgres.execute(statement)
                return cursor.fetchall() if cursor.description else []
        with closing(sqlite3.connect(tmp_path / "w.db")) as connection, connection:
            return connection.execute(statement).fetchall()

    ask("CREATE TABLE credits (body TEXT)")
    produce(kafka_url, kafka_topic, ("a", b"1"))

    with child(credit_in_transaction, client, kafka_url, kafka_topic, store, stops=("before the commit",)) as first:
        first.reaches("before the commit")
        first.kill()
    assert (ask("SELECT * FROM credits"), committed(kafka_url, kafka_topic, kafka_topic)) == ([("1",)], 0)
    with child(credit_in_transaction, client, kafka_url, kafka_topic, store) as second:
        assert second.hear() is None

    assert ask("SELECT * FROM credits") == [("1",)]


def test_a_worker_killed_before_the_commit_of_a_whole_poll_leaves_one_effect_of_each(
    client: str, kafka_url: str, kafka_topic: str, tmp_path: Path
) -> None:
    path = tmp_path / "w.db"
    with Guard(f"sqlite:///{path}") as guard, closing(sqlite3.connect(path)) as connection:
        guard.run("other", "k", lambda: None)
        connection.execute("CREATE TABLE credits (body TEXT)")
    produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))

    with child(credit_batches, client, kafka_url, kafka_topic, path, stops=("before the commit",)) as first:
        first.reaches("before the commit")
        first.kill()
    assert committed(kafka_url, kafka_topic, kafka_topic) == 0
    with child(credit_batches, client, kafka_url, kafka_topic, path) as second:
        assert second.hear() is None

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT body FROM credits ORDER BY body").fetchall() == [("1",), ("2",)]


@pytest.mark.parametrize(
    ("after_crash", "charges", "buried"),
    # Again with the same downstream key; once, and a person is asked; once, and nobody is.
    [("rerun", 2, 0), ("hold", 1, 1), pytest.param("skip", 1, 0, marks=pytest.mark.more)],
)
def test_a_worker_killed_in_claim_mode_follows_its_policy(
    client: str, kafka_url: str, kafka_topic: str, tmp_path: Path, after_crash: str, charges: int, buried: int
) -> None:
    produce(kafka_url, kafka_topic, ("a", b"1"))
    args = (charge_by_claim, client, kafka_url, kafka_topic, tmp_path, after_crash)

    with child(*args, stops=("after the effect",)) as first:
        first.reaches("after the effect")
        first.kill()
    lapse(tmp_path / "records.db")
    with child(*args) as second:
        assert second.hear() is None

    found = Notes(tmp_path / "charges").read()
    assert len(found) == charges
    assert len(set(found)) == 1
    letters = letters_in(kafka_url, f"{kafka_topic}.dead", buried)
    assert all(b"Held" in headers_of(letter)["x-onefold-reason"] for letter in letters)


class TestSend:
    """A sender mints the key once, and keeps it."""

    def test_it_mints_a_key_and_waits_until_the_message_is_there(
        self, client: str, kafka_url: str, kafka_topic: str
    ) -> None:
        with WORKERS[client](kafka_url, kafka_topic, print, subscribe=False) as one:
            minted = one.send(kafka_topic, b"1", partition_by="account", headers={"trace": "t"})
            again = one.send(kafka_topic, b"1", key=minted, partition_by="account")
            other = one.send(kafka_topic, b"1", key=42)

        assert (again, other) == (minted, "42")
        messages = letters_in(kafka_url, kafka_topic, 3)
        keys = sorted(headers_of(message)["idempotency-key"] for message in messages)
        assert keys == sorted([minted.encode(), minted.encode(), b"42"])
        same = [message for message in messages if message.key() == b"account"]
        assert len({message.partition() for message in same}) == 1
        assert {headers_of(message).get("trace") for message in same} == {b"t", None}

    @pytest.mark.parametrize("key", ["", "  ", "k" * 1000, 1.5, True])
    def test_what_cannot_be_a_key_is_refused(self, client: str, kafka_url: str, kafka_topic: str, key: Any) -> None:
        with WORKERS[client](kafka_url, kafka_topic, print, subscribe=False) as one, pytest.raises(MissingKey):
            one.send(kafka_topic, b"1", key=key)

    def test_what_is_not_confirmed_is_told_with_the_key_to_send_it_with_again(
        self, client: str, own_kafka: Server
    ) -> None:
        url = bootstrap(own_kafka.url)
        with WORKERS[client](url, "payments", print, subscribe=False) as one:
            one.send("payments", b"0")
            own_kafka.stop()
            try:
                with pytest.raises(one.adapter.NotConfirmed, match="not confirmed by payments") as caught:
                    one.send("payments", b"1", within=0.3)
            finally:
                own_kafka.cont()
            key = caught.value.key
            assert key not in str(caught.value)
            assert one.send("payments", b"1", key=key) == key

        values = [(m.value(), headers_of(m)["idempotency-key"]) for m in letters_in(url, "payments", 3)]
        assert values.count((b"1", key.encode())) == 2


def fail_for_ever(stage: Stage, url: str, topic: str, store: str) -> None:
    def fails(_message: Any) -> None:
        stage.tell("failed")
        raise ValueError("not yet")

    config = {"session.timeout.ms": SHORT_SESSION_MS}
    with WORKERS["confluent"](url, topic, fails, store=store, backoff=LONG, consumer_config=config) as worker:
        worker.until(lambda: False)


# The mock takes its time to notice that a member has died; one that leaves is in test_kafka_rebalance.py.
@pytest.mark.more
def test_a_consumer_joins_while_partitions_wait_and_is_killed_and_all_of_them_are_read(
    kafka_url: str, kafka_topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_partitions, "BACKOFF_MAX", LONG)
    store = f"sqlite:///{tmp_path / 'records.db'}"
    starts, effects = list[bytes](), list[bytes]()
    for number in range(4):
        produce(kafka_url, kafka_topic, (f"k{number}", b"%d" % number), partition=number)

    def handler(message: Any) -> None:
        starts.append(value_of(message))
        if not is_mended:
            raise ValueError("not yet")
        effects.append(value_of(message))

    is_mended: list[bool] = []
    config = {"session.timeout.ms": SHORT_SESSION_MS}
    with WORKERS["confluent"](
        kafka_url, kafka_topic, handler, store=store, backoff=LONG, consumer_config=config
    ) as first:
        # All four wait.
        first.until(lambda: len(set(starts)) == 4)
        with child(fail_for_ever, kafka_url, kafka_topic, store) as second:
            first.until(lambda: 0 < len(first.partitions()) < 4)
            second.reaches("failed")
            is_mended.append(True)
            second.kill()
        first.until(lambda: [committed(kafka_url, kafka_topic, kafka_topic, one) for one in range(4)] == [1] * 4)

    assert sorted(effects) == [b"0", b"1", b"2", b"3"]
