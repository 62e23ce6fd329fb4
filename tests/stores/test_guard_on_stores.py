"""Guards on every store with batches: the production flows on real servers, and mixed batches sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from onefold import AsyncGuard, Done, Guard, Held, InProgress, KeyReused, Outcome, OutcomeUnknown, Policy, current
from onefold._delivery import decide as _decide
from onefold._delivery.decide import Then
from onefold._model import Claim, DeliveryRequest, State
from tests.stores.redis.tools import entry
from tests.support import eventually, in_time

KINDS = ("sqlite", "postgres", "pgbouncer", "mysql", "redis", "valkey", "redis_cluster", "valkey_cluster")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/records.db"


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


class Desk:
    """A handler that says what came in. Poison fails, and what is doubtful may have happened."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def take(self, message: str) -> str:
        self.seen.append(message)
        if message == "poison":
            raise ValueError(message)
        if message == "doubtful":
            raise OutcomeUnknown(message)
        return f"took {message}, attempt {current().attempt}"

    async def take_async(self, message: str) -> str:
        await asyncio.sleep(0)
        return self.take(message)


HOLDING = Policy(after_crash="hold")
BRIEF = Policy(keep="50ms")
RUNNING = entry("running", lease=900.0, ttl=900.0)

BATCH = ["new", "finished", "running", "doubtful", "expired", "new", "poison", "finished", "another", "open"]


def told(results: Sequence[Any]) -> list[Any]:
    """Outcomes in short: the value and whether it was replayed; or the class of an error."""
    return [(each.value, each.replayed) if isinstance(each, Outcome) else type(each) for each in results]


EXPECTED = [
    ("took new, attempt 1", False),
    ("took finished, attempt 1", True),
    InProgress,
    Held,
    ("took expired, attempt 1", False),
    ("took new, attempt 1", True),
    ValueError,
    ("took finished, attempt 1", True),
    ("took another, attempt 1", False),
    ("took open, attempt 2", False),
]


def test_a_mixed_batch_gives_each_message_its_own_answer(url: str) -> None:
    with Guard(url, policy=HOLDING) as guard:
        before = Desk()
        guard.run("charge", "finished", lambda: before.take("finished"))
        guard.run("charge", "expired", lambda: before.take("expired"), policy=BRIEF)
        with pytest.raises(OutcomeUnknown):
            guard.run("charge", "doubtful", lambda: before.take("doubtful"))
        with pytest.raises(ZeroDivisionError):
            guard.run("charge", "open", _fails_after_a_step)
        assert guard.store.claim(RUNNING) is None
        assert eventually(lambda: guard.read("charge", "expired") is None)
        desk = Desk()

        results = guard.run_batch("charge", BATCH, key=str, handler=desk.take)

        assert told(results) == EXPECTED
        assert desk.seen == ["new", "expired", "poison", "another", "open"]
        again = guard.run_batch("charge", ["new", "another", "poison"], key=str, handler=desk.take)
        assert told(again) == [("took new, attempt 1", True), ("took another, attempt 1", True), ValueError]


def _fails_after_a_step() -> None:
    current().step("first", lambda: "noted")
    raise ZeroDivisionError


def test_a_mixed_batch_gives_each_message_its_own_answer_async(url: str) -> None:
    async def fails_after_a_step() -> None:
        await current().step("first", lambda: asyncio.sleep(0, "noted"))
        raise ZeroDivisionError

    async def story() -> None:
        async with AsyncGuard(url, policy=HOLDING) as guard:
            before = Desk()
            await guard.run("charge", "finished", lambda: before.take_async("finished"))
            await guard.run("charge", "expired", lambda: before.take_async("expired"), policy=BRIEF)
            with pytest.raises(OutcomeUnknown):
                await guard.run("charge", "doubtful", lambda: before.take_async("doubtful"))
            with pytest.raises(ZeroDivisionError):
                await guard.run("charge", "open", fails_after_a_step)
            assert await guard.store.claim(RUNNING) is None
            while await guard.read("charge", "expired") is not None:
                pass
            desk = Desk()

            results = await guard.run_batch("charge", BATCH, key=str, handler=desk.take_async)

            assert told(results) == EXPECTED
            assert desk.seen == ["new", "expired", "poison", "another", "open"]

    in_time(story())


def test_a_function_runs_once_and_its_answer_is_replayed(url: str) -> None:
    charged = []
    with Guard(url) as guard:

        @guard.idempotent("charge", key="payment_id")
        def charge(payment_id: str, amount: int) -> int:
            charged.append(payment_id)
            return amount

        assert [charge("pay_1", 4200), charge("pay_1", 4200), charge("pay_2", 1)] == [4200, 4200, 1]
        with pytest.raises(KeyReused):
            charge("pay_1", 1)
    assert charged == ["pay_1", "pay_2"]


def test_a_held_record_is_resolved_and_forgotten(url: str) -> None:
    with Guard(url, policy=HOLDING) as guard:
        with pytest.raises(OutcomeUnknown):
            guard.run("charge", "pay_1", lambda: Desk().take("doubtful"))
        with pytest.raises(Held):
            guard.run("charge", "pay_1", lambda: 1)

        guard.resolve("charge", "pay_1", Done(4200), by="me", reason="the bank says so")

        assert guard.run("charge", "pay_1", lambda: 1).value == 4200
        record = guard.read("charge", "pay_1")
        assert record is not None
        assert record.state is State.DONE
        assert guard.forget("charge", "pay_1") is True
        assert guard.read("charge", "pay_1") is None


def test_steps_survive_a_crash_and_are_not_repeated(url: str) -> None:
    steps: list[str] = []

    def first_step() -> str:
        steps.append("first")
        return "one"

    with Guard(url) as guard:

        def handler() -> str:
            first = current().step("first", first_step)
            if len(steps) == 1:
                steps.append("crash")
                raise ConnectionError
            return f"{first}, two"

        with pytest.raises(ConnectionError):
            guard.run("charge", "pay_1", handler)

        assert guard.run("charge", "pay_1", handler).value == "one, two"
    assert steps == ["first", "crash"]


def test_tenants_do_not_share_records(url: str) -> None:
    with Guard(url) as guard:
        values = [guard.run("charge", "pay_1", partial(str, tenant), scope=tenant).value for tenant in "abcab"]

    assert values == ["a", "b", "c", "a", "b"]


def test_a_bypass_that_fails_or_dies_leaves_what_was_done(url: str) -> None:
    with Guard(url) as guard:
        check_bypasses(guard)


def test_on_dynamodb_a_bypass_that_fails_or_dies_leaves_what_was_done(dynamodb_url: str) -> None:
    with Guard(dynamodb_url) as guard:
        # Its leases are long: what a dead one left is read, and not waited for.
        check_bypasses(guard, lease=60.0)


def check_bypasses(guard: Guard, *, lease: float = 0.001) -> None:
    """Finish; fail a bypass after a step; let another die; finish one. Duplicates replay what was finished last."""
    guard.run("charge", "pay_1", lambda: "the receipt", payload=42)
    before = guard.read("charge", "pay_1")
    assert before is not None
    with pytest.raises(ZeroDivisionError):
        guard.run("charge", "pay_1", _fails_after_a_step, payload=42, bypass=True)
    failed = guard.read("charge", "pay_1")
    assert failed is not None
    assert (failed.state, failed.result, failed.bypasses) == (State.DONE, before.result, 0)
    assert failed.ttl_left == pytest.approx(before.ttl_left, abs=600)

    dead = _decide.entry(Then.RUN_AGAIN, failed, DeliveryRequest(failed.address, None, True), guard.policy, b"d" * 16)
    assert guard.store.claim(replace(dead, lease=lease), replacing=failed) is None
    assert guard.store.extend(Claim(dead.address, dead.token, lease, dead.ttl), dead.notes) is True
    running = guard.read("charge", "pay_1")
    assert running is not None
    assert (running.state, running.result, running.notes) == (State.RUNNING, before.result, dead.notes)
    if lease > 1:
        return
    assert eventually(lambda: (guard.read("charge", "pay_1") or failed).lease_left <= 0)
    assert guard.run("charge", "pay_1", pytest.fail, payload=42).value == "the receipt"

    steps: list[str] = []
    again = guard.run("charge", "pay_1", lambda: current().step("first", lambda: steps.append("first")), bypass=True)
    assert (again.replayed, steps) == (False, [])
    assert guard.run("charge", "pay_1", pytest.fail, payload=42).replayed
