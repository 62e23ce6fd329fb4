"""Deliveries a second with several callers at once: threads for blocking sides, tasks for async ones.

The sides take turns here too, a slice of time each, in an order that moves on from round to round.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from bench.compare.spread import spread_of
from bench.measure import Side, check

ROUNDS: Final = 3

# Of one side's turn; with many callers it is longer, so that each of them gets to deliver a few times.
SLICE_SECONDS: Final = 0.25
SLICE_SECONDS_OF_MANY: Final = 1.0
MANY: Final = 100

# A caller waits no longer than this for the others to begin.
START_SECONDS_MAX: Final = 60.0


class Keys:
    """New keys for any number of threads; it knows how many were taken."""

    def __init__(self) -> None:
        self._of_this_side = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._taken: list[None] = []

    @property
    def taken(self) -> int:
        return len(self._taken)

    def __call__(self) -> str:
        self._taken.append(None)
        return f"{self._of_this_side}-0000-4000-9000-{next(self._numbers):012d}"


class Course:
    """One number of callers: whose turn it is, and how fast each side was in each of its turns.

    A side that fails or whose handler runs twice under load is out, with the reason in place of its speed.
    """

    def __init__(self, sides: Sequence[Side]) -> None:
        self._sides = sides
        self._speeds: list[list[float]] = [[] for _ in sides]
        self._failed: dict[int, str] = {}

    def turns(self) -> Iterator[tuple[Side, Keys, Callable[[float], None], Callable[[Exception], None]]]:
        """Yield each turn: the side, its keys, and what to call with the speed, or with what went wrong."""
        for index in itertools.chain.from_iterable(orders(len(self._sides))):
            if index not in self._failed:
                yield self._turn(index)

    def _turn(self, index: int) -> tuple[Side, Keys, Callable[[float], None], Callable[[Exception], None]]:
        side, keys, before = self._sides[index], Keys(), self._sides[index].ran()

        def failed(error: Exception) -> None:
            self._failed[index] = f"{type(error).__name__}: {error}"

        def done(speed: float) -> None:
            try:
                check([side], [before], keys.taken)
            except Exception as error:  # noqa: BLE001 - the row says it
                failed(error)
            else:
                self._speeds[index].append(speed)

        return side, keys, done, failed

    def summary(self, ours: int) -> list[dict[str, Any]]:
        """Return the median speed of each side, and how many times longer ours takes for a delivery."""
        return [
            {"missing": self._failed[index]} if index in self._failed else compared(of_side, self._speeds[ours])
            for index, of_side in enumerate(self._speeds)
        ]


def compared(speeds: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    per_round = [theirs / our for theirs, our in zip(speeds, ours, strict=False)]
    return {
        "per_second": round(statistics.median(speeds), 1),
        "ratio": [round(value, 4) for value in spread_of(per_round)] if per_round else None,
    }


def orders(sides: int, rounds: int = ROUNDS) -> list[list[int]]:
    """Return whose turn it is in each round: everybody once, and each round begins with the next one."""
    return [[(start + index) % sides for index in range(sides)] for start in range(rounds)]


def callers_of(kind: str, callers: int) -> str:
    """Say how many callers there were: `1 thread`, `1,000 tasks`."""
    return f"{callers:,} {'task' if kind == 'async' else 'thread'}{'' if callers == 1 else 's'}"


def slice_seconds(callers: int, share: float) -> float:
    return (SLICE_SECONDS_OF_MANY if callers > MANY else SLICE_SECONDS) * share


class Callers:
    """Threads that live through all turns, so that each has its connection open when it is measured."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool = ThreadPoolExecutor(most)

    def warm(self, side: Side) -> None:
        keys = Keys()
        self._all(self._most, lambda: side.first(keys()))

    def deliver(self, side: Side, keys: Keys, callers: int, seconds: float) -> float:
        """Let so many threads deliver new keys for so long; return how many a second were done."""
        began = time.monotonic()
        ends = began + seconds

        def until_it_ends() -> None:
            side.first(keys())
            while time.monotonic() < ends:
                side.first(keys())

        self._all(callers, until_it_ends)
        return keys.taken / (time.monotonic() - began)

    def _all(self, callers: int, call: Callable[[], Any]) -> None:
        barrier = threading.Barrier(callers)

        def one() -> None:
            barrier.wait(START_SECONDS_MAX)
            call()

        for future in [self._pool.submit(one) for _ in range(callers)]:
            future.result()

    def close(self) -> None:
        self._pool.shutdown()


async def deliver_async(side: Side, keys: Keys, callers: int, seconds: float) -> float:
    """Let so many tasks deliver new keys for so long; return how many a second were done."""
    began, before = time.monotonic(), keys.taken
    ends = began + seconds

    async def until_it_ends() -> None:
        await side.first(keys())
        while time.monotonic() < ends:
            await side.first(keys())

    await asyncio.gather(*(until_it_ends() for _ in range(callers)))
    return (keys.taken - before) / (time.monotonic() - began)


async def warm_async(side: Side, keys: Keys, callers: int) -> None:
    """Open the connections that so many tasks need."""
    await asyncio.gather(*(side.first(keys()) for _ in range(callers)))
