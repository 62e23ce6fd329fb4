"""The Idempotency-Key header in front of one ASGI application on Redis: ours, three other middlewares, and none.

The application is called without a server or a client between: their time would be the larger part, and the same for
all. Its handler waits 1 ms, as for a query, and answers JSON, which is all that one of the peers remembers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from bench.measure import Side
from bench.sides import library, redis_prefix
from onefold import AsyncGuard
from services.house import House

HANDLER_SECONDS: Final = 0.001
BODY: Final = b'{"amount":4200,"currency":"EUR"}'
ANSWER: Final = b'{"id":"ch_1","status":"paid"}'

App = Callable[[Any, Any, Any], Awaitable[Any]]


class Shop:
    """The application: how often it ran for each key is counted."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.keys.append(dict(scope["headers"])[b"idempotency-key"])
        await asyncio.sleep(HANDLER_SECONDS)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})

    def ran(self) -> int:
        return len(self.keys)


def _side(title: str, app: App, ran: Callable[[], int]) -> Side:
    async def deliver(key: str) -> None:
        status, body = await post(app, key)
        if (status, body) != (200, ANSWER):
            raise ValueError(f"answered {status}: {body.decode()}")

    return Side(title, deliver, deliver, ran)


async def post(app: App, key: str) -> tuple[int, bytes]:
    """Send one request and return the answer: its status and body."""
    sent: list[Any] = []
    asked = iter([{"type": "http.request", "body": BODY, "more_body": False}])

    async def receive() -> Any:
        return next(asked, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    await app(_scope(key), receive, send)
    # As JSON may be written with or without spaces, only what is not one is compared.
    body = b"".join(message.get("body", b"") for message in sent).replace(b", ", b",").replace(b": ", b":")
    return sent[0]["status"], body


def _scope(key: str) -> dict[str, Any]:
    headers = [
        (b"host", b"shop.example"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(BODY)).encode()),
        (b"idempotency-key", key.encode()),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/charges",
        "raw_path": b"/charges",
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 80),
    }


@asynccontextmanager
async def bare(_house: House) -> AsyncIterator[Side]:
    """Without a middleware each duplicate runs again: only the keys are counted."""
    shop = Shop()
    yield _side("the bare app", shop, lambda: len(set(shop.keys)))


@asynccontextmanager
async def onefold(house: House) -> AsyncIterator[Side]:
    from onefold.http.asgi import IdempotencyMiddleware, single_tenant

    shop = Shop()
    with redis_prefix(house) as (url, prefix):
        async with AsyncGuard(f"{url}?prefix={prefix}") as guard:
            yield _side("Onefold's middleware", IdempotencyMiddleware(shop, guard=guard, scope=single_tenant), shop.ran)


@asynccontextmanager
async def idemkit(house: House) -> AsyncIterator[Side]:
    kit, shop = library("idemkit"), Shop()
    with redis_prefix(house) as (url, prefix):
        async with kit.RedisBackend.from_url(url, namespace=prefix) as backend:
            config = kit.HttpConfig(scope=lambda _request: "bench")
            yield _side(
                "idemkit's middleware", kit.IdempotencyMiddleware(shop, backend=backend, config=config), shop.ran
            )


@asynccontextmanager
async def asgi_idempotency_header(house: House) -> AsyncIterator[Side]:
    from redis import asyncio as client

    middleware, backends = library("idempotency_header_middleware"), library("idempotency_header_middleware.backends")
    shop = Shop()
    with redis_prefix(house) as (url, prefix):
        async with client.Redis.from_url(url) as raw:
            backend = backends.RedisBackend(redis=raw, keys_key=f"{prefix}-keys", response_key=f"{prefix}-responses")
            app = middleware.IdempotencyHeaderMiddleware(shop, backend=backend)
            yield _side("asgi-idempotency-header", app, shop.ran)


@asynccontextmanager
async def fastapi_idempotency_key(house: House) -> AsyncIterator[Side]:
    from redis import asyncio as client

    peer, shop = library("fastapi_idempotency_key"), Shop()
    with redis_prefix(house) as (url, prefix):
        async with client.Redis.from_url(url) as raw:
            backend = peer.RedisBackend(redis=raw, prefix=f"{prefix}:")
            yield _side("fastapi-idempotency-key", peer.IdempotencyMiddleware(shop, backend=backend), shop.ran)
