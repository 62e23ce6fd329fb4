"""Read through to the old store while records move: its records count too, and are moved on demand.

A claim is written here first, and the other store is read after it. Two guards that use the same two stores from
opposite sides therefore never both run: each writes before it reads, so at least one of them sees the other. A record
that is found there is moved as it was seen: fenced there by compare-and-swap, written here, removed there. Nothing is
lost in between, because it is always in at least one of the two.

The old records may also be the rows of a table that is only read: they are all done, and stay there. So they are copied
here, and from then on the copy is what counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard, TypeVar

import msgspec

from onefold._concurrency.generators import Flow
from onefold._delivery import earlier_ending
from onefold._delivery.claim import RETRY_AFTER
from onefold._delivery.steps import (
    Claiming,
    ClaimingAll,
    Elsewhere,
    Reading,
    Releasing,
    Step,
    StillOpen,
    StoreStep,
    Waiting,
)
from onefold._model import GONE, Address, Claim, Entry, Gone, Record, State
from onefold.errors import InProgress, StoreUnavailable, UsageError

T = TypeVar("T")


class Old(NamedTuple):
    """Where the records were so far: another store, or a table of finished deliveries that is only read."""

    store: Any
    only_read: bool = False

    def ask(self, step: StoreStep) -> Elsewhere:
        return Elsewhere(self.store, step)


def read_through(flow: Flow[T], old: Old) -> Flow[T]:
    """Run this flow, taking the old store's records into account."""
    moved: list[Record] = []

    def expand(step: Step) -> Flow[Any]:
        if isinstance(step, Claiming):
            return _claim(step, old, moved)
        if isinstance(step, Waiting):
            # It may run in the other store, of whose endings nobody tells.
            return _as_it_is(msgspec.structs.replace(step, seconds_told=step.seconds))
        return _read(step, old) if isinstance(step, Reading) else _as_it_is(step)

    return _expanded(flow, expand)


def read_through_first(flow: Flow[T], address: Address, old: Old, new: Any) -> Flow[T]:
    """Move the old store's record before a transaction of our own begins.

    A record in a transaction is invisible before the commit: a worker that claims in the old store at the same time is
    not noticed.
    """
    running = yield from _move(address, old, lambda step: Elsewhere(new, step))
    if running is not None:
        raise _busy(address)
    return (yield from flow)


def read_through_to_forget(flow: Flow[T], address: Address, old: Old) -> Flow[T]:
    """Move the old store's record before it is forgotten. Raise `UsageError` if it would count again from a table."""
    if old.only_read and _counts((yield old.ask(Reading(address)))):
        raise UsageError(
            f"{address.operation} [key {address.digest}]: its row in the table of migrate_from= would count again, and "
            "Onefold only reads that table. Nothing was forgotten. Delete the row, and forget it then"
        )
    return (yield from read_through(flow, old))


def read_through_joined(flow: Flow[T], old: Old, new: Any) -> Flow[T]:
    """Move the old store's record before our first statement in a caller's transaction, and outside it."""

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
            except Exception as error:  # noqa: BLE001 - the flow knows its meaning
                failure = error
    finally:
        flow.close()


def _as_it_is(step: Step) -> Flow[Any]:
    return (yield step)


def _claim(step: Claiming, old: Old, moved: list[Record]) -> Flow[Record | Gone | None]:
    found: Record | Gone | None = yield step
    if isinstance(found, Record):
        # An abandoned claim may have died before it read the other store.
        may_be_there = found.is_abandoned and not _stands_here(found, old)
        return (yield from _instead_of_abandoned(found, old, moved)) if may_be_there else found
    is_new_claim = step.entry.state is State.RUNNING and _token_of(step.replacing) != step.entry.token
    if found is not None or not is_new_claim or _stands_here(step.replacing, old):
        return found
    return (yield from _unless_known(step, old, moved))


def _stands_here(record: Record | None, old: Old) -> bool:
    """Return whether an outcome known here overrides a row: a bypass runs although the row is still there."""
    if record is None or not old.only_read:
        return False
    return record.state in (State.DONE, State.FAILED) or earlier_ending.finished(record) is not None


def _instead_of_abandoned(found: Record, old: Old, moved: list[Record]) -> Flow[Record | Gone]:
    left: Record | None = yield old.ask(Reading(found.address))
    if not _counts(left):
        return found
    if left.is_live:
        return left
    if (yield from _replace(found, left, old, moved)):
        return (yield Reading(found.address)) or GONE
    raise _busy(found.address)


def _unless_known(step: Claiming, old: Old, moved: list[Record]) -> Flow[Record | Gone | None]:
    """Check the old store after a claim of ours. None: the claim stands, because the old store has no record."""
    entry = step.entry
    try:
        left: Record | None = yield old.ask(Reading(entry.address))
        if not _counts(left):
            return None
        is_moved = not left.is_live and (yield from _replace(entry.as_record(), left, old, moved))
    except Exception as error:
        yield from _give_back_unread(step, error)
        raise
    if is_moved:
        return (yield Reading(entry.address)) or GONE
    # It is running in the old store.
    yield from _give_back(step)
    if left.is_live:
        return left
    raise _busy(entry.address)


def _give_back(step: Claiming) -> Flow[None]:
    """Release our claim, and restore the record that it replaced."""
    if step.replacing is None:
        yield Releasing(step.entry.as_claim())
    else:
        yield Claiming(step.replacing.as_moved(), step.entry.as_record())


def _give_back_unread(step: Claiming, error: Exception) -> Flow[None]:
    """Release our claim after the old store did not answer: nothing has started, and a doubt would be held later.

    If this store fails as well, the lease ends the claim. A record that was moved meanwhile is not touched: its token
    is not our claim's.
    """
    try:
        yield from _give_back(step)
    except Exception:  # noqa: BLE001 - the old store's error is the one to show
        return
    if isinstance(error, StoreUnavailable):
        # The claim need not be released a second time.
        error.reached = False


def _replace(ours: Record, left: Record, old: Old, moved: list[Record]) -> Flow[bool]:
    """Replace our claim with the record of the old store. Return False if another delivery was faster, there or here.

    A delivery moves once: two that move the same record back and forth would never end.
    """
    if moved:
        return False
    moved.append(left)
    copy = left.as_moved()
    if old.only_read:
        # A row is final: there is nobody to be kept from changing it.
        return (yield Claiming(copy, ours)) is None
    if (yield old.ask(Claiming(copy, left))) is not None:
        return False
    if (yield Claiming(copy, ours)) is not None:
        return False
    yield old.ask(Releasing(Claim(copy.address, copy.token)))
    return True


def _read(step: Reading, old: Old) -> Flow[Record | None]:
    found: Record | None = yield step
    if found is not None and not found.is_expired:
        return found
    return (yield from _move(step.address, old, _here)) or (yield step)


def _claim_joined(step: Claiming, old: Old, new: Any) -> Flow[Any]:
    if old.only_read:
        return (yield from _claim_or_copy(step, old))
    running = yield from _move(step.entry.address, old, lambda step: Elsewhere(new, step))
    return running or (yield step)


def _claim_or_copy(step: Claiming, old: Old) -> Flow[Any]:
    """Claim in the caller's transaction; if there is a row, write its copy there instead, and answer with that."""
    left: Record | None = yield old.ask(Reading(step.entry.address))
    if not _counts(left):
        return (yield step)
    copy = left.as_moved()
    found = yield from _copied(copy, _here)
    if found is not None:
        return found
    yield StillOpen(copy.as_claim())
    return (yield Reading(copy.address)) or GONE


def _copied(copy: Entry, here: Callable[[StoreStep], Step], found: Record | Gone | None = None) -> Flow[Any]:
    """Write the copy of a row, over an unsettled record too; return what is in the way, such as `found`."""
    if found is None:
        found = yield here(Claiming(copy))
    if not isinstance(found, Record) or not (found.state is State.OPEN or found.is_abandoned):
        return found
    # The record of a bypass that died carries an outcome.
    return found if earlier_ending.finished(found) is not None else (yield here(Claiming(copy, found)))


def _claim_all_or_copy(step: ClaimingAll, old: Old) -> Flow[list[Any]]:
    """Do the same for many: claims and copies are written together."""
    copies: list[Entry | None] = []
    for claiming in step.steps:
        left: Record | None = yield old.ask(Reading(claiming.entry.address))
        copies.append(left.as_moved() if _counts(left) else None)
    pairs = list(zip(step.steps, copies, strict=True))
    replies = yield ClaimingAll([claiming if copy is None else Claiming(copy) for claiming, copy in pairs])
    answers: list[Any] = []
    for reply, copy in zip(replies, copies, strict=True):
        if copy is None:
            answers.append(reply)
            continue
        found = None if reply is None else (yield from _copied(copy, _here, reply))
        answers.append(copy.as_record() if found is None else found)
    return answers


def _claim_all_joined(step: ClaimingAll, old: Old, new: Any) -> Flow[list[Any]]:
    if old.only_read:
        return (yield from _claim_all_or_copy(step, old))
    running: list[Record | None] = []
    for claiming in step.steps:
        found = yield from _move(claiming.entry.address, old, lambda step: Elsewhere(new, step))
        running.append(found)
    free = [claiming for claiming, found in zip(step.steps, running, strict=True) if found is None]
    replies = iter((yield ClaimingAll(free)) if free else ())
    return [next(replies) if found is None else found for found in running]


def _move(address: Address, old: Old, here: Callable[[StoreStep], Step]) -> Flow[Record | None]:
    """Move the old store's record here; if it is running there, leave it there and return it."""
    left: Record | None = yield old.ask(Reading(address))
    if not _counts(left):
        return None
    if left.is_live:
        return left
    copy = left.as_moved()
    if old.only_read:
        yield from _copied(copy, here)
        return None
    if (yield old.ask(Claiming(copy, left))) is not None:
        raise _busy(address)
    # If a record is in the way here, its writer will look there, and has to find this one.
    if (yield here(Claiming(copy))) is None:
        yield old.ask(Releasing(Claim(address, copy.token)))
    return None


def _busy(address: Address) -> InProgress:
    """Create the error for two deliveries that move the same record: one of them is retried."""
    return InProgress.about(address, retry_after=RETRY_AFTER)


def _counts(record: Record | None) -> TypeGuard[Record]:
    return record is not None and not record.is_expired


def _here(step: StoreStep) -> Step:
    return step


def _token_of(record: Record | None) -> bytes | None:
    return None if record is None else record.token
