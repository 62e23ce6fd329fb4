"""A form that any framework reads is read in the same way by `body_field`, or refused: no key is passed over."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import flask
import pytest
from starlette.requests import Request as StarletteRequest
from werkzeug.formparser import FormDataParser
from werkzeug.http import parse_options_header

from onefold import Guard
from onefold.http._requests.keys import KEY_BODY_MAX, body_field
from onefold.http._shared.messages import Body, Refused, Request
from onefold.http.flask import IdempotencyMiddleware, single_tenant
from tests.stores.django.project import project

FORM = "application/x-www-form-urlencoded"
PARTS = "multipart/form-data; boundary=x"
NAMED = b'Content-Disposition: form-data; name="id"\r\n'
OTHER = b'Content-Disposition: form-data; name="a"\r\n'
SEED = 20_261_116


def key_in(kind: str, content: bytes, field: str = "id", **headers: str) -> str | None:
    pairs = [(b"content-type", kind.encode()), *((name.encode(), value.encode()) for name, value in headers.items())]
    with closing(Body()) as body:
        body.add(content)
        return body_field(field)(Request("POST", "/hooks", b"", pairs), body)


@pytest.fixture(scope="module", autouse=True)
def django_is_configured() -> Iterator[None]:
    with project():
        yield


# What frameworks read.


def by_flask(kind: str, content: bytes) -> list[str]:
    # As Flask's request does it; files stay in memory.
    parser = FormDataParser(stream_factory=lambda *_args, **_named: io.BytesIO(), silent=False)
    media_type, options = parse_options_header(kind)
    _stream, form, _files = parser.parse(io.BytesIO(content), media_type, len(content), options)
    return form.getlist("id")


def by_django(kind: str, content: bytes) -> list[str]:
    from django.test import RequestFactory

    request = RequestFactory().generic("POST", "/hooks", content, kind)
    with closing(request):
        return [str(value) for value in request.POST.getlist("id")]


def by_starlette(kind: str, content: bytes) -> list[str]:
    async def receive() -> Any:
        return {"type": "http.request", "body": content, "more_body": False}

    async def read() -> list[str]:
        scope = {"type": "http", "method": "POST", "headers": [(b"content-type", kind.encode())]}
        async with StarletteRequest(scope, receive).form() as form:
            return [value for value in form.getlist("id") if isinstance(value, str)]

    return asyncio.run(read())


def values_read(kind: str, content: bytes) -> dict[str, list[str]]:
    """Return what each framework reads of the field. One that refuses the form runs nothing of it."""
    found: dict[str, list[str]] = {}
    for parser in (by_flask, by_django, by_starlette):
        with suppress(Exception):
            found[parser.__name__] = parser(kind, content)
    return found


def check(kind: str, content: bytes) -> bool:
    """Whether it is read. If so, every framework reads the same."""
    try:
        key = key_in(kind, content)
    except Refused:
        return False
    expected = [] if key is None else [key]
    assert values_read(kind, content) == dict.fromkeys(values_read(kind, content), expected), content
    return True


TWO_WAYS = {
    "folded": b'--x\r\nContent-Disposition: form-data;\r\n name="id"\r\n\r\nk\r\n--x--\r\n',
    "folded by a tab": b'--x\r\nContent-Disposition: form-data;\r\n\tname="id"\r\n\r\nk\r\n--x--\r\n',
    "name*": b"--x\r\nContent-Disposition: form-data; name*=utf-8''id\r\n\r\nk\r\n--x--\r\n",
    "name* and name": b"--x\r\nContent-Disposition: form-data; name=a; name*=utf-8''id\r\n\r\nk\r\n--x--\r\n",
    "name*0": b'--x\r\nContent-Disposition: form-data; name*0="i"; name*1="d"\r\n\r\nk\r\n--x--\r\n',
    "two names": b'--x\r\nContent-Disposition: form-data; name="a"; name="id"\r\n\r\nk\r\n--x--\r\n',
    "two dispositions": b"--x\r\n" + OTHER + NAMED + b"\r\nk\r\n--x--\r\n",
    "a part behind LF": b"--x\r\n" + OTHER + b"\r\nz\n--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "a part behind CR": b"--x\r\n" + OTHER + b"\r\nz\r--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "a part behind nothing": b"--x\r\n" + OTHER + b"\r\nz--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "lines of LF": b'--x\nContent-Disposition: form-data; name="id"\n\nk\n--x--\n',
    "headers of LF": b'--x\r\nContent-Disposition: form-data; name="id"\n\nk\r\n\r\n--x--\r\n',
    "a header behind LF": b'--x\r\nX-A: 1\nContent-Disposition: form-data; name="id"\r\n\r\nk\r\n--x--\r\n',
    "a header behind CR": b'--x\r\nX-A: 1\rContent-Disposition: form-data; name="id"\r\n\r\nk\r\n--x--\r\n',
    "a preamble": b"hello\r\n--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "a preamble in the line": b"hello--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "a preamble of LF": b"\n--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "a part behind the end": b"--x\r\n" + OTHER + b"\r\n1\r\n--x--\r\n--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "an end that is longer": b"--x\r\n" + OTHER + b"\r\n1\r\n--x--junk\r\n",
    "an epilogue": b"--x\r\n" + OTHER + b"\r\n1\r\n--x--\r\nhello",
    "blanks in the name": b'--x\r\nContent-Disposition: form-data; name=" id "\r\n\r\nk\r\n--x--\r\n',
    "an escape in the name": b'--x\r\nContent-Disposition: form-data; name="i\\d"\r\n\r\nk\r\n--x--\r\n',
    "a name in other brackets": b"--x\r\nContent-Disposition: form-data; name=<id>\r\n\r\nk\r\n--x--\r\n",
    "a name in other quotes": b"--x\r\nContent-Disposition: form-data; name='id'\r\n\r\nk\r\n--x--\r\n",
    "quotes that do not end": b'--x\r\nContent-Disposition: form-data; name="id\r\n\r\nk\r\n--x--\r\n',
    "a blank before the colon": b'--x\r\nContent-Disposition : form-data; name="id"\r\n\r\nk\r\n--x--\r\n',
    "a line without a colon": b"--x\r\nnothing\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "a file without its name": b'--x\r\nContent-Disposition: form-data; name="id"; filename=""\r\n\r\nk\r\n--x--\r\n',
    "a file of filename*": b"--x\r\nContent-Disposition: form-data; name=id; filename*=utf-8''f\r\n\r\nk\r\n--x--\r\n",
    "an encoded part": b"--x\r\nContent-Transfer-Encoding: base64\r\n" + NAMED + b"\r\nazIy\r\n--x--\r\n",
    "a value that is not UTF-8": b"--x\r\n" + NAMED + b"\r\ncaf\xe9\r\n--x--\r\n",
}


@pytest.mark.parametrize("form", TWO_WAYS)
def test_what_two_parsers_might_read_in_two_ways_is_refused(form: str) -> None:
    with pytest.raises(Refused) as refused:
        key_in(PARTS, TWO_WAYS[form])

    assert refused.value.code == "key_malformed"


def test_a_form_in_a_character_set_that_is_unlike_ascii_is_refused() -> None:
    for kind in (f"{PARTS}; charset=utf-16", f"{FORM}; charset=utf-7", f"{FORM}; charset=utf-32"):
        with pytest.raises(Refused, match="character set"):
            key_in(kind, b"id=k")


def test_a_name_in_another_character_set_may_be_the_fields() -> None:
    for kind, content in (
        (FORM, b"gr%F6%DFe=k"),
        (PARTS, b"--x\r\n" + NAMED.replace(b"id", b"gr\xf6\xdfe") + b"\r\nk\r\n--x--"),
    ):
        with pytest.raises(Refused):
            key_in(f"{kind}; charset=latin-1", content, "größe")
        assert key_in(f"{kind}; charset=latin-1", content) is None


ONE_WAY = {
    "plain": b"--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "without the last end of a line": b"--x\r\n" + NAMED + b"\r\nk\r\n--x--",
    "an end of a line before": b"\r\n--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "a name without quotes": b"--x\r\nContent-Disposition: form-data; name=id\r\n\r\nk\r\n--x--\r\n",
    "a part without headers": b"--x\r\n\r\nfoo\r\n--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "a field of bytes": b"--x\r\n" + OTHER + b"\r\n\xff\xd8\xff\r\n--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "a file of bytes": b'--x\r\nContent-Disposition: form-data; name="f"; filename="C:\\f.txt"\r\n'
    b"Content-Type: image/png\r\n\r\n\xff\r\n--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "a file of two names": b"--x\r\nContent-Disposition: form-data; name=\"f\"; filename=f; filename*=utf-8''f%C3%A9"
    b"\r\n\r\n1\r\n--x\r\n" + NAMED + b"\r\nk\r\n--x--\r\n",
    "a file of the same name": b'--x\r\nContent-Disposition: form-data; name="id"; filename="f"\r\n\r\n1\r\n--x\r\n'
    + NAMED
    + b"\r\nk\r\n--x--\r\n",
    "more headers": b"--x\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Transfer-Encoding: 8bit\r\n"
    + NAMED
    + b"\r\nk\r\n--x--\r\n",
}


@pytest.mark.parametrize("form", ONE_WAY)
def test_what_every_parser_reads_is_read(form: str) -> None:
    assert key_in(PARTS, ONE_WAY[form]) == "k"
    assert values_read(PARTS, ONE_WAY[form])["by_flask"] == ["k"]
    assert check(PARTS, ONE_WAY[form])


@pytest.mark.parametrize("kind", [f"{FORM}; charset=latin-1", f"{FORM}; charset=unheard-of"])
def test_only_the_wanted_field_of_a_form_has_to_be_a_text(kind: str) -> None:
    assert key_in(kind, b"a=caf%E9&%FF=1&id=k") == "k"
    assert key_in(kind, b"a=caf\xe9&id=caf%C3%A9") == "café"
    with pytest.raises(Refused):
        key_in(kind, b"a=1&id=caf%E9")


# Pieces of which a form may be made. The first of each kind is right, and the most frequent.
STARTS = (b"", b"\r\n", b"\n", b"hi\r\n")
ENDS_OF_LINES = (b"\r\n", b"\n", b"\r", b" \r\n")
HEADS = (
    b'Content-Disposition: form-data; name="id"',
    b'Content-Disposition: form-data; name="a"',
    b"content-disposition:form-data;name=id",
    b'Content-Disposition: form-data; name="id"; filename="f"',
    b'Content-Disposition: form-data; name="id"; filename=""',
    b"Content-Disposition: form-data; name*=utf-8''id",
    b'Content-Disposition: form-data;\r\n name="id"',
    b'Content-Disposition: attachment; name="id"',
    b'Content-Disposition: form-data; NAME="id"',
    b'Content-Disposition: form-data; filename="a;name=\\"id"; name="b"',
    b'Content-Type: text/plain\r\nContent-Disposition: form-data; name="id"',
    b"X-Other: 1",
)
CONTENTS = (b"k", b"", b"\xff", b"a\r\n\r\nb", b"--", b"-x", b"--x", b"\r\n-", "é".encode())
FINISHES = (b"--x--\r\n", b"--x--", b"--x", b"--x--\r\n--x--", b"--x--\n", b"")


def random_form(chance: random.Random) -> bytes:
    def one(pieces: tuple[bytes, ...], right: float = 0.95) -> bytes:
        return pieces[0] if chance.random() < right else chance.choice(pieces)

    written = [one(STARTS)]
    for _ in range(chance.randint(1, 3)):
        line = [one(ENDS_OF_LINES) for _ in range(4)]
        written += [b"--x", line[0], one(HEADS, 0.2), line[1], line[2], one(CONTENTS, 0.6), line[3]]
    return b"".join([*written, one(FINISHES)])


@pytest.mark.parametrize("forms", [500, pytest.param(20_000, marks=pytest.mark.more)])
def test_a_random_form_is_read_as_every_framework_reads_it_or_refused(forms: int) -> None:
    chance = random.Random(SEED)

    read = sum(check(PARTS, random_form(chance)) for _ in range(forms))

    assert forms // 10 < read < forms


def test_a_form_that_flask_reads_is_never_passed_by() -> None:
    """Through the middleware, with a key that is optional."""
    app, events = flask.Flask("hooks"), []
    app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]
        app.wsgi_app, guard=Guard("memory:"), scope=single_tenant, key=body_field("id")
    )

    @app.post("/hooks")
    def hook() -> str:
        events.append(flask.request.form.get("id"))
        return ""

    for content in TWO_WAYS.values():
        answers = [app.test_client().post("/hooks", data=content, content_type=PARTS) for _ in range(2)]
        assert [one.status_code for one in answers] == [400, 400]
    assert events == []


# Bodies that are not searched.

LARGE = KEY_BODY_MAX + 1


@pytest.mark.parametrize("kind", ["image/png", "text/plain", "application/octet-stream", ""])
def test_a_large_body_that_is_no_document_has_no_key(kind: str) -> None:
    assert key_in(kind, b"\x89PNG" + b"\0" * LARGE) is None
    assert key_in(kind, b"[1, 2]" + b" " * LARGE) is None


@pytest.mark.parametrize("start", [b'{"id": "k"}', b' \n{"id": "k"}', '{"id": "k"}'.encode("utf-16"), b" " * LARGE])
def test_a_large_body_that_may_be_a_document_is_refused(start: bytes) -> None:
    for kind in ("text/plain", ""):
        with pytest.raises(Refused, match="not searched"):
            key_in(kind, start + b" " * LARGE)


@pytest.mark.parametrize("kind", ["application/json", FORM, PARTS])
def test_a_large_body_that_would_be_searched_is_refused(kind: str) -> None:
    with pytest.raises(Refused, match="not searched"):
        key_in(kind, b"\x89PNG" + b"\0" * LARGE)


def test_a_compressed_body_that_says_nothing_of_its_media_type_is_refused() -> None:
    compressed = {"Content-Encoding": "gzip"}

    with pytest.raises(Refused, match="compressed"):
        key_in("", b"\x1f\x8b...", **compressed)
    assert key_in("", b"", **compressed) is None
    assert key_in("application/xml", b"\x1f\x8b...", **compressed) is None
