"""What has started goes on, though its server gives it up: some cancel an application whose client has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final
from weakref import WeakKeyDictionary

from onefold import AsyncGuard

# How long the shutdown of the application waits for requests that its server has given up.
GRACE: Final = 30.0

LOG = logging.getLogger("onefold.http")


class Shelter:
    """The exchanges under way, each in a task that a cancellation from outside does not reach."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def to_its_end(self, exchange: Coroutine[Any, Any, None], forsaken: Callable[[], None]) -> None:
        """Wait for it. If we are cancelled, it is told so (`forsaken`) and goes on alone."""
        task = asyncio.ensure_future(exchange)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            forsaken()
            task.add_done_callback(_told)
            raise
        task.result()

    async def empty(self) -> None:
        """Until nobody is under way, or the grace is over."""
        here = {task for task in self._tasks if task.get_loop() is asyncio.get_running_loop()}
        if here:
            await asyncio.wait(here, timeout=GRACE)


def shelter_of(guard: AsyncGuard) -> Shelter:
    """Return the shelter of all requests that this guard guards, whichever middleware or route they come by."""
    return _shelters.setdefault(guard, Shelter())


async def drain(guard: AsyncGuard) -> None:
    """Wait until no request of this guard is under way, or the grace of 30 s (`GRACE`) is over.

    For the shutdown of an application, before it closes anything that its handlers use: the guard, a pool.
    """
    await shelter_of(guard).empty()


_shelters: WeakKeyDictionary[AsyncGuard, Shelter] = WeakKeyDictionary()


def _told(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        LOG.error("a request whose client had gone ended in an error", exc_info=task.exception())
