"""Read httpx response bodies before they are returned, or request them again if they break off."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, Self

import httpx

from onefold._concurrency.generators import Flow, run, run_async
from onefold.http.client._answers import BODYLESS, Answer, watching
from onefold.http.client._resuming import Another, HandedOut, Rest
from onefold.http.client._retrying import ANSWER_MAX, PROBLEM_MAX, ClientCall, is_problem

# Network errors. A wrong URL, or a request that cannot be written, is not among them.
LOST: Final = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError)


def read(response: httpx.Response) -> httpx.Response:
    """Read a short response in whole, and release its connection. A longer one is passed on as a stream."""
    assert isinstance(response.stream, httpx.SyncByteStream)
    parts: list[bytes] = []
    stream, size = iter(response.stream), 0
    try:
        for part in stream:
            parts.append(part)
            size += len(part)
            if size > ANSWER_MAX:
                return with_stream(response, _Rest(parts, stream, response))
        response.close()
    except BaseException:
        # An unread part would hold its connection forever.
        response.close()
        raise
    return with_stream(response, httpx.ByteStream(b"".join(parts)))


async def read_async(response: httpx.Response) -> httpx.Response:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    parts: list[bytes] = []
    stream, size = aiter(response.stream), 0
    try:
        async for part in stream:
            parts.append(part)
            size += len(part)
            if size > ANSWER_MAX:
                return with_stream(response, _AsyncRest(parts, stream, response))
        await response.aclose()
    except BaseException:
        await response.aclose()
        raise
    return with_stream(response, httpx.ByteStream(b"".join(parts)))


class _Rest(httpx.SyncByteStream):
    """The part of a long response that was read, followed by its rest."""

    def __init__(self, parts: list[bytes], stream: Iterator[bytes], response: httpx.Response) -> None:
        self._parts, self._stream, self._response = parts, stream, response

    def __iter__(self) -> Iterator[bytes]:
        yield from self._parts
        yield from self._stream

    def close(self) -> None:
        self._response.close()


class _AsyncRest(httpx.AsyncByteStream):
    """The async counterpart of `_Rest`."""

    def __init__(self, parts: list[bytes], stream: AsyncIterator[bytes], response: httpx.Response) -> None:
        self._parts, self._stream, self._response = parts, stream, response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        await self._response.aclose()


def with_stream(response: httpx.Response, stream: Any) -> httpx.Response:
    """Return the response with this stream as its body, as it was sent."""
    return httpx.Response(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)


def problem(response: httpx.Response) -> bytes | None:
    """Return the decoded body of a problem document, or None if it cannot be read. Other bodies are not needed."""
    if not is_problem(response.headers):
        return b""
    if not isinstance(response.stream, httpx.ByteStream):
        return None
    sent = b"".join(response.stream)
    if len(sent) > PROBLEM_MAX:
        return None
    try:
        body = with_stream(response, response.stream).read()
    except httpx.DecodingError:
        return None
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    # httpx returns an encoding that it does not know unchanged.
    return None if encoding not in ("", "identity") and body == sent else body


class _Resuming:
    """The part of a response that was returned, and how to continue if it breaks off."""

    def __init__(
        self, response: httpx.Response, call: ClientCall, ask_again: Callable[..., Flow[httpx.Response]]
    ) -> None:
        self._response, self._call, self._ask_again = response, call, ask_again
        self._handed_out = HandedOut(response.status_code, response.headers)
        self._lost: httpx.TransportError | None = None
        self._has_ended = False

    @contextmanager
    def _reading(self) -> Iterator[Rest]:
        """Read the response, or its repetition, to its end, or note how it was lost."""
        self._has_ended = False
        try:
            rest = self._handed_out.rest_of(self._response.status_code, self._response.headers)
            yield rest
            rest.check_end()
            self._has_ended, self._lost = True, None
        except LOST as error:
            self._lost = error
        except Another:
            assert self._lost is not None
            give_up(self._lost, self._call)

    def _again(self) -> Flow[httpx.Response]:
        """Request the response once more; raise the error by which it was lost if a retry is pointless."""
        assert self._lost is not None
        self._call.broke_off(self._lost)
        if not self._handed_out.can_go_on:
            give_up(self._lost, self._call)
        return (yield from self._ask_again(self._lost))


class Resumed(_Resuming, httpx.SyncByteStream):
    """The body of a response that the client reads: if it breaks off, it is requested again."""

    def __iter__(self) -> Iterator[bytes]:
        while True:
            assert isinstance(self._response.stream, httpx.SyncByteStream)
            with self._reading() as rest:
                for part in self._response.stream:
                    if new := rest.of(part):
                        yield self._handed_out.add(new)
            if self._has_ended:
                return
            self._response.close()
            self._response = run(self._again())

    def close(self) -> None:
        self._response.close()


class AsyncResumed(_Resuming, httpx.AsyncByteStream):
    """The async counterpart of `Resumed`."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            assert isinstance(self._response.stream, httpx.AsyncByteStream)
            with self._reading() as rest:
                async for part in self._response.stream:
                    if new := rest.of(part):
                        yield self._handed_out.add(new)
            if self._has_ended:
                return
            await self._response.aclose()
            self._response = await run_async(self._again())

    async def aclose(self) -> None:
        await self._response.aclose()


def give_up(error: httpx.TransportError, call: ClientCall) -> NoReturn:
    call.gave_up(error)
    raise error


class Watched(httpx.SyncByteStream):
    """The body of a response, which records how far it was read."""

    def __init__(self, stream: Any, answer: Answer) -> None:
        self._stream, self._answer, self._is_closed = stream, answer, False

    def __iter__(self) -> Iterator[bytes]:
        with watching(self._answer):
            for part in self._stream:
                with self._answer.handed_out():
                    yield part
            # Closed here, so that nothing can fail any more after the end.
            self._close()

    def close(self) -> None:
        self._answer.closed()
        self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._stream.close()

    def __del__(self) -> None:
        # A dropped response is not read any further.
        self._answer.closed()


class AsyncWatched(httpx.AsyncByteStream):
    """The async counterpart of `Watched`."""

    def __init__(self, stream: Any, answer: Answer) -> None:
        self._stream, self._answer, self._is_closed = stream, answer, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with watching(self._answer):
            async for part in self._stream:
                with self._answer.handed_out():
                    yield part
            await self._aclose()

    async def aclose(self) -> None:
        self._answer.closed()
        await self._aclose()

    async def _aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self._stream.aclose()

    def __del__(self) -> None:
        self._answer.closed()


# The extension of a response that holds its `Answer`, which is not pickled with it.
ANSWER: Final = "onefold.answer"


class Response(httpx.Response):
    """A response that records problems found after its body was received."""

    @classmethod
    def of(cls, response: httpx.Response, stream: Any, answer: Answer) -> Self:
        """Return a response with this stream. If its body is already here, it has ended."""
        if isinstance(response.stream, httpx.ByteStream) or response.status_code in BODYLESS:
            answer.ended()
            stream = response.stream
        extensions = {**response.extensions, ANSWER: answer}
        return cls(response.status_code, headers=response.headers, stream=stream, extensions=extensions)

    @property
    def next_request(self) -> httpx.Request | None:
        return self._next_request

    @next_request.setter
    def next_request(self, request: httpx.Request | None) -> None:
        # A client sets it if it does not follow a redirect.
        self._next_request = request
        if request is not None and ANSWER in self.extensions:
            self.extensions[ANSWER].not_followed()

    def iter_bytes(self, chunk_size: int | None = None) -> Iterator[bytes]:
        with self._decoding():
            yield from super().iter_bytes(chunk_size)

    async def aiter_bytes(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        with self._decoding():
            async for part in super().aiter_bytes(chunk_size):
                yield part

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Watch a body being decoded: decoding may fail after it was received, too."""
        try:
            yield
        except GeneratorExit:
            # Its reader has stopped; the received part counts.
            raise
        except BaseException:
            if ANSWER in self.extensions:
                self.extensions[ANSWER].broke_off()
            raise
