"""Publish a dead letter with FastStream, and know that its broker has it: only then is the message acknowledged.

FastStream itself reports neither a message that RabbitMQ returns, because no queue takes it, nor one that NATS or a
Redis channel has no reader for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from onefold import UsageError
from onefold.queues._nats.consumer import MESSAGE_ID_HEADER, MSG_ID, SEQUENCE_HEADER, SERVERS, STREAM_HEADER
from onefold.queues._nats.consumer import SUBJECT_HEADER as NATS_SUBJECT_HEADER
from onefold.queues._rabbitmq import consumer as rabbitmq
from onefold.queues._shared.dead_letters import (
    DIGEST_HEADER,
    OPERATION_HEADER,
    REASON_HEADER,
    REASON_MAX,
    TIME_HEADER,
    plain,
)
from onefold.stores.base import Address

# Headers by which a broker routes or counts: a copy must not carry them.
NOT_COPIED: Final = rabbitmq.NOT_COPIED | {
    "x-death",
    "x-first-death-exchange",
    "x-first-death-queue",
    "x-first-death-reason",
    "correlation_id",
    "reply_to",
}

# Ours. Not a sender's: a person may let the record with this digest run again, or send the letter where it says.
OURS: Final = (
    rabbitmq.OURS
    | {NATS_SUBJECT_HEADER, STREAM_HEADER, SEQUENCE_HEADER, MESSAGE_ID_HEADER}
    | {"x-onefold-topic", "x-onefold-partition", "x-onefold-offset"}
)

# FastStream's names for properties of RabbitMQ, where they are others.
NAMES: Final = {"type": "message_type"}


class NotTaken(Exception):
    """The broker has no place for a dead letter."""


def broker_of(thing: object) -> str:
    """Return the name of FastStream's package for the broker of a message or a publisher."""
    for kind in type(thing).__mro__:
        parts = kind.__module__.split(".")
        if parts[0] == "faststream" and len(parts) > 2:
            return parts[1]
    return ""


def check_publisher(dead_letter: Any) -> None:
    """Refuse a publisher whose broker does not say whether it has a message."""
    if not callable(getattr(dead_letter, "publish", None)):
        raise UsageError(f"dead_letter={dead_letter!r:.60} has to be a publisher: broker.publisher('charges.dead')")
    match broker_of(dead_letter):
        case "nats" if getattr(dead_letter, "stream", None) is None:
            raise UsageError(
                "dead_letter= is a publisher of core NATS, which loses what nobody reads, and does not say so: name "
                "the stream, broker.publisher('charges.dead', stream='charges')"
            )
        case "redis" if hasattr(dead_letter, "channel"):
            raise UsageError(
                "dead_letter= is a publisher of a Redis channel, which loses what nobody reads: take a stream, "
                "broker.publisher(stream='charges.dead')"
            )


def headers_of(
    headers: Mapping[str, Any], message_id: str | None, address: Address, reason: str, origin: Mapping[str, str]
) -> dict[str, Any]:
    """Return the headers of a dead letter: its message's own, and ours, with those of its origin."""
    found = {str(name): value for name, value in headers.items() if not _is_left_out(str(name))}
    if message_id is not None and MSG_ID in headers:
        # The stream would drop a letter with the id of its message.
        found[MESSAGE_ID_HEADER] = message_id
    found |= {REASON_HEADER: plain(" ".join(reason.split()))[:REASON_MAX], OPERATION_HEADER: address.operation}
    if rabbitmq.EXCHANGE_HEADER in origin:
        # The other brokers say when it was buried.
        found[TIME_HEADER] = int(time.time())
    found |= {name: plain(value) for name, value in origin.items()}
    return found | ({DIGEST_HEADER: address.digest} if address.key else {})


def _is_left_out(name: str) -> bool:
    return name in NOT_COPIED or name in OURS or name.lower().startswith(SERVERS)


async def published(dead_letter: Any, native: Any, headers: Mapping[str, Any]) -> None:
    """Publish a dead letter. Raise if no broker has it."""
    options = _of_rabbitmq(native) if broker_of(dead_letter) == "rabbit" else {}
    answer = await dead_letter.publish(native.body, headers=dict(headers), **options)
    if options and _is_returned(answer):
        raise NotTaken("no queue takes it")


def _of_rabbitmq(native: Any) -> dict[str, Any]:
    """Return how RabbitMQ keeps a letter: on its disk, with the properties of its message, or not at all."""
    options: dict[str, Any] = {"persist": True, "mandatory": True}
    if broker_of(native) == "rabbit":
        properties = {NAMES.get(name, name): getattr(native.raw_message, name, None) for name in rabbitmq.COPIED}
        options |= {name: value for name, value in properties.items() if value is not None}
    return options


def _is_returned(answer: object) -> bool:
    # On use: it needs aio-pika.
    from aiormq.abc import DeliveredMessage

    return isinstance(answer, DeliveredMessage)
