"""`fingerprint=`: what has to be equal under one key, if it is not the whole content. Host, method and path stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from onefold import UsageError
from onefold.http import Body, Request
from onefold.http.scopes import single_tenant
from tests.http_service.adapters import ADAPTERS, Service, service_on


@pytest.fixture(params=ADAPTERS)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with service_on(request.param) as service:
        yield service


def amount(_request: Request, body: Body) -> Any:
    """What counts of a request whose timestamp is another one in each retry."""
    return json.loads(body.read())["amount"]


def order(amount: int, at: str) -> bytes:
    return json.dumps({"amount": amount, "at": at}).encode()


def test_what_the_function_leaves_out_may_differ_in_a_retry(service: Service) -> None:
    service.take({"scope": single_tenant, "fingerprint": amount})

    first = service.post("/pay?sent=1", order(5, "09:00"))
    again = service.post("/pay?sent=2", order(5, "09:01"))

    assert (again.is_replay, again.body) == (True, first.body)
    # The handler has read the body after the function has.
    assert service.ran == [order(5, "09:00")]


def test_what_the_function_returns_must_not_differ(service: Service) -> None:
    service.take({"scope": single_tenant, "fingerprint": amount})
    service.post(body=order(5, "09:00"))

    refused = service.post(body=order(6, "09:00"))

    assert (refused.status, refused.code, len(service.ran)) == (422, "key_reused", 1)


@pytest.mark.parametrize("fingerprint", [None, lambda _request, _body: "same"], ids=["opted out", "always the same"])
def test_no_function_shows_the_response_of_another_route_or_of_another_host(service: Service, fingerprint: Any) -> None:
    """Each host may be a tenant, whose users have the names of another's."""
    service.take({"scope": single_tenant, "fingerprint": fingerprint})
    first = service.post(body=order(5, "09:00"), host="a.example")

    again = service.post("/pay?x=1", order(6, "10:00"), host="a.example")
    other_route = service.post("/refund", order(5, "09:00"), host="a.example")
    other_host = service.post(body=order(5, "09:00"), host="b.example")

    assert (again.is_replay, again.body) == (True, first.body)
    assert [(one.status, one.code) for one in (other_route, other_host)] == [(422, "key_reused")] * 2
    assert len(service.ran) == 1


@pytest.mark.parametrize("fingerprint", [None, lambda _request, _body: "same"], ids=["opted out", "always the same"])
def test_no_function_shows_one_tenant_the_response_of_another(service: Service, fingerprint: Any) -> None:
    service.take({"scope": lambda request: request.header("X-Tenant"), "fingerprint": fingerprint})

    answers = [service.post(X_Tenant=tenant) for tenant in ("asha", "riya", "asha")]

    assert [one.is_replay for one in answers] == [False, False, True]
    assert [one.body for one in answers] == [answers[0].body, answers[1].body, answers[0].body]
    assert answers[0].body != answers[1].body


def test_another_function_never_takes_a_request_for_one_that_it_did_not_compare(service: Service) -> None:
    """After a deployment: what was recorded by the old function is refused, and not replayed for another payload."""
    whole = {"scope": single_tenant}
    for options in (whole, {**whole, "fingerprint": amount}, {**whole, "fingerprint": None}):
        service.take(options)
        service.post(body=order(5, "09:00"), key=f"by-{len(service.ran)}")

    service.take({**whole, "fingerprint": amount})

    assert [service.post(body=order(5, "09:00"), key=f"by-{number}").code for number in (0, 2)] == ["key_reused"] * 2


@pytest.mark.parametrize(
    ("fingerprint", "says"),
    [
        (lambda _request, _body: None, "fingerprint= returned None, .*or pass fingerprint=None"),
        (lambda _request, _body: object(), r"cannot be compared \(.*object.*\)\. Nothing ran\. Return text, bytes"),
        (lambda _request, _body: Later(), "fingerprint= returned an awaitable"),
    ],
    ids=["None", "an object", "an awaitable"],
)
def test_what_cannot_be_compared_is_a_programmers_mistake_and_nothing_runs(
    service: Service, fingerprint: Any, says: str
) -> None:
    service.take({"scope": single_tenant, "fingerprint": fingerprint})

    with pytest.raises(UsageError, match=says):
        service.post()

    assert (service.ran, service.records()) == ([], [])


def test_what_the_function_raises_is_its_own_and_nothing_runs(service: Service) -> None:
    service.take({"scope": single_tenant, "fingerprint": amount})

    with pytest.raises(KeyError, match="amount"):
        service.post(body=b"{}")

    assert (service.ran, service.records()) == ([], [])


class Later:
    def __await__(self) -> Iterator[Any]:
        yield


async def awaited(_request: Request, _body: Body) -> str:
    return ""


@pytest.mark.parametrize(
    ("fingerprint", "says"),
    [
        (awaited, "fingerprint= is an async function"),
        (lambda _request: "", r"fingerprint= is a function that cannot be called \(too many positional"),
        (lambda *, request, body: "", "fingerprint= is a function that cannot be called"),
        ("amount", "fingerprint='amount' is not a function: write a function of a request and its body, or None"),
        (False, "fingerprint=False is not a function"),
    ],
    ids=["async", "one argument", "keywords", "a name", "False"],
)
def test_what_is_no_such_function_is_refused_when_it_is_given(service: Service, fingerprint: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        service.take({"scope": single_tenant, "fingerprint": fingerprint})
