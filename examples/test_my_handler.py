"""A test suite of your own handler, without infrastructure. Run it: pytest examples/test_my_handler.py

The handler, and the guard that it is bound to, are as an application has them; no test touches the application's store.
The fixtures come with Onefold. It needs `pip install onefold pytest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import pytest

from onefold import Guard, KeyReused, current
from onefold.stores.memory import MemoryStore
from onefold.testing import Clock, use

# The application.


def production_store() -> NoReturn:
    """Stands for "postgresql://orders.example.org/orders"."""
    raise RuntimeError("a test must never come here")


guard = Guard(production_store)


class Gateway:
    """The payment provider. It deduplicates on the idempotency key, as real ones do."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def charges(self) -> int:
        return len(set(self.calls))

    def charge(self, reference: str, amount: int, idempotency_key: str) -> str:
        self.calls.append(idempotency_key)
        return f"{reference}: charged {amount}"


gateway = Gateway()


@guard.idempotent("charge", key="payment_id")
def charge(payment_id: str, amount: int) -> str:
    return gateway.charge(payment_id, amount, idempotency_key=current().key_for("gateway"))


# Its tests.


@pytest.fixture(autouse=True)
def fresh(onefold_clock: Clock) -> Iterator[None]:
    """A store in memory and an empty gateway for each test; the store's clock is `onefold_clock`."""
    gateway.calls.clear()
    with use(guard, MemoryStore(clock=onefold_clock)):
        yield


def test_a_payment_that_is_delivered_twice_is_charged_once(deliver_twice: Callable[..., Any]) -> None:
    assert deliver_twice(charge, "pay_1", 4200) == "pay_1: charged 4200"

    assert gateway.charges == len(gateway.calls) == 1


def test_equal_amounts_under_two_keys_are_two_payments() -> None:
    charge("pay_1", 4200)
    charge("pay_2", 4200)

    assert gateway.charges == 2


def test_a_key_with_another_amount_is_refused() -> None:
    charge("pay_1", 4200)

    with pytest.raises(KeyReused):
        charge("pay_1", 9900)
    assert gateway.charges == 1


def test_a_worker_that_dies_after_the_charge_does_not_charge_again(
    crash_at: Callable[..., AbstractContextManager[None]], onefold_clock: Clock
) -> None:
    with crash_at("after_handler", guard=guard):
        charge("pay_1", 4200)
    onefold_clock.advance("31s")

    assert charge("pay_1", 4200) == "pay_1: charged 4200"

    assert len(gateway.calls) == 2
    assert gateway.charges == 1, "the second call had another idempotency key"


def test_an_operation_of_its_own_on_a_guard_of_its_own(onefold_guard: Guard, deliver_twice: Callable[..., Any]) -> None:
    sent: list[str] = []

    @onefold_guard.idempotent("receipt", key="payment_id")
    def send_receipt(payment_id: str) -> int:
        sent.append(payment_id)
        return len(sent)

    assert deliver_twice(send_receipt, "pay_1") == 1
    assert sent == ["pay_1"]
