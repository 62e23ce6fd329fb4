"""The body of a refusal can be the application's own, on every adapter; a function that fails harms no client."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest

from onefold import RememberedFailure, ResultNotKept, StoreUnavailable
from onefold.http import Answer, Refusal
from onefold.http._answers.problems import TITLES
from onefold.http._exchange.rules import Exchange
from onefold.http._shared.messages import Refused
from onefold.http.client._retrying import settles
from onefold.http.scopes import single_tenant
from tests.http_service.adapters import ADAPTERS, Service, service_on


@pytest.fixture(params=ADAPTERS)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with service_on(request.param) as service:
        yield service


def shorter(refusal: Refusal) -> dict[str, str]:
    return {"error": refusal.code}


def test_the_body_of_a_refusal_is_the_applications_own(service: Service) -> None:
    service.take({"scope": single_tenant, "refusal": shorter, "policy_url": "https://shop.example/policy"})
    service.post()

    reused = service.post(body=b'{"other": 1}')

    assert (reused.status, reused.body) == (422, b'{"error":"key_reused"}')
    assert reused.headers["Content-Type"] == "application/json"
    assert reused.headers["Idempotent-Refused"] == "key_reused"
    assert reused.headers["Content-Length"] == str(len(reused.body))
    assert reused.headers["Link"] == '<https://shop.example/policy>; rel="describedby"'
    assert service.ran == [b"{}"]


def test_a_whole_answer_is_sent_as_it_is(service: Service) -> None:
    teapot = Answer(418, [(b"content-type", b"text/plain"), (b"x-shop", b"closed")], b"no")
    service.take({"scope": single_tenant, "refusal": lambda _refusal: teapot, "required": True})

    refused = service.post(key=None)

    assert (refused.status, refused.body, refused.headers["X-Shop"]) == (418, b"no", "closed")
    assert "Retry-After" not in refused.headers
    assert service.ran == []


def test_an_answer_with_headers_in_text_or_without_a_body_is_sent(service: Service) -> None:
    gone = Answer(410, cast("Any", [("x-shop", "closed"), ("Content-Length", "0")]))
    service.take({"scope": single_tenant, "refusal": lambda _refusal: gone, "required": True})

    refused = service.post(key=None)

    assert (refused.status, refused.body, refused.headers["X-Shop"]) == (410, b"", "closed")
    assert refused.headers["Content-Length"] == "0"


def test_a_status_without_a_body_gets_no_length() -> None:
    answer = exchange(lambda _refusal: Answer(204, [])).refused(REFUSALS["failed"])

    assert (answer.status, [name for name, _ in answer.headers]) == (204, [b"idempotent-refused"])


def exchange(make: Any) -> Exchange:
    return Exchange(scope=single_tenant, refusal=make)


REFUSALS: dict[str, Any] = {
    "key_missing": Refused("key_missing", "There is none."),
    "failed": RememberedFailure(),
    "result_not_kept": ResultNotKept(),
    "store_unavailable": StoreUnavailable("down"),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_a_function_is_told_what_the_client_would_be_told(code: str) -> None:
    told: list[Refusal] = []
    plain = exchange(None).refused(REFUSALS[code])

    kept = exchange(told.append).refused(REFUSALS[code])

    assert kept == plain, "None leaves the problem document"
    (refusal,) = told
    document = json.loads(plain.body)
    assert (refusal.code, refusal.status, refusal.headers) == (code, plain.status, plain.headers)
    assert (refusal.title, refusal.detail) == (document["title"], document["detail"])
    assert refusal.code in TITLES


def test_what_a_client_has_to_know_stays_in_the_headers() -> None:
    answer = exchange(shorter).refused(REFUSALS["store_unavailable"])

    assert answer.status == 503
    assert dict(answer.headers)[b"retry-after"] == b"1"
    assert dict(answer.headers)[b"cache-control"] == b"no-store"
    assert b"content-language" not in dict(answer.headers), "it is not ours any more"


@pytest.mark.parametrize(("code", "ends"), [("key_missing", False), ("failed", True), ("result_not_kept", True)])
@pytest.mark.parametrize(
    "make", [None, shorter, lambda _refusal: Answer(400, [], b"no")], ids=["ours", "JSON", "whole"]
)
def test_an_intent_of_our_client_ends_by_the_code_whatever_the_words(make: Any, code: str, ends: bool) -> None:
    answer = exchange(make).refused(REFUSALS[code])
    headers = httpx.Headers([(name.decode(), value.decode()) for name, value in answer.headers])

    assert settles(answer.status, headers, answer.body) is ends


async def awaited() -> None: ...


@pytest.mark.parametrize(
    "make",
    [
        lambda _refusal: 1 / 0,
        lambda _refusal: object(),
        lambda _refusal: awaited(),
        lambda _refusal: Answer(200, [(b"a b", b"c")]),
        lambda _refusal: Answer(409, [(b"content-length", b"99")], b"short"),
        lambda _refusal: Answer(409, [(b"Content-Length", b"2")], b"too long"),
        lambda _refusal: Answer(304, [], b"no body"),
        lambda _refusal: Answer(409, [], cast("bytes", "text")),
    ],
    ids=["raises", "no JSON", "a coroutine", "a header", "too short", "too long", "no place for a body", "text"],
)
def test_a_function_that_fails_leaves_the_problem_document_and_is_logged(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "onefold.http"):
        answer = exchange(make).refused(REFUSALS["failed"])

    assert answer == exchange(None).refused(REFUSALS["failed"])
    assert "refusal= failed for 'failed'" in caplog.text
