"""A FastStream handler on NATS JetStream that charges once. Run it: python examples/faststream_worker.py

It needs a NATS server with JetStream: nats://localhost:4222, or the one that ONEFOLD_NATS_URL names. The sender sends a
charge twice, as it does after a lost answer, and another under a used key; the handler fails at its first attempt. The
row is written in the transaction of its record, so that nothing that happens to a worker charges twice.
It needs `pip install 'onefold[faststream,nats]'`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from typing import Final

from faststream import AckPolicy
from faststream.nats import JStream, NatsBroker, NatsMessage, PullSub

from onefold import Guard
from onefold.queues.faststream import guarded, send
from onefold.queues.keys import body, header

# Far longer than this takes, in seconds.
PATIENCE: Final = 60.0

URL: Final = os.environ.get("ONEFOLD_NATS_URL", "nats://localhost:4222")
NAME: Final = f"onefold-example-{os.getpid()}"
DEAD: Final = f"{NAME}-dead"

broker = NatsBroker(URL, logger=None)
stream = JStream(NAME, subjects=[NAME, DEAD])
letters = broker.publisher(DEAD, stream=NAME)
guard = Guard("sqlite:///wallet.db")
attempts: list[str] = []
dead: list[str] = []


@broker.subscriber(
    NAME, stream=stream, durable="workers", pull_sub=PullSub(timeout=0.5), ack_policy=AckPolicy.NACK_ON_ERROR
)
@guarded(guard, "charge", key=header(), payload=body(), dead_letter=letters)
def charge(account: str, amount: int, *, tx: sqlite3.Connection) -> None:
    attempts.append(account)
    tx.execute("CREATE TABLE IF NOT EXISTS charges (account TEXT, amount INTEGER)")
    tx.execute("INSERT INTO charges VALUES (?, ?)", (account, amount))
    if len(attempts) == 1:
        raise ConnectionError("the first attempt fails, and its row is rolled back")


@broker.subscriber(DEAD, stream=stream, durable="people", pull_sub=PullSub(timeout=0.5))
async def look(_body: object, message: NatsMessage) -> None:
    dead.append(message.headers["x-onefold-reason"])


async def main() -> None:
    await broker.start()
    for _ in range(2):
        await send(broker, {"account": "riya", "amount": 42}, NAME, stream=NAME, key="pay-17")
    await send(broker, {"account": "riya", "amount": 43}, NAME, stream=NAME, key="pay-17")
    await send(broker, {"account": "rahul", "amount": 9}, NAME, stream=NAME, key="pay-18")
    await until(lambda: bool(dead) and "rahul" in attempts)
    await broker.stop()


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE / 0.05)):
        if holds():
            return
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.ERROR, format="logged: %(message)s")
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        asyncio.run(asyncio.wait_for(main(), PATIENCE))
        guard.close()
        with closing(sqlite3.connect("wallet.db")) as connection:
            charges = sorted(connection.execute("SELECT account, amount FROM charges").fetchall())
        os.chdir("/")
    print(f"sent: 4; attempts: {len(attempts)}, and the first one failed")
    print(f"charges: {charges}")
    print(f"a dead letter: {dead[0].partition(':')[0]}")
    assert charges == [("rahul", 9), ("riya", 42)]
    assert dead[0].startswith("KeyReused")
