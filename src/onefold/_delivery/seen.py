"""Seen mode, for effects that are idempotent by themselves: one read before, one write after success."""

from __future__ import annotations

from typing import Any, Final, cast

from onefold._concurrency.generators import Flow
from onefold._concurrency.interrupts import is_answer
from onefold._delivery import decide as _decide
from onefold._delivery.claim import answer, answer_and_count, without_store
from onefold._delivery.close import FINISH_PAUSE_FIRST
from onefold._delivery.decide import Then
from onefold._delivery.steps import Claiming, Ended, Pausing, Reading, Running
from onefold._delivery.work import Delivery, done_ending, ended_entry, failed_ending, tell_not_recorded
from onefold._model import GONE, Entry, Outcome, Record
from onefold.errors import StoreUnavailable
from onefold.events import Kind

# Seen mode has no lease to measure by.
WRITES_MAX: Final = 3


def look(delivery: Delivery) -> Flow[Outcome[Any]]:
    """Read before the handler, and write after success. A crash in between runs it again, which is harmless."""
    request, policy = delivery.request, delivery.policy
    try:
        found: Record | None = yield Reading(request.address)
    except StoreUnavailable as down:
        return (yield from without_store(delivery, down))
    then = Then.RUN if found is None else _decide.decide(found, request, policy)
    if found is not None:
        counts = policy.count_duplicates
        settled = (yield from answer_and_count(delivery, found, then)) if counts else answer(delivery, found, then)
        if settled is not None:
            return settled
    entry = _decide.entry(then, found, request, policy, delivery.mint())
    attempt = entry.attempt
    if then is Then.RUN_AGAIN:
        delivery.tell(Kind.BYPASSED, request.address, attempt)
    delivery.tell(Kind.STARTED, request.address, attempt)
    ended: Ended = yield Running(delivery.call, entry)
    if ended.error is not None:
        # A bypass that fails leaves the existing record unchanged.
        remembers = _decide.after(ended.error, policy) is Then.FAIL and then is not Then.RUN_AGAIN
        if remembers:
            ending = failed_ending(delivery, cast("Exception", ended.error), ended.noted)
            yield from write_seen(delivery, ended_entry(entry, ending), found)
        kind = Kind.FAILED if remembers else Kind.RELEASED
        delivery.tell(kind, request.address, attempt, type(ended.error).__name__)
        raise ended.error
    struck: list[BaseException] = []
    ending = done_ending(delivery, ended.value, attempt, struck, noted=ended.noted)
    recorded = yield from write_seen(delivery, ended_entry(entry, ending), found)
    if recorded:
        delivery.tell(Kind.FINISHED, request.address, attempt)
    else:
        tell_not_recorded(delivery, attempt)
    if struck:
        raise struck[0]
    return Outcome(kept=ended.value, attempt=attempt, recorded=recorded)


def write_seen(delivery: Delivery, entry: Entry, replacing: Record | None) -> Flow[bool]:
    """Record a success. Losing the race is fine: the existing record says the same about another run."""
    for write in range(WRITES_MAX):
        try:
            in_the_way = yield Claiming(entry, replacing)
        except Exception as error:
            if not is_answer(error):
                raise
            # An effect that happened is never reported as failed.
            delivery.tell(Kind.STORE_FAILED, entry.address, detail="claim")
            if write + 1 < WRITES_MAX:
                yield Pausing(FINISH_PAUSE_FIRST * 2**write)
            continue
        if in_the_way is not GONE:
            return True
        replacing = None
    return False
