"""What an ASGI application does after its answer begins once the answer is remembered and sent, and always begins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.background import BackgroundTask
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from onefold import AsyncGuard, Policy, UsageError, current
from onefold.current import Current
from onefold.http._asgi import captured_response
from onefold.http._asgi.captured_response import CapturedResponse
from onefold.http.asgi import IdempotencyMiddleware, single_tenant
from onefold.http.fastapi import idempotent_route
from tests.http_service.visitor import Visitor
from tests.support import PATIENCE, AsyncProxyStore, in_time

Endpoint = Callable[[], Awaitable[Response]]


def behind_middleware(endpoint: Endpoint, guard: AsyncGuard) -> Any:
    app = FastAPI()
    app.post("/pay")(endpoint)
    return IdempotencyMiddleware(app, guard=guard, scope=single_tenant)


def behind_route_class(endpoint: Endpoint, guard: AsyncGuard) -> Any:
    router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant))
    router.post("/pay")(endpoint)
    app = FastAPI()
    app.include_router(router)
    return app


def behind_both(endpoint: Endpoint, guard: AsyncGuard) -> Any:
    inner = behind_route_class(endpoint, guard)
    return IdempotencyMiddleware(inner, guard=guard, scope=single_tenant, operation="outer")


@pytest.fixture(params=[behind_middleware, behind_route_class, behind_both], ids=["middleware", "route", "both"])
def behind(request: pytest.FixtureRequest) -> Callable[[Endpoint, AsyncGuard], Any]:
    made: Callable[[Endpoint, AsyncGuard], Any] = request.param
    return made


@pytest.fixture(autouse=True)
def is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is paused for a second is not taken for a store that waits for the application."""
    monkeypatch.setattr(captured_response, "REMEMBER_SECONDS", PATIENCE)


def whole(later: BackgroundTask) -> Response:
    return PlainTextResponse("paid", background=later)


def streamed(later: BackgroundTask) -> Response:
    async def parts() -> Any:
        yield b"pa"
        yield b"id"

    return StreamingResponse(parts(), background=later)


@pytest.mark.parametrize("made", [whole, streamed])
@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
def test_a_background_task_begins_once_its_answer_is_remembered_and_sent(
    behind: Callable[..., Any], made: Callable[[BackgroundTask], Response], spec_version: str
) -> None:
    async def story() -> None:
        store, seen = AsyncProxyStore(), []

        async def later() -> None:
            """It might end the process here, or keep its loop busy."""
            seen.append((store.count("finish"), visitor.ended))

        async def pay() -> Response:
            return made(BackgroundTask(later))

        app = behind(pay, AsyncGuard(store))
        # Before 2.4 an application hears from `receive` that its client has gone, and Starlette listens meanwhile.
        visitor = Visitor(app, asgi={"version": "3.0", "spec_version": spec_version})
        await visitor.visit()

        assert seen == [(store.count("claim"), True)]
        assert visitor.body == b"paid"

    in_time(story())


@pytest.mark.parametrize("made", [whole, streamed])
def test_a_background_task_is_outside_of_the_delivery_and_takes_no_steps(
    behind: Callable[..., Any], made: Callable[[BackgroundTask], Response]
) -> None:
    async def story() -> None:
        seen: list[Any] = []
        deliveries: list[Current] = []

        async def later() -> None:
            for ask in (current, lambda: deliveries[0].step("mail", lambda: seen.append("mailed"))):
                try:
                    seen.append(ask())
                except UsageError as error:
                    seen.append(type(error))

        async def pay() -> Response:
            deliveries.append(current())
            return made(BackgroundTask(later))

        await Visitor(behind(pay, AsyncGuard("memory:"))).visit()

        assert seen == [UsageError, UsageError]

    in_time(story())


class Broken(Exception):
    """What no guard raises."""


class BrokenGuard(AsyncGuard):
    """It ends each claim, and breaks."""

    async def run(self, *arguments: Any, **options: Any) -> Any:
        await super().run(*arguments, **options)
        raise Broken


async def lost(*_: Any) -> bool:
    return False


def unfinishable(store: AsyncProxyStore) -> None:
    store.inner.finish = lost  # type: ignore[assignment, method-assign]


def down(store: AsyncProxyStore) -> None:
    store.down.update({"finish", "release"})


def nothing(_store: AsyncProxyStore) -> None:
    pass


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize("failure", [unfinishable, down, nothing], ids=lambda failure: failure.__name__)
@pytest.mark.parametrize("kind", [AsyncGuard, BrokenGuard])
def test_an_application_goes_on_however_its_claim_has_ended(
    behind: Callable[..., Any], failure: Callable[[AsyncProxyStore], None], kind: type[AsyncGuard], status: int
) -> None:
    async def story() -> None:
        store, ended = AsyncProxyStore(), asyncio.Event()

        async def later() -> None:
            ended.set()

        async def pay() -> Response:
            failure(store)
            return Response("paid", status_code=status, background=BackgroundTask(later))

        # Where the store is down, it is asked again for as long as the lease holds.
        guard = kind(store, policy=Policy(lease=0.2))
        visiting = asyncio.ensure_future(Visitor(behind(pay, guard)).visit())
        await ended.wait()
        # The server hears of what nobody expects, and of nothing else.
        (error,) = await asyncio.gather(visiting, return_exceptions=True)
        assert not isinstance(error, BaseException) or isinstance(error, Broken)

    in_time(story())


def test_a_store_that_waits_for_what_comes_after_the_answer_gets_it(
    behind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a transaction that a dependency with `yield` ends on the same SQLite file."""
    monkeypatch.setattr(captured_response, "REMEMBER_SECONDS", 0.01)

    async def story() -> None:
        store, committed = AsyncProxyStore(), asyncio.Event()
        store.before["finish"] = committed.wait

        async def pay() -> Response:
            return PlainTextResponse("paid", background=BackgroundTask(commit))

        async def commit() -> None:
            committed.set()

        app = behind(pay, AsyncGuard(store))
        visitors = [await Visitor(app).visit() for _ in range(2)]

        assert [(one.body, one.is_replay) for one in visitors] == [(b"paid", False), (b"paid", True)]

    in_time(story())

    assert "Commit before you respond" in caplog.text


def test_a_client_that_reads_slowly_is_waited_for(behind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a key, for as long as it takes: the store is not in the way."""
    responses: list[CapturedResponse] = []
    end = CapturedResponse.end

    async def ending(captured: CapturedResponse) -> None:
        responses.append(captured)
        await end(captured)

    monkeypatch.setattr(CapturedResponse, "end", ending)

    async def story() -> None:
        seen: list[bool] = []

        async def later() -> None:
            seen.append(visitor.ended)

        async def pay() -> Response:
            return PlainTextResponse("paid", background=BackgroundTask(later))

        async def slowly(message: Any) -> None:
            for captured in responses:
                # The bound on the store is over by now.
                captured._go_on_anyway()
            for _ in range(100):
                await asyncio.sleep(0)
            await Visitor.send(visitor, message)

        visitor = Visitor(behind(pay, AsyncGuard("memory:")))
        monkeypatch.setattr(visitor, "send", slowly)
        await visitor.visit()

        assert responses
        assert seen == [True]

    in_time(story())


def test_an_application_goes_on_when_the_claim_of_its_answer_is_called_off(behind: Callable[..., Any]) -> None:
    """As the end of the loop does: every task is cancelled, and none may be left waiting."""

    async def story() -> None:
        store, asked, ours = AsyncProxyStore(), asyncio.Event(), asyncio.all_tasks()

        async def never() -> None:
            asked.set()
            await asyncio.Event().wait()

        store.before["finish"] = never

        async def pay() -> Response:
            return PlainTextResponse("paid")

        visiting = asyncio.ensure_future(Visitor(behind(pay, AsyncGuard(store))).visit())
        await asked.wait()
        others = asyncio.all_tasks() - ours
        for task in others:
            task.cancel()
        await asyncio.wait(others)
        assert visiting.cancelled()

    in_time(story())


def test_a_request_that_is_cancelled_as_its_answer_is_sent_cancels_its_background_task(
    behind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> list[str]:
        seen: list[str] = []

        async def later() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        async def pay() -> Response:
            return PlainTextResponse("paid", background=BackgroundTask(later))

        async def last(message: Any) -> None:
            await Visitor.send(visitor, message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                visit.cancel()

        visitor = Visitor(behind(pay, AsyncGuard("memory:")))
        monkeypatch.setattr(visitor, "send", last)
        visit = asyncio.ensure_future(visitor.visit())
        with pytest.raises(asyncio.CancelledError):
            await visit
        return seen

    # It may be cancelled before it has begun.
    assert in_time(story()) in (["cancelled"], [])
