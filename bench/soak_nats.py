"""NATS is killed in the middle of its messages: python -m bench.soak_nats (--short for CI)

5,000 messages, each of which moves money in PostgreSQL, 10 % of them sent twice, to four worker processes; the server
is killed and started again while they are sent and handled. Every message must have had its effect exactly once, and
the wallet must be exact. 1 if it is not.

The stream's own window for duplicates is made as short as it can be: it must not be what keeps the wallet exact.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from multiprocessing.synchronize import Event
from typing import Any, Final

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig

from bench.soak import brokers
from bench.soak.brokers import SECONDS_MAX, Desk
from bench.soak.plan import Message
from onefold import AsyncGuard
from onefold.queues.keys import header
from onefold.queues.nats import Delivery, guarded, send

STREAM: Final = "credits"
DEAD: Final = "dead"
SUBJECT: Final = "credits.new"
DEAD_SUBJECT: Final = "dead.credits"
DURABLE: Final = "workers"

# What an acknowledgement that a kill has swallowed costs.
ACK_WAIT: Final = 2.0
WINDOW: Final = 0.1

CONCURRENCY: Final = 5
RECONNECT_SECONDS: Final = 0.2


async def connected(url: str) -> Client:
    async def quiet(_error: Exception) -> None:
        """A server that is killed is what this is about."""

    return await nats.connect(
        url, error_cb=quiet, reconnect_time_wait=RECONNECT_SECONDS, max_reconnect_attempts=-1, connect_timeout=10
    )


def within(url: str, story: Callable[[Client], Coroutine[Any, Any, Any]]) -> Any:
    """Play a story on a connection of its own, in a loop of its own."""

    async def connected_story() -> Any:
        client = await connected(url)
        try:
            return await story(client)
        finally:
            await client.close()

    return asyncio.run(connected_story())


def prepare(desk: Desk) -> None:
    async def story(client: Client) -> None:
        js = client.jetstream()
        await js.add_stream(name=STREAM, subjects=[SUBJECT], duplicate_window=WINDOW)
        await js.add_stream(name=DEAD, subjects=[DEAD_SUBJECT])
        await js.add_consumer(STREAM, ConsumerConfig(durable_name=DURABLE, ack_wait=ACK_WAIT))

    within(desk.broker, story)


def send_all(url: str, messages: Iterator[Message]) -> None:
    async def story(client: Client) -> None:
        for message in messages:
            await send_surely(client, json.dumps(message._asdict()).encode(), message.id)

    within(url, story)


async def send_surely(client: Client, body: bytes, key: str) -> None:
    """A sender tries for half a minute; a server on a slow machine may take longer to come back."""
    deadline = asyncio.get_running_loop().time() + SECONDS_MAX
    while True:
        try:
            await send(client.jetstream(), SUBJECT, body, key=key)
        except nats.errors.Error:
            if asyncio.get_running_loop().time() > deadline:
                raise
        else:
            return


def work(desk: Desk, stop: Event) -> None:
    """One worker: it consumes, and waits for its server whenever that is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    within(desk.broker, lambda client: (guarded_work if desk.is_guarded else bare_work)(desk, stop, client))


async def guarded_work(desk: Desk, stop: Event, client: Client) -> None:
    async def credit(delivery: Delivery, *, tx: Any) -> None:
        await desk.ledger.credit_async(tx, Message(**json.loads(delivery.body)))

    async with AsyncGuard(desk.store) as guard:
        callback = guarded(guard, "credit", credit, key=header(), dead_letter=DEAD_SUBJECT, concurrency=CONCURRENCY)
        consuming = asyncio.create_task(callback.consume(await subscribed(client)))
        await asyncio.to_thread(stop.wait)
        await callback.drain(SECONDS_MAX)
        await consuming


async def bare_work(desk: Desk, stop: Event, client: Client) -> None:
    """A consumer as one writes it without a guard: the effect, then the acknowledgement."""

    def credit(message: Msg) -> None:
        connection = desk.ledger.connect()
        desk.ledger.credit(connection, Message(**json.loads(message.data)))
        connection.commit()
        connection.close()

    subscription = await subscribed(client)
    while not stop.is_set():
        with suppress(nats.errors.Error, TimeoutError):
            for message in await subscription.fetch(CONCURRENCY, timeout=1):
                await asyncio.to_thread(credit, message)
                await message.ack()
    await client.flush()


async def subscribed(client: Client) -> JetStreamContext.PullSubscription:
    """The server may be killed just now."""
    while True:
        with suppress(nats.errors.Error):
            return await client.jetstream().pull_subscribe(SUBJECT, DURABLE, stream=STREAM)


def left(desk: Desk) -> Mapping[str, int]:
    async def story(client: Client) -> Mapping[str, int]:
        js = client.jetstream()
        consumer = await js.consumer_info(STREAM, DURABLE)
        letters = await js.stream_info(DEAD)
        return {STREAM: consumer.num_pending + consumer.num_ack_pending, DEAD: letters.state.messages}

    found: Mapping[str, int] = within(desk.broker, story)
    return found


SOAK: Final = brokers.Soak("NATS", "nats", prepare, send_all, work, left)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(brokers.main(SOAK, "bench.soak_nats", __doc__))
