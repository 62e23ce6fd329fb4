"""Temporal's heartbeat, sent while a guarded activity runs or waits: it says that the worker is alive, and no more.

The lease of a claim has a heartbeat of its own, which goes to the store.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from temporalio import activity

from onefold._checks import true_or_false

# A heartbeat that comes at a third of its time-out may be lost or late once.
BEATS_PER_TIMEOUT: Final = 3


class Heartbeat:
    """Sends heartbeats without details for activities that have a time-out for them."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = true_or_false(enabled, "heartbeat")

    def _seconds(self, info: activity.Info) -> float | None:
        """Return the seconds between two heartbeats; None if there are none."""
        if not self._enabled or not info.heartbeat_timeout:
            return None
        return info.heartbeat_timeout.total_seconds() / BEATS_PER_TIMEOUT

    @contextmanager
    def in_thread(self, info: activity.Info) -> Iterator[None]:
        """Send heartbeats from a thread of their own, for a sync activity."""
        seconds = self._seconds(info)
        if seconds is None:
            yield
            return
        over = threading.Event()

        def beat() -> None:
            # The worker's event loop may be closed by now.
            with suppress(RuntimeError):
                activity.heartbeat()
                while not over.wait(seconds):
                    activity.heartbeat()

        threading.Thread(
            target=contextvars.copy_context().run, args=(beat,), name="onefold-temporal-heartbeat", daemon=True
        ).start()
        try:
            yield
        finally:
            over.set()

    @asynccontextmanager
    async def in_task(self, info: activity.Info) -> AsyncIterator[None]:
        """Send heartbeats from a task, for an async activity."""
        seconds = self._seconds(info)
        if seconds is None:
            yield
            return

        async def beat() -> None:
            while True:
                activity.heartbeat()
                await asyncio.sleep(seconds)

        task = asyncio.create_task(beat())
        try:
            yield
        finally:
            task.cancel()
