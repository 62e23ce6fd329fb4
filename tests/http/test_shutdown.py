"""The shutdown of an ASGI application waits for the guarded requests that its server has given up."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from litestar import Litestar
from litestar import post as litestar_post
from litestar.middleware import DefineMiddleware
from starlette.applications import Starlette
from starlette.routing import Mount

from onefold import AsyncGuard, Guard, State
from onefold.http import fastapi
from onefold.http.asgi import IdempotencyMiddleware, drain, single_tenant
from onefold.http.fastapi import idempotent_route
from onefold.stores.memory import AsyncMemoryStore
from tests.http_service.process import PATIENCE, records_in, started
from tests.http_service.visitor import Visitor
from tests.support import in_time


class Story:
    """An application with one handler that goes on when it may, and what happened in which order."""

    def __init__(self) -> None:
        self.store = AsyncMemoryStore()
        self.guard = AsyncGuard(self.store)
        self.order: list[str] = []
        self.started, self.goes_on = asyncio.Event(), asyncio.Event()

    async def pay(self) -> str:
        self.started.set()
        await self.goes_on.wait()
        self.order.append("paid")
        return "paid"

    @contextlib.asynccontextmanager
    async def closes(self, _app: Any) -> AsyncIterator[None]:
        """As a lifespan of a user's does."""
        yield
        self.order.append("closed")
        await self.guard.aclose()

    @contextlib.asynccontextmanager
    async def drains(self, app: Any) -> AsyncIterator[None]:
        async with self.closes(app):
            yield
            await drain(self.guard)

    @property
    def router(self) -> APIRouter:
        router = APIRouter(route_class=idempotent_route(guard=self.guard, scope=single_tenant))
        router.post("/pay")(self.pay)
        return router


def middleware(story: Story) -> Any:
    app = FastAPI(lifespan=story.closes)
    app.post("/pay")(story.pay)
    app.add_middleware(IdempotencyMiddleware, guard=story.guard, scope=single_tenant)
    return app


def route(story: Story) -> Any:
    app = FastAPI()
    app.include_router(story.router)
    app.router.on_shutdown.append(lambda: story.order.append("closed"))
    return app


def route_below_a_lifespan(story: Story) -> Any:
    app = FastAPI(lifespan=story.drains)
    app.include_router(story.router)
    return app


def route_below_a_mount(story: Story) -> Any:
    mounted = FastAPI()
    mounted.include_router(story.router)
    return Starlette(routes=[Mount("/", mounted)], lifespan=story.drains)


def route_below_a_lifespan_of_its_router(story: Story) -> Any:
    route_class = idempotent_route(guard=story.guard, scope=single_tenant)
    router = APIRouter(route_class=route_class, lifespan=story.drains)
    router.post("/pay")(story.pay)
    app = FastAPI()
    app.include_router(router)
    return app


def middleware_of_litestar(story: Story) -> Any:
    @litestar_post("/pay")
    async def pay() -> str:
        return await story.pay()

    ours: Any = IdempotencyMiddleware
    named = DefineMiddleware(ours, guard=story.guard, scope=single_tenant)
    return Litestar([pay], middleware=[named], lifespan=[story.drains], openapi_config=None, logging_config=None)


APPS = [
    middleware,
    route,
    route_below_a_lifespan,
    route_below_a_lifespan_of_its_router,
    route_below_a_mount,
    middleware_of_litestar,
]


class Lifespan:
    """The server's side of a lifespan."""

    def __init__(self, app: Any) -> None:
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self._running = asyncio.ensure_future(app({"type": "lifespan", "state": {}}, self.receive, self.send))

    async def receive(self) -> Any:
        return {"type": await self.said.get()}

    async def send(self, message: Any) -> None:
        self.heard.put_nowait(message["type"])

    async def phase(self, name: str) -> None:
        self.said.put_nowait(f"lifespan.{name}")
        assert await self.heard.get() == f"lifespan.{name}.complete"


@pytest.mark.parametrize("made", APPS, ids=lambda made: made.__name__)
def test_a_request_that_was_given_up_is_remembered_before_anything_is_closed(made: Callable[[Story], Any]) -> None:
    async def tell() -> None:
        story = Story()
        app = made(story)
        lifespan = Lifespan(app)
        await lifespan.phase("startup")
        server = asyncio.ensure_future(Visitor(app).visit())
        await story.started.wait()
        server.cancel()
        await asyncio.wait({server})
        shutdown = asyncio.ensure_future(lifespan.phase("shutdown"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert story.order == []
        story.goes_on.set()
        await shutdown
        assert story.order == ["paid", "closed"]
        record = await AsyncGuard(story.store).read("http", "key")
        assert record is not None
        assert record.state is State.DONE

    in_time(tell())


def test_the_shutdown_of_a_route_is_asked_for_once() -> None:
    async def tell() -> None:
        story = Story()
        story.goes_on.set()
        app = route(story)
        for key in ("one", "two"):
            await Visitor(app, key=key).visit()
        assert len(app.router.on_shutdown) == 2

    in_time(tell())


def test_both_modules_have_the_same_drain() -> None:
    assert fastapi.drain is drain


GRACEFUL = {
    "uvicorn": lambda port: ["uvicorn", "--port", str(port), "--timeout-graceful-shutdown=1"],
    "hypercorn": lambda port: ["hypercorn", f"--bind=127.0.0.1:{port}", "--graceful-timeout=1", "--workers=0"],
}


@pytest.mark.parametrize("server", [pytest.param("uvicorn", marks=pytest.mark.more), "hypercorn"])
@pytest.mark.parametrize("how", [pytest.param("middleware", marks=pytest.mark.more), "route"])
def test_a_server_that_is_told_to_end_finishes_what_has_started_and_ends(server: str, how: str, tmp_path: Path) -> None:
    store = records_in(tmp_path)
    environment = {"ENDING_FOLDER": str(tmp_path), "ENDING_STORE": store, "ENDING_HOW": how}

    def options(port: int) -> list[str]:
        return [*GRACEFUL[server](port), "tests.http_service.ending:app"]

    with started([sys.executable, "-m"], options, tmp_path, environment) as service:

        def pay() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{service.url}/pay", headers={"Idempotency-Key": "key"}, timeout=PATIENCE)

        client = threading.Thread(target=pay)
        client.start()
        until((tmp_path / "started").exists)
        service.process.send_signal(signal.SIGTERM)
        if server == "hypercorn" and sys.version_info >= (3, 12):
            # There it gives up no request.
            until(lambda: refuses(service.url))
        else:
            # Until the server has given it up.
            client.join(PATIENCE)
        (tmp_path / "gate").touch()
        service.process.wait(PATIENCE)
        with Guard(store) as guard:
            record = guard.read("http", "key")

    assert record is not None, service.log()
    assert record.state is State.DONE, service.log()


def refuses(url: str) -> bool:
    """Whether the server listens no more."""
    try:
        httpx.get(url, timeout=PATIENCE)
    except httpx.HTTPError:
        return True
    return False


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)
