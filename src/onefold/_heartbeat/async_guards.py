"""Keep the claims of an async guard alive: one timer per event loop for all of them, batched where the store can.

A renewal that fails, or takes too long, is reported at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from onefold._heartbeat import clock
from onefold._heartbeat.beats import ALIVE, CLOSE_SECONDS, Beat, Beats
from onefold._heartbeat.groups import TASKS_MAX, groups_of
from onefold._heartbeat.logs import told_failed, told_left
from onefold._heartbeat.renewal import claims_of, grouped, outcome_of, renew_async, tell_failures
from onefold._model import Claim
from onefold.errors import ClaimLost
from onefold.events import Teller
from onefold.stores.base import AsyncBatching

if TYPE_CHECKING:
    import asyncio


class LoopBeats:
    """The beats of one event loop, and the timer for the next one."""

    def __init__(self) -> None:
        self.beats = Beats()
        self.wakes_at = math.inf
        self.timer: asyncio.TimerHandle | None = None
        self.tasks: set[asyncio.Task[None]] = set()


class AsyncHeartbeat:
    """The heartbeat of async guards: one timer per event loop, and a short task for each beat."""

    def __init__(self, store: Callable[[], Any], tell: Teller) -> None:
        # Imported with the first heartbeat rather than with onefold: blocking code needs no asyncio.
        from asyncio import get_running_loop

        self._store = store
        self._tell = tell
        self._running_loop = get_running_loop
        self.reset()
        ALIVE.add(self)

    def reset(self) -> None:
        """Start over in a forked child, where the parent's loop does not run and its claims are not ours."""
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBeats] = weakref.WeakKeyDictionary()
        # The loop that was looked up last, and its beats: usually there is one.
        self._last: tuple[weakref.ref[asyncio.AbstractEventLoop], LoopBeats] | None = None

    def watch(self, claims: Sequence[Claim], sent: float) -> float:
        """Keep these claims alive from now on; return how long all of them are certainly still ours."""
        here = self._here()
        left, due = here.beats.add_one(claims[0], sent) if len(claims) == 1 else here.beats.add(claims, sent)
        if due < here.wakes_at:
            self._wake_at(here, due)
        return left

    def find(self, token: bytes) -> Beat | None:
        return self._here().beats.get(token)

    def left(self, claim: Claim) -> float:
        """Return how long this claim is certainly still ours."""
        beat = self.find(claim.token)
        return 0.0 if beat is None else beat.left

    def left_of(self, claims: Sequence[Claim]) -> float | None:
        """Return how long all of these claims are certainly still ours; None if none of them is watched."""
        beats = self._here().beats
        found = [beats[claim.token].left for claim in claims if claim.token in beats]
        return min(found, default=None)

    def unwatch(self, claims: Sequence[Claim]) -> None:
        """Let these claims go, in whichever loop they are: a delivery may be collected in another thread."""
        for found in self._loops.keyrefs():
            loop = found()
            here = None if loop is None else self._loops.get(loop)
            if here is not None:
                here.beats.drop(claims)

    def cancel_when_lost(self, token: bytes) -> None:
        """Cancel the current task once this claim is lost."""
        from asyncio import current_task

        beat, task = self.find(token), current_task()
        if beat is not None and task is not None:
            beat.cancel = task.cancel

    def rescue(self, token: bytes, error: BaseException) -> BaseException:
        """Turn a cancellation that we requested into `ClaimLost`; return any other error unchanged."""
        from asyncio import CancelledError, current_task

        beat, task = self.find(token), current_task()
        if not isinstance(error, CancelledError) or beat is None or not beat.cancelled or task is None:
            return error
        return error if task.uncancel() else ClaimLost.about(beat.claim.address, value=None)

    def close(self) -> None:
        """Stop the timers; live claims end with their leases."""
        for here in list(self._loops.values()):
            if here.timer is not None:
                here.timer.cancel()
            for task in list(here.tasks):
                task.cancel()
        self.reset()

    async def aclose(self) -> None:
        """Close, and wait for renewals in progress in this event loop, within a bound.

        One that is cancelled gives its connection back in a task of its own: if the event loop ended before that, the
        connection would stay open.
        """
        from asyncio import wait

        here = self._loops.get(self._running_loop())
        tasks = set() if here is None else set(here.tasks)
        self.close()
        if tasks and (await wait(tasks, timeout=CLOSE_SECONDS))[1]:
            told_left(CLOSE_SECONDS)

    def _here(self) -> LoopBeats:
        loop, last = self._running_loop(), self._last
        if last is not None and last[0]() is loop:
            return last[1]
        here = self._loops.get(loop)
        if here is None:
            self._forget_closed()
            here = self._loops[loop] = LoopBeats()
        self._last = weakref.ref(loop), here
        return here

    def _forget_closed(self) -> None:
        """Forget loops that were closed: the timer of each knows its loop, and would keep it forever."""
        for found in self._loops.keyrefs():
            loop = found()
            if loop is not None and loop.is_closed():
                self._loops.pop(loop, None)

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
        """Schedule the next beat, renew the claims that are due, and cancel the tasks of lost ones if requested."""
        due = here.beats.due(clock.monotonic())
        # At once: an unresponsive server delays only its own claims.
        moment = here.beats.next_due()
        if moment < here.wakes_at:
            self._wake_at(here, moment)
        if due:
            for beat in due:
                beat.under_way = True
            try:
                await self._renew_all(due)
            except Exception as error:  # noqa: BLE001 - the next beat retries, and `lost` is determined by the clock
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
