"""Django: the Idempotency-Key header as a middleware, for single views, and for views of Django REST framework.

    idempotency = middleware(guard=guard, scope=by_user)      # in shop/http.py
    MIDDLEWARE = [..., "django.contrib.auth.middleware.AuthenticationMiddleware", "shop.http.idempotency"]

Sync, as most of Django is. A streaming response is read to its end (or to the limit of what is remembered) before it is
sent; for one that is passed on live, put `onefold.http.wsgi` around the application.
"""

from __future__ import annotations

import functools
import uuid
from asyncio import CancelledError
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from typing import Any, TypeVar, Unpack

from onefold import Guard, UsageError
from onefold.http._answers.capture import Capture
from onefold.http._answers.rules import SERVER_ERROR, NotFinal, failed_with, is_own
from onefold.http._exchange.rules import GuardRequest, Options, known
from onefold.http._exchange.views import Views, captured, captured_async
from onefold.http._requests.keys import body_field, header_key
from onefold.http._requests.paths import Path, path_of
from onefold.http._shared.messages import CHUNK, Answer, Body, Refused, Request
from onefold.http.scopes import by_header, name_of, single_tenant

try:
    from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
    from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
    from django.core.handlers.asgi import ASGIRequest
    from django.core.handlers.exception import response_for_exception
    from django.db import connections
    from django.http import Http404, HttpResponse
    from django.http.multipartparser import MultiPartParserError
    from django.http.response import HttpResponseBase

    from onefold.http._django.asgi import to_its_end
    from onefold.http._django.views import AsyncView, check_mixed, check_view, finalized, responding
except ImportError as missing:
    raise UsageError("onefold.http.django needs Django: pip install 'onefold[http]' django") from missing

__all__ = [
    "Idempotency",
    "IdempotentMixin",
    "body_field",
    "by_header",
    "by_user",
    "header_key",
    "idempotent",
    "middleware",
    "single_tenant",
]

View = TypeVar("View", bound=Callable[..., Any])

# Exceptions that a view raises as a response: Django turns them into 404, 403 or 400, once it has rolled back.
ANSWERS = (Http404, PermissionDenied, SuspiciousOperation, BadRequest, MultiPartParserError)


def middleware(*, guard: Guard, **options: Unpack[Options]) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Create a middleware for Django's settings: bind it to a name in your module, and list it in `MIDDLEWARE`."""
    rules = Idempotency(guard=guard, **known("middleware", options))

    def installed(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if iscoroutinefunction(get_response):
            return _on_asgi(rules, get_response)
        return functools.partial(_on_either, rules, get_response)

    # On ASGI Django awaits it, unless the layer below it blocks.
    installed.sync_capable = installed.async_capable = True  # type: ignore[attr-defined]
    return installed


def _on_asgi(rules: Idempotency, get_response: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    async def handle(request: Any) -> Any:
        # The functions that decide this may query a database, and block.
        if not rules.exchange.guards_any([request.method]) or await sync_to_async(rules.passes)(request):
            return await get_response(request)
        return await to_its_end(_responding(rules, async_to_sync(get_response), request), request)

    return handle


def _on_either(rules: Idempotency, get_response: Callable[[Any], Any], request: Any) -> Any:
    if isinstance(request, ASGIRequest) and not rules.passes(request):
        # The layer below blocks, on ASGI: a cancellation would bypass us and reach it.
        return async_to_sync(to_its_end)(_responding(rules, get_response, request), request)
    return rules.exchanged(request, lambda: get_response(request))


def _responding(
    rules: Idempotency, get_response: Callable[[Any], Any], request: Any
) -> Callable[[Callable[[], bool]], Any]:
    def respond(is_called_off: Callable[[], bool]) -> Any:
        return rules.exchanged(request, lambda: get_response(request), is_called_off=is_called_off)

    return respond


def idempotent(*, guard: Guard, **options: Unpack[Options]) -> Callable[[View], View]:
    """Decorate a view: `@idempotent(guard=guard, scope=by_user)`, below the decorators that authenticate."""
    rules = Idempotency(guard=guard, **known("idempotent", options))

    def decorate(view: View) -> View:
        check_view(view)

        @functools.wraps(view)
        def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
            return rules.exchanged(request, responding(view, request, args, kwargs), inside=True)

        return guarded  # type: ignore[return-value]

    return decorate


class Idempotency(Views):
    """A guard and the rules of the header, for an `IdempotentMixin`."""

    def passes(self, request: Any) -> bool:
        """Return whether the request passes through untouched."""
        try:
            return self.exchange.passes(request_of(request))
        except Refused:
            return False

    def exchanged(
        self,
        request: Any,
        respond: Callable[[], Any],
        *,
        inside: bool = False,
        is_called_off: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Return the response to this request: the one that `respond` makes, a replay, or a refusal.

        `inside` is for views: a transaction around one would be committed after its response is remembered. A view that
        was cancelled has not failed by itself: it counts as crashed, under every rule.
        """
        asking = request_of(request)
        try:
            guard_request = None if self.exchange.passes(asking) else self._guard_request(request, asking)
        except Refused as refused:
            return _response(self.exchange.refused(refused))
        if guard_request is None:
            return respond()
        if inside:
            _check_outside_of_transactions()
        responses: list[Any] = []
        play = functools.partial(self._played, request, respond, responses, is_called_off)
        instead = self.deliver(
            guard_request, asking, play, lambda: not inside and getattr(request, "resolver_match", None) is None
        )
        if instead is not None:
            return _response(instead)
        response = responses[0]
        if isinstance(response, Exception):
            raise response
        return response

    def _guard_request(self, request: Any, asking: Request) -> GuardRequest | None:
        body = _body_of(request)
        try:
            return self.exchange.guard_request(asking, body)
        finally:
            # A function that has read it has left it at its end; the view reads it from its beginning.
            body.rewind()

    def _played(
        self, request: Any, respond: Callable[[], Any], responses: list[Any], is_called_off: Callable[[], bool]
    ) -> Answer:
        try:
            try:
                response = respond()
            except ANSWERS as error:
                # Remembered as the response that Django makes of it, but still raised: outer layers have to see it.
                responses.append(error)
                return self._captured(request, response_for_exception(request, error))
            except AsyncView as error:
                # It has not run: nothing is remembered or held, whatever the rules are.
                responses.append(error)
                raise NotFinal from None
            except Exception as error:
                if not self.exchange.answers_errors:
                    raise
                # As Django would do later: it logs the error, and tells its subscribers.
                response = response_for_exception(request, error)
            responses.append(response)
            if not isinstance(response, HttpResponseBase):
                # Django itself reports the problem.
                raise failed_with(TypeError())
            if response.status_code >= SERVER_ERROR and is_called_off():
                # Django's response for a view that failed to clean up.
                raise CancelledError
            if hasattr(response, "render") and not response.is_rendered:
                responses[0] = response = response.render()
            return self._captured(request, response)
        except NotFinal:
            raise
        except BaseException as error:
            if is_called_off():
                # Whatever the view made of the cancellation.
                raise CancelledError from error
            if not is_own(error):
                raise
            raise failed_with(error) from error

    def _captured(self, request: Any, response: Any) -> Answer:
        capture = Capture(self.exchange.body_max, request.method.upper())
        capture.begin(response.status_code, response.items())
        if not response.streaming:
            capture.add(bytes(response.content))
        elif capture.is_event_stream and not self.exchange.event_streams:
            # It may never end: by default, we keep no claim for it.
            raise NotFinal
        else:
            capture.add_whole(_read(response, self.exchange.body_max))
        return capture.answer()


class IdempotentMixin:
    """For a view of Django REST framework: after authentication, permissions and throttles. List it first.

    class Payments(IdempotentMixin, APIView):
        idempotency = Idempotency(guard=guard, scope=by_user)
    """

    idempotency: Idempotency

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_mixed(IdempotentMixin, cls)

    def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)  # type: ignore[misc]
        name = request.method.lower()
        handler = getattr(self, name, None)
        if handler is not None:
            check_view(handler)
            # The framework looks up its handler after this, and finds the guarded one.
            setattr(self, name, functools.partial(self._guarded, handler))

    def _guarded(self, handler: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        respond = functools.partial(finalized, self, handler, request, args, kwargs)
        return self.idempotency.exchanged(request, respond, inside=True)


def request_of(request: Any) -> Request:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers.items()]
    query = request.META.get("QUERY_STRING", "").encode()
    path = path_of(request.scope) if hasattr(request, "scope") else Path(request.path, request.path)
    host = functools.partial(_host_of, request)
    return Request(
        request.method,
        path.whole,
        query,
        headers,
        request,
        host=host,
        compared_path=path.compared,
        path_below_mounts=path.below,
    )


def _host_of(request: Any) -> str:
    """Return the host as Django sees it behind its proxy; if it is not in ALLOWED_HOSTS, as it was sent."""
    try:
        return str(request.get_host())
    except SuspiciousOperation:
        return str(request.headers.get("Host", ""))


def _body_of(request: Any) -> Body:
    """Read the body, of any size that Django would accept, and restore it as if it had not been read."""
    request = getattr(request, "_request", request)
    if hasattr(request, "_body"):
        return Body(bytes(request._body))
    if request._read_started:
        raise UsageError(
            "the body was read before its view, so it can no longer be compared. Use the middleware, or "
            "csrf_exempt and no request.data in permissions"
        )
    body = _spooled(request)
    request._stream, request._read_started = body.file, False
    closes = request.close

    def close() -> None:
        closes()
        body.close()

    # Django calls it at the end of the response.
    request.close = close
    return body


def _spooled(request: Any) -> Body:
    declared, is_asgi = request.META.get("CONTENT_LENGTH") or None, isinstance(request, ASGIRequest)
    if declared is None and not is_asgi and request.META.get("HTTP_TRANSFER_ENCODING"):
        # Django reads none of it. Two different bodies of this kind would look the same.
        raise Refused("body_incomplete", "This server cannot read a body without Content-Length.")
    with ExitStack() as fails:
        body = fails.enter_context(closing(Body()))
        while chunk := request.read(CHUNK):
            body.add(chunk)
        if declared is not None and declared.isdecimal() and body.size < int(declared):
            raise Refused("body_incomplete", "A part of the body is missing. Nothing was processed.")
        fails.pop_all()
    return body


def _check_outside_of_transactions() -> None:
    for connection in connections.all(initialized_only=True):
        blocks = getattr(connection, "atomic_blocks", [])
        if any(not block._from_testcase for block in blocks):
            raise UsageError(
                f"this view runs in a transaction on {connection.alias!r} (ATOMIC_REQUESTS, or transaction.atomic "
                "above @idempotent), and its answer would be remembered before the commit. Use the middleware of "
                "onefold.http.django, or @transaction.non_atomic_requests with atomic() inside the view"
            )


def _read(response: Any, limit: int) -> bytes | None:
    """Read a streaming body, which can still be sent. Return None if it is longer than the limit."""
    if not response.is_async:
        found = captured(iter(response.streaming_content), limit)
        response.streaming_content = found.parts
        return found.whole
    parts = aiter(response.streaming_content)
    head, whole = async_to_sync(captured_async)(parts, limit)
    response.streaming_content = _chained(head, parts)
    return whole


async def _chained(head: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with _closing(rest):
        for part in head:
            yield part
        async for part in rest:
            yield part


@asynccontextmanager
async def _closing(parts: Any) -> AsyncIterator[None]:
    """Close an unfinished stream now, not when it is garbage-collected."""
    try:
        yield
    finally:
        if hasattr(parts, "aclose"):
            await parts.aclose()


def _response(answer: Answer) -> Any:
    response = HttpResponse(answer.body, status=answer.status)
    del response["Content-Type"]
    for name, value in answer.headers:
        response.headers[name.decode("latin-1")] = value.decode("latin-1")
    return response


def by_user(request: Request) -> str | None:
    """Identify the caller by the authenticated user. The authentication middleware has to be above this one."""
    user = getattr(request.native, "user", None)
    if user is None:
        raise UsageError("by_user: no authentication has run before. Put its middleware above this one")
    if not user.is_authenticated:
        raise Refused("caller_unknown", "A request with a key needs a caller: authenticate first.")
    return name_of(_identity_of(user), f"by_user: the pk of {type(user).__name__}", "Pass a function as scope=")


def _identity_of(user: Any) -> Any:
    """Return the primary key; if only its field knows the type, as the string that Django's sessions store."""
    field = getattr(getattr(user, "_meta", None), "pk", None)
    if isinstance(user.pk, (str, int, uuid.UUID, tuple, type(None))) or field is None:
        return user.pk
    return field.value_to_string(user)
