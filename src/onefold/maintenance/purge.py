"""Remove expired records, alongside other work on the same table, without getting in the way.

It works in batches, each a short transaction that takes rows that nobody else has, so that several purgers share the
work. Between two batches it pauses for twice as long as the last one took, so it never uses more than a third of the
time of one connection. It decides nothing: the store knows which records are expired.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from onefold import UsageError
from onefold.stores.base import Store

# Some 10 ms of work for a database server: short enough for others that wait, and long enough to be worth it.
BATCH: Final = 1_000

# A batch is one transaction, and a delivery of a key in it waits for its end.
BATCH_MAX: Final = 50_000

# A batch is followed by a pause of this many times its own duration: a busy server is purged more gently.
REST: Final = 2.0

# Shorter pauses would leave no gap in which the server serves others.
PAUSE_MIN: Final = 0.01


class Purged(NamedTuple):
    """The result of one pass over a store."""

    removed: int
    batches: int
    seconds: float
    # False: it was told to stop, or its limit was reached, and there may be more.
    finished: bool


def purge(
    store: Store,
    *,
    batch: int = BATCH,
    limit: int | None = None,
    stop: threading.Event | None = None,
    on_batch: Callable[[int], Any] | None = None,
) -> Purged:
    """Remove expired records, at most `limit`; call `on_batch` with the number removed so far.

    `stop` ends it after the batch in progress. Raises the store's errors.
    """
    check(batch=batch, limit=limit)
    stopped = stop or threading.Event()
    began, removed, batches = time.monotonic(), 0, 0
    finished = False
    while not (finished or stopped.is_set() or removed >= (math.inf if limit is None else limit)):
        wanted = batch if limit is None else min(batch, limit - removed)
        sent = time.monotonic()
        found = store.purge(wanted)
        took = time.monotonic() - sent
        removed, batches = removed + found, batches + 1
        if on_batch is not None:
            on_batch(removed)
        finished = found < wanted
        if not finished:
            stopped.wait(max(REST * took, PAUSE_MIN))
    return Purged(removed, batches, time.monotonic() - began, finished)


def passes(every: float | None, stop: threading.Event) -> Iterator[int]:
    """Yield 1, and then, every `every` seconds after the start of the previous pass, 2, 3 and so on."""
    number = 0
    while not stop.is_set():
        began, number = time.monotonic(), number + 1
        yield number
        if every is None:
            return
        stop.wait(max(began + every - time.monotonic(), 0.0))


def check(*, batch: int, limit: int | None) -> None:
    """Raise `UsageError` for invalid numbers."""
    if not 1 <= batch <= BATCH_MAX:
        raise UsageError(f"batch={batch} has to be a number from 1 to {BATCH_MAX:,}")
    if limit is not None and limit < 1:
        raise UsageError(f"limit={limit} has to be 1 or more")
