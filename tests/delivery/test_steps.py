"""Once `step()` has returned, no later attempt runs that step again: it returns when its log is kept, or raises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Held, OutcomeUnknown, Policy, State, StoreUnavailable, current
from onefold._model import Claim
from onefold.keys import address
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import AsyncProxyStore, Clock, Handler, Heard, ProxyStore

CHARGE = address("charge", "pay_1")

Stall = Callable[[float], None]


class Store(ProxyStore):
    """Keeping a log is one thing, a heartbeat another."""

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return super().extend(claim) if notes is None else self.ask("log", lambda: self.inner.extend(claim, notes))

    def die(self) -> None:
        super().die()
        self.down.add("log")


class AsyncStore(AsyncProxyStore):
    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        if notes is None:
            return await super().extend(claim)
        return await self.ask("log", lambda: self.inner.extend(claim, notes))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    return Store(MemoryStore(clock=clock))


def losing(store: Store | AsyncStore, stall: Stall, *, back: bool) -> Callable[[], None]:
    """The store is away from now on, until the lease is over; `back`: then it answers again."""

    def lose() -> None:
        store.down.add("log")
        store.before["log"] = lambda: store.before.update(log=over)

    def over() -> None:
        stall(31)
        if not back:
            store.die()

    return lose


def taking(steps: list[str], lose: Callable[[], None]) -> Callable[[], Any]:
    """A handler of two steps, whose store goes away during the first one, the first time."""

    def pay() -> str:
        steps.append("pay")
        if len(steps) == 1:
            lose()
        return "paid"

    def handler() -> str:
        paid = current().step("pay", pay)
        current().step("ship", lambda: steps.append("ship"))
        return f"{paid} and shipped"

    return handler


def test_a_log_that_is_kept_late_is_kept(store: Store) -> None:
    steps: list[str] = []

    def lose() -> None:
        store.down.add("log")
        # It is back when it is asked for the second time.
        store.before["log"] = lambda: store.before.update(log=store.down.clear)

    outcome = Guard(store).run("charge", "pay_1", taking(steps, lose))

    assert (outcome.value, steps) == ("paid and shipped", ["pay", "ship"])


def test_a_log_that_cannot_be_kept_stops_the_handler_and_the_next_attempt_knows_the_step(
    store: Store, stall: Stall
) -> None:
    steps: list[str] = []
    heard = Heard()
    guard, handler = Guard(store, on_event=heard), taking(steps, losing(store, stall, back=True))

    with pytest.raises(OutcomeUnknown, match=rf"charge \[key {CHARGE.digest}\]: the step 'pay' has run") as raised:
        guard.run("charge", "pay_1", handler)
    store.down.clear()

    assert isinstance(raised.value.__cause__, StoreUnavailable)
    assert steps == ["pay"]
    assert "not_recorded" in heard.kinds
    assert guard.run("charge", "pay_1", handler).value == "paid and shipped"
    assert steps == ["pay", "ship"]


def test_a_run_that_dies_with_its_store_repeats_only_the_step_that_did_not_return(
    store: Store, clock: Clock, stall: Stall
) -> None:
    steps: list[str] = []
    guard, handler = Guard(store), taking(steps, losing(store, stall, back=False))

    with pytest.raises(OutcomeUnknown):
        guard.run("charge", "pay_1", handler)
    store.down.clear()
    clock.advance(31)
    guard.run("charge", "pay_1", handler)

    assert steps == ["pay", "pay", "ship"]


@pytest.mark.parametrize("back", [True, False])
def test_under_hold_a_person_is_asked(store: Store, clock: Clock, stall: Stall, *, back: bool) -> None:
    steps: list[str] = []
    guard = Guard(store, policy=Policy(after_crash="hold"))
    handler = taking(steps, losing(store, stall, back=back))

    with pytest.raises(OutcomeUnknown):
        guard.run("charge", "pay_1", handler)
    store.down.clear()
    clock.advance(31)
    with pytest.raises(Held):
        guard.run("charge", "pay_1", handler)

    found = store.inner.read(CHARGE)
    assert found is not None
    assert (found.state, steps) == (State.HELD, ["pay"])


def test_an_error_of_the_store_that_stays_is_raised_although_the_heartbeat_gets_through(store: Store) -> None:
    """Notes that the database refuses, say: renewing works, and keeping the log never will."""
    steps: list[str] = []

    def handler() -> None:
        current().step("pay", lambda: steps.append("pay"))
        steps.append("went on")

    store.ask = refusing(store.ask)  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown, match="ValueError: an item of more than 400 KB"):
        Guard(store, policy=Policy(lease=0.3)).run("charge", "pay_1", handler)
    assert steps == ["pay"]


def test_a_step_that_is_taken_again_in_the_same_run_returns_only_once_its_log_is_kept(store: Store) -> None:
    steps: list[str] = []
    kept: list[bytes | None] = []

    def handler() -> None:
        with pytest.raises(OutcomeUnknown):
            current().step("pay", lambda: steps.append("pay"))
        with pytest.raises(OutcomeUnknown):
            current().step("pay", lambda: steps.append("pay"))
        store.ask = ask  # type: ignore[method-assign]
        current().step("pay", lambda: steps.append("pay"))
        found = store.inner.read(CHARGE)
        assert found is not None
        kept.append(found.notes)

    ask = store.ask
    store.ask = refusing(store.ask)  # type: ignore[method-assign]
    Guard(store, policy=Policy(lease=0.3)).run("charge", "pay_1", handler)

    assert steps == ["pay"]
    assert kept[0] is not None
    assert b"pay" in kept[0]


def refusing(ask: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(operation: str, send: Callable[[], Any]) -> Any:
        if operation == "log":
            raise ValueError("an item of more than 400 KB")
        return ask(operation, send)

    return refuse


def test_the_same_async(clock: Clock, stall: Stall) -> None:
    store = AsyncStore(AsyncMemoryStore(clock=clock))
    pay = Handler("paid")
    lose = losing(store, stall, back=True)

    async def paying() -> Any:
        if not pay.starts:
            lose()
        return pay()

    async def handler() -> Any:
        return await current().step("pay", paying)

    async def story() -> Any:
        guard = AsyncGuard(store)
        with pytest.raises(OutcomeUnknown, match="the step 'pay' has run"):
            await guard.run("charge", "pay_1", handler)
        store.down.clear()
        return await guard.run("charge", "pay_1", handler)

    assert (asyncio.run(story()).value, pay.starts) == ("paid", 1)
