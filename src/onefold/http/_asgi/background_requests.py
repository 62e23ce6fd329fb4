"""Let a request finish after its client disconnects: some servers cancel the application then."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from typing import Any, Final
from weakref import WeakKeyDictionary

from onefold import AsyncGuard
from onefold.http._asgi.captured_response import Performance

# How long the shutdown of the application waits for requests that its server has abandoned.
GRACE: Final = 30.0

# How long it waits for work that was cancelled after its response: long enough to notice, and to clean up.
CLEAN_UP: Final = 1.0

# A server cancels its requests, and ends the lifespan at once. Each layer above us takes a turn of the loop, or a few,
# to pass the cancellation on.
TURNS: Final = 20

LOG = logging.getLogger("onefold.http")


class Shelter:
    """The exchanges in progress, each in a task that a cancellation from outside does not reach."""

    def __init__(self) -> None:
        self._stays: set[_Stay] = set()

    async def to_its_end(self, exchange: Coroutine[Any, Any, None], performance: Performance) -> None:
        """Wait for the exchange. If we are cancelled before its response is sent, it is told so and continues alone.

        Work after the response is not guarded: it is cancelled with us, as without a key.
        """
        task = asyncio.ensure_future(exchange)
        stay = self._enter(task, math.inf)
        performance.on_sent = lambda: self._leave(stay)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            # The application at once, and not through our task: a server does not wait for what it has cancelled.
            if stay.over.done() and performance.cancel():
                self._enter(task, CLEAN_UP)
                await task
                if performance.is_cancelled:
                    raise
                return
            # Its background tasks are not interrupted either: only we wait for them.
            performance.on_sent = _nothing
            performance.forsake()
            task.add_done_callback(_told)
            raise
        task.result()

    async def empty(self) -> None:
        """Wait until no exchange is in progress, or the grace is over: one grace per request, for all that wait."""
        loop = asyncio.get_running_loop()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        ends = loop.time() + GRACE
        while True:
            _limit_all(loop, ends)
            waited_for = [stay for stay in self._here(loop) if stay.ends > loop.time()]
            if not waited_for:
                return
            await asyncio.wait({waited_for[0].over}, timeout=waited_for[0].ends - loop.time())

    def _enter(self, task: asyncio.Task[None], seconds: float) -> _Stay:
        stay = _Stay(task.get_loop(), seconds)
        self._stays.add(stay)
        task.add_done_callback(lambda _task: self._leave(stay))
        return stay

    def _here(self, loop: asyncio.AbstractEventLoop) -> list[_Stay]:
        # A copy: other threads have their own loops.
        return [stay for stay in tuple(self._stays) if stay.loop is loop]

    def _leave(self, stay: _Stay) -> None:
        self._stays.discard(stay)
        if not stay.over.done():
            stay.over.set_result(None)


class _Stay:
    """One exchange in progress: whether it is over, and until when a shutdown waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self.loop = loop
        self.over: asyncio.Future[None] = loop.create_future()
        self.ends = loop.time() + seconds


def shelter_of(guard: AsyncGuard) -> Shelter:
    """Return the registry of all requests under this guard, whichever middleware or route they come through."""
    return _shelters.setdefault(guard, Shelter())


async def drain(guard: AsyncGuard) -> None:
    """Wait until no request of this guard is in progress, or the grace of 30 s (`GRACE`) is over.

    For the shutdown of an application, before it closes anything that its handlers use: the guard, a pool. A request
    that begins meanwhile is waited for, too. A request that has had its grace is not waited for again, whoever asks.
    """
    await shelter_of(guard).empty()


_shelters: WeakKeyDictionary[AsyncGuard, Shelter] = WeakKeyDictionary()


def _limit_all(loop: asyncio.AbstractEventLoop, ends: float) -> None:
    """Bound how long anyone waits for a request of this loop: an application has several guards, but one shutdown."""
    for shelter in tuple(_shelters.values()):
        for stay in shelter._here(loop):
            stay.ends = min(stay.ends, ends)


def _nothing() -> None:
    pass


def _told(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        LOG.error("a request whose client had gone ended in an error", exc_info=task.exception())
