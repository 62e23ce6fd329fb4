"""The contract can fail: every promise has a store that breaks it. And it can be kept, on a real clock too."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest

from onefold._delivery.batch import BATCH_MAX
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from onefold.testing import AsyncStoreContract, Clock, StoreContract
from onefold.testing.promises import powers
from tests.testing.broken_stores import BROKEN
from tests.testing.file_store import AsyncFileStore, FileStore, open_in_a_file_of_its_own

PROMISES = sorted(name for name in dir(StoreContract) if name.startswith("test_"))

IN_PROCESSES = [
    "test_of_claims_racing_in_processes_exactly_one_wins",
    "test_of_take_overs_racing_in_processes_exactly_one_wins",
]


class TestFileStore(StoreContract):
    """Shared between processes, without optional capabilities, on a clock that cannot be moved: the contract waits."""

    unit = 0.02
    rounds = 1

    @pytest.fixture(autouse=True)
    def _path(self, tmp_path: Path) -> None:
        self.path = tmp_path / "records"

    def process_source(self) -> Any:
        return partial(FileStore, self.path)

    def open_store(self) -> FileStore:
        return FileStore(self.path)


def contract_on(opened: type[MemoryStore]) -> StoreContract:
    """The contract of a store whose clock is moved."""
    clock = Clock()

    class Contract(StoreContract):
        def open_store(self) -> MemoryStore:
            return opened(clock=clock)

        def pass_time(self, seconds: float) -> None:
            clock.advance(seconds)

    return Contract()


def kept(contract: StoreContract | AsyncStoreContract, promise: str) -> bool:
    """Whether the store of this contract keeps the promise."""
    try:
        getattr(contract, promise)()
    except AssertionError:
        return False
    finally:
        contract.teardown_method()
    return True


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        pytest.param(broken, promise, id=f"{broken.__name__}-{promise}")
        for broken, promises in BROKEN.items()
        for promise in promises
    ],
)
def test_a_broken_store_is_noticed(broken: type[MemoryStore], promise: str) -> None:
    assert kept(contract_on(MemoryStore), promise)

    assert not kept(contract_on(broken), promise)


def test_every_promise_has_a_store_that_breaks_it() -> None:
    broken = {promise for promises in BROKEN.values() for promise in promises}

    assert sorted(broken | set(IN_PROCESSES)) == PROMISES


def test_sync_and_async_have_the_same_promises() -> None:
    assert sorted(name for name in dir(AsyncStoreContract) if name.startswith("test_")) == PROMISES


def test_no_promise_hides_another() -> None:
    names = [name for part in StoreContract.__mro__[2:-2] for name in vars(part) if not name.startswith("__")]

    assert len(names) > len(PROMISES)
    assert [name for name in names if names.count(name) > 1] == []


def test_the_largest_batch_of_the_contract_is_the_largest_of_a_guard() -> None:
    assert powers.BATCH == BATCH_MAX


class TestProcesses:
    @pytest.mark.parametrize("promise", IN_PROCESSES)
    def test_a_store_that_is_not_really_shared_is_noticed(self, promise: str, tmp_path: Path) -> None:
        class Contract(StoreContract):
            def open_store(self) -> FileStore:
                return FileStore(tmp_path / "records")

            def process_source(self) -> Any:
                return partial(open_in_a_file_of_its_own, tmp_path)

        assert not kept(Contract(), promise)

    def test_an_async_store_races_in_processes_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # In new processes, as with users.
        monkeypatch.setattr("onefold.testing.promises._processes.START_METHOD", "spawn")

        class Contract(AsyncStoreContract):
            def open_store(self) -> AsyncFileStore:
                return AsyncFileStore(tmp_path / "records")

            def process_source(self) -> Any:
                return partial(AsyncFileStore, tmp_path / "records")

        assert kept(Contract(), "test_of_take_overs_racing_in_processes_exactly_one_wins")

    @pytest.mark.parametrize("promise", IN_PROCESSES)
    def test_a_store_that_is_not_shared_is_skipped_with_a_reason(self, promise: str) -> None:
        with pytest.raises(SkipTest, match="not shared between processes"):
            kept(contract_on(MemoryStore), promise)

    def test_what_fails_in_a_process_is_told(self, tmp_path: Path) -> None:
        class Contract(StoreContract):
            def open_store(self) -> FileStore:
                return FileStore(tmp_path / "records")

            def process_source(self) -> Any:
                return "memory:?limit=many"

        with pytest.raises(AssertionError, match=r"a process failed: UsageError: .*limit='many'"):
            Contract().test_of_claims_racing_in_processes_exactly_one_wins()

    def test_a_process_that_dies_is_noticed_at_once(self, tmp_path: Path) -> None:
        class Contract(StoreContract):
            def open_store(self) -> FileStore:
                return FileStore(tmp_path / "records")

            def process_source(self) -> Any:
                return partial(os._exit, 1)

        with pytest.raises(AssertionError, match="a process failed: it ended before it could answer"):
            Contract().test_of_claims_racing_in_processes_exactly_one_wins()


class TestSyncAndAsync:
    def test_an_async_store_that_forgets_its_own_token_is_noticed(self) -> None:
        class Forgetful(AsyncMemoryStore):
            async def claim(self, entry: Any, *, replacing: Any = None) -> Any:
                return await self.read(entry.address) or await super().claim(entry, replacing=replacing)

        class Contract(AsyncStoreContract):
            def open_store(self) -> AsyncMemoryStore:
                return Forgetful()

        assert not kept(Contract(), "test_a_claim_on_a_free_address_is_written")

    def test_an_async_store_that_looks_and_then_writes_is_noticed(self) -> None:
        class Slow(AsyncMemoryStore):
            """Between its look and its write every other task takes its turn."""

            async def claim(self, entry: Any, *, replacing: Any = None) -> Any:
                found = await self.read(entry.address)
                await asyncio.sleep(0)
                if found is not None and found.token != entry.token:
                    return found
                self.sync._rows.pop(entry.address, None)
                return await super().claim(entry)

        class Contract(AsyncStoreContract):
            def open_store(self) -> AsyncMemoryStore:
                return Slow()

        assert kept(Contract(), "test_a_claim_on_a_free_address_is_written")
        assert not kept(Contract(), "test_of_many_racing_claims_exactly_one_wins")

    def test_an_async_store_is_opened_used_and_closed_on_one_event_loop(self) -> None:
        loops = []

        class Tracing(AsyncMemoryStore):
            async def claim(self, entry: Any, *, replacing: Any = None) -> Any:
                loops.append(asyncio.get_running_loop())
                return await super().claim(entry, replacing=replacing)

            async def aclose(self) -> None:
                loops.append(asyncio.get_running_loop())

        class Contract(AsyncStoreContract):
            async def open_store(self) -> AsyncMemoryStore:
                loops.append(asyncio.get_running_loop())
                return Tracing()

        assert kept(Contract(), "test_a_claim_on_a_free_address_is_written")
        assert len(loops) == 4
        assert len(set(loops)) == 1
        assert loops[0].is_closed()


class TestHooks:
    def test_a_store_is_opened_for_each_test_and_closed_after_it(self) -> None:
        closed = []

        class Closing(MemoryStore):
            def close(self) -> None:
                closed.append(self)

        contract = contract_on(Closing)
        contract.test_a_claim_on_a_free_address_is_written()
        assert closed == []
        contract.teardown_method()
        assert len(closed) == 1

    @pytest.mark.parametrize("contract", [StoreContract, AsyncStoreContract])
    def test_a_contract_without_a_store_says_what_it_needs(self, contract: type[Any]) -> None:
        case = contract()

        with pytest.raises(NotImplementedError, match=r"def open_store\(self\)"):
            case.test_a_claim_on_a_free_address_is_written()
        case.teardown_method()

    def test_a_power_that_a_store_has_not_is_skipped_with_a_reason(self, tmp_path: Path) -> None:
        class Contract(StoreContract):
            def open_store(self) -> FileStore:
                return FileStore(tmp_path / "records")

        with pytest.raises(SkipTest, match="not Batching"):
            Contract().test_an_empty_batch_has_no_answers()
        with pytest.raises(SkipTest, match="not Browsable"):
            Contract().test_browsing_filters_by_state()

    def test_a_store_whose_records_vanish_by_themselves_may_purge_fewer(self) -> None:
        class Vanishing(MemoryStore):
            def purge(self, limit: int) -> int:
                super().purge(10_000)
                return 0

        contract = contract_on(Vanishing)
        assert not kept(contract, "test_purge_respects_its_limit")
        contract.expires_by_itself = True
        assert kept(contract, "test_purge_respects_its_limit")
        assert kept(contract, "test_racing_purges_remove_each_record_once")
