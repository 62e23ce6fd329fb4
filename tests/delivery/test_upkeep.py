"""What a guard owes to those who keep it running: no leaks, no secrets in what is printed, records settled exactly."""

from __future__ import annotations

import gc
import math
import threading
import time
from typing import Any, NoReturn

import pytest

from onefold import (
    AsyncGuard,
    Done,
    Event,
    Guard,
    Held,
    InProgress,
    NotDone,
    Outcome,
    Policy,
    StoreUnavailable,
    UsageError,
)
from onefold._heartbeat.sync_guards import Heartbeat
from onefold.events import Teller
from onefold.keys import address
from onefold.stores.base import Claim, Entry
from onefold.stores.memory import MemoryStore
from tests.support import PATIENCE, BatchingProxyStore, Clock, Died, ProxyStore


def heartbeats() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "onefold-heartbeat"}


def test_the_thread_of_a_guard_that_was_dropped_without_a_close_ends() -> None:
    before = heartbeats()
    guard = Guard("memory:")
    guard.run("charge", "pay_1", lambda: 1)
    (thread,) = heartbeats() - before

    del guard
    gc.collect()
    thread.join(PATIENCE)

    assert not thread.is_alive()


def test_the_thread_ends_too_where_it_was_the_last_to_know_of_its_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat(lambda: None, Teller())
    ours, attend = id(heartbeat), Heartbeat.attend
    looked, dropped = threading.Event(), threading.Event()

    def slowly(self: Heartbeat, moment: float | None) -> float:
        if id(self) != ours:
            return attend(self, moment)
        looked.set()
        dropped.wait(PATIENCE)
        return math.inf

    monkeypatch.setattr(Heartbeat, "attend", slowly)
    before = heartbeats()
    heartbeat.watch([Claim(address("charge", "pay_1"), b"token", lease=3_600.0)], time.monotonic())
    (thread,) = heartbeats() - before
    assert looked.wait(PATIENCE)

    del heartbeat
    dropped.set()
    thread.join(PATIENCE)

    assert not thread.is_alive()


@pytest.mark.parametrize("kind", [Guard, AsyncGuard])
def test_a_guard_is_shown_without_its_password(kind: Any) -> None:
    shown = repr(kind("redis://user:p%40ssw0rd@host/0"))

    assert "ssw0rd" not in shown
    assert "user:***@host" in shown


def test_an_event_is_shown_with_the_digest_and_not_with_the_key() -> None:
    heard: list[Event] = []
    Guard("memory:", on_event=heard.append).run("charge", "a-secret-key", lambda: 1)

    assert "a-secret-key" not in repr(heard)
    assert heard[0].digest in repr(heard)


def hold(guard: Guard, policy: Policy) -> Any:
    """A function that times out, and so is held."""

    @guard.idempotent("charge", key="payment", policy=policy)
    def charge(payment: str) -> str:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        charge("pay_1")
    return charge


def test_a_record_is_resolved_by_the_policy_of_its_own_operation() -> None:
    guard = Guard("memory:")
    charge = hold(guard, Policy(after_crash="hold", keep="forever"))

    guard.resolve("charge", "pay_1", Done("paid"), by="maria", reason="on the statement")

    record = guard.read("charge", "pay_1")
    assert record is not None
    assert record.ttl_left == math.inf
    assert charge("pay_1") == "paid"


def test_a_value_that_cannot_be_stored_does_not_resolve_anything() -> None:
    guard = Guard("memory:")
    hold(guard, Policy(after_crash="hold"))

    with pytest.raises(UsageError, match=r"Done\(object\) cannot be stored"):
        guard.resolve("charge", "pay_1", Done(object()), by="maria", reason="why")

    record = guard.read("charge", "pay_1")
    assert record is not None
    assert record.state == "held"


def test_what_came_back_to_life_since_it_was_seen_is_not_forgotten() -> None:
    clock = Clock()
    store = ProxyStore(MemoryStore(clock=clock))
    guard = Guard(store)
    store.down = {"finish", "release"}

    def handler() -> None:
        clock.advance(31)
        record = guard.read("charge", "pay_1")
        assert record is not None
        store.before["take_over"] = lambda: store.inner.extend(Claim(record.address, record.token, 30.0, 60.0))

        with pytest.raises(InProgress):
            guard.forget("charge", "pay_1")
        store.down.clear()

    guard.run("charge", "pay_1", handler, policy=Policy(lease=30, keep=3600))


def test_an_int_is_kept_where_a_float_is_promised() -> None:
    @Guard("memory:").idempotent("rate", key="key")
    def rate(key: str) -> float:
        return 1

    assert [rate("a"), rate("a")] == [1, 1.0]


def test_a_handler_that_never_returns_can_be_guarded() -> None:
    def fail() -> NoReturn:
        raise ValueError("as promised")

    with pytest.raises(ValueError, match="as promised"):
        Guard("memory:").run("charge", "pay_1", fail)


def test_the_errors_of_a_batch_are_not_one_error() -> None:
    store = BatchingProxyStore()
    store.die()

    errors = Guard(store).run_batch("credit", [1, 2, 3], key=lambda number: number, handler=lambda number: number)

    assert [type(error) for error in errors] == [StoreUnavailable] * 3
    assert [len(getattr(error, "__notes__", ())) for error in errors] == [1, 1, 1]


def test_a_scheme_without_its_colon_is_named() -> None:
    with pytest.raises(UsageError, match="did you mean 'memory:'"):
        Guard("memory")


def test_a_claim_whose_lease_ended_before_the_handler_started_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard("memory:", policy=Policy(after_crash="hold"))
    # The worker stood still for an hour after its claim was sent.
    monkeypatch.setattr("onefold._heartbeat.clock.monotonic", lambda: time.monotonic() + 3600)

    with pytest.raises(InProgress):
        guard.run("charge", "pay_1", pytest.fail)

    assert guard.read("charge", "pay_1") is None


def test_a_start_after_a_probe_is_counted_once_though_it_was_sent_again() -> None:
    clock = Clock()
    store = ProxyStore(MemoryStore(clock=clock))
    guard = Guard(store, policy=Policy(after_crash=lambda _current: NotDone()))
    store.inner.claim(Entry(address=address("charge", "pay_1"), token=b"dead", lease=30.0))
    clock.advance(31)
    # The first take-over asks the probe, the second counts the start: its answer is lost on the way.
    store.after["take_over"] = lambda: store.after.update(take_over=interrupted)

    with pytest.raises(KeyboardInterrupt):
        guard.run("charge", "pay_1", pytest.fail)

    record = guard.read("charge", "pay_1")
    assert record is not None
    assert record.attempt == 1


def interrupted() -> None:
    raise KeyboardInterrupt


def test_a_batch_that_died_uses_up_no_attempt_of_a_message_that_had_not_started() -> None:
    clock = Clock()
    store = BatchingProxyStore(MemoryStore(clock=clock))
    guard = Guard(store, policy=Policy(max_attempts=1))

    def die(_message: str) -> None:
        store.die()
        raise Died

    with pytest.raises(Died):
        guard.run_batch("credit", ["a", "b"], key=str, handler=die)
    store.down.clear()
    clock.advance(31)

    outcomes = guard.run_batch("credit", ["a", "b"], key=str, handler=str.upper)

    assert isinstance(outcomes[0], Held)
    assert isinstance(outcomes[1], Outcome)
    assert outcomes[1].value == "B"
