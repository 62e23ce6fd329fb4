"""Equal requests of several threads or tasks of one handler: what is a retry, what is another request, what is refused.

A pool's threads and a worker's tasks live on after a call has failed in them: that they are alive says nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
import requests

from onefold import AsyncGuard, Guard, UsageError
from onefold.http.client import Adapter, AsyncTransport, Retries, Transport
from onefold.http.client._answers import Answer
from onefold.http.client._callers import Caller
from onefold.http.client._handler_keys import Request, keyed
from tests.http_service.scripted import Say, Scripted, scripted

ONCE = Retries(attempts=1)
PATIENCE = 120.0
REDIRECTS_MAX = 2
MANY = 12
URL = "https://bank.example/charges"


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


class Httpx:
    """httpx, blocking."""

    def __init__(self) -> None:
        self.client: Any = httpx.Client(
            transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE),
            follow_redirects=True,
            max_redirects=REDIRECTS_MAX,
            timeout=PATIENCE,
        )

    def post(self, url: str, **options: Any) -> Any:
        return self.client.post(url, content=b"{}", **options)

    def stream(self, url: str) -> Any:
        return self.client.send(self.client.build_request("POST", url, content=b"{}"), stream=True)

    def hook(self, call: Callable[[], None]) -> None:
        self.client.event_hooks = {"response": [lambda _: call()]}


class Requests(Httpx):
    """requests."""

    def __init__(self) -> None:
        self.client = requests.Session()
        self.client.mount("http://", Adapter(retries=ONCE))
        self.client.max_redirects = REDIRECTS_MAX

    def post(self, url: str, **options: Any) -> Any:
        return self.client.post(url, data=b"{}", timeout=PATIENCE, **options)

    def stream(self, url: str) -> Any:
        return self.post(url, stream=True)

    def hook(self, call: Callable[[], None]) -> None:
        self.client.hooks["response"].append(lambda *_, **__: call())


@pytest.fixture(params=[Httpx, Requests], ids=["httpx", "requests"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.param()
    with made.client:
        yield made


class Threads:
    """Threads that stay alive, each with a copy of the handler's context."""

    def __init__(self, stack: ExitStack) -> None:
        self._pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(2)]

    def submit(self, number: int, call: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._pools[number].submit(contextvars.copy_context().run, call, *args)

    def run(self, number: int, call: Callable[..., Any], *args: Any) -> Any:
        return self.submit(number, call, *args).result(PATIENCE)


def in_handler(call: Callable[[Threads], Any]) -> None:
    def handle() -> None:
        with ExitStack() as stack:
            call(Threads(stack))

    Guard("memory:").run("charge", "1", handle)


def posted(server: Scripted) -> list[str | None]:
    return [one.key for one in server.got if one.method == "POST"]


NOWHERE = {"broken": "http://[::1", "another protocol": "gopher://127.0.0.1/receipt", "in a circle": "/a"}


@pytest.mark.parametrize("where", NOWHERE)
def test_a_redirect_that_cannot_be_followed_is_retried_by_another_thread_with_its_key(
    server: Scripted, client: Any, where: str
) -> None:
    server.script = [Say(303, [("Location", NOWHERE[where])])]
    kept: list[Exception] = []

    def handle(threads: Threads) -> None:
        for number in range(2):
            # ValueError: a Location that urllib cannot read.
            with pytest.raises((httpx.HTTPError, requests.RequestException, ValueError)) as failed:
                threads.run(number, client.post, server.url)
            # Its traceback, and so all that the call had, is kept: also then the call is over.
            kept.append(failed.value)

    in_handler(handle)

    first, second = posted(server)
    assert first == second


def test_a_redirect_that_requests_does_not_follow_is_retried_by_another_thread_with_its_key(server: Scripted) -> None:
    server.script = [Say(303, [("Location", "/receipt")])]
    client = Requests()

    def send() -> None:
        client.post(server.url, allow_redirects=False)

    with client.client:
        in_handler(lambda threads: [threads.run(number, send) for number in range(2)])

    first, second = posted(server)
    assert first == second


def test_a_redirect_that_cannot_be_followed_is_retried_by_another_task_with_its_key() -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            keys.append(request.headers["Idempotency-Key"])
        return httpx.Response(303, headers={"Location": "/a"})

    async def handle() -> None:
        transport = AsyncTransport(httpx.MockTransport(answer), retries=ONCE)
        jobs: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

        async def work() -> None:
            job = await jobs.get()
            with suppress(httpx.TooManyRedirects):
                await session.post(URL)
            job.set_result(None)
            await asyncio.Event().wait()

        async with httpx.AsyncClient(transport=transport, follow_redirects=True) as session:
            workers = [asyncio.create_task(work()) for _ in range(2)]
            for _ in workers:
                done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                await jobs.put(done)
                await done
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    asyncio.run(AsyncGuard("memory:").run("charge", "1", handle))

    first, second = keys
    assert first == second


def test_between_a_redirect_and_its_target_an_equal_request_of_another_thread_is_another_one(
    server: Scripted, client: Any
) -> None:
    server.script = [Say(303, [("Location", "/receipt")]), Say(201), Say(200)]
    reached, opened = threading.Event(), threading.Event()

    def wait() -> None:
        if not reached.is_set():
            reached.set()
            assert opened.wait(PATIENCE)

    def handle(threads: Threads) -> None:
        client.hook(wait)
        first = threads.submit(0, client.post, server.url)
        try:
            assert reached.wait(PATIENCE)
            threads.run(1, client.post, server.url)
        finally:
            opened.set()
        first.result(PATIENCE)

    in_handler(handle)

    assert [one.method for one in server.got] == ["POST", "POST", "GET"]
    assert len(set(posted(server))) == 2


def test_between_a_redirect_and_its_target_an_equal_request_of_another_task_is_another_one() -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            keys.append(request.headers["Idempotency-Key"])
        return httpx.Response(303 if len(keys) == 1 and request.method == "POST" else 200, headers=TO_RECEIPT)

    async def handle() -> None:
        reached, opened = asyncio.Event(), asyncio.Event()

        async def wait(_: httpx.Response) -> None:
            if not reached.is_set():
                reached.set()
                await opened.wait()

        transport = AsyncTransport(httpx.MockTransport(answer), retries=ONCE)
        hooks: Any = {"response": [wait]}
        async with httpx.AsyncClient(transport=transport, follow_redirects=True, event_hooks=hooks) as client:
            first = asyncio.create_task(client.post(URL))
            await reached.wait()
            await asyncio.create_task(client.post(URL))
            opened.set()
            await first

    asyncio.run(AsyncGuard("memory:").run("charge", "1", handle))

    assert len(keys) == len(set(keys)) == 2


TO_RECEIPT = {"Location": "/receipt"}


class Gated(httpx.SyncByteStream):
    """A body whose second part waits for somebody."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        yield b"one "
        self.reached.set()
        assert self.opened.wait(PATIENCE)
        yield b"two"


@pytest.mark.parametrize("streamed", [False, True], ids=["by the client", "streamed"])
def test_while_an_answer_is_read_an_equal_request_of_another_thread_is_another_one(streamed: bool) -> None:
    keys: list[str] = []
    body = Gated()

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        return httpx.Response(201, stream=body) if len(keys) == 1 else httpx.Response(201)

    def read(client: httpx.Client) -> None:
        if streamed:
            with client.stream("POST", URL) as response:
                response.read()
        else:
            client.post(URL)

    def handle(threads: Threads) -> None:
        with httpx.Client(transport=Transport(httpx.MockTransport(answer), retries=ONCE)) as client:
            first = threads.submit(0, read, client)
            try:
                assert body.reached.wait(PATIENCE)
                threads.run(1, client.post, URL)
            finally:
                body.opened.set()
            first.result(PATIENCE)
            client.post(URL)

    in_handler(handle)

    assert len(keys) == len(set(keys)) == 3


LONG = Say(201, body=b"a" * 1_000, chunked=True)


@pytest.mark.parametrize("parts", [0, 1], ids=["at its headers", "in its body"])
def test_an_answer_that_another_thread_may_read_on_or_not_is_in_doubt_and_an_equal_request_is_refused(
    server: Scripted, client: Any, parts: int
) -> None:
    server.script = [LONG]
    left: list[Any] = []

    def leave() -> None:
        response = client.stream(server.url)
        body = response.iter_bytes(10) if isinstance(client.client, httpx.Client) else response.iter_content(10)
        left.extend([response, body])
        for _ in range(parts):
            next(body)

    def handle(threads: Threads) -> None:
        threads.run(0, leave)

        with pytest.raises(UsageError, match=r"Nothing was sent.*name the key"):
            threads.run(1, client.post, server.url)

        assert len(server.got) == 1
        client.post(server.url, headers={"Idempotency-Key": "mine"})
        left[0].close()
        threads.run(1, client.post, server.url)
        threads.run(1, client.post, server.url)

    in_handler(handle)

    first, named, retried, another = posted(server)
    assert first == retried != another
    assert named == "mine"


def test_the_same_object_whose_answer_another_thread_has_is_refused_too(server: Scripted) -> None:
    server.script = [LONG]

    with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE)) as client, ExitStack() as s:
        ready = client.build_request("POST", server.url, content=b"{}")
        first = Threads(s).run(0, lambda: client.send(ready, stream=True))
        with pytest.raises(UsageError, match="Nothing was sent"):
            client.send(ready)
        first.close()
        client.send(ready)

    assert len(server.keys) == 2
    assert len(set(server.keys)) == 1


def test_an_answer_that_another_thread_has_dropped_is_asked_for_again(server: Scripted, client: Any) -> None:
    server.script = [LONG]

    def drop() -> None:
        client.stream(server.url)

    def handle(threads: Threads) -> None:
        threads.run(0, drop)
        if isinstance(client.client, httpx.Client):
            # Its response is part of a cycle, and stays until the collector comes by.
            with pytest.raises(UsageError):
                threads.run(1, client.post, server.url)
            gc.collect()
        threads.run(1, client.post, server.url)

    in_handler(handle)

    first, second = posted(server)
    assert first == second


def test_an_answer_of_a_thread_that_is_gone_is_asked_for_again(server: Scripted, client: Any) -> None:
    server.script = [LONG]
    left: list[Any] = []

    def handle() -> None:
        with ThreadPoolExecutor(1) as threads:
            left.append(threads.submit(contextvars.copy_context().run, client.stream, server.url).result(PATIENCE))
        client.post(server.url)

    Guard("memory:").run("charge", "1", handle)

    first, second = posted(server)
    assert first == second


def test_a_response_that_is_read_to_its_end_while_another_thread_looks_at_it_is_not_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def handle() -> None:
        with keyed(Request("POST", URL, b"{}")) as first:
            answer = first.heard(200, {}, None)

        def is_elsewhere(_: Caller) -> bool:
            answer.ended()
            return True

        monkeypatch.setattr(Caller, "is_elsewhere", property(is_elsewhere))
        assert keyed(Request("POST", URL, b"{}")).key != first.key

    Guard("memory:").run("charge", "1", handle)


def test_a_response_that_ends_between_two_looks_at_its_reader_breaks_nothing() -> None:
    class Ending(Answer):
        """Another thread ends it right after each look."""

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name == "_caller" and found is not None:
                self.ended()
            return found

    answers = [Ending(200, {}, None, ExitStack().close) for _ in range(3)]

    assert [answers[0].is_awaited_elsewhere, answers[1].is_in_doubt, answers[2].is_settled] == [False, False, False]
    assert [answer.is_settled for answer in answers] == [True, True, False]


@pytest.mark.parametrize("rounds", [3, pytest.param(100, marks=pytest.mark.more)])
def test_of_many_equal_requests_at_once_each_has_a_key_of_its_own(rounds: int) -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200)
        keys.append(request.headers["Idempotency-Key"])
        return httpx.Response(303, headers=TO_RECEIPT)

    transport = Transport(httpx.MockTransport(answer), retries=ONCE)
    with Guard("memory:") as guard, httpx.Client(transport=transport, follow_redirects=True) as client:

        def handle() -> None:
            # Threads that come and go, while others look for calls that have ended.
            with ThreadPoolExecutor(MANY) as threads:
                sent = [threads.submit(contextvars.copy_context().run, client.post, URL) for _ in range(MANY)]
                for one in sent:
                    one.result(PATIENCE)

        for number in range(rounds):
            guard.run("charge", str(number), handle)

    assert len(keys) == len(set(keys)) == rounds * MANY
