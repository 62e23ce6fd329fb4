"""A measured store is the store that it measures, with its powers and its errors, and each call is timed."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onefold import TX, AsyncGuard, Guard, StoreUnavailable, UsageError
from onefold.metrics import measured
from onefold.metrics.timing import Timing, subscribe
from onefold.stores.base import AsyncBatching, AsyncBrowsable, Batching, Browsable, Inspectable, Joinable, Store
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from onefold.testing import AsyncStoreContract, Clock, StoreContract
from tests.support import ProxyStore


@pytest.fixture
def timings() -> Iterator[list[Timing]]:
    found: list[Timing] = []
    end = subscribe(found.append)
    yield found
    end()


class TestMeasuredMemory(StoreContract):
    """All of a store's promises hold through the measuring one."""

    rounds = 1

    @pytest.fixture(autouse=True)
    def _clock(self) -> None:
        self.clock = Clock()

    def open_store(self) -> Any:
        return measured(MemoryStore(clock=self.clock))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


class TestMeasuredAsyncMemory(AsyncStoreContract):
    """The async counterpart."""

    rounds = 1

    @pytest.fixture(autouse=True)
    def _clock(self) -> None:
        self.clock = Clock()

    def open_store(self) -> Any:
        return measured(AsyncMemoryStore(clock=self.clock))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


def test_each_call_is_timed_under_the_name_of_its_store(timings: list[Timing]) -> None:
    guard = Guard(measured("memory:", name="money"))

    guard.run("charge", "pay_1", lambda: 1)

    assert [(one.store, one.call, one.failed) for one in timings] == [
        ("money", "claim", False),
        ("money", "finish", False),
    ]
    assert all(0 <= one.seconds < 60 for one in timings)


def test_a_call_that_fails_is_timed_and_raises_what_it_raised(timings: list[Timing]) -> None:
    inside = ProxyStore(MemoryStore())
    inside.die()

    with pytest.raises(StoreUnavailable, match="did not answer to claim"):
        Guard(measured(inside)).run("charge", "pay_1", lambda: 1)

    assert timings[0].call == "claim"
    assert timings[0].failed


def test_an_async_store_is_timed_while_it_is_async(timings: list[Timing]) -> None:
    async def deliver() -> Any:
        return await AsyncGuard(measured(AsyncMemoryStore(), name="money")).run("charge", "pay_1", one)

    async def one() -> int:
        return 1

    assert asyncio.run(deliver()).value == 1
    assert [(timing.store, timing.call) for timing in timings] == [("money", "claim"), ("money", "finish")]


def test_a_batch_is_one_call(timings: list[Timing]) -> None:
    Guard(measured("memory:")).run_batch("charge", ["a", "b", "c"], key=str, handler=str)

    assert [timing.call for timing in timings] == ["claim_all", "close_all"]


def test_it_has_the_powers_of_the_store_inside_and_no_others(tmp_path: Path) -> None:
    sqlite: Any = measured(f"sqlite:///{tmp_path}/records.db")
    memory, poor = measured("memory:"), measured(Poor())
    is_async = measured("memory:", is_async=True)

    assert isinstance(sqlite, Store)
    assert isinstance(sqlite, Joinable)
    assert not isinstance(memory, Joinable)
    assert isinstance(memory, Batching)
    assert isinstance(memory, Browsable)
    assert isinstance(memory, Inspectable)
    assert not isinstance(poor, Batching)
    assert not isinstance(poor, Browsable)
    assert not isinstance(poor, Inspectable)
    assert isinstance(is_async, AsyncBatching)
    assert isinstance(is_async, AsyncBrowsable)
    sqlite.inner.close()  # type: ignore[attr-defined]


class Poor:
    """Six operations, and nothing else."""

    def __init__(self) -> None:
        inside = MemoryStore()
        self.inside = inside

    def claim(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside.claim(*args, **kwargs)

    extend = finish = release = read = purge = claim


@pytest.mark.parametrize("power", ["transaction", "facts", "claim_all", "browse"])
def test_a_check_for_a_power_that_asks_no_instance_finds_it(power: str, tmp_path: Path) -> None:
    """From Python 3.12 on, a check of a protocol does not ask `__getattr__`."""
    store = measured(f"sqlite:///{tmp_path}/records.db")

    assert callable(inspect.getattr_static(store, power))
    store.close()


def test_transactions_work_through_it(tmp_path: Path) -> None:
    store = measured(f"sqlite:///{tmp_path}/records.db")
    guard = Guard(store)

    @guard.transactional("credit", key="message")
    def credit(message: str, *, tx: Any = TX) -> int:
        return int(tx.execute("SELECT 1").fetchone()[0])

    assert credit("a") == 1
    assert credit.outcome("a").replayed
    guard.close()
    store.close()


def test_what_is_not_timed_is_the_stores_own(tmp_path: Path) -> None:
    store = measured(f"sqlite:///{tmp_path}/records.db")

    assert store.path.endswith("records.db")
    assert repr(store).startswith("measured(")
    store.close()


def test_a_listener_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    end = subscribe(lambda timing: 1 / 0)
    try:
        assert Guard(measured("memory:")).run("charge", "pay_1", lambda: 1).value == 1
    finally:
        end()
    end()

    assert "a listener failed on a timing" in caplog.text


def test_a_store_is_not_measured_twice() -> None:
    with pytest.raises(UsageError, match="already measured"):
        measured(measured("memory:"))
