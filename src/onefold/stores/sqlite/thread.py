"""A thread that waits for SQLite on behalf of an event loop: SQLite itself has no async interface."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

P = ParamSpec("P")
T = TypeVar("T")


class OneThread:
    """Performs the calls of all event loops in order, in one thread, which starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0

    async def request(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await _in_thread(self._running(), partial(call, *args, **kwargs))

    async def end(self, last: Callable[[], None]) -> None:
        """Run `last` after all earlier calls, and end the thread. A later call starts a new one."""
        executor, self._executor = self._running(), None
        try:
            await _in_thread(executor, last)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        # The thread is idle, so that this does not block the loop.
        executor.shutdown()

    def _running(self) -> ThreadPoolExecutor:
        # A forked child inherits the object, but not its thread.
        if self._executor is None or self._pid != os.getpid():
            from concurrent.futures import ThreadPoolExecutor

            self._pid = os.getpid()
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return self._executor


async def _in_thread(executor: ThreadPoolExecutor, call: Callable[[], T]) -> T:
    from asyncio import get_running_loop

    return await get_running_loop().run_in_executor(executor, call)
