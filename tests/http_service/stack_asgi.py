"""Starlette below the ASGI middleware, FastAPI's route class, and bare applications that break, behind one port."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from functools import cache
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from onefold import AsyncGuard
from onefold.http.fastapi import IdempotencyMiddleware, idempotent_route
from tests.http_service.behaviour import note, wishes
from tests.http_service.stack_acts import RULES, act, options_of, route_of

guards = {rule: AsyncGuard("memory:", policy=policy) for rule, (_options, policy) in RULES.items()}


async def handle(request: Request) -> Response:
    size = len(await request.body())
    done = await run_in_threadpool(act, request.url.path, request.url.query, size)
    if done.body is not None:
        return Response(done.body, done.status, dict(done.headers))
    return Closing(done.parts, done.status, dict(done.headers))


class Closing(StreamingResponse):
    """Closes its parts when it ends, and does not leave that to the collector."""

    def __init__(self, parts: Any, *more: Any) -> None:
        super().__init__(iterate_in_threadpool(parts), *more)
        self.parts = parts

    async def stream_response(self, send: Any) -> None:
        try:
            await super().stream_response(send)
        finally:
            self.parts.close()


async def fastapi_handle(request: Request) -> Response:
    return await handle(request)


ACTS = ("json", "stream", "endless", "boom", "missing")
PATH = "/{above}/{below}/{rule}/"
routes = [
    Route(PATH + "with-slash/", handle, methods=["POST"]),
    Route(PATH + "both", handle, methods=["POST"]),
    Route(PATH + "both/", handle, methods=["POST"]),
    Mount(PATH + "mount", routes=[Route("/inside", handle, methods=["POST"])]),
    *(Route(PATH + name, handle, methods=["POST", "PATCH"]) for name in ACTS),
]
starlette = Starlette(routes=routes)

single = FastAPI()
router = APIRouter(route_class=idempotent_route(guard=AsyncGuard("memory:"), **options_of("below")))
for name in ACTS:
    router.add_api_route(PATH + name, fastapi_handle, methods=["POST", "PATCH"], response_model=None)
single.include_router(router)


class RequestId:
    """Changes the start message in place, as much that is published does."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-request-id", uuid.uuid4().hex.encode()))
            await send(message)

        await self.app(scope, receive, sent)


class Session(RequestId):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"set-cookie", b"session=" + uuid.uuid4().hex.encode()))
            await send(message)

        await self.app(scope, receive, sent)


def base(app: Any) -> Any:
    async def dispatch(request: Any, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-base"] = uuid.uuid4().hex
        return response

    return BaseHTTPMiddleware(app, dispatch=dispatch)


AROUND: dict[str, Callable[[Any], Any]] = {
    "none": lambda app: app,
    "compression": lambda app: GZipMiddleware(app, minimum_size=100),
    "cors": lambda app: CORSMiddleware(app, allow_origins=["https://a.example", "https://b.example"]),
    "request-id": RequestId,
    "session": Session,
    "base": base,
}


START: dict[str, Any] = {"type": "http.response.start", "status": 201, "headers": []}
BODY: dict[str, Any] = {"type": "http.response.body", "body": b"done"}
MORE: dict[str, Any] = {**BODY, "more_body": True}

# What it sends, and what it raises at the end.
BREAKS: dict[str, tuple[list[dict[str, Any]], BaseException | None]] = {
    "raises": ([], RuntimeError("after its effect")),
    "cancels": ([], asyncio.CancelledError()),
    "nothing": ([], None),
    "no-start": ([BODY], None),
    "no-end": ([START, MORE], None),
    "raises-in-the-middle": ([START, MORE], RuntimeError("in the middle")),
    "text-headers": ([{**START, "headers": [("x-own", "yes")]}, BODY], None),
    "no-latin": ([{**START, "headers": [("x-own", "счёт")]}, BODY], None),
    "number-header": ([{**START, "headers": [(b"x-own", 5)]}, BODY], None),
    "no-pair": ([{**START, "headers": [(b"x-own",)]}, BODY], None),
    "no-status": ([{"type": "http.response.start", "headers": []}, BODY], None),
    "text-status": ([{**START, "status": "fine"}, BODY], None),
    "low-status": ([{**START, "status": 20}, BODY], None),
    "high-status": ([{**START, "status": 600}, BODY], None),
    "text-body": ([START, {**BODY, "body": "done"}], None),
    "line-end": ([{**START, "headers": [(b"x-own", b"yes\r\nx-evil: 1")]}, BODY], None),
    "control-character": ([{**START, "headers": [(b"x-own", b"\x00")]}, BODY], None),
    "blank-in-name": ([{**START, "headers": [(b"x own", b"yes")]}, BODY], None),
    "too-short": ([{**START, "headers": [(b"content-length", b"200")]}, BODY], None),
    "too-short-stream": ([{**START, "headers": [(b"content-length", b"200")]}, MORE, BODY], None),
    "too-long": ([{**START, "headers": [(b"content-length", b"2")]}, BODY], None),
    "too-long-stream": ([{**START, "headers": [(b"content-length", b"4")]}, MORE, BODY], None),
    "two-lengths": ([{**START, "headers": [(b"content-length", b"4"), (b"content-length", b"5")]}, BODY], None),
    "no-length": ([{**START, "headers": [(b"content-length", b"four")]}, BODY], None),
    "blanks-around": ([{**START, "headers": [(b"x-own", b" yes\t")]}, BODY], None),
    "body-of-204": ([{**START, "status": 204}, BODY], None),
}


async def breaks(scope: Any, receive: Any, send: Any) -> None:
    """A bare application that has an effect, and then breaks as its path says."""
    message = await receive()
    note(f"{scope['path']} {wishes(scope['query_string'].decode())['name']} {len(message['body'])}")
    messages, error = BREAKS[scope["path"].rpartition("/")[2]]
    for one in messages:
        await send({**one, "headers": list(one["headers"])} if "headers" in one else dict(one))
    if error is not None:
        raise error


@cache
def stacked(above: str, below: str, rule: str, broken: bool) -> Any:
    if rule == "single":
        return AROUND[above](AROUND[below](single))
    inside = AROUND[below](breaks if broken else starlette)
    return AROUND[above](IdempotencyMiddleware(inside, guard=guards[rule], **options_of(rule)))


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    route = route_of(scope["path"])
    assert route is not None, scope["path"]
    await stacked(*route[:3], route.act in BREAKS)(scope, receive, send)
