"""FastAPI: the Idempotency-Key header for single routes, after their dependencies, and in the OpenAPI schema.

    router = APIRouter(route_class=idempotent_route(guard=guard, scope=by_argument("user")))

The claim is made when the endpoint is called: authentication and validation have passed by then, and their responses
are never remembered. For all routes at once use `onefold.http.asgi.IdempotencyMiddleware`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Final, Unpack

from onefold import AsyncGuard, OnefoldError, Outcome, UsageError
from onefold.http._answers.rules import NotFinal, checked
from onefold.http._asgi.background_requests import background_requests_of, drain
from onefold.http._asgi.captured_response import App, CapturedResponse, Receive, Scope, Send, send_answer
from onefold.http._asgi.openapi import PARAMETER, described, responses
from onefold.http._exchange.deliveries import deliver_async
from onefold.http._exchange.rules import Ended, Exchange, GuardRequest, Options, known, methods_of
from onefold.http._requests.fingerprints import body_for
from onefold.http._requests.keys import body_field, header_key
from onefold.http._shared import options as _options
from onefold.http._shared.messages import Answer, Body, Refused, Request
from onefold.http.asgi import IdempotencyMiddleware, as_async_guard, by_user, read_body, request_of
from onefold.http.scopes import ScopeOf, by_header, name_of, single_tenant
from onefold.stores.sources import AsyncStoreSource

try:
    from fastapi import FastAPI, Response
    from fastapi.routing import APIRoute
    from starlette.concurrency import run_in_threadpool
except ImportError as missing:
    raise UsageError("onefold.http.fastapi needs FastAPI: pip install 'onefold[http]' fastapi") from missing

__all__ = [
    "IdempotencyMiddleware",
    "body_field",
    "by_argument",
    "by_header",
    "by_user",
    "describe",
    "drain",
    "header_key",
    "idempotent_route",
    "single_tenant",
]

# The attribute of a wrapped endpoint that holds the user's.
ORIGINAL: Final = "__onefold_endpoint__"


def idempotent_route(*, guard: AsyncGuard | AsyncStoreSource, **options: Unpack[Options]) -> type[APIRoute]:
    """Create the class for routes whose requests are guarded: `APIRouter(route_class=idempotent_route(…))`."""
    rules = _Rules(guard, Exchange(**known("idempotent_route", options, has_endpoint=True), begun=True))
    scope = options["scope"]

    class IdempotentRoute(APIRoute):
        def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
            # In upper case, as FastAPI stores them.
            methods = [method.upper() for method in settings.get("methods") or ["GET"]]
            self.is_guarded = rules.exchange.guards_any(methods)
            if self.is_guarded:
                extra = settings.get("openapi_extra") or {}
                parameters = [one for one in extra.get("parameters", []) if one.get("name") != PARAMETER["name"]]
                parameters.append({**PARAMETER, "required": rules.exchange.always_required})
                settings["openapi_extra"] = {**extra, "parameters": parameters}
                settings["responses"] = {**responses(rules.exchange.rules), **(settings.get("responses") or {})}
                endpoint = _claiming(endpoint)
                if isinstance(scope, _ByArgument):
                    scope.check(endpoint)
            super().__init__(path, endpoint, **settings)

        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            if self.is_guarded:
                await rules.exchanged(super().handle, scope, receive, send)
            else:
                await super().handle(scope, receive, send)

    return IdempotentRoute


def by_argument(name: str, of: Callable[[Any], object] | None = None) -> ScopeOf:
    """Identify the caller by an argument from a dependency: `by_argument("user", lambda u: u.id)`."""
    return _ByArgument(name, of)


class _ByArgument:
    """A caller identified by the endpoint's dependencies."""

    needs_endpoint: Final = True

    def __init__(self, name: str, of: Callable[[Any], object] | None) -> None:
        given: object = name
        if not isinstance(given, str) or not name.isidentifier():
            raise UsageError(f"by_argument({name!r:.60}) has to name an argument: write by_argument('user')")
        if of is not None:
            _options.check_function("by_argument's function", of, 1, "by_argument('user', lambda user: user.id)")
        self._name = name
        self._of = of

    def check(self, endpoint: Callable[..., Any]) -> None:
        """Refuse an endpoint without this argument, before its first request."""
        arguments = list(inspect.signature(endpoint).parameters)
        if self._name not in arguments:
            raise UsageError(
                f"by_argument({self._name!r}): {endpoint.__qualname__}() has no such argument"
                f"{_options.nearest(self._name, arguments) if arguments else ', and no other'}"
            )

    def __call__(self, _request: Request) -> str | None:
        visit = _visit.get()
        arguments = {} if visit is None else visit.arguments
        if self._name not in arguments:
            raise UsageError(f"by_argument({self._name!r}): the endpoint has no such argument")
        caller = arguments[self._name] if self._of is None else self._of(arguments[self._name])
        _options.check_not_async("by_argument's function", caller)
        return name_of(
            caller,
            f"by_argument({self._name!r})",
            f"Name the part that identifies it: by_argument({self._name!r}, lambda {self._name}: {self._name}.id)",
        )


def describe(
    app: FastAPI,
    *,
    paths: Iterable[str] | None = None,
    methods: Iterable[str] | None = None,
    required: bool = False,
    rules: str = "below_500",
) -> None:
    """Add the header and our responses to the schema of an application behind the middleware.

    The responses are 400, 409 and 422; under `rules="stripe"` 400 and 409. `methods` are those of the rules, unless you
    name them. It can be called several times: for some
    paths where the header is required, for others where it is optional.
    """
    chosen = None if paths is None else _options.paths("paths", paths)
    by = checked(rules)
    verbs = methods_of(by, methods)
    _options.check_yes_or_no("required", required)
    make = app.openapi

    @functools.wraps(make)
    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        schema = described(make(), chosen, verbs, required=required, rules=by)
        app.openapi_schema = schema
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


class _Rules:
    """A guard and the rules of the header, for routes."""

    def __init__(self, guard: AsyncGuard | AsyncStoreSource, exchange: Exchange) -> None:
        self.guard = as_async_guard(guard)
        self.exchange = exchange
        self.policy = exchange.policy(self.guard)
        self._background = background_requests_of(self.guard)

    async def exchanged(self, route: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request of a route. Its endpoint comes back to the `_Visit` to be claimed."""
        request = request_of(scope)
        try:
            passes = self.exchange.passes(request)
        except Refused as refused:
            await send_answer(send, self.exchange.refused(refused))
            return
        if passes:
            await _visiting(None, route)(scope, receive, send)
            return
        body = body_for(request)
        is_read = False
        try:
            is_read = await read_body(receive, body)
        except Refused as refused:
            await send_answer(send, self.exchange.refused(refused))
        finally:
            if not is_read:
                body.close()
        if not is_read:
            return
        visit = _Visit(self, request, body)
        captured = CapturedResponse(_visiting(visit, route), request, body, receive, send, self.exchange)
        self._drain_at_shutdown(scope.get("app"))
        await self._background.to_its_end(visit.play(captured), captured, body.close)

    def _drain_at_shutdown(self, app: Any) -> None:
        """Make the application wait for requests in progress, before its own shutdown handlers.

        A route sees no lifespan. These handlers run if the application has no lifespan of its own; one that has, or
        whose routers have their own handlers or lifespan, calls `drain`.
        """
        handlers = getattr(getattr(app, "router", None), "on_shutdown", None)
        if isinstance(handlers, list) and self._background.empty not in handlers:
            handlers.insert(0, self._background.empty)


class _Visit:
    """One request on its way through a route: the claim begins at the endpoint, and ends with the response."""

    def __init__(self, rules: _Rules, request: Request, body: Body) -> None:
        self._rules = rules
        self._request = request
        self._body = body
        # The endpoint's arguments, once its dependencies have passed.
        self.arguments: dict[str, Any] = {}
        self._claimed: asyncio.Task[Outcome[Answer]] | None = None
        # The endpoint, in its own task: a cancellation that it leaves pending there is not the claim's.
        self._running: asyncio.Task[None] | None = None
        # Its claim was cancelled from outside, and so is the endpoint.
        self._is_called_off = False
        # The value that the endpoint returned, and the final response of the route.
        self._returned: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    async def play(self, captured: CapturedResponse) -> None:
        """Run the whole route; at the end of its response its claim ends, if its endpoint has made one."""
        try:
            try:
                answer: Answer | NotFinal = await captured.settled()
            except NotFinal as unsettled:
                answer = unsettled
            except asyncio.CancelledError:
                await self._call_off()
                raise
            if self._claimed is None or self._claimed.done():
                # Never claimed, a replay, a refusal, or a claim that was lost on the way.
                await captured.end()
                return
            if isinstance(answer, NotFinal):
                self._answer.set_exception(answer)
            else:
                self._answer.set_result(answer)
            try:
                ended: Ended = await self._claimed
            except (NotFinal, OnefoldError) as error:
                ended = error
            # Not inside our `except`: the endpoint's exception would carry ours in its traceback.
            await captured.conclude(ended)
        finally:
            captured.let_go()

    async def enter(self, endpoint: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Return the endpoint's result, or the response that replaces it."""
        self.arguments = arguments
        exchange = self._rules.exchange
        try:
            guard_request = exchange.guard_request(self._request, self._body)
        except Refused as refused:
            return _response(exchange.refused(refused))
        if guard_request is None:
            return await _called(endpoint, arguments)
        claimed = self._claimed = asyncio.ensure_future(self._claim(guard_request, endpoint, arguments))
        await self._entered(claimed)
        if self._returned.done():
            return self._returned.result()
        try:
            return _response(exchange.replay(claimed.result()))
        except OnefoldError as error:
            return _response(exchange.refused(error))

    async def _entered(self, claimed: asyncio.Task[Outcome[Answer]]) -> None:
        """Wait for the endpoint to return, or for a claim that has ended without it.

        Cancelling the route (a timeout in a dependency, the end of the loop) cancels the endpoint, and continues when
        that has ended: as if it had been called in this task.
        """
        cancelled: asyncio.CancelledError | None = None
        while not (claimed.done() or self._returned.done()):
            try:
                await asyncio.wait({claimed, self._returned}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                cancelled = error
                (self._running or claimed).cancel()
        if cancelled is not None and not self._returned.done():
            raise cancelled

    async def _call_off(self) -> None:
        """End the claim of a route that was cancelled: it will get no response."""
        if self._claimed is not None and not self._claimed.done():
            self._claimed.cancel()
            await asyncio.wait({self._claimed})

    async def _claim(
        self, guard_request: GuardRequest, endpoint: Callable[..., Any], arguments: dict[str, Any]
    ) -> Outcome[Answer]:
        async def perform() -> Answer:
            running = self._running = asyncio.ensure_future(self._run(endpoint, arguments))
            while not running.done():
                try:
                    await asyncio.wait({running})
                except asyncio.CancelledError:
                    # The claim is lost, or the loop ends. The claim may end only when the endpoint has.
                    self._is_called_off = True
                    running.cancel()
            if self._is_called_off:
                raise asyncio.CancelledError
            if not self._returned.done():
                running.result()
            # Not awaited directly: a cancellation of the claim would cancel the response.
            await asyncio.wait({self._answer})
            return self._answer.result()

        return await deliver_async(self._rules.guard, guard_request, perform, self._rules.policy)

    async def _run(self, endpoint: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Run the endpoint and keep its result: a task with a pending cancellation has no result at its end."""
        returned: Any = None
        raised: BaseException | None = None
        try:
            returned = await _called(endpoint, arguments)
        # A cancellation is the endpoint's own, of a scope that it has cancelled: it has run, and must not look as if it
        # had not. FastAPI turns any other error into a response, which decides.
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            raised = error
        if raised is None and not self._is_called_off:
            self._returned.set_result(returned)
        elif raised is not None and not self._is_called_off:
            self._returned.set_exception(raised)
        elif raised is not None:
            # The claim decides what follows, whatever the endpoint raised; the loop logs an error.
            raise raised


# The request of a guarded endpoint, as a context variable: a parameter would be visible to FastAPI.
_visit: ContextVar[_Visit | None] = ContextVar("onefold.http.fastapi", default=None)


def _visiting(visit: _Visit | None, route: App) -> App:
    async def visited(scope: Scope, receive: Receive, send: Send) -> None:
        token = _visit.set(visit)
        try:
            await route(scope, receive, send)
        finally:
            _visit.reset(token)

    return visited


def _claiming(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return the endpoint, routed through its visit. FastAPI sees its original signature."""
    # `include_router` may create every route again, from the endpoint that it finds.
    endpoint = getattr(endpoint, ORIGINAL, endpoint)
    if inspect.isgeneratorfunction(endpoint) or inspect.isasyncgenfunction(endpoint):
        raise UsageError(f"{endpoint.__qualname__} yields its answer: give it a router without idempotent_route")

    @functools.wraps(endpoint)
    async def claiming(**arguments: Any) -> Any:
        visit = _visit.get()
        return await (_called(endpoint, arguments) if visit is None else visit.enter(endpoint, arguments))

    setattr(claiming, ORIGINAL, endpoint)
    return claiming


async def _called(endpoint: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    # The second condition is for callable objects.
    if inspect.iscoroutinefunction(endpoint) or inspect.iscoroutinefunction(type(endpoint).__call__):
        return await endpoint(**arguments)
    return await run_in_threadpool(endpoint, **arguments)


def _response(answer: Answer) -> Response:
    response = Response(answer.body, status_code=answer.status)
    response.raw_headers = [(bytes(name), bytes(value)) for name, value in answer.headers]
    return response
