"""A step's name is one effect, and what a step returned is never taken for the end of its delivery."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onefold import TX, AsyncGuard, Guard, Policy, ResultNotKept, ResultUnreadable, State, UsageError, current
from onefold._model import Address
from onefold.queues import keys
from onefold.queues._rabbitmq import consumer as rabbitmq_consumer
from onefold.queues._shared.consumer import AsyncConsuming, Consuming
from onefold.queues._shared.verdict import ACK, HandlerRaised, Never, of_error
from onefold.queues.keys import Message
from tests.queues.rabbitmq_tools import Consumer, Environment, until
from tests.support import Handler

SENT = Message(b"{}", headers={"idempotency-key": "m1"})
WHEN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


# What a step may return.


def reserving(effects: list[str], **options: Any) -> Callable[[], str]:
    """Return a handler whose first run fails after its first step."""

    def reserve() -> dt.datetime:
        effects.append("reserve")
        return WHEN

    def handler() -> str:
        until = current().step("reserve", reserve, **options)
        if current().attempt == 1:
            raise ValueError("the card was declined")
        effects.append("pay")
        return f"{until:%Y}"

    return handler


def test_a_step_whose_value_could_not_be_kept_warns_at_once_and_raises_a_usage_error_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    effects: list[str] = []
    guard = Guard("memory:")
    with caplog.at_level(logging.WARNING, "onefold"), pytest.raises(ValueError, match="declined"):
        guard.run("reserving", "o-1", reserving(effects))

    assert "the step 'reserve' returned datetime, which cannot be stored" in caplog.text
    assert "returns=" in caplog.text
    with pytest.raises(UsageError, match=r"the step 'reserve' .* It did not run again, and this delivery is not done"):
        guard.run("reserving", "o-1", reserving(effects))
    assert effects == ["reserve"]
    found = guard.read("reserving", "o-1")
    assert found is None or found.state is not State.DONE


def test_with_its_type_the_step_is_replayed() -> None:
    effects: list[str] = []
    guard = Guard("memory:")
    handler = reserving(effects, returns=dt.datetime)
    with pytest.raises(ValueError, match="declined"):
        guard.run("reserving typed", "o-1", handler)

    assert guard.run("reserving typed", "o-1", handler).value == "2026"
    assert effects == ["reserve", "pay"]


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "awaiting"])
def test_a_message_whose_step_cannot_be_replayed_is_not_acknowledged(*, is_async: bool) -> None:
    effects: list[str] = []
    handler = reserving(effects)

    async def handle_async(_body: str) -> None:
        async def reserve() -> dt.datetime:
            effects.append("reserve")
            return WHEN

        await current().step("reserve", reserve)
        raise ValueError("the card was declined")

    async def main() -> list[Any]:
        async with AsyncGuard("memory:") as guard:
            consuming = AsyncConsuming(guard, "reserved", handle_async, key=keys.header())
            return [await consuming.deliver(SENT, "body") for _ in range(2)]

    def handle(_body: str) -> None:
        handler()

    if is_async:
        verdicts = asyncio.run(main())
    else:
        consuming = Consuming(Guard("memory:"), "reserved", handle, key=keys.header())
        verdicts = [consuming.deliver(SENT, "body") for _ in range(2)]

    assert isinstance(verdicts[0], HandlerRaised)
    assert isinstance(verdicts[1], Never)
    assert "the step 'reserve'" in verdicts[1].reason
    assert effects == ["reserve"]


@pytest.mark.parametrize("kind", [ResultNotKept, ResultUnreadable])
def test_what_a_handler_raises_itself_is_never_the_end_of_its_message(kind: type[ResultNotKept]) -> None:
    """Also where the address is its own: an inner guard on another store may use the same name and key."""
    error = kind.about(Address("", "charge", "m1"), remark="", expected="", problem="")

    assert of_error(error, own=("charge", "m1"), called=True) == HandlerRaised(error)
    assert of_error(error, own=("charge", "m1")) == ACK

    def handle(_body: str) -> None:
        raise error

    assert Consuming(Guard("memory:"), "charge", handle, key=keys.header()).deliver(SENT, "body") == HandlerRaised(
        error
    )


# A name is one effect.


def mailing(sent: list[str]) -> Callable[[], None]:
    def handler() -> None:
        for one in "abc":
            current().step("mail", partial(sent.append, one))

    return handler


@pytest.mark.parametrize("policy", [Policy(), Policy(mode="seen")], ids=["claim", "seen"])
def test_two_steps_of_one_name_are_refused(policy: Policy) -> None:
    sent: list[str] = []

    with pytest.raises(UsageError, match=r"the step 'mail' was used before in this run: a name stands for one effect"):
        Guard("memory:").run("mail", "m1", mailing(sent), policy=policy)

    assert sent == ["a"]


def test_two_steps_of_one_name_are_refused_in_a_transaction(tmp_path: Path) -> None:
    sent: list[str] = []
    with Guard(f"sqlite:///{tmp_path / 'records.db'}") as guard:

        @guard.transactional("mail", key="key")
        def handler(key: str, *, tx: sqlite3.Connection = TX) -> None:
            mailing(sent)()

        with pytest.raises(UsageError, match="'mail' was used before in this run"):
            handler("m1")


def test_two_steps_of_one_name_are_refused_where_they_are_gathered() -> None:
    sent: list[int] = []

    async def one(number: int) -> None:
        await asyncio.sleep(0)
        sent.append(number)

    async def handler() -> None:
        steps = [lambda number=number: one(number) for number in range(3)]
        taken = [asyncio.create_task(taking(step)) for step in steps]
        await asyncio.gather(*taken)

    async def taking(step: Callable[[], Any]) -> None:
        await current().step("mail", step)

    async def main() -> None:
        async with AsyncGuard("memory:") as guard:
            with pytest.raises(UsageError, match="'mail' was used before in this run"):
                await guard.run("mail", "m1", handler)

    asyncio.run(main())

    assert len(sent) <= 1


def test_a_step_that_failed_may_be_tried_again_in_the_same_run() -> None:
    pay = Handler(error=ConnectionError("reset"))

    def handler() -> Any:
        with pytest.raises(ConnectionError):
            current().step("pay", pay)
        pay.error, pay.value = None, 7
        return current().step("pay", pay)

    async def handler_async() -> Any:
        async def pay_async() -> Any:
            return pay()

        with pytest.raises(ConnectionError):
            await current().step("pay", pay_async)
        pay.error, pay.value = None, 7
        return await current().step("pay", pay_async)

    assert Guard("memory:").run("pay", "p1", handler).value == 7
    pay.error = ConnectionError("reset")
    assert asyncio.run(_run(handler_async)) == 7


async def _run(handler: Callable[[], Any]) -> Any:
    async with AsyncGuard("memory:") as guard:
        return (await guard.run("pay", "p1", handler)).value


def test_a_later_attempt_replays_by_name_and_refuses_a_second_one_too() -> None:
    ran: list[str] = []
    guard = Guard("memory:")

    def handler() -> None:
        current().step("reserve", lambda: ran.append("reserve"))
        if current().attempt == 1:
            raise ValueError("declined")
        if current().attempt == 2:
            current().step("reserve", lambda: ran.append("again"))

    with pytest.raises(ValueError, match="declined"):
        guard.run("order", "o-1", handler)
    with pytest.raises(UsageError, match="'reserve' was used before"):
        guard.run("order", "o-1", handler)
    guard.run("order", "o-1", handler)

    assert ran == ["reserve"]


def test_on_a_real_broker_such_a_message_goes_to_the_dead_letters_with_its_reason(
    rabbitmq_url: str, rabbitmq_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rabbitmq_consumer, "FAILED_DELAY", 0.01)
    environment, effects = Environment(rabbitmq_url, rabbitmq_name), list[str]()
    handler = reserving(effects)
    environment.send_keyed("pay-1")

    with Consumer(
        "pika", environment, f"sqlite:///{tmp_path / 'records.db'}", lambda _delivery: handler() and None
    ) as one:
        until(lambda: one.acks == 1, "it is off the queue")

    assert environment.count(environment.dead) == 1
    assert "the step 'reserve' was finished by an earlier" in environment.letter()[0].headers["x-onefold-reason"]
    assert effects == ["reserve"]
