"""An SQS worker, and a producer that sends twice. Run it: python examples/sqs_worker.py

It needs SQS, or an emulator, which ONEFOLD_SQS_URL names (http://localhost:4566 by default: `pip install ministack`,
`ministack -d`), and credentials: for an emulator AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test will do. It creates
two queues, and deletes them at its end. The effect is a row, so that the record goes into the same transaction:
whatever SQS delivers again is deleted, and not applied.
It needs `pip install 'onefold[sqs]'`.
"""

# boto3 has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import boto3

from onefold import Guard
from onefold.queues.keys import header
from onefold.queues.sqs import Delivery, guarded, send

URL: Final = os.environ.get("ONEFOLD_SQS_URL", "http://localhost:4566")
REGION: Final = os.environ.get("AWS_REGION", "eu-central-1")

# Far more than seven messages need.
RECEIVES_MAX: Final = 30


def credit(delivery: Delivery, *, tx: sqlite3.Connection) -> None:
    """Everything in here commits with the record of the message, or not at all."""
    account, _, amount = delivery.body.decode().partition(" ")
    tx.execute("UPDATE wallet SET balance = balance + ?, effects = effects + 1 WHERE account = ?", (amount, account))


def main(folder: Path) -> None:
    path = folder / "wallet.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE wallet (account TEXT PRIMARY KEY, balance INTEGER, effects INTEGER)")
        connection.execute("INSERT INTO wallet VALUES ('asha', 0, 0), ('rahul', 0, 0)")

    sqs: Any = boto3.client("sqs", endpoint_url=URL, region_name=REGION)
    name = f"onefold-example-{secrets.token_hex(4)}"
    # One group: its messages are handled in the order in which they were sent.
    fifo = {"FifoQueue": "true"}
    queue = sqs.create_queue(QueueName=f"{name}.fifo", Attributes=fifo)["QueueUrl"]
    dead = sqs.create_queue(QueueName=f"{name}-dead.fifo", Attributes=fifo)["QueueUrl"]
    produce(sqs, queue)

    with Guard(f"sqlite:///{path}") as guard:
        worker = guarded(guard, "credit", credit, client=sqs, queue=queue, key=header(), dead_letter=dead)
        consuming = threading.Thread(target=worker.consume, daemon=True)
        consuming.start()
        # What nobody can handle was sent last: once it is a dead letter, all others are settled.
        letter = first_of(sqs, dead)
        worker.drain()
        consuming.join()

    reason = letter["MessageAttributes"]["x-onefold-reason"]["StringValue"]
    print(f"a dead letter {letter['Body']}: {reason}")
    for url in (queue, dead):
        sqs.delete_queue(QueueUrl=url)
    sqs.close()

    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT account, balance, effects FROM wallet ORDER BY account").fetchall()
    print(f"account, balance, effects: {found}")
    assert found == [("asha", 4700, 2), ("rahul", 900, 1)]


def produce(sqs: Any, queue: str) -> None:
    """Three orders. The producer does not hear two of the answers, and sends again with the key that it has.

    A FIFO queue drops what is sent again within five minutes. So that this shows the guard, each has another
    deduplication id, as if they were over.
    """
    for account, amount, times in [("asha", 4500, 2), ("rahul", 900, 1), ("asha", 200, 3)]:
        key = secrets.token_hex(8)
        for _ in range(times):
            later = secrets.token_hex(8)
            send(sqs, queue, f"{account} {amount}", key=key, group="credits", deduplication_id=later)
        print(f"sent {times} x {account} +{amount}")
    last = {"MessageGroupId": "credits", "MessageDeduplicationId": secrets.token_hex(8)}
    sqs.send_message(QueueUrl=queue, MessageBody="from somebody without keys", **last)


def first_of(sqs: Any, queue: str) -> dict[str, Any]:
    for _ in range(RECEIVES_MAX):
        found = sqs.receive_message(QueueUrl=queue, MessageAttributeNames=["All"], WaitTimeSeconds=5)
        for message in found.get("Messages", []):
            return dict(message)
    raise SystemExit("no dead letter has come")


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.ERROR, format="logged: %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
