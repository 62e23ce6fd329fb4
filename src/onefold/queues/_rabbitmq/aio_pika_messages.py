"""Read, send and bury messages with aio-pika; sending waits until the broker has confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from aio_pika.exceptions import CONNECTION_EXCEPTIONS, PublishError
from aiormq.abc import AbstractConnection, DeliveredMessage
from msgspec import UNSET, UnsetType

from onefold import UsageError
from onefold._concurrency.generators import run_async
from onefold.events import tell_sent
from onefold.queues._rabbitmq import consumer as rabbitmq_consumer
from onefold.queues._rabbitmq.consumer import Dead, Delivery, fitted
from onefold.queues.keys import Key, with_key


def delivery_of(message: AbstractIncomingMessage) -> Delivery:
    """Return a message as handlers see it."""
    return Delivery(
        message.body,
        message.headers,
        message.message_id,
        message.content_type,
        message.exchange or "",
        message.routing_key or "",
        bool(message.redelivered),
        str(message.delivery_tag),
        message,
    )


def encoded_size(properties: dict[str, Any]) -> int:
    """Return the size of these properties on the wire, in bytes."""
    return len(Message(b"", **properties).properties.marshal())


def frame_max_of(connection: AbstractConnection) -> int:
    """Return the frame size negotiated with the broker; 0 if aio-pika does not report it."""
    tuned = getattr(connection, "connection_tune", None)
    return int(getattr(tuned, "frame_max", 0) or 0)


async def bury(connection: AbstractConnection, dead: Dead) -> None:
    """Send a dead letter on a channel of its own: an error there closes no consumer."""
    dead = fitted(dead, encoded_size, frame_max_of(connection))
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    try:
        properties = Message(dead.body, **dead.properties).properties
        await channel.basic_publish(dead.body, routing_key=dead.queue, properties=properties, mandatory=True)
    finally:
        await channel.close()


async def send(
    channel: AbstractChannel,
    routing_key: str,
    body: bytes,
    *,
    exchange: str = "",
    key: Key | UnsetType = UNSET,
    headers: Mapping[str, Any] | None = None,
    content_type: str | None = None,
) -> str:
    """Send a message until the broker has confirmed it, and return its key: the one that you passed, or a new one.

    On a robust channel it is sent again after a lost connection, always with the same key. Raises aio-pika's own error
    once its attempts are used up, and at once if no queue takes the message.
    """
    chosen, carried = with_key(headers, key)
    if not channel.publisher_confirms:
        raise UsageError(
            "send() needs a channel with publisher_confirms=True: without it a lost message is not noticed"
        )
    message = Message(body, **rabbitmq_consumer.sent_properties(chosen, carried, content_type))

    async def publish() -> None:
        target = await channel.get_exchange(exchange, ensure=False) if exchange else channel.default_exchange
        # Each attempt: the broker may have the message of one that failed.
        tell_sent(exchange or routing_key, chosen)
        answer = await target.publish(
            message, routing_key, mandatory=True, timeout=rabbitmq_consumer.CONFIRM_SECONDS_MAX
        )
        if isinstance(answer, DeliveredMessage):
            raise PublishError(answer, answer.delivery)

    def is_worth_another_try(error: BaseException) -> bool:
        return not isinstance(error, PublishError)

    await run_async(rabbitmq_consumer.confirmed(publish, asyncio.sleep, CONNECTION_EXCEPTIONS, is_worth_another_try))
    return chosen
