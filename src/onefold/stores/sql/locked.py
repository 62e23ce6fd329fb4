"""Records that somebody else has locked: how long a renewal waits for them, and what is said of them.

The renewal of one claim must never wait for the row of another. So a batch passes over rows that are locked, and those
are asked for one by one after it, within a part of the lease.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from onefold._model import Claim
from onefold.errors import StoreUnavailable
from onefold.stores.base import PartlyRenewed

# All waits of one renewal take an eighth of the shortest lease at most: half of what the heartbeat waits for an answer.
WAITS_PER_LEASE: Final = 8

# For so many at most, chosen at random: the others have their turn at another beat.
WAITED_FOR_MAX: Final = 8

# And no longer for all of them: claims with a shorter lease may become due meanwhile.
WAIT_SECONDS: Final = 1.0

WHY: Final = (
    "another transaction holds the row of its record: one that has met this key, by guard.within(), or that works on "
    "onefold_records by hand. Keep such transactions shorter than the lease"
)


class Leases:
    """The leases that a store has claimed: behind a renewal that waits for a row, those of other claims wait, too."""

    def __init__(self) -> None:
        self.shortest = math.inf
        self._cared_for = math.inf

    def meet(self, lease: float) -> bool:
        """Take note of a lease that is about to be claimed; return whether a wait under way may be too long for it.

        Then the claim has to be sent after that wait, which `cared_for` tells.
        """
        self.shortest = min(self.shortest, lease)
        return longest_wait(lease) < longest_wait(self._cared_for)

    def cared_for(self, lease: float) -> None:
        self._cared_for = min(self._cared_for, lease)


def longest_wait(lease: float) -> float:
    """Return how long a renewal waits for all rows that are locked, where this is the shortest lease."""
    return min(lease / WAITS_PER_LEASE, WAIT_SECONDS)


def turns(
    claims: Sequence[Claim], locked: Sequence[int], least: float, shortest: float = math.inf
) -> tuple[list[int], float]:
    """Return which of the locked ones to wait for, and how long for each.

    `least` is the shortest wait there is, and `shortest` the shortest lease that is renewed on the same connection.
    """
    budget = longest_wait(min(shortest, *(claim.lease for claim in claims)))
    count = min(len(locked), WAITED_FOR_MAX, int(budget / least))
    if count == 0:
        return [], 0.0
    return random.sample(list(locked), count), budget / count


class RowHeld(StoreUnavailable):
    """Another transaction holds the row of a record that was to be written without waiting for it."""

    @classmethod
    def of(cls, claim: Claim) -> RowHeld:
        return cls(f"{claim.address.operation} [key {claim.address.digest}]: {WHY}")


def all_known(answers: Sequence[bool | None]) -> list[bool]:
    """Return the answers; raise `PartlyRenewed` where one is missing."""
    if None in answers:
        raise PartlyRenewed(answers, WHY)
    return [bool(answer) for answer in answers]
