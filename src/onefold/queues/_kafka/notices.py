"""Report what happens to Kafka's messages: log lines that lead to a record, and the event of a dead letter.

A key is shown as its digest. Nothing here shows a key, a payload or the text of a handler's error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from onefold.events import Kind, tell
from onefold.queues._kafka.offsets import Delivery, Partition, Spot
from onefold.queues._shared.logs import Waits, buried, found_at
from onefold.queues._shared.verdict import Later
from onefold.queues.keys import Message
from onefold.stores.base import Address

log = logging.getLogger("onefold.queues.kafka")

UNHEARD: Final = (
    "the consumer is subscribed without our callbacks, so nobody learns which partitions come and go: their counts and "
    "waiting messages outlive them, and offsets that are kept in a database are not read. Call handle.subscribe([...]) "
    "instead of consumer.subscribe([...]), or %s in callbacks of your own"
)

AddressOf = Callable[[Message], Address]


class Undeliverable(RuntimeError):
    """A message can never be handled, and there are no dead letters for it: the consumer has to stop.

    `digest` is that of its key, as for `onefold show`; empty if it has none.
    """

    def __init__(self, text: str, spot: Spot, address: Address, reason: str) -> None:
        super().__init__(text)
        self.topic, self.partition = spot.partition
        self.offset = spot.offset
        self.operation = address.operation
        self.digest = address.digest if address.key else ""
        self.reason = reason


def unaddressed(_message: Message) -> Address:
    return Address("", "", "")


class Notices:
    """Reports what happens to messages; a cause that makes many of them wait, only once in a while."""

    def __init__(self, address_of: AddressOf, clock: Callable[[], float]) -> None:
        self._address_of = address_of
        self._waits = Waits(clock)

    def name(self, delivery: Delivery) -> str:
        """Return the message's position in Kafka, and the name of its record."""
        (topic, number), offset, _ = delivery.spot
        return found_at(f"{topic}/{number} offset {offset}", self._address_of(delivery.message))

    def failed(self, delivery: Delivery, attempt: str, what: str, error: Exception) -> None:
        name = self.name(delivery)
        log.debug("%s: the handler raised", name, exc_info=error)
        log.warning("%s: %s failed: %s", name, attempt, what)

    def waits(self, delivery: Delivery, later: Later) -> None:
        """Report that the partition waits for this message."""
        self._waits.tell(log, self.name(delivery), later)

    def buried(self, delivery: Delivery, reason: str) -> None:
        """Report that the broker has confirmed the dead letter."""
        log.error("%s: to the dead letters: %s", self.name(delivery), reason)
        buried(self._address_of(delivery.message), reason)

    def unread(self, partition: Partition, count: int, silent_for: float) -> None:
        """Report a partition of ours that has messages but is not read."""
        where = f"{partition.topic}/{partition.number}"
        log.warning(
            "%s is assigned to this consumer, has %d messages, and none was read for %.0f s: it was paused and not "
            "resumed, or the consumer is too slow for its partitions",
            where,
            count,
            silent_for,
        )
        tell(Kind.UNREAD, self._address_of(Message(b"", {})), detail=f"{where}: {count} messages")

    def undeliverable(self, delivery: Delivery, reason: str) -> Undeliverable:
        name = self.name(delivery)
        log.error("%s: it can never be handled, and there are no dead letters, so the consumer stops: %s", name, reason)
        return Undeliverable(f"{name}: {reason}", delivery.spot, self._address_of(delivery.message), reason)
