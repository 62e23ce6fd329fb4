"""A worker in tasks of one event loop, for an `AsyncGuard` and aiobotocore."""

from __future__ import annotations

import asyncio
import math
from contextlib import nullcontext, suppress
from typing import Final

from onefold._concurrency.generators import run_async
from onefold.durations import Duration, seconds
from onefold.queues._shared.consumer import AsyncConsuming
from onefold.queues._shared.verdict import SOON
from onefold.queues._sqs.jobs import Job
from onefold.queues._sqs.worker import Options, WorkerBase, clock

# How long messages are handled without a turn for others.
YIELD_SECONDS: Final = 0.01


class AsyncWorker(WorkerBase):
    """A worker for one queue. Created by `guarded_async`."""

    def __init__(self, consuming: AsyncConsuming, options: Options) -> None:
        super().__init__(consuming, options, nullcontext())
        self._running: set[asyncio.Task[None]] = set()
        # Set when there is something to settle, and when there is room for more messages.
        self._to_settle = asyncio.Event()
        self._changed = asyncio.Event()
        self._settles_at = math.inf
        self._is_cancelled = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def consume(self) -> None:
        """Receive and handle messages until `stop` or `drain` is called, and return when all of them are settled.

        Raises the client's error if the queue does not exist, or may not be read; a lost connection is waited for. If
        it is cancelled, handlers are cancelled, and their messages come again.
        """
        self._begin()
        self._idle.clear()
        try:
            while not await run_async(self._open()):
                if self._is_stopping:
                    return
                await asyncio.sleep(SOON)
            await self._consume()
        finally:
            # Also if it is cancelled once more.
            self._idle.set()

    async def _consume(self) -> None:
        settling = asyncio.create_task(self._keep_settling())
        refused: Exception | None = None
        try:
            try:
                while (count := await self._room(settling)) > 0:
                    if not await run_async(self._receive(count)):
                        await asyncio.sleep(SOON)
                    self._start()
                    if self._work.next_due() < self._settles_at:
                        self._to_settle.set()
            except Exception as error:  # noqa: BLE001 - it is raised below
                # Only the receive was refused: handlers that run are settled first.
                refused = error
            finally:
                self.stop()
                self._work.leave()
                self._start()
            await settling
            if refused is not None:
                raise refused
        finally:
            self._is_cancelled = True
            for task in (settling, *self._running):
                task.cancel()
            await asyncio.gather(settling, *self._running, return_exceptions=True)

    def stop(self) -> None:
        """Have `consume` return, once what runs has ended. It returns at once."""
        self._is_stopping = True
        self._changed.set()

    async def drain(self, within: Duration = 30) -> bool:
        """Start nothing more, and wait until `consume` has settled what runs. Return False if that takes longer.

        Messages that were not started are given back, and other workers get them at once. To consume again, create
        another worker.
        """
        limit = seconds(within, "within")
        self.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._idle.wait()
        return self._idle.is_set()

    async def _room(self, settling: asyncio.Task[None]) -> int:
        """Wait until there is room; return how many may be received, 0 if this worker stops."""
        while not self._has_room and not self._is_stopping and not settling.done():
            self._changed.clear()
            await self._changed.wait()
        return 0 if self._is_stopping or settling.done() else self._options.batch - self._work.busy

    def _start(self) -> None:
        """Start handlers, as many as may run. Each task takes messages while there are any."""
        while len(self._running) < self._options.concurrency and (job := self._work.next(clock())) is not None:
            task = asyncio.create_task(self._keep_handling(job))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        self._look()

    def _look(self) -> None:
        """Wake whoever waits for what has come to hold: to settle something sooner, or to receive more."""
        if self._work.is_due_before(self._settles_at) or self._work.is_leaving:
            self._to_settle.set()
        if self._has_room:
            self._changed.set()

    async def _keep_handling(self, job: Job | None) -> None:
        since = clock()
        while job is not None:
            await self._run(job)
            if (now := clock()) - since >= YIELD_SECONDS:
                # Handlers that never wait must not keep extensions, heartbeats and deletions back.
                await asyncio.sleep(0)
                since = now
            job = self._work.next(now)
            self._look()

    async def _run(self, job: Job) -> None:
        try:
            step = await run_async(self._handle(job))
        except (KeyboardInterrupt, SystemExit):
            raise
        except asyncio.CancelledError as error:
            if self._is_cancelled:
                raise
            # By its own handler: this worker would keep the message, and nobody would settle it.
            step = self._broken(error, job)
            _not_cancelled(asyncio.current_task())
        except BaseException as error:  # noqa: BLE001 - a task has nobody to tell
            step = self._broken(error, job)
        self._work.ended(job, step, clock())
        if len(self._running) < self._options.concurrency:
            # More than one may have their turn now.
            self._start()

    async def _keep_settling(self) -> None:
        while not (self._work.is_leaving and self._work.is_settled):
            self._to_settle.clear()
            self._settles_at = self._work.next_due()
            if (pause := self._settles_at - clock()) > 0:
                # Not `wait_for`, which may swallow a cancellation.
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if math.isinf(pause) else pause):
                        await self._to_settle.wait()
            await run_async(self._settle())
            self._start()


def _not_cancelled(task: asyncio.Task[None] | None) -> None:
    while task is not None and task.cancelling():
        task.uncancel()
