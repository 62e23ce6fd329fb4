"""Views of Django that cannot be guarded as they are written: they are refused before they run, and never unguarded."""

# Django and its REST framework have no types.
# mypy: disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from typing import Any

import pytest

from onefold import Guard, Policy, UsageError
from onefold.http.scopes import single_tenant
from onefold.stores.memory import MemoryStore
from tests.stores.django.project import project


@pytest.fixture(autouse=True)
def django_is_configured() -> Iterator[None]:
    from django.test import override_settings

    # Django's own users would need their tables.
    alone: dict[str, Any] = {"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None}
    with project(), override_settings(REST_FRAMEWORK=alone):
        yield


@pytest.fixture
def ran() -> list[str]:
    return []


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def guarded(store: MemoryStore, **options: Any) -> Any:
    from onefold.http.django import idempotent

    options = {"guard": Guard(store, policy=Policy(after_crash="hold")), "scope": single_tenant, **options}
    return idempotent(**options)


def rules_on(store: MemoryStore) -> Any:
    from onefold.http.django import Idempotency

    return Idempotency(guard=Guard(store), scope=single_tenant)


def post(view: Any, key: str | None = "key", body: bytes = b"{}") -> Any:
    from django.test import RequestFactory

    headers = {} if key is None else {"Idempotency-Key": key}
    request = RequestFactory().post("/pay", body, "application/json", headers=headers)
    try:
        response = view(request)
        if asyncio.iscoroutine(response):
            # As Django does on ASGI, and on WSGI for a view that says that it is async.
            response = asyncio.run(response)
        return response.render() if hasattr(response, "render") else response
    finally:
        request.close()


def replays(*answers: Any) -> list[bool]:
    return [one.headers.get("Idempotent-Replayed") == "true" for one in answers]


# Views that are awaited.


@pytest.mark.parametrize("key", ["key", None], ids=["with a key", "without"])
@pytest.mark.parametrize("name", ["dispatch", "post"])
def test_a_class_with_async_handlers_is_refused_before_anything_runs(
    store: MemoryStore, ran: list[str], name: str, key: str | None
) -> None:
    from django.http import HttpResponse
    from django.utils.decorators import method_decorator
    from django.views import View

    class Pay(View):
        async def post(self, _request: Any) -> Any:
            ran.append("paid")
            return HttpResponse()

    view = method_decorator(guarded(store), name=name)(Pay).as_view()

    for _ in range(2):
        with pytest.raises(UsageError, match=r"async.*Use the middleware"):
            post(view, key)
    assert ran == []
    assert len(store) == 0


@pytest.mark.parametrize("rules", ["below_500", "stripe"])
@pytest.mark.parametrize("key", ["key", None], ids=["with a key", "without"])
def test_an_async_view_that_hides_in_a_plain_function_is_refused_before_it_runs(
    store: MemoryStore, ran: list[str], key: str | None, rules: str
) -> None:
    from django.http import HttpResponse

    async def pay(_request: Any) -> Any:
        ran.append("paid")
        return HttpResponse()

    @guarded(store, rules=rules)
    @functools.wraps(pay)
    def hidden(request: Any) -> Any:
        return pay(request)

    for _ in range(2):
        with pytest.raises(UsageError, match=r"async.*Use the middleware"):
            post(hidden, key)
    assert ran == []
    # Neither held nor remembered: it has not run.
    assert len(store) == 0


def test_a_class_with_plain_handlers_is_guarded(store: MemoryStore, ran: list[str]) -> None:
    from django.http import HttpResponse
    from django.utils.decorators import method_decorator
    from django.views import View

    class Pay(View):
        def post(self, _request: Any) -> Any:
            ran.append("paid")
            return HttpResponse("paid")

    view = method_decorator(guarded(store), name="dispatch")(Pay).as_view()

    assert replays(post(view), post(view)) == [False, True]
    assert ran == ["paid"]


def test_a_class_itself_is_no_view(store: MemoryStore) -> None:
    from django.views import View

    with pytest.raises(UsageError, match="method_decorator"):
        guarded(store)(View)


# Django REST framework.


def test_the_mixin_is_refused_on_a_view_that_never_asks_it(store: MemoryStore) -> None:
    from django.views import View

    from onefold.http.django import IdempotentMixin

    with pytest.raises(UsageError, match=r"Pay is not a view of Django REST framework.*method_decorator"):
        type("Pay", (IdempotentMixin, View), {"idempotency": rules_on(store)})


@pytest.mark.parametrize("name", ["FormView", "CreateView", "UpdateView", "DeleteView"])
def test_the_mixin_is_refused_on_a_view_of_a_form(store: MemoryStore, name: str) -> None:
    """It has an `initial`, too: the first values of its form."""
    from django.views import generic

    from onefold.http.django import IdempotentMixin

    with pytest.raises(UsageError, match="not a view of Django REST framework"):
        type("Payments", (IdempotentMixin, getattr(generic, name)), {"idempotency": rules_on(store)})


def test_the_mixin_is_refused_where_somebody_elses_view_has_an_initial(store: MemoryStore) -> None:
    from django.views import View

    from onefold.http.django import IdempotentMixin

    class Steps(View):
        def initial(self, request: Any) -> None: ...

    with pytest.raises(UsageError, match="not a view of Django REST framework"):
        type("Payments", (IdempotentMixin, Steps), {"idempotency": rules_on(store)})
    with pytest.raises(UsageError, match="not a view of Django REST framework"):
        type("Payments", (Steps, IdempotentMixin), {"idempotency": rules_on(store)})


def test_the_mixin_is_refused_after_the_view(store: MemoryStore) -> None:
    from rest_framework.views import APIView
    from rest_framework.viewsets import ViewSet

    from onefold.http.django import IdempotentMixin

    mixed: Any = type("Mixed", (IdempotentMixin,), {"idempotency": rules_on(store)})
    for bases in ((APIView, IdempotentMixin), (ViewSet, IdempotentMixin), (APIView, mixed)):
        with pytest.raises(UsageError, match=r"the mixin first: class Pay\(.*, (APIView|ViewSet)\)"):
            type("Pay", bases, {})
    type("Pay", (mixed, APIView), {})


def test_an_async_handler_of_a_mixed_view_is_refused(store: MemoryStore, ran: list[str]) -> None:
    from rest_framework.views import APIView

    from onefold.http.django import IdempotentMixin

    class Pay(IdempotentMixin, APIView):
        idempotency = rules_on(store)

    async def hidden() -> None:
        ran.append("paid")

    async def async_view(_self: Any, _request: Any) -> None:
        ran.append("paid")

    for handler in (async_view, lambda _self, _request: hidden()):
        Pay.post = handler
        with pytest.raises(UsageError, match=r"async.*Use the middleware"):
            Pay.dispatch(*called(Pay))
    assert ran == []
    assert len(store) == 0


def called(view: Any) -> tuple[Any, Any]:
    """Return an instance of this view, and a request. (`as_view` knows that it is async, and Django would await it.)"""
    from django.test import RequestFactory

    one = view()
    request = RequestFactory().post("/pay", b"{}", "application/json", headers={"Idempotency-Key": "key"})
    one.setup(request)
    return one, request


def test_below_api_view_a_function_is_guarded_after_its_permissions(store: MemoryStore, ran: list[str]) -> None:
    from rest_framework.decorators import api_view, permission_classes
    from rest_framework.exceptions import ValidationError
    from rest_framework.permissions import BasePermission
    from rest_framework.response import Response

    class Asked(BasePermission):
        def has_permission(self, _request: Any, _view: Any) -> bool:
            ran.append("asked")
            return True

    @api_view(["POST"])
    @permission_classes([Asked])
    @guarded(store)
    def pay(request: Any) -> Any:
        ran.append("paid")
        if request.data.get("amount", 0) < 0:
            raise ValidationError({"amount": "too small"})
        return Response({"paid": request.data}, status=201)

    first, again, other = post(pay), post(pay), post(pay, body=b'{"amount": 6}')
    refused = [post(pay, "other", b'{"amount": -1}') for _ in range(2)]
    plain = post(pay, None)

    assert [one.status_code for one in (first, again, other, plain)] == [201, 201, 422, 201]
    assert first.content == again.content == plain.content == b'{"paid":{}}'
    assert replays(first, again, other) == [False, True, False]
    assert [(one.status_code, one.content) for one in refused] == [(400, b'{"amount":"too small"}')] * 2
    assert replays(*refused) == [False, True]
    assert ran.count("asked") == 6
    assert ran.count("paid") == 3


def test_a_single_handler_of_an_api_view_is_guarded_too(store: MemoryStore, ran: list[str]) -> None:
    from django.utils.decorators import method_decorator
    from rest_framework.response import Response
    from rest_framework.views import APIView

    class Pay(APIView):
        @method_decorator(guarded(store))
        def post(self, _request: Any) -> Any:
            ran.append("paid")
            return Response({"n": len(ran)})

    answers = [post(Pay.as_view()) for _ in range(2)]

    assert [one.content for one in answers] == [b'{"n":1}'] * 2
    assert replays(*answers) == [False, True]


def test_a_request_of_the_framework_without_its_view_is_refused_before_anything_runs(
    store: MemoryStore, ran: list[str]
) -> None:
    from django.test import RequestFactory
    from rest_framework.request import Request

    request = Request(RequestFactory().post("/pay", headers={"Idempotency-Key": "key"}))

    with pytest.raises(UsageError, match="api_view"):
        guarded(store)(lambda _request: ran.append("paid"))(request)
    assert ran == []
