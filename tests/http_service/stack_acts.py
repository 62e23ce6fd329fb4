"""What the handlers of every stack do, and what stands above and below the guard: the same names everywhere.

A path is `/<above>/<below>/<rule>/<act>`: middlewares around ours, middlewares inside, the rule, and what the handler
does. Records are in memory, effects in a file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from onefold import Policy
from onefold.http import Request, Unauthorized
from onefold.http._asgi import client_gone
from onefold.http.scopes import by_header
from tests.http_service.behaviour import note, wait_for, wishes

# A stream without a client ends in these services after so many bytes: no test waits for a time.
client_gone.STREAM_BYTES = 1 << 20  # type: ignore[misc]

# Of an endless stream: a view has its beginning read, up to `body_max`, before anybody sees it.
PART = b"x" * 100_000

AROUND = ("none", "compression", "cors", "request-id", "session", "base")

RULES: dict[str, tuple[dict[str, Any], Policy]] = {
    "below": ({}, Policy()),
    "hold": ({}, Policy(after_crash="hold")),
    "stripe": ({"rules": "stripe"}, Policy()),
    "needed": ({"required": True}, Policy()),
    "loose": ({"fingerprint": None}, Policy()),
}

# Whose credential is not known any more.
REVOKED = "revoked"

# Bounds an endless stream that nobody ends, so that a broken test ends.
ENDLESS_SECONDS_MAX = 60.0

ORIGIN = "access-control-allow-origin"


def options_of(rule: str) -> dict[str, Any]:
    return {"scope": caller_of, "operation": rule, **RULES[rule][0]}


def caller_of(request: Request) -> str | None:
    if request.header("X-Api-Key") == REVOKED:
        raise Unauthorized
    return by_header("X-Api-Key")(request)


class Route(NamedTuple):
    above: str
    below: str
    rule: str
    act: str


def route_of(path: str) -> Route | None:
    names = path.strip("/").split("/")
    if len(names) < 4 or names[2] not in (*RULES, "single") or {names[0], names[1]} - {*AROUND, "blocking"}:
        return None
    above, below, rule, *rest = names
    return Route(above, below, rule, "/".join(rest))


class Done(NamedTuple):
    """What a handler answers: all at once, or in parts."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes | None
    parts: Iterator[bytes]


def act(path: str, query: str, size: int) -> Done:
    route, wish = route_of(path), wishes(query)
    assert route is not None
    name = wish.get("name", "")
    note(f"{path} {name} {size}")
    if "gate" in wish:
        wait_for(wish["gate"])
    if route.act == "boom":
        raise RuntimeError("after its effect")
    headers = [("Content-Type", "application/x-ndjson")]
    if route.act == "stream":
        return Done(200, headers, None, stream(wish))
    if route.act == "endless":
        return Done(200, headers, None, endless(name))
    answer = json.dumps({"path": path, "padding": "x" * 1_000}).encode()
    if route.act == "missing":
        return Done(404, [("Content-Type", "application/json")], answer, iter(()))
    return Done(201, [("Content-Type", "application/json"), ("X-Own", "yes")], answer, iter(()))


def stream(wish: dict[str, str]) -> Iterator[bytes]:
    for number in range(3):
        if number == 1 and "between" in wish:
            wait_for(wish["between"])
        yield b"%d" % number * 600 + b"\n"


def endless(name: str) -> Iterator[bytes]:
    ends = time.monotonic() + ENDLESS_SECONDS_MAX
    try:
        while time.monotonic() < ends:
            yield PART
            time.sleep(0.005)
    finally:
        note(f"ended {name}-ended 0")
