"""Run one delivery in claim mode, written once for sync and async: no I/O, no clock, no random.

A flow yields the steps of `drive` and asks `decide` what follows from what it finds. Handler errors are data here, and
are raised again at the end unchanged.
"""

from __future__ import annotations

import math
from typing import Any, Final, cast

from onefold._concurrency.interrupts import NotAnswered
from onefold._delivery import decide as _decide
from onefold._delivery import earlier_ending
from onefold._delivery.bypass import alone, put_back
from onefold._delivery.decide import Then
from onefold._delivery.handler_steps.left import as_remark
from onefold._delivery.probe import ask_probe, refusal
from onefold._delivery.steps import (
    Claiming,
    Ended,
    Finishing,
    Flow,
    LeaseLeft,
    Pausing,
    Reading,
    Releasing,
    Running,
    StoreStep,
    Took,
    Watching,
)
from onefold._delivery.work import (
    Delivery,
    done_ending,
    failed_ending,
    plain,
    refused,
    replay,
    stored_error,
    tell_if_uncompared,
    tell_not_remembered,
    tell_steps_left,
)
from onefold._model import Answer, Claim, Done, Ending, Entry, Gone, NotDone, Outcome, Record, State
from onefold.errors import ClaimLost, InProgress, KeyReused, OnHold, StoreUnavailable
from onefold.events import Kind, Teller

# The members that almost every delivery uses: on Python 3.11 accessing an enum's members is slow.
RUN: Final = Then.RUN
REPLAY: Final = Then.REPLAY
FINISH: Final = Then.FINISH
ASK: Final = Then.ASK
STARTED: Final = Kind.STARTED
FINISHED: Final = Kind.FINISHED

# Two workers can race for the same abandoned key; each lost race is one round.
ROUNDS_MAX: Final = 8

# A duplicate polls after 5 ms, then ever more rarely: a quick handler is answered quickly.
PAUSE_FIRST: Final = 0.005
PAUSE_MAX: Final = 0.25

# How long a refused duplicate is told to wait: most handlers end within it, whatever their lease.
RETRY_AFTER: Final = 1.0

# Finishing is retried until this part of the lease is left: then another delivery may soon take over the claim.
LEASE_MARGIN: Final = 0.1
FINISH_PAUSE_FIRST: Final = 0.05
FINISH_PAUSE_MAX: Final = 1.0


def deliver(delivery: Delivery, won: tuple[Entry, Then] | None = None) -> Flow[Outcome[Any]]:
    """Claim mode: one round trip before the handler, one after. `won` is a claim that is already ours."""
    down: StoreUnavailable | None = None
    entry: Entry | Outcome[Any]
    try:
        entry, then = won or (yield from win(delivery))
    except StoreUnavailable as error:
        down = error
    if down is not None:
        return (yield from without_store(delivery, down))
    if isinstance(entry, Outcome):
        return entry
    if (yield Watching((claim_of(entry),))) <= 0:
        # A long pause after the claim: another may own it by now, so this handler must not start any more.
        late = InProgress.about(delivery.request.address, retry_after=RETRY_AFTER)
        if then is not ASK:
            yield from give_back(delivery, entry, Ended(error=late, started=False))
        raise refused(delivery, late)
    if then is ASK:
        entry = yield from ask_first(delivery, entry)
        if isinstance(entry, Outcome):
            return entry
    delivery.tell(STARTED, delivery.request.address, entry.attempt)
    ended: Ended = yield Running(delivery.call, entry, cancel_when_lost=delivery.policy.cancel_when_lost)
    return (yield from close(delivery, entry, ended))


def win(delivery: Delivery, *, unstarted: bool = False) -> Flow[tuple[Entry | Outcome[Any], Then]]:
    """Claim until the address is ours or otherwise settled. Batches claim messages that have not started yet."""
    request, policy, token = delivery.request, delivery.policy, delivery.mint()
    new = _decide.new_entry(request, policy, token)
    if unstarted:
        new = _decide.change(new, notes=_decide.UNSTARTED)
    entry, then, replacing = new, RUN, None
    waited, rounds = 0.0, 0
    while rounds < ROUNDS_MAX:
        try:
            found: Record | Gone | None = yield Claiming(entry, replacing)
        except StoreUnavailable as down:
            # If nothing was sent, or nothing can be, taking it back would only double the wait.
            if replacing is None and down.reached:
                yield from _disown(entry)
            raise
        if found is None:
            return _written(delivery, entry, then), then
        entry, then, replacing = new, RUN, None
        if isinstance(found, Record):
            then = _decide.decide(found, request, policy)
            if waited < policy.wait and then is Then.REFUSE_RUNNING:
                waited += yield Pausing(_patience(waited, policy.wait, found.lease_left))
                then = RUN
                continue
            settled = answer(delivery, found, then, waited)
            if settled is not None:
                return settled, then
            entry, replacing = _decide.entry(then, found, request, policy, token), found
        rounds += 1
    raise refused(delivery, InProgress.about(request.address, retry_after=RETRY_AFTER))


def _disown(entry: Entry) -> Flow[None]:
    """Try to take back a claim that got no answer but may have been written, so that nothing is left in doubt."""
    try:
        yield Releasing(claim_of(entry))
    except Exception:  # noqa: BLE001 - the store is still down; a lease will end what was written
        return


def _written(delivery: Delivery, entry: Entry, then: Then) -> Entry | Outcome[Any]:
    """Return the result of a claim that is in the store: its entry, or the outcome that it recorded."""
    if then is RUN:
        return entry
    address = delivery.request.address
    if then is Then.HOLD:
        delivery.tell(Kind.HELD, address, entry.attempt, entry.remark)
        raise OnHold.about(address, remark=entry.remark)
    if then is Then.SKIP:
        delivery.tell(Kind.SKIPPED, address, entry.attempt)
        return Outcome(value=None, replayed=True, attempt=entry.attempt, omitted=True, remark=entry.remark)
    if then is Then.TAKE_OVER:
        delivery.tell(Kind.TAKEN_OVER, address, entry.attempt)
    elif then is Then.RUN_AGAIN:
        delivery.tell(Kind.BYPASSED, address, entry.attempt)
    return entry


def answer(delivery: Delivery, found: Record, then: Then, waited: float = 0.0) -> Outcome[Any] | None:
    """Return the answer that the record itself gives: a replay or a refusal; None if a claim has to be written."""
    address = delivery.request.address
    if found.fingerprint != delivery.request.fingerprint:
        tell_if_uncompared(delivery, found.fingerprint)
    if then is REPLAY:
        if waited:
            delivery.tell(Kind.WAITED, address, found.attempt)
        return replay(delivery, earlier_ending.finished(found) or found)
    match then:
        case Then.REPLAY_ERROR:
            found = earlier_ending.finished(found) or found
            delivery.tell(Kind.REPLAYED, address, found.attempt, "error")
            raise stored_error(delivery, found)
        case Then.REFUSE_REUSED:
            raise refused(delivery, KeyReused.about(address))
        case Then.REFUSE_HELD:
            raise refused(delivery, OnHold.about(address, remark=found.remark))
        case Then.REFUSE_RUNNING:
            left = max(found.lease_left, 0.0)
            raise refused(delivery, InProgress.about(address, retry_after=min(left, RETRY_AFTER)))
        case _:
            return None


def ask_first(delivery: Delivery, entry: Entry) -> Flow[Entry | Outcome[Any]]:
    """Ask the probe about an unknown run; return its outcome, or the entry with which the handler starts."""
    answered = yield from ask_probe(delivery, entry)
    if isinstance(answered, BaseException):
        raise refusal(delivery, entry, answered)
    then = _decide.probed(answered, entry.attempt, delivery.policy)
    if then is FINISH:
        return (
            yield from close_done(
                delivery, entry, Ended(value=cast("Done", answered).value), replayed=True, probed=True
            )
        )
    if then is Then.HOLD:
        remark = _doubt(answered, entry.attempt)
        yield from finish(delivery, claim_of(entry), _held(remark, entry.notes))
        delivery.tell(Kind.HELD, delivery.request.address, entry.attempt, remark)
        raise OnHold.about(delivery.request.address, remark=remark)
    return (yield from _count_start(delivery, entry))


def _count_start(delivery: Delivery, entry: Entry) -> Flow[Entry]:
    """Write the next attempt into a record that was taken over only to ask about it. It keeps its token.

    The attempt follows from the entry, not from what is found: a write whose answer got lost is repeated.
    """
    for _ in range(ROUNDS_MAX):
        found: Record | None = yield Reading(entry.address)
        if found is None or found.token != entry.token:
            break
        counted = _decide.change(entry, attempt=entry.attempt + 1, age=found.age, notes=found.notes)
        if (yield Claiming(counted, found)) is None:
            return counted
    raise refused(delivery, InProgress.about(entry.address, retry_after=RETRY_AFTER))


def close(delivery: Delivery, entry: Entry, ended: Ended) -> Flow[Outcome[Any]]:
    """Close the record according to how the handler ended; its error is raised unchanged."""
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
    if then is ASK:
        answered = yield from _ask_after(delivery, entry, ended)
        if isinstance(answered, Done):
            return (yield from close_done(delivery, entry, Ended(value=answered.value), probed=True))
        then = Then.RELEASE if isinstance(answered, NotDone) else Then.HOLD
    if (yield from put_back(delivery, entry, ended)):
        raise cast("BaseException", ended.error)
    # It has expired meanwhile: this is a run like any other.
    return (yield from close_raised(delivery, *alone(entry, ended), then))


def close_done(
    delivery: Delivery, entry: Entry, ended: Ended, *, replayed: bool = False, probed: bool = False
) -> Flow[Outcome[Any]]:
    """Store the result of a run that happened, as the handler or the probe says; report a lost claim."""
    struck: list[BaseException] = []
    ending = done_ending(delivery, ended.value, entry.attempt, struck, probed=probed)
    kept = yield from finish(delivery, claim_of(entry), ending)
    if kept is False:
        delivery.tell(Kind.LOST, entry.address, entry.attempt)
        raise ClaimLost.about(entry.address, value=ended.value)
    if kept:
        delivery.tell(FINISHED, entry.address, entry.attempt)
    else:
        tell_not_remembered(delivery, entry.attempt)
    if struck:
        raise struck[0]
    return Outcome(value=ended.value, replayed=replayed, attempt=entry.attempt, remembered=kept is True)


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
                return (
                    yield from close_done(delivery, entry, Ended(value=answered.value, notes=ended.notes), probed=True)
                )
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
            kind, ending = Kind.FAILED, failed_ending(delivery, cast("Exception", ended.error))
        case Then.SKIP:
            remark = f"skipped: attempt {entry.attempt} ended in {name}"
            kind, ending = Kind.SKIPPED, Ending(state=State.DONE, ttl=delivery.policy.keep, omitted=True, remark=remark)
        case _:
            remark = plain(f"attempt {entry.attempt} ended in {name}{as_remark(ended.steps)}")
            kind, ending = Kind.HELD, _held(remark, ended.notes)
    kept = yield from finish(delivery, claim_of(entry), ending)
    if kept is None:
        tell_not_remembered(delivery, entry.attempt, name)
    else:
        delivery.tell(kind if kept else Kind.LOST, delivery.request.address, entry.attempt, name)


def give_back(delivery: Delivery, entry: Entry, ended: Ended) -> Flow[None]:
    """Release the claim. A store that fails now changes nothing for the caller: the lease will end."""
    if earlier_ending.is_bypass(entry):
        if (yield from put_back(delivery, entry, ended)):
            return
        entry, ended = alone(entry, ended)
    error = cast("BaseException", ended.error)
    if ended.started:
        left = _decide.released(entry, error, ended.notes, delivery.policy, ended.steps)
    else:
        left = _decide.released_unstarted(entry, delivery.policy)
    address, name = delivery.request.address, type(error).__name__
    try:
        ours = yield Releasing(claim_of(entry), left)
    except Exception:  # noqa: BLE001 - the handler's own error must surface, not this one
        delivery.tell(Kind.STORE_FAILED, address, entry.attempt, "release")
        return
    delivery.tell(Kind.RELEASED if ours else Kind.LOST, address, entry.attempt, name)


def finish(delivery: Delivery, claim: Claim, ending: Ending) -> Flow[bool | None]:
    """Finish the claim. True: ended. False: no longer ours. None: the store failed until the lease was nearly over."""
    kept = yield from insist(delivery.tell, claim, Finishing(claim, ending), "finish")
    # An effect that happened is never reported as failed.
    return None if isinstance(kept, Exception) else kept


def insist(tell: Teller, claim: Claim, step: StoreStep, what: str) -> Flow[bool | Exception]:
    """Retry until the store answers: return whether the claim is ours, or the error if the lease was nearly over.

    A heartbeat that still gets through must not make this endless: it ends after one lease in any case.
    """
    pause, waited = FINISH_PAUSE_FIRST, 0.0
    while True:
        try:
            ours: bool = yield step
            return ours
        except Exception as error:  # noqa: BLE001 - whatever it is, it is asked again: something has happened
            failure = error
        tell(Kind.STORE_FAILED, claim.address, detail=f"{what}: {type(failure).__name__}")
        waited += yield Took()
        left = yield LeaseLeft(claim)
        if isinstance(failure, NotAnswered) or min(left, claim.lease - waited) <= claim.lease * LEASE_MARGIN:
            return failure
        waited += yield Pausing(min(pause, left / 2))
        pause = min(pause * 2, FINISH_PAUSE_MAX)


def _ask_after(delivery: Delivery, entry: Entry, ended: Ended) -> Flow[Answer]:
    """Ask the probe after an error of the handler, which must not be hidden if the probe fails too."""
    answered = yield from ask_probe(delivery, entry, ended.notes)
    if not isinstance(answered, BaseException):
        return answered
    assert ended.error is not None
    delivery.tell(Kind.LEFT, entry.address, entry.attempt, type(ended.error).__name__)
    if not isinstance(answered, Exception):
        raise answered
    ended.error.add_note(
        f"onefold: the probe failed too, so it is not known whether it happened. The next delivery asks it again: "
        f"{answered!r}"
    )
    raise ended.error


def without_store(delivery: Delivery, down: StoreUnavailable) -> Flow[Outcome[Any]]:
    """Handle a store that did not answer: refuse, or run anyway, marked so in the outcome and in an event."""
    address = delivery.request.address
    delivery.tell(Kind.STORE_FAILED, address, detail=type(down).__name__)
    if delivery.policy.store_down == "refuse":
        delivery.tell(Kind.REFUSED, address, detail=type(down).__name__)
        down.add_note(f"onefold: {address.operation} [key {address.digest}] did not run; deliver it again")
        raise down
    delivery.tell(Kind.UNPROTECTED, address, 1)
    entry = _decide.entry(Then.RUN, None, delivery.request, delivery.policy, delivery.mint())
    ended: Ended = yield Running(delivery.call, entry)
    if ended.error is not None:
        raise ended.error
    return Outcome(value=ended.value, remembered=False, protected=False)


def _held(remark: str, notes: bytes | None) -> Ending:
    return Ending(state=State.HELD, ttl=math.inf, notes=notes, remark=remark)


def _doubt(answered: Answer, attempt: int) -> str:
    if isinstance(answered, NotDone):
        return f"attempt {attempt} was abandoned, the probe says that nothing happened, and the attempts are used up"
    return f"attempt {attempt} was abandoned, and the probe could not say whether it happened"


def claim_of(entry: Entry) -> Claim:
    return Claim(entry.address, entry.token, entry.lease, entry.ttl)


def _patience(waited: float, wait: float, lease_left: float) -> float:
    """Return the next pause of a waiting duplicate: a tenth of the wait so far, within its bound and the lease."""
    pause = min(max(PAUSE_FIRST, waited / 4), PAUSE_MAX)
    return max(min(pause, wait - waited, max(lease_left, PAUSE_FIRST)), PAUSE_FIRST / 5)
