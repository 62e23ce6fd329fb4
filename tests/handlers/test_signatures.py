"""A decorated function looks and is called as before: by people, by FastAPI, by Celery, as a method."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pydantic
import pytest
from fastapi import FastAPI

from onefold import AsyncGuard, Guard, KeyReused, UsageError
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import YEAR, Clock

clock = Clock()
guard = Guard(MemoryStore(clock=clock))
async_guard = AsyncGuard(AsyncMemoryStore(clock=clock))
ran: Counter[str] = Counter()


class Payment(pydantic.BaseModel):
    amount: int


class Receipt(pydantic.BaseModel):
    payment_id: str
    amount: int


@guard.idempotent("charge", key="payment_id")
def charge(payment_id: str, amount: int = 1, /, *tags: str, currency: str = "eur", **more: int) -> str:
    """Charge a card."""
    ran["charge"] += 1
    return f"{amount} {currency} {tags} {more}"


@async_guard.idempotent("charge", key="payment_id")
async def charge_async(payment_id: str, amount: int = 1) -> str:
    """Charge a card, async."""
    ran["charge_async"] += 1
    return f"{amount}"


@guard.idempotent("post", key="payment_id")
def post(payment_id: str, payment: Payment, dry: bool = False) -> Receipt:
    ran["post"] += 1
    return Receipt(payment_id=payment_id, amount=payment.amount)


@async_guard.idempotent("put", key="payment_id")
async def put(payment_id: str, payment: Payment) -> Receipt:
    ran["put"] += 1
    return Receipt(payment_id=payment_id, amount=payment.amount)


class Shop:
    def __init__(self, name: str) -> None:
        self.name = name

    @guard.idempotent("shop charge", key="payment_id", scope=lambda self, payment_id, amount=1: self.name)
    def charge(self, payment_id: str, amount: int = 1) -> str:
        """Charge a card in this shop."""
        ran[self.name] += 1
        return f"{self.name} {amount}"

    @async_guard.idempotent("shop ship", key=lambda self, order: f"{self.name}-{order}")
    async def ship(self, order: int) -> str:
        ran["ship"] += 1
        return f"{self.name} {order}"

    @staticmethod
    @guard.idempotent("shop refund", key="payment_id")
    def refund(payment_id: str, amount: int = 1) -> str:
        ran["refund"] += 1
        return f"{amount}"

    @classmethod
    @guard.idempotent("shop close", key="day")
    def close(cls, day: str) -> str:
        ran["close"] += 1
        return f"{cls.__name__} {day}"


@pytest.fixture(autouse=True)
def _long_after_the_last_test() -> None:
    clock.advance(YEAR)
    ran.clear()


# As people see it.


@pytest.mark.parametrize("decorated", [charge, charge_async, post, put, Shop.charge, Shop.ship, Shop.refund])
def test_a_decorated_function_keeps_its_name_its_words_and_its_signature(decorated: Callable[..., Any]) -> None:
    original = inspect.unwrap(decorated)

    assert original is not decorated
    assert inspect.signature(decorated) == inspect.signature(original)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(decorated, name) == getattr(original, name)


def test_a_decorated_function_shows_whether_it_is_async() -> None:
    assert inspect.iscoroutinefunction(charge_async)
    assert inspect.iscoroutinefunction(Shop("a").ship)
    assert not inspect.iscoroutinefunction(charge)
    assert inspect.iscoroutinefunction(charge_async.outcome)
    assert inspect.isfunction(charge)


def test_every_way_to_write_a_call_is_the_same_call() -> None:
    answers = {
        charge("pay_1", 1, currency="eur"),
        charge("pay_1"),
        charge("pay_1", 1),
    }

    assert (len(answers), ran["charge"]) == (1, 1)
    others = [
        functools.partial(charge, "pay_1", 1, "tag"),
        functools.partial(charge, "pay_1", more=1),
        functools.partial(charge, "pay_1", 2),
    ]
    for other in others:
        with pytest.raises(KeyReused):
            other()


# As a method.


def test_a_method_is_bound_and_its_object_is_not_part_of_the_payload() -> None:
    shops = [Shop("a"), Shop("a"), Shop("b")]

    answers = [shop.charge("pay_1", amount=3) for shop in shops]

    assert answers == ["a 3", "a 3", "b 3"]
    assert ran == {"a": 1, "b": 1}
    assert Shop.charge(shops[0], "pay_1", 3) == "a 3"
    assert Shop.charge.outcome(shops[0], "pay_1", 3).replayed


def test_an_async_method_is_bound() -> None:
    shop = Shop("a")

    async def twice() -> list[str]:
        return [await shop.ship(1), await shop.ship(order=1)]

    assert asyncio.run(twice()) == ["a 1", "a 1"]
    assert ran["ship"] == 1


def test_static_methods_and_class_methods_work_from_class_and_instance() -> None:
    shop: Any = Shop("a")
    kind: Any = Shop

    assert [kind.refund("pay_1", 2), shop.refund("pay_1", amount=2)] == ["2", "2"]
    assert [kind.close("monday"), shop.close(day="monday")] == ["Shop monday", "Shop monday"]
    assert (ran["refund"], ran["close"]) == (1, 1)


def test_the_outcome_of_a_bound_method_belongs_to_its_object() -> None:
    shop: Any = Shop("a")

    outcomes = [shop.charge.outcome("pay_1", 3), shop.charge.outcome("pay_1", amount=3)]

    assert [(outcome.value, outcome.replayed) for outcome in outcomes] == [("a 3", False), ("a 3", True)]
    assert shop.charge.bypass("pay_1", 3).value == "a 3"
    assert ran["a"] == 2


# As functools, Celery and others wrap it.


def test_a_partial_of_a_decorated_function_is_that_function() -> None:
    in_dollars = functools.partial(charge, "pay_1", 5, currency="usd")

    assert in_dollars() == in_dollars() == charge("pay_1", 5, currency="usd")
    assert ran["charge"] == 1


def test_a_partial_can_be_decorated() -> None:
    def pay(bank: str, payment_id: str, amount: int) -> tuple[str, int]:
        ran[bank] += 1
        return bank, amount

    decorated = guard.idempotent("partial", key="payment_id")(functools.partial(pay, "acme", amount=7))

    assert decorated(payment_id="pay_1") == decorated(payment_id="pay_1") == ("acme", 7)
    assert ran["acme"] == 1


def test_a_callable_object_can_be_decorated() -> None:
    class Pay:
        def __call__(self, payment_id: str) -> str:
            ran["object"] += 1
            return payment_id

    decorated = guard.idempotent("object", key="payment_id")(Pay())

    assert decorated("pay_1") == decorated("pay_1") == "pay_1"
    assert ran["object"] == 1
    with pytest.raises(UsageError, match="did you mean 'payment_id'"):
        guard.idempotent("object", key="paymentid")(Pay())


def test_another_decorator_may_stand_above_or_below() -> None:
    def loud(function: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> str:
            return function(*args, **kwargs).upper()

        return wrapper

    def pay(payment_id: str) -> str:
        return payment_id

    above = loud(guard.idempotent("above", key="payment_id")(pay))
    below = guard.idempotent("below", key="payment_id")(loud(pay))

    assert [above("pay_1"), above("pay_1"), below("pay_1"), below("pay_1")] == ["PAY_1"] * 4


def test_a_bound_task_gets_itself_first_as_celery_gives_it() -> None:
    class Task:
        """What `@app.task(bind=True)` does: the function becomes a method of its task."""

        def __init__(self, function: Callable[..., str]) -> None:
            self.run = function.__get__(self, Task)
            self.retries = 0
            self.arguments = list(inspect.signature(self.run).parameters)

    @Task
    @guard.idempotent("task", key="order")
    def task(self: Any, order: int, fast: bool = False) -> str:
        self.retries += 1
        return f"{order} {self.retries}"

    assert [task.run(7), task.run(order=7), task.run(7, fast=False)] == ["7 1"] * 3
    assert task.arguments == ["order", "fast"]


# As FastAPI sees it.


def send(method: str, url: str, *bodies: dict[str, Any] | None) -> list[httpx.Response]:
    """What an application with two guarded endpoints, one sync and one async, answers to these bodies in turn."""
    app = FastAPI()
    app.post("/payments/{payment_id}")(post)
    app.put("/payments/{payment_id}")(put)

    async def talk() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            return [await client.request(method, url, json=body) for body in bodies]

    return asyncio.run(talk())


@pytest.mark.parametrize("method", ["post", "put"])
def test_a_guarded_endpoint_runs_once_and_answers_every_delivery(method: str) -> None:
    answers = send(method, "/payments/pay_1", {"amount": 3}, {"amount": 3}, {"amount": 3})

    assert [answer.status_code for answer in answers] == [200] * 3
    assert [answer.json() for answer in answers] == [{"payment_id": "pay_1", "amount": 3}] * 3
    assert ran[method] == 1


def test_a_guarded_endpoint_is_validated_and_documented_as_before() -> None:
    (wrong,) = send("post", "/payments/pay_1", {"amount": "many"})
    (schema,) = send("get", "/openapi.json", None)

    described = schema.json()["paths"]["/payments/{payment_id}"]
    answer = described["put"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert wrong.status_code == 422
    assert [one["name"] for one in described["post"]["parameters"]] == ["payment_id", "dry"]
    assert answer == {"$ref": "#/components/schemas/Receipt"}
    assert ran["post"] == 0


def test_another_body_under_the_same_key_is_refused_at_an_endpoint_too() -> None:
    with pytest.raises(KeyReused):
        send("post", "/payments/pay_1", {"amount": 3}, {"amount": 4})
