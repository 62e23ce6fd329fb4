"""End a handler before the time of its Lambda function is over, so that the guard can still note what that means.

Lambda kills a function at its time limit, without a word. A little before that the handler is interrupted, at whatever
line it is: nobody knows whether its effect happened.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from onefold import OutcomeUnknown

clock: Final = time.monotonic

# How long before its end a function stops: for the guard's last request, and for the answer.
MARGIN: Final = 1.0

# The timer goes off again until it is heard: a handler that is about to block, or whose signal another thread was
# given, does not wake up from the first one.
AGAIN_SECONDS: Final = 0.05


class TimeIsUp(BaseException):
    """Raised in a handler by the timer. It is no `Exception`: a handler that catches those must not go on."""


class NotStarted(Exception):
    """The time was up before the handler was called: nothing ran."""


class TimeLimit:
    """The time that is left of one invocation after another."""

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._ends_at = math.inf

    def begin(self, context: Any) -> float:
        """Note when this invocation has to be over; return how long it may take: without a context, forever."""
        left = getattr(context, "get_remaining_time_in_millis", None)
        found = math.inf if left is None else left() / 1000
        self._ends_at = clock() + found
        return found

    @property
    def left(self) -> float:
        """Return how long a handler may still run."""
        return self._ends_at - clock() - self._margin

    def limited(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return the handler, which raises `OutcomeUnknown` when its time is up; before it has begun, `NotStarted`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            left = self.left
            if left <= 0:
                raise NotStarted("the time of the Lambda function was nearly up, and nothing ran")
            try:
                with _interrupted_after(left):
                    return handler(*args, **kwargs)
            except TimeIsUp:
                raise OutcomeUnknown(
                    "the time of the Lambda function was nearly up, and the handler was interrupted"
                ) from None

        return call


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise `TimeIsUp` in this block after so many seconds. Only the main thread can be interrupted: Lambda uses it."""
    if math.isinf(seconds) or not can_interrupt():
        yield
        return
    is_over = False

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal is_over
        # What has returned is done, even if the timer was faster.
        if not is_over:
            is_over = True
            # It was heard: what the handler does about it is left alone.
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise TimeIsUp

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def can_interrupt() -> bool:
    return hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
