"""One table for every stack: middlewares around the guard, clients that leave, applications that break."""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from onefold import Policy
from tests.http_service.process import STACKS, Service, serving
from tests.http_service.wire import Wire, post_of

# Every day each family, and each server that has no other test; `make test-all` has them all.
EVERY_DAY = {
    "asgi on uvicorn with h11",
    "asgi on hypercorn",
    "wsgi on waitress",
    "django on uvicorn with h11",
}

PATIENCE = 120.0

# A service settles its record long before the lease ends, also on a slow machine.
SETTLED_SECONDS = Policy().lease * 2 / 3

# Whose credential the services do not know any more.
REVOKED = "revoked"

AROUND = ("none", "compression", "cors", "request-id", "session", "base")

# Of an application that breaks.
BODIES = {201: b"done", 204: b""}

# What HTTP has no form for; and what is remembered in a form that can be sent.
UNSENDABLE = {
    "high-status": "unknown",
    "blank-in-name": "unknown",
    "too-short": "unknown",
    "too-long": "unknown",
    "blanks-around": "known",
    "body-of-204": "known",
}

BREAKS = {
    "asgi": {
        "raises": "unknown",
        "cancels": "unknown",
        "nothing": "unknown",
        "no-start": "unknown",
        "no-end": "unknown",
        "raises-in-the-middle": "unknown",
        "text-headers": "known",
        "no-latin": "unknown",
        "number-header": "unknown",
        "no-pair": "unknown",
        "no-status": "unknown",
        "text-status": "unknown",
        "low-status": "unknown",
        "text-body": "unknown",
        **UNSENDABLE,
        "control-character": "unknown",
        "line-end": "unknown",
        "too-short-stream": "unknown",
        "too-long-stream": "unknown",
        "two-lengths": "unknown",
        "no-length": "unknown",
    },
    "wsgi": {
        "raises": "unknown",
        "nothing": "unknown",
        "no-start": "unknown",
        "raises-in-the-middle": "unknown",
        "closes-badly": "unknown",
        "no-latin": "unknown",
        "bytes-header": "known",
        "number-header": "unknown",
        "no-pair": "unknown",
        "bytes-status": "unknown",
        "text-status": "unknown",
        "low-status": "unknown",
        "text-body": "unknown",
        **UNSENDABLE,
        "control-character": "unknown",
        "line-end": "unknown",
        "line-end-in-status": "unknown",
        "too-short-stream": "unknown",
        "too-long-stream": "unknown",
        "two-lengths": "unknown",
        "no-length": "unknown",
    },
    "django": {
        "raises": "unknown",
        "nothing": "unknown",
        "raises-in-the-middle": "unknown",
        # Django encodes it.
        "no-latin": "known",
        "number-body": "unknown",
        "text-status": "unknown",
        "low-status": "unknown",
        **UNSENDABLE,
    },
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.more) for name in STACKS],
)
def stack_and_service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Service]]:
    with serving(request.param, "memory:", tmp_path_factory.mktemp("stack")) as service:
        yield request.param, service


@pytest.fixture(scope="module")
def stack(stack_and_service: tuple[str, Service]) -> str:
    return stack_and_service[0]


@pytest.fixture(scope="module")
def service(stack_and_service: tuple[str, Service]) -> Service:
    return stack_and_service[1]


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, headers={"X-Api-Key": "asha"}, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


Post = Callable[..., httpx.Response]


@pytest.fixture
def post(client: httpx.Client, name: str) -> Post:
    def send(path: str, *, key: str = "", headers: Any = None, **wish: Any) -> httpx.Response:
        ours = {"Idempotency-Key": key or name, "Accept-Encoding": "identity", **(headers or {})}
        content = wish.pop("content", b"{}")
        return client.post(path, params={"name": wish.pop("name", name), **wish}, headers=ours, content=content)

    return send


def is_replay(response: httpx.Response) -> bool:
    return bool(response.headers.get("idempotent-replayed") == "true")


def until(holds: Callable[[], bool], service: Service) -> None:
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < ends, service.log()[-2_000:]
        time.sleep(0.005)


def until_settled(send: Callable[[], httpx.Response]) -> httpx.Response:
    """Send again while the first one is still at it, as a client would, but not until a claim that it left is over."""
    ends = time.monotonic() + SETTLED_SECONDS
    while (answer := send()).status_code == 409 and time.monotonic() < ends:
        if answer.json()["code"] != "in_progress":
            break
        time.sleep(0.01)
    return answer


# Middlewares around the guard.

ASKS = [
    {"Accept-Encoding": "gzip", "Origin": "https://a.example"},
    {"Accept-Encoding": "identity", "Origin": "https://b.example"},
    {"Accept-Encoding": "gzip"},
]


@pytest.mark.parametrize("act", ["json", "stream"])
@pytest.mark.parametrize("above", AROUND)
def test_a_replay_is_the_applications_answer_whatever_stands_around(
    post: Post, service: Service, name: str, above: str, act: str
) -> None:
    """Each caller gets its own compression, origin, cookie and request id from above; the application's from below."""
    for number, (below, rule) in enumerate(itertools.product(AROUND, ("below", "single"))):
        if rule == "single" and below != "none":
            # Guarded inside of all of them.
            continue
        key = f"{name}-{number}"

        answers = [post(f"/{above}/{below}/{rule}/{act}", name=key, key=key, headers=ask) for ask in ASKS]

        where = f"{above} / {below} / {rule}"
        assert [is_replay(one) for one in answers] == [False, True, True], where
        assert len({one.content for one in answers}) == 1, where
        assert len({one.headers["content-type"] for one in answers}) == 1, where
        assert service.effects(key) == 1, where
        check_headers_of(above, below if rule == "below" else "none", answers, where)


def check_headers_of(above: str, below: str, answers: list[httpx.Response], where: str) -> None:
    encodings = [one.headers.get("content-encoding", "identity") for one in answers]
    if above == "compression" and below != "compression":
        assert encodings == ["gzip", "identity", "gzip"], where
    elif below == "compression":
        # It was compressed for the first caller, which the page warns of.
        assert encodings == ["gzip", "gzip", "gzip"], where
    else:
        assert encodings == ["identity"] * 3, where
    origins = [one.headers.get_list("access-control-allow-origin") for one in answers]
    if above == "cors" and below != "cors":
        assert origins == [["https://a.example"], ["https://b.example"], []], where
    elif above != "cors" and below != "cors":
        assert origins == [[], [], []], where
    for header, who in (("x-request-id", "request-id"), ("x-base", "base")):
        found = [one.headers.get_list(header) for one in answers]
        if above == who and below != who:
            assert [len(one) for one in found] == [1, 1, 1], where
            assert len({one[0] for one in found}) == 3, where
        elif below == who and above != who:
            assert len({tuple(one) for one in found}) == 1, where
        elif who not in (above, below):
            assert found == [[], [], []], where
    cookies = [len(one.headers.get_list("set-cookie")) for one in answers]
    if above == "session" and below != "session":
        assert cookies == [1, 1, 1], where
    elif below == "session" and above != "session":
        assert cookies == [1, 0, 0], where


# Callers.


@pytest.mark.parametrize("rule", ["below", "single", "loose"])
def test_a_caller_who_is_refused_leaves_no_claim_and_sees_nothing(
    post: Post, service: Service, name: str, rule: str
) -> None:
    """After the whole body was read, in memory or in a file; before the first request with a key, and after it."""
    path = f"/none/none/{rule}/json"

    for body in (b"{}", b"x" * (2 << 20)):
        key = f"{name}-{len(body)}"
        answers = [
            post(path, key=key, name=key, content=body, headers={"X-Api-Key": caller})
            for caller in (REVOKED, "asha", REVOKED, "riya", "asha")
        ]

        assert [one.status_code for one in answers] == [401, 201, 401, 201, 201]
        assert {one.headers["www-authenticate"] for one in answers if one.status_code == 401} == {"Bearer"}
        assert [one.json()["code"] for one in answers if one.status_code == 401] == ["unauthorized"] * 2
        assert [is_replay(one) for one in answers] == [False, False, False, False, True]
        assert service.effects(key) == 2


def test_without_a_fingerprint_no_other_route_caller_or_host_gets_a_response(
    post: Post, service: Service, name: str
) -> None:
    path = "/none/none/loose"
    first = post(f"{path}/json")

    again = post(f"{path}/json", content=b"another", more="1")
    refused = [post(f"{path}/stream"), post(f"{path}/json", headers={"Host": "other.example"})]
    stranger = post(f"{path}/json", headers={"X-Api-Key": "riya"})

    assert (is_replay(again), again.content) == (True, first.content)
    assert [(one.status_code, one.json()["code"]) for one in refused] == [(422, "key_reused")] * 2
    assert (stranger.status_code, is_replay(stranger)) == (201, False)
    assert service.effects(name) == 2


# Methods and routes.


def test_a_method_in_small_letters_is_guarded_and_needs_a_key_too(
    stack: str, client: httpx.Client, service: Service, name: str
) -> None:
    def patch(rule: str, headers: list[tuple[str, str]]) -> Any:
        request = post_of(f"/none/none/{rule}/json", headers=headers, name=name).replace(b"POST", b"patch", 1)
        with Wire(service.url) as wire:
            wire.send(request)
            return wire.answer()

    refused = patch("needed", [])
    answers = [patch("below", [("Idempotency-Key", name)]) for _ in range(2)]

    if refused.status == 400 and not refused.headers.get("content-type", "").startswith("application/problem"):
        # httptools and gunicorn know no such method.
        assert service.effects(name) == 0
        return
    assert refused.status == 400
    assert b"key_missing" in refused.body
    assert service.effects(name) <= 1, [one.status for one in answers]


@pytest.mark.parametrize("rule", ["below", "stripe"])
def test_what_routing_answers_is_not_remembered(post: Post, service: Service, name: str, rule: str) -> None:
    """Neither a 404 of no route, nor a redirect that adds the slash: the right request still runs."""
    path = f"/none/none/{rule}"

    nowhere = [post(f"{path}/nowhere", key=f"{name}-1") for _ in range(2)]
    then = post(f"{path}/json", key=f"{name}-1")
    sent_on = [post(f"{path}/with-slash", key=f"{name}-2") for _ in range(2)]
    there = [post(f"{path}/with-slash/", key=f"{name}-2") for _ in range(2)]

    assert [one.status_code for one in nowhere] == [404, 404]
    assert {one.status_code for one in sent_on} <= {301, 307, 308, 404}
    assert not any(map(is_replay, (*nowhere, then, *sent_on)))
    assert then.status_code == 201
    assert [one.status_code for one in there] == [201, 201]
    assert [is_replay(one) for one in there] == [False, True]


def test_a_404_of_the_application_is_remembered(post: Post, service: Service, name: str) -> None:
    answers = [post("/none/none/below/missing") for _ in range(2)]

    assert [one.status_code for one in answers] == [404, 404]
    assert [is_replay(one) for one in answers] == [False, True]
    assert service.effects(name) == 1


def test_two_routes_that_differ_by_a_slash_do_not_share_answers(post: Post, service: Service, name: str) -> None:
    first = post("/none/none/below/both")
    other = post("/none/none/below/both/")

    assert first.status_code == 201
    assert (other.status_code, other.json()["code"]) == (422, "key_reused")
    assert service.effects(name) == 1


# Clients that leave.


def test_a_client_that_leaves_in_its_body_runs_nothing(post: Post, service: Service, name: str) -> None:
    request = post_of("/none/none/hold/json", b"a" * 100, headers=[("Idempotency-Key", name)], name=name)
    with Wire(service.url) as wire:
        wire.send(request[:-50])
        wire.end()
        wire.rest()

    answer = post("/none/none/hold/json", content=b"a" * 100)

    assert (answer.status_code, is_replay(answer)) == (201, False)
    assert service.effects(name) == 1


def leaves_while_it_runs(post: Post, service: Service, name: str, path: str) -> httpx.Response:
    gate = service.gate(name)
    with Wire(service.url) as wire:
        wire.send(post_of(path, headers=[("Idempotency-Key", name)], name=name, gate=str(gate)))
        until(lambda: service.effects(name) == 1, service)
    # Nobody answers here, and it may be that nobody has noticed yet: a retry finds it under way in any case.
    busy = post(path, gate=str(gate))
    assert (busy.status_code, busy.json()["code"]) == (409, "in_progress")
    gate.touch()
    return until_settled(lambda: post(path, gate=str(gate)))


@pytest.mark.parametrize("around", ["none/none", "none/base", "base/none"])
@pytest.mark.parametrize(
    ("rule", "act"), [("below", "json"), ("below", "stream"), ("hold", "json"), ("single", "json")]
)
def test_a_client_that_leaves_while_the_handler_runs_ends_nothing(
    post: Post, service: Service, name: str, around: str, rule: str, act: str
) -> None:
    answer = leaves_while_it_runs(post, service, name, f"/{around}/{rule}/{act}")

    assert answer.status_code in (200, 201)
    assert is_replay(answer)
    assert service.effects(name) == 1


@pytest.mark.parametrize("around", ["none/none", "none/blocking", "blocking/none"])
@pytest.mark.parametrize("act", ["json", "awaited", "cancellable"])
def test_django_ends_no_view_whose_client_has_left(
    stack: str, post: Post, service: Service, name: str, act: str, around: str
) -> None:
    if not stack.startswith("django"):
        pytest.skip("views are Django's")

    answer = leaves_while_it_runs(post, service, name, f"/{around}/below/{act}")

    assert (answer.status_code, is_replay(answer)) == (201, True)
    assert service.effects(name) == 1


def test_django_still_cancels_a_view_whose_request_has_no_key(stack: str, service: Service, name: str) -> None:
    if not stack.startswith("django on uvicorn"):
        pytest.skip("Django cancels views on ASGI")
    with Wire(service.url) as wire:
        wire.send(post_of("/none/none/below/cancellable", name=name, gate=str(service.gate(name))))
        until(lambda: service.effects(name) == 1, service)

    until(lambda: service.effects(f"{name}-cancelled") == 1, service)


@pytest.mark.parametrize("around", ["none/none", "base/none", "compression/base"])
def test_a_client_that_leaves_in_a_stream_ends_nothing(post: Post, service: Service, name: str, around: str) -> None:
    path, gate = f"/{around}/below/stream", service.gate(name)
    with Wire(service.url) as wire:
        wire.send(post_of(path, headers=[("Idempotency-Key", name)], name=name, between=str(gate)))
        until(lambda: service.effects(name) == 1, service)
    gate.touch()

    answer = until_settled(lambda: post(path, between=str(gate)))

    assert is_replay(answer)
    assert len(answer.content) == 3 * 601
    assert service.effects(name) == 1


@pytest.mark.parametrize("rule", ["below", "hold", "single"])
def test_an_endless_stream_ends_when_its_client_has_left(
    stack: str, post: Post, service: Service, name: str, rule: str
) -> None:
    path = f"/none/none/{rule}/endless"
    with Wire(service.url) as wire:
        wire.send(post_of(path, headers=[("Idempotency-Key", name)], name=name))
        assert wire.some()

    until(lambda: service.effects(f"{name}-ended") == 1, service)

    if rule == "hold" and not stack.startswith("django"):
        answer = until_settled(lambda: post(path))
        assert (answer.status_code, answer.json()["code"]) == (409, "held")
    assert service.effects(name) == 1


# Applications that break after their effect.


@pytest.mark.parametrize("rule", ["hold", "stripe", "below"])
def test_an_application_that_breaks_after_its_effect_has_run(
    stack: str, post: Post, service: Service, name: str, rule: str
) -> None:
    for how, outcome in BREAKS[stack.partition(" ")[0]].items():
        key = f"{name}-{how}"
        path = f"/none/none/{rule}/{how}"
        answers: list[httpx.Response] = []
        for _ in range(2):
            # A server may close the connection where it gets no answer that it could send.
            # And a client may have a whole answer before the server has settled its record.
            with contextlib.suppress(httpx.TransportError):
                answers.append(until_settled(partial(post, path, name=key, key=key, headers={"Connection": "close"})))

        runs = service.effects(key)
        assert runs == (2 if rule == "below" and outcome == "unknown" else 1), how
        if rule == "below" and outcome == "unknown":
            continue
        last = answers[-1]
        if outcome == "known":
            status = 204 if how == "body-of-204" else 201
            assert (last.status_code, last.content, is_replay(last)) == (status, BODIES[status], True), how
        elif rule == "hold":
            assert (last.status_code, last.json()["code"]) == (409, "held"), how
        else:
            assert (last.status_code, is_replay(last)) == (500, True), how


# Large bodies.


def test_an_upload_comes_through_with_a_key_as_it_does_without(
    client: httpx.Client, service: Service, name: str
) -> None:
    """Django limits what a form holds in memory, and not its files."""

    def upload(key: str | None, content: bytes) -> httpx.Response:
        headers = {"Accept-Encoding": "identity", **({} if key is None else {"Idempotency-Key": key})}
        # The boundary of every form is the same here.
        headers["Content-Type"] = "multipart/form-data; boundary=edge"
        return client.post(
            "/none/none/below/json", params={"name": name}, headers=headers, files={"receipt": ("r", content)}
        )

    large = b"r" * (4 << 20)
    free, first, again, other = upload(None, large), upload(name, large), upload(name, large), upload(name, large[:-1])

    assert [one.status_code for one in (free, first, again, other)] == [201, 201, 201, 422]
    assert [is_replay(one) for one in (first, again)] == [False, True]
    sizes = [int(line.split(" ")[2]) for line in service.lines() if line.split(" ")[1] == name]
    assert len(sizes) == 2
    assert len(set(sizes)) == 1
    assert sizes[0] >= len(large)
