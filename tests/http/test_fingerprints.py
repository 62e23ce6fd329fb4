"""What a retry has to repeat: its content whatever its boundary, its media type, and the host that it was sent to."""

from __future__ import annotations

import hashlib
import random
import re
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import flask
import httpx
import pytest
from fastapi import FastAPI
from fastapi import Request as FastApiRequest

from onefold import AsyncGuard, Guard
from onefold.http import asgi, wsgi
from onefold.http import fastapi as routes
from onefold.http._exchange.rules import Exchange, GuardRequest
from onefold.http._requests.fingerprints import LABEL, body_for, content_of, host_of
from onefold.http._shared.messages import CHUNK, Body, Refused, Request
from onefold.http.scopes import by_header, single_tenant
from tests.support import in_time


def request(**headers: str) -> Request:
    named = {"Idempotency_Key": "key", **headers}
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]
    return Request("POST", "/pay", b"", pairs)


def asked(exchange: Exchange, content: bytes = b"{}", **headers: str) -> GuardRequest:
    with closing(Body()) as body:
        body.add(content)
        found = exchange.guard_request(request(**headers), body)
    assert found is not None
    return found


def fingerprint(content: bytes, kind: str, *, piece: int = CHUNK) -> tuple[str, bytes]:
    with closing(Body()) as body:
        for start in range(0, len(content), piece):
            body.add(content[start : start + piece])
        return content_of(request(Content_Type=kind), body)


def form(boundary: str, *values: bytes, name: str = "file") -> bytes:
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode()
    return b"".join(head + value + b"\r\n" for value in values) + f"--{boundary}--\r\n".encode()


def multipart(boundary: str, *values: bytes, kind: str = "multipart/form-data", name: str = "file") -> Any:
    return fingerprint(form(boundary, *values, name=name), f"{kind}; boundary={boundary}")


# Multipart bodies.


def test_a_retry_with_another_boundary_is_the_same_request() -> None:
    assert multipart("one", b"a", b"b") == multipart("2f1c-anotherOne", b"a", b"b")
    assert multipart("one", b"a") == fingerprint(form("x y", b"a"), 'Multipart/Form-Data; Boundary="x y"')


@pytest.mark.parametrize(
    "other",
    [
        multipart("two", b"a", b"c"),
        multipart("two", b"ab"),
        multipart("two", b"b", b"a"),
        multipart("two", b"a"),
        multipart("two", b"a", b"b", b""),
        multipart("two", b"a", b"b", name="other"),
        multipart("two", b"a", b"b", kind="multipart/mixed"),
        fingerprint(form("one", b"a", b"b"), "multipart/form-data; boundary=two"),
        fingerprint(form("one", b"a", b"b"), "multipart/form-data"),
        fingerprint(form("one", b"a", b"b"), "multipart/form-data; boundary=one; boundary=two"),
        fingerprint(form("one", b"a", b"b"), "application/octet-stream"),
        fingerprint(form("one", b"a", b"b")[:-4], "multipart/form-data; boundary=one"),
    ],
)
def test_what_another_multipart_body_says_is_another_request(other: Any) -> None:
    assert other != multipart("one", b"a", b"b")


def test_a_line_that_only_begins_like_a_delimiter_is_content() -> None:
    """To some readers it is content: two files that differ in it must not be one request."""
    assert multipart("one", b"x\r\n--oneself\r\ny") != multipart("two", b"x\r\n--twoself\r\ny")
    assert multipart("one", b"x --one\r\ny") != multipart("two", b"x --two\r\ny")
    assert multipart("one", b"x\n--one\ny") != multipart("two", b"x\n--two\ny")
    assert multipart("one", b"x\r\n--one--y") != multipart("two", b"x\r\n--two--y")


def split_at_once(content: bytes, boundary: bytes) -> bytes:
    """The same rule, for a body that is held as a whole."""
    pieces = re.split(rb"\r\n--" + boundary + rb"(?=\r\n|--\r\n|--\Z)", b"\r\n" + content)
    return hashlib.sha256(LABEL + b"".join(hashlib.sha256(piece).digest() for piece in pieces)).digest()


def test_pieces_of_any_size_give_the_same_digest() -> None:
    chance = random.Random(7)
    parts = [
        b"\r\n--bb",
        b"--bb",
        b"--bb--",
        b"\r\n",
        b"\r",
        b"\n",
        b"--",
        b"b",
        b"xyz",
        b"\r\n--bb--\r\n",
        b"\r\n--bb\r\n",
    ]
    for _ in range(300):
        content = b"".join(chance.choices(parts, k=chance.randrange(1, 30)))

        class Pieces(Body):
            def chunks(self, content: bytes = content) -> Any:
                left = content
                while left:
                    size = chance.randrange(1, 9)
                    yield left[:size]
                    left = left[size:]

        with closing(Pieces()) as body:
            found = content_of(request(Content_Type="multipart/mixed; boundary=bb"), body)

        assert found == ("multipart/mixed", split_at_once(content, b"bb")), content


def test_a_body_that_is_compared_as_it_comes_has_the_same_digest() -> None:
    content = form("b", b"x" * 100, b"\r\n--b", b"--b--\r\n")
    asking = request(Content_Type="multipart/form-data; boundary=b")
    with closing(body_for(asking)) as body:
        for start in range(0, len(content), 7):
            body.add(content[start : start + 7])

        found = [content_of(asking, body) for _ in range(2)]

        assert found == [fingerprint(content, "multipart/form-data; boundary=b")] * 2
        assert body.read() == content


def test_a_large_upload_is_not_held_in_memory() -> None:
    part = bytes(1 << 20)
    with closing(Body()) as body:
        for piece in (b"--b\r\n\r\n", *[part] * 24, b"\r\n--b--\r\n"):
            body.add(piece)
        tracemalloc.start()
        try:
            content_of(request(Content_Type="multipart/form-data; boundary=b"), body)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak < 1 << 20


def test_a_body_can_be_compared_while_somebody_reads_it() -> None:
    content = form("b", *[bytes([number]) * CHUNK for number in range(3)])
    with closing(Body()) as body:
        body.add(content)
        reading = body.chunks()
        first = next(reading)
        content_of(request(Content_Type="multipart/form-data; boundary=b"), body)

        assert first + b"".join(reading) == content


# The media type.


def test_who_corrects_only_the_media_type_sends_another_request() -> None:
    exchange = Exchange(scope=single_tenant)
    kinds = ["", "text/plain", "application/json", "application/json; profile=a", "application/json; profile=b"]

    found = [asked(exchange, Content_Type=kind).payload for kind in kinds]

    assert all(found.count(one) == 1 for one in found)


def test_who_corrects_only_the_encoding_sends_another_request() -> None:
    exchange = Exchange(scope=single_tenant)

    plain, zipped = asked(exchange), asked(exchange, Content_Encoding="gzip")

    assert plain.payload != zipped.payload
    assert plain.payload == asked(exchange, Content_Encoding="identity").payload
    assert zipped.payload == asked(exchange, Content_Encoding="GZip").payload


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("application/json", "Application/JSON"),
        ("application/json; charset=utf-8", 'application/json;charset="UTF-8"'),
        ("text/plain; a=1; b=2", "text/plain;b=2 ;A=1"),
    ],
)
def test_two_spellings_of_a_media_type_are_one(one: str, other: str) -> None:
    assert fingerprint(b"x", one) == fingerprint(b"x", other)


# The host.


def test_the_same_key_at_another_host_is_another_request() -> None:
    exchange = Exchange(scope=lambda _request: "1")

    here, there = (asked(exchange, Host=host) for host in ("a.example", "b.example"))

    assert here.scope == there.scope == "1"
    assert here.payload != there.payload


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a.example", "A.Example:443"),
        ("a.example", "a.example.:8000"),
        ("10.0.0.5:8000", "10.0.0.6:8000"),
        ("[::1]:80", "[fe80::2]:80"),
    ],
)
def test_a_port_and_the_address_of_a_machine_make_no_other_host(one: str, other: str) -> None:
    exchange = Exchange(scope=single_tenant)

    assert asked(exchange, Host=one).payload == asked(exchange, Host=other).payload


def test_several_host_names_can_be_one_api() -> None:
    exchange = Exchange(scope=single_tenant, host="ignore")

    assert asked(exchange, Host="a.example") == asked(exchange, Host="b.example")


def test_each_host_can_be_a_tenant_whose_keys_never_meet_anothers() -> None:
    exchange = Exchange(scope=lambda _request: "user@1", host="separate")
    here, there = (asked(exchange, Host=host) for host in ("a.example:80", "b.example"))

    assert (here.scope, there.scope) == ("user@1@a.example", "user@1@b.example")
    assert asked(Exchange(scope=single_tenant, host="separate"), Host="a.example").scope == "@a.example"
    for host in ("", "h" * 256):
        with pytest.raises(Refused, match=r"Host|255 bytes"):
            asked(exchange, Host=host)


def test_a_framework_may_see_another_host_than_the_header_names() -> None:
    behind = Request("POST", "/", b"", [(b"host", b"upstream")], host=lambda: "shop.example:8443")

    assert host_of(behind) == "shop.example"


def test_a_host_that_django_does_not_allow_is_compared_as_it_was_sent() -> None:
    from django.core.exceptions import DisallowedHost

    from onefold.http.django import request_of

    def get_host() -> str:
        raise DisallowedHost

    native = SimpleNamespace(method="POST", path="/", META={}, headers={"Host": "x.example"}, get_host=get_host)

    assert host_of(request_of(native)) == "x.example"


# Through the frameworks.


def on_asgi() -> Callable[..., httpx.Response]:
    app = FastAPI()
    calls: list[int] = []

    @app.post("/pay")
    async def pay(request: FastApiRequest) -> dict[str, int]:
        calls.append(len(await request.body()))
        return {"call": len(calls)}

    app.add_middleware(asgi.IdempotencyMiddleware, guard=AsyncGuard("memory:"), scope=by_header("X-Api-Key"))
    return sender(app)


def on_a_route() -> Callable[..., httpx.Response]:
    guarded = routes.idempotent_route(guard=AsyncGuard("memory:"), scope=by_header("X-Api-Key"))
    app = FastAPI()
    app.router.route_class = guarded
    calls: list[int] = []

    @app.post("/pay")
    async def pay(request: FastApiRequest) -> dict[str, int]:
        calls.append(len(await request.body()))
        return {"call": len(calls)}

    return sender(app)


def sender(app: Any) -> Callable[..., httpx.Response]:
    def send(**sent: Any) -> httpx.Response:
        async def story() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
                return await client.post(**sent)

        return in_time(story())

    return send


def on_wsgi() -> Callable[..., httpx.Response]:
    app = flask.Flask("shop")
    calls: list[int] = []

    @app.post("/pay")
    def pay() -> dict[str, int]:
        calls.append(len(flask.request.get_data()))
        return {"call": len(calls)}

    guarded: Any = wsgi.IdempotencyMiddleware(app.wsgi_app, guard=Guard("memory:"), scope=by_header("X-Api-Key"))
    client = httpx.Client(transport=httpx.WSGITransport(guarded))
    return client.post


@pytest.mark.parametrize("serve", [on_asgi, on_a_route, on_wsgi])
def test_an_upload_a_media_type_and_a_host_are_compared_in_each_framework(
    serve: Callable[[], Callable[..., httpx.Response]],
) -> None:
    send = serve()

    def post(key: str, host: str = "a.example", kind: str = "", **content: Any) -> tuple[int, Any]:
        headers = {"Idempotency-Key": key, "X-Api-Key": "asha", **({"Content-Type": kind} if kind else {})}
        answer = send(url=f"http://{host}/pay", headers=headers, **content)
        return answer.status_code, answer.json().get("call", answer.json().get("code"))

    upload = {"file": b"a receipt"}
    assert [post("upload", files=upload), post("upload", files=upload)] == [(200, 1), (200, 1)]
    assert post("upload", files={"file": b"another"}) == (422, "key_reused")
    assert post("kind", kind="text/plain", content=b"{}") == (200, 2)
    assert post("kind", kind="application/json", content=b"{}") == (422, "key_reused")
    assert [post("host", "a.example"), post("host", "b.example")] == [(200, 3), (422, "key_reused")]


def test_where_each_host_is_a_tenant_no_host_makes_another_caller() -> None:
    exchange = Exchange(scope=lambda _request: "bob", host="separate")

    with pytest.raises(Refused, match="must not contain @"):
        asked(exchange, Host="corp.com@shop.example")
