"""Change records by hand: resolve held ones, forget remembered ones."""

from __future__ import annotations

from typing import Any

from onefold._checks import with_article
from onefold._concurrency.generators import Flow
from onefold._delivery import decide as _decide
from onefold._delivery import earlier_ending
from onefold._delivery.claim import RETRY_AFTER, ROUNDS_MAX
from onefold._delivery.steps import Claiming, Reading, Releasing
from onefold._delivery.work import Delivery, as_stored, done_ending, failed_ending, plain, refused
from onefold._model import (
    Claim,
    Done,
    Ending,
    Entry,
    Failed,
    Record,
    Rerun,
    Resolution,
    State,
)
from onefold._model.notes import only_noted
from onefold._model.remarks import BEFORE, RESOLVED, SIGNED_MAX, as_part, bounded, latest_of
from onefold.errors import InProgress, UsageError
from onefold.events import Kind


def resolve(
    delivery: Delivery, resolution: Resolution, *, by: str, reason: str, at: str = "", only: Record | None = None
) -> Flow[Record]:
    """Settle a record whose outcome is unknown; return the record that was replaced.

    `at` is the time as text: a flow has no clock. The record gets a new token: from now on its late owner is refused. A
    record that was resolved by hand before can be corrected. With `only`, a record that is not that one is left.
    """
    if not isinstance(resolution, (Done, Failed, Rerun)):
        raise UsageError(
            f"resolve() takes Done(value), Failed(error) or Rerun(), not {_shown(resolution)}. Nothing was changed"
        )
    if not by.strip() or not reason.strip():
        raise UsageError("by= and reason= say who decided this, and why: neither is empty. Nothing was changed")
    if len(f"{by}{reason}") > SIGNED_MAX:
        raise UsageError(f"by= and reason= have at most {SIGNED_MAX:,} characters together. Nothing was changed")
    _check_only(delivery, only)
    for _ in range(ROUNDS_MAX):
        found: Record | None = yield Reading(delivery.request.address)
        unsettled = _unsettled(delivery, found)
        _check_same(unsettled, only)
        entry = _resolved(delivery, unsettled, resolution, _signed(by, reason, at))
        in_the_way = yield Claiming(entry, found)
        if in_the_way is None:
            delivery.tell(Kind.RESOLVED, entry.address, entry.attempt, latest_of(entry.remark))
            assert found is not None
            return found
    raise refused(delivery, InProgress.about(delivery.request.address, retry_after=RETRY_AFTER))


def _unsettled(delivery: Delivery, found: Record | None) -> Record:
    address = delivery.request.address
    if found is None or found.is_expired:
        raise UsageError(
            f"{address.operation} [key {address.digest}]: there is no record of it, so there is nothing to resolve"
        )
    if found.is_live:
        raise refused(delivery, InProgress.about(address, retry_after=found.lease_left))
    if not found.is_renewable and not found.was_resolved:
        raise UsageError(
            f"{address.operation} [key {address.digest}]: it is {found.state}, not held: there is nothing to resolve"
        )
    return found


def _check_only(delivery: Delivery, only: object) -> None:
    """Refuse what is no record of this address: it is a mistake, and nothing has changed."""
    if only is None or (isinstance(only, Record) and only.address == delivery.request.address):
        return
    address = delivery.request.address
    given = "the record of another key" if isinstance(only, Record) else with_article(type(only).__name__)
    raise UsageError(
        f"{address.operation} [key {address.digest}]: only= is {given}, and has to be the record of this key, from "
        "read(). Nothing was changed"
    )


def _check_same(found: Record, only: Record | None) -> None:
    """Refuse a record that was written since: by a new claim, another person, or its owner.

    The token and the state tell: the revision also changes with the heartbeat of an owner that is only slow.
    """
    if only is not None and (found.token, found.state) != (only.token, only.state):
        raise UsageError(
            f"{found.address.operation} [key {found.address.digest}]: it has changed in the meantime, and was left as "
            "it is now. Look at it again"
        )


def _shown(resolution: object) -> str:
    """Describe what was passed instead, without showing a value that may be confidential."""
    if isinstance(resolution, type):
        return f"{resolution.__name__} without parentheses"
    return with_article(type(resolution).__name__)


def _signed(by: str, reason: str, at: str) -> str:
    """Format who, when and why, so that it cannot be mistaken for an earlier remark."""
    return as_part(f"by {by}{f' at {at}' if at else ''}: {reason}")


def _remark(found: Record, resolution: Resolution, signed: str) -> str:
    """Combine the new remark with the earlier one: a correction hides nothing."""
    now = f"{RESOLVED}{type(resolution).__name__.lower()} {signed}"
    earlier = list(found.history)
    if found.state is State.RUNNING:
        ended = earlier_ending.finished(found)
        what = "" if ended is None else f", a bypass of what was {ended.state.value},"
        earlier[:0] = [f"attempt {found.attempt}{what} was abandoned"]
    return plain(BEFORE.join([now, *bounded(earlier)]))


def _resolved(delivery: Delivery, found: Record, resolution: Resolution, signed: str) -> Entry:
    ending: Ending | None = None
    if isinstance(resolution, Done):
        ending = _done(delivery, resolution.value, found.attempt)
    elif isinstance(resolution, Failed):
        ending = failed_ending(delivery, resolution.error)
    entry = Entry(
        address=found.address,
        token=delivery.mint(),
        state=State.OPEN if ending is None else ending.state,
        # A rerun starts afresh: new attempts, and the provider's memory counts from now.
        attempt=0 if ending is None else found.attempt,
        age=0.0 if ending is None else found.age,
        ttl=delivery.policy.keep if ending is None else ending.ttl,
        bypasses=found.bypasses,
        fingerprint=found.fingerprint,
        notes=earlier_ending.steps_only(found.notes) if ending is None else only_noted(found.notes),
        remark=_remark(found, resolution, signed),
    )
    return entry if ending is None else _decide.change(entry, result=ending.result, omitted=ending.omitted)


def _done(delivery: Delivery, value: Any, attempt: int) -> Ending:
    """Return the ending for a result given by a person. Without a type it keeps its own."""
    if value is None or not delivery.policy.keep_result:
        return done_ending(delivery, value, attempt)
    result, why = as_stored(delivery, value, delivery.returns)
    if result is None and delivery.returns is Any:
        result, why = as_stored(delivery, value, type(value))
    if result is None:
        raise UsageError(f"Done({type(value).__name__}) cannot be stored: {why}. Pass returns=")
    return Ending(state=State.DONE, ttl=delivery.policy.keep, result=result)


def forget(delivery: Delivery, only: Record | None = None) -> Flow[bool]:
    """Remove the record, so that the next delivery runs. Return False if there is none, or it is not `only`."""
    address = delivery.request.address
    _check_only(delivery, only)
    for _ in range(ROUNDS_MAX):
        found: Record | None = yield Reading(address)
        if found is None or found.is_expired:
            return False
        if only is not None and not _is_unchanged(found, only):
            return False
        if found.is_live:
            raise refused(delivery, InProgress.about(address, retry_after=found.lease_left))
        # First claim it exactly as it was read: its owner may have come back to life since.
        ours = Entry(address=address, token=delivery.mint(), state=State.OPEN, attempt=0, ttl=delivery.policy.keep)
        if (yield Claiming(ours, found)) is None:
            yield Releasing(Claim(address, ours.token))
            delivery.tell(Kind.FORGOTTEN, address, found.attempt)
            return True
    raise refused(delivery, InProgress.about(address, retry_after=RETRY_AFTER))


def _is_unchanged(found: Record, only: Record) -> bool:
    """Return whether nobody has written the record since, except to count a duplicate of what had ended."""
    if found.token != only.token:
        return False
    ended = found.state is only.state and found.state in (State.DONE, State.FAILED)
    return ended or found.revision == only.revision


def read(delivery: Delivery) -> Flow[Record | None]:
    """Return the record."""
    found: Record | None = yield Reading(delivery.request.address)
    return found
