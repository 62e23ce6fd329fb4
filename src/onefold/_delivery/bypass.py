"""Restore the earlier record after a bypass that did not succeed. The rules are in `carried`."""

from __future__ import annotations

from typing import Final

import msgspec

from onefold._delivery import decide as _decide
from onefold._delivery import earlier_ending
from onefold._delivery.steps import Claiming, Ended, Flow, Reading
from onefold._delivery.work import Delivery
from onefold._model import Entry, Record, State
from onefold.events import Kind

# A heartbeat can come between the read and the write; each is one round.
ROUNDS_MAX: Final = 8


def put_back(delivery: Delivery, entry: Entry, ended: Ended) -> Flow[bool]:
    """Restore the record that a failed bypass found. False: it has expired meanwhile, and nothing was written."""
    name = type(ended.error).__name__
    try:
        ours = yield from _write_earlier(entry, ended, name if ended.started else "")
    except Exception:  # noqa: BLE001 - the handler's own error must surface, and the lease will end
        delivery.tell(Kind.STORE_FAILED, entry.address, entry.attempt, "claim")
        return True
    if ours is not None:
        delivery.tell(Kind.RELEASED if ours else Kind.LOST, entry.address, entry.attempt, name)
    return ours is not None


def _write_earlier(entry: Entry, ended: Ended, failure: str) -> Flow[bool | None]:
    for _ in range(ROUNDS_MAX):
        found: Record | None = yield Reading(entry.address)
        if found is None or found.token != entry.token:
            return False
        if found.state is not State.RUNNING:
            # Written in the previous round, whose answer got lost.
            return True
        earlier = earlier_ending.put_back(found, ended.notes if ended.started else found.notes, failure)
        if earlier is None:
            return None
        if (yield Claiming(earlier, found)) is None:
            return True
    return False


def alone(entry: Entry, ended: Ended) -> tuple[Entry, Ended]:
    """Return a bypass that has nothing to restore any more."""
    return (
        _decide.change(entry, notes=earlier_ending.without_earlier(entry.notes)),
        msgspec.structs.replace(ended, notes=earlier_ending.without_earlier(ended.notes)),
    )
