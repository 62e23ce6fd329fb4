"""Decorated methods are bound as methods, class methods and static methods are."""

from collections.abc import Callable, Coroutine
from typing import Any, assert_type

from onefold import AsyncGuard, Guard, Outcome

guard = Guard("memory:")
async_guard = AsyncGuard("memory:")


class Shop:
    @guard.idempotent("charge", key="payment_id")
    def charge(self, payment_id: str, amount: int = 1) -> float:
        return 1.5

    @async_guard.idempotent("ship", key="order")
    async def ship(self, order: int, *, fast: bool = False) -> str:
        return ""

    @staticmethod
    @guard.idempotent("refund", key="payment_id")
    def refund(payment_id: str, amount: int) -> bytes:
        return b""

    @classmethod
    @guard.idempotent("close", key="day")
    def close(cls, day: str) -> int:
        return 1

    @classmethod
    @async_guard.idempotent("audit", key="day")
    async def audit(cls, day: str) -> list[str]:
        return []

    @staticmethod
    @async_guard.idempotent("post", key="letter")
    async def post(letter: int) -> None:
        return None


class Corner(Shop):
    """A shop that inherits its methods."""


shop = Shop()

assert_type(shop.charge("pay_1"), float)
assert_type(shop.charge("pay_1", amount=3), float)
assert_type(shop.charge.outcome("pay_1", amount=3), Outcome[float])
assert_type(shop.charge.bypass("pay_1"), Outcome[float])
assert_type(Shop.charge(shop, "pay_1", 3), float)
assert_type(Shop.charge.outcome(shop, "pay_1", 3), Outcome[float])
ship = assert_type(shop.ship(1, fast=True), Coroutine[Any, Any, str])
outcome = assert_type(Shop.ship.outcome(shop, 1), Coroutine[Any, Any, Outcome[str]])
assert_type(Shop.refund("pay_1", amount=3), bytes)
assert_type(shop.refund("pay_1", 3), bytes)
assert_type(shop.refund.outcome("pay_1", 3), Outcome[bytes])
assert_type(shop.close(day="monday"), int)
assert_type(Shop.close("monday"), int)
assert_type(Shop.close.outcome("monday"), Outcome[int])
assert_type(Corner.close("monday"), int)
assert_type(Corner().charge("pay_1"), float)
audit = assert_type(Shop.audit("monday"), Coroutine[Any, Any, list[str]])
audit_of_one = assert_type(shop.audit("monday"), Coroutine[Any, Any, list[str]])
post = assert_type(shop.post(3), Coroutine[Any, Any, None])

bound: Callable[[str], float] = shop.charge

shop.charge(1)  # type: ignore[arg-type]
shop.charge()  # type: ignore[call-arg]
shop.charge("pay_1", "3")  # type: ignore[arg-type]
shop.charge("pay_1", amout=3)  # type: ignore[call-arg]
shop.charge.outcome(1)  # type: ignore[arg-type]
Shop.charge("pay_1", 3)  # type: ignore[arg-type]
shop.ship("1")  # type: ignore[arg-type, unused-coroutine]
Shop.refund("pay_1")  # type: ignore[call-arg]
shop.close(1)  # type: ignore[arg-type]
shop.refund(1, 3)  # type: ignore[arg-type]
Shop.close()  # type: ignore[call-arg]
Shop.audit(shop, "monday")  # type: ignore[call-arg, arg-type, unused-coroutine]
