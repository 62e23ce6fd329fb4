"""The client: one key for all retries of a call, and for a whole intent. httpx, its async twin, requests."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gzip
import json
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import requests
import tenacity
from msgspec.structs import replace

from onefold import AsyncGuard, Guard, KeyReused, OutcomeUnknown, StoreUnavailable, UsageError
from onefold.http._shared.intents import OPERATION
from onefold.http.client import Adapter, AsyncTransport, Attempt, Retries, Sent, Transport, intent
from onefold.http.client._retrying import Wanted, is_wanted_again, plan, retry_after, settles
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from services.proxy import Proxy
from tests.http_service.process import records_in, serving
from tests.http_service.scripted import CUT, Say, Scripted, scripted
from tests.support import AsyncProxyStore, Clock, ProxyStore

# As patient as the default, in less time.
QUICK = Retries(pause=0.01, retry_after_max=0.01)

PATIENCE = 120.0


def quick(retries: Retries = QUICK) -> Transport:
    """Without the certificates, which take longer to load than most of these tests."""
    return Transport(httpx.HTTPTransport(verify=False), retries=retries)


class Heard(NamedTuple):
    """What a caller gets, whatever its client."""

    status: int
    body: bytes
    sent: Sent


class Sync:
    """httpx, blocking."""

    errors: Any = httpx.TransportError
    # Patient while it connects and sends, and then not.
    impatient: Any = httpx.Timeout(PATIENCE, read=0.1)

    def __init__(self, retries: Retries = QUICK, **options: Any) -> None:
        self.retries = retries
        self.options = {"timeout": PATIENCE, **options}

    def send(self, url: str, method: str = "POST", around: Any = None, **request: Any) -> Heard:
        with httpx.Client(transport=quick(self.retries), **self.options) as client:
            if around is None:
                return self._heard(client.request(method, url, **request))
            with around:
                return self._heard(client.request(method, url, **request))

    def _heard(self, response: httpx.Response) -> Heard:
        assert response.elapsed
        return Heard(response.status_code, response.content, response.extensions["onefold"])

    def store(self, clock: Callable[[], float]) -> Any:
        return Guard(MemoryStore(clock=clock))

    def broken_store(self) -> tuple[Any, Any]:
        store = ProxyStore()
        return Guard(store), store


class Async(Sync):
    """httpx, async."""

    def send(self, url: str, method: str = "POST", around: Any = None, **request: Any) -> Heard:
        return asyncio.run(self._story(url, method, around, request))

    async def _story(self, url: str, method: str, around: Any, request: Any) -> Heard:
        async with httpx.AsyncClient(
            transport=AsyncTransport(httpx.AsyncHTTPTransport(verify=False), retries=self.retries), **self.options
        ) as client:
            if around is None:
                return self._heard(await client.request(method, url, **request))
            async with around:
                return self._heard(await client.request(method, url, **request))

    def store(self, clock: Callable[[], float]) -> Any:
        return AsyncGuard(AsyncMemoryStore(clock=clock))

    def broken_store(self) -> tuple[Any, Any]:
        store = AsyncProxyStore()
        return AsyncGuard(store), store


class Requests(Sync):
    """requests."""

    errors = requests.RequestException
    impatient = (PATIENCE, 0.1)

    def send(self, url: str, method: str = "POST", around: Any = None, **request: Any) -> Heard:
        if "content" in request:
            request["data"] = request.pop("content")
        timeout = self.options["timeout"]
        with requests.Session() as session:
            session.mount("http://", Adapter(retries=self.retries))
            if around is None:
                return self._told(session.request(method, url, timeout=timeout, **request))
            with around:
                return self._told(session.request(method, url, timeout=timeout, **request))

    def _told(self, response: Any) -> Heard:
        return Heard(response.status_code, response.content, response.onefold)


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


@pytest.fixture(params=[Sync, Async, Requests], ids=["httpx", "httpx-async", "requests"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def client(kind: Any) -> Any:
    return kind()


# One key for all retries of a call.


def test_a_key_is_minted_for_each_call_in_the_form_of_the_draft(server: Scripted, client: Any) -> None:
    for _ in range(2):
        client.send(server.url, content=b"{}")

    first, second = server.keys
    assert first != second
    for key in (first, second):
        assert key is not None
        assert (key[0], key[-1]) == ('"', '"')
        assert uuid.UUID(key[1:-1]).version == 4


@pytest.mark.parametrize("method", ["POST", "PATCH"])
@pytest.mark.parametrize(
    "failure",
    [
        CUT,
        Say(500),
        Say(503, [("Retry-After", "1")]),
        Say(409, [("Retry-After", "1")]),
        Say(429, [("Retry-After", "1")]),
        Say(408),
        Say(425),
        Say(200, body=b"a" * 1_000, cut="body"),
        Say(500, chunked=True, body=b"a" * 1_000),
    ],
    ids=str,
)
def test_it_is_kept_over_every_retry_of_that_call(server: Scripted, client: Any, method: str, failure: Say) -> None:
    server.script = [failure, failure, Say(201, [("Idempotent-Replayed", "true")], b"paid")]

    heard = client.send(server.url, method, content=b'{"amount": 5}')

    assert (heard.status, heard.body) == (201, b"paid")
    assert len(server.got) == 3
    assert len(set(server.keys)) == 1
    assert {one.body for one in server.got} == {b'{"amount": 5}'}
    assert heard.sent.key == server.keys[0]
    assert heard.sent.replayed
    assert [one.status for one in heard.sent.attempts][2] == 201
    for attempt in heard.sent.attempts[:2]:
        assert attempt == Attempt(status=failure.status) if not failure.cut else attempt.error


def test_a_key_of_the_callers_own_is_kept(server: Scripted, client: Any) -> None:
    server.script = [Say(500), Say()]

    heard = client.send(server.url, content=b"{}", headers={"Idempotency-Key": "mine"})

    assert server.keys == ["mine", "mine"]
    assert heard.sent == Sent("mine", [Attempt(status=500), Attempt(status=200)])


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_other_methods_are_passed_on_as_they_are(server: Scripted, method: str) -> None:
    server.script = [Say(500)]
    with httpx.Client(transport=quick(), timeout=PATIENCE) as client:
        answer = client.request(method, server.url)
    with requests.Session() as session:
        session.mount("http://", Adapter(retries=QUICK))
        session.request(method, server.url)

    assert server.keys == [None, None]
    assert "onefold" not in answer.extensions


@pytest.mark.parametrize(
    "final", [Say(200), Say(204), Say(301), Say(400), Say(401), Say(404), Say(409), Say(422), Say(429)], ids=str
)
def test_an_answer_that_cannot_get_better_is_handed_out_at_once(server: Scripted, client: Any, final: Say) -> None:
    server.script = [final]

    heard = client.send(server.url, content=b"{}")

    assert (heard.status, len(server.got)) == (final.status, 1)
    assert not heard.sent.replayed


def test_after_the_last_attempt_the_answer_is_handed_out_as_it_is(server: Scripted, kind: Any) -> None:
    server.script = [Say(503, [("Retry-After", "1")], b"later")]

    heard = kind(replace(QUICK, attempts=3)).send(server.url, content=b"{}")

    assert (heard.status, heard.body, len(server.got)) == (503, b"later", 3)
    assert heard.sent.attempts == [Attempt(status=503)] * 3


def test_after_the_last_attempt_the_error_is_raised_and_tells_what_happened(server: Scripted, kind: Any) -> None:
    server.script = [CUT]

    with pytest.raises(kind.errors) as raised:
        kind(replace(QUICK, attempts=3)).send(server.url, content=b"{}")

    error: Any = raised.value
    assert len(set(server.keys)) == 1
    assert (error.onefold.key, len(error.onefold.attempts)) == (server.keys[0], 3)
    assert "sent 3 times, and the outcome is not known" in error.__notes__[-1]
    assert str(server.keys[0]) not in "".join(error.__notes__)


def test_a_server_that_is_not_there_is_asked_again(kind: Any) -> None:
    with pytest.raises(kind.errors) as raised:
        kind(replace(QUICK, attempts=2)).send("http://127.0.0.1:1/", content=b"{}")

    assert len(raised.value.onefold.attempts) == 2


def test_a_timeout_is_a_lost_answer(server: Scripted, kind: Any) -> None:
    server.flows.clear()

    with pytest.raises(kind.errors):
        kind(replace(QUICK, attempts=2), timeout=kind.impatient).send(server.url, content=b"{}")

    # Both were sent; when the server has read them is its own affair.
    assert all(server.arrived.acquire(timeout=PATIENCE) for _ in range(2))
    assert len(server.got) == 2
    assert len(set(server.keys)) == 1


def test_a_request_that_cannot_be_written_is_not_retried() -> None:
    with (
        httpx.Client(transport=quick(), timeout=PATIENCE) as client,
        pytest.raises(httpx.UnsupportedProtocol) as raised,
    ):
        client.post("ftp://127.0.0.1/", content=b"{}")

    assert not hasattr(raised.value, "onefold")


def test_a_certificate_that_is_broken_stays_broken(server: Scripted) -> None:
    with requests.Session() as session:
        session.mount("https://", Adapter(retries=QUICK))
        with pytest.raises(requests.exceptions.SSLError) as raised:
            session.post(server.url.replace("http:", "https:"), data=b"{}", timeout=PATIENCE)

    error: Any = raised.value
    assert len(error.onefold.attempts) == 1


def test_a_body_that_can_be_read_once_is_sent_in_whole_each_time(server: Scripted, client: Any) -> None:
    server.script = [Say(500), CUT, Say()]
    parts: Any = parts_of(b"one ", b"two") if isinstance(client, Async) else iter([b"one ", b"two"])

    client.send(server.url, content=parts)

    assert [one.body for one in server.got] == [b"one two"] * 3
    for one in server.got:
        assert ("content-length" in one.headers) != ("transfer-encoding" in one.headers)


async def parts_of(*parts: bytes) -> Any:
    for part in parts:
        yield part


def test_a_stream_is_handed_out_live(server: Scripted) -> None:
    server.script = [Say(200, chunked=True, body=b"a stream")]
    transport = quick()
    with (
        httpx.Client(transport=transport, timeout=PATIENCE) as client,
        client.stream("POST", server.url, content=b"{}") as answer,
    ):
        assert not answer.is_stream_consumed
        assert b"".join(answer.iter_raw()) == b"a stream"
    with requests.Session() as session:
        session.mount("http://", Adapter(retries=QUICK))
        with session.post(server.url, data=b"{}", stream=True) as streamed:
            assert b"".join(streamed.iter_content(1_024)) == b"a stream"


def test_a_compressed_answer_is_decoded_once(server: Scripted, client: Any) -> None:
    server.script = [Say(200, [("Content-Encoding", "gzip")], gzip.compress(b"paid"))]

    assert client.send(server.url, content=b"{}").body == b"paid"


# The pauses.


def pauses(retries: Retries, *errors: Any) -> list[float]:
    """How long tenacity would wait after each of these."""
    found = []
    for number, error in enumerate(errors, 1):
        state = tenacity.RetryCallState(None, None, (), {})  # type: ignore[arg-type]
        state.attempt_number = number
        wanted = error if isinstance(error, Exception) else Wanted(None, 503, {"Retry-After": error})
        state.set_exception((type(wanted), wanted, None))
        found.append(plan(retries, (OSError,))["wait"](state))
    return found


def test_pauses_double_with_jitter_and_come_after_what_the_server_asks_for() -> None:
    lost = [OSError()] * 8
    first, second, third, *_, last = pauses(Retries(pause=1.0, pause_max=10.0), *lost)

    assert 0.5 <= first <= 1.0
    assert 1.0 <= second <= 2.0
    assert 2.0 <= third <= 4.0
    assert 5.0 <= last <= 10.0
    assert 7.0 < pauses(Retries(pause=1.0), "7")[0] <= 8.0
    assert 60.0 < pauses(Retries(pause=1.0), "86400")[0] <= 61.0


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("7", 7, 7),
        (" 7 ", 7, 7),
        ("", 0, 0),
        ("soon", 0, 0),
        ("-3", 0, 0),
        (lambda now: format_datetime(now + timedelta(seconds=3_600), usegmt=True), 3_000, 3_600),
        (lambda now: format_datetime(now.replace(tzinfo=None) + timedelta(seconds=3_600)), 3_000, 3_600),
        (lambda now: format_datetime(now - timedelta(seconds=100), usegmt=True), 0, 0),
    ],
)
def test_both_forms_of_retry_after_are_read(value: Any, least: float, most: float) -> None:
    written = value(datetime.now(UTC)) if callable(value) else value

    assert least <= retry_after({"Retry-After": written}) <= most


def test_a_conflict_is_asked_again_only_where_the_server_says_when() -> None:
    assert is_wanted_again(409, {"Retry-After": "1"})
    assert not is_wanted_again(409, {})


# Intents.


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kept(client: Any, clock: Clock) -> Any:
    """A guard that keeps intents."""
    return client.store(clock)


def begun(guard: Any) -> bool:
    """Whether there is an intent of our name that has not ended."""
    found = guard.read(OPERATION, "pay-order-42")
    return (asyncio.run(found) if asyncio.iscoroutine(found) else found) is not None


def test_an_intent_keeps_its_key_until_a_final_answer(server: Scripted, client: Any, kept: Any) -> None:
    server.script = [CUT] * 5 + [Say(500)] * 5 + [Say(201)]

    with pytest.raises(client.errors):
        client.send(server.url, content=b"{}", around=intent("pay-order-42", store=kept))
    assert client.send(server.url, content=b"{}", around=intent("pay-order-42", store=kept)).status == 500
    assert begun(kept)
    assert client.send(server.url, content=b"{}", around=intent("pay-order-42", store=kept)).status == 201
    assert not begun(kept)
    client.send(server.url, content=b"{}", around=intent("pay-order-42", store=kept))

    assert len(server.got) == 12
    assert len(set(server.keys[:11])) == 1
    assert server.keys[11] != server.keys[10]


def problem(code: str, status: int, *headers: tuple[str, str]) -> Say:
    body = json.dumps({"code": code, "status": status}).encode()
    return Say(status, [("Content-Type", "application/problem+json"), *headers], body)


REPLAYED = ("Idempotent-Replayed", "true")


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        (Say(200), True),
        (Say(204), True),
        (Say(302), True),
        (Say(307), False),
        (Say(308), False),
        (Say(400), True),
        (Say(402), True),
        (Say(404), True),
        (Say(422), True),
        (Say(409), False),
        (Say(409, [REPLAYED]), True),
        (Say(401), False),
        (Say(403), False),
        (Say(408), False),
        (Say(425), False),
        (Say(429), False),
        (Say(500), False),
        (Say(503), False),
        (problem("in_progress", 409, ("Retry-After", "1")), False),
        (problem("held", 409), False),
        (problem("claim_lost", 409, ("Retry-After", "1")), False),
        (problem("key_reused", 422), False),
        (problem("caller_unknown", 400), False),
        (problem("unauthorized", 401), False),
        (problem("store_unavailable", 503), False),
        (problem("outcome_unknown", 503), False),
        (problem("result_not_kept", 409), True),
        (problem("failed", 500), True),
        (Say(422, [("Content-Type", "application/problem+json")], b'{"title": "another kind of problem"}'), True),
        (Say(422, [("Content-Type", "application/problem+json")], b"no json"), True),
    ],
    ids=str,
)
def test_an_intent_ends_only_on_an_answer_after_which_nothing_else_can_come(
    server: Scripted, client: Any, kept: Any, answer: Say, ends: bool
) -> None:
    server.script = [answer]

    client.send(server.url, content=b"{}", around=intent("pay-order-42", store=kept))

    assert begun(kept) is not ends
    assert len(set(server.keys)) == 1


def pay_and_fail(client: httpx.Client, url: str, kept: Guard) -> None:
    with intent("pay-order-42", store=kept):
        client.post(url, content=b"{}")
        raise RuntimeError("the disk is full")


def test_an_intent_does_not_end_on_an_exception_though_the_answer_was_final(server: Scripted) -> None:
    kept = Guard("memory:")
    with httpx.Client(transport=quick(), timeout=PATIENCE) as client:
        with pytest.raises(RuntimeError, match="the disk is full"):
            pay_and_fail(client, server.url, kept)
        with intent("pay-order-42", store=kept) as again:
            client.post(server.url, content=b"{}")

    assert again.settled
    assert len(set(server.keys)) == 1
    assert not begun(kept)


def test_another_request_under_the_same_intent_is_refused_and_nothing_is_sent(
    server: Scripted, client: Any, kept: Any
) -> None:
    server.script = [Say(500)]
    client.send(server.url, content=b'{"amount": 5}', around=intent("pay-order-42", store=kept))
    before = len(server.got)

    others: list[Any] = [
        {"content": b'{"amount": 6}'},
        {"content": b'{"amount": 5}', "url": f"{server.url}/other"},
        {"content": b'{"amount": 5}', "method": "PATCH"},
    ]
    for other in others:
        with pytest.raises(KeyReused) as refused:
            client.send(**{"url": server.url, **other}, around=intent("pay-order-42", store=kept))
        assert "begun with another method, URL or body" in str(refused.value)

    assert len(server.got) == before


def test_an_intent_is_one_request(server: Scripted) -> None:
    with httpx.Client(transport=quick(), timeout=PATIENCE) as client, intent("pay-order-42", store="memory:"):
        client.post(server.url, content=b"{}")
        client.post(server.url, content=b"{}")
        with pytest.raises(UsageError, match="another one was sent inside it"):
            client.post(server.url, content=b"another")
        with pytest.raises(UsageError, match="a key of its own"):
            client.post(server.url, content=b"{}", headers={"Idempotency-Key": "mine"})

    assert len(set(server.keys)) == 1


def test_a_redirect_inside_of_an_intent_keeps_the_key(server: Scripted) -> None:
    server.script = [Say(307, [("Location", "/v2")]), Say()]
    kept = Guard("memory:")
    transport = quick()
    with (
        httpx.Client(transport=transport, follow_redirects=True, timeout=PATIENCE) as client,
        intent("pay-order-42", store=kept),
    ):
        client.post(server.url, content=b"{}")

    assert [one.path for one in server.got] == ["/", "/v2"]
    assert len(set(server.keys)) == 1
    assert not begun(kept)


def test_an_intent_that_the_server_has_forgotten_is_not_sent_any_more(
    server: Scripted, client: Any, kept: Any, clock: Clock
) -> None:
    server.script = [Say(500)]
    client.send(server.url, content=b"{}", around=intent("pay-order-42", store=kept, server_keeps="1h"))
    clock.advance(3_599)
    client.send(server.url, content=b"{}", around=intent("pay-order-42", store=kept, server_keeps="1h"))
    before = len(server.got)

    clock.advance(2)
    with pytest.raises(OutcomeUnknown, match=r"is 3601s old, .* a key for 1h \(server_keeps\).* Nothing was sent"):
        client.send(server.url, content=b"{}", around=intent("pay-order-42", store=kept, server_keeps="1h"))
    assert len(server.got) == before

    # Somebody has asked the server, and ends it by hand.
    by_hand = intent("pay-order-42", store=kept)
    asyncio.run(by_hand.aend()) if isinstance(kept, AsyncGuard) else by_hand.end()
    client.send(server.url, content=b"{}", around=intent("pay-order-42", store=kept, server_keeps="1h"))
    assert len(set(server.keys)) == 2


@pytest.mark.parametrize("down", ["claim", "finish"])
def test_an_intent_that_cannot_be_kept_sends_nothing(
    server: Scripted, client: Any, down: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onefold.http.client import _intent

    monkeypatch.setattr(_intent, "POLICY", _intent.POLICY.replace(lease=0.2))
    guard, store = client.broken_store()
    store.down.add(down)

    with pytest.raises(StoreUnavailable):
        client.send(server.url, content=b"{}", around=intent("pay-order-42", store=guard))

    assert server.got == []


def test_an_intent_is_async_if_its_client_is(server: Scripted) -> None:
    async def wrong() -> None:
        async with httpx.AsyncClient(
            transport=AsyncTransport(httpx.AsyncHTTPTransport(verify=False), retries=QUICK)
        ) as client:
            with intent("pay-order-42", store="memory:"), pytest.raises(UsageError, match="async one"):
                await client.post(server.url, content=b"{}")
        with httpx.Client(transport=quick(), timeout=PATIENCE) as blocking:
            async with intent("pay-order-42", store="memory:"):
                with pytest.raises(UsageError, match="blocking one"):
                    blocking.post(server.url, content=b"{}")  # noqa: ASYNC212 - it is refused for that
        with pytest.raises(UsageError, match="AsyncGuard or a URL"):
            async with intent("pay-order-42", store=Guard("memory:")):
                raise AssertionError
        with pytest.raises(UsageError, match="async with"), intent("pay-order-42", store=AsyncGuard("memory:")):
            raise AssertionError

    asyncio.run(wrong())

    assert server.got == []


def nothing() -> None: ...


def leave(kept: Any, inside: Callable[[], Any] = nothing) -> None:
    """A block that ends without an error."""

    async def in_loop() -> None:
        async with intent("pay-order-42", store=kept):
            inside()

    if isinstance(kept, AsyncGuard):
        asyncio.run(in_loop())
    else:
        with intent("pay-order-42", store=kept):
            inside()


def test_an_intent_by_which_no_request_came_is_told_and_its_key_stays(server: Scripted, client: Any, kept: Any) -> None:
    server.script = [Say(500)] * 5 + [Say(201)]
    client.send(server.url, content=b"{}", around=intent("pay-order-42", store=kept))

    with pytest.raises(
        UsageError, match=r"no POST or PATCH passed through it.*Transport, .*contextvars\.copy_context\(\)\.run"
    ):
        leave(kept)

    assert begun(kept)
    client.send(server.url, content=b"{}", around=intent("pay-order-42", store=kept))
    assert len(set(server.keys)) == 1


def test_a_client_without_our_transport_is_found_out(server: Scripted) -> None:
    with httpx.Client(verify=False, timeout=PATIENCE) as client, pytest.raises(UsageError, match="without its key"):
        leave(Guard("memory:"), lambda: client.post(server.url, content=b"{}"))


def test_a_thread_inherits_an_intent_only_with_a_copy_of_the_context(server: Scripted) -> None:
    kept = Guard("memory:")
    with httpx.Client(transport=quick(), timeout=PATIENCE) as client:

        def in_a_thread(around: Callable[..., Any]) -> None:
            thread = threading.Thread(target=around, args=(lambda: client.post(server.url, content=b"{}"),))
            thread.start()
            thread.join(PATIENCE)

        with pytest.raises(UsageError, match="A thread does not inherit the block"):
            leave(kept, lambda: in_a_thread(lambda send: send()))
        leave(kept, lambda: in_a_thread(contextvars.copy_context().run))

    assert not begun(kept)


def test_an_error_inside_of_an_intent_is_raised_as_it_is() -> None:
    def fail() -> None:
        raise RuntimeError("before anything was sent")

    with pytest.raises(RuntimeError, match="before anything was sent"):
        leave(Guard("memory:"), fail)


def test_an_intent_that_is_ended_by_hand_inside_of_its_block_needs_no_request() -> None:
    with intent("pay-order-42", store="memory:") as ours:
        ours.end()


def test_a_redirect_that_is_lost_on_its_way_does_not_end_an_intent(server: Scripted) -> None:
    server.script = [Say(307, [("Location", "/v2")]), *[CUT] * 10]
    kept = Guard("memory:")
    with httpx.Client(transport=quick(), follow_redirects=True, timeout=PATIENCE) as client:

        def send() -> None:
            with contextlib.suppress(httpx.TransportError):
                client.post(server.url, content=b"{}")

        leave(kept, send)

    assert begun(kept)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"attempts": 0}, "attempts=0 has to be 1 or more"),
        ({"attempts": -1}, "1 sends once, and never again"),
        ({"attempts": 2.5}, "attempts=2.5 has"),
        ({"attempts": True}, "attempts=True has"),
        ({"pause": -1}, "pause=-1 has to be seconds, such as pause=0.2"),
        ({"pause": "200ms"}, "pause='200ms' has to be seconds"),
        ({"pause_max": float("inf")}, "pause_max=inf has to be seconds"),
        ({"retry_after_max": float("nan")}, "retry_after_max=nan has to be seconds"),
    ],
)
def test_retries_that_cannot_be_meant_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Retries(**wrong)


@pytest.mark.parametrize("make", [Transport, AsyncTransport, Adapter])
def test_a_number_of_retries_is_no_retries(make: Any) -> None:
    with pytest.raises(UsageError, match=r"retries=3 is not a Retries: write retries=Retries\(attempts=5\)"):
        make(retries=3)


def test_what_ends_an_intent_is_a_rule_without_a_client() -> None:
    assert settles(200, {})
    assert not settles(409, {}, b'{"code": "held"}')


# A client that is killed.

SENDER = """
import sys, httpx
from onefold.http.client import Transport, Retries, intent

url, store = sys.argv[1:]
with httpx.Client(transport=Transport(retries=Retries(pause=0.01)), timeout=120.0) as client:
    with intent("pay-order-42", store=store):
        answer = client.post(url, json={"amount": 5})
print(answer.status_code, answer.extensions["onefold"].replayed)
"""


def sender(tmp_path: Path, url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SENDER, url, f"sqlite:///{tmp_path}/intents.db"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_an_intent_survives_the_death_of_its_process(server: Scripted, tmp_path: Path) -> None:
    server.flows.clear()
    with sender(tmp_path, server.url) as first:
        assert server.arrived.acquire(timeout=PATIENCE)
        first.send_signal(signal.SIGKILL)
    server.flows.set()

    with sender(tmp_path, server.url) as second:
        told = second.communicate(timeout=PATIENCE)[0]
    with sender(tmp_path, server.url) as third:
        third.communicate(timeout=PATIENCE)

    assert first.returncode == -signal.SIGKILL
    assert (second.returncode, told) == (0, "200 False\n")
    assert server.got[0].key == server.got[1].key
    assert server.got[0].body == server.got[1].body
    assert server.got[2].key != server.got[1].key


def test_a_killed_sender_and_a_lost_answer_charge_once(tmp_path: Path) -> None:
    """End to end, with a service of ours: the answer is lost twice, the first sender dies, and one payment is made."""
    with serving("asgi", records_in(tmp_path), tmp_path) as service, Proxy(service.url) as proxy:
        url = f"{proxy.url()}/below/pay?name=order"
        sends: dict[str, Any] = {"json": {"amount": 5}, "headers": {"X-Api-Key": "asha"}}
        store = f"sqlite:///{tmp_path}/intents.db"
        proxy.cut_after(b"amount")
        fault = proxy.cut_after(b"amount")
        impatient, patient = quick(replace(QUICK, attempts=2)), quick()
        with (
            httpx.Client(transport=impatient, timeout=PATIENCE) as client,
            pytest.raises(httpx.TransportError),
            intent("order", store=store),
        ):
            client.post(url, **sends)
        assert fault.reached.is_set()

        with httpx.Client(transport=patient, timeout=PATIENCE) as client, intent("order", store=store):
            answer = client.post(url, **sends)

        assert (answer.status_code, answer.extensions["onefold"].replayed) == (200, True)
        assert service.effects("order") == 1
