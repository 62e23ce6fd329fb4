"""`Guard(new, migrate_from=old)` while the old store does not answer: nothing runs, and nothing of it is held later."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Held, Outcome, Policy, StoreUnavailable, keys
from onefold._concurrency.generators import Flow
from onefold._delivery import migration
from onefold._delivery.steps import Claiming
from onefold._model import Entry, Released, State
from onefold.stores.memory import MemoryStore
from onefold.testing.simulate import Scenario, search
from tests.support import Clock, ProxyStore

ADDRESS = keys.address("charge", "pay_7f3a")
HOLD = Policy(after_crash="hold", keep="forever")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def new(clock: Clock) -> ProxyStore:
    return ProxyStore(MemoryStore(clock=clock))


class Away(ProxyStore):
    """A store to which no connection can be had, until it is `back`."""

    back = False

    def refuse(self, operation: str) -> None:
        if not self.back:
            raise StoreUnavailable.unreached(f"no connection for {operation}")


@pytest.fixture
def old(clock: Clock) -> Away:
    return Away(MemoryStore(clock=clock))


@pytest.fixture
def guard(new: ProxyStore, old: Away) -> Guard:
    return Guard(new, migrate_from=old, policy=HOLD)


def charge() -> int:
    return 4200


def must_not_run() -> int:
    raise AssertionError("it ran")


def test_a_delivery_that_never_started_is_not_held_because_of_the_old_store(
    guard: Guard, new: ProxyStore, old: Away, clock: Clock
) -> None:
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            guard.run("charge", "pay_7f3a", must_not_run)
        clock.advance(31)

    assert new.inner.read(ADDRESS) is None
    old.back = True
    outcome = guard.run("charge", "pay_7f3a", charge)
    assert (outcome.value, outcome.attempt) == (4200, 1)


def test_messages_of_a_batch_are_given_back_each(guard: Guard, new: ProxyStore, old: Away) -> None:
    results = guard.run_batch("charge", ["a", "b"], key=str, handler=lambda _message: must_not_run())

    assert [type(result) for result in results] == [StoreUnavailable, StoreUnavailable]
    assert [new.inner.read(keys.address("charge", key)) for key in "ab"] == [None, None]
    old.back = True
    again = guard.run_batch("charge", ["a", "b"], key=str, handler=lambda _message: charge())
    assert [result.attempt for result in again if isinstance(result, Outcome)] == [1, 1]


def test_what_a_claim_took_the_place_of_is_put_back(guard: Guard, new: ProxyStore, old: Away) -> None:
    left = Entry(address=ADDRESS, token=b"t" * 16, lease=30.0)
    new.inner.claim(left)
    new.inner.release(left.as_claim(), Released(attempt=2, notes=b"\x81\xa1a\xc0", ttl=1000.0))

    with pytest.raises(StoreUnavailable):
        guard.run("charge", "pay_7f3a", must_not_run)

    found = new.inner.read(ADDRESS)
    assert found is not None
    assert (found.state, found.attempt, found.notes) == (State.OPEN, 2, b"\x81\xa1a\xc0")
    old.back = True
    assert guard.run("charge", "pay_7f3a", charge).attempt == 3


def test_a_bypass_leaves_what_was_done(guard: Guard, old: Away, new: ProxyStore) -> None:
    Guard(new).run("charge", "pay_7f3a", charge)

    with pytest.raises(StoreUnavailable):
        guard.run("charge", "pay_7f3a", must_not_run, bypass=True)

    assert guard.run("charge", "pay_7f3a", must_not_run).value == 4200


def test_if_the_claim_cannot_be_given_back_either_its_lease_ends_it(
    guard: Guard, new: ProxyStore, old: Away, clock: Clock
) -> None:
    new.down = {"release"}
    with pytest.raises(StoreUnavailable, match="no connection for read"):
        guard.run("charge", "pay_7f3a", must_not_run)

    new.down, old.back = set(), True
    clock.advance(31)
    with pytest.raises(Held):
        guard.run("charge", "pay_7f3a", must_not_run)


# On servers.


@pytest.fixture
def nowhere() -> Iterator[str]:
    """A Redis that is down: a port where nobody listens, and that nobody else gets meanwhile."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{kept.getsockname()[1]}/0"


def run(guard: Guard, handler: Callable[[], int]) -> int:
    return guard.run("charge", "pay_7f3a", handler).value


def call(guard: Guard, handler: Callable[[], int]) -> int:
    @guard.idempotent("charge", key="key")
    def pay(key: str) -> int:
        return handler()

    return pay("pay_7f3a")


def transact(guard: Guard, handler: Callable[[], int]) -> int:
    @guard.transactional("charge", key="key")
    def pay(key: str, *, tx: Any) -> int:
        return handler()

    return pay("pay_7f3a")  # type: ignore[call-arg]


def run_batch(guard: Guard, handler: Callable[[], int]) -> int:
    [result] = guard.run_batch("charge", ["pay_7f3a"], key=str, handler=lambda _message: handler())
    if isinstance(result, Exception):
        raise result
    return result.value


@pytest.mark.parametrize("deliver", [run, call, transact, run_batch])
def test_with_servers_it_runs_as_soon_as_the_old_one_is_back(
    deliver: Callable[[Guard, Callable[[], int]], int], postgres_url: str, redis_url: str, nowhere: str
) -> None:
    with Guard(postgres_url, migrate_from=nowhere, policy=HOLD) as guard, pytest.raises(StoreUnavailable):
        deliver(guard, must_not_run)

    with Guard(postgres_url, migrate_from=redis_url, policy=HOLD) as guard:
        assert guard.read("charge", "pay_7f3a") is None
        assert deliver(guard, charge) == 4200


async def run_async(guard: AsyncGuard, handler: Callable[[], int]) -> int:
    async def pay() -> int:
        return handler()

    return (await guard.run("charge", "pay_7f3a", pay)).value


async def transact_async(guard: AsyncGuard, handler: Callable[[], int]) -> int:
    @guard.transactional("charge", key="key")
    async def pay(key: str, *, tx: Any) -> int:
        return handler()

    return await pay("pay_7f3a")  # type: ignore[call-arg]


async def run_batch_async(guard: AsyncGuard, handler: Callable[[], int]) -> int:
    async def pay(_message: str) -> int:
        return handler()

    [result] = await guard.run_batch("charge", ["pay_7f3a"], key=str, handler=pay)
    if isinstance(result, Exception):
        raise result
    return result.value


@pytest.mark.parametrize("deliver", [run_async, transact_async, run_batch_async])
def test_with_servers_it_does_so_async_too(deliver: Any, postgres_url: str, redis_url: str, nowhere: str) -> None:
    async def main() -> None:
        async with AsyncGuard(postgres_url, migrate_from=nowhere, policy=HOLD) as guard:
            with pytest.raises(StoreUnavailable):
                await deliver(guard, must_not_run)
        async with AsyncGuard(postgres_url, migrate_from=redis_url, policy=HOLD) as guard:
            assert await guard.read("charge", "pay_7f3a") is None
            assert await deliver(guard, charge) == 4200

    asyncio.run(main())


@pytest.mark.parametrize("left", ["nothing", "open"])
def test_the_simulator_finds_a_claim_that_is_left(monkeypatch: pytest.MonkeyPatch, left: Any) -> None:
    def left_behind(_step: Claiming, _error: Exception) -> Flow[None]:
        return
        yield

    monkeypatch.setattr(migration, "_give_back_unread", left_behind)

    found = search(Scenario(beats=0, faults=1, after_crash="hold", migrating=left)).story
    assert found is not None
    assert found.violation == "8: nobody is in doubt whether it ran, and a fresh delivery finds it held"
