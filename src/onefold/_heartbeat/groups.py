"""Group the claims that are renewed together: the renewal of one must never depend on what another waits for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from onefold._model import Claim

T = TypeVar("T")

# How many concurrent requests a sync guard sends to a store that renews one by one: fewer than the ten connections that
# client libraries usually keep. An async guard sends more, as waiting costs it nothing.
THREADS_MAX: Final = 8
# How many threads in all may wait for missing answers before further renewals are held back.
HANGING_MAX: Final = 64
TASKS_MAX: Final = 32

# The indexes of claims that are sent together.
Group = list[int]


def groups_of(store: Any, claims: Sequence[Claim], *, batching: bool) -> list[Group]:
    """Return the indexes of the claims by group: a store that renews one by one has a group for each.

    A store of several servers says with `renewal_groups` which claims fail together; any other renews all at once.
    """
    if not batching:
        return [[index] for index in range(len(claims))]
    grouped = getattr(store, "renewal_groups", None)
    return [list(range(len(claims)))] if grouped is None else grouped(claims)


def are_one_group(store: Any, *, batching: bool) -> bool:
    """Return whether all claims of this store are always renewed together, on one connection."""
    return batching and not hasattr(store, "renewal_groups")


def spread(work: Callable[[T], object], pieces: Sequence[T], most: int = THREADS_MAX) -> list[threading.Thread]:
    """Process the items in a few threads, without waiting for them: each takes the next item until none is left."""
    waiting = deque(pieces)

    def take() -> None:
        while True:
            try:
                piece = waiting.popleft()
            except IndexError:
                return
            work(piece)

    threads = [
        threading.Thread(target=take, name="onefold-renewal", daemon=True)
        for _ in range(min(len(pieces), most, THREADS_MAX))
    ]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        # A process that is exiting cannot start threads any more.
        take()
    return [thread for thread in threads if thread.ident is not None]
