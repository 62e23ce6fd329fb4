"""Records that somebody else has locked: how long a renewal waits for them, and how that is reported.

The renewal of one claim must never wait for the row of another. So a batch skips locked rows, then asks for them one by
one, within a part of the lease.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from onefold._model import Claim
from onefold.errors import StoreUnavailable
from onefold.stores.base import PartlyRenewed

# All waits of one renewal take at most an eighth of the shortest lease: half of the heartbeat's timeout.
WAITS_PER_LEASE: Final = 8

# At most so many locked rows are waited for, chosen at random: the others get their turn at another beat.
WAITED_FOR_MAX: Final = 8

# An upper bound for all of them together: claims with a shorter lease may become due meanwhile.
WAIT_SECONDS: Final = 1.0

WHY: Final = (
    "another transaction holds the row of its record: one that used this key in guard.within(), or that changes "
    "onefold_records by hand. Keep such transactions shorter than the lease"
)


class Leases:
    """The leases that a store has claimed. Behind a renewal that waits for a row, those of other claims wait, too."""

    def __init__(self) -> None:
        self.shortest = math.inf
        self._cared_for = math.inf

    def meet(self, lease: float) -> bool:
        """Note a lease that is about to be claimed; return whether a wait in progress may be too long for it.

        If so, the claim has to be sent after that wait; `cared_for` reports its end.
        """
        if lease >= self._cared_for:
            # As nearly all are: an operation has one lease, and it was met before.
            return False
        self.shortest = min(self.shortest, lease)
        return longest_wait(lease) < longest_wait(self._cared_for)

    def cared_for(self, lease: float) -> None:
        self._cared_for = min(self._cared_for, lease)


def longest_wait(lease: float) -> float:
    """Return how long a renewal may wait for all locked rows, given the shortest lease."""
    return min(lease / WAITS_PER_LEASE, WAIT_SECONDS)


def turns(
    claims: Sequence[Claim], locked: Sequence[int], least: float, shortest: float = math.inf
) -> tuple[list[int], float]:
    """Return which of the locked rows to wait for, and how long for each.

    `least` is the shortest possible wait, and `shortest` the shortest lease renewed on the same connection.
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
