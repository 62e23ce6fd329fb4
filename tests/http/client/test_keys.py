"""Which keys a server sees: one for a request and all that follows from it, and another for the next one.

Redirects, challenges, hooks and objects that are sent twice; bare, in a handler and in an intent.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import copy
import io
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import requests

from onefold import AsyncGuard, Guard, KeyReused, UsageError, current
from onefold.http._shared.intents import OPERATION
from onefold.http.client import Adapter, AsyncTransport, Attempt, Retries, Transport, intent
from onefold.http.client._handler_keys import Keyed, Request, keyed
from onefold.http.client._identity import caller, for_whom
from tests.http_service.scripted import CUT, Say, Scripted, scripted

ONCE = Retries(attempts=1)
PATIENCE = 120.0


class Crash(BaseException):
    """The process dies here, as far as the guard can see."""


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


def to(path: str) -> list[tuple[str, str]]:
    return [("Location", path)]


CHALLENGE = Say(401, [("WWW-Authenticate", 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5')])
PAID = Say(201)

# What a server says to one request and to all that follows from it.
STORIES: dict[str, tuple[str, list[Say]]] = {
    "plain": ("POST", [PAID]),
    "307": ("POST", [Say(307, to("/v2")), PAID]),
    "308": ("PATCH", [Say(308, to("/v2?a=%20b")), PAID]),
    "307 to itself": ("POST", [Say(307, to("/pay")), PAID]),
    "307 twice": ("POST", [Say(307, to("/v2")), Say(307, to("/v3")), PAID]),
    "301, as GET": ("POST", [Say(301, to("/v2")), Say(200)]),
    "302, as GET": ("POST", [Say(302, to("/v2")), Say(200)]),
    "303, as GET": ("POST", [Say(303, to("/v2")), Say(200)]),
    "301, as PATCH": ("PATCH", [Say(301, to("/v2")), PAID]),
    "challenge": ("POST", [CHALLENGE, PAID]),
    "307, then a challenge": ("POST", [Say(307, to("/v2")), CHALLENGE, PAID]),
}


class Sync:
    """httpx, blocking. `run` sends each of some requests, in places of this kind: each is `again` or another one."""

    lost: Any = httpx.TransportError

    def __init__(self) -> None:
        self.guard: Any = Guard("memory:")

    def run(self, around: str, method: str, url: str, *requests: Any, crash: bool = False, key: str = "1") -> None:
        transport = Transport(httpx.HTTPTransport(verify=False), retries=ONCE)
        with httpx.Client(transport=transport, follow_redirects=True, timeout=PATIENCE) as client:
            ready = client.build_request(method, url, content=b"{}")

            def send(same: bool = False, lost: bool = False, digest: bool = False, **options: Any) -> None:
                request = ready if same else client.build_request(method, url, content=b"{}", **options)
                try:
                    client.send(request, auth=httpx.DigestAuth("ada", "secret") if digest else None)
                except httpx.TransportError:
                    assert lost

            self._run(around, send, requests, crash, key)

    def _run(self, around: str, send: Callable[..., None], requests: Any, crash: bool, key: str) -> None:
        def handle() -> None:
            for request in requests:
                send(**request)
            if crash:
                raise Crash

        if around == "handler":
            self.guard.run("charge", key, handle)
        elif around == "intent":
            for number, request in enumerate(requests):
                with intent(f"pay-{number}", store=self.guard):
                    send(**request)
        else:
            handle()

    def is_begun(self, name: str) -> bool:
        return self.guard.read(OPERATION, name) is not None


class Requests(Sync):
    """requests."""

    lost = requests.RequestException

    def run(self, around: str, method: str, url: str, *wanted: Any, crash: bool = False, key: str = "1") -> None:
        with requests.Session() as session:
            session.mount("http://", Adapter(retries=ONCE))
            ready = session.prepare_request(requests.Request(method, url, data=b"{}"))

            def send(same: bool = False, lost: bool = False, digest: bool = False, **options: Any) -> None:
                auth = requests.auth.HTTPDigestAuth("ada", "secret") if digest else None
                made = requests.Request(method, url, data=b"{}", auth=auth, **options)
                try:
                    session.send(ready if same else session.prepare_request(made), timeout=PATIENCE)
                except requests.RequestException:
                    assert lost

            self._run(around, send, wanted, crash, key)


class Async(Sync):
    """httpx, async."""

    def __init__(self) -> None:
        self.guard = AsyncGuard("memory:")

    def run(self, around: str, method: str, url: str, *requests: Any, crash: bool = False, key: str = "1") -> None:
        asyncio.run(self._story(around, method, url, requests, crash, key))

    async def _story(self, around: str, method: str, url: str, requests: Any, crash: bool, key: str) -> None:
        transport = AsyncTransport(httpx.AsyncHTTPTransport(verify=False), retries=ONCE)
        async with httpx.AsyncClient(transport=transport, follow_redirects=True, timeout=PATIENCE) as client:
            ready = client.build_request(method, url, content=b"{}")

            async def send(same: bool = False, lost: bool = False, digest: bool = False, **options: Any) -> None:
                request = ready if same else client.build_request(method, url, content=b"{}", **options)
                try:
                    await client.send(request, auth=httpx.DigestAuth("ada", "secret") if digest else None)
                except httpx.TransportError:
                    assert lost

            async def handle() -> None:
                for request in requests:
                    await send(**request)
                if crash:
                    raise Crash

            if around == "handler":
                await self.guard.run("charge", key, handle)
            elif around == "intent":
                for number, request in enumerate(requests):
                    async with intent(f"pay-{number}", store=self.guard):
                        await send(**request)
            else:
                await handle()

    def is_begun(self, name: str) -> bool:
        return asyncio.run(self.guard.read(OPERATION, name)) is not None


@pytest.fixture(params=[Sync, Async, Requests], ids=["httpx", "httpx-async", "requests"])
def client(request: pytest.FixtureRequest) -> Any:
    return request.param()


def keys_by_request(server: Scripted, of_each: int) -> list[set[str | None]]:
    """The keys that the server saw for each request and all that followed from it."""
    return [set(server.keys[start : start + of_each]) for start in range(0, len(server.keys), of_each)]


@pytest.mark.parametrize("around", ["bare", "handler", "intent"])
@pytest.mark.parametrize("how", ["equal ones", "the same object"])
def test_a_request_and_all_that_follows_from_it_have_one_key_and_the_next_one_has_another(
    server: Scripted, client: Any, how: str, around: str
) -> None:
    is_same = how == "the same object"
    for story, (method, answers) in STORIES.items():
        is_digest = "challenge" in story
        if is_digest and is_same and isinstance(client, Requests):
            # Its HTTPDigestAuth answers one challenge for each object.
            continue
        server.script, server.got[:] = answers * 5, []
        one = {"same": is_same, "digest": is_digest}

        client.run(around, method, f"{server.url}/pay", one, one, key=story)

        first, second = keys_by_request(server, len(answers))
        assert (len(first), len(second)) == (1, 1), story
        assert first != second, story
        assert around != "intent" or not client.is_begun("pay-0"), story


def test_a_rerun_sends_the_same_keys_for_all_of_them(server: Scripted, client: Any) -> None:
    for story, (method, answers) in STORIES.items():
        server.script, server.got[:] = answers * 5, []
        one = {"digest": "challenge" in story}

        with pytest.raises(Crash):
            client.run("handler", method, f"{server.url}/pay", one, one, crash=True, key=story)
        client.run("handler", method, f"{server.url}/pay", one, one, key=story)

        first, second, *again = keys_by_request(server, len(answers))
        assert again == [first, second], story
        assert first != second, story


@pytest.mark.parametrize("around", ["bare", "handler"])
@pytest.mark.parametrize("moved", [307, 301])
def test_an_object_keeps_its_key_until_an_answer_is_final(
    server: Scripted, client: Any, around: str, moved: int
) -> None:
    method, goes_on = "POST" if moved == 307 else "PATCH", Say(moved, to("/v2"))
    for lost in ([CUT], [goes_on, CUT]):
        server.script, server.got[:] = [*lost, goes_on, PAID, goes_on, PAID], []
        one: Any = {"same": True}

        client.run(around, method, server.url, {**one, "lost": True}, one, one, key=str(len(lost)))

        *before, third, fourth = server.keys
        assert len(before) == len(lost) + 2
        assert len(set(before)) == 1
        assert third == fourth != before[0]


def test_an_object_of_the_module_is_another_request_in_each_delivery(server: Scripted) -> None:
    guard, kept = Guard("memory:"), Guard("memory:")
    server.script = [Say(500)]
    with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE)) as client:
        ready = client.build_request("POST", server.url, content=b"{}")

        def charge(key: str) -> None:
            guard.run("charge", key, lambda: client.send(ready).status_code)

        def in_steps() -> None:
            for step in ("first", "second"):
                current().step(step, lambda: client.send(ready).status_code)

        for key in ("order-1", "order-2"):
            charge(key)
        guard.run("charge", "order-3", in_steps)
        for name in ("pay-1", "pay-2"):
            with intent(name, store=kept):
                client.send(ready)
        client.send(ready)

    assert len(server.keys) == len(set(server.keys)) == 7


def test_an_object_that_is_sent_twice_at_once_is_two_requests_with_retries_of_their_own() -> None:
    keys: list[str] = []

    async def story() -> None:
        both = asyncio.Barrier(2)

        async def answer(request: httpx.Request) -> httpx.Response:
            keys.append(request.headers["Idempotency-Key"])
            # Both are sent before one is answered, and the first answers are lost.
            await both.wait()
            return httpx.Response(500 if len(keys) == 2 else 201)

        transport = AsyncTransport(httpx.MockTransport(answer), retries=Retries(attempts=2, pause=0))
        async with httpx.AsyncClient(transport=transport) as client:
            ready = client.build_request("POST", "http://127.0.0.1/", content=b"{}")
            await asyncio.gather(client.send(ready), client.send(ready))

    asyncio.run(story())

    assert sorted(keys.count(key) for key in set(keys)) == [2, 2]


def test_an_object_of_requests_that_is_sent_twice_at_once_is_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    both = threading.Barrier(2)

    def answer(adapter: Any, request: requests.PreparedRequest, **_: Any) -> requests.Response:
        both.wait(PATIENCE)
        keys.append(request.headers["Idempotency-Key"])
        both.wait(PATIENCE)
        response = requests.Response()
        response.status_code, response.request, response.raw = 500 if len(keys) == 2 else 201, request, io.BytesIO()
        both.wait(PATIENCE)
        return response

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", answer)
    ready = requests.Request("POST", "http://127.0.0.1/", data=b"{}").prepare()
    adapter = Adapter(retries=Retries(attempts=2, pause=0))
    with ThreadPoolExecutor(2) as threads:
        sent = [threads.submit(adapter.send, ready) for _ in range(2)]
        assert [one.result(PATIENCE).status_code for one in sent] == [201, 201]

    assert sorted(keys.count(key) for key in set(keys)) == [2, 2]


def test_a_copy_of_an_object_is_another_request(server: Scripted) -> None:
    guard = Guard("memory:")

    def handle() -> None:
        server.script = [PAID]
        with requests.Session() as session:
            session.mount("http://", Adapter(retries=ONCE))
            ready = session.prepare_request(requests.Request("POST", server.url, data=b"{}"))
            session.send(ready)
            for again in (ready.copy(), copy.deepcopy(ready)):
                session.send(again)
            server.script = [Say(500)]
            session.send(ready)
            another = ready.copy()
            another.prepare_body(b"another", None)
            session.send(another)

    handle()
    guard.run("charge", "order-1", handle)

    assert len(server.keys) == len(set(server.keys)) == 10


def test_a_copy_with_another_body_in_an_intent_is_refused(server: Scripted) -> None:
    server.script = [Say(307, to("/v2")), Say(307, to("/v3"))]
    with requests.Session() as session, intent("pay", store="memory:"):
        session.mount("http://", Adapter(retries=ONCE))
        ready = session.prepare_request(requests.Request("POST", server.url, data=b"{}"))
        session.send(ready, allow_redirects=False)
        another = ready.copy()
        another.prepare_body(b"another", None)
        with pytest.raises(UsageError, match="another one was sent inside it"):
            session.send(another)

    assert len(server.keys) == 1


def test_a_response_of_requests_can_be_pickled(server: Scripted) -> None:
    with requests.Session() as session:
        session.mount("http://", Adapter(retries=ONCE))
        response = session.post(server.url, data=b"{}")

    again = pickle.loads(pickle.dumps(response))
    assert again.request.headers["Idempotency-Key"] == server.keys[0]
    assert type(again.request.headers["Idempotency-Key"]) is str


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_session_with_our_adapter_can_be_copied_and_pickled(server: Scripted, copied: Callable[[Any], Any]) -> None:
    server.script = [Say(503), Say(503), PAID]

    with requests.Session() as session:
        session.mount("http://", Adapter(retries=Retries(attempts=2, pause=0)))
        with copied(session) as another:
            assert another.post(server.url, data=b"{}").onefold.attempts == [Attempt(status=503)] * 2
            assert another.post(server.url, data=b"{}").status_code == 201

    first, second, third = server.keys
    assert first == second != third


@pytest.mark.parametrize("follow", ["by next_request", "by hand"])
def test_a_redirect_that_is_followed_by_the_handler_keeps_the_key(server: Scripted, follow: str) -> None:
    server.script = [Say(307, to("/v2")), PAID] * 3
    guard = Guard("memory:")

    def handle() -> None:
        with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE)) as client:
            for _ in range(2):
                moved = client.post(server.url, content=b"{}")
                assert moved.next_request is not None
                if follow == "by next_request":
                    client.send(moved.next_request)
                else:
                    client.post(moved.next_request.url, content=b"{}", headers=moved.request.headers)

    guard.run("charge", "order-1", handle)

    first, second, third, fourth = server.keys
    assert first == second != third == fourth


class Pipe:
    """Something to read from that cannot go back."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)

    def read(self, size: int = -1) -> bytes:
        return self._content.read(size)

    def tell(self) -> int:
        raise OSError("not seekable")

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._content)


def half_read(content: bytes) -> io.BytesIO:
    file = io.BytesIO(b"before" + content)
    file.seek(len(b"before"))
    return file


@pytest.mark.parametrize(
    "made",
    [io.BytesIO, half_read, lambda content: io.StringIO(content.decode()), Pipe, lambda content: iter([content])],
    ids=["file", "half-read file", "text", "pipe", "generator"],
)
@pytest.mark.parametrize("status", [307, 308])
def test_a_file_is_sent_on_by_a_redirect_with_its_key(server: Scripted, made: Any, status: int) -> None:
    server.script = [Say(status, to("/v2")), PAID]

    with requests.Session() as session:
        session.mount("http://", Adapter(retries=ONCE))
        response = session.post(f"{server.url}/pay", data=made(b"forty-two"), timeout=PATIENCE)

    assert response.status_code == 201
    assert [(one.path, one.body) for one in server.got] == [("/pay", b"forty-two"), ("/v2", b"forty-two")]
    assert len(set(server.keys)) == 1


def test_hooks_see_the_key_and_a_hook_that_repeats_a_request_sends_the_same_one(server: Scripted) -> None:
    server.script = [Say(503), PAID, PAID]
    seen: list[str] = []

    def again(response: httpx.Response) -> None:
        seen.append(response.request.headers["Idempotency-Key"])
        if response.status_code == 503:
            hooked.send(response.request)

    transport = Transport(httpx.HTTPTransport(verify=False), retries=ONCE)
    with httpx.Client(transport=transport, event_hooks={"response": [again]}) as hooked:
        for _ in range(2):
            hooked.post(server.url, content=b"{}")

    assert seen[1:] == [seen[0], server.keys[2]]
    assert server.keys[:2] == [seen[0]] * 2
    assert server.keys[2] != server.keys[0]


def test_a_key_of_the_callers_own_stays_on_its_object_and_on_its_redirect(server: Scripted, client: Any) -> None:
    server.script = [Say(307, to("/v2")), PAID] * 5

    for around in ("bare", "handler"):
        client.run(around, "POST", server.url, *[{"headers": {"Idempotency-Key": "mine"}}] * 2)

    assert server.keys == ["mine"] * 8


def test_a_redirect_that_is_lost_does_not_end_an_intent(server: Scripted, client: Any) -> None:
    server.script = [Say(301, to("/v2")), CUT]

    client.run("intent", "PATCH", server.url, {"lost": True})

    assert client.is_begun("pay-0")


def test_a_key_that_is_given_to_an_object_later_is_the_callers_own(server: Scripted) -> None:
    with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE)) as httpx_client:
        ready = httpx_client.build_request("POST", server.url, content=b"{}")
        httpx_client.send(ready)
        ready.headers["Idempotency-Key"] = "mine"
        for _ in range(2):
            httpx_client.send(ready)
    with requests.Session() as session:
        session.mount("http://", Adapter(retries=ONCE))
        prepared = session.prepare_request(requests.Request("POST", server.url, data=b"{}"))
        session.send(prepared)
        prepared.headers["Idempotency-Key"] = "mine"
        for _ in range(2):
            session.send(prepared)

    assert [key == "mine" for key in server.keys] == [False, True, True] * 2


GIVEN: dict[str, Callable[[Any], Any]] = {
    "the key": lambda answer: {"Idempotency-Key": answer.request.headers["Idempotency-Key"]},
    "all headers": lambda answer: answer.request.headers,
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("is_requests", [False, True], ids=["httpx", "requests"])
def test_a_key_that_is_read_from_an_answer_and_given_by_hand_is_kept(
    server: Scripted, is_requests: bool, given: str
) -> None:
    def handle() -> None:
        if is_requests:
            with requests.Session() as session:
                session.mount("http://", Adapter(retries=ONCE))
                answer: Any = session.post(server.url, data=b"{}")
                session.post(server.url, data=b"{}", headers=GIVEN[given](answer))
        else:
            with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE)) as client:
                answer = client.post(server.url, content=b"{}")
                client.post(server.url, content=b"{}", headers=GIVEN[given](answer))

    handle()
    Guard("memory:").run("charge", "order-1", handle)

    first, second, third, fourth = server.keys
    assert first == second != third == fourth


def test_a_transport_inside_of_a_transport_keeps_the_key() -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        return httpx.Response(500 if len(keys) == 1 else 201)

    inner = Transport(httpx.MockTransport(answer), retries=ONCE)
    with httpx.Client(transport=Transport(inner, retries=ONCE)) as outer:
        ready = outer.build_request("POST", "http://127.0.0.1/")
        told = [outer.send(ready).extensions["onefold"].key for _ in range(3)]

    assert keys == told
    assert keys[0] == keys[1] != keys[2]


# The rules, without a client.

HERE = "http://127.0.0.1:80/pay"


def answered(status: int, location: str, method: str = "POST", url: str = HERE) -> Keyed:
    """A request outside of every handler, and its answer."""
    with keyed(Request(method, url, b"{}")) as call:
        call.heard(status, {"Location": location}, b"")
    return call


def elsewhere(work: Callable[[], Keyed]) -> Keyed:
    """What comes of this work in another thread of the same handler."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(contextvars.copy_context().run, work).result()


def goes_on(call: Keyed, url: str, body: bytes = b"{}") -> bool:
    return keyed(Request(call.method, url, body, given=call.key, carried=call)) is call


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/v2", "http://127.0.0.1/v2"),
        ("v2?a=1#top", "http://127.0.0.1:80/v2?a=1"),
        ("http://ada@Example.com/v%32", "http://example.com/v2"),
        ("//example.com", "http://example.com/"),
        ("HTTPS://example.com:443/a b", "https://example.com/a%20b"),
    ],
)
def test_a_redirect_is_recognised_however_its_place_is_written(location: str, url: str) -> None:
    assert goes_on(answered(307, location), url)


def test_a_copy_for_another_place_or_with_another_body_does_not_follow_from_a_redirect() -> None:
    assert not goes_on(answered(307, "/v2"), "http://127.0.0.1/v3")
    assert not goes_on(answered(307, "/v2"), "http://127.0.0.1/v2", b"another")
    assert not goes_on(answered(302, "/v2", "PATCH"), "http://127.0.0.1/v2")
    assert not goes_on(answered(301, "/v2"), "http://127.0.0.1/v2")
    assert not goes_on(answered(307, "http://[broken"), "http://127.0.0.1/v2")


def test_a_redirect_that_is_lost_is_retried_although_its_request_was_answered() -> None:
    guard = Guard("memory:")
    equal = Request("PATCH", HERE, b"{}")

    def handle() -> None:
        with keyed(equal) as moved:
            # While it is on its way, another thread sends an equal one.
            other = elsewhere(lambda: answered(500, "", "PATCH"))
            moved.heard(301, {"Location": "/v2"}, b"")
        assert moved.key != other.key
        with keyed(Request("PATCH", "http://127.0.0.1/v2", b"{}", given=moved.key, carried=moved)) as sent_on:
            assert sent_on is moved
        assert {keyed(equal), keyed(equal)} == {moved, other}

    guard.run("charge", "order-1", handle)


# For whom, and by whom.


def bearer(**claims: Any) -> str:
    parts = [base64.urlsafe_b64encode(json.dumps(one).encode()).decode().rstrip("=") for one in ({}, claims)]
    return ".".join(["Bearer " + parts[0], parts[1], "signature"])


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


ANOTHER = {
    "account": ({"Stripe-Account": "acct_1"}, {"Stripe-Account": "acct_2"}),
    "tenant": ({"X-Tenant-Id": "1"}, {"x-tenant-id": "2"}),
    "api key": ({"X-Api-Key": "one"}, {"X-Api-Key": "two"}),
    "token": ({"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}),
    "user": ({"Authorization": basic("ada:secret")}, {"Authorization": basic("eve:secret")}),
    "claims": ({"Authorization": bearer(sub="ada", iat=1)}, {"Authorization": bearer(sub="eve", iat=1)}),
}


@pytest.mark.parametrize("which", ANOTHER)
def test_a_request_for_another_account_is_no_retry_of_one_that_was_lost(
    server: Scripted, client: Any, which: str
) -> None:
    one, another = ({"headers": headers, "lost": True} for headers in ANOTHER[which])
    server.script = [CUT, CUT, PAID, PAID, PAID]

    with pytest.raises(Crash):
        client.run("handler", "POST", server.url, one, another, crash=True)
    client.run("handler", "POST", server.url, one, another)

    first, second, *again = server.keys
    assert first != second
    assert again == [first, second]


def test_a_rerun_that_leaves_out_an_account_does_not_send_its_key_for_another(server: Scripted, client: Any) -> None:
    one, another = ({"headers": headers} for headers in ANOTHER["account"])

    with pytest.raises(Crash):
        client.run("handler", "POST", server.url, one, another, crash=True)
    client.run("handler", "POST", server.url, another)

    assert server.keys[2] == server.keys[1] != server.keys[0]


CHANGED = {
    "token": ("Bearer one", "Bearer two"),
    "password": (basic("ada:old"), basic("ada:new")),
    "claims": (bearer(sub="ada", iat=1, jti="a"), bearer(sub="ada", iat=2, jti="b")),
    "signature": ("AWS4-HMAC-SHA256 Signature=1", "AWS4-HMAC-SHA256 Signature=2"),
}


@pytest.mark.parametrize("which", CHANGED)
def test_a_rerun_with_renewed_credentials_sends_the_same_key(server: Scripted, client: Any, which: str) -> None:
    old, new = ({"headers": {"Authorization": value, "Date": value, "X-Request-Id": value}} for value in CHANGED[which])

    with pytest.raises(Crash):
        client.run("handler", "POST", server.url, old, old, crash=True)
    client.run("handler", "POST", server.url, new, new)

    first, second, *again = server.keys
    assert again == [first, second]
    assert first != second


@pytest.mark.parametrize("status", [401, 403])
def test_credentials_that_were_refused_and_renewed_send_the_same_key(
    server: Scripted, client: Any, status: int
) -> None:
    old, new = ({"headers": {"Authorization": value}} for value in CHANGED["token"])
    server.script = [Say(status), PAID]

    client.run("handler", "POST", server.url, old, new, new)

    assert server.keys[0] == server.keys[1] != server.keys[2]


def test_an_intent_for_another_account_is_refused(server: Scripted) -> None:
    server.script = [Say(500)]
    kept = Guard("memory:")
    with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False), retries=ONCE)) as client:

        def pay(account: str, token: str) -> None:
            with intent("pay", store=kept):
                client.post(server.url, headers={"Stripe-Account": account, "Authorization": f"Bearer {token}"})

        pay("acct_1", "old")
        pay("acct_1", "new")
        with pytest.raises(KeyReused) as refused:
            pay("acct_2", "new")

    assert "for another account" in str(refused.value)
    assert (len(server.keys), len(set(server.keys))) == (2, 1)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("Stripe-Account", True),
        ("Stripe-Context", True),
        ("X-Tenant-ID", True),
        ("X-TenantId", True),
        ("OpenAI-Organization", True),
        ("X-Goog-User-Project", True),
        ("User-Agent", False),
        ("X-Stripe-Client-User-Agent", False),
        ("X-User-Token", False),
        ("X-Account-Signature", False),
        ("X-Request-Id", False),
        ("traceparent", False),
        ("Date", False),
        ("Cookie", False),
        ("Authorization", False),
        ("Accept-Encoding", False),
        ("Content-Type", False),
    ],
)
def test_headers_that_say_for_whom_are_part_of_the_name(name: str, counts: bool) -> None:
    request = Request("POST", "http://127.0.0.1/", b"", headers={name: "7"})

    assert for_whom(request.headers) == (f"{name.lower()}: 7" if counts else "")
    assert request.name.endswith(f" {name.lower()}: 7") is counts


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer a.b.c", "Bearer a.e30.c", "Bearer a.W10.c", "Digest a", "OAuth b"]
)
def test_what_says_nothing_about_the_caller_tells_nobody_apart(value: str) -> None:
    assert caller({"Authorization": value}) in ("", caller({"Authorization": "Bearer "}))
