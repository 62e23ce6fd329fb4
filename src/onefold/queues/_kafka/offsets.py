"""Where Kafka's messages are, for both clients. Data only."""

from __future__ import annotations

from typing import Any, NamedTuple

from onefold.queues.keys import Message


class Partition(NamedTuple):
    topic: str
    number: int


class Spot(NamedTuple):
    """Where a message was, and in which assignment of its partition it was read."""

    partition: Partition
    offset: int
    turn: int

    @property
    def position(self) -> tuple[Partition, int]:
        return self.partition, self.offset


class Delivery(NamedTuple):
    """A message in progress: where it was, as the keys see it, and as the client gave it."""

    spot: Spot
    message: Message
    native: Any
