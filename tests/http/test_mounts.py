"""A request has one path, whatever mounts it has come through: no two mounts share answers, and patterns match it."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import flask
import pytest
from fastapi import APIRouter, FastAPI
from hypercorn.middleware import DispatcherMiddleware
from litestar import Litestar, asgi, post
from litestar.middleware import DefineMiddleware
from litestar.types import Receive, Scope, Send
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from werkzeug.middleware.dispatcher import DispatcherMiddleware as WsgiDispatcher
from werkzeug.test import Client

from onefold import AsyncGuard, Guard
from onefold.http._requests import paths
from onefold.http._requests.paths import path_of
from onefold.http.asgi import IdempotencyMiddleware, single_tenant
from onefold.http.fastapi import idempotent_route
from onefold.http.flask import IdempotencyMiddleware as WsgiMiddleware
from onefold.http.flask import idempotent
from tests.http_service.visitor import Visitor
from tests.stores.django.project import project
from tests.support import in_time

PATHS = ("/a/x/pay", "/b/x/pay")
# A request without a key: its path, and what it gets under required=["/a/x/*"].
KEYLESS = {"/a/x/pay": 400, "/b/x/pay": 200}


@pytest.mark.parametrize(
    ("path", "raw", "root", "whole", "compared"),
    [
        pytest.param("/pay", b"/pay", "", "/pay", "/pay", id="as it was sent"),
        pytest.param("//pay/", b"//pay/", "", "//pay/", "//pay/", id="as it was sent, with slashes"),
        pytest.param("/a/pay", b"/a/pay", "/a", "/a/pay", "/a/pay", id="a mount of Starlette"),
        pytest.param("/pay", b"/pay/", "", "/pay", "/pay/", id="a slash that Litestar takes away"),
        pytest.param("/pay", b"//pay", "", "/pay", "//pay", id="a slash before that Litestar takes away"),
        pytest.param("/pay/", b"/a/pay", "", "/a/pay", "/a/pay", id="a mount of Litestar"),
        pytest.param("/pay", b"/a/pay/", "", "/a/pay/", "/a/pay/", id="a mount of Litestar, with a slash"),
        pytest.param("/pay/", b"//a//pay", "", "/a/pay", "//a//pay", id="a mount of Litestar, with slashes"),
        pytest.param("/", b"/a", "", "/a", "/a", id="the root of a mount of Litestar"),
        pytest.param("/b/pay/", b"/a/b/pay", "/b", "/a/b/pay", "/a/b/pay", id="Starlette in a mount of Litestar"),
        pytest.param("/pay", b"/a/pay", "/a", "/a/pay", "/a/pay", id="a mount of an old Starlette"),
        pytest.param("/pay", b"/pay", "/api", "/pay", "/pay", id="a prefix that a proxy takes away"),
        pytest.param("/pay", b"/a%20b/pay?x=1", "", "/a b/pay", "/a b/pay", id="escapes, and a query"),
        pytest.param("/v1/pay", b"/v1/a/pay", "", "/v1/pay", ["/v1/pay", "/v1/a/pay"], id="written anew"),
        pytest.param("/\ufffd", b"/%E9", "", "/\ufffd", "/\udce9", id="no UTF-8"),
        pytest.param("/\ufffd/", b"/a/%E9", "", "/a/\ufffd", "/a/\udce9", id="no UTF-8 in a mount of Litestar"),
        pytest.param("/pay", None, "", "/pay", "/pay", id="not told"),
        pytest.param("/a/pay", None, "/a", "/a/pay", "/a/pay", id="not told, a mount of Starlette"),
        pytest.param("/pay", None, "/a", "/pay", "/a/pay", id="not told, an old mount"),
        pytest.param("/ab", None, "/a", "/ab", "/a/ab", id="not told, a name that begins alike"),
        pytest.param("/pay", b"", None, "/pay", "/pay", id="told nothing"),
    ],
)
def test_the_path_of_a_request(path: str, raw: bytes | None, root: str | None, whole: str, compared: Any) -> None:
    assert path_of({"path": path, "raw_path": raw, "root_path": root})[:2] == (whole, compared)


class Shop:
    """An application that says how often it ran, below the middleware."""

    def __init__(self) -> None:
        self.runs = 0
        self.guarded = IdempotencyMiddleware(
            self.app, guard=AsyncGuard("memory:"), scope=single_tenant, required=["/a/x/*"]
        )

    async def app(self, _scope: Any, _receive: Any, send: Any) -> None:
        self.runs += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def litestar_mounts(prefixes: list[str], app: Any) -> Litestar:
    def mounted(prefix: str) -> Any:
        @asgi(prefix, is_mount=True, copy_scope=True)
        async def mount(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, send)

        return mount

    # The logging of the other tests is none of its business.
    return Litestar([mounted(prefix) for prefix in prefixes], logging_config=None)


def starlette_mounts(prefixes: list[str], app: Any) -> Starlette:
    return Starlette(routes=[Mount(prefix, app) for prefix in prefixes])


def fastapi_mounts(prefixes: list[str], app: Any) -> FastAPI:
    api = FastAPI()
    for prefix in prefixes:
        api.mount(prefix, app)
    return api


def dispatched(prefixes: list[str], app: Any) -> Any:
    return DispatcherMiddleware(dict.fromkeys(prefixes, app))


def stripped(prefixes: list[str], app: Any) -> Any:
    """A middleware that takes a prefix away, and says nothing else."""

    async def strip(scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        inner = next((path.removeprefix(prefix) for prefix in prefixes if path.startswith(prefix)), path)
        await app({**scope, "path": inner}, receive, send)

    return strip


KINDS = {
    "litestar": litestar_mounts,
    "starlette": starlette_mounts,
    "fastapi": fastapi_mounts,
    "hypercorn": dispatched,
    "stripped": stripped,
}


async def answered(app: Any, path: str, key: str | None) -> Visitor:
    return await Visitor(app, path, key=key).visit()


async def check_two_mounts(app: Any, runs: Callable[[], int]) -> None:
    first, again, other = [await answered(app, path, "key") for path in (PATHS[0], PATHS[0], PATHS[1])]
    keyless = {path: (await answered(app, path, None)).status for path in KEYLESS}

    assert (first.status, again.status, again.is_replay) == (200, 200, True)
    assert (other.status, json.loads(other.body)["code"]) == (422, "key_reused")
    assert keyless == KEYLESS
    assert runs() == 2


# Hypercorn's dispatcher looks at the whole path, and finds nothing inside of another one.
@pytest.mark.parametrize("inner", [name for name in KINDS if name != "hypercorn"])
@pytest.mark.parametrize("outer", KINDS)
def test_two_mounts_of_one_application_share_no_answers(outer: str, inner: str) -> None:
    shop = Shop()
    app = KINDS[outer](["/a", "/b"], KINDS[inner](["/x"], shop.guarded))

    in_time(check_two_mounts(app, lambda: shop.runs))


def test_a_route_of_litestar_below_the_middleware_in_a_mount() -> None:
    """Litestar's own middlewares stand behind its router, and see what it has made of the path."""
    runs: list[int] = []

    @post("/x/pay", status_code=200)
    async def pay() -> None:
        runs.append(1)

    middleware: Any = IdempotencyMiddleware
    options: dict[str, Any] = {"guard": AsyncGuard("memory:"), "scope": single_tenant, "required": ["/a/x/*"]}
    inside = Litestar([pay], middleware=[DefineMiddleware(middleware, **options)], logging_config=None)

    in_time(check_two_mounts(starlette_mounts(["/a", "/b"], inside), lambda: len(runs)))


@pytest.mark.parametrize("path", ["//a/x/pay", "/a//x/pay", "/a/x/pay/", "/%61/x/pay", "/a/x/%70ay"])
def test_no_spelling_of_a_path_that_litestar_understands_goes_without_its_key(path: str) -> None:
    shop = Shop()
    app = litestar_mounts(["/a", "/b"], shop.guarded)
    visitor = Visitor(app, unquote(path), key=None, raw_path=path.encode())

    assert in_time(visitor.visit()).status == 400
    assert shop.runs == 0


def test_the_route_class_of_fastapi_in_two_mounts() -> None:
    runs: list[int] = []
    options: dict[str, Any] = {"scope": single_tenant, "required": ["/a/x/*"]}
    router = APIRouter(route_class=idempotent_route(guard=AsyncGuard("memory:"), **options))

    # A mount of Litestar puts a slash at the end.
    @router.post("/x/pay/")
    async def pay() -> None:
        runs.append(1)

    inside = FastAPI()
    inside.include_router(router)

    in_time(check_two_mounts(litestar_mounts(["/a", "/b"], inside), lambda: len(runs)))


def test_django_in_two_mounts_of_asgi() -> None:
    runs: list[int] = []

    async def story() -> None:
        from asgiref.sync import sync_to_async
        from django.core.handlers.asgi import ASGIRequest
        from django.http import HttpResponse

        from onefold.http.django import middleware

        def respond(_request: Any) -> HttpResponse:
            runs.append(1)
            return HttpResponse()

        handle = middleware(guard=Guard("memory:"), scope=single_tenant, required=["/a/x/*"])(respond)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            request = ASGIRequest(scope, io.BytesIO((await receive())["body"]))
            response = await sync_to_async(handle)(request)
            headers = [(name.lower().encode(), value.encode()) for name, value in response.items()]
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            await send({"type": "http.response.body", "body": response.content})
            request.close()

        await check_two_mounts(litestar_mounts(["/a", "/b"], app), lambda: len(runs))

    with project():
        in_time(story())


def wsgi_app(runs: list[int]) -> Any:
    def app(_environ: Any, start_response: Any) -> list[bytes]:
        runs.append(1)
        start_response("200 OK", [])
        return []

    return WsgiMiddleware(app, guard=Guard("memory:"), scope=single_tenant, required=["/a/x/*"])


def flask_view(runs: list[int]) -> Any:
    app = flask.Flask("shop")

    @app.post("/pay")
    @idempotent(guard=Guard("memory:"), scope=single_tenant, required=["/a/x/*"])
    def pay() -> str:
        runs.append(1)
        return ""

    return app


@pytest.mark.parametrize("made", [wsgi_app, flask_view], ids=["middleware", "decorator"])
def test_two_mounts_of_wsgi_share_no_answers(made: Callable[[list[int]], Any]) -> None:
    runs: list[int] = []
    inner = WsgiDispatcher(flask.Flask("none"), {"/x": made(runs)})
    client = Client(WsgiDispatcher(flask.Flask("none"), {"/a": inner, "/b": inner}))

    first, again, other = [
        client.post(path, headers={"Idempotency-Key": "key"}) for path in (PATHS[0], PATHS[0], PATHS[1])
    ]
    keyless = {path: client.post(path).status_code for path in KEYLESS}

    assert (first.status_code, again.headers.get("Idempotent-Replayed")) == (200, "true")
    assert other.status_code == 422
    assert keyless == KEYLESS
    assert len(runs) == 2


def test_a_path_that_was_written_anew_is_compared_with_what_was_sent() -> None:
    """Whose request it is may have stood in what was taken away."""
    shop = Shop()

    async def rewritten(scope: Any, receive: Any, send: Any) -> None:
        await shop.guarded({**scope, "path": "/v1/pay"}, receive, send)

    async def story() -> list[int]:
        return [(await answered(rewritten, path, "key")).status for path in ("/v1/a/pay", "/v1/a/pay", "/v1/b/pay")]

    assert in_time(story()) == [200, 200, 422]


class Copying:
    """As some middlewares do: what routers find below is not seen above."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(dict(scope), receive, send)


def mounted_starlette(pay: Callable[[], None], *, copies: bool) -> Any:
    async def missing(_request: Request) -> Response:
        pay()
        return Response(status_code=404)

    ours = [Middleware(Copying)] if copies else []
    app = Starlette(routes=[Route("/pay", missing, methods=["POST"])], middleware=ours)
    return Starlette(routes=[Mount("/x", app)], middleware=ours)


def mounted_fastapi(pay: Callable[[], None], *, copies: bool) -> Any:
    def missing() -> Response:
        pay()
        return Response(status_code=404)

    router = APIRouter()
    router.post("/pay")(missing)
    app = FastAPI(middleware=[Middleware(Copying)] if copies else [])
    app.include_router(router, prefix="/x")
    return app


def mounted_litestar(pay: Callable[[], None], *, copies: bool) -> Any:
    @post("/x/pay", status_code=404)
    async def missing() -> None:
        pay()

    return (Copying if copies else lambda app: app)(Litestar([missing], openapi_config=None, logging_config=None))


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("mounted", [mounted_starlette, mounted_fastapi, mounted_litestar])
def test_a_404_of_a_handler_below_a_mount_is_its_own(mounted: Callable[..., Any], copies: bool) -> None:
    """And one of a router is not remembered, where Starlette or FastAPI tells that it is the router's."""
    paid: list[str] = []
    app = Starlette(routes=[Mount("/a", mounted(lambda: paid.append("paid"), copies=copies))])
    guarded = IdempotencyMiddleware(app, guard=AsyncGuard("memory:"), scope=single_tenant)

    async def twice(path: str) -> list[tuple[int, bool]]:
        visitors = [await Visitor(guarded, path, key=path).visit() for _ in range(2)]
        return [(one.status, one.is_replay) for one in visitors]

    assert in_time(twice("/a/x/pay")) == [(404, False), (404, True)]
    assert paid == ["paid"]
    if mounted is not mounted_litestar:
        assert in_time(twice("/a/x/nobody")) == [(404, False), (404, False)]


PIECES = ("/", "a", "b%41", "//", "?", "é", ".", "%", "a/", "~", "")


@pytest.mark.parametrize("root", ["", "/a"])
def test_a_path_that_is_recognized_at_once_is_read_as_any_other(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = ["/" + "".join(pieces) for pieces in itertools.product(PIECES, repeat=3)]
    scopes = [
        {"path": path, "raw_path": raw.encode(), "root_path": root}
        for raw in sent
        for path in (raw, raw.partition("?")[0], unquote(raw))
    ]
    at_once = [paths.path_of(scope) for scope in scopes]
    assert any(paths.PLAIN.fullmatch(scope["raw_path"]) for scope in scopes if isinstance(scope["raw_path"], bytes))

    monkeypatch.setattr(paths, "PLAIN", re.compile(rb"(?!)"))

    assert at_once == [paths.path_of(scope) for scope in scopes]
