"""Kafka, both clients: what is wrong with a worker or its store costs no message, and people are told of it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from confluent_kafka import KafkaError, TopicPartition
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from onefold import Event, Guard, Policy, UsageError, subscribe
from onefold.keys import address
from onefold.queues._kafka.confluent_messages import is_news
from onefold.queues._shared import transactional_batches
from onefold.queues._shared.transactional_batches import TransactionalBatches
from onefold.queues.keys import Message, header
from tests.queues.kafka_tools import WORKERS, Wallet, committed, letters_in, produce, value_of
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


@pytest.fixture
def buried() -> Iterator[list[Event]]:
    """What the listeners of the process hear of dead letters."""
    heard: list[Event] = []
    unsubscribe = subscribe(lambda event: heard.append(event) if event.kind == "buried" else None)
    yield heard
    unsubscribe()


@pytest.fixture(autouse=True)
def looks_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactional_batches, "PAUSES", (0.0, 0.0))


def ignore(message: Any) -> None: ...


def with_tx(message: Any, *, tx: Any) -> None: ...


def ignore_all(messages: Any, *, tx: Any) -> None: ...


class TestUncommitted:
    """A transaction that nobody commits would lose every message of its poll."""

    @pytest.mark.parametrize("guards_store", ["the database", "elsewhere"])
    def test_it_moves_no_offset_and_stops_the_loop(
        self, worker: Any, kafka_url: str, kafka_topic: str, wallet: Wallet, store: str, guards_store: str
    ) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))
        made: dict[str, Any] = {"poll": 10, "transaction": uncommitted(wallet)}
        made["store"] = store if guards_store == "the database" else "memory:"

        with (
            worker(kafka_url, kafka_topic, wallet.credit_all, **made) as one,
            pytest.raises(
                UsageError, match=r"neither they nor the work were committed.*No offset was moved.*engine.begin"
            ),
        ):
            one.until(lambda: False)
        assert wallet.credits == []
        assert committed(kafka_url, kafka_topic, kafka_topic) == 0
        letters_in(kafka_url, f"{kafka_topic}.dead", 0)

    def test_a_guard_whose_store_is_no_database_is_no_reason_to_stop(
        self, worker: Any, kafka_url: str, kafka_topic: str, wallet: Wallet
    ) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))

        with worker(kafka_url, kafka_topic, wallet.credit_all, poll=10, transaction=wallet.begin) as one:
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 2)

        assert wallet.credits == ["1", "2"]

    def test_a_handler_that_takes_it_back_fails_alone_where_it_has_committed_before(
        self, worker: Any, kafka_url: str, kafka_topic: str, wallet: Wallet, store: str
    ) -> None:
        def credit_all(messages: list[Any], *, tx: sqlite3.Connection) -> None:
            for message in messages:
                wallet.credit(message, tx=tx)
                if value_of(message) == b"taken back":
                    tx.execute("ROLLBACK")
                    tx.execute("BEGIN IMMEDIATE")

        produce(kafka_url, kafka_topic, ("a", b"1"))
        with worker(kafka_url, kafka_topic, credit_all, store=store, poll=10, transaction=wallet.begin) as one:
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 1)
            produce(kafka_url, kafka_topic, ("b", b"2"), ("c", b"taken back"))
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 3)

        assert wallet.credits == ["1", "2"]
        (letter,) = letters_in(kafka_url, f"{kafka_topic}.dead", 1)
        assert letter.value() == b"taken back"

    def test_a_failed_statement_that_the_handler_passed_over_loses_nothing(self, postgres_url: str) -> None:
        """PostgreSQL answers the COMMIT of such a transaction with a ROLLBACK, and psycopg says nothing of it."""
        import psycopg

        def passes_over(messages: list[str], *, tx: Any) -> None:
            with pytest.raises(psycopg.errors.DivisionByZero):
                tx.execute("SELECT 1 / 0")

        with Guard(postgres_url) as guard:
            guard.run("other", "k", lambda: None)
            batches = TransactionalBatches(
                guard,
                "credit",
                passes_over,
                lambda: psycopg.connect(postgres_url),
                key=header(),
                missing_key="never",
                policy=None,
            )
            with pytest.raises(UsageError, match="nor continue after a statement has failed"):
                batches.deliver([Sent("a")])

    def test_what_is_known_not_to_commit_is_refused_at_once(self, store: str) -> None:
        engine, async_one = sqlalchemy.create_engine(store), create_async_engine(store.replace(":", "+aiosqlite:", 1))
        guard, asked = Guard("memory:"), {"key": header(), "missing_key": "never", "policy": None}
        wrong = [engine.connect, engine.raw_connection, sessionmaker(engine), async_one.connect, async_sessionmaker()]
        right = [engine.begin, sessionmaker(engine).begin, async_one.begin]

        for transaction in wrong:
            with pytest.raises(UsageError, match="does not commit at its end: use engine"):
                TransactionalBatches(guard, "credit", ignore_all, transaction, **asked)  # type: ignore[arg-type]
        for transaction in right:
            TransactionalBatches(guard, "credit", ignore_all, transaction, **asked)  # type: ignore[arg-type]


class TestMistakes:
    """What the worker does wrong is raised: no message is buried for it, and no offset moves."""

    @pytest.mark.parametrize("poll", [0, 10], ids=["one by one", "batches"])
    def test_a_guard_that_is_closed(self, worker: Any, kafka_url: str, kafka_topic: str, poll: int) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))

        with worker(kafka_url, kafka_topic, ignore, poll=poll) as one:
            one.close_guard()
            with pytest.raises(UsageError, match="this guard is closed"):
                one.until(lambda: False)

        assert committed(kafka_url, kafka_topic, kafka_topic) == 0
        letters_in(kafka_url, f"{kafka_topic}.dead", 0)

    def test_a_guard_that_is_closed_while_a_poll_runs(self, worker: Any, kafka_url: str, kafka_topic: str) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"), (None, b"keyless"))

        ran: list[Any] = []

        def closes(message: Any) -> None:
            # In a poll of all three it comes first, because nothing has to be asked about it.
            if b"keyless" in (message.value, callable(message.value) and message.value()):
                one.guard._closed, one.guard._opened = True, None
            else:
                ran.append(message)

        with (
            worker(kafka_url, kafka_topic, closes, missing_key="run", poll=10) as one,
            pytest.raises(UsageError, match="this guard is closed"),
        ):
            one.until(lambda: False)

        assert committed(kafka_url, kafka_topic, kafka_topic) == len(ran)
        letters_in(kafka_url, f"{kafka_topic}.dead", 0)

    def test_a_store_without_transactions_for_a_handler_with_tx(
        self, worker: Any, kafka_url: str, kafka_topic: str
    ) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"))

        with pytest.raises(UsageError, match="has no transactions"):
            worker(kafka_url, kafka_topic, with_tx)
        # One that is opened late is known when the first message comes.
        late = worker(kafka_url, kafka_topic, with_tx, store=lambda: "memory:")
        with late as one, pytest.raises(UsageError, match="has no transactions"):
            one.until(lambda: False)

        assert committed(kafka_url, kafka_topic, kafka_topic) == 0
        letters_in(kafka_url, f"{kafka_topic}.dead", 0)

    @pytest.mark.parametrize("poll", [0, 10], ids=["one by one", "batches"])
    def test_a_scope_that_nobody_has_set(self, worker: Any, kafka_url: str, kafka_topic: str, poll: int) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))

        with worker(kafka_url, kafka_topic, ignore, poll=poll) as one:
            one.guard._scope = lambda: None
            with pytest.raises(UsageError, match="has to name a tenant"):
                one.until(lambda: False)

        assert committed(kafka_url, kafka_topic, kafka_topic) == 0
        letters_in(kafka_url, f"{kafka_topic}.dead", 0)

    @pytest.mark.parametrize("poll", [0, 10], ids=["one by one", "batches"])
    def test_a_payload_that_cannot_be_compared_is_the_messages_own(
        self, worker: Any, kafka_url: str, kafka_topic: str, poll: int
    ) -> None:
        def payload(message: Message) -> object:
            return object() if message.body == b"1" else message.body

        produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))

        with worker(kafka_url, kafka_topic, ignore, poll=poll, payload=payload) as one:
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 2)

        (letter,) = letters_in(kafka_url, f"{kafka_topic}.dead", 1)
        assert letter.value() == b"1"

    def test_a_transaction_that_is_none(
        self, worker: Any, kafka_url: str, kafka_topic: str, wallet: Wallet, store: str
    ) -> None:
        @contextmanager
        def autocommit() -> Iterator[sqlite3.Connection]:
            with closing(sqlite3.connect(wallet.path, isolation_level=None)) as connection:
                yield connection

        produce(kafka_url, kafka_topic, ("a", b"1"))

        with (
            worker(kafka_url, kafka_topic, wallet.credit_all, store=store, poll=10, transaction=autocommit) as one,
            pytest.raises(UsageError, match="no transaction is open"),
        ):
            one.until(lambda: False)

        assert committed(kafka_url, kafka_topic, kafka_topic) == 0
        letters_in(kafka_url, f"{kafka_topic}.dead", 0)

    def test_failures_that_a_rollback_would_take_back(self, store: str) -> None:
        policy = Policy(final_errors=(ValueError,))

        with Guard(store, policy=policy) as guard, pytest.raises(UsageError, match="cannot remember a failure"):
            TransactionalBatches(guard, "credit", ignore_all, print, key=header(), missing_key="never", policy=None)  # type: ignore[arg-type]


class TestTold:
    """Logs and events, from which a record can be found."""

    @pytest.mark.parametrize("poll", [0, 10], ids=["one by one", "batches"])
    def test_every_dead_letter_is_told_with_its_reason(
        self, worker: Any, kafka_url: str, kafka_topic: str, poll: int, buried: list[Event]
    ) -> None:
        def fails(message: Any) -> None:
            raise ValueError("card 4111")

        produce(kafka_url, kafka_topic, (None, b"keyless"), ("a", b"poison"))

        with worker(kafka_url, kafka_topic, fails, attempts=2, poll=poll) as one:
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 2)

        keyless, poison = buried
        assert (keyless.operation, keyless.address.key, keyless.detail) == ("credit", "", "it has no key")
        assert poison.address == address("credit", "a")
        assert poison.detail.startswith("it failed 2 times, the last time with ValueError at ")

    def test_a_dead_letter_that_was_not_confirmed_is_not_told(
        self, worker: Any, kafka_url: str, kafka_topic: str, buried: list[Event], caplog: pytest.LogCaptureFixture
    ) -> None:
        produce(kafka_url, kafka_topic, (None, b"too large for the other producer" * 100))
        small = {"max_request_size": 1000} if worker.is_async else {"message.max.bytes": 1000}

        with worker(kafka_url, kafka_topic, ignore, producer_config=small) as one:
            one.until(lambda: "no dead letter" in caplog.text)

        assert buried == []
        assert "to the dead letters" not in caplog.text

    def test_the_lines_lead_to_the_record(
        self, worker: Any, kafka_url: str, kafka_topic: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fails(message: Any) -> None:
            raise ValueError("card 4111")

        produce(kafka_url, kafka_topic, ("secret", b"poison"))

        with worker(kafka_url, kafka_topic, fails, attempts=2) as one:
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 1)

        where = f"{kafka_topic}/0 offset 0: credit [key {address('credit', 'secret').digest}]: "
        lines = [record.getMessage() for record in caplog.records if record.name == "onefold.queues.kafka"]
        assert [line.startswith(where) for line in lines] == [True, True, True]
        assert [word in line for word, line in zip(("attempt 1", "attempt 2", "dead"), lines, strict=True)] == [
            True
        ] * 3
        assert "secret" not in caplog.text
        assert "4111" not in caplog.text

    @pytest.mark.parametrize("poll", [0, 10], ids=["one by one", "batches"])
    def test_a_store_that_is_away_is_told_with_its_error(
        self, worker: Any, kafka_url: str, kafka_topic: str, poll: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("WARNING")
        produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))
        away = f"sqlite:///{tmp_path / 'nowhere' / 'records.db'}"

        with worker(kafka_url, kafka_topic, ignore, store=away, poll=poll) as one:
            one.until(lambda: "the file cannot be opened" in caplog.text)

        (line,) = [record for record in caplog.records if record.name == "onefold.queues.kafka"]
        assert line.levelname == "WARNING"
        assert line.getMessage().startswith(f"{kafka_topic}/0 offset 0: credit [key ")
        assert committed(kafka_url, kafka_topic, kafka_topic) == 0

    def test_a_database_that_is_away_is_told_without_what_its_driver_says(
        self,
        worker: Any,
        kafka_url: str,
        kafka_topic: str,
        wallet: Wallet,
        store: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level("WARNING")
        produce(kafka_url, kafka_topic, ("a", b"1"))
        wallet.down = True

        with worker(kafka_url, kafka_topic, wallet.credit_all, store=store, poll=10, transaction=wallet.begin) as one:
            one.until(lambda: "no transaction could be opened: ConnectionError" in caplog.text)

        assert "the database is away" not in caplog.text

    def test_what_is_held_is_told_once(
        self, worker: Any, kafka_url: str, kafka_topic: str, store: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("WARNING")
        with Guard(store, policy=Policy(after_crash="hold")) as guard, pytest.raises(TimeoutError):
            guard.run("credit", "held", Handler(error=TimeoutError()))
        produce(kafka_url, kafka_topic, ("held", b"held"))

        with worker(kafka_url, kafka_topic, ignore, store=store) as one:
            one.until(lambda: "Held" in caplog.text)

        assert f"{kafka_topic}/0 offset 0: credit [key " in caplog.text

    def test_a_consumer_that_stops_says_where_and_does_not_say_that_it_goes_on(
        self, worker: Any, kafka_url: str, kafka_topic: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fails(message: Any) -> None:
            raise ValueError("cannot be done")

        caplog.set_level("INFO")
        produce(kafka_url, kafka_topic, ("a", b"poison"))

        with (
            worker(kafka_url, kafka_topic, fails, dead_letter="stop", attempts=1) as one,
            pytest.raises(one.adapter.Undeliverable) as raised,
        ):
            one.until(lambda: False)

        error, digest = raised.value, address("credit", "a").digest
        assert (error.topic, error.partition, error.offset) == (kafka_topic, 0, 0)
        assert (error.operation, error.digest) == ("credit", digest)
        assert error.reason.startswith("it failed 1 times")
        lines = [record.getMessage() for record in caplog.records if record.name == "onefold.queues.kafka"]
        assert "so the consumer stops" in lines[-1]
        assert not any("again in" in line for line in lines)

    def test_a_consumer_that_is_subscribed_elsewhere_is_told_once(
        self, worker: Any, kafka_url: str, kafka_topic: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"), ("b", b"2"))

        with worker(kafka_url, kafka_topic, ignore, subscribe=False) as one:
            one.consumer.subscribe([kafka_topic])
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 2)

        assert caplog.text.count("Call handle.subscribe") == 1

    def test_a_consumer_that_is_assigned_by_hand_hears_all_there_is(
        self, kafka_url: str, kafka_topic: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"))

        with WORKERS["confluent"](kafka_url, kafka_topic, ignore, subscribe=False) as one:
            one.consumer.assign([TopicPartition(kafka_topic, 0, 0)])
            one.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 1)

        assert "Call handle.subscribe" not in caplog.text

    def test_a_poll_that_came_too_late_is_told_with_its_cure(self, caplog: pytest.LogCaptureFixture) -> None:
        class Late:
            def error(self) -> KafkaError:
                return KafkaError(KafkaError._MAX_POLL_EXCEEDED)

        assert is_news(Late())

        assert "max.poll.interval.ms above your longest handler" in caplog.text


class TestRefusedAtOnce:
    def test_a_consumer_without_a_group(self, kafka_url: str, kafka_topic: str) -> None:
        with pytest.raises(UsageError, match="Create it with group_id="):
            WORKERS["aiokafka"](kafka_url, kafka_topic, ignore, consumer_config={"group_id": None})

    def test_a_wait_that_outlasts_the_poll_interval(self, kafka_url: str, kafka_topic: str) -> None:
        config = {"max_poll_interval_ms": 10_000}

        with pytest.raises(UsageError, match="wait=1m is not below the consumer's max_poll_interval_ms=10000"):
            WORKERS["aiokafka"](kafka_url, kafka_topic, ignore, wait="60s", consumer_config=config)

    def test_one_message_for_many_and_many_for_one(self, worker: Any, kafka_url: str, kafka_topic: str) -> None:
        produce(kafka_url, kafka_topic, ("a", b"1"))
        taken: list[Any] = []

        with worker(kafka_url, kafka_topic, taken.append) as one:
            one.until(lambda: taken != [])
            several: list[Any] = [[], [taken[0]], {}, "text"]
            for many in several:
                with pytest.raises(UsageError, match=r"handle\(\) takes the result of .* use handle.batch\(\)"):
                    call(one, one.handle, many)
            for wrong in (None, taken[0], "text"):
                with pytest.raises(UsageError, match=r"handle.batch\(\) takes the result of .* use handle\(\)"):
                    call(one, one.handle.batch, wrong)


class Sent:
    """A message on its way."""

    def __init__(self, key: str) -> None:
        self.message = Message(b"", {"idempotency-key": key})
        self.native = key


def uncommitted(wallet: Wallet) -> Any:
    @contextmanager
    def opened() -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(wallet.path, isolation_level=None, timeout=PATIENCE)
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.close()

    return opened


def call(one: Any, handle: Any, given: Any) -> None:
    if one.is_async:
        one._runner.run(handle(given))
    else:
        handle(given)
