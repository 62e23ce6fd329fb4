"""Read, send and bury messages with pika; sending waits until the broker has confirmed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPError, UnroutableError

from onefold._concurrency.generators import run
from onefold.events import tell_sent
from onefold.queues._rabbitmq import consumer as rabbitmq_consumer
from onefold.queues._rabbitmq.consumer import Dead, Delivery, fitted
from onefold.queues.keys import Key, with_key
from onefold.stores.base import Address


@dataclass(eq=False, slots=True, weakref_slot=True)
class Job:
    """A message that this consumer has not settled yet."""

    channel: BlockingChannel
    tag: int
    delivery: Delivery
    since: float
    # The address of its record, once something has to be reported about it.
    address: Address | None = None

    @property
    def unacked_for(self) -> float:
        return time.monotonic() - self.since


def delivery_of(method: Any, properties: BasicProperties, body: bytes) -> Delivery:
    """Return a message as handlers see it."""
    return Delivery(
        body,
        properties.headers or {},
        properties.message_id,
        properties.content_type,
        method.exchange,
        method.routing_key,
        method.redelivered,
        str(method.delivery_tag),
        properties,
    )


def encoded_size(properties: dict[str, Any]) -> int:
    """Return the size of these properties on the wire, in bytes."""
    return sum(map(len, BasicProperties(**properties).encode()))


def frame_max_of(connection: BlockingConnection) -> int:
    """Return the frame size that the broker and this connection have negotiated."""
    # Private, for lack of a public name.
    return int(vars(connection)["_impl"].params.frame_max)


def bury(connection: BlockingConnection, dead: Dead) -> None:
    """Send a dead letter on a channel of its own: an error there closes no consumer."""
    dead = fitted(dead, encoded_size, frame_max_of(connection))
    with connection.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish("", dead.queue, dead.body, BasicProperties(**dead.properties), mandatory=True)


def send(
    channel: BlockingChannel | Callable[[], BlockingChannel],
    routing_key: str,
    body: bytes,
    *,
    exchange: str = "",
    key: Key | UnsetType = UNSET,
    headers: Mapping[str, Any] | None = None,
    content_type: str | None = None,
) -> str:
    """Send a message until the broker has confirmed it, and return its key: the one that you passed, or a new one.

    With a function that returns an open channel, it is sent again after a lost connection, always with the same key.
    Raises pika's own error once its attempts are used up, and at once if no queue takes the message.
    """
    chosen, carried = with_key(headers, key)
    properties = BasicProperties(**rabbitmq_consumer.sent_properties(chosen, carried, content_type))

    def publish() -> None:
        here = channel() if callable(channel) else channel
        # Private, for lack of a public name: a second call would be logged as an error.
        if not vars(here).get("_delivery_confirmation"):
            here.confirm_delivery()
        # Each attempt: the broker may have the message of one that failed.
        tell_sent(exchange or routing_key, chosen)
        here.basic_publish(exchange, routing_key, body, properties, mandatory=True)

    def is_worth_another_try(error: BaseException) -> bool:
        return not isinstance(error, UnroutableError) and (callable(channel) or channel.is_open)

    run(rabbitmq_consumer.confirmed(publish, time.sleep, (AMQPError,), is_worth_another_try))
    return chosen
