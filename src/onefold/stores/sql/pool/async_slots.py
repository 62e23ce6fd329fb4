"""A bound on concurrent use by the tasks of one event loop: whoever waits longest is next.

`asyncio.Semaphore` would need a timer for each wait (`asyncio.timeout`), which costs more than the wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

from onefold._concurrency.deadlines import deadlines


class AsyncSlots:
    """A limited number of slots; a task that finds them taken waits until one is handed to it."""

    def __init__(self, size: int) -> None:
        self._left = size
        # Each is told whether it has a slot now. One that has given up is passed over.
        self._queue: deque[asyncio.Future[bool]] = deque()

    def take(self) -> bool:
        """Take a slot, if one is free. A free slot means that nobody waits."""
        if self._left == 0:
            return False
        self._left -= 1
        return True

    async def wait(self, seconds: float) -> bool:
        """Wait for a slot; return False after so many seconds without one."""
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        bounds = deadlines()
        bound = bounds.add(seconds, partial(_give_up, place))
        try:
            return await place
        except BaseException:
            # A cancellation may come just after the slot.
            if place.done() and not place.cancelled() and place.result():
                self.leave()
            raise
        finally:
            bounds.remove(bound)

    def leave(self) -> None:
        """Hand the slot to the next one who waits."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(True)
                return
        self._left += 1


def _give_up(place: asyncio.Future[bool]) -> None:
    if not place.done():
        place.set_result(False)
