"""A bound on concurrent use by threads, which no interrupt can break.

The semaphores of `threading` are written in Python around a lock: an interrupt (KeyboardInterrupt, or whatever a signal
handler raises) between two of their lines leaves that lock taken, or a slot lost, and the next thread waits forever.
Here there is no lock: all threads stand in one queue, and the first ones are inside. Each change of the queue is one
dictionary operation. A thread that was interrupted before it could leave has left once its waiter is garbage.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final
from weakref import ref

# The longest wait before looking again: an interrupt may have come between freeing a slot and ringing the bell.
LOOK_AGAIN_SECONDS: Final = 0.2


class Waiter:
    """A place in the queue, for as long as it lives and has not left."""

    # Made by who has to wait. Implemented in C: waiting for it can be interrupted, taking from it cannot.
    bell: SimpleQueue[None] | None = None


class Slots:
    """A limited number of slots; a thread that finds them full waits until one is freed."""

    def __init__(self, size: int) -> None:
        self._size = size
        # In order of arrival. The references have no callbacks: an interrupt raised in one would be lost.
        self._queue: dict[ref[Waiter], None] = {}

    def enter(self, waiter: Waiter, patience: float) -> bool:
        """Wait for a slot; return False after `patience` seconds without one. Call `leave` in either case."""
        self._queue[ref(waiter)] = None
        return len(self._queue) <= self._size or self._wait(waiter, patience)

    def leave(self, waiter: Waiter) -> None:
        """Leave the queue, if still in it, and let the next one in."""
        self._queue.pop(ref(waiter), None)
        if len(self._queue) >= self._size:
            for one in self._first()[-1:]:
                found = one()
                if found is not None and found.bell is not None:
                    found.bell.put(None)

    def _wait(self, waiter: Waiter, patience: float) -> bool:
        # Before the queue is looked at: a slot that is freed from now on rings it.
        bell = waiter.bell = SimpleQueue[None]()
        ends = monotonic() + patience
        while not self._is_inside(waiter):
            left = ends - monotonic()
            if left <= 0:
                return False
            with suppress(Empty):
                bell.get(timeout=min(left, LOOK_AGAIN_SECONDS))
        return True

    def _is_inside(self, waiter: Waiter) -> bool:
        if len(self._queue) <= self._size:
            return True
        for one in list(self._queue):
            if one() is None:
                self._queue.pop(one, None)
        return ref(waiter) in self._first()

    def _first(self) -> list[ref[Waiter]]:
        return list(self._queue)[: self._size]
