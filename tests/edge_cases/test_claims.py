"""Rows 1 to 13e of the edge cases: claims, leases and zombies.

The heartbeat (2, 5, 11) and the workers (13) have files of their own.
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from onefold import (
    FOREVER,
    ClaimLost,
    Done,
    Guard,
    Held,
    InProgress,
    NotDone,
    Outcome,
    Policy,
    State,
    StoreUnavailable,
    Unknown,
    current,
)
from onefold._model import GONE, Claim, Ending, Entry, Gone, Record
from onefold.codecs import MsgspecCodec
from onefold.keys import address
from onefold.stores.memory import MemoryStore
from tests.support import (
    PATIENCE,
    YEAR,
    Clock,
    Elsewhere,
    Handler,
    Heard,
    ProxyStore,
    die_running,
    elsewhere,
)

CHARGE = address("charge", "pay_1")

# Its beats come ten seconds apart: within a test there is none, as if the worker were stopped.
STOPPED = Policy(lease="30s", keep="24h")
HOLD = STOPPED.replace(after_crash="hold", keep=FOREVER)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


def charge(guard: Guard, call: Callable[[], Any] = lambda: "ok", **options: Any) -> Outcome[Any]:
    return guard.run("charge", "pay_1", call, **options)


def record(store: MemoryStore) -> Record:
    found = store.read(CHARGE)
    assert found is not None
    return found


# Row 1.


def test_after_a_crash_the_next_delivery_runs_as_soon_as_the_lease_is_over(clock: Clock, store: MemoryStore) -> None:
    die_running(store, "charge", "pay_1", STOPPED)
    guard = Guard(store, policy=STOPPED)

    clock.advance(29.9)
    with pytest.raises(InProgress):
        charge(guard)
    clock.advance(0.2)
    outcome = charge(guard, lambda: current().attempt)

    assert (outcome.value, outcome.attempt, outcome.replayed) == (2, 2, False)


# Rows 3, 4.


def taken_over(clock: Clock, store: MemoryStore, call: Callable[[], Any] = lambda: "theirs") -> Outcome[Any]:
    """The lease of whoever runs is over, and another worker takes the claim."""
    clock.advance(31)
    return elsewhere(lambda: charge(Guard(store, policy=STOPPED), call))


def test_a_zombie_that_completes_late_is_refused_and_its_caller_is_told(clock: Clock, store: MemoryStore) -> None:
    heard = Heard()

    def zombie() -> str:
        taken_over(clock, store)
        return "mine"

    with pytest.raises(ClaimLost) as lost:
        charge(Guard(store, policy=STOPPED, on_event=heard), zombie)

    assert lost.value.value == "mine"
    assert heard.kinds == ["started", "lost"]
    assert charge(Guard(store)).value == "theirs"


def test_a_zombie_that_releases_late_leaves_the_new_owners_claim_alone(clock: Clock, store: MemoryStore) -> None:
    owned: list[Record] = []

    def zombie() -> None:
        clock.advance(31)
        owned.append(running_elsewhere(store))
        raise ValueError("no such card")

    with pytest.raises(ValueError, match="no such card"):
        charge(Guard(store, policy=STOPPED), zombie)

    assert record(store) == owned[0]


def running_elsewhere(store: MemoryStore) -> Record:
    """Another worker has taken over, and is inside its handler: the record that it owns."""
    die_running(store, "charge", "pay_1", STOPPED)
    return record(store)


# Rows 6, 7, 8.


def test_a_waiter_that_gives_up_touches_nothing(store: MemoryStore) -> None:
    die_running(store, "charge", "pay_1", STOPPED)
    before = record(store)

    with pytest.raises(InProgress):
        charge(Guard(store, policy=STOPPED.replace(wait=0.02)))

    assert record(store) == before


def test_of_many_waiters_at_one_abandoned_claim_exactly_one_takes_over(clock: Clock, store: MemoryStore) -> None:
    crowd = 8
    die_running(store, "charge", "pay_1", STOPPED)
    clock.advance(31)
    all_have_looked = threading.Barrier(crowd)
    handler = Handler("once")

    class Crowded(ProxyStore):
        def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
            if replacing is not None and replacing.attempt == 1:
                all_have_looked.wait(PATIENCE)
            return super().claim(entry, replacing=replacing)

    proxy = Crowded(store)
    guard = Guard(proxy, policy=STOPPED.replace(wait=PATIENCE))
    workers = [Elsewhere(lambda: charge(guard, handler)) for _ in range(crowd)]
    outcomes = [worker.result() for worker in workers]

    assert handler.starts == 1
    assert [outcome.value for outcome in outcomes] == ["once"] * crowd
    assert sorted(outcome.replayed for outcome in outcomes) == [False] + [True] * (crowd - 1)
    assert [answer for name, answer in proxy.answers if name == "take_over"].count(None) == 1


def test_an_owner_that_finishes_before_the_take_over_wins_and_the_waiter_replays(
    clock: Clock, store: MemoryStore
) -> None:
    owner = Claim(CHARGE, b"o" * 16)
    store.claim(Entry(address=CHARGE, token=owner.token, lease=30))
    clock.advance(31)
    proxy = ProxyStore(store)
    late = Ending(state=State.DONE, ttl=FOREVER, result=MsgspecCodec().encode("late", str))
    proxy.before["take_over"] = lambda: store.finish(owner, late)

    outcome = charge(Guard(proxy), pytest.fail)

    assert (outcome.value, outcome.replayed) == ("late", True)


# Rows 9, 13c.


def test_a_zombie_is_refused_also_after_its_successor_released_and_a_third_one_claimed(
    clock: Clock, store: MemoryStore
) -> None:
    tokens: list[str] = []

    def zombie() -> str:
        tokens.append(current().token)
        with pytest.raises(ValueError, match="second"):
            taken_over(clock, store, second)
        tokens.append(running_elsewhere(store).token.hex())
        return "mine"

    def second() -> None:
        tokens.append(current().token)
        raise ValueError("second")

    with pytest.raises(ClaimLost):
        charge(Guard(store, policy=STOPPED), zombie)

    assert len(set(tokens)) == 3
    assert (record(store).token.hex(), record(store).state) == (tokens[-1], State.RUNNING)


def test_a_take_over_of_what_was_seen_before_a_release_and_a_new_claim_is_refused(
    clock: Clock, store: MemoryStore
) -> None:
    first, third = Claim(CHARGE, b"a" * 16), Entry(address=CHARGE, token=b"c" * 16, lease=30)
    store.claim(Entry(address=CHARGE, token=first.token, lease=30))
    clock.advance(31)
    proxy = ProxyStore(store)
    # The new claim has the revision of the old one, and another token.
    proxy.before["take_over"] = lambda: (store.release(first), store.claim(third))

    with pytest.raises(InProgress):
        charge(Guard(proxy), pytest.fail)

    assert record(store).token == third.token


# Row 10.


def test_a_key_that_disappears_before_the_take_over_is_asked_for_again_and_claimed(
    clock: Clock, store: MemoryStore
) -> None:
    die_running(store, "charge", "pay_1", STOPPED)
    gone = Claim(CHARGE, record(store).token)
    clock.advance(31)
    proxy = ProxyStore(store)
    proxy.before["take_over"] = lambda: store.release(gone)

    outcome = charge(Guard(proxy), lambda: record(store).state)

    assert (outcome.value, outcome.attempt) == (State.RUNNING, 1)
    assert proxy.calls["claim"] == 2


def test_a_key_that_keeps_disappearing_is_refused_after_a_bounded_number_of_rounds(
    clock: Clock, store: MemoryStore
) -> None:
    die_running(store, "charge", "pay_1", STOPPED)
    clock.advance(31)
    rounds: list[bool] = []

    class Flickering(ProxyStore):
        def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
            rounds.append(replacing is None)
            assert len(rounds) < 100
            return self.read(entry.address) if replacing is None else GONE

    with pytest.raises(InProgress):
        charge(Guard(Flickering(store)), pytest.fail)

    assert len(rounds) == 8


# Row 12.


@pytest.mark.parametrize("error", [-10 * YEAR, 10 * YEAR])
def test_a_worker_with_a_wrong_clock_neither_steals_nor_waits_longer(
    clock: Clock, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    die_running(store, "charge", "pay_1", STOPPED)
    guard = Guard(store, policy=STOPPED)
    honest, steady = time.time, time.monotonic

    with monkeypatch.context() as worker:
        worker.setattr(time, "time", lambda: honest() + error)
        worker.setattr(time, "monotonic", lambda: steady() + error)
        worker.setattr("onefold._heartbeat.clock.monotonic", time.monotonic)
        with pytest.raises(InProgress) as refusal:
            charge(guard)
        clock.advance(30)
        outcome = charge(guard)

    assert refusal.value.retry_after <= 30
    assert outcome.attempt == 2


# Row 13a.


def test_operations_that_the_client_library_sent_again_succeed_as_one(clock: Clock, store: MemoryStore) -> None:
    proxy = ProxyStore(store)
    proxy.twice = True
    guard = Guard(proxy, policy=STOPPED)

    with pytest.raises(ValueError, match="card"):
        charge(guard, Handler(error=ValueError("card")))
    die_running(store, "charge", "pay_1", STOPPED)
    clock.advance(31)
    outcome = charge(guard)

    assert (outcome.value, outcome.attempt, outcome.recorded) == ("ok", 2, True)
    assert charge(guard).replayed


@pytest.mark.parametrize("way", [STOPPED, HOLD])
def test_a_claim_whose_reply_got_lost_leaves_nobody_busy_with_himself(
    clock: Clock, store: MemoryStore, way: Policy
) -> None:
    proxy = ProxyStore(store)
    proxy.reply_lost = {"claim"}
    guard = Guard(proxy, policy=way)

    with pytest.raises(StoreUnavailable):
        charge(guard, pytest.fail)
    proxy.reply_lost.clear()
    clock.advance(31)

    assert charge(guard).value == "ok"


# Rows 13b, 13d, 13e.


def test_what_is_held_never_expires_and_never_runs_again_by_itself(clock: Clock, store: MemoryStore) -> None:
    guard = Guard(store, policy=HOLD.replace(keep="1h"))

    die_running(store, "charge", "pay_1", guard.policy)
    for _ in range(3):
        clock.advance(10 * YEAR)
        assert store.purge(100) == 0
        with pytest.raises(Held):
            charge(guard, pytest.fail)

    assert record(store).state is State.HELD


def test_a_slow_owner_that_finishes_after_all_turns_held_into_done(clock: Clock, store: MemoryStore) -> None:
    guard = Guard(store, policy=HOLD)

    def slow() -> str:
        with pytest.raises(Held):
            taken_over_under_hold(clock, store)
        return "after all"

    outcome = charge(guard, slow)

    assert (outcome.value, outcome.recorded) == ("after all", True)
    assert charge(guard, pytest.fail).value == "after all"


def taken_over_under_hold(clock: Clock, store: MemoryStore) -> Outcome[Any]:
    clock.advance(31)
    return elsewhere(lambda: charge(Guard(store, policy=HOLD), pytest.fail))


# As a client library that was never imported here would raise it.
TRANSPORT = types.new_class("TransportError", (Exception,), {}, lambda body: body.update(__module__="httpx"))


@pytest.mark.parametrize("error", [TimeoutError, ConnectionResetError, TRANSPORT])
def test_after_a_timeout_or_connection_error_nobody_knows_and_hold_holds(
    store: MemoryStore, error: type[Exception]
) -> None:
    guard = Guard(store, policy=HOLD)

    with pytest.raises(error):
        charge(guard, Handler(error=error("no answer")))

    assert record(store).state is State.HELD
    with pytest.raises(Held, match=error.__name__):
        charge(guard, pytest.fail)


@pytest.mark.parametrize(
    ("answer", "becomes"), [(Done("receipt"), State.DONE), (NotDone(), None), (Unknown(), State.HELD)]
)
def test_after_a_timeout_a_probe_is_asked_at_once(store: MemoryStore, answer: Any, becomes: State | None) -> None:
    guard = Guard(store, policy=STOPPED.replace(after_crash=lambda _current: answer))
    surfaced: list[object] = []

    try:
        surfaced.append(charge(guard, Handler(error=TimeoutError("no answer"))).value)
    except TimeoutError as error:
        surfaced.append(str(error))

    found = store.read(CHARGE)
    assert (None if found is None else found.state) == becomes
    assert surfaced == ["receipt" if becomes is State.DONE else "no answer"]


def test_under_rerun_a_timeout_releases_and_an_ordinary_error_never_holds(store: MemoryStore) -> None:
    with pytest.raises(TimeoutError):
        charge(Guard(store, policy=STOPPED), Handler(error=TimeoutError()))
    with pytest.raises(ValueError, match="card"):
        charge(Guard(store, policy=HOLD), Handler(error=ValueError("card")))

    assert store.read(CHARGE) is None
