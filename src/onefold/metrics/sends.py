"""Count what a producer sends, and how many keys that is: sends that repeat a key are retries, and retries are normal.

A producer that sends again under new keys shows as one that never repeats a key.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

from onefold.events import Sent
from onefold.metrics.table import SENDS, SENT_KEYS, Metric, Operations

# A retry comes seconds or minutes after the first attempt: so many keys are remembered at least, and twice as many at
# most. Exact, and a few MB; an estimate of all keys ever sent would fit into less, but its error of a percent or two is
# larger than the share of retries.
RECENT_MIN: Final = 25_000


class RecentKeys:
    """The keys sent last, as hashes, in two generations: when the younger is full, the older is forgotten."""

    def __init__(self, least: int = RECENT_MIN) -> None:
        self._least = least
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._adding = threading.Lock()

    def __len__(self) -> int:
        return len(self._young | self._old)

    def is_new(self, sent: Sent) -> bool:
        """Return whether this key was not sent to this hop lately, and remember it."""
        # Of this process only, and 64 bits: among so many, two are the same once in some ten billion sets.
        digest = hash(sent)
        with self._adding:
            known = digest in self._young or digest in self._old
            self._young.add(digest)
            if len(self._young) == self._least:
                self._young, self._old = set(), self._young
        return not known


class CountedSends:
    """Tell which counters a message that is sent increments."""

    def __init__(self, least: int = RECENT_MIN) -> None:
        self._hops = Operations()
        self._keys = RecentKeys(least)

    def counted(self, sent: Sent) -> Iterator[tuple[Metric, tuple[str, ...]]]:
        """Yield the counters, with their labels."""
        labels = (self._hops.label(sent.hop),)
        yield SENDS, labels
        if self._keys.is_new(sent):
            yield SENT_KEYS, labels
