"""`current().note()`: a few fields of the user's, kept with the outcome of the run that noted them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import sqlite3
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from onefold import TX, AsyncGuard, Done, Failed, Guard, Held, Policy, RecordColumn, Rerun, State, UsageError, current
from onefold._model.notes import NOTED_BYTES_MAX, RESERVED
from onefold.stores.memory import MemoryStore
from tests.support import Clock, Died, ProxyStore

WHO: dict[str, Any] = {"by": "ada", "reason": "asked the bank"}


@pytest.fixture
def guard() -> Guard:
    return Guard(MemoryStore(clock=Clock()))


def noting(error: BaseException | None = None, **fields: object) -> Callable[[], None]:
    def handler() -> None:
        current().note(**fields)
        if error is not None:
            raise error

    return handler


def noted(guard: Guard, operation: str = "charge") -> dict[str, Any] | None:
    record = guard.read(operation, "k")
    return None if record is None else record.noted


def test_what_a_handler_notes_is_in_the_record_of_its_run(guard: Guard) -> None:
    def handler() -> str:
        current().note(prior_balance=1500, currency="INR")
        current().note(prior_balance=1600, tags=["a", None, {"b": 1.5}])
        return "paid"

    assert guard.run("charge", "k", handler).value == "paid"

    assert noted(guard) == {"prior_balance": 1600, "currency": "INR", "tags": ["a", None, {"b": 1.5}]}
    assert guard.run("charge", "k", handler).replayed


def test_what_is_no_json_is_kept_as_text(guard: Guard) -> None:
    day, number = dt.date(2026, 11, 18), uuid.UUID(int=7)

    guard.run("charge", "k", noting(amount=Decimal("10.50"), day=day, id=number))

    assert noted(guard) == {"amount": "10.50", "day": "2026-11-18", "id": str(number)}


def test_a_run_that_notes_nothing_has_a_record_without(guard: Guard) -> None:
    guard.run("charge", "k", lambda: None)

    record = guard.read("charge", "k")
    assert record is not None
    assert (record.notes, record.noted, record.steps) == (None, {}, ())


def test_notes_and_steps_do_not_get_into_each_others_way(guard: Guard) -> None:
    def handler() -> None:
        current().note(before=1)
        current().step("pay", lambda: "paid")
        current().note(after=2)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        guard.run("charge", "k", handler, after_crash="hold")

    record = guard.read("charge", "k")
    assert record is not None
    assert (record.state, record.noted, record.steps) == (State.HELD, {"before": 1, "after": 2}, ("pay",))


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_no_step_has_a_name_of_ours(guard: Guard, name: str) -> None:
    with pytest.raises(UsageError, match="name"):
        guard.run("charge", "k", lambda: current().step(name, lambda: None))


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"final_errors": (ValueError,)}, State.FAILED),
        ({"after_crash": "hold", "ambiguous_errors": (ValueError,)}, State.HELD),
        ({"after_crash": "skip", "ambiguous_errors": (ValueError,)}, State.DONE),
        ({"after_crash": lambda _: Done(), "ambiguous_errors": (ValueError,)}, State.DONE),
    ],
    ids=["failed", "held", "skipped", "probed"],
)
def test_a_run_that_raised_and_is_recorded_keeps_its_notes(guard: Guard, fields: Any, state: State) -> None:
    with contextlib.suppress(ValueError):
        guard.run("charge", "k", noting(ValueError("no"), prior=1), policy=Policy(**fields))

    record = guard.read("charge", "k")
    assert record is not None
    assert (record.state, record.noted) == (state, {"prior": 1})


def test_a_run_that_is_released_leaves_no_notes(guard: Guard) -> None:
    def handler() -> None:
        current().step("reserve", lambda: None)
        noting(ValueError("no"), prior=1)()

    with pytest.raises(ValueError, match="no"):
        guard.run("charge", "k", handler)

    record = guard.read("charge", "k")
    assert record is not None
    assert (record.state, record.noted, record.steps) == (State.OPEN, {}, ("reserve",))


@pytest.mark.parametrize("resolution", [Done(), Failed("no")])
def test_a_person_who_resolves_it_leaves_the_notes(guard: Guard, resolution: Done | Failed) -> None:
    with pytest.raises(TimeoutError):
        guard.run("charge", "k", noting(TimeoutError(), prior=1), after_crash="hold")

    guard.resolve("charge", "k", resolution, **WHO)

    assert noted(guard) == {"prior": 1}


def test_another_run_has_its_own_notes(guard: Guard) -> None:
    with pytest.raises(TimeoutError):
        guard.run("charge", "k", noting(TimeoutError(), prior=1, first=True), after_crash="hold")
    with pytest.raises(Held):
        guard.run("charge", "k", lambda: None)
    guard.resolve("charge", "k", Rerun(), **WHO)
    assert noted(guard) == {}

    guard.run("charge", "k", noting(prior=2))

    assert noted(guard) == {"prior": 2}


def test_the_notes_of_a_finished_run_stand_until_a_bypass_has_succeeded(guard: Guard) -> None:
    guard.run("charge", "k", noting(prior=1))

    with pytest.raises(ValueError, match="no"):
        guard.run("charge", "k", noting(ValueError("no"), prior=2, other=True), bypass=True)
    assert noted(guard) == {"prior": 1}

    guard.run("charge", "k", noting(prior=3), bypass=True)
    assert noted(guard) == {"prior": 3}

    guard.run("charge", "k", lambda: None, bypass=True)
    assert noted(guard) == {}


def test_a_bypass_that_died_leaves_the_notes_of_the_run_before() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    with Guard(store) as guard:
        guard.run("charge", "k", noting(prior=1))
    connection = ProxyStore(store)

    def die() -> None:
        current().note(prior=2)
        connection.die()
        raise Died

    with Guard(connection) as guard, pytest.raises(Died):
        guard.run("charge", "k", die, bypass=True)
    with Guard(store) as guard:
        clock.advance(60.0)
        assert guard.run("charge", "k", die).replayed
        with pytest.raises(ValueError, match="no"):
            guard.run("charge", "k", noting(ValueError("no"), prior=3), bypass=True)

        assert noted(guard) == {"prior": 1}


def test_what_cannot_be_kept_is_left_out_with_a_warning_and_costs_no_effect(
    guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    def handler() -> str:
        current().note(first=1, thing=object(), much="x" * NOTED_BYTES_MAX, half="\ud800", last=2)
        return "paid"

    with caplog.at_level(logging.WARNING, logger="onefold"):
        assert guard.run("noting", "k", handler).value == "paid"

    assert noted(guard, "noting") == {"first": 1, "last": 2}
    for name, why in (("thing", "object has no form in JSON"), ("much", "NOTED_BYTES_MAX=4096"), ("half", "no form")):
        assert any(f"note({name}=…) was left out" in line and why in line for line in caplog.messages)


def test_seen_mode_and_batches_keep_notes(guard: Guard) -> None:
    guard.run("seen", "k", noting(prior=1), mode="seen")
    guard.run_batch("batch", ["k"], key=str, handler=lambda _: noting(prior=2)())

    assert (noted(guard, "seen"), noted(guard, "batch")) == ({"prior": 1}, {"prior": 2})


def test_a_transaction_keeps_notes_with_the_work(tmp_path: Path) -> None:
    with Guard(f"sqlite:///{tmp_path / 'shop.db'}") as guard:

        @guard.transactional("credit", key="payment")
        def credit(payment: str, *, tx: sqlite3.Connection = TX) -> None:
            current().note(prior=1)

        credit("k")

        assert noted(guard, "credit") == {"prior": 1}


def test_in_a_transaction_of_the_callers_notes_are_rolled_back_with_the_work(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    with Guard(f"sqlite:///{tmp_path / 'shop.db'}") as guard:
        for end in ("ROLLBACK", "COMMIT"):
            assert noted(guard) is None
            connection.execute("BEGIN IMMEDIATE")
            guard.within(connection).run("charge", "k", noting(prior=1))
            connection.execute(end)

        assert noted(guard) == {"prior": 1}
    connection.close()


def test_a_row_of_the_handlers_own_has_no_room_for_notes_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    connection.execute("CREATE TABLE payments (id TEXT PRIMARY KEY)")

    def pay() -> None:
        connection.execute("INSERT INTO payments VALUES ('k')")
        current().note(prior=1)

    with Guard(f"sqlite:///{tmp_path / 'shop.db'}") as guard, caplog.at_level(logging.WARNING, logger="onefold"):
        connection.execute("BEGIN IMMEDIATE")
        guard.within(connection, record=RecordColumn("payments", "id")).run("own-row", "k", pay)
        connection.execute("COMMIT")

    assert connection.execute("SELECT count(*) FROM payments").fetchone() == (1,)
    assert any("the record is the handler's own row" in line for line in caplog.messages)
    connection.close()


def test_async_handlers_note_without_awaiting() -> None:
    async def scenario() -> dict[str, Any]:
        async with AsyncGuard("memory:") as guard:

            async def handler() -> None:
                current().note(prior=1)

            await guard.run("charge", "k", handler)
            record = await guard.read("charge", "k")
            assert record is not None
            return record.noted

    assert asyncio.run(scenario()) == {"prior": 1}


def test_the_history_of_a_resolution_stays_in_seen_mode_and_in_a_transaction(tmp_path: Path) -> None:
    with Guard(f"sqlite:///{tmp_path / 'shop.db'}") as guard:
        connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
        for operation in ("seen", "joined"):
            with pytest.raises(TimeoutError):
                guard.run(operation, "k", noting(TimeoutError()), after_crash="hold")
            guard.resolve(operation, "k", Rerun(), **WHO)

        guard.run("seen", "k", lambda: None, mode="seen")
        connection.execute("BEGIN IMMEDIATE")
        guard.within(connection).run("joined", "k", lambda: "a result")
        connection.execute("COMMIT")
        connection.close()

        for operation in ("seen", "joined"):
            record = guard.read(operation, "k")
            assert record is not None
            assert record.state is State.DONE
            assert record.history[0].startswith("resolved as rerun by ada")
