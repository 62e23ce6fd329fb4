"""The positions of Kafka's messages, for both clients. Data only."""

from __future__ import annotations

from typing import Any, NamedTuple

from onefold.queues.keys import Message


class Partition(NamedTuple):
    topic: str
    number: int


class Spot(NamedTuple):
    """The position of a message, and the assignment of its partition in which it was read."""

    partition: Partition
    offset: int
    turn: int

    @property
    def position(self) -> tuple[Partition, int]:
        return self.partition, self.offset


class Delivery(NamedTuple):
    """A message in progress: its position, its form for reading keys, and the client's own object."""

    spot: Spot
    message: Message
    native: Any
