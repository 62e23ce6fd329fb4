"""Keeps live claims alive: one thread, or one timer of the event loop, for all claims of a guard.

A claim is renewed every third of its lease, batched where the store can. Whether it is lost is told by the worker's
own monotonic clock, one lease after the *sending* of the last confirmed renewal, so that it shows even while the
heartbeat itself is starved. A renewal that fails, or takes too long, is a warning at once.

The renewal of one claim never depends on another's: what fails by itself (a record of a store that renews one by one, a
server of several) is sent by itself, each answer counts as soon as it is there, and an error is about its own claims.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from onefold._heartbeat.groups import HANGING_MAX, TASKS_MAX, are_one_group, groups_of, spread
from onefold._heartbeat.logs import told_failed, told_late, told_left
from onefold._heartbeat.thread import AT_ONCE, Bell, thread_for
from onefold._model import Claim
from onefold.durations import in_words
from onefold.errors import ClaimLost
from onefold.events import Teller
from onefold.stores.base import AsyncBatching, Batching, PartlyRenewed

if TYPE_CHECKING:
    import asyncio

# Two beats may fail before the lease ends.
BEATS_PER_LEASE: Final = 3

# How long `close` waits for renewals that are under way: a driver that waits for an answer cannot be told to stop.
CLOSE_SECONDS: Final = 5.0


class Beat(msgspec.Struct, eq=False):
    """One claim under the heartbeat's care."""

    claim: Claim
    # When the last confirmed renewal was sent, and when the next one has to be.
    sent: float
    due: float
    # Called once when the claim is lost, where the policy asks for it.
    cancel: Callable[[], object] | None = None
    cancelled: bool = False
    # A renewal was sent and has not been answered: no second one is sent behind it.
    under_way: bool = False

    @property
    def left(self) -> float:
        """How long the claim is certainly still ours."""
        return self.sent + self.claim.lease - time.monotonic()

    @property
    def lost(self) -> bool:
        return self.left <= 0

    def refuse(self) -> None:
        """The store says that the claim is another's: as if no renewal had ever been confirmed, and none is sent."""
        self.sent, self.due = -math.inf, math.inf

    @property
    def refused(self) -> bool:
        return self.sent == -math.inf


class Beats(dict[bytes, Beat]):
    """The claims of one guard that are alive in this process, by token."""

    def add(self, claims: Sequence[Claim], sent: float) -> tuple[float, float]:
        """Take them into care: how long all of them are certainly still ours, and when the first is due."""
        end = due = math.inf
        for claim in claims:
            beat = self.setdefault(claim.token, Beat(claim, sent, sent + claim.lease / BEATS_PER_LEASE))
            if beat.sent + claim.lease < end:
                end = beat.sent + claim.lease
            if beat.due < due:
                due = beat.due
        return end - time.monotonic(), due

    def drop(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self.pop(claim.token, None)

    def next_due(self) -> float:
        return min((beat.due for beat in list(self.values())), default=math.inf)

    def due(self, now: float) -> list[Beat]:
        """The beats to send now; each is due again a third of its lease later, whatever comes of this one."""
        due = [beat for beat in list(self.values()) if beat.due <= now]
        for beat in due:
            beat.due = now + beat.claim.lease / BEATS_PER_LEASE
        return [beat for beat in due if not beat.under_way]

    def cancel_lost(self) -> None:
        for beat in list(self.values()):
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
        self._bell: Bell = Bell()
        # Set by the thread alone.
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None
        self._renewers: list[threading.Thread] = []
        self.closed = False

    def watch(self, claims: Sequence[Claim], sent: float) -> float:
        """Keep these claims alive from now on; the answer is how long all of them are certainly still ours."""
        left, due = self.beats.add(claims, sent)
        # Almost every claim finds the thread already waiting for an earlier moment, and costs no wake-up.
        if due < self._wakes_at:
            self._wake_at(due)
        return left

    def _wake_at(self, moment: float) -> None:
        """Have the thread wake at this moment.

        Nothing is locked, as an interrupt may strike at any line: two callers may start a thread each, and then the
        one whose bell is not ours any more ends.
        """
        if self._thread is None or not self._thread.is_alive():
            before, self._bell = self._bell, Bell()
            before.put(AT_ONCE)
            self._thread = thread_for(self, self._bell)
            self._thread.start()
        self._bell.put(moment)

    def find(self, token: bytes) -> Beat | None:
        return self.beats.get(token)

    def left(self, claim: Claim) -> float:
        """How long this claim is certainly still ours."""
        beat = self.find(claim.token)
        return 0.0 if beat is None else beat.left

    def unwatch(self, claims: Sequence[Claim]) -> None:
        self.beats.drop(claims)

    def close(self) -> None:
        """Stop the thread; claims that are still alive end with their leases.

        Renewals that are under way are waited for, within a bound: what they open after the store is closed, nobody
        closes before the process ends.
        """
        self.closed = True
        self._bell.put(AT_ONCE)
        ends = time.monotonic() + CLOSE_SECONDS
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
        """Renew what is due; return how long until the next beat is, also if its claim ends before it.

        `moment`: what the bell rang for; None after a pause that nobody interrupted.
        """
        if moment is not None and moment < self._wakes_at:
            self._wakes_at = moment
        if moment is None or self._wakes_at <= time.monotonic():
            self.beat()
            # First forever, then what is due: a claim that comes in between sees the one or is seen by the other.
            self._wakes_at = math.inf
            self._wakes_at = self.beats.next_due()
        return self._wakes_at - time.monotonic()

    def beat(self) -> None:
        """Renew what is due. A store that fails is asked again at the next beat; `lost` keeps the truth meanwhile."""
        due = self.beats.due(time.monotonic())
        if not due:
            return
        try:
            store = self._store()
            batching = isinstance(store, Batching)
            groups = _grouped(due, groups_of(store, _claims(due), batching=batching))
        except Exception as error:  # noqa: BLE001 - the next beat tries again, and `lost` is told by the clock
            told_failed(self._tell, due, error)
            return
        for beat in due:
            beat.under_way = True
        if are_one_group(store, batching=batching):
            answered = _tell_if_late(self.beats, due, self._tell)
            _renew(store, due, self._tell)
            answered.set()
        else:
            self._renew_apart(store, due, groups)

    def _renew_apart(self, store: Any, due: list[Beat], groups: list[list[Beat]]) -> None:
        """Renew each group by itself. Nobody waits for all of them: the next beat of one comes while another hangs."""
        tell = self._tell
        self._renewers = [thread for thread in self._renewers if thread.is_alive()]
        room = HANGING_MAX - len(self._renewers)
        if room <= 0:
            for beat in due:
                beat.under_way = False
            told_late(tell, due, f"{HANGING_MAX} renewals were sent before it, and the store has not answered them")
            return
        answered = _tell_if_late(None, due, tell)

        def renew(group: list[Beat]) -> None:
            _renew(store, group, tell)
            if not any(beat.under_way for beat in due):
                answered.set()

        self._renewers += spread(renew, groups, room)


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
        _alive.add(self)

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
        delay = max(moment - time.monotonic(), 0.0)
        here.timer = self._running_loop().call_later(delay, self._start, here)

    def _start(self, here: LoopBeats) -> None:
        here.timer, here.wakes_at = None, math.inf
        if here.beats:
            task = self._running_loop().create_task(self.beat(here), name="onefold-heartbeat")
            here.tasks.add(task)
            task.add_done_callback(here.tasks.discard)

    async def beat(self, here: LoopBeats) -> None:
        """Plan the next beat, renew what is due, and cancel what is lost and asks for it."""
        due = here.beats.due(time.monotonic())
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
        groups = _grouped(due, groups_of(store, _claims(due), batching=batching))
        if len(groups) == 1:
            outcomes = [await _outcome(_asked(store, due, batching=batching), due)]
        else:
            room = Semaphore(TASKS_MAX)
            asked = (_outcome(_asked(store, group, batching=batching, room=room), group) for group in groups)
            outcomes = await gather(*asked)
        _tell_failures(self._tell, outcomes)


def _joined(thread: threading.Thread, ends: float) -> bool:
    """Wait for a thread until this moment; return whether it has ended, or is the one that waits."""
    if thread is threading.current_thread():
        return True
    thread.join(max(ends - time.monotonic(), 0.0))
    return not thread.is_alive()


def _claims(beats: Sequence[Beat]) -> list[Claim]:
    return [beat.claim for beat in beats]


def _grouped(beats: Sequence[Beat], groups: Sequence[Sequence[int]]) -> list[list[Beat]]:
    return [[beats[place] for place in group] for group in groups]


def _hear(beats: Sequence[Beat], answers: Sequence[bool | None], sent: float) -> None:
    """Keep what the store answered to the beats that were sent at this moment; None is no answer."""
    for beat, ours in zip(beats, answers, strict=True):
        if ours:
            beat.sent = sent
        elif ours is not None:
            beat.refuse()


def _renew(store: Any, beats: list[Beat], tell: Teller) -> None:
    """Renew these claims, blocking: an error is about them alone."""
    sent, claims = time.monotonic(), _claims(beats)
    try:
        answers = store.extend_all(claims) if isinstance(store, Batching) else [store.extend(claims[0])]
        _hear(beats, answers, sent)
    except Exception as error:  # noqa: BLE001 - the next beat tries again, and `lost` is told by the clock
        _tell_failures(tell, [(_unanswered(beats, error, sent), error)])
    finally:
        for beat in beats:
            beat.under_way = False


async def _asked(store: Any, beats: list[Beat], *, batching: bool, room: asyncio.Semaphore | None = None) -> None:
    """Renew these claims, awaiting: their turn, where there is a room for some only, and then their answers."""
    async with room or nullcontext():
        sent, claims = time.monotonic(), _claims(beats)
        try:
            answers = await store.extend_all(claims) if batching else [await store.extend(claims[0])]
        except PartlyRenewed as error:
            _unanswered(beats, error, sent)
            raise
        _hear(beats, answers, sent)


# The beats that were not renewed, and why.
Outcome = tuple[list[Beat], Exception | None]


async def _outcome(asked: Awaitable[None], beats: list[Beat]) -> Outcome:
    from asyncio import wait_for

    try:
        await wait_for(asked, patience(beats))
    except PartlyRenewed as error:
        return _unanswered(beats, error, None), error
    except Exception as error:  # noqa: BLE001 - the next beat tries again, and `lost` is told by the clock
        return beats, error
    finally:
        for beat in beats:
            beat.under_way = False
    return [], None


def _unanswered(beats: list[Beat], error: Exception, sent: float | None) -> list[Beat]:
    """Return those of whose renewal nothing is known after this error; and keep, unless kept, what is of the others."""
    if not isinstance(error, PartlyRenewed):
        return beats
    if sent is not None:
        _hear(beats, error.answers, sent)
    return [beat for beat, answer in zip(beats, error.answers, strict=True) if answer is None]


def patience(beats: Sequence[Beat]) -> float:
    """Return how long renewals may take: less than the time between two beats, so that one more can be sent."""
    return min(beat.claim.lease for beat in beats) / (BEATS_PER_LEASE + 1)


def _tell_if_late(beats: Beats | None, due: Sequence[Beat], tell: Teller) -> threading.Event:
    """Tell of renewals that take too long, until the event is set: a driver that waits cannot be told to stop.

    `beats`: all that wait for these, where nothing else is sent before they are answered.
    """
    answered = threading.Event()
    waits = threading.Thread(
        target=_await_answer, args=(answered, beats, due, tell), name="onefold-late-renewal", daemon=True
    )
    # A process that ends starts no threads any more.
    with suppress(RuntimeError):
        waits.start()
    return answered


def _await_answer(answered: threading.Event, beats: Beats | None, due: Sequence[Beat], tell: Teller) -> None:
    """Tell of each claim that it is not renewed, and once more when its lease has ended.

    Those that become due meanwhile are not renewed either, where nothing is sent before this is answered.
    """
    told: dict[bytes, bool] = {}
    late = list(due)
    pause = patience(late)
    while not answered.wait(pause):
        late = [beat for beat in late if beat.under_way or beat not in due]
        if late:
            _late(tell, late)
        told |= {beat.claim.token: beat.lost for beat in late}
        alive = [beat for beat in due if beat.under_way] if beats is None else list(beats.values())
        late = [beat for beat in alive if _is_untold(beat, told)]
        pause = patience(late or alive) if alive else pause


def _is_untold(beat: Beat, told: dict[bytes, bool]) -> bool:
    known = told.get(beat.claim.token)
    return beat.due <= time.monotonic() if known is None else beat.lost and not known


def _tell_failures(tell: Teller, outcomes: Sequence[Outcome]) -> None:
    """Tell of renewals that failed: those with the same cause together, as each claim may have been sent by itself."""
    causes: dict[str, tuple[list[Beat], Exception]] = {}
    for beats, error in outcomes:
        if error is not None:
            causes.setdefault(f"{type(error).__name__}: {error}", ([], error))[0].extend(beats)
    for beats, error in causes.values():
        if isinstance(error, TimeoutError):
            _late(tell, beats)
        elif isinstance(error, PartlyRenewed):
            _late(tell, beats, str(error))
        else:
            told_failed(tell, beats, error)


def _late(tell: Teller, beats: Sequence[Beat], cause: str | None = None) -> None:
    told_late(tell, beats, cause or f"the store has not answered within {in_words(patience(beats))}")


_alive: weakref.WeakSet[Heartbeat | AsyncHeartbeat] = weakref.WeakSet()


def _begin_anew() -> None:
    for heartbeat in list(_alive):
        heartbeat.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
