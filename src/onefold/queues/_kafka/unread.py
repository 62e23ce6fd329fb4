"""Detect partitions that are ours and have messages, but are not read. Pure.

Pausing a partition and forgetting it silences it until a restart, and nothing else says so.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from onefold.queues._kafka.offsets import Partition

# Longer than a poll takes, and than a message waits.
UNREAD_AFTER: Final = 60.0

# One partition is looked at so often: its broker is asked for its end.
LOOK_EVERY: Final = 5.0

# A broker that does not answer must not keep the loop.
LOOK_SECONDS_MAX: Final = 1.0


class Ends(NamedTuple):
    """Where a partition is read next, and where it ends. None: unknown."""

    position: int | None
    end: int | None


class Readings:
    """The last time at which a message of each partition was seen."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[Partition, float] = {}
        self._looked: dict[Partition, float] = {}
        # The end at the first look, where nobody knows the position.
        self._first_ends: dict[Partition, int] = {}
        self._due = clock() + LOOK_EVERY

    def note(self, partition: Partition) -> None:
        """Note that a message of it was read."""
        self._seen[partition] = self._clock()

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._due

    def silent(self, ours: AbstractSet[Partition]) -> Partition | None:
        """Return the partition to look at now: one without a message for a while, and not looked at for longest."""
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
        # Where it begins is the consumer's own affair (auto.offset.reset): what came since is certainly not read.
        return max(ends.end - self._first_ends.setdefault(partition, ends.end), 0)

    def silent_for(self, partition: Partition) -> float:
        return self._clock() - self._seen.get(partition, self._clock())
