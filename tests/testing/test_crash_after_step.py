"""`crash_at("after_step", guard, step="pay")`: the worker dies between two steps of its handler."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onefold import TX, AsyncGuard, Guard, State, UsageError, current
from onefold.testing import Clock, crash_at


class Shop:
    """A handler of two steps that counts its effects."""

    def __init__(self) -> None:
        self.paid: list[int] = []
        self.mailed: list[int] = []

    def pay(self) -> str:
        self.paid.append(current().attempt)
        return "paid"

    def mail(self) -> str:
        self.mailed.append(current().attempt)
        return "mailed"

    def order(self, _message: object = None) -> str:
        return current().step("pay", self.pay) + current().step("mail", self.mail)

    async def order_async(self) -> str:
        async def pay() -> str:
            return self.pay()

        async def mail() -> str:
            return self.mail()

        return await current().step("pay", pay) + await current().step("mail", mail)


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def sqlite_guard(tmp_path: Path) -> Iterator[Guard]:
    with Guard(f"sqlite:///{tmp_path}/shop.db") as guard:
        yield guard


def test_a_worker_that_dies_after_a_step_has_left_it_in_the_store(
    shop: Shop, onefold_guard: Guard, onefold_clock: Clock
) -> None:
    with crash_at("after_step", onefold_guard, step="pay"):
        onefold_guard.run("order", "42", shop.order)
        pytest.fail("it did not crash")
    assert (shop.paid, shop.mailed) == ([1], [])
    record = onefold_guard.read("order", "42")
    assert record is not None
    assert record.state is State.RUNNING

    onefold_clock.advance("31s")
    outcome = onefold_guard.run("order", "42", shop.order)

    assert outcome.value == "paidmailed"
    assert (shop.paid, shop.mailed) == ([1], [2])


def test_of_an_async_guard(shop: Shop, onefold_async_guard: AsyncGuard, onefold_clock: Clock) -> None:
    async def deliver() -> Any:
        with crash_at("after_step", onefold_async_guard, step="pay"):
            await onefold_async_guard.run("order", "42", shop.order_async)
            pytest.fail("it did not crash")
        assert (shop.paid, shop.mailed) == ([1], [])
        onefold_clock.advance("31s")
        return await onefold_async_guard.run("order", "42", shop.order_async)

    assert asyncio.run(deliver()).value == "paidmailed"
    assert (shop.paid, shop.mailed) == ([1], [2])


def test_of_a_message_in_a_batch(shop: Shop, onefold_guard: Guard, onefold_clock: Clock) -> None:
    with crash_at("after_step", onefold_guard, step="pay"):
        onefold_guard.run_batch("order", ["42"], key=str, handler=shop.order)
    assert (shop.paid, shop.mailed) == ([1], [])

    onefold_clock.advance("31s")
    onefold_guard.run_batch("order", ["42"], key=str, handler=shop.order)

    assert (shop.paid, shop.mailed) == ([1], [2])


def test_on_a_store_on_disk(shop: Shop, sqlite_guard: Guard) -> None:
    with crash_at("after_step", sqlite_guard, step="mail"):
        sqlite_guard.run("order", "42", shop.order)

    assert (shop.paid, shop.mailed) == ([1], [1])
    record = sqlite_guard.read("order", "42")
    assert record is not None
    assert record.state is State.RUNNING


def test_a_step_that_is_replayed_is_not_the_point(shop: Shop, onefold_guard: Guard, onefold_clock: Clock) -> None:
    with crash_at("after_step", onefold_guard, step="pay"):
        onefold_guard.run("order", "42", shop.order)
    onefold_clock.advance("31s")

    # The log that the second step writes names the first one, too.
    with (
        pytest.raises(
            AssertionError, match=r"no delivery got to 'after_step' of step='pay': nothing crashed\. A finished"
        ),
        crash_at("after_step", onefold_guard, step="pay"),
    ):
        onefold_guard.run("order", "42", shop.order)

    assert (shop.paid, shop.mailed) == ([1], [2])


def test_a_transactional_handler_has_no_log_of_steps(shop: Shop, sqlite_guard: Guard) -> None:
    @sqlite_guard.transactional("order", key="number")
    def order(number: str, *, tx: Any = TX) -> str:
        return shop.order()

    with (
        pytest.raises(AssertionError, match=r"nothing crashed\. .* a transactional handler has no log of steps"),
        crash_at("after_step", sqlite_guard, step="pay"),
    ):
        order("42")


def test_the_fixture_takes_the_step_too(shop: Shop, onefold_guard: Guard, request: pytest.FixtureRequest) -> None:
    with request.getfixturevalue("crash_at")("after_step", step="pay"):
        onefold_guard.run("order", "42", shop.order)

    assert (shop.paid, shop.mailed) == ([1], [])


@pytest.mark.parametrize(
    ("point", "step", "message"),
    [
        ("after_step", None, "name the step after which to die"),
        ("after_step", "", "name the step after which to die"),
        ("after_step", 7, "name the step after which to die"),
        ("after_claim", "pay", "step='pay' belongs to 'after_step', but the point is 'after_claim'"),
    ],
)
def test_a_step_is_named_for_its_own_point_and_for_no_other(
    point: Any, step: Any, message: str, onefold_guard: Guard
) -> None:
    with pytest.raises(UsageError, match=message):
        crash_at(point, onefold_guard, step=step).__enter__()
