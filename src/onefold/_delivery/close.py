"""Close the record of a run: done, failed, held, released, or as a bypass found it. Pure, like `claim`.

The handler's own error is data here and is raised again unchanged, whatever the store answers. Which way a run is
closed is decided in `decide`.
"""

from __future__ import annotations

import math
from typing import Any, Final, cast

import msgspec

from onefold._concurrency.generators import Flow
from onefold._concurrency.interrupts import NotAnswered, is_answer
from onefold._concurrency.users_errors import add_note, class_name, text_of
from onefold._delivery import decide as _decide
from onefold._delivery import earlier_ending
from onefold._delivery.decide import Then
from onefold._delivery.handler_steps.left import NONE_LEFT, as_remark
from onefold._delivery.probe import ask_probe
from onefold._delivery.steps import (
    Claiming,
    Ended,
    Finishing,
    LeaseLeft,
    Pausing,
    Reading,
    Releasing,
    StoreStep,
    Took,
)
from onefold._delivery.work import (
    Delivery,
    done_ending,
    failed_ending,
    plain,
    tell_not_recorded,
    tell_steps_left,
    with_history,
)
from onefold._model import Claim, Done, Ending, Entry, NotDone, Outcome, ProbeAnswer, Record, State
from onefold._model.notes import with_noted
from onefold.errors import ClaimLost
from onefold.events import LISTENERS, Kind, Teller

# The members that almost every delivery uses: on Python 3.11 accessing an enum's members is slow.
FINISH: Final = Then.FINISH
FINISHED: Final = Kind.FINISHED

# Finishing is retried until this part of the lease is left: then another delivery may soon take over the claim.
LEASE_MARGIN: Final = 0.1
FINISH_PAUSE_FIRST: Final = 0.05
FINISH_PAUSE_MAX: Final = 1.0

# A heartbeat can come between the read and the write that restores an earlier record; each is one round.
RESTORE_ROUNDS_MAX: Final = 8


def close(delivery: Delivery, entry: Entry, ended: Ended, claim: Claim | None = None) -> Flow[Outcome[Any]]:
    """Close the record according to how the handler ended; its error is raised unchanged.

    `claim` is that of the entry, for whoever has it.
    """
    if ended.error is None and ended.steps is NONE_LEFT:
        return close_done(delivery, entry, ended, claim=claim)
    then = _decide.after(ended.error, delivery.policy, ended.steps) if ended.started else Then.RELEASE
    tell_steps_left(delivery, ended.error, ended.steps)
    if then is FINISH:
        return close_done(delivery, entry, ended)
    # The outcome that a bypass found is not restored over the log of a step that is under way: it stands meanwhile.
    if earlier_ending.is_bypass(entry) and not (then is Then.LEAVE and ended.steps.under_way):
        return _close_bypass(delivery, entry, ended, then)
    return close_raised(delivery, entry, ended, then)


def _close_bypass(delivery: Delivery, entry: Entry, ended: Ended, then: Then) -> Flow[Outcome[Any]]:
    """Restore what a bypass found if it did not return: whatever else is unknown, that is known."""
    if then is Then.ASK:
        answered = yield from _ask_after(delivery, entry, ended)
        if isinstance(answered, Done):
            return (yield from close_done(delivery, entry, Ended(value=answered.value), probed=True))
        then = Then.RELEASE if isinstance(answered, NotDone) else Then.HOLD
    if (yield from _restore_earlier(delivery, entry, ended)):
        raise cast("BaseException", ended.error)
    # It has expired meanwhile: this is a run like any other.
    return (yield from close_raised(delivery, *_as_plain_run(entry, ended), then))


def close_done(
    delivery: Delivery,
    entry: Entry,
    ended: Ended,
    *,
    claim: Claim | None = None,
    replayed: bool = False,
    probed: bool = False,
) -> Flow[Outcome[Any]]:
    """Store the result of a run that happened, as the handler or the probe says; report a lost claim."""
    struck: list[BaseException] = []
    ending = done_ending(delivery, ended.value, entry.attempt, struck, noted=ended.noted, probed=probed)
    if claim is None:
        claim = entry.as_claim()
    step = Finishing(claim, with_history(ending, entry) if entry.remark else ending)
    kept: bool | Exception
    try:
        # `finish`, without calling it: almost every store answers at once.
        kept = yield step
    except Exception as error:
        if not is_answer(error):
            # An interrupt after the answer.
            raise
        kept = yield from insist(delivery.tell, claim, step, "finish", error)
    if kept is False:
        delivery.tell(Kind.LOST, entry.address, entry.attempt)
        raise ClaimLost.about(entry.address, value=ended.value)
    if kept is not True:
        tell_not_recorded(delivery, entry.attempt)
    elif delivery.tell.own or LISTENERS:
        delivery.tell(FINISHED, entry.address, entry.attempt)
    if struck:
        raise struck[0]
    return Outcome(kept=ended.value, replayed=replayed, attempt=entry.attempt, recorded=kept is True)


def close_raised(delivery: Delivery, entry: Entry, ended: Ended, then: Then) -> Flow[Outcome[Any]]:
    """Close a run that raised, or was not started; there is an outcome only if the probe knows one."""
    match then:
        case Then.RELEASE:
            yield from give_back(delivery, entry, ended)
        case Then.LEAVE:
            delivery.tell(Kind.LEFT, delivery.request.address, entry.attempt, type(ended.error).__name__)
        case Then.ASK:
            answered = yield from _ask_after(delivery, entry, ended)
            if isinstance(answered, Done):
                done = Ended(value=answered.value, notes=ended.notes, noted=ended.noted)
                return (yield from close_done(delivery, entry, done, probed=True))
            if isinstance(answered, NotDone):
                yield from give_back(delivery, entry, ended)
            else:
                yield from close_otherwise(delivery, entry, ended, Then.HOLD)
        case _:
            yield from close_otherwise(delivery, entry, ended, then)
    raise cast("BaseException", ended.error)


def close_otherwise(delivery: Delivery, entry: Entry, ended: Ended, then: Then) -> Flow[None]:
    """Record that it raised: failed for good, held, or skipped."""
    name = type(ended.error).__name__
    match then:
        case Then.FAIL:
            kind, ending = Kind.FAILED, failed_ending(delivery, cast("Exception", ended.error), ended.noted)
        case Then.SKIP:
            remark = f"skipped: attempt {entry.attempt} ended in {name}"
            notes = with_noted(None, ended.noted)
            kind = Kind.SKIPPED
            ending = Ending(state=State.DONE, ttl=delivery.policy.keep, omitted=True, notes=notes, remark=remark)
        case _:
            error = cast("BaseException", ended.error)
            why = f"attempt {entry.attempt} ended in {class_name(error)}{as_remark(ended.steps)}"
            remark = plain(f"{why}{_decide.error_text(error, delivery.policy)}")
            kind, ending = Kind.HELD, held_ending(remark, with_noted(ended.notes, ended.noted))
    kept = yield from finish(delivery, entry, ending)
    if kept is None:
        tell_not_recorded(delivery, entry.attempt, name)
    else:
        delivery.tell(kind if kept else Kind.LOST, delivery.request.address, entry.attempt, name)


def give_back(delivery: Delivery, entry: Entry, ended: Ended) -> Flow[None]:
    """Release the claim. A store that fails now changes nothing for the caller: the lease will end."""
    if earlier_ending.is_bypass(entry):
        if (yield from _restore_earlier(delivery, entry, ended)):
            return
        entry, ended = _as_plain_run(entry, ended)
    error = cast("BaseException", ended.error)
    if ended.started:
        left = _decide.released(entry, error, ended.notes, delivery.policy, ended.steps)
    else:
        left = _decide.released_unstarted(entry, delivery.policy)
    address, name = delivery.request.address, type(error).__name__
    # Made before: an interrupt meanwhile is no failure of the store.
    release = Releasing(entry.as_claim(), left)
    try:
        ours = yield release
    except Exception as failure:
        if not is_answer(failure):
            raise
        # The handler's own error must surface, not this one.
        delivery.tell(Kind.STORE_FAILED, address, entry.attempt, "release")
        return
    delivery.tell(Kind.RELEASED if ours else Kind.LOST, address, entry.attempt, name)


def finish(delivery: Delivery, entry: Entry, ending: Ending) -> Flow[bool | None]:
    """Finish the claim. True: ended. False: no longer ours. None: the store failed until the lease was nearly over.

    What people have said about earlier runs stays in the record.
    """
    claim = entry.as_claim()
    kept = yield from insist(delivery.tell, claim, Finishing(claim, with_history(ending, entry)), "finish")
    # An effect that happened is never reported as failed.
    return None if isinstance(kept, Exception) else kept


def insist(
    tell: Teller, claim: Claim, step: StoreStep, what: str, failure: Exception | None = None
) -> Flow[bool | Exception]:
    """Retry until the store answers: return whether the claim is ours, or the error if the lease was nearly over.

    A heartbeat that still gets through must not make this endless: it ends after one lease in any case. `failure` is
    what the step was answered before.
    """
    pause, waited = FINISH_PAUSE_FIRST, 0.0
    while True:
        if failure is None:
            try:
                ours: bool = yield step
                return ours
            except Exception as error:
                if not is_answer(error):
                    # An interrupt after the answer.
                    raise
                # Whatever it is, it is asked again: something has happened.
                failure = error
        tell(Kind.STORE_FAILED, claim.address, detail=f"{what}: {type(failure).__name__}")
        waited += yield Took()
        left = yield LeaseLeft(claim)
        if isinstance(failure, NotAnswered) or min(left, claim.lease - waited) <= claim.lease * LEASE_MARGIN:
            return failure
        waited += yield Pausing(min(pause, left / 2))
        pause = min(pause * 2, FINISH_PAUSE_MAX)
        failure = None


def _ask_after(delivery: Delivery, entry: Entry, ended: Ended) -> Flow[ProbeAnswer]:
    """Ask the probe after an error of the handler, which must not be hidden if the probe fails too."""
    answered = yield from ask_probe(delivery, entry, ended.notes)
    if not isinstance(answered, BaseException):
        return answered
    assert ended.error is not None
    delivery.tell(Kind.LEFT, entry.address, entry.attempt, type(ended.error).__name__)
    if not isinstance(answered, Exception):
        raise answered
    add_note(
        ended.error,
        "onefold: the probe failed too, so it is not known whether it happened. The next delivery asks it again: "
        f"{type(answered).__name__}: {text_of(answered)}",
    )
    raise ended.error


def _restore_earlier(delivery: Delivery, entry: Entry, ended: Ended) -> Flow[bool]:
    """Restore the record that a failed bypass found. False: it has expired meanwhile, and nothing was written."""
    name = type(ended.error).__name__
    try:
        ours = yield from _write_earlier(entry, ended, name if ended.started else "")
    except Exception as failure:
        if not is_answer(failure):
            raise
        # The handler's own error must surface, and the lease will end.
        delivery.tell(Kind.STORE_FAILED, entry.address, entry.attempt, "claim")
        return True
    if ours is not None:
        delivery.tell(Kind.RELEASED if ours else Kind.LOST, entry.address, entry.attempt, name)
    return ours is not None


def _write_earlier(entry: Entry, ended: Ended, failure: str) -> Flow[bool | None]:
    for _ in range(RESTORE_ROUNDS_MAX):
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


def _as_plain_run(entry: Entry, ended: Ended) -> tuple[Entry, Ended]:
    """Return a bypass that has nothing to restore any more."""
    return (
        _decide.change(entry, notes=earlier_ending.steps_only(entry.notes)),
        msgspec.structs.replace(ended, notes=earlier_ending.steps_only(ended.notes)),
    )


def held_ending(remark: str, notes: bytes | None) -> Ending:
    return Ending(state=State.HELD, ttl=math.inf, notes=notes, remark=remark)
