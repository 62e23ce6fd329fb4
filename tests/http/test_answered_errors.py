"""An application that raises, under the rules of Stripe: its first caller gets the 500 that every duplicate gets.

The error is not hidden for that: it is raised after the response, or goes the way of its framework.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import flask
import httpx
import pytest
from fastapi import APIRouter, FastAPI

from onefold import AsyncGuard, Guard
from onefold.http import asgi, wsgi
from onefold.http.fastapi import idempotent_route
from onefold.http.flask import idempotent
from onefold.http.scopes import single_tenant
from tests.http.test_wsgi import Client
from tests.stores.django.project import project
from tests.support import in_time


class Boom(Exception):
    pass


class Seen(NamedTuple):
    """What a client has got, and what the server has."""

    status: int
    headers: dict[str, str]
    body: bytes
    raised: bool = False

    @property
    def is_replay(self) -> bool:
        return "idempotent-replayed" in self.headers

    @property
    def as_first(self) -> tuple[int, dict[str, str], bytes]:
        # The server, or a layer above a view, adds the length.
        own = ("idempotent-replayed", "content-length")
        headers = {name: value for name, value in self.headers.items() if name not in own}
        return self.status, headers, self.body


Send = Callable[[], Seen]
KEY = {"Idempotency-Key": "key"}


def options(kind: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    return {"guard": kind("memory:"), "scope": single_tenant, "rules": "stripe", **given}


def over_asgi(app: Any) -> Send:
    def send() -> Seen:
        raised: list[bool] = []

        async def served(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            except Boom:
                raised.append(True)
                raise

        async def story() -> httpx.Response:
            transport = httpx.ASGITransport(served, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                return await client.post("/pay", headers=KEY)

        found = in_time(story())
        return Seen(found.status_code, dict(found.headers), found.content, bool(raised))

    return send


def on_asgi(given: dict[str, Any], fail: Callable[[], None]) -> Send:
    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        fail()

    return over_asgi(asgi.IdempotencyMiddleware(app, **options(AsyncGuard, given)))


def on_starlette(given: dict[str, Any], fail: Callable[[], None]) -> Send:
    app = FastAPI()
    app.add_middleware(asgi.IdempotencyMiddleware, **options(AsyncGuard, given))
    app.post("/pay")(fail)
    return over_asgi(app)


def around_starlette(given: dict[str, Any], fail: Callable[[], None]) -> Send:
    """Starlette's own layer for errors is inside: it responds, and raises the error again."""
    app = FastAPI()
    app.post("/pay")(fail)
    return over_asgi(asgi.IdempotencyMiddleware(app, **options(AsyncGuard, given)))


def on_a_route(given: dict[str, Any], fail: Callable[[], None]) -> Send:
    router = APIRouter(route_class=idempotent_route(**options(AsyncGuard, given)))
    router.post("/pay")(fail)
    app = FastAPI()
    app.include_router(router)
    return over_asgi(app)


def on_wsgi(given: dict[str, Any], fail: Callable[[], None]) -> Send:
    client = Client(wsgi.IdempotencyMiddleware(lambda *_: fail(), **options(Guard, given)))  # type: ignore[arg-type]

    def send() -> Seen:
        raised = False
        try:
            client.post()
        except Boom:
            raised = True
        return Seen(client.status, client.headers, client.body, raised)

    return send


def over_flask(app: flask.Flask) -> Send:
    def send() -> Seen:
        told: list[bool] = []

        def tell(_app: flask.Flask, **_more: Any) -> None:
            told.append(True)

        with flask.got_request_exception.connected_to(tell, app):
            found = app.test_client().post("/pay", headers=KEY)
        return Seen(found.status_code, {k.lower(): v for k, v in found.headers}, found.data, bool(told))

    return send


def around_flask(given: dict[str, Any], fail: Callable[[], None]) -> Send:
    app = flask.Flask("shop")
    app.add_url_rule("/pay", view_func=fail, methods=["POST"])  # type: ignore[arg-type]
    app.wsgi_app = wsgi.IdempotencyMiddleware(app.wsgi_app, **options(Guard, given))  # type: ignore[method-assign]
    return over_flask(app)


def on_flask(given: dict[str, Any], fail: Callable[[], None]) -> Send:
    app = flask.Flask("shop")
    app.add_url_rule("/pay", view_func=idempotent(**options(Guard, given))(fail), methods=["POST"])  # type: ignore[arg-type]
    return over_flask(app)


def over_django(view: Callable[[Any], Any]) -> Send:
    def send() -> Seen:
        from django.core.handlers.exception import convert_exception_to_response
        from django.core.signals import got_request_exception
        from django.test import RequestFactory

        told: list[bool] = []

        def tell(**_more: Any) -> None:
            told.append(True)

        got_request_exception.connect(tell)
        try:
            found = convert_exception_to_response(view)(RequestFactory().post("/pay", headers=KEY))
        finally:
            got_request_exception.disconnect(tell)
        return Seen(found.status_code, {k.lower(): v for k, v in found.items()}, found.content, bool(told))

    return send


def on_django(given: dict[str, Any], fail: Callable[[], None]) -> Send:
    from onefold.http.django import middleware

    return over_django(middleware(**options(Guard, given))(lambda _request: fail()))


def on_a_django_view(given: dict[str, Any], fail: Callable[[], None]) -> Send:
    from onefold.http.django import idempotent

    return over_django(idempotent(**options(Guard, given))(lambda _request: fail()))


OURS = {"asgi": on_asgi, "starlette": on_starlette, "route": on_a_route, "wsgi": on_wsgi}
THEIRS = {
    "around starlette": around_starlette,
    "around flask": around_flask,
    "flask": on_flask,
    "django": on_django,
    "django's view": on_a_django_view,
}


@pytest.fixture
def runs() -> list[int]:
    return []


@contextmanager
def serving(adapter: str, runs: list[int], **given: Any) -> Iterator[Send]:
    def fail() -> None:
        runs.append(1)
        raise Boom("as it was asked")

    with project():
        from django.test import override_settings

        with override_settings(ALLOWED_HOSTS=["*"], ROOT_URLCONF=()):
            yield {**OURS, **THEIRS}[adapter](given, fail)


@pytest.mark.parametrize("adapter", [*OURS, *THEIRS])
def test_the_first_caller_gets_the_same_500_as_every_duplicate(adapter: str, runs: list[int]) -> None:
    with serving(adapter, runs) as send:
        first, again = send(), send()

    assert first.status == 500
    assert (first.is_replay, again.is_replay) == (False, True)
    assert first.as_first == again.as_first
    assert len(runs) == 1


@pytest.mark.parametrize("adapter", [*OURS, *THEIRS])
def test_the_error_reaches_whoever_reports_errors_and_once(adapter: str, runs: list[int]) -> None:
    with serving(adapter, runs) as send:
        assert (send().raised, send().raised) == (True, False)


@pytest.mark.parametrize("adapter", OURS)
def test_the_500_is_a_problem_document_or_the_applications_own(adapter: str, runs: list[int]) -> None:
    with serving(adapter, runs) as send:
        problem = send()
    with serving(adapter, runs, refusal=lambda refusal: {"error": refusal.code}) as send:
        own, again = send(), send()

    assert b'"code":"failed"' in problem.body
    assert own.body == again.body == b'{"error":"failed"}'


@pytest.mark.parametrize("adapter", [*OURS, "flask", "django", "django's view"])
def test_the_first_500_may_be_left_to_the_server(adapter: str, runs: list[int]) -> None:
    with serving(adapter, runs, answer_errors=False) as send:
        first, again = send(), send()

    assert first.raised
    assert (again.status, again.is_replay, b'"code":"failed"' in again.body) == (500, True, True)
    assert first.body != again.body
    assert len(runs) == 1


def test_a_flask_that_propagates_exceptions_still_does(runs: list[int]) -> None:
    app = flask.Flask("shop")
    app.testing = True

    def fail() -> None:
        runs.append(1)
        raise Boom

    app.add_url_rule("/pay", view_func=idempotent(**options(Guard, {}))(fail), methods=["POST"])  # type: ignore[arg-type]

    with pytest.raises(Boom):
        app.test_client().post("/pay", headers=KEY)
    again = app.test_client().post("/pay", headers=KEY)
    assert (again.status_code, len(runs)) == (500, 1)


def test_under_the_other_rules_an_error_is_the_servers(runs: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with serving("wsgi", runs, rules="below_500") as send, caplog.at_level(logging.ERROR):
        seen = [send(), send()]

    assert [(one.status, one.raised) for one in seen] == [(0, True), (0, True)]
    assert len(runs) == 2
