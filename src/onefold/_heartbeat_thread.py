"""The thread of a blocking heartbeat: it sleeps until something is due, and ends with its heartbeat."""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any, Protocol


class Beating(Protocol):
    """What the thread asks of a heartbeat."""

    def is_over(self, wake: threading.Condition) -> bool: ...
    def pause(self) -> float: ...
    def beat_and_plan(self) -> None: ...


def thread_for(heartbeat: Beating, wake: threading.Condition) -> threading.Thread:
    """A thread that lives as long as the heartbeat, and does not keep it alive: a guard may be dropped unclosed."""
    gone = weakref.finalize(heartbeat, _notify, wake)
    gone.atexit = False
    thread = threading.Thread(
        target=_beat_until_gone, args=(weakref.ref(heartbeat), wake, gone), name="onefold-heartbeat", daemon=True
    )
    thread.start()
    return thread


def _beat_until_gone(
    find: weakref.ref[Beating], wake: threading.Condition, gone: weakref.finalize[Any, Beating]
) -> None:
    while True:
        with wake:
            heartbeat = find()
            if heartbeat is None or heartbeat.is_over(wake):
                return
            pause = heartbeat.pause()
            if pause > 0:
                del heartbeat
                # Ours may have been the last reference: then it was told while nobody waited.
                if gone.alive:
                    wake.wait(None if math.isinf(pause) else pause)
                continue
        heartbeat.beat_and_plan()
        del heartbeat


def _notify(wake: threading.Condition) -> None:
    with wake:
        wake.notify_all()
