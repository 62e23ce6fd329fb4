"""A policy's fields as options of every adapter: they override the guard's policy, one by one, and merge with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from onefold import Guard, Policy, UsageError
from onefold.http._exchange.rules import Exchange, Options
from onefold.http.scopes import single_tenant
from tests.http_service.adapters import ADAPTERS, Service, service_on


@pytest.fixture(params=ADAPTERS)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with service_on(request.param) as service:
        yield service


def policy_of(guard_policy: Policy | None = None, **options: Any) -> Policy:
    return Exchange(scope=single_tenant, **options).policy(Guard("memory:", policy=guard_policy or Policy()))


def test_a_field_is_an_option_of_every_adapter(service: Service) -> None:
    service.take({"scope": single_tenant, "keep": "forever"})
    service.post()

    assert [one.ttl_left for one in service.records()] == [math.inf]


def test_a_field_leaves_the_others_to_the_guard(service: Service) -> None:
    service.fails_with = TimeoutError("the bank did not answer")
    service.take({"scope": single_tenant, "keep": "forever", "guard_options": {"after_crash": "hold"}})

    with pytest.raises(TimeoutError):
        service.post()

    assert service.post().code == "held"


def test_a_whole_policy_replaces_the_guards_and_a_field_changes_it(service: Service) -> None:
    policy = Policy(keep="7d")
    service.take({"scope": single_tenant, "policy": policy, "after_crash": "hold", "guard_options": {"keep": 1}})
    service.post()
    service.fails_with = TimeoutError("the bank did not answer")
    with pytest.raises(TimeoutError):
        service.post(key="other")

    assert min(one.ttl_left for one in service.records()) > 6 * 86_400
    assert service.post(key="other").code == "held"


def test_fields_win_over_the_policy_and_the_policy_over_the_guards() -> None:
    guards = Policy(keep=1, lease=2, wait=3)

    assert policy_of(guards).keep == 1
    assert policy_of(guards, wait="5s").wait == 5
    assert policy_of(guards, wait="5s").lease == 2
    assert policy_of(guards, policy=Policy(lease=9)).keep == Policy().keep
    assert policy_of(guards, policy=Policy(lease=9), keep="7d", max_attempts=2).replace(keep=1) == policy_of(
        Policy(lease=9, max_attempts=2, keep=1)
    )


def test_a_policy_that_claims_is_taken_on_a_guard_that_does_not() -> None:
    assert policy_of(Policy(mode="seen"), policy=Policy()).mode == "claim"
    with pytest.raises(UsageError, match=r'mode="seen" makes no claim.*Give HTTP a guard, or a policy, with'):
        policy_of(policy=Policy(mode="seen"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"final_errors": (ValueError,)}, "has no option 'final_errors': rules= decides which responses are final$"),
        ({"mode": "seen"}, "has no option 'mode': a request with a key is always claimed$"),
        ({"mode": "claim"}, "has no option 'mode'"),
        ({"ambiguous_errors": ()}, "has no option 'ambiguous_errors': every exception and every 5xx leaves"),
        ({"max_result_bytes": 10}, "has no option 'max_result_bytes': body_max= limits what is remembered"),
        ({"kep": "7d"}, r"has no option 'kep': did you mean 'keep'\?"),
        ({"keep": "7 parsecs"}, "keep="),
        ({"wait": -1}, "wait="),
        ({"after_crash": "retry"}, "after_crash="),
        ({"policy": {"keep": "7d"}}, "has to be a Policy"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_meant_is_refused_when_it_is_given(
    service: Service, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        service.take({"scope": single_tenant, **options})


def test_every_field_of_a_policy_is_an_option_by_its_type() -> None:
    assert set(Policy.__slots__) <= set(Options.__annotations__)
