"""One key, two tenants, on every adapter: neither reads the other's answer, a remembered 500 and refusals included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from onefold.http import Refusal
from onefold.http.scopes import by_header
from tests.http_service.adapters import ADAPTERS, METHODS, Service, service_on


@pytest.fixture(params=ADAPTERS)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with service_on(request.param) as service:
        yield service


def told(refusal: Refusal) -> dict[str, str]:
    return {"error": refusal.code, "detail": refusal.detail}


@pytest.mark.parametrize("method", METHODS)
def test_an_answer_is_replayed_to_its_own_tenant_only(service: Service, method: str) -> None:
    service.take({"scope": by_header("X-Tenant"), "rules": "stripe", "refusal": told})

    acme, globex = (service.post(method=method, body=body, X_Tenant=name) for name, body in (("a", b"1"), ("b", b"2")))
    again = service.post(method=method, body=b"2", X_Tenant="b")
    mixed = service.post(method=method, body=b"1", X_Tenant="b")
    nobody = service.post(method=method, body=b"1")

    assert (acme.is_replay, globex.is_replay, again.is_replay) == (False, False, True)
    assert again.body == globex.body != acme.body
    assert (mixed.status, b"key_reused" in mixed.body) == (400, True)
    assert nobody.status in (400, 401, 403)
    assert all(acme.body not in one.body for one in (mixed, nobody))
    assert service.ran == [b"1", b"2"]


@pytest.mark.parametrize("method", METHODS)
def test_a_remembered_500_is_its_own_tenants(service: Service, method: str) -> None:
    service.take({"scope": by_header("X-Tenant"), "rules": "stripe", "refusal": told})

    service.fails_with = RuntimeError("the secret of acme")
    # The adapters' own clients raise what a server would report.
    with suppress(Exception):
        service.post(method=method, X_Tenant="acme")
    service.fails_with = None
    once, again, other = (service.post(method=method, X_Tenant=name) for name in ("acme", "acme", "globex"))

    assert (once.status, again.status, other.status) == (500, 500, 200)
    assert (once.body, once.is_replay, other.is_replay) == (again.body, True, False)
    assert b"secret" not in once.body
    assert service.ran == [b"{}"]
