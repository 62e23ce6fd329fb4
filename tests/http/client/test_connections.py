"""The client gives its connection back, whatever the answer: a thousand requests over a pool of one connection."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
import requests
import urllib3

from onefold.http.client import Adapter, AsyncTransport, Attempt, Retries, Transport
from onefold.http.client import _retrying as retrying
from onefold.http.client._httpx import bodies as with_httpx
from onefold.http.client._requests import bodies as with_requests
from onefold.http.client._requests.adapter import _was_sent

# Each kind of answer six times, streamed or not, and left before its end or not; the thousand is for `make soak`.
FEW = 126
MANY = 1_000
# No pause: the answers are there at once.
AT_ONCE = Retries(attempts=3, pause=0, retry_after_max=0)
PATIENCE = 60.0

# Smaller than it is, so that a long answer is soon sent.
ANSWER_MAX = 1_000


class Raw(NamedTuple):
    """Bytes for the wire, and whether the connection is reset or closed after them."""

    sent: bytes
    cut: bool = False
    close: bool = False


def answer(status: int, body: bytes = b"paid", *headers: str, chunked: bool = False) -> bytes:
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = "\r\n".join([f"HTTP/1.1 {status} Said", *headers, *([] if status == 204 else [length])])
    framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    return head.encode() + b"\r\n\r\n" + (b"" if status == 204 else framed)


PROBLEM = "Content-Type: application/problem+json"
GZIP = "Content-Encoding: gzip"
WRONG = b'{"code": "key_reused"}'
PAID = Raw(answer(200))

# What the server says to a path: the first time, the second time, and so on; the last is said for good.
ANSWERS: dict[str, list[Raw]] = {
    "paid": [PAID],
    "nothing": [Raw(answer(204))],
    "refused": [Raw(answer(400, b"no"))],
    "problem": [Raw(answer(422, WRONG, PROBLEM))],
    "problem-chunked": [Raw(answer(422, WRONG, PROBLEM, chunked=True))],
    "problem-long": [Raw(answer(422, b"a" * 3 * ANSWER_MAX, PROBLEM, chunked=True))],
    "conflict": [Raw(answer(409, b"later", "Retry-After: 0")), PAID],
    "error": [Raw(answer(500)), Raw(answer(503, b"", "Retry-After: 1")), PAID],
    "error-chunked": [Raw(answer(500, chunked=True)), PAID],
    "error-long": [Raw(answer(500, b"a" * 3 * ANSWER_MAX)), PAID],
    "errors": [Raw(answer(500, chunked=True))],
    "chunked": [Raw(answer(200, chunked=True))],
    "long": [Raw(answer(200, b"a" * 3 * ANSWER_MAX))],
    "compressed": [Raw(answer(200, gzip.compress(b"paid"), GZIP))],
    "compressed-chunked": [Raw(answer(200, gzip.compress(b"paid"), GZIP, chunked=True))],
    "moved": [Raw(answer(307, b"", "Location: /paid"))],
    "cut": [Raw(b"", cut=True), PAID],
    "cut-head": [Raw(b"HTTP/1.1 200 OK\r\nContent-", cut=True), PAID],
    "cut-body": [Raw(answer(200, b"a" * 100)[:-50], cut=True), PAID],
    "cut-problem": [Raw(answer(422, WRONG, PROBLEM, chunked=True)[:-20], cut=True), PAID],
    "closed": [Raw(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\npaid", close=True)],
}

FINAL = {"nothing": 204, "refused": 400, "problem": 422, "problem-chunked": 422, "problem-long": 422, "errors": 500}

# After these a connection can be used again.
KIND = ("paid", "nothing", "refused", "problem", "problem-chunked", "conflict", "error", "compressed", "moved")


class Server:
    """Speaks just enough HTTP, and counts its connections."""

    def __init__(self) -> None:
        self.url = ""
        self.connections = 0
        self.times: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._answer(reader, writer):
                    """Until the connection is closed by either side."""
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = head.partition("content-length: ")[2].partition("\r\n")[0]
        await reader.readexactly(int(length or 0))
        raw = self.next(head.split(" ", 2)[1])
        writer.write(raw.sent)
        await writer.drain()
        if raw.cut:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        return not (raw.cut or raw.close)

    def next(self, path: str) -> Raw:
        """The path is a kind of answer, and the number of the request after it."""
        answers = ANSWERS[path.strip("/").partition("/")[0]]
        self.times[path] += 1
        return answers[min(self.times[path], len(answers)) - 1]


@pytest.fixture
def server() -> Iterator[Server]:
    server, ready = Server(), threading.Event()
    stops: list[Callable[[], object]] = []

    async def serving() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(ended.set))
        ready.set()
        await ended.wait()
        listener.close()

    thread = threading.Thread(target=lambda: asyncio.run(serving()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    yield server
    stops[0]()
    thread.join(PATIENCE)


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (retrying, with_httpx, with_requests):
        monkeypatch.setattr(module, "ANSWER_MAX", ANSWER_MAX)


ONE = httpx.Limits(max_connections=1)
WAITS = httpx.Timeout(PATIENCE)


class Sync:
    """httpx, blocking."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Every third answer is streamed, and every other one of these is left before its end.
        self.streams = True

    def all(self, paths: list[str]) -> list[int]:
        transport = Transport(httpx.HTTPTransport(verify=False, limits=ONE), retries=AT_ONCE)
        with httpx.Client(transport=transport, follow_redirects=True, timeout=WAITS) as client:
            return [self._send(client, number, path) for number, path in enumerate(paths)]

    def _send(self, client: httpx.Client, number: int, path: str) -> int:
        if number % 3 or not self.streams:
            return client.post(f"{self.url}{path}", content=b"{}").status_code
        with client.stream("POST", f"{self.url}{path}", content=b"{}") as response:
            if number % 2:
                response.read()
            return response.status_code


class Async(Sync):
    """httpx, async."""

    def all(self, paths: list[str]) -> list[int]:
        return asyncio.run(self._all(paths))

    async def _all(self, paths: list[str]) -> list[int]:
        transport = AsyncTransport(httpx.AsyncHTTPTransport(verify=False, limits=ONE), retries=AT_ONCE)
        async with httpx.AsyncClient(transport=transport, follow_redirects=True, timeout=WAITS) as client:
            return [await self._send_async(client, number, path) for number, path in enumerate(paths)]

    async def _send_async(self, client: httpx.AsyncClient, number: int, path: str) -> int:
        if number % 3 or not self.streams:
            return (await client.post(f"{self.url}{path}", content=b"{}")).status_code
        async with client.stream("POST", f"{self.url}{path}", content=b"{}") as response:
            if number % 2:
                await response.aread()
            return response.status_code


class Requests(Sync):
    """requests, whose pool waits for ever: a connection that is not given back is a thread that does not end."""

    def all(self, paths: list[str]) -> list[int]:
        found: list[int] = []
        thread = threading.Thread(target=self._all, args=(paths, found), daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"stuck at {paths[len(found)]}"
        return found

    def _all(self, paths: list[str], found: list[int]) -> None:
        with requests.Session() as session:
            session.mount("http://", Adapter(retries=AT_ONCE, pool_connections=1, pool_maxsize=1, pool_block=True))
            for number, path in enumerate(paths):
                streams = self.streams and not number % 3
                with session.post(f"{self.url}{path}", data=b"{}", timeout=PATIENCE, stream=streams) as response:
                    # A streamed answer that breaks off is its reader's.
                    with contextlib.suppress(requests.exceptions.ChunkedEncodingError):
                        _ = response.content if number % 2 else b""
                    found.append(response.status_code)


@pytest.fixture(params=[Sync, Async, Requests], ids=["httpx", "httpx-async", "requests"])
def client(request: pytest.FixtureRequest, server: Server) -> Any:
    return request.param(server.url)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.more)])
def test_a_thousand_requests_go_through_a_pool_of_one_connection(client: Any, count: int) -> None:
    kinds = [list(ANSWERS)[number % len(ANSWERS)] for number in range(count)]

    found = client.all([f"/{kind}/{number}" for number, kind in enumerate(kinds)])

    assert found == [FINAL.get(kind, 200) for kind in kinds]


def test_a_connection_that_can_be_used_again_is_used_again(client: Any, server: Server) -> None:
    client.streams = False

    client.all([f"/{kind}" for kind in KIND])

    assert server.connections == 1


def test_a_long_answer_is_handed_out_in_whole(server: Server) -> None:
    transport = Transport(httpx.HTTPTransport(verify=False, limits=ONE), retries=AT_ONCE)
    with httpx.Client(transport=transport, timeout=WAITS) as client, requests.Session() as session:
        session.mount("http://", Adapter(retries=AT_ONCE))
        for path in ("/long/1", "/problem-long/1"):
            url = f"{server.url}{path}"
            assert client.post(url, content=b"{}").content == b"a" * 3 * ANSWER_MAX
            with session.post(url, data=b"{}", timeout=PATIENCE, stream=True) as streamed:
                assert b"".join(streamed.iter_content(100)) == b"a" * 3 * ANSWER_MAX


class Stuck(httpx.AsyncByteStream):
    """A body of which one part comes, and then nothing."""

    def __init__(self) -> None:
        self.reading = asyncio.Event()
        self.is_closed = False

    async def __aiter__(self) -> Any:
        yield b"a part"
        self.reading.set()
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.is_closed = True


class Inner(httpx.AsyncBaseTransport):
    """Answers with this response, each time."""

    def __init__(self, status: int, stream: Stuck, *headers: tuple[str, str]) -> None:
        self.response = httpx.Response(status, stream=stream, headers=[*headers])

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.response


@pytest.mark.parametrize(
    ("status", "header"),
    [(200, ("Content-Length", "100")), (422, ("Content-Type", "application/problem+json"))],
    ids=["short", "problem"],
)
def test_a_call_that_is_cancelled_while_its_answer_is_read_gives_its_connection_back(
    status: int, header: tuple[str, str]
) -> None:
    async def story() -> bool:
        stuck = Stuck()
        async with httpx.AsyncClient(transport=AsyncTransport(Inner(status, stuck, header)), timeout=None) as client:
            task = asyncio.create_task(client.post("http://127.0.0.1/", content=b"{}"))
            await stuck.reading.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return stuck.is_closed

    assert asyncio.run(story())


def test_nobody_keeps_a_connection_while_it_waits_to_ask_again() -> None:
    async def story() -> bool:
        stuck, asleep = Stuck(), Retries(attempts=2, pause=3_600, pause_max=3_600)
        transport = AsyncTransport(Inner(500, stuck, ("Transfer-Encoding", "chunked")), retries=asleep)
        async with httpx.AsyncClient(transport=transport, timeout=None) as client:
            task = asyncio.create_task(client.post("http://127.0.0.1/", content=b"{}"))
            for _ in range(100):
                await asyncio.sleep(0)
            closed = stuck.is_closed
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return closed

    assert asyncio.run(story())


# What was never sent is never unknown.


def note_of(error: Any) -> str:
    return "\n".join(error.__notes__)


def test_a_pool_without_a_free_connection_has_sent_nothing_and_is_not_asked_again(server: Server) -> None:
    transport = Transport(httpx.HTTPTransport(verify=False, limits=ONE), retries=AT_ONCE)
    waits = httpx.Timeout(PATIENCE, pool=0.01)
    with (
        httpx.Client(transport=transport, timeout=waits) as client,
        client.stream("POST", f"{server.url}/chunked/1", content=b"{}"),
        pytest.raises(httpx.PoolTimeout) as raised,
    ):
        client.post(f"{server.url}/paid/1", content=b"{}")

    error: Any = raised.value
    assert error.onefold.attempts == [Attempt(error="PoolTimeout", sent=False)]
    assert "nothing was sent" in note_of(error)
    assert server.times["/paid/1"] == 0


@pytest.mark.parametrize("kind", [httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError])
def test_what_does_not_connect_has_sent_nothing(kind: type[httpx.TransportError]) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise kind("no", request=request)

    transport = Transport(httpx.MockTransport(fail), retries=AT_ONCE)
    with httpx.Client(transport=transport) as client, pytest.raises(kind) as raised:
        client.post("http://127.0.0.1/", content=b"{}")

    error: Any = raised.value
    assert error.onefold.attempts == [Attempt(error=kind.__name__, sent=False)] * 3
    assert "nothing was sent" in note_of(error)
    assert "not known" not in note_of(error)


def test_one_attempt_that_was_sent_is_enough_not_to_know() -> None:
    errors = [httpx.ReadTimeout("no"), httpx.ConnectError("no"), httpx.ConnectError("no")]

    def fail(_: httpx.Request) -> httpx.Response:
        raise errors.pop(0)

    transport = Transport(httpx.MockTransport(fail), retries=AT_ONCE)
    with httpx.Client(transport=transport) as client, pytest.raises(httpx.ConnectError) as raised:
        client.post("http://127.0.0.1/", content=b"{}")

    assert "sent 1 times, and the outcome is not known" in note_of(raised.value)


def test_requests_that_does_not_connect_has_sent_nothing() -> None:
    with requests.Session() as session:
        session.mount("http://", Adapter(retries=AT_ONCE))
        with pytest.raises(requests.ConnectionError) as raised:
            session.post("http://127.0.0.1:1/", data=b"{}", timeout=PATIENCE)

    error: Any = raised.value
    assert [attempt.sent for attempt in error.onefold.attempts] == [False] * 3
    assert "nothing was sent" in note_of(error)


def test_what_requests_wraps_is_looked_at() -> None:
    lost = urllib3.exceptions.ProtocolError("Connection aborted.", ConnectionResetError())
    slow = urllib3.exceptions.ReadTimeoutError(None, "", "no")  # type: ignore[arg-type]
    closed = urllib3.exceptions.ClosedPoolError(None, "no")  # type: ignore[arg-type]

    assert _was_sent(requests.ConnectionError(lost))
    assert _was_sent(requests.ReadTimeout(slow))
    assert _was_sent(requests.ConnectionError())
    assert not _was_sent(requests.ConnectionError(closed))
    assert not _was_sent(requests.exceptions.ProxyError())
    assert not _was_sent(requests.ConnectTimeout())
