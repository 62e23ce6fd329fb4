"""Which answers are a router's own. A handler's redirect, after its effect, is remembered like any other answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flask
import pytest
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request as StarletteRequest
from starlette.responses import RedirectResponse
from starlette.routing import Mount, Route

from onefold import AsyncGuard, Guard
from onefold.http._requests.paths import path_of
from onefold.http._shared.messages import Answer, Request
from onefold.http._shared.routing import is_of_routing, unmatched_asgi, unmatched_wsgi
from onefold.http.asgi import IdempotencyMiddleware, single_tenant
from onefold.http.fastapi import idempotent_route
from onefold.http.flask import IdempotencyMiddleware as WsgiMiddleware
from onefold.http.flask import idempotent
from tests.http_service.visitor import Visitor
from tests.stores.django.project import project
from tests.support import in_time


def is_routing(status: int, location: str | None = None, path: str = "/pay", **told: Any) -> bool:
    headers = [] if location is None else [(b"Location", location.encode())]
    unmatched, host, query = told.pop("unmatched", None), told.pop("host", "shop"), told.pop("query", b"")
    request = Request("POST", path, query, [(b"host", host.encode())], **told)
    return is_of_routing(Answer(status, headers), request, unmatched=unmatched)


@pytest.mark.parametrize(
    ("status", "unmatched", "is_its"),
    [
        (404, True, True),
        (404, False, False),
        (404, None, False),
        (405, None, True),
        (405, False, True),
        (200, True, False),
    ],
)
def test_an_answer_without_a_place_to_go_to(status: int, unmatched: bool | None, is_its: bool) -> None:
    assert is_routing(status, unmatched=unmatched) is is_its


@pytest.mark.parametrize(
    ("location", "request_told"),
    [
        pytest.param("/pay/", {}, id="a slash more"),
        pytest.param("/pay", {"path": "/pay/"}, id="a slash less"),
        pytest.param("http://shop/pay/", {}, id="with its host"),
        pytest.param("https://SHOP:443/pay/", {}, id="with its port"),
        pytest.param("http://shop:8000/pay/", {"host": "shop:8000"}, id="with a port of its own"),
        pytest.param("//shop/pay/", {"host": "shop:80"}, id="without a scheme"),
        pytest.param("/pay/?a=%31", {"query": b"a=1"}, id="with its query"),
        pytest.param("/caf%C3%A9/", {"path": "/café"}, id="UTF-8"),
        pytest.param("/caf%C3%A9/", {"path": "/cafÃ©"}, id="UTF-8 that was taken for Latin-1"),
        pytest.param("/a/pay/", {"path": "/a/pay", "path_below_mounts": "/pay"}, id="the whole path below a mount"),
        pytest.param("/pay/", {"path": "/a/pay", "path_below_mounts": "/pay"}, id="what a mount has left"),
        pytest.param("/pay", {"path": "/a/pay", "path_below_mounts": "/pay/"}, id="what a mount has left, and a slash"),
    ],
)
def test_a_redirect_that_adds_or_takes_a_slash_is_the_routers(location: str, request_told: dict[str, Any]) -> None:
    assert [is_routing(status, location, **request_told) for status in (301, 302, 303, 307, 308)] == [
        *(True, False, False, True, True)
    ]
    # The framework says that a handler has run.
    assert not is_routing(301, location, **request_told, unmatched=False)


@pytest.mark.parametrize(
    ("location", "request_told"),
    [
        pytest.param("/pay", {}, id="the same"),
        pytest.param("/paid/", {}, id="another path"),
        pytest.param("/", {"path": "/a/pay"}, id="the root"),
        pytest.param("http://shop", {"path": "/"}, id="the root of a host"),
        pytest.param("/orders/", {"path": "/admin/orders"}, id="the end of the path"),
        pytest.param("/b/", {"path": "/v2/a/b"}, id="the end of a long path"),
        pytest.param("ay/", {}, id="the end of a segment"),
        pytest.param("pay/", {}, id="what does not begin with a slash"),
        pytest.param("https://bank.example/pay/", {}, id="another host"),
        pytest.param("//bank.example/pay/", {}, id="another host without a scheme"),
        pytest.param("http://shop@bank.example/pay/", {}, id="a host behind a name"),
        pytest.param("http://shop.bank.example/pay/", {}, id="a host that begins alike"),
        pytest.param("http://shop:8000/pay/", {}, id="another port"),
        pytest.param("http:/pay/", {}, id="a scheme without a host"),
        pytest.param("http://shop/pay/", {"host": ""}, id="a request without a host"),
        pytest.param("/pay/?order=7", {}, id="another query"),
        pytest.param("/pay/", {"query": b"order=7"}, id="no query"),
        pytest.param("/pay/#paid", {}, id="a fragment"),
        pytest.param("http://[", {}, id="no URL"),
        pytest.param("ay/", {"path": "/a/pay", "path_below_mounts": "/pay"}, id="the end of what a mount has left"),
    ],
)
def test_a_redirect_to_anywhere_else_is_the_applications(location: str, request_told: dict[str, Any]) -> None:
    assert not any(is_routing(status, location, **request_told) for status in (301, 307, 308))
    assert not is_routing(301, location, **request_told, unmatched=True)


@pytest.mark.parametrize(
    ("path", "raw", "root", "below"),
    [
        pytest.param("/pay", b"/pay", "", None, id="as it was sent"),
        pytest.param("/a/pay", b"/a/pay", "/a", None, id="a mount of Starlette"),
        pytest.param("/pay", b"/a/pay", "/a", None, id="a mount of an old Starlette, which tells its router"),
        pytest.param("/pay/", b"/a/pay", "", "/pay/", id="a mount of Litestar"),
        pytest.param("/b/pay/", b"/a/b/pay", "/b", "/b/pay/", id="Starlette in a mount of Litestar"),
        pytest.param("/v1/pay", b"/v1/a/pay", "", None, id="written anew"),
        pytest.param("/pay", None, "/a", None, id="not told"),
    ],
)
def test_what_a_mount_has_left_of_a_path(path: str, raw: bytes | None, root: str, below: str | None) -> None:
    assert path_of({"path": path, "raw_path": raw, "root_path": root}).below == below


def test_what_starlette_tells() -> None:
    class Mounted:
        routes = ()

    class Endpoint(HTTPEndpoint):
        pass

    def told(*endpoint: Any) -> bool | None:
        return unmatched_asgi({"router": object(), **({"endpoint": endpoint[0]} if endpoint else {})})

    assert unmatched_asgi({}) is None
    assert (told(), told(Mounted())) == (True, True)
    assert (told(test_what_starlette_tells), told(Endpoint)) == (False, False)
    # Another application, with a router of its own.
    assert told(object()) is None


def test_what_flask_tells() -> None:
    class Seen:
        def __init__(self, rule: Any, error: Any) -> None:
            self.url_rule, self.routing_exception = rule, error

    seen = [Seen(None, LookupError()), Seen(object(), None), Seen(None, None)]

    assert [unmatched_wsgi({"werkzeug.request": one}) for one in seen] == [True, False, None]
    assert unmatched_wsgi({}) is None


# Through the adapters: the handler's own redirect, after its effect.

OWN = [
    ("/admin/orders", "/orders/"),
    ("/shop/pay", "https://bank.example/pay/"),
    ("/pay", "https://bank.example/pay/"),
    ("/v2/a/b", "/b/"),
    ("/pay", "ay/"),
    ("/pay", "/pay/"),
    ("/pay", "/pay/?order=7"),
]
Pay = Callable[[], None]


def thrice_with_asgi(app: Any, path: str) -> list[tuple[int, bool]]:
    async def story() -> list[tuple[int, bool]]:
        visitors = [await Visitor(app, path).visit() for _ in range(3)]
        return [(one.status, one.is_replay) for one in visitors]

    return in_time(story())


def with_fastapi(path: str, to: str, pay: Pay) -> list[tuple[int, bool]]:
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, guard=AsyncGuard("memory:"), scope=single_tenant)

    @app.post(path)
    async def endpoint() -> RedirectResponse:
        pay()
        return RedirectResponse(to, 301)

    return thrice_with_asgi(app, path)


def with_a_route_of_fastapi(path: str, to: str, pay: Pay) -> list[tuple[int, bool]]:
    router = APIRouter(route_class=idempotent_route(guard=AsyncGuard("memory:"), scope=single_tenant))

    @router.post(path)
    async def endpoint() -> RedirectResponse:
        pay()
        return RedirectResponse(to, 301)

    app = FastAPI()
    app.include_router(router)
    return thrice_with_asgi(app, path)


def with_a_mount(path: str, to: str, pay: Pay) -> list[tuple[int, bool]]:
    async def endpoint(_request: StarletteRequest) -> RedirectResponse:
        pay()
        return RedirectResponse(to, 301)

    app = Starlette(routes=[Route(path, endpoint, methods=["POST"])])
    guarded = IdempotencyMiddleware(
        Starlette(routes=[Mount("/m", app)]), guard=AsyncGuard("memory:"), scope=single_tenant
    )
    return thrice_with_asgi(guarded, "/m" + path)


def thrice_with_flask(app: flask.Flask, path: str) -> list[tuple[int, bool]]:
    answers = [app.test_client().post(path, headers={"Idempotency-Key": "key"}) for _ in range(3)]
    return [(one.status_code, "Idempotent-Replayed" in one.headers) for one in answers]


def with_flask(path: str, to: str, pay: Pay) -> list[tuple[int, bool]]:
    app = flask.Flask("shop")
    app.wsgi_app = WsgiMiddleware(  # type: ignore[method-assign]
        app.wsgi_app, guard=Guard("memory:"), scope=single_tenant
    )

    @app.post(path)
    def view() -> Any:
        pay()
        return flask.redirect(to, 301)

    return thrice_with_flask(app, path)


def with_a_view_of_flask(path: str, to: str, pay: Pay) -> list[tuple[int, bool]]:
    app = flask.Flask("shop")

    @app.post(path)
    @idempotent(guard=Guard("memory:"), scope=single_tenant)
    def view() -> Any:
        pay()
        return flask.redirect(to, 301)

    return thrice_with_flask(app, path)


def with_a_view_of_django(path: str, to: str, pay: Pay) -> list[tuple[int, bool]]:
    with project():
        from django.http import HttpResponsePermanentRedirect
        from django.test import RequestFactory

        from onefold.http import django

        @django.idempotent(guard=Guard("memory:"), scope=single_tenant)
        def view(_request: Any) -> HttpResponsePermanentRedirect:
            pay()
            return HttpResponsePermanentRedirect(to)

        answers = [view(RequestFactory().post(path, headers={"Idempotency-Key": "key"})) for _ in range(3)]
        return [(one.status_code, "Idempotent-Replayed" in one.headers) for one in answers]


ADAPTERS = [
    *(with_fastapi, with_a_route_of_fastapi, with_a_mount),
    *(with_flask, with_a_view_of_flask, with_a_view_of_django),
]


@pytest.mark.parametrize(("path", "to"), OWN)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_handlers_own_redirect_is_remembered(adapter: Callable[..., Any], path: str, to: str) -> None:
    paid: list[str] = []

    assert adapter(path, to, lambda: paid.append("paid")) == [(301, False), (301, True), (301, True)]
    assert paid == ["paid"]


def test_a_routers_redirect_is_not_remembered_below_a_mount_that_takes_its_prefix_away() -> None:
    """As Django in a mount of Litestar: its router knows no more than what was left."""

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"location", scope["path"].encode() + b"/")]
        await send({"type": "http.response.start", "status": 301, "headers": headers})
        await send({"type": "http.response.body"})

    guarded = IdempotencyMiddleware(app, guard=AsyncGuard("memory:"), scope=single_tenant)

    async def mount(scope: Any, receive: Any, send: Any) -> None:
        await guarded({**scope, "path": scope["path"].removeprefix("/a")}, receive, send)

    assert thrice_with_asgi(mount, "/a/pay") == [(301, False)] * 3
