"""What is written wrong for a server: refused when it is constructed, with the option, what it got, what to write."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from onefold import (
    AsyncGuard,
    ClaimLost,
    Guard,
    Held,
    InProgress,
    KeyReused,
    MissingKey,
    Policy,
    RememberedFailure,
    ResultNotKept,
    StoreUnavailable,
    UsageError,
)
from onefold.http import asgi, fastapi, flask, wsgi
from onefold.http._exchange.rules import Exchange
from onefold.http._shared.messages import Body, Refused, Request
from onefold.http.scopes import by_header, single_tenant
from tests.http_service.visitor import Visitor
from tests.support import in_time


async def async_handler(*_given: Any) -> str:
    return "key"


async def passing(*_given: Any) -> None: ...


def without_addresses(given: object) -> str:
    """Name a case by its values: the processes of a parallel run must agree on the names of the tests."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(given))


def request(method: str = "POST", path: str = "/pay", **headers: str) -> Request:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request(method, path, b"", pairs)


def ask(exchange: Exchange, content: bytes = b"{}", **headers: str) -> Any:
    with closing(Body()) as body:
        body.add(content)
        return exchange.guard_request(request(**headers), body)


def django(name: str) -> Callable[..., Any]:
    """Django is ready only where it has settings: none are needed to be refused."""
    from onefold.http import django

    return getattr(django, name)  # type: ignore[no-any-return]


# Everything that takes the options, under its own name.
OWNERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "asgi": (
        "IdempotencyMiddleware",
        lambda **given: asgi.IdempotencyMiddleware(passing, guard=AsyncGuard("memory:"), **given),
    ),
    "wsgi": (
        "IdempotencyMiddleware",
        lambda **given: wsgi.IdempotencyMiddleware(lambda *_: [], guard=Guard("memory:"), **given),
    ),
    "fastapi": ("idempotent_route", lambda **given: fastapi.idempotent_route(guard=AsyncGuard("memory:"), **given)),
    "flask": ("idempotent", lambda **given: flask.idempotent(guard=Guard("memory:"), **given)),
    "django middleware": ("middleware", lambda **given: django("middleware")(guard=Guard("memory:"), **given)),
    "django view": ("idempotent", lambda **given: django("idempotent")(guard=Guard("memory:"), **given)),
    "django mixin": ("Idempotency", lambda **given: django("Idempotency")(guard=Guard("memory:"), **given)),
}


@pytest.fixture(params=sorted(OWNERS))
def owner(request: pytest.FixtureRequest) -> tuple[str, Callable[..., Any]]:
    return OWNERS[request.param]


def test_an_option_that_nobody_knows_is_refused_under_the_name_of_its_owner(
    owner: tuple[str, Callable[..., Any]],
) -> None:
    name, make = owner

    with pytest.raises(UsageError, match=rf"^{name} has no option 'requird': did you mean 'required'\?"):
        make(scope=single_tenant, requird=True)
    with pytest.raises(UsageError, match=rf"^{name} has no option 'x': it is one of guard, scope, rules"):
        make(scope=single_tenant, x=True)
    with pytest.raises(UsageError, match=rf"^{name} needs scope=, .*by_header\('X-Api-Key'\)"):
        make()


def test_a_wrong_value_is_refused_wherever_it_is_given(owner: tuple[str, Callable[..., Any]]) -> None:
    _, make = owner

    with pytest.raises(UsageError, match=r"methods='POST' takes several methods: write methods=\['POST'\]"):
        make(scope=single_tenant, methods="POST")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"methods": "post"}, r"methods='post' .*write methods=\['POST'\]"),
        ({"methods": []}, r"nothing would be guarded: write methods=\['POST', 'PATCH'\]"),
        ({"methods": ["PO ST"]}, "'PO ST', which is not an HTTP method"),
        ({"methods": [b"POST"]}, "b'POST', which is not an HTTP method"),
        ({"methods": ["PSOT"]}, r"'PSOT': did you mean 'POST'\?"),
        ({"methods": 7}, "methods=7 is not understood"),
        ({"refusal": "no"}, "refusal='no' is not a function: write a function of a refusal"),
        ({"answer_errors": "yes"}, "answer_errors='yes' is neither True nor False"),
        ({"answer_errors": True}, "under 'below_500' no exception is remembered"),
        ({"required": "/pay"}, r"required='/pay' takes several paths: write required=\['/pay'\]"),
        ({"required": ["payments"]}, "a path begins with a slash: write '/payments'"),
        ({"required": ["https://shop/payments"]}, "write '/payments'"),
        ({"required": [""]}, "a path begins with a slash"),
        ({"required": ["/orders/{order_id}"]}, r"`\*` stands for any text: write '/orders/\*'"),
        ({"required": ["/orders/<int:id>/pay"]}, r"write '/orders/\*/pay'"),
        ({"required": ["/orders/:id"]}, r"`\*` stands for any text: write '/orders/\*'"),
        ({"required": ["/orders/:order_id/pay"]}, r"write '/orders/\*/pay'"),
        ({"required": ["/orders/:id?"]}, r"write '/orders/\*'"),
        ({"required": ["/orders/[id]"]}, r"`\*` stands for any text: write '/orders/\*'"),
        ({"required": ["/orders/[...rest]"]}, r"write '/orders/\*'"),
        ({"required": ["/orders/[[...rest]]/"]}, r"write '/orders/\*/'"),
        ({"required": ["/orders/{id:[0-9]+}"]}, r"'/orders/\*'"),
        ({"required": [r"^/orders/\d+$"]}, r"a regular expression, which no path matches. `\*` .* '/orders/\*'"),
        ({"required": ["/orders/(?P<id>[0-9]+)"]}, "a regular expression"),
        ({"required": ["/orders/.*"]}, "a regular expression"),
        ({"required": ["/orders/[0-9]+"]}, "a regular expression"),
        ({"required": ["/orders?pay=1"]}, "a path ends before its query: write '/orders'"),
        ({"required": ["/orders#pay"]}, "write '/orders'"),
        ({"required": ["/orders "]}, "write '/orders'"),
        ({"required": ["/caf%C3%A9"]}, "compared without escapes: write '/café'"),
        ({"required": [7]}, "7, which is not a path"),
        ({"required": None}, "required=None is not understood"),
        ({"required": async_handler}, "required= is an async function"),
        ({"required": lambda: True}, r"required= is a function that cannot be called \(too many positional"),
        ({"scope": "X-Api-Key"}, r"scope='X-Api-Key' is not a function: write by_header\('X-Api-Key'\)"),
        ({"scope": None}, "scope=None is not a function"),
        ({"scope": by_header}, r"scope=by_header is not called: write scope=by_header\('X-Api-Key'\)"),
        ({"scope": fastapi.by_argument}, "scope=by_argument is not called"),
        ({"scope": async_handler}, "scope= is an async function"),
        ({"scope": asgi.header_key("X-Id")}, "scope= is a function that cannot be called"),
        ({"key": "id"}, r"key='id' is not a function: write body_field\('id'\), header_key\('id'\)"),
        ({"key": asgi.body_field}, r"key=body_field is not called: write key=body_field\('id'\)"),
        ({"key": by_header("X-Id")}, "key= is a function that cannot be called"),
        ({"key": async_handler}, "key= is an async function, and nobody awaits it"),
        ({"rules": "below500"}, r"'below_500', 'stripe', 'success_only': did you mean 'below_500'\?"),
        ({"rules": None}, "rules=None is not one of"),
        (
            {"host": "seperate"},
            r"host='seperate' is not one of 'compare', 'separate', 'ignore': did you mean 'separate'\?",
        ),
        ({"host": None}, "host=None is not one of"),
        ({"strict": "no"}, "strict='no' is neither True nor False"),
        ({"event_streams": 1}, "event_streams=1 is neither"),
        ({"body_max": "1MB"}, "body_max='1MB' is not a number of bytes: write body_max=1_048_576"),
        ({"body_max": 1.5}, "body_max=1.5 is not a number of bytes"),
        ({"body_max": -1}, "body_max=-1 is not a number of bytes"),
        ({"policy_url": 7}, "policy_url=7 is not a URL"),
        ({"policy_url": "see\r\nSet-Cookie: a=b"}, "is not a URL: write policy_url='https://example.com/idempotency'"),
        ({"operation": " "}, "a name such as 'charge'"),
    ],
    ids=without_addresses,
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(options: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Exchange(**{"scope": single_tenant, **options})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: by_header(""), "has to name a header"),
        (lambda: by_header("X Api Key"), "has to name a header"),
        (lambda: by_header("X-Api-Key", secret=7), "secret= has to be a str or bytes, not int"),  # type: ignore[arg-type]
        (lambda: asgi.header_key("X-Id:"), r"header_key\('X-Id:'\) has to name a header"),
        (lambda: asgi.header_key("X-Id", strict="yes"), "strict='yes'"),  # type: ignore[arg-type]
        (lambda: asgi.body_field(7), r"body_field\(7\) has to name a field"),  # type: ignore[arg-type]
        (lambda: fastapi.by_argument(""), r"write by_argument\('user'\)"),
        (lambda: fastapi.by_argument("user", "id"), "lambda user: user.id"),  # type: ignore[arg-type]
        (lambda: fastapi.by_argument("user", async_handler), "is an async function"),
    ],
)
def test_a_name_that_nothing_can_have_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_methods_may_be_written_small_and_be_somebodys_own() -> None:
    exchange = Exchange(scope=single_tenant, methods=["post", "PURGE", "PROPPATCH"], required=True)

    for method in ("POST", "PURGE", "PROPPATCH"):
        with pytest.raises(Refused):
            exchange.passes(request(method))
    assert exchange.passes(request("PATCH"))


@pytest.mark.parametrize(
    ("patterns", "path", "required"),
    [
        (["/payments"], "/payments", True),
        (["/payments"], "/payments/", True),
        (["/payments/"], "/payments", True),
        (["/payments/"], "/payments/", True),
        (["/payments"], "/Payments", False),
        (["/payments"], "/payments/7", False),
        (["/orders/*"], "/orders/7", True),
        (["/orders/*"], "/orders/7/pay/", True),
        (["/orders/*"], "/orders/", True),
        (["/orders/*"], "/orders", False),
        (["*/payments"], "/v2/payments/", True),
        (["*"], "/", True),
        (["/"], "/", True),
        (["/"], "/payments", False),
        (["/orders(*)"], "/orders(7)", True),
        (["/orders/*:cancel"], "/orders/7:cancel", True),
        (["/.well-known/*"], "/.well-known/pay", True),
        (["/$batch"], "/$batch", True),
        (["/*.*"], "/a.json", True),
    ],
)
def test_a_path_is_required_with_and_without_a_slash_at_its_end(patterns: list[str], path: str, required: bool) -> None:
    exchange = Exchange(scope=single_tenant, required=patterns)

    if not required:
        assert exchange.passes(request(path=path))
        return
    with pytest.raises(Refused) as refused:
        exchange.passes(request(path=path))
    assert refused.value.code == "key_missing"


@pytest.mark.parametrize("path", ["/caf\xc3\xa9", "/café", "/\xff"])
def test_on_wsgi_a_path_is_compared_as_it_reads(path: str) -> None:
    """A server hands its bytes over as Latin-1."""
    asking = wsgi.request_of({"REQUEST_METHOD": "POST", "PATH_INFO": path})

    assert asking.path == ("/café" if path.startswith("/caf") else path)
    with pytest.raises(Refused):
        Exchange(scope=single_tenant, required=["/café", "/\xff"]).passes(asking)


@pytest.mark.parametrize(
    ("key", "title", "detail"),
    [
        (None, "Idempotency-Key is missing", "needs an Idempotency-Key"),
        (asgi.header_key("X-Event-Id"), "X-Event-Id is missing", "needs the header X-Event-Id"),
        (asgi.body_field("event.id"), "The field event.id is missing", "needs the field event.id in its body"),
        (lambda _request, _body: None, "The key is missing", "needs a key"),
    ],
)
def test_a_request_without_its_key_is_told_where_the_key_belongs(key: Any, title: str, detail: str) -> None:
    exchange = Exchange(scope=single_tenant, required=True, key=key)

    with pytest.raises(Refused, match=detail) as refused:
        ask(exchange)
    answer = exchange.refused(refused.value)

    assert answer.status == 400
    assert title.encode() in answer.body
    assert key is None or b"Idempotency-Key" not in answer.body


def test_a_field_that_is_no_key_is_named_in_the_title_too() -> None:
    exchange = Exchange(scope=single_tenant, key=asgi.body_field("id"))

    with pytest.raises(Refused) as refused:
        ask(exchange, b'{"id": true}')

    assert b"The field id is malformed" in exchange.refused(refused.value).body


# What the guard refuses, too.
GUARD_REFUSES = (
    MissingKey("the key has 408 bytes"),
    KeyReused(),
    InProgress(),
    Held(),
    ClaimLost(),
    StoreUnavailable(),
    RememberedFailure(),
    ResultNotKept(),
)


@pytest.mark.parametrize(
    ("key", "malformed", "outstanding"),
    [
        (None, "Idempotency-Key is malformed", "outstanding for this Idempotency-Key"),
        (asgi.header_key("X-Event-Id"), "X-Event-Id is malformed", "outstanding for this X-Event-Id"),
        (asgi.body_field("id"), "The field id is malformed", "outstanding for this value of the field id"),
        (lambda _request, _body: None, "The key is malformed", "outstanding for this key"),
    ],
)
def test_what_the_guard_refuses_names_the_place_of_the_key(key: Any, malformed: str, outstanding: str) -> None:
    exchange = Exchange(scope=single_tenant, key=key)
    said = [exchange.refused(error).body.decode() for error in GUARD_REFUSES]

    assert malformed in said[0]
    assert outstanding in said[2]
    assert key is None or not any("Idempotency-Key" in one for one in said)


@pytest.mark.parametrize(
    "content", [{"id": "é" * 200}, {"id": "a\0b"}, {"id": "secret\ud800"}], ids=["long", "NUL", "half"]
)
def test_a_field_that_no_store_takes_is_named_and_not_shown(content: Any) -> None:
    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise AssertionError

    guarded = asgi.IdempotencyMiddleware(
        app, guard=AsyncGuard("memory:"), scope=single_tenant, key=asgi.body_field("id")
    )
    visitor = in_time(Visitor(guarded, body=json.dumps(content).encode()).visit())
    problem = json.loads(visitor.body)

    assert (problem["status"], problem["code"], problem["title"]) == (400, "key_malformed", "The field id is malformed")
    assert "255 bytes" in problem["detail"]
    assert "secret" not in problem["detail"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": lambda *given: async_handler()}, "key= returned an awaitable"),
        ({"key": lambda *given: b"key"}, "key= has to return the key as a str, or None, but returned a bytes"),
        ({"key": lambda *given: True}, "returned a bool"),
        (
            {"key": lambda *given: None, "required": lambda _request: async_handler()},
            "required= returned an awaitable",
        ),
        ({"scope": lambda _request: async_handler()}, "scope= returned an awaitable"),
    ],
    ids=without_addresses,
)
def test_what_a_function_gives_wrongly_is_a_bug_and_not_the_clients_fault(options: Any, says: str) -> None:
    exchange = Exchange(**{"scope": single_tenant, **options})

    with pytest.raises(UsageError, match=says):
        ask(exchange, Idempotency_Key="key")


@pytest.mark.parametrize("key", [7, uuid.UUID(int=7)])
def test_a_function_may_give_a_number_or_a_uuid(key: Any) -> None:
    assert ask(Exchange(scope=single_tenant, key=lambda *_: key)).key == str(key)


# Arguments of an endpoint.


def test_an_argument_that_an_endpoint_does_not_have_is_refused_before_its_first_request() -> None:
    guarded = fastapi.idempotent_route(guard=AsyncGuard("memory:"), scope=fastapi.by_argument("usr"))
    router = APIRouter(route_class=guarded)

    with pytest.raises(UsageError, match=r"by_argument\('usr'\): .*pay\(\) has no such argument: did you mean 'user'"):

        @router.post("/pay")
        async def pay(user: str) -> None: ...

    # What is not guarded needs no caller.
    @router.get("/pay")
    async def paid() -> None: ...


@pytest.mark.parametrize("kind", ["asgi", "wsgi", "flask", "django view"])
def test_whoever_knows_no_endpoint_refuses_to_look_for_its_arguments(kind: str) -> None:
    name, make = OWNERS[kind]

    with pytest.raises(
        UsageError, match=rf"^{name} does not see an endpoint's arguments.* for FastAPI's idempotent_route"
    ):
        make(scope=fastapi.by_argument("user"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"paths": "/pay"}, r"write paths=\['/pay'\]"),
        ({"paths": ["pay"]}, "write '/pay'"),
        ({"methods": "POST"}, r"write methods=\['POST'\]"),
        ({"required": ["/pay"]}, "is neither True nor False"),
        ({"rules": "strip"}, "did you mean 'stripe'"),
    ],
)
def test_a_schema_is_described_by_paths_and_not_by_letters(options: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        fastapi.describe(FastAPI(), **options)


def test_a_path_that_the_schema_does_not_have_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()

    @app.post("/orders/{id}")
    async def order(id: str) -> None: ...  # noqa: A002

    fastapi.describe(app, paths=["/orders/:id"])
    app.openapi()

    assert caplog.messages == ["describe: the schema has no path '/orders/:id': did you mean '/orders/{id}'?"]


# Guards that claim nothing.


AWAITING = ("asgi", "fastapi")


def made_with(kind: str, guard: Guard | AsyncGuard) -> Any:
    makers: dict[str, Callable[..., Any]] = {
        "asgi": functools.partial(asgi.IdempotencyMiddleware, passing),
        "wsgi": functools.partial(wsgi.IdempotencyMiddleware, lambda *_: []),
        "fastapi": fastapi.idempotent_route,
        "flask": flask.idempotent,
        "django middleware": django("middleware"),
        "django view": django("idempotent"),
        "django mixin": django("Idempotency"),
    }
    return makers[kind](guard=guard, scope=single_tenant)


@pytest.mark.parametrize("kind", sorted(OWNERS))
def test_a_guard_that_claims_nothing_is_refused(kind: str) -> None:
    guard = (AsyncGuard if kind in AWAITING else Guard)("memory:", policy=Policy(mode="seen"))

    with pytest.raises(UsageError, match='mode="seen" makes no claim'):
        made_with(kind, guard)


@pytest.mark.parametrize("kind", sorted(OWNERS))
def test_a_guard_of_the_other_kind_is_refused_with_a_word_about_what_it_is_for(kind: str) -> None:
    says = {
        "wsgi": "^a WSGI application needs a Guard",
        **dict.fromkeys(AWAITING, "^an ASGI application needs an AsyncGuard"),
    }.get(kind, "^views of Django and Flask need a Guard, async views and those under ASGI too")

    with pytest.raises(UsageError, match=says):
        made_with(kind, (Guard if kind in AWAITING else AsyncGuard)("memory:"))


def test_what_add_middleware_got_is_checked_when_starlette_makes_it_and_nothing_runs_before() -> None:
    ran = []
    app = FastAPI()
    app.add_middleware(asgi.IdempotencyMiddleware, guard=AsyncGuard("memory:"))  # type: ignore[call-arg]
    app.post("/pay")(lambda: ran.append("paid"))

    async def starts() -> None:
        await app({"type": "lifespan", "state": {}}, passing, passing)  # type: ignore[arg-type]

    async def asks() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            await client.post("/pay", headers={"Idempotency-Key": "k"})

    for happens in (starts, asks, asks):
        with pytest.raises(UsageError, match="needs scope="):
            asyncio.run(happens())
    assert ran == []


# Packages that are not there.

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from onefold import UsageError
try:
    {code}
except UsageError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("package", "code", "says"),
    [
        ("fastapi", "import onefold.http.fastapi", "needs FastAPI: pip install 'onefold[http]' fastapi"),
        ("flask", "import onefold.http.flask", "needs Flask: pip install 'onefold[http]' flask"),
        ("django", "import onefold.http.django", "needs Django: pip install 'onefold[http]' django"),
        ("httpx", "from onefold.http.client import Transport", "need httpx: pip install 'onefold[client]' httpx"),
        ("httpx", "from onefold.http.client import AsyncTransport", "need httpx: pip install 'onefold[client]' httpx"),
        (
            "requests",
            "from onefold.http.client import Adapter",
            "pip install 'onefold[client]' requests",
        ),
        ("tenacity", "import onefold.http.client", "pip install 'onefold[client]'"),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_to_install(package: str, code: str, says: str) -> None:
    command = [sys.executable, "-c", WITHOUT.format(package=package, code=code)]

    found = subprocess.run(command, capture_output=True, text=True, check=True)

    assert says in found.stdout
