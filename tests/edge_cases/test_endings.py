"""Rows 39 and 40 of the edge cases: results that are left out, and errors of handlers."""

from __future__ import annotations

import asyncio
import traceback

import pytest

from onefold import (
    AsyncGuard,
    Guard,
    Policy,
    RememberedFailure,
    ResultNotKept,
    State,
)
from onefold._model import Record
from onefold.codecs import MsgspecCodec
from onefold.keys import address
from onefold.stores.memory import MemoryStore
from tests.support import Clock, Handler, Heard

CHARGE = address("charge", "pay_1")


class Declined(Exception):
    """Its arguments make it again."""


class DeclinedBy(Declined):
    """A subclass of what is remembered, with more than a message."""

    def __init__(self, bank: str, code: int) -> None:
        super().__init__(bank, code)
        self.bank = bank


class Awkward(Declined):
    """Its arguments do not make it again."""

    def __init__(self, *, bank: str) -> None:
        super().__init__(f"declined by {bank}")


class Doubled(Declined):
    """Its arguments make another one."""

    def __init__(self, bank: str) -> None:
        super().__init__(f"declined by {bank}")


FINAL = Policy(final_errors=(Declined, KeyError))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(clock=Clock())


# Row 39.


def test_a_result_above_the_limit_is_left_out_and_never_runs_again() -> None:
    guard = Guard("memory:", policy=Policy(max_result_bytes=100))
    calls = Handler("x" * 200)
    charge = guard.idempotent("charge", key="number", returns=str)(lambda number: calls())

    first, outcome = charge(1), charge.outcome(1)

    assert first == "x" * 200
    assert (outcome.replayed, outcome.omitted, outcome.value_or(None)) == (True, True, None)
    with pytest.raises(ResultNotKept, match="max_result_bytes=100"):
        charge(1)
    assert calls.starts == 1


def test_a_result_at_the_limit_is_kept() -> None:
    guard = Guard("memory:", policy=Policy(max_result_bytes=len(MsgspecCodec().encode("x" * 200, str))))
    guard.run("charge", "pay_1", Handler("x" * 200))

    assert guard.run("charge", "pay_1", pytest.fail).value == "x" * 200


def test_by_policy_no_result_is_kept_and_a_function_without_one_replays_all_the_same() -> None:
    guard = Guard("memory:", policy=Policy(keep_result=False))

    @guard.idempotent("charge", key="number")
    def charge(number: int) -> str:
        return "paid"

    @guard.idempotent("mail", key="number")
    def mail(number: int) -> None:
        return None

    charge(1)
    mail(1)

    mail(1)
    with pytest.raises(ResultNotKept, match="keep_result=False"):
        charge(1)


# Row 40.


def test_a_handler_that_raises_is_released_and_its_own_error_surfaces_unmasked(store: MemoryStore) -> None:
    error = ValueError("no such card")
    guard = Guard(store)

    def handler() -> None:
        raise error

    with pytest.raises(ValueError, match="no such card") as raised:
        guard.run("charge", "pay_1", handler)

    assert raised.value is error
    assert (error.__context__, error.__cause__, getattr(error, "__notes__", [])) == (None, None, [])
    assert traceback.extract_tb(error.__traceback__)[-1].name == "handler"
    assert store.read(CHARGE) is None
    assert guard.run("charge", "pay_1", Handler()).attempt == 1


def test_an_async_handler_that_raises_is_released_and_its_own_error_surfaces_unmasked() -> None:
    error, guard = ValueError("no such card"), AsyncGuard("memory:")

    async def handler() -> None:
        raise error

    async def story() -> Record | None:
        with pytest.raises(ValueError, match="no such card") as raised:
            await guard.run("charge", "pay_1", handler)
        assert raised.value is error
        return await guard.read("charge", "pay_1")

    assert asyncio.run(story()) is None
    assert error.__context__ is None
    assert traceback.extract_tb(error.__traceback__)[-1].name == "handler"


def test_an_iterator_that_ran_out_inside_a_handler_surfaces_as_just_that(store: MemoryStore) -> None:
    empty: list[int] = []

    with pytest.raises(StopIteration):
        Guard(store).run("charge", "pay_1", lambda: next(iter(empty)))

    assert store.read(CHARGE) is None


def test_the_cause_of_a_handlers_error_stays_its_cause(store: MemoryStore) -> None:
    def handler() -> None:
        try:
            dict[str, str]()["card"]
        except KeyError as cause:
            raise ValueError("no such card") from cause

    with pytest.raises(ValueError, match="no such card") as raised:
        Guard(store).run("charge", "pay_1", handler)

    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize("error", [Declined("card", 7), DeclinedBy("acme", 3), KeyError("card")])
def test_a_final_error_is_replayed_with_the_same_class_and_arguments(store: MemoryStore, error: Exception) -> None:
    heard = Heard()
    guard, handler = Guard(store, policy=FINAL, on_event=heard), Handler(error=error)

    with pytest.raises(type(error)) as first:
        guard.run("charge", "pay_1", handler)
    with pytest.raises(type(error)) as again:
        guard.run("charge", "pay_1", handler)

    assert first.value is error
    assert again.value is not error
    assert (type(again.value), again.value.args) == (type(error), error.args)
    assert "replayed" in "".join(again.value.__notes__)
    assert handler.starts == 1
    assert heard.kinds == ["started", "failed", "replayed"]


def test_a_note_on_a_final_error_does_not_make_it_another_error(store: MemoryStore) -> None:
    guard, error = Guard(store, policy=FINAL), Declined("card")
    error.add_note("seen by the till")

    for _ in range(2):
        with pytest.raises(Declined, match="card"):
            guard.run("charge", "pay_1", Handler(error=error))


@pytest.mark.parametrize("error", [Awkward(bank="acme"), Doubled("acme"), Declined(object()), Declined((1, 2))])
def test_a_final_error_that_cannot_be_made_again_is_replayed_as_a_remembered_failure(
    store: MemoryStore, error: Exception
) -> None:
    guard, handler = Guard(store, policy=FINAL), Handler(error=error)
    with pytest.raises(type(error)):
        guard.run("charge", "pay_1", handler)

    with pytest.raises(RememberedFailure) as again:
        guard.run("charge", "pay_1", handler)

    assert again.value.type_name.endswith(type(error).__name__)
    assert again.value.message == str(error)
    assert handler.starts == 1


def test_a_final_error_whose_class_has_changed_since_is_a_remembered_failure(store: MemoryStore) -> None:
    old = type("Refused", (Exception,), {})
    new = type("Refused", (Exception,), {"__init__": lambda self, *, reason: None})
    with pytest.raises(old):
        Guard(store, policy=Policy(final_errors=(old,))).run("charge", "pay_1", Handler(error=old("card")))

    for policy in (Policy(final_errors=(new,)), Policy()):
        with pytest.raises(RememberedFailure, match="Refused: card"):
            Guard(store, policy=policy).run("charge", "pay_1", pytest.fail)


def test_a_final_error_is_replayed_in_seen_mode_too(store: MemoryStore) -> None:
    guard, handler = Guard(store, policy=FINAL.replace(mode="seen")), Handler(error=Declined("card"))

    for _ in range(2):
        with pytest.raises(Declined, match="card"):
            guard.run("charge", "pay_1", handler)

    assert handler.starts == 1


def test_a_handlers_error_is_not_hidden_by_a_probe_that_fails_too(store: MemoryStore) -> None:
    guard = Guard(store, policy=Policy(after_crash=Handler(error=OSError("the probe's own"))))

    with pytest.raises(TimeoutError, match="no answer"):
        guard.run("charge", "pay_1", Handler(error=TimeoutError("no answer")))

    found = store.read(CHARGE)
    assert found is not None
    assert found.state is State.RUNNING
