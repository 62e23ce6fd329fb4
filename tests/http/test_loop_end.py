"""The end of an event loop cancels every task, in whatever order: no guarded request may keep it from ending."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI
from starlette.responses import Response, StreamingResponse

from onefold import AsyncGuard
from onefold.http.asgi import IdempotencyMiddleware, single_tenant
from onefold.http.fastapi import idempotent_route
from onefold.stores.memory import AsyncMemoryStore
from tests.http_service.visitor import Visitor
from tests.support import AsyncProxyStore, in_time

# How often the others get their turn after each cancellation.
TURNS = (0, 2)

# More than a request has.
MOST_TASKS = 6


class Story:
    """One request that stands still at `place`."""

    def __init__(self, where: str, *, is_route: bool) -> None:
        self.where = where
        self.reached = asyncio.Event()
        self.store = AsyncProxyStore(AsyncMemoryStore())
        if where == "claiming":
            self.store.before["claim"] = self.stand_still
        elif where == "finishing":
            self.store.before["finish"] = self.stand_still
        self.guard = AsyncGuard(self.store)
        router = APIRouter(route_class=idempotent_route(guard=self.guard, scope=single_tenant)) if is_route else None
        app = FastAPI()
        self.app: Any = app
        (router or app).post("/pay")(self.pay)
        if router is None:
            self.app = IdempotencyMiddleware(app, guard=self.guard, scope=single_tenant)
        else:
            app.include_router(router)

    async def stand_still(self) -> None:
        self.reached.set()
        await asyncio.Event().wait()

    async def pay(self) -> Response:
        if self.where == "running":
            await self.stand_still()
        return StreamingResponse(self.parts())

    async def parts(self) -> Any:
        yield b"one "
        if self.where == "streaming":
            await self.stand_still()
        yield b"two"

    async def tell(self, order: Callable[[list[Any]], list[Any]], turns: int) -> None:
        before = asyncio.all_tasks()
        visiting = asyncio.ensure_future(Visitor(self.app).visit())
        await self.reached.wait()
        others = asyncio.all_tasks() - before
        for task in order(sorted(others, key=lambda task: task.get_coro().__qualname__)):
            task.cancel()
            for _ in range(turns):
                await asyncio.sleep(0)
        while left := asyncio.all_tasks() - before:
            await asyncio.wait(left)
        assert visiting.cancelled() or visiting.exception() is not None


@pytest.mark.parametrize("where", ["claiming", "running", "streaming", "finishing"])
@pytest.mark.parametrize("is_route", [False, True], ids=["middleware", "route"])
def test_a_loop_that_ends_in_the_middle_of_a_request_comes_to_its_end(where: str, is_route: bool) -> None:
    async def story() -> None:
        for turns, first, step in itertools.product(TURNS, range(MOST_TASKS), (1, -1)):

            def order(tasks: list[Any], first: int = first, step: int = step) -> list[Any]:
                first %= len(tasks)
                return [*tasks[first:], *tasks[:first]][::step]

            await Story(where, is_route=is_route).tell(order, turns)

    in_time(story())


def test_whoever_cancels_a_route_cancels_its_endpoint() -> None:
    """As a time-out in a dependency does. The request ends with it, and goes for one that failed."""

    async def story() -> None:
        started, ended = asyncio.Event(), []
        tasks: list[Any] = []
        store = AsyncProxyStore()

        async def bounded() -> Any:
            tasks.append(asyncio.current_task())
            yield

        router = APIRouter(route_class=idempotent_route(guard=AsyncGuard(store), scope=single_tenant))

        @router.post("/pay", dependencies=[Depends(bounded)])
        async def pay() -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(store.count("release"))

        app = FastAPI()
        app.include_router(router)
        visiting = asyncio.ensure_future(Visitor(app).visit())
        await started.wait()
        tasks[0].cancel()
        with pytest.raises(RuntimeError, match="cancelled"):
            await visiting
        assert (ended, store.count("release")) == ([0], 1)

    in_time(story())
