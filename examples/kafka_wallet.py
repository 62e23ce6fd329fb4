"""A Kafka wallet that takes whole polls, with duplicates and a poison message. Run it: python examples/kafka_wallet.py

Without a broker in ONEFOLD_KAFKA_URL it runs on librdkafka's own mock cluster. Each poll is one SQLite transaction:
the credits, the records of the messages and the offsets are in it, or none of them.
It needs `pip install 'onefold[kafka,sqlalchemy]'`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from confluent_kafka import Consumer, Message, Producer

from onefold import Guard
from onefold.queues.confluent_kafka import DeadLetters, Offsets, guarded_batches, send
from onefold.queues.keys import header

URL: Final = os.environ.get("ONEFOLD_KAFKA_URL", "").removeprefix("kafka://")

MESSAGES: Final = 100
POISON: Final = "not a number"

# Far more than a few hundred messages need.
SECONDS_MAX: Final = 120.0


def credit(messages: list[Message], *, tx: sa.Connection) -> None:
    """All new messages of a poll. Everything in here commits with their records, or not at all."""
    orders: list[dict[str, Any]] = [json.loads(message.value() or b"") for message in messages]
    for order in orders:
        tx.execute(
            sa.text("INSERT INTO effects VALUES (:id, :amount)"), {"id": order["id"], "amount": int(order["amount"])}
        )


def deliver(producer: Producer, topic: str) -> None:
    """One in ten is sent twice, as by a producer that did not hear the confirmation; one cannot be worked on."""
    for number in range(MESSAGES):
        body = json.dumps({"id": number, "amount": POISON if number == 42 else 10})
        key = send(producer, topic, body, partition_by=f"account-{number % 7}")
        if number % 10 == 0:
            send(producer, topic, body, key=key, partition_by=f"account-{number % 7}")


def work(engine: sa.Engine, guard: Guard, settings: dict[str, Any], topic: str, group: str, enough: int) -> int:
    """Take polls until so many credits are there; the answer is the number of messages that were read."""
    consumer = Consumer(
        {**settings, "group.id": group, "auto.offset.reset": "earliest", "enable.auto.offset.store": False}
    )
    handle = guarded_batches(
        guard,
        "credit",
        credit,
        transaction=engine.begin,
        offsets=Offsets(engine.begin, group="wallet"),
        consumer=consumer,
        key=header(),
        dead_letter=DeadLetters(Producer(settings), f"{topic}.dead"),
        attempts=2,
        backoff=0.1,
    )
    handle.subscribe([topic])
    read, deadline = 0, time.monotonic() + SECONDS_MAX
    while count(engine) < enough and time.monotonic() < deadline:
        messages = consumer.consume(100, 0.5)
        read += len(messages)
        handle.batch(messages)
    consumer.close()
    return read


def count(engine: sa.Engine) -> int:
    with engine.begin() as tx:
        return int(tx.execute(sa.text("SELECT count(*) FROM effects")).scalar() or 0)


def main() -> None:
    logging.getLogger("onefold").addHandler(logging.NullHandler())
    # The mock lives as long as the producer that made it.
    mock = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 3})
    servers = URL or ",".join(f"{one.host}:{one.port}" for one in mock.list_topics(timeout=60).brokers.values())
    settings = {"bootstrap.servers": servers, "log_level": 3}
    topic = f"wallet-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory() as folder:
        engine = sa.create_engine(f"sqlite:///{Path(folder) / 'wallet.db'}")
        with engine.begin() as tx:
            Offsets(engine.begin, group="wallet").create(tx)
            tx.execute(sa.text("CREATE TABLE effects (id INTEGER, amount INTEGER)"))
        deliver(Producer(settings), topic)
        print(f"{MESSAGES} messages were sent, {MESSAGES // 10} of them twice, and one of them is poison")

        with Guard(engine) as guard:
            read = work(engine, guard, settings, topic, topic, MESSAGES - 1)
            print(f"{read} were read, {count(engine)} credits were made")
            assert count(engine) == MESSAGES - 1

            # A group that Kafka has forgotten begins where the work is, and not at the beginning.
            send(Producer(settings), topic, json.dumps({"id": MESSAGES, "amount": 10}))
            again = work(engine, guard, settings, topic, f"{topic}-new", MESSAGES)
            print(f"a new group read {again} instead of {MESSAGES + MESSAGES // 10 + 1}")
            assert again < MESSAGES

        with engine.begin() as tx:
            effects, distinct, total = tx.execute(
                sa.text("SELECT count(*), count(DISTINCT id), sum(amount) FROM effects")
            ).one()
        engine.dispose()
    assert (effects, distinct, total) == (MESSAGES, MESSAGES, MESSAGES * 10)
    print(f"each message was credited once: {effects} credits, {total} in the wallet")


if __name__ == "__main__":
    main()
