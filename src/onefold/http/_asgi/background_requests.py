"""Let a request finish after its client disconnects: some servers cancel the application then."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from onefold import AsyncGuard
from onefold.http._asgi.captured_response import CapturedResponse
from onefold.http._asgi.tasks import WatchedTask

# How long the shutdown of the application waits for requests that its server has abandoned.
GRACE: Final = 30.0

# How long it waits for work that was cancelled after its response: long enough to notice, and to clean up.
CLEAN_UP: Final = 1.0

# A server cancels its requests, and ends the lifespan at once. Each outer layer takes one or a few turns of the loop to
# pass the cancellation on.
TURNS: Final = 20

LOG = logging.getLogger("onefold.http")


class BackgroundRequests:
    """The exchanges in progress, each in a task that a cancellation from outside does not reach."""

    def __init__(self) -> None:
        self._running: set[_Running] = set()

    async def to_its_end(
        self, exchange: Coroutine[Any, Any, None], captured: CapturedResponse, close: Callable[[], None]
    ) -> None:
        """Wait for the exchange, and `close` what it has used. If we are cancelled before its response is sent, let it
        continue alone.

        Work after the response is not guarded: it is cancelled with us, as without a key.
        """
        running = _Running(asyncio.get_running_loop(), math.inf)
        self._running.add(running)
        leave = captured.on_sent = partial(self._leave, running)
        watched = WatchedTask(_closing(exchange, captured, close), leave)
        cancelled: asyncio.CancelledError | None = None
        try:
            await watched.wait()
        except asyncio.CancelledError as error:
            if captured.rest is None or captured.rest.done():
                # Its background tasks are not interrupted either: only we wait for them.
                captured.on_sent = _nothing
                captured.is_alone = True
                captured.give_up_sending()
                watched.task.add_done_callback(_told)
                if watched.task.done():
                    close()
                raise
            cancelled = error
        try:
            await self._rest(captured, cancelled)
            watched.task.result()
        finally:
            close()

    async def _rest(self, captured: CapturedResponse, cancelled: asyncio.CancelledError | None) -> None:
        """Wait for the application's work after its response. Whoever cancels us cancels that, as without a key."""
        task = captured.rest
        if task is None:
            return
        if cancelled is not None:
            # At once: a server does not wait for requests that it has cancelled.
            task.cancel()
            self._enter(task, CLEAN_UP)
        await captured.last(lambda: self._enter(task, CLEAN_UP))
        if cancelled is not None and task.cancelled():
            raise cancelled

    async def empty(self) -> None:
        """Wait until no exchange is in progress, or the grace is over: one grace per request, for all that wait."""
        loop = asyncio.get_running_loop()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        ends = loop.time() + GRACE
        while True:
            _limit_all(loop, ends)
            waited_for = [running for running in self._here(loop) if running.ends > loop.time()]
            if not waited_for:
                return
            await asyncio.wait({waited_for[0].over}, timeout=waited_for[0].ends - loop.time())

    def _enter(self, task: asyncio.Task[None], seconds: float) -> None:
        running = _Running(task.get_loop(), seconds)
        self._running.add(running)
        task.add_done_callback(lambda _task: self._leave(running))

    def _here(self, loop: asyncio.AbstractEventLoop) -> list[_Running]:
        # A copy: other threads have their own loops.
        return [running for running in tuple(self._running) if running.loop is loop]

    def _leave(self, running: _Running) -> None:
        self._running.discard(running)
        if not running.over.done():
            running.over.set_result(None)


class _Running:
    """One exchange in progress: whether it is over, and how long a shutdown waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self.loop = loop
        self.over: asyncio.Future[None] = loop.create_future()
        self.ends = loop.time() + seconds


def background_requests_of(guard: AsyncGuard) -> BackgroundRequests:
    """Return the registry of all requests under this guard, whichever middleware or route they come through."""
    return _by_guard.setdefault(guard, BackgroundRequests())


async def drain(guard: AsyncGuard) -> None:
    """Wait until no request of this guard is in progress, or the grace of 30 s (`GRACE`) is over.

    For the shutdown of an application, before it closes anything that its handlers use: the guard, a pool. This
    includes requests that begin meanwhile. A request that has had its grace is not waited for again.
    """
    await background_requests_of(guard).empty()


_by_guard: WeakKeyDictionary[AsyncGuard, BackgroundRequests] = WeakKeyDictionary()


def _limit_all(loop: asyncio.AbstractEventLoop, ends: float) -> None:
    """Limit how long anyone waits for a request of this loop: an application has several guards, but one shutdown."""
    for background in tuple(_by_guard.values()):
        for running in background._here(loop):
            running.ends = min(running.ends, ends)


async def _closing(exchange: Coroutine[Any, Any, None], captured: CapturedResponse, close: Callable[[], None]) -> None:
    """Close what an exchange has used, if nobody else does."""
    try:
        await exchange
    finally:
        if captured.is_alone:
            close()


def _nothing() -> None:
    pass


def _told(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        LOG.error("a request whose client had disconnected ended in an error", exc_info=task.exception())
