"""Duplicates that a store in this process answers before a flow is started: the same answers, and less work."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from onefold import AsyncGuard, Done, Event, Guard, InsideItself, KeyReused, StoreUnavailable, UsageError
from onefold._guard import base
from onefold.events import Kind
from onefold.stores.base import Address, Entry, Gone, Record, State
from onefold.stores.memory import AsyncMemoryStore, MemoryStore, Row
from onefold.testing import Clock


def test_a_duplicate_draws_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard("memory:")
    charge = guard.idempotent("charge", key="payment_id")(lambda payment_id, amount: amount)
    charge("pay_1", 4200)
    monkeypatch.setattr(base, "mint", lambda: pytest.fail("a token was drawn"))

    assert charge("pay_1", 4200) == 4200
    assert guard.run("charge", "pay_1", lambda: 1).value == 4200


def test_a_duplicate_of_an_async_guard_draws_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deliver_twice() -> None:
        guard = AsyncGuard("memory:")

        @guard.idempotent("charge", key="payment_id")
        async def charge(payment_id: str, amount: int) -> int:
            return amount

        await charge("pay_1", 4200)
        monkeypatch.setattr(base, "mint", lambda: pytest.fail("a token was drawn"))
        again = await guard.run("charge", "pay_1", charge.__wrapped__)
        assert await charge("pay_1", 4200) == again.value == 4200

    asyncio.run(deliver_twice())


def test_it_is_told_as_a_replay_with_the_attempt_and_the_remark() -> None:
    heard: list[Event] = []
    guard = Guard("memory:", on_event=heard.append, keep_result=False)
    guard.run("charge", "pay_1", lambda: 4200)

    outcome = guard.run("charge", "pay_1", lambda: 4200)

    assert (outcome.replayed, outcome.omitted, outcome.attempt) == (True, True, 1)
    assert outcome.remark == "keep_result=False"
    assert [event.kind for event in heard][-1] is Kind.REPLAYED


def test_another_payload_is_refused() -> None:
    guard = Guard("memory:")
    guard.run("charge", "pay_1", lambda: None, payload=1)

    with pytest.raises(KeyReused):
        guard.run("charge", "pay_1", lambda: None, payload=2)


def test_a_bypass_runs_and_what_it_noted_stays() -> None:
    guard = Guard("memory:")
    guard.run("charge", "pay_1", lambda: 1)

    assert guard.run("charge", "pay_1", lambda: 2, bypass=True).value == 2
    assert guard.run("charge", "pay_1", lambda: 3).value == 2


@pytest.mark.parametrize("fields", [{"count_duplicates": True}, {"count_duplicates": True, "mode": "seen"}])
def test_a_duplicate_that_is_to_be_counted_is_counted(fields: dict[str, Any]) -> None:
    guard = Guard("memory:", **fields)
    for _ in range(3):
        guard.run("charge", "pay_1", lambda: 1)

    found = guard.read("charge", "pay_1")

    assert found is not None
    assert found.duplicates == 2


def test_a_record_that_has_expired_answers_nobody() -> None:
    clock = Clock()
    guard = Guard(MemoryStore(clock=clock), keep="1h")
    guard.run("charge", "pay_1", lambda: 1)
    clock.advance("1h")

    assert guard.run("charge", "pay_1", lambda: 2).value == 2


class Down(MemoryStore):
    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        del entry, replacing
        raise StoreUnavailable("the store is down")


class AsyncDown(AsyncMemoryStore):
    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        del entry, replacing
        raise StoreUnavailable("the store is down")


def test_a_store_that_changes_what_a_claim_does_is_asked() -> None:
    store = Down()
    guard = Guard(store)
    assert guard.store is store
    MemoryStore.claim(store, Entry(address=guard.address("charge", "pay_1"), token=b"t" * 16, state=State.DONE))

    with pytest.raises(StoreUnavailable):
        guard.run("charge", "pay_1", lambda: None)


def test_an_async_store_that_changes_what_a_claim_does_is_asked() -> None:
    async def deliver() -> None:
        store = AsyncDown()
        guard = AsyncGuard(store)
        assert guard.store is store
        store.sync.claim(Entry(address=guard.address("charge", "pay_1"), token=b"t" * 16, state=State.DONE))
        await guard.run("charge", "pay_1", lambda: asyncio.sleep(0))

    with pytest.raises(StoreUnavailable):
        asyncio.run(deliver())


class Broken(Down):
    def find_done(self, address: Address) -> Row | None:
        del address
        raise StoreUnavailable("the store is down")


def test_a_store_that_fails_to_look_is_down_as_the_policy_says() -> None:
    heard: list[Event] = []
    guard = Guard(Broken(), on_event=heard.append, store_down="run")
    assert isinstance(guard.store, Broken)

    outcome = guard.run("charge", "pay_1", lambda: 1)

    assert (outcome.value, outcome.protected) == (1, False)
    assert [event.kind for event in heard] == [Kind.STORE_FAILED, Kind.UNPROTECTED]


def test_the_same_address_inside_itself_is_an_error_even_if_it_is_done_meanwhile() -> None:
    clock = Clock()
    guard = Guard(MemoryStore(clock=clock), lease="30s", after_crash="hold")

    def handler() -> None:
        clock.advance("31s")
        guard.resolve("charge", "pay_1", Done(1), by="ops", reason="seen on the statement")
        guard.run("charge", "pay_1", lambda: 2)

    with pytest.raises(InsideItself):
        guard.run("charge", "pay_1", handler)


def test_a_closed_guard_answers_nobody() -> None:
    store = MemoryStore()
    guard = Guard(store)
    guard.run("charge", "pay_1", lambda: 1)
    guard.close()

    with pytest.raises(UsageError, match="is closed"):
        guard.run("charge", "pay_1", lambda: 1)
