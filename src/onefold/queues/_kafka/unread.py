"""Detect partitions of ours that have messages but are not read. Pure.

A partition that was paused and forgotten stays silent until a restart, and nothing else reports it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from onefold.queues._kafka.offsets import Partition

# Longer than a poll takes, or a message waits.
UNREAD_AFTER: Final = 60.0

# How often one partition is checked, by querying its broker for its end offset.
LOOK_EVERY: Final = 5.0

# A broker that does not answer must not block the loop.
LOOK_SECONDS_MAX: Final = 1.0


class Ends(NamedTuple):
    """The next position of a partition, and its end. None: unknown."""

    position: int | None
    end: int | None


class Readings:
    """The last time at which a message of each partition was seen."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[Partition, float] = {}
        self._looked: dict[Partition, float] = {}
        # The end at the first look, if the position is unknown.
        self._first_ends: dict[Partition, int] = {}
        self._due = clock() + LOOK_EVERY

    def note(self, partition: Partition) -> None:
        """Note that a message of it was read."""
        self._seen[partition] = self._clock()

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._due

    def silent(self, ours: AbstractSet[Partition]) -> Partition | None:
        """Return the partition to check now: silent for a while, and not checked for the longest time."""
        now = self._clock()
        self._due = now + LOOK_EVERY
        for gone in self._seen.keys() - ours:
            del self._seen[gone]
            self._looked.pop(gone, None)
            self._first_ends.pop(gone, None)
        since = {one: max(self._seen.setdefault(one, now), self._looked.get(one, 0.0)) for one in ours}
        found = min(since, key=since.__getitem__, default=None)
        if found is None or now - since[found] < UNREAD_AFTER:
            return None
        self._looked[found] = now
        return found

    def unread(self, partition: Partition, ends: Ends) -> int:
        """Return how many messages wait in it to be read."""
        if ends.end is None:
            return 0
        if ends.position is not None:
            return max(ends.end - ends.position, 0)
        # The starting position is the consumer's choice (auto.offset.reset): only later messages are certainly unread.
        return max(ends.end - self._first_ends.setdefault(partition, ends.end), 0)

    def silent_for(self, partition: Partition) -> float:
        return self._clock() - self._seen.get(partition, self._clock())
