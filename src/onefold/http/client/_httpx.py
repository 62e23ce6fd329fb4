"""Transports for httpx that keep one key across all retries of a call."""

from __future__ import annotations

from typing import Any, Final

from onefold import UsageError
from onefold.http.client._answers import BODYLESS
from onefold.http.client._handler_keys import Keyed, Request, following, keyed
from onefold.http.client._intent import current_intent
from onefold.http.client._retrying import (
    HEADER,
    METHODS,
    Call,
    Retries,
    Wanted,
    is_problem,
    is_short,
    plan,
    resumed,
    unwanted,
)

try:
    import httpx
    import tenacity
except ImportError as missing:
    raise UsageError("Transport and AsyncTransport need httpx: pip install 'onefold[client]' httpx") from missing

from onefold.http.client._httpx_bodies import (
    LOST,
    AsyncResumed,
    AsyncWatched,
    Response,
    Resumed,
    Watched,
    problem,
    read,
    read_async,
)

# Where a response keeps what happened: `response.extensions["onefold"]` is a `Sent`.
EXTENSION: Final = "onefold"

# Where a request keeps the call whose key it carries: a redirect copies it to its own request.
CARRIED: Final = "onefold.carried"

# These come before the first byte of a request: the server has seen nothing of it.
NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)

# The limits are the caller's own, and so is the time that it waits for a free connection.
NOT_AGAIN: Final = (httpx.PoolTimeout,)


class Transport(httpx.BaseTransport):
    """Creates a key for each POST and PATCH without one, and repeats the call until its response is final."""

    def __init__(self, transport: httpx.BaseTransport | None = None, *, retries: Retries = Retries()) -> None:  # noqa: B008
        self._transport = httpx.HTTPTransport() if transport is None else transport
        self._plan = plan(retries, LOST, NOT_AGAIN)
        self._retries = retries

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method not in METHODS:
            return self._follow(request)
        # Read in whole, so that it can be sent again.
        asked, around = _asked(request, request.read()), current_intent()
        with keyed(asked) if around is None else around.call_for(asked) as chosen:
            return self._call(_with_key(request, chosen), Call(chosen.key), chosen)

    def _follow(self, request: httpx.Request) -> httpx.Response:
        """Send a request that needs no key. A redirect of one that has a key is settled by the response from there."""
        redirected = _redirected(request)
        with following(redirected):
            response = self._transport.handle_request(request)
        if redirected is None:
            return response
        answer = redirected.heard_there(response.status_code, response.headers, problem(response))
        return Response.of(response, Watched(response.stream, answer), answer)

    def _call(self, request: httpx.Request, call: Call, chosen: Keyed) -> httpx.Response:
        response = self._ask(request, call, self._plan)
        answer = chosen.heard(response.status_code, response.headers, problem(response))
        response.extensions[EXTENSION] = call.sent(response.headers)

        def again(error: httpx.TransportError) -> httpx.Response:
            with chosen.again():
                return self._ask(request, call, resumed(self._plan, self._retries, call), error)

        stream: Any = response.stream
        if not isinstance(stream, httpx.ByteStream):
            stream = Resumed(response, call, again)
        return Response.of(response, Watched(stream, answer), answer)

    def _ask(
        self, request: httpx.Request, call: Call, how: Any, lost: httpx.TransportError | None = None
    ) -> httpx.Response:
        """Send until the response is final. `lost`: how the last one was lost, if there was one."""
        errors = [] if lost is None else [lost]

        def send() -> httpx.Response:
            if errors:
                raise errors.pop()
            return self._send(call, request)

        try:
            response: httpx.Response = tenacity.Retrying(**how, before_sleep=_let_go)(send)
        except Wanted as wanted:
            response = wanted.response
        except LOST as error:
            call.gave_up(error)
            raise
        return response

    def _send(self, call: Call, request: httpx.Request) -> httpx.Response:
        try:
            response = self._transport.handle_request(request)
            if _is_read_at_once(response):
                response = read(response)
        except LOST as error:
            call.failed(error, sent=not isinstance(error, NOT_SENT))
            raise
        call.answered(response, response.status_code, response.headers)
        return response

    def close(self) -> None:
        self._transport.close()


class AsyncTransport(httpx.AsyncBaseTransport):
    """Keeps one key across all retries, for an `httpx.AsyncClient`."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None, *, retries: Retries = Retries()) -> None:  # noqa: B008
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport
        self._plan = plan(retries, LOST, NOT_AGAIN)
        self._retries = retries

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method not in METHODS:
            return await self._follow(request)
        asked, around = _asked(request, await request.aread()), current_intent()
        with keyed(asked) if around is None else await around.call_for_awaited(asked) as chosen:
            return await self._call(_with_key(request, chosen), Call(chosen.key), chosen)

    async def _follow(self, request: httpx.Request) -> httpx.Response:
        """Send a request that needs no key. A redirect of one that has a key is settled by the response from there."""
        redirected = _redirected(request)
        with following(redirected):
            response = await self._transport.handle_async_request(request)
        if redirected is None:
            return response
        answer = redirected.heard_there(response.status_code, response.headers, problem(response))
        return Response.of(response, AsyncWatched(response.stream, answer), answer)

    async def _call(self, request: httpx.Request, call: Call, chosen: Keyed) -> httpx.Response:
        response = await self._ask(request, call, self._plan)
        answer = chosen.heard(response.status_code, response.headers, problem(response))
        response.extensions[EXTENSION] = call.sent(response.headers)

        async def again(error: httpx.TransportError) -> httpx.Response:
            with chosen.again():
                return await self._ask(request, call, resumed(self._plan, self._retries, call), error)

        stream: Any = response.stream
        if not isinstance(stream, httpx.ByteStream):
            stream = AsyncResumed(response, call, again)
        return Response.of(response, AsyncWatched(stream, answer), answer)

    async def _ask(
        self, request: httpx.Request, call: Call, how: Any, lost: httpx.TransportError | None = None
    ) -> httpx.Response:
        errors = [] if lost is None else [lost]

        async def send() -> httpx.Response:
            if errors:
                raise errors.pop()
            return await self._send(call, request)

        try:
            response: httpx.Response = await tenacity.AsyncRetrying(**how, before_sleep=_let_go_async)(send)
        except Wanted as wanted:
            response = wanted.response
        except LOST as error:
            call.gave_up(error)
            raise
        return response

    async def _send(self, call: Call, request: httpx.Request) -> httpx.Response:
        try:
            response = await self._transport.handle_async_request(request)
            if _is_read_at_once(response):
                response = await read_async(response)
        except LOST as error:
            call.failed(error, sent=not isinstance(error, NOT_SENT))
            raise
        call.answered(response, response.status_code, response.headers)
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


def _asked(request: httpx.Request, body: bytes) -> Request:
    headers, given = request.headers, request.headers.get(HEADER)
    carried = request.extensions.get(CARRIED)
    if carried is not None and carried.key != given:
        # Somebody has given it another one since.
        carried = None
    return Request(request.method, str(request.url), body, headers.get("Content-Type", ""), given, carried, headers)


def _with_key(request: httpx.Request, chosen: Keyed) -> httpx.Request:
    """Return a copy with the key: the caller may send its own object again, even concurrently.

    That one gets the key, too, because redirects are copied from it, and because people look at `response.request`; but
    it says that the key is ours.
    """
    extensions = {name: value for name, value in request.extensions.items() if name != CARRIED}
    request.headers[HEADER] = chosen.key
    if chosen.is_ours:
        request.extensions = {**extensions, CARRIED: chosen}
    headers, stream = httpx.Headers(request.headers), request.stream
    sent = httpx.Request(request.method, request.url, headers=headers, stream=stream, extensions=extensions)
    # Transports may look at its content.
    sent.read()
    return sent


def _let_go(state: tenacity.RetryCallState) -> None:
    """Close the response that is requested again: it must not hold its connection while nobody reads from it."""
    response = unwanted(state)
    if response is not None:
        response.close()


async def _let_go_async(state: tenacity.RetryCallState) -> None:
    response = unwanted(state)
    if response is not None:
        await response.aclose()


def _is_read_at_once(response: httpx.Response) -> bool:
    return response.status_code in BODYLESS or is_short(response.headers) or is_problem(response.headers)


def _redirected(request: httpx.Request) -> Keyed | None:
    """Return the call that was redirected to here, if one was."""
    carried: Keyed | None = request.extensions.get(CARRIED)
    return carried if carried is not None and carried.redirect is not None else None
