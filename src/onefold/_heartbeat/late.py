"""Report renewals that take too long: a driver that waits for an answer cannot be told to stop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from onefold._heartbeat import clock
from onefold._heartbeat.beats import Beat, Beats, patience
from onefold._heartbeat.logs import told_late
from onefold.durations import as_text
from onefold.events import Teller


def tell_if_late(beats: Beats | None, due: Sequence[Beat], tell: Teller) -> threading.Event:
    """Report renewals that take too long, until the event is set: a driver that waits cannot be told to stop.

    `beats` are all that wait for these, if nothing else is sent before they are answered.
    """
    answered = threading.Event()
    waits = threading.Thread(
        target=_await_answer, args=(answered, beats, due, tell), name="onefold-late-renewal", daemon=True
    )
    # A process that is exiting cannot start threads any more.
    with suppress(RuntimeError):
        waits.start()
    return answered


def _await_answer(answered: threading.Event, beats: Beats | None, due: Sequence[Beat], tell: Teller) -> None:
    """Report each claim that is not renewed, and once more when its lease has ended.

    Claims that become due meanwhile are not renewed either, if nothing is sent before this is answered.
    """
    told: dict[bytes, bool] = {}
    late = list(due)
    pause = patience(late)
    while not answered.wait(pause):
        late = [beat for beat in late if beat.under_way or beat not in due]
        if late:
            too_late(tell, late)
        told |= {beat.claim.token: beat.lost for beat in late}
        alive = [beat for beat in due if beat.under_way] if beats is None else list(beats.values())
        late = [beat for beat in alive if _is_untold(beat, told)]
        pause = patience(late or alive) if alive else pause


def _is_untold(beat: Beat, told: dict[bytes, bool]) -> bool:
    known = told.get(beat.claim.token)
    return beat.due <= clock.monotonic() if known is None else beat.lost and not known


def too_late(tell: Teller, beats: Sequence[Beat], cause: str | None = None) -> None:
    told_late(tell, beats, cause or f"the store has not answered within {as_text(patience(beats))}")
