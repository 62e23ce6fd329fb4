"""Decorated functions keep their signature: what type checkers say of good calls, and of wrong ones."""

from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, assert_type

from onefold import TX, AsyncGuard, Guard, Outcome
from onefold.guard import UseAnAsyncGuard

guard = Guard("memory:")
async_guard = AsyncGuard("memory:")


class Receipt:
    """What a charge gives."""


@guard.idempotent("charge", key="payment_id")
def charge(payment_id: str, amount: int, /, currency: str = "eur", *, note: str | None = None) -> Receipt:
    return Receipt()


def recipient(payment_id: str, to: str) -> str:
    return to


@guard.idempotent("mail", key=("payment_id", "to"), fingerprint=None, scope=recipient)
def mail(payment_id: str, to: str) -> None:
    return None


@async_guard.idempotent("charge", key="payment_id")
async def charge_async(payment_id: str, amount: int = 1) -> list[Receipt]:
    return []


@guard.scheduled("report", every="1h", keep="7d")
def report(planned: datetime | None = None) -> Receipt:
    return Receipt()


@async_guard.scheduled("report", scope="shop")
async def report_async(shop: str) -> Receipt:
    return Receipt()


assert_type(report(), Receipt)
assert_type(report.outcome(planned=None), Outcome[Receipt])
scheduled = assert_type(report_async("a"), Coroutine[Any, Any, Receipt])
report(planned="14:00")  # type: ignore[arg-type]
guard.scheduled("report", evry="1h")  # type: ignore[call-arg]

assert_type(charge("pay_1", 4200), Receipt)
assert_type(charge("pay_1", 4200, "usd", note="x"), Receipt)
assert_type(charge.outcome("pay_1", 4200), Outcome[Receipt])
assert_type(charge.outcome("pay_1", 4200).value, Receipt)
assert_type(charge.outcome("pay_1", 4200).replayed, bool)
assert_type(charge.bypass("pay_1", 4200, currency="usd"), Outcome[Receipt])
assert_type(mail("pay_1", to="ada"), None)
run = assert_type(charge_async("pay_1"), Coroutine[Any, Any, list[Receipt]])
outcome = assert_type(charge_async.outcome("pay_1", amount=2), Coroutine[Any, Any, Outcome[list[Receipt]]])
bypass = assert_type(charge_async.bypass("pay_1"), Coroutine[Any, Any, Outcome[list[Receipt]]])

as_before: Callable[[str, int], Receipt] = charge
name: str = charge.__name__


async def in_loop() -> None:
    assert_type(await charge_async("pay_1", 2), list[Receipt])
    assert_type((await charge_async.outcome("pay_1")).value, list[Receipt])


charge(1, 4200)  # type: ignore[arg-type]
charge("pay_1")  # type: ignore[call-arg]
charge("pay_1", "4200")  # type: ignore[arg-type]
charge("pay_1", 4200, curency="usd")  # type: ignore[call-arg]
charge("pay_1", amount=4200)  # type: ignore[call-arg]
charge.outcome("pay_1", None)  # type: ignore[arg-type]
charge.bypass()  # type: ignore[call-arg]
charge.nothing  # type: ignore[attr-defined]  # noqa: B018
charge_async(amount="2", payment_id="pay_1")  # type: ignore[arg-type, unused-coroutine]


@async_guard.idempotent("charge", key="payment_id")  # type: ignore[arg-type]
def sync_async_mixed(payment_id: str) -> int:
    return 1


@async_guard.transactional("charge", key="payment_id")  # type: ignore[arg-type]
def sync_async_mixed_in_a_transaction(payment_id: str) -> int:
    return 1


@guard.idempotent("charge", key="payment_id")
async def needs_an_async_guard(payment_id: str) -> int:
    return 1


@guard.transactional("charge", key="payment_id")
async def needs_an_async_guard_for_its_transaction(payment_id: str, tx: object = TX) -> int:
    return 1


assert_type(needs_an_async_guard, UseAnAsyncGuard)
needs_an_async_guard("pay_1")  # type: ignore[operator]
needs_an_async_guard.outcome("pay_1")  # type: ignore[attr-defined]
needs_an_async_guard_for_its_transaction("pay_1")  # type: ignore[operator]


@guard.idempotent("charge")  # type: ignore[call-arg]
def without_a_key(payment_id: str) -> int:
    return 1
