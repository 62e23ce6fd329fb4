"""A RabbitMQ worker with SQLAlchemy, and a producer that sends twice. Run it: python examples/rabbitmq_worker.py

It needs a broker, which ONEFOLD_RABBITMQ_URL may name. The effect is a row, so that the record goes into the same
transaction: whatever the broker delivers again is acknowledged, and not applied.
It needs `pip install 'onefold[rabbitmq,sqlalchemy]'`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import pika
import sqlalchemy as sa

from onefold import Guard
from onefold.queues.keys import header
from onefold.queues.pika import Delivery, guarded, send

URL: Final = os.environ.get("ONEFOLD_RABBITMQ_URL", "amqp://guest:guest@localhost:5672/%2F")

# Far more than seven messages need.
SECONDS_MAX: Final = 120.0

metadata = sa.MetaData()
wallet = sa.Table(
    "wallet", metadata, sa.Column("account", sa.String, primary_key=True), sa.Column("balance", sa.Integer)
)
effects = sa.Table("effects", metadata, sa.Column("message", sa.String), sa.Column("amount", sa.Integer))


def credit(delivery: Delivery, *, tx: sa.Connection) -> None:
    """Everything in here commits with the record of the message, or not at all."""
    order: dict[str, Any] = json.loads(delivery.body)
    tx.execute(effects.insert().values(message=delivery.message_id, amount=order["amount"]))
    changed = wallet.update().where(wallet.c.account == order["account"])
    tx.execute(changed.values(balance=wallet.c.balance + order["amount"]))


def main(folder: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{folder}/wallet.db")
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(wallet.insert(), [{"account": name, "balance": 0} for name in ("asha", "rahul")])

    queue = f"onefold-example-{secrets.token_hex(4)}"
    with Guard(engine) as guard, pika.BlockingConnection(pika.URLParameters(URL)) as broker:
        channel = broker.channel()
        for name in (queue, f"{queue}.dead"):
            channel.queue_declare(name, durable=True)
        produce(channel, queue)

        channel.basic_qos(prefetch_count=10)
        consumer = guarded(guard, "credit", credit, key=header(), dead_letter=f"{queue}.dead")
        channel.basic_consume(queue, consumer)
        deadline = time.monotonic() + SECONDS_MAX
        # What nobody can handle was sent last: once it is a dead letter, all others are settled.
        while waiting(channel, f"{queue}.dead") == 0 and time.monotonic() < deadline:
            broker.process_data_events(0.1)
        channel.stop_consuming()
        consumer.drain(broker)

        letter: Any = channel.basic_get(f"{queue}.dead", auto_ack=True)
        print(f"a dead letter {letter[2].decode()}: {letter[1].headers['x-onefold-reason']}")
        for name in (queue, f"{queue}.dead"):
            channel.queue_delete(name)

    with engine.connect() as connection:
        balances = {row.account: row.balance for row in connection.execute(sa.select(wallet))}
    print(f"effects {applied(engine)}, balances {balances}")
    assert applied(engine) == 3
    assert balances == {"asha": 4700, "rahul": 900}
    engine.dispose()


def produce(channel: Any, queue: str) -> None:
    """Three orders. The producer does not hear two of the confirmations, and sends again with the key that it has."""
    orders = [("asha", 4500, 2), ("rahul", 900, 1), ("asha", 200, 3)]
    for account, amount, times in orders:
        body, key = json.dumps({"account": account, "amount": amount}).encode(), secrets.token_hex(8)
        for _ in range(times):
            send(channel, queue, body, key=key, content_type="application/json")
        print(f"sent {times} x {account} +{amount}")
    channel.basic_publish("", queue, b"from somebody without keys")


def waiting(channel: Any, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def applied(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return int(connection.scalar(sa.select(sa.func.count()).select_from(effects)) or 0)


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.ERROR, format="logged: %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
