"""Keep the outcome that a bypass has found until the bypass succeeds. Pure: no I/O, no clock, no random.

The record of a running bypass carries the earlier outcome: the result in its own place, the rest in its notes, under
a name that no step can have. A bypass that fails restores it; if one dies, the next delivery that finds the lease
over replays it. So the earlier finish stands until there is another.
"""

from __future__ import annotations

from typing import Final

import msgspec

from onefold._model import Entry, Record, State
from onefold._model.notes import EARLIER, RESERVED, log_of, packed, without
from onefold._model.remarks import BEFORE

# The first words of the remark about a failed bypass, in the record that it left unchanged.
FAILED: Final = "bypass failed: "


class Earlier(msgspec.Struct, frozen=True, array_like=True):
    """The outcome that a bypass has found, without its result."""

    state: State
    ttl: float
    age: float
    attempt: int
    omitted: bool
    remark: str
    fingerprint: bytes | None


def carrying(entry: Entry, found: Record) -> Entry:
    """Add to a bypass's entry the outcome that it found, and the finished steps of an equal, failed bypass."""
    ended = finished(found) or found
    earlier = Earlier(
        ended.state, ended.ttl_left, ended.age, ended.attempt, ended.omitted, ended.remark, ended.fingerprint
    )
    return msgspec.structs.replace(
        entry,
        bypasses=ended.bypasses + 1,
        ttl=max(entry.ttl, ended.ttl_left),
        fingerprint=entry.fingerprint if ended.fingerprint is None else ended.fingerprint,
        result=ended.result,
        notes=packed(log_of(found.notes) | {EARLIER: msgspec.msgpack.encode(earlier)}),
    )


def is_bypass(entry: Entry) -> bool:
    """Return whether there is something to restore if it fails."""
    return bool(entry.bypasses and entry.notes) and EARLIER in log_of(entry.notes)


def finished(found: Record) -> Record | None:
    """Return the outcome that stands while a bypass runs, as long as it is kept; None if there is none."""
    if found.state is not State.RUNNING or not found.bypasses or not found.notes:
        return None
    carried = log_of(found.notes).get(EARLIER)
    if carried is None:
        return None
    earlier = msgspec.msgpack.decode(carried, type=Earlier)
    if earlier.ttl <= found.age:
        return None
    return msgspec.structs.replace(
        found,
        state=earlier.state,
        attempt=earlier.attempt,
        lease_left=0.0,
        # The bypass began at age zero.
        ttl_left=earlier.ttl - found.age,
        age=earlier.age + found.age,
        bypasses=found.bypasses - 1,
        fingerprint=earlier.fingerprint,
        omitted=earlier.omitted,
        remark=earlier.remark,
    )


def put_back(found: Record, notes: bytes | None, failure: str) -> Entry | None:
    """Return the earlier outcome, to replace the bypass; None if it has expired meanwhile."""
    ended = finished(found)
    if ended is None:
        return None
    # Into the latest remark: behind the history it would change the name of the earliest bypass, which then ran again.
    latest, *history = ended.remark.partition(BEFORE)
    before = latest.partition(FAILED)[0].removesuffix("; ")
    remark = "; ".join(part for part in (before, failure and FAILED + failure) if part) + "".join(history)
    return msgspec.structs.replace(ended, notes=without(notes, EARLIER), remark=remark).as_entry(found.token)


def steps_only(notes: bytes | None) -> bytes | None:
    """Return the log of the steps only."""
    return without(notes, *RESERVED)
