"""Bound many waits of an event loop with one timer.

Almost every wait ends long before its bound. A timer for each costs more than the wait itself: it stays in the loop's
heap until its time comes, and delays the others there.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable
from weakref import WeakKeyDictionary, ref


class Deadlines:
    """The bounds of one event loop: what is called for each that is over, and one timer for the first of them."""

    def __init__(self) -> None:
        self._due: dict[object, tuple[float, Callable[[], object]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf

    def add(self, seconds: float, call: Callable[[], object]) -> object:
        """Call this after so many seconds, unless what is returned is removed before. It must not raise."""
        loop = asyncio.get_running_loop()
        bound, moment = object(), loop.time() + seconds
        self._due[bound] = moment, call
        if moment < self._wakes_at:
            self._set(loop, moment)
        return bound

    def remove(self, bound: object) -> None:
        """Forget a bound. The timer stays: it finds nothing, and costs less than setting it anew."""
        self._due.pop(bound, None)

    def _set(self, loop: asyncio.AbstractEventLoop, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._wakes_at = None, moment
        if moment < math.inf:
            # It belongs to no delivery.
            self._timer = loop.call_at(moment, self._look, context=contextvars.Context())

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        over = [bound for bound, (moment, _) in self._due.items() if moment <= now]
        calls = [self._due.pop(bound)[1] for bound in over]
        self._set(loop, min((moment for moment, _ in self._due.values()), default=math.inf))
        for call in calls:
            call()


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Deadlines] = WeakKeyDictionary()


# The loop that was looked up last, and its bounds: usually there is one.
_last: tuple[ref[asyncio.AbstractEventLoop], Deadlines] | None = None


def deadlines() -> Deadlines:
    """Return the bounds of the running event loop."""
    global _last  # noqa: PLW0603 - replaced as a whole, so that another thread sees the old one or the new one
    loop, last = asyncio.get_running_loop(), _last
    if last is not None and last[0]() is loop:
        return last[1]
    found = _by_loop.get(loop)
    if found is None:
        _forget_closed()
        found = _by_loop[loop] = Deadlines()
    _last = ref(loop), found
    return found


def _forget_closed() -> None:
    """Forget loops that were closed: the timer of each knows its loop, and would keep it forever."""
    for known in _by_loop.keyrefs():
        loop = known()
        if loop is not None and loop.is_closed():
            _by_loop.pop(loop, None)
