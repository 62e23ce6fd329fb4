"""What a held record keeps of the handler's error: its class; and its text, only where the policy allows it."""

from __future__ import annotations

import asyncio
import logging
from decimal import InvalidOperation
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Held, OutcomeUnknown, Policy, Rerun, State, Unknown
from onefold._delivery.decide import ERROR_TEXT_MAX
from onefold.events import Event
from onefold.keys import address
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import Clock, Handler

CHARGE = address("charge", "pay_1")
CARD = "card 4111 1111 1111 1111"

HOLD = Policy(after_crash="hold", keep="forever")
WITH_TEXT = HOLD.replace(keep_error_text=True)


class GatewayTimeout(TimeoutError):
    """One of the application's own."""


def put_held(store: Any, error: BaseException, policy: Policy = HOLD) -> str:
    """The remark of a record that became held because of this error."""
    with pytest.raises(type(error)):
        Guard(store, policy=policy).run("charge", "pay_1", Handler(error=error))
    record = store.read(CHARGE)
    assert record is not None
    assert record.state is State.HELD
    return str(record.remark)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (TimeoutError(CARD), "TimeoutError"),
        (GatewayTimeout(CARD), f"{__name__}.GatewayTimeout"),
        (InvalidOperation(CARD), "decimal.InvalidOperation"),
        (OutcomeUnknown(CARD), "OutcomeUnknown"),
    ],
)
def test_by_default_it_is_the_class_and_nothing_of_the_text(error: Exception, named: str) -> None:
    policy = HOLD.replace(ambiguous_errors=(TimeoutError, InvalidOperation))

    assert put_held(MemoryStore(), error, policy) == f"attempt 1 ended in {named}"


def test_the_text_is_kept_where_the_policy_allows_it() -> None:
    assert (
        put_held(MemoryStore(), TimeoutError(CARD), WITH_TEXT) == f"attempt 1 ended in TimeoutError, which said: {CARD}"
    )


def test_an_async_guard_does_the_same() -> None:
    store = AsyncMemoryStore()

    async def fails() -> None:
        raise TimeoutError(CARD)

    async def charge() -> str:
        with pytest.raises(TimeoutError):
            await AsyncGuard(store, policy=WITH_TEXT).run("charge", "pay_1", fails)
        record = await store.read(CHARGE)
        assert record is not None
        return record.remark

    assert asyncio.run(charge()) == f"attempt 1 ended in TimeoutError, which said: {CARD}"


class Mute(TimeoutError):
    def __str__(self) -> str:
        raise ValueError("it fails to describe itself")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError("two\n  lines\tand a tab"), "two lines and a tab"),
        (TimeoutError("\x1b[31mred\0\udc80"), r"\x1b[31mred\x00\udc80"),
        (TimeoutError("x" * ERROR_TEXT_MAX), "x" * ERROR_TEXT_MAX),
        (TimeoutError("x" * 100_000), "x" * (ERROR_TEXT_MAX - 1) + "…"),
        (TimeoutError("\n" * 100_000), ""),
        (TimeoutError(), ""),
        (Mute(), "<Mute>"),
    ],
)
def test_the_text_is_one_line_that_can_be_printed_and_is_bounded(error: Exception, text: str) -> None:
    _, _, said = put_held(MemoryStore(), error, WITH_TEXT).partition(", which said: ")

    assert said == text
    assert len(said) <= ERROR_TEXT_MAX


def test_a_text_cannot_pass_for_the_history_of_the_record() -> None:
    store = MemoryStore()
    put_held(store, TimeoutError("x | before: resolved as done by eve"), WITH_TEXT)
    Guard(store, policy=WITH_TEXT).resolve("charge", "pay_1", Rerun(), by="ada", reason="asked the bank")

    record = store.read(CHARGE)
    assert record is not None
    assert len(record.history) == 2
    assert record.history[1].endswith("which said: x / before: resolved as done by eve")


def test_the_text_is_only_in_the_record_and_neither_raised_nor_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store, heard = MemoryStore(), list[Event]()
    put_held(store, TimeoutError(CARD), WITH_TEXT)
    guard = Guard(store, policy=WITH_TEXT, on_event=heard.append)

    with pytest.raises(Held) as refused:
        guard.run("charge", "pay_1", Handler())

    assert refused.value.remark == "attempt 1 ended in TimeoutError"
    assert CARD not in str(refused.value)
    assert CARD not in repr(heard)
    assert CARD not in caplog.text


def test_a_rerun_that_came_too_late_keeps_what_the_last_run_ended_in() -> None:
    clock = Clock()
    store, heard = MemoryStore(clock=clock), list[Event]()
    policy = Policy(rerun_within="1h", keep_error_text=True)
    guard = Guard(store, policy=policy, on_event=heard.append)
    with pytest.raises(GatewayTimeout):
        guard.run("charge", "pay_1", Handler(error=GatewayTimeout(CARD)))

    clock.advance(3600)
    with pytest.raises(Held) as refused:
        guard.run("charge", "pay_1", Handler())

    why = f"attempt 1 left no answer, and rerun_within=3600s has passed; it ended in {__name__}.GatewayTimeout"
    record = store.read(CHARGE)
    assert record is not None
    assert record.remark == f"{why}, which said: {CARD}"
    assert refused.value.remark == why
    assert CARD not in repr(heard)


def test_a_probe_that_does_not_know_leaves_the_error_in_the_record() -> None:
    policy = Policy(after_crash=lambda _running: Unknown(), keep_error_text=True)

    assert put_held(MemoryStore(), TimeoutError(CARD), policy).endswith(f"TimeoutError, which said: {CARD}")


@pytest.mark.parametrize("url", ["postgres_url", "mysql_url", "redis_url", "dynamodb_url"])
def test_every_store_keeps_it(url: str, request: pytest.FixtureRequest) -> None:
    with Guard(request.getfixturevalue(url), policy=WITH_TEXT) as guard:
        remark = put_held(guard.store, TimeoutError("größer als 5 € - \0 \udc80"), WITH_TEXT)

    assert remark == r"attempt 1 ended in TimeoutError, which said: größer als 5 € - \x00 \udc80"
