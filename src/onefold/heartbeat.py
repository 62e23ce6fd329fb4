"""Keeps live claims alive: one thread, or one timer of the event loop, for all claims of a guard.

A claim is renewed every third of its lease, batched where the store can. Whether it is lost is told by the worker's
own monotonic clock, one lease after the *sending* of the last confirmed renewal, so that it shows even while the
heartbeat itself is starved.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from onefold._model import Claim
from onefold.errors import ClaimLost
from onefold.events import Kind, Teller
from onefold.stores.base import AsyncBatching, Batching

if TYPE_CHECKING:
    import asyncio

# Two beats may fail before the lease ends.
BEATS_PER_LEASE: Final = 3


class Beat:
    """One claim under the heartbeat's care."""

    __slots__ = ("cancel", "cancelled", "claim", "due", "refused", "sent")

    def __init__(self, claim: Claim, sent: float) -> None:
        self.claim = claim
        self.sent = sent
        self.due = sent + claim.lease / BEATS_PER_LEASE
        self.refused = False
        # Called once when the claim is lost, where the policy asks for it.
        self.cancel: Callable[[], object] | None = None
        self.cancelled = False

    @property
    def left(self) -> float:
        """How long the claim is certainly still ours."""
        return 0.0 if self.refused else self.sent + self.claim.lease - time.monotonic()

    @property
    def lost(self) -> bool:
        return self.left <= 0


class Beats:
    """The claims of one guard that are alive in this process, by token."""

    def __init__(self) -> None:
        self._beats: dict[bytes, Beat] = {}

    def add(self, claim: Claim, sent: float) -> Beat:
        return self._beats.setdefault(claim.token, Beat(claim, sent))

    def remove(self, claim: Claim) -> None:
        self._beats.pop(claim.token, None)

    def find(self, claim: Claim) -> Beat | None:
        return self._beats.get(claim.token)

    def __len__(self) -> int:
        return len(self._beats)

    def next_due(self) -> float:
        return min((beat.due for beat in list(self._beats.values())), default=math.inf)

    def due(self, now: float) -> list[Beat]:
        """The beats to send now; each is due again a third of its lease later, whatever comes of this one."""
        due = [beat for beat in list(self._beats.values()) if beat.due <= now and not beat.refused]
        for beat in due:
            beat.due = now + beat.claim.lease / BEATS_PER_LEASE
        return due

    def heard(self, beats: Sequence[Beat], answers: Sequence[bool], sent: float) -> None:
        """What the store answered to the beats that were sent at this moment."""
        for beat, ours in zip(beats, answers, strict=True):
            if ours:
                beat.sent = sent
            else:
                beat.refused = True
                beat.due = math.inf

    def cancel_lost(self) -> None:
        for beat in list(self._beats.values()):
            if beat.cancel is not None and beat.lost:
                cancel, beat.cancel, beat.cancelled = beat.cancel, None, True
                cancel()


class Heartbeat:
    """For blocking guards: one daemon thread, started with the first claim, asleep while nothing is due."""

    def __init__(self, store: Callable[[], Any], tell: Teller) -> None:
        self._store = store
        self._tell = tell
        self.reset()
        _alive.add(self)

    def reset(self) -> None:
        """Begin anew: in a forked child, where the parent's thread does not run and its claims are not ours."""
        self.beats = Beats()
        self._wake = threading.Condition()
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None
        self.closed = False

    def watch(self, claim: Claim, sent: float) -> Beat:
        beat = self.beats.add(claim, sent)
        # Almost every claim finds the thread already waiting for an earlier moment, and costs no wake-up.
        if beat.due < self._wakes_at:
            with self._wake:
                if self._thread is None:
                    self._thread = _thread_for(self, self._wake)
                self._wakes_at = min(self._wakes_at, beat.due)
                self._wake.notify()
        return beat

    def find(self, claim: Claim) -> Beat | None:
        return self.beats.find(claim)

    def unwatch(self, claim: Claim) -> None:
        self.beats.remove(claim)

    def cancel_when_lost(self, beat: Beat) -> None:
        """A blocking handler cannot be cancelled; it can look at `current().lost`."""

    def rescue(self, _claim: Claim, error: BaseException) -> BaseException:
        return error

    def close(self) -> None:
        """Stop the thread; claims that are still alive end with their leases."""
        with self._wake:
            self.closed = True
            self._wake.notify()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.reset()

    def pause(self) -> float:
        """How long until the next beat is due; also if its claim has ended meanwhile, which costs less to see then."""
        return self._wakes_at - time.monotonic()

    def beat_and_plan(self) -> None:
        self.beat()
        with self._wake:
            # First forever, then what is due: a claim that comes in between sees the one or is seen by the other.
            self._wakes_at = math.inf
            self._wakes_at = self.beats.next_due()

    def beat(self) -> None:
        """Renew what is due. A store that fails is asked again at the next beat; `lost` keeps the truth meanwhile."""
        sent = time.monotonic()
        due = self.beats.due(sent)
        if not due:
            return
        try:
            self.beats.heard(due, self._renew([beat.claim for beat in due]), sent)
        except Exception as error:  # noqa: BLE001 - the next beat tries again, and `lost` is told by the clock
            _failed(self._tell, due, error)

    def _renew(self, claims: list[Claim]) -> list[bool]:
        store = self._store()
        if isinstance(store, Batching):
            return store.extend_all(claims)
        return [store.extend(claim) for claim in claims]


class LoopBeats:
    """The beats of one event loop, and the timer that waits for the next."""

    def __init__(self) -> None:
        self.beats = Beats()
        self.wakes_at = math.inf
        self.timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None


class AsyncHeartbeat:
    """For async guards: one timer per event loop, and a short task for each beat. A new loop finds a new timer."""

    def __init__(self, store: Callable[[], Any], tell: Teller) -> None:
        self._store = store
        self._tell = tell
        self.reset()
        _alive.add(self)

    def reset(self) -> None:
        """Begin anew: in a forked child, where the parent's loop does not run and its claims are not ours."""
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBeats] = weakref.WeakKeyDictionary()

    def watch(self, claim: Claim, sent: float) -> Beat:
        here = self._here()
        beat = here.beats.add(claim, sent)
        if beat.due < here.wakes_at:
            self._wake_at(here, beat.due)
        return beat

    def find(self, claim: Claim) -> Beat | None:
        return self._here().beats.find(claim)

    def unwatch(self, claim: Claim) -> None:
        self._here().beats.remove(claim)

    def cancel_when_lost(self, beat: Beat) -> None:
        """Cancel the task that runs now, once this claim is lost."""
        from asyncio import current_task

        task = current_task()
        assert task is not None
        beat.cancel = task.cancel

    def rescue(self, claim: Claim, error: BaseException) -> BaseException:
        """A cancellation that we asked for is `ClaimLost`; anybody else's stays what it is."""
        from asyncio import CancelledError, current_task

        beat, task = self.find(claim), current_task()
        if not isinstance(error, CancelledError) or beat is None or not beat.cancelled or task is None:
            return error
        return error if task.uncancel() else ClaimLost.about(claim.address, value=None)

    def close(self) -> None:
        """Stop the timers; claims that are still alive end with their leases."""
        for here in list(self._loops.values()):
            if here.timer is not None:
                here.timer.cancel()
            if here.task is not None and not here.task.done():
                here.task.cancel()
        self.reset()

    def _here(self) -> LoopBeats:
        from asyncio import get_running_loop

        loop = get_running_loop()
        here = self._loops.get(loop)
        if here is None:
            here = self._loops[loop] = LoopBeats()
        return here

    def _wake_at(self, here: LoopBeats, moment: float) -> None:
        from asyncio import get_running_loop

        if here.timer is not None:
            here.timer.cancel()
        here.wakes_at = moment
        delay = max(moment - time.monotonic(), 0.0)
        here.timer = get_running_loop().call_later(delay, self._start, here)

    def _start(self, here: LoopBeats) -> None:
        from asyncio import get_running_loop

        here.timer, here.wakes_at = None, math.inf
        if here.beats:
            here.task = get_running_loop().create_task(self.beat(here), name="onefold-heartbeat")

    async def beat(self, here: LoopBeats) -> None:
        """Renew what is due, cancel what is lost and asks for it, and wait for the next beat."""
        from asyncio import wait_for

        sent = time.monotonic()
        due = here.beats.due(sent)
        if due:
            patience = min(beat.claim.lease for beat in due) / (BEATS_PER_LEASE + 1)
            try:
                answers = await wait_for(self._renew([beat.claim for beat in due]), patience)
                here.beats.heard(due, answers, sent)
            except Exception as error:  # noqa: BLE001 - the next beat tries again, and `lost` is told by the clock
                _failed(self._tell, due, error)
        here.beats.cancel_lost()
        moment = here.beats.next_due()
        if moment < here.wakes_at:
            self._wake_at(here, moment)

    async def _renew(self, claims: list[Claim]) -> list[bool]:
        store = self._store()
        if isinstance(store, AsyncBatching):
            return await store.extend_all(claims)
        return [await store.extend(claim) for claim in claims]


def _thread_for(heartbeat: Heartbeat, wake: threading.Condition) -> threading.Thread:
    """A thread that lives as long as the heartbeat, and does not keep it alive: a guard may be dropped unclosed."""
    thread = threading.Thread(
        target=_beat_until_gone, args=(weakref.ref(heartbeat), wake), name="onefold-heartbeat", daemon=True
    )
    weakref.finalize(heartbeat, _notify, wake).atexit = False
    thread.start()
    return thread


def _beat_until_gone(find: weakref.ref[Heartbeat], wake: threading.Condition) -> None:
    while True:
        with wake:
            heartbeat = find()
            if heartbeat is None or heartbeat.closed:
                return
            pause = heartbeat.pause()
            if pause > 0:
                del heartbeat
                wake.wait(None if math.isinf(pause) else pause)
                continue
        heartbeat.beat_and_plan()
        del heartbeat


def _notify(wake: threading.Condition) -> None:
    with wake:
        wake.notify_all()


def _failed(tell: Teller, beats: Sequence[Beat], error: Exception) -> None:
    for beat in beats:
        tell(Kind.STORE_FAILED, beat.claim.address, detail=f"extend: {type(error).__name__}")


_alive: weakref.WeakSet[Heartbeat | AsyncHeartbeat] = weakref.WeakSet()


def _begin_anew() -> None:
    for heartbeat in list(_alive):
        heartbeat.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
