"""Await async jobs in one event loop of a worker, and end them in order when a time limit strikes.

RQ would open a loop for each job, and close none: in a `SimpleWorker` each job would leave a connection of the store
behind. And a signal that is raised while a loop waits passes every coroutine by: nobody would settle the job.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Final

from onefold.queues._shared.jobs.handler import Ended, GuardedJob, JobCall
from onefold.queues.rq.jobs import FRAMEWORK

# How long a function may take to end once it is cancelled; then its claim stays until the lease ends.
CANCEL_SECONDS_MAX: Final = 5.0


class _Own(threading.local):
    loop: asyncio.AbstractEventLoop | None = None
    process = 0


_own: Final = _Own()


def awaited(job: GuardedJob, call: JobCall) -> Ended:
    """Await the function once for this message's key; return how that ended."""
    loop = _loop()
    task = loop.create_task(job.deliver_async(call))
    try:
        return loop.run_until_complete(task)
    except FRAMEWORK.interrupts as error:
        return _interrupted(job, call, loop, task, error)


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this thread. A work horse has its own: after a fork, the parent's is of no use."""
    if _own.loop is None or _own.loop.is_closed() or _own.process != os.getpid():
        _own.loop, _own.process = asyncio.new_event_loop(), os.getpid()
    return _own.loop


def _interrupted(
    job: GuardedJob, call: JobCall, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Ended], error: BaseException
) -> Ended:
    call.interrupt = error
    task.cancel()
    loop.run_until_complete(asyncio.wait([task], timeout=CANCEL_SECONDS_MAX))
    if not task.done():
        # It does not let itself be cancelled: it ends here, wherever it is, as it would with RQ's own loop.
        _own.loop = None
    elif not task.cancelled():
        return task.result()
    return job.interrupted(call, error)
