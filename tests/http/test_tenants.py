"""A guard with a scope of its own, below HTTP: a tenant never sees the answer of another, whoever its callers are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import flask
import httpx
import pytest
from fastapi import APIRouter, FastAPI

from onefold import AsyncGuard, Guard, UsageError, current
from onefold.http._requests.tenants import joined
from onefold.http.asgi import IdempotencyMiddleware
from onefold.http.fastapi import idempotent_route
from onefold.http.flask import idempotent as flask_idempotent
from onefold.http.scopes import single_tenant
from onefold.http.wsgi import IdempotencyMiddleware as WsgiMiddleware
from onefold.keys import SCOPE_MAX
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.stores.django.project import project
from tests.support import in_time

# A guard's own scope, and the scope of a middleware, route or view: whose request it is.
Post = Callable[[Any, Any], str]

HEADERS = {"Idempotency-Key": "key"}


def asgi(app: Any) -> str:
    async def story() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            return (await client.post("/pay", headers=HEADERS)).text

    return in_time(story())


def with_asgi(store: Any) -> Post:
    def post(tenant: Any, scope: Any) -> str:
        app = FastAPI()
        app.post("/pay")(lambda: current().scope)
        return asgi(IdempotencyMiddleware(app, guard=AsyncGuard(store, scope=tenant), scope=scope))

    return post


def with_a_route(store: Any) -> Post:
    def post(tenant: Any, scope: Any) -> str:
        router = APIRouter(route_class=idempotent_route(guard=AsyncGuard(store, scope=tenant), scope=scope))
        router.post("/pay")(lambda: current().scope)
        app = FastAPI()
        app.include_router(router)
        return asgi(app)

    return post


def with_flask(store: Any) -> Post:
    def post(tenant: Any, scope: Any) -> str:
        app = flask.Flask("shop")
        app.testing = True
        app.post("/pay")(
            flask_idempotent(guard=Guard(store, scope=tenant), scope=scope)(lambda: flask.jsonify(whose()))
        )
        return app.test_client().post("/pay", headers=HEADERS).text

    return post


def with_wsgi(store: Any) -> Post:
    def post(tenant: Any, scope: Any) -> str:
        app = flask.Flask("shop")
        app.testing = True
        app.post("/pay")(lambda: flask.jsonify(whose()))
        around = WsgiMiddleware(app.wsgi_app, guard=Guard(store, scope=tenant), scope=scope)
        app.wsgi_app = around  # type: ignore[method-assign]
        return app.test_client().post("/pay", headers=HEADERS).text

    return post


def whose() -> str:
    return current().scope


def django_post(view: Any) -> str:
    from django.test import RequestFactory

    request = RequestFactory().post("/pay", b"{}", "application/json", headers=HEADERS)
    response = view(request)
    request.close()
    return str(response.content.decode())


def with_django(store: Any) -> Post:
    from django.http import JsonResponse

    from onefold.http.django import middleware

    def post(tenant: Any, scope: Any) -> str:
        def respond(_request: Any) -> Any:
            return JsonResponse(whose(), safe=False)

        return django_post(middleware(guard=Guard(store, scope=tenant), scope=scope)(respond))

    return post


def with_a_django_view(store: Any) -> Post:
    from django.http import JsonResponse

    from onefold.http.django import idempotent

    def post(tenant: Any, scope: Any) -> str:
        def view(_request: Any) -> Any:
            return JsonResponse(whose(), safe=False)

        return django_post(idempotent(guard=Guard(store, scope=tenant), scope=scope)(view))

    return post


ADAPTERS: dict[str, tuple[Callable[[Any], Post], type[Any]]] = {
    "asgi": (with_asgi, AsyncMemoryStore),
    "fastapi's route": (with_a_route, AsyncMemoryStore),
    "wsgi": (with_wsgi, MemoryStore),
    "flask's view": (with_flask, MemoryStore),
    "django": (with_django, MemoryStore),
    "django's view": (with_a_django_view, MemoryStore),
}


@pytest.fixture(params=ADAPTERS)
def post(request: pytest.FixtureRequest) -> Iterator[Post]:
    adapter, store = ADAPTERS[request.param]
    with project():
        yield adapter(store())


def asha(_request: Any) -> str:
    return "asha"


def test_callers_of_one_name_are_apart_at_each_tenant(post: Post) -> None:
    answers = [post(tenant, asha).strip() for tenant in ("tenant-a", "tenant-b", "tenant-a", None)]

    assert answers == ['"8:tenant-a/asha"', '"8:tenant-b/asha"', '"8:tenant-a/asha"', '"asha"']


def test_a_tenant_with_one_client_is_no_caller_of_its_name(post: Post) -> None:
    answers = [post("asha", single_tenant), post("riya", single_tenant), post(None, asha), post(None, single_tenant)]

    assert [one.strip() for one in answers] == ['"4:asha/"', '"4:riya/"', '"asha"', '""']


def test_the_tenant_of_each_request_may_be_found_by_a_function(post: Post) -> None:
    tenant: ContextVar[str] = ContextVar("tenant")
    answers = []
    for name in ("tenant-a", "tenant-b"):
        tenant.set(name)
        answers.append(post(tenant.get, asha).strip())

    assert answers == ['"8:tenant-a/asha"', '"8:tenant-b/asha"']


def test_nothing_runs_where_that_function_finds_no_tenant(post: Post) -> None:
    with pytest.raises(UsageError, match="has to name a tenant"):
        post(lambda: None, asha)


def test_without_a_scope_of_the_guard_the_caller_stays_as_it_is() -> None:
    for caller in ("asha", "1:bob", "12:", "0:", "a@b.example", "ключ", "x" * SCOPE_MAX, None):
        assert joined("", caller) == caller


def test_a_pair_that_is_too_long_becomes_a_digest() -> None:
    long = joined("t" * SCOPE_MAX, "asha")
    other = joined("t" * SCOPE_MAX, "riya")

    assert long is not None
    assert other is not None
    assert long.startswith("0:#")
    assert len({long, other, joined("", long), joined("t" * SCOPE_MAX, None)}) == 4
    assert all(len(one.encode()) <= SCOPE_MAX for one in (long, other))


def names() -> Iterator[str]:
    """Names that are likely to be confused with what is made of two."""
    return ("".join(one) for length in range(1, 4) for one in itertools.product("01:/#a", repeat=length))


def test_no_two_pairs_share_a_scope_and_no_caller_takes_that_of_a_pair() -> None:
    pairs = list(itertools.product(["", *names()], [None, *names()]))
    found = {joined(tenant, caller): (tenant, caller) for tenant, caller in pairs}

    assert len(found) == len(pairs)
    for scope in list(found):
        # Whoever calls himself so at a guard without a scope, and whoever calls himself as that one is called.
        mine = joined("", scope)
        assert found.get(mine, ("", scope)) == ("", scope)
        assert scope is None or joined("", mine) not in found or mine == scope
