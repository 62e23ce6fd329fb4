"""Records that somebody else has locked: how long a renewal waits for them, and what is said of them.

The renewal of one claim must never wait for the row of another. So a batch passes over rows that are locked, and those
are asked for one by one after it, within a part of the lease.
"""

from __future__ import annotations

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


def turns(claims: Sequence[Claim], locked: Sequence[int], least: float) -> tuple[list[int], float]:
    """Return which of the locked ones to wait for, and how long for each; `least` is the shortest wait there is."""
    budget = min(min(claim.lease for claim in claims) / WAITS_PER_LEASE, WAIT_SECONDS)
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
