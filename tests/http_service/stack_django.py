"""Django's middleware and decorator, among its own middlewares; sync and async views, on WSGI and on ASGI."""

# Django has no types.
# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

import django
from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.conf import settings

from onefold import Guard
from onefold.http.django import idempotent, middleware
from tests.http_service.behaviour import note
from tests.http_service.stack_acts import AROUND as NAMES
from tests.http_service.stack_acts import ENDLESS_SECONDS_MAX, ORIGIN, PART, RULES, act, options_of, route_of

if not settings.configured:
    settings.configure(
        ROOT_URLCONF="tests.http_service.stack_django",
        MIDDLEWARE=["django.middleware.common.CommonMiddleware", "tests.http_service.stack_django.chosen"],
        SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
        SESSION_SERIALIZER="django.contrib.sessions.serializers.JSONSerializer",
        ALLOWED_HOSTS=["*"],
        SECRET_KEY="for tests only",
        LOGGING_CONFIG=None,
    )
    django.setup()

from django.contrib.sessions.middleware import SessionMiddleware
from django.core.asgi import get_asgi_application
from django.core.handlers.asgi import ASGIRequest
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse, StreamingHttpResponse
from django.middleware.gzip import GZipMiddleware
from django.urls import path
from django.utils.decorators import sync_and_async_middleware
from django.utils.deprecation import MiddlewareMixin


class Session(SessionMiddleware):
    def process_request(self, request: Any) -> None:
        super().process_request(request)
        request.session["seen"] = uuid.uuid4().hex


class Cors(MiddlewareMixin):
    def process_response(self, request: Any, response: Any) -> Any:
        if "Origin" in request.headers:
            response[ORIGIN.title()] = request.headers["Origin"]
        return response


class RequestId(MiddlewareMixin):
    name = "X-Request-Id"

    def process_response(self, _request: Any, response: Any) -> Any:
        response[self.name] = uuid.uuid4().hex
        return response


class Base(RequestId):
    name = "X-Base"


AROUND: dict[str, Callable[[Any], Any]] = {
    "none": lambda get_response: get_response,
    "compression": GZipMiddleware,
    "cors": Cors,
    "request-id": RequestId,
    "session": Session,
    "base": Base,
}

guards = {rule: Guard("memory:", policy=policy) for rule, (_options, policy) in RULES.items()}


@sync_and_async_middleware
def chosen(get_response: Any) -> Any:
    chains: dict[tuple[str, str, str], Any] = {}
    for rule in (*RULES, "single"):
        ours = (lambda inside: inside) if rule == "single" else middleware(guard=guards[rule], **options_of(rule))
        for above in NAMES:
            for below in NAMES:
                chains[above, below, rule] = AROUND[above](ours(AROUND[below](get_response)))
        chains["none", "blocking", rule] = blocked(lambda respond, ours=ours: ours(blocking(respond)), get_response)
        chains["blocking", "none", rule] = blocked(blocking, ours(get_response))

    def chain(request: Any) -> Any:
        route = route_of(request.path)
        assert route is not None, request.path
        return chains[route[:3]](request)

    if not iscoroutinefunction(get_response):
        return chain

    async def async_view(request: Any) -> Any:
        return await chain(request)

    return async_view


def blocking(respond: Any) -> Any:
    """A middleware that is not async."""

    def handle(request: Any) -> Any:
        request.was_blocked = True
        return respond(request)

    return handle


def blocked(around: Any, get_response: Any) -> Any:
    """What blocks around what may be async, as Django puts them together."""
    if not iscoroutinefunction(get_response):
        return around(get_response)
    return sync_to_async(around(async_to_sync(get_response)))


def view(request: Any, **_names: str) -> Any:
    size = sum(file.size for file in request.FILES.values()) if request.FILES else len(request.read())
    done = act(request.path, request.META["QUERY_STRING"], size)
    parts = done.parts
    if isinstance(request, ASGIRequest) and request.path.endswith("endless"):
        # Django reads the whole of any other stream before it sends it on ASGI.
        parts = endless(request.GET["name"])
    response = HttpResponse(done.body) if done.body is not None else StreamingHttpResponse(parts)
    response.status_code = done.status
    for name, value in done.headers:
        response[name] = value
    return response


async def endless(name: str) -> Any:
    ends = time.monotonic() + ENDLESS_SECONDS_MAX
    try:
        while time.monotonic() < ends:
            yield PART
            await asyncio.sleep(0.005)
    finally:
        note(f"ended {name}-ended 0")


async def async_view(request: Any, **_names: str) -> Any:
    return await sync_to_async(view)(request)


async def cancellable(request: Any, **_names: str) -> Any:
    """Waits in the event loop, where a cancellation would end it."""
    note(f"{request.path} {request.GET['name']} 0")
    try:
        for _ in range(10_000):
            if os.path.exists(request.GET["gate"]):  # noqa: ASYNC240 - the test opens it
                break
            await asyncio.sleep(0.005)
    except asyncio.CancelledError:
        note(f"{request.path} {request.GET['name']}-cancelled 0")
        raise
    return HttpResponse(b"done", status=201)


def breaks(request: Any, how: str, **_names: str) -> Any:
    act(request.path.replace(f"/{how}", "/json"), request.META["QUERY_STRING"], 0)
    response = HttpResponse(b"done", status=201)
    match how:
        case "raises":
            raise RuntimeError("after its effect")
        case "nothing":
            return None
        case "raises-in-the-middle":
            return StreamingHttpResponse(in_the_middle())
        case "number-body":
            return StreamingHttpResponse(5)
    response.status_code = STATUSES.get(how, 201)
    for name, value in HEADERS.get(how, {}).items():
        response[name] = value
    return response


STATUSES: dict[str, Any] = {"text-status": "fine", "low-status": 20, "high-status": 600, "body-of-204": 204}
HEADERS = {
    "no-latin": {"Content-Disposition": "attachment; filename=счёт.pdf"},
    "blank-in-name": {"X Own": "yes"},
    "too-short": {"Content-Length": "200"},
    "too-long": {"Content-Length": "2"},
    "blanks-around": {"X-Own": " yes\t"},
}


def in_the_middle() -> Any:
    yield b"do"
    raise RuntimeError("in the middle")


BREAKS = ("raises", "nothing", "raises-in-the-middle", "number-body", *STATUSES, *HEADERS)
PATH = "<above>/<below>/<rule>/"
single = idempotent(guard=Guard("memory:"), **options_of("below"))(view)
urlpatterns = [
    *(path(f"<above>/<below>/single/{name}", single) for name in ("json", "stream", "endless", "boom", "missing")),
    *(path(f"{PATH}{name}", view) for name in ("json", "stream", "endless", "boom", "missing", "both", "both/")),
    path(f"{PATH}with-slash/", view),
    path(f"{PATH}awaited", async_view),
    path(f"{PATH}cancellable", cancellable),
    *(path(f"{PATH}{how}", breaks, {"how": how}) for how in BREAKS),
]
app = get_wsgi_application()
asgi = get_asgi_application()
