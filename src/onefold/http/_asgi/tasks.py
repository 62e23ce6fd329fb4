"""Wait for a task without cancelling it, as `asyncio.wait` does, at less of its cost: each request waits twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class WatchedTask:
    """A task that says when it ends."""

    __slots__ = ("_ended", "_on_end", "task")

    task: asyncio.Task[None]

    def __init__(self, work: Awaitable[None], on_end: Callable[[], None]) -> None:
        """Start the task. `on_end` is called at its end, however it ends."""
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._on_end = on_end
        self.task = loop.create_task(self._watched(work))
        # For a task that is cancelled before it begins.
        self.task.add_done_callback(self._end)

    async def wait(self) -> None:
        """Wait until it has ended. Whoever is cancelled meanwhile may wait once more."""
        if not self._ended.done():
            await self._ended
        elif not self.task.done():
            await asyncio.wait({self.task})

    async def _watched(self, work: Awaitable[None]) -> None:
        self.task.remove_done_callback(self._end)
        try:
            await work
        finally:
            # Now, and not by a callback of the task: that would take another turn of the event loop.
            self._end()

    def _end(self, _task: Any = None) -> None:
        self._on_end()
        if not self._ended.done():
            self._ended.set_result(None)
