"""`onefold.testing`: a store for one test, a moved clock, and the fixtures of the pytest plugin."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import onefold.testing
from onefold import (
    TX,
    AsyncGuard,
    Guard,
    Held,
    InProgress,
    Policy,
    State,
    StoreUnavailable,
    UsageError,
    current,
    events,
)
from onefold.stores.base import Address, Claim
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from onefold.testing import Clock, Crash, StoreContract, use

pytest_plugins = ["pytester"]

PROMISES = [name for name in dir(StoreContract) if name.startswith("test_")]

CrashAt = Callable[..., AbstractContextManager[None]]


def never_opened() -> Any:
    pytest.fail("the guard's own store was opened")


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


class TestThePackage:
    def test_its_names_are_listed_and_sorted(self) -> None:
        assert onefold.testing.__all__ == sorted(onefold.testing.__all__)
        for name in onefold.testing.__all__:
            assert getattr(onefold.testing, name).__name__ == name
            assert name in dir(onefold.testing)

    def test_a_wrong_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'Klock'"):
            _ = onefold.testing.Klock

    def test_it_works_without_pytest(self) -> None:
        python(
            "import sys; sys.modules['pytest'] = None\n"
            "from onefold import Guard\n"
            "from onefold.testing import AsyncStoreContract, Clock, StoreContract, use\n"
            "with use(Guard('memory:')) as store: assert len(store) == 0\n"
        )

    def test_nothing_is_imported_before_it_is_asked_for(self) -> None:
        loaded = python("import sys, onefold.testing; print(*sys.modules)").split()

        assert [name for name in loaded if name.startswith("onefold.testing")] == ["onefold.testing"]


class TestClock:
    def test_it_stands_still_until_it_is_moved(self) -> None:
        clock = Clock(start=10.0)
        assert (clock(), clock()) == (10.0, 10.0)

        clock.advance("1m")
        clock.advance(timedelta(seconds=2))
        clock.advance(0.5)

        assert clock() == 72.5
        assert repr(clock) == "Clock(72.5)"

    @pytest.mark.parametrize("duration", [-1, "forever", "soon", None])
    def test_it_goes_forward_by_finite_durations(self, duration: Any) -> None:
        clock = Clock()

        with pytest.raises(UsageError, match="duration="):
            clock.advance(duration)
        assert clock() == 0.0


class TestUse:
    def test_a_guard_that_was_bound_at_import_runs_on_another_store(self) -> None:
        guard = Guard(never_opened)

        @guard.idempotent("charge", key="payment")
        def charge(payment: str) -> str:
            return f"charged {payment}"

        with use(guard, "memory:") as store:
            charge("pay_1")
            assert len(store) == 1
            assert charge.outcome("pay_1").replayed

        with use(guard) as store:
            assert len(store) == 0

    def test_the_guards_own_store_is_back_afterwards_with_its_records(self) -> None:
        guard = Guard("memory:")
        guard.run("charge", "pay_1", lambda: "own")
        own = guard.store

        with use(guard, "memory:"):
            assert guard.run("charge", "pay_1", lambda: "lent").value == "lent"

        assert guard.store is own
        assert guard.run("charge", "pay_1", lambda: "again").value == "own"

    def test_it_is_back_after_an_exception_too(self) -> None:
        guard = Guard("memory:")
        own = guard.store

        with pytest.raises(ZeroDivisionError), use(guard, "memory:"):
            _ = 1 / 0

        assert guard.store is own

    def test_uses_can_be_nested(self) -> None:
        guard = Guard(never_opened)
        lend = use(guard, "memory:")

        with lend as outer:
            with lend as inner, use(guard, MemoryStore()) as innermost:
                assert guard.store is innermost
            assert inner is not outer
            assert guard.store is outer

    @pytest.mark.parametrize(
        ("guard", "source"),
        [
            (Guard(never_opened), AsyncMemoryStore()),
            (AsyncGuard(never_opened), MemoryStore()),
            (Guard(never_opened), "memory:nonsense"),
            (Guard(never_opened), "memroy:"),
            (Guard(never_opened), None),
        ],
    )
    def test_a_store_that_does_not_fit_changes_nothing(self, guard: Any, source: Any) -> None:
        with pytest.raises(UsageError), use(guard, source):
            pytest.fail("it was lent all the same")

        with use(guard, "memory:"):
            pass
        assert guard._swap("memory:")[:2] == (never_opened, None)

    def test_what_the_test_brought_is_not_closed_and_what_was_opened_here_is(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed: list[MemoryStore] = []

        def close(store: MemoryStore) -> None:
            closed.append(store)

        monkeypatch.setattr(MemoryStore, "close", close)
        guard, brought = Guard(never_opened), MemoryStore()

        with use(guard, brought):
            pass
        assert closed == []
        with use(guard, "memory:") as opened:
            pass
        assert closed == [opened]

    def test_the_heartbeat_of_the_lent_store_ends_with_it(self) -> None:
        guard = Guard(never_opened)

        with use(guard, "memory:"):
            guard.run("charge", "pay_1", lambda: 1)
            thread = guard._context().heartbeat._thread  # type: ignore[union-attr]
            assert thread is not None
            assert thread.is_alive()

        assert not thread.is_alive()

    def test_a_guard_that_is_closed_inside_is_open_again_afterwards(self) -> None:
        guard = Guard("memory:")

        for _ in range(2):
            with use(guard, "memory:"), guard:
                guard.run("charge", "pay_1", lambda: 1)

        assert guard.run("charge", "pay_1", lambda: 1).value == 1

    def test_a_guard_that_was_closed_before_is_lent_a_store_and_stays_closed(self) -> None:
        guard = Guard("memory:")
        guard.close()

        with use(guard, "memory:"):
            assert guard.run("charge", "pay_1", lambda: 1).value == 1

        with pytest.raises(UsageError, match=r"this guard is closed.*with onefold\.testing\.use\(guard, 'memory:'\)$"):
            guard.run("charge", "pay_1", lambda: 1)

    def test_a_blocking_guard_is_not_used_with_async_with(self) -> None:
        async def enter() -> None:
            async with use(Guard(never_opened), "memory:"):
                pytest.fail("it was lent all the same")

        with pytest.raises(UsageError, match="without async"):
            asyncio.run(enter())


class TestUseOfAnAsyncGuard:
    def test_around_an_event_loop(self) -> None:
        guard = AsyncGuard(never_opened)

        with use(guard, "memory:"):
            first = asyncio.run(guard.run("charge", "pay_1", self.charged))
            again = asyncio.run(guard.run("charge", "pay_1", self.charged))

        assert (first.replayed, again.replayed) == (False, True)

    @pytest.mark.parametrize("is_async", [False, True])
    def test_inside_an_event_loop(self, is_async: bool) -> None:
        guard = AsyncGuard(never_opened)

        async def deliver() -> bool:
            if is_async:
                async with use(guard, "memory:"):
                    return (await guard.run("charge", "pay_1", self.charged)).replayed
            with use(guard, "memory:"):
                return (await guard.run("charge", "pay_1", self.charged)).replayed

        assert [asyncio.run(deliver()), asyncio.run(deliver())] == [False, False]
        assert guard._swap("memory:")[:2] == (never_opened, None)

    def test_the_heartbeat_of_the_lent_store_ends_with_it(self) -> None:
        guard = AsyncGuard(never_opened)

        async def deliver() -> None:
            started, never = asyncio.Event(), asyncio.Event()

            async def wait() -> None:
                started.set()
                await never.wait()

            with use(guard, "memory:"):
                running = asyncio.create_task(guard.run("charge", "pay_1", wait))
                await started.wait()
                (here,) = guard._context().heartbeat._loops.values()  # type: ignore[union-attr]
                timer = here.timer
                assert timer is not None
                assert not timer.cancelled()
            assert timer.cancelled()
            running.cancel()
            await asyncio.wait([running])

        asyncio.run(deliver())

    def test_a_store_that_takes_time_to_close_needs_async_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        closed = []

        async def aclose(store: AsyncMemoryStore) -> None:
            await asyncio.sleep(0)
            closed.append(store)

        monkeypatch.setattr(AsyncMemoryStore, "aclose", aclose)
        guard = AsyncGuard(never_opened)

        async def lend() -> None:
            async with use(guard, "memory:"):
                pass

        asyncio.run(lend())
        assert len(closed) == 1
        with pytest.raises(UsageError, match="async with"), use(guard, "memory:"):
            pass
        assert guard._swap("memory:")[:2] == (never_opened, None)

    async def charged(self) -> str:
        return "charged"


class TestTheGuardFixtures:
    def test_the_clock_of_the_guard_is_moved_by_hand(self, onefold_guard: Guard, onefold_clock: Clock) -> None:
        onefold_guard.run("charge", "pay_1", lambda: 1)

        onefold_clock.advance("23h")
        assert onefold_guard.run("charge", "pay_1", lambda: 2).replayed
        onefold_clock.advance("2h")
        assert not onefold_guard.run("charge", "pay_1", lambda: 3).replayed

    def test_the_async_guard_has_the_same_clock(self, onefold_async_guard: AsyncGuard, onefold_clock: Clock) -> None:
        async def one() -> int:
            return 1

        asyncio.run(onefold_async_guard.run("charge", "pay_1", one))
        onefold_clock.advance("25h")

        assert not asyncio.run(onefold_async_guard.run("charge", "pay_1", one)).replayed

    def test_each_test_has_a_store_of_its_own(self, onefold_guard: Guard, onefold_async_guard: AsyncGuard) -> None:
        assert onefold_guard.read("charge", "pay_1") is None
        assert asyncio.run(onefold_async_guard.read("charge", "pay_1")) is None


class Shop:
    """Charges as a method, as functions, and unguarded."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.charges = 0

    def count(self) -> int:
        self.charges += 1
        return self.charges


class TestDeliverTwice:
    def test_a_decorated_function(self, onefold_guard: Guard, deliver_twice: Callable[..., Any]) -> None:
        shop, listening = Shop(onefold_guard), list(events._process)

        @onefold_guard.idempotent("charge", key="payment")
        def charge(payment: str, amount: int = 1) -> int:
            return shop.count()

        assert deliver_twice(charge, "pay_1", amount=5) == 1
        assert deliver_twice(charge, "pay_2") == 2
        assert list(events._process) == listening, "it goes on listening"

    def test_a_method(self, onefold_guard: Guard, deliver_twice: Callable[..., Any]) -> None:
        class Charging(Shop):
            @onefold_guard.idempotent("charge", key="payment")
            def charge(self, payment: str) -> int:
                return self.count()

        assert deliver_twice(Charging(onefold_guard).charge, "pay_1") == 1

    def test_an_async_function(self, onefold_async_guard: AsyncGuard, deliver_twice: Callable[..., Any]) -> None:
        ran = []

        @onefold_async_guard.idempotent("charge", key="payment")
        async def charge(payment: str) -> str:
            ran.append(payment)
            return f"charged {payment}"

        async def deliver() -> str:
            value: str = await deliver_twice(charge, "pay_1")
            return value

        assert asyncio.run(deliver()) == "charged pay_1"
        assert ran == ["pay_1"]

    def test_a_function_that_uses_a_guard_inside(self, onefold_guard: Guard, deliver_twice: Callable[..., Any]) -> None:
        shop = Shop(onefold_guard)

        def consume(message: dict[str, str]) -> str:
            return f"charge {onefold_guard.run('charge', message['id'], shop.count).value}"

        assert deliver_twice(consume, {"id": "pay_1"}) == "charge 1"
        assert deliver_twice(lambda: onefold_guard.run("charge", "pay_2", shop.count)) == 2

    def test_an_async_function_that_uses_a_guard_inside(
        self, onefold_async_guard: AsyncGuard, deliver_twice: Callable[..., Any]
    ) -> None:
        async def one() -> int:
            return 1

        async def consume(key: str) -> int:
            return (await onefold_async_guard.run("charge", key, one)).value

        async def deliver() -> int:
            value: int = await deliver_twice(consume, "pay_1")
            return value

        assert asyncio.run(deliver()) == 1

    def test_a_handler_that_runs_again_is_noticed(
        self, onefold_guard: Guard, deliver_twice: Callable[..., Any]
    ) -> None:
        numbers = itertools.count()

        @onefold_guard.idempotent("charge", key=lambda amount: f"pay_{next(numbers)}")
        def charge(amount: int) -> int:
            return amount

        with pytest.raises(AssertionError, match="ran the handler again"):
            deliver_twice(charge, 1)
        with pytest.raises(AssertionError, match="ran a handler again: charge"):
            deliver_twice(lambda: charge(1))

    def test_a_handler_that_runs_unprotected_is_noticed(self, deliver_twice: Callable[..., Any]) -> None:
        guard = Guard("memory:?limit=1", policy=Policy(store_down="run"))
        guard.run("charge", "pay_1", lambda: 1)

        with pytest.raises(AssertionError, match="again"):
            deliver_twice(lambda: guard.run("charge", "pay_2", lambda: 1).value)

    def test_a_function_without_a_guard_is_noticed(self, deliver_twice: Callable[..., Any]) -> None:
        with pytest.raises(AssertionError, match="does this function use a guard"):
            deliver_twice(lambda: 1)

    def test_another_answer_is_noticed(self, onefold_guard: Guard, deliver_twice: Callable[..., Any]) -> None:
        numbers = itertools.count()

        def consume() -> int:
            onefold_guard.run("charge", "pay_1", lambda: 1)
            return next(numbers)

        with pytest.raises(AssertionError, match="the second delivery returned 1, but the first returned 0"):
            deliver_twice(consume)

    def test_a_result_that_was_not_kept_is_noticed(
        self, onefold_guard: Guard, deliver_twice: Callable[..., Any]
    ) -> None:
        @onefold_guard.idempotent("charge", key="payment", policy=Policy(keep_result=False))
        def charge(payment: str) -> int:
            return 1

        with pytest.raises(AssertionError, match="no result to replay: keep_result=False"):
            deliver_twice(charge, "pay_1")


class TestCrashAt:
    """One delivery dies; what the next one finds is what SIGKILL would have left."""

    @pytest.mark.parametrize(
        ("point", "ran", "state"),
        [
            ("before_claim", 0, None),
            ("after_claim", 0, State.RUNNING),
            ("after_handler", 1, State.RUNNING),
            ("after_finish", 1, State.DONE),
        ],
    )
    def test_what_a_crash_leaves_behind(
        self, point: str, ran: int, state: State | None, onefold_guard: Guard, crash_at: CrashAt
    ) -> None:
        shop = Shop(onefold_guard)

        with crash_at(point):
            onefold_guard.run("charge", "pay_1", shop.count)
            pytest.fail("it did not crash")

        assert shop.charges == ran
        record = onefold_guard.read("charge", "pay_1")
        assert (record and record.state) == state
        # One write to claim and one to finish: no clean-up has reached the store.
        assert record is None or record.revision == (2 if state is State.DONE else 1)

    def test_the_next_delivery_runs_after_the_lease(
        self, onefold_guard: Guard, onefold_clock: Clock, crash_at: CrashAt
    ) -> None:
        keys = []

        def charge() -> int:
            keys.append(current().key_for("gateway"))
            return current().attempt

        with crash_at("after_handler"):
            onefold_guard.run("charge", "pay_1", charge)

        with pytest.raises(InProgress):
            onefold_guard.run("charge", "pay_1", charge)
        onefold_clock.advance("31s")
        assert onefold_guard.run("charge", "pay_1", charge).value == 2
        assert len(keys) == 2
        assert len(set(keys)) == 1

    def test_under_hold_the_outcome_is_unknown(
        self, onefold_guard: Guard, onefold_clock: Clock, crash_at: CrashAt
    ) -> None:
        hold = Policy(after_crash="hold")
        with crash_at("after_handler"):
            onefold_guard.run("charge", "pay_1", lambda: 1, policy=hold)
        onefold_clock.advance("31s")

        with pytest.raises(Held):
            onefold_guard.run("charge", "pay_1", lambda: 1, policy=hold)

    def test_a_handler_that_raises_dies_before_its_release(self, onefold_guard: Guard, crash_at: CrashAt) -> None:
        with crash_at("after_handler"):
            onefold_guard.run("charge", "pay_1", lambda: 1 / 0)

        record = onefold_guard.read("charge", "pay_1")
        assert record is not None
        assert record.state is State.RUNNING

    def test_a_take_over_dies_after_the_claim_that_it_wins(
        self, onefold_guard: Guard, onefold_clock: Clock, crash_at: CrashAt
    ) -> None:
        with crash_at("after_claim"):
            onefold_guard.run("charge", "pay_1", lambda: 1)
        onefold_clock.advance("31s")

        with crash_at("after_claim"):
            onefold_guard.run("charge", "pay_1", lambda: 1)

        record = onefold_guard.read("charge", "pay_1")
        assert record is not None
        assert record.attempt == 2

    @pytest.mark.parametrize(("point", "ran"), [("before_claim", 0), ("after_handler", 1), ("after_finish", 1)])
    def test_in_seen_mode(self, point: str, ran: int, onefold_guard: Guard, crash_at: CrashAt) -> None:
        shop = Shop(onefold_guard)
        seen = Policy(mode="seen")

        with crash_at(point):
            onefold_guard.run("charge", "pay_1", shop.count, policy=seen)

        assert shop.charges == ran
        assert onefold_guard.run("charge", "pay_1", shop.count, policy=seen).replayed == (point == "after_finish")

    @pytest.mark.parametrize(
        ("point", "ran"), [("before_claim", 0), ("after_claim", 0), ("after_handler", 2), ("after_finish", 2)]
    )
    def test_in_a_batch(self, point: str, ran: int, onefold_guard: Guard, crash_at: CrashAt) -> None:
        handled: list[str] = []

        with crash_at(point):
            onefold_guard.run_batch("charge", ["a", "b"], key=str, handler=handled.append)

        assert len(handled) == ran

    @pytest.mark.parametrize("point", ["before_claim", "after_claim", "after_handler", "after_finish"])
    def test_of_an_async_guard(
        self, point: str, onefold_async_guard: AsyncGuard, onefold_clock: Clock, crash_at: CrashAt
    ) -> None:
        ran = []

        async def charge() -> str:
            ran.append(current().attempt)
            return "charged"

        async def deliver() -> None:
            with crash_at(point, guard=onefold_async_guard):
                await onefold_async_guard.run("charge", "pay_1", charge)
                pytest.fail("it did not crash")
            onefold_clock.advance("31s")
            outcome = await onefold_async_guard.run("charge", "pay_1", charge)
            assert outcome.value == "charged"
            assert outcome.replayed == (point == "after_finish")

        asyncio.run(deliver())

        assert ran == {"before_claim": [1], "after_claim": [2], "after_handler": [1, 2], "after_finish": [1]}[point]

    @pytest.mark.parametrize("point", ["before_claim", "after_claim", "after_handler", "after_finish"])
    @pytest.mark.parametrize("result", [None, 7])
    def test_of_a_transactional_handler_all_or_nothing_is_left(
        self, point: str, result: int | None, tmp_path: Path, crash_at: CrashAt
    ) -> None:
        guard, ran = Guard(never_opened), []

        @guard.transactional("deposit", key="message")
        def deposit(message: str, *, tx: sqlite3.Connection = TX) -> int | None:
            tx.execute("CREATE TABLE IF NOT EXISTS deposits (message)")
            tx.execute("INSERT INTO deposits VALUES (?)", (message,))
            ran.append(current().attempt)
            return result

        with use(guard, f"sqlite:///{tmp_path}/shop.db"):
            with crash_at(point, guard=guard):
                deposit("msg_1")
                pytest.fail("it did not crash")

            assert len(ran) == (point in ("after_handler", "after_finish"))
            record = guard.read("deposit", "msg_1")
            assert (record is not None) == (point == "after_finish")
            # No lease is left behind: the next delivery need not wait.
            outcome = deposit.outcome("msg_1")
            assert (outcome.value, outcome.replayed) == (result, point == "after_finish")
        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
            assert connection.execute("SELECT count(*) FROM deposits").fetchone() == (1,)

    @pytest.mark.parametrize("point", ["before_claim", "after_claim", "after_handler", "after_finish"])
    def test_of_an_async_transactional_handler_too(self, point: str, tmp_path: Path, crash_at: CrashAt) -> None:
        guard, ran = AsyncGuard(never_opened), []

        @guard.transactional("deposit", key="message")
        async def deposit(message: str, *, tx: sqlite3.Connection = TX) -> int:
            tx.execute("CREATE TABLE IF NOT EXISTS deposits (message)")
            tx.execute("INSERT INTO deposits VALUES (?)", (message,))
            ran.append(message)
            return 7

        async def deliver() -> None:
            async with use(guard, f"sqlite:///{tmp_path}/shop.db"):
                with crash_at(point, guard=guard):
                    await deposit("msg_1")
                    pytest.fail("it did not crash")
                assert len(ran) == (point in ("after_handler", "after_finish"))
                outcome = await deposit.outcome("msg_1")
                assert (outcome.value, outcome.replayed) == (7, point == "after_finish")

        asyncio.run(deliver())

        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
            assert connection.execute("SELECT count(*) FROM deposits").fetchone() == (1,)

    def test_a_transactional_handler_that_raises_dies_before_its_rollback(
        self, tmp_path: Path, crash_at: CrashAt
    ) -> None:
        guard = Guard(never_opened)

        @guard.transactional("deposit", key="message", policy=Policy(final_errors=(ValueError,)))
        def deposit(message: str, *, tx: sqlite3.Connection = TX) -> None:
            raise ValueError(message)

        with use(guard, f"sqlite:///{tmp_path}/shop.db"):
            with crash_at("after_handler", guard=guard):
                deposit("msg_1")
            assert guard.read("deposit", "msg_1") is None

            with crash_at("after_finish", guard=guard):
                deposit("msg_1")
            with pytest.raises(ValueError, match="msg_1"):
                deposit("msg_1")

    @pytest.mark.parametrize("point", ["after_claim", "after_handler", "after_finish"])
    def test_a_transaction_that_replays_gets_to_no_step_after_the_claim(
        self, point: str, tmp_path: Path, crash_at: CrashAt
    ) -> None:
        guard = Guard(never_opened)

        @guard.transactional("deposit", key="message")
        def deposit(message: str, *, tx: sqlite3.Connection = TX) -> int:
            return 7

        with use(guard, f"sqlite:///{tmp_path}/shop.db"):
            deposit("msg_1")
            with pytest.raises(AssertionError, match="deliver a new key"), crash_at(point, guard=guard):
                assert deposit("msg_1") == 7

    def test_the_guard_of_another_handler_is_named_with_the_argument_that_helps(
        self, tmp_path: Path, crash_at: CrashAt
    ) -> None:
        guard = Guard(f"sqlite:///{tmp_path}/shop.db")

        @guard.transactional("deposit", key="message")
        def deposit(message: str, *, tx: sqlite3.Connection = TX) -> int:
            return 7

        for deliver in (lambda: deposit("msg_1"), lambda: guard.run("charge", "pay_1", lambda: 1)):
            with (
                pytest.raises(AssertionError, match=r"Nothing in the block used Guard\(.*pass the guard .* as guard="),
                crash_at("after_handler"),
            ):
                deliver()
        guard.close()

    def test_what_is_no_guard_is_refused(self, crash_at: CrashAt) -> None:
        with (
            pytest.raises(UsageError, match=r"guard= is a str, not a guard: .* crash_at\('after_claim', guard\)"),
            crash_at("after_claim", guard="memory:"),
        ):
            pytest.fail("it was taken")

    def test_swapped_arguments_are_told_by_the_points_that_there_are(self, crash_at: CrashAt) -> None:
        swapped: Any = crash_at
        with (
            pytest.raises(UsageError, match=r"^point=Guard\(.*\) is not one of 'before_claim', "),
            swapped(Guard("memory:"), "after_claim"),
        ):
            pytest.fail("it was taken")

    def test_of_a_transactional_handler_inside_of_another_nothing_is_left_of_both(
        self, tmp_path: Path, crash_at: CrashAt
    ) -> None:
        guard, ran = Guard(never_opened), []

        @guard.transactional("fee", key="message")
        def fee(message: str, *, tx: sqlite3.Connection = TX) -> None:
            ran.append("fee")

        @guard.transactional("deposit", key="message")
        def deposit(message: str, *, tx: sqlite3.Connection = TX) -> None:
            fee(message)
            ran.append("deposit")

        with use(guard, f"sqlite:///{tmp_path}/shop.db"):
            with crash_at("after_handler", guard=guard):
                deposit("msg_1")
            assert ran == ["fee"]
            assert guard.read("fee", "msg_1") is None

            with crash_at("after_finish", guard=guard):
                deposit("msg_1")
            assert deposit.outcome("msg_1").replayed
            assert fee.outcome("msg_1").replayed

    def test_a_dead_worker_that_goes_on_asking_is_refused(self, onefold_guard: Guard, crash_at: CrashAt) -> None:
        claim = Claim(Address("", "charge", "pay_1"), b"token")

        with crash_at("after_claim"):
            dead: Any = onefold_guard.store
            onefold_guard.run("charge", "pay_1", lambda: 1)

        for ask in ("read", "release", "finish", "close_all"):
            with pytest.raises(Crash):
                getattr(dead, ask)(claim)
        with pytest.raises(Crash):
            dead.extend(claim, b"a finished step")
        # What a heartbeat asks gets an ordinary error, so that its thread does not die of it.
        with pytest.raises(StoreUnavailable):
            dead.extend(claim, None)
        with pytest.raises(StoreUnavailable):
            dead.extend_all([claim])
        record = onefold_guard.read("charge", "pay_1")
        assert record is not None
        assert record.revision == 1

    def test_a_crash_that_somebody_caught_is_a_crash(self, onefold_guard: Guard, crash_at: CrashAt) -> None:
        with crash_at("after_claim"), suppress(BaseException):
            onefold_guard.run("charge", "pay_1", pytest.fail)

        assert onefold_guard.read("charge", "pay_1") is not None

    def test_a_block_that_does_not_get_there_fails(self, onefold_guard: Guard, crash_at: CrashAt) -> None:
        onefold_guard.run("charge", "pay_1", lambda: 1)

        with pytest.raises(AssertionError, match="no delivery got to 'after_handler'"), crash_at("after_handler"):
            assert onefold_guard.run("charge", "pay_1", lambda: 1).replayed

    def test_another_error_surfaces_as_it_is(self, onefold_guard: Guard, crash_at: CrashAt) -> None:
        own = onefold_guard.store

        with pytest.raises(ZeroDivisionError), crash_at("after_handler"):
            _ = 1 / 0
        with pytest.raises(Crash, match="another"), crash_at("after_handler"):
            raise Crash("another")

        assert onefold_guard.store is own

    def test_a_wrong_point_is_refused(self, crash_at: CrashAt) -> None:
        with pytest.raises(UsageError, match="'before_claim', 'after_claim', 'after_step', 'after_handler'"):
            crash_at("before_the_claim").__enter__()


class TestThePlugin:
    """In a project of its own, where warnings are errors."""

    @pytest.fixture
    def project(self, pytester: pytest.Pytester) -> pytest.Pytester:
        pytester.makeini("[pytest]\nfilterwarnings = error\n")
        return pytester

    def test_its_fixtures_work_without_an_import(self, project: pytest.Pytester) -> None:
        project.makepyfile(
            """
            import pytest

            def test_all_of_them(onefold_guard, onefold_clock, deliver_twice, crash_at):
                @onefold_guard.idempotent("charge", key="payment")
                def charge(payment: str) -> str:
                    return payment

                with crash_at("after_handler"):
                    charge("pay_1")
                onefold_clock.advance("31s")
                assert deliver_twice(charge, "pay_1") == "pay_1"

            def test_a_crash_of_another_guard(onefold_async_guard, crash_at):
                with pytest.raises(AssertionError, match="Nothing in the block used AsyncGuard.*as guard="):
                    with crash_at("after_claim", guard=onefold_async_guard):
                        pass
            """
        )

        project.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=2)

    def test_pytest_works_without_it(self, project: pytest.Pytester) -> None:
        project.makepyfile(
            """
            from onefold.stores.memory import MemoryStore
            from onefold.testing import StoreContract

            class TestIt(StoreContract):
                def open_store(self):
                    return MemoryStore()

            def test_it(onefold_guard):
                pass
            """
        )

        result = project.runpytest("-p", "no:onefold", "-k", "free_address_is_written or test_it")

        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines(["*fixture 'onefold_guard' not found*"])

    def test_its_fixtures_explain_themselves(self, project: pytest.Pytester) -> None:
        result = project.runpytest("--fixtures", "-v", "-p", "no:anyio")

        for name in ("onefold_clock", "onefold_guard", "onefold_async_guard", "deliver_twice", "crash_at"):
            result.stdout.fnmatch_lines([f"{name}*"])
        result.stdout.no_fnmatch_line("*no docstring available*")

    def test_a_broken_promise_says_what_it_found(self, project: pytest.Pytester) -> None:
        project.makepyfile(
            """
            from onefold.stores.memory import MemoryStore
            from onefold.testing import StoreContract

            class Careless(MemoryStore):
                def finish(self, claim, ending):
                    return True

            class TestCareless(StoreContract):
                def open_store(self):
                    return Careless()
            """
        )

        result = project.runpytest("-k", "finish_writes_the_whole_ending")

        result.assert_outcomes(failed=1, deselected=len(PROMISES) - 1)
        result.stdout.fnmatch_lines(["E *At index 1 diff: <State.RUNNING: 'running'> != <State.DONE: 'done'>"])

    def test_loading_it_loads_nothing_but_the_package(self) -> None:
        loaded = python(
            "import sys, onefold, pytest\n"
            "before = set(sys.modules)\n"
            "import onefold.testing.plugin\n"
            "print(*set(sys.modules) - before)"
        )

        assert set(loaded.split()) == {"onefold.testing", "onefold.testing.plugin"}
