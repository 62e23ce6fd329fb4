"""Find out who sent a request, and whether the client's call that sent it is still running.

A client follows redirects, and reads most responses, inside one call. It does not say when that call gives up, so we
check whether its frame is still executing. A live thread proves nothing: a pool's thread continues.

Never with `sys._current_frames()`: it can deadlock with a thread that starts or ends (CPython 3.11).
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final
from weakref import ref

# The packages that follow redirects, and read responses.
CLIENTS: Final = frozenset({"httpx", "requests"})

# A client's generator is not its call: it is left and re-entered.
GENERATOR: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Caller:
    """The task or thread that sent, or reads, and the client's call in which it does."""

    def __init__(self) -> None:
        # Weak: remembering a request must not keep a task alive.
        self._who = ref(_running_here())
        self._call = _client_call()

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it is another task or thread, and not over."""
        who = self._who()
        return who is not None and who is not _running_here() and not _is_over(who)

    @property
    def is_in_call(self) -> bool:
        """Return whether the client's call in which it was sent has not returned or raised yet."""
        if self._call is not None and not _is_executed(self._call, self._who()):
            # It never comes back, and we must not keep its references alive.
            self._call = None
        return self._call is not None

    def leaves_call(self) -> None:
        """Note that the client has passed it on, and its call is done with it."""
        self._call = None


def _running_here() -> Any:
    """Return the running task, or the thread outside one."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.current_thread() if task is None else task


def _is_over(who: Any) -> bool:
    return who.done() if isinstance(who, asyncio.Future) else not who.is_alive()


def _client_call() -> FrameType | None:
    """Return the outermost frame of the client that sends us this request; None if there is no client around us."""
    found = None
    for frame in _outwards(sys._getframe()):
        is_client = frame.f_globals.get("__name__", "").partition(".")[0] in CLIENTS
        if is_client and not frame.f_code.co_flags & GENERATOR:
            found = frame
        elif found is not None and not is_client:
            break
    return found


def _is_executed(call: FrameType, who: Any) -> bool:
    """Return whether this frame, entered by that task or thread, has not been left for good."""
    if call.f_code.co_flags & inspect.CO_COROUTINE:
        return isinstance(who, asyncio.Task) and _is_inside(call, who.get_coro())
    try:
        # The way to test a frame: an executing one, in any thread, refuses it. It is the client's own, and its
        # variables are no longer needed.
        call.clear()
    except RuntimeError:
        return True
    return False


def _is_inside(call: FrameType, coroutine: Any) -> bool:
    """Return whether this coroutine is suspended inside that frame, or runs in another thread, where we cannot look."""
    while coroutine is not None:
        if getattr(coroutine, "cr_running", False) or getattr(coroutine, "cr_frame", None) is call:
            return True
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return False


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
