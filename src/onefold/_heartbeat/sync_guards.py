"""Keep the claims of a sync guard alive: one thread for all of them, batched where the store can.

A renewal that fails, or takes too long, is reported at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from onefold._heartbeat import clock
from onefold._heartbeat.beats import ALIVE, CLOSE_SECONDS, Beat, Beats
from onefold._heartbeat.groups import HANGING_MAX, are_one_group, groups_of, spread
from onefold._heartbeat.late import tell_if_late
from onefold._heartbeat.logs import told_failed, told_late, told_left
from onefold._heartbeat.renewal import claims_of, grouped, renew
from onefold._heartbeat.thread import AT_ONCE, Bell, thread_for
from onefold._model import Claim
from onefold.events import Teller
from onefold.stores.base import Batching


class Heartbeat:
    """The heartbeat of sync guards: one daemon thread, started with the first claim, asleep while nothing is due."""

    def __init__(self, store: Callable[[], Any], tell: Teller) -> None:
        self._store = store
        self._tell = tell
        self.reset()
        ALIVE.add(self)

    def reset(self) -> None:
        """Start over in a forked child, where the parent's thread does not run and its claims are not ours."""
        self.beats = Beats()
        # Finds the beat of a token: an attribute, because every delivery asks.
        self.find: Callable[[bytes], Beat | None] = self.beats.get
        self._bell: Bell = Bell()
        # Set only by the thread.
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None
        self._renewers: list[threading.Thread] = []
        self.closed = False

    def watch(self, claims: Sequence[Claim], sent: float) -> float:
        """Keep these claims alive from now on; return how long all of them are certainly still ours."""
        left, due = self.beats.add_one(claims[0], sent) if len(claims) == 1 else self.beats.add(claims, sent)
        # For almost every claim the thread already waits for an earlier time, and needs no wake-up.
        if due < self._wakes_at:
            self._wake_at(due)
        return left

    def _wake_at(self, moment: float) -> None:
        """Make the thread wake at this time.

        Nothing is locked, as an interrupt may strike at any line: two callers may each start a thread, and then the one
        whose bell was replaced ends.
        """
        if self._thread is None or not self._thread.is_alive():
            before, self._bell = self._bell, Bell()
            before.put(AT_ONCE)
            self._thread = thread_for(self, self._bell)
            self._thread.start()
        self._bell.put(moment)

    def left(self, claim: Claim) -> float:
        """Return how long this claim is certainly still ours."""
        beat = self.find(claim.token)
        return 0.0 if beat is None else beat.left

    def unwatch(self, claims: Sequence[Claim]) -> None:
        self.beats.drop(claims)

    def close(self) -> None:
        """Stop the thread; live claims end with their leases.

        Wait for renewals in progress, within a bound: a connection that they opened after the store was closed would
        stay open until the process ends.
        """
        self.closed = True
        self._bell.put(AT_ONCE)
        ends = clock.monotonic() + CLOSE_SECONDS
        # The thread first: it may be about to start one of the others.
        ended = [self._thread is None or _joined(self._thread, ends)]
        ended += [_joined(renewer, ends) for renewer in self._renewers]
        if not all(ended):
            told_left(CLOSE_SECONDS)
        self.reset()

    def is_over(self, bell: Bell) -> bool:
        """Return whether the thread that listens to this bell has to end."""
        return self.closed or bell is not self._bell

    def attend(self, moment: float | None) -> float:
        """Renew the claims that are due; return the time until the next beat, even if its claim is dropped before.

        `moment` is the time that the bell rang for, or None after an uninterrupted pause.
        """
        if moment is not None and moment < self._wakes_at:
            self._wakes_at = moment
        if moment is None or self._wakes_at <= clock.monotonic():
            self.beat()
            # Infinity first, then the next due time: a claim added in between either sees infinity or is counted.
            self._wakes_at = math.inf
            self._wakes_at = self.beats.next_due()
        return self._wakes_at - clock.monotonic()

    def beat(self) -> None:
        """Renew the claims that are due. A renewal that fails is sent again at the next beat; `lost` stays correct."""
        due = self.beats.due(clock.monotonic())
        if not due:
            return
        try:
            store = self._store()
            batching = isinstance(store, Batching)
            groups = grouped(due, groups_of(store, claims_of(due), batching=batching))
        except Exception as error:  # noqa: BLE001 - the next beat retries, and `lost` is determined by the clock
            told_failed(self._tell, due, error)
            return
        for beat in due:
            beat.under_way = True
        if are_one_group(store, batching=batching):
            answered = tell_if_late(self.beats, due, self._tell)
            renew(store, due, self._tell)
            answered.set()
        else:
            self._renew_apart(store, due, groups)

    def _renew_apart(self, store: Any, due: list[Beat], groups: list[list[Beat]]) -> None:
        """Renew each group separately, without waiting for all: one group's next beat may come while another hangs."""
        tell = self._tell
        self._renewers = [thread for thread in self._renewers if thread.is_alive()]
        room = HANGING_MAX - len(self._renewers)
        if room <= 0:
            for beat in due:
                beat.under_way = False
            told_late(tell, due, f"{HANGING_MAX} renewals were sent before it, and the store has not answered them")
            return
        answered = tell_if_late(None, due, tell)

        def renew_group(group: list[Beat]) -> None:
            renew(store, group, tell)
            if not any(beat.under_way for beat in due):
                answered.set()

        self._renewers += spread(renew_group, groups, room)


def _joined(thread: threading.Thread, ends: float) -> bool:
    """Wait for a thread until this time; return whether it has ended, or is the current thread."""
    if thread is threading.current_thread():
        return True
    thread.join(max(ends - clock.monotonic(), 0.0))
    return not thread.is_alive()
