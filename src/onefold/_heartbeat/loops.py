"""Keeps the claims of an async guard alive: one timer of each event loop for all of them, batched where the store can.

A renewal that fails, or takes too long, is a warning at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from onefold._heartbeat import clock
from onefold._heartbeat.beats import ALIVE, Beat, Beats
from onefold._heartbeat.groups import TASKS_MAX, groups_of
from onefold._heartbeat.logs import told_failed
from onefold._heartbeat.renewal import claims_of, grouped, outcome_of, renew_async, tell_failures
from onefold._model import Claim
from onefold.errors import ClaimLost
from onefold.events import Teller
from onefold.stores.base import AsyncBatching

if TYPE_CHECKING:
    import asyncio


class LoopBeats:
    """The beats of one event loop, and the timer that waits for the next."""

    def __init__(self) -> None:
        self.beats = Beats()
        self.wakes_at = math.inf
        self.timer: asyncio.TimerHandle | None = None
        self.tasks: set[asyncio.Task[None]] = set()


class AsyncHeartbeat:
    """For async guards: one timer per event loop, and a short task for each beat. A new loop finds a new timer."""

    def __init__(self, store: Callable[[], Any], tell: Teller) -> None:
        # Imported with the first heartbeat rather than with onefold: blocking code needs no asyncio.
        from asyncio import get_running_loop

        self._store = store
        self._tell = tell
        self._running_loop = get_running_loop
        self.reset()
        ALIVE.add(self)

    def reset(self) -> None:
        """Begin anew: in a forked child, where the parent's loop does not run and its claims are not ours."""
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBeats] = weakref.WeakKeyDictionary()

    def watch(self, claims: Sequence[Claim], sent: float) -> float:
        """Keep these claims alive from now on; the answer is how long all of them are certainly still ours."""
        here = self._here()
        left, due = here.beats.add(claims, sent)
        if due < here.wakes_at:
            self._wake_at(here, due)
        return left

    def find(self, token: bytes) -> Beat | None:
        return self._here().beats.get(token)

    def left(self, claim: Claim) -> float:
        """How long this claim is certainly still ours."""
        beat = self.find(claim.token)
        return 0.0 if beat is None else beat.left

    def left_of(self, claims: Sequence[Claim]) -> float | None:
        """How long all of these claims are certainly still ours; None: none of them is under our care."""
        beats = self._here().beats
        found = [beats[claim.token].left for claim in claims if claim.token in beats]
        return min(found, default=None)

    def unwatch(self, claims: Sequence[Claim]) -> None:
        self._here().beats.drop(claims)

    def cancel_when_lost(self, token: bytes) -> None:
        """Cancel the task that runs now, once this claim is lost."""
        from asyncio import current_task

        beat, task = self.find(token), current_task()
        if beat is not None and task is not None:
            beat.cancel = task.cancel

    def rescue(self, token: bytes, error: BaseException) -> BaseException:
        """A cancellation that we asked for is `ClaimLost`; anybody else's stays what it is."""
        from asyncio import CancelledError, current_task

        beat, task = self.find(token), current_task()
        if not isinstance(error, CancelledError) or beat is None or not beat.cancelled or task is None:
            return error
        return error if task.uncancel() else ClaimLost.about(beat.claim.address, value=None)

    def close(self) -> None:
        """Stop the timers; claims that are still alive end with their leases."""
        for here in list(self._loops.values()):
            if here.timer is not None:
                here.timer.cancel()
            for task in list(here.tasks):
                task.cancel()
        self.reset()

    def _here(self) -> LoopBeats:
        loop = self._running_loop()
        here = self._loops.get(loop)
        if here is None:
            here = self._loops[loop] = LoopBeats()
        return here

    def _wake_at(self, here: LoopBeats, moment: float) -> None:
        if here.timer is not None:
            here.timer.cancel()
        here.wakes_at = moment
        delay = max(moment - clock.monotonic(), 0.0)
        here.timer = self._running_loop().call_later(delay, self._start, here)

    def _start(self, here: LoopBeats) -> None:
        here.timer, here.wakes_at = None, math.inf
        if here.beats:
            task = self._running_loop().create_task(self.beat(here), name="onefold-heartbeat")
            here.tasks.add(task)
            task.add_done_callback(here.tasks.discard)

    async def beat(self, here: LoopBeats) -> None:
        """Plan the next beat, renew what is due, and cancel what is lost and asks for it."""
        due = here.beats.due(clock.monotonic())
        # At once: a server that is silent keeps those waiting that it has, and no others.
        moment = here.beats.next_due()
        if moment < here.wakes_at:
            self._wake_at(here, moment)
        if due:
            for beat in due:
                beat.under_way = True
            try:
                await self._renew_all(due)
            except Exception as error:  # noqa: BLE001 - the next beat tries again, and `lost` is told by the clock
                told_failed(self._tell, due, error)
            finally:
                for beat in due:
                    beat.under_way = False
        here.beats.cancel_lost()

    async def _renew_all(self, due: list[Beat]) -> None:
        from asyncio import Semaphore, gather

        store = self._store()
        batching = isinstance(store, AsyncBatching)
        groups = grouped(due, groups_of(store, claims_of(due), batching=batching))
        if len(groups) == 1:
            outcomes = [await outcome_of(renew_async(store, due, batching=batching), due)]
        else:
            room = Semaphore(TASKS_MAX)
            asked = (outcome_of(renew_async(store, group, batching=batching, room=room), group) for group in groups)
            outcomes = await gather(*asked)
        tell_failures(self._tell, outcomes)
