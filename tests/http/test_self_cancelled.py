"""An endpoint that cancels its own task, and answers all the same: what the client was sent is remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI

from onefold import AsyncGuard, Guard
from onefold.http.asgi import IdempotencyMiddleware, single_tenant
from onefold.http.fastapi import idempotent_route
from tests.http_service.visitor import Visitor
from tests.stores.django.project import project
from tests.support import in_time

Endpoint = Callable[[], Awaitable[str]]
# What two requests with one key got: a status, and whether it was a replay.
Got = list[tuple[int, bool]]


def cancel_myself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def pending() -> str:
    cancel_myself()
    return "paid"


async def pending_again() -> str:
    await swallowed()
    cancel_myself()
    return "paid"


async def swallowed() -> str:
    cancel_myself()
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        return "paid"
    return "never"


async def timed_out() -> str:
    """The usual way to such a cancellation: of a time-out, which ends as the work does."""
    try:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    except TimeoutError:
        cancel_myself()
    return "paid"


ENDPOINTS: list[Endpoint] = [pending, pending_again, swallowed, timed_out]


async def visited(app: Any) -> Got:
    visitors = [await Visitor(app).visit() for _ in range(2)]
    return [(one.status, one.is_replay) for one in visitors]


def with_asgi(endpoint: Endpoint) -> Got:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        body = (await endpoint()).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return in_time(visited(IdempotencyMiddleware(app, guard=AsyncGuard("memory:"), scope=single_tenant)))


def with_route_class(endpoint: Endpoint) -> Got:
    router = APIRouter(route_class=idempotent_route(guard=AsyncGuard("memory:"), scope=single_tenant))
    router.add_api_route("/pay", endpoint, methods=["POST"])
    app = FastAPI()
    app.include_router(router)
    return in_time(visited(app))


def with_django(endpoint: Endpoint) -> Got:
    from django.http import HttpResponse
    from django.test import AsyncRequestFactory

    from onefold.http.django import middleware

    async def respond(_request: Any) -> HttpResponse:
        return HttpResponse(await endpoint())

    async def story() -> list[Any]:
        guarded = middleware(guard=Guard("memory:"), scope=single_tenant)(respond)
        posts = [AsyncRequestFactory().post("/pay", headers={"Idempotency-Key": "key"}) for _ in range(2)]
        return [await guarded(one) for one in posts]

    with project():
        return [(one.status_code, "Idempotent-Replayed" in one.headers) for one in in_time(story())]


# Flask raises the cancellation of an async view itself, and answers 500: test_failures.py has it.
ADAPTERS: dict[str, Callable[[Endpoint], Got]] = {
    "asgi": with_asgi,
    "route class": with_route_class,
    "django": with_django,
}


@pytest.fixture(params=ADAPTERS)
def twice(request: pytest.FixtureRequest) -> Callable[[Endpoint], Got]:
    return ADAPTERS[request.param]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.__name__)
def test_what_a_cancelled_endpoint_answered_is_remembered(twice: Callable[[Endpoint], Got], endpoint: Endpoint) -> None:
    runs: list[str] = []

    async def pay() -> str:
        runs.append("paid")
        return await endpoint()

    got = twice(pay)

    assert got == [(200, False), (200, True)]
    assert runs == ["paid"]
