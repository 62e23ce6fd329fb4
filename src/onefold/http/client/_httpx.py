"""httpx: transports that keep one key over all retries of a call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from onefold import UsageError
from onefold.http.client._handler_keys import HandlerCall, Minted, Request, keyed
from onefold.http.client._intent import current_intent, intent
from onefold.http.client._retrying import (
    ANSWER_MAX,
    HEADER,
    METHODS,
    PROBLEM_MAX,
    Call,
    Retries,
    Wanted,
    is_problem,
    is_short,
    plan,
    unwanted,
)

try:
    import httpx
    import tenacity
except ImportError as missing:
    raise UsageError("Transport and AsyncTransport need httpx: pip install 'onefold[client]' httpx") from missing

# Where a response keeps what happened: `response.extensions["onefold"]` is a `Sent`.
EXTENSION: Final = "onefold"

# What the wire does. A wrong URL, or a request that cannot be written, is not among them.
LOST: Final = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError)

# These come before the first byte of a request: the server has seen nothing of it.
NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)

# The limits are the caller's own, and so is the time for which it waits for a free connection.
NOT_AGAIN: Final = (httpx.PoolTimeout,)


class Transport(httpx.BaseTransport):
    """Mints a key for each POST and PATCH without one, and sends the call again until its answer is final."""

    def __init__(self, transport: httpx.BaseTransport | None = None, *, retries: Retries = Retries()) -> None:  # noqa: B008
        self._transport = httpx.HTTPTransport() if transport is None else transport
        self._plan = plan(retries, LOST, NOT_AGAIN)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method not in METHODS:
            return self._transport.handle_request(request)
        # Read in whole, so that it can be sent again.
        asked, around = _asked(request, request.read()), current_intent()
        if around is not None:
            return self._call(request, Call(around.key_for(asked)), around)
        with keyed(asked) as chosen:
            return self._call(request, Call(chosen.key), chosen)

    def _call(self, request: httpx.Request, call: Call, around: intent | HandlerCall | Minted) -> httpx.Response:
        request.headers[HEADER] = call.key
        try:
            retrying = tenacity.Retrying(**self._plan, before_sleep=_let_go)
            response: httpx.Response = retrying(self._send, call, request)
        except Wanted as wanted:
            response = wanted.response
        except LOST as error:
            call.gave_up(error)
            raise
        return _told(response, call, around)

    def _send(self, call: Call, request: httpx.Request) -> httpx.Response:
        try:
            response = self._transport.handle_request(request)
            if is_short(response.headers) or is_problem(response.headers):
                response = _read(response)
        except LOST as error:
            call.failed(error, sent=not isinstance(error, NOT_SENT))
            raise
        call.answered(response, response.status_code, response.headers)
        return response

    def close(self) -> None:
        self._transport.close()


class AsyncTransport(httpx.AsyncBaseTransport):
    """The same for an `httpx.AsyncClient`."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None, *, retries: Retries = Retries()) -> None:  # noqa: B008
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport
        self._plan = plan(retries, LOST, NOT_AGAIN)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method not in METHODS:
            return await self._transport.handle_async_request(request)
        asked, around = _asked(request, await request.aread()), current_intent()
        if around is not None:
            return await self._call(request, Call(await around.key_for_awaited(asked)), around)
        with keyed(asked) as chosen:
            return await self._call(request, Call(chosen.key), chosen)

    async def _call(self, request: httpx.Request, call: Call, around: intent | HandlerCall | Minted) -> httpx.Response:
        request.headers[HEADER] = call.key
        try:
            retrying = tenacity.AsyncRetrying(**self._plan, before_sleep=_let_go_async)
            response: httpx.Response = await retrying(self._send, call, request)
        except Wanted as wanted:
            response = wanted.response
        except LOST as error:
            call.gave_up(error)
            raise
        return _told(response, call, around)

    async def _send(self, call: Call, request: httpx.Request) -> httpx.Response:
        try:
            response = await self._transport.handle_async_request(request)
            if is_short(response.headers) or is_problem(response.headers):
                response = await _read_async(response)
        except LOST as error:
            call.failed(error, sent=not isinstance(error, NOT_SENT))
            raise
        call.answered(response, response.status_code, response.headers)
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


def _asked(request: httpx.Request, body: bytes) -> Request:
    headers = request.headers
    return Request(request.method, str(request.url), body, headers.get("Content-Type", ""), headers.get(HEADER))


def _let_go(state: tenacity.RetryCallState) -> None:
    """Close the answer that is asked for again: its connection must not be taken while nobody reads from it."""
    response = unwanted(state)
    if response is not None:
        response.close()


async def _let_go_async(state: tenacity.RetryCallState) -> None:
    response = unwanted(state)
    if response is not None:
        await response.aclose()


def _read(response: httpx.Response) -> httpx.Response:
    """Read a short answer in whole, and give its connection back. A longer one is handed on as a stream."""
    assert isinstance(response.stream, httpx.SyncByteStream)
    parts: list[bytes] = []
    stream, size = iter(response.stream), 0
    try:
        for part in stream:
            parts.append(part)
            size += len(part)
            if size > ANSWER_MAX:
                return _with(response, _Rest(parts, stream, response))
        response.close()
    except BaseException:
        # A part that is not read would keep its connection for ever.
        response.close()
        raise
    return _with(response, httpx.ByteStream(b"".join(parts)))


async def _read_async(response: httpx.Response) -> httpx.Response:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    parts: list[bytes] = []
    stream, size = aiter(response.stream), 0
    try:
        async for part in stream:
            parts.append(part)
            size += len(part)
            if size > ANSWER_MAX:
                return _with(response, _AsyncRest(parts, stream, response))
        await response.aclose()
    except BaseException:
        await response.aclose()
        raise
    return _with(response, httpx.ByteStream(b"".join(parts)))


class _Rest(httpx.SyncByteStream):
    """What was read of a long answer, and then the rest of it."""

    def __init__(self, parts: list[bytes], stream: Iterator[bytes], response: httpx.Response) -> None:
        self._parts, self._stream, self._response = parts, stream, response

    def __iter__(self) -> Iterator[bytes]:
        yield from self._parts
        yield from self._stream

    def close(self) -> None:
        self._response.close()


class _AsyncRest(httpx.AsyncByteStream):
    """The same for an async client."""

    def __init__(self, parts: list[bytes], stream: AsyncIterator[bytes], response: httpx.Response) -> None:
        self._parts, self._stream, self._response = parts, stream, response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        await self._response.aclose()


def _with(response: httpx.Response, stream: Any) -> httpx.Response:
    """Return the same response with this stream for its body, as it was sent."""
    return httpx.Response(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)


def _problem(response: httpx.Response) -> bytes | None:
    """Return the decoded body of a problem document; None where it cannot be read. Of others nothing is needed."""
    if not is_problem(response.headers):
        return b""
    if not isinstance(response.stream, httpx.ByteStream):
        return None
    sent = b"".join(response.stream)
    if len(sent) > PROBLEM_MAX:
        return None
    try:
        body = _with(response, response.stream).read()
    except httpx.DecodingError:
        return None
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    # httpx hands out an encoding that it does not know as it came.
    return None if encoding not in ("", "identity") and body == sent else body


def _told(response: httpx.Response, call: Call, around: intent | HandlerCall | Minted) -> httpx.Response:
    around.heard(response.status_code, response.headers, _problem(response))
    response.extensions[EXTENSION] = call.sent(response.headers)
    return response
