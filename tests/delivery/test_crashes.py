"""After a crash: attempts and time that run out, runs that are skipped, probes that are asked; and seen mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onefold import (
    Done,
    Guard,
    Held,
    NotDone,
    Policy,
    ProbeFailed,
    Record,
    ResultNotKept,
    State,
    Unknown,
    UsageError,
    current,
)
from onefold.keys import address
from onefold.stores.memory import MemoryStore
from tests.support import YEAR, Clock, Handler, Heard, die_running, elsewhere

CHARGE = address("charge", "pay_1")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


def record(store: MemoryStore) -> Record:
    found = store.read(CHARGE)
    assert found is not None
    return found


def charge(guard: Guard, call: Callable[[], Any] = lambda: "ok", **options: Any) -> Any:
    return guard.run("charge", "pay_1", call, **options)


# Attempts and time.


def test_attempts_that_are_used_up_end_held(clock: Clock, store: MemoryStore) -> None:
    policy = Policy(max_attempts=2)
    for _ in range(2):
        die_running(store, "charge", "pay_1", policy)
        clock.advance(31)

    with pytest.raises(Held, match="all 2 attempts were abandoned, and max_attempts=2"):
        charge(Guard(store, policy=policy), pytest.fail)

    clock.advance(10 * YEAR)
    assert record(store).state is State.HELD


def test_past_the_providers_memory_nothing_runs_again_and_nothing_expires_before(clock: Clock) -> None:
    policy = Policy(rerun_within="24h", keep="1h")

    for hours, answer in ((23, "ok"), (25, Held), (24 * 3650, Held)):
        store = MemoryStore(clock=clock)
        guard = Guard(store, policy=policy)
        die_running(store, "charge", "pay_1", policy)
        with pytest.raises(TimeoutError):
            guard.run("charge", "pay_2", Handler(error=TimeoutError()))
        clock.advance(hours * 3_600)
        store.purge(100)
        for key in ("pay_1", "pay_2"):
            if answer == "ok":
                assert guard.run("charge", key, Handler()).attempt == 2
            else:
                with pytest.raises(Held, match="rerun_within"):
                    guard.run("charge", key, pytest.fail)


# Skipped.


def test_under_skip_an_abandoned_run_counts_as_done_without_a_result(clock: Clock, store: MemoryStore) -> None:
    heard = Heard()
    policy = Policy(after_crash="skip")
    guard = Guard(store, policy=policy, on_event=heard)
    die_running(store, "charge", "pay_1", policy)
    clock.advance(31)

    outcomes = [charge(guard, pytest.fail) for _ in range(2)]
    with pytest.raises(TimeoutError):
        guard.run("charge", "pay_2", Handler(error=TimeoutError()))

    assert [(outcome.replayed, outcome.omitted) for outcome in outcomes] == [(True, True)] * 2
    assert guard.run("charge", "pay_2", pytest.fail).omitted
    assert heard.kinds[:2] == ["skipped", "replayed"]


def test_a_skipped_function_without_a_result_has_nothing_to_miss(clock: Clock, store: MemoryStore) -> None:
    skip = Policy(after_crash="skip")
    for operation in ("mail", "charge"):
        die_running(store, operation, "1", skip)
    clock.advance(31)

    @Guard(store, policy=skip).idempotent("mail", key="number", fingerprint=None)
    def mail(number: int) -> None:
        pytest.fail("it ran")

    @Guard(store, policy=skip).idempotent("charge", key="number", fingerprint=None)
    def charge(number: int) -> str:
        pytest.fail("it ran")

    mail(1)
    with pytest.raises(ResultNotKept, match="skipped: attempt 1 was abandoned"):
        charge(1)


# Probed.


def probed(clock: Clock, store: MemoryStore, answer: Any, **options: Any) -> tuple[Guard, Handler]:
    """A guard with this probe, and an abandoned charge to ask about."""
    probe = answer if isinstance(answer, Handler) else Handler(answer)
    guard = Guard(store, policy=Policy(after_crash=probe, **options))
    die_running(store, "charge", "pay_1", guard.policy)
    clock.advance(31)
    return guard, probe


def test_a_probe_that_says_done_finishes_and_replays(clock: Clock, store: MemoryStore) -> None:
    guard, probe = probed(clock, store, Done("receipt"))

    outcomes = [charge(guard, pytest.fail) for _ in range(2)]

    assert [(outcome.value, outcome.replayed) for outcome in outcomes] == [("receipt", True)] * 2
    assert probe.starts == 1


def test_a_probe_that_says_not_done_lets_it_run_and_one_that_cannot_say_holds(clock: Clock, store: MemoryStore) -> None:
    guard, _ = probed(clock, store, NotDone())
    ran = charge(guard, lambda: current().attempt)
    guard.forget("charge", "pay_1")
    guard, _ = probed(clock, store, Unknown())

    with pytest.raises(Held, match="the probe could not say"):
        charge(guard, pytest.fail)

    assert (ran.value, ran.replayed) == (2, False)
    assert record(store).state is State.HELD


def test_a_probe_is_told_whom_to_ask_about(clock: Clock, store: MemoryStore) -> None:
    asked: list[tuple[str, str]] = []

    def probe(inside: Any) -> Any:
        asked.append((inside.key, inside.key_for("bank")))
        assert current() is inside
        return NotDone()

    guard = Guard(store, policy=Policy(after_crash=probe))
    die_running(store, "charge", "pay_1", guard.policy)
    clock.advance(31)
    outcome = charge(guard, lambda: current().key_for("bank"))

    assert asked == [("pay_1", outcome.value)]


def test_a_probe_that_raises_is_asked_again_at_once(clock: Clock, store: MemoryStore) -> None:
    guard, probe = probed(clock, store, Handler(error=OSError("no route")))

    for _ in range(2):
        with pytest.raises(ProbeFailed):
            charge(guard, pytest.fail)
    probe.error, probe.value = None, Done("receipt")

    assert charge(guard, pytest.fail).value == "receipt"


def test_questions_of_a_probe_are_not_starts_of_the_handler(clock: Clock, store: MemoryStore) -> None:
    guard, probe = probed(clock, store, Handler(error=OSError("no route")), max_attempts=2)
    for _ in range(3):
        with pytest.raises(ProbeFailed):
            charge(guard, pytest.fail)

    probe.error, probe.value = None, NotDone()

    assert charge(guard, lambda: current().attempt).value == 2


def test_a_probe_that_says_not_done_does_not_outlast_the_attempts(clock: Clock, store: MemoryStore) -> None:
    guard, _ = probed(clock, store, NotDone(), max_attempts=1)

    with pytest.raises(Held, match="the attempts are used up"):
        charge(guard, pytest.fail)


def test_a_probe_that_answers_nothing_is_told_what_to_answer(clock: Clock, store: MemoryStore) -> None:
    guard, _ = probed(clock, store, True)

    with pytest.raises(UsageError, match=r"a probe answers Done\(value\), NotDone\(\) or Unknown\(\), not True"):
        charge(guard, pytest.fail)


# Seen.


def test_what_is_only_seen_runs_once_and_costs_no_claim(store: MemoryStore) -> None:
    guard = Guard(store, policy=Policy(mode="seen"))

    first = charge(guard, lambda: store.read(CHARGE) is None)
    again = charge(guard, pytest.fail)

    assert [(one.value, one.replayed) for one in (first, again)] == [(True, False), (True, True)]


def test_what_is_only_seen_runs_again_after_a_failure_or_beside_another(store: MemoryStore) -> None:
    guard = Guard(store, policy=Policy(mode="seen"))
    with pytest.raises(ValueError, match="card"):
        charge(guard, Handler(error=ValueError("card")))

    def beside() -> str:
        assert elsewhere(lambda: charge(guard, Handler("theirs"))).value == "theirs"
        return "mine"

    assert charge(guard, beside).value == "mine"
    assert charge(guard, pytest.fail).value == "theirs"
