"""The live claims: when each was renewed, when it is due again, and whether it is lost.

A claim is renewed every third of its lease. Whether it is lost is determined by the worker's own monotonic clock, one
lease after the *sending* of the last confirmed renewal, so that it shows even while the heartbeat itself is starved.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Final, Protocol
from weakref import WeakSet

import msgspec

from onefold._heartbeat import clock
from onefold._model import Claim

# Two beats may fail before the lease ends.
BEATS_PER_LEASE: Final = 3

# How long closing a heartbeat waits for renewals in progress: a driver that waits for an answer cannot be told to stop.
CLOSE_SECONDS: Final = 5.0


class Beat(msgspec.Struct, eq=False):
    """One claim that the heartbeat renews."""

    claim: Claim
    # When the last confirmed renewal was sent, and when the next one is due.
    sent: float
    due: float
    # Called once when the claim is lost, if the policy asks for it.
    cancel: Callable[[], object] | None = None
    cancelled: bool = False
    # A renewal was sent and has not been answered: no second one is sent behind it.
    under_way: bool = False

    @property
    def left(self) -> float:
        """Return how long the claim is certainly still ours."""
        return self.sent + self.claim.lease - clock.monotonic()

    @property
    def lost(self) -> bool:
        return self.left <= 0

    def refuse(self) -> None:
        """Mark the claim as lost, because the store says that another owns it; send no more renewals."""
        self.sent, self.due = -math.inf, math.inf

    @property
    def refused(self) -> bool:
        return self.sent == -math.inf


class Beats(dict[bytes, Beat]):
    """The live claims of one guard in this process, by token."""

    def add(self, claims: Sequence[Claim], sent: float) -> tuple[float, float]:
        """Add claims; return how long all of them are certainly still ours, and when the first is due."""
        end = due = math.inf
        for claim in claims:
            beat = self.setdefault(claim.token, Beat(claim, sent, sent + claim.lease / BEATS_PER_LEASE))
            if beat.sent + claim.lease < end:
                end = beat.sent + claim.lease
            if beat.due < due:
                due = beat.due
        return end - clock.monotonic(), due

    def add_one(self, claim: Claim, sent: float) -> tuple[float, float]:
        """Do the same for one claim: almost every delivery has one."""
        beat = Beat(claim, sent, sent + claim.lease / BEATS_PER_LEASE)
        if self.setdefault(claim.token, beat) is not beat:
            return self.add((claim,), sent)
        return sent + claim.lease - clock.monotonic(), beat.due

    def drop(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self.pop(claim.token, None)

    def next_due(self) -> float:
        return min((beat.due for beat in list(self.values())), default=math.inf)

    def due(self, now: float) -> list[Beat]:
        """Return the beats to send now; each is due again a third of its lease later, whatever its answer."""
        due = [beat for beat in list(self.values()) if beat.due <= now]
        for beat in due:
            beat.due = now + beat.claim.lease / BEATS_PER_LEASE
        return [beat for beat in due if not beat.under_way]

    def cancel_lost(self) -> None:
        for beat in list(self.values()):
            if beat.cancel is not None and beat.lost:
                cancel, beat.cancel, beat.cancelled = beat.cancel, None, True
                cancel()


def patience(beats: Sequence[Beat]) -> float:
    """Return how long renewals may take: less than the time between two beats, so that one more can be sent."""
    return min(beat.claim.lease for beat in beats) / (BEATS_PER_LEASE + 1)


class Resets(Protocol):
    """A heartbeat, as a fork sees it."""

    def reset(self) -> None: ...


ALIVE: Final[WeakSet[Resets]] = WeakSet()


def _begin_anew() -> None:
    for heartbeat in list(ALIVE):
        heartbeat.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
