"""How a guard is measured against the same work by hand: call by call in turn, with fresh keys.

Whatever else the machine does meanwhile hits both alike, so that their ratio can be believed where their times cannot.
And what runs between two deliveries of one side is the other side, not the same again: caches are as in real life.
"""

from __future__ import annotations

import gc
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

# Rounds that are not measured: after them connections are open, statements prepared, and code is warm.
WARM_UP_ROUNDS: Final = 20

# After so many rounds the other side goes first: a disk may still be busy with what was written just before.
ROUNDS_IN_ORDER: Final = 10

# So many rounds say enough, however quick they are.
ROUNDS_MAX: Final = 20_000


class Side(NamedTuple):
    """One of two rivals: what a delivery of a new key does, and one of a key that is done."""

    title: str
    first: Callable[[str], object]
    duplicate: Callable[[str], object]
    # How often the handler has run.
    ran: Callable[[], int]


class Pair(NamedTuple):
    """A guard, and the same work without one; at most how many times longer the guard may take, where it is said."""

    ours: Side
    by_hand: Side
    first_at_most: float | None = None
    duplicate_at_most: float | None = None


class Compared(NamedTuple):
    """The median of one call, on both sides, in seconds."""

    ours: float
    by_hand: float
    at_most: float | None

    @property
    def ratio(self) -> float:
        return self.ours / self.by_hand

    @property
    def met(self) -> bool | None:
        return None if self.at_most is None else self.ratio <= self.at_most


class Measured(NamedTuple):
    first: Compared
    duplicate: Compared
    rounds: int


def measure(pair: Pair, *, seconds: float, rounds: int | None = None) -> Measured:
    """Deliver new keys for half of the time, or for so many rounds, and then the same ones once more."""
    ours, by_hand = pair.ours, pair.by_hand
    with _no_collector():
        keys, first = _in_turn(ours.first, by_hand.first, _fresh_keys(rounds), seconds / 2)
        _check(pair, len(keys))
        _, duplicate = _in_turn(ours.duplicate, by_hand.duplicate, keys, seconds / 2)
    _check(pair, len(keys))
    return Measured(
        Compared(*first, pair.first_at_most),
        Compared(*duplicate, pair.duplicate_at_most),
        len(keys) - WARM_UP_ROUNDS,
    )


def _in_turn(
    ours: Callable[[str], object], by_hand: Callable[[str], object], keys: Iterable[str], seconds: float
) -> tuple[list[str], tuple[float, float]]:
    """Call the two in turn until the keys or the time are used up; the keys that were used, and the two medians."""
    used: list[str] = []
    times: dict[Callable[[str], object], list[float]] = {ours: [], by_hand: []}
    order = [ours, by_hand]
    ends = time.monotonic() + seconds
    for key in keys:
        if len(used) > WARM_UP_ROUNDS and time.monotonic() >= ends:
            break
        for call in order:
            times[call].append(_time_of(call, key))
        used.append(key)
        if len(used) % ROUNDS_IN_ORDER == 0:
            order.reverse()
    return used, (statistics.median(times[ours][WARM_UP_ROUNDS:]), statistics.median(times[by_hand][WARM_UP_ROUNDS:]))


def _fresh_keys(rounds: int | None) -> Iterator[str]:
    """As long as a UUID, which most keys are."""
    of_this_run = secrets.token_hex(4)
    for number in range(WARM_UP_ROUNDS + (ROUNDS_MAX if rounds is None else rounds)):
        yield f"{of_this_run}-0000-4000-8000-{number:012d}"


def _time_of(call: Callable[[str], object], key: str) -> float:
    began = time.perf_counter()
    call(key)
    return time.perf_counter() - began


@contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check(pair: Pair, keys: int) -> None:
    """What is fast must also be right: each key's handler has run once."""
    for side in (pair.ours, pair.by_hand):
        if side.ran() != keys:
            raise AssertionError(f"{side.title}: the handler ran {side.ran()} times for {keys} keys")
