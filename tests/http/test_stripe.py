"""The rules of Stripe: saved is what came of a request once it began, and nothing of what was refused before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel, Field

from onefold import AsyncGuard, Policy
from onefold.http.fastapi import IdempotencyMiddleware, describe, idempotent_route, single_tenant
from tests.http_service.adapters import ADAPTERS, Service, service_on
from tests.support import in_time


class Payment(BaseModel):
    amount: int = Field(gt=0)
    # What the endpoint answers, after it has begun.
    status: int = 200


def signed_in(x_user: Annotated[str, Header()] = "1") -> str:
    if not x_user.isdecimal():
        raise HTTPException(401)
    if int(x_user) >= 400:
        raise HTTPException(int(x_user))
    return x_user


class Shop:
    """A service whose endpoint counts its runs."""

    def __init__(self, *, per_route: bool, rules: str = "stripe", policy: Policy | None = None) -> None:
        self.runs = 0
        self.app = FastAPI()
        options: dict[str, Any] = {
            "guard": AsyncGuard("memory:", policy=policy or Policy()),
            "scope": single_tenant,
            "rules": rules,
        }
        if per_route:
            self.app.router.route_class = idempotent_route(**options)
        else:
            self.app.add_middleware(IdempotencyMiddleware, **options)

        @self.app.post("/pay")
        async def pay(payment: Payment, user: Annotated[str, Depends(signed_in)]) -> dict[str, int]:
            self.runs += 1
            if payment.status == 0:
                raise TimeoutError("the bank did not answer")
            if payment.status == -1:
                raise asyncio.CancelledError
            if payment.status != 200:
                raise HTTPException(payment.status)
            return {"run": self.runs}

    def post(self, amount: int = 5, status: int = 200, *, user: str = "1") -> httpx.Response:
        async def story() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                headers = {"Idempotency-Key": "key", "X-User": user}
                return await client.post("/pay", json={"amount": amount, "status": status}, headers=headers)

        return in_time(story())


@pytest.fixture(params=[False, True], ids=["middleware", "route"])
def shop(request: pytest.FixtureRequest) -> Shop:
    return Shop(per_route=request.param)


def is_replay(answer: httpx.Response) -> bool:
    return bool(answer.headers.get("idempotent-replayed") == "true")


def test_a_request_that_is_not_valid_saves_nothing_and_may_be_corrected_under_its_key(shop: Shop) -> None:
    refused = [shop.post(amount=-1) for _ in range(2)]
    corrected, again = shop.post(amount=5), shop.post(amount=5)

    assert [one.status_code for one in refused] == [422, 422]
    assert [is_replay(one) for one in (*refused, corrected, again)] == [False, False, False, True]
    assert (corrected.json(), again.json(), shop.runs) == ({"run": 1}, {"run": 1}, 1)


@pytest.mark.parametrize("user", ["nobody", "401", "403", "429"])
def test_a_caller_who_is_refused_before_it_begins_saves_nothing(shop: Shop, user: str) -> None:
    refused, let_in = shop.post(user=user), shop.post()

    assert refused.status_code == (401 if user == "nobody" else int(user))
    assert (let_in.status_code, is_replay(let_in), shop.runs) == (200, False, 1)


@pytest.mark.parametrize("status", [401, 403, 429])
def test_a_refusal_that_an_endpoint_makes_itself_is_not_saved_either(shop: Shop, status: int) -> None:
    answers = [shop.post(status=status) for _ in range(2)]

    assert [one.status_code for one in answers] == [status, status]
    assert [is_replay(one) for one in answers] == [False, False]


@pytest.mark.parametrize("status", [402, 409, 500, 503])
def test_what_came_of_it_is_saved_whatever_it_is(shop: Shop, status: int) -> None:
    answers = [shop.post(status=status) for _ in range(2)]

    assert [one.status_code for one in answers] == [status, status]
    assert [is_replay(one) for one in answers] == [False, True]
    assert shop.runs == 1


def test_an_endpoint_that_raised_is_not_run_again(shop: Shop) -> None:
    first, second = shop.post(status=0), shop.post(status=0)

    assert (first.status_code, second.status_code) == (500, 500)
    assert (second.json()["code"], shop.runs) == ("failed", 1)


def test_another_request_under_the_key_is_400(shop: Shop) -> None:
    shop.post(amount=5)

    other = shop.post(amount=6)

    assert (other.status_code, other.json()["status"], other.json()["code"]) == (400, 400, "key_reused")
    assert shop.runs == 1


@pytest.mark.parametrize("status", [400, 404, 422])
def test_on_a_route_the_endpoints_own_refusals_are_saved_because_it_has_begun(status: int) -> None:
    shop = Shop(per_route=True)

    answers = [shop.post(status=status) for _ in range(2)]

    assert [one.status_code for one in answers] == [status, status]
    assert [is_replay(one) for one in answers] == [False, True]
    assert shop.runs == 1


@pytest.mark.parametrize("per_route", [False, True], ids=["middleware", "route"])
@pytest.mark.parametrize(
    ("rules", "after_crash", "code"), [("stripe", "rerun", "failed"), ("below_500", "hold", "held")]
)
def test_an_endpoint_that_raises_a_cancellation_is_not_run_again(
    per_route: bool, rules: str, after_crash: Any, code: str
) -> None:
    """It has run, perhaps to its effect: a scope of its own was cancelled, or a task that it awaited."""
    shop = Shop(per_route=per_route, rules=rules, policy=Policy(after_crash=after_crash))

    answers = [shop.post(status=-1) for _ in range(2)]

    assert answers[1].json()["code"] == code
    assert shop.runs == 1


@pytest.fixture(params=ADAPTERS)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with service_on(request.param) as service:
        yield service


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_every_request_that_changes_something_is_guarded(service: Service, method: str) -> None:
    """A repeated DELETE gets the response of the first, and not a 404 for what is gone."""
    service.take({"scope": single_tenant, "rules": "stripe"})

    first, again = (service.post(method=method) for _ in range(2))

    assert (first.body, first.is_replay, again.is_replay) == (again.body, False, True)
    assert len(service.ran) == 1


@pytest.mark.parametrize("options", [{"rules": "below_500"}, {"rules": "stripe", "methods": ["POST"]}], ids=str)
def test_elsewhere_a_delete_is_guarded_only_where_it_is_named(service: Service, options: dict[str, Any]) -> None:
    service.take({"scope": single_tenant, **options})

    for _ in range(2):
        service.post(method="DELETE")

    assert len(service.ran) == 2


@pytest.mark.parametrize(("rules", "described"), [("stripe", {"post", "delete"}), ("below_500", {"post"})])
def test_the_schema_has_the_header_where_a_request_is_guarded(rules: str, described: set[str]) -> None:
    behind = FastAPI()
    for add in (behind.get, behind.post, behind.delete):
        add("/orders")(lambda: None)
    describe(behind, rules=rules)

    assert {verb for verb, told in behind.openapi()["paths"]["/orders"].items() if "parameters" in told} == described
