"""Read through to the old store while records move: its records count too, and are moved when they are asked for.

A claim is written here first, and the other store is read after it. Two guards that use the same two stores from
opposite sides therefore never both run: each writes before it reads, so at least one of them sees the other. A record
that is found there is moved as it was seen: fenced there by compare-and-swap, written here, removed there. Nothing is
lost in between, because it is always in at least one of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

from onefold._delivery.claim import RETRY_AFTER, claim_of
from onefold._delivery.steps import Claiming, ClaimingAll, Elsewhere, Flow, Reading, Releasing, Step, StoreStep
from onefold._model import GONE, Address, Claim, Entry, Gone, Record, State
from onefold.errors import InProgress, StoreUnavailable

T = TypeVar("T")


def read_through(flow: Flow[T], old: Any) -> Flow[T]:
    """Run this flow, taking the old store's records into account."""
    moved: list[Record] = []

    def expand(step: Step) -> Flow[Any]:
        if isinstance(step, Claiming):
            return _claim(step, old, moved)
        return _read(step, old) if isinstance(step, Reading) else _as_it_is(step)

    return _expanded(flow, expand)


def read_through_first(flow: Flow[T], address: Address, old: Any, new: Any) -> Flow[T]:
    """Move the old store's record before a transaction of our own begins.

    A record in a transaction is invisible before the commit: a worker that claims in the old store at the same time is
    not noticed.
    """
    running = yield from _move(address, old, lambda step: Elsewhere(new, step))
    if running is not None:
        raise _busy(address)
    return (yield from flow)


def read_through_joined(flow: Flow[T], old: Any, new: Any) -> Flow[T]:
    """Move the old store's record before our first statement in a caller's transaction, and outside of it."""

    def expand(step: Step) -> Flow[Any]:
        if isinstance(step, Claiming) and step.replacing is None:
            return _claim_joined(step, old, new)
        return _claim_all_joined(step, old, new) if isinstance(step, ClaimingAll) else _as_it_is(step)

    return _expanded(flow, expand)


def _expanded(flow: Flow[T], expand: Callable[[Step], Flow[Any]]) -> Flow[T]:
    reply: Any = None
    failure: Exception | None = None
    try:
        while True:
            try:
                step = flow.send(reply) if failure is None else flow.throw(failure)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            reply = failure = None
            try:
                reply = yield from expand(step)
            except Exception as error:  # noqa: BLE001 - the flow knows what it means there
                failure = error
    finally:
        flow.close()


def _as_it_is(step: Step) -> Flow[Any]:
    return (yield step)


def _claim(step: Claiming, old: Any, moved: list[Record]) -> Flow[Record | Gone | None]:
    found: Record | Gone | None = yield step
    if isinstance(found, Record):
        # An abandoned claim may be one that died before it read the other store.
        return (yield from _instead_of_abandoned(found, old, moved)) if found.is_abandoned else found
    is_new_claim = step.entry.state is State.RUNNING and _token_of(step.replacing) != step.entry.token
    return (yield from _unless_known(step, old, moved)) if found is None and is_new_claim else found


def _instead_of_abandoned(found: Record, old: Any, moved: list[Record]) -> Flow[Record | Gone]:
    left: Record | None = yield Elsewhere(old, Reading(found.address))
    if not _counts(left):
        return found
    if left.is_live:
        return left
    if (yield from _replace(found, left, old, moved)):
        return (yield Reading(found.address)) or GONE
    raise _busy(found.address)


def _unless_known(step: Claiming, old: Any, moved: list[Record]) -> Flow[Record | Gone | None]:
    """Check the old store after a claim of ours. None: the claim stands, because the old store has no record."""
    entry = step.entry
    try:
        left: Record | None = yield Elsewhere(old, Reading(entry.address))
        if not _counts(left):
            return None
        is_moved = not left.is_live and (yield from _replace(_as_written(entry), left, old, moved))
    except Exception as error:
        yield from _give_back_unread(step, error)
        raise
    if is_moved:
        return (yield Reading(entry.address)) or GONE
    # It is running there.
    yield from _give_back(step)
    if left.is_live:
        return left
    raise _busy(entry.address)


def _give_back(step: Claiming) -> Flow[None]:
    """Give our claim back, and restore what it replaced."""
    if step.replacing is None:
        yield Releasing(claim_of(step.entry))
    else:
        yield Claiming(step.replacing.as_moved(), _as_written(step.entry))


def _give_back_unread(step: Claiming, error: Exception) -> Flow[None]:
    """Give our claim back after the old store did not answer: nothing has started, and a doubt would be held later.

    If this store fails as well, the lease ends the claim. A record that was moved meanwhile is not touched: its token
    is not our claim's.
    """
    try:
        yield from _give_back(step)
    except Exception:  # noqa: BLE001 - what the old store failed with is the one to show
        return
    if isinstance(error, StoreUnavailable):
        # Whoever catches it need not take the claim back once more.
        error.reached = False


def _replace(ours: Record, left: Record, old: Any, moved: list[Record]) -> Flow[bool]:
    """Replace our claim with the record that was left there. False: another was quicker, there or here.

    A delivery moves once: two that move the same record back and forth would never end.
    """
    if moved:
        return False
    moved.append(left)
    copy = left.as_moved()
    if (yield Elsewhere(old, Claiming(copy, left))) is not None:
        return False
    if (yield Claiming(copy, ours)) is not None:
        return False
    yield Elsewhere(old, Releasing(Claim(copy.address, copy.token)))
    return True


def _read(step: Reading, old: Any) -> Flow[Record | None]:
    found: Record | None = yield step
    if found is not None and not found.is_expired:
        return found
    return (yield from _move(step.address, old, _here)) or (yield step)


def _claim_joined(step: Claiming, old: Any, new: Any) -> Flow[Any]:
    running = yield from _move(step.entry.address, old, lambda step: Elsewhere(new, step))
    return running or (yield step)


def _claim_all_joined(step: ClaimingAll, old: Any, new: Any) -> Flow[list[Any]]:
    running: list[Record | None] = []
    for claiming in step.steps:
        found = yield from _move(claiming.entry.address, old, lambda step: Elsewhere(new, step))
        running.append(found)
    free = [claiming for claiming, found in zip(step.steps, running, strict=True) if found is None]
    replies = iter((yield ClaimingAll(free)) if free else ())
    return [next(replies) if found is None else found for found in running]


def _move(address: Address, old: Any, here: Callable[[StoreStep], Step]) -> Flow[Record | None]:
    """Move the old store's record here; return it if it is running there, and leave it where it is."""
    left: Record | None = yield Elsewhere(old, Reading(address))
    if not _counts(left):
        return None
    if left.is_live:
        return left
    copy = left.as_moved()
    if (yield Elsewhere(old, Claiming(copy, left))) is not None:
        raise _busy(address)
    # If something is in the way here, whoever wrote it will look there, and has to find it.
    if (yield here(Claiming(copy))) is None:
        yield Elsewhere(old, Releasing(Claim(address, copy.token)))
    return None


def _busy(address: Address) -> InProgress:
    """Create the error for two that are moving the same record: one of them comes again."""
    return InProgress.about(address, retry_after=RETRY_AFTER)


def _counts(record: Record | None) -> TypeGuard[Record]:
    return record is not None and not record.is_expired


def _here(step: StoreStep) -> Step:
    return step


def _token_of(record: Record | None) -> bytes | None:
    return None if record is None else record.token


def _as_written(entry: Entry) -> Record:
    """Return the record that a claim has just written."""
    return Record(
        address=entry.address,
        token=entry.token,
        revision=1,
        state=entry.state,
        attempt=entry.attempt,
        lease_left=entry.lease,
        ttl_left=entry.ttl,
        age=entry.age,
    )
