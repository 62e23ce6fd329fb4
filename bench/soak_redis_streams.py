"""Redis is killed in the middle of its messages: python -m bench.soak_redis_streams (--short for CI)

5,000 messages, each of which moves money in PostgreSQL, 10 % of them sent twice, to four worker processes; the server,
which writes each change to its disk before it answers, is killed and started again while they are sent and handled.
Every message must have had its effect exactly once, and the wallet must be exact. 1 if it is not.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.synchronize import Event
from typing import Any, Final

import redis
from redis.exceptions import RedisError, ResponseError

from bench.soak import brokers
from bench.soak.brokers import SECONDS_MAX, Desk
from bench.soak.plan import Message
from onefold import Guard
from onefold.queues.keys import header
from onefold.queues.redis_streams import Delivery, guarded, send
from services.redis import named_client

STREAM: Final = "credits"
DEAD: Final = "credits.dead"
GROUP: Final = "workers"

# What an acknowledgement that a kill has swallowed costs.
MIN_IDLE: Final = 2.0

CONCURRENCY: Final = 5
RECONNECT_SECONDS: Final = 0.2


def prepare(desk: Desk) -> None:
    with named_client(desk.broker) as client:
        client.xgroup_create(STREAM, GROUP, "0", mkstream=True)


def send_all(url: str, messages: Iterator[Message]) -> None:
    with named_client(url) as client:
        for message in messages:
            send_surely(client, json.dumps(message._asdict()).encode(), message.id)


def send_surely(client: redis.Redis, body: bytes, key: str) -> None:
    """A sender tries for half a minute; a server on a slow machine may take longer to come back."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            send(client, STREAM, body, key=key)
        except RedisError:
            if time.monotonic() > deadline:
                raise
        else:
            return


def work(desk: Desk, stop: Event) -> None:
    """One worker: it consumes, and waits for its server whenever that is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with named_client(desk.broker) as client:
        (guarded_work if desk.is_guarded else bare_work)(desk, stop, client)


def guarded_work(desk: Desk, stop: Event, client: redis.Redis) -> None:
    def credit(delivery: Delivery, *, tx: Any) -> None:
        desk.ledger.credit(tx, Message(**json.loads(delivery.body)))

    with Guard(desk.store) as guard:
        worker = guarded(
            guard,
            "credit",
            credit,
            key=header(),
            stream=STREAM,
            group=GROUP,
            dead_letter=DEAD,
            min_idle=MIN_IDLE,
            concurrency=CONCURRENCY,
        )

        def stopping() -> None:
            stop.wait()
            worker.stop()

        threading.Thread(target=stopping, daemon=True).start()
        worker.consume(client)


def bare_work(desk: Desk, stop: Event, client: redis.Redis) -> None:
    """A consumer as one writes it without a guard: the effect, then the acknowledgement."""
    name = f"bare-{time.monotonic_ns()}"
    while not stop.is_set():
        try:
            for entry_id, fields in taken(client, name):
                connection = desk.ledger.connect()
                desk.ledger.credit(connection, Message(**json.loads(fields[b"body"])))
                connection.commit()
                connection.close()
                client.xack(STREAM, GROUP, entry_id)
        except RedisError:
            time.sleep(RECONNECT_SECONDS)


def taken(client: redis.Redis, name: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries that nobody has acknowledged for a while, and new ones."""
    reply: Any = client.xautoclaim(STREAM, GROUP, name, int(MIN_IDLE * 1000), count=CONCURRENCY)
    found: Any = client.xreadgroup(GROUP, name, {STREAM: ">"}, count=CONCURRENCY, block=1000)
    new = found.get(STREAM.encode(), []) if isinstance(found, dict) else (found[0][1] if found else [])
    return [*reply[1], *new]


def left(desk: Desk) -> Mapping[str, int]:
    with named_client(desk.broker) as client, suppress(ResponseError):
        (group,) = client.xinfo_groups(STREAM)
        return {STREAM: group["pending"] + (group["lag"] or 0), DEAD: client.xlen(DEAD)}
    return {STREAM: 1}


SOAK: Final = brokers.Soak("Redis", "redis", prepare, send_all, work, left)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(brokers.main(SOAK, "bench.soak_redis_streams", __doc__))
