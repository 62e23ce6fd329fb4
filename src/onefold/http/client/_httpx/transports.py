"""Transports for httpx that keep one key across all retries of a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from onefold import UsageError
from onefold._concurrency.generators import Flow, run, run_async
from onefold.http.client._answers import BODYLESS, Answer
from onefold.http.client._handler_keys import Keyed, Request, following, keyed
from onefold.http.client._intent import current_intent
from onefold.http.client._retrying import (
    HEADER,
    METHODS,
    ClientCall,
    Retries,
    Wanted,
    is_problem,
    is_short,
    let_go,
    plan,
    resumed,
    unwanted,
)

try:
    import httpx
    import tenacity
except ImportError as missing:
    raise UsageError("Transport and AsyncTransport need httpx: pip install 'onefold[client]' httpx") from missing

from onefold.http.client._httpx.bodies import (
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

# The extension of a response that holds its history: `response.extensions["onefold"]` is a `Sent`.
EXTENSION: Final = "onefold"

# The extension of a request that holds the call whose key it carries: a redirect copies it to its own request.
CARRIED: Final = "onefold.carried"

# These occur before the first byte of a request: the server has seen nothing of it.
NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)

# The limits are the caller's own, and so is the wait for a free connection.
NOT_AGAIN: Final = (httpx.PoolTimeout,)


class _Sending:
    """Sends a request until its response is final. The two transports make it sync or async."""

    def __init__(self, retries: Retries) -> None:
        self._plan = plan(retries, LOST, NOT_AGAIN)
        self._retries = retries

    def _follow(self, request: httpx.Request) -> Flow[httpx.Response]:
        """Send a request that needs no key. A redirect of one that has a key is settled by the response from there."""
        redirected = _redirected(request)
        with following(redirected):
            response: httpx.Response = yield partial(self._handle, request)
        if redirected is None:
            return response
        answer = redirected.heard_there(response.status_code, response.headers, problem(response))
        return Response.of(response, self._watched(response.stream, answer), answer)

    def _call(self, request: httpx.Request, call: ClientCall, chosen: Keyed) -> Flow[httpx.Response]:
        response = yield from self._ask(request, call, self._plan)
        answer = chosen.heard(response.status_code, response.headers, problem(response))
        response.extensions[EXTENSION] = call.sent(response.headers)
        stream: Any = response.stream
        if not isinstance(stream, httpx.ByteStream):
            stream = self._resumed(response, call, partial(self._ask_again, request, call, chosen))
        return Response.of(response, self._watched(stream, answer), answer)

    def _ask_again(
        self, request: httpx.Request, call: ClientCall, chosen: Keyed, lost: httpx.TransportError
    ) -> Flow[httpx.Response]:
        with chosen.again():
            return (yield from self._ask(request, call, resumed(self._plan, self._retries, call), lost))

    def _ask(
        self, request: httpx.Request, call: ClientCall, how: Any, lost: httpx.TransportError | None = None
    ) -> Flow[httpx.Response]:
        """Send until the response is final. `lost` is the error of the last response that was lost, if any."""
        errors = [] if lost is None else [lost]
        try:
            response: httpx.Response = yield partial(self._retrying(how), self._attempt, call, request, errors)
        except Wanted as wanted:
            response = wanted.response
        except LOST as error:
            call.gave_up(error)
            raise
        return response

    def _send(
        self, call: ClientCall, request: httpx.Request, errors: list[httpx.TransportError]
    ) -> Flow[httpx.Response]:
        """Make one attempt. A response that broke off before counts as the first."""
        if errors:
            raise errors.pop()
        try:
            response: httpx.Response = yield partial(self._handle, request)
            if _is_read_at_once(response):
                response = yield partial(self._read, response)
        except LOST as error:
            call.failed(error, sent=not isinstance(error, NOT_SENT))
            raise
        call.answered(response, response.status_code, response.headers)
        return response

    # The same names, sync and async.
    _handle: Callable[[httpx.Request], Any]
    _attempt: Callable[..., Any]
    _read: Callable[[httpx.Response], Any]
    _retrying: Callable[[Any], Any]
    _resumed: Callable[[httpx.Response, ClientCall, Any], Any]
    _watched: Callable[[Any, Answer], Any]


class Transport(_Sending, httpx.BaseTransport):
    """Mint a key for each POST and PATCH without one, and retry the call until its response is final."""

    _read = staticmethod(read)
    _resumed = Resumed
    _watched = Watched

    def __init__(self, transport: httpx.BaseTransport | None = None, *, retries: Retries = Retries()) -> None:  # noqa: B008
        super().__init__(retries)
        self._transport = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method not in METHODS:
            return run(self._follow(request))
        # Read in whole, so that it can be sent again.
        asked, around = _asked(request, request.read()), current_intent()
        with keyed(asked) if around is None else around.call_for(asked) as chosen:
            return run(self._call(_with_key(request, chosen), ClientCall(chosen.key), chosen))

    def close(self) -> None:
        self._transport.close()

    def _handle(self, request: httpx.Request) -> httpx.Response:
        return self._transport.handle_request(request)

    def _attempt(self, call: ClientCall, request: httpx.Request, errors: list[httpx.TransportError]) -> httpx.Response:
        return run(self._send(call, request, errors))

    def _retrying(self, how: Any) -> tenacity.Retrying:
        return tenacity.Retrying(**how, before_sleep=let_go)


class AsyncTransport(_Sending, httpx.AsyncBaseTransport):
    """The `Transport` for an `httpx.AsyncClient`."""

    _read = staticmethod(read_async)
    _resumed = AsyncResumed
    _watched = AsyncWatched

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None, *, retries: Retries = Retries()) -> None:  # noqa: B008
        super().__init__(retries)
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method not in METHODS:
            return await run_async(self._follow(request))
        asked, around = _asked(request, await request.aread()), current_intent()
        with keyed(asked) if around is None else await around.call_for_async(asked) as chosen:
            return await run_async(self._call(_with_key(request, chosen), ClientCall(chosen.key), chosen))

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        return await self._transport.handle_async_request(request)

    async def _attempt(
        self, call: ClientCall, request: httpx.Request, errors: list[httpx.TransportError]
    ) -> httpx.Response:
        return await run_async(self._send(call, request, errors))

    def _retrying(self, how: Any) -> tenacity.AsyncRetrying:
        return tenacity.AsyncRetrying(**how, before_sleep=_let_go_async)


def _asked(request: httpx.Request, body: bytes) -> Request:
    headers, given = request.headers, request.headers.get(HEADER)
    carried = request.extensions.get(CARRIED)
    if carried is not None and carried.key != given:
        # Somebody has given it another one since.
        carried = None
    return Request(request.method, str(request.url), body, headers.get("Content-Type", ""), given, carried, headers)


def _with_key(request: httpx.Request, chosen: Keyed) -> httpx.Request:
    """Return a copy with the key: the caller may send its own object again, even concurrently.

    The caller's object gets the key, too, because redirects are copied from it, and because people look at
    `response.request`; but it is marked as carrying our key.
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
