"""How rivals are measured: call by call in turn, with fresh keys, in one process, on one server.

Whatever else the machine does meanwhile hits all of them alike, so that their ratios can be believed where their times
cannot. A turn is one delivery, or a burst of a few: between two bursts the other sides run, so that caches are as in
real life; inside of one, a side does not pay for the threads of its neighbour. The order is drawn anew for each round,
because a disk may still be busy with what was written just before.
"""

from __future__ import annotations

import gc
import itertools
import random
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

# Rounds that are not measured: after them connections are open, statements prepared, and code is warm. Where rounds are
# so slow that they would take a third of the time, fewer have to do.
WARM_UP_ROUNDS: Final = 20
WARM_UP_ROUNDS_MIN: Final = 3
WARM_UP_SHARE: Final = 1 / 3

# So many rounds say enough, however quick they are.
ROUNDS_MAX: Final = 20_000

# The orders of the rounds are the same in each run.
SEED: Final = 15


class Side(NamedTuple):
    """One of the rivals: what a delivery of a new key does, and one of a key that is done.

    Both return an awaitable where the rivals are async.
    """

    title: str
    first: Callable[[str], Any]
    duplicate: Callable[[str], Any]
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


class Turned(NamedTuple):
    """The keys of all rounds, and the seconds that each side took in the measured ones."""

    keys: list[str]
    times: list[list[float]]


class Taken(NamedTuple):
    """The seconds of each round, for each side."""

    first: list[list[float]]
    duplicate: list[list[float]]


class SideFailed(Exception):
    """A side raised, or its handler did not run once for each key."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


def measure(pair: Pair, *, seconds: float, rounds: int | None = None) -> Measured:
    """Measure two sides: new keys for half of the time, or for so many rounds, and then the same ones once more."""
    taken = take_turns([pair.ours, pair.by_hand], seconds=seconds, rounds=rounds)
    first, duplicate = ([statistics.median(times) for times in call] for call in taken)
    return Measured(
        Compared(first[0], first[1], pair.first_at_most),
        Compared(duplicate[0], duplicate[1], pair.duplicate_at_most),
        len(taken.first[0]),
    )


def take_turns(sides: Sequence[Side], *, seconds: float, rounds: int | None = None, burst: int = 1) -> Taken:
    """Deliver new keys to all sides for half of the time, or for so many rounds; then the same ones once more."""
    before = [side.ran() for side in sides]
    with no_collector():
        steps = turns(len(sides), fresh_keys(rounds), seconds / 2, burst, rounds)
        first = _in_turn([side.first for side in sides], steps)
        check(sides, before, len(first.keys))
        steps = turns(len(sides), first.keys, seconds / 2, burst, rounds)
        again = _in_turn([side.duplicate for side in sides], steps)
    check(sides, before, len(first.keys))
    return Taken(first.times, again.times)


async def take_turns_async(
    sides: Sequence[Side], *, seconds: float, rounds: int | None = None, burst: int = 1
) -> Taken:
    """Do the same with sides that are awaited, one delivery after the other."""
    before = [side.ran() for side in sides]
    with no_collector():
        steps = turns(len(sides), fresh_keys(rounds), seconds / 2, burst, rounds)
        first = await _in_turn_async([side.first for side in sides], steps)
        check(sides, before, len(first.keys))
        steps = turns(len(sides), first.keys, seconds / 2, burst, rounds)
        again = await _in_turn_async([side.duplicate for side in sides], steps)
    check(sides, before, len(first.keys))
    return Taken(first.times, again.times)


Turns = Generator[tuple[int, str], float, Turned]


def turns(sides: int, keys: Iterable[str], seconds: float, burst: int = 1, rounds: int | None = None) -> Turns:
    """Say whose turn it is and with which key, until the keys, the time or the rounds are used up.

    It is sent how long each took. A turn is a burst of keys, one after the other.
    """
    used: list[str] = []
    times: list[list[float]] = [[] for _ in range(sides)]
    order, chance = list(range(sides)), random.Random(SEED)
    left, began = iter(keys), time.monotonic()
    warm_up = 0
    while chunk := list(itertools.islice(left, burst)):
        took_all = time.monotonic() - began
        if not warm_up and (
            len(used) >= WARM_UP_ROUNDS or (len(used) >= WARM_UP_ROUNDS_MIN and took_all >= seconds * WARM_UP_SHARE)
        ):
            warm_up = len(used)
        # Where warming up was cut short, there are keys for more rounds.
        is_enough = took_all >= seconds or (rounds is not None and len(used) - warm_up >= rounds)
        if len(used) > warm_up > 0 and is_enough:
            break
        chance.shuffle(order)
        for index in order:
            for key in chunk:
                took = yield index, key
                times[index].append(took)
        used += chunk
    if rounds is not None:
        # The keys of a slow first pass may be too few for a fast second one to warm up: its last ones count.
        warm_up = max(warm_up, len(used) - rounds)
    return Turned(used, [taken[warm_up:] for taken in times])


def _in_turn(calls: Sequence[Callable[[str], Any]], steps: Turns) -> Turned:
    index, key = next(steps)
    while True:
        call = calls[index]
        began = time.perf_counter()
        try:
            call(key)
        except Exception as error:
            raise SideFailed(index, f"{type(error).__name__}: {error}") from error
        took = time.perf_counter() - began
        try:
            index, key = steps.send(took)
        except StopIteration as end:
            turned: Turned = end.value
            return turned


async def _in_turn_async(calls: Sequence[Callable[[str], Awaitable[Any]]], steps: Turns) -> Turned:
    index, key = next(steps)
    while True:
        call = calls[index]
        began = time.perf_counter()
        try:
            await call(key)
        except Exception as error:
            raise SideFailed(index, f"{type(error).__name__}: {error}") from error
        took = time.perf_counter() - began
        try:
            index, key = steps.send(took)
        except StopIteration as end:
            turned: Turned = end.value
            return turned


def fresh_keys(rounds: int | None = None) -> Iterator[str]:
    """Yield keys as long as a UUID, which most keys are."""
    of_this_run = secrets.token_hex(4)
    for number in range(WARM_UP_ROUNDS + (ROUNDS_MAX if rounds is None else rounds)):
        yield f"{of_this_run}-0000-4000-8000-{number:012d}"


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check(sides: Sequence[Side], before: Sequence[int], keys: int) -> None:
    """Raise if a handler has not run once for each key: what is fast must also be right."""
    for index, side in enumerate(sides):
        if (ran := side.ran() - before[index]) != keys:
            raise SideFailed(index, f"{side.title}: the handler ran {ran} times for {keys} keys")
