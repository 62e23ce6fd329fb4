"""An answer that is cut is no answer, wherever it is cut: in its status line, its headers or its body.

By the server's own count: which keys it saw, and how often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import requests
import urllib3

from onefold import AsyncGuard, Guard
from onefold.http.client import Adapter, AsyncTransport, Attempt, Retries, Transport, intent
from onefold.http.client._handler_keys import Request, keyed
from onefold.http.client._resuming import Another, HandedOut
from tests.http_service.cutting import ANSWERS, PAID, Cutting, cuts, cutting, landmarks

# The client asks again, or the caller does.
PATIENT = Retries(attempts=2, pause=0)
ONCE = Retries(attempts=1)
PATIENCE = 120.0

ENDS = ("closed", "reset")


@pytest.fixture
def server() -> Iterator[Cutting]:
    with cutting() as server:
        yield server


class Sync:
    """httpx, blocking. `all` sends each of these the given number of times, and returns what the caller got."""

    lost: Any = httpx.TransportError

    def all(self, urls: list[str], retries: Retries, times: int, around: str, *, stream: bool = False) -> list[Any]:
        transport = Transport(httpx.HTTPTransport(verify=False), retries=retries)
        guard = Guard("memory:")
        with httpx.Client(transport=transport, timeout=PATIENCE) as client:

            def post(url: str) -> bytes:
                with client.stream("POST", url, content=b"{}") as response:
                    return b"".join(response.iter_bytes()) if stream else response.read()

            return self._all(post, guard, urls, times, around)

    def _all(self, post: Any, guard: Guard, urls: list[str], times: int, around: str) -> list[Any]:
        found: list[Any] = []

        def tries(url: str) -> None:
            for _ in range(times):
                try:
                    found.append(post(url))
                except self.lost as error:
                    found.append(error)

        for url in urls:
            if around == "handler":
                guard.run("charge", url, partial(tries, url))
            elif around == "intent":
                for _ in range(times):
                    with intent(url, store=guard):
                        try:
                            found.append(post(url))
                        except self.lost as error:
                            found.append(error)
            else:
                tries(url)
        return found


class Requests(Sync):
    """requests."""

    lost = requests.RequestException

    def all(self, urls: list[str], retries: Retries, times: int, around: str, *, stream: bool = False) -> list[Any]:
        with requests.Session() as session:
            session.mount("http://", Adapter(retries=retries))

            def post(url: str) -> Any:
                with session.post(url, data=b"{}", timeout=PATIENCE, stream=stream) as response:
                    return b"".join(response.iter_content(3))

            return self._all(post, Guard("memory:"), urls, times, around)


class Async(Sync):
    """httpx, async."""

    def all(self, urls: list[str], retries: Retries, times: int, around: str, *, stream: bool = False) -> list[Any]:
        return asyncio.run(self._story(urls, retries, times, around, stream))

    async def _story(self, urls: list[str], retries: Retries, times: int, around: str, stream: bool) -> list[Any]:
        found: list[Any] = []
        transport = AsyncTransport(httpx.AsyncHTTPTransport(verify=False), retries=retries)
        async with httpx.AsyncClient(transport=transport, timeout=PATIENCE) as client, AsyncGuard("memory:") as guard:

            async def post(url: str) -> None:
                try:
                    async with client.stream("POST", url, content=b"{}") as response:
                        parts = [part async for part in response.aiter_bytes()] if stream else [await response.aread()]
                        found.append(b"".join(parts))
                except httpx.TransportError as error:
                    found.append(error)

            async def tries(url: str) -> None:
                for _ in range(times):
                    await post(url)

            for url in urls:
                if around == "handler":
                    await guard.run("charge", url, partial(tries, url))
                elif around == "intent":
                    for _ in range(times):
                        async with intent(url, store=guard):
                            await post(url)
                else:
                    await tries(url)
        return found


@pytest.fixture(params=[Sync, Async, Requests], ids=["httpx", "httpx-async", "requests"])
def client(request: pytest.FixtureRequest) -> Any:
    return request.param()


def paths(kind: str, where: Callable[[str], Iterable[int]], ends: tuple[str, ...] = ENDS) -> list[str]:
    return [f"/{kind}/{cut}/{how}" for cut in where(kind) for how in ends]


@pytest.mark.parametrize("where", [landmarks, pytest.param(cuts, marks=pytest.mark.more)])
@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_that_is_cut_at_any_byte_is_asked_for_again_under_its_key(
    server: Cutting, client: Any, kind: str, where: Any
) -> None:
    wanted = paths(kind, where)

    found = client.all([server.url + path for path in wanted], PATIENT, 1, "bare")

    assert set(found) == {b"" if kind == "empty" else PAID}
    seen = {path: (len(keys), len(set(keys))) for path, keys in server.keys.items()}
    assert seen == dict.fromkeys(wanted, (2, 1))


@pytest.mark.parametrize("stream", [False, True], ids=["read", "streamed"])
@pytest.mark.parametrize("around", ["handler", "intent"])
@pytest.mark.parametrize(
    ("where", "ends"),
    [
        pytest.param(landmarks, ENDS[:1], id="landmarks"),
        pytest.param(landmarks, ENDS[1:], id="landmarks-reset", marks=pytest.mark.more),
        pytest.param(cuts, ENDS, id="cuts", marks=pytest.mark.soak),
    ],
)
def test_whoever_asks_again_after_a_cut_sends_the_same_key_and_then_a_new_one(
    server: Cutting, client: Any, around: str, stream: bool, where: Any, ends: tuple[str, ...]
) -> None:
    wanted = [path for kind in ANSWERS for path in paths(kind, where, ends)]

    found = client.all([server.url + path for path in wanted], ONCE, 3, around, stream=stream)

    for path, first, *others in zip(wanted, found[::3], found[1::3], found[2::3], strict=True):
        assert isinstance(first, client.lost), path
        assert others == [b"" if "empty" in path else PAID] * 2, path
        lost, again, another = server.keys[path]
        assert lost == again != another, path


def test_an_error_says_what_happened_also_where_the_body_is_cut(server: Cutting, client: Any) -> None:
    cut = len(ANSWERS["chunked"]) - 8
    (error,) = client.all([f"{server.url}/chunked/{cut}/closed"], ONCE, 1, "bare")

    assert [attempt.status for attempt in error.onefold.attempts] == [None]
    assert "sent 1 times, and the outcome is not known" in "".join(error.__notes__)


# A repetition goes on where the answer broke off, or it is none.


class Parts(httpx.SyncByteStream):
    """A body in parts; None: it breaks off."""

    def __init__(self, *parts: bytes | None) -> None:
        self.parts = parts
        self.is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        for part in self.parts:
            if part is None:
                raise httpx.ReadError("it broke off")
            yield part

    def close(self) -> None:
        self.is_closed = True


class AsyncParts(httpx.AsyncByteStream):
    """The same for an async client."""

    def __init__(self, parts: Parts) -> None:
        self.of = parts

    async def __aiter__(self) -> Any:
        for part in self.of:
            yield part

    async def aclose(self) -> None:
        self.of.close()


CHUNKED = {"Transfer-Encoding": "chunked"}


class Answers(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers in turn."""

    def __init__(self, *answers: tuple[int, dict[str, str], Parts]) -> None:
        self.answers = list(answers)
        self.keys: list[str] = []

    def asked(self, key: str) -> None:
        self.keys.append(key)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked(request.headers["Idempotency-Key"])
        status, headers, parts = self.answers.pop(0)
        return httpx.Response(status, headers={**CHUNKED, **headers}, stream=parts)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked(request.headers["Idempotency-Key"])
        status, headers, parts = self.answers.pop(0)
        return httpx.Response(status, headers={**CHUNKED, **headers}, stream=AsyncParts(parts))


def streamed(answers: Answers, is_async: bool, told: list[Any] | None = None) -> list[bytes]:
    """What a reader of the stream got, part by part, before its end or an error."""
    found: list[bytes] = []
    retries, sent = Retries(attempts=3, pause=0), [] if told is None else told

    async def story() -> None:
        async with (
            httpx.AsyncClient(transport=AsyncTransport(answers, retries=retries)) as client,
            client.stream("POST", "http://127.0.0.1/", content=b"{}") as response,
        ):
            sent.append(response.extensions["onefold"])
            async for part in response.aiter_raw():
                found.append(part)  # noqa: PERF401 - what came before an error counts

    def sync() -> None:
        with (
            httpx.Client(transport=Transport(answers, retries=retries)) as client,
            client.stream("POST", "http://127.0.0.1/", content=b"{}") as response,
        ):
            sent.append(response.extensions["onefold"])
            for part in response.iter_raw():
                found.append(part)  # noqa: PERF402

    try:
        asyncio.run(story()) if is_async else sync()
    except httpx.ReadError as error:
        found.append(b"lost" if "the outcome is not known" in "".join(error.__notes__) else b"not told")
    return found


both = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@both
def test_a_repetition_goes_on_where_the_answer_broke_off(is_async: bool) -> None:
    bodies = [Parts(b"one ", b"two ", None), Parts(b"on", None), Parts(b"one t", b"wo th", b"ree")]
    answers = Answers(*((201, {}, body) for body in bodies))

    found = streamed(answers, is_async)

    assert found == [b"one ", b"two ", b"th", b"ree"]
    assert (len(answers.keys), len(set(answers.keys))) == (3, 1)
    assert [body.is_closed for body in bodies] == [True] * 3


@both
@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (201, {}, [b"one, another"]),
        (201, {}, [b"on"]),
        (200, {}, [b"one two"]),
        (201, {"Content-Encoding": "gzip"}, [b"one two"]),
    ],
    ids=["another body", "a shorter one", "another status", "another encoding"],
)
def test_another_answer_is_no_repetition(is_async: bool, status: int, headers: Any, body: list[bytes]) -> None:
    bodies = [Parts(b"one ", None), Parts(*body)]
    answers = Answers((201, {}, bodies[0]), (status, headers, bodies[1]))

    assert streamed(answers, is_async) == [b"one ", b"lost"]
    assert [part.is_closed for part in bodies] == [True, True]


@both
def test_after_another_answer_an_equal_request_is_a_retry(is_async: bool) -> None:
    answers = Answers((201, {}, Parts(b"one ", None)), (201, {}, Parts(b"another")), (201, {}, Parts(b"paid")))
    found: list[bytes] = []

    def handle() -> None:
        for _ in range(2):
            found.extend(streamed(answers, is_async))

    Guard("memory:").run("charge", "order-1", handle)

    assert found == [b"one ", b"lost", b"paid"]
    assert len(set(answers.keys)) == 1


def test_who_reads_from_below_requests_is_watched_too(server: Cutting) -> None:
    url = f"{server.url}/chunked/{len(ANSWERS['chunked']) - 8}/closed"

    def handle() -> None:
        with requests.Session() as session:
            session.mount("http://", Adapter(retries=ONCE))
            with (
                session.post(url, data=b"{}", stream=True) as response,
                pytest.raises(urllib3.exceptions.ProtocolError),
            ):
                response.raw.read()
            session.post(url, data=b"{}")

    Guard("memory:").run("charge", "order-1", handle)

    (keys,) = server.keys.values()
    assert (len(keys), len(set(keys))) == (2, 1)


@both
def test_while_it_is_asked_for_again_an_equal_request_is_another_one(is_async: bool) -> None:
    others: list[str] = []

    class Meanwhile(Answers):
        def asked(self, key: str) -> None:
            super().asked(key)
            if len(self.keys) == 2:
                others.append(keyed(Request("POST", "http://127.0.0.1/", b"{}")).key)

    answers = Meanwhile((201, {}, Parts(b"one ", None)), (201, {}, Parts(b"one two")))
    found: list[bytes] = []
    Guard("memory:").run("charge", "order-1", lambda: found.extend(streamed(answers, is_async)))

    assert found == [b"one ", b"two"]
    assert len(set(answers.keys)) == 1
    assert others[0] != answers.keys[0]


@both
def test_what_is_told_has_every_attempt(is_async: bool) -> None:
    answers = Answers((201, {}, Parts(b"one ", None)), (503, {}, Parts()), (201, {}, Parts(b"one two")))
    told: list[Any] = []

    assert streamed(answers, is_async, told) == [b"one ", b"two"]
    assert told[0].attempts == [Attempt(error="ReadError"), Attempt(status=503), Attempt(status=201)]


@both
def test_there_are_no_more_attempts_than_were_asked_for(is_async: bool) -> None:
    answers = Answers(*[(201, {}, Parts(b"one ", None)) for _ in range(5)])

    assert streamed(answers, is_async) == [b"one ", b"lost"]
    assert len(answers.keys) == 3


@both
def test_a_stream_of_events_that_breaks_off_is_its_readers(is_async: bool) -> None:
    answers = Answers((200, {"Content-Type": "text/event-stream; charset=utf-8"}, Parts(b"data: 1\n\n", None)))

    assert streamed(answers, is_async) == [b"data: 1\n\n", b"lost"]
    assert len(answers.keys) == 1


def test_a_long_answer_that_breaks_off_is_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    from onefold.http.client import _retrying

    monkeypatch.setattr(_retrying, "ANSWER_MAX", 5)
    answers = Answers((200, {}, Parts(b"one ", b"two ", None)))

    assert streamed(answers, False) == [b"one ", b"two ", b"lost"]
    assert len(answers.keys) == 1


def test_what_is_skipped_is_compared_whatever_its_parts() -> None:
    handed_out = HandedOut(200, {})
    for part in (b"one ", b"two "):
        handed_out.add(part)

    rest = handed_out.rest_of(200, {"content-encoding": "identity"})
    assert [rest.of(part) for part in (b"o", b"ne two", b" three", b"")] == [b"", b"", b"three", b""]
    rest.check_end()
    with pytest.raises(Another):
        handed_out.rest_of(200, {}).of(b"one TWO three")
