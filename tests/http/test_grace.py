"""The grace of a shutdown: who has it, and that there is one. The clock of the loop is moved instead of waited for."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from onefold import AsyncGuard
from onefold.http._asgi.background_requests import CLEAN_UP, GRACE
from onefold.http.asgi import IdempotencyMiddleware, drain, header_key, single_tenant
from onefold.http.fastapi import idempotent_route
from onefold.stores.memory import AsyncMemoryStore
from tests.http.test_shutdown import Lifespan
from tests.http_service.visitor import Visitor
from tests.support import in_time


class MovedSelector(selectors.DefaultSelector):
    """Moves the clock where others would wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if events := super().select(0):
            return events
        assert timeout is not None, "every task waits for another one"
        self.now += max(timeout, 0.0)
        return []


class MovedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._moved = MovedSelector()
        super().__init__(self._moved)

    def time(self) -> float:
        return self._moved.now


def tell(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=MovedLoop) as runner:
        runner.run(story())


def now() -> float:
    return asyncio.get_running_loop().time()


Endpoint = Callable[[], Coroutine[Any, Any, Any]]


def behind_middleware(endpoint: Endpoint, guard: AsyncGuard) -> Any:
    app = FastAPI()
    app.post("/pay")(endpoint)
    app.add_middleware(IdempotencyMiddleware, guard=guard, scope=single_tenant)
    return app


def behind_route_class(endpoint: Endpoint, guard: AsyncGuard) -> Any:
    app = FastAPI()
    router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant))
    router.post("/pay")(endpoint)
    app.include_router(router)
    return app


def behind_others(endpoint: Endpoint, guard: AsyncGuard) -> Any:
    """Middlewares that pass a cancellation on by a task group of theirs."""
    app = behind_route_class(endpoint, guard)
    for _ in range(2):
        app.add_middleware(BaseHTTPMiddleware, dispatch=passed_on)
    return app


async def passed_on(request: Any, call_next: Any) -> Any:
    return await call_next(request)


def behind_all(endpoint: Endpoint, guard: AsyncGuard, other: AsyncGuard | None = None) -> Any:
    app = behind_route_class(endpoint, guard)
    app.add_middleware(IdempotencyMiddleware, guard=guard, scope=single_tenant, operation="outer")
    hook = header_key("X-Event")
    app.add_middleware(IdempotencyMiddleware, guard=other or guard, scope=single_tenant, key=hook)
    return app


@pytest.fixture(
    params=[behind_middleware, behind_route_class, pytest.param(behind_others, marks=pytest.mark.more), behind_all],
    ids=["middleware", "route", "others", "all"],
)
def behind(request: pytest.FixtureRequest) -> Callable[[Endpoint, AsyncGuard], Any]:
    made: Callable[[Endpoint, AsyncGuard], Any] = request.param
    return made


class Stuck:
    """An endpoint that never answers."""

    def __init__(self) -> None:
        self.started = asyncio.Semaphore(0)

    async def __call__(self) -> None:
        self.started.release()
        await asyncio.Event().wait()


async def given_up(visitor: Visitor, stuck: Stuck) -> None:
    server = asyncio.ensure_future(visitor.visit())
    await stuck.started.acquire()
    server.cancel()
    await asyncio.wait({server})


def test_a_stuck_request_has_one_grace_however_many_wait_for_it(behind: Callable[[Endpoint, AsyncGuard], Any]) -> None:
    async def story() -> None:
        stuck = Stuck()
        app = behind(stuck, AsyncGuard(AsyncMemoryStore()))
        lifespan = Lifespan(app)
        await lifespan.phase("startup")
        await given_up(Visitor(app), stuck)
        began = now()

        await lifespan.phase("shutdown")

        assert now() - began == pytest.approx(GRACE)

    tell(story)


def test_requests_of_several_guards_have_one_grace() -> None:
    async def story() -> None:
        stuck = Stuck()
        app = behind_all(stuck, AsyncGuard(AsyncMemoryStore()), AsyncGuard(AsyncMemoryStore()))
        lifespan = Lifespan(app)
        await lifespan.phase("startup")
        await given_up(Visitor(app, key="one"), stuck)
        await given_up(Visitor(app, key=None, headers=[(b"x-event", b"two")]), stuck)
        began = now()

        await lifespan.phase("shutdown")

        assert now() - began == pytest.approx(GRACE)

    tell(story)


def test_drain_waits_for_a_request_that_begins_meanwhile(behind: Callable[[Endpoint, AsyncGuard], Any]) -> None:
    async def story() -> None:
        guard, order = AsyncGuard(AsyncMemoryStore()), []

        async def pay() -> None:
            await asyncio.sleep(GRACE / 3)
            order.append("paid")

        app = behind(pay, guard)
        first = asyncio.ensure_future(Visitor(app, key="one").visit())
        await asyncio.sleep(1)
        draining = asyncio.ensure_future(drain(guard))
        await asyncio.sleep(1)
        second = asyncio.ensure_future(Visitor(app, key="two").visit())
        await draining

        assert order == ["paid", "paid"]
        await asyncio.gather(first, second)

    tell(story)


def test_requests_that_never_cease_to_come_do_not_keep_drain_beyond_the_grace() -> None:
    async def story() -> None:
        guard = AsyncGuard(AsyncMemoryStore())

        async def pay() -> None:
            await asyncio.sleep(2)

        app = behind_middleware(pay, guard)

        async def come() -> None:
            visits = []
            for number in range(int(2 * GRACE)):
                visits.append(asyncio.ensure_future(Visitor(app, key=str(number)).visit()))
                await asyncio.sleep(1)
            await asyncio.gather(*visits)

        coming = asyncio.ensure_future(come())
        await asyncio.sleep(1)
        began = now()
        await drain(guard)

        assert now() - began == pytest.approx(GRACE)
        await coming

    tell(story)


def whole(later: BackgroundTask) -> Response:
    return PlainTextResponse("paid", background=later)


def streamed(later: BackgroundTask) -> Response:
    async def parts() -> Any:
        yield b"pa"
        yield b"id"

    return StreamingResponse(parts(), background=later)


class Later:
    """A background task that takes its time, and what became of it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.began = asyncio.Event()
        self.ended = ""

    async def __call__(self) -> None:
        self.began.set()
        try:
            await asyncio.sleep(self.seconds)
            self.ended = "done"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


@pytest.mark.parametrize("made", [whole, streamed])
def test_no_shutdown_waits_for_a_background_task_of_an_answered_request(
    behind: Callable[[Endpoint, AsyncGuard], Any], made: Callable[[BackgroundTask], Response]
) -> None:
    async def story() -> None:
        later = Later(10 * GRACE)

        async def pay() -> Response:
            return made(BackgroundTask(later))

        app = behind(pay, AsyncGuard(AsyncMemoryStore()))
        lifespan = Lifespan(app)
        await lifespan.phase("startup")
        server = asyncio.ensure_future(Visitor(app).visit())
        await later.began.wait()
        began = now()

        await lifespan.phase("shutdown")

        assert (now() - began, later.ended) == (0, "")
        await server
        assert later.ended == "done"

    tell(story)


@pytest.mark.parametrize("key", [None, "key"])
@pytest.mark.parametrize("made", [whole, streamed])
def test_a_server_that_gives_up_an_answered_request_cancels_its_background_task_with_and_without_a_key(
    behind: Callable[[Endpoint, AsyncGuard], Any], made: Callable[[BackgroundTask], Response], key: str | None
) -> None:
    async def story() -> None:
        later = Later(10 * GRACE)

        async def pay() -> Response:
            return made(BackgroundTask(later))

        visitor = Visitor(behind(pay, AsyncGuard(AsyncMemoryStore())), key=key)
        server = asyncio.ensure_future(visitor.visit())
        await later.began.wait()
        server.cancel()
        await asyncio.wait({server})

        assert (visitor.ended, later.ended, now()) == (True, "cancelled", 0)
        assert server.cancelled()

    tell(story)


@pytest.mark.parametrize(("needs", "waits"), [(CLEAN_UP / 2, CLEAN_UP / 2), (10 * GRACE, CLEAN_UP)])
def test_a_shutdown_lets_a_cancelled_background_task_clean_up_for_a_second(
    behind: Callable[[Endpoint, AsyncGuard], Any], needs: float, waits: float
) -> None:
    async def story() -> None:
        began, told = asyncio.Event(), asyncio.Event()

        async def later() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                told.set()
                await asyncio.sleep(needs)

        async def pay() -> Response:
            return whole(BackgroundTask(later))

        app = behind(pay, AsyncGuard(AsyncMemoryStore()))
        lifespan = Lifespan(app)
        await lifespan.phase("startup")
        server = asyncio.ensure_future(Visitor(app).visit())
        await began.wait()
        server.cancel()
        # As little as a server does in between.
        await asyncio.sleep(0)

        await lifespan.phase("shutdown")

        # A task group of anyio's cancels the cleaning up as well, with and without a key.
        assert now() == pytest.approx(0 if behind is behind_others else waits)
        assert told.is_set()
        await asyncio.wait({server})

    tell(story)


def test_a_request_that_was_given_up_before_its_answer_finishes_its_background_task_within_the_grace(
    behind: Callable[[Endpoint, AsyncGuard], Any],
) -> None:
    async def story() -> None:
        later, started, goes_on = Later(GRACE / 2), asyncio.Event(), asyncio.Event()

        async def pay() -> Response:
            started.set()
            await goes_on.wait()
            return whole(BackgroundTask(later))

        app = behind(pay, AsyncGuard(AsyncMemoryStore()))
        lifespan = Lifespan(app)
        await lifespan.phase("startup")
        server = asyncio.ensure_future(Visitor(app).visit())
        await started.wait()
        server.cancel()
        await asyncio.wait({server})
        goes_on.set()

        await lifespan.phase("shutdown")

        assert later.ended == "done"

    tell(story)


def test_a_guard_that_the_middleware_opens_serves_every_lifespan_and_requests_outside_of_one(tmp_path: Path) -> None:
    async def story() -> None:
        async def pay() -> str:
            return "paid"

        app = FastAPI()
        app.post("/pay")(pay)
        app.add_middleware(IdempotencyMiddleware, guard=f"sqlite:///{tmp_path}/records.db", scope=single_tenant)
        visitors = []
        for _ in range(2):
            lifespan = Lifespan(app)
            await lifespan.phase("startup")
            visitors.append(await Visitor(app).visit())
            await lifespan.phase("shutdown")
        visitors.append(await Visitor(app).visit())
        lifespan = Lifespan(app)
        await lifespan.phase("startup")
        await lifespan.phase("shutdown")

        assert [(one.status, one.is_replay) for one in visitors] == [(200, False), (200, True), (200, True)]

    in_time(story())
