"""`body_field`: whatever an application can read as JSON, or as a form, is guarded by its key or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

import flask
import httpx
import pytest

from onefold import AsyncGuard, Guard
from onefold.http._requests.keys import body_field
from onefold.http._shared.messages import Body, Refused, Request
from onefold.http.asgi import IdempotencyMiddleware
from onefold.http.flask import idempotent
from onefold.http.scopes import single_tenant
from tests.support import in_time

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
PARTS = 'multipart/form-data; boundary="b-1"'


def multipart(*parts: tuple[str, str], ends: bool = True) -> bytes:
    written = "".join(f"--b-1\r\nContent-Disposition: form-data; {head}\r\n\r\n{value}\r\n" for head, value in parts)
    return (written + ("--b-1--\r\n" if ends else "")).encode()


def key_in(kind: str | None, content: bytes, path: str = "id", **headers: str) -> str | None:
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    if kind is not None:
        pairs.append((b"content-type", kind.encode("latin-1")))
    with closing(Body()) as body:
        body.add(content)
        return body_field(path)(Request("POST", "/hooks", b"", pairs), body)


READ = {
    "half of a surrogate pair": (JSON, b'{"id": "evt_1", "text": "cut \\ud83d"}'),
    "UTF-16": (JSON, '{"id": "evt_1"}'.encode("utf-16")),
    "UTF-16 without a mark": (JSON, '{"id": "evt_1"}'.encode("utf-16-le")),
    "UTF-32": (JSON, '{"id": "evt_1"}'.encode("utf-32")),
    "UTF-8 with a mark": (JSON, b'\xef\xbb\xbf{"id": "evt_1"}'),
    "what is not a number": (JSON, b'{"id": "evt_1", "rate": NaN, "other": -Infinity}'),
    "a number beyond all floats": (JSON, b'{"id": "evt_1", "n": 1E999}'),
    "another media type": ("application/vnd.api+json; charset=utf-8", b'{"id": "evt_1", "text": "\\ud83d"}'),
    "no media type": (None, '{"id": "evt_1"}'.encode("utf-16")),
    "a form": (FORM, b"a=1&id=evt_1"),
    "a multipart form": (PARTS, multipart(('name="a"', "1"), ('name="id"', "evt_1"))),
    "a name without quotes": (PARTS, multipart(("name=id", "evt_1"))),
    "a file of the same name": (PARTS, multipart(('name="id"; filename="id.txt"', "file"), ('name="id"', "evt_1"))),
    "padding": (PARTS, multipart(('name="id"', "evt_1")).replace(b"--b-1\r\n", b"--b-1 \t\r\n")),
}


@pytest.mark.parametrize("read", READ)
def test_a_key_is_found_wherever_the_application_would_find_it(read: str) -> None:
    assert key_in(*READ[read]) == "evt_1"


def test_the_names_of_a_form_are_whole() -> None:
    assert key_in(FORM, b"event.id=evt_1", "event.id") == "evt_1"
    assert key_in(PARTS, multipart(('name="event.id"', "evt_1")), "event.id") == "evt_1"
    assert key_in(PARTS, multipart(('name="größe"', "evt_1")), "größe") == "evt_1"


UNREADABLE = {
    "no JSON": (JSON, b"not json"),
    "JSON that broke off": (JSON, b'{"id": "evt_1"'),
    "another encoding": ("application/json; charset=latin-1", '{"id": "é"}'.encode("latin-1")),
    "a number without end": (JSON, b'{"id": "evt_1", "text": "\\ud83d", "n": ' + b"9" * 5_000 + b"}"),
    "a deep document": (JSON, b'{"id": "evt_1", "text": "\\ud83d", "n": ' + b"[" * 100_000),
    "another media type": ("application/cloudevents+json", b"<id>evt_1</id>"),
    "a field that comes twice": (FORM, b"id=evt_1&id=evt_2"),
    "an empty field": (FORM, b"id="),
    "a part that comes twice": (PARTS, multipart(('name="id"', "evt_1"), ('name="id"', "evt_2"))),
    "an empty part": (PARTS, multipart(('name="id"', ""))),
    "no boundary": ("multipart/form-data", multipart(('name="id"', "evt_1"))),
    "another boundary": ("multipart/form-data; boundary=b-2", multipart(('name="id"', "evt_1"))),
    "lines that end otherwise": (PARTS, multipart(('name="id"', "evt_1")).replace(b"\r\n", b"\n")),
    "no end": (PARTS, multipart(('name="a"', "1"), ends=False)),
    "a longer line": (PARTS, multipart(('name="a"', "x\r\n--b-1x"))),
    "no end of the headers": (PARTS, b"--b-1\r\nContent-Disposition: form-data; name=id\r\n--b-1--"),
    "a part that is not text": (PARTS, multipart(('name="id"', "?")).replace(b"?", b"\xff")),
}


@pytest.mark.parametrize("content", UNREADABLE)
def test_what_may_name_a_key_and_cannot_be_read_is_refused(content: str) -> None:
    with pytest.raises(Refused) as refused:
        key_in(*UNREADABLE[content])

    assert refused.value.code == "key_malformed"


@pytest.mark.parametrize("kind", [JSON, FORM, PARTS])
def test_a_compressed_body_is_refused(kind: str) -> None:
    with pytest.raises(Refused, match="compressed"):
        key_in(kind, b"\x1f\x8b...", Content_Encoding="gzip")


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (JSON, b""),
        (JSON, b" \r\n"),
        (FORM, b""),
        (PARTS, b""),
        (FORM, b"a=1"),
        (PARTS, multipart(('name="a"', "1"))),
        (PARTS, multipart(('name="id"; filename="id.txt"', "file"))),
        ("image/png", b"\x89PNG"),
        ("text/xml", b"<id>evt_1</id>"),
        (None, b"not json"),
    ],
)
def test_a_body_in_which_there_is_none_has_no_key(kind: str | None, content: bytes) -> None:
    assert key_in(kind, content) is None


# On the way through an adapter, where the key is optional.

Bodies = dict[str, Any]
SENT: dict[str, Bodies] = {
    "surrogate": {"content": b'{"id": "evt_1", "text": "\\ud83d"}', "headers": {"Content-Type": JSON}},
    "utf-16": {"content": '{"id": "evt_1"}'.encode("utf-16"), "headers": {"Content-Type": JSON}},
    "multipart": {"files": {"id": (None, "evt_1"), "receipt": ("r.txt", b"r")}},
}


def with_asgi(hook: Callable[[], None], sent: Bodies) -> list[int]:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        hook()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    guarded = IdempotencyMiddleware(app, guard=AsyncGuard("memory:"), scope=single_tenant, key=body_field("id"))

    async def story() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://shop") as client:
            return [(await client.post("/hooks", **sent)).status_code for _ in range(3)]

    return in_time(story())


def with_flask(hook: Callable[[], None], sent: Bodies) -> list[int]:
    app = flask.Flask("shop")

    @app.post("/hooks")
    @idempotent(guard=Guard("memory:"), scope=single_tenant, key=body_field("id"))
    def hooks() -> str:
        hook()
        return ""

    with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://shop") as client:
        return [client.post("/hooks", **sent).status_code for _ in range(3)]


@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("adapter", [with_asgi, with_flask])
def test_an_event_that_is_delivered_again_runs_once(adapter: Any, sent: str) -> None:
    runs: list[str] = []

    assert adapter(lambda: runs.append("ran"), SENT[sent]) == [200] * 3
    assert runs == ["ran"]


def test_a_key_that_is_no_text_is_refused_and_nothing_runs() -> None:
    runs: list[str] = []
    sent = {"content": json.dumps({"id": "\ud83d"}).encode(), "headers": {"Content-Type": JSON}}

    assert with_asgi(lambda: runs.append("ran"), sent) == [400] * 3
    assert runs == []
