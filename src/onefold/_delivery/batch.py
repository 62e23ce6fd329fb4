"""Run many deliveries at once: one round trip claims them, one ends them, and the handler is called for each.

The rules are those of `claim`: each message has a flow of its own, and requests that the flows make at the same point
are sent together. One message never fails its neighbours: each gets its own outcome or error, in order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import msgspec

from onefold._concurrency.generators import Flow
from onefold._concurrency.users_errors import as_raised
from onefold._delivery import decide as _decide
from onefold._delivery.claim import RETRY_AFTER, deliver, win, without_store
from onefold._delivery.close import close
from onefold._delivery.decide import Then
from onefold._delivery.seen import look
from onefold._delivery.steps import (
    Claiming,
    ClaimingAll,
    Closing,
    ClosingAll,
    Ended,
    Extending,
    Running,
    Step,
    StoreStep,
    Watching,
)
from onefold._delivery.work import Delivery, refused
from onefold._model import Address, Entry, Outcome
from onefold.errors import InProgress, KeyReused, StoreUnavailable
from onefold.events import Kind

# Bounds one round trip: larger batches are split into parts of this size.
BATCH_MAX: Final = 1_000

Result = Outcome[Any] | Exception


class Over(msgspec.Struct):
    """The end of a flow, with a value or an error."""

    value: Any = None
    error: BaseException | None = None


class Part(msgspec.Struct):
    """One message of a batch in progress: its flow, and the step at which the flow stands."""

    delivery: Delivery
    flow: Flow[Any]
    at: Step | Over | None = None


def deliver_all(deliveries: Sequence[Delivery | Exception], *, batching: bool) -> Flow[list[Result]]:
    """Return outcomes or errors in the order of the deliveries; an exception in place of a delivery stays there."""
    parts: dict[Address, Part] = {}
    for delivery in deliveries:
        if isinstance(delivery, Delivery) and delivery.request.address not in parts:
            parts[delivery.request.address] = Part(delivery, _begin(delivery))
    if batching:
        yield from _together(parts.values(), Claiming, ClaimingAll)
        # If the store did not answer, all claims that may have been written are taken back in one round trip too.
        yield from _together(parts.values(), Closing, ClosingAll)
        won = [cast("Over", part.at).value[0] for part in parts.values() if _has_won(part.at)]
        yield Watching([entry.as_claim() for entry in won])
    interrupt = yield from _run_each(parts.values(), batching=batching)
    if batching:
        yield from _together(parts.values(), Closing, ClosingAll)
    for part in parts.values():
        over = yield from _alone(part)
        interrupt = interrupt or _interrupt(over.error)
    if interrupt is not None:
        raise interrupt
    told: set[Address] = set()
    return [delivery if isinstance(delivery, Exception) else _result(delivery, parts, told) for delivery in deliveries]


def _begin(delivery: Delivery) -> Flow[Any]:
    if delivery.policy.mode == "seen":
        return _look(delivery)
    # Under `rerun` it hardly matters whether a handler had started; otherwise knowing it is worth a round trip.
    policy = delivery.policy
    return win(delivery, unstarted=policy.after_crash != "rerun" or policy.max_attempts == 1)


def _look(delivery: Delivery) -> Flow[tuple[Outcome[Any], Then]]:
    return (yield from look(delivery)), Then.REPLAY


def _run_each(parts: Iterable[Part], *, batching: bool) -> Flow[BaseException | None]:
    """Call the handlers in order, and give each part the flow that closes it.

    Return an interrupt, if one came: the message that it hit is closed by the rules, and those that had not started are
    released.
    """
    interrupt: BaseException | None = None
    for part in parts:
        if interrupt is not None and not isinstance(part.at, Over):
            part.at = Over(error=interrupt)
            continue
        over = yield from _alone(part)
        interrupt = interrupt or _interrupt(over.error)
        suspect = False
        if _has_won(over):
            entry, then = over.value
            suspect = entry.attempt > 1
            if interrupt is None:
                part.flow, interrupt = yield from _run(part.delivery, entry, then)
            else:
                part.flow = close(part.delivery, entry, Ended(error=interrupt, started=False))
        elif isinstance(over.error, StoreUnavailable) and interrupt is None:
            over = yield from _alone(Part(part.delivery, without_store(part.delivery, over.error)))
            part.flow, interrupt = _ended(over), _interrupt(over.error)
        else:
            part.flow = _ended(over)
        part.at = None
        # A batch shares its last round trip; a probe that has to be asked before is asked now. A run that a crash has
        # left behind is recorded separately and at once: a message that kills its worker must not take its neighbours
        # along again and again.
        at = yield from _alone(part, until=Closing if batching and not suspect else Over)
        interrupt = interrupt or (_interrupt(at.error) if isinstance(at, Over) else None)
    return interrupt


def _run(delivery: Delivery, entry: Entry, then: Then) -> Flow[tuple[Flow[Any], BaseException | None]]:
    """Call one handler; return the flow that closes its record, and the interrupt that hit it."""
    claim = entry.as_claim()
    if then is Then.ASK:
        over = yield from _alone(Part(delivery, deliver(delivery, (entry, then))))
        return _ended(over), _interrupt(over.error)
    if (yield Watching((claim,))) <= 0:
        late = Ended(error=refused(delivery, InProgress.about(entry.address, retry_after=RETRY_AFTER)), started=False)
        return close(delivery, entry, late), None
    if entry.notes == _decide.UNSTARTED:
        try:
            ours = yield Extending(claim, _decide.STARTED)
        except StoreUnavailable as down:
            return _ended(Over(error=down)), None
        if not ours:
            lost = refused(delivery, InProgress.about(delivery.request.address, retry_after=RETRY_AFTER))
            return _ended(Over(error=lost)), None
        entry = _decide.change(entry, notes=None)
    delivery.tell(Kind.STARTED, delivery.request.address, entry.attempt)
    ended: Ended = yield Running(delivery.call, entry, cancel_when_lost=delivery.policy.cancel_when_lost)
    return close(delivery, entry, ended), _interrupt(ended.error)


def _together(parts: Iterable[Part], kind: type[StoreStep], all_at_once: type[ClaimingAll | ClosingAll]) -> Flow[None]:
    """Advance every flow to its first request; send those of one kind in one round trip, and hand out the replies."""
    asking: list[Part] = []
    for part in parts:
        if part.at is None:
            part.at = _advance(part.flow)
        if isinstance(part.at, kind):
            asking.append(part)
    if not asking:
        return
    try:
        replies = yield all_at_once([cast("Any", part.at) for part in asking])
    except Exception as error:  # noqa: BLE001 - each flow knows its meaning
        for part in asking:
            part.at = _advance(part.flow, failure=_copied(error))
    else:
        for part, reply in zip(asking, replies, strict=True):
            part.at = _advance(part.flow, reply)


def _copied(error: Exception) -> Exception:
    """Return a copy: a note that the flow of one message adds to its error must not appear on that of another."""
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001 - its class wants other arguments than it keeps
        return error


def _alone(part: Part, until: type[Step | Over] = Over) -> Flow[Any]:
    """Run one flow to its end, or to a step of this kind."""
    if part.at is None:
        part.at = _advance(part.flow)
    while not isinstance(part.at, (Over, until)):
        try:
            reply = yield part.at
        except Exception as error:  # noqa: BLE001 - the flow knows its meaning
            part.at = _advance(part.flow, failure=error)
        else:
            part.at = _advance(part.flow, reply)
    return part.at


def _advance(flow: Flow[Any], reply: Any = None, failure: Exception | None = None) -> Step | Over:
    try:
        step: Step = flow.send(reply) if failure is None else flow.throw(failure)
    except StopIteration as end:
        return Over(value=end.value)
    except BaseException as error:  # noqa: BLE001 - one message's error is its own result
        return Over(error=as_raised(error))
    return step


def _ended(over: Over) -> Flow[Any]:
    """Return a flow that makes no more requests."""
    if over.error is not None:
        raise over.error
    return over.value[0] if isinstance(over.value, tuple) else over.value
    yield


def _has_won(at: Step | Over | None) -> bool:
    return isinstance(at, Over) and at.error is None and isinstance(at.value[0], Entry)


def _interrupt(error: BaseException | None) -> BaseException | None:
    return None if error is None or isinstance(error, Exception) else error


def _result(delivery: Delivery, parts: dict[Address, Part], told: set[Address]) -> Result:
    """Return the outcome of the first message of a key; others of the same key share it."""
    address = delivery.request.address
    part = parts[address]
    over = cast("Over", part.at)
    if address not in told:
        told.add(address)
        return cast("Result", over.value if over.error is None else over.error)
    if _decide.reused(part.delivery.request.fingerprint, delivery.request.fingerprint):
        return refused(delivery, KeyReused.about(address))
    if over.error is not None:
        return cast("Exception", over.error)
    delivery.tell(Kind.REPLAYED, address, over.value.attempt)
    shared: Outcome[Any] = msgspec.structs.replace(over.value, replayed=True)
    return shared
