"""What a first call, its claim and a duplicate cost in a store with few records, and in one with many.

The two take turns, call by call: whatever else the machine does hits both alike, so that their ratio can be believed
where their times cannot. New keys are random, and duplicates are drawn at random from all records that were filled in.
"""

from __future__ import annotations

import random
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from bench.scale.filling import OPERATION, Place, Places, key_of, write_template
from onefold import Guard

RECORDS: Final = (10_000, 1_000_000, 10_000_000)
REFERENCE: Final = 10_000
ROUNDS: Final = 2_000

# Rounds that are not measured: connections are opened, statements prepared, and code is warm.
WARM_UP_ROUNDS: Final = 50

# At most so many times longer may a claim take in a full store than in one of 10 thousand records.
AT_MOST: Final = 1.5

# Bytes of a finished record without a result, a fingerprint or waste.
BYTES_AT_MOST: Final = {"redis": 230, "postgres": 270}


class Times(NamedTuple):
    """Seconds of each call, by what was called."""

    claim: list[float]
    first: list[float]
    duplicate: list[float]


class Grown(NamedTuple):
    """One store with so many records, measured in turn with one that has few."""

    store: str
    records: int
    times: Times
    reference: Times
    bytes: float
    index_bytes: float | None
    log_bytes: float | None
    cpu_seconds: float | None

    @property
    def ratio(self) -> float:
        return _p50(self.times.claim) / _p50(self.reference.claim)

    def as_json(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "records": self.records,
            "claim_us": _us(_p50(self.times.claim)),
            "first_us": _us(_p50(self.times.first)),
            "duplicate_us": _us(_p50(self.times.duplicate)),
            "claim_p99_us": _us(_p99(self.times.claim)),
            "duplicate_p99_us": _us(_p99(self.times.duplicate)),
            "claim_mean_us": _us(statistics.fmean(self.times.claim)),
            "reference_claim_us": _us(_p50(self.reference.claim)),
            "reference_duplicate_us": _us(_p50(self.reference.duplicate)),
            "reference_claim_mean_us": _us(statistics.fmean(self.reference.claim)),
            "ratio": round(self.ratio, 3),
            "duplicate_ratio": round(_p50(self.times.duplicate) / _p50(self.reference.duplicate), 3),
            "at_most": AT_MOST,
            "met": self.ratio <= AT_MOST,
            "bytes": round(self.bytes, 1),
            "index_bytes": None if self.index_bytes is None else round(self.index_bytes, 1),
            "log_bytes_per_first_call": None if self.log_bytes is None else round(self.log_bytes),
            "server_cpu_us_per_first_call": None if self.cpu_seconds is None else _us(self.cpu_seconds),
        }


# What is being done, and how far it is.
Progress = Callable[[str, int, int], object]


def measure(places: Places, sizes: tuple[int, ...], rounds: int, progress: Progress) -> Iterator[Grown]:
    """Fill one place step by step, and measure it at each size in turn with a small one."""
    reference, place = places.new(), places.new()
    _fill(reference, 0, REFERENCE, f"{places.name}, reference", progress)
    filled, taken = 0, 0
    for records in sorted(sizes):
        # What the measurements between two sizes have added is not counted.
        before = _sizes_before(place)
        _fill(place, filled, records, places.name, progress)
        after = place.sizes()
        filled, taken = records, taken + after.bytes - before
        progress(f"{places.name}, measuring at {records:,}", 0, rounds)
        small, large = _in_turn(reference, place, records, rounds)
        index = None if after.index_bytes is None else after.index_bytes / records
        yield Grown(places.name, records, large, small, taken / records, index, *_of_the_server(places, place, rounds))


def bytes_with_fingerprint(places: Places, records: int, progress: Progress) -> float:
    """Return the bytes of a record that also remembers its payload's fingerprint, as `idempotent` writes it."""
    place = places.new()
    before = _sizes_before(place)
    _fill(place, 0, records, f"{places.name}, with fingerprints", progress, payload={"amount": 4200})
    return (place.sizes().bytes - before) / records


def _sizes_before(place: Place) -> int:
    """Return the bytes of a store before it is filled: its tables exist, and other places may have records."""
    with Guard(place.url) as guard:
        guard.store.read(guard.address(OPERATION, "none"))
    return place.sizes().bytes


def _fill(place: Place, begin: int, end: int, title: str, progress: Progress, payload: object = None) -> None:
    if not begin:
        write_template(place.url, payload)
    place.fill(begin, end, lambda done: progress(f"{title}, filling to {end:,}", done, end - begin))
    # A fingerprint depends on its key, too: a copy of one is as long, and fits no other key.
    if payload is None:
        _check(place, end)


def _check(place: Place, records: int) -> None:
    """What was filled in must be what a delivery leaves: a guard replays it."""
    with Guard(place.url) as guard:
        for number in random.Random(records).sample(range(records), min(20, records)):
            guard.run(OPERATION, key_of(number), _never)


def _never() -> None:
    raise AssertionError("a record that was filled in has run")


def _in_turn(reference: Place, place: Place, records: int, rounds: int) -> tuple[Times, Times]:
    """Deliver new keys to both in turn, then known ones."""
    with ExitStack() as guards:
        small, large = (guards.enter_context(Guard(one.url)) for one in (reference, place))
        times = {small: Times([], [], []), large: Times([], [], [])}
        for _ in range(rounds + WARM_UP_ROUNDS):
            for guard in (small, large):
                _first(guard, times[guard])
        chosen = random.Random(rounds)
        for _ in range(rounds + WARM_UP_ROUNDS):
            for guard, known in ((small, REFERENCE), (large, records)):
                _duplicate(guard, times[guard], key_of(chosen.randrange(known)))
    return _warm(times[small]), _warm(times[large])


def _first(guard: Guard, times: Times) -> None:
    key, began_at = str(uuid.uuid4()), [0.0]

    def handler() -> None:
        began_at[0] = time.perf_counter()

    called = time.perf_counter()
    guard.run(OPERATION, key, handler)
    ended = time.perf_counter()
    times.claim.append(began_at[0] - called)
    times.first.append(ended - called)


def _duplicate(guard: Guard, times: Times, key: str) -> None:
    called = time.perf_counter()
    outcome = guard.run(OPERATION, key, _never)
    times.duplicate.append(time.perf_counter() - called)
    if not outcome.replayed:
        raise AssertionError("a known key was not replayed")


def _of_the_server(places: Places, place: Place, rounds: int) -> tuple[float | None, float | None]:
    """Return the log that a first call writes, and the processor time that it takes of the server."""
    log_before, cpu_before = place.log_bytes(), places.cpu_seconds()
    if log_before is None and cpu_before is None:
        return None, None
    with Guard(place.url) as guard:
        unused = Times([], [], [])
        for _ in range(rounds):
            _first(guard, unused)
        cpu_after = places.cpu_seconds()
    return _each(log_before, place.log_bytes(), rounds), _each(cpu_before, cpu_after, rounds)


def _each(before: float | None, after: float | None, rounds: int) -> float | None:
    return None if before is None or after is None else (after - before) / rounds


def _warm(times: Times) -> Times:
    return Times(*(found[WARM_UP_ROUNDS:] for found in times))


def _p50(found: list[float]) -> float:
    return statistics.median(found)


def _p99(found: list[float]) -> float:
    return sorted(found)[int(len(found) * 0.99)]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
