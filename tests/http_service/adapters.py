"""Every HTTP adapter in this process, without a server: one service a set of options, which counts what it runs."""

# Django and its REST framework have no types.
# mypy: disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import flask
import httpx
from fastapi import APIRouter, FastAPI, Request

from onefold import AsyncGuard, Guard
from onefold.http.asgi import IdempotencyMiddleware
from onefold.http.fastapi import idempotent_route
from onefold.http.flask import idempotent as flask_idempotent
from onefold.http.wsgi import IdempotencyMiddleware as WsgiMiddleware
from onefold.stores.base import Query, Record
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.stores.django.project import project
from tests.support import in_time

PATHS = ("/pay", "/refund")
METHODS = ("POST", "PUT", "PATCH", "DELETE")


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_replay(self) -> bool:
        return self.headers.get("Idempotent-Replayed") == "true"

    @property
    def code(self) -> str:
        """Return the code of a problem."""
        return str(json.loads(self.body)["code"])


class Sent(NamedTuple):
    path: str
    body: bytes
    headers: Mapping[str, str]
    method: str = "POST"


class Service:
    """An application behind one adapter. Its answers are numbered, and `ran` has the bodies that it has read."""

    def __init__(self, around: Callable[[Service, dict[str, Any]], Callable[[Sent], Reply]], store: Any) -> None:
        self._around = around
        self.store = store
        self.ran: list[bytes] = []
        # Raised by the application, which has done nothing then.
        self.fails_with: Exception | None = None
        self._send: Callable[[Sent], Reply] | None = None

    def take(self, options: dict[str, Any]) -> None:
        """Serve with these options from now on. The store stays."""
        guard = {"guard": self.guard(**options.pop("guard_options", {}))}
        self._send = self._around(self, {**guard, **options})

    def guard(self, **fields: Any) -> Any:
        kind = AsyncGuard if isinstance(self.store, AsyncMemoryStore) else Guard
        return kind(self.store, **fields)

    def records(self) -> list[Record]:
        found = self.store.browse(Query(), 10)
        return in_time(found) if isinstance(self.store, AsyncMemoryStore) else found

    def run(self, body: bytes) -> str:
        if self.fails_with is not None:
            raise self.fails_with
        self.ran.append(body)
        return f"run {len(self.ran)}"

    def post(
        self,
        path: str = "/pay",
        body: bytes = b"{}",
        *,
        key: str | None = "key",
        host: str = "shop",
        method: str = "POST",
        **headers: str,
    ) -> Reply:
        assert self._send is not None
        named = {} if key is None else {"Idempotency-Key": key}
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._send(Sent(path, body, {"Host": host, "Content-Type": "application/json", **named, **more}, method))


def _over_asgi(app: Any, sent: Sent) -> Reply:
    async def story() -> Reply:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            found = await client.request(sent.method, sent.path, content=sent.body, headers=dict(sent.headers))
            return Reply(found.status_code, found.headers, found.content)

    return in_time(story())


def _asgi(service: Service, options: dict[str, Any]) -> Callable[[Sent], Reply]:
    app = FastAPI()
    for path in PATHS:
        app.api_route(path, methods=list(METHODS))(_endpoint(service))
    around = IdempotencyMiddleware(app, **options)
    return lambda sent: _over_asgi(around, sent)


def _route(service: Service, options: dict[str, Any]) -> Callable[[Sent], Reply]:
    router = APIRouter(route_class=idempotent_route(**options))
    for path in PATHS:
        router.api_route(path, methods=list(METHODS))(_endpoint(service))
    app = FastAPI()
    app.include_router(router)
    return lambda sent: _over_asgi(app, sent)


def _endpoint(service: Service) -> Callable[..., Any]:
    async def handle(request: Request) -> str:
        return service.run(await request.body())

    # FastAPI reads the annotations, which are text here.
    handle.__annotations__ = {"request": Request, "return": str}
    return handle


def _over_flask(app: flask.Flask, sent: Sent) -> Reply:
    found = app.test_client().open(sent.path, method=sent.method, data=sent.body, headers=dict(sent.headers))
    return Reply(found.status_code, httpx.Headers(list(found.headers)), found.data)


def _wsgi(service: Service, options: dict[str, Any]) -> Callable[[Sent], Reply]:
    app = flask.Flask("shop")
    app.testing = True
    for path in PATHS:
        app.route(path, endpoint=path, methods=METHODS)(lambda: service.run(flask.request.get_data()))
    app.wsgi_app = WsgiMiddleware(app.wsgi_app, **options)  # type: ignore[method-assign]
    return lambda sent: _over_flask(app, sent)


def _flask_view(service: Service, options: dict[str, Any]) -> Callable[[Sent], Reply]:
    app = flask.Flask("shop")
    app.testing = True
    view = flask_idempotent(**options)(lambda: service.run(flask.request.get_data()))
    for path in PATHS:
        app.route(path, endpoint=path, methods=METHODS)(view)
    return lambda sent: _over_flask(app, sent)


def _over_django(view: Callable[[Any], Any], sent: Sent) -> Reply:
    from django.test import RequestFactory

    request = RequestFactory().generic(
        sent.method, sent.path, sent.body, "application/json", headers=dict(sent.headers)
    )
    try:
        found = view(request)
        return Reply(found.status_code, found.headers, found.content)
    finally:
        request.close()


def _django(service: Service, options: dict[str, Any]) -> Callable[[Sent], Reply]:
    from django.http import HttpResponse

    from onefold.http.django import middleware

    installed = middleware(**options)(lambda request: HttpResponse(service.run(request.read())))
    return lambda sent: _over_django(installed, sent)


def _django_view(service: Service, options: dict[str, Any]) -> Callable[[Sent], Reply]:
    from django.http import HttpResponse

    from onefold.http.django import idempotent

    view = idempotent(**options)(lambda request: HttpResponse(service.run(request.read())))
    return lambda sent: _over_django(view, sent)


def _rest_view(service: Service, options: dict[str, Any]) -> Callable[[Sent], Reply]:
    from django.http import HttpResponse
    from rest_framework.views import APIView

    from onefold.http.django import Idempotency, IdempotentMixin

    class View(IdempotentMixin, APIView):
        idempotency = Idempotency(**options)

        def post(self, request: Any) -> Any:
            return HttpResponse(service.run(request.read()))

        put = patch = delete = post

    return lambda sent: _over_django(View.as_view(), sent)


ADAPTERS = {
    "asgi": (_asgi, AsyncMemoryStore),
    "fastapi's route": (_route, AsyncMemoryStore),
    "wsgi": (_wsgi, MemoryStore),
    "flask's view": (_flask_view, MemoryStore),
    "django": (_django, MemoryStore),
    "django's view": (_django_view, MemoryStore),
    "django's rest view": (_rest_view, MemoryStore),
}


@contextmanager
def service_on(adapter: str) -> Iterator[Service]:
    """A service behind this adapter, with a store of its own; Django is configured while it lasts."""
    around, store = ADAPTERS[adapter]
    with project():
        from django.test import override_settings

        # Django's own users would need their tables.
        alone: dict[str, Any] = {"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None}
        with override_settings(REST_FRAMEWORK=alone, ALLOWED_HOSTS=["*"]):
            yield Service(around, store())
