"""A bound for what threads use at the same time, which no interrupt can break.

The semaphores of `threading` are written in Python around a lock: an interrupt (KeyboardInterrupt, what a signal's
handler raises) between two of their lines leaves that lock taken, or a place lost, and the next one waits for ever.
Here there is no lock: all stand in one line, and the first of it are inside. Each change of the line is one operation
of a dictionary, and whoever was interrupted before it could leave has left as soon as it is garbage.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final
from weakref import ref

# How long at most somebody waits before looking again: an interrupt may have come between a place and its bell.
LOOK_AGAIN_SECONDS: Final = 0.2


class Waiter:
    """Somebody in the line, for as long as it lives and has not left."""

    __slots__ = ("__weakref__", "bell")

    def __init__(self) -> None:
        # In C: waiting for it can be interrupted, and taking it cannot.
        self.bell: SimpleQueue[None] = SimpleQueue()


class Slots:
    """So many may be inside at the same time; whoever comes next waits until one leaves."""

    def __init__(self, size: int) -> None:
        self._size = size
        # In the order in which they came. The references have no callbacks: what is raised in one of those is lost.
        self._queue: dict[ref[Waiter], None] = {}

    def enter(self, waiter: Waiter, patience: float) -> bool:
        """Wait until it is inside; False: it was not for so long. In either case it has to leave."""
        self._queue[ref(waiter)] = None
        ends = monotonic() + patience
        while not self._is_inside(waiter):
            left = ends - monotonic()
            if left <= 0:
                return False
            with suppress(Empty):
                waiter.bell.get(timeout=min(left, LOOK_AGAIN_SECONDS))
        return True

    def leave(self, waiter: Waiter) -> None:
        """Leave the line, if it stands there, and let the next one in."""
        self._queue.pop(ref(waiter), None)
        if len(self._queue) >= self._size:
            for one in self._first()[-1:]:
                found = one()
                if found is not None:
                    found.bell.put(None)

    def _is_inside(self, waiter: Waiter) -> bool:
        if len(self._queue) <= self._size:
            return True
        for one in list(self._queue):
            if one() is None:
                self._queue.pop(one, None)
        return ref(waiter) in self._first()

    def _first(self) -> list[ref[Waiter]]:
        return list(self._queue)[: self._size]
