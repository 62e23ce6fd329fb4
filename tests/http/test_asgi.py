"""The ASGI middleware where a server cannot be made to do it: cancellation, broken senders, its neighbours."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, BaseUser, SimpleUser
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from onefold import AsyncGuard, Done, Failed, Guard, Policy, Rerun, State, UsageError, current
from onefold.http import Answer
from onefold.http._shared.messages import SPOOL_MAX
from onefold.http.asgi import IdempotencyMiddleware, body_field, by_header, by_user, single_tenant
from onefold.http.fastapi import idempotent_route
from onefold.keys import address
from onefold.stores.memory import AsyncMemoryStore
from tests.http_service.visitor import Visitor
from tests.support import AsyncProxyStore, Clock, in_own_context, in_time


class App:
    """An application that counts its runs, and does what it is told before and after its answer."""

    def __init__(self, **steps: Callable[[], Any]) -> None:
        self.runs = 0
        self.bodies: list[bytes] = []
        self.steps = steps

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        await self.step("begin")
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-run", str(self.runs).encode())]})
        await self.step("middle")
        await send({"type": "http.response.body", "body": b"run ", "more_body": True})
        await self.step("streaming")
        await send({"type": "http.response.body", "body": str(self.runs).encode()})
        await self.step("end")

    async def step(self, name: str) -> None:
        found = self.steps.get(name, lambda: None)()
        if asyncio.iscoroutine(found):
            await found


def guarded(app: Any, *, guard: AsyncGuard | None = None, **options: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(app, guard=guard or AsyncGuard("memory:"), **{"scope": single_tenant, **options})


async def until(holds: Callable[[], bool]) -> None:
    """Until it holds; `in_time` bounds it."""
    while not holds():  # noqa: ASYNC110 - what is waited for knows nothing of us
        await asyncio.sleep(0.001)


async def another(operation: str, store: AsyncProxyStore) -> None:
    """Until one more of these was answered."""
    before = store.count(operation)
    await until(lambda: store.count(operation) > before)


def boom() -> None:
    raise RuntimeError("boom")


# What is not ours.


def test_websockets_pass_with_the_very_same_arguments() -> None:
    seen: list[Any] = []

    async def app(*arguments: Any) -> None:
        seen.extend(arguments)

    scope, receive, send = {"type": "websocket"}, object(), object()
    in_time(guarded(app)(scope, receive, send))  # type: ignore[arg-type]

    assert [one is other for one, other in zip(seen, (scope, receive, send), strict=True)] == [True] * 3


@pytest.mark.parametrize("ours", [True, False])
def test_the_lifespan_passes_and_at_its_end_a_guard_is_closed_that_was_opened_here(ours: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def story() -> None:
        told: list[Any] = []
        messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
        guard: Any = "memory:" if ours else AsyncGuard("memory:")
        middleware = IdempotencyMiddleware(app, guard=guard, scope=single_tenant)

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            told.append(message["type"])

        await middleware({"type": "lifespan"}, receive, send)
        assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        with pytest.raises(UsageError, match="closed") if ours else nullcontext():
            await middleware.guard.read("http", "key")

    in_time(story())


@pytest.mark.parametrize("guard", [Guard("memory:")])
def test_a_blocking_guard_is_refused_at_once(guard: Any) -> None:
    with pytest.raises(UsageError, match="AsyncGuard"):
        IdempotencyMiddleware(App(), guard=guard, scope=single_tenant)


# A client that goes, a server that gives up, a sender that breaks.


def test_a_cancelled_request_is_finished_and_remembered_with_its_whole_body() -> None:
    async def story() -> None:
        started, goes_on = asyncio.Event(), asyncio.Event()

        async def begin() -> None:
            started.set()
            await goes_on.wait()

        app = App(begin=begin)
        middleware = guarded(app)
        body = b"a" * (SPOOL_MAX + 10)
        visitor = Visitor(middleware, body=[body[:1_000], body[1_000:]])
        server = asyncio.ensure_future(visitor.visit())
        await started.wait()
        server.cancel()
        with pytest.raises(asyncio.CancelledError):
            await server
        goes_on.set()
        await middleware._background.empty()

        again = await Visitor(middleware, body=body).visit()

        assert app.bodies == [body]
        assert visitor.sent == []
        assert (again.is_replay, again.body, app.runs) == (True, b"run 1", 1)

    in_time(story())


def test_an_error_after_the_client_has_gone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        started, goes_on = asyncio.Event(), asyncio.Event()

        async def begin() -> None:
            started.set()
            await goes_on.wait()
            boom()

        middleware = guarded(App(begin=begin))
        server = asyncio.ensure_future(Visitor(middleware).visit())
        await started.wait()
        server.cancel()
        goes_on.set()
        await asyncio.wait({server})
        await middleware._background.empty()
        await asyncio.sleep(0)

    in_time(story())

    assert "client had disconnected" in caplog.text
    assert "boom" in caplog.text


def test_the_end_of_the_application_waits_for_who_is_under_way() -> None:
    async def story() -> None:
        started, goes_on = asyncio.Event(), asyncio.Event()

        async def begin() -> None:
            started.set()
            await goes_on.wait()

        app = App(begin=begin)

        async def service(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await app(scope, receive, send)
            else:
                told.append((await receive())["type"])
                await send({"type": "lifespan.shutdown.complete"})

        middleware = guarded(service)
        server = asyncio.ensure_future(Visitor(middleware).visit())
        await started.wait()
        server.cancel()
        told: list[Any] = []

        async def send(message: Any) -> None:
            told.append(message["type"])

        async def receive() -> Any:
            return {"type": "lifespan.shutdown"}

        shutdown = asyncio.ensure_future(middleware({"type": "lifespan"}, receive, send))
        for _ in range(10):
            await asyncio.sleep(0)
        # Nor has the application heard of it, which may close what its handlers use.
        assert told == []
        goes_on.set()
        await shutdown
        assert (told, app.bodies) == (["lifespan.shutdown", "lifespan.shutdown.complete"], [b"{}"])

    in_time(story())


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("broken above")])
def test_a_sender_that_breaks_does_not_end_what_has_started(at: int, error: Exception) -> None:
    async def story() -> None:
        app = App()
        middleware = guarded(app)
        visitor = Visitor(middleware)
        visitor.breaks_at[at] = error
        if isinstance(error, OSError):
            await visitor.visit()
        else:
            with pytest.raises(RuntimeError, match="broken above"):
                await visitor.visit()

        again = await Visitor(middleware).visit()

        assert (again.is_replay, again.body, app.runs) == (True, b"run 1", 1)

    in_time(story())


def test_who_looks_for_the_client_does_not_see_it_go() -> None:
    async def story() -> None:
        goes_on = asyncio.Event()

        async def parts() -> Any:
            yield b"one "
            await goes_on.wait()
            yield b"two"

        async def stream(_request: Request) -> Response:
            return StreamingResponse(parts())

        middleware = guarded(Starlette(routes=[Route("/pay", stream, methods=["POST"])]))
        visitor = Visitor(middleware)
        running = asyncio.ensure_future(visitor.visit())
        await until(lambda: visitor.body == b"one ")
        visitor.go()
        for _ in range(10):
            await asyncio.sleep(0)
        goes_on.set()
        await running
        again = await Visitor(middleware).visit()

        assert (again.is_replay, again.body) == (True, b"one two")

    in_time(story())


def test_a_client_that_goes_in_the_middle_of_its_body_runs_nothing() -> None:
    async def story() -> None:
        app = App()
        visitor = Visitor(guarded(app), body=[b"one", b"two"])
        visitor._unsent.pop()
        visitor.go()
        await visitor.visit()

        assert (app.runs, visitor.sent) == (0, [])

    in_time(story())


# Exceptions.


def test_before_anybody_has_seen_a_part_an_exception_can_still_become_a_500() -> None:
    async def story() -> None:
        app = App(middle=boom)
        visitor = Visitor(guarded(app))
        with pytest.raises(RuntimeError, match="boom"):
            await visitor.visit()
        assert visitor.sent == []
        with pytest.raises(RuntimeError, match="boom"):
            await Visitor(visitor.app).visit()
        assert app.runs == 2

    in_time(story())


def test_after_the_first_part_an_exception_leaves_the_answer_open_and_nothing_is_remembered() -> None:
    async def story() -> None:
        app = App(streaming=boom)
        visitor = Visitor(guarded(app))
        with pytest.raises(RuntimeError, match="boom"):
            await visitor.visit()
        assert (visitor.body, visitor.ended) == (b"run ", False)
        app.steps.clear()
        again = await Visitor(visitor.app).visit()
        assert (again.is_replay, again.body) == (False, b"run 2")

    in_time(story())


def test_an_application_that_does_not_answer_is_a_bug_that_is_told() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    with pytest.raises(RuntimeError, match="without a complete response"):
        in_time(Visitor(guarded(app)).visit())


def test_trailers_come_after_the_last_part() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [], "trailers": True})
        await send({"type": "http.response.body", "body": b"all"})
        await send({"type": "http.response.trailers", "headers": [(b"x", b"1")], "more_trailers": False})

    async def story() -> None:
        visitor = await Visitor(guarded(app)).visit()

        assert [one["type"] for one in visitor.sent] == [
            "http.response.start",
            "http.response.body",
            "http.response.trailers",
        ]

    in_time(story())


# The last part is sent once it is remembered, and what follows is no part of the claim.


def test_the_end_of_an_answer_is_sent_once_it_is_remembered() -> None:
    async def story() -> None:
        store = AsyncProxyStore()
        ended: list[bool] = []
        visitor = Visitor(guarded(App(), guard=AsyncGuard(store)))
        store.before["finish"] = lambda: ended.append(visitor.ended)
        await visitor.visit()

        assert (ended, visitor.ended) == ([False], True)

    in_time(story())


def test_background_tasks_run_after_the_answer_and_duplicates_do_not_wait_for_them() -> None:
    async def story() -> None:
        sent, goes_on, done_at = asyncio.Event(), asyncio.Event(), []

        async def later() -> None:
            sent.set()
            await goes_on.wait()
            done_at.append("later")

        async def pay(_request: Request) -> Response:
            return PlainTextResponse("paid", background=BackgroundTask(later))

        middleware = guarded(Starlette(routes=[Route("/pay", pay, methods=["POST"])]))
        first = Visitor(middleware)
        running = asyncio.ensure_future(first.visit())
        await sent.wait()
        await until(lambda: first.ended)
        again = await Visitor(middleware).visit()
        assert (first.body, again.is_replay, done_at) == (b"paid", True, [])
        goes_on.set()
        await running
        assert done_at == ["later"]

    in_time(story())


def test_what_a_background_task_raises_reaches_the_server_and_the_answer_stands() -> None:
    async def story() -> None:
        app = App(end=boom)
        visitor = Visitor(guarded(app))
        with pytest.raises(RuntimeError, match="boom"):
            await visitor.visit()
        again = await Visitor(visitor.app).visit()
        assert (visitor.body, again.is_replay, app.runs) == (b"run 1", True, 1)

    in_time(story())


# What a handler may know, and what the guard says.


def test_current_works_below_the_middleware() -> None:
    seen: list[Any] = []

    def look() -> None:
        here = current()
        seen.append((here.operation, here.key, here.attempt, here.key_for("gateway")))

    async def story() -> None:
        await Visitor(guarded(App(begin=look))).visit()

    in_time(story())

    assert seen[0][:3] == ("http", "key", 1)
    assert seen[0][3]


def test_a_store_that_is_down_is_503_with_retry_after_and_nothing_runs(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        app, store = App(), AsyncProxyStore()
        store.die()
        visitor = await Visitor(guarded(app, guard=AsyncGuard(store))).visit()

        assert (visitor.status, visitor.headers["retry-after"], app.runs) == (503, "1", 0)
        assert json.loads(visitor.body)["code"] == "store_unavailable"

    in_time(story())

    assert [record.levelno for record in caplog.records if record.name == "onefold.http"] == [logging.WARNING]


def test_an_answer_that_cannot_be_remembered_any_more_is_sent_all_the_same() -> None:
    async def story() -> None:
        store = AsyncProxyStore()
        store.down.add("finish")
        visitor = await Visitor(guarded(App(), guard=AsyncGuard(store, policy=Policy(lease=0.2)))).visit()

        assert (visitor.status, visitor.body) == (201, b"run 1")

    in_time(story())


def test_who_has_lost_its_claim_is_told_and_finds_the_other_ones_answer() -> None:
    async def story() -> None:
        clock, goes_on = Clock(), asyncio.Event()
        store = AsyncMemoryStore(clock=clock)
        other = App()

        async def lose() -> None:
            clock.advance(100)
            taken = await in_own_context(Visitor(guarded(other, guard=AsyncGuard(store))).visit())
            assert taken.body == b"run 1"
            goes_on.set()

        async def pay(_request: Request) -> Response:
            await lose()
            return PlainTextResponse("too late")

        slow = guarded(Starlette(routes=[Route("/pay", pay, methods=["POST"])]), guard=AsyncGuard(store))
        visitor = await Visitor(slow).visit()
        again = await Visitor(slow).visit()

        assert (visitor.status, json.loads(visitor.body)["code"]) == (409, "claim_lost")
        assert visitor.headers["retry-after"] == "1"
        assert (again.is_replay, again.body) == (True, b"run 1")

    in_time(story())


def test_who_has_lost_its_claim_in_the_middle_of_its_answer_gets_it_to_the_end_and_is_not_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "onefold.http")

    async def story() -> None:
        store = AsyncProxyStore()

        async def not_ours(*_: Any) -> bool:
            return False

        store.inner.finish = not_ours  # type: ignore[assignment, method-assign]
        visitor = await Visitor(guarded(App(), guard=AsyncGuard(store))).visit()

        assert (visitor.status, visitor.body, visitor.ended) == (201, b"run 1", True)

    in_time(story())
    assert "refused" not in caplog.text


def test_a_handler_that_is_cancelled_with_its_claim_comes_to_its_end_before_that_is_told() -> None:
    async def story() -> None:
        store = AsyncProxyStore()
        store.down.update({"extend", "extend_all"})
        told_before: list[bool] = []

        async def forever() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.02)
                told_before.append(bool(visitor.sent))

        policy = Policy(lease=0.5, cancel_when_lost=True)
        visitor = Visitor(guarded(App(begin=forever), guard=AsyncGuard(store, policy=policy)))
        await visitor.visit()

        assert (visitor.status, json.loads(visitor.body)["code"], told_before) == (409, "claim_lost", [False])

    in_time(story())


def test_a_heartbeat_keeps_the_claim_of_a_handler_that_outlives_its_lease() -> None:
    async def story() -> None:
        clock, finished = Clock(), asyncio.Event()
        store = AsyncProxyStore(AsyncMemoryStore(clock=clock))
        policy = Policy(lease=0.6)

        async def slow() -> None:
            await finished.wait()

        app = App(begin=slow)
        middleware = guarded(app, guard=AsyncGuard(store, policy=policy))
        running = asyncio.ensure_future(Visitor(middleware).visit())
        # Each beat buys the next half a second, on a clock that no pause of this machine moves.
        for _ in range(4):
            await another("extend", store)
            clock.advance(0.5)
        duplicate = await Visitor(middleware).visit()
        finished.set()
        first = await running

        assert (duplicate.status, first.body, app.runs) == (409, b"run 1", 1)

    in_time(story())


# Settled by hand, or by a probe.


@pytest.mark.parametrize(
    ("resolution", "status", "body"),
    [
        (Done(Answer(202, [(b"x-by", b"hand")], b"it happened")), 202, b"it happened"),
        (Done(), 200, b"null"),
        (Done({"id": 17}), 200, b'{"id":17}'),
        (Failed(ValueError("it did not")), 500, b"failed"),
        (Rerun(), 201, b"run 2"),
    ],
)
def test_a_held_request_that_somebody_resolves(resolution: Any, status: int, body: bytes) -> None:
    async def story() -> None:
        app = App(middle=boom)
        guard = AsyncGuard("memory:", policy=Policy(after_crash="hold"))
        middleware = guarded(app, guard=guard)
        with pytest.raises(RuntimeError):
            await Visitor(middleware).visit()
        held = await Visitor(middleware).visit()
        assert (held.status, json.loads(held.body)["code"]) == (409, "held")
        app.steps.clear()

        returns = Answer if isinstance(getattr(resolution, "value", None), Answer) else Any
        await guard.resolve("http", "key", resolution, by="asha", reason="asked the bank", returns=returns)
        answer = await Visitor(middleware).visit()

        assert (answer.status, body in answer.body) == (status, True)

    in_time(story())


def test_a_probe_answers_in_the_place_of_a_handler_that_broke() -> None:
    async def ask(_current: Any) -> Any:
        return Done(Answer(200, [], b"the bank says yes"))

    async def story() -> None:
        guard = AsyncGuard("memory:", policy=Policy(after_crash=ask))
        app = App(middle=boom)
        first = await Visitor(guarded(app, guard=guard)).visit()
        again = await Visitor(guarded(app, guard=guard)).visit()

        assert (first.status, first.body) == (200, b"the bank says yes")
        assert (again.is_replay, again.body, app.runs) == (True, b"the bank says yes", 1)

    in_time(story())


def test_a_probe_that_fails_is_503_and_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Any] = [ConnectionError("bank-3.internal"), ConnectionError("bank-3.internal")]

    async def ask(_current: Any) -> Any:
        if answers:
            raise answers.pop()
        return Done(Answer(200, [], b"the bank says yes"))

    async def story() -> None:
        app = App(middle=boom)
        middleware = guarded(app, guard=AsyncGuard("memory:", policy=Policy(after_crash=ask)))
        with pytest.raises(RuntimeError):
            await Visitor(middleware).visit()
        second = await Visitor(middleware).visit()
        third = await Visitor(middleware).visit()

        assert (second.status, json.loads(second.body)["code"]) == (503, "outcome_unknown")
        assert second.headers["retry-after"] == "1"
        assert b"bank-3" not in second.body
        assert (third.body, app.runs) == (b"the bank says yes", 1)

    in_time(story())
    assert "the probe failed with ConnectionError" in caplog.text


def test_a_probe_that_knows_it_is_done_and_no_more_is_believed_the_first_time_too() -> None:
    async def ask(_current: Any) -> Any:
        return Done()

    async def story() -> None:
        middleware = guarded(App(middle=boom), guard=AsyncGuard("memory:", policy=Policy(after_crash=ask)))
        answers = [await Visitor(middleware).visit() for _ in range(2)]

        assert [(one.status, one.body) for one in answers] == [(200, b"null")] * 2

    in_time(story())


# Redirects.


@pytest.mark.parametrize("policy", [Policy(), Policy(after_crash="hold")], ids=["rerun", "hold"])
def test_a_request_that_is_sent_on_to_another_path_keeps_its_key(policy: Policy) -> None:
    paid = []

    async def pay(_request: Request) -> Response:
        paid.append("paid")
        return JSONResponse(len(paid))

    # As FastAPI does: a path with a slash too many is sent on.
    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])

    async def story() -> None:
        transport = httpx.ASGITransport(guarded(app, guard=AsyncGuard("memory:", policy=policy)))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop", follow_redirects=True) as client:
            paths = ("/pay/", "/pay", "/pay/")
            answers = [await client.post(path, headers={"Idempotency-Key": "key"}) for path in paths]

        assert [one.status_code for one in answers[0].history] == [307]
        assert [(one.status_code, one.json()) for one in answers[:2]] == [(200, 1), (200, 1)]
        assert [one.headers.get("idempotent-replayed") for one in answers[:2]] == [None, "true"]
        # The key belongs to the path where the work was done, and the slash makes another one.
        assert (answers[2].status_code, answers[2].json()["code"]) == (422, "key_reused")
        assert paid == ["paid"]

    in_time(story())


# Event streams.


def test_an_event_stream_goes_on_until_its_client_goes_and_keeps_no_claim() -> None:
    async def story() -> None:
        second, ended = asyncio.Event(), []

        async def events() -> Any:
            try:
                yield b"data: 1\n\n"
                await second.wait()
                yield b"data: 2\n\n"
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async def stream(_request: Request) -> Response:
            return StreamingResponse(events(), media_type="text/event-stream")

        store = AsyncProxyStore()
        guard = AsyncGuard(store)
        middleware = guarded(Starlette(routes=[Route("/pay", stream, methods=["POST"])]), guard=guard)
        visitor = Visitor(middleware)
        running = asyncio.ensure_future(visitor.visit())
        await until(lambda: b"data: 1" in visitor.body)
        # Released: a duplicate is not in its way.
        assert store.count("release") == 1
        second.set()
        await until(lambda: b"data: 2" in visitor.body)
        assert not ended
        visitor.go()
        await running
        assert ended

    in_time(story())


@pytest.mark.parametrize("is_route", [False, True], ids=["middleware", "route"])
def test_an_event_stream_begins_once_its_claim_is_given_back(is_route: bool) -> None:
    """Its reader may ask again at its end, and is not told that the first request is in progress."""

    async def story() -> None:
        asked, goes_on = asyncio.Event(), asyncio.Event()

        async def events() -> Any:
            yield b"data: 1\n\n"

        def stream() -> Response:
            return StreamingResponse(events(), media_type="text/event-stream")

        async def slowly() -> None:
            asked.set()
            await goes_on.wait()

        store = AsyncProxyStore()
        store.before["release"] = slowly
        guard = AsyncGuard(store)
        app: Any = FastAPI()
        if is_route:
            router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant))
            router.post("/pay")(stream)
            app.include_router(router)
        else:
            app.post("/pay")(stream)
            app = guarded(app, guard=guard)
        first = Visitor(app)
        running = asyncio.ensure_future(first.visit())
        await asked.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert first.body == b""
        goes_on.set()
        await running
        second = Visitor(app)
        await second.visit()
        assert [first.body, second.body] == [b"data: 1\n\n"] * 2

    in_time(story())


# Where it stands.


class PassThrough(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        await request.body()
        response: Response = await call_next(request)
        return response


@pytest.mark.parametrize("where", ["above", "below", "both"])
def test_middlewares_of_starlette_stand_above_and_below(where: str) -> None:
    runs = []

    async def pay(request: Request) -> Response:
        runs.append(await request.json())

        async def parts() -> Any:
            yield b"one "
            yield b"two"

        return StreamingResponse(parts(), status_code=201)

    ours = Middleware(IdempotencyMiddleware, guard=AsyncGuard("memory:"), scope=by_header("X-Api-Key"))
    theirs = Middleware(PassThrough)
    stack = {"above": [theirs, ours], "below": [ours, theirs], "both": [theirs, ours, theirs]}[where]
    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])], middleware=stack)

    async def story() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            headers = {"X-Api-Key": "asha", "Idempotency-Key": "key"}
            first, second = [await client.post("/pay", json={"amount": 1}, headers=headers) for _ in range(2)]

            assert (first.status_code, first.content) == (201, b"one two")
            assert (second.status_code, second.content) == (201, b"one two")
            assert second.headers["idempotent-replayed"] == "true"

    in_time(story())

    assert runs == [{"amount": 1}]


@pytest.mark.parametrize("root_path", ["", "/api"])
def test_a_mounted_application_is_guarded_by_its_whole_path(root_path: str) -> None:
    async def pay(_request: Request) -> Response:
        return JSONResponse({"paid": True})

    def sub() -> Starlette:
        return Starlette(routes=[Route("/pay", pay, methods=["POST"])])

    guard = AsyncGuard("memory:")
    options: dict[str, Any] = {"guard": guard, "scope": single_tenant, "required": [f"{root_path}/v1/*"]}
    app = Starlette(
        routes=[
            Mount("/v1", IdempotencyMiddleware(sub(), **options)),
            Mount("/v2", IdempotencyMiddleware(sub(), **options)),
        ]
    )

    async def story() -> None:
        paths = [f"{root_path}/v1/pay", f"{root_path}/v1/pay", f"{root_path}/v2/pay"]
        answers = [await Visitor(app, path, root_path=root_path).visit() for path in paths]
        keyless = [
            (await Visitor(app, f"{root_path}/{version}/pay", root_path=root_path, key=None).visit()).status
            for version in ("v1", "v2")
        ]

        assert [one.status for one in answers] == [200, 200, 422]
        assert [one.is_replay for one in answers] == [False, True, False]
        assert keyless == [400, 200]

    in_time(story())


def test_a_path_that_is_written_otherwise_is_the_same_path() -> None:
    async def story() -> None:
        app = App()
        middleware = guarded(app, required=["/pay"])
        refused = await Visitor(middleware, "/pay", raw_path=b"/p%61y", key=None).visit()
        first = await Visitor(middleware, "/pay").visit()
        again = await Visitor(middleware, "/pay", raw_path=b"/p%61y").visit()

        assert (refused.status, first.status, again.is_replay, app.runs) == (400, 201, True, 1)

    in_time(story())


def test_files_are_sent_by_us_where_a_server_could_send_them_by_itself(tmp_path: Any) -> None:
    (tmp_path / "receipt.txt").write_bytes(b"a receipt")

    async def receipt(_request: Request) -> Response:
        return FileResponse(tmp_path / "receipt.txt")

    async def story() -> None:
        app = Starlette(routes=[Route("/pay", receipt, methods=["POST"])])
        extensions: dict[str, Any] = {"http.response.pathsend": {}, "http.response.debug": {}}
        first, second = [
            await Visitor(guarded_app, extensions=extensions).visit() for guarded_app in [guarded(app)] * 2
        ]
        unguarded = await Visitor(app, key=None, extensions=extensions).visit()

        assert (first.body, second.body, second.is_replay) == (b"a receipt", b"a receipt", True)
        assert unguarded.sent[-1]["type"] == "http.response.pathsend"

    in_time(story())


def test_without_a_key_in_it_the_body_is_there_again_and_the_client_can_go() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([(await receive())["body"], (await receive())["type"]])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def story() -> None:
        visitor = Visitor(guarded(app, key=body_field("id")), key=None, body=b'{"type": "paid"}')
        visitor.go()
        await visitor.visit()

    in_time(story())

    assert seen == [b'{"type": "paid"}', "http.disconnect"]


# Users.


class Named(BaseUser):
    def __init__(self, identity: Any) -> None:
        self._identity = identity

    @property
    def is_authenticated(self) -> bool:
        return True

    @property
    def identity(self) -> Any:
        return self._identity


class Backend(AuthenticationBackend):
    async def authenticate(self, conn: Any) -> Any:
        user = conn.headers.get("x-user")
        if not user:
            return None
        return AuthCredentials(["user"]), (SimpleUser(user) if user.startswith("simple") else Named(user))


@pytest.mark.parametrize("user", ["asha", "simple-riya"])
def test_the_user_of_an_authentication_above_is_the_caller(user: str) -> None:
    async def story() -> None:
        app, guard = App(), AsyncGuard("memory:")
        above = AuthenticationMiddleware(guarded(app, guard=guard, scope=by_user), backend=Backend())
        answers = [await Visitor(above, headers=[(b"x-user", name)]).visit() for name in (user.encode(), b"other")]
        nobody = await Visitor(above).visit()

        assert [one.is_replay for one in answers] == [False, False]
        assert (nobody.status, json.loads(nobody.body)["code"]) == (400, "caller_unknown")
        found = await guard.read("http", "key", scope=user)
        assert found is not None
        assert found.state is State.DONE

    in_time(story())


# The text of an object would be its address in memory.
@pytest.mark.parametrize("user", [None, Named(""), Named(object())])
def test_a_user_that_is_not_there_or_has_no_name_is_a_bug(user: Any) -> None:
    scope = {} if user is None else {"user": user}

    with pytest.raises(UsageError, match="by_user"):
        in_time(Visitor(guarded(App(), scope=by_user), **scope).visit())


def test_a_record_is_where_the_documentation_says() -> None:
    async def story() -> None:
        guard = AsyncGuard("memory:")
        await Visitor(guarded(App(), guard=guard)).visit()
        found = await guard.store.read(address("http", "key"))

        assert found.state is State.DONE

    in_time(story())
