"""Which claims are renewed together: the renewal of one must never depend on what another of them waits for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from onefold._model import Claim

T = TypeVar("T")

# A store that renews one by one is asked for so many at the same time by a blocking guard: fewer than the ten
# connections that client libraries usually keep. An async guard asks for more, as waiting costs it nothing.
THREADS_MAX: Final = 8
# And so many threads in all wait for answers that do not come, before no further renewal is sent.
HANGING_MAX: Final = 64
TASKS_MAX: Final = 32

# The places of claims that are sent together.
Group = list[int]


def groups_of(store: Any, claims: Sequence[Claim], *, batching: bool) -> list[Group]:
    """Return the places of the claims by groups: a store that renews one by one has a group for each.

    A store of several servers says by `renewal_groups` which claims fail together; any other renews all at once.
    """
    if not batching:
        return [[place] for place in range(len(claims))]
    grouped = getattr(store, "renewal_groups", None)
    return [list(range(len(claims)))] if grouped is None else grouped(claims)


def are_one_group(store: Any, *, batching: bool) -> bool:
    """Return whether all claims of this store are always renewed together, on one connection."""
    return batching and not hasattr(store, "renewal_groups")


def spread(work: Callable[[T], object], pieces: Sequence[T], most: int = THREADS_MAX) -> list[threading.Thread]:
    """Work on the pieces in a few threads, and do not wait for them: each takes the next piece until none is left."""
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
        # A process that ends starts no threads any more.
        take()
    return [thread for thread in threads if thread.ident is not None]
