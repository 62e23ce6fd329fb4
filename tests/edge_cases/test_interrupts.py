"""Row 41 of the edge cases: cancellations and interrupts. What is unknown stays claimed until its lease ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Held, InProgress, Policy, State
from onefold._model import Record
from onefold.keys import address
from onefold.stores.memory import MemoryStore
from tests.support import AsyncProxyStore, Clock, Handler, ProxyStore, die_running, in_time

Stop = Callable[[], Coroutine[Any, Any, None]]

CHARGE = address("charge", "pay_1")

HOLD = Policy(after_crash="hold")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


def state(store: MemoryStore) -> State | None:
    found = store.read(CHARGE)
    return None if found is None else found.state


def interrupt() -> None:
    raise KeyboardInterrupt


# What an interrupt hits.


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_handler_is_released_under_rerun_and_left_under_hold(
    clock: Clock, store: MemoryStore, interrupt: type[BaseException]
) -> None:
    for policy in (Policy(), HOLD):
        with pytest.raises(interrupt):
            Guard(store, policy=policy).run("charge", policy.after_crash, Handler(error=interrupt()))  # type: ignore[arg-type]

    assert Guard(store).run("charge", "rerun", Handler()).attempt == 2
    with pytest.raises(InProgress):
        Guard(store, policy=HOLD).run("charge", "hold", pytest.fail)
    clock.advance(31)
    with pytest.raises(Held):
        Guard(store, policy=HOLD).run("charge", "hold", pytest.fail)


@pytest.mark.parametrize("policy", [Policy(), HOLD], ids=["rerun", "hold"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupt_inside_the_claim_gives_it_back_and_starts_nothing(
    store: MemoryStore, policy: Policy, moment: str
) -> None:
    proxy, handler = ProxyStore(store), Handler()
    getattr(proxy, moment)["claim"] = interrupt

    with pytest.raises(KeyboardInterrupt):
        Guard(proxy, policy=policy).run("charge", "pay_1", handler)

    assert handler.starts == 0
    assert store.read(CHARGE) is None


@pytest.mark.parametrize("policy", [Policy(), HOLD], ids=["rerun", "hold"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupt_inside_the_finish_loses_no_result(store: MemoryStore, policy: Policy, moment: str) -> None:
    proxy = ProxyStore(store)
    getattr(proxy, moment)["finish"] = interrupt

    with pytest.raises(KeyboardInterrupt):
        Guard(proxy, policy=policy).run("charge", "pay_1", Handler("paid"))

    assert Guard(store).run("charge", "pay_1", pytest.fail).value == "paid"


def test_an_interrupt_goes_on_whatever_the_store_then_answers(store: MemoryStore) -> None:
    proxy = ProxyStore(store)
    die_running(store, "charge", "pay_1")
    proxy.before["claim"] = interrupt

    with pytest.raises(KeyboardInterrupt):
        Guard(proxy).run("charge", "pay_1", pytest.fail)


def test_an_interrupt_while_the_store_is_down_leaves_what_is_unknown_claimed(store: MemoryStore) -> None:
    proxy = ProxyStore(store)

    def interrupt_and_die() -> None:
        proxy.die()
        raise KeyboardInterrupt

    proxy.before["finish"] = interrupt_and_die

    with pytest.raises(KeyboardInterrupt):
        Guard(proxy, policy=HOLD).run("charge", "pay_1", Handler())

    # Sent again once for the interrupt; after that nobody who pressed a key waits for a store.
    assert proxy.calls["finish"] == 2
    assert state(store) is State.RUNNING


# What a cancellation hits.


def cancelled_at(policy: Policy, prepare: Callable[[AsyncProxyStore, Stop], Any]) -> AsyncProxyStore:
    """Deliver once, and cancel the task where it calls `stop`; `prepare` arranges for that, or gives the handler."""
    store = AsyncProxyStore()

    async def ok() -> str:
        return "paid"

    async def story() -> None:
        reached = asyncio.Event()

        async def stop_here() -> None:
            reached.set()
            await asyncio.Event().wait()

        handler = prepare(store, stop_here) or ok
        delivery = asyncio.create_task(AsyncGuard(store, policy=policy).run("charge", "pay_1", handler))
        await reached.wait()
        delivery.cancel()
        with pytest.raises(asyncio.CancelledError):
            await delivery

    in_time(story())
    return store


@pytest.mark.parametrize(("policy", "becomes"), [(Policy(), State.OPEN), (HOLD, State.RUNNING)])
def test_a_handler_that_was_cancelled_is_released_under_rerun_and_left_under_hold(
    policy: Policy, becomes: State
) -> None:
    store = cancelled_at(policy, lambda _store, stop: stop)

    assert state(store.inner.sync) is becomes


@pytest.mark.parametrize("policy", [Policy(), HOLD], ids=["rerun", "hold"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_cancellation_during_the_claim_gives_it_back(policy: Policy, moment: str) -> None:
    store = cancelled_at(policy, lambda store, stop: getattr(store, moment).update(claim=stop))

    assert state(store.inner.sync) is None


@pytest.mark.parametrize("policy", [Policy(), HOLD], ids=["rerun", "hold"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_cancellation_during_the_finish_loses_no_result(policy: Policy, moment: str) -> None:
    store = cancelled_at(policy, lambda store, stop: getattr(store, moment).update(finish=stop))

    assert Guard(store.inner.sync).run("charge", "pay_1", pytest.fail).value == "paid"


def test_a_cancellation_goes_on_whatever_the_store_then_answers() -> None:
    def busy(store: AsyncProxyStore, stop: Stop) -> None:
        die_running(store.inner.sync, "charge", "pay_1")
        store.before["claim"] = stop

    store = cancelled_at(Policy(), busy)

    assert state(store.inner.sync) is State.RUNNING


def test_the_clean_up_is_shielded_from_a_second_cancellation() -> None:
    store = AsyncProxyStore()

    async def story() -> None:
        started, releasing, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handler() -> None:
            started.set()
            await asyncio.Event().wait()

        async def slowly() -> None:
            releasing.set()
            store.before["release"] = slowly_again
            await asyncio.Event().wait()

        async def slowly_again() -> None:
            await go_on.wait()

        store.before["release"] = slowly
        delivery = asyncio.create_task(AsyncGuard(store).run("charge", "pay_1", handler))
        await started.wait()
        delivery.cancel()
        await releasing.wait()
        for _ in range(3):
            delivery.cancel()
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await delivery

    in_time(story())

    assert state(store.inner.sync) is State.OPEN


def test_a_timeout_around_a_delivery_is_a_timeout_and_the_claim_is_released() -> None:
    guard = AsyncGuard("memory:")

    async def story() -> Record | None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await guard.run("charge", "pay_1", asyncio.Event().wait)
        return await guard.read("charge", "pay_1")

    found = in_time(story())

    assert found is not None
    assert (found.state, found.attempt) == (State.OPEN, 1)


def test_a_store_that_is_down_does_not_turn_a_cancellation_into_an_error() -> None:
    def down(store: AsyncProxyStore, stop: Stop) -> Any:
        async def handler() -> None:
            store.die()
            await stop()

        return handler

    store = cancelled_at(Policy(), down)

    assert state(store.inner.sync) is State.RUNNING
