"""A worker of a Redis consumer group, and a producer that sends twice. Run it: python examples/redis_streams_worker.py

It needs a Redis or Valkey, which ONEFOLD_REDIS_URL may name. The effect is a row, so that the record goes into the same
transaction: whatever is delivered again, or was sent twice, is acknowledged and not applied.
It needs `pip install 'onefold[redis]'`.
"""

# redis-py does not type the options of a URL, nor what its calls return.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import redis

from onefold import Guard
from onefold.queues.keys import header
from onefold.queues.redis_streams import Delivery, guarded, send

URL: Final = os.environ.get("ONEFOLD_REDIS_URL", "redis://localhost:6379/0")

# Far more than seven messages need.
SECONDS_MAX: Final = 120.0


def credit(delivery: Delivery, *, tx: sqlite3.Connection) -> None:
    """Everything in here commits with the record of the message, or not at all."""
    account, _, amount = delivery.body.decode().partition(" ")
    tx.execute("UPDATE wallet SET balance = balance + ?, effects = effects + 1 WHERE account = ?", (amount, account))


def main(folder: Path) -> None:
    path = folder / "wallet.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE wallet (account TEXT PRIMARY KEY, balance INTEGER, effects INTEGER)")
        connection.execute("INSERT INTO wallet VALUES ('asha', 0, 0), ('rahul', 0, 0)")

    client: Any = redis.Redis.from_url(URL)
    stream = f"onefold-example-{secrets.token_hex(4)}"
    dead = f"{stream}.dead"
    produce(client, stream)

    with Guard(f"sqlite:///{path}") as guard:
        worker = guarded(guard, "credit", credit, key=header(), stream=stream, group="credit", dead_letter=dead)
        # A service would call worker.stop() when it gets SIGTERM, and consume in its main thread.
        consuming = threading.Thread(target=worker.consume, args=(client,))
        consuming.start()
        # What nobody can handle was sent last: once it is a dead letter, all others are settled.
        deadline = time.monotonic() + SECONDS_MAX
        while not client.xlen(dead) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert worker.drain()
        consuming.join()

    ((_, letter),) = client.xrange(dead)
    print(f"a dead letter {letter[b'body'].decode()}: {letter[b'x-onefold-reason'].decode()}")
    client.delete(stream, dead)
    client.close()

    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT account, balance, effects FROM wallet ORDER BY account").fetchall()
    print(f"account, balance, effects: {found}")
    assert found == [("asha", 4700, 2), ("rahul", 900, 1)]


def produce(client: Any, stream: str) -> None:
    """Three orders. The producer does not hear two of the replies, and sends again with the key that it has."""
    for account, amount, times in [("asha", 4500, 2), ("rahul", 900, 1), ("asha", 200, 3)]:
        key = secrets.token_hex(8)
        for _ in range(times):
            send(client, stream, f"{account} {amount}".encode(), key=key)
        print(f"sent {times} x {account} +{amount}")
    client.xadd(stream, {"body": b"from somebody without keys"})


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.ERROR, format="logged: %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
