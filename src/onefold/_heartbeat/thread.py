"""The thread of a sync heartbeat: it sleeps until a beat is due, and ends with its heartbeat.

It is woken through its bell, a queue implemented in C: an interrupt (Ctrl-C, a signal handler that raises) may hit the
caller between any two lines, but leaves nothing locked, and no wake-up is lost.
"""

from __future__ import annotations

import threading
import weakref
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

# The times at which the thread is to wake; `AT_ONCE` makes it check whether it has to end.
Bell = SimpleQueue[float]

AT_ONCE: Final = 0.0


class Beating(Protocol):
    """The heartbeat as its thread sees it."""

    def is_over(self, bell: Bell) -> bool: ...
    def attend(self, moment: float | None) -> float: ...


def thread_for(heartbeat: Beating, bell: Bell) -> threading.Thread:
    """Create a thread that lives as long as the heartbeat without keeping it alive: a guard may be dropped unclosed."""
    weakref.finalize(heartbeat, bell.put, AT_ONCE).atexit = False
    return threading.Thread(
        target=_beat_until_gone, args=(weakref.ref(heartbeat), bell), name="onefold-heartbeat", daemon=True
    )


def _beat_until_gone(find: weakref.ref[Any], bell: Bell) -> None:
    # Check first: a claim may have rung the bell of an earlier thread, which has ended.
    moment: float | None = None
    while True:
        heartbeat = find()
        if heartbeat is None or heartbeat.is_over(bell):
            return
        pause = heartbeat.attend(moment)
        del heartbeat
        moment = _heard(bell, pause)


def _heard(bell: Bell, pause: float) -> float | None:
    """Wait until the bell rings, or the pause is over; return the earliest time that it rang for."""
    try:
        moment = bell.get(timeout=min(max(pause, 0.0), threading.TIMEOUT_MAX))
        while not bell.empty():
            moment = min(moment, bell.get_nowait())
    except Empty:
        return None
    return moment
