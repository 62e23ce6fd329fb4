"""Rows 27 to 33 and 42 to 49e of the edge cases, on real servers with real sockets: one matrix for every framework."""

from __future__ import annotations

import gzip
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from services.postgres import Database
from services.servers import Server
from tests.http_service.process import SERVERS, Service, records_in, serving
from tests.http_service.wire import Raw, Wire, post_of

# Every day all of it on ASGI and WSGI, to which the other frameworks' guards are adapters; and a part on every other
# framework, and on each other store with one sync or async framework. The rest is for `make test-all`.
EVERY_RULE = [("asgi", "sqlite"), ("wsgi", "sqlite")]
A_PART = [(framework, "sqlite") for framework in SERVERS] + [("asgi", "redis"), ("django", "postgres")]
MORE = [(framework, store) for store in ("redis", "postgres") for framework in ("asgi", "wsgi", "django", "flask")]
SERVED = list(dict.fromkeys((*EVERY_RULE, *A_PART, *MORE)))
PART = {
    "test_the_same_key_with_another_request_is_refused_and_the_right_one_still_replays",
    "test_what_cannot_be_a_key_gets_400_and_nothing_runs",
    "test_the_rule_says_which_first_answers_are_replayed",
    "test_the_rule_says_whether_an_exception_is_final",
    "test_a_stream_is_passed_on_live_while_it_is_captured",
    "test_of_eight_at_once_one_runs_and_the_others_get_409_with_a_short_retry_after",
    "test_a_client_that_goes_does_not_end_what_has_started",
    "test_no_key_no_credential_and_no_body_is_in_the_logs_and_no_credential_in_the_store",
}

# A view's answer is read to its end before it is sent.
BUFFERED = {"django", "flask"}

PATIENCE = 120.0


@pytest.fixture(scope="module")
def http_redis_url(redis_server: Server) -> str:
    return redis_server.url


@pytest.fixture(scope="module")
def http_postgres_url(postgres: Server) -> Iterator[str]:
    database = Database(postgres)
    yield database.url
    database.drop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test with frameworks and stores, and mark those that are not for every day."""
    if "framework_and_service" in metafunc.fixturenames:
        everyday = A_PART if metafunc.function.__name__ in PART else EVERY_RULE
        params = [
            pytest.param(served, id="-".join(served), marks=() if served in everyday else pytest.mark.more)
            for served in SERVED
        ]
        metafunc.parametrize("framework_and_service", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def framework_and_service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Service]]:
    framework, store = request.param
    folder = tmp_path_factory.mktemp(f"{framework}-{store}")
    url = records_in(folder) if store == "sqlite" else request.getfixturevalue(f"http_{store}_url")
    with serving(framework, url, folder) as service:
        yield framework, service


@pytest.fixture(scope="module")
def framework(framework_and_service: tuple[str, Service]) -> str:
    return framework_and_service[0]


@pytest.fixture(scope="module")
def service(framework_and_service: tuple[str, Service]) -> Service:
    return framework_and_service[1]


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, headers={"X-Api-Key": "asha"}, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def name() -> str:
    """Of the requests of one test, in the service's list of effects; a key too."""
    return uuid.uuid4().hex


Post = Callable[..., httpx.Response]


@pytest.fixture
def post(client: httpx.Client, name: str) -> Post:
    def send(
        path: str = "/below/pay", *, key: str | None = "", headers: Any = None, content: Any = b"{}", **wish: Any
    ) -> httpx.Response:
        named = {} if key is None else {"Idempotency-Key": f'"{key or name}"'}
        if "raise" in wish:
            # Servers close a connection after an exception, and the next request must not meet that.
            named["Connection"] = "close"
        return client.post(path, params={"name": name, **wish}, headers={**named, **(headers or {})}, content=content)

    return send


def is_replay(response: httpx.Response) -> bool:
    return bool(response.headers.get("idempotent-replayed") == "true")


def problem(response: httpx.Response) -> str:
    assert response.headers["content-type"] == "application/problem+json"
    found = response.json()
    assert found["status"] == response.status_code
    assert {"type", "title", "detail"} < set(found)
    return str(found["code"])


# Keys and payloads.


@pytest.mark.parametrize("change", ["body", "order", "path", "query", "method"])
def test_the_same_key_with_another_request_is_refused_and_the_right_one_still_replays(
    post: Post, client: httpx.Client, service: Service, name: str, change: str
) -> None:
    body = b'{"a": 1, "b": 2}'
    first = post(content=body)
    headers = {"Idempotency-Key": name}
    others = {
        "body": lambda: post(content=b'{"amount": 2}'),
        "order": lambda: post(content=b'{"b": 2, "a": 1}'),
        "path": lambda: post("/below/refund", content=body),
        "query": lambda: post(more="1", content=body),
        "method": lambda: client.patch("/below/pay", params={"name": name}, headers=headers, content=body),
    }

    refused, again = others[change](), post(content=body)

    assert (refused.status_code, problem(refused)) == (422, "key_reused")
    assert is_replay(again)
    assert again.content == first.content
    assert service.effects(name) == 1


def test_another_payload_while_the_first_still_runs_is_refused_too(post: Post, service: Service, name: str) -> None:
    gate = service.gate(name)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(post, gate=str(gate))
        wait_for_effects(service, name, 1)
        other = post(gate=str(gate), content=b'{"amount": 2}')
        gate.touch()

    assert (other.status_code, problem(other)) == (422, "key_reused")
    assert first.result().status_code == 200
    assert is_replay(post(gate=str(gate)))
    assert service.effects(name) == 1


def test_another_key_with_the_same_payload_is_another_order(post: Post, service: Service, name: str) -> None:
    post(key=f"{name}-1")
    post(key=f"{name}-2")

    assert service.effects(name) == 2


def test_another_tenant_with_the_same_key_gets_an_answer_of_its_own(post: Post, service: Service, name: str) -> None:
    first = post()

    other = post(headers={"X-Api-Key": "riya"})

    assert not is_replay(other)
    assert other.content != first.content
    assert service.effects(name) == 2


def test_separators_inside_of_tenant_and_key_are_not_confused(post: Post, service: Service, name: str) -> None:
    post(key=f"c{name}", headers={"X-Api-Key": "a:b"})

    other = post(key=f"b:c{name}", headers={"X-Api-Key": "a"})

    assert not is_replay(other)
    assert service.effects(name) == 2


def test_the_same_key_for_two_operations_runs_both(post: Post, service: Service, name: str) -> None:
    answers = [post("/below/pay"), post("/stripe/pay")]

    assert not any(map(is_replay, answers))
    assert service.effects(name) == 2


@pytest.mark.parametrize(
    "key",
    [b"", b"   ", b'""', b"k" * 256, b"two keys", b'"open', "clé".encode(), b"a,b", b'"tab\t"', b"del\x7f", b"a\xff"],
)
def test_what_cannot_be_a_key_gets_400_and_nothing_runs(service: Service, name: str, key: bytes) -> None:
    with Wire(service.url) as wire:
        wire.send(post_of("/below/pay", headers=[("Idempotency-Key", key)], name=name))
        refused = wire.answer()

    assert refused.status == 400
    # A server may refuse what is no header at all before anybody of ours sees it.
    if refused.headers.get("content-type") == "application/problem+json":
        assert json.loads(refused.body)["code"] == "key_malformed"
    else:
        assert key == b"del\x7f"
    assert service.effects(name) == 0


def test_a_key_that_was_sent_twice_gets_400(service: Service, name: str) -> None:
    twice = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    with Wire(service.url) as wire:
        wire.send(post_of("/below/pay", headers=twice, name=name))
        refused = wire.answer()

    assert (refused.status, json.loads(refused.body)["code"]) == (400, "key_malformed")
    assert service.effects(name) == 0


def test_a_refusal_reaches_a_client_that_sends_a_large_body(client: httpx.Client, service: Service, name: str) -> None:
    # Gunicorn may end a connection, after the answer, whose body it does not get to read to its end in time: for the
    # next test it would be gone.
    headers = {"Idempotency-Key": "two keys", "Connection": "close"}

    refused = client.post("/below/pay", params={"name": name}, headers=headers, content=b"a" * (3 << 20))

    assert (refused.status_code, problem(refused)) == (400, "key_malformed")
    assert service.effects(name) == 0


def test_a_key_without_a_caller_gets_400(client: httpx.Client, service: Service, name: str) -> None:
    request = client.build_request("POST", "/below/pay", params={"name": name}, headers={"Idempotency-Key": name})
    del request.headers["X-Api-Key"]

    refused = client.send(request)

    assert (refused.status_code, problem(refused)) == (400, "caller_unknown")
    assert service.effects(name) == 0


def test_a_quoted_and_a_bare_key_are_the_same_key(post: Post, client: httpx.Client, name: str) -> None:
    post()

    bare = client.post("/below/pay", params={"name": name}, headers={"Idempotency-Key": name}, content=b"{}")

    assert is_replay(bare)


def test_strict_takes_only_the_quoted_form(post: Post, client: httpx.Client, service: Service, name: str) -> None:
    bare = client.post("/strict/pay", params={"name": name}, headers={"Idempotency-Key": name}, content=b"{}")
    quoted = post("/strict/pay")

    assert (bare.status_code, problem(bare), quoted.status_code) == (400, "key_malformed", 200)
    assert service.effects(name) == 1


def test_a_key_is_optional_and_where_it_is_required_its_absence_is_400_with_a_link(
    post: Post, service: Service, name: str
) -> None:
    optional, needed = [post(key=None) for _ in range(2)], post("/needed/pay", key=None)

    assert [one.status_code for one in optional] == [200, 200]
    assert (needed.status_code, problem(needed)) == (400, "key_missing")
    assert "https://example.com/idempotency" in needed.headers["link"]
    assert needed.json()["type"] == "https://example.com/idempotency"
    assert service.effects(name) == 2


def test_an_upload_that_is_sent_again_has_another_boundary_and_is_the_same_request(
    client: httpx.Client, service: Service, name: str
) -> None:
    def upload(content: bytes) -> httpx.Response:
        headers = {"Idempotency-Key": f'"{name}"'}
        return client.post("/below/pay", params={"name": name}, headers=headers, files={"receipt": content})

    # The second is larger than what is kept in memory.
    for size in (10, 2 << 20):
        name = f"{name}-{size}"
        answers = [upload(b"x" * size), upload(b"x" * size), upload(b"y" * size)]

        assert len({one.request.headers["content-type"] for one in answers}) == 3
        assert [one.status_code for one in answers] == [200, 200, 422]
        assert [is_replay(one) for one in answers] == [False, True, False]
        assert service.effects(name) == 1


# Replays.

# One of each kind: test_exchange.py has them all.
STATUSES = (201, 204, 307, 401, 404, 409, 422, 500)


@pytest.mark.parametrize(
    ("prefix", "final"),
    [
        ("below", {201, 204, 404, 409, 422}),
        ("stripe", {201, 204, 409, 500}),
        ("success", {201, 204}),
    ],
)
def test_the_rule_says_which_first_answers_are_replayed(
    post: Post, service: Service, framework: str, name: str, prefix: str, final: set[int]
) -> None:
    if (framework, prefix) == ("fastapi", "stripe"):
        # Its endpoint has begun when the claim is made: also its own 4xx are what came of the request.
        final = final | {404, 422}
    found = {}
    for status in STATUSES:
        first, second = (post(f"/{prefix}/pay", key=f"{name}-{status}", status=status) for _ in range(2))
        assert (first.status_code, second.status_code) == (status, status)
        assert not is_replay(first)
        found[status] = is_replay(second)
        assert (second.content == first.content) is (is_replay(second) or status == 204)

    assert {status for status, replayed in found.items() if replayed} == final
    assert service.effects(name) == 2 * len(STATUSES) - len(final)


@pytest.mark.parametrize("where", ["handler", "below"])
@pytest.mark.parametrize(("prefix", "final"), [("below", False), ("stripe", True), ("success", False)])
def test_the_rule_says_whether_an_exception_is_final(
    post: Post, service: Service, name: str, where: str, prefix: str, final: bool
) -> None:
    first, second = (post(f"/{prefix}/pay", **{"raise": where}) for _ in range(2))

    assert (first.status_code, second.status_code) == (500, 500)
    assert is_replay(second) is final
    assert first.content == second.content or not final
    assert service.effects(name) == (1 if final else 2)


@pytest.mark.parametrize("wish", [{"raise": "handler"}, {"raise": "below"}, {"status": 500}], ids=str)
def test_under_hold_a_failure_after_the_handler_started_is_unknown_and_is_not_run_again(
    post: Post, service: Service, name: str, wish: dict[str, Any]
) -> None:
    first, second = (post("/hold/pay", **wish) for _ in range(2))

    assert first.status_code == 500
    assert (second.status_code, problem(second)) == (409, "held")
    assert "retry-after" not in second.headers
    assert service.effects(name) == 1


@pytest.mark.parametrize(
    "wish",
    [
        {"text": "text"},
        {"text": "é" * 10},
        {"type": "application/json", "text": '{"a": [1, 2]}'},
        {"type": "application/octet-stream", "size": 1_024},
        {"type": "application/octet-stream", "size": 1 << 20},
        {"parts": 5},
        {"parts": 3, "size": 100_000},
        {"status": 204},
        {"text": ""},
        {"padding": 6_000},
    ],
    ids=str,
)
def test_a_replay_has_status_body_and_headers_as_first_sent(
    post: Post, service: Service, name: str, wish: dict[str, Any]
) -> None:
    first, second = (post(**wish) for _ in range(2))

    of_one_delivery = {"date", "connection", "transfer-encoding", "content-length", "idempotent-replayed", "server"}
    kept = [{key: value for key, value in one.headers.items() if key not in of_one_delivery} for one in (first, second)]
    assert is_replay(second)
    assert (second.status_code, second.content) == (first.status_code, first.content)
    assert kept[1] == kept[0]
    assert kept[1]["x-effect"]
    assert service.effects(name) == 1


def test_a_compressed_answer_is_replayed_byte_for_byte(service: Service, name: str) -> None:
    answers: list[Raw] = []
    with Wire(service.url) as wire:
        for _ in range(2):
            wire.send(post_of("/below/pay", headers=[("Idempotency-Key", name)], name=name, encoding="gzip"))
            answers.append(wire.answer())

    assert [one.headers["content-encoding"] for one in answers] == ["gzip", "gzip"]
    assert answers[0].body == answers[1].body
    assert gzip.decompress(answers[1].body).startswith(b"effect")
    assert service.effects(name) == 1


def test_cookies_and_the_date_of_the_first_answer_are_not_replayed(post: Post) -> None:
    first, second = (post(cookie="secret") for _ in range(2))

    assert "session=secret" in first.headers["set-cookie"]
    assert is_replay(second)
    assert "set-cookie" not in second.headers
    assert len(second.headers.get_list("date")) <= 1


def test_an_answer_beyond_the_limit_is_passed_on_and_replayed_without_its_body(
    post: Post, service: Service, name: str
) -> None:
    for number, wish in enumerate(({"size": 5_000}, {"size": 300, "parts": 20})):
        first, second = (post("/small/pay", key=f"{name}-{number}", **wish) for _ in range(2))

        assert len(first.content) >= 5_000
        assert (second.status_code, second.content) == (200, b"")
        assert is_replay(second)
        assert second.headers["idempotent-body"] == "omitted"
        assert second.headers["x-effect"] == first.headers["x-effect"]
    assert service.effects(name) == 2


def test_event_streams_are_guarded_only_where_they_are_asked_for(post: Post, service: Service, name: str) -> None:
    events = {"type": "text/event-stream", "parts": 3}

    unguarded = [post(key=f"{name}-1", **events) for _ in range(2)]
    guarded = [post("/streams/pay", key=f"{name}-2", **events) for _ in range(2)]

    assert [one.text.count(":effect") for one in unguarded + guarded] == [3] * 4
    assert [is_replay(one) for one in unguarded] == [False, False]
    assert [is_replay(one) for one in guarded] == [False, True]
    assert service.effects(name) == 3


@pytest.mark.parametrize("prefix", ["below", "streams"])
def test_a_stream_is_passed_on_live_while_it_is_captured(
    client: httpx.Client, service: Service, framework: str, name: str, prefix: str
) -> None:
    if framework in BUFFERED:
        pytest.skip("a view's answer is read to its end before it is sent; the middleware of WSGI passes it on live")
    gate = service.gate(name)
    query = {"name": name, "parts": "3", "between": str(gate)}
    ask: dict[str, Any] = {
        "url": f"/{prefix}/pay",
        "params": query,
        "headers": {"Idempotency-Key": name},
        "content": b"{}",
    }

    with client.stream("POST", **ask) as first:
        parts = first.iter_raw()
        live = next(parts)
        gate.touch()
        whole = live + b"".join(parts)
    again = client.post(**ask)

    assert live == whole.partition(b"1:")[0]
    assert is_replay(again)
    assert again.content == whole
    assert service.effects(name) == 1


def test_an_answer_that_breaks_in_the_middle_is_not_remembered(
    post: Post, service: Service, framework: str, name: str
) -> None:
    wish = {"parts": "3", "raise": "middle"}
    for _ in range(2):
        if framework in BUFFERED:
            assert post(**wish).status_code == 500
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                post(**wish)

    assert service.effects(name) == 2


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "HEAD"])
def test_other_methods_are_not_touched(client: httpx.Client, service: Service, name: str, method: str) -> None:
    headers = {"Idempotency-Key": name}
    answers = [client.request(method, "/below/pay", params={"name": name}, headers=headers) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert not any(is_replay(answer) for answer in answers)
    assert service.effects(name) == 2


def test_a_websocket_is_not_touched(service: Service, framework: str, name: str) -> None:
    if framework != "asgi":
        pytest.skip("there are websockets on ASGI alone")
    url = service.url.replace("http:", "ws:")

    with connect(f"{url}/needed/chat", additional_headers={"Idempotency-Key": "two keys"}) as websocket:
        websocket.send(name)
        said = websocket.recv(timeout=PATIENCE)

    assert said == f"you said {name}"


# Requests.


@pytest.mark.parametrize("size", [0, 1_024, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_bodies_of_every_size_are_fingerprinted_in_full_and_reach_the_handler(
    post: Post, service: Service, name: str, size: int
) -> None:
    body = b"a" * size
    post(content=body)
    again = post(content=body)
    other = post(content=body[:-1] + b"b")

    assert is_replay(again)
    assert other.status_code == 422
    assert [line.split(" ")[1:] for line in service.lines() if name in line] == [[name, str(size)]]


def test_a_chunked_request_is_the_same_request(post: Post, service: Service, name: str) -> None:
    post(content=b"one two")

    chunked = post(content=iter([b"one ", b"two"]))
    other = post(content=iter([b"one ", b"three"]))

    assert is_replay(chunked)
    assert other.status_code == 422
    assert service.effects(name) == 1


def test_a_chunked_request_reaches_the_handler_in_whole(post: Post, service: Service, name: str) -> None:
    post(content=iter([b"one ", b"two"]))

    assert any(line.split(" ")[1:] == [name, "7"] for line in service.lines())


def test_a_compressed_request_is_hashed_as_it_was_sent(post: Post, service: Service, name: str) -> None:
    packed = gzip.compress(b'{"amount": 1}' * 100, mtime=0)

    first, second = (post(content=packed, headers={"Content-Encoding": "gzip"}) for _ in range(2))

    assert not is_replay(first)
    assert is_replay(second)
    assert service.effects(name) == 1


def test_a_webhooks_key_comes_from_its_body(client: httpx.Client, service: Service, name: str) -> None:
    def deliver(event: dict[str, Any]) -> httpx.Response:
        return client.post("/hook/event", params={"name": name}, json=event)

    first, second = (deliver({"id": f"evt_{name}", "type": "paid"}) for _ in range(2))
    without = deliver({"type": "paid"})
    wrong = deliver({"id": True})

    assert (is_replay(first), is_replay(second), is_replay(without)) == (False, True, False)
    assert (wrong.status_code, problem(wrong)) == (400, "key_malformed")
    assert service.effects(name) == 2


def test_duplicates_on_one_keep_alive_connection(service: Service, name: str) -> None:
    request = post_of("/below/pay", headers=[("Idempotency-Key", name)], name=name)
    answers = []
    with Wire(service.url) as wire:
        for _ in range(3):
            wire.send(request)
            answers.append(wire.answer())

    assert [one.status for one in answers] == [200, 200, 200]
    assert [one.headers.get("idempotent-replayed") for one in answers] == [None, "true", "true"]
    assert len({one.body for one in answers}) == 1
    assert service.effects(name) == 1


def test_http_1_0_is_answered_and_replayed(service: Service, name: str) -> None:
    request = post_of("/below/pay", headers=[("Idempotency-Key", name)], version="1.0", name=name, parts="2")
    answers = []
    for _ in range(2):
        with Wire(service.url) as wire:
            wire.send(request)
            answers.append(wire.answer())

    assert [one.headers.get("idempotent-replayed") for one in answers] == [None, "true"]
    assert answers[0].body == answers[1].body
    assert service.effects(name) == 1


def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on(service: Service, name: str) -> None:
    body = b"a" * 1_000
    request = post_of("/below/pay", body, headers=[("Idempotency-Key", name), ("Expect", "100-continue")], name=name)
    answers = []
    for _ in range(2):
        with Wire(service.url) as wire:
            wire.send(request.removesuffix(body))
            interim = wire.answer()
            wire.send(body)
            answers.append(wire.answer())
            assert interim.status == 100

    assert [one.headers.get("idempotent-replayed") for one in answers] == [None, "true"]
    assert service.effects(name) == 1


def test_a_client_that_goes_in_the_middle_of_its_body_runs_nothing(post: Post, service: Service, name: str) -> None:
    whole = post_of("/below/pay", b"a" * 100, headers=[("Idempotency-Key", name)], name=name)
    with Wire(service.url) as wire:
        wire.send(whole[:-98])
        wire.end()
        wire.rest()

    answer = post(content=b"a" * 100)

    assert not is_replay(answer)
    assert service.effects(name) == 1


# At the same time.


def test_of_eight_at_once_one_runs_and_the_others_get_409_with_a_short_retry_after(
    post: Post, service: Service, name: str
) -> None:
    gate = service.gate(name)
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(post, gate=str(gate))
        wait_for_effects(service, name, 1)
        others = list(threads.map(lambda _: post(gate=str(gate)), range(7)))
        gate.touch()

    assert first.result().status_code == 200
    assert [(one.status_code, problem(one)) for one in others] == [(409, "in_progress")] * 7
    assert {one.headers["retry-after"] for one in others} <= {"1", "2"}
    assert is_replay(post(gate=str(gate)))
    assert service.effects(name) == 1


def test_eight_that_wait_by_policy_all_get_the_first_ones_answer(post: Post, service: Service, name: str) -> None:
    gate = service.gate(name)
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(post, "/waits/pay", gate=str(gate)) for _ in range(8)]
        wait_for_effects(service, name, 1)
        gate.touch()
        answers = [one.result() for one in waiting]

    assert [one.status_code for one in answers] == [200] * 8
    assert len({one.content for one in answers}) == 1
    assert sorted(is_replay(one) for one in answers) == [False] + [True] * 7
    assert service.effects(name) == 1


def test_eight_at_the_same_moment_run_once(post: Post, service: Service, name: str) -> None:
    together = threading.Barrier(8)

    def send(_number: int) -> httpx.Response:
        together.wait(PATIENCE)
        return post()

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(send, range(8)))

    assert {one.status_code for one in answers} <= {200, 409}
    assert len({one.content for one in answers if one.status_code == 200}) == 1
    assert service.effects(name) == 1


@pytest.mark.parametrize("parts", ["1", "3"])
def test_a_client_that_goes_does_not_end_what_has_started(post: Post, service: Service, name: str, parts: str) -> None:
    gate = service.gate(name)
    wish: dict[str, Any] = {"gate": str(gate), "parts": parts, "size": "100000"}
    with Wire(service.url) as wire:
        wire.send(post_of("/below/pay", headers=[("Idempotency-Key", name)], name=name, **wish))
        wait_for_effects(service, name, 1)
    gate.touch()

    answer = until_settled(lambda: post(**wish))

    assert answer.status_code == 200
    assert is_replay(answer)
    assert service.effects(name) == 1


def wait_for_effects(service: Service, name: str, count: int) -> None:
    ends = time.monotonic() + PATIENCE
    while service.effects(name) < count:
        assert time.monotonic() < ends, service.log()[-2_000:]
        time.sleep(0.005)


def until_settled(send: Callable[[], httpx.Response]) -> httpx.Response:
    """Send again while the first one is still at it, as a client would; bounded."""
    ends = time.monotonic() + PATIENCE
    while (answer := send()).status_code == 409 and time.monotonic() < ends:
        time.sleep(0.02)
    return answer


# Nothing of it in the logs, and no credential in the store.


def test_no_key_no_credential_and_no_body_is_in_the_logs_and_no_credential_in_the_store(
    post: Post, service: Service, name: str
) -> None:
    secret, card = f"secret-{name}", f"card-{name}"
    post(content=json.dumps({"card": card}).encode(), headers={"X-Api-Key": secret})
    post(content=b"another body", headers={"X-Api-Key": secret})
    post("/hold/pay", headers={"X-Api-Key": secret}, **{"raise": "handler"})
    post("/hold/pay", headers={"X-Api-Key": secret}, **{"raise": "handler"})

    log = service.log()
    assert f"name={name}" in log or "Boom" in log
    assert [word for word in (secret, card, f'"{name}"') if word in log] == []
    assert [path for path in records_of(service) if secret.encode() in path.read_bytes()] == []


def records_of(service: Service) -> list[Path]:
    return sorted(service.folder.glob("records.db*"))
