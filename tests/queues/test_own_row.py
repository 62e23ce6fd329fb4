"""A row of the business as the record of a message, on real brokers: the article's own statement, and one effect."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from dramatiq.brokers.stub import StubBroker
from sqlalchemy import create_engine, text

from onefold import AsyncGuard, Guard, RecordColumn, UsageError, current
from onefold.queues import aio_pika, dramatiq, pika, rq
from onefold.queues._shared.transactional_batches import TransactionalBatches
from onefold.queues._shared.verdict import ACK
from onefold.queues.celery import guarded as guarded_task
from onefold.queues.keys import Message, body, header
from tests.queues.dramatiq_tools import Hand
from tests.queues.kafka_tools import WORKERS, committed, letters_in, produce, value_of
from tests.queues.nats_tools import Environment as NatsEnvironment
from tests.queues.nats_tools import worker
from tests.queues.rabbitmq_tools import LIBRARIES, Consumer, Environment, Library, until
from tests.queues.redis_streams_tools import KINDS, Kind
from tests.queues.redis_streams_tools import Environment as StreamEnvironment
from tests.queues.redis_streams_tools import Worker as StreamWorker
from tests.support import in_time

PAYMENT = RecordColumn("payments", "message_key", fingerprint="fingerprint")

DO_NOTHING = "INSERT INTO payments (message_key, amount) VALUES (?, ?) ON CONFLICT DO NOTHING"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "CREATE TABLE payments (message_key TEXT PRIMARY KEY, amount INTEGER NOT NULL, fingerprint TEXT)"
        )
        connection.execute("CREATE TABLE effects (amount INTEGER)")
    return path


def rows(path: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def pay(tx: sqlite3.Connection, key: str, amount: int) -> None:
    tx.execute(DO_NOTHING, (key, amount))
    tx.execute("INSERT INTO effects VALUES (?)", (amount,))


@pytest.mark.parametrize("library", LIBRARIES)
def test_eight_messages_of_rabbitmq_with_one_key_have_one_effect_and_another_body_is_buried(
    library: Library, rabbitmq_url: str, rabbitmq_name: str, path: Path
) -> None:
    environment = Environment(rabbitmq_url, rabbitmq_name)
    options: dict[str, Any] = {"record": PAYMENT, "payload": body()}
    if library == "pika":
        options["threads"] = 4

    def handle(delivery: Any, *, tx: Any) -> None:
        pay(tx, "pay-1", int(delivery.body))

    environment.send_keyed("pay-1", b"500", times=8)
    with Consumer(library, environment, f"sqlite:///{path}", handle, **options) as consumer:
        until(lambda: consumer.acks == 8, "all are acknowledged")
        environment.send_keyed("pay-1", b"900")
        _, letter = environment.letter()

    assert letter == b"900"
    assert rows(path, "SELECT message_key, amount FROM payments") == [("pay-1", 500)]
    assert rows(path, "SELECT * FROM effects") == [(500,)]


@pytest.mark.parametrize("kind", KINDS)
def test_eight_entries_of_a_redis_stream_with_one_key_have_one_effect_and_another_body_is_buried(
    kind: Kind, valkey_url: str, path: Path
) -> None:
    environment = StreamEnvironment(valkey_url)
    options: dict[str, Any] = {"record": PAYMENT, "payload": body(), "concurrency": 4}

    def handle(delivery: Any, *, tx: Any) -> None:
        pay(tx, "pay-1", int(delivery.body))

    environment.send_keyed("pay-1", b"500", times=8)
    with StreamWorker(kind, environment, f"sqlite:///{path}", handle, **options):
        environment.settled()
        environment.send_keyed("pay-1", b"900")
        letter = environment.letter()

    assert letter[b"body"] == b"900"
    assert rows(path, "SELECT message_key, amount FROM payments") == [("pay-1", 500)]
    assert rows(path, "SELECT * FROM effects") == [(500,)]


def test_eight_messages_of_nats_with_one_key_have_one_effect_and_another_body_is_buried(
    nats_url: str, nats_name: str, path: Path
) -> None:
    async def handle(delivery: Any, *, tx: Any) -> None:
        pay(tx, "pay-1", int(delivery.body))

    async def story() -> bytes:
        async with NatsEnvironment(nats_url, nats_name) as environment:
            await environment.send_keyed("pay-1", b"500", times=8)
            options: dict[str, Any] = {"record": PAYMENT, "payload": body(), "concurrency": 4}
            async with worker(environment, f"sqlite:///{path}", handle, **options):
                await environment.settled(8)
                await environment.send_keyed("pay-1", b"900")
                return (await environment.letter()).data

    assert in_time(story()) == b"900"
    assert rows(path, "SELECT message_key, amount FROM payments") == [("pay-1", 500)]
    assert rows(path, "SELECT * FROM effects") == [(500,)]


@pytest.mark.parametrize("client", WORKERS)
def test_messages_of_kafka_with_one_key_have_one_effect_and_another_body_is_buried(
    client: str, kafka_url: str, kafka_topic: str, path: Path
) -> None:
    produce(kafka_url, kafka_topic, *[("pay-1", b"500")] * 4, ("pay-1", b"900"), ("pay-2", b"7"))

    def handle(message: Any, *, tx: Any) -> None:
        amount = int(value_of(message))
        pay(tx, "pay-1" if amount == 500 else "pay-2", amount)

    options: dict[str, Any] = {"store": f"sqlite:///{path}", "record": PAYMENT, "payload": body()}
    with WORKERS[client](kafka_url, kafka_topic, handle, **options) as worker:
        worker.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 6)

    assert [letter.value() for letter in letters_in(kafka_url, f"{kafka_topic}.dead", 1)] == [b"900"]
    assert rows(path, "SELECT message_key, amount FROM payments ORDER BY 1") == [("pay-1", 500), ("pay-2", 7)]
    assert rows(path, "SELECT amount FROM effects ORDER BY 1") == [(7,), (500,)]


@pytest.mark.parametrize("client", WORKERS)
def test_a_poll_of_kafka_is_one_transaction_whose_rows_are_its_records(
    client: str, kafka_url: str, kafka_topic: str, path: Path
) -> None:
    produce(
        kafka_url, kafka_topic, ("pay-1", b"500"), ("pay-2", b"7"), ("pay-1", b"500"), ("pay-1", b"900"), ("lost", b"1")
    )
    produce(kafka_url, kafka_topic, ("pay-2", b"7"), partition=1)
    polls: list[int] = []

    def handle(messages: list[Any], *, tx: Any) -> None:
        polls.append(len(messages))
        for message in messages:
            amount = int(value_of(message))
            if amount == 1:
                tx.execute("INSERT INTO effects VALUES (1)")
            else:
                pay(tx, "pay-1" if amount == 500 else "pay-2", amount)

    @contextmanager
    def transaction() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path, isolation_level=None)) as tx:
            tx.execute("BEGIN IMMEDIATE")
            yield tx
            tx.execute("COMMIT")

    options: dict[str, Any] = {"poll": 10, "transaction": transaction, "record": PAYMENT, "payload": body()}
    with WORKERS[client](kafka_url, kafka_topic, handle, store=f"sqlite:///{path}", attempts=1, **options) as worker:
        worker.until(lambda: [committed(kafka_url, kafka_topic, kafka_topic, at) for at in (0, 1)] == [5, 1])

    assert {letter.value() for letter in letters_in(kafka_url, f"{kafka_topic}.dead", 2)} == {b"900", b"1"}
    assert rows(path, "SELECT message_key, amount FROM payments ORDER BY 1") == [("pay-1", 500), ("pay-2", 7)]
    assert rows(path, "SELECT amount FROM effects ORDER BY 1") == [(7,), (500,)]
    assert max(polls) > 1


class OnItsWay(NamedTuple):
    message: Message
    native: str


@pytest.mark.parametrize("database", ["postgres", "mariadb"])
def test_the_rows_of_a_poll_are_locked_and_proven_on_a_server_too(
    request: pytest.FixtureRequest, database: str
) -> None:
    fixture, scheme = {
        "postgres": ("postgres_url", "postgresql+psycopg"),
        "mariadb": ("mysql_url", "mysql+pymysql"),
    }[database]
    url = str(request.getfixturevalue(fixture))
    engine = create_engine(f"{scheme}:{url.partition(':')[2]}")
    with engine.begin() as tx:
        tx.execute(text("CREATE TABLE payments (message_key VARCHAR(50) PRIMARY KEY, fingerprint VARCHAR(255))"))
        tx.execute(text("CREATE TABLE effects (message_key VARCHAR(50))"))

    def handle(keys: list[str], *, tx: Any) -> None:
        for key in keys:
            tx.execute(text("INSERT INTO effects VALUES (:key)"), {"key": key})
            if key != "left to Onefold":
                tx.execute(text("INSERT INTO payments (message_key) VALUES (:key)"), {"key": key})

    keys = ["b", "a", "b", "left to Onefold"]
    deliveries = [OnItsWay(Message(b"{}", {"idempotency-key": key}), key) for key in keys]
    with Guard(url) as guard:
        batches = TransactionalBatches(
            guard,
            "pay",
            handle,
            engine.begin,
            key=header(),
            missing_key="never",
            policy=None,
            payload=body(),
            record=PAYMENT,
        )
        verdicts = [batches.deliver(deliveries) for _ in range(2)]

    assert verdicts == [[ACK] * 4] * 2
    with engine.begin() as tx:
        found = tx.execute(text("SELECT message_key, count(*) FROM effects GROUP BY message_key ORDER BY 1")).fetchall()
        assert [tuple(row) for row in found] == [("a", 1), ("b", 1), ("left to Onefold", 1)]
        assert tx.execute(text("SELECT count(*), count(fingerprint) FROM payments")).fetchone() == (3, 3)
    engine.dispose()


@pytest.fixture
def folding(path: Path) -> Path:
    """A table whose column takes `PAY-1` for `pay-1`."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("""
            DROP TABLE payments;
            CREATE TABLE payments (message_key TEXT PRIMARY KEY COLLATE NOCASE, amount INTEGER, fingerprint TEXT)
        """)
    return path


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_message_of_rabbitmq_whose_key_the_column_does_not_take_is_buried(
    library: Library, rabbitmq_url: str, rabbitmq_name: str, folding: Path
) -> None:
    environment = Environment(rabbitmq_url, rabbitmq_name)
    for key in ("pay-1", "PAY-1"):
        environment.send_keyed(key, b"500")

    def handle(delivery: Any, *, tx: Any) -> None:
        pay(tx, "pay-1", int(delivery.body))

    options: dict[str, Any] = {"record": PAYMENT, "payload": body()}
    with Consumer(library, environment, f"sqlite:///{folding}", handle, **options):
        environment.letter()

    assert rows(folding, "SELECT * FROM effects") == [(500,)]


@pytest.mark.parametrize("poll", [None, 10])
@pytest.mark.parametrize("client", WORKERS)
def test_a_message_of_kafka_whose_key_the_column_does_not_take_is_buried_and_the_next_one_runs(
    client: str, kafka_url: str, kafka_topic: str, folding: Path, poll: int | None
) -> None:
    produce(kafka_url, kafka_topic, ("pay-1", b"500"), ("PAY-1", b"501"), ("pay-2", b"7"))

    def handle(given: Any, *, tx: Any) -> None:
        for message in given if poll else [given]:
            amount = int(value_of(message))
            pay(tx, "pay-2" if amount == 7 else "pay-1", amount)

    @contextmanager
    def transaction() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(folding, isolation_level=None)) as tx:
            tx.execute("BEGIN IMMEDIATE")
            yield tx
            tx.execute("COMMIT")

    options: dict[str, Any] = {"record": PAYMENT, "payload": body(), "attempts": 1}
    if poll:
        options |= {"poll": poll, "transaction": transaction}
    with WORKERS[client](kafka_url, kafka_topic, handle, store=f"sqlite:///{folding}", **options) as worker:
        worker.until(lambda: committed(kafka_url, kafka_topic, kafka_topic) == 3)

    assert [letter.value() for letter in letters_in(kafka_url, f"{kafka_topic}.dead", 1)] == [b"501"]
    assert rows(folding, "SELECT amount FROM effects ORDER BY 1") == [(7,), (500,)]


def takes_none(delivery: Any) -> None: ...


def takes_tx(delivery: Any, *, tx: Any) -> None: ...


async def takes_tx_later(delivery: Any, *, tx: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "options", "says"),
    [
        (takes_none, {}, "the handler has to take tx"),
        (takes_tx, {"missing_key": "run"}, "has no row without a key"),
        (takes_tx, {"payload": body(), "record": RecordColumn("payments", "message_key")}, "no place for a payload="),
        (takes_tx, {"final_errors": (ValueError,)}, "cannot remember a failure"),
        (takes_tx, {"record": RecordColumn("pay ments", "message_key")}, "not the plain name"),
    ],
)
def test_what_no_row_can_keep_is_refused_before_the_first_message(
    handler: Callable[..., Any], options: dict[str, Any], says: str
) -> None:
    given: dict[str, Any] = {"key": header(), "dead_letter": "dead", "record": PAYMENT, **options}

    with Guard("sqlite:///never.db") as guard, pytest.raises(UsageError, match=says):
        pika.guarded(guard, "pay", handler, **given)


def test_an_async_client_refuses_it_too() -> None:
    guard = AsyncGuard("sqlite:///never.db")

    with pytest.raises(UsageError, match="has no row without a key"):
        aio_pika.guarded(guard, "pay", takes_tx_later, key=header(), dead_letter="d", record=PAYMENT, missing_key="run")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"record": RecordColumn("payments", "message_key")}, r"the task pay: .*no place for a fingerprint="),
        ({"record": PAYMENT, "missing_key": "run"}, r"the task pay: .*has no row without a key"),
    ],
)
def test_a_task_of_celery_refuses_it_under_its_name(options: dict[str, Any], says: str) -> None:
    from celery import Celery

    with Guard("sqlite:///never.db") as guard, pytest.raises(UsageError, match=says):

        @guarded_task(Celery("shop", broker="memory://", set_as_current=False), guard, "pay", name="pay", **options)
        def pay_task(amount: int, *, tx: Any) -> None: ...


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"record": RecordColumn("payments", "message_key")}, r"the (actor|job) .*no place for a fingerprint="),
        ({"record": PAYMENT, "missing_key": "run"}, r"the (actor|job) .*has no row without a key"),
    ],
)
def test_actors_and_jobs_refuse_it_under_their_names(options: dict[str, Any], says: str) -> None:
    def pay(amount: int, *, tx: Any) -> None: ...

    with Guard("sqlite:///never.db") as guard:
        with pytest.raises(UsageError, match=says):
            dramatiq.guarded(guard, "pay", broker=StubBroker(), **options)(pay)
        with pytest.raises(UsageError, match=says):
            rq.guarded(guard, "pay", **options)(pay)


def test_a_row_of_the_business_is_the_record_of_an_actor(tmp_path: Path) -> None:
    hand, path = Hand(), tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE payments (message_key TEXT PRIMARY KEY, amount INT)")
        connection.commit()
    record = RecordColumn("payments", "message_key")
    with Guard(f"sqlite:///{path}") as guard:

        @dramatiq.guarded(guard, "pay", broker=hand.broker, record=record, fingerprint=None)
        def pay(amount: int, *, tx: sqlite3.Connection) -> None:
            tx.execute("INSERT INTO payments VALUES (?, ?)", (current().key, amount))

        for _ in range(2):
            hand.process(pay.message_with_options(args=(5,), idempotency_key="pay-1"))

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT * FROM payments").fetchall() == [("pay-1", 5)]
    assert hand.ended == ["acknowledged"] * 2
