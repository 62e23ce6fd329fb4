"""What ends an intent, however the answer is written; and that one sender never ends another's intent."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import requests

from onefold import AsyncGuard, Guard, KeyReused, UsageError
from onefold.http._shared.intents import OPERATION
from onefold.http.client import Adapter, AsyncTransport, Retries, Transport, intent
from onefold.http.client._handler_keys import Keyed, Request
from onefold.http.client._retrying import ANSWER_MAX, PAUSE_SECONDS_MAX, PROBLEM_MAX, is_short, retry_after
from tests.http_service.scripted import Say, Scripted, scripted

QUICK = Retries(attempts=3, pause=0.01, retry_after_max=0.01)
PATIENCE = 120.0
NAME = "pay-order-42"


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


class Sync:
    """httpx, blocking."""

    def __init__(self) -> None:
        self.guard: Any = Guard("memory:")

    def send(self, url: str, *, stream: bool = False, **request: Any) -> tuple[int, bytes]:
        transport = Transport(httpx.HTTPTransport(verify=False), retries=QUICK)
        request = request or {"content": b"{}"}
        with httpx.Client(transport=transport, timeout=PATIENCE) as client, intent(NAME, store=self.guard):
            if not stream:
                response = client.post(url, **request)
                return response.status_code, response.content
            with client.stream("POST", url, **request) as response:
                return response.status_code, response.read()

    def is_begun(self) -> bool:
        return self.guard.read(OPERATION, NAME) is not None


class Async(Sync):
    """httpx, async."""

    def __init__(self) -> None:
        self.guard = AsyncGuard("memory:")

    def send(self, url: str, *, stream: bool = False, **request: Any) -> tuple[int, bytes]:
        return asyncio.run(self._send(url, stream, request or {"content": b"{}"}))

    async def _send(self, url: str, stream: bool, request: Any) -> tuple[int, bytes]:
        transport = AsyncTransport(httpx.AsyncHTTPTransport(verify=False), retries=QUICK)
        async with httpx.AsyncClient(transport=transport, timeout=PATIENCE) as client, intent(NAME, store=self.guard):
            if not stream:
                response = await client.post(url, **request)
                return response.status_code, response.content
            async with client.stream("POST", url, **request) as response:
                return response.status_code, await response.aread()

    def is_begun(self) -> bool:
        return asyncio.run(self.guard.read(OPERATION, NAME)) is not None


class Requests(Sync):
    """requests."""

    def send(self, url: str, *, stream: bool = False, **request: Any) -> tuple[int, bytes]:
        with requests.Session() as session, intent(NAME, store=self.guard):
            session.mount("http://", Adapter(retries=QUICK))
            request = request or {"data": b"{}"}
            with session.post(url, timeout=PATIENCE, stream=stream, **request) as response:
                return response.status_code, b"".join(response.iter_content(100))


@pytest.fixture(params=[Sync, Async, Requests], ids=["httpx", "httpx-async", "requests"])
def client(request: pytest.FixtureRequest) -> Any:
    return request.param()


PROBLEM = ("Content-Type", "application/problem+json")
WRITTEN: dict[str, tuple[Callable[[bytes], bytes], list[tuple[str, str]]]] = {
    "plain": (lambda body: body, []),
    "gzip": (gzip.compress, [("Content-Encoding", "gzip")]),
    "deflate": (zlib.compress, [("Content-Encoding", "deflate")]),
}


@pytest.mark.parametrize("stream", [False, True], ids=["read", "streamed"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("written", WRITTEN)
def test_a_refusal_is_understood_however_it_is_written(
    server: Scripted, client: Any, written: str, chunked: bool, stream: bool
) -> None:
    encode, headers = WRITTEN[written]
    for code, status, ends in [("key_reused", 422, False), ("caller_unknown", 400, False), ("failed", 422, True)]:
        body = json.dumps({"code": code}).encode()
        server.script = [Say(status, [PROBLEM, *headers], encode(body), chunked=chunked)]

        found = client.send(server.url, stream=stream)

        assert found == (status, body)
        assert client.is_begun() is not ends
    # Two refusals under one key; after the end a new one.
    client.send(server.url)
    first, second, third, fourth = server.keys
    assert first == second == third != fourth


@pytest.mark.parametrize(
    "answer",
    [
        Say(422, [PROBLEM, ("Content-Encoding", "snappy")], b"\xff\x06\x00"),
        Say(422, [PROBLEM], b"a" * (PROBLEM_MAX + ANSWER_MAX), chunked=True),
        Say(422, [PROBLEM], b'{"code": "failed"}' + b" " * PROBLEM_MAX),
    ],
    ids=["an unknown encoding", "a long one", "one that is too long to be understood"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["read", "streamed"])
def test_a_problem_that_cannot_be_read_ends_nothing(server: Scripted, client: Any, answer: Say, stream: bool) -> None:
    server.script = [answer]

    status, body = client.send(server.url, stream=stream)

    assert (status, body) == (422, answer.body)
    assert client.is_begun()


def test_a_problem_that_breaks_off_is_asked_for_again(server: Scripted, client: Any) -> None:
    broken = Say(422, [PROBLEM], b'{"code": "key_reused"}', cut="body")
    server.script = [broken, Say(201)]

    status, _ = client.send(server.url, stream=True)

    assert (status, len(set(server.keys))) == (201, 1)


ABSURD = [
    "9" * 400,
    "9" * 5_000,
    "Fri, 31 Dec 9999 23:59:59 -2359",
    "Fri, 31 Dec 9999 23:59:59 GMT",
    "Fri, 31 Dec 99999999999 23:59:59 GMT",
    "Fri, 31 Dec 1999 23:59:59 +99999999999999999999",
    "Fri, 01 Jan 0001 00:00:00 +2359",
    "Fri, 31 Dec 1999 23:59:99999999999999999999 GMT",
]


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: value[:40])
def test_an_absurd_retry_after_is_bounded(value: str) -> None:
    assert 0 <= retry_after({"Retry-After": value}) <= PAUSE_SECONDS_MAX


@pytest.mark.parametrize("value", ["9" * 400, "Fri, 31 Dec 9999 23:59:59 -2359"], ids=["number", "date"])
def test_an_absurd_retry_after_loses_no_key(server: Scripted, client: Any, value: str) -> None:
    server.script = [Say(503, [("Retry-After", value)]), Say(201)]

    status, _ = client.send(server.url)

    assert (status, len(set(server.keys))) == (201, 1)


def test_a_pause_that_no_clock_can_wait_for_is_refused() -> None:
    with pytest.raises(UsageError, match=r"retry_after_max=1e\+300 has to be seconds"):
        Retries(retry_after_max=1e300)


def test_a_thousand_attempts_have_pauses_that_are_numbers() -> None:
    import tenacity

    from onefold.http.client._retrying import plan

    state = tenacity.RetryCallState(None, None, (), {})  # type: ignore[arg-type]
    state.attempt_number = 5_000
    state.set_exception((OSError, OSError(), None))

    assert plan(Retries(attempts=5_000), (OSError,))["wait"](state) <= Retries().pause_max


def test_an_absurd_length_is_no_short_answer() -> None:
    assert not is_short({"Content-Length": "9" * 5_000})
    assert is_short({"Content-Length": "7"})


# One's own key, and no other.


async def done(value: Any) -> Any:
    """The value sync or async."""
    return await value if inspect.isawaitable(value) else value


async def entered(guard: Any) -> intent:
    one = intent(NAME, store=guard)
    await done(one.__enter__() if isinstance(guard, Guard) else one.__aenter__())
    return one


async def left(one: intent, guard: Any, *error: Any) -> None:
    how = error or (None, None, None)
    if isinstance(guard, Guard):
        one.__exit__(*how)
    else:
        await one.__aexit__(*how)


async def sent_in(one: intent, guard: Any, body: bytes = b"{}") -> Keyed:
    request = Request("POST", "http://127.0.0.1/", body)
    call: Keyed = await done(one.call_for(request) if isinstance(guard, Guard) else one.call_for_async(request))
    return call


@pytest.mark.parametrize("by_hand", [False, True], ids=["by its answer", "by hand"])
@pytest.mark.parametrize("body", [b"{}", b"another"], ids=["the same request", "another request"])
def test_a_slow_sender_does_not_end_a_newer_intent_of_the_same_name(client: Any, body: bytes, by_hand: bool) -> None:
    guard = client.guard

    async def story() -> None:
        slow = await entered(guard)
        old = await sent_in(slow, guard)
        # Another process sends the same, and is faster.
        fast = await entered(guard)
        same = await sent_in(fast, guard)
        assert same.key == old.key
        same.heard(201, {}, b"").ended()
        await left(fast, guard)
        # A new operation under the name has no answer yet when its process dies; then the slow one hears its own.
        newer = await entered(guard)
        new = await sent_in(newer, guard, body)
        await left(newer, guard, OSError, OSError(), None)
        if not by_hand:
            old.heard(201, {}, b"").ended()
        elif isinstance(guard, Guard):
            slow.end()
        else:
            await slow.aend()
        await left(slow, guard)

        again = await entered(guard)
        last = await sent_in(again, guard, body)
        assert last.key == new.key != old.key
        last.heard(201, {}, b"").ended()
        await left(again, guard)

    asyncio.run(story())

    assert not client.is_begun()


# Multipart.


def test_an_upload_is_repeated_under_one_key(server: Scripted, client: Any) -> None:
    server.script = [Say(500)] * 3 + [Say(201)]

    for _ in range(2):
        client.send(server.url, files={"receipt": ("a.txt", b"forty-two")}, data={"order": "7"})

    bodies = {one.body for one in server.got}
    assert len(bodies) == 2, "each upload has a boundary of its own"
    assert len(set(server.keys)) == 1
    assert not client.is_begun()


def test_another_upload_is_another_request(server: Scripted, client: Any) -> None:
    server.script = [Say(500)]
    client.send(server.url, files={"receipt": ("a.txt", b"forty-two")})
    sent = len(server.got)

    for other in [{"receipt": ("a.txt", b"forty-three")}, {"receipt": ("b.txt", b"forty-two")}]:
        with pytest.raises(KeyReused):
            client.send(server.url, files=other)

    assert len(server.got) == sent


def test_only_the_boundary_of_a_multipart_body_does_not_count() -> None:
    def digest(body: bytes, kind: str) -> bytes:
        return Request("POST", "http://127.0.0.1/", body, kind).digest

    one = digest(b"--x\r\n\r\na\r\n--x--\r\n", "multipart/form-data; boundary=x")

    assert one == digest(b"--yy\r\n\r\na\r\n--yy--\r\n", 'multipart/form-data; boundary="yy"')
    assert one != digest(b"--x\r\n\r\na\r\n--x\r\n\r\n--x--\r\n", "multipart/form-data; boundary=x")
    assert one != digest(b"--x\r\n\r\na\r\n--x--\r\n", "text/plain; boundary=x")
    assert digest(b"a", "multipart/form-data") == digest(b"a", "")
    # It counts where the boundary is.
    assert digest(b"--xab", "multipart/form-data; boundary=x") != digest(b"a--xb", "multipart/form-data; boundary=x")
