"""Wake those in this process who wait for the end of a record, and let one look serve them all.

Whoever waits for the same record in the same store is in one room. A wake-up is a hint that a look at the store is due.
Of those in a room one looks at a time; what it finds ended is handed to the others. So a wake-up that is lost costs
time, until the next look is due anyway, and one that is spurious or doubled costs a look.

Sync and async waiters can share an address, and are woken from any thread and by any event loop. A waiter is forgotten
with the frame that waits: its room holds it weakly, in case an interrupt has kept it from leaving.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

if TYPE_CHECKING:
    import asyncio

# By address. It is empty unless somebody waits: that is all that the end of a delivery looks at.
ROOMS: Final[dict[Hashable, list[Room]]] = {}

# Held for a few lines at a time. A signal's handler may come back here in the same thread.
_lock = threading.RLock()


class Room:
    """Those who wait for one record in one store."""

    def __init__(self, address: Hashable, store: Any) -> None:
        self.address = address
        self.store = store
        self.members: WeakSet[Waiter] = WeakSet()
        # When the last look of a member was sent, by the monotonic clock; and whether the next one is due at once.
        self.looked = 0.0
        self.due = False
        # Whether the store tells of endings in other processes; None until it has been asked.
        self.told: bool | None = None
        # Whether it was ever asked: then it may tell, or try to, whatever became of the question.
        self.has_asked = False

    def wake(self) -> None:
        with _lock:
            self.due = True
            members = list(self.members)
        for member in members:
            member.notify()


class Waiter:
    """One delivery that waits, from its first wait until it has an answer or runs by itself."""

    def __init__(self, address: Hashable, store: Any) -> None:
        # What another member of the room has found.
        self.found: Any = None
        # The token of the record for whose end it waits, and whether it has to look by itself, at once.
        self._token: bytes | None = None
        self._due = False
        # Whether it is looking on behalf of the others, who do not know yet what it found.
        self._looks = False
        # Whether it is asking the store, on behalf of the others, to tell of endings.
        self._asks = False
        with _lock:
            rooms = ROOMS.setdefault(address, [])
            room = next((room for room in rooms if room.store is store), None)
            if room is None:
                room = Room(address, store)
                rooms.append(room)
            self.room = room
            room.members.add(self)

    def notify(self) -> None:
        """Make it check whether it is its turn. From any thread."""
        raise NotImplementedError

    def waits_for(self, token: bytes) -> None:
        """Note whose end it waits for. What others have found of an earlier owner is not its answer."""
        with _lock:
            self._token = token
            if self.found is not None and self.found.token != token:
                self.found = None

    def has_looked(self, sent: float) -> None:
        """Note that it has looked, without an end: the next look of the room is not due before its pause is over."""
        with _lock:
            self._looks = False
            self.room.looked = max(self.room.looked, sent)

    def asks_the_store(self) -> bool:
        """Return whether it is this waiter that asks the store to tell of endings: once for a room."""
        with _lock:
            if self.room.told is not None:
                return False
            # Until there is an answer, the others expect that it does: this one looks when it has the answer.
            self.room.told = self.room.has_asked = self._asks = True
            return True

    def is_told(self, told: bool) -> None:  # noqa: FBT001 - the store's answer
        """Note whether the store tells of endings from now on. Until now it did not: then a look is due at once.

        If its connection was lost while it answered, nobody tells, and the next wait asks again.
        """
        with _lock:
            self._asks = False
            if self.room.told is not None:
                self.room.told = told
            self.room.due = self.room.due or told

    def pause_left(self, seconds: float, ends: float) -> float:
        """Return how long to sleep before the next check; zero if it is its turn to look, or its time is up."""
        with _lock:
            if self.found is not None:
                return 0.0
            now, room = time.monotonic(), self.room
            left = min(0.0 if room.due or self._due else room.looked + seconds - now, ends - now)
            if left > 0:
                return left
            room.due, room.looked, self._due, self._looks = False, now, False, True
            return 0.0

    def handed(self) -> Any:
        """Return what another member has found, once."""
        with _lock:
            found, self.found = self.found, None
            return found

    def share(self, found: Any, *, ended: bool) -> None:
        """Hand what it has found to the others, if it has ended: none of them has to look any more.

        Only to those who wait for this very record to end. Whoever has met another owner at the address looks by
        itself: what was found may be older (forgotten since, or expired), and nobody has to know whose look came first.
        """
        with _lock:
            self._looks = False
            others = [member for member in self.room.members if member is not self] if ended else []
            for other in others:
                if other._token == found.token:
                    other.found = found
                else:
                    other._due = True
        for other in others:
            other.notify()

    def leave(self, *, runs: bool = False) -> None:
        """Leave the room; the others have to look in its place, unless it `runs` the delivery now."""
        with _lock:
            room = self.room
            room.members.discard(self)
            passes_on = self._looks and not runs
            if self._asks:
                room.told = None
            self._looks = self._asks = False
            is_silent = not room.members and _close(room)
        if passes_on:
            room.wake()
        if is_silent:
            _unlisten(room)


class BlockingWaiter(Waiter):
    """A waiter that blocks its thread."""

    def __init__(self, address: Hashable, store: Any) -> None:
        self._event = threading.Event()
        super().__init__(address, store)

    def notify(self) -> None:
        self._event.set()

    def sleep(self, seconds: float, ends: float) -> None:
        """Block until it is its turn to look, something was found, or its time is up."""
        while True:
            self._event.clear()
            left = self.pause_left(seconds, ends)
            if left <= 0:
                return
            self._event.wait(left)


class AwaitingWaiter(Waiter):
    """A waiter that suspends its task."""

    def __init__(self, address: Hashable, store: Any) -> None:
        import asyncio

        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] | None = None
        super().__init__(address, store)

    def notify(self) -> None:
        # A closed loop has forgotten its tasks.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def sleep(self, seconds: float, ends: float) -> None:
        """Suspend until it is its turn to look, something was found, or its time is up."""
        while True:
            self._woken = self._loop.create_future()
            left = self.pause_left(seconds, ends)
            if left <= 0:
                return
            timer = self._loop.call_later(left, self._wake)
            try:
                await self._woken
            finally:
                timer.cancel()


def wake(address: Hashable) -> None:
    """Wake those in this process who wait for this address, in whatever store."""
    with _lock:
        rooms = list(ROOMS.get(address, ()))
        # An interrupt has kept their members from leaving.
        silent = [room for room in rooms if not room.members and _close(room)]
    for room in rooms:
        room.wake()
    for room in silent:
        _unlisten(room)


@contextmanager
def acquired(lock: threading.Lock, seconds: float) -> Iterator[None]:
    """Hold a lock that another may hold for long. Raise `TimeoutError` if it is not free in time."""
    if not lock.acquire(timeout=seconds):
        raise TimeoutError("somebody else has been connecting for too long")
    try:
        yield
    finally:
        lock.release()


def nobody_tells(address: Hashable) -> None:
    """Wake those who wait for this address, of whose end their stores do not tell any more. They may ask again."""
    with _lock:
        for room in ROOMS.get(address, ()):
            room.told = None
    wake(address)


def _close(room: Room) -> bool:
    """Forget an empty room; return whether its store need not tell of the end any more."""
    rooms = ROOMS.get(room.address)
    if rooms is None or room not in rooms:
        return False
    rooms.remove(room)
    if not rooms:
        del ROOMS[room.address]
    return room.has_asked


def _unlisten(room: Room) -> None:
    # Somebody may have entered a new room meanwhile.
    if not _is_awaited(room):
        with suppress(Exception):
            room.store.unlisten(room.address)
        if _is_awaited(room):
            nobody_tells(room.address)


def _is_awaited(room: Room) -> bool:
    """Return whether somebody waits for the record of this room, in its store."""
    with _lock:
        return any(other.store is room.store for other in ROOMS.get(room.address, ()))


def _begin_anew() -> None:
    """Forget the parent's waiters, in a forked child: their threads are not here."""
    global _lock  # noqa: PLW0603 - nobody here could release the parent's
    _lock = threading.RLock()
    ROOMS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
