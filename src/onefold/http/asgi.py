"""ASGI: the Idempotency-Key header for FastAPI, Starlette, Litestar and Django's ASGI.

    app.add_middleware(IdempotencyMiddleware, guard=AsyncGuard(url), scope=by_header("X-Api-Key"))

A response is passed on live, and remembered at its end: its last part is sent once it is remembered. A handler that has
started is finished and remembered even if its client disconnects. The store is checked when the application starts.
Websockets are not touched.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Unpack

from onefold import AsyncGuard, Guard, OnefoldError, UsageError
from onefold.http._answers.rules import NotFinal
from onefold.http._asgi.background_requests import background_requests_of, drain
from onefold.http._asgi.captured_response import (
    App,
    CapturedResponse,
    Message,
    Receive,
    Scope,
    Send,
    reading_again,
    send_answer,
)
from onefold.http._exchange.deliveries import check_first, deliver_async
from onefold.http._exchange.rules import Ended, Exchange, GuardRequest, Options, known
from onefold.http._requests.fingerprints import body_for
from onefold.http._requests.keys import body_field, header_key
from onefold.http._requests.paths import path_of
from onefold.http._shared.messages import Body, Refused, Request
from onefold.http.scopes import by_header, name_of, single_tenant
from onefold.stores.sources import AsyncStoreSource

__all__ = ["IdempotencyMiddleware", "body_field", "by_header", "by_user", "drain", "header_key", "single_tenant"]


class IdempotencyMiddleware:
    """Guard requests that carry an Idempotency-Key. `docs/http.md` explains each argument.

    `guard` is an `AsyncGuard`, or anything that one takes: then it is opened here, closed at the end of the lifespan,
    and reopened for a request after that.
    """

    def __init__(self, app: App, *, guard: AsyncGuard | AsyncStoreSource, **options: Unpack[Options]) -> None:
        self.app = app
        self.exchange = Exchange(**known("IdempotencyMiddleware", options))
        self._given = guard
        self._ours = not isinstance(guard, AsyncGuard)
        self._open()

    def _open(self) -> None:
        self.guard = as_async_guard(self._given)
        self._policy = self.exchange.policy(self.guard)
        self._background = background_requests_of(self.guard)
        self._is_closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, self._draining(receive), self._closing_guard(self._checking(send)))
        elif scope["type"] == "http":
            await self._exchanged(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _exchanged(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = request_of(scope)
        try:
            passes = self.exchange.passes(request)
        except Refused as refused:
            await send_answer(send, self.exchange.refused(refused))
            return
        if passes:
            await self.app(scope, receive, send)
            return
        if self._is_closed:
            # An application may have several lifespans, one after another, and requests outside them, as in tests.
            self._open()
        body = body_for(request)
        captured: CapturedResponse | None = None
        try:
            try:
                if not await read_body(receive, body):
                    return
                guard_request = self.exchange.guard_request(request, body)
            except Refused as refused:
                await send_answer(send, self.exchange.refused(refused))
                return
            if guard_request is None:
                await self.app(scope, reading_again(body, receive), send)
                return
            captured = CapturedResponse(self.app, request, body, receive, send, self.exchange)
        finally:
            if captured is None:
                body.close()
        await self._background.to_its_end(self._guarded(guard_request, captured), captured, body.close)

    async def _guarded(self, guard_request: GuardRequest, captured: CapturedResponse) -> None:
        try:
            try:
                ended: Ended = await deliver_async(self.guard, guard_request, captured.settled, self._policy)
            except (NotFinal, OnefoldError) as error:
                ended = error
            # Not inside our `except`: the application's exception would carry ours in its traceback.
            await captured.conclude(ended)
        finally:
            captured.let_go()

    def _checking(self, send: Send) -> Send:
        """Check the store once the application has started, which may be what creates it."""

        async def checking_first(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                try:
                    await check_first(self.guard, self._policy)
                except UsageError as problem:
                    message = {"type": "lifespan.startup.failed", "message": f"onefold: {problem}"}
            await send(message)

        return checking_first

    def _draining(self, receive: Receive) -> Receive:
        async def draining_first() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                # Before the application is notified: it may close resources that its handlers use, and this guard,
                # whose heartbeat keeps their claims.
                await self._background.empty()
            return message

        return draining_first

    def _closing_guard(self, send: Send) -> Send:
        async def closing_first(message: Message) -> None:
            if self._ours and message["type"].startswith("lifespan.shutdown."):
                self._is_closed = True
                await self.guard.aclose()
            await send(message)

        return closing_first


def as_async_guard(guard: AsyncGuard | AsyncStoreSource) -> AsyncGuard:
    """Return the guard, or create one from anything that a guard takes."""
    if isinstance(guard, Guard):
        raise UsageError("an ASGI application needs an AsyncGuard, but this is a Guard: it would block every request")
    return guard if isinstance(guard, AsyncGuard) else AsyncGuard(guard)


def request_of(scope: Scope) -> Request:
    path, compared, below = path_of(scope)
    query = scope.get("query_string") or b""
    headers = scope["headers"]
    return Request(scope["method"], path, query, headers, scope, compared_path=compared, path_below_mounts=below)


async def read_body(receive: Receive, body: Body) -> bool:
    """Read the whole body. Return False if the client disconnected before its end: then nothing may run."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return False
        body.add(message.get("body", b""))
        if not message.get("more_body", False):
            return True


def by_user(request: Request) -> str | None:
    """Identify the caller by the authenticated user that an authentication layer above left in the scope."""
    user = request.native.get("user")
    if user is None:
        raise UsageError(
            "by_user: no authentication has run before. Put the middleware for it above this one; a dependency of "
            "FastAPI's runs later: for that use idempotent_route and by_argument"
        )
    if not getattr(user, "is_authenticated", False):
        raise Refused("caller_unknown", "A request with a key needs a caller: authenticate first.")
    for name in ("identity", "pk", "username"):
        # Starlette's users have an identity that raises until somebody defines it.
        with suppress(NotImplementedError):
            if (identity := getattr(user, name, None)) not in (None, ""):
                return name_of(identity, f"by_user: the {name} of {type(user).__name__}", "Pass a function as scope=")
    raise UsageError(f"by_user: {type(user).__name__} has neither identity, pk nor username. Pass a function as scope=")
