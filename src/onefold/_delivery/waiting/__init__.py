"""Wait, in a driver, for a delivery that runs elsewhere.

The owner wakes those who wait in its own process when its delivery ends (`leave`). A store may tell of endings in other
processes: it has `listen` and `unlisten`. Looking again and again is the fall-back; how often
is decided in `patience`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from onefold._concurrency import waiters
from onefold._concurrency.waiters import AwaitingWaiter, BlockingWaiter, Waiter
from onefold._delivery.steps import Found, Waiting
from onefold._model import Claim, Record, State

# What a waiter may be handed by another: nobody writes it without being asked to.
ENDED: Final = (State.DONE, State.FAILED, State.HELD)


# Where a driver keeps its waiter: empty unless its delivery waits.
Seat = list[Any]


def share(step: Found, seat: Seat) -> None:
    """Hand what was found to those who wait for it as well, in this process."""
    if seat:
        seat[0].share(step.record, ended=step.record.state in ENDED)


def run_instead(seat: Seat) -> None:
    """Wait no longer: the delivery is ours to run."""
    seat.pop().leave(runs=True)


def wait(step: Waiting, seat: Seat, context: Any, sent: float) -> tuple[float, Record | None]:
    """Block until it is time to look; return how long it took, and what another waiter has found meanwhile."""
    began = time.monotonic()
    waiter: BlockingWaiter = _seated(seat, step, context, BlockingWaiter)
    waiter.waits_for(step.found.token)
    waiter.has_looked(sent)
    told = _owner_is_here(step, context)
    if not told and hasattr(context.store, "listen"):
        if waiter.asks_the_store():
            waiter.is_told(context.store.listen(step.found.address))
        told = bool(waiter.room.told)
    waiter.sleep(step.seconds_told if told else step.seconds, began + step.at_most)
    return time.monotonic() - began, waiter.handed()


async def wait_async(step: Waiting, seat: Seat, context: Any, sent: float) -> tuple[float, Record | None]:
    """Suspend until it is time to look, as `wait` does."""
    began = time.monotonic()
    waiter: AwaitingWaiter = _seated(seat, step, context, AwaitingWaiter)
    waiter.waits_for(step.found.token)
    waiter.has_looked(sent)
    told = _owner_is_here(step, context)
    if not told and hasattr(context.store, "listen"):
        if waiter.asks_the_store():
            waiter.is_told(await context.store.listen(step.found.address))
        told = bool(waiter.room.told)
    await waiter.sleep(step.seconds_told if told else step.seconds, began + step.at_most)
    return time.monotonic() - began, waiter.handed()


def _seated(seat: Seat, step: Waiting, context: Any, kind: type[Waiter]) -> Any:
    """Return the waiter of this delivery. A batch waits for one message after the other, each with a waiter."""
    if seat and seat[0].room.address != step.found.address:
        seat.pop().leave()
    if not seat:
        seat.append(kind(step.found.address, context.store))
    return seat[0]


def _owner_is_here(step: Waiting, context: Any) -> bool:
    """Return whether a delivery of this guard, in this process, runs it, and so wakes whoever waits.

    It wakes after its claim has left the heartbeat: if the claim is still there, the wake-up is yet to come.
    """
    return context.heartbeat is not None and context.heartbeat.find(step.found.token) is not None


def leave(watched: Sequence[Claim], seat: Seat) -> None:
    """End a delivery: wake those in this process who wait for its claims, and wait no longer by ourselves."""
    for claim in watched:
        waiters.wake(claim.address)
    if seat:
        seat.pop().leave()
