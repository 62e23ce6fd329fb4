"""httpx: transports that keep one key over all retries of a call."""

from __future__ import annotations

from typing import Final

from onefold import UsageError
from onefold.http.client._intent import current_intent
from onefold.http.client._retrying import HEADER, METHODS, Call, Retries, Wanted, is_short, mint, plan

try:
    import httpx
    import tenacity
except ImportError as missing:
    raise UsageError("Transport and AsyncTransport need httpx: pip install 'onefold[client]' httpx") from missing

# Where a response keeps what happened: `response.extensions["onefold"]` is a `Sent`.
EXTENSION: Final = "onefold"

# What the wire does. A wrong URL, or a request that cannot be written, is not among them.
LOST: Final = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError)


class Transport(httpx.BaseTransport):
    """Mints a key for each POST and PATCH without one, and sends the call again until its answer is final."""

    def __init__(self, transport: httpx.BaseTransport | None = None, *, retries: Retries = Retries()) -> None:  # noqa: B008
        self._transport = httpx.HTTPTransport() if transport is None else transport
        self._plan = plan(retries, LOST)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method not in METHODS:
            return self._transport.handle_request(request)
        # Read in whole, so that it can be sent again.
        body, around = request.read(), current_intent()
        if around is not None:
            key = around.key_for(request.method, str(request.url), body, given=request.headers.get(HEADER))
        else:
            key = request.headers.get(HEADER) or mint()
        request.headers[HEADER] = key
        call = Call(key)
        try:
            response: httpx.Response = tenacity.Retrying(**self._plan)(self._send, call, request)
        except Wanted as wanted:
            response = wanted.response
        except LOST as error:
            call.gave_up(error)
            raise
        if around is not None:
            around.heard(response.status_code, response.headers, _problem(response))
        return _told(response, call)

    def _send(self, call: Call, request: httpx.Request) -> httpx.Response:
        if call.unwanted is not None:
            call.unwanted.close()
        try:
            response = self._transport.handle_request(request)
            if is_short(response.headers):
                assert isinstance(response.stream, httpx.SyncByteStream)
                response = _whole(response, b"".join(response.stream))
        except LOST as error:
            call.failed(error)
            raise
        call.answered(response, response.status_code, response.headers)
        return response

    def close(self) -> None:
        self._transport.close()


class AsyncTransport(httpx.AsyncBaseTransport):
    """The same for an `httpx.AsyncClient`."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None, *, retries: Retries = Retries()) -> None:  # noqa: B008
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport
        self._plan = plan(retries, LOST)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method not in METHODS:
            return await self._transport.handle_async_request(request)
        body, around = await request.aread(), current_intent()
        if around is not None:
            given = request.headers.get(HEADER)
            key = await around.key_for_awaited(request.method, str(request.url), body, given=given)
        else:
            key = request.headers.get(HEADER) or mint()
        request.headers[HEADER] = key
        call = Call(key)
        try:
            response: httpx.Response = await tenacity.AsyncRetrying(**self._plan)(self._send, call, request)
        except Wanted as wanted:
            response = wanted.response
        except LOST as error:
            call.gave_up(error)
            raise
        if around is not None:
            around.heard(response.status_code, response.headers, _problem(response))
        return _told(response, call)

    async def _send(self, call: Call, request: httpx.Request) -> httpx.Response:
        if call.unwanted is not None:
            await call.unwanted.aclose()
        try:
            response = await self._transport.handle_async_request(request)
            if is_short(response.headers):
                assert isinstance(response.stream, httpx.AsyncByteStream)
                response = _whole(response, b"".join([part async for part in response.stream]))
        except LOST as error:
            call.failed(error)
            raise
        call.answered(response, response.status_code, response.headers)
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


def _whole(response: httpx.Response, body: bytes) -> httpx.Response:
    """The same response, whose body is there, as it was sent."""
    return httpx.Response(
        response.status_code, headers=response.headers, stream=httpx.ByteStream(body), extensions=response.extensions
    )


def _problem(response: httpx.Response) -> bytes:
    """A body that says what a refusal means, if it is there already."""
    return b"".join(response.stream) if isinstance(response.stream, httpx.ByteStream) else b""


def _told(response: httpx.Response, call: Call) -> httpx.Response:
    response.extensions[EXTENSION] = call.sent(response.headers)
    return response
