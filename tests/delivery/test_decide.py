"""The decision table: every row decides something, and every record finds a row."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from onefold import Done, NotDone, OutcomeUnknown, Policy, Record, State, Unknown
from onefold._delivery.decide import (
    AFTER,
    FOUND,
    STARTED,
    UNSTARTED,
    After,
    Then,
    after,
    decide,
    entry,
    is_one_of,
    probed,
    released,
    transitions,
    ttl_running,
    why_held,
)
from onefold._delivery.earlier_ending import carrying, finished
from onefold._delivery.handler_steps.left import StepsLeft
from onefold._model import DeliveryRequest, Entry
from onefold._model.policy import AFTER_CRASH
from onefold._model.remarks import BEFORE, RESOLVED
from onefold.errors import ClaimLost
from onefold.keys import address

ADDRESS = address("charge", "pay_7f3a")


def probe(_current: object) -> Any:
    return Unknown()


def record(state: State = State.RUNNING, **fields: Any) -> Record:
    usual: dict[str, Any] = {"attempt": 1, "lease_left": -1.0, "ttl_left": math.inf, "age": 5.0}
    return Record(address=ADDRESS, token=b"t" * 16, revision=1, state=state, **(usual | fields))


@pytest.mark.parametrize(
    ("found", "policy", "then"),
    [
        (record(ttl_left=0.0), Policy(), Then.RUN),
        (record(State.DONE), Policy(), Then.REPLAY),
        (record(State.FAILED), Policy(), Then.REPLAY_ERROR),
        (record(State.HELD), Policy(), Then.REFUSE_HELD),
        (record(State.OPEN), Policy(), Then.TAKE_OVER),
        (record(State.OPEN, attempt=99), Policy(max_attempts=1), Then.TAKE_OVER),
        (record(State.OPEN, age=10.0), Policy(rerun_within=10), Then.HOLD),
        (record(lease_left=0.1), Policy(), Then.REFUSE_RUNNING),
        (record(), Policy(), Then.TAKE_OVER),
        (record(attempt=5), Policy(), Then.HOLD),
        (record(attempt=4), Policy(), Then.TAKE_OVER),
        (record(age=10.0), Policy(rerun_within=10), Then.HOLD),
        (record(age=9.9), Policy(rerun_within=10), Then.TAKE_OVER),
        (record(), Policy(after_crash="hold"), Then.HOLD),
        (record(), Policy(after_crash="skip"), Then.SKIP),
        (record(), Policy(after_crash=probe), Then.ASK),
        (record(notes=UNSTARTED), Policy(after_crash="hold"), Then.TAKE_OVER),
        (record(notes=STARTED), Policy(after_crash="hold"), Then.HOLD),
    ],
)
def test_what_follows_from_the_record_that_is_found(found: Record, policy: Policy, then: Then) -> None:
    assert decide(found, DeliveryRequest(ADDRESS), policy) is then


def test_every_word_of_after_crash_decides_something_of_its_own() -> None:
    decided = [decide(record(), DeliveryRequest(ADDRESS), Policy(after_crash=way)) for way in (*AFTER_CRASH, probe)]

    assert len(set(decided)) == len(decided)


@pytest.mark.parametrize("state", State)
def test_another_fingerprint_is_refused_in_every_state(state: State) -> None:
    found = record(state, fingerprint=b"rcp1" + b"one")

    assert decide(found, DeliveryRequest(ADDRESS, b"rcp1" + b"two"), Policy()) is Then.REFUSE_REUSED
    assert decide(found, DeliveryRequest(ADDRESS, b"rcp1" + b"one"), Policy()) is not Then.REFUSE_REUSED
    assert decide(found, DeliveryRequest(ADDRESS, b"rcp2" + b"two"), Policy()) is not Then.REFUSE_REUSED
    assert decide(found, DeliveryRequest(ADDRESS), Policy()) is not Then.REFUSE_REUSED


@pytest.mark.parametrize(
    ("state", "then"),
    [
        (State.DONE, Then.RUN_AGAIN),
        (State.FAILED, Then.RUN_AGAIN),
        (State.HELD, Then.REFUSE_HELD),
        (State.OPEN, Then.TAKE_OVER),
    ],
)
def test_a_bypass_runs_again_only_what_is_finished(state: State, then: Then) -> None:
    assert decide(record(state), DeliveryRequest(ADDRESS, None, True), Policy()) is then


def abandoned_bypass(state: State) -> Record:
    """What a bypass of something finished leaves when it dies."""
    claim = entry(
        Then.RUN_AGAIN, record(state, result=b"the receipt"), DeliveryRequest(ADDRESS, None, True), Policy(), b"new"
    )
    kept = {name: getattr(claim, name) for name in ("bypasses", "notes", "result")}
    return record(State.RUNNING, lease_left=-1.0, **kept)


@pytest.mark.parametrize(
    ("state", "bypass", "then"),
    [
        (State.DONE, False, Then.REPLAY),
        (State.FAILED, False, Then.REPLAY_ERROR),
        (State.DONE, True, Then.RUN_AGAIN),
        (State.FAILED, True, Then.RUN_AGAIN),
    ],
)
@pytest.mark.parametrize("after_crash", [*AFTER_CRASH, probe])
def test_what_a_bypass_found_stands_when_it_dies(state: State, bypass: bool, then: Then, after_crash: Any) -> None:
    found = abandoned_bypass(state)

    assert decide(found, DeliveryRequest(ADDRESS, None, bypass), Policy(after_crash=after_crash)) is then


def test_every_record_finds_a_row_and_every_row_is_found() -> None:
    policies = [
        Policy(),
        Policy(after_crash="hold"),
        Policy(after_crash="skip"),
        Policy(after_crash=probe),
        Policy(max_attempts=1),
        Policy(rerun_within=1),
    ]
    found = itertools.product(State, (0, 1), (-1.0, 1.0), (None, UNSTARTED), (False, True), policies)
    hit = set()
    records = [
        (record(state, attempt=attempt, lease_left=lease_left, notes=notes), bypass, policy)
        for state, attempt, lease_left, notes, bypass, policy in found
    ]
    records += [
        (abandoned_bypass(state), bypass, Policy())
        for state, bypass in itertools.product((State.DONE, State.FAILED), (False, True))
    ]
    for one, bypass, policy in records:
        request, state = DeliveryRequest(ADDRESS, None, bypass), one.state
        hit.add(next(row for row in FOUND if row.state is state and row.holds(one, request, policy)))

        assert decide(one, request, policy) in Then

    assert hit == set(FOUND)


@pytest.mark.parametrize(
    ("error", "policy", "then"),
    [
        (None, Policy(), Then.FINISH),
        (ValueError(), Policy(), Then.RELEASE),
        (ValueError(), Policy(final_errors=(ValueError,)), Then.FAIL),
        (TimeoutError(), Policy(), Then.RELEASE),
        (TimeoutError(), Policy(after_crash="hold"), Then.HOLD),
        (ConnectionResetError(), Policy(after_crash="hold"), Then.HOLD),
        (OutcomeUnknown(), Policy(after_crash="hold", ambiguous_errors=()), Then.HOLD),
        (TimeoutError(), Policy(after_crash="skip"), Then.SKIP),
        (TimeoutError(), Policy(after_crash=probe), Then.ASK),
        (TimeoutError(), Policy(after_crash="hold", final_errors=(TimeoutError,)), Then.FAIL),
        (ExceptionGroup("two", [ValueError(), TimeoutError()]), Policy(after_crash="hold"), Then.HOLD),
        (KeyboardInterrupt(), Policy(), Then.RELEASE),
        (KeyboardInterrupt(), Policy(after_crash="hold"), Then.LEAVE),
        (KeyboardInterrupt(), Policy(after_crash=probe), Then.LEAVE),
        (ClaimLost(), Policy(), Then.LEAVE),
    ],
)
def test_what_follows_from_how_the_handler_ended(error: BaseException | None, policy: Policy, then: Then) -> None:
    assert after(error, policy) is then


@pytest.mark.parametrize(
    ("error", "steps", "policy", "then"),
    [
        (None, StepsLeft(under_way=("pay",)), Policy(), Then.FINISH),
        (ValueError(), StepsLeft(under_way=("pay",)), Policy(final_errors=(ValueError,)), Then.FAIL),
        (ValueError(), StepsLeft(under_way=("pay",)), Policy(), Then.LEAVE),
        (ValueError(), StepsLeft(under_way=("pay",)), Policy(after_crash="hold"), Then.LEAVE),
        (TimeoutError(), StepsLeft(under_way=("pay",)), Policy(after_crash=probe), Then.LEAVE),
        (KeyboardInterrupt(), StepsLeft(under_way=("pay",)), Policy(), Then.LEAVE),
        (None, StepsLeft(interrupted=("pay",)), Policy(after_crash="hold"), Then.FINISH),
        (ValueError(), StepsLeft(interrupted=("pay",)), Policy(), Then.RELEASE),
        (ValueError(), StepsLeft(interrupted=("pay",)), Policy(after_crash="hold"), Then.HOLD),
        (ValueError(), StepsLeft(interrupted=("pay",)), Policy(after_crash="skip"), Then.SKIP),
        (ValueError(), StepsLeft(interrupted=("pay",)), Policy(after_crash=probe), Then.ASK),
        (
            ValueError(),
            StepsLeft(interrupted=("pay",)),
            Policy(after_crash="hold", final_errors=(ValueError,)),
            Then.FAIL,
        ),
        (KeyboardInterrupt(), StepsLeft(interrupted=("pay",)), Policy(), Then.RELEASE),
        (KeyboardInterrupt(), StepsLeft(interrupted=("pay",)), Policy(after_crash="hold"), Then.LEAVE),
        (ValueError(), StepsLeft(unbegun=("pay",)), Policy(after_crash="hold"), Then.RELEASE),
    ],
)
def test_what_follows_from_the_steps_that_a_handler_has_left(
    error: BaseException | None, steps: StepsLeft, policy: Policy, then: Then
) -> None:
    assert after(error, policy, steps) is then


NO_STEPS = StepsLeft()
ENDINGS: tuple[tuple[BaseException | None, StepsLeft], ...] = (
    (None, NO_STEPS),
    (ClaimLost(), NO_STEPS),
    (KeyError(), NO_STEPS),
    (ValueError(), StepsLeft(under_way=("pay",))),
    (KeyboardInterrupt(), NO_STEPS),
    (TimeoutError(), NO_STEPS),
    (ValueError(), NO_STEPS),
)


def test_a_row_about_a_handler_decides_under_those_ways_that_it_names() -> None:
    decides: dict[After, set[str]] = {row: set() for row in AFTER}
    for (error, steps), way in itertools.product(ENDINGS, (*AFTER_CRASH, probe)):
        policy = Policy(after_crash=way, final_errors=(KeyError,))
        decides[next(row for row in AFTER if row.holds(error, policy, steps))].add("a probe" if way is probe else way)

    for row, ways in decides.items():
        assert ways == ({*AFTER_CRASH, "a probe"} if row.under == "any" else set(row.under.split(", "))), row.ended


def test_an_exception_can_be_named_without_importing_its_library() -> None:
    import httpx

    assert is_one_of(httpx.ReadTimeout("slow"), Policy().ambiguous_errors)
    assert not is_one_of(httpx.InvalidURL("no"), Policy().ambiguous_errors)


@pytest.mark.parametrize(
    ("answer", "attempt", "then"),
    [(Done(1), 9, Then.FINISH), (NotDone(), 4, Then.RUN), (NotDone(), 5, Then.HOLD), (Unknown(), 1, Then.HOLD)],
)
def test_what_follows_from_the_answer_of_a_probe(answer: Any, attempt: int, then: Then) -> None:
    assert probed(answer, attempt, Policy(after_crash=probe)) is then


def test_marking_held_keeps_the_token_of_the_owner_and_stays_forever() -> None:
    held = entry(Then.HOLD, record(notes=b"log"), DeliveryRequest(ADDRESS), Policy(after_crash="hold"), b"new")

    assert (held.token, held.state, held.ttl, held.notes) == (b"t" * 16, State.HELD, math.inf, b"log")


@pytest.mark.parametrize(
    ("policy", "ttl"),
    [
        (Policy(lease=30, keep=100), 130.0),
        (Policy(lease=30, keep=100, after_crash="skip"), 130.0),
        (Policy(after_crash="hold"), math.inf),
        (Policy(after_crash=probe), math.inf),
        (Policy(rerun_within="1h"), math.inf),
    ],
)
def test_what_may_end_up_held_never_expires_before(policy: Policy, ttl: float) -> None:
    assert ttl_running(policy) == ttl


def test_a_clean_failure_leaves_nothing_and_any_other_leaves_its_attempts_and_steps() -> None:
    first = Entry(address=ADDRESS, token=b"t")
    second = Entry(address=ADDRESS, token=b"t", attempt=2)

    clean = released(first, ValueError(), None, Policy())
    later = released(second, ValueError(), None, Policy())
    stepped = released(first, ValueError(), b"log", Policy())
    forgetful = released(first, TimeoutError(), None, Policy(rerun_within="1h"))

    assert clean is None
    assert later is not None
    assert later.attempt == 2
    assert stepped is not None
    assert stepped.notes == b"log"
    assert forgetful is not None
    assert forgetful.ttl == math.inf


def test_every_row_that_changes_a_record_is_drawn() -> None:
    changing = {Then.RUN_AGAIN, Then.TAKE_OVER, Then.HOLD, Then.SKIP, Then.ASK}

    drawn = list(transitions())

    assert len(drawn) == 1 + sum(row.then in changing for row in FOUND) + len(AFTER)


@pytest.mark.parametrize(
    ("age", "says"), [(3_599.0, "all 5 attempts were abandoned"), (3_600.0, "rerun_within=3600s has passed")]
)
def test_the_reason_of_a_hold_is_the_one_that_led_to_it(age: float, says: str) -> None:
    assert says in why_held(record(age=age, attempt=5), Policy(rerun_within=3_600))


@pytest.mark.parametrize(("before", "kept"), [(b"of the first", b"of the first"), (None, b"of the bypass")])
def test_a_bypass_keeps_the_fingerprint_of_what_it_found(before: bytes | None, kept: bytes) -> None:
    """Its duplicates are those of the first delivery."""
    of_a_bypass = Entry(address=ADDRESS, token=b"b" * 16, fingerprint=b"of the bypass")

    assert carrying(of_a_bypass, record(State.DONE, fingerprint=before)).fingerprint == kept


def test_what_a_bypass_found_grows_older_while_the_bypass_runs() -> None:
    running = carrying(Entry(address=ADDRESS, token=b"b" * 16), record(State.DONE, age=100.0, ttl_left=1_000.0))

    ended = finished(record(bypasses=running.bypasses, notes=running.notes, age=30.0))

    assert ended is not None
    assert (ended.state, ended.age, ended.ttl_left, ended.bypasses) == (State.DONE, 130.0, 970.0, 0)


def test_the_history_of_a_record_is_its_remark_and_those_before_it() -> None:
    assert record().history == ()
    assert record(remark="no answer").history == ("no answer",)
    assert record(remark=f"{RESOLVED}done by ada{BEFORE}no answer").history == (f"{RESOLVED}done by ada", "no answer")
