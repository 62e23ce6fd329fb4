"""Send dead letters and messages with aiokafka, each confirmed by its broker within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import UNSET, UnsetType

from onefold import UsageError
from onefold._concurrency.generators import run_async
from onefold.durations import Duration, seconds
from onefold.events import tell_sent
from onefold.queues._kafka.messages import (
    WITHIN,
    DeadLettersBase,
    Letter,
    NotConfirmed,
    letter_forms,
    letter_headers,
    message_of,
    sent_headers,
)
from onefold.queues._kafka.offsets import Delivery
from onefold.queues._kafka.partitions import Ledger
from onefold.queues.kafka_offsets import Offsets
from onefold.queues.keys import KEY_HEADER, Key

try:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
    from aiokafka.errors import KafkaError
except ImportError as error:
    raise UsageError("aiokafka is not installed: pip install 'onefold[kafka]'") from error

__all__ = ["AIOKafkaConsumer", "ConsumerRebalanceListener", "DeadLetters", "KafkaError", "TopicPartition", "send"]


class DeadLetters(DeadLettersBase):
    """A topic for messages that can never be handled: unchanged, with their origin and the reason in their headers."""

    sends_by = "send_and_wait"

    def __init__(self, producer: AIOKafkaProducer, topic: str, *, within: Duration = WITHIN) -> None:
        super().__init__(producer, topic, within=within)

    async def bury(self, delivery: Delivery, operation: str, reason: str, digest: str = "") -> bool:
        """Produce the dead letter. Return whether the broker has confirmed it."""
        message = delivery.native
        headers = letter_headers(message.headers, delivery.spot, operation, reason, digest)

        async def produce(letter: Letter) -> object:
            return await _confirmed(
                self._producer, self._topic, letter.value, message.key, letter.headers, self._within
            )

        return await run_async(self._bury(letter_forms(message.value, headers), produce))


async def send(
    producer: AIOKafkaProducer,
    topic: str,
    value: bytes | str,
    *,
    key: Key | UnsetType = UNSET,
    partition_by: bytes | str | None = None,
    headers: Mapping[str, str | bytes] | None = None,
    key_header: str = KEY_HEADER,
    within: Duration = WITHIN,
) -> str:
    """Produce one message with an idempotency key, new unless you pass one, and wait until it is confirmed.

    `partition_by` is what Kafka calls the message's key: equal ones keep their order. Raises `NotConfirmed`; send the
    message again with its `key`.
    """
    chosen, pairs = sent_headers(headers, key, key_header)
    tell_sent(topic, chosen)
    why = await _confirmed(producer, topic, _bytes(value), _bytes(partition_by), pairs, seconds(within, "within"))
    if why is not None:
        raise NotConfirmed(topic, chosen, why)
    return chosen


async def _confirmed(producer: AIOKafkaProducer, topic: str, value: Any, key: Any, headers: Any, within: float) -> Any:
    """Produce a message. Return None once the broker has confirmed it; else why it has not."""
    try:
        async with asyncio.timeout(within):
            await producer.send_and_wait(topic, value, key, headers=headers)
    except TimeoutError:
        return f"no confirmation within {within:g} s"
    except KafkaError as error:
        return error
    return None


def delivery_of(message: Any, ledger: Ledger) -> Delivery:
    spot = ledger.spot(message.topic, message.partition, message.offset)
    return Delivery(spot, message_of(message.value, message.headers, spot), message)


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def saving(handler: Callable[..., Any], offsets: Offsets) -> Callable[..., Any]:
    """Wrap the handler to save the next offset in its transaction."""

    async def handle(message: Any, *, tx: Any) -> None:
        await handler(message, tx=tx)
        await offsets.save_async(tx, message.topic, message.partition, message.offset + 1)

    return handle
