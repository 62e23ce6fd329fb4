"""The memory store: the contract sync and async, and what it alone promises."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, StoreUnavailable, UsageError
from onefold.stores.base import Address, Claim, Ending, Entry, Record, State
from onefold.stores.memory import AsyncMemoryStore, MemoryStore, Row
from onefold.testing import AsyncStoreContract, Clock, StoreContract


class TestMemoryStore(StoreContract):
    def open_store(self) -> MemoryStore:
        self.clock = Clock()
        return MemoryStore(clock=self.clock)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


class TestAsyncMemoryStore(AsyncStoreContract):
    def open_store(self) -> AsyncMemoryStore:
        self.clock = Clock()
        return AsyncMemoryStore(clock=self.clock)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


def entry(number: int, **fields: Any) -> Entry:
    return Entry(address=Address("", "operation", f"key-{number}"), token=number.to_bytes(16), **fields)


def claim_of(entry: Entry) -> Claim:
    return Claim(entry.address, entry.token, 30.0, 60.0)


DONE = Ending(state=State.DONE, ttl=60.0, result=b"result")


class TestALimit:
    def test_a_full_store_refuses_new_records_rather_than_forget_one(self) -> None:
        store = MemoryStore(limit=2)
        store.claim(entry(1))
        store.claim(entry(2))

        with pytest.raises(StoreUnavailable, match="limit=2"):
            store.claim(entry(3))

        assert [store.read(entry(number).address) is not None for number in (1, 2, 3)] == [True, True, False]

    def test_what_has_expired_makes_room(self) -> None:
        clock = Clock()
        store = MemoryStore(limit=10, clock=clock)
        for number in range(10):
            # Only the last one will have expired: a few steps of the sweep do not come that far.
            store.claim(entry(number, ttl=math.inf if number < 9 else 60.0))
        clock.advance("61s")

        assert store.claim(entry(10)) is None
        assert len(store) == 10

    def test_a_full_store_still_serves_the_records_that_it_has(self) -> None:
        store = MemoryStore(limit=1)
        store.claim(entry(1))

        shown = store.claim(Entry(address=entry(1).address, token=b"another"))
        assert isinstance(shown, Record)
        assert store.claim(entry(1)) is None
        assert store.claim(Entry(address=entry(1).address, token=b"another"), replacing=shown) is None
        assert store.finish(Claim(entry(1).address, b"another"), DONE) is True

    def test_an_async_store_has_a_limit_too(self) -> None:
        store = AsyncGuard("memory:?limit=7").store

        assert isinstance(store, AsyncMemoryStore)
        assert store.sync._limit == 7


class CountedRows(OrderedDict[Address, Row]):
    """Counts every row that is looked at or written."""

    touched = 0

    def get(self, address: Address, default: Any = None) -> Any:
        self.touched += 1
        return super().get(address, default)

    def __getitem__(self, address: Address) -> Row:
        self.touched += 1
        return super().__getitem__(address)

    def __setitem__(self, address: Address, row: Row) -> None:
        self.touched += 1
        super().__setitem__(address, row)

    def __iter__(self) -> Iterator[Address]:
        for address in super().__iter__():
            self.touched += 1
            yield address

    def items(self) -> Any:
        for address in self:
            yield address, self[address]


class TestCosts:
    def test_no_call_looks_at_more_rows_in_a_large_store_than_in_a_small_one(self) -> None:
        assert self._touched(2_000) == self._touched(20)

    def test_the_count_would_notice_a_scan(self) -> None:
        store = self._filled(20)

        store.purge(1)

        assert isinstance(store._rows, CountedRows)
        assert store._rows.touched >= 20

    def test_expired_records_are_swept_as_new_ones_come(self) -> None:
        clock = Clock()
        store = MemoryStore(clock=clock)
        for number in range(100):
            store.claim(entry(number, ttl=60.0))
        clock.advance("61s")

        for number in range(100, 200):
            store.claim(entry(number))

        assert len(store) == 100

    def _touched(self, size: int) -> list[int]:
        """How many rows each operation touches in a store of this size."""
        store = self._filled(size)
        rows = store._rows
        assert isinstance(rows, CountedRows)
        new, seen = entry(size), store.read(entry(0).address)
        counts = []
        for ask in (
            lambda: store.claim(new),
            lambda: store.claim(Entry(address=new.address, token=b"another")),
            lambda: store.claim(Entry(address=entry(0).address, token=b"another"), replacing=seen),
            lambda: store.extend(claim_of(new)),
            lambda: store.finish(claim_of(new), DONE),
            lambda: store.read(new.address),
            lambda: store.release(claim_of(new)),
        ):
            rows.touched = 0
            ask()
            counts.append(rows.touched)
        return counts

    def _filled(self, size: int) -> MemoryStore:
        store = MemoryStore(clock=Clock())
        store._rows = CountedRows()
        for number in range(size):
            store.claim(entry(number))
        store._rows.touched = 0
        return store


class TestUrls:
    @pytest.mark.parametrize("url", ["memory:", "memory://", "MEMORY:", "memory:?limit=10"])
    def test_urls_of_a_memory_store(self, url: str) -> None:
        assert isinstance(Guard(url).store, MemoryStore)
        assert isinstance(AsyncGuard(url).store, AsyncMemoryStore)

    @pytest.mark.parametrize(
        "url",
        [
            "memory:name",
            "memory:/path",
            "memory://host",
            "memory:?limit=many",
            "memory:?limit=",
            "memory:?limit=0",
            "memory:?limit=-1",
            "memory:?limit=1.5",
            "memory:?limits=10",
            "memory:?limit=10&size=2",
        ],
    )
    def test_bad_urls_are_refused(self, url: str) -> None:
        with pytest.raises(UsageError):
            _ = Guard(url).store
        with pytest.raises(UsageError):
            _ = AsyncGuard(url).store

    def test_each_guard_has_a_store_of_its_own(self) -> None:
        one, other = Guard("memory:"), Guard("memory:")

        one.run("operation", "key", lambda: 1)

        assert other.read("operation", "key") is None
