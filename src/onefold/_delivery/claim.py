"""Run one delivery in claim mode, written once for sync and async: no I/O, no clock, no random.

A flow yields the steps of `drive` and asks `decide` what follows from what it finds. Handler errors are data here, and
are raised again at the end unchanged.
"""

from __future__ import annotations

from typing import Any, Final, cast

from onefold._concurrency.generators import Flow
from onefold._concurrency.interrupts import is_answer
from onefold._delivery import decide as _decide
from onefold._delivery import earlier_ending
from onefold._delivery.close import close, close_done, finish, give_back, held_ending
from onefold._delivery.decide import Then
from onefold._delivery.probe import ask_probe, refusal
from onefold._delivery.steps import Annotating, Claiming, Ended, Found, Reading, Releasing, Running, Watching
from onefold._delivery.waiting.patience import waiting_for
from onefold._delivery.work import Delivery, not_kept, refused, replay, stored_error, tell_if_uncompared
from onefold._model import Done, Entry, Gone, NotDone, Outcome, ProbeAnswer, Record, State
from onefold._model.notes import with_one_more
from onefold._model.remarks import bypassing, latest_of, without_error_text
from onefold.errors import Held, InProgress, KeyReused, StoreUnavailable
from onefold.events import LISTENERS, Kind

# The members that almost every delivery uses: on Python 3.11 accessing an enum's members is slow.
RUN: Final = Then.RUN
REPLAY: Final = Then.REPLAY
FINISH: Final = Then.FINISH
ASK: Final = Then.ASK
STARTED: Final = Kind.STARTED

# Two workers can race for the same abandoned key; each lost race is one round.
ROUNDS_MAX: Final = 8

# Duplicates can race to be counted; each lost race is one round, and the answer waits meanwhile.
COUNT_ROUNDS_MAX: Final = 3

# How long a refused duplicate is told to wait: most handlers end within it, whatever their lease.
RETRY_AFTER: Final = 1.0

NOT_COUNTED: Final = (
    "a duplicate was answered, and could not be counted in the record, because the store failed or the record was "
    "locked. The count says less than happened"
)


def deliver(  # noqa: C901 - the straight path is written out
    delivery: Delivery, won: tuple[Entry, Then] | None = None
) -> Flow[Outcome[Any]]:
    """Claim mode: one round trip before the handler, one after. `won` is a claim that is already ours.

    Almost every delivery finds the address free, or done: both are written out here, because each generator in between
    costs as much as a look into a dictionary.
    """
    down: StoreUnavailable | None = None
    try:
        if won is None:
            entry, then = _decide.new_entry(delivery.request, delivery.policy, delivery.mint()), RUN
            try:
                found: Record | Gone | None = yield Claiming(entry)
            except StoreUnavailable as error:
                yield from _disown(entry, error)
                raise
            if found is not None:
                policy = delivery.policy
                # What is counted takes the longer way.
                if (
                    isinstance(found, Record)
                    and not policy.count_duplicates
                    and _decide.decide(found, delivery.request, policy) is REPLAY
                ):
                    return answer_done(delivery, found)
                settled, then = yield from _contend(delivery, entry, found)
                if isinstance(settled, Outcome):
                    return settled
                entry = settled
        else:
            entry, then = won
    except StoreUnavailable as error:
        down = error
    if down is not None:
        return (yield from without_store(delivery, down))
    claim = entry.as_claim()
    if (yield Watching((claim,))) <= 0:
        # A long pause after the claim: another may own it by now, so this handler must not start any more.
        late = InProgress.about(delivery.request.address, retry_after=RETRY_AFTER)
        if then is not ASK:
            yield from give_back(delivery, entry, Ended(error=late, started=False))
        raise refused(delivery, late)
    if then is ASK:
        asked = yield from ask_first(delivery, entry)
        if isinstance(asked, Outcome):
            return asked
        entry = asked
    if delivery.tell.own or LISTENERS:
        delivery.tell(STARTED, delivery.request.address, entry.attempt)
    ended: Ended = yield Running(delivery.call, entry, cancel_when_lost=delivery.policy.cancel_when_lost)
    return (yield from close(delivery, entry, ended, claim))


def win(delivery: Delivery, *, unstarted: bool = False) -> Flow[tuple[Entry | Outcome[Any], Then]]:
    """Claim until the address is ours or otherwise settled. Batches claim messages that have not started yet."""
    new = _decide.new_entry(delivery.request, delivery.policy, delivery.mint())
    if unstarted:
        new = _decide.change(new, notes=_decide.UNSTARTED)
    try:
        found: Record | Gone | None = yield Claiming(new)
    except StoreUnavailable as down:
        yield from _disown(new, down)
        raise
    if found is None:
        return new, RUN
    return (yield from _contend(delivery, new, found))


def _contend(delivery: Delivery, new: Entry, found: Record | Gone | None) -> Flow[tuple[Entry | Outcome[Any], Then]]:
    """Claim until the address is ours or otherwise settled, once `new` has been refused for what was found."""
    request, policy = delivery.request, delivery.policy
    waited, rounds, looked = 0.0, 1, True
    while True:
        entry, then, replacing = new, RUN, None
        waits = False
        if isinstance(found, Record):
            then = _decide.decide(found, request, policy)
            waits = waited < policy.wait and then is Then.REFUSE_RUNNING
            if waits:
                took, handed = yield waiting_for(found, waited, policy.wait, policy.lease)
                waited, then = waited + took, RUN
                if handed is not None:
                    # Another waiter has looked for us.
                    found, looked = cast("Record", handed), False
                    continue
            else:
                settled = yield from _answered(delivery, found, then, waited, tells=looked)
                if settled is not None:
                    return settled, then
                entry, replacing = _decide.entry(then, found, request, policy, new.token), found
        if not waits:
            if rounds == ROUNDS_MAX:
                raise refused(delivery, InProgress.about(request.address, retry_after=RETRY_AFTER))
            rounds += 1
        looked = True
        try:
            found = yield Claiming(entry, replacing)
        except StoreUnavailable as down:
            if replacing is None:
                yield from _disown(entry, down)
            raise
        if found is None:
            if then is not Then.SKIP or not request.bypass:
                return _written(delivery, entry, then), then
            # It counts as done now, and that is what a bypass runs again: as a claim of its own, with another token.
            _written(delivery, entry, then)
            new = _decide.change(new, token=delivery.mint())


def _answered(
    delivery: Delivery, found: Record, then: Then, waited: float, *, tells: bool
) -> Flow[Outcome[Any] | None]:
    """Return the record's own answer. One that has waited, and looked, tells the other waiters of its process first."""
    if waited and tells:
        yield Found(0.0, found)
    if delivery.policy.count_duplicates:
        return (yield from answer_and_count(delivery, found, then, waited))
    return answer(delivery, found, then, waited)


def _disown(entry: Entry, down: StoreUnavailable) -> Flow[None]:
    """Try to take back a claim that got no answer but may have been written, so that nothing is left in doubt."""
    # If nothing was sent, or nothing can be, taking it back would only double the wait.
    if not down.reached:
        return
    try:
        yield Releasing(entry.as_claim())
    except Exception as error:
        # The store is still down; a lease will end what was written.
        if not is_answer(error):
            raise


def _written(delivery: Delivery, entry: Entry, then: Then) -> Entry | Outcome[Any]:
    """Return the result of a claim that is in the store: its entry, or the outcome that it recorded."""
    if then is RUN:
        return entry
    address = delivery.request.address
    if then is Then.HOLD:
        remark = without_error_text(latest_of(entry.remark))
        delivery.tell(Kind.HELD, address, entry.attempt, remark)
        raise Held.about(address, remark=remark)
    if then is Then.SKIP:
        delivery.tell(Kind.SKIPPED, address, entry.attempt)
        why = latest_of(entry.remark)
        return Outcome(
            kept=not_kept(address, delivery.returns), replayed=True, attempt=entry.attempt, omitted=True, remark=why
        )
    if then is Then.TAKE_OVER:
        delivery.tell(Kind.TAKEN_OVER, address, entry.attempt)
    elif then is Then.RUN_AGAIN:
        delivery.tell(Kind.BYPASSED, address, entry.attempt)
    return entry


def answer(delivery: Delivery, found: Record, then: Then, waited: float = 0.0) -> Outcome[Any] | None:
    """Return the answer that the record itself gives: a replay or a refusal; None if a claim has to be written."""
    if then is REPLAY:
        return answer_done(delivery, found, waited)
    address = delivery.request.address
    if found.fingerprint != delivery.request.fingerprint:
        tell_if_uncompared(delivery, found.fingerprint)
    match then:
        case Then.REPLAY_ERROR:
            found = earlier_ending.finished(found) or found
            delivery.tell(Kind.REPLAYED, address, found.attempt, "error")
            raise stored_error(delivery, found)
        case Then.REFUSE_REUSED:
            raise refused(delivery, KeyReused.about(address))
        case Then.REFUSE_HELD:
            raise refused(delivery, Held.about(address, remark=without_error_text(found.latest_remark)))
        case Then.REFUSE_RUNNING:
            left = max(found.lease_left, 0.0)
            raise refused(delivery, InProgress.about(address, retry_after=min(left, RETRY_AFTER)))
        case _:
            return None


def answer_done(delivery: Delivery, found: Record, waited: float = 0.0) -> Outcome[Any]:
    """Return the outcome of a record that is done."""
    if found.fingerprint != delivery.request.fingerprint:
        tell_if_uncompared(delivery, found.fingerprint)
    if waited:
        delivery.tell(Kind.WAITED, delivery.request.address, found.attempt)
    # Only a record with notes can hold an outcome that a bypass has found.
    if found.notes is not None:
        found = earlier_ending.finished(found) or found
    return replay(found, delivery.request.address, delivery.returns, delivery.codec, delivery.tell)


def answer_and_count(delivery: Delivery, found: Record, then: Then, waited: float = 0.0) -> Flow[Outcome[Any] | None]:
    """Do the same, and count the duplicate in the record that answers it. An answer that fails is not counted."""
    if then is Then.REPLAY_ERROR:
        yield from count(delivery, found)
    settled = answer(delivery, found, then, waited)
    if then is REPLAY:
        yield from count(delivery, found)
    return settled


def count(delivery: Delivery, found: Record) -> Flow[None]:
    """Add this duplicate to the count in the record. What cannot be counted is left out: the answer stands.

    Only the notes change, not the token or the expiry: a purge, a forget or a bypass takes no notice of it, and a
    record that is gone is not written again. The count says less than happened, never more.
    """
    mark = delivery.mint()
    for _ in range(COUNT_ROUNDS_MAX):
        # Not while a bypass runs: there the notes are its owner's log.
        notes = with_one_more(found.notes, mark) if found.state in (State.DONE, State.FAILED) else None
        if notes is None:
            return
        try:
            in_the_way: Record | Gone | None = yield Annotating(found, notes)
        except Exception as error:
            if not is_answer(error):
                raise
            # It may have been written all the same: another try could count it twice.
            delivery.tell(Kind.STORE_FAILED, found.address, found.attempt, "count")
            delivery.tell.warn(found.address, NOT_COUNTED, about="count")
            return
        if not isinstance(in_the_way, Record):
            return
        found = in_the_way


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
        yield from finish(delivery, entry, held_ending(remark, entry.notes))
        delivery.tell(Kind.HELD, delivery.request.address, entry.attempt, remark)
        raise Held.about(delivery.request.address, remark=remark)
    return (yield from _count_start(delivery, entry))


def _count_start(delivery: Delivery, entry: Entry) -> Flow[Entry]:
    """Write the next attempt into a record that was taken over only to ask about it. It keeps its token.

    The attempt follows from the entry, not from what is found: a write whose answer got lost is repeated.
    """
    for _ in range(ROUNDS_MAX):
        found: Record | None = yield Reading(entry.address)
        if found is None or found.token != entry.token:
            break
        remark = bypassing(entry.remark, name=delivery.request.bypass)
        counted = _decide.change(entry, attempt=entry.attempt + 1, age=found.age, notes=found.notes, remark=remark)
        if (yield Claiming(counted, found)) is None:
            return counted
    raise refused(delivery, InProgress.about(entry.address, retry_after=RETRY_AFTER))


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
    return Outcome(kept=ended.value, recorded=False, protected=False)


def _doubt(answered: ProbeAnswer, attempt: int) -> str:
    if isinstance(answered, NotDone):
        return f"attempt {attempt} was abandoned, the probe says that nothing happened, and the attempts are used up"
    return f"attempt {attempt} was abandoned, and the probe could not say whether it happened"
