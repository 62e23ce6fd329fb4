"""What `make bench-quick` compares: each store beside the same work by hand on its raw driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from bench.measure import Pair, Side
from bench.sides import babelqueue, by_hand, joined, onefold
from services.house import House

Opens = Callable[[House], AbstractContextManager[Side]]


def pair(
    ours: Opens, rival: Opens, first_at_most: float | None = None, duplicate_at_most: float | None = None
) -> Callable[[House], AbstractContextManager[Pair]]:
    @contextmanager
    def opened(house: House) -> Iterator[Pair]:
        with ours(house) as our_side, rival(house) as their_side:
            yield Pair(our_side, their_side, first_at_most, duplicate_at_most)

    return opened


PAIRS: Final = {
    "memory": pair(onefold.memory, babelqueue.memory, 4.0, 4.0),
    "memory, run": pair(onefold.memory_run, babelqueue.memory, 4.0, 4.0),
    "memory, seen": pair(onefold.memory_seen, babelqueue.memory, 4.0, 4.0),
    "sqlite": pair(onefold.sqlite, by_hand.sqlite),
    "redis": pair(onefold.redis, by_hand.redis, 1.25, 1.4),
    "postgres": pair(onefold.postgres, by_hand.postgres),
    "postgres, joined": pair(joined.within, joined.by_hand, 1.10),
    "mariadb": pair(onefold.mysql, by_hand.mysql),
    "dynamodb": pair(onefold.dynamo, by_hand.dynamo),
}
