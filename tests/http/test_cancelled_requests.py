"""A server cancels a request, in any turn of the event loop: the exchange comes to its end, and nothing is left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from onefold import AsyncGuard
from onefold.http.asgi import IdempotencyMiddleware, single_tenant

# A request, also within another layer, has come to its end by then.
TURNS = 60


class Layer(BaseHTTPMiddleware):
    """Starlette's own kind of middleware: it takes each message in another task, and waits for it to be sent."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)


class Shop:
    """An application with our middleware, and its effects."""

    def __init__(self, guard: AsyncGuard, layers: str) -> None:
        self.effects: Counter[str] = Counter()
        ours = Middleware(IdempotencyMiddleware, guard=guard, scope=single_tenant)
        stack = {"alone": [ours], "outside": [Middleware(Layer), ours], "inside": [ours, Middleware(Layer)]}
        self.app = Starlette(
            routes=[Route("/whole", self.whole, methods=["POST"]), Route("/stream", self.stream, methods=["POST"])],
            middleware=stack[layers],
        )

    async def whole(self, request: Request) -> Response:
        self.effects[request.headers["Idempotency-Key"]] += 1
        return PlainTextResponse("paid", background=BackgroundTask(asyncio.sleep, 0))

    async def stream(self, request: Request) -> Response:
        async def parts() -> Any:
            for part in ("pa", "id"):
                await asyncio.sleep(0)
                yield part

        self.effects[request.headers["Idempotency-Key"]] += 1
        return StreamingResponse(parts())

    async def post(self, path: str, key: str) -> tuple[int, bytes]:
        sent: list[MutableMapping[str, Any]] = []
        body = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> MutableMapping[str, Any]:
            if not body:
                # The client stays.
                await asyncio.Event().wait()
            return body.pop()

        async def send(message: MutableMapping[str, Any]) -> None:
            await asyncio.sleep(0)
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "asgi": {"version": "3.0"}}
        await self.app({**scope, "headers": [(b"idempotency-key", key.encode())]}, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)

    async def post_and_cancel(self, path: str, key: str, turns: int) -> None:
        task = asyncio.ensure_future(self.post(path, key))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})


async def nothing_is_left() -> bool:
    for _ in range(TURNS):
        if len(asyncio.all_tasks()) == 1:
            return True
        await asyncio.sleep(0)
    return False


async def cancelled_in_each_turn(layers: str, path: str) -> Counter[str]:
    async with AsyncGuard("memory:") as guard:
        shop = Shop(guard, layers)
        for turns in range(TURNS):
            await shop.post_and_cancel(path, f"k{turns}", turns)
            assert await nothing_is_left(), f"cancelled after {turns} turns"
            # The duplicate is cancelled, too.
            await shop.post_and_cancel(path, f"k{turns}", turns)
            assert await nothing_is_left(), f"the duplicate was cancelled after {turns} turns"

            assert await shop.post(path, f"k{turns}") == (200, b"paid")
    return shop.effects


@pytest.mark.parametrize("path", ["/whole", "/stream"])
@pytest.mark.parametrize("layers", ["alone", "outside", "inside"])
def test_a_request_that_is_cancelled_in_any_turn_ends_and_is_answered_when_it_comes_again(
    layers: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    effects = asyncio.run(cancelled_in_each_turn(layers, path))

    assert effects == {f"k{turns}": 1 for turns in range(TURNS)}
    assert [one.getMessage() for one in caplog.records if one.name.startswith("onefold")] == []
