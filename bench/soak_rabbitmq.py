"""RabbitMQ is killed in the middle of its messages: python -m bench.soak_rabbitmq (--short for CI)

5,000 messages, each of which moves money in PostgreSQL, 10 % of them sent twice, to four worker processes; the broker
is killed and started again while they are sent and handled. Every message must have had its effect exactly once, and
the wallet must be exact. 1 if it is not.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from multiprocessing.synchronize import Event
from typing import Any, Final

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from bench.soak import brokers
from bench.soak.brokers import SECONDS_MAX, Desk
from bench.soak.plan import Message
from onefold import Guard
from onefold.queues.keys import header
from onefold.queues.pika import Delivery, guarded, send
from services.rabbitmq import write_down

PREFETCH: Final = 20
QUEUE: Final = "credits"
DEAD: Final = "credits.dead"

RECONNECT_SECONDS: Final = 0.2


def prepare(desk: Desk) -> None:
    with connected(desk.broker) as channel:
        for queue in (QUEUE, DEAD):
            channel.queue_declare(queue, durable=True)


def send_all(url: str, messages: Iterator[Message]) -> None:
    channel = Reconnecting(url)
    for message in messages:
        send_surely(channel, json.dumps(message._asdict()).encode(), message.id)
    channel().connection.close()


def send_surely(channel: Reconnecting, body: bytes, key: str) -> None:
    """A sender tries for half a minute; a broker on a slow machine may take longer to come back."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            send(channel, QUEUE, body, key=key)
        except AMQPError:
            if time.monotonic() > deadline:
                raise
        else:
            return


class Reconnecting:
    """A channel that is open when one asks for it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._channel: BlockingChannel | None = None

    def __call__(self) -> BlockingChannel:
        if self._channel is None or not self._channel.is_open:
            self._channel = pika.BlockingConnection(pika.URLParameters(self._url)).channel()
        return self._channel


def work(desk: Desk, stop: Event) -> None:
    """One worker: it consumes, and connects again whenever its broker is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def credit(delivery: Delivery, *, tx: Any) -> None:
        desk.ledger.credit(tx, Message(**json.loads(delivery.body)))

    with Guard(desk.store) as guard:
        callback = guarded(guard, "credit", credit, key=header(), dead_letter=DEAD)
        while not stop.is_set():
            with suppress(AMQPError), pika.BlockingConnection(pika.URLParameters(desk.broker)) as connection:
                channel = connection.channel()
                channel.basic_qos(prefetch_count=PREFETCH)
                in_hand = InHand(channel, callback if desk.is_guarded else unguarded(desk))
                channel.basic_consume(QUEUE, in_hand)
                # What it has not begun would go back to the queue, and nobody would be there to take it.
                while not stop.is_set() or in_hand.tags:
                    connection.process_data_events(0.1)
                channel.stop_consuming()
                callback.drain(connection)
                return
            time.sleep(RECONNECT_SECONDS)


class InHand:
    """The messages of a channel that this worker has not settled."""

    def __init__(self, channel: BlockingChannel, consume: Callable[..., None]) -> None:
        self.tags: set[int] = set()
        self._consume = consume
        for name in ("basic_ack", "basic_nack", "basic_reject"):
            setattr(channel, name, self._noted(getattr(channel, name)))

    def __call__(self, channel: BlockingChannel, method: Any, properties: Any, body: bytes) -> None:
        self.tags.add(method.delivery_tag)
        self._consume(channel, method, properties, body)

    def _noted(self, settle: Callable[..., None]) -> Callable[..., None]:
        def noted(tag: int, **options: Any) -> None:
            settle(tag, **options)
            self.tags.discard(tag)

        return noted


def unguarded(desk: Desk) -> Callable[..., None]:
    """A consumer as one writes it without a guard: the effect, then the acknowledgement."""

    def consume(channel: BlockingChannel, method: Any, _properties: Any, body: bytes) -> None:
        with closing(desk.ledger.connect()) as connection:
            desk.ledger.credit(connection, Message(**json.loads(body)))
            connection.commit()
        channel.basic_ack(method.delivery_tag)

    return consume


def left(desk: Desk) -> Mapping[str, int]:
    with connected(desk.broker) as channel:
        return {queue: int(channel.queue_declare(queue, passive=True).method.message_count) for queue in (QUEUE, DEAD)}


@contextmanager
def connected(url: str) -> Iterator[BlockingChannel]:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        yield connection.channel()


SOAK: Final = brokers.Soak("RabbitMQ", "rabbitmq", prepare, send_all, work, left, before_kill=write_down)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(brokers.main(SOAK, "bench.soak_rabbitmq", __doc__))
