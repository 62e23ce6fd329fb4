"""The capacity model: from a workload and a store's costs to records, bytes, round trips and connections. Pure.

Records are new keys per second times `keep`. Connections by Little's law: the seconds that each delivery holds one,
times the deliveries per second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal

import msgspec

from onefold.sizing.costs import KEY_CHARACTERS, UUID_BYTES, Costs

DAY_SECONDS: Final = 86_400

# A pool or a server whose connections are busy half of the time has room for bursts.
BUSY_SHARE: Final = 0.5

# DynamoDB counts writes in units of a kilobyte.
UNIT_BYTES: Final = 1024

Mode = Literal["claim", "transactional"]


class Contradiction(ValueError):
    """The parts of a workload do not fit together; the message is one line for people."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is delivered. Durations are seconds, sizes are bytes."""

    # Deliveries per second, duplicates among them; and how many times that at the busiest moment.
    rate: float
    peak: float = 1.0
    keep: float
    # The share of deliveries that are duplicates.
    duplicates: float = 0.0
    handler: float = 0.05
    # One way to the store's server and back.
    round_trip: float = 0.0005
    result: int = 0
    key: int = KEY_CHARACTERS
    fingerprint: bool = True
    mode: Mode = "claim"


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What a store has to hold and to do. Rates are per second, at the peak where it says so."""

    record_bytes: float
    # Of new keys.
    records_a_day: float
    # None: kept forever, so that the number only grows.
    records: float | None
    bytes: float | None
    bytes_a_day: float
    # With room for what the store needs besides.
    provide: float | None
    # Written to the log in a day: from, to.
    log_a_day: tuple[float, float] | None
    # At the peak.
    round_trips: float
    handlers: float
    connections: int | None
    cores: float | None
    write_units: float | None
    # Records that expire in a second, on average; zero if none do.
    purge: float
    # Why it will not work like that.
    warnings: tuple[str, ...]


def size(workload: Workload, costs: Costs) -> Size:
    """Do the sums. Raise `Contradiction` for a workload that this store cannot have."""
    check(workload, costs)
    new = workload.rate * (1 - workload.duplicates)
    forever = math.isinf(workload.keep)
    records = None if forever else new * workload.keep
    each = record_bytes(workload, costs, records or new * DAY_SECONDS)
    a_day = new * DAY_SECONDS
    log = None if costs.log_bytes is None else (a_day * costs.log_bytes[0], a_day * costs.log_bytes[1])
    peak = workload.peak
    return Size(
        record_bytes=each,
        records_a_day=a_day,
        records=records,
        bytes=None if records is None else records * each,
        bytes_a_day=a_day * each,
        provide=None if records is None else records * each * costs.headroom,
        log_a_day=log,
        round_trips=peak * _round_trips(workload, costs),
        handlers=peak * new * workload.handler,
        connections=None if costs.writer_per_second else _connections(workload, costs),
        cores=None if costs.server_seconds is None else peak * _server_seconds(workload, costs),
        write_units=peak * _write_units(workload, each) if costs.billed_bytes else None,
        purge=0.0 if forever else new,
        warnings=tuple(_warnings(workload, costs)),
    )


def check(workload: Workload, costs: Costs) -> None:
    """Raise `Contradiction` for numbers that cannot be meant, or that this store cannot have."""
    if not 0 <= workload.duplicates < 1:
        raise Contradiction("--duplicates: something has to be delivered for the first time, so give it less than 100%")
    if workload.keep <= 0:
        raise Contradiction("--keep: a record that is not kept finds no duplicate, so give it a time such as 24h")
    if workload.peak < 1:
        raise Contradiction("--peak: the busiest moment has at least the mean rate, so give it 1 or more")
    if workload.mode == "transactional" and costs.transactional_saves is None:
        raise Contradiction(
            f"--mode transactional: a record on {costs.name} cannot commit with the rows of your database. "
            "Use --mode claim, or a SQL store"
        )


def record_bytes(workload: Workload, costs: Costs, records: float) -> float:
    """Return the bytes of one finished record among so many."""
    found = between(costs.bytes_by_result, workload.result) + costs.billed_bytes
    if not workload.fingerprint:
        found -= costs.fingerprint_bytes
    if workload.mode == "transactional":
        found -= costs.transactional_saves or 0.0
    # A key that is as long as a UUID is taken for one, which Redis stores as its number.
    if workload.key != KEY_CHARACTERS:
        measured_with = UUID_BYTES if costs.in_memory else KEY_CHARACTERS
        found += costs.key_character_bytes * (workload.key - measured_with)
    slots = _slots(records) / records
    if math.isinf(workload.keep):
        return found - costs.forever_saves + costs.slot_bytes / 2 * slots
    return found + costs.slot_bytes * slots


def between(points: Sequence[tuple[int, float]], at: int) -> float:
    """Interpolate between the points; above the last one, continue as between the last two."""
    for (x, y), (next_x, next_y) in pairwise(points):
        if at <= next_x or next_x == points[-1][0]:
            return y + (next_y - y) * (at - x) / (next_x - x)
    return points[0][1]


def _slots(records: float) -> float:
    return float(2 ** math.ceil(math.log2(max(records, 1))))


def _round_trips(workload: Workload, costs: Costs) -> float:
    first = costs.round_trips * (1 - workload.duplicates)
    return workload.rate * (first + costs.duplicate_round_trips * workload.duplicates)


def _connections(workload: Workload, costs: Costs) -> int:
    """By Little's law. In a transaction the handler holds a connection, too; in claim mode only statements do."""
    first = costs.first_seconds + costs.round_trips * workload.round_trip
    if workload.mode == "transactional":
        first += workload.handler
    duplicate = costs.duplicate_seconds + costs.duplicate_round_trips * workload.round_trip
    each = first * (1 - workload.duplicates) + duplicate * workload.duplicates
    return math.ceil(workload.peak * workload.rate * each / BUSY_SHARE)


def _server_seconds(workload: Workload, costs: Costs) -> float:
    """Return the processor seconds of a second. A duplicate takes about its share of the round trips."""
    duplicate = costs.duplicate_round_trips / costs.round_trips * workload.duplicates
    return workload.rate * (costs.server_seconds or 0.0) * (1 - workload.duplicates + duplicate)


def _write_units(workload: Workload, each: float) -> float:
    """Return DynamoDB's write units: claiming costs one, finishing and refusing one for each kilobyte."""
    units = math.ceil(each / UNIT_BYTES)
    return workload.rate * ((1 + units) * (1 - workload.duplicates) + units * workload.duplicates)


def _warnings(workload: Workload, costs: Costs) -> list[str]:
    found = []
    new = workload.peak * workload.rate * (1 - workload.duplicates)
    writer = costs.writer_per_second
    if writer is not None and new > writer:
        found.append(f"{costs.name} has one writer, which did {writer:,} first calls a second: use a server")
    if costs.purge_per_second is not None and not math.isinf(workload.keep) and new > costs.purge_per_second:
        found.append(f"one purge removed {costs.purge_per_second:,} records a second: run several of them")
    if costs.in_memory and math.isinf(workload.keep):
        found.append("memory that only grows: keep records for a time, or use a database on disk")
    return found
