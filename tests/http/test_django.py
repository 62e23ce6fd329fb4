"""Views of Django and of Django REST framework, on WSGI and on ASGI, and a service of Litestar: real servers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.http_service.process import Service, records_in, serving

# Far more than an answer needs; it bounds how long a broken server hangs a test.
PATIENCE = 120.0


@pytest.fixture(scope="module", params=["django views", "django views on asgi"])
def framework_and_service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Service]]:
    folder = tmp_path_factory.mktemp("django")
    with serving(request.param, records_in(folder), folder) as service:
        yield request.param, service


@pytest.fixture(scope="module")
def service(framework_and_service: tuple[str, Service]) -> Service:
    return framework_and_service[1]


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


class Sender:
    """Sends requests that have the test's key, and its name."""

    def __init__(self, client: httpx.Client, name: str) -> None:
        self.client = client
        self.name = name

    def __call__(self, path: str, *, user: str = "1", key: str | None = None, **wish: Any) -> httpx.Response:
        body = {name: wish.pop(name) for name in ("json", "content", "data", "files") if name in wish}
        host = {"Host": wish.pop("host")} if "host" in wish else {}
        headers = {"X-User": user, "Idempotency-Key": f'"{key or self.name}"', "Connection": "close", **host}
        return self.client.post(path, params={"name": self.name, **wish}, headers=headers, **body)

    def rows(self) -> int:
        return int(self.client.get("/rows", params={"name": self.name}).text)


@pytest.fixture
def send(client: httpx.Client, name: str) -> Sender:
    return Sender(client, name)


def replays(*answers: httpx.Response) -> list[bool]:
    return [one.headers.get("idempotent-replayed") == "true" for one in answers]


# Transactions of a request.


def test_below_the_middleware_an_answer_is_remembered_once_its_transaction_is_committed(send: Sender) -> None:
    refused = [send("/middleware/pay", orphan="1", key=f"{send.name}-1") for _ in range(2)]
    paid = [send("/middleware/pay", key=f"{send.name}-2") for _ in range(2)]

    assert [one.status_code for one in refused] == [500, 500]
    assert [one.status_code for one in paid] == [201, 201]
    assert replays(*refused, *paid) == [False, False, False, True]
    assert send.rows() == 1


@pytest.mark.parametrize("path", ["/in-a-transaction", "/rest/atomic"])
def test_a_view_in_a_transaction_is_refused_because_its_answer_would_be_remembered_before_the_commit(
    send: Sender, service: Service, path: str
) -> None:
    assert send(path, json={"amount": 5}).status_code == 500
    assert "remembered before the commit" in service.log()
    assert send.rows() == 0
    assert service.effects(send.name) == 0


def test_a_host_is_compared_as_django_sees_it(send: Sender) -> None:
    answers = [send("/with-its-own", host=host) for host in ("a.example", "a.example:443", "b.example")]

    assert [one.status_code for one in answers] == [201, 201, 422]
    assert replays(*answers) == [False, True, False]


def test_a_view_with_its_own_transaction_is_guarded(send: Sender) -> None:
    first, second, other = send("/with-its-own"), send("/with-its-own"), send("/with-its-own", user="2")

    assert [one.status_code for one in (first, second, other)] == [201, 201, 201]
    assert replays(first, second, other) == [False, True, False]
    assert send.rows() == 2


def test_what_a_view_raises_as_an_answer_is_remembered_and_rolls_back(send: Sender, service: Service) -> None:
    missing = [send("/with-its-own", **{"raise": "404"}, key=f"{send.name}-1") for _ in range(2)]
    denied = [send("/with-its-own", **{"raise": "403"}, key=f"{send.name}-2") for _ in range(2)]

    assert [one.status_code for one in (*missing, *denied)] == [404, 404, 403, 403]
    assert missing[0].content == missing[1].content
    assert replays(*missing, *denied) == [False, True, False, False]
    assert service.effects(send.name) == 3
    # Whoever stands around the view sees what it raised.
    assert service.effects(f"{send.name}-seen") == 3
    assert send.rows() == 0


def test_nobody_in_particular_is_no_caller(send: Sender, service: Service) -> None:
    refused = send("/with-its-own", user="")

    assert (refused.status_code, refused.json()["code"]) == (400, "caller_unknown")
    assert service.effects(send.name) == 0


# Streams and files.


def test_a_file_is_sent_and_replayed(send: Sender, service: Service) -> None:
    first, second = send("/download"), send("/download")

    assert (first.content, second.content) == (b"a receipt", b"a receipt")
    assert replays(first, second) == [False, True]
    assert service.effects(send.name) == 1


@pytest.mark.parametrize(("parts", "kept"), [("10", True), ("100", False)])
def test_a_stream_is_sent_in_whole_and_remembered_up_to_the_limit(send: Sender, parts: str, kept: bool) -> None:
    first, second = send("/stream", parts=parts), send("/stream", parts=parts)

    assert len(first.content) == 100 * int(parts)
    assert second.content == (first.content if kept else b"")
    assert second.headers.get("idempotent-body") == (None if kept else "omitted")
    assert replays(first, second) == [False, True]


def test_an_async_stream_and_an_async_view_are_guarded_on_asgi(
    send: Sender, framework_and_service: tuple[str, Service], service: Service
) -> None:
    if "asgi" not in framework_and_service[0]:
        pytest.skip("async streams belong to ASGI")

    before = len(service.log())
    streams = [send("/middleware/events", key=f"{send.name}-1") for _ in range(2)]
    views = [send("/middleware/awaited", key=f"{send.name}-2") for _ in range(2)]

    assert [one.content for one in streams] == [b"0 1 2 "] * 2
    assert [(one.status_code, one.text) for one in views] == [(201, f"{send.name}-2")] * 2
    assert replays(*streams, *views) == [False, True] * 2
    assert service.effects(send.name) == 2
    # As Django warns of a stream that it has to read in the event loop.
    assert "synchronous iterator" not in service.log()[before:]


# Django REST framework.


def test_a_rest_view_is_guarded_after_its_permissions(send: Sender, service: Service) -> None:
    stranger = send("/rest/payments", user="", json={"amount": 5})
    first, second = (send("/rest/payments", json={"amount": 5}) for _ in range(2))
    other = send("/rest/payments", json={"amount": 6})

    assert (stranger.status_code, other.status_code, other.json()["code"]) == (401, 422, "key_reused")
    assert (first.status_code, first.json()) == (201, {"key": send.name, "amount": 5})
    assert (second.status_code, second.content, second.headers["allow"]) == (201, first.content, first.headers["allow"])
    assert replays(stranger, first, second) == [False, False, True]
    assert service.effects(send.name) == 1


def test_what_the_framework_makes_of_an_error_is_remembered_if_it_is_final(send: Sender, service: Service) -> None:
    invalid = [send("/rest/payments", json={"amount": "x"}, key=f"{send.name}-1") for _ in range(2)]
    unknown = [send("/rest/payments", json={"amount": 5}, key=f"{send.name}-2", **{"raise": "401"}) for _ in range(2)]

    assert [one.status_code for one in (*invalid, *unknown)] == [400, 400, 401, 401]
    assert replays(*invalid, *unknown) == [False, True, False, False]
    assert service.effects(send.name) == 3


def test_what_the_framework_raises_is_unknown_and_held(send: Sender, service: Service) -> None:
    first, second = (send("/rest/payments", json={"amount": 5}, **{"raise": "boom"}) for _ in range(2))

    assert (first.status_code, second.status_code, second.json()["code"]) == (500, 409, "held")
    assert service.effects(send.name) == 1


def test_forms_reach_a_rest_view_and_other_methods_are_not_touched(send: Sender, client: httpx.Client) -> None:
    files = {"receipt": b"r" * 100}
    uploaded, again = (send("/rest/payments", data={"amount": "7"}, files=files) for _ in range(2))
    looked = client.get("/rest/payments", params={"name": send.name}, headers={"X-User": "1", "Idempotency-Key": "a b"})

    assert (uploaded.status_code, uploaded.json()["amount"]) == (201, 7)
    # With another boundary.
    assert replays(uploaded, again) == [False, True]
    assert looked.status_code == 400
    assert "code" not in looked.json()


def test_a_viewset_is_guarded_too(send: Sender, service: Service) -> None:
    first, second = (send("/rest/refunds", json={"amount": 5}) for _ in range(2))

    assert (first.status_code, first.json(), second.content) == (201, {"refunded": 5}, first.content)
    assert replays(first, second) == [False, True]
    assert service.effects(send.name) == 1


def test_a_body_that_was_read_before_its_view_is_a_bug_and_not_an_empty_body(send: Sender, service: Service) -> None:
    refused = send("/rest/eager", data={"amount": "7"}, files={"receipt": b"r"})

    assert refused.status_code == 500
    assert "the body was read before its view" in service.log()
    assert service.effects(send.name) == 0


# Litestar.


@pytest.fixture(scope="module")
def litestar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("litestar")
    with serving("litestar", records_in(folder), folder) as service:
        yield service


def test_litestar_is_guarded_by_the_middleware(litestar: Service, name: str) -> None:
    def post(path: str, key: str) -> list[httpx.Response]:
        headers = {"X-Api-Key": "asha", "Idempotency-Key": f"{name}-{key}", "Connection": "close"}
        return [http.post(path, params={"name": name}, json={"amount": 5}, headers=headers) for _ in range(2)]

    with httpx.Client(base_url=litestar.url, timeout=PATIENCE) as http:
        paid, missing, broken, streamed = (post(f"/{what}", what) for what in ("pay", "missing", "boom", "stream"))

    assert [(one.status_code, one.json()) for one in paid] == [(201, {"key": f"{name}-pay", "amount": 5})] * 2
    assert [one.status_code for one in (*missing, *broken)] == [404, 404, 500, 500]
    assert [one.content for one in streamed] == [b"one two"] * 2
    assert replays(*paid, *missing, *broken, *streamed) == [False, True, False, True, False, False, False, True]
    assert litestar.effects(name) == 5
