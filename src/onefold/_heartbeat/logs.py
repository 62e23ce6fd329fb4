"""Report claims that were not renewed: a warning in the log, and an event for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from onefold._model import Claim
from onefold.durations import as_text
from onefold.errors import OnefoldError, although_it_ran
from onefold.events import Kind, Teller


class Told(Protocol):
    """A claim that the heartbeat renews."""

    claim: Claim

    @property
    def left(self) -> float: ...


def told_late(tell: Teller, beats: Sequence[Told], cause: str) -> None:
    _warn(beats, cause)
    for beat in beats:
        tell(Kind.NOT_RENEWED, beat.claim.address, detail="late")


def told_failed(tell: Teller, beats: Sequence[Told], error: Exception) -> None:
    # Any other message may quote a statement, and with it a key.
    _warn(beats, f"{type(error).__name__}: {error}" if isinstance(error, OnefoldError) else type(error).__name__)
    for beat in beats:
        tell(Kind.STORE_FAILED, beat.claim.address, detail=f"extend: {type(error).__name__}")
        tell(Kind.NOT_RENEWED, beat.claim.address, detail=type(error).__name__)


def told_left(seconds: float) -> None:
    """Log that a heartbeat was closed while a renewal was in progress."""
    import logging

    logging.getLogger("onefold").warning(
        "a guard was closed, and a renewal that is under way has not been answered within %s: it and its "
        "connection are abandoned. Give the driver timeouts below the lease",
        as_text(seconds),
    )


def _warn(beats: Sequence[Told], cause: str) -> None:
    """Log a missed renewal while there is still time: another worker may take over the claim when its lease is over."""
    import logging

    first = min(beats, key=lambda beat: beat.left)
    others = f", and {len(beats) - 1} others" if len(beats) > 1 else ""
    left = round(first.left, 1)
    logging.getLogger("onefold").warning(
        "%s [key %s]%s: the claim was not renewed, and its lease %s: %s",
        first.claim.address.operation,
        first.claim.address.digest,
        others,
        f"ends in {as_text(left)}" if left > 0 else "has ended",
        # The handler is running.
        although_it_ran(cause),
    )
