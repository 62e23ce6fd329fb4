"""Every decision about a delivery is a row in a table here. Pure: no I/O, no clock, no random.

`FOUND` decides by the record that a delivery finds, `AFTER` by how its handler ended, `PROBED` by a probe's answer. The
first matching row decides, by the finder's policy. The diagram in `docs/concepts.md` is generated from these tables.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec

from onefold._concurrency.users_errors import class_name, line_of
from onefold._delivery import earlier_ending
from onefold._delivery.handler_steps.left import NONE_LEFT, StepsLeft
from onefold._fingerprint import Compared, compare
from onefold._model import (
    DeliveryRequest,
    Done,
    DoneRecord,
    Entry,
    NotDone,
    ProbeAnswer,
    Record,
    Released,
    State,
    Unknown,
)
from onefold._model.policy import ErrorKinds, Policy
from onefold._model.remarks import RELEASED, bypassing, earlier_in, saying, was_bypassed
from onefold.errors import ClaimLost, OutcomeUnknown

# Stands for a log of steps: nil for a claim whose handler has not started yet, an empty log once it has.
UNSTARTED: Final = b"\xc0"
STARTED: Final = b"\x80"


# It can be a whole response: a table of held records shows it, and every store has to keep it.
ERROR_TEXT_MAX: Final = 500


class Then(enum.Enum):
    """The decisions about a delivery."""

    RUN = "run"
    RUN_AGAIN = "run again, as a bypass"
    TAKE_OVER = "take over, next attempt"
    REPLAY = "replay the result"
    REPLAY_ERROR = "replay the error"
    REFUSE_REUSED = "refuse: KeyReused"
    REFUSE_HELD = "refuse: Held"
    REFUSE_RUNNING = "wait within policy.wait, then refuse: InProgress"
    FINISH = "finish"
    FAIL = "remember the error"
    HOLD = "hold"
    SKIP = "count it as done, without a result"
    ASK = "ask the probe"
    RELEASE = "release"
    LEAVE = "leave it claimed until its lease ends"


class Row(NamedTuple):
    """In this state, when this holds: take this action, and the record gets that state."""

    state: State
    when: str
    holds: Callable[[Record, DeliveryRequest, Policy], bool]
    then: Then
    becomes: State


def always(_found: Record, _request: DeliveryRequest, _policy: Policy) -> bool:
    return True


def bypassed(found: Record, request: DeliveryRequest, _policy: Policy) -> bool:
    return bool(request.bypass) and not was_bypassed(found.remark, name=request.bypass)


def stands_done(found: Record, _request: DeliveryRequest, _policy: Policy) -> bool:
    ended = earlier_ending.finished(found)
    return ended is not None and ended.state is State.DONE


def stands_failed(found: Record, _request: DeliveryRequest, _policy: Policy) -> bool:
    ended = earlier_ending.finished(found)
    return ended is not None and ended.state is State.FAILED


def bypassed_again(found: Record, request: DeliveryRequest, policy: Policy) -> bool:
    ended = earlier_ending.finished(found)
    return ended is not None and bypassed(ended, request, policy)


def lease_live(found: Record, _request: DeliveryRequest, _policy: Policy) -> bool:
    return found.is_live


def never_started(found: Record, _request: DeliveryRequest, _policy: Policy) -> bool:
    return starts(found) == 0


def may_hold(_found: Record, _request: DeliveryRequest, policy: Policy) -> bool:
    return policy.after_crash == "hold"


def may_skip(_found: Record, _request: DeliveryRequest, policy: Policy) -> bool:
    return policy.after_crash == "skip"


def has_probe(_found: Record, _request: DeliveryRequest, policy: Policy) -> bool:
    return callable(policy.after_crash)


def used_up(found: Record, _request: DeliveryRequest, policy: Policy) -> bool:
    return starts(found) >= policy.max_attempts


def too_old(found: Record, _request: DeliveryRequest, policy: Policy) -> bool:
    return found.age >= policy.rerun_within


FOUND = (
    Row(State.DONE, "bypass", bypassed, Then.RUN_AGAIN, State.RUNNING),
    Row(State.DONE, "otherwise", always, Then.REPLAY, State.DONE),
    Row(State.FAILED, "bypass", bypassed, Then.RUN_AGAIN, State.RUNNING),
    Row(State.FAILED, "otherwise", always, Then.REPLAY_ERROR, State.FAILED),
    Row(State.HELD, "until it is resolved", always, Then.REFUSE_HELD, State.HELD),
    Row(State.OPEN, "past rerun_within", too_old, Then.HOLD, State.HELD),
    Row(State.OPEN, "otherwise", always, Then.TAKE_OVER, State.RUNNING),
    Row(State.RUNNING, "lease live", lease_live, Then.REFUSE_RUNNING, State.RUNNING),
    Row(State.RUNNING, "lease over, never started", never_started, Then.TAKE_OVER, State.RUNNING),
    Row(State.RUNNING, "a bypass whose lease is over, bypass", bypassed_again, Then.RUN_AGAIN, State.RUNNING),
    Row(State.RUNNING, "a bypass whose lease is over, done before", stands_done, Then.REPLAY, State.RUNNING),
    Row(State.RUNNING, "a bypass whose lease is over, failed before", stands_failed, Then.REPLAY_ERROR, State.RUNNING),
    Row(State.RUNNING, "lease over, hold", may_hold, Then.HOLD, State.HELD),
    Row(State.RUNNING, "lease over, skip", may_skip, Then.SKIP, State.DONE),
    Row(State.RUNNING, "lease over, a probe", has_probe, Then.ASK, State.RUNNING),
    Row(State.RUNNING, "lease over, attempts used up", used_up, Then.HOLD, State.HELD),
    Row(State.RUNNING, "lease over, past rerun_within", too_old, Then.HOLD, State.HELD),
    Row(State.RUNNING, "lease over, rerun", always, Then.TAKE_OVER, State.RUNNING),
)

_BY_STATE = {state: tuple(row for row in FOUND if row.state is state) for state in State}


def _settled() -> Iterator[tuple[State, Then]]:
    """Yield the states in which only a bypass would change what happens, and what happens otherwise."""
    for state, rows in _BY_STATE.items():
        plain = [row for row in rows if row.holds is not bypassed]
        if plain[0].holds is always:
            yield state, plain[0].then


# Almost every record that is found is done: its row is looked up at once.
_WITHOUT_BYPASS: Final = dict(_settled())
_DONE_REPLAYS: Final = _WITHOUT_BYPASS.get(State.DONE) is Then.REPLAY


def decide(found: Record, request: DeliveryRequest, policy: Policy) -> Then:
    """Decide what to do with a delivery that finds this record."""
    if found.ttl_left <= 0:
        return Then.RUN
    if found.fingerprint != request.fingerprint and reused(found.fingerprint, request.fingerprint):
        return Then.REFUSE_REUSED
    if not request.bypass and (then := _WITHOUT_BYPASS.get(found.state)) is not None:
        return then
    for row in _BY_STATE[found.state]:
        if row.holds(found, request, policy):
            return row.then
    raise AssertionError(f"no row for {found.state}: the last one of each state always holds")


def replays(found: DoneRecord, request: DeliveryRequest) -> bool:
    """Return whether a record that is done, and without notes, is certainly replayed, as `decide` says.

    For a store that finds such a record without waiting. Everything else is left to the flow.
    """
    if request.bypass or not _DONE_REPLAYS:
        return False
    return found.fingerprint == request.fingerprint or compare(found.fingerprint, request.fingerprint) is Compared.EQUAL


def reused(found: bytes | None, request: bytes | None) -> bool:
    """Return whether this is a different payload, as far as both fingerprints can tell."""
    return found != request and compare(found, request) is Compared.DIFFERENT


def uncompared(found: bytes | None, request: bytes | None) -> bool:
    """Return whether another payload could go unnoticed: an argument was renamed, or another function wrote it."""
    return found != request and compare(found, request) is Compared.UNKNOWN


class After(NamedTuple):
    """The handler ended this way, under this `after_crash`: take this action, and the record gets that state."""

    ended: str
    under: str
    holds: Callable[[BaseException | None, Policy, StepsLeft], bool]
    then: Then
    becomes: State | None


def under(*ways: str) -> Callable[[Policy], bool]:
    return lambda policy: (policy.after_crash if isinstance(policy.after_crash, str) else "probe") in ways


def returned(error: BaseException | None, _policy: Policy, _steps: StepsLeft = NONE_LEFT) -> bool:
    return error is None


def claim_lost(error: BaseException | None, _policy: Policy, _steps: StepsLeft = NONE_LEFT) -> bool:
    return isinstance(error, ClaimLost)


def interrupted(error: BaseException | None, _policy: Policy, _steps: StepsLeft = NONE_LEFT) -> bool:
    return not isinstance(error, Exception)


def is_final(error: BaseException | None, policy: Policy, _steps: StepsLeft = NONE_LEFT) -> bool:
    return isinstance(error, Exception) and is_one_of(error, policy.final_errors)


def step_under_way(_error: BaseException | None, _policy: Policy, steps: StepsLeft = NONE_LEFT) -> bool:
    return bool(steps.under_way)


def is_ambiguous(error: BaseException | None, policy: Policy, steps: StepsLeft = NONE_LEFT) -> bool:
    return bool(steps.interrupted) or is_one_of(error, (*policy.ambiguous_errors, OutcomeUnknown))


def _when(kind: Callable[[BaseException | None, Policy, StepsLeft], bool], *ways: str) -> Callable[..., bool]:
    rules = under(*ways)
    return lambda error, policy, steps: kind(error, policy, steps) and rules(policy)


UNKNOWN: Final = "raised an error listed in `ambiguous_errors`, or after a step was interrupted"


AFTER = (
    After("returned", "any", returned, Then.FINISH, State.DONE),
    After("found its claim lost", "any", claim_lost, Then.LEAVE, State.RUNNING),
    After("raised an error listed in `final_errors`", "any", is_final, Then.FAIL, State.FAILED),
    # The step is still running: its entry can still be logged, and nobody may run it concurrently, nor probe it yet.
    After("raised while a step was under way", "any", step_under_way, Then.LEAVE, State.RUNNING),
    After("was cancelled", "rerun", _when(interrupted, "rerun"), Then.RELEASE, State.OPEN),
    After("was cancelled", "hold, skip, a probe", interrupted, Then.LEAVE, State.RUNNING),
    After(UNKNOWN, "hold", _when(is_ambiguous, "hold"), Then.HOLD, State.HELD),
    After(UNKNOWN, "skip", _when(is_ambiguous, "skip"), Then.SKIP, State.DONE),
    After(UNKNOWN, "a probe", _when(is_ambiguous, "probe"), Then.ASK, State.RUNNING),
    After("raised anything else", "any", lambda _error, _policy, _steps: True, Then.RELEASE, None),
)


def after(error: BaseException | None, policy: Policy, steps: StepsLeft = NONE_LEFT) -> Then:
    """Decide what to do with a claim whose handler ended this way; `None` means that it returned."""
    for row in AFTER:
        if row.holds(error, policy, steps):
            return row.then
    raise AssertionError("the last row always holds")


def is_one_of(error: BaseException | None, kinds: ErrorKinds) -> bool:
    """Return whether the error, or one inside its group, is one of these: classes, or dotted names of classes."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_one_of(inner, kinds) for inner in error.exceptions)
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    if isinstance(error, classes):
        return True
    names = {f"{parent.__module__}.{parent.__qualname__}" for parent in type(error).__mro__}
    return any(kind in names for kind in kinds if isinstance(kind, str))


PROBED: dict[type[ProbeAnswer], tuple[Then, State]] = {
    Done: (Then.FINISH, State.DONE),
    NotDone: (Then.RUN, State.RUNNING),
    Unknown: (Then.HOLD, State.HELD),
}


def probed(answer: ProbeAnswer, attempt: int, policy: Policy) -> Then:
    """Decide what to do after the probe's answer, when the handler has started `attempt` times."""
    then = PROBED[type(answer)][0]
    return Then.HOLD if then is Then.RUN and attempt >= policy.max_attempts else then


def new_entry(request: DeliveryRequest, policy: Policy, token: bytes) -> Entry:
    """Return the record that a claim writes if it finds none."""
    return Entry(
        address=request.address,
        token=token,
        lease=policy.lease,
        ttl=ttl_running(policy),
        fingerprint=request.fingerprint,
        remark=bypassing("", name=request.bypass) if request.bypass else "",
    )


def done_at_once(request: DeliveryRequest, policy: Policy, token: bytes) -> Entry:
    """Return a record that is done at once, for a transaction that commits it or not: nobody sees it running."""
    return Entry(
        address=request.address,
        token=token,
        state=State.DONE,
        lease=0.0,
        ttl=policy.keep,
        fingerprint=request.fingerprint,
        remark=bypassing("", name=request.bypass) if request.bypass else "",
    )


def entry(then: Then, found: Record | None, request: DeliveryRequest, policy: Policy, token: bytes) -> Entry:
    """Return the record that a claim writes to carry out the decision."""
    new = new_entry(request, policy, token)
    if found is None or then is Then.RUN:
        return new
    if then is Then.RUN_AGAIN:
        before = earlier_ending.finished(found) or found
        return change(earlier_ending.carrying(new, found), remark=bypassing(before.remark, name=request.bypass))
    # A probe may say that it is done: then no bypass has run, and its name is not used up.
    runs = then not in (Then.HOLD, Then.SKIP, Then.ASK)
    kept = change(
        new,
        remark=bypassing(found.remark, name=runs and request.bypass),
        attempt=starts(found),
        age=found.age,
        bypasses=found.bypasses,
        # The outcome that a bypass had found has expired, or it would have been replayed.
        notes=None if found.notes in (UNSTARTED, STARTED) else earlier_ending.steps_only(found.notes),
        fingerprint=request.fingerprint if found.fingerprint is None else found.fingerprint,
    )
    if then is Then.HOLD:
        # The owner's token stays: a slow owner that succeeds after all still turns held into done.
        return change(
            kept,
            state=State.HELD,
            token=found.token,
            lease=0.0,
            ttl=math.inf,
            remark=why_held(found, policy) + kept.remark,
        )
    if then is Then.SKIP:
        remark = f"skipped: attempt {starts(found)} was abandoned{kept.remark}"
        return change(kept, state=State.DONE, lease=0.0, ttl=policy.keep, notes=None, omitted=True, remark=remark)
    # Asking a probe is not a start: the attempt is counted when the handler starts.
    return kept if then is Then.ASK else change(kept, attempt=starts(found) + 1)


def starts(found: Record) -> int:
    """Return how often a handler has started: all attempts, except one claimed by a batch and not started yet."""
    return found.attempt - 1 if found.notes == UNSTARTED else found.attempt


def why_held(found: Record, policy: Policy) -> str:
    """Explain, for people, what led to the hold."""
    if found.age >= policy.rerun_within:
        why = f"attempt {starts(found)} left no answer, and rerun_within={policy.rerun_within:g}s has passed"
        was_released = found.state is State.OPEN and found.remark.startswith(RELEASED)
        return f"{why}; it ended in {found.latest_remark.removeprefix(RELEASED)}" if was_released else why
    if policy.after_crash == "rerun":
        return f"all {starts(found)} attempts were abandoned, and max_attempts={policy.max_attempts}"
    return f"attempt {starts(found)} was abandoned: its lease ended without an answer"


def error_text(error: BaseException | None, policy: Policy) -> str:
    """Return the end of a remark: what the handler's error says, if the policy allows that."""
    if error is None or not policy.keep_error_text:
        return ""
    return saying(line_of(error, ERROR_TEXT_MAX))


def ttl_running(policy: Policy) -> float:
    """Return how long a running record is kept. One that may become held must not disappear before."""
    if policy.rerun_within == math.inf and policy.after_crash in ("rerun", "skip"):
        return policy.lease + policy.keep
    return math.inf


def released(
    entry: Entry, error: BaseException, notes: bytes | None, policy: Policy, steps: StepsLeft = NONE_LEFT
) -> Released | None:
    """Return what a release leaves behind: nothing after a clean failure, else the attempts and the finished steps."""
    unsettled = interrupted(error, policy) or is_ambiguous(error, policy, steps) or entry.attempt > 1
    provider_forgets = unsettled and math.isfinite(policy.rerun_within)
    if not (entry.attempt > 1 or interrupted(error, policy) or notes or entry.bypasses or provider_forgets):
        return None
    return Released(
        ttl=math.inf if provider_forgets else policy.keep,
        attempt=entry.attempt,
        notes=notes,
        remark=f"{RELEASED}{class_name(error)}{error_text(error, policy)}{earlier_in(entry.remark)}",
    )


def released_unstarted(entry: Entry, policy: Policy) -> Released | None:
    """Return the release of a claim whose handler was not started: the state before it, if there was one."""
    if entry.attempt <= 1 and entry.notes in (None, UNSTARTED) and not entry.bypasses:
        return None
    ttl = policy.keep if math.isinf(policy.rerun_within) else math.inf
    remark = f"interrupted before it started{earlier_in(entry.remark)}"
    return Released(ttl=ttl, attempt=entry.attempt - 1, notes=entry.notes, remark=remark)


def change(entry: Entry, **fields: object) -> Entry:
    return msgspec.structs.replace(entry, **fields)


def transitions() -> Iterator[tuple[str, str, str]]:
    """Yield every change of state as (from, to, why), for the diagram in the documentation."""
    yield "[*]", State.RUNNING, "claimed"
    for row in FOUND:
        if row.then.value.startswith(("refuse", "replay", "wait")):
            continue
        yield row.state, row.becomes, row.when if row.when != "otherwise" else row.then.value
    for after_row in AFTER:
        way = "" if after_row.under == "any" else f" ({after_row.under})"
        yield State.RUNNING, after_row.becomes or "[*]", after_row.ended + way
