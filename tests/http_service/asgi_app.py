"""The service on bare ASGI, below the middleware."""

from __future__ import annotations

import asyncio
from typing import Any

from onefold import AsyncGuard
from onefold.http.asgi import IdempotencyMiddleware
from tests.http_service.behaviour import CONFIG, RULES, Boom, behave, options_of, raises_below


async def service(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        said = await receive()
        await send({"type": "websocket.send", "text": f"you said {said['text']}"})
        await send({"type": "websocket.close"})
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    answer = await asyncio.to_thread(behave, scope["path"], scope["query_string"].decode(), body)
    headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    if not answer.streamed:
        await send({"type": "http.response.body", "body": answer.whole})
        return
    while (part := await asyncio.to_thread(next, answer.parts, None)) is not None:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def broken(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http" or not raises_below(scope["query_string"].decode()):
        await service(scope, receive, send)
        return

    async def nowhere(_message: Any) -> None:
        return

    await service(scope, receive, nowhere)
    raise Boom("below the middleware")


async def lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


guarded = {
    prefix: IdempotencyMiddleware(broken, guard=AsyncGuard(CONFIG["store"], policy=rule.policy), **options_of(prefix))
    for prefix, rule in RULES.items()
}


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
        return
    prefix = scope["path"].split("/")[1]
    await guarded.get(prefix, guarded["below"])(scope, receive, send)
