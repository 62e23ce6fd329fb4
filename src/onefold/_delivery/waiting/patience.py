"""Decide how long a delivery waits between two looks at one that is running elsewhere. Pure."""

from __future__ import annotations

from typing import Final

from onefold._delivery.steps import Waiting
from onefold._model import Record

# The first look follows after 5 ms, the next ones ever more rarely: a quick handler is answered quickly.
PAUSE_FIRST: Final = 0.005
# A long lease announces long work: between two looks at most this part of it, within bounds.
LOOKS_PER_LEASE: Final = 120
PAUSE_MAX: Final = (0.05, 1.0)

# Where a wake-up is expected, looks are for the case that it is lost: that costs 2 s, or as long as it has waited.
TOLD_FIRST: Final = 2.0
TOLD_MAX: Final = 10.0


def waiting_for(found: Record, waited: float, wait: float, lease: float) -> Waiting:
    """Return the step of a delivery that has found another one running."""
    least, most = PAUSE_MAX
    pause = min(max(PAUSE_FIRST, waited / 4), max(min(lease / LOOKS_PER_LEASE, most), least))
    told = min(max(TOLD_FIRST, waited), TOLD_MAX)
    # Its owner may die: somebody looks as the lease ends.
    until_over = max(found.lease_left, PAUSE_FIRST)
    return Waiting(min(pause, until_over), found, min(told, until_over), wait - waited)
