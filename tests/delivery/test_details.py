"""Small promises of the core that no other test keeps, each found by a break that went unnoticed (`make mutate`)."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from onefold import (
    AsyncGuard,
    Done,
    Event,
    Guard,
    MissingKey,
    OutcomeUnknown,
    Policy,
    RecordColumn,
    State,
    UsageError,
    current,
)
from onefold._concurrency.interrupts import leave, read
from onefold._heartbeat.async_guards import AsyncHeartbeat
from onefold._heartbeat.beats import BEATS_PER_LEASE, Beat, Beats, patience
from onefold._model import Claim, downstream
from onefold.events import Teller
from onefold.keys import KEY_MAX, address
from onefold.stores.base import Query
from onefold.stores.memory import MemoryStore

CLAIM = Claim(address("pay", "k"), b"token", 30.0, 90.0)


def test_a_task_that_nobody_waits_for_is_kept_until_it_has_cleaned_up() -> None:
    """asyncio itself holds tasks weakly: one in the middle of its clean-up could be collected."""
    ended: list[str] = []

    async def work(open_door: list[asyncio.Future[None]]) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            door = asyncio.get_running_loop().create_future()
            open_door.append(weakref.proxy(door))
            await door
            ended.append("cleaned up")

    async def story() -> None:
        open_door: list[Any] = []
        task = asyncio.create_task(work(open_door))
        await asyncio.sleep(0)
        leave(task)
        del task
        await asyncio.sleep(0)
        gc.collect()
        open_door[0].set_result(None)
        await asyncio.sleep(0)

    asyncio.run(story())

    assert ended == ["cleaned up"]


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), (("k",), {}), (("k",), {"amont": 1}), (("k", 1, 2, 3), {})])
def test_a_wrong_call_raises_what_it_always_would_and_claims_nothing(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    heard: list[Event] = []
    guard = Guard(MemoryStore(), on_event=heard.append)

    @guard.idempotent("pay", key="order")
    def pay(order: str, amount: int) -> None:
        raise AssertionError("it ran")

    @guard.idempotent("refund", key="order")
    def refund(order: str, amount: int, currency: str = "EUR") -> None:
        raise AssertionError("it ran")

    for function in (pay, refund):
        with pytest.raises(TypeError, match="argument"):
            function(*args, **kwargs)

    assert heard == []


def test_the_name_of_a_step_is_known_inside_of_it_alone() -> None:
    names: list[str | None] = []

    def handle() -> None:
        names.append(current().step_name)
        current().step("reserve", lambda: names.append(current().step_name))
        names.append(current().step_name)

    Guard(MemoryStore()).run("pay", "k", handle)

    assert names == [None, "reserve", None]


def test_a_renewal_that_takes_too_long_leaves_time_for_one_more() -> None:
    beats = Beats()
    beats.add([CLAIM], sent=0.0)

    assert 0 < patience([beats[CLAIM.token]]) < CLAIM.lease / BEATS_PER_LEASE


def test_a_closed_heartbeat_forgets_its_claims_and_renews_later_ones() -> None:
    async def story() -> tuple[Beat | None, bool]:
        heartbeat = AsyncHeartbeat(lambda: None, Teller())
        heartbeat.watch([CLAIM], time.monotonic() - CLAIM.lease / 4)
        heartbeat.close()
        forgotten = heartbeat.find(CLAIM.token)
        heartbeat.watch([CLAIM], time.monotonic())
        timer = heartbeat._here().timer
        renews = timer is not None and not timer.cancelled()
        heartbeat.close()
        return forgotten, renews

    assert asyncio.run(story()) == (None, True)


@pytest.mark.parametrize("rerun_within", ["1h", "forever"])
def test_a_clean_failure_of_the_first_attempt_leaves_nothing_behind(rerun_within: str) -> None:
    """Nobody has to remember when a provider forgets the key: it was never passed on."""
    store = MemoryStore()
    guard = Guard(store, policy=Policy(rerun_within=rerun_within))

    def declined() -> None:
        raise ValueError("declined")

    with pytest.raises(ValueError, match="declined"):
        guard.run("pay", "k", declined)

    assert store.browse(Query(), 10) == []


def test_a_key_is_measured_in_bytes_and_the_limit_is_among_what_is_taken() -> None:
    full = "é" * (KEY_MAX // 2) + "e" * (KEY_MAX % 2)

    assert address("pay", full).key == full
    with pytest.raises(MissingKey, match=f"has {KEY_MAX + 1} bytes of UTF-8, and the limit is {KEY_MAX}"):
        address("pay", full + "e")


def test_a_value_that_a_person_gives_is_not_kept_where_results_are_not() -> None:
    store = MemoryStore()
    guard = Guard(store, policy=Policy(after_crash="hold", keep_result=False))

    def lost() -> None:
        raise OutcomeUnknown("no answer")

    with pytest.raises(OutcomeUnknown):
        guard.run("pay", "k", lost)
    guard.resolve("pay", "k", Done("4200 to IBAN DE00"), by="ada", reason="asked the bank")

    (record,) = store.browse(Query(), 10)
    assert record.state is State.DONE
    assert record.result is None


@pytest.mark.parametrize("kind", [Guard, AsyncGuard])
def test_a_column_of_your_own_has_no_store_of_before(kind: type[Any], tmp_path: Path) -> None:
    guard = kind(f"sqlite:///{tmp_path}/new.db", migrate_from=f"sqlite:///{tmp_path}/old.db")

    with pytest.raises(UsageError, match="there is no migrate_from= for them"):
        guard.within(object(), record=RecordColumn("payments", "idempotency_key"))


def test_a_policy_shows_what_is_not_as_usual() -> None:
    assert repr(Policy()) == "Policy()"
    assert repr(Policy(keep="1h", after_crash="hold")) == "Policy(after_crash='hold', keep=3600.0)"


@pytest.mark.parametrize(
    ("bypasses", "key"),
    [(0, "078e6b14-7221-8048-a90a-4ecbfc4523a6"), (1, "7e20ef8c-c0ba-8223-89e3-e9d10ff082c8")],
)
def test_the_key_for_a_provider_is_the_same_in_every_release(bypasses: int, key: str) -> None:
    """A provider that has seen one key takes another one for another payment."""
    assert downstream(address("charge", "pay_1", scope="acme"), "stripe", bypasses) == key


def test_a_task_that_was_left_and_cancelled_is_no_error_of_the_loop() -> None:
    errors: list[Any] = []

    async def story() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: errors.append(context))
        task = asyncio.create_task(asyncio.sleep(60))
        read(task)
        leave(task)
        await asyncio.wait([task])
        await asyncio.sleep(0)

    asyncio.run(story())

    assert errors == []
