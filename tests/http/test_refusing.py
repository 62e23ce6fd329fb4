"""A scope function refuses a caller whom it does not know: 401 on every adapter, and nothing runs or is recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from onefold import UsageError
from onefold.http import Body, Request, Unauthorized
from onefold.http._answers.problems import TITLES, of_refusal
from onefold.http.client._retrying import SETTLED_CODES
from onefold.http.scopes import single_tenant
from tests.http_service.adapters import ADAPTERS, Service, service_on
from tests.support import PROJECT

TENANTS = {"token-of-asha": "asha", "token-of-riya": "riya"}


@pytest.fixture(params=ADAPTERS)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with service_on(request.param) as service:
        yield service


def tenant_of(request: Request) -> str:
    scheme, _, token = (request.header("Authorization") or "").partition(" ")
    if scheme.lower() != "bearer" or token not in TENANTS:
        raise Unauthorized
    return TENANTS[token]


def test_an_unknown_caller_gets_401_with_a_challenge_and_nothing_runs_or_is_recorded(service: Service) -> None:
    service.take({"scope": tenant_of, "policy_url": "https://shop.example/policy"})

    refused = service.post(Authorization="Bearer stolen")

    assert (refused.status, refused.code) == (401, "unauthorized")
    assert refused.headers["WWW-Authenticate"] == "Bearer"
    assert refused.headers["Content-Type"] == "application/problem+json"
    assert refused.headers["Link"] == '<https://shop.example/policy>; rel="describedby"'
    assert refused.headers["Cache-Control"] == "no-store"
    assert (service.ran, service.records()) == ([], [])


def test_after_a_refusal_the_same_key_is_free_for_whoever_authenticates(service: Service) -> None:
    service.take({"scope": tenant_of})
    assert service.post().status == 401

    first, again = (service.post(Authorization="Bearer token-of-asha") for _ in range(2))

    assert (first.status, first.is_replay, again.is_replay) == (200, False, True)
    assert service.ran == [b"{}"]


def test_a_revoked_token_gets_no_stored_response(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.take({"scope": tenant_of})
    service.post(Authorization="Bearer token-of-asha")

    monkeypatch.delitem(TENANTS, "token-of-asha")
    refused = service.post(Authorization="Bearer token-of-asha")

    assert (refused.status, refused.is_replay, service.ran) == (401, False, [b"{}"])


def test_a_refusal_leaves_a_running_request_and_its_record_as_they_were(service: Service) -> None:
    service.take({"scope": tenant_of})
    first = service.post(Authorization="Bearer token-of-asha")

    for token in ("", "Basic token-of-asha", "Bearer token-of-nobody"):
        assert service.post(Authorization=token).status == 401

    assert service.post(Authorization="Bearer token-of-asha").body == first.body
    assert (len(service.ran), len(service.records())) == (1, 1)


def test_one_tenant_never_gets_the_response_of_another_under_the_same_key(service: Service) -> None:
    service.take({"scope": tenant_of})

    answers = [service.post(Authorization=f"Bearer {token}") for token in TENANTS]

    assert [one.is_replay for one in answers] == [False, False]
    assert answers[0].body != answers[1].body


def test_a_request_without_a_key_is_not_asked_who_it_is(service: Service) -> None:
    service.take({"scope": tenant_of})

    assert service.post(key=None).status == 200
    assert len(service.ran) == 1


@pytest.mark.parametrize("option", ["key", "required", "fingerprint"])
def test_every_function_of_a_request_may_refuse_it(service: Service, option: str) -> None:
    """After the body was read, too: a signature covers it."""

    def refusing(_request: Request, *_body: Body) -> str:
        raise Unauthorized("The signature is wrong.")

    service.take({"scope": single_tenant, option: refusing})

    refused = service.post(key=None if option == "required" else "key")

    assert (refused.status, refused.code) == (401, "unauthorized")
    assert (service.ran, service.records()) == ([], [])


@pytest.mark.parametrize("key", ["key", None])
def test_what_a_view_raises_is_no_refusal(key: str | None) -> None:
    """Nobody knows what a view has done before: it is an error like any other."""
    for adapter in ADAPTERS:
        with service_on(adapter) as service:
            service.fails_with = Unauthorized()
            service.take({"scope": single_tenant})

            with pytest.raises(Unauthorized):
                service.post(key=key)


def test_the_challenge_and_the_text_are_the_callers_own() -> None:
    refused = Unauthorized("This token has expired.", challenge='Bearer realm="shop", error="invalid_token"')

    answer = of_refusal(refused, None)

    assert answer.status == 401
    assert dict(answer.headers)[b"www-authenticate"] == b'Bearer realm="shop", error="invalid_token"'
    assert json.loads(answer.body)["detail"] == "This token has expired."


@pytest.mark.parametrize("challenge", ["", " Bearer", "Bearer\r\nSet-Cookie: a=b", 'Bearer realm="café"', None, 7])
def test_a_challenge_that_cannot_be_sent_is_refused(challenge: str) -> None:
    with pytest.raises(UsageError, match="cannot be sent as WWW-Authenticate: write challenge='Bearer'"):
        Unauthorized(challenge=challenge)


def test_every_code_is_documented_and_the_client_knows_those_that_settle_a_request() -> None:
    page = (PROJECT / "docs" / "http.md").read_text(encoding="utf-8")
    table = re.findall(r"^\|.*\| `(\w+)` \|", page, flags=re.MULTILINE)

    assert set(TITLES) <= set(table)
    assert set(TITLES) >= SETTLED_CODES


def test_whatever_the_detail_says_the_caller_gets_401(service: Service) -> None:
    def unknown(_request: Request) -> str:
        raise Unauthorized("nobody is called \ud800")

    service.take({"scope": unknown})

    refused = service.post()

    assert (refused.status, refused.code) == (401, "unauthorized")
    assert service.ran == []
