"""Medians, percentiles, and ratios with their spread. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

# Neighbouring rounds are one block, and each block has a ratio of its own: the quartiles over the blocks say how much
# the machine's mood moved it.
BLOCKS: Final = 20


class Spread(NamedTuple):
    """A median between its quartiles."""

    low: float
    median: float
    high: float


def spread_of(values: Sequence[float]) -> Spread:
    """Return the quartiles of one value or more."""
    if not values:
        raise ValueError("there is no spread of no values")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of them does not exceed: the nearest rank."""
    if not values:
        raise ValueError("there is no percentile of no values")
    ordered = sorted(values)
    rank = max(0, -(-int(share * len(ordered) * 1_000_000) // 1_000_000) - 1)
    return ordered[min(rank, len(ordered) - 1)]


def ratios(ours: Sequence[float], theirs: Sequence[float], blocks: int = BLOCKS) -> Spread:
    """Return how many times longer ours take, block by block of rounds that were measured side by side."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} rounds against {len(theirs)}: they were not measured in turn")
    pairs = zip(_blocks(ours, blocks), _blocks(theirs, blocks), strict=True)
    return spread_of([statistics.median(one) / statistics.median(other) for one, other in pairs])


def _blocks(values: Sequence[float], blocks: int) -> list[Sequence[float]]:
    """Cut the rounds into so many blocks, or as many as there are rounds; they differ by one round at most."""
    count = min(blocks, len(values))
    edges = [len(values) * number // count for number in range(count + 1)]
    return [values[start:end] for start, end in itertools.pairwise(edges)]
