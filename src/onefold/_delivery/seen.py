"""Seen mode, for effects that are idempotent by themselves: one read before, one write after success."""

from __future__ import annotations

from typing import Any, Final, cast

from onefold._delivery import decide as _decide
from onefold._delivery.claim import FINISH_PAUSE_FIRST, answer, without_store
from onefold._delivery.decide import Then
from onefold._delivery.steps import Claiming, Ended, Flow, Pausing, Reading, Running
from onefold._delivery.work import Work, done, failed, tell_not_remembered
from onefold._model import GONE, Ending, Entry, Outcome, Record
from onefold.errors import StoreUnavailable
from onefold.events import Kind

# Seen mode has no lease to measure by.
WRITES_MAX: Final = 3


def look(work: Work) -> Flow[Outcome[Any]]:
    """Seen mode: one read before, one write after success. A crash in between runs it again, which is harmless."""
    asked, policy = work.asked, work.policy
    try:
        found: Record | None = yield Reading(asked.address)
    except StoreUnavailable as down:
        return (yield from without_store(work, down))
    then = Then.RUN if found is None else _decide.decide(found, asked, policy)
    if found is not None:
        settled = answer(work, found, then)
        if settled is not None:
            return settled
    entry = _decide.entry(then, found, asked, policy, work.mint())
    attempt = entry.attempt
    if then is Then.RUN_AGAIN:
        work.tell(Kind.BYPASSED, asked.address, attempt)
    work.tell(Kind.STARTED, asked.address, attempt)
    ended: Ended = yield Running(work.call, entry)
    if ended.error is not None:
        # A bypass that fails leaves what was there.
        remembers = _decide.after(ended.error, policy) is Then.FAIL and then is not Then.RUN_AGAIN
        if remembers:
            ending = failed(work, cast("Exception", ended.error))
            yield from write_seen(work, _ended_entry(entry, ending), found)
        kind = Kind.FAILED if remembers else Kind.RELEASED
        work.tell(kind, asked.address, attempt, type(ended.error).__name__)
        raise ended.error
    struck: list[BaseException] = []
    ending = done(work, ended.value, attempt, struck)
    remembered = yield from write_seen(work, _ended_entry(entry, ending), found)
    if remembered:
        work.tell(Kind.FINISHED, asked.address, attempt)
    else:
        tell_not_remembered(work, attempt)
    if struck:
        raise struck[0]
    return Outcome(value=ended.value, attempt=attempt, remembered=remembered)


def write_seen(work: Work, entry: Entry, replacing: Record | None) -> Flow[bool]:
    """Record what was seen. Losing the race is fine: the existing record says the same about another run."""
    for write in range(WRITES_MAX):
        try:
            in_the_way = yield Claiming(entry, replacing)
        except Exception:  # noqa: BLE001 - an effect that happened is never reported as failed
            work.tell(Kind.STORE_FAILED, entry.address, detail="claim")
            if write + 1 < WRITES_MAX:
                yield Pausing(FINISH_PAUSE_FIRST * 2**write)
            continue
        if in_the_way is not GONE:
            return True
        replacing = None
    return False


def _ended_entry(entry: Entry, ending: Ending) -> Entry:
    return _decide.change(
        entry,
        state=ending.state,
        lease=0.0,
        stay=ending.stay,
        notes=None,
        result=ending.result,
        omitted=ending.omitted,
        remark=ending.remark,
    )
