"""HTTP checks a store once: when the application starts, or before the first request with a key."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from onefold import AsyncGuard, Guard
from onefold.http.asgi import IdempotencyMiddleware, single_tenant
from onefold.http.wsgi import IdempotencyMiddleware as WsgiMiddleware
from services.house import House
from services.redis import named_client
from services.servers import Server
from tests.health.test_sql import set_for_session
from tests.health.tools import use


@pytest.fixture(scope="module")
def server(house: House) -> Iterator[Server]:
    with house.own("redis") as server, named_client(server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        yield server


@pytest.fixture
def read_only(postgres_url: str) -> str:
    use(postgres_url)
    return set_for_session(postgres_url, default_transaction_read_only="on")


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for when in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{when}.complete"})
        return
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


async def started(middleware: Any) -> dict[str, Any]:
    """What the server is told when it starts the application."""
    told: list[dict[str, Any]] = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        told.append(message)

    await middleware({"type": "lifespan"}, receive, send)
    return told[0]


async def posted(middleware: Any, key: str) -> int:
    statuses: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"idempotency-key", f'"{key}"'.encode()), (b"host", b"shop")]
    scope = {"type": "http", "method": "POST", "path": "/charges", "query_string": b"", "headers": headers}
    await middleware(scope, receive, send)
    return statuses[0]


def test_an_application_does_not_start_on_a_store_that_cannot_be_written(read_only: str) -> None:
    async def start() -> dict[str, Any]:
        async with AsyncGuard(read_only) as guard:
            return await started(IdempotencyMiddleware(app, guard=guard, scope=single_tenant))

    told = asyncio.run(start())

    assert told["type"] == "lifespan.startup.failed"
    assert "Reset default_transaction_read_only" in told["message"]


def test_an_application_starts_on_an_evicting_redis_and_says_so_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async def start() -> tuple[str, int]:
        async with AsyncGuard(server.url) as guard:
            middleware = IdempotencyMiddleware(app, guard=guard, scope=single_tenant)
            told = await started(middleware)
            return told["type"], await posted(middleware, "pay-1")

    assert asyncio.run(start()) == ("lifespan.startup.complete", 201)
    (told,) = errors(caplog)
    assert "maxmemory-policy is allkeys-lru" in told


def test_an_application_starts_while_its_store_is_down() -> None:
    async def start() -> str:
        async with AsyncGuard("redis://127.0.0.1:1") as guard:
            told = await started(IdempotencyMiddleware(app, guard=guard, scope=single_tenant))
            return str(told["type"])

    assert asyncio.run(start()) == "lifespan.startup.complete"


def test_without_a_lifespan_the_first_request_is_told_to_come_again(
    read_only: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def post() -> int:
        async with AsyncGuard(read_only) as guard:
            return await posted(IdempotencyMiddleware(app, guard=guard, scope=single_tenant), "pay-1")

    assert asyncio.run(post()) == 503
    assert len(errors(caplog)) == 1


def test_the_middleware_of_wsgi_checks_before_its_first_request(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def page(_environ: Any, start_response: Any) -> list[bytes]:
        start_response("201 Created", [])
        return [b"done"]

    statuses: list[str] = []
    with Guard(server.url) as guard:
        middleware = WsgiMiddleware(page, guard=guard, scope=single_tenant)
        for key in ("wsgi-1", "wsgi-2"):
            environ = {
                "REQUEST_METHOD": "POST",
                "PATH_INFO": "/charges",
                "HTTP_IDEMPOTENCY_KEY": f'"{key}"',
                "HTTP_HOST": "shop",
                "wsgi.input": io.BytesIO(b""),
            }
            b"".join(middleware(environ, lambda status, *_: statuses.append(status)))  # type: ignore[arg-type]

    assert statuses == ["201 Created"] * 2
    assert len(errors(caplog)) == 1
