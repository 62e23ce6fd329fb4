"""Send dead letters and messages with confluent-kafka, each confirmed by its delivery report within a bound."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import UNSET, UnsetType

from onefold import UsageError
from onefold._concurrency.generators import run
from onefold.durations import Duration, seconds
from onefold.events import tell_sent
from onefold.queues._kafka.messages import (
    WITHIN,
    DeadLettersBase,
    Letter,
    NotConfirmed,
    Unreadable,
    letter_forms,
    letter_headers,
    message_of,
    sent_headers,
)
from onefold.queues._kafka.notices import log
from onefold.queues._kafka.offsets import Delivery
from onefold.queues._kafka.partitions import Ledger
from onefold.queues.kafka_offsets import Offsets
from onefold.queues.keys import KEY_HEADER, Key

try:
    from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
except ImportError as error:
    raise UsageError("confluent-kafka is not installed: pip install 'onefold[kafka]'") from error

__all__ = ["Consumer", "DeadLetters", "KafkaException", "Message", "Producer", "TopicPartition", "send"]

# How often to look for a delivery report.
REPORT_POLL: Final = 0.1

# Called this way, Python checks for an error that the client has set beside its result; a plain call may miss it.
_asked_for_headers: Final = operator.methodcaller("headers")

TOO_LATE: Final = "Set max.poll.interval.ms above your longest handler, or poll, and above wait="


class DeadLetters(DeadLettersBase):
    """A topic for messages that can never be handled: unchanged, with their origin and the reason in their headers."""

    sends_by = "produce"

    def __init__(self, producer: Producer, topic: str, *, within: Duration = WITHIN) -> None:
        super().__init__(producer, topic, within=within)

    def bury(self, delivery: Delivery, operation: str, reason: str, digest: str = "") -> bool:
        """Produce the dead letter. Return whether the broker has confirmed it."""
        message = delivery.native
        headers = letter_headers(message.headers(), delivery.spot, operation, reason, digest)
        whole = not isinstance(delivery.message.headers, Unreadable)

        def produce(letter: Letter) -> object:
            return _confirmed(self._producer, self._topic, letter.value, message.key(), letter.headers, self._within)

        return run(self._bury(letter_forms(message.value(), headers, whole=whole), produce))


def send(
    producer: Producer,
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
    why = _confirmed(producer, topic, value, partition_by, pairs, seconds(within, "within"))
    if why is not None:
        raise NotConfirmed(topic, chosen, why)
    return chosen


def _confirmed(producer: Producer, topic: str, value: Any, key: Any, headers: Any, within: float) -> object:
    """Produce a message. Return None once the broker has confirmed it; else why it has not."""
    reports: list[object] = []

    def report(error: object, _message: object) -> None:
        reports.append(error)

    deadline = time.monotonic() + within
    while True:
        try:
            # By keyword: a SerializingProducer has another order.
            producer.produce(topic, value=value, key=key, headers=headers, on_delivery=report)
            break
        except BufferError:
            if time.monotonic() >= deadline:
                return "the producer's queue is full"
            producer.poll(REPORT_POLL)
        except KafkaException as error:
            return error
    while not reports and (left := deadline - time.monotonic()) > 0:
        producer.poll(min(left, REPORT_POLL))
    return reports[0] if reports else f"no report within {within:g} s"


def delivery_of(message: Any, ledger: Ledger) -> Delivery:
    spot = ledger.spot(message.topic(), message.partition(), message.offset())
    return Delivery(spot, message_of(message.value(), headers_of(message), spot), message)


def headers_of(message: Any) -> Any:
    """Return the headers of a message; `Unreadable` if a name among them is not text."""
    try:
        return _asked_for_headers(message)
    except (SystemError, UnicodeDecodeError):
        # The client has kept a list with holes in it; reading that one crashes the process.
        message.set_headers([])
        return Unreadable()


def is_news(message: Any) -> bool:
    """Return whether this is an event of the client instead of a message. Raise an unrecoverable one."""
    error = message.error()
    if error is not None and error.fatal():
        raise KafkaException(error)
    if error is not None and error.code() != KafkaError._PARTITION_EOF:
        late = error.code() == KafkaError._MAX_POLL_EXCEEDED
        log.warning("the consumer reports: %s%s", error, f". {TOO_LATE}" if late else "")
    return error is not None


def saving(handler: Callable[..., Any], offsets: Offsets) -> Callable[..., Any]:
    """Wrap the handler to save the next offset in its transaction."""

    def handle(message: Any, *, tx: Any) -> None:
        handler(message, tx=tx)
        offsets.save(tx, message.topic(), message.partition(), message.offset() + 1)

    return handle
