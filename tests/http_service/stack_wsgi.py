"""Flask below the WSGI middleware, Flask's decorator, and bare applications that break, behind one port."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import flask

from onefold import Guard
from onefold.http.flask import IdempotencyMiddleware, idempotent
from tests.http_service.behaviour import note, wishes
from tests.http_service.stack_acts import ORIGIN, RULES, act, options_of, route_of

guards = {rule: Guard("memory:", policy=policy) for rule, (_options, policy) in RULES.items()}

shop = flask.Flask("stack")


def handle(**_names: str) -> flask.Response:
    request = flask.request
    done = act(request.path, request.query_string.decode(), len(request.get_data()))
    body = done.parts if done.body is None else done.body
    return flask.Response(body, status=done.status, headers=done.headers)


PATH = "/<above>/<below>/<rule>/"
ACTS = ("json", "stream", "endless", "boom", "missing", "with-slash/", "both", "both/")
for name in ACTS:
    shop.add_url_rule(PATH + name, name, handle, methods=["POST", "PATCH"])

single = flask.Flask("single")
guarded: Any = idempotent(guard=Guard("memory:"), **options_of("below"))(handle)
for name in ACTS:
    single.add_url_rule(PATH + name, name, guarded, methods=["POST", "PATCH"])


def in_place(change: Callable[[Any, list[Any]], None]) -> Callable[[Any], Any]:
    """A middleware that changes the headers in the list that it was given, as much that is published does."""

    def middleware(app: Any) -> Any:
        def around(environ: Any, start_response: Any) -> Any:
            def start(status: str, headers: list[Any], *more: Any) -> Any:
                change(environ, headers)
                return start_response(status, headers, *more)

            return app(environ, start)

        return around

    return middleware


def add_origin(environ: Any, headers: list[Any]) -> None:
    if "HTTP_ORIGIN" in environ:
        headers.append((ORIGIN.title(), environ["HTTP_ORIGIN"]))


def compression(app: Any) -> Any:
    def around(environ: Any, start_response: Any) -> Any:
        if "gzip" not in environ.get("HTTP_ACCEPT_ENCODING", ""):
            return app(environ, start_response)
        packed = Packed()

        def start(status: str, headers: list[Any], *more: Any) -> Any:
            if any(pair[0].lower() == "content-encoding" for pair in headers):
                # Compressed below: a second time would be for nobody.
                packed.plain = True
                return start_response(status, headers, *more)
            headers[:] = [pair for pair in headers if pair[0].lower() != "content-length"]
            headers.append(("Content-Encoding", "gzip"))
            write = start_response(status, headers, *more)
            return lambda part: write(packed(part))

        return compressed(app(environ, start), packed)

    return around


class Packed:
    """Parts, compressed one by one; or as they are."""

    def __init__(self) -> None:
        self.plain = False
        self._packed = zlib.compressobj(wbits=31)

    def __call__(self, part: bytes) -> bytes:
        return part if self.plain else self._packed.compress(part) + self._packed.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        return b"" if self.plain else self._packed.flush()


def compressed(parts: Any, packed: Packed) -> Iterator[bytes]:
    try:
        for part in parts:
            yield packed(part)
        yield packed.end()
    finally:
        getattr(parts, "close", lambda: None)()


AROUND: dict[str, Callable[[Any], Any]] = {
    "none": lambda app: app,
    "compression": compression,
    "cors": in_place(add_origin),
    "request-id": in_place(lambda _, headers: headers.append(("X-Request-Id", uuid.uuid4().hex))),
    "session": in_place(lambda _, headers: headers.append(("Set-Cookie", f"session={uuid.uuid4().hex}"))),
    "base": in_place(lambda _, headers: headers.append(("X-Base", uuid.uuid4().hex))),
}


class ClosesBadly(list[bytes]):
    def close(self) -> None:
        raise RuntimeError("at its end")


def breaks(environ: Any, start_response: Any) -> Any:
    """A bare application that has an effect, and then breaks as its path says."""
    note(f"{environ['PATH_INFO']} {wishes(environ['QUERY_STRING'])['name']} 0")
    how = environ["PATH_INFO"].rpartition("/")[2]
    starts: dict[str, tuple[Any, list[Any]]] = {
        "no-latin": ("201 Created", [("Content-Disposition", "attachment; filename=счёт.pdf")]),
        "bytes-header": ("201 Created", [(b"X-Own", b"yes")]),
        "number-header": ("201 Created", [("X-Own", 5)]),
        "no-pair": ("201 Created", [("X-Own",)]),
        "bytes-status": (b"201 Created", []),
        "text-status": ("fine", []),
        "low-status": ("20 OK", []),
        "high-status": ("600 More", []),
        "line-end": ("201 Created", [("X-Own", "yes\r\nX-Evil: 1")]),
        "line-end-in-status": ("201 Created\r\nX-Evil: 1", []),
        "control-character": ("201 Created", [("X-Own", "\0")]),
        "blank-in-name": ("201 Created", [("X Own", "yes")]),
        "too-short": ("201 Created", [("Content-Length", "200")]),
        "too-short-stream": ("201 Created", [("Content-Length", "200")]),
        "too-long": ("201 Created", [("Content-Length", "2")]),
        "too-long-stream": ("201 Created", [("Content-Length", "2")]),
        "two-lengths": ("201 Created", [("Content-Length", "4"), ("Content-Length", "5")]),
        "no-length": ("201 Created", [("Content-Length", "four")]),
        "blanks-around": ("201 Created", [("X-Own", " yes\t")]),
        "body-of-204": ("204 No Content", []),
    }
    if how == "raises":
        raise RuntimeError("after its effect")
    if how != "no-start":
        start_response(*starts.get(how, ("201 Created", [])))
    if how == "raises-in-the-middle":
        return in_the_middle()
    if how.endswith("-stream"):
        return iter([b"do", b"ne"])
    others: dict[str, Any] = {"nothing": None, "text-body": ["done"], "closes-badly": ClosesBadly([b"done"])}
    return others.get(how, [b"done"])


def in_the_middle() -> Iterable[bytes]:
    yield b"do"
    raise RuntimeError("in the middle")


BREAKS = (
    "raises",
    "nothing",
    "no-start",
    "raises-in-the-middle",
    "closes-badly",
    "no-latin",
    "bytes-header",
    "number-header",
    "no-pair",
    "bytes-status",
    "text-status",
    "low-status",
    "high-status",
    "text-body",
    "line-end",
    "line-end-in-status",
    "control-character",
    "blank-in-name",
    "too-short",
    "too-short-stream",
    "too-long",
    "too-long-stream",
    "two-lengths",
    "no-length",
    "blanks-around",
    "body-of-204",
)


@cache
def stacked(above: str, below: str, rule: str, broken: bool) -> Any:
    if rule == "single":
        return AROUND[above](AROUND[below](single))
    inside = AROUND[below](breaks if broken else shop)
    return AROUND[above](IdempotencyMiddleware(inside, guard=guards[rule], **options_of(rule)))


def app(environ: Any, start_response: Any) -> Any:
    route = route_of(environ["PATH_INFO"])
    assert route is not None, environ["PATH_INFO"]
    return stacked(*route[:3], route.act in BREAKS)(environ, start_response)
