"""Routes of FastAPI: claimed after their dependencies, remembered as what FastAPI made of them, and described."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any
from uuid import UUID

import httpx
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from onefold import AsyncGuard, Done, Guard, Policy, UsageError, current
from onefold.http import Answer
from onefold.http.fastapi import body_field, by_argument, by_header, describe, idempotent_route, single_tenant
from tests.http_service.visitor import Visitor
from tests.support import AsyncProxyStore, in_time


class Payment(BaseModel):
    amount: int


class Receipt(BaseModel):
    id: int
    amount: int
    note: str | None = None


class Bank:
    """Counts what it paid."""

    def __init__(self) -> None:
        self.paid: list[int] = []

    def pay(self, amount: int) -> Receipt:
        self.paid.append(amount)
        return Receipt(id=len(self.paid), amount=amount)


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.fixture
def router() -> APIRouter:
    return APIRouter(route_class=idempotent_route(guard=AsyncGuard("memory:"), scope=single_tenant))


def app_of(router: APIRouter, **options: Any) -> FastAPI:
    app = FastAPI(**options)
    app.include_router(router)
    return app


def sent(app: FastAPI, *requests: dict[str, Any]) -> list[httpx.Response]:
    """The answers to these requests, one after the other. Each has a key unless it says otherwise."""

    async def story() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.send(client.build_request(**as_request(one))) for one in requests]

    return in_time(story())


def as_request(wanted: dict[str, Any]) -> dict[str, Any]:
    key = wanted.get("key", "key")
    headers = {**({} if key is None else {"Idempotency-Key": key}), **wanted.get("headers", {})}
    body = {name: value for name, value in wanted.items() if name in ("json", "content")}
    return {
        "method": wanted.get("method", "POST"),
        "url": wanted.get("url", "/pay"),
        "headers": headers,
        **(body or {"json": {"amount": 5}}),
    }


def replays(answers: list[httpx.Response]) -> list[bool]:
    return [one.headers.get("idempotent-replayed") == "true" for one in answers]


# What runs.


def test_an_endpoint_is_called_once_with_what_it_asked_for(router: APIRouter, bank: Bank) -> None:
    @router.post("/pay", status_code=201, response_model_exclude_none=True)
    async def pay(payment: Payment, request: Request, response: Response) -> Receipt:
        response.headers["X-Path"] = request.url.path
        response.set_cookie("session", "secret")
        return bank.pay(payment.amount)

    first, second = sent(app_of(router), {}, {})

    assert (first.status_code, first.json()) == (201, {"id": 1, "amount": 5})
    assert (second.status_code, second.content, second.headers["x-path"]) == (201, first.content, "/pay")
    assert ("set-cookie" in first.headers, "set-cookie" in second.headers) == (True, False)
    assert replays([first, second]) == [False, True]
    assert bank.paid == [5]


class Called:
    async def __call__(self, payment: Payment) -> Receipt:
        return Receipt(id=7, amount=payment.amount)


def of_two(payment: Payment, more: int) -> Receipt:
    return Receipt(id=more, amount=payment.amount)


async def async_handler(payment: Payment, more: int) -> Receipt:
    return of_two(payment, more)


@pytest.mark.parametrize(
    "endpoint",
    [Called(), functools.partial(of_two, more=7), functools.partial(async_handler, more=7)],
    ids=["object", "partial", "async partial"],
)
def test_an_endpoint_may_be_any_callable(router: APIRouter, endpoint: Any) -> None:
    router.add_api_route("/pay", endpoint, methods=["POST"])

    answers = sent(app_of(router), {}, {})

    assert [one.json()["id"] for one in answers] == [7, 7]
    assert replays(answers) == [False, True]


def test_a_blocking_endpoint_runs_in_its_thread_and_knows_its_key(router: APIRouter) -> None:
    seen = []

    @router.post("/pay")
    def pay(payment: Payment) -> int:
        seen.append(current().key)
        return payment.amount

    answers = sent(app_of(router), {}, {})

    assert [one.json() for one in answers] == [5, 5]
    assert seen == ["key"]


def test_without_a_key_every_request_runs_and_other_methods_are_not_touched(router: APIRouter, bank: Bank) -> None:
    @router.post("/pay")
    @router.get("/pay")
    async def pay() -> Receipt:
        return bank.pay(1)

    answers = sent(app_of(router), {"key": None}, {"key": None}, {"method": "GET"}, {"method": "GET"})

    assert [one.json()["id"] for one in answers] == [1, 2, 3, 4]


@pytest.mark.parametrize("is_included", [True, False])
def test_a_method_counts_however_it_is_written(router: APIRouter, bank: Bank, is_included: bool) -> None:
    app = FastAPI()
    app.router.route_class = router.route_class

    @(router if is_included else app).api_route("/pay", methods=["post"])
    async def pay() -> Receipt:
        return bank.pay(1)

    app.include_router(router)

    assert replays(sent(app, {}, {})) == [False, True]
    assert bank.paid == [1]


def test_a_large_body_reaches_the_endpoint(router: APIRouter) -> None:
    @router.post("/pay")
    async def pay(request: Request) -> int:
        return len(await request.body())

    first, second, other = sent(app_of(router), *({"content": content * 2_000_000} for content in (b"a", b"a", b"b")))

    assert (first.json(), second.json(), other.status_code) == (2_000_000, 2_000_000, 422)
    assert replays([first, second]) == [False, True]


def test_a_route_that_is_made_again_of_another_ones_endpoint_is_guarded_once(bank: Bank) -> None:
    route_class = idempotent_route(guard=AsyncGuard("memory:"), scope=single_tenant)

    async def pay() -> Receipt:
        return bank.pay(1)

    # As `include_router` did in older versions.
    first = route_class("/pay", pay, methods=["POST"])
    again = route_class("/pay", first.endpoint, methods=["POST"])
    app = FastAPI()
    app.router.routes.append(again)

    assert replays(sent(app, {}, {})) == [False, True]
    assert bank.paid == [1]


@pytest.mark.parametrize("nested", [False, True])
def test_routers_inside_of_routers_are_guarded_once(bank: Bank, nested: bool) -> None:
    router = APIRouter(prefix="/v1", route_class=idempotent_route(guard=AsyncGuard("memory:"), scope=single_tenant))

    @router.post("/pay")
    async def pay() -> Receipt:
        return bank.pay(1)

    around = APIRouter(prefix="/api")
    around.include_router(router)
    app = app_of(around if nested else router)
    url = "/api/v1/pay" if nested else "/v1/pay"

    assert replays(sent(app, {"url": url}, {"url": url})) == [False, True]
    assert bank.paid == [1]


# What comes before the claim, and is never remembered.


def test_who_is_not_let_in_is_not_remembered(router: APIRouter, bank: Bank) -> None:
    async def user(x_user: Annotated[str | None, Header()] = None) -> str:
        if x_user is None:
            raise HTTPException(403)
        return x_user

    @router.post("/pay")
    async def pay(user: str = Depends(user)) -> Receipt:
        return bank.pay(1)

    answers = sent(app_of(router), {}, {"headers": {"X-User": "asha"}}, {"headers": {"X-User": "asha"}})

    assert [one.status_code for one in answers] == [403, 200, 200]
    assert replays(answers) == [False, False, True]


def test_what_is_not_valid_is_not_remembered(router: APIRouter, bank: Bank) -> None:
    @router.post("/pay")
    async def pay(payment: Payment) -> Receipt:
        return bank.pay(payment.amount)

    answers = sent(app_of(router), {"json": {"amount": "much"}}, {}, {})

    assert [one.status_code for one in answers] == [422, 200, 200]
    assert replays(answers) == [False, False, True]


def test_a_malformed_key_is_refused_before_anything_runs(router: APIRouter, bank: Bank) -> None:
    @router.post("/pay")
    async def pay() -> Receipt:
        return bank.pay(1)

    (refused,) = sent(app_of(router), {"key": "two keys"})

    assert (refused.status_code, refused.json()["code"], bank.paid) == (400, "key_malformed", [])


# Whose key it is.


def user_of(x_user: Annotated[str, Header()] = "") -> str:
    return x_user


def test_an_argument_of_the_endpoint_is_the_caller(bank: Bank) -> None:
    scope = by_argument("user", lambda user: user.upper())
    router = APIRouter(route_class=idempotent_route(guard=AsyncGuard("memory:"), scope=scope))

    @router.post("/pay")
    async def pay(user: Annotated[str, Depends(user_of)]) -> Receipt:
        return bank.pay(1)

    users = ["asha", "riya", "asha", ""]
    answers = sent(app_of(router), *({"headers": {"X-User": name}} for name in users))

    assert replays(answers) == [False, False, True, False]
    assert (answers[3].status_code, answers[3].json()["code"]) == (400, "caller_unknown")
    assert bank.paid == [1, 1]


@pytest.mark.parametrize("user", ["7", 7, UUID(int=7)], ids=lambda user: type(user).__name__)
def test_a_caller_is_a_text_a_number_or_a_uuid(bank: Bank, user: Any) -> None:
    guard = AsyncGuard("memory:")
    router = APIRouter(route_class=idempotent_route(guard=guard, scope=by_argument("user")))

    found = Depends(lambda: user)

    @router.post("/pay")
    async def pay(user: Any = found) -> Receipt:
        return bank.pay(1)

    assert replays(sent(app_of(router), {}, {})) == [False, True]
    assert in_time(guard.read("http", "key", scope=str(user))) is not None


class Row:
    """As a model of an ORM: its text is its address in memory."""

    id = 7


@pytest.mark.parametrize("user", [Row(), {"id": 7}, True, 7.0, b"7"], ids=lambda user: type(user).__name__)
def test_an_object_is_no_caller(user: Any) -> None:
    router = APIRouter(route_class=idempotent_route(guard=AsyncGuard("memory:"), scope=by_argument("user")))

    found = Depends(lambda: user)

    @router.post("/pay")
    async def pay(user: Any = found) -> None:
        raise AssertionError

    with pytest.raises(UsageError, match=r"by_argument\('user', lambda user: user\.id\)"):
        in_time(Visitor(app_of(router)).visit())


def test_an_argument_that_is_nobody_is_no_caller() -> None:
    router = APIRouter(route_class=idempotent_route(guard=AsyncGuard("memory:"), scope=by_argument("user")))

    @router.post("/pay")
    async def pay(user: str | None = Depends(lambda: None)) -> None:
        raise AssertionError

    (refused,) = sent(app_of(router), {})

    assert (refused.status_code, refused.json()["code"]) == (400, "caller_unknown")


def test_an_argument_that_the_endpoint_does_not_have_is_a_bug() -> None:
    """Refused when the route is made; here a function hides what it asks for."""
    asks = by_argument("user")

    def hidden(request: Any) -> str:
        return f"user {asks(request)}"

    router = APIRouter(route_class=idempotent_route(guard=AsyncGuard("memory:"), scope=hidden))

    @router.post("/pay")
    async def pay() -> None:
        raise AssertionError

    with pytest.raises(UsageError, match="by_argument"):
        in_time(Visitor(app_of(router)).visit())


def test_a_caller_that_has_to_be_async_is_a_bug() -> None:
    async def find(name: str) -> str:
        return name

    caller = by_argument("user", lambda name: find(name.lower()))
    router = APIRouter(route_class=idempotent_route(guard=AsyncGuard("memory:"), scope=caller))

    @router.post("/pay")
    async def pay(user: str = "asha") -> None:
        raise AssertionError

    with pytest.raises(UsageError, match="returned an awaitable"):
        in_time(Visitor(app_of(router)).visit())


# Answers that are made of errors.


def test_what_fastapi_makes_of_an_error_is_remembered_as_it_is(router: APIRouter, bank: Bank) -> None:
    class Declined(Exception):
        pass

    @router.post("/pay")
    async def pay(payment: Payment) -> Receipt:
        bank.pay(payment.amount)
        if payment.amount == 404:
            raise HTTPException(404, "no such order", headers={"X-Why": "gone"})
        raise Declined

    app = app_of(router)

    @app.exception_handler(Declined)
    async def declined(_request: Request, _error: Exception) -> Response:
        return JSONResponse({"declined": True}, 402)

    missing = sent(app, *[{"json": {"amount": 404}, "key": "missing"}] * 2)
    refused = sent(app, *[{"json": {"amount": 1}, "key": "refused"}] * 2)

    assert [(one.status_code, one.json(), one.headers["x-why"]) for one in missing] == [
        (404, {"detail": "no such order"}, "gone")
    ] * 2
    assert [(one.status_code, one.json()) for one in refused] == [(402, {"declined": True})] * 2
    assert replays([*missing, *refused]) == [False, True] * 2
    assert bank.paid == [404, 1]


@pytest.mark.parametrize(("policy", "second"), [(Policy(), 500), (Policy(after_crash="hold"), 409)])
def test_what_nobody_makes_an_answer_of_is_released_or_held(bank: Bank, policy: Policy, second: int) -> None:
    guard = AsyncGuard("memory:", policy=policy)
    router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant))

    @router.post("/pay")
    async def pay() -> None:
        bank.pay(1)
        raise RuntimeError("boom")

    answers = sent(app_of(router), {}, {})

    assert [one.status_code for one in answers] == [500, second]
    assert len(bank.paid) == (2 if second == 500 else 1)


def test_the_error_itself_reaches_the_server(router: APIRouter) -> None:
    @router.post("/pay")
    async def pay() -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        in_time(Visitor(app_of(router)).visit())


def test_an_answer_that_cannot_be_serialized_is_a_failure(router: APIRouter, bank: Bank) -> None:
    @router.post("/pay", response_model=Receipt)
    async def pay() -> Any:
        bank.pay(1)
        return {"no": "receipt"}

    answers = sent(app_of(router), {}, {})

    assert [one.status_code for one in answers] == [500, 500]
    assert bank.paid == [1, 1]


def test_a_probe_answers_in_the_place_of_an_endpoint_that_failed(bank: Bank) -> None:
    async def ask(_current: Any) -> Any:
        return Done(Answer(200, [], b"the bank says yes"))

    guard = AsyncGuard("memory:", policy=Policy(after_crash=ask))
    router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant))

    @router.post("/pay")
    async def pay() -> None:
        bank.pay(1)
        raise RuntimeError("boom")

    answers = sent(app_of(router), {}, {})

    assert [(one.status_code, one.content) for one in answers] == [(200, b"the bank says yes")] * 2
    assert bank.paid == [1]


def test_a_held_request_that_somebody_resolves_with_a_plain_value(bank: Bank) -> None:
    guard = AsyncGuard("memory:", policy=Policy(after_crash="hold"))
    router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant))

    @router.post("/pay")
    async def pay() -> None:
        bank.pay(1)
        raise RuntimeError("boom")

    (first,) = sent(app_of(router), {})
    in_time(guard.resolve("http", "key", Done({"id": 17}), by="asha", reason="asked the bank"))
    (again,) = sent(app_of(router), {})

    assert (first.status_code, again.status_code, again.json()) == (500, 200, {"id": 17})
    assert bank.paid == [1]


# Dependencies that end, background tasks, streams.


@pytest.mark.parametrize(("when", "remembered"), [("function", False), ("request", True)])
def test_a_commit_in_a_dependency_comes_before_the_memory_only_with_the_scope_of_the_function(
    router: APIRouter, bank: Bank, when: Any, remembered: bool
) -> None:
    commits: list[str] = []

    def session() -> Iterator[str]:
        yield "session"
        commits.append("commit")
        if len(commits) == 1:
            raise RuntimeError("the commit failed")

    @router.post("/pay")
    async def pay(session: str = Depends(session, scope=when)) -> Receipt:
        return bank.pay(1)

    answers = sent(app_of(router), {}, {})

    assert replays(answers)[1] is remembered
    assert len(bank.paid) == (1 if remembered else 2)


def test_background_tasks_run_once_after_the_answer(router: APIRouter, bank: Bank) -> None:
    @router.post("/pay")
    async def pay(tasks: BackgroundTasks) -> str:
        tasks.add_task(bank.pay, 1)
        return "later"

    assert replays(sent(app_of(router), {}, {})) == [False, True]
    assert bank.paid == [1]


def test_a_stream_is_remembered_at_its_end(router: APIRouter) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for number in range(3):
            yield b"%d " % number

    @router.post("/pay")
    async def pay() -> StreamingResponse:
        return StreamingResponse(parts())

    answers = sent(app_of(router), {}, {})

    assert [one.content for one in answers] == [b"0 1 2 "] * 2
    assert replays(answers) == [False, True]


def test_an_endpoint_that_yields_is_refused(router: APIRouter) -> None:
    async def pay() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(UsageError, match="yields its answer"):
        router.add_api_route("/pay", pay, methods=["POST"])


# At the same time, and when a client goes.


def test_a_cancelled_request_is_finished_and_remembered(router: APIRouter, bank: Bank) -> None:
    async def story() -> None:
        started, goes_on = asyncio.Event(), asyncio.Event()

        @router.post("/pay")
        async def pay() -> Receipt:
            started.set()
            await goes_on.wait()
            return bank.pay(1)

        app = app_of(router)
        server = asyncio.ensure_future(Visitor(app).visit())
        await started.wait()
        duplicate = await Visitor(app).visit()
        server.cancel()
        with pytest.raises(asyncio.CancelledError):
            await server
        goes_on.set()
        while (again := await Visitor(app).visit()).status == 409:  # noqa: ASYNC110 - as a client would
            await asyncio.sleep(0.001)

        assert (duplicate.status, json.loads(duplicate.body)["code"]) == (409, "in_progress")
        assert (again.is_replay, bank.paid) == (True, [1])

    in_time(story())


def test_a_handler_that_has_lost_its_claim_is_told() -> None:
    async def story() -> None:
        store = AsyncProxyStore()
        store.down.update({"extend", "extend_all"})
        policy = Policy(lease=0.5, cancel_when_lost=True)
        guard = AsyncGuard(store, policy=policy)
        router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant))

        @router.post("/pay")
        async def pay() -> None:
            await asyncio.Event().wait()

        visitor = await Visitor(app_of(router)).visit()

        assert (visitor.status, json.loads(visitor.body)["code"]) == (409, "claim_lost")

    in_time(story())


def test_a_claim_that_is_lost_in_the_middle_of_a_stream_does_not_end_the_stream() -> None:
    async def story() -> None:
        store, goes_on = AsyncProxyStore(), asyncio.Event()
        guard = AsyncGuard(store, policy=Policy(lease=0.5, cancel_when_lost=True))
        router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant))

        async def parts() -> AsyncIterator[bytes]:
            yield b"one "
            await goes_on.wait()
            yield b"two"

        @router.post("/pay")
        async def pay() -> StreamingResponse:
            return StreamingResponse(parts())

        visitor = Visitor(app_of(router))
        running = asyncio.ensure_future(visitor.visit())
        while visitor.body != b"one ":  # noqa: ASYNC110 - what is waited for knows nothing of us
            await asyncio.sleep(0.01)
        # From here on nobody can renew the lease, and this is longer than it.
        store.down.update({"extend", "extend_all"})
        await asyncio.sleep(0.7)
        goes_on.set()
        await running

        assert (visitor.body, visitor.ended) == (b"one two", True)

    in_time(story())


def test_a_request_inside_of_a_request_has_a_visit_of_its_own(bank: Bank) -> None:
    guard = AsyncGuard("memory:")
    router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant))
    app = FastAPI()

    @router.post("/pay")
    async def pay() -> Receipt:
        return bank.pay(1)

    @router.post("/pay-twice")
    async def pay_twice() -> list[bool]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = [await client.post("/pay", headers=headers) for headers in ({}, {"Idempotency-Key": "inner"}) * 2]
        return replays(answers)

    app.include_router(router)
    (answer,) = sent(app, {"url": "/pay-twice", "key": "outer"})

    assert answer.json() == [False, False, False, True]
    assert bank.paid == [1, 1, 1]


@pytest.mark.parametrize("guard", [Guard("memory:")])
def test_a_blocking_guard_is_refused_at_once(guard: Any) -> None:
    with pytest.raises(UsageError, match="AsyncGuard"):
        idempotent_route(guard=guard, scope=single_tenant)


# The schema.


def parameters(operation: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one for one in operation.get("parameters", [])}


@pytest.mark.parametrize("required", [True, False])
def test_the_header_and_the_answers_are_in_the_schema_of_guarded_routes_alone(required: bool) -> None:
    route_class = idempotent_route(guard=AsyncGuard("memory:"), scope=by_header("X-Api-Key"), required=required)
    router = APIRouter(route_class=route_class)

    @router.post("/pay", responses={404: {"description": "No such order"}})
    async def pay(payment: Payment, dry: bool = False) -> Receipt:
        raise AssertionError

    @router.get("/pay")
    async def paid() -> list[Receipt]:
        raise AssertionError

    schema = app_of(router).openapi()["paths"]["/pay"]

    assert set(parameters(schema["post"])) == {"dry", "Idempotency-Key"}
    assert parameters(schema["post"])["Idempotency-Key"]["required"] is required
    assert set(schema["post"]["responses"]) == {"200", "400", "404", "409", "422"}
    assert "application/problem+json" in schema["post"]["responses"]["409"]["content"]
    assert "parameters" not in schema["get"]
    assert set(schema["get"]["responses"]) == {"200"}


@pytest.mark.parametrize(("paths", "described"), [(None, {"/pay", "/refund"}), (["/pay"], {"/pay"})])
def test_an_application_behind_the_middleware_can_be_described(paths: list[str] | None, described: set[str]) -> None:
    app = FastAPI()

    @app.post("/pay")
    async def pay(payment: Payment) -> Receipt:
        raise AssertionError

    @app.post("/refund")
    async def refund() -> None:
        raise AssertionError

    @app.get("/payments")
    async def payments() -> None:
        raise AssertionError

    describe(app, paths=paths)
    schema = app.openapi()["paths"]

    found = {
        path
        for path, operations in schema.items()
        for one in operations.values()
        if "Idempotency-Key" in parameters(one)
    }
    assert found == described
    assert set(schema["/pay"]["post"]["responses"]) == {"200", "400", "409", "422"}
    assert set(schema["/pay"]["post"]["responses"]["422"]["content"]) == {
        "application/json",
        "application/problem+json",
    }
    assert app.openapi() is app.openapi()


@pytest.mark.parametrize(
    ("rules", "reused"), [("below_500", {"422"}), ("success_only", {"422"}), ("stripe", set[str]())]
)
def test_the_schema_has_the_answer_to_a_reused_key_that_comes(rules: str, reused: set[str]) -> None:
    guard = AsyncGuard("memory:")
    router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant, rules=rules))
    behind = FastAPI()

    # Without arguments: FastAPI adds a 422 of its own to what it validates.
    @router.post("/pay")
    @behind.post("/pay")
    async def pay() -> None:
        raise AssertionError

    describe(behind, rules=rules)

    for app in (app_of(router), behind):
        answers = app.openapi()["paths"]["/pay"]["post"]["responses"]
        assert set(answers) == {"200", "400", "409"} | reused
        assert ("used with another request" in answers["400"]["description"]) == (not reused)


def test_a_webhook_takes_its_key_from_the_body(bank: Bank) -> None:
    options: dict[str, Any] = {"scope": single_tenant, "key": body_field("id")}
    router = APIRouter(route_class=idempotent_route(guard=AsyncGuard("memory:"), **options))

    @router.post("/pay")
    async def hook(event: dict[str, Any]) -> Receipt:
        return bank.pay(1)

    events: list[dict[str, Any]] = [{"id": "evt_1"}, {"id": "evt_1"}, {"type": "paid"}]
    answers = sent(app_of(router), *({"json": event, "key": None} for event in events))

    assert replays(answers) == [False, True, False]
    assert bank.paid == [1, 1]
