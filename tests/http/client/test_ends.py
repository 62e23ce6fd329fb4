"""When a request of a client is settled: after its answer was read to its end, and its redirect was followed.

Until then an equal request of the same handler, the same object, and the same intent send the same key again.
"""

from __future__ import annotations

import asyncio
import contextvars
import pickle
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
import requests

from onefold import AsyncGuard, Guard
from onefold.http._shared.intents import OPERATION
from onefold.http.client import Adapter, AsyncTransport, Retries, Transport, intent
from tests.http_service.scripted import CUT, Say, Scripted, scripted

ONCE = Retries(attempts=1)
PATIENCE = 120.0
REDIRECTS_MAX = 2
URL = "https://bank.example/charges"


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


def to(path: str) -> list[tuple[str, str]]:
    return [("Location", path)]


GZIP = [("Content-Encoding", "gzip")]
PAID = Say(201)

# What a server says to a request that ends in an error of the client's, although its status is a final one.
ERRORS: dict[str, list[Say]] = {
    "not decodable": [Say(201, GZIP, b"no gzip!")],
    "not decodable, in chunks": [Say(201, GZIP, b"no gzip!", chunked=True)],
    "303, and a GET that is lost": [Say(303, to("/receipt")), CUT],
    "301, and a GET that is lost": [Say(301, to("/receipt")), CUT],
    "303, and a GET that is cut": [Say(303, to("/receipt")), Say(200, cut="body")],
    "303, and a GET that is not decodable": [Say(303, to("/receipt")), Say(200, GZIP, b"no gzip!")],
    "302, and another one, and a GET that is lost": [Say(302, to("/a")), Say(302, to("/b")), CUT],
    "a redirect to nowhere": [Say(302, to("http://[::1"))],
    "a redirect to another protocol": [Say(302, to("gopher://127.0.0.1/receipt"))],
    "a redirect in a circle": [Say(303, to("/a"))] * (REDIRECTS_MAX + 1),
    "307, then 303, and a GET that is lost": [Say(307, to("/v2")), Say(303, to("/receipt")), CUT],
}

# What a server says to a request that ends well.
WELL: dict[str, list[Say]] = {
    "201": [PAID],
    "in chunks": [Say(201, chunked=True)],
    "204": [Say(204)],
    "303, and a GET": [Say(303, to("/receipt")), Say(200)],
    "302 twice, and a GET": [Say(302, to("/a")), Say(302, to("/b")), Say(200, chunked=True)],
    "303, and a GET that finds nothing": [Say(303, to("/receipt")), Say(404)],
}


def everywhere(stories: Iterable[str], *samples: str) -> pytest.MarkDecorator:
    """Every story in a handler; every day only these also with the same object, and in an intent."""
    found = []
    for story in stories:
        for around in ("handler", "same object", "intent"):
            marks = [] if around == "handler" or story in samples else [pytest.mark.more]
            found.append(pytest.param(around, story, marks=marks, id=f"{around}: {story}"))
    return pytest.mark.parametrize(("around", "story"), found)


class Sync:
    """httpx, blocking."""

    errors: Any = httpx.HTTPError

    def __init__(self) -> None:
        self.guard: Any = Guard("memory:")

    def run(self, around: str, url: str, *wanted: bool) -> None:
        """Send an equal request, or the same object, once for each of these. False: it ends in an error."""
        with httpx.Client(
            transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE),
            follow_redirects=True,
            max_redirects=REDIRECTS_MAX,
            timeout=PATIENCE,
        ) as client:
            ready = client.build_request("POST", url, content=b"{}")
            self.all(around, wanted, lambda: client.post(url, content=b"{}"), lambda: client.send(ready))

    def all(self, around: str, wanted: Any, send: Callable[[], Any], resend: Callable[[], Any]) -> None:
        def one(is_well: bool) -> None:
            try:
                resend() if around == "same object" else send()
            except self.errors:
                assert not is_well
            else:
                assert is_well

        def handle() -> None:
            for is_well in wanted:
                one(is_well)

        if around == "handler":
            self.guard.run("charge", "1", handle)
        elif around == "intent":
            for is_well in wanted:
                with intent("pay-1", store=self.guard):
                    one(is_well)
        else:
            handle()


class Requests(Sync):
    """requests."""

    # A Location that urllib cannot read is its ValueError.
    errors = (requests.RequestException, ValueError)

    def run(self, around: str, url: str, *wanted: bool) -> None:
        with requests.Session() as session:
            session.mount("http://", Adapter(retries=ONCE))
            session.max_redirects = REDIRECTS_MAX
            ready = session.prepare_request(requests.Request("POST", url, data=b"{}"))

            def read(response: requests.Response) -> None:
                with response:
                    _ = response.content

            self.all(around, wanted, lambda: read(self.post(session, url)), lambda: read(self.send(session, ready)))

    def post(self, session: requests.Session, url: str) -> requests.Response:
        return session.post(url, data=b"{}", timeout=PATIENCE)

    def send(self, session: requests.Session, ready: requests.PreparedRequest) -> requests.Response:
        return session.send(ready, timeout=PATIENCE)


class Streamed(Requests):
    """requests with `stream=True`."""

    def post(self, session: requests.Session, url: str) -> requests.Response:
        return session.post(url, data=b"{}", timeout=PATIENCE, stream=True)

    def send(self, session: requests.Session, ready: requests.PreparedRequest) -> requests.Response:
        return session.send(ready, timeout=PATIENCE, stream=True)


class Async(Sync):
    """httpx, async."""

    def __init__(self) -> None:
        self.guard = AsyncGuard("memory:")

    def run(self, around: str, url: str, *wanted: bool) -> None:
        asyncio.run(self._run(around, url, wanted))

    async def _run(self, around: str, url: str, wanted: Any) -> None:
        async with httpx.AsyncClient(
            transport=AsyncTransport(httpx.AsyncHTTPTransport(verify=False), retries=ONCE),
            follow_redirects=True,
            max_redirects=REDIRECTS_MAX,
            timeout=PATIENCE,
        ) as client:
            ready = client.build_request("POST", url, content=b"{}")

            async def one(is_well: bool) -> None:
                sent = client.send(ready) if around == "same object" else client.post(url, content=b"{}")
                try:
                    await sent
                except httpx.HTTPError:
                    assert not is_well
                else:
                    assert is_well

            async def handle() -> None:
                for is_well in wanted:
                    await one(is_well)

            if around == "handler":
                await self.guard.run("charge", "1", handle)
            elif around == "intent":
                for is_well in wanted:
                    async with intent("pay-1", store=self.guard):
                        await one(is_well)
            else:
                await handle()


@pytest.fixture(params=[Sync, Async, Requests, Streamed], ids=["httpx", "httpx-async", "requests", "requests-streamed"])
def client(request: pytest.FixtureRequest) -> Any:
    return request.param()


def posted(server: Scripted) -> list[str | None]:
    return [one.key for one in server.got if one.method == "POST" and one.path == "/pay"]


@everywhere(ERRORS, "not decodable", "303, and a GET that is lost")
def test_after_an_error_of_the_client_an_equal_request_is_a_retry_and_the_next_one_is_new(
    server: Scripted, client: Any, around: str, story: str
) -> None:
    server.script = [*ERRORS[story], PAID, PAID]

    client.run(around, f"{server.url}/pay", False, True, True)

    first, second, third = posted(server)
    assert first == second != third


@everywhere(WELL, "in chunks", "303, and a GET")
def test_after_an_answer_that_was_read_to_its_end_an_equal_request_is_a_new_one(
    server: Scripted, client: Any, around: str, story: str
) -> None:
    server.script = [*WELL[story], PAID]

    client.run(around, f"{server.url}/pay", True, True)

    first, second = posted(server)
    assert first != second


def test_a_redirect_to_a_server_that_fails_is_not_settled(server: Scripted, client: Any) -> None:
    server.script = [Say(303, to("/receipt")), Say(500), PAID, PAID]

    client.run("handler", f"{server.url}/pay", True, True, True)

    first, second, third = posted(server)
    assert first == second != third


# Redirects that nobody follows.


@pytest.mark.parametrize("around", ["handler", "same object", "intent"])
def test_httpx_says_that_it_does_not_follow_a_redirect_and_then_it_is_the_answer(server: Scripted, around: str) -> None:
    server.script = [Say(303, to("/receipt"))]
    sync = Sync()
    with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE)) as client:
        ready = client.build_request("POST", f"{server.url}/pay", content=b"{}")

        def send() -> None:
            client.post(f"{server.url}/pay", content=b"{}")

        sync.all(around, [True, True], send, lambda: client.send(ready))

    first, second = posted(server)
    assert first != second


@pytest.mark.parametrize("around", ["handler", "same object", "intent"])
def test_a_redirect_that_requests_does_not_follow_is_sent_again_with_its_key(server: Scripted, around: str) -> None:
    server.script = [Say(303, to("/receipt"))]
    sync = Sync()
    with requests.Session() as session:
        session.mount("http://", Adapter(retries=ONCE))
        ready = session.prepare_request(requests.Request("POST", f"{server.url}/pay", data=b"{}"))

        def send() -> None:
            session.post(f"{server.url}/pay", data=b"{}", allow_redirects=False)

        sync.all(around, [True, True], send, lambda: session.send(ready, allow_redirects=False))

    first, second = posted(server)
    assert first == second


# What goes around a transport.


@pytest.mark.parametrize("mounted", [False, True], ids=["transport", "mounts"])
def test_a_proxy_of_the_transport_inside_gets_keys_and_retries(server: Scripted, mounted: bool) -> None:
    server.script = [Say(503), PAID]
    quick = Retries(pause=0)

    def options(outer: Any, inner: Any) -> dict[str, Any]:
        transport = outer(inner(proxy=server.url), retries=quick)
        return {"mounts": {"http://bank.example": transport}} if mounted else {"transport": transport}

    async def in_loop() -> None:
        async with httpx.AsyncClient(**options(AsyncTransport, httpx.AsyncHTTPTransport)) as client:
            await client.post("http://bank.example/pay", content=b"{}")

    with httpx.Client(**options(Transport, httpx.HTTPTransport)) as client:
        client.post("http://bank.example/pay", content=b"{}")
    server.script = [Say(503), PAID]
    asyncio.run(in_loop())

    assert {one.headers["host"] for one in server.got} == {"bank.example"}
    first, second, third, fourth = server.keys
    assert None not in server.keys
    assert first == second != third == fourth


# Answers that are streamed.


def test_an_answer_that_is_left_before_its_end_is_asked_for_again(server: Scripted) -> None:
    server.script = [Say(201, body=b"a" * 100_000, chunked=True)]

    def handle() -> None:
        with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE)) as client:
            for parts in (0, 1, 100_000, 100_000):
                with client.stream("POST", f"{server.url}/pay", content=b"{}") as response:
                    for _, _ in zip(range(parts), response.iter_bytes(1_000), strict=False):
                        pass
        with requests.Session() as session:
            session.mount("http://", Adapter(retries=ONCE))
            for parts in (0, 1, 100_000, 100_000):
                with session.post(f"{server.url}/pay", data=b"{}", stream=True) as response:
                    for _, _ in zip(range(parts), response.iter_content(1_000), strict=False):
                        pass

    Guard("memory:").run("charge", "1", handle)

    keys = posted(server)
    for one in (keys[:4], keys[4:]):
        assert one[0] == one[1] == one[2] != one[3]
    assert len(set(keys)) == 4


def test_an_answer_that_nobody_closes_is_asked_for_again(server: Scripted) -> None:
    server.script = [Say(201, chunked=True)]

    def handle() -> None:
        with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE)) as client:
            unread = client.send(client.build_request("POST", f"{server.url}/pay", content=b"{}"), stream=True)
            client.post(f"{server.url}/pay", content=b"{}")
            unread.close()
            client.post(f"{server.url}/pay", content=b"{}")

    Guard("memory:").run("charge", "1", handle)

    first, second, third = posted(server)
    assert first == second != third


@pytest.mark.parametrize("say", [Say(204), Say(201, body=b"")], ids=["204", "empty"])
def test_an_answer_without_a_body_is_settled_by_its_head(server: Scripted, say: Say) -> None:
    server.script = [say]

    def handle() -> None:
        with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE)) as client:
            for _ in range(2):
                with client.stream("POST", f"{server.url}/pay", content=b"{}"):
                    pass
        with requests.Session() as session:
            session.mount("http://", Adapter(retries=ONCE))
            for _ in range(2):
                with session.post(f"{server.url}/pay", data=b"{}", stream=True):
                    pass

    Guard("memory:").run("charge", "1", handle)

    assert len(set(posted(server))) == 4


def test_who_reads_to_the_end_from_below_requests_is_done(server: Scripted) -> None:
    server.script = [Say(201, body=b"a" * 1_000, chunked=True)]

    def read(raw: Any, size: int | None) -> bytes:
        whole = b""
        while part := raw.read(size):
            whole += part
            if size is None:
                break
        return whole

    def handle() -> None:
        with requests.Session() as session:
            session.mount("http://", Adapter(retries=ONCE))
            for size in (None, 64):
                with session.post(f"{server.url}/pay", data=b"{}", stream=True) as response:
                    assert read(response.raw, size) == b"a" * 1_000

    Guard("memory:").run("charge", "1", handle)

    assert len(set(posted(server))) == 2


def test_a_response_of_httpx_can_be_pickled(server: Scripted) -> None:
    server.script = [Say(303, to("/receipt"))]

    with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE)) as client:
        again = pickle.loads(pickle.dumps(client.post(f"{server.url}/pay", content=b"{}")))

    assert (again.status_code, again.content, again.next_request.method) == (303, b"{}", "GET")


class Unfinished:
    """A decoder that finds out at the end that something is missing, as those of Brotli and Zstandard do."""

    def decode(self, part: bytes) -> bytes:
        return part

    def flush(self) -> bytes:
        raise httpx.DecodingError("the data is incomplete")


@pytest.mark.parametrize("is_async", [False, True], ids=["httpx", "httpx-async"])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_encoding_that_has_no_end_is_no_answer(is_async: bool, chunked: bool) -> None:
    bank = Bank(lambda: httpx.Response(201, stream=Parts()) if chunked else httpx.Response(201, content=b"{}"))

    def spoil(response: Any) -> None:
        if len(bank.keys) == 1:
            response._decoder = Unfinished()

    async def spoil_async(response: Any) -> None:
        spoil(response)

    async def handle() -> None:
        async with bank.client_async(event_hooks={"response": [spoil_async]}) as client:
            for _ in range(3):
                with suppress(httpx.DecodingError):
                    await client.post(URL)

    def handle_blocking() -> None:
        with bank.client(event_hooks={"response": [spoil]}) as client:
            for _ in range(3):
                with suppress(httpx.DecodingError):
                    client.post(URL)

    if is_async:
        asyncio.run(AsyncGuard("memory:").run("charge", "1", handle))
    else:
        Guard("memory:").run("charge", "1", handle_blocking)

    assert bank.keys[0] == bank.keys[1] != bank.keys[2]


# Cancellation, and what is sent at the same time.


class Parts(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body of two parts. It waits for somebody, if it is asked to: in its middle, or while it is closed."""

    def __init__(self, gate: Gate | None = None, *, where: str = "") -> None:
        self._gate, self._where = gate, where

    def __iter__(self) -> Iterator[bytes]:
        yield b"one "
        yield b"two"

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"one "
        await self._wait("middle")
        yield b"two"

    async def aclose(self) -> None:
        await self._wait("end")

    async def _wait(self, where: str) -> None:
        if self._gate is not None and self._where == where:
            await self._gate.wait()


class Gate:
    """Tells that somebody is at it, and waits until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self.reached.set()
        await self.opened.wait()


class Bank:
    """Answers each POST with the next of its answers, and each GET by `get`."""

    def __init__(self, *answers: Callable[[], httpx.Response], get: Any = None) -> None:
        self.keys: list[str] = []
        self._answers, self._get = answers, get

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers["Idempotency-Key"])
        return self._answers[min(len(self.keys), len(self._answers)) - 1]()

    async def answer_async(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            await self._get()
            return httpx.Response(200)
        return self.answer(request)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(transport=Transport(httpx.MockTransport(self.answer), retries=ONCE), **options)

    def client_async(self, **options: Any) -> httpx.AsyncClient:
        transport = AsyncTransport(httpx.MockTransport(self.answer_async), retries=ONCE)
        return httpx.AsyncClient(transport=transport, follow_redirects=True, **options)


def paid() -> httpx.Response:
    return httpx.Response(201)


WAITING = ["in the middle of its body", "while it is closed", "at the target of its redirect"]


def waiting(where: str, gate: Gate) -> Bank:
    """A bank whose first answer waits here."""
    if where == "at the target of its redirect":
        return Bank(lambda: httpx.Response(303, headers={"Location": "/receipt"}), paid, get=gate.wait)
    at = "middle" if where == "in the middle of its body" else "end"
    return Bank(lambda: httpx.Response(201, stream=Parts(gate, where=at)), paid)


@pytest.mark.parametrize("where", WAITING)
@pytest.mark.parametrize("around", ["handler", "same object", "intent"])
def test_after_a_cancellation_an_equal_request_is_a_retry(where: str, around: str) -> None:
    async def story() -> None:
        gate, guard = Gate(), AsyncGuard("memory:")
        bank = waiting(where, gate)
        client = bank.client_async()
        ready = client.build_request("POST", URL)

        async def send() -> None:
            await (client.send(ready) if around == "same object" else client.post(URL))

        async def cancelled() -> None:
            task = asyncio.create_task(send())
            await gate.reached.wait()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        async def handle() -> None:
            await cancelled()
            await send()
            await send()

        if around == "handler":
            await guard.run("charge", "1", handle)
        elif around == "intent":
            for step in (cancelled, send, send):
                async with intent("pay-1", store=guard):
                    await step()
            assert await guard.read(OPERATION, "pay-1") is None
        else:
            await handle()
        await client.aclose()
        assert bank.keys[0] == bank.keys[1] != bank.keys[2]

    asyncio.run(story())


@pytest.mark.parametrize("where", WAITING)
def test_while_an_answer_is_read_or_followed_an_equal_request_of_another_task_is_another_one(where: str) -> None:
    async def story() -> None:
        gate = Gate()
        bank = waiting(where, gate)

        async def handle() -> None:
            async with bank.client_async() as client:
                first = asyncio.create_task(client.post(URL))
                await gate.reached.wait()
                await asyncio.create_task(client.post(URL))
                gate.opened.set()
                await first

        await AsyncGuard("memory:").run("charge", "1", handle)
        assert len(set(bank.keys)) == 2

    asyncio.run(story())


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirect_that_another_thread_follows_by_hand_keeps_its_key(server: Scripted, status: int) -> None:
    server.script = [Say(status, to("/v2")), PAID]

    def handle() -> None:
        with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE)) as client:
            moved = client.post(f"{server.url}/pay", content=b"{}")
            assert moved.next_request is not None
            with ThreadPoolExecutor(1) as threads:
                threads.submit(contextvars.copy_context().run, client.send, moved.next_request).result()

    Guard("memory:").run("charge", "1", handle)

    assert [one.path for one in server.got] == ["/pay", "/v2"]
    assert len(set(server.keys)) == 1
