"""What goes wrong around a request, in every adapter: full disks, streams for nobody, errors and their names."""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import flask
import httpx
import pytest
from fastapi import APIRouter, FastAPI

from onefold import AsyncGuard, Guard, Policy, State
from onefold.http._asgi import client_gone
from onefold.http._exchange import views as _views
from onefold.http._exchange.views import captured, captured_async
from onefold.http._shared.messages import SPOOL_MAX
from onefold.http.asgi import IdempotencyMiddleware, single_tenant
from onefold.http.fastapi import idempotent_route
from onefold.http.flask import IdempotencyMiddleware as WsgiMiddleware
from onefold.http.flask import idempotent
from onefold.stores.base import Record
from tests.http_service.visitor import Visitor
from tests.stores.django.project import project
from tests.support import in_time

HOLD = Policy(after_crash="hold")


class Cause(Exception):
    """What the user's error came from."""


class Boom(Exception):
    """The user's error."""


def pays(runs: list[str]) -> None:
    """An effect, and an error after it."""
    runs.append("paid")
    try:
        raise Cause("the bank said no more")
    except Cause as cause:
        raise Boom("after the effect") from cause


class Sent(NamedTuple):
    """What came of one request: an answer, or an error; and the record of its key."""

    status: int
    body: bytes
    error: BaseException | None
    record: Record | None


Send = Callable[..., Sent]


async def asgi_sent(app: Any, guard: AsyncGuard, body: bytes) -> Sent:
    visitor, error = Visitor(app, body=body), None
    try:
        await visitor.visit()
    except Exception as raised:
        error = raised
    record = await guard.read("http", "key")
    await guard.aclose()
    return Sent(visitor.status if visitor.sent else 0, visitor.body, error, record)


def with_asgi(handler: Callable[[], None], policy: Policy, body: bytes) -> Sent:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        handler()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = AsyncGuard("memory:", policy=policy)
    return in_time(asgi_sent(IdempotencyMiddleware(app, guard=guard, scope=single_tenant), guard, body))


def with_fastapi(handler: Callable[[], None], policy: Policy, body: bytes) -> Sent:
    guard = AsyncGuard("memory:", policy=policy)
    router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant))

    @router.post("/pay")
    async def pay() -> None:
        handler()

    app = FastAPI()
    app.include_router(router)
    return in_time(asgi_sent(app, guard, body))


def wsgi_sent(app: Any, guard: Guard, body: bytes) -> Sent:
    statuses: list[str] = []
    environ = {
        "REQUEST_METHOD": "POST",
        "SERVER_NAME": "shop",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
        "PATH_INFO": "/pay",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
        "HTTP_IDEMPOTENCY_KEY": "key",
    }
    content, error = b"", None
    try:
        parts = app(environ, lambda status, *_: statuses.append(status))
        content = b"".join(parts)
        if hasattr(parts, "close"):
            parts.close()
    except Exception as raised:
        error = raised
    record = guard.read("http", "key")
    guard.close()
    return Sent(int(statuses[-1][:3]) if statuses else 0, content, error, record)


def with_wsgi(handler: Callable[[], None], policy: Policy, body: bytes) -> Sent:
    def app(_environ: Any, start_response: Any) -> list[bytes]:
        handler()
        start_response("200 OK", [])
        return []

    guard = Guard("memory:", policy=policy)
    return wsgi_sent(WsgiMiddleware(app, guard=guard, scope=single_tenant), guard, body)


def with_flask(handler: Callable[[], None], policy: Policy, body: bytes) -> Sent:
    guard = Guard("memory:", policy=policy)
    app = flask.Flask("shop")
    app.config["PROPAGATE_EXCEPTIONS"] = True

    @app.post("/pay")
    @idempotent(guard=guard, scope=single_tenant)
    def pay() -> str:
        handler()
        return ""

    return wsgi_sent(app, guard, body)


def with_django(handler: Callable[[], None], policy: Policy, body: bytes) -> Sent:
    from django.http import HttpResponse
    from django.test import RequestFactory

    from onefold.http.django import middleware

    guard = Guard("memory:", policy=policy)

    def respond(_request: Any) -> HttpResponse:
        handler()
        return HttpResponse()

    guarded = middleware(guard=guard, scope=single_tenant)(respond)
    request = RequestFactory().post("/pay", body, "application/octet-stream", headers={"Idempotency-Key": "key"})
    status, content, error = 0, b"", None
    try:
        response = guarded(request)
        status, content = response.status_code, response.content
    except Exception as raised:
        error = raised
    request.close()
    record = guard.read("http", "key")
    guard.close()
    return Sent(status, content, error, record)


ADAPTERS = {
    "asgi": with_asgi,
    "fastapi": with_fastapi,
    "wsgi": with_wsgi,
    "flask": with_flask,
    "django": with_django,
}


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Iterator[str]:
    with project():
        yield request.param


@pytest.fixture
def send(adapter: str) -> Send:
    def sent(handler: Callable[[], None], *, policy: Policy = Policy(), body: bytes = b"{}") -> Sent:  # noqa: B008
        return ADAPTERS[adapter](handler, policy, body)

    return sent


# The user's error.


def fails() -> None:
    raise Boom("after the effect")


@pytest.mark.parametrize(("handler", "shown"), [(lambda: pays([]), [Boom, Cause]), (fails, [Boom])])
def test_the_users_error_comes_out_as_it_was_raised(send: Send, handler: Any, shown: list[type]) -> None:
    found = send(handler, policy=HOLD).error

    assert found is not None
    assert type(found.__cause__) is (shown[1] if len(shown) > 1 else type(None))
    seen = [found]
    while (inner := seen[-1].__context__) is not None:
        seen.append(inner)
    assert [type(one) for one in seen] == shown


def test_a_held_record_names_the_users_error(send: Send) -> None:
    record = send(lambda: pays([]), policy=HOLD).record

    assert record is not None
    assert (record.state, record.remark) == (State.HELD, f"attempt 1 ended in {__name__}.Boom")


def test_a_held_record_has_the_text_of_the_users_error_if_the_policy_allows_it(send: Send) -> None:
    record = send(fails, policy=HOLD.replace(keep_error_text=True)).record

    assert record is not None
    assert record.remark == f"attempt 1 ended in {__name__}.Boom, which said: after the effect"


def test_a_held_record_names_the_status_of_an_answer() -> None:
    def app(_environ: Any, start_response: Any) -> list[bytes]:
        start_response("503 Service Unavailable", [])
        return [b""]

    guard = Guard("memory:", policy=HOLD)
    record = wsgi_sent(WsgiMiddleware(app, guard=guard, scope=single_tenant), guard, b"{}").record

    assert record is not None
    assert record.remark == "attempt 1 ended in HTTP 503"


# A full temporary folder.


def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/there/is/no/such/folder")


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "r+b"))  # noqa: SIM115


@pytest.mark.parametrize("break_it", [no_folder, full_disk])
def test_a_body_for_which_there_is_no_room_is_refused_and_nothing_has_run(
    send: Send, adapter: str, monkeypatch: pytest.MonkeyPatch, break_it: Any
) -> None:
    if adapter == "flask":
        pytest.skip("Flask has the body of a view in memory")
    runs: list[str] = []
    large = b"r" * (SPOOL_MAX + 1)
    with monkeypatch.context() as broken:
        break_it(broken)
        refused = send(lambda: runs.append("ran"), body=large)
    later = send(lambda: runs.append("ran"), body=large)

    assert refused.error is None
    assert (refused.status, json.loads(refused.body)["code"]) == (503, "no_room")
    assert refused.record is None
    assert later.status == 200
    assert runs == ["ran"]


# Methods.


def test_a_method_in_small_letters_is_guarded() -> None:
    """As werkzeug's own server passes it on, and Flask runs it."""
    app = flask.Flask("shop")
    runs: list[str] = []

    @app.route("/pay", methods=["PATCH"])
    def pay() -> str:
        runs.append("paid")
        return "paid"

    guarded = WsgiMiddleware(app.wsgi_app, guard=Guard("memory:"), scope=single_tenant, required=True)
    statuses: list[str] = []
    for key in ({}, {"HTTP_IDEMPOTENCY_KEY": "key"}, {"HTTP_IDEMPOTENCY_KEY": "key"}):
        environ = {
            "REQUEST_METHOD": "patch",
            "SERVER_NAME": "shop",
            "SERVER_PORT": "80",
            "wsgi.url_scheme": "http",
            "PATH_INFO": "/pay",
            "wsgi.input": io.BytesIO(),
            **key,
        }
        b"".join(guarded(environ, lambda status, *_: statuses.append(status[:3])))  # type: ignore[arg-type]

    assert statuses == ["400", "200", "200"]
    assert runs == ["paid"]


# Streams for nobody.


def test_a_fast_stream_for_nobody_ends_after_so_many_bytes_and_lets_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_gone, "STREAM_BYTES", 100_000)

    async def story() -> tuple[int, Record | None]:
        sent = 0

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            nonlocal sent
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 1_000, "more_body": True})
                sent += 1
                if sent == 10:
                    visitor.go()

        guard = AsyncGuard("memory:", policy=HOLD)
        visitor = Visitor(IdempotencyMiddleware(app, guard=guard, scope=single_tenant))
        # Nobody takes it: a real server waits for its client here.
        visitor.breaks_at = {20: ConnectionResetError()}
        await visitor.visit()
        record = await guard.read("http", "key")
        await guard.aclose()
        return sent, record

    sent, record = in_time(story())

    assert 100 <= sent <= 200
    assert record is not None
    assert (record.state, record.remark) == (State.HELD, "attempt 1 ended in ClientGone")


def test_a_stream_that_ends_in_time_after_its_client_has_gone_is_remembered() -> None:
    async def story() -> Visitor:
        left = asyncio.Event()

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"one ", "more_body": True})
            left.set()
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"two ", "more_body": True})
            await send({"type": "http.response.body", "body": b"three"})

        guard = AsyncGuard("memory:")
        guarded = IdempotencyMiddleware(app, guard=guard, scope=single_tenant)
        first = Visitor(guarded)
        visit = asyncio.ensure_future(first.visit())
        await left.wait()
        first.go()
        await visit
        second = await Visitor(guarded).visit()
        await guard.aclose()
        return second

    second = in_time(story())

    assert second.is_replay
    assert second.body == b"one two three"


def test_a_slow_stream_for_nobody_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_gone, "STREAM_SECONDS", 0.0)

    async def story() -> Record | None:
        async def app(_scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"one ", "more_body": True})
            visitor.go()
            # It sends nothing more, and listens: it is told that its client has gone.
            assert (await receive())["type"] == "http.disconnect"

        guard = AsyncGuard("memory:", policy=HOLD)
        visitor = Visitor(IdempotencyMiddleware(app, guard=guard, scope=single_tenant))
        await visitor.visit()
        record = await guard.read("http", "key")
        await guard.aclose()
        return record

    record = in_time(story())

    assert record is not None
    assert (record.state, record.remark) == (State.HELD, "attempt 1 ended in ClientGone")


def test_the_stream_of_a_view_is_read_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for part in (b"one ", b"two"):
            yield part

    whole = captured(iter([b"one ", b"two"]), 100)
    whole_async = asyncio.run(captured_async(parts(), 100))
    monkeypatch.setattr(_views, "READ_SECONDS", -1.0)
    slow = captured(iter([b"one ", b"two"]), 100)
    slow_async = asyncio.run(captured_async(parts(), 100))

    assert (whole.whole, whole_async) == (b"one two", ([b"one ", b"two"], b"one two"))
    assert (slow.whole, list(slow.parts)) == (None, [b"one ", b"two"])
    assert slow_async == ([b"one "], None)


def test_an_event_stream_that_is_not_guarded_is_cancelled_with_its_request() -> None:
    """Its claim was given back when it began: nothing of it has to come to an end."""

    async def story() -> list[str]:
        begun, seen = asyncio.Event(), []

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        guard = AsyncGuard("memory:")
        visit = asyncio.ensure_future(Visitor(IdempotencyMiddleware(app, guard=guard, scope=single_tenant)).visit())
        await begun.wait()
        visit.cancel()
        await asyncio.wait({visit})
        while not seen:  # noqa: ASYNC110 - the application is in a task of its own
            await asyncio.sleep(0)
        await guard.aclose()
        return seen

    assert in_time(story()) == ["cancelled"]


def test_an_endless_stream_of_wsgi_ends_when_its_client_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_gone, "STREAM_BYTES", 100_000)
    ended: list[int] = []

    def app(_environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        number = 0
        try:
            while True:
                number += 1
                yield b"x" * 1_000
        finally:
            ended.append(number)

    def write(_part: bytes) -> None:
        raise ConnectionResetError

    guard = Guard("memory:", policy=HOLD)
    environ: dict[str, Any] = {"REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "HTTP_IDEMPOTENCY_KEY": "key"}
    environ |= {"wsgi.input": io.BytesIO(), "CONTENT_LENGTH": "0"}

    parts = WsgiMiddleware(app, guard=guard, scope=single_tenant)(environ, lambda *_: write)

    assert list(parts) == []
    assert 100 <= ended[0] <= 110
    record = guard.read("http", "key")
    guard.close()
    assert record is not None
    assert (record.state, record.remark) == (State.HELD, "attempt 1 ended in ClientGone")


# An endpoint that cancels itself.


@pytest.mark.parametrize("rules", ["stripe", "below_500"])
def test_an_endpoint_that_raises_a_cancellation_has_run(rules: str) -> None:
    runs: list[str] = []
    guard = AsyncGuard("memory:", policy=HOLD)
    router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant, rules=rules))

    @router.post("/pay")
    async def pay() -> None:
        runs.append("paid")
        raise asyncio.CancelledError

    app = FastAPI()
    app.include_router(router)

    async def story() -> int:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            answers = [await client.post("/pay", headers={"Idempotency-Key": "key"}) for _ in range(2)]
        await guard.aclose()
        return answers[1].status_code

    assert in_time(story()) == (500 if rules == "stripe" else 409)
    assert runs == ["paid"]


def flask_app(runs: list[str], *, decorated: bool) -> Any:
    guard = Guard("memory:", policy=HOLD)
    app = flask.Flask("shop")

    def pay() -> str:
        runs.append("paid")
        raise asyncio.CancelledError

    if decorated:
        pay = idempotent(guard=guard, scope=single_tenant, rules="stripe")(pay)
    app.add_url_rule("/pay", view_func=pay, methods=["POST"])
    if not decorated:
        around = WsgiMiddleware(app.wsgi_app, guard=guard, scope=single_tenant, rules="stripe")
        app.wsgi_app = around  # type: ignore[method-assign]
    return app


@pytest.mark.parametrize("decorated", [False, True], ids=["middleware", "decorator"])
def test_a_view_of_flask_that_raises_the_cancellation_of_a_task_has_run(decorated: bool) -> None:
    runs: list[str] = []
    client = flask_app(runs, decorated=decorated).test_client()

    with pytest.raises(asyncio.CancelledError):
        # The middleware answers first, and raises at the end of its response, which a server reads.
        client.post("/pay", headers={"Idempotency-Key": "key"}).get_data()
    again = client.post("/pay", headers={"Idempotency-Key": "key"})

    assert again.status_code == 500
    assert runs == ["paid"]
