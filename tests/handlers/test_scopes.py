"""`scope=` on a decorator is what `key=` is: the name of an argument, several names, or a function of the arguments."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from onefold import Guard, UsageError


def paying(guard: Guard, scope: Any) -> Callable[..., str]:
    @guard.idempotent("pay", key="payment_id", scope=scope)
    def pay(tenant: Any, payment_id: str, region: Any = "eu") -> str:
        return f"{tenant} in {region}"

    return pay


@pytest.mark.parametrize("scope", ["tenant", ("tenant",), lambda tenant, payment_id, region="eu": tenant])
def test_tenants_are_kept_apart_by_an_argument(scope: Any) -> None:
    guard = Guard("memory:")
    pay = paying(guard, scope)

    assert [pay("acme", "1"), pay("bakery", "1"), pay("acme", "1")] == ["acme in eu", "bakery in eu", "acme in eu"]
    assert guard.run("pay", "1", pytest.fail, scope="acme").value == "acme in eu"


def test_several_arguments_make_one_scope_that_no_other_values_make() -> None:
    pay = paying(Guard("memory:"), ("tenant", "region"))

    values = [("a", "bc"), ("ab", "c"), ("abc", "d"), ("a", "bcd"), ("1:a", "b")]
    assert [pay(tenant, "1", region) for tenant, region in values] == [f"{one} in {two}" for one, two in values]


@pytest.mark.parametrize("tenant", [7, 0, UUID(int=7)])
def test_a_tenant_may_be_a_number_or_a_uuid(tenant: object) -> None:
    guard = Guard("memory:")

    paying(guard, "tenant")(tenant, "1")

    assert guard.read("pay", "1", scope=str(tenant)) is not None


@pytest.mark.parametrize("tenant", [None, ""])
@pytest.mark.parametrize("scope", ["tenant", ("region", "tenant")])
def test_a_call_without_its_tenant_is_refused(scope: Any, tenant: Any) -> None:
    with pytest.raises(UsageError, match=rf"pay: .*tenant of .*pay\(\) is the scope, and is {tenant!r}: it has to"):
        paying(Guard("memory:"), scope)(tenant, "1")


def test_an_argument_replaces_the_guards_own_scope() -> None:
    guard = Guard("memory:", scope="shop")
    pay = paying(guard, "tenant")

    pay("acme", "1")

    assert guard.read("pay", "1") is None
    assert guard.read("pay", "1", scope="acme") is not None


@pytest.mark.parametrize(
    ("scope", "said"),
    [
        ("tenat", r"scope='tenat' is not an argument of .*pay\(.*did you mean 'tenant'"),
        ("acme", r"One scope for all calls belongs to the guard: Guard\(\.\.\., scope='acme'\)"),
        ((), r"scope= names no argument"),
        (("tenant", "regon"), "did you mean 'region'"),
    ],
)
def test_a_scope_that_is_no_argument_is_refused_when_decorating(scope: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        paying(Guard("memory:"), scope)


class Tenants(dict[str, str]):
    """A directory that finds tenants, and knows none yet: it is empty, and so counts as false."""

    def __call__(self, tenant: str = "acme", payment_id: str = "", region: str = "") -> str:
        return f"{tenant}{payment_id[:0]}{region[:0]}"


def test_a_scope_function_counts_whatever_its_truth_value() -> None:
    guard = Guard("memory:")
    pay = paying(guard, Tenants())

    assert [pay("acme", "1"), pay("other", "1")] == ["acme in eu", "other in eu"]

    guard = Guard("memory:", scope=Tenants())
    paying(guard, None)("acme", "1")
    assert guard.read("pay", "1", scope="acme") is not None


class Named(str, enum.Enum):  # noqa: UP042 - as older code has it
    """Members are formatted as `Named.ACME` by some versions of Python, and hold `acme`."""

    ACME = "acme"


class Odd(str):
    """A text that shows itself as another."""

    def __format__(self, _: str) -> str:
        return "other"

    def encode(self, *_: object) -> bytes:
        return b"other"


@pytest.mark.parametrize("scope", [Named.ACME, Odd("acme")])
def test_a_scope_is_its_text_of_whatever_class(scope: str) -> None:
    guard = Guard("memory:")

    found = guard.address(scope, "1", scope=scope)

    assert found == guard.address("acme", "1", scope="acme")
    assert (type(found.scope), type(found.operation)) == (str, str)
    assert found.digest == guard.address("acme", "1", scope="acme").digest


def test_a_blank_scope_is_refused() -> None:
    guard = Guard("memory:")

    with pytest.raises(UsageError, match="has to be the name of a tenant"):
        guard.run("pay", "1", pytest.fail, scope="  ")
    with pytest.raises(UsageError, match="has to be the name of a tenant"):
        paying(guard, "tenant")("\t", "1")
