"""A NATS JetStream worker, and a producer that sends twice. Run it: python examples/nats_worker.py

It needs a server with JetStream, which ONEFOLD_NATS_URL may name. The effect is a row, so that the record goes into the
same transaction: whatever the server delivers again is acknowledged, and not applied.
It needs `pip install 'onefold[nats]'`.
"""

# nats-py does not type the options of these calls.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Final

import nats
from nats.js import JetStreamContext

from onefold import AsyncGuard
from onefold.queues.keys import header
from onefold.queues.nats import Delivery, guarded, send

URL: Final = os.environ.get("ONEFOLD_NATS_URL", "nats://localhost:4222")

# Far more than seven messages need.
SECONDS_MAX: Final = 120.0


async def credit(delivery: Delivery, *, tx: sqlite3.Connection) -> None:
    """Everything in here commits with the record of the message, or not at all."""
    account, _, amount = delivery.body.decode().partition(" ")
    tx.execute("UPDATE wallet SET balance = balance + ?, effects = effects + 1 WHERE account = ?", (amount, account))


async def main(folder: Path) -> None:
    path = folder / "wallet.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE wallet (account TEXT PRIMARY KEY, balance INTEGER, effects INTEGER)")
        connection.execute("INSERT INTO wallet VALUES ('asha', 0, 0), ('rahul', 0, 0)")

    name = f"onefold-example-{secrets.token_hex(4)}"
    client = await nats.connect(URL, max_reconnect_attempts=-1)
    js = client.jetstream()
    await js.add_stream(name=name, subjects=[f"{name}.credits"])
    await js.add_stream(name=f"{name}-dead", subjects=[f"{name}.dead"])
    await produce(js, f"{name}.credits")

    async with AsyncGuard(f"sqlite:///{path}") as guard:
        worker = guarded(guard, "credit", credit, key=header(), dead_letter=f"{name}.dead")
        consuming = asyncio.create_task(worker.consume(await js.pull_subscribe(f"{name}.credits", durable="credit")))
        # What nobody can handle was sent last: once it is a dead letter, all others are settled.
        letters = await js.pull_subscribe(f"{name}.dead", durable="people")
        (letter,) = await letters.fetch(1, timeout=SECONDS_MAX)
        await worker.drain()
        await consuming

    print(f"a dead letter {letter.data.decode()}: {(letter.headers or {})['x-onefold-reason']}")
    for stream in (name, f"{name}-dead"):
        await js.delete_stream(stream)
    await client.close()

    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT account, balance, effects FROM wallet ORDER BY account").fetchall()
    print(f"account, balance, effects: {found}")
    assert found == [("asha", 4700, 2), ("rahul", 900, 1)]


async def produce(js: JetStreamContext, subject: str) -> None:
    """Three orders. The producer does not hear two of the confirmations, and sends again with the key that it has.

    A stream drops what is sent again within its window. So that this shows the guard, each has another `Nats-Msg-Id`,
    as if the window were over.
    """
    for account, amount, times in [("asha", 4500, 2), ("rahul", 900, 1), ("asha", 200, 3)]:
        key = secrets.token_hex(8)
        for _ in range(times):
            body, later = f"{account} {amount}".encode(), {"Nats-Msg-Id": secrets.token_hex(8)}
            await send(js, subject, body, key=key, headers=later)
        print(f"sent {times} x {account} +{amount}")
    await js.publish(subject, b"from somebody without keys")


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.ERROR, format="logged: %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))
