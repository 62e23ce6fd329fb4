"""Rows 23 and 24 of the edge cases: the store is down before the handler, or fails after the effect happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from onefold import (
    AsyncGuard,
    ClaimLost,
    Guard,
    Held,
    Policy,
    State,
    StoreUnavailable,
    current,
)
from onefold._model import Claim, Entry
from onefold.keys import address
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import (
    EVERYTHING,
    AsyncProxyStore,
    Clock,
    Elsewhere,
    Handler,
    Heard,
    ProxyStore,
)

CHARGE = address("charge", "pay_1")

RUN = Policy(store_down="run")

Stall = Callable[[float], None]


@pytest.fixture
def store() -> ProxyStore:
    return ProxyStore(MemoryStore(clock=Clock()))


@pytest.fixture
def heard() -> Heard:
    return Heard()


async def ok() -> str:
    return "ok"


# Row 23.


def test_a_store_that_is_down_refuses_by_default_and_nothing_runs(store: ProxyStore, heard: Heard) -> None:
    store.die()
    handler = Handler()

    with pytest.raises(StoreUnavailable) as refusal:
        Guard(store, on_event=heard).run("charge", "pay_1", handler)

    assert handler.starts == 0
    assert "did not run; deliver it again" in "".join(refusal.value.__notes__)
    assert CHARGE.digest in "".join(refusal.value.__notes__)
    assert heard.kinds == ["store_failed", "refused"]


def test_a_store_that_is_down_refuses_when_async_too() -> None:
    store = AsyncProxyStore()
    store.die()

    with pytest.raises(StoreUnavailable):
        asyncio.run(AsyncGuard(store).run("charge", "pay_1", ok))


def test_once_the_store_is_back_the_refused_delivery_runs(store: ProxyStore) -> None:
    guard = Guard(store)
    store.die()
    with pytest.raises(StoreUnavailable):
        guard.run("charge", "pay_1", Handler())

    store.down.clear()
    outcome = guard.run("charge", "pay_1", Handler("at last"))

    assert (outcome.value, outcome.attempt, outcome.replayed) == ("at last", 1, False)


def test_by_policy_it_runs_without_a_store_and_says_so(store: ProxyStore, heard: Heard) -> None:
    store.die()
    guard = Guard(store, policy=RUN, on_event=heard)

    outcome = guard.run("charge", "pay_1", lambda: (current().key_for("gateway"), current().lost))

    assert (outcome.protected, outcome.recorded, outcome.replayed) == (False, False, False)
    assert heard.kinds == ["store_failed", "unprotected"]
    store.down.clear()
    assert guard.run("charge", "pay_1", lambda: current().key_for("gateway")).value == outcome.value[0]
    assert outcome.value[1] is False


def test_by_policy_it_runs_without_a_store_when_async_too() -> None:
    store = AsyncProxyStore()
    store.die()

    outcome = asyncio.run(AsyncGuard(store, policy=RUN).run("charge", "pay_1", ok))

    assert (outcome.value, outcome.protected, outcome.recorded) == ("ok", False, False)


def test_an_error_in_an_unprotected_run_surfaces_as_it_is(store: ProxyStore) -> None:
    store.die()
    error = ValueError("no such card")

    with pytest.raises(ValueError, match="no such card") as raised:
        Guard(store, policy=RUN).run("charge", "pay_1", Handler(error=error))

    assert raised.value is error
    assert error.__context__ is None


def test_seen_mode_refuses_or_runs_by_the_same_rule(store: ProxyStore) -> None:
    store.die()
    seen = Policy(mode="seen")

    with pytest.raises(StoreUnavailable):
        Guard(store, policy=seen).run("charge", "pay_1", pytest.fail)

    assert not Guard(store, policy=seen.replace(store_down="run")).run("charge", "pay_1", Handler()).protected


def test_a_batch_without_a_store_runs_each_message_unprotected_or_refuses_each(store: ProxyStore) -> None:
    store.die()

    refused = Guard(store).run_batch("charge", [1, 2], key=int, handler=Handler())
    ran = Guard(store, policy=RUN).run_batch("charge", [1, 2], key=int, handler=str)

    assert [type(result) for result in refused] == [StoreUnavailable, StoreUnavailable]
    assert [(one.value, one.protected) for one in ran if not isinstance(one, Exception)] == [("1", False), ("2", False)]


# Row 24.


def test_a_finish_that_fails_is_tried_again_and_the_result_is_remembered(store: ProxyStore, heard: Heard) -> None:
    guard = Guard(store, on_event=heard)
    store.down = {"finish"}

    def comes_back() -> None:
        store.before["finish"] = store.down.clear

    store.before["finish"] = comes_back
    outcome = guard.run("charge", "pay_1", Handler("paid"))

    assert (outcome.value, outcome.recorded, store.calls["finish"]) == ("paid", True, 2)
    assert heard.kinds == ["started", "store_failed", "finished"]
    assert guard.run("charge", "pay_1", pytest.fail).replayed


def test_an_effect_that_cannot_be_remembered_is_returned_and_marked_so(
    store: ProxyStore, heard: Heard, stall: Stall
) -> None:
    guard = Guard(store, on_event=heard)

    def handler() -> str:
        store.die()
        # It is tried again, and then the lease is over.
        store.before["finish"] = lambda: store.before.update(finish=lambda: stall(31))
        return "paid"

    outcome = guard.run("charge", "pay_1", handler)

    assert (outcome.value, outcome.recorded, outcome.protected) == ("paid", False, True)
    assert store.calls["finish"] == 2
    # A beat may fail too, whenever it comes.
    assert [kind for kind in heard.kinds if kind != "store_failed"] == ["started", "not_recorded"]


def told_of_it(caplog: pytest.LogCaptureFixture) -> int:
    """How many warnings say that an effect is not remembered, and of which key."""
    digest = address("charge", "pay_1").digest
    message = [line.getMessage() for line in caplog.records if line.levelname == "WARNING" and line.name == "onefold"]
    return sum(digest in line and "could not record it in time" in line for line in message)


def test_an_effect_that_cannot_be_remembered_is_returned_when_async_too(
    stall: Stall, caplog: pytest.LogCaptureFixture
) -> None:
    store, heard = AsyncProxyStore(), Heard()

    async def handler() -> str:
        store.die()
        store.before["finish"] = lambda: store.before.update(finish=lambda: stall(31))
        return "paid"

    outcome = asyncio.run(AsyncGuard(store, on_event=heard).run("charge", "pay_1", handler))

    assert (outcome.value, outcome.recorded, store.calls["finish"]) == ("paid", False, 2)
    assert told_of_it(caplog) == 1
    # A beat may fail too, whenever it comes.
    assert [kind for kind in heard.kinds if kind != "store_failed"] == ["started", "not_recorded"]


def test_a_finish_that_fails_for_ever_ends_although_the_heartbeat_still_gets_through(store: ProxyStore) -> None:
    # A result that the database refuses, say: renewing the lease works, and finishing never will.
    store.down = {"finish"}
    # Finishing is tried again for nearly a lease, so that this is about how long this test takes.
    guard = Guard(store, policy=Policy(lease=1.0))

    running = Elsewhere(lambda: guard.run("charge", "pay_1", Handler("paid")))
    try:
        outcome = running.result()
    finally:
        store.down.clear()

    assert (outcome.value, outcome.recorded) == ("paid", False)


def test_while_finishing_is_tried_again_the_heartbeat_goes_on(long_lease: float) -> None:
    store = ProxyStore(MemoryStore())
    guard = Guard(store, policy=Policy(lease=long_lease))
    store.down = {"finish"}

    def second_try() -> None:
        store.wait_for("extend", store.count("extend") + 1)
        store.down.clear()

    store.before["finish"] = lambda: store.before.update(finish=second_try)
    outcome = guard.run("charge", "pay_1", Handler("paid"))

    assert (outcome.value, outcome.recorded) == ("paid", True)


def test_any_error_of_the_store_after_the_effect_is_no_failure_of_the_effect(store: ProxyStore) -> None:
    def broken() -> None:
        raise OSError("a driver's own error")

    store.before["finish"] = broken
    outcome = Guard(store).run("charge", "pay_1", Handler("paid"))

    assert (outcome.value, outcome.recorded) == ("paid", True)


def test_a_finish_whose_reply_got_lost_is_no_lost_claim(store: ProxyStore) -> None:
    store.reply_lost = {"finish"}
    store.after["finish"] = lambda: store.before.update(finish=store.reply_lost.clear)

    outcome = Guard(store).run("charge", "pay_1", Handler("paid"))

    assert (outcome.value, outcome.recorded, store.calls["finish"]) == ("paid", True, 2)


def test_a_handlers_own_error_surfaces_although_the_release_fails(store: ProxyStore, heard: Heard) -> None:
    store.down = {"release"}
    error = ValueError("no such card")

    with pytest.raises(ValueError, match="no such card") as raised:
        Guard(store, on_event=heard).run("charge", "pay_1", Handler(error=error))

    assert raised.value is error
    assert error.__context__ is None
    assert heard.kinds == ["started", "store_failed"]


def test_a_hold_that_cannot_be_written_is_found_after_the_lease_all_the_same(stall: Stall) -> None:
    clock = Clock()
    store = ProxyStore(MemoryStore(clock=clock))
    guard = Guard(store, policy=Policy(after_crash="hold"))

    def handler() -> Any:
        store.die()
        store.before["finish"] = lambda: stall(31)
        raise TimeoutError("no answer")

    with pytest.raises(TimeoutError, match="no answer"):
        guard.run("charge", "pay_1", handler)
    store.down.clear()
    clock.advance(31)

    with pytest.raises(Held):
        guard.run("charge", "pay_1", pytest.fail)


def test_a_result_finished_after_another_took_over_is_a_lost_claim_not_a_lost_result(store: ProxyStore) -> None:
    def another_takes_over() -> None:
        found = store.inner.read(CHARGE)
        assert found is not None
        store.inner.release(Claim(CHARGE, found.token))
        store.inner.claim(Entry(address=CHARGE, token=b"another's token.", lease=30))
        store.down.clear()

    store.down = {"finish"}
    store.before["finish"] = lambda: store.before.update(finish=another_takes_over)

    with pytest.raises(ClaimLost) as lost:
        Guard(store).run("charge", "pay_1", Handler("paid"))

    assert lost.value.value == "paid"
    found = store.inner.read(CHARGE)
    assert found is not None
    assert found.state is State.RUNNING


def test_seen_mode_returns_the_value_although_it_cannot_be_written_down(
    heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    store = AsyncProxyStore(AsyncMemoryStore())
    store.down = {*EVERYTHING} - {"read"}

    outcome = asyncio.run(
        AsyncGuard(store, policy=Policy(mode="seen"), on_event=heard).run("charge", "pay_1", ok),
    )

    assert (outcome.value, outcome.recorded) == ("ok", False)
    assert heard.kinds == ["started", "store_failed", "store_failed", "store_failed", "not_recorded"]
    assert told_of_it(caplog) == 1
