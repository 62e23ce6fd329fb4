"""A service for the shutdown of its server: its handler waits for a file. `ENDING_HOW` says where its guard stands."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from fastapi import APIRouter, FastAPI

from onefold import AsyncGuard
from onefold.http.asgi import IdempotencyMiddleware, single_tenant
from onefold.http.fastapi import idempotent_route

FOLDER = Path(os.environ["ENDING_FOLDER"])

guard = AsyncGuard(os.environ["ENDING_STORE"])
is_route = os.environ["ENDING_HOW"] == "route"
router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant)) if is_route else APIRouter()


@router.post("/pay")
async def pay() -> str:
    (FOLDER / "started").touch()
    while not (FOLDER / "gate").exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.01)
    return "paid"


app = FastAPI()
app.include_router(router)
if not is_route:
    app.add_middleware(IdempotencyMiddleware, guard=guard, scope=single_tenant)
