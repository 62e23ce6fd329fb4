"""A Litestar application below the middleware."""

from __future__ import annotations

from typing import Any

from litestar import Litestar, Request, post
from litestar.exceptions import NotFoundException
from litestar.middleware import DefineMiddleware
from litestar.response import Stream

from onefold import AsyncGuard, current
from onefold.http.asgi import IdempotencyMiddleware, by_header
from tests.http_service.behaviour import CONFIG, note


@post("/pay")
async def pay(request: Request[Any, Any, Any], name: str, data: dict[str, int]) -> dict[str, Any]:
    note(f"/pay {name} {len(await request.body())}")
    return {"key": current().key, "amount": data["amount"]}


@post("/missing")
async def missing(name: str) -> None:
    note(f"/missing {name} 0")
    raise NotFoundException("no such order")


@post("/boom")
async def boom(name: str) -> None:
    note(f"/boom {name} 0")
    raise RuntimeError("boom")


@post("/stream")
async def stream(name: str) -> Stream:
    note(f"/stream {name} 0")
    return Stream(iter([b"one ", b"two"]))


middleware: Any = IdempotencyMiddleware
options: dict[str, Any] = {"guard": AsyncGuard(CONFIG["store"]), "scope": by_header("X-Api-Key")}
app = Litestar([pay, missing, boom, stream], middleware=[DefineMiddleware(middleware, **options)])
